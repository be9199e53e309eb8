"""Numbered parts of a model (layers, experts), found by structure alone: equal FQNs but for one number, equal shapes.

No rule may go by what a module is called. ``layers.3.mlp.w1`` belongs to the group of that role over the layers, and
``layers.3.experts.5.w1`` to the group of that role over the experts of one layer. Which of them are experts shows in the
tokens: the members of a routed group see different numbers of rows in one step.

Which input is the product of two other Linears' outputs (a gated MLP), and whether their largest values meet.

Found by shapes and data, never by names: two Linears that read the same tensor and have as many outputs as a later one has
inputs. SwiGLU's runaway (arXiv 2409.12517) is an alignment of the two: amax(product) nears amax(gate) amax(up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fp8debug.rules.reading.conditions import KEYS, RUNNING

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: step -> module -> its fprop input: call_index, rows, sum_x2.
Inputs = dict[int, Mapping[str, Mapping[str, Any]]]
_KEYS = f"{KEYS} AND gemm = 'fprop' AND tensor = 'input'"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Modules that differ in one number of their FQN.

    Attributes:
        prefix: FQN before the number.
        suffix: FQN after it.
        members: FQN by number, in rising order.
    """

    prefix: str
    suffix: str
    members: Mapping[int, str]

    @property
    def holder(self) -> str:
        """FQN of the module that owns the numbered list; empty at the top."""
        return self.prefix.rpartition(".")[0]


def linears(run: Run) -> list[dict[str, Any]]:
    """Return the modules of the manifest in execution order, each value of its type or None."""
    query = "SELECT fqn, in_features, out_features, fp8, requested, call_index FROM modules"
    rows: list[dict[str, Any]] = run.memo("linears", lambda: run.sql(query).to_pylist())
    return [dict(row) for row in rows]


def numbered(run: Run, min_members: int = 2) -> list[Group]:
    """Return the groups of modules of one shape that have at least so many members."""
    found: dict[tuple[str, str, Any, Any], dict[int, str]] = {}
    for module in linears(run):
        parts = module["fqn"].split(".")
        for place, part in enumerate(parts):
            if part.isdecimal():
                key = ".".join(parts[:place]), ".".join(parts[place + 1 :]), module["in_features"], module["out_features"]
                found.setdefault(key, {})[int(part)] = module["fqn"]
    return [
        Group(prefix=key[0], suffix=key[1], members=dict(sorted(members.items())))
        for key, members in found.items()
        if len(members) >= min_members
    ]


def fprop_inputs(run: Run) -> Inputs:
    """Return how many rows FP8 modules read at each sampled step, and their sum of squares; NaN inputs are left out.

    Every step is there. Modules are left out that can be no expert and no router: those of groups whose members always read as
    many rows, if no router of a group has as many outputs as any of them.
    """
    return run.memo("fprop_inputs", lambda: _fprop_inputs(run))


def reads(run: Run) -> dict[str, dict[str, Any]]:
    """Return by module what the rows of all ranks say of its fprop input in FP8: extent of numel, counts, names of casts."""
    query = (
        "SELECT module, count(*) AS num, count(numel) AS num_known, min(numel) AS least, max(numel) AS most,"
        " count(*) FILTER (WHERE coalesce(num_nan, 0) + coalesce(num_inf, 0) > 0) AS num_sick,"
        " count(*) FILTER (WHERE replicated) AS num_copies, min(cast_name) AS first_cast, max(cast_name) AS last_cast FROM raw"
        f" WHERE {_KEYS} GROUP BY module"
    )
    return run.memo("reads", lambda: {row["module"]: row for row in run.sql(query).to_pylist()})


def _always(run: Run, module: Mapping[str, Any]) -> int | None:
    """Return how many elements a module reads at every step on all ranks together, if it is always as many."""
    is_plain = not module["num_sick"] and not module["num_copies"] and module["first_cast"] == module["last_cast"]
    is_whole = module["num"] == module["num_known"] == len(run.sampled_steps) * len(run.ranks)
    return module["least"] * len(run.ranks) if is_plain and is_whole and module["least"] == module["most"] else None


def _fprop_inputs(run: Run) -> Inputs:
    widths = {module["fqn"]: module["in_features"] for module in linears(run)}
    always = {fqn: _always(run, row) for fqn, row in reads(run).items() if widths.get(fqn)}
    if None not in always.values() and not _telling(run, {fqn: {(num or 0) // widths[fqn]} for fqn, num in always.items()}):
        return {step: {} for step in run.sampled_steps} if always else {}
    alive = RUNNING.replace("numel > 0", "numel >= 0")  # an expert without tokens has a row of zeros
    query = (
        "SELECT step, module, min(call_index) AS call_index, max(numel) AS numel, max(sum_x2) AS sum_x2 FROM sites"
        f" WHERE {alive} AND gemm = 'fprop' AND tensor = 'input' GROUP BY step, module ORDER BY step, module"
    )
    table = run.sql(query)
    import pyarrow.compute as pc  # takes 50 ms, and few runs need it

    table = table.filter(pc.is_in(table["module"], pa.array([fqn for fqn, width in widths.items() if width], pa.string())))
    extent = table.group_by("module").aggregate([("numel", "min"), ("numel", "max")]).to_pylist()
    rows = {r["module"]: {r[end] // widths[r["module"]] for end in ("numel_min", "numel_max")} for r in extent}
    found: dict[int, dict[str, dict[str, Any]]] = {step: {} for step in table["step"].unique().to_pylist()}
    for row in table.filter(pc.is_in(table["module"], pa.array(_telling(run, rows), pa.string()))).to_pylist():
        values = {
            "call_index": row["call_index"] or 0,
            "rows": row["numel"] // widths[row["module"]],
            "sum_x2": row["sum_x2"] or 0.0,
        }
        found[row["step"]][row["module"]] = values
    return {**found}


def _telling(run: Run, rows: Mapping[str, set[int]]) -> list[str]:
    """Return the modules that may be experts or routers, by the least and the most rows that each read."""
    groups = numbered(run)
    sizes = {num for group in groups for num in router_outputs(group)}
    chosen = {module["fqn"]: module.get("selects") for module in run.modules}
    outputs = {m["fqn"]: m["out_features"] for m in linears(run) if m["fqn"] in rows and m["out_features"]}
    if any(num in sizes or num == chosen[fqn] for fqn, num in outputs.items()):
        return list(rows)
    read = [(group, {num for fqn in group.members.values() for num in rows.get(fqn, ())}) for group in groups]
    uneven = {fqn for group, nums in read if len(nums) > 1 for fqn in group.members.values()}
    return [fqn for fqn in rows if fqn in uneven]


def router_outputs(group: Group) -> tuple[int, int]:
    """Return how many outputs a router of a group may have: one a member, or the next multiple of 16, which FP8 GEMMs ask for."""
    num = len(group.members)
    return num, -(-num // 16) * 16


def is_routed(group: Group, inputs: Inputs) -> bool:
    """Return whether its members share the tokens among them: at half of the steps those called see different numbers.

    A layer that is dropped at random is called with all rows or not at all, and is none.
    """
    seen = [
        {values[m]["rows"] for m in group.members.values() if m in values and values[m]["rows"]} for values in inputs.values()
    ]
    return 2 * sum(len(rows) > 1 for rows in seen) >= max(1, len(seen))


def factors_of(run: Run, module: str) -> tuple[str, str] | None:
    """Return the two Linears whose outputs' product is the module's input, as shapes and data have it; None without."""
    shapes = {m["fqn"]: (m.get("in_features"), m.get("out_features")) for m in run.modules if m["call_index"] is not None}
    names = list(shapes)
    if module not in shapes or shapes[module][0] is None:
        return None
    wide = [name for name in names[: names.index(module)] if shapes[name][1] == shapes[module][0]][-2:]
    pairs = [(a, b) for a, b in combinations(wide, 2) if shapes[a][0] == shapes[b][0] and share_input(run, a, b)]
    return pairs[-1] if pairs else None


def product_words(run: Run, module: str, first: int, last: int) -> str:
    """Return a clause on the alignment of the two factors at two steps; empty where there are none."""
    factors = factors_of(run, module)
    if factors is None:
        return ""
    ratios = [_alignment(run, module, factors, step) for step in (first, last)]
    words = f"; it is the product of {factors[0]} and {factors[1]}"
    if None not in ratios:
        words += (
            f", whose largest outputs meet by {ratios[0]:.2g} at step {first} and {ratios[1]:.2g} at step {last} (1: aligned)"
        )
    return words


def share_input(run: Run, a: str, b: str) -> bool:
    """Return whether two Linears read the same tensor, by its amax at every step that was sampled."""
    query = (
        "SELECT count(DISTINCT amax) AS num_amax, count(DISTINCT module) AS num_modules FROM sites WHERE gemm = 'fprop'"
        " AND tensor = 'input' AND reference = 'operand' AND module IN (?, ?) GROUP BY step"
    )
    rows = run.sql(query, [a, b]).to_pylist()
    return bool(rows) and all(row["num_amax"] == 1 and row["num_modules"] == 2 for row in rows)


def _alignment(run: Run, module: str, factors: tuple[str, str], step: int) -> float | None:
    """Return amax(input) over the product of the factors' amaxes, from their sampled rows."""
    query = (
        "SELECT max(amax) FILTER (WHERE module = $module AND tensor = 'input' AND reference = 'operand') AS product,"
        " max(amax) FILTER (WHERE module = $a AND tensor = 'output') AS a,"
        " max(amax) FILTER (WHERE module = $b AND tensor = 'output') AS b FROM sites WHERE gemm = 'fprop' AND step = $step"
    )
    row = run.sql(query, {"module": module, "a": factors[0], "b": factors[1], "step": step}).to_pylist()[0]
    return row["product"] / (row["a"] * row["b"]) if row["product"] and row["a"] and row["b"] else None

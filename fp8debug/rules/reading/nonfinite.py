"""The first NaN or Inf of a run: the cast or GEMM that made it, or the input that brought it from outside the Linears.

The steps table may say which module returned the first one, of any step. All tensors of the first sampled step that holds one
are put in the order in which they were computed: forward by execution, backward in reverse; of one GEMM the operands before
their casts, then the casts, then the result. The first that is not finite is the origin, everything after it a victim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from fp8debug.rules.reading.bounds import contracted_length
from fp8debug.rules.reading.conditions import Look
from fp8debug.rules.reading.prefilter import bad_rows, may_have, source
from fp8debug.types import RESULTS as _RESULTS
from fp8debug.types import Gemm

if TYPE_CHECKING:
    from fp8debug.rules.base import Finding
    from fp8debug.store.read.run import Run

#: The rows in which something is not finite: of a module in high precision the tensors are those of casts that were only tried.
_IS_READ = "(actual OR reference = 'operand')"
SICK = Look(
    f"{_IS_READ} AND coalesce(num_nan + num_inf, 0) + CASE WHEN actual THEN coalesce(num_actual_nonfinite, 0) ELSE 0 END > 0",
    "coalesce(num_nan + num_inf, 0) + coalesce(num_actual_nonfinite, 0) > 0",
    _IS_READ,
    (
        *("reference", "numel", "num_tensors", "coalesce(num_nan, 0) AS num_nan", "coalesce(num_inf, 0) AS num_inf"),
        "CASE WHEN actual THEN coalesce(num_actual_nonfinite, 0) ELSE 0 END AS num_made",
    ),
    ("num_nan > 0", "num_inf > 0", "num_actual_nonfinite > 0"),
)
#: Gradients of mixed precision overflow now and then, and the step is skipped: they count when the loss follows.
NEXT_STEPS = 1
RESULTS = {gemm.value: _RESULTS[gemm].value for gemm in Gemm}
#: Where to look for what made a gradient NaN or Inf: behind the last Linear of the forward pass, and between two of them.
_SOURCES = "look at what the gradient comes from: the loss function, softmax or attention"
_BETWEEN = (
    "look at what the backward pass computes between {before} and {module}: activation, norm, softmax or attention, and whether"
    " their kernels write every row; then at another loss whose gradient joins there"
)
#: A GEMM of operands whose largest possible result is beyond this may overflow in FP32 and BF16.
MAX_RESULT = 3e38
#: FP16's largest value.
FP16_MAX = 65504.0
#: Half of it: a cast changes an element by 1/16 at most.
_FP16_RESULT = FP16_MAX / 2
#: SQL predicate: an operand that holds NaN or Inf before its cast.
IS_POISONED = "reference = 'operand' AND num_nan + num_inf > 0"
#: Operands that hold NaN or Inf before their casts, and what a rule over them reads.
POISONED = Look(
    IS_POISONED,
    "num_nan + num_inf > 0",
    "reference = 'operand'",
    (
        *("num_actual_nonfinite", "num_zero_blocks", "num_eps_blocks", "num_blocks", "numel", "headroom", "sqnr_db"),
        "num_tensors",
    ),
    ("num_nan > 0", "num_inf > 0"),
)


@dataclass(frozen=True, kw_only=True)
class NonfiniteOrigin:
    """Origin of the first NaN or Inf.

    Attributes:
        kind: ``cast`` (finite before it), ``gemm`` (a result of finite operands), ``weight`` (the weight held it when the
            step began) or ``outside`` (it came with the input, or with the gradient).
        row: of ``sites``: step, module, gemm, tensor, cast_name, call_index, ranks and counts; the counts are None where the
            steps table tells of it.
        before: the Linear that was computed before; None for the first.
        poisoned: modules whose operands held a NaN or Inf after it, in execution order: in the same pass of that step those that
            were computed after it, and all in later steps.
        follows_loss: whether it is of the backward pass of a loss that was not finite itself, which that pass did not make.
    """

    kind: str
    row: Mapping[str, Any]
    before: str | None
    poisoned: tuple[str, ...]
    follows_loss: bool = False

    @property
    def step(self) -> int:
        """The sampled step."""
        return int(self.row["step"])

    @property
    def count(self) -> int | None:
        """Elements that are NaN or Inf there; None when nobody counted."""
        if self.row["num_nan"] is None:
            return None
        came = int(self.row["num_nan"] + self.row["num_inf"])  # of a weight or an input its cast then spreads them over blocks
        return came if self.kind in ("weight", "outside") else came + int(self.row["num_made"])


def first_poison(run: Run) -> NonfiniteOrigin | None:
    """Return the origin of the first NaN or Inf that mattered; None where all was finite, or counts were not recorded.

    Of one step, what the search of results found counts where it was computed before all that the statistics have: a module
    that writes to a result after its GEMM.
    """
    seen, found = _first_sampled(run), _first_searched(run)
    if seen is None or found is None:
        return seen or found
    return min(seen, found, key=lambda origin: (origin.step, *_place({"reference": "", "num_made": 0, **origin.row})))


def gradients_from_outside(run: Run, first: int, last: int) -> list[NonfiniteOrigin]:
    """Return the origin of each sampled step of a range whose first NaN or Inf came with a gradient, from outside the Linears.

    Steps in which a cast, a GEMM or the forward pass made the first one are left out.
    """
    if not counts_nonfinite(run):
        return []
    rows = sorted(
        (row for row in bad_rows(run, SICK) if first <= row["step"] <= last), key=lambda row: (row["step"], *_place(row))
    )
    heads = [next(group) for _, group in groupby(rows, key=lambda row: row["step"])]
    return [
        NonfiniteOrigin(kind="outside", row=row, before=_before(run, row), poisoned=())
        for row in heads
        if row["gemm"] != "fprop" and _kind(row) == "outside"
    ]


def cure_of_gradient(origin: NonfiniteOrigin, *, may_overflow: bool = True) -> str:
    """Return where to look for what made a gradient NaN or Inf outside of the Linears.

    Behind a Linear of a finite gradient neither the loss function nor a NaN of its scale made it; an Inf may be an overflow.

    Args:
        origin: of a gradient.
        may_overflow: whether the loss scale may be to blame.
    """
    if not origin.before:
        return f"{_SOURCES}, an overflowing loss scale" if may_overflow else _SOURCES
    cure = _BETWEEN.format(before=origin.before, module=origin.row["module"])
    is_inf = not origin.row["num_nan"] or origin.row["num_inf"]
    return f"{cure}; or an overflowing loss scale" if may_overflow and is_inf else cure


def _first_searched(run: Run) -> NonfiniteOrigin | None:
    """Return the origin that the steps table tells of."""
    if not run.has("nonfinite_module"):
        return None
    gemm = "nonfinite_gemm" if run.has("nonfinite_gemm") else "NULL"
    query = (
        f"SELECT step, rank, nonfinite_module AS module, nonfinite_origin AS kind, coalesce({gemm}, 'fprop') AS gemm"
        " FROM raw_steps WHERE nonfinite_module IS NOT NULL ORDER BY step, rank"
    )
    sick_steps = _sick_steps(run)
    for step, rows in groupby(run.sql(query).to_pylist(), key=lambda row: row["step"]):
        ranks: dict[tuple[str, str, str], list[int]] = {}
        for row in rows:
            if row["gemm"] == "fprop" or _follows(step, sick_steps) or (row["kind"] == "gemm" and cannot_overflow(run, row)):
                ranks.setdefault((row["module"], row["kind"], row["gemm"]), []).append(row["rank"])
        origins = [_searched(run, step, *found, own) for found, own in ranks.items()]
        if origins:  # of several ranks the one whose module comes first in execution
            first = min(origins, key=lambda origin: _place({"reference": "", "num_made": 0, **origin.row}))
            return replace(first, follows_loss=first.row["gemm"] != "fprop" and step in sick_steps)
    return None


def _searched(run: Run, step: int, module: str, kind: str, gemm: str, ranks: list[int]) -> NonfiniteOrigin:
    given, result = ("input", "output") if gemm == "fprop" else ("grad_output", RESULTS[gemm])
    tensor = {"outside": given, "weight": "weight"}.get(kind, result)
    last = (
        "SELECT cast_name, call_index, ranks FROM sites WHERE actual AND gemm = ? AND tensor = ? AND module = ? AND step <= ?"
        " ORDER BY step DESC, call_index DESC LIMIT 1"
    )
    known = run.sql(last, [gemm, result, module, step]).to_pylist()
    called = sorted((m["call_index"], m["fqn"]) for m in run.modules if m["call_index"] is not None)
    at_first = next((at for at, fqn in called if fqn == module), 0)
    row: dict[str, Any] = {"cast_name": None, "call_index": at_first, **(known[0] if known else {}), "ranks": ranks}
    row |= {"step": step, "module": module, "gemm": gemm, "tensor": tensor, "numel": None, "num_nan": None}
    is_backward = gemm != "fprop"
    later = tuple(fqn for at, fqn in called if (at < at_first if is_backward else at > at_first))
    later = later[::-1] if is_backward else later
    return NonfiniteOrigin(kind=kind, row=row, before=_before(run, row), poisoned=(module, *later) if kind != "gemm" else later)


def _sick_steps(run: Run) -> set[int]:
    """Return the steps whose loss is not finite.

    DuckDB 2.0 skips a row group by its smallest and largest value, which in Parquet leave NaN out: it is not asked.
    """
    steps = run.sql("SELECT step, loss FROM steps WHERE loss IS NOT NULL")
    pairs = zip(steps["step"].to_pylist(), steps["loss"].to_pylist(), strict=True)
    return {step for step, loss in pairs if not math.isfinite(loss)}


def counts_nonfinite(run: Run) -> bool:
    """Return whether NaN and Inf were counted, in tensors or in what a cast made of them."""
    return (run.has("num_nan") and run.has("num_inf")) or run.has("num_actual_nonfinite")


def counts_operands(run: Run, row: Mapping[str, Any]) -> bool:
    """Return whether NaN and Inf were counted in both operands of a row's GEMM, before and after their casts."""
    is_counted = "num_nan + num_inf + CASE WHEN cast_name = 'bf16' THEN 0 ELSE num_actual_nonfinite END IS NOT NULL"
    query = (
        "SELECT count(DISTINCT tensor) AS number FROM sites WHERE actual AND reference = 'operand' AND step = ? AND module = ?"
        f" AND gemm = ? AND {is_counted}"
    )
    key = [row[name] for name in ("step", "module", "gemm")]
    return bool(run.sql(query, key).to_pylist()[0]["number"] == 2)


def _repeated(run: Run, found: Set[int]) -> set[int]:
    """Return the steps of these that the next sampled step follows with the same: no overflow for which one step is skipped.

    They stand for those of a loss that is not finite, where no loss was recorded.
    """
    return {step for step, following in pairwise(run.sampled_steps) if step in found and following in found}


def _follows(step: int, sick_steps: set[int]) -> bool:
    """Return whether the loss is not finite at a step or just after it."""
    return any(s in sick_steps for s in range(step, step + NEXT_STEPS + 1))


def _first_sampled(run: Run) -> NonfiniteOrigin | None:
    if not counts_nonfinite(run):
        return None
    rows = sorted(bad_rows(run, SICK), key=lambda row: (row["step"], *_place(row)))
    sick_steps = _sick_steps(run) if run.has("loss") else _repeated(run, {row["step"] for row in rows})
    for step, group in groupby(rows, key=lambda row: row["step"]):
        row, *others = group
        kind = _kind(row)
        if kind == "outside" and row["num_tensors"] > 1:  # of several calls: what a later layer made may have come back to it
            made = [r for r in others if r["num_made"] and r["reference"] == "operand" and r["num_tensors"] > 1]
            row, kind = (made[0], "cast") if made else (row, kind)
        is_backward = row["gemm"] != "fprop"
        follows = _follows(step, sick_steps)
        maker = _overflowing(run, row) if kind == "outside" and not is_backward else None
        if maker is not None:
            row, kind = maker, "gemm"
        if kind == "cast" or follows or not is_backward or (kind == "gemm" and cannot_overflow(run, row)):
            row = {**row, "ranks": _sick_ranks(run, row)}
            later = [r for r in rows if r["reference"] == "operand" and r["num_nan"] + r["num_inf"] and is_after(row, r)]
            return NonfiniteOrigin(kind=kind, row=row, before=_before(run, row), poisoned=_in_order(later),
                                   follows_loss=is_backward and run.has("loss") and step in sick_steps)  # fmt: skip
    return None


def _place(row: Mapping[str, Any]) -> tuple[int, int, int, int, str]:
    """Order within a step: forward before backward, execution, dgrad before wgrad, then operand, cast, result."""
    at = row["call_index"] or 0
    is_backward = row["gemm"] != "fprop"
    stage = 2 if row["reference"] != "operand" else 1 if row["num_made"] and not row["num_nan"] + row["num_inf"] else 0
    return int(is_backward), -at if is_backward else at, int(row["gemm"] == "wgrad"), stage, row["tensor"]


def poisoned_after(run: Run, finding: Finding) -> tuple[str, ...]:
    """Return the modules with a NaN or Inf after a finding: in the same pass of its step those computed later, then all."""
    if not may_have(run, POISONED):
        return ()
    step, is_forward = finding.steps[0], finding.gemm == "fprop"
    order = "gemm = 'fprop' AND call_index >" if is_forward else "gemm <> 'fprop' AND call_index <"
    query = (
        f"SELECT module, min(call_index) AS place FROM {source(run, POISONED)} WHERE {IS_POISONED}"
        f" AND (step > {step} OR (step = {step} AND {order} {finding.call_index})) GROUP BY module ORDER BY place, module"
    )
    return tuple(row["module"] for row in run.sql(query).to_pylist())


def largest_product(run: Run, row: Mapping[str, Any]) -> float:
    """Return how large an element of a GEMM's result can be, by the amax of its operands and the length of the sum."""
    amaxes = _amaxes(run, row)
    return math.prod(amax or 0.0 for amax in amaxes) * _length(run, row["module"]) if len(amaxes) > 1 else 0.0


def cannot_overflow(run: Run, row: Mapping[str, Any]) -> bool:
    """Return whether a GEMM's operands, all finite, are so small that no sum of their products leaves FP16's range.

    A result that is NaN or Inf none the less was not computed from them. With a loss scale gradients may be as large as that.
    """
    length = contracted_length(run, row["module"], row["gemm"])
    if length is None or not counts_operands(run, row):
        return False
    amaxes = _amaxes(run, row)
    known = [amax for amax in amaxes if amax is not None]
    return len(known) == len(amaxes) == 2 and math.prod(known) * length <= _FP16_RESULT


def reach(run: Run, row: Mapping[str, Any]) -> float:
    """Return the largest element of a GEMM's result as the same GEMM in BF16 or of the exact product has it; 0 where unknown."""
    query = (
        "SELECT max(amax) AS amax FROM sites WHERE step = ? AND module = ? AND gemm = ? AND tensor = ?"
        " AND reference IN ('shadow', 'exact')"
    )
    site = [row["step"], row["module"], row["gemm"], row["tensor"]]
    return float(run.sql(query, site)["amax"][0].as_py() or 0.0)


def _amaxes(run: Run, row: Mapping[str, Any]) -> list[float | None]:
    """Return the largest magnitude of each recorded operand of a row's GEMM."""
    query = (
        "SELECT tensor, max(amax) AS amax FROM sites WHERE step = ? AND module = ? AND gemm = ? AND reference = 'operand'"
        " GROUP BY tensor"
    )
    amaxes: list[float | None] = run.sql(query, [row["step"], row["module"], row["gemm"]])["amax"].to_pylist()
    return amaxes


def _length(run: Run, module: str) -> int:
    """Return over how many elements a module's fprop sums; 1 where that was not recorded."""
    return next((m.get("in_features") or 1 for m in run.modules if m["fqn"] == module), 1)


def _overflowing(run: Run, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the first Linear before a row whose output was not read and may have overflowed, by the sizes of its operands."""
    query = (
        "SELECT module, min(call_index) AS call_index, any_value(ranks) AS ranks FROM sites WHERE step = ? AND gemm = 'fprop'"
        " AND call_index < ? GROUP BY module HAVING count(*) FILTER (WHERE actual AND reference <> 'operand') = 0"
        " ORDER BY call_index, module"
    )
    for found in run.sql(query, [row["step"], row["call_index"] or 0]).to_pylist():
        maker = {**row, **found, "gemm": "fprop", "tensor": "output", "cast_name": None, "numel": None, "num_nan": None}
        if largest_product(run, maker) > MAX_RESULT:
            return maker
    return None


def _sick_ranks(run: Run, row: Mapping[str, Any]) -> list[int]:
    """Return the ranks whose tensor held a NaN or Inf; all that have the row where nobody counted."""
    ranks: list[int] = list(row["ranks"])
    if len(ranks) < 2 or row["num_nan"] is None:
        return ranks
    query = (
        "SELECT DISTINCT rank FROM raw WHERE step = ? AND module = ? AND gemm = ? AND tensor = ?"
        " AND num_nan + num_inf + CASE WHEN actual THEN coalesce(num_actual_nonfinite, 0) ELSE 0 END > 0 ORDER BY rank"
    )
    key = [row[name] for name in ("step", "module", "gemm", "tensor")]
    return [found["rank"] for found in run.sql(query, key).to_pylist()] or ranks


def is_after(origin: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether a row may suffer from an origin: a later step, computed after it in the same pass, or the origin itself.

    The backward pass of a loss that is NaN reaches layers whose forward pass came before the origin: they are no victims of it in
    that step.
    """
    if row["step"] != origin["step"]:
        return bool(row["step"] > origin["step"])
    is_backward = origin["gemm"] != "fprop"
    if is_backward != (row["gemm"] != "fprop"):
        return is_backward is False and row["module"] == origin["module"]
    own, other = origin["call_index"] or 0, row["call_index"] or 0
    return other <= own if is_backward else other >= own


def _kind(row: Mapping[str, Any]) -> str:
    if row["reference"] != "operand":
        return "gemm"
    # Of several calls or microbatches in one row, one may have made what came back to the others.
    if row["num_made"] and (row["num_tensors"] > 1 or not row["num_nan"] + row["num_inf"]):
        return "cast"
    return "weight" if row["tensor"] == "weight" else "outside"


def _before(run: Run, row: Mapping[str, Any]) -> str | None:
    """Return the module that was computed just before a row's own."""
    called = [m for m in run.modules if m["call_index"] is not None]
    order = called if row["gemm"] == "fprop" else called[::-1]
    names = [m["fqn"] for m in order]
    place = names.index(row["module"]) if row["module"] in names else 0
    return names[place - 1] if place else None


def _in_order(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for row in rows:
        first[row["module"]] = min(first.get(row["module"], row["call_index"] or 0), row["call_index"] or 0)
    return tuple(sorted(first, key=lambda module: (first[module], module)))

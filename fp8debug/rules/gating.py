"""Which input is the product of two other Linears' outputs (a gated MLP), and whether their largest values meet.

Found by shapes and data, never by names: two Linears that read the same tensor and have as many outputs as a later one has
inputs. SwiGLU's runaway (arXiv 2409.12517) is an alignment of the two: amax(product) nears amax(gate) amax(up).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


def factors_of(run: Run, module: str) -> tuple[str, str] | None:
    """Return the two Linears whose outputs' product is the module's input, as shapes and data have it; None without."""
    shapes = {m["fqn"]: (m.get("in_features"), m.get("out_features")) for m in run.modules if m["call_index"] is not None}
    names = list(shapes)
    if module not in shapes or shapes[module][0] is None:
        return None
    wide = [name for name in names[: names.index(module)] if shapes[name][1] == shapes[module][0]][-2:]
    pairs = [(a, b) for a, b in combinations(wide, 2) if shapes[a][0] == shapes[b][0] and _share_input(run, a, b)]
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


def _share_input(run: Run, a: str, b: str) -> bool:
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

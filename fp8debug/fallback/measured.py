"""Measurements of a run's GEMMs for the policy: their casts, their share of the FLOPs, and the errors of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8debug.errors import Fp8DebugError, UsageError
from fp8debug.formats import TRANSPOSED
from fp8debug.recipes import Cast
from fp8debug.rules.reading.traces import RUNNING
from fp8debug.store.flop_shares import flop_shares
from fp8debug.types import OPERANDS, RESULTS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: SQNR of BF16's own rounding (numerics.md, 4).
BF16_SQNR_DB = 55.6


class ResultError(NamedTuple):
    """The error of one GEMM's result against the shadow, over the sampled steps.

    Attributes:
        sqnr_db: median.
        expected_db: what the formats of its operands give in closed form.
        num_steps: sampled steps.
        damage: sum over the sampled rows of fprop's output; None for other GEMMs and where it was not recorded.
        damage_per_row: its mean.
        call_index: execution order of the module.
        explained: error energy over what the healthy errors of its operands give when summed without regard to sign, as a
            median; None where it cannot be told. Near 1 at a low SQNR, the products cancel and the cast is not at fault.
    """

    sqnr_db: float
    expected_db: float
    num_steps: int
    damage: float | None
    damage_per_row: float | None
    call_index: int
    explained: float | None


def parsed(name: str | None) -> Cast | None:
    """Return the cast of that name; None for none and for one that another version wrote."""
    try:
        return Cast.parse(name) if name else None
    except Fp8DebugError:
        return None


def changed(cast: Cast, changes: Mapping[str, Any]) -> Cast:
    """Return the cast with some fields changed; what belongs to the scaling that it had goes with that."""
    values = {**cast.to_dict(), **changes}
    if values["scaling"] != cast.scaling:
        defaults = Cast().to_dict()
        values |= {name: defaults[name] for name in ("history", "algo", "margin", "scale_inv") if name not in changes}
    return Cast.from_dict(values)


def is_same(a: Cast, b: Cast) -> bool:
    """Return whether two casts are one but for the direction in which their GEMMs contract."""
    return b in (a, replace(a, granularity=TRANSPOSED[a.granularity]))


def running_casts(run: Run) -> dict[tuple[str, str, str], Cast]:
    """Return by (module, gemm, tensor) the cast that ran."""
    query = f"SELECT DISTINCT module, gemm, tensor, cast_name FROM sites WHERE {RUNNING} ORDER BY cast_name"
    found = {(r["module"], r["gemm"], r["tensor"]): parsed(r["cast_name"]) for r in run.sql(query).to_pylist()}
    return {key: cast for key, cast in found.items() if cast is not None}


def gemm_shares(run: Run) -> dict[str, float]:
    """Return by module the share of one of its GEMMs in all FLOPs that run in FP8."""
    return {fqn: share / len(OPERANDS) for fqn, share in flop_shares(run.modules).items()}


def result_errors(run: Run) -> dict[tuple[str, str], ResultError]:
    """Return by (module, gemm) the error of the result."""
    results = ", ".join(f"'{tensor.value}'" for tensor in RESULTS.values())
    query = (
        "SELECT module, gemm, max(cast_name) AS cast_name, count(*) AS num_steps, min(call_index) AS call_index,"
        " percentile_cont(0.5) WITHIN GROUP (ORDER BY sqnr_db) AS sqnr_db,"
        " sum(damage) FILTER (WHERE isfinite(damage)) AS damage,"
        " sum(damage) FILTER (WHERE isfinite(damage)) / sum(num_damage_rows) FILTER (WHERE isfinite(damage)) AS per_row"
        f" FROM sites WHERE actual AND reference = 'shadow' AND tensor IN ({results}) AND sqnr_db IS NOT NULL"
        " GROUP BY module, gemm ORDER BY module, gemm"
    )
    found, explained = {}, _explained(run)
    for row in run.sql(query).to_pylist():
        found[row["module"], row["gemm"]] = ResultError(
            sqnr_db=row["sqnr_db"],
            expected_db=expected_sqnr_db(row["cast_name"]),
            num_steps=row["num_steps"],
            damage=row["damage"] if row["gemm"] == Gemm.FPROP.value else None,
            damage_per_row=row["per_row"],
            call_index=row["call_index"] or 0,
            explained=explained.get((row["module"], row["gemm"])),
        )
    return found


def _explained(run: Run) -> dict[tuple[str, str], float]:
    """Return by (module, gemm) the median over the sampled steps of ``ResultError.explained``.

    Each element of a result sums K products. Independent operand errors of relative energy n1 and n2 give it an error of
    K * mean(a^2) * mean(b^2) * (n1 + n2), whether the products add up or cancel. An operand counts with the error of its
    format at most, so that its own fault explains nothing.
    """
    query = (
        "SELECT module, gemm, step, tensor, cast_name, numel, sum_x2, sum_err2, reference FROM sites"
        " WHERE actual AND reference IN ('operand', 'shadow') AND numel > 0 AND sum_x2 > 0"
    )
    calls: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in run.sql(query).to_pylist():
        calls.setdefault((row["module"], row["gemm"], row["step"]), {})[row["tensor"]] = row
    widths = {m["fqn"]: (m.get("in_features"), m.get("out_features")) for m in run.modules}
    ratios: dict[tuple[str, str], list[float]] = {}
    for (module, gemm, _), rows in calls.items():
        operands = [rows.get(tensor.value) for tensor in OPERANDS[Gemm(gemm)]]
        result, (in_features, out_features) = rows.get(RESULTS[Gemm(gemm)].value), widths.get(module, (None, None))
        if result is None or None in operands or not in_features or not out_features:
            continue
        first, second = (row for row in operands if row is not None)
        tokens = first["numel"] / out_features if gemm == Gemm.WGRAD.value else 0.0
        depth = {Gemm.FPROP.value: in_features, Gemm.DGRAD.value: out_features}.get(gemm, tokens)
        products = depth * (first["sum_x2"] / first["numel"]) * (second["sum_x2"] / second["numel"])
        healthy = products * sum(min(row["sum_err2"] / row["sum_x2"], _format_nmse(row["cast_name"])) for row in (first, second))
        if healthy > 0:
            ratios.setdefault((module, gemm), []).append(result["sum_err2"] / result["numel"] / healthy)
    return {key: median(values) for key, values in ratios.items()}


def expected_sqnr_db(cast_name: str) -> float:
    """Return the SQNR that the operands' formats give a result in closed form: their error energies add up.

    Args:
        cast_name: of a result, ``FIRST @ SECOND``; the format is the first word of each.
    """
    return -10 * math.log10(sum(_format_nmse(operand) for operand in cast_name.split(" @ ")))


def _format_nmse(cast_name: str) -> float:
    """Return the relative error energy of a cast, in closed form (``Cast.gaussian``); BF16's for the name of none."""
    try:
        sqnr_db = Cast.parse(cast_name).gaussian.sqnr_db
    except UsageError:
        sqnr_db = BF16_SQNR_DB
    return float(10 ** (-sqnr_db / 10))

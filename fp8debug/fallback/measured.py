"""What a run says of its GEMMs for the policy: their casts, their share of the FLOPs, and the errors of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8debug.errors import Fp8DebugError
from fp8debug.formats import FORMATS, TRANSPOSED
from fp8debug.recipes import Cast
from fp8debug.rules.evidence import RUNNING
from fp8debug.shares import flop_shares
from fp8debug.types import OPERANDS, RESULTS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.run import Run

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
    """

    sqnr_db: float
    expected_db: float
    num_steps: int
    damage: float | None
    damage_per_row: float | None
    call_index: int


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
    """Tell whether two casts are one but for the direction in which their GEMMs contract."""
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
    found = {}
    for row in run.sql(query).to_pylist():
        found[row["module"], row["gemm"]] = ResultError(
            sqnr_db=row["sqnr_db"],
            expected_db=expected_sqnr_db(row["cast_name"]),
            num_steps=row["num_steps"],
            damage=row["damage"] if row["gemm"] == Gemm.FPROP.value else None,
            damage_per_row=row["per_row"],
            call_index=row["call_index"] or 0,
        )
    return found


def expected_sqnr_db(cast_name: str) -> float:
    """Return the SQNR that the operands' formats give a result in closed form: their error energies add up.

    Args:
        cast_name: of a result, ``FIRST @ SECOND``; the format is the first word of each.
    """
    energy = 0.0
    for operand in cast_name.split(" @ "):
        fmt = FORMATS.get(operand.split()[0]) if operand.split() else None
        energy += 10 ** (-((fmt.gaussian_sqnr_db if fmt else None) or BF16_SQNR_DB) / 10)
    return -10 * math.log10(energy)

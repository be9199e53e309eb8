"""Measurements of a run's GEMMs for the policy: their casts, their share of the FLOPs, and the errors of their results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8debug.errors import Fp8DebugError, UsageError
from fp8debug.formats import TRANSPOSED
from fp8debug.recipes import Cast
from fp8debug.rules.reading.prefilter import batches
from fp8debug.rules.reading.traces import RUNNING
from fp8debug.store.flop_shares import flop_shares
from fp8debug.types import OPERANDS, RESULTS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: SQNR of BF16's own rounding (numerics.md, 4).
BF16_SQNR_DB = 55.6
#: A result's error against the shadow is material when its SQNR lies this far below what the formats of its operands
#: give: 28.5 - 3.5 = 25 dB for two E4M3 operands (numerics.md, 4).
MATERIAL_DEFICIT_DB = 3.5
#: Rows of the operands and results of GEMMs in FP8.
_CALLS = "actual AND reference IN ('operand', 'shadow') AND numel > 0 AND sum_x2 > 0"


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
            median; None where the SQNR is not low, or it cannot be told. Near 1 the products cancel and the cast is not at
            fault.
    """

    sqnr_db: float
    expected_db: float
    num_steps: int
    damage: float | None
    damage_per_row: float | None
    call_index: int
    explained: float | None

    @property
    def is_low(self) -> bool:
        """True for an SQNR below the healthy envelope."""
        return self.sqnr_db < self.expected_db - MATERIAL_DEFICIT_DB


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
    found = {
        (row["module"], row["gemm"]): ResultError(
            sqnr_db=row["sqnr_db"],
            expected_db=expected_sqnr_db(row["cast_name"]),
            num_steps=row["num_steps"],
            damage=row["damage"] if row["gemm"] == Gemm.FPROP.value else None,
            damage_per_row=row["per_row"],
            call_index=row["call_index"] or 0,
            explained=None,
        )
        for row in run.sql(query).to_pylist()
    }
    explained = _explained(run, {module: None for (module, _), error in found.items() if error.is_low})
    return {key: error._replace(explained=explained.get(key)) if error.is_low else error for key, error in found.items()}


def _explained(run: Run, modules: Collection[str]) -> dict[tuple[str, str], float]:
    """Return by (module, gemm) the median over the sampled steps of ``ResultError.explained``, for some modules.

    Each element of a result sums K products. Independent operand errors of relative energy n1 and n2 give it an error of
    K * mean(a^2) * mean(b^2) * (n1 + n2), whether the products add up or cancel. An operand counts with the error of its
    format at most, so that its own fault explains nothing.
    """
    widths = {m["fqn"]: (m.get("in_features"), m.get("out_features")) for m in run.modules}
    known = [module for module in modules if all(widths.get(module, (None, None)))]
    if not known:
        return {}
    names = [str(row["cast_name"]) for row in run.sql(f"SELECT DISTINCT cast_name FROM raw WHERE {_CALLS}").to_pylist()]
    nmse = " ".join("WHEN cast_name = ? THEN ?" for _ in names)
    places = " ".join(
        f"WHEN gemm = '{gemm.value}' AND tensor = '{tensor.value}' THEN {place}"
        for gemm in Gemm
        for place, tensor in enumerate((*OPERANDS[gemm], RESULTS[gemm]))
    )
    picked = (
        f"SELECT module, gemm, step, CASE {places} END AS place, sum_x2 / numel AS energy, sum_err2 / numel AS error, numel,"
        f" least(sum_err2 / sum_x2, CASE {nmse} END) AS nmse FROM sites"
        f" WHERE {_CALLS} AND {{steps}} AND module IN ({', '.join('?' for _ in known)})"
    )
    of = "max({}) FILTER (WHERE place = {})".format
    query = (
        f"SELECT module, gemm, {of('numel', 0)} AS num_first, {of('energy', 0)} * {of('energy', 1)} AS energies,"
        f" {of('nmse', 0)} + {of('nmse', 1)} AS nmse, {of('error', 2)} AS error"
        f" FROM ({picked}) AS picked GROUP BY module, gemm, step"
    )
    params = [value for name in names for value in (name, _format_nmse(name))]
    ratios: dict[tuple[str, str], list[NDArray[np.float64]]] = {}
    for table in batches(run, query, [*params, *known]):
        for (module, gemm), own in _grouped(table):
            first, energies, nmse_of, error = own
            in_features, out_features = widths[module]
            depth = {Gemm.FPROP.value: in_features, Gemm.DGRAD.value: out_features}.get(gemm, first / out_features)
            healthy = depth * energies * nmse_of
            there = (healthy > 0) & ~np.isnan(error)
            ratios.setdefault((module, gemm), []).append(error[there] / healthy[there])
    medians = {key: np.concatenate(parts) for key, parts in ratios.items()}
    return {key: float(np.median(values)) for key, values in medians.items() if len(values)}


def _grouped(table: pa.Table) -> Iterator[tuple[tuple[str, str], NDArray[np.float64]]]:
    """Yield (module, gemm) and its numbers, float64 ``[columns, rows]``, NaN where there is none."""
    numbers = np.stack([np.asarray(table.column(i).cast("float64").to_numpy()) for i in range(2, table.num_columns)])
    codes, keys = np.zeros(table.num_rows, np.int64), []
    for name in ("module", "gemm"):
        column = table.column(name).combine_chunks().cast("string").dictionary_encode()
        keys.append(column.dictionary.to_pylist())
        codes = codes * len(keys[-1]) + column.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    found, begins = np.unique(codes[order], return_index=True)
    for code, rows in zip(found.tolist(), np.split(order, begins[1:]), strict=True):
        yield (keys[0][code // len(keys[1])], keys[1][code % len(keys[1])]), numbers[:, rows]


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

"""Healthy ranges as colours: NUMERICS.md section 4 turned into one scale for every metric.

"Act" begins where a rule's finding does, by its own limits (``fp8debug.metrics.limits``). Where no rule takes a value for a fault
by itself (a result against the shadow, a clipping no larger than rounding, zeros without an outlier) it stays below "act",
however far it is from healthy: the severity 2 becomes 1.25 and 3 becomes 1.5.

``severity`` maps a value to: 0 healthy, 1 the warn threshold, 2 the act threshold, 3 hopeless; below 0 lies what is *too good*
or on the other side (an operand near 55 dB is not in FP8 at all; a scale far above its tensor). Values between two
thresholds are interpolated, so a figure shows how far a site is from the next one, in the same colours for all metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fp8debug.formats import FORMATS, gaussian
from fp8debug.metrics import limits
from fp8debug.recipes import Cast

Floats = NDArray[np.float32]

#: What kind of site a value comes from: bits, so that SQL can send them along with each value; STOCHASTIC is rounding at random,
#: ROUNDED_SCALE an E4M3 scale (NVFP4), EVEN a scale that lets an amax clip which its format's mantissa rounds down (torchao's
#: EVEN), FLOOR a scale rounded down, and the place of a coarser format than E4M3 in ``_COARSER`` is multiplied by FORMAT. Of a
#: row, see ``row_kinds``: CLIPS_LITTLE clips by no more than what no rule takes for a fault, NO_CAUSE has zeros of which no rule
#: names the cause, BELOW_FLOOR is an operand of less than 8 bits that is farther from its tensor than its cast can put it (F128).
E5M2, DELAYED, WGRAD_GRAD_OUTPUT, SHADOW, EXACT, STOCHASTIC, ROUNDED_SCALE, EVEN = 1, 2, 4, 8, 16, 32, 64, 128
FLOOR, CLIPS_LITTLE, NO_CAUSE, BELOW_FLOOR, FORMAT = 256, 512, 1024, 2048, 4096
#: Formats of less than 8 bits, the coarsest first: a result has the kind of its coarser operand.
_COARSER = sorted((f for f in FORMATS.values() if f.bits < 8), key=lambda f: f.mantissa_bits)

_CASES = " ".join(f"WHEN cast_name LIKE '%{f.name}%' THEN {FORMAT * (i + 1)}" for i, f in enumerate(_COARSER))

#: SQL over ``sites`` that computes those bits.
KIND_SQL = (
    f"(CASE WHEN cast_name LIKE '%e5m2%' THEN {E5M2} ELSE 0 END"
    f" + CASE WHEN cast_name LIKE '%delayed%' OR cast_name LIKE '%static%' THEN {DELAYED} ELSE 0 END"
    f" + CASE WHEN gemm = 'wgrad' AND tensor = 'grad_output' THEN {WGRAD_GRAD_OUTPUT} ELSE 0 END"
    f" + CASE WHEN reference = 'shadow' THEN {SHADOW} WHEN reference = 'exact' THEN {EXACT} ELSE 0 END"
    f" + CASE WHEN cast_name LIKE '%stochastic%' THEN {STOCHASTIC} ELSE 0 END"
    f" + CASE WHEN cast_name LIKE '%scale=e4m3fn%' THEN {ROUNDED_SCALE} ELSE 0 END"
    f" + CASE WHEN cast_name LIKE '%pow2_even%' THEN {EVEN} ELSE 0 END"
    f" + CASE WHEN cast_name LIKE '%pow2_floor%' THEN {FLOOR} ELSE 0 END"
    f" + CASE {_CASES} ELSE 0 END)"
)


def kind_of(gemm: str, tensor: str, cast_name: str, reference: str) -> int:
    """Return the same bits as ``KIND_SQL`` for one site."""
    return (
        E5M2 * ("e5m2" in cast_name)
        + DELAYED * ("delayed" in cast_name or "static" in cast_name)
        + WGRAD_GRAD_OUTPUT * ((gemm, tensor) == ("wgrad", "grad_output"))
        + {"shadow": SHADOW, "exact": EXACT}.get(reference, 0)
        + STOCHASTIC * ("stochastic" in cast_name)
        + ROUNDED_SCALE * ("scale=e4m3fn" in cast_name)
        + EVEN * ("pow2_even" in cast_name)
        + FLOOR * ("pow2_floor" in cast_name)
        + FORMAT * next((i + 1 for i, f in enumerate(_COARSER) if f.name in cast_name), 0)
    )


@cache
def deficit_db(kind: int) -> float:
    """Return how many dB of SQNR a healthy operand of that kind lies below one in E4M3, in closed form.

    The format's is that of its 1x32 blocks under scales rounded up (``formats.gaussian``); rounding at random costs 3 dB.
    """
    place, random = kind // FORMAT, 3.0 if kind & STOCHASTIC else 0.0
    if not place:
        return (5.95 if kind & E5M2 else 0.0) + random
    best, own = (gaussian(f, 32, "pow2_ceil").sqnr_db for f in (FORMATS["e4m3fn"], _COARSER[place - 1]))
    return best - own + random


@dataclass(frozen=True)
class HealthyRange:
    """Thresholds of one metric: values in ascending order and the severity at each."""

    values: tuple[float, ...]
    severities: tuple[float, ...]

    def severity(self, values: Floats) -> Floats:
        """Return the severity of each value; NaN (no data) stays NaN."""
        safe = np.where(np.isnan(values), self.values[0], values)
        mapped = np.interp(safe, self.values, self.severities).astype(np.float32)
        return np.where(np.isnan(values), np.float32(np.nan), mapped)

    def at_value(self, value: float) -> float:
        """Return the severity of one value."""
        return float(np.interp(value, self.values, self.severities))

    def at(self, severity: float) -> list[float]:
        """Return the thresholds that stand for exactly this severity, e.g. both sides of a gain."""
        return [v for v, s in zip(self.values, self.severities, strict=True) if s == severity]


def _never_act(ranges: HealthyRange) -> HealthyRange:
    """Return a range of the same limits that says "act" of no value."""
    return HealthyRange(ranges.values, tuple(s if s <= 1 else 1 + (s - 1) / 4 for s in ranges.severities))


_OPERAND_DB = HealthyRange((10, 25, 30, 31, 35, 45, 55), (3, 2, 1, 0, 0, -1, -2))
_E5M2_DB = HealthyRange((4, 19, 24, 25, 29, 45, 55), (3, 2, 1, 0, 0, -1, -2))  # 25.55 dB, closed form
# Results against the shadow differ by their operands' errors, more where they cancel: rules judge the operands.
_RESULT_DB = _never_act(HealthyRange((5, 20, 25, 27, 35, 45, 55), (3, 2, 1, 0, 0, -1, -2)))
# 25.55 beside 31.5 dB predicts 24.6
_RESULT_E5M2_DB = _never_act(HealthyRange((1, 16, 21, 23, 31, 45, 55), (3, 2, 1, 0, 0, -1, -2)))
_EXACT_DB = HealthyRange((20, 35, 45, 50), (3, 2, 1, 0))
_COSINE = HealthyRange((0.9, 0.99, 0.999, 0.9995), (3, 2, 1, 0))
_COSINE_E5M2 = HealthyRange((0.6, 0.96, 0.996, 0.998), (3, 2, 1, 0))  # four times the noise power
_COSINE_RESULT = _never_act(HealthyRange((0.9, 0.995, 0.9984, 0.999), (3, 2, 1, 0)))  # what 20, 25 and 27 dB leave
_COSINE_RESULT_E5M2 = _never_act(HealthyRange((0.8, 0.987, 0.996, 0.9975), (3, 2, 1, 0)))
_COSINE_EXACT = HealthyRange((0.99, 0.99984, 0.999984, 0.999995), (3, 2, 1, 0))  # what 35, 45 and 50 dB leave
_UNDERFLOW = HealthyRange((0, 0.002, limits.WARN_UNDERFLOW, limits.MAX_UNDERFLOW, 1), (0, 0, 1, 2, 3))
_UNDERFLOW_LEAF = HealthyRange((0, 0.01, 0.05, 1), (0, 0, 1, 1.5))  # wgrad is a leaf: never alone a reason to act
_SATURATION = HealthyRange((0, 1e-9, limits.MAX_CLIPPED, 1), (0, 1, 2, 3))
_SATURATION_DELAYED = HealthyRange((0, 1e-4, limits.WARN_CLIPPED_DELAYED, limits.MAX_CLIPPED_DELAYED, 1), (0, 0, 1, 2, 3))
_GAIN = HealthyRange((0, 0.95, 0.99, 0.998, 1.002, 1.01, 1.05, 2), (3, 2, 1, 0, 0, 1, 2, 3))
# Clean runs in FP4 [measured: tests/bench/clean.py --low-bit]: underflow up to 0.38 in inputs and 0.72 in gradients, gain 0.97 to
# 1.04, under E4M3 scales up to 5.3 % of the elements beyond the format's max, by at most 1/16. pow2_even lets an amax clip by
# up to 31/28: 0.55 % of Gaussian and 3.5 % of uniform values in blocks of 32 [measured: fp8debug.measure of 1024 x 2048].
_UNDERFLOW_LOW_BITS = HealthyRange((0, 0.4, 0.5, limits.MAX_UNDERFLOW_LOW_BITS, 1), (0, 0, 1, 2, 3))
_GAIN_LOW_BITS = (0.97, 1.04)
_SATURATION_ROUNDED = _never_act(HealthyRange((0, 0.06, 0.1, 0.3, 1), (0, 0, 1, 2, 3)))
_HEADROOM_ROUNDED = HealthyRange((2**-12, 2**-6, 2**-3, 17 / 16, 1.1, 1.5, 4), (-2, -1, 0, 0, 1, 2, 3))
_NONFINITE = HealthyRange((0, 1e-12, 1), (0, 2, 3))
# No published thresholds: headroom above 1 clips by definition; below, colour starts where a third of E4M3's 18 binades is lost.
_HEADROOM = HealthyRange((2**-12, 2**-6, 2**-3, 1, 1.01, 1.25, 4), (-2, -1, 0, 0, 1, 2, 3))
_RATIO = HealthyRange((-2, -0.32, -0.014, 0, 3, 6, 12), (3, 2, 1, 0, 0, -1, -2))


def _lower(ranges: HealthyRange, by_db: float) -> HealthyRange:
    """Return a range of SQNR that lies so many dB lower; what is too good to be quantized stays."""
    return HealthyRange(tuple(v - by_db if v < 45 else v for v in ranges.values), ranges.severities)


def _noisier(ranges: HealthyRange, by_db: float) -> HealthyRange:
    """Return a range of cosines for a noise power that many dB higher."""
    return HealthyRange(tuple(max(-1.0, 1 - 10 ** (by_db / 10) * (1 - v)) for v in ranges.values), ranges.severities)


def _cast_of(kind: int) -> Cast:
    """Return a cast of a kind: what the bounds of FP8 depend on."""
    place = kind // FORMAT
    return Cast(
        format=_COARSER[place - 1].name if place else "e5m2" if kind & E5M2 else "e4m3fn",
        scaling="delayed" if kind & DELAYED else "current",
        scale_rounding="pow2_floor" if kind & FLOOR else "pow2_even" if kind & EVEN else "none",
        rounding="stochastic" if kind & STOCHASTIC else "nearest",
    )


@cache
def _of_operand(metric: str, kind: int) -> HealthyRange | None:
    """Return the envelope of an operand in FP8 whose "act" is the limit of a rule; None for other metrics."""
    match metric:
        case "sqnr_db":
            usual = _lower(_E5M2_DB if kind & E5M2 else _OPERAND_DB, 3.0 if kind & STOCHASTIC else 0.0)
            least = limits.operand_floor_db(_cast_of(kind))
            return HealthyRange((usual.values[0], least, *usual.values[2:]), usual.severities)
        case "gain" | "norm_ratio":
            most = limits.gain_limit(_cast_of(kind))
            return HealthyRange((0, 1 - most, *_GAIN.values[2:-2], 1 + most, 2), _GAIN.severities)
    return None


@cache
def _of_low_bits(metric: str, kind: int) -> HealthyRange | None:
    """Return the envelope of FP4, FP6, of rounding at random, or of E4M3 scales; None where that of E4M3 holds."""
    deficit = deficit_db(kind)
    match metric:
        case "sqnr_db" if kind & SHADOW:
            return _lower(_RESULT_DB, deficit)
        case "sqnr_db" if not kind & EXACT:  # how far it may be depends on its magnitudes: "act" is what BELOW_FLOOR says
            usual = _lower(_OPERAND_DB, deficit)
            is_below = kind & BELOW_FLOOR
            return HealthyRange(usual.values[:2], usual.severities[:2]) if is_below else _never_act(usual)
        case "cosine" if not kind & EXACT:
            return _noisier(_COSINE_RESULT if kind & SHADOW else _COSINE, deficit)
        case "underflow_rate" | "underflow_nonzero_rate":
            return _UNDERFLOW_LOW_BITS
        case "overflow_rate" if kind & ROUNDED_SCALE:
            return _SATURATION_ROUNDED
        case "headroom" if kind & ROUNDED_SCALE:
            return _HEADROOM_ROUNDED
        case "gain" | "norm_ratio" if kind // FORMAT and not kind & EXACT:
            most = limits.gain_limit(_cast_of(kind))
            low, high = _GAIN_LOW_BITS
            values = (0, 1 - most, (1 - most + low) / 2, low, high, (1 + most + high) / 2, 1 + most, 2)
            found = HealthyRange(values, _GAIN.severities)
            return _never_act(found) if kind & SHADOW else found
    return None


#: Envelopes of a column: the first of whose bits a kind of site has all.
_ENVELOPES: dict[str, tuple[tuple[int, HealthyRange], ...]] = {
    "sqnr_db": (
        (EXACT, _EXACT_DB),
        (SHADOW | E5M2, _RESULT_E5M2_DB),
        (SHADOW, _RESULT_DB),
        (E5M2, _E5M2_DB),
        (0, _OPERAND_DB),
    ),
    "cosine": (
        (EXACT, _COSINE_EXACT),
        (SHADOW | E5M2, _COSINE_RESULT_E5M2),
        (SHADOW, _COSINE_RESULT),
        (E5M2, _COSINE_E5M2),
        (0, _COSINE),
    ),
    **dict.fromkeys(("underflow_rate", "underflow_nonzero_rate"), ((WGRAD_GRAD_OUTPUT, _UNDERFLOW_LEAF), (0, _UNDERFLOW))),
    "overflow_rate": ((DELAYED, _SATURATION_DELAYED), (EVEN, _SATURATION_ROUNDED), (0, _SATURATION)),
    **dict.fromkeys(("gain", "norm_ratio"), ((SHADOW, _never_act(_GAIN)), (0, _GAIN))),
    **dict.fromkeys(("nonfinite_rate", "actual_nonfinite_rate"), ((0, _NONFINITE),)),
    "headroom": ((0, _HEADROOM),),
    "scale_log2_ratio": ((0, _RATIO),),
}


#: The bit of a row that a column needs: with the first two it says "act" of no value, with the last of each.
ROW_BITS = {
    "overflow_rate": CLIPS_LITTLE,
    "underflow_rate": NO_CAUSE,
    "underflow_nonzero_rate": NO_CAUSE,
    "sqnr_db": BELOW_FLOOR,
}


@cache
def envelope(metric: str, kind: int = 0) -> HealthyRange | None:
    """Return the envelope of a column at a kind of site, or None where nothing says what is healthy."""
    found = None
    if not kind // FORMAT and not kind & (SHADOW | EXACT):
        found = _of_operand(metric, kind)
    if found is None and (kind // FORMAT or kind & (STOCHASTIC | ROUNDED_SCALE)):
        found = _of_low_bits(metric, kind)
    if found is None:
        found = next((found for bits, found in _ENVELOPES.get(metric, ()) if kind & bits == bits), None)
    is_left = kind & ROW_BITS.get(metric, 0) & ~BELOW_FLOOR
    return _never_act(found) if found is not None and is_left else found


def kinds_in(kinds: NDArray[np.int32]) -> list[int]:
    """Return the kinds among those of many values, ascending; counting takes a fifth of the time of ``np.unique``."""
    return [int(kind) for kind in np.flatnonzero(np.bincount(kinds.ravel()))]


def severities(metric: str, values: Floats, kinds: NDArray[np.int32]) -> Floats | None:
    """Return the severity of each value, each by the envelope of its own kind of site; None without an envelope."""
    if envelope(metric) is None:
        return None
    result = np.full(values.shape, np.nan, dtype=np.float32)
    for kind in kinds_in(kinds):
        found = envelope(metric, kind)
        if found is not None:
            chosen = kinds == kind
            result[chosen] = found.severity(values[chosen])
    return result


#: Where "warn" begins, and the slope beyond it that keeps a rate of 1 below "act": of rows that no rule takes for a fault, so
#: that they hide none that one does.
_ABOVE_WARN = {
    "underflow": (limits.WARN_UNDERFLOW, limits.MAX_UNDERFLOW - limits.WARN_UNDERFLOW),
    "delayed": (limits.WARN_CLIPPED_DELAYED, limits.MAX_CLIPPED_DELAYED - limits.WARN_CLIPPED_DELAYED),
    "current": (0.0, limits.MAX_CLIPPED),
}
#: The same of the SQNR of operands below 8 bits, in dB below E4M3's "act": those that F128 names are beyond all others.
_ACT_DB, _LEFT_SLOPE, _NAMED_DB = 25.0, 1e-3, 1000.0


def badness(metric: str, values: Floats, kind: int) -> Floats:
    """Return what ``badness_sql`` says of values of one kind of site."""
    with np.errstate(over="ignore", invalid="ignore"):
        match metric:
            case "sqnr_db" | "worst_block_sqnr_db":
                own = -(values + np.float32(deficit_db(kind)))
                if metric != "sqnr_db" or kind < FORMAT or kind & (SHADOW | EXACT):
                    return own
                if kind & BELOW_FLOOR:
                    return own + np.float32(_NAMED_DB)
                return np.where(own > -_ACT_DB, -_ACT_DB + (own + _ACT_DB) * _LEFT_SLOPE, own).astype(np.float32)
            case "cosine":
                coarser = 10 ** (-deficit_db(kind & ~STOCHASTIC) / 10) if kind // FORMAT else 0.25 if kind & E5M2 else 1
                return (1 - values) * np.float32(coarser)
            case "underflow_rate" | "underflow_nonzero_rate":
                least, slope = _ABOVE_WARN["underflow"] if kind & NO_CAUSE else (np.inf, 1.0)
                own = values * np.float32(0.2 if kind & WGRAD_GRAD_OUTPUT else 1)
                return np.where(own > least, least + (own - least) * slope, own).astype(np.float32)
            case "overflow_rate" if kind & CLIPS_LITTLE:
                least, slope = _ABOVE_WARN["delayed" if kind & DELAYED else "current"]
                return np.where(values > least, least + (values - least) * slope, values).astype(np.float32)
            case "gain" | "norm_ratio":
                return np.abs(values - 1)
            case "scale_log2_ratio":
                return np.where(values < 0, 100 - values, values)
            case "amin" | "scale_inv_min":
                return -values
    return values


def _above_warn_sql(value: str, condition: str, least: str, slope: str) -> str:
    return f"CASE WHEN {condition} AND {value} > {least} THEN {least} + ({value} - {least}) * {slope} ELSE {value} END"


def badness_sql(metric: str, kind: str = "0") -> str:
    """Return SQL that is largest for the worst of several values of a column: what a cell of many steps must show.

    Args:
        metric: the column.
        kind: SQL of the kind of a row; without it each row counts as one that a rule may take for a fault.
    """
    is_e5m2, is_leaf = "cast_name LIKE '%e5m2%'", "gemm = 'wgrad' AND tensor = 'grad_output'"
    deficits = [(f.name, deficit_db(FORMAT * (i + 1))) for i, f in enumerate(_COARSER)]
    match metric:
        case "sqnr_db" | "worst_block_sqnr_db":
            cases = " ".join(f"WHEN cast_name LIKE '%{name}%' THEN {db!r}" for name, db in deficits)
            random = "CASE WHEN cast_name LIKE '%stochastic%' THEN 3 ELSE 0 END"
            own = f"-({metric} + CASE {cases} WHEN {is_e5m2} THEN 5.95 ELSE 0 END + {random})"
            if metric != "sqnr_db" or kind == "0":
                return own
            is_low = f"{kind} >= {FORMAT} AND {kind} & {SHADOW | EXACT} = 0"
            named = f"WHEN {is_low} AND {kind} & {BELOW_FLOOR} > 0 THEN {own} + {_NAMED_DB}"
            left = f"WHEN {is_low} AND {own} > {-_ACT_DB} THEN {-_ACT_DB} + ({own} + {_ACT_DB}) * {_LEFT_SLOPE}"
            return f"CASE {named} {left} ELSE {own} END"
        case "cosine":
            cases = " ".join(f"WHEN cast_name LIKE '%{name}%' THEN {10 ** (-db / 10)!r}" for name, db in deficits)
            return f"(1 - {metric}) * CASE {cases} WHEN {is_e5m2} THEN 0.25 ELSE 1 END"
        case "underflow_rate" | "underflow_nonzero_rate":
            # wgrad's grad_output may lose five times as much; it must not hide an operand that may not.
            own, (least, slope) = f"{metric} * CASE WHEN {is_leaf} THEN 0.2 ELSE 1 END", _ABOVE_WARN["underflow"]
            return _above_warn_sql(own, f"{kind} & {NO_CAUSE} > 0", str(least), str(slope)) if kind != "0" else own
        case "overflow_rate":
            both = zip(_ABOVE_WARN["delayed"], _ABOVE_WARN["current"], strict=True)
            begin, rise = (f"(CASE WHEN {kind} & {DELAYED} > 0 THEN {late} ELSE {own} END)" for late, own in both)
            return _above_warn_sql(metric, f"{kind} & {CLIPS_LITTLE} > 0", begin, rise) if kind != "0" else metric
        case "gain" | "norm_ratio":
            return f"abs({metric} - 1)"
        case "scale_log2_ratio":
            return f"CASE WHEN {metric} < 0 THEN 100 - {metric} ELSE {metric} END"
        case "amin" | "scale_inv_min":
            return f"-{metric}"
    return metric

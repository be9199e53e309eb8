"""From a recorded window to static scales, and to a format and granularity per operand with the SQNR to expect.

    scale_inv = margin * percentile over steps of amax / max of the format          one per operand, tensorwise

What a static scale will clip, flush to zero and lose follows from the exponent histogram of the window: magnitudes that stand
for the elements of each binade are quantized. Of a finer granularity the histogram knows nothing: those that were recorded, as
the running cast or as a what-if, are quoted as they were measured, and no other is proposed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8debug.errors import RunError, UsageError
from fp8debug.formats import FORMATS, GRANULARITIES, Format
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.recipes import Cast, Recipe
from fp8debug.store.calibration_file import KIND, SCHEMA
from fp8debug.types import OPERAND_SITES, OPERANDS, Gemm, TensorRole

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run, StepRange

    Array = np.ndarray[Any, Any]

#: What a cast may lose at most (numerics.md, 4): torchao's cast gate, and the shares at which a rule would speak.
MIN_SQNR_DB, MAX_CLIP_RATE, MAX_UNDERFLOW_RATE = 25.0, 1e-3, 0.01
#: Magnitudes that stand for the elements of a binade.
_POINTS = 128
#: Of the density within a binade, in log2 over log2.
_MAX_SLOPE = 40.0


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Statistics of a cast of an operand over the window.

    Attributes:
        cast: its name.
        sqnr_db: SQNR; None without data or outside the histogram, infinite without an error.
        clip_rate: share of the elements that clip.
        underflow_rate: share of the nonzero finite elements that become 0.
        measured: True when it was recorded, False when it follows from the histogram.
    """

    cast: str
    sqnr_db: float | None
    clip_rate: float
    underflow_rate: float
    measured: bool

    @property
    def problem(self) -> str:
        """Reason why the cast is not proposed; empty when it is fine."""
        if self.clip_rate > MAX_CLIP_RATE:
            return f"{self.clip_rate:.2g} of the elements clip"
        if self.underflow_rate > MAX_UNDERFLOW_RATE:
            return f"{self.underflow_rate:.2g} of the nonzero elements become 0"
        if self.sqnr_db is None or self.sqnr_db < MIN_SQNR_DB:
            nothing = "no data" if self.measured else "its values lie outside the exponent histogram"
            return nothing if self.sqnr_db is None else f"SQNR {self.sqnr_db:.1f} dB"
        return ""


@dataclass(frozen=True, kw_only=True)
class SiteScale:
    """One operand's static scale and the proposal.

    Attributes:
        module: FQN.
        gemm: the GEMM that reads it.
        tensor: its role.
        num_steps: sampled steps in the window.
        amax: the percentile over these steps.
        amax_max: the largest.
        amax_min: the smallest.
        running: what ran, measured; None when it was not in FP8.
        static: what the static scale will do, from the histogram.
        is_static: whether the recipe uses it: it holds, and so does that of the GEMM's other operand.
        proposal: the coarsest cast that holds, static before recorded ones; None when none does.
        note: why not static, or what to record.
    """

    module: str
    gemm: str
    tensor: str
    num_steps: int
    amax: float
    amax_max: float
    amax_min: float
    running: Expected | None
    static: Expected
    is_static: bool
    proposal: Expected | None
    note: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The scales of a window.

    Attributes:
        run: name of the run.
        steps: first and last sampled step.
        percentile: of the amaxes over steps.
        margin: factor on the scale_inv.
        sites: every operand with data, in execution order.
        recipes: by module: static where ``is_static``, else what ran.
        first_nonfinite: first step of the window with NaN or Inf in an operand, whose other elements are in the scales; None
            where all are finite.
    """

    run: str
    steps: tuple[int, int]
    percentile: float
    margin: float
    sites: list[SiteScale]
    recipes: dict[str, Recipe]
    first_nonfinite: int | None = None

    def to_json(self) -> str:
        """Return the file that ``convert`` and :func:`load_recipes` read."""
        document = {
            "kind": KIND,
            "schema": SCHEMA,
            "run": self.run,
            "steps": list(self.steps),
            "percentile": self.percentile,
            "margin": self.margin,
            "recipes": {module: recipe.to_dict() for module, recipe in self.recipes.items()},
            "sites": [asdict(site) for site in self.sites],
        }
        return json.dumps(_strict(document), indent=1) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def expect(fmt: Format, scale_inv: float, histogram: Array, amax: float, sum_x2: float, numel: int) -> Expected:
    """Return what a tensorwise static scale does to elements of which the exponent histogram is known.

    Args:
        fmt: of the data.
        scale_inv: decode factor.
        histogram: elements by floor(log2(abs x)), int64 ``[64]``, not all of them zero.
        amax: largest magnitude.
        sum_x2: sum of the squares.
        numel: elements, zeros included.
    """
    x, count = _stand_ins(histogram, amax, sum_x2)
    y = _rounded(x / scale_inv, fmt)
    error = float((count * (y * scale_inv - x) ** 2).sum())
    below = histogram[0] > 0 and scale_inv * fmt.min_subnormal / 2 < 2.0 ** (FIRST_LOG2 + 1)
    return Expected(
        cast=str(Cast(format=fmt.name, scaling="static", scale_inv=scale_inv)),
        sqnr_db=None if below or amax >= 2.0 ** (FIRST_LOG2 + NUM_BINS) else _sqnr_db(error, sum_x2),
        clip_rate=float(count[x / scale_inv > fmt.max * (1 + 2.0**-20)].sum()) / max(numel, 1),
        underflow_rate=float(count[y == 0].sum()) / float(histogram.sum()),
        measured=False,
    )


def _stand_ins(histogram: Array, amax: float, sum_x2: float) -> tuple[Array, Array]:
    """Return magnitudes that stand for all elements, and how many each stands for.

    One element is amax itself. Within a binade the density is the smooth curve through it and its neighbours: its slope, in
    log2 of density over log2 of magnitude, goes from that towards the lower neighbour to that towards the upper one; all slopes
    are then changed alike until the sum of squares is the recorded one.
    """
    low = np.exp2(np.arange(NUM_BINS) + float(FIRST_LOG2))
    high = np.maximum(np.minimum(2 * low, amax), low * (1 + 2.0**-20))
    with np.errstate(divide="ignore", invalid="ignore"):
        between = np.diff(np.log2(histogram / (high - low))) / np.diff(np.log2((low + high) / 2))
    between[~np.isfinite(between)] = np.nan  # next to an empty binade
    below, above = np.concatenate([[np.nan], between]), np.concatenate([between, [np.nan]])
    bend = np.nan_to_num(below - np.concatenate([[np.nan], below[:-1]]))
    above = np.where(np.isnan(above), below + np.minimum(bend, 0.0), above)
    below = np.where(np.isnan(below), above, below)
    below, above = (np.nan_to_num(slope).clip(-_MAX_SLOPE, _MAX_SLOPE)[:, None] for slope in (below, above))
    x = low[:, None] + (high - low)[:, None] * (np.arange(_POINTS) + 0.5) / _POINTS
    u = np.log2(x / low[:, None])
    log2_density = below * u + (above - below) * u**2 / 2
    count = histogram.astype(np.float64)[:, None]
    count[int(np.clip(math.floor(math.log2(amax)) - FIRST_LOG2, 0, NUM_BINS - 1))] -= 1
    lowest, highest = -_MAX_SLOPE, _MAX_SLOPE
    for _ in range(20):
        slope = (lowest + highest) / 2
        density = np.exp2(log2_density + slope * u)
        weight = count * density / density.sum(1, keepdims=True)
        if float((weight * x**2).sum()) > sum_x2 - amax**2:
            highest = slope
        else:
            lowest = slope
    return np.append(x.reshape(-1), amax), np.append(weight.reshape(-1), 1.0)


def _rounded(scaled: Array, fmt: Format) -> Array:
    """Round magnitudes to the nearest value of a format, ties to even, after the clamp."""
    ulp = np.exp2(np.maximum(np.frexp(scaled)[1] - 1, 1 - fmt.bias) - float(fmt.mantissa_bits))
    rounded: Array = np.minimum(np.rint(scaled / ulp) * ulp, fmt.max)
    return rounded


def _sqnr_db(sum_err2: float, sum_x2: float) -> float | None:
    if not sum_x2 > 0:
        return None
    return -10 * math.log10(sum_err2 / sum_x2) if sum_err2 > 0 else math.inf


def calibrate(
    run: Run | str | Path, *, percentile: float = 99.9, margin: float = 1.0, steps: StepRange | None = None
) -> Calibration:
    """Turn a recorded window into static scales.

    Args:
        run: a recorded run, or its folder; in FP8 or only tried.
        percentile: of the amaxes of the sampled steps; 100 is the largest.
        margin: factor on the scale_inv; 2 leaves one binade for growth.
        steps: the window, ``"A:B"``; the whole run by default.

    Raises:
        RunError: the window holds no histogram of an operand.
        UsageError: a number out of range.
    """
    for name, number in (("percentile", percentile), ("margin", margin)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise UsageError(f"{name} must be a number, got {number!r}")
    if not 0 < percentile <= 100:
        raise UsageError(f"percentile must be above 0 and at most 100, got {percentile}")
    if not 2.0**-8 <= margin <= 2.0**8:
        raise UsageError(f"margin is a factor between 1/256 and 256, got {margin}")
    run = _as_run(run)
    rows = _amaxes(run, percentile, steps)
    if not rows:
        raise RunError(f"{run.path}: no exponent histogram of an operand in steps {steps or 'of the run'}; widen --steps")
    recorded = _recorded(run, steps)
    static = {key: _static(row, margin, _formats_for(recorded.get(key, []))) for key, row in rows.items()}
    sites = []
    for (module, gemm, tensor), row in rows.items():
        site = module, gemm, tensor
        partner = next(str(t) for t in OPERANDS[Gemm(gemm)] if t != tensor)
        other = static.get((module, gemm, partner))
        problem = static[site].problem
        if not problem and (other is None or other.problem):
            problem = f"its {partner} is not: {other.problem if other else 'no data'}"
        seen = recorded.get(site, [])
        fine = [e for e in [static[site], *sorted((e for e, _ in seen), key=_fineness)] if not e.problem]
        proposal = fine[0] if fine else None
        sites.append(
            SiteScale(
                module=module,
                gemm=gemm,
                tensor=tensor,
                num_steps=row["num_steps"],
                amax=row["amax"],
                amax_max=row["amax_max"],
                amax_min=row["amax_min"],
                running=next((e for e, actual in seen if actual), None),
                static=static[site],
                is_static=not problem,
                proposal=proposal,
                note=_note(problem, proposal, [e for e, _ in seen]),
            )
        )
    window = min(row["first"] for row in rows.values()), max(row["last"] for row in rows.values())
    return Calibration(
        run=run.name,
        steps=window,
        percentile=percentile,
        margin=margin,
        sites=sites,
        recipes=_recipes(run, sites),
        first_nonfinite=_first_nonfinite(run, steps),
    )


def _as_run(run: Run | str | Path) -> Run:
    from fp8debug.store.read.run import Run

    return run if isinstance(run, Run) else Run(run)


def _fineness(expected: Expected) -> tuple[int, str]:
    return list(GRANULARITIES).index(Cast.parse(expected.cast).granularity), expected.cast


def _note(problem: str, proposal: Expected | None, seen: list[Expected]) -> str:
    text = f"not static: {problem}" if problem else ""
    if proposal is None:
        finest = max((Cast.parse(e.cast).granularity for e in seen), key=list(GRANULARITIES).index, default="none")
        text += f"; no recorded cast holds (finest: {finest}); a finer one cannot be told from a histogram, record it as what_if="
    return text


def _where(run: Run, steps: Any) -> str:
    from fp8debug.store.read.run import parse_steps

    first, end = parse_steps(steps)
    bounds = [f"step >= {first}"] if first is not None else []
    bounds += [f"step < {end}"] if end is not None else []
    return " AND ".join(["reference = 'operand'", *bounds])


def _amaxes(run: Run, percentile: float, steps: Any) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return amaxes, energy and the summed histogram of each operand, in execution order."""
    from fp8debug.store.read.views import DUCKDB

    bins = ", ".join(f"CAST(sum({DUCKDB.element('log2_hist', i + 1)}) AS BIGINT) AS bin_{i}" for i in range(NUM_BINS))
    query = f"""
SELECT module, gemm, tensor, min(call_index) AS call_index, count(DISTINCT step) AS num_steps, min(step) AS first,
  max(step) AS last, percentile_cont({percentile / 100}) WITHIN GROUP (ORDER BY amax) AS amax, max(amax) AS amax_max,
  min(amax) AS amax_min, sum(sum_x2) AS sum_x2, sum(numel) AS numel, {bins}
FROM sites
WHERE {_where(run, steps)} AND log2_hist IS NOT NULL AND amax IS NOT NULL
GROUP BY module, gemm, tensor"""
    order = {(str(g), str(t)): place for place, (g, t) in enumerate(OPERAND_SITES)}
    found = {}
    for row in sorted(
        run.sql(query).to_pylist(), key=lambda r: (r["call_index"] or 0, r["module"], order[r["gemm"], r["tensor"]])
    ):
        row["histogram"] = np.array([row.pop(f"bin_{i}") for i in range(NUM_BINS)], np.int64)
        found[row["module"], row["gemm"], row["tensor"]] = row
    return found


def _first_nonfinite(run: Run, steps: Any) -> int | None:
    query = f"SELECT min(step) AS step FROM sites WHERE {_where(run, steps)} AND num_nan + num_inf > 0"
    found: int | None = run.sql(query).to_pylist()[0]["step"]
    return found


def _recorded(run: Run, steps: Any) -> dict[tuple[str, str, str], list[tuple[Expected, bool]]]:
    """Return what each recorded cast did over the window, and whether it ran."""
    query = f"""
SELECT module, gemm, tensor, cast_name, bool_or(actual) AS actual, sum(sum_err2) AS sum_err2, sum(sum_x2) AS sum_x2,
  sum(num_saturated) AS num_saturated, sum(num_underflow) AS num_underflow, sum(numel) AS numel,
  sum(numel - num_zero - num_nan - num_inf) AS num_nonzero
FROM sites
WHERE {_where(run, steps)} AND sum_x2 IS NOT NULL AND num_underflow IS NOT NULL
GROUP BY module, gemm, tensor, cast_name"""
    found: dict[tuple[str, str, str], list[tuple[Expected, bool]]] = {}
    for row in run.sql(query).to_pylist():
        try:
            Cast.parse(row["cast_name"])
        except UsageError:
            continue  # of a newer version, or made by a fault
        expected = Expected(
            cast=row["cast_name"],
            sqnr_db=_sqnr_db(row["sum_err2"], row["sum_x2"]),
            clip_rate=float(row["num_saturated"]) / max(float(row["numel"]), 1.0),
            underflow_rate=float(row["num_underflow"]) / max(float(row["num_nonzero"]), 1.0),
            measured=True,
        )
        found.setdefault((row["module"], row["gemm"], row["tensor"]), []).append((expected, bool(row["actual"])))
    return found


def _formats_for(seen: list[tuple[Expected, bool]]) -> list[Format]:
    """Return the formats of a static scale, the finest first: those of 8 bits of the kind that ran, OCP's or fnuz."""
    running = [FORMATS[Cast.parse(expected.cast).format].is_unsigned_zero for expected, actual in seen if actual]
    is_fnuz = bool(running) and running[0]
    found = [f for f in FORMATS.values() if f.bits == 8 and not f.scale_only and f.is_unsigned_zero == is_fnuz]
    return sorted(found, key=lambda f: -f.mantissa_bits)


def _static(row: Mapping[str, Any], margin: float, formats: list[Format]) -> Expected:
    """Return the static cast: the finest format, unless the range of a coarser one keeps more of what it would flush to zero."""

    def of(fmt: Format) -> Expected:
        scale_inv = float(np.float32(np.clip(row["amax"] * margin / fmt.max, 2.0**-126, 2.0**126)))
        return expect(fmt, scale_inv, row["histogram"], row["amax_max"], float(row["sum_x2"]), int(row["numel"]))

    fine, coarse = (of(fmt) for fmt in formats)
    flushed = fine.underflow_rate > MAX_UNDERFLOW_RATE and coarse.underflow_rate < fine.underflow_rate / 2
    return coarse if flushed else fine


def _recipes(run: Run, sites: list[SiteScale]) -> dict[str, Recipe]:
    """Return each module's casts: static where both operands of a GEMM hold, else as the manifest says that they ran."""
    ran: dict[str, dict[str, Any]] = {m["fqn"]: m.get("casts") or {} for m in run.modules}
    casts: dict[str, dict[tuple[Gemm, TensorRole], Cast | None]] = {}
    for site in sites:
        if site.module not in casts:
            known = ran.get(site.module, {})
            entries = {(g, t): known.get(f"{g}.{t}") for g, t in OPERAND_SITES}
            casts[site.module] = {key: Cast.from_dict(cast) if cast else None for key, cast in entries.items()}
        if site.is_static:
            casts[site.module][Gemm(site.gemm), TensorRole(site.tensor)] = Cast.parse(site.static.cast)
    return {module: Recipe("calibrated", found) for module, found in casts.items()}

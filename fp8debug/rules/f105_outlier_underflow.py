"""F105: an outlier takes the whole range of its scale, and the ordinary values beside it underflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.metrics import limits
from fp8debug.recipes import get_recipe, list_recipes
from fp8debug.rules.base import RULES, Finding, FollowingRule, Severity, accuses_other_modules
from fp8debug.rules.reading.bounds import IS_BELOW_8_BITS
from fp8debug.rules.reading.conditions import Condition, Keys, Look, look
from fp8debug.rules.reading.forecasts import ForecastLimits, underflow_ahead
from fp8debug.rules.reading.outlier_spread import spread_log2
from fp8debug.rules.reading.rounded_twice import ExactCastLimits, rounded_again
from fp8debug.rules.reading.traces import RUNNING, Trace, has_fp8, percent, times, traces
from fp8debug.types import Gemm, TensorRole

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_COLUMNS = ("underflow_nonzero_rate", "underflow_rate", "amax", "rms", "sqnr_db", "log2_hist")


@dataclass(frozen=True)
class OutlierUnderflow(FollowingRule, ForecastLimits):
    """An outlier sets the scale of its neighbours, and they underflow to zero while SQNR looks better than clean.

    What it detects
        An input of fprop whose scale fits its own amax (so it is not F102) and of which a material share still becomes
        zero, because the amax lies many binades above the median magnitude. SwiGLU's product into down_proj does this
        when gate and up align. Underflow of values that are tiny anyway, such as the tail of GELU, comes with an amax
        near the median and is not reported. Where nothing underflows yet under one scale for the tensor, an amax that
        steadily runs away from the other values is reported as outlier-underflow-forecast, with when they will
        (docs/triage.md), and with the two Linears of which it is the product. Where rows or blocks have scales of their own, an
        amax far above the median may be in other rows, so that few nonzero elements of a tensor of zeros are no finding: a
        squared ReLU has that many just above 0. In a run without FP8 the cast that
        plain_recipe tries at the input is judged in the same way: the finding says what would underflow, one severity lower.
        Where the module's weight was made by another cast (F137), and a what-if cast of the input leaves less than half of the
        underflow, the recipe is at fault and not the input: it is information beside that finding.

    Why it matters
        The outlier is nearly all of the tensor's energy, so SQNR and cosine rise while the information of all other
        channels is lost. arXiv 2409.12517 traces the divergence of a 7B model in FP8 to it, after 200 B tokens.

    Example
        blocks.4.mlp.down, fprop input, e4m3fn tensorwise current: 61 % of the nonzero elements underflow; the amax is
        8.4e+05 times the median magnitude, and SQNR reads 37.1 dB.

    Cure
        A finer granularity (1x128), so that the outlier spoils one tile per row; scale the channel down and its weight
        up (Smooth-SwiGLU); BF16 for the fprop of this module. 1x128 is proposed where it leaves less than half of the
        underflow: as the what-if of such a cast has it, or else 128 of the K elements of a row, those beside one outlier.

    Thresholds
        - max_rate 0.05, warn_rate 0.01: share of nonzero elements that underflow; numerics.md, 4 (act above 5 %, warn
          above 1 %; clean is at most 0.06 %, and 1 % in Ling 2.0, Fig. 16). Where the scale is not one for the tensor,
          warn_rate is of all elements, as those sources count.
        - min_spread_log2 10: log2(amax / median magnitude). No published basis: 3 for a Gaussian, 6 for a product of
          two; E4M3 holds 18.8 binades from amax to the first underflow.
        - min_crest 6: amax / rms, in its place where no histogram was recorded. No published basis.
        - min_headroom 0.015625: below 2^-6 the scale is too old (F102).
        - max_low_bit_rate 0.6: the same for FP4 and FP6, whose smallest values lie 2.6 to 5.9 binades below their largest: clean
          inputs have up to 38 % in E2M1, Gaussian ones 7 to 11 % [measured: tests/bench/clean.py --low-bit].
        - min_elements 16: underflowed elements; in a small tensor a share says nothing. No published basis.
        - horizon 1: how far a forecast looks ahead, as a share of the steps that the trend was seen for; 0 for none. No
          published basis.
        - min_points 8, max_points 60, min_z 3, min_later_slope 0.5, trend_warmup 8: of a forecast; as in F101, which says what
          they are and where they come from.
        - follow_steps 2: sampled steps after the first of another fault, in a layer that ran before, within which this one is its
          consequence, as information. No published basis.
        - min_batch_growth 10: amax of what the module that runs first reads, over its largest of the sampled steps before; in
          another module a finding at such steps alone is a consequence of the batch, as information. No published basis.
    """

    code = "F105"
    name = "outlier-underflow"
    needs_fp8 = False
    columns = ("num_underflow", "amax")
    cure = "granularity='1x128' for this operand; else smooth the outlier channel; else BF16 for this module's fprop"
    changes: ClassVar[Mapping[str, Any]] = {"granularity": "1x128", "scaling": "current"}

    max_rate: float = limits.MAX_UNDERFLOW
    warn_rate: float = limits.WARN_UNDERFLOW
    max_low_bit_rate: float = limits.MAX_UNDERFLOW_LOW_BITS
    min_spread_log2: float = limits.MIN_SPREAD_LOG2
    min_crest: float = limits.MIN_CREST
    min_headroom: float = limits.MAX_STALE_HEADROOM
    min_elements: int = limits.MIN_UNDERFLOW_ELEMENTS

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the inputs that an outlier flushes, or else those that it will."""
        if not has_fp8(run):
            yield from self._would_flush(run)
            return
        sites = [trace for rows in self._looks for trace in traces(run, rows)]
        found = [self._with_cure(finding, run) for finding in self._flushed(sites)]
        weights = rounded_again(run, ExactCastLimits()) if found else []
        exact = {trace.module: cast for trace, cast in weights if trace.gemm == "fprop"}
        found = [self._beside_rounded_twice(finding, exact.get(finding.module or ""), run) for finding in found]
        yield from found or underflow_ahead(self, run, self.warn_rate, self.min_spread_log2, spread_log2, self)

    @property
    def _looks(self) -> tuple[Look, Look]:
        """Rows whose zeros were counted before the cast, and those whose share of all elements is the least it can be.

        A log without errors may be of a version that counts zeros of the tensor too.
        """
        whole: list[Condition | Keys | str] = [
            Condition("underflow_rate", ">", self.warn_rate),
            "num_zero IS NULL AND sum_err2 IS NOT NULL",
        ]
        columns = ("underflow_rate AS underflow_nonzero_rate", *_COLUMNS[1:])
        return look(self._conditions, _COLUMNS), look([*whole, *self._conditions[1:]], columns)

    @property
    def _conditions(self) -> list[Condition | Keys | str]:
        return [
            Condition("underflow_nonzero_rate", ">", self.warn_rate),
            Keys("gemm = 'fprop' AND tensor = 'input'"),
            f"NOT ({IS_BELOW_8_BITS} AND coalesce(underflow_nonzero_rate, underflow_rate) < {self.max_low_bit_rate})",
            f"num_underflow >= {self.min_elements} AND coalesce(headroom, 1) >= {self.min_headroom}",
        ]

    def looks(self) -> Iterable[Look]:
        """Return the inputs that underflow."""
        yield from self._looks

    def _would_flush(self, run: Run) -> Iterable[Finding]:
        """Return the inputs of a run without FP8 that would underflow under the cast that plain_recipe tries."""
        name = run.manifest.get("plain_recipe")
        cast = get_recipe(name).casts[Gemm.FPROP, TensorRole.INPUT] if name in list_recipes() else None
        if cast is None:
            return
        rows = RUNNING.replace("actual", "NOT actual", 1)
        tried = look([*self._conditions, f"cast_name = '{cast}'"], _COLUMNS, rows=rows)
        for finding in self._flushed(traces(run, tried)):
            severity = Severity.WARNING if finding.severity is Severity.ERROR else Severity.INFO
            told = finding.message.replace(" underflows at step", " would underflow in FP8 at step", 1)
            yield replace(finding, severity=severity, message=f"{told} (the run has no FP8: {finding.cast} was tried)")

    def _flushed(self, found: Iterable[Trace]) -> Iterable[Finding]:
        for trace in found:
            is_whole = trace.cast is None or trace.cast.granularity == "tensorwise"
            outlying = trace.where(self._has_outlier if is_whole else self._has_material_outlier)
            if outlying is None:
                continue
            row = outlying.worst("underflow_nonzero_rate")
            rate, spread = row["underflow_nonzero_rate"], spread_log2(row)
            against = f"{times(2.0**spread)} times the median magnitude" if spread else "far above the rest"
            sqnr = f", while SQNR reads {row['sqnr_db']:.1f} dB" if row["sqnr_db"] is not None else ""
            message = (
                f"{percent(rate)} of the nonzero {trace.gemm} {trace.tensor} underflows at step {row['step']}: an"
                f" outlier (amax {times(row['amax'])}) lies {against}{sqnr}"
            )
            severity = Severity.ERROR if rate > self.max_rate else Severity.WARNING
            threshold = self.max_rate if severity is Severity.ERROR else self.warn_rate
            finding = outlying.finding(self, severity, message, value=rate, threshold=threshold)
            is_fine = trace.cast is not None and "x" in trace.cast.granularity
            yield replace(finding, cure=self._without_tiles) if is_fine else finding

    @property
    def _without_tiles(self) -> str:
        return self.cure.partition("; else ")[2]

    def _with_cure(self, finding: Finding, run: Run) -> Finding:
        return finding if self.is_cured_by_cast(finding, run) else replace(finding, cure=self._without_tiles)

    def is_cured_by_cast(self, site: Finding, run: Run) -> bool:
        """Tell whether tiles of 1x128 leave less than half of the underflow: as measured, or for one outlier in a row."""
        if site.value is None or site.module is None or site.cast is None:
            return True
        tiled = site.cast.partition(" ")[0] + " 1x128 current"
        rows = run.table(("cast_name", "underflow_nonzero_rate"), site.module, site.gemm, site.tensor, actual=False)
        rates = [row["underflow_nonzero_rate"] for row in rows.to_pylist() if row["cast_name"].startswith(tiled)]
        measured = max((rate for rate in rates if rate is not None), default=None)
        width = next((m.get("in_features") for m in run.modules if m["fqn"] == site.module), None)
        left = measured if measured is not None else 128 / max(128, width or 0)
        return left < site.value / 2

    def _beside_rounded_twice(self, finding: Finding, exact: str | None, run: Run) -> Finding:
        """Return the finding as information where a recorded cast leaves less than half, and made the weight.

        Args:
            finding: of an input.
            exact: the what-if cast that holds the module's weight without error, which the running one rounds again (F137).
            run: the run.
        """
        if exact is None or finding.value is None or finding.module is None:
            return finding
        rows = run.table(("step", "cast_name", "underflow_nonzero_rate"), finding.module, "fprop", "input", actual=False)
        rates: dict[str, float] = {}
        for row in rows.to_pylist():
            rate = row["underflow_nonzero_rate"]
            if rate is not None:
                rates[row["cast_name"]] = max(rate, rates.get(row["cast_name"], 0.0))
        best = min(rates, key=lambda name: rates[name], default=None)
        if best is None or rates[best] >= finding.value / 2:
            return finding
        words = (
            f"{finding.message}; the weight was made by {exact} (F137), and for the input {best}, recorded beside it, leaves at"
            f" most {percent(rates[best])}"
        )
        cure = f"cast this module by the recipe that holds its weight exactly: {best} for the input; else {finding.cure}"
        return replace(finding, severity=Severity.INFO, message=words, cure=cure)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to rows that poison the others (F117), which look like an outlier from afar."""
        return accuses_other_modules(finding, others, "F117")

    def _has_material_outlier(self, row: dict[str, Any]) -> bool:
        """Return the same where more underflows than lies just above 0 in a tensor of zeros: under scales of rows or blocks."""
        whole = row["underflow_rate"]
        is_material = whole is None or whole > self.warn_rate or row["underflow_nonzero_rate"] > self.max_rate
        return is_material and self._has_outlier(row)

    def _has_outlier(self, row: dict[str, Any]) -> bool:
        spread = spread_log2(row)
        if spread is not None:
            return spread >= self.min_spread_log2
        return bool(row["rms"]) and row["amax"] / row["rms"] >= self.min_crest


RULES.add(OutlierUnderflow.code, OutlierUnderflow())

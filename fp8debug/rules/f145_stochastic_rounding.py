"""F145: stochastic rounding that is none: it returns zeros, rounds to nearest, has a bias, or repeats its random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.metrics.limits import cast_floor_db
from fp8debug.rules.base import RULES, Finding, Rule, Severity, accuses_other_modules
from fp8debug.rules.reading.conditions import Condition, Keys, Look, look
from fp8debug.rules.reading.traces import Trace, percent, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_IS_RANDOM = "cast_name LIKE '% stochastic%'"
_COLUMNS = (
    *("num_noise", "noise_ratio", "noise_bias", "noise_repeat_z", "noise_sum", "noise_variance", "underflow_nonzero_rate"),
    *("num_eps_blocks", "headroom", "sqnr_db"),
)


@dataclass(frozen=True)
class StochasticRounding(Rule):
    """An operand is declared to be rounded at random, and it is not.

    What it detects
        Under a cast with stochastic rounding: all elements zero under scales that fit; roundings of the energy of rounding to
        nearest (half of the random one's) or beyond it; roundings with a mean away from zero; and roundings that correlate with
        those of the sampled step before, as where a generator is seeded anew in each step. The expectation of each is known for
        every tensor: an element at a distance f above the value below it goes up with probability f, so that its rounding has the
        mean 0 and the variance f (1 - f) in units of the spacing. Elements that did not change between two steps do not count,
        and an operand farther from its tensor than its cast can put it is no rounding (F119, F128).

    Why it matters
        FP4 gradients are rounded at random because rounding to nearest has a bias that adds up over steps (arXiv 2509.25149,
        section 4.4, and 2502.20586): training then stalls late, without one bad number in any step. Zeros stop all layers below.

    Example
        blocks.1.down, dgrad grad_output, e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor stochastic: its roundings have 0.50
        of the energy of random ones at 12 of 12 sampled steps: it is rounded to nearest.

    Cure
        Check the kernel's flag for stochastic rounding and its generator state (seed and offset, which each call has to
        advance); rounding='nearest' says what runs; BF16 for this GEMM until then.

    Thresholds
        - min_ratio 0.75, max_ratio 1.33: energy of the roundings over f (1 - f). To nearest it is at most half for values
          spread evenly over a spacing, truncated it is twice: the middle, and its inverse; numerics.md, 2.
        - max_bias 0.01: mean rounding in spacings. A generator of b bits has 2^-(b + 1): 0.002 of 8 bits (closed form).
        - min_z 8: standard deviations, of n independent roundings, that each deviation must have; 1e-15 by chance.
        - max_underflow_rate 0.9995: share of the nonzero elements that are zero, under scales that fit.
        - min_headroom 0.5: amax over what the scale holds, from which a scale fits: one that was rounded up to a power of two
          leaves half (closed form).
        - min_elements 1024: elements between two values of the format. No published basis.
        - Seen in TransformerEngine #3281.
    """

    code = "F145"
    name = "stochastic-rounding"
    columns = ("num_noise", "noise_sum2", "noise_variance")
    cure = "check the kernel's stochastic-rounding flag and generator state (seed, offset); else BF16 for this GEMM"

    min_ratio: float = 0.75
    max_ratio: float = 1.33
    max_bias: float = 0.01
    min_z: float = 8.0
    max_underflow_rate: float = 0.9995
    min_headroom: float = 0.5
    min_elements: int = 1024

    def looks(self) -> Iterable[Look]:
        """Return the operands that are declared to be rounded at random."""
        yield self._look

    @property
    def _look(self) -> Look:
        wrong = (
            f"noise_ratio < {self.min_ratio} OR noise_ratio > {self.max_ratio} OR abs(noise_bias) > {self.max_bias}"
            f" OR noise_repeat_z > {self.min_z} OR underflow_nonzero_rate >= {self.max_underflow_rate}"
        )
        return look(
            [Condition("num_noise", ">", 0), Keys(_IS_RANDOM), f"num_noise >= {self.min_elements} AND ({wrong})"], _COLUMNS
        )

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose rounding is not random."""
        for whole in traces(run, self._look):
            floor = 0.0 if whole.cast is None else cast_floor_db(whole.cast)
            rounded = whole.where(lambda row, floor=floor: row["sqnr_db"] is not None and row["sqnr_db"] >= floor)  # type: ignore[misc]  # bound now
            judges = (self._nearest, self._bias, self._repeats)
            for judge, trace in ((self._zeros, whole), *((judge, rounded) for judge in judges)):
                if trace is not None and (finding := judge(trace)) is not None:
                    yield finding
                    break

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to an operand that is not in its format at all, whose roundings are another format's."""
        return accuses_other_modules(finding, others, "F111")

    def _zeros(self, whole: Trace) -> Finding | None:
        trace = whole.where(
            lambda row: (
                row["underflow_nonzero_rate"] >= self.max_underflow_rate
                and not row["num_eps_blocks"]
                and (row["headroom"] or 0.0) > self.min_headroom
            )
        )
        if trace is None:
            return None
        row = trace.worst("underflow_nonzero_rate")
        message = (
            f"{percent(row['underflow_nonzero_rate'])} of the nonzero {trace.gemm} {trace.tensor} is zero at step {row['step']}"
            f" ({self._share(trace)}) under scales that fit it: stochastic rounding returned zeros"
        )
        return trace.finding(
            self, Severity.ERROR, message, value=row["underflow_nonzero_rate"], threshold=self.max_underflow_rate
        )

    def _nearest(self, whole: Trace) -> Finding | None:
        def is_off(row: dict[str, Any]) -> bool:
            ratio, deviations = row["noise_ratio"], abs(row["noise_ratio"] - 1) * row["noise_variance"] ** 0.5
            return not self.min_ratio <= ratio <= self.max_ratio and bool(deviations > self.min_z)

        trace = whole.where(lambda row: row["noise_ratio"] is not None and is_off(row))
        if trace is None:
            return None
        row = max(trace.rows, key=lambda row: abs(row["noise_ratio"] - 1))
        ratio = row["noise_ratio"]
        what = "it is rounded to nearest" if ratio < 1 else "it is truncated, or rounded by numbers that are not random"
        message = (
            f"the roundings of the {trace.gemm} {trace.tensor} have {ratio:.2f} of the energy of random ones at step"
            f" {row['step']} ({self._share(trace)}): {what}"
        )
        limit = self.min_ratio if ratio < 1 else self.max_ratio
        return trace.finding(self, Severity.ERROR, message, value=ratio, threshold=limit)

    def _bias(self, whole: Trace) -> Finding | None:
        trace = whole.where(
            lambda row: (
                row["noise_bias"] is not None
                and abs(row["noise_bias"]) > self.max_bias
                and bool(abs(row["noise_sum"]) > self.min_z * row["noise_variance"] ** 0.5)
            )
        )
        if trace is None:
            return None
        row = max(trace.rows, key=lambda row: abs(row["noise_bias"]))
        side = "away from" if row["noise_bias"] > 0 else "towards"
        message = (
            f"the {trace.gemm} {trace.tensor} is rounded {side} zero by {abs(row['noise_bias']):.2g} spacings in the mean at step"
            f" {row['step']} ({self._share(trace)}): its random numbers do not fill [0, 1) evenly"
        )
        return trace.finding(self, Severity.ERROR, message, value=abs(row["noise_bias"]), threshold=self.max_bias)

    def _repeats(self, whole: Trace) -> Finding | None:
        trace = whole.where(lambda row: row["noise_repeat_z"] is not None and row["noise_repeat_z"] > self.min_z)
        if trace is None:
            return None
        row = trace.worst("noise_repeat_z")
        message = (
            f"the roundings of the {trace.gemm} {trace.tensor} at step {row['step']} are those of the sampled step before"
            f" ({row['noise_repeat_z']:.0f} standard deviations of independent ones; {self._share(trace)}): the random numbers"
            " come back in each step"
        )
        return trace.finding(self, Severity.ERROR, message, value=row["noise_repeat_z"], threshold=self.min_z)

    def _share(self, trace: Trace) -> str:
        since = sum(step >= trace.rows[0]["step"] for step in trace.sampled)
        return f"{len(trace.rows)} of {since} sampled steps"


RULES.add(StochasticRounding.code, StochasticRounding())

"""Would BF16 have left its course too? From update sizes and gradient noise, or from a baseline in BF16 where there is one.

A gradient of one step is g + e: what all data would give, and the noise of the batch, of variance q times |g|^2. Adam's first
moment after t steps averages both, so that with r = |m|^2 / |gradient|^2 and b = beta1

    r = ((1 - b^t)^2 + q * (1 - b) * (1 - b^2t) / (1 + b)) / (1 + q)

gives q, the batch's noise-to-signal ratio (the inverse of "simple noise scale over batch", arXiv 1812.06162, 2.2). FP8 adds noise
of its own: at most the errors of all results of the forward and backward GEMMs, whose energies add, and that of the weight's own
gradient. Where that is small against q, a training in BF16 sees the same gradients as far as anybody can tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import Finding, Severity
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.movements import movements_before
from fp8debug.rules.reading.optimizer_steps import OUT_OF_SIZE
from fp8debug.rules.reading.traces import percent, sampled_steps

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True, kw_only=True)
class Bf16Verdict:
    """The verdict and its reason.

    Attributes:
        verdict: ``yes`` and ``no`` are measured, by a baseline in BF16; ``likely`` and ``unlikely`` are concluded; ``undecided``.
        why: one clause.
    """

    verdict: str
    why: str

    @property
    def words(self) -> str:
        """One sentence for people."""
        return f"would BF16 have left its course too? {self.verdict}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Noise of the gradients just before a step, as shares of their own energy.

    Attributes:
        batch: of the batch, median over weights.
        fp8: that FP8 adds, at most.
        update_ratio: RMS of the updates over that of their weights, median over weights.
        steps: sampled steps that were looked at.
    """

    batch: float
    fp8: float | None
    update_ratio: float
    steps: tuple[int, ...]

    @property
    def share(self) -> float | None:
        """FP8's share of both; None where FP8's is not known."""
        return None if self.fp8 is None else self.fp8 / max(self.fp8 + self.batch, 1e-30)


def bf16_verdict(
    run: Run, step: int, cause: str, findings: Sequence[Finding], comparison: Mapping[str, Any] | None, limits: CourseLimits
) -> Bf16Verdict:
    """Return whether a training in BF16 would have left its course at that step too.

    Args:
        run: the run.
        step: at which its loss left its course.
        cause: of the classification.
        findings: those that stand, the culprit first.
        comparison: with a baseline, if there is one.
        limits: thresholds.
    """
    if comparison is not None and not comparison["has_fp8"]:
        return _measured(comparison, step, limits)
    large = (f for f in findings if f.name == OUT_OF_SIZE and f.severity > Severity.INFO)
    exploded = next((f for f in large if f.steps[0] <= step), None)
    harmful = [f for f in findings if f.module and f.severity is Severity.ERROR and f.steps[0] <= step]
    if cause in ("fp8", "numerical"):
        first = f": {harmful[0].module} ({harmful[0].code} {harmful[0].name}) was at fault before" if harmful else ""
        return Bf16Verdict(verdict="unlikely", why=f"a cast or GEMM of FP8 is at the origin{first}")
    if exploded is not None and not any(f.steps[0] < exploded.steps[0] for f in harmful):
        return Bf16Verdict(
            verdict="likely", why=f"at step {exploded.steps[0]} {_size(exploded)}, and no cast was at fault before"
        )
    if harmful:
        return Bf16Verdict(verdict="undecided", why=f"{harmful[0].module} ({harmful[0].code} {harmful[0].name}) was at fault too")
    noise = gradient_noise(run, step, limits)
    if noise is None or noise.share is None:
        return Bf16Verdict(
            verdict="undecided",
            why="no baseline in BF16, and the gradients' noise before it was not recorded; fp8debug verify trains both",
        )
    sizes = (
        f"of the gradients' energy {percent(noise.batch)} is noise of the batch and at most {percent(noise.fp8 or 0.0)} noise"
        f" of FP8, and updates are {noise.update_ratio:.2g} of their weights (steps {noise.steps[0]} to {noise.steps[-1]})"
    )
    if noise.share <= limits.max_fp8_noise and not movements_before(run, step, limits).found:
        return Bf16Verdict(verdict="likely", why=sizes)
    return Bf16Verdict(verdict="undecided", why=f"{sizes}; fp8debug verify trains both")


def gradient_noise(run: Run, step: int, limits: CourseLimits) -> GradientNoise | None:
    """Return the noise of the gradients at the sampled steps just before a step; None where Adam's moments were not recorded."""
    until = [s for s in sampled_steps(run) if 0 < s < step][-limits.gradient_steps :]
    if not until:
        return None
    where = f"step BETWEEN {until[0]} AND {until[-1]}"
    rows = run.sql(
        f"SELECT step, beta1, sum_grad2, sum_moment2, sum_update2, sum_weight2 FROM updates WHERE {where} AND beta1 > 0"
        " AND sum_grad2 > 0 AND sum_moment2 IS NOT NULL AND sum_weight2 > 0"
    ).to_pylist()
    ratios = [batch_noise(row["sum_moment2"] / row["sum_grad2"], row["beta1"], row["step"] + 1) for row in rows]
    if not ratios:
        return None
    found = median(ratios)
    return GradientNoise(
        batch=1.0 if math.isinf(found) else found / (1 + found),
        fp8=_fp8_noise(run, where),
        update_ratio=median(math.sqrt(row["sum_update2"] / row["sum_weight2"]) for row in rows),
        steps=tuple(sorted({row["step"] for row in rows})),
    )


def batch_noise(ratio: float, beta1: float, num_steps: int) -> float:
    """Return q, the noise of a batch's gradient over its signal, both as energies; infinite where nothing but noise is seen.

    Args:
        ratio: squared norm of Adam's first moment after the step over that of the gradient.
        beta1: decay of the first moment.
        num_steps: steps that it averages.
    """
    of_signal = (1 - beta1**num_steps) ** 2
    of_noise = (1 - beta1) * (1 - beta1 ** (2 * num_steps)) / (1 + beta1)
    if ratio <= of_noise or of_signal <= of_noise:
        return math.inf
    return max(0.0, (of_signal - ratio) / (ratio - of_noise))


def _fp8_noise(run: Run, where: str) -> float | None:
    """Return FP8's noise in a gradient over the gradient, at most: what all modules' results add, and the weight's own."""
    rows = run.sql(
        "SELECT module, tensor, sqnr_db FROM sites WHERE reference = 'shadow' AND actual AND sqnr_db IS NOT NULL"
        f" AND {where} ORDER BY module, tensor, step"
    ).to_pylist()
    series: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        series.setdefault((row["module"], row["tensor"]), []).append(row["sqnr_db"])
    energies = [(tensor, 10 ** (-median(found) / 10)) for (_, tensor), found in series.items()]
    own = [energy for tensor, energy in energies if tensor == "grad_weight"]
    if not own:
        return None
    return min(1.0, max(own) + sum(energy for tensor, energy in energies if tensor != "grad_weight"))


def _measured(comparison: Mapping[str, Any], step: int, limits: CourseLimits) -> Bf16Verdict:
    """Return what a baseline in BF16 shows."""
    name, last = f"the loss of {comparison['run']}, which has no FP8,", comparison["steps"]
    leaves = min(comparison["baseline_leaves_at"], key=lambda other: abs(other - step), default=None)
    if leaves is not None and abs(leaves - step) <= limits.level_steps:
        return Bf16Verdict(verdict="yes", why=f"{name} leaves its course at step {leaves}")
    if leaves is not None:
        return Bf16Verdict(verdict="undecided", why=f"{name} leaves its course at another step, {leaves}")
    if last is None or last[1] < step:
        return Bf16Verdict(verdict="undecided", why=f"{name} ends before")
    return Bf16Verdict(verdict="no", why=f"{name} stays on its course")


def _size(finding: Finding) -> str:
    return f"the optimizer changed weights by {finding.value:.3g} times their size"

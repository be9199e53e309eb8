"""Read what the optimizer's steps did to the weights: how much of an update took effect, and updates as large as the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: What F127 calls a finding of updates as large as the weights, whatever the loss does.
OUT_OF_SIZE = "updates-out-of-size"
#: What F149 calls a finding of gradients whose small elements became 0 after wgrad.
ROUNDED_TO_ZERO = "gradient-rounded-to-zero"
#: Why no rule can judge a run's optimizer steps.
NOT_RECORDED = "no optimizer step was recorded: no torch optimizer that holds a watched weight stepped in a sampled step"


@dataclass(frozen=True)
class UpdateLimits:
    """Thresholds for updates as large as the weights; F127's page says where each comes from.

    Attributes:
        ratio: RMS of an update over that of its weight.
        normalized: largest update of an element over the learning rate, of an optimizer that divides by the gradients' size
            and whose betas are not known.
        adam: times ``largest_of_adam``.
        ordinary_rms: size that a weight which starts from zero is compared with, times the root of its columns.
    """

    ratio: float
    normalized: float
    adam: float
    ordinary_rms: float


@dataclass(frozen=True, kw_only=True)
class LargeUpdates:
    """Updates as large as the weights themselves.

    Attributes:
        steps: sampled steps that show them, in order.
        modules: those whose weights have them, in execution order; of all steps.
        num_modules: modules whose updates were recorded.
        first: row of the largest one, against its weight, at the first step.
        ratio: RMS of that update over the weight's.
        cause: ``moments`` (second moments are 0, or far too small for the first ones), ``learning-rate``, or ``gradient`` where
            the update is large against both.
    """

    steps: tuple[int, ...]
    modules: tuple[str, ...]
    num_modules: int
    first: Mapping[str, Any]
    ratio: float
    cause: str

    @property
    def is_own(self) -> bool:
        """True if the optimizer made them, whatever the gradients were: one that divides by the gradients' size."""
        return self.cause != "gradient"

    @property
    def is_of_moments(self) -> bool:
        """True if the optimizer's moments made them: neither a gradient nor a learning rate can."""
        return self.cause == "moments"

    @property
    def words(self) -> str:
        """One clause for people."""
        row, lr = self.first, self.first["lr"]
        if self.cause == "moments":
            share = (row["num_moment_zero"] or 0) / max(1, row["num_sampled"])
            empty = f"{share:.2g} of its second moments are 0 under gradients that are not, and " if share else ""
            apart = "" if share else ", more than gradients can: its two moments do not belong together (a second moment lost)"
            return (
                f"{self._what}: {empty}single elements move by up to {row['max_update'] / lr:.3g} times the learning rate"
                f" ({row['optimizer']}){apart}"
            )
        why = "the learning rate is too high for it" if self.cause == "learning-rate" else "so large is the gradient"
        return f"{self.size}: {why}"

    @property
    def size(self) -> str:
        """The update without its cause, for people."""
        return f"{self._what} ({self.first['optimizer']}, largest update {self.first['max_update']:.3g})"

    @property
    def _what(self) -> str:
        row = self.first
        return f"the optimizer step {row['step']} changes the weight of {row['module']} by {self.ratio:.3g} times its own RMS"

    @property
    def cure(self) -> str:
        """Remedies by cause."""
        return {
            "moments": "keep the second moment in FP32, in checkpoints too, or with a scale per block and an eps above its"
            " smallest step; no cast of a GEMM helps",
            "learning-rate": "lower the learning rate or warm it up longer; no cast of a GEMM helps",
            "gradient": "clip the gradient norm, look at the batch and the learning rate of that step",
        }[self.cause]


@dataclass(frozen=True, kw_only=True)
class NonfiniteUpdate:
    """An update that is NaN or Inf, of a gradient that is neither.

    Attributes:
        optimizer: class of the optimizer.
        is_of_zeros: True where all elements of the gradient that were looked at are 0.
        num_weights: weights that have such an update in that step.
        num_recorded: weights whose updates were recorded there.
    """

    optimizer: str
    is_of_zeros: bool
    num_weights: int
    num_recorded: int

    @property
    def words(self) -> str:
        """One clause for people."""
        gradient = "of a gradient that is 0 everywhere" if self.is_of_zeros else "of a finite gradient"
        count = f"{self.num_weights} of {self.num_recorded} weights"
        return f"the optimizer ({self.optimizer}) made it: its update is NaN or Inf, {gradient}, as for {count}"

    @property
    def cure(self) -> str:
        """Remedies by the gradient."""
        if self.is_of_zeros:
            return (
                f"{self.optimizer} divides by the size of a gradient, a moment or an update that is 0: give that division an eps,"
                " or skip such a weight; a weight that starts from 0 leaves those before it without a gradient in the first step"
            )
        return f"look for a division by 0 or an overflow in {self.optimizer}: its eps, and the dtype of its state"


def largest_updates(run: Run) -> dict[str, float]:
    """Return by module the largest RMS of an update of its weight that was recorded."""
    rows = run.sql(
        "SELECT module, max(sqrt(sum_update2 / num_sampled)) AS size FROM updates WHERE num_sampled > 0 GROUP BY module"
    ).to_pylist()
    return {row["module"]: row["size"] for row in rows if row["size"] is not None}


def nonfinite_update(run: Run, module: str, step: int) -> NonfiniteUpdate | None:
    """Return the update that made a weight NaN or Inf in a sampled step; None where it is not known or the gradient did."""
    query = (
        "SELECT module, optimizer, num_grad, num_moved > 0 AND isfinite(sum_weight2) AND isfinite(sum_grad2)"
        " AND NOT coalesce(isfinite(sum_update2), FALSE) AS is_made FROM updates WHERE step = ? AND num_sampled > 0"
    )
    rows = run.sql(query, [step]).to_pylist()
    made = [row for row in rows if row["is_made"]]
    own = next((row for row in made if row["module"] == module), None)
    if own is None:
        return None
    return NonfiniteUpdate(
        optimizer=own["optimizer"], is_of_zeros=own["num_grad"] == 0, num_weights=len(made), num_recorded=len(rows)
    )


def large_updates(run: Run, limits: UpdateLimits) -> LargeUpdates | None:
    """Return the updates that are large beside the weight's RMS; None where there are none or nothing was recorded."""
    return run.memo(f"large updates {limits}", lambda: _large_updates(run, limits))


def _large_updates(run: Run, limits: UpdateLimits) -> LargeUpdates | None:
    rows: list[dict[str, Any]] = run.sql("SELECT * FROM updates WHERE num_sampled > 0 ORDER BY step, module").to_pylist()
    large = [row for row in rows if update_ratio(row, limits.ordinary_rms) > limits.ratio]
    if not large:
        return None
    step = large[0]["step"]
    first = max((row for row in large if row["step"] == step), key=lambda row: update_ratio(row, limits.ordinary_rms))
    found = {row["module"] for row in large}
    ordered = [m["fqn"] for m in run.modules if m["fqn"] in found]
    return LargeUpdates(
        steps=tuple(dict.fromkeys(row["step"] for row in large)),
        modules=tuple(ordered),
        num_modules=len({row["module"] for row in rows}),
        first=first,
        ratio=update_ratio(first, limits.ordinary_rms),
        cause=_cause(first, limits),
    )


def largest_of_adam(beta1: float, beta2: float) -> float:
    """Return the most that Adam moves an element by, over the learning rate, whatever the gradients were.

    m sums w_k g_k and v sums u_k g_k^2, with w_k = (1 - beta1) beta1^k and u_k = (1 - beta2) beta2^k. By Cauchy and Schwarz
    m^2 / v is at most the sum of w_k^2 / u_k, (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)). It has no limit where beta1^2
    is not below beta2. Both moments are of the same gradients.

    Args:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
    """
    if not (beta1**2 < beta2 < 1):
        return math.inf
    return max(1.0, (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)))


def update_ratio(row: Mapping[str, Any], ordinary_rms: float) -> float:
    """Return the RMS of an update over that of its weight, or over an ordinary weight's where the weight is smaller."""
    if row["sum_update2"] is None or row["sum_weight2"] is None:
        return 0.0
    if math.isinf(row["sum_update2"]) and math.isfinite(row["sum_grad2"] or 0.0):  # no size explains it: F125 names it
        return 0.0
    usual = ordinary_rms / math.sqrt(max(1, row["fan_in"] or 1))
    return math.sqrt(row["sum_update2"] / row["num_sampled"]) / max(math.sqrt(row["sum_weight2"] / row["num_sampled"]), usual)


def _cause(row: Mapping[str, Any], limits: UpdateLimits) -> str:
    lr, largest = row["lr"] or 0.0, row["max_update"] or 0.0
    is_normalized = row["beta1"] is not None or (str(row["optimizer"]).lower() != "sgd" and largest <= limits.normalized * lr)
    if row["num_moment_zero"] and largest > limits.normalized * lr > 0:
        return "moments"
    if None not in (row["beta1"], row["beta2"]):
        most = limits.adam * largest_of_adam(row["beta1"], row["beta2"])
        if largest > most * lr > 0:
            return "moments"
    return "learning-rate" if is_normalized else "gradient"

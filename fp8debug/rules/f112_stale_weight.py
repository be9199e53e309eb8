"""F112: the FP8 weight that a GEMM reads is a cached one of an earlier step or was not refreshed between microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.outside_scales import applied_outside
from fp8debug.rules.reading.traces import IS_DELAYED, traces
from fp8debug.rules.reading.weights import OffWeightRule, look_for_weights, off_weights

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Mean log2 of the later reads' scale_inv over the first one's, where all of its blocks were read again.
_SHIFT = (
    "CASE WHEN num_zero_blocks = 0 AND num_reread_blocks % num_blocks = 0"
    " THEN reread_scale_inv_sum_log2 / num_reread_blocks - scale_inv_sum_log2 / num_blocks END AS shift"
)
#: The cure of cached data whose scale was updated.
_RESCALED = (
    "keep the scale_inv that the cached data were cast with, and update scales when the weight is cast, not between microbatches;"
    " or switch the weight cache off; else BF16 for this module"
)
#: The cure where it is farther away than the last updates explain.
_IF_CACHED = (
    "if this FP8 weight is cached, refresh it after each optimizer step or switch the cache off; if it is cast at each step, dump"
    " it (watch(dump=...)) and compare it with fp8debug.quantize() of the weight; else BF16 for this module"
)


@dataclass(frozen=True)
class StaleWeight(OffWeightRule):
    """The cached FP8 weight is out of step with the weight: the optimizer moved on and the cache did not.

    What it detects
        A weight whose FP8 values differ from it by more than a cast does, in all rows alike, with nothing lost at either end of
        the range; or one that is right in the first microbatch of a step and wrong in a later one, which is how a cache shows
        in gradient accumulation. Where the later read is as far off as the data of the first one are under the scale of the
        later one, the scale was updated and the cached data were not cast again, and the message says so. Parts of another
        shard or checkpoint, and values farther away than the optimizer's steps reach, are F121, or F128 where they have the
        weight's direction; a low SQNR at the cosine of rounding is F113 or F118. Where values are farther away than the steps
        since they were right reach, the message says so: a copy of before then, or none of the weight's values.

    Why it matters
        The forward pass computes with weights that no optimizer knows: gradients belong to one point and are applied to
        another. It looks like a learning rate that is too large.

    Example
        blocks.1.mlp.up, fprop weight, e4m3fn 128x128 current: 20.0 dB at cosine 0.99506 since step 40; a fresh cast has
        31.5 dB.

    Cure
        Quantize the weight anew after each optimizer step (is_first_microbatch, cache_weights, a stale graph capture), or
        switch the weight cache off; BF16 for this module until then. Cached data keep the scale_inv that they were cast with:
        update scales when the weight is cast, not at every microbatch.

    Thresholds
        - max_sqnr_db 27: SQNR of an E4M3 weight, 6 dB lower for E5M2, 23.5 (and a cosine of 0.998) under delayed scaling;
          numerics.md, 4 (warn below 30, act below 25). Values that all round alike reach 24.6 dB with a cosine near 1.
        - max_cosine 0.999: numerics.md, 4 (warn below); healthy weights have 0.9996 and more [measured].
        - max_own_scale_sqnr_db 30, max_own_scale_cosine 0.9995, max_own_headroom_error 0.002: SQNR and cosine where the scale is
          not made of the weight's own amax (by 0.2 %; FP32 scales under current scaling hit it exactly); numerics.md, 4 (warn
          below 30).
        - max_headroom 1.25: at the first step that shows it; beyond, the scales are of other blocks (F119). A weight that is
          stale for long outgrows its scales later.
        - min_reread_gap_db 1: SQNR that the second microbatch's weight lies below the first's. No published basis: 0 in
          healthy runs, 0.07 where rows are sampled; three times as much under delayed scaling, whose scale moves between two
          reads (0.95 dB) [measured].
        - max_scale_error_db 1: distance of the later read's SQNR from -10 log10((r - 1)^2 + r^2 10^(-SQNR / 10)), where r is how
          many times the first read's scale_inv the later one's is: closed form for data that stayed. No published basis.
        - min_steps 2, warmup 8: sampled steps that show it; under delayed scaling the first steps do not count.
        - delayed_sqnr_db 23.5, delayed_cosine 0.998: limits under delayed scaling: weights that grow from zero clip for some
          steps [measured: 24.3 dB and 0.9989 at step 8 of a healthy run]; one 16 steps old has 21.7 dB and 0.9966 or less.
        - min_coefficient 0.9: cosine / norm_ratio, the coefficient of the weight on an older one of its own: 1 in closed form
          where updates lie across it. Measured, a weight of up to 16 steps ago at learning rates of 0.002 and 0.01: 0.994 to
          1.27; permuted scales: 0.26 to 0.83.
        - max_block_growth 4: growth of a block's amax over that of the weight's norm, 1.64 at most in the same runs; beyond,
          single blocks have scales that were never theirs (F119). No published basis.
        - max_noise_db 20, max_noise_share 0.25, max_noise_range_db 2: noise added to the right values from the first step on is
          F128's: an SQNR below and steady within these, and 1 - gain over nmse below the share: 1 for an older weight, 0.5 for
          values in other places, 0 for noise (closed form; 0.02 at 13 dB of noise [measured]).
        - max_e5m2_error_db 0.6: distance from the 25.55 dB of E5M2 at every step, whose noise is F120's. No published basis.
        - max_e5m2_headroom 1.002: headroom up to which a weight with that SQNR lies under its own scale, within the rounding of
          a scale in BF16 (2^-9). max_flushed_rate 0.05: share of nonzero elements that are zero; beyond it the scale is at
          fault, not the values. No published basis.
        - min_own_cosine 0.9: cosine from which on values are the weight's, under wrong scales at a start (F119): a factor of up
          to 2 for each block leaves 0.95.
        - min_judged_rows 0.8: share of sampled rows that are either lost or right, where a part of the weight is another's; the
          others lie between 10 and 24 dB, as those of a stale weight do. No published basis.
        - min_elements 256: elements; a small tensor says little. No published basis.
        - min_mixed_rows 0.03, max_foreign_sqnr_db 15, max_unrelated 0.3, max_size_error 0.5, max_steps_worth 4: by which the
          weight is another's; as in F121, which says where they come from. Set them for both.
        - max_unit_gain 2, min_pair_cosine 0.999, max_pair_error 0.15, min_outside_cosine 0.5, min_far_cosine 0.1, far_gain 16,
          min_result_cosine 0.9, min_compensated 4: by which a scale is applied outside the GEMM or on the other operand's side;
          as in F113, which says where they come from.
        - Seen in TransformerEngine #1047, marin #7659.
    """

    code = "F112"
    name = "stale-weight"
    cure = "refresh the FP8 weight after each optimizer step, or switch its cache off; else BF16 for this module"

    min_reread_gap_db: float = 1.0
    max_scale_error_db: float = 1.0

    def looks(self) -> Iterable[Look]:
        """Return the weights that are off, in either read."""
        yield look_for_weights(self)
        yield self._recheck

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the weights that are those of another time."""
        yield from self._between_microbatches(run)
        for weight in off_weights(run, self):
            if not weight.foreign:
                row = min(weight.trace.rows, key=lambda row: float(row["sqnr_db"]))
                message = (
                    f"the {weight.trace.gemm} weight has {row['sqnr_db']:.1f} dB at cosine {row['cosine']:.5f} at step"
                    f" {row['step']}: its FP8 values are not those of the weight as it is now"
                )
                if weight.since_right:
                    message += f"; {weight.since_right}"
                finding = weight.trace.finding(
                    self, Severity.ERROR, message, value=row["sqnr_db"], threshold=self.max_sqnr_db, unit="dB"
                )
                yield replace(finding, cure=_IF_CACHED) if weight.since_right else finding

    @property
    def _recheck(self) -> Look:
        conditions: Conditions = [
            Condition("reread_sqnr_db", "<", self.max_own_scale_sqnr_db),
            Keys("tensor = 'weight'"),
            f"sqnr_db - reread_sqnr_db > CASE WHEN {IS_DELAYED} THEN 3 ELSE 1 END * {self.min_reread_gap_db}",
        ]
        return look(conditions, ["sqnr_db", "reread_sqnr_db", _SHIFT])

    def _is_rescaled(self, row: Mapping[str, Any]) -> bool:
        """Return whether the later read has the first one's data under another scale."""
        if row["shift"] is None or row["sqnr_db"] is None:
            return False
        factor = 2.0 ** row["shift"]
        error = (factor - 1) ** 2 + factor**2 * 10 ** (-row["sqnr_db"] / 10)
        return bool(error > 0 and abs(row["reread_sqnr_db"] + 10 * math.log10(error)) < self.max_scale_error_db)

    def _between_microbatches(self, run: Run) -> Iterable[Finding]:
        if not run.has("num_reread"):
            return
        found = traces(run, self._recheck)
        # The weight of such a GEMM holds the scale of each microbatch's input.
        outside = applied_outside(run, self.max_unit_gain) if found else []
        across = {(row["module"], row["gemm"]) for row in outside if row["tensor"] != "weight"}
        for trace in found:
            if (trace.module, trace.gemm) not in across and trace.lasting(min(self.min_steps, len(trace.sampled))):
                row = trace.least("reread_sqnr_db")
                message = (
                    f"the {trace.gemm} weight has {row['sqnr_db']:.1f} dB in the first microbatch of step {row['step']} and"
                    f" {row['reread_sqnr_db']:.1f} dB in later ones: "
                )
                is_rescaled = self._is_rescaled(row)
                if is_rescaled:
                    message += (
                        f"its cached FP8 data stayed, and their scale_inv is {2.0 ** row['shift']:.2g} times the one"
                        " that they were cast with"
                    )
                else:
                    message += "its FP8 values are a cached copy out of step"
                finding = trace.finding(
                    self,
                    Severity.ERROR,
                    message,
                    value=row["reread_sqnr_db"],
                    threshold=row["sqnr_db"] - self.min_reread_gap_db,
                    unit="dB",
                )
                yield replace(finding, cure=_RESCALED) if is_rescaled else finding


RULES.add(StaleWeight.code, StaleWeight())

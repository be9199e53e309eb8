"""F121: the FP8 copy of a weight, gathered or reloaded, holds other values than the weight it stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Severity
from fp8debug.rules.reading.conditions import Look, look
from fp8debug.rules.reading.prefilter import in_batches, source_of_ranks
from fp8debug.rules.reading.traces import RUNNING, traces
from fp8debug.rules.reading.weights import OffWeightRule, look_for_weights, off_weights

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_OF_TRANSPOSED = (
    "check how the transposed copy is made (transposition of FP8 data in the kernel, layout of its scales), and that each load"
    " and gather makes it anew; else BF16 for dgrad"
)
#: Where the values have the weight's size and nothing else in common with it from the first step on.
_OF_ANOTHER_PLACE = (
    "check which copy this GEMM is handed: another weight's, or its own transposed (a square weight fits both ways, as where the"
    " results of a cast are unpacked in another order) or in another shard order; compare it with fp8debug.quantize() of the"
    " weight; else BF16 for this module"
)


@dataclass(frozen=True)
class WeightCopyDiffers(OffWeightRule):
    """The FP8 parameter that was gathered or loaded is not the cast of its master weight: other values, in part or on one rank.

    What it detects
        Dequantized values, never bytes (equal values have many codes and scales). A weight of which some rows are right and
        others unrelated, as after a gather with shards missing or out of order; one that is wrong from the first step of a
        run or of a resumed part on, before an update could part them; one that is farther away at a later step than all updates
        can have moved it, where it has no direction in common with the weight or dgrad alone reads it so; or one whose FP8 values
        differ between ranks that hold the same weight. Where dgrad alone reads such a copy, the transposed one is at fault.
        Noise on the right values, from the first step on, is F128.

    Why it matters
        The GEMM multiplies by something else than the optimizer trains. Loss jumps at the reload, or ranks drift apart while
        each looks consistent in itself.

    Example
        blocks.1.mlp.up, fprop weight, e4m3fn 128x128 current: 50 % of its rows are other values at step 40, SQNR 0.1 dB.

    Cure
        Quantize the parameters from the master weights after each gather and each load; compare shard order and padding; save
        master weights, not FP8 copies; BF16 for this module until then. Of values that have the weight's size and nothing else
        of it from the first step on: look at which copy the GEMM is handed, another weight's or a transposed one.

    Thresholds
        - max_sqnr_db 27, max_cosine 0.999: as for F112; numerics.md, 4.
        - min_mixed_rows 0.03: share of sampled rows that are lost (below 10 dB), and share that is right (above 24 dB), which
          together are min_judged_rows 0.8 at least. No published basis: a stale weight drifts in all rows alike.
        - max_foreign_sqnr_db 15: at the first step of a run or resumed part. No published basis.
        - max_unrelated 0.3, max_size_error 0.5: cosine below which values of the weight's size are another tensor's or lie in
          other places, and distance of the norm ratio from 1, as the message says; independent ones have 1 / sqrt(numel).
        - max_steps_worth 4: times what all steps so far can move the weight: the RMS of a sum of updates is at most the sum
          of their RMS (closed form). One update is the largest that `updates` has of the weight; the factor is for what was
          not sampled, as in F150.
        - delayed_sqnr_db 23.5, delayed_cosine 0.998, min_coefficient 0.9, max_block_growth 4, max_noise_db 20,
          max_noise_share 0.25, max_noise_range_db 2, max_e5m2_error_db 0.6, max_e5m2_headroom 1.002,
          max_flushed_rate 0.05, min_own_cosine 0.9, max_own_scale_sqnr_db 30, max_own_scale_cosine 0.9995,
          max_own_headroom_error 0.002, max_headroom 1.25, min_elements 256, min_steps 2, warmup 8: what parts a weight that is
          not the own from other faults; as in F112, which says where they come from. Set them for both.
        - max_unit_gain 2, min_pair_cosine 0.999, max_pair_error 0.15, min_outside_cosine 0.5, min_far_cosine 0.1, far_gain 16,
          min_result_cosine 0.9, min_compensated 4: by which a scale is applied outside the GEMM or on the other operand's side;
          as in F113, which says where they come from.
        - max_rank_ratio 2: squared error of the FP8 weight on one rank over that on another, both of the same weight. No
          published basis: replicas of a healthy weight are equal to rounding.
        - Seen in Megatron-LM #2272 and #6666, PaddleFleet #1523.
    """

    code = "F121"
    name = "weight-copy-differs"
    cure = "requantize from the master weight after each gather and load (check shard order); else BF16 for this module"

    max_rank_ratio: float = 2.0

    def looks(self) -> Iterable[Look]:
        """Return the weights that are off."""
        yield look_for_weights(self)

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the weights that are those of another place."""
        for weight in off_weights(run, self):
            if weight.foreign:
                row = weight.trace.rows[0]
                which = (
                    f"the {weight.trace.gemm} weight has {row['sqnr_db']:.1f} dB at step {row['step']}, its FP8 copy is not the"
                )
                alone = (
                    "; the copy that fprop reads is right, so that the transposed one has values in other places, scales of other"
                    " blocks, or old values"
                )
                message = f"{which} cast of it: {weight.foreign}{alone if weight.is_transposed_alone else ''}"
                found = weight.trace.finding(
                    self, Severity.ERROR, message, value=row["sqnr_db"], threshold=self.max_sqnr_db, unit="dB"
                )
                cure = _OF_TRANSPOSED if weight.is_transposed_alone else _OF_ANOTHER_PLACE if weight.is_unrelated else self.cure
                yield replace(found, cure=cure)
        if len(run.ranks) > 1:
            yield from self._between_ranks(run)

    def _between_ranks(self, run: Run) -> Iterable[Finding]:
        # The rank with the largest error shows what off_weights looks for, so that all ranks of its row were kept.
        table = source_of_ranks(run, look_for_weights(self))
        if table is None:
            return
        query = (
            f"SELECT step, module, gemm, max(sum_err2) AS worst, min(sum_err2) AS best FROM {table}"
            f" WHERE {{steps}} AND {RUNNING} AND tensor = 'weight' AND replicated GROUP BY step, module, gemm, cast_name"
            " HAVING count(*) > 1 AND max(sum_x2) <= min(sum_x2) * (1 + 1e-6)"
            f" AND max(sum_err2) > {self.max_rank_ratio} * min(sum_err2)"
            f" AND max(sum_err2) > {10 ** (-self.max_sqnr_db / 10)} * max(sum_x2)"
        )
        apart = {(row["module"], row["gemm"], row["step"]): row for row in in_batches(run, query)}
        within = [(module, step) for module, _, step in apart]
        for whole in traces(run, look(["tensor = 'weight' AND replicated"], []), within) if apart else ():
            trace = whole.where(lambda row, at=whole: (at.module, at.gemm, row["step"]) in apart)  # type: ignore[misc]  # bound now
            if trace is not None:
                step = trace.rows[0]["step"]
                row = apart[trace.module, trace.gemm, step]
                ratio = row["worst"] / max(row["best"], 1e-300)
                message = (
                    f"the FP8 copies of the {trace.gemm} weight differ between ranks at step {step}: the weight is the same,"
                    f" and the squared error of one {ratio:.3g} times that of another"
                )
                yield trace.finding(self, Severity.ERROR, message, value=ratio, threshold=self.max_rank_ratio)


RULES.add(WeightCopyDiffers.code, WeightCopyDiffers())

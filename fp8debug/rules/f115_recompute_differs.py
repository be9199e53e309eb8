"""F115: the recomputation of a checkpointed forward pass quantizes with another scale than the forward pass did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8debug.metrics.limits import cast_floor_db
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


_OTHER_VALUES = (
    "make the recomputation repeat the forward pass: preserve_rng_state=True where there is dropout, the same autocast, and no"
    " data that change in between; no cast changes it"
)


@dataclass(frozen=True)
class RecomputeDiffers(Rule):
    """Activation recomputation quantizes with another scale: the backward pass reads an input that the forward pass never had.

    What it detects
        wgrad's input as the backward pass reads it after a recomputation, under scales that lie far from those which the first
        forward pass recorded for the same tensor. In a healthy run they are equal, whatever the scaling. A layer behind the
        culprit recomputes from a slightly different input; its scales hardly move. recompute-of-other-values: the recomputed
        input is not the one of the forward pass, whatever its scales: another dropout mask, another precision, data that moved.

    Why it matters
        The gradient belongs to another function than the loss. Nothing in the forward pass shows it: operands, outputs and the
        loss look clean, and the run degrades or diverges late.

    Example
        blocks.2.mlp.up, wgrad input, e4m3fn 128x1 current: recomputed with scales 2^-3.5 times those of the forward pass, 1.6 dB.

    Cure
        Keep the scale (or the FP8 data) of the forward pass for its recomputation; update amax histories once a step; or leave
        this module out of recomputation; BF16 for its wgrad.

    Thresholds
        - max_shift_log2 0.5: distance of the mean log2(scale_inv), absolute. No published basis: 0 in healthy runs with
          checkpointing, 3.5 for the planted fault; half a binade leaves room for kernels that are not deterministic.
        - min_shift_log2 0.05: of the modules that exceed it at one step the first in execution order is the culprit. The rest
          recomputed from what it gave.
        - min_reread_sqnr_db 20: of the recomputed input, in FP8, against the forward pass's; numerics.md, 4 (act below 20 of a
          result, 25 of an operand); a healthy one has that of its cast, 31 dB.
        - room_db 3: how far below the least that the cast can give the recomputed input counts, where that is less than
          min_reread_sqnr_db. A kernel that is not deterministic recomputes other roundings, twice the power of one: 4 dB
          above that least [measured].
        - warmup 8: first steps, in which a delayed scale grows between a pass and its recomputation; they count only beyond
          early_shift_log2 2.
        - Seen in TransformerEngine #1190, Megatron-DeepSpeed #302, OLMo-core #828.
    """

    code = "F115"
    name = "recompute-differs"
    needs_training = True
    columns = ("num_reread_blocks",)
    cure = "use the forward pass's scale in its recomputation; else exempt the module from recomputation; else BF16 for wgrad"

    max_shift_log2: float = 0.5
    min_shift_log2: float = 0.05
    min_reread_sqnr_db: float = 20.0
    room_db: float = 3.0
    warmup: int = 8
    early_shift_log2: float = 2.0

    def needs(self, run: Run) -> str | None:
        """Return why not: nothing was recomputed."""
        query = "SELECT 1 AS one FROM raw WHERE gemm = 'wgrad' AND num_reread_blocks > 0 LIMIT 1"
        return None if run.sql(query).num_rows else "no activation was recomputed for the backward pass"

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("reread_scale_log2", ">", self.min_shift_log2, center=0),
            Keys("gemm = 'wgrad' AND tensor = 'input'"),
            "num_reread_blocks = num_blocks",
        ]
        return look(conditions, ["reread_scale_log2", "reread_sqnr_db", "abs(reread_scale_log2) AS shift", "sqnr_db"])

    def looks(self) -> Iterable[Look]:
        """Return the inputs with another scale at the second read; one rank reads no more blocks again than it has."""
        yield self._look
        yield self._values

    @property
    def _values(self) -> Look:
        limit = Condition("reread_sqnr_db", "<", self.min_reread_sqnr_db)
        is_own = Keys("gemm = 'wgrad' AND tensor = 'input'")
        return look(
            [limit, is_own], ["reread_sqnr_db", "sqnr_db"], rows="actual AND reference = 'operand' AND num_reread_blocks > 0"
        )

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the inputs that were recomputed under another scale."""
        scaled = list(self._rescaled(run))
        yield from scaled
        if not scaled:
            yield from self._other_values(run)

    def _other_values(self, run: Run) -> Iterable[Finding]:
        """Return the first module of each pass that recomputes from other values, with those behind it as victims."""
        found = []
        for whole in traces(run, self._values):
            if whole.cast is not None and whole.cast.scaling == "current":
                limit = min(self.min_reread_sqnr_db, cast_floor_db(whole.cast) - self.room_db)
                trace = whole.where(
                    lambda row, limit=limit: (
                        row["reread_sqnr_db"] < limit  # type: ignore[misc]  # bound now
                        # What the cast itself loses, clipped under a stale scale, it loses of the same values too.
                        and (row["sqnr_db"] is None or row["reread_sqnr_db"] < row["sqnr_db"] - self.room_db)
                    )
                )
                found += [] if trace is None else [trace]
        if not found:
            return
        first = min(found, key=lambda trace: (trace.rows[0]["step"], trace.rows[0]["call_index"] or 0))
        row = first.least("reread_sqnr_db")
        message = (
            f"the wgrad input is recomputed from other values than those of the forward pass: {row['reread_sqnr_db']:.1f} dB from"
            f" them at step {row['step']}, in {len(found)} modules, of which this one runs first"
        )
        finding = first.finding(
            self, Severity.ERROR, message, value=row["reread_sqnr_db"], threshold=self.min_reread_sqnr_db, unit="dB"
        )
        victims = tuple(dict.fromkeys(trace.module for trace in found if trace.module != first.module))
        yield replace(finding, name="recompute-of-other-values", cure=_OTHER_VALUES, victims=victims)

    def _rescaled(self, run: Run) -> Iterable[Finding]:
        found = traces(run, self._look)
        first_at: dict[int, int] = {}
        for seen in found:
            for row in seen.rows:
                first_at[row["step"]] = min(row["call_index"] or 0, first_at.get(row["step"], row["call_index"] or 0))
        for whole in found:
            settled = whole.start + self.warmup
            trace = whole.where(
                lambda row, settled=settled: (
                    row["shift"]  # type: ignore[misc]  # bound now
                    > (self.max_shift_log2 if row["step"] >= settled else self.early_shift_log2)
                )
            )
            if trace is None or (trace.rows[0]["call_index"] or 0) > first_at[trace.rows[0]["step"]]:
                continue
            row = trace.worst("shift")
            sqnr = f", {row['reread_sqnr_db']:.1f} dB" if row["reread_sqnr_db"] is not None else ""
            message = (
                f"the wgrad {trace.tensor} is recomputed at step {row['step']} with scales 2^{row['reread_scale_log2']:.1f} times"
                f" those of the forward pass{sqnr}"
            )
            yield trace.finding(self, Severity.ERROR, message, value=row["shift"], threshold=self.max_shift_log2, unit="log2")


RULES.add(RecomputeDiffers.code, RecomputeDiffers())

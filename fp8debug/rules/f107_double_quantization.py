"""F107: wgrad's operand is quantized from an FP8 tile of another GEMM, so that two roundings add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import SCALES_ARE_ROUNDED, deficit_sql
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_FIRST = {"input": "fprop", "grad_output": "dgrad"}


@dataclass(frozen=True)
class DoubleQuantization(Rule):
    """An operand of wgrad carries the noise of two casts: it was quantized again from another GEMM's FP8 tile.

    What it detects
        An operand of wgrad whose SQNR lies about 3 dB below that of the same tensor in fprop (input) or dgrad (grad_output),
        in the same format, with nothing lost at either end of the range. Power-of-two scales move the exponent alone: a
        second cast then changes next to nothing, and nothing is reported, which is right.

    Why it matters
        The gradient of the weight has twice the noise that its recipe suggests, at every step. It is a leaf, so that it
        harms no other layer; some recipes do it on purpose to save a tensor's memory.

    Example
        blocks.1.mlp.up, wgrad input, e4m3fn 128x1 current: 28.9 dB, where fprop reads the same input at 32.0 dB.

    Cure
        Quantize wgrad's operand from the high-precision tensor, or use power-of-two scales (scale_rounding='pow2_ceil'); BF16
        for wgrad of this module.

    Thresholds
        - max_sqnr_db 31.2, min_sqnr_db 27: SQNR of wgrad's operand; numerics.md, 4 (E4M3 gives 31.5 to 33 dB, two casts 3 dB
          less). 6 dB less for each mantissa bit that a format has less. Below, there is more wrong than a second rounding.
        - min_gap_db 2: below the other GEMM's. No published basis: planted in small models the gap is 2.9 to 3.4 dB, healthy
          ones show at most 1.9 dB between rows and columns [measured].
        - min_headroom 1.005, max_headroom 1.15: the scale is made of a rounded amax, which lies up to 1/16 (E5M2: 1/8) off, and
          not of the tensor's own, as it is by construction where it is cast once (1 to seven digits).
        - max_lost_rate 0.02, max_subnormal_rate 0.1: share of elements that underflow, and that are subnormal; either lowers
          SQNR by itself. No published basis.
        - min_elements 1024, min_steps 2: elements, and sampled steps that show it (all, in a shorter run).
        - Seen in Transformer Engine's primer and FP8-Flow-MoE; numerics.md, 5.
    """

    code = "F107"
    name = "double-quantization"
    needs_training = True
    columns = ("sum_err2", "sum_x2", "num_underflow", "headroom")
    cure = "quantize wgrad's operand from the high-precision tensor; else scale_rounding='pow2_ceil'; else BF16 for wgrad"

    max_sqnr_db: float = 31.2
    min_sqnr_db: float = 27.0
    min_gap_db: float = 2.0
    min_headroom: float = 1.005
    max_headroom: float = 1.15
    max_lost_rate: float = 0.02
    max_subnormal_rate: float = 0.1
    min_elements: int = 1024
    min_steps: int = 2

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("headroom", ">=", self.min_headroom),
            Keys("gemm = 'wgrad' AND cast_name LIKE '% current%' AND cast_name NOT LIKE '%pow2%'"),
            f"headroom <= {self.max_headroom} AND numel >= {self.min_elements} AND NOT {SCALES_ARE_ROUNDED}",
            f"(sqnr_db + {deficit_sql()}) BETWEEN {self.min_sqnr_db} AND {self.max_sqnr_db}",
            f"coalesce(underflow_nonzero_rate, 0) < {self.max_lost_rate}",
            f"coalesce(subnormal_rate, 0) < {self.max_subnormal_rate}",
        ]
        return look(conditions, ["sqnr_db"])

    def looks(self) -> Iterable[Look]:
        """Return the operands whose scale is not of their own amax."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands of wgrad that were cast twice."""
        for whole in traces(run, self._look):
            first = self._first_reads(run, whole.module, whole.tensor, whole.cast_name.partition(" ")[0])
            trace = whole.where(lambda row, first=first: first.get(row["step"], 0.0) - row["sqnr_db"] > self.min_gap_db)  # type: ignore[misc]  # bound now
            if trace is None or not trace.lasting(min(self.min_steps, len(trace.sampled))):
                continue
            row = max(trace.rows, key=lambda row: first[row["step"]] - row["sqnr_db"])
            message = (
                f"the wgrad {trace.tensor} has {row['sqnr_db']:.1f} dB at step {row['step']}, where {_FIRST[trace.tensor]} reads"
                f" the same tensor at {first[row['step']]:.1f} dB: it is quantized twice"
            )
            yield trace.finding(
                self, Severity.WARNING, message, value=row["sqnr_db"], threshold=first[row["step"]] - self.min_gap_db, unit="dB"
            )

    def _first_reads(self, run: Run, module: str, tensor: str, number_format: str) -> dict[int, float]:
        """Return the SQNR of the same tensor in the GEMM that reads it first, by step."""
        query = (
            "SELECT step, sqnr_db FROM sites WHERE actual AND reference = 'operand' AND module = ? AND tensor = ? AND gemm = ?"
            " AND cast_name LIKE ? AND isfinite(sqnr_db)"
        )
        rows = run.sql(query, [module, tensor, _FIRST[tensor], f"{number_format} %"]).to_pylist()
        return {row["step"]: row["sqnr_db"] for row in rows}


RULES.add(DoubleQuantization.code, DoubleQuantization())

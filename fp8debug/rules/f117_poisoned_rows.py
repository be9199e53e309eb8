"""F117: rows of garbage, such as padding, share a scale with the tokens, whose rows are then lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.prefilter import bad_rows
from fp8debug.rules.reading.traces import percent, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Inputs whose rows share a scale, and the outputs that show it.
_SHARED = (
    "gemm = 'fprop' AND tensor = 'input'"
    " AND cast_name NOT LIKE '% 1x128 %' AND cast_name NOT LIKE '% 1x32 %' AND cast_name NOT LIKE '% rowwise %'"
)
_OUTPUT = "actual AND tensor = 'output' AND reference = 'shadow'"


@dataclass(frozen=True)
class PoisonedRows(Rule):
    """A few rows of huge values (padding, uninitialised memory) set the scale of all: the other rows are lost in FP8.

    What it detects
        An input of fprop that underflows under a scale which several rows share, while many rows of the output are below 10 dB
        and the output as a whole looks fine: its energy lies in few rows, and those are good. An outlier *channel* spoils
        every row alike; that is F105, which yields to this rule.

    Why it matters
        Cosine and SQNR of the whole tensor are clean or better than clean, and the tokens that count are noise: flashinfer
        #3650 had cosine 0.9997 and 1 % on GSM8K.

    Example
        blocks.1.mlp.up, fprop output: 92 % of the rows are below 10 dB at step 40, while the output as a whole has 32 dB; 92 % of
        the nonzero input underflows under one tensorwise scale.

    Cure
        Zero the padding rows before the cast, or cast without them; a scale of each row's own (granularity='1x128', 'rowwise');
        BF16 for fprop of this module.

    Thresholds
        - min_bad_rows 0.1: share of judged rows below 10 dB. No published basis: 0 in healthy runs of every recipe [measured].
        - min_sqnr_db 20: SQNR of the whole output against the shadow; numerics.md, 4 (act below 20 dB). What poisons rows
          lifts it; a fault that spoils all rows lowers it.
        - max_rate 0.05: share of the input's nonzero elements that underflow; numerics.md, 4 (act above 5 %).
        - min_rows 8: rows below 10 dB. No published basis.
    """

    code = "F117"
    name = "poisoned-rows"
    columns = ("num_bad_rows", "num_underflow")
    cure = "zero or drop the padding rows before the cast; else granularity='1x128'; else BF16 for this module's fprop"
    changes: ClassVar[Mapping[str, Any]] = {"granularity": "1x128", "scaling": "current"}

    min_bad_rows: float = 0.1
    min_sqnr_db: float = 20.0
    max_rate: float = 0.05
    min_rows: int = 8

    @property
    def _look(self) -> Look:
        return look([Condition("underflow_nonzero_rate", ">", self.max_rate), Keys(_SHARED)], ["underflow_nonzero_rate"])

    @property
    def _look_at_outputs(self) -> Look:
        conditions: Conditions = [
            Condition("bad_row_rate", ">", self.min_bad_rows),
            f"num_bad_rows >= {self.min_rows} AND sqnr_db >= {self.min_sqnr_db}",
        ]
        return look(conditions, ["bad_row_rate", "sqnr_db"], rows=_OUTPUT, keys=_OUTPUT)

    def looks(self) -> Iterable[Look]:
        """Return the inputs that underflow, and the outputs that lose rows."""
        yield self._look
        yield self._look_at_outputs

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the inputs whose rows are lost beside others."""
        lost = bad_rows(run, self._look_at_outputs)
        rows = {(row["module"], row["step"]): row for row in lost}
        for whole in traces(run, self._look):
            outputs = {step: row for (module, step), row in rows.items() if module == whole.module}
            trace = whole.where(lambda row, outputs=outputs: row["step"] in outputs)  # type: ignore[misc]  # bound now
            if trace is None:
                continue
            row = max(trace.rows, key=lambda row: float(outputs[row["step"]]["bad_row_rate"]))
            output = outputs[row["step"]]
            message = (
                f"{percent(output['bad_row_rate'])} of the output's rows are below 10 dB at step {row['step']}, while the output"
                f" as a whole has {output['sqnr_db']:.0f} dB: few rows set the scale, and"
                f" {percent(row['underflow_nonzero_rate'])} of the nonzero fprop input underflows"
            )
            yield trace.finding(self, Severity.ERROR, message, value=output["bad_row_rate"], threshold=self.min_bad_rows)


RULES.add(PoisonedRows.code, PoisonedRows())

"""F120: input or weight runs in E5M2, declared or not, where E4M3 was meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.formats import FORMATS
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import RUNNING, Trace, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_IS_E5M2 = "cast_name LIKE 'e5m2%' AND tensor IN ('input', 'weight')"  # AMD's kind too
#: Rules that blame an operand's scales.
_OF_SCALES = ("F104", "F113", "F119")
_DECLARED = look([Keys(_IS_E5M2, gate="cast_name LIKE 'e5m2%'")], ["sqnr_db"])


@dataclass(frozen=True)
class WrongFormat(Rule):
    """An input or weight runs in E5M2 where E4M3 was meant, by its name or by its noise.

    What it detects
        E5M2 declared for input or weight (an error where other modules run E4M3 at the same place, a warning where all
        of them run E5M2); or E4M3 declared and the noise of E5M2 measured: SQNR near 25.5 dB with a cosine to match,
        no underflow, nothing clipped, gain 1. AMD's formats (e4m3fnuz, e5m2fnuz) are judged alike. E5M2 for grad_output is
        the HYBRID recipe and healthy. MXFP6's E3M2 has as many mantissa bits as E5M2 and its noise, 25.6 dB, by design:
        formats of less than 8 bits are not judged here (F105, F128).

    Why it matters
        E5M2 has one mantissa bit less: 6 dB more noise in every GEMM for a range that current scaling of activations
        does not need.

    Example
        blocks.0.mlp.up, fprop input: runs e5m2 1x128 current at 25.5 dB, where 11 other modules run E4M3 at 31.5 dB.

    Cure
        format='e4m3fn' (on AMD 'e4m3fnuz') for this operand; where E4M3 is declared already, the kernel or the cached weight
        is at fault.

    Thresholds
        - max_sqnr_db 27, min_sqnr_db 24: E5M2 gives 25.55 dB on Gaussian data, E4M3 31.5 dB; numerics.md, 4 ("a 6 dB
          deficit means the wrong format"). Below 24 dB there is more wrong than the format.
        - max_cosine 0.9992: E5M2's noise gives 0.9986, E4M3's 0.99965. Values that all round to one code lose SQNR
          without losing cosine, and are healthy.
        - max_gain_error 0.01: beyond it the scale is at fault (F113).
        - min_elements 1024, min_steps 2: elements, and sampled steps at which it lasts. No published basis.
        - Seen in TransformerEngine #2754.
    """

    code = "F120"
    name = "wrong-format"
    columns = ("sum_err2", "sum_x2", "sum_xy", "sum_y2")
    cure = "format='e4m3fn' for this operand"
    changes: ClassVar[Mapping[str, Any]] = {"format": "e4m3fn"}

    max_sqnr_db: float = 27.0
    min_sqnr_db: float = 24.0
    max_cosine: float = 0.9992
    max_gain_error: float = 0.01
    min_elements: int = 1024
    min_steps: int = 2

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("sqnr_db", "<=", self.max_sqnr_db),
            Keys("cast_name LIKE 'e4m3%'"),
            f"sqnr_db >= {self.min_sqnr_db} AND cosine < {self.max_cosine} AND abs(gain - 1) < {self.max_gain_error}",
            f"numel >= {self.min_elements}",
            "coalesce(underflow_nonzero_rate, 0) < 0.01 AND coalesce(overflow_rate, 0) < 0.001",
            "coalesce(subnormal_rate, 0) < 0.2",
        ]
        return look(conditions, ["sqnr_db"])

    def looks(self) -> Iterable[Look]:
        """Return the operands that are declared E5M2, and those with its noise."""
        yield _DECLARED
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands in E5M2."""
        yield from self._declared(run)
        for trace in traces(run, self._look):
            if trace.lasting(min(self.min_steps, len(trace.sampled))):
                finding = self._finding(trace, Severity.ERROR, "is declared E4M3 and has the noise of E5M2")
                yield replace(finding, cure="check the kernel and the cached weight; else BF16 for this GEMM")

    def is_cured_by_cast(self, site: Finding, run: Run) -> bool:
        """Return whether E4M3 of this package's own casts is what was meant: not where AMD's is."""
        return not _is_of_amd(site.cast or "")

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to a weight that is not its own and to scales that are wrong: their error may pass through the band of E5M2's."""
        stale: set[tuple[str | None, str | None]] = {
            (part.module, "weight") for f in others if f.code in ("F112", "F121") for part in f.sites
        }
        stale |= {(part.module, part.tensor) for f in others if f.code in _OF_SCALES for part in f.sites}
        return any((part.module, part.tensor) not in stale for part in finding.sites)

    def _declared(self, run: Run) -> Iterable[Finding]:
        found = traces(run, _DECLARED)
        if not found:
            return
        query = f"SELECT DISTINCT gemm, tensor, module FROM sites WHERE {RUNNING} AND cast_name LIKE 'e4m3%'"
        peers = {(row["gemm"], row["tensor"], row["module"]) for row in run.sql(query).to_pylist()}
        accused = {(trace.gemm, trace.tensor, trace.module) for trace in found}
        for trace in found:
            num = sum(peer[:2] == (trace.gemm, trace.tensor) for peer in peers - accused)
            others = f"where {num} other module{'s run' if num > 1 else ' runs'} E4M3" if num else "as in every module"
            severity = Severity.ERROR if num else Severity.WARNING
            finding = self._finding(trace, severity, f"runs {trace.cast_name} {others}")
            yield replace(finding, cure="format='e4m3fnuz' for this operand") if _is_of_amd(trace.cast_name) else finding

    def _finding(self, trace: Trace, severity: Severity, what: str) -> Finding:
        known = [row["sqnr_db"] for row in trace.rows if row["sqnr_db"] is not None]
        sqnr_db = median(known) if known else None
        number = f" ({sqnr_db:.1f} dB, E4M3 gives 31.5 dB)" if sqnr_db is not None else ""
        message = f"the {trace.gemm} {trace.tensor} {what}{number}"
        return trace.finding(self, severity, message, value=sqnr_db, threshold=self.max_sqnr_db, unit="dB")


def _is_of_amd(cast_name: str) -> bool:
    found = FORMATS.get(cast_name.partition(" ")[0])
    return found is not None and found.is_unsigned_zero


RULES.add(WrongFormat.code, WrongFormat())

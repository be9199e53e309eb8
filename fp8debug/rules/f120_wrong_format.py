"""F120: an operand runs in E5M2, declared or not, where E4M3 was meant; or a gradient in E4M3 where the others run in E5M2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.formats import FORMATS, GRANULARITIES
from fp8debug.recipes import Cast
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import OF_ANOTHER_FORMAT, READ_AS_ANOTHER, READ_OR_SCALED, SCALED_FOR_ANOTHER, one_scale_db
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.misread import COLUMNS, DATA_FORMATS, Misreading, PairLimits, misreadings
from fp8debug.rules.reading.nonfinite import POISONED, first_poison, poisoned_after
from fp8debug.rules.reading.prefilter import has_cast
from fp8debug.rules.reading.traces import RUNNING, ElsewhereLimits, Trace, scaled_elsewhere, times, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_IS_E5M2 = "cast_name LIKE 'e5m2%' AND tensor IN ('input', 'weight')"  # AMD's kind too
#: Rules that blame an operand's scales.
_OF_SCALES = ("F104", "F113", "F119")
#: How much larger the maximum of a format is that holds another: the least ratio is 448 / 240, 1.87, and E4M3's kinds are one.
_WIDER_BY = 1.25
#: By a format of 8 bits and a wider one: the ratio of their largest values.
_WIDER = {
    (fmt.name, other.name): other.max / fmt.max
    for fmt in DATA_FORMATS
    for other in DATA_FORMATS
    if other.max > _WIDER_BY * fmt.max
}
_BLOCKS = " OR ".join(f"cast_name LIKE 'e5m2 {name} current%'" for name, sides in GRANULARITIES.items() if all(sides))
#: Gradients in E5M2, not AMD's kind, whose blocks have scales of their own, computed from the tensor.
_IN_BLOCKS = f"tensor = 'grad_output' AND ({_BLOCKS})"
_DECLARED = look([Keys(_IS_E5M2, gate="cast_name LIKE 'e5m2%'")], ["sqnr_db"])


@dataclass(frozen=True)
class WrongFormat(Rule, ElsewhereLimits, PairLimits):
    """An input or weight runs in E5M2 where E4M3 was meant, by its name or by its noise.

    What it detects
        E5M2 declared for input or weight (an error where other modules run E4M3 at the same place, a warning where all
        of them run E5M2); or E4M3 declared and the noise of E5M2 measured: SQNR near 25.5 dB with a cosine to match,
        no underflow, nothing clipped, gain 1. AMD's formats (e4m3fnuz, e5m2fnuz) are judged alike. E5M2 for grad_output is
        the HYBRID recipe and healthy; one of many gradients in another format than the others under the same scaling is a
        warning, whichever (not where an override names the module). Information where all gradients run in E5M2 with a
        scale per block and E4M3 would hold them as well with a single scale, by the recorded exponents of their elements: the
        range for which E5M2 gives up a mantissa bit is not needed.
        read-as-another-format: an operand far from its tensor whose codes are those of another of the four formats of 8 bits,
        read in the declared one, for each ordered pair. Between FNUZ and the other kind of one split each value is half or
        double; E4M3 read as E5M2 squares values, E5M2 read as E4M3 takes their root. The largest value, as often its scale_inv
        as on record (448, 240, 57344), names the format that the scales are made for; elements that became NaN or Inf, and
        those at the declared format's largest value, have to be where the pair's codes have them: E4M3's two largest binades
        in E5M2, FNUZ's largest code in E4M3, FNUZ's largest binade in E5M2, -0 in FNUZ. Under one scale the gain has to be that
        which the histogram gives. Formats that leave the same numbers, as scales of powers of two may have it, are listed.
        read-as-another-or-off-by-two: the same where a factor of two between the data and their scale_inv has the same numbers:
        e5m2 and e5m2fnuz, of one largest value. Where F113 finds that factor for E4M3, its message has both readings.
        scaled-for-another-format: scales of a wider format under which the cast to the declared one clips, so that more values
        are at its largest than another format's codes put there; for formats of one mantissa (448 and 240) F113 tells it.
        MXFP6's E3M2 has as many mantissa bits as E5M2 and its noise, 25.6 dB, by design:
        formats of less than 8 bits are not judged here (F105, F128).

    Why it matters
        E5M2 has one mantissa bit less: 6 dB more noise in every GEMM for a range that current scaling of activations
        does not need.

    Example
        blocks.0.mlp.up, fprop input: runs e5m2 1x128 current at 25.5 dB, where 11 other modules run E4M3 at 31.5 dB.

    Cure
        format='e4m3fn' (on AMD 'e4m3fnuz') for this operand; where E4M3 is declared already, the kernel or the cached weight
        is at fault. A gradient that differs from the others: the format that they have.

    Thresholds
        - max_sqnr_db 27, min_sqnr_db 24: E5M2 gives 25.55 dB on Gaussian data, E4M3 31.5 dB; numerics.md, 4 ("a 6 dB
          deficit means the wrong format"). Below 24 dB there is more wrong than the format.
        - max_cosine 0.9992: E5M2's noise gives 0.9986, E4M3's 0.99965. Values that all round to one code lose SQNR
          without losing cosine, and are healthy.
        - max_gain_error 0.01: beyond it the scale is at fault (F113).
        - max_underflow 0.01, max_overflow 0.001, max_subnormal 0.2: shares of the nonzero elements that are zero, of those at
          the largest value, and of those with fewer bits than the format has: beyond them the noise is the range's, not the
          format's. No published basis.
        - max_ratio_error 0.002: relative, of the largest value over its block's scale, and over the largest scale, from another
          format's largest value; FP32 scales hit it to 1e-6, scales in BF16 to 0.002. Scales of powers of two leave the range
          of their rounding, half to all of it (a quarter for pow2_amax_ceil, beyond it for pow2_floor and pow2_even).
        - max_misread_db 10: SQNR; closed form: 6 dB of half the values, 0 dB of the double, about 0 dB of roots, below of
          squares.
        - min_misread_cosine 0.1: between a tensor and its values' squares or roots, 0.92 and 0.96 of Gaussian data (closed
          form), 0.41 where one of 10^6 values is 448 times the others; chance leaves less than 0.1 from 1024 elements on.
        - max_sums_ratio 2: gain over what a histogram predicts, or its inverse: by so much a code's factor varies within a
          binade. The two kinds of E4M3 read as E5M2 differ by 4.
        - max_growth 16: of a delayed or static scale, the largest value over what the other format holds, or its inverse. No
          published basis: an amax that lags by 16 is F101's or F102's.
        - max_unit_gain 2, min_pair_cosine 0.999, max_pair_error 0.15, min_outside_cosine 0.5, min_far_cosine 0.1, far_gain 16,
          min_result_cosine 0.9, min_compensated 4: by which a scale is applied outside the GEMM or on the other operand's side,
          and its operand is left out; as in F113, which says where they come from.
        - max_share 0.34, min_modules 3: of so many modules or more, those whose gradients differ from the others'. No published
          basis.
        - min_e4m3_db 30: SQNR that E4M3 would give an E5M2 gradient under one scale; numerics.md, 4 (ok from 31, warn below 30).
        - max_steps 64: sampled steps, spread evenly, at which gradients are read for that, and the finding says so where a
          run has more. No published basis.
        - warmup 8: first steps of a run, whose gradients alone do not tell what range a training needs. As in F101.
        - min_elements 1024, min_steps 2: elements, and sampled steps at which it lasts. No published basis.
        - Seen in TransformerEngine #2754, Megatron-Bridge #638.
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
    max_underflow: float = 0.01
    max_overflow: float = 0.001
    max_subnormal: float = 0.2
    min_elements: int = 1024
    min_steps: int = 2
    max_share: float = 0.34
    min_modules: int = 3
    min_e4m3_db: float = 30.0
    max_steps: int = 64
    warmup: int = 8

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("sqnr_db", "<=", self.max_sqnr_db),
            Keys("cast_name LIKE 'e4m3%'"),
            f"sqnr_db >= {self.min_sqnr_db} AND cosine < {self.max_cosine} AND abs(gain - 1) < {self.max_gain_error}",
            f"numel >= {self.min_elements}",
            f"coalesce(underflow_nonzero_rate, 0) < {self.max_underflow} AND coalesce(overflow_rate, 0) < {self.max_overflow}",
            f"coalesce(subnormal_rate, 0) < {self.max_subnormal}",
        ]
        return look(conditions, ["sqnr_db"])

    @property
    def _misread(self) -> Look:
        names = " OR ".join(f"cast_name LIKE '{fmt.name} %'" for fmt in DATA_FORMATS)
        conditions: Conditions = [
            Condition("sqnr_db", "<", self.max_misread_db),
            Keys(f"({names})"),
            f"cosine > 0 AND headroom > 0 AND numel >= {self.min_elements}",
        ]
        return look(conditions, COLUMNS)

    def looks(self) -> Iterable[Look]:
        """Return the operands that are declared E5M2, and those with its noise or its codes."""
        yield self._misread
        yield POISONED
        yield _DECLARED
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands in E5M2."""
        yield from self._declared(run)
        yield from self._gradients(run)
        yield from self._read_as_another(run)
        for trace in traces(run, self._look):
            if trace.lasting(min(self.min_steps, len(trace.sampled))):
                finding = self._finding(trace, Severity.ERROR, "is declared E4M3 and has the noise of E5M2")
                yield replace(finding, cure="check the kernel and the cached weight; else BF16 for this GEMM")

    def is_cured_by_cast(self, site: Finding, run: Run) -> bool:
        """Return whether E4M3 of this package's own casts is what was meant: not where AMD's is."""
        return not _is_of_amd(site.cast or "")

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to a weight that is not its own and to scales that are wrong: their error may pass through the band of E5M2's."""
        if finding.name == READ_OR_SCALED:
            wrong = {(part.module, part.gemm, part.tensor) for f in others if f.name == "wrong-scale" for part in f.sites}
            return any((part.module, part.gemm, part.tensor) not in wrong for part in finding.sites)
        if finding.name in OF_ANOTHER_FORMAT:
            return True
        misread = {(part.module, part.gemm, part.tensor) for f in others if f.name in OF_ANOTHER_FORMAT for part in f.sites}
        if all((part.module, part.gemm, part.tensor) in misread for part in finding.sites):
            return False
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

    def _gradients(self, run: Run) -> Iterable[Finding]:
        """Return the gradients in another format than those of the other modules, and those that E4M3 would hold as well."""
        odd: dict[tuple[str, str], tuple[str, int]] = {}
        for gemm, by_format in _formats_of_gradients(run):
            num = sum(map(len, by_format.values()))
            usual = max(by_format, key=lambda name: len(by_format[name]))
            for name, modules in by_format.items():
                if name != usual and num >= self.min_modules and len(modules) <= self.max_share * num:
                    odd |= {(gemm, module): (usual, len(by_format[usual])) for module in modules - _named(run)}
        if odd:
            names = ", ".join("'" + module.replace("'", "''") + "'" for module in sorted({module for _, module in odd}))
            for trace in traces(run, look([Keys(f"tensor = 'grad_output' AND module IN ({names})")], ["sqnr_db"])):
                other, num = odd.get((trace.gemm, trace.module), ("", 0))
                if other and not trace.cast_name.startswith(other):
                    finding = self._finding(
                        trace,
                        Severity.WARNING,
                        f"runs {trace.cast_name}, where that of {num} other modules runs {other}",
                        beside="",
                    )
                    yield replace(finding, cure=f"format='{other}' for this gradient")
        if not has_cast(run, _IN_BLOCKS):
            return
        steps = run.sampled_steps
        num = max(1, min(self.max_steps, len(steps)))
        chosen = [steps[place * len(steps) // num] for place in range(num)]
        is_chosen = "TRUE" if len(chosen) == len(steps) else f"step IN ({', '.join(map(str, chosen))})"
        for trace in traces(run, look([Keys(_IN_BLOCKS), is_chosen], ["sqnr_db", "log2_hist", "amax", "numel"])):
            if (trace.gemm, trace.module) not in odd:
                yield from self._unneeded_range(trace, len(chosen))

    def _read_as_another(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose codes are of another format than the declared one."""
        found = traces(run, self._misread)
        is_elsewhere = scaled_elsewhere(run, found, self)
        for whole in found:
            cast = whole.cast
            if cast is None:
                continue
            known = [(row, misreadings(row, cast, self)) for row in whole.rows if not is_elsewhere(whole, row)]
            known = [(row, by) for row, by in known if by]
            trace = replace(whole, rows=tuple(row for row, _ in known))
            common = [one for one in known[0][1] if all(one in by for _, by in known)] if known else []
            if not common or not self._is_settled(run, trace):
                yield from self._scaled_for_another(whole)
                continue
            yield self._of_codes(run, trace, cast.format, common)

    def _is_settled(self, run: Run, trace: Trace) -> bool:
        """Return whether an operand is so for long enough: at the steps before the first NaN, after which nothing is sound."""
        origin = first_poison(run)
        end = math.inf if origin is None else origin.step + 1
        sound = replace(trace, sampled=tuple(step for step in trace.sampled if step < end) or trace.sampled[:1])
        return sound.lasting(min(self.min_steps, len(sound.sampled)))

    def _of_codes(self, run: Run, trace: Trace, read: str, found: Sequence[Misreading]) -> Finding:
        row, names = trace.rows[0], [one.made.name for one in found]
        size, made = row["headroom"] * FORMATS[read].max, found[0].made
        scales = f"its largest value is {size:.5g} times its scale_inv"
        if len(found) > 1:
            reason = f"{scales}: codes of another format are read as {read}, of {' or '.join(names)}"
        elif not found[0].is_proven:
            reason = (
                f"{scales} and its gain is {row['gain']:.3g}: codes of {names[0]} are read as {read}, or a factor of two lies"
                " between the cast and its scale_inv"
            )
        else:
            own = f" ({names[0]} holds {made.max:g})"
            reason = f"{scales}{own}, at gain {row['gain']:.3g}: codes of {names[0]} are read as {read}"
        if row["num_actual_nonfinite"]:
            reason += f"; {row['num_actual_nonfinite']} elements became NaN or Inf"
        message = f"the {trace.gemm} {trace.tensor} has {row['sqnr_db']:.1f} dB at step {row['step']}, and {reason}"
        finding = trace.finding(self, Severity.ERROR, message, value=row["sqnr_db"], threshold=self.max_misread_db, unit="dB")
        cure = f"tell the GEMM that the operand is {' or '.join(names)}, or cast it to {read}"
        if not found[0].is_proven:
            cure += "; else compare the factor of its cast with its scale_inv"
        finding = replace(finding, name=READ_AS_ANOTHER if found[0].is_proven else READ_OR_SCALED, cure=cure)
        if not row["num_actual_nonfinite"]:
            return finding
        victims = tuple(module for module in poisoned_after(run, finding) if module != finding.module)
        return replace(finding, origin="cast", victims=victims)

    def _scaled_for_another(self, whole: Trace) -> Iterable[Finding]:
        """Return an operand that a cast clips under scales of a wider format than the declared one."""
        fmt = FORMATS[whole.cast_name.partition(" ")[0]]
        for (name, made), ratio in _WIDER.items():
            # A scale by another maximum of formats with one mantissa is F113's.
            if name != fmt.name or " current" not in whole.cast_name or FORMATS[made].mantissa_bits == fmt.mantissa_bits:
                continue
            trace = whole.where(partial(self._has_ratio, largest=fmt.max, ratio=ratio))
            if trace is None or not trace.lasting(min(self.min_steps, len(trace.sampled))):
                continue
            row = trace.least("sqnr_db")
            message = (
                f"the {trace.gemm} {trace.tensor} has {row['sqnr_db']:.1f} dB at step {row['step']}, and its scales are made"
                f" for {made} (values {times(ratio)} times beyond what they hold in {name}): the cast to {name} clips them"
            )
            found = trace.finding(self, Severity.ERROR, message, value=row["headroom"], threshold=ratio)
            cure = f"divide the amax by the largest value of {name} ({fmt.max:g}), not by that of {made}"
            yield replace(found, name=SCALED_FOR_ANOTHER, cure=cure)
            break

    def _has_ratio(self, row: Mapping[str, Any], largest: float, ratio: float) -> bool:
        """Return whether values clip, and the largest lies a given factor beyond its scale, and beyond the largest scale too."""
        if not row["num_saturated"]:
            return False
        beyond = row["amax"] / (row["scale_inv_max"] * largest) if row["scale_inv_max"] else 0.0
        return all(abs(value / ratio - 1) <= self.max_ratio_error for value in (row["headroom"], beyond))

    def _unneeded_range(self, trace: Trace, num_steps: int) -> Iterable[Finding]:
        rows = [row for row in trace.rows if row["log2_hist"] is not None and row["amax"] and row["numel"] >= self.min_elements]
        known = [(row["step"], one_scale_db(FORMATS["e4m3fn"], row["log2_hist"], row["amax"])) for row in rows]
        num_later = sum(step >= trace.start + self.warmup for step, _ in known)
        least = min((sqnr_db for _, sqnr_db in known), default=0.0)
        if num_later < self.min_steps or least < self.min_e4m3_db:
            return
        beside = f", where E4M3 gives {least:.1f} dB with a single scale for the tensor, and no less with one per block"
        if num_steps < len(trace.sampled):
            beside += f"; looked at in {num_steps} of {len(trace.sampled)} sampled steps"
        yield self._finding(trace, Severity.INFO, f"runs {trace.cast_name}", beside=beside)

    def _finding(self, trace: Trace, severity: Severity, what: str, beside: str = ", E4M3 gives 31.5 dB") -> Finding:
        known = [row["sqnr_db"] for row in trace.rows if row["sqnr_db"] is not None]
        sqnr_db = median(known) if known else None
        number = f" ({sqnr_db:.1f} dB{beside})" if sqnr_db is not None else ""
        message = f"the {trace.gemm} {trace.tensor} {what}{number}"
        return trace.finding(self, severity, message, value=sqnr_db, threshold=self.max_sqnr_db, unit="dB")


def _formats_of_gradients(run: Run) -> list[tuple[str, dict[str, set[str]]]]:
    """Return by GEMM, and by casts that are equal but for the format, the modules whose gradient runs in each format."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for module in run.modules:
        for site, values in (module.get("casts") or {}).items():
            gemm, _, tensor = site.partition(".")
            if tensor == "grad_output" and values is not None and module.get("observed"):
                cast = Cast.from_dict(values)
                if FORMATS[cast.format].bits == 8:
                    rest = str(replace(cast, format="e4m3fn"))
                    found.setdefault((gemm, rest), {}).setdefault(cast.format, set()).add(module["fqn"])
    return [(gemm, by_format) for (gemm, _), by_format in found.items()]


def _named(run: Run) -> set[str]:
    """Return the modules that an override names, whose format is meant."""
    filters = run.manifest.get("filters")
    return {str(entry.get("pattern")) for entry in (filters if isinstance(filters, list) else ()) if isinstance(entry, dict)}


def _is_of_amd(cast_name: str) -> bool:
    found = FORMATS.get(cast_name.partition(" ")[0])
    return found is not None and found.is_unsigned_zero


RULES.add(WrongFormat.code, WrongFormat())

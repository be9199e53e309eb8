"""F103: a cast or GEMM makes NaN of finite values, as a block whose amax is 0 does without an amax eps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.formats import GRANULARITIES
from fp8debug.metrics.limits import cast_floor_db
from fp8debug.rules.base import RULES, Finding, Rule, Severity, finite
from fp8debug.rules.reading.bounds import OF_ANOTHER_FORMAT
from fp8debug.rules.reading.conditions import Condition, Look, look
from fp8debug.rules.reading.losses import read_losses
from fp8debug.rules.reading.nonfinite import (
    FP16_MAX,
    IS_POISONED,
    MAX_RESULT,
    POISONED,
    NonfiniteOrigin,
    cannot_overflow,
    counts_nonfinite,
    counts_operands,
    first_poison,
    largest_product,
    poisoned_after,
    reach,
)
from fp8debug.rules.reading.prefilter import may_have, source
from fp8debug.rules.reading.traces import Trace, times, traces
from fp8debug.types import RESULTS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_COLUMNS = ("num_actual_nonfinite", "num_zero_blocks", "num_eps_blocks", "num_blocks", "numel", "headroom", "sqnr_db")
#: The cure where the scale itself is not finite.
_LOAD = "load or compute the scale of this operand before its first use (synchronize scales with their data); else BF16 here"
#: What is found by the kind of origin, where no loss was recorded: name, cause, cure.
_FOREIGN = {
    "outside": (
        "nonfinite-from-outside",
        "no cast made it",
        "look at what lies before it: the batch, the embedding, a norm, attention; for a gradient the loss and its scale",
    ),
    "weight": (
        "nonfinite-weight",
        "it held it when the step began",
        "look at the optimizer step before: learning rate, gradient norm and clipping, optimizer state; or at the checkpoint",
    ),
}
#: Findings that values which have grown beyond every format leave too.
_OF_OVERFLOW = ("gemm-nonfinite", "nonfinite-scale")
_CLAMP = (
    "clamp to the format's largest value before the conversion (a saturating cast), and compute the scale from this tensor's own"
    " amax; else BF16 here"
)
_WRITTEN = (
    "clear this operand's buffer before its cast, and check which elements the cast writes (mask, strides, rows and columns"
    " exchanged) and what else writes there; compare its codes with fp8debug.quantize(); else BF16 for this GEMM"
)
_CACHED = (
    "cast the weight anew in each microbatch (is_first_microbatch, the weight cache off), or fill the cache before it is read;"
    " else BF16 for this module"
)
_FILLED = (
    "fill the buffers of codes and scales before the cast (torch.zeros, not torch.empty), and check that it writes the rows which"
    " hold no token (padding, what a permutation leaves out); else BF16 for this GEMM"
)


@dataclass(frozen=True)
class ZeroTileNan(Rule):
    """A block of zeros is divided by its own amax: 0 / 0 puts NaN into the FP8 data.

    What it detects
        Elements that are finite before the cast and NaN or Inf after it, in a tensor with blocks whose amax is 0 (or
        so small that max / amax is not finite). Where no block is zero and whole blocks became NaN, the scale itself is not
        finite: it was never loaded or computed (nonfinite-scale), and an amax eps changes nothing. Where values lie beyond
        what a finite scale holds, the cast does not saturate (cast-without-clamp). Where the same cast left blocks of zeros of
        another operand of the module finite, or of this one at another step, it can divide by them: nobody wrote these
        (nonfinite-unwritten), as rows of padding in a buffer that was never filled. Where a scale is finite and single elements
        are hit, their codes were never written, or something else wrote there (nonfinite-codes). The first such cast is the
        culprit; every module whose operands hold a NaN or Inf from that step on is its victim, and no rule accuses it. Zero
        blocks that stay zero are healthy. Whether the codes or the scale of a zero block are NaN shows where fewer elements than
        a block has are hit; else a dump of the operand tells, which the message names.
        A result that is NaN or Inf although both operands and their casts were finite is reported as gemm-nonfinite, unless
        the operands are so large that it overflows in every format (F125). In the backward pass, where loss scaling skips steps
        that overflow, it counts when the loss is lost too, or when the operands are too small to overflow: amax times amax times
        the length of the sum is less than half of FP16's largest value. So is the first one of a step that was not sampled,
        where the run looked there (watch's check_finite), and a result that was finite when its GEMM had run and is not when it
        leaves the module (rows never written, memory used again). Where the loss of the step was not finite before its backward
        pass began, no result of that pass is accused: F125 says so.
        Where the FP8 weight of a later microbatch is not finite, though the first one's is, its cached copy is
        (nonfinite-cached-weight).
        A result or scale that overflows within 10 steps of a loss above where it began to diverge (F127) is that divergence's
        consequence, and not reported.
        Where the first NaN came from outside the Linears, or with a weight, no cast is accused: F125 says so, and this rule in
        a run without a loss, as of inference or of an imported log (nonfinite-from-outside, nonfinite-weight). A gradient
        counts there when the next sampled step has it too: loss scaling skips single ones.

    Why it matters
        One NaN reaches the loss in the same step and every weight in the next. Zero blocks are ordinary: padding,
        unrouted experts, ReLU, masked tokens, gradients of a layer that is initialised to zero.

    Example
        blocks.1.attn.proj, fprop input, e4m3fn 1x128 current: 128 finite elements became NaN at step 40, and 1 of 512
        blocks was all zero.

    Cure
        An amax eps (1e-12, or 1e-10 if NaN stays; FP8_QUANT_*_AMAX_EPS in LoongForge), or a kernel that takes scale 1
        for a zero block; BF16 for this GEMM until then.

    Thresholds
        - max_nonfinite 0: elements made NaN or Inf; a cast of finite values may make none (numerics.md, 2). Seen in
          lmdeploy #3652, ROCm TransformerEngine #737, cache-dit #1097.
        - min_headroom 1.03: of cast-without-clamp, amax over what the scale holds: E4M3 has no Inf, and what rounds beyond 448
          (464 and more, 1.036 times) is NaN where a conversion does not saturate; in E5M2 Inf. Seen in transformers #42775.
        - divergence_steps 10: steps after a loss above where a divergence began, within which an overflow is its consequence: the
          level_steps of a divergence. No published basis.
    """

    code = "F103"
    name = "zero-tile-nan"
    needs_fp8 = False
    cure = "amax_eps=1e-12 for this operand (1e-10 if NaN stays); else BF16 for this GEMM"
    changes: ClassVar[Mapping[str, Any]] = {"amax_eps": 1e-12}

    max_nonfinite: int = 0
    min_headroom: float = 1.03
    divergence_steps: int = 10

    @property
    def _bad(self) -> Condition:
        return Condition("num_actual_nonfinite", ">", self.max_nonfinite)

    @property
    def _look(self) -> Look:
        return look([self._bad], _COLUMNS)

    def needs(self, run: Run) -> str | None:
        """Return why the rule cannot judge: nobody counted NaN and Inf."""
        return None if counts_nonfinite(run) else "not recorded: num_nan, num_inf, num_actual_nonfinite"

    def looks(self) -> Iterable[Look]:
        """Return the rows that became NaN or Inf, and those that came so."""
        yield self._look
        yield POISONED

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the casts that made NaN, or the GEMM that did, the first with its victims."""
        bad_traces = traces(run, self._look) or self._first_of_several_calls(run)
        origin = first_poison(run)
        if origin is not None and origin.kind != "cast":
            bad_traces = [trace for trace in bad_traces if trace.rows[0]["step"] < origin.step]
        found = sorted((self._finding(run, trace) for trace in bad_traces), key=lambda f: f.order)
        is_of_gemm = origin is not None and origin.kind == "gemm" and not origin.follows_loss
        if origin is not None and is_of_gemm and not found and largest_product(run, origin.row) <= MAX_RESULT:
            yield self._of_gemm(run, origin)
        if origin is not None and origin.kind in _FOREIGN and not found and not run.has("loss"):
            yield self._from_outside(origin)
        culprits = {finding.module for finding in found}
        for finding in found[:1]:
            victims = tuple(m for m in poisoned_after(run, finding) if m not in culprits)
            ranks = origin.row["ranks"] if origin is not None and origin.row["module"] == finding.module else finding.ranks
            yield replace(finding, victims=victims, origin="cast", ranks=tuple(ranks))
        yield from found[1:]

    def _first_of_several_calls(self, run: Run) -> list[Trace]:
        """Return the first poisoned operand of the run, if several calls are merged in it and one of them made the NaN.

        A module called twice in a step, or once per microbatch, may make a NaN that comes back to it as its own input.
        """
        poisoned = f"actual AND {IS_POISONED}"
        if not may_have(run, POISONED):
            return []
        query = (
            f"SELECT step, min(call_index) FILTER (WHERE num_tensors > 1 AND {self._bad.rows}) AS maker,"
            " min(call_index) FILTER (WHERE num_tensors = 1 AND gemm = 'fprop') AS single"
            f" FROM {source(run, POISONED)} WHERE {poisoned} GROUP BY step ORDER BY step LIMIT 1"
        )
        for first in run.sql(query).to_pylist():
            if first["maker"] is not None and (first["single"] is None or first["maker"] < first["single"]):
                merged = f"{poisoned} AND step = {first['step']} AND call_index = {first['maker']}"
                return traces(run, look([self._bad], _COLUMNS, rows=merged))
        return []

    def _finding(self, run: Run, trace: Trace) -> Finding:
        row = trace.rows[0]
        count, blocks = row["num_actual_nonfinite"], row["num_blocks"] or 0
        zero, tiny = row["num_zero_blocks"] or 0, row["num_eps_blocks"] or 0
        is_known = row["num_zero_blocks"] is not None
        is_beyond = not zero and not tiny and self.min_headroom < (row["headroom"] or 0.0) < math.inf
        is_scale = not zero and not tiny and not is_beyond and count >= row["numel"] // max(1, blocks)
        finite_operand = _finite_zeros(run, trace) if zero and not tiny else None
        if finite_operand is not None:
            cause = (
                f"{zero} of {blocks} blocks {'was' if zero == 1 else 'were'} all zero, and the same cast left such blocks of its"
                f" {finite_operand} finite: it can divide by them, so that these were never written (padding)"
            )
        elif zero or tiny:
            cause = f"{zero} of {blocks} blocks " + ("was" if zero == 1 else "were") + " all zero"
            cause += f" and {tiny} had an amax too small for a finite scale" if tiny else ""
        elif is_beyond:
            cause = (
                f"values lie up to {times(row['headroom'])} times beyond what their scale holds, and the cast does not saturate"
            )
        elif is_scale:
            extent = "all elements" if count == row["numel"] else "whole blocks"
            known = "no block was all zero and " if is_known else ""
            cause = f"{known}{extent} are hit, so that the scale is NaN or Inf (never loaded, or never computed)"
        elif not is_known:
            cause = "a block of zeros, the cast's kernel or its scale made them; which was not recorded"
        else:
            cause = (
                f"no block was all zero{_others(trace, row['sqnr_db'])}, so that these codes were never written, something else"
                " wrote there, or the scale of a small block is not finite"
            )
        if zero and not tiny:
            cause += _codes_or_scale(trace, row)
        elements = f"{count} finite element{'' if count == 1 else 's'}" if is_known else "finite elements"
        message = f"{elements} of the {trace.gemm} {trace.tensor} became NaN or Inf at step {row['step']}: {cause}"
        finding = trace.finding(self, Severity.ERROR, message, value=float(count), threshold=float(self.max_nonfinite))
        if is_beyond:
            return replace(finding, name="cast-without-clamp", cure=_CLAMP)
        if is_scale:
            return replace(finding, name="nonfinite-scale", cure=_LOAD)
        if finite_operand is not None:
            return replace(finding, name="nonfinite-unwritten", cure=_FILLED)
        is_of_codes = is_known and not zero and not tiny
        return replace(finding, name="nonfinite-codes", cure=_WRITTEN) if is_of_codes else finding

    def _from_outside(self, origin: NonfiniteOrigin) -> Finding:
        """Return the finding of a tensor that was not finite before its cast, in a run without a loss that F125 would judge."""
        row, (name, where, cure) = origin.row, _FOREIGN[origin.kind]
        message = f"the {row['gemm']} {row['tensor']} holds NaN or Inf before its cast since step {origin.step}: {where}"
        site = {key: row[key] for key in ("module", "gemm", "tensor")}
        return Finding(code=self.code, name=name, severity=Severity.ERROR, **site, cast=row["cast_name"],
                       steps=(origin.step, origin.step), ranks=tuple(row["ranks"]), threshold=float(self.max_nonfinite),
                       message=message, cure=cure, call_index=row["call_index"] or 0, origin="outside",
                       victims=tuple(m for m in origin.poisoned if m != row["module"]))  # fmt: skip

    def is_cured_by_cast(self, site: Finding, run: Run) -> bool:
        """Return whether an amax eps cures it: NaN of zero blocks alone."""
        return site.name == self.name

    def _of_gemm(self, run: Run, origin: NonfiniteOrigin) -> Finding:
        row = origin.row
        site = {key: row[key] for key in ("module", "gemm", "tensor")}
        name = "gemm-nonfinite"
        if _is_of_cached_weight(run, row):
            message = (
                f"the {row['gemm']} weight is finite in the first microbatch of step {origin.step} and NaN or Inf in a later one:"
                " its cached FP8 copy was never written, or something else wrote there"
            )
            name, cure, site["tensor"] = "nonfinite-cached-weight", _CACHED, "weight"
        elif origin.count is None and origin.step in run.sampled_steps:
            message = (
                f"the {row['gemm']} {row['tensor']} that leaves the module holds a NaN or Inf at step {origin.step}; operands,"
                " casts and what was read of the GEMM's result when it had run were finite: rows that the GEMM did not write,"
                " or what the module does to its result"
            )
            cure = "clear the result's buffer before this GEMM, check the rows it writes; else BF16 for this GEMM"
        elif origin.count is None:
            given = "input and weight were" if row["gemm"] == "fprop" else "grad_output was"
            known = _without_zero_blocks(run, row)
            zeros = f" (its operands had none at {known} sampled steps before; an amax eps cures it)" if known else ""
            eps = "" if known else " amax_eps=1e-12 for a block of zeros,"
            message = (
                f"the {row['gemm']} {row['tensor']} holds a NaN or Inf at step {origin.step}, which was not sampled, and {given}"
                " finite: a scale is NaN or Inf, the GEMM overflows, it leaves rows unwritten, or the cast makes NaN of a block"
                f" of zeros{zeros}"
            )
            cure = (
                f"sample step {origin.step} (every=1) to see which:{eps} a scale that is loaded or computed before its first use,"
                " a cleared result buffer for unwritten rows; else BF16 for this GEMM"
            )
        elif not counts_operands(run, row):
            message = (
                f"the {row['gemm']} {row['tensor']} holds NaN or Inf at step {origin.step}; not all its operands were recorded:"
                " they came so, their casts made it, or the GEMM did"
            )
            cure = (
                "record both operands of this GEMM (of a Transformer Engine log: their cur_amax and mse); else BF16 for this GEMM"
            )
        else:
            # An imported log tells that there are some, of a number that it does not know.
            number = "" if "nominal_numel" in run.manifest else f"{origin.count} of {row['numel']} sampled "
            why, largest = "the GEMM overflows, or its kernel is wrong", reach(run, {**row, "step": origin.step})
            if largest > FP16_MAX:
                why = (
                    f"the same GEMM in BF16 reaches {largest:.6g} there, beyond FP16's largest value, {FP16_MAX:.0f}: a result in"
                    " FP16 overflows"
                )
            if cannot_overflow(run, row):
                why = "they are too small to overflow, so that its kernel is wrong or leaves rows unwritten"
            message = (
                f"{number}elements of the {row['gemm']} {row['tensor']} are NaN or Inf at step"
                f" {origin.step}, and all operands were finite: {why}"
            )
            cure = "check this GEMM's kernel and its output's type; else BF16 for this GEMM"
            if largest > FP16_MAX:
                cure = (
                    "write this GEMM's result in BF16 (its output's type, or the autocast's); where it is in BF16, check its"
                    " kernel; else BF16 for this GEMM"
                )
        return Finding(code=self.code, name=name, severity=Severity.ERROR, **site, cast=row["cast_name"],
                       steps=(origin.step, origin.step), ranks=tuple(row["ranks"]), value=finite(origin.count),
                       threshold=float(self.max_nonfinite), message=message, cure=cure, call_index=row["call_index"] or 0,
                       origin="gemm",
                       victims=tuple(m for m in origin.poisoned if m != row["module"]))  # fmt: skip

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to what makes such values.

        Codes of another format are NaN or Inf in the declared one, and so is their GEMM's result. Values that grow without limit
        from updates out of size (F127) overflow in the end, in every format: a block of zeros does not come from that.
        """
        if finding.name in _OF_OVERFLOW and any(
            f.code == "F127"
            and f.severity > Severity.INFO
            and _is_still_up(run, f.steps[0], finding.steps[0], self.divergence_steps)
            and RULES.get(f.code).holds_beside(f, [finding, *(o for o in others if o is not f)], run)
            for f in others
        ):
            return False
        misread = [part for f in others if f.name in OF_ANOTHER_FORMAT for part in f.sites]
        explained = {(part.module, part.gemm, part.tensor) for part in misread}
        explained |= {(part.module, part.gemm, RESULTS[Gemm(part.gemm)].value) for part in misread if part.gemm}
        return any((part.module, part.gemm, part.tensor) not in explained for part in finding.sites)


def _finite_zeros(run: Run, trace: Trace) -> str | None:
    """Return an operand of the module in whose blocks of zeros the same cast left all finite; None if there is none.

    The operands of other modules say nothing: their casts may have an amax eps of their own.
    """
    query = (
        "SELECT gemm, tensor FROM sites WHERE actual AND reference = 'operand' AND module = ? AND cast_name = ?"
        " AND num_zero_blocks > 0 AND num_zero_blocks < num_blocks AND num_nan + num_inf + num_actual_nonfinite = 0"
        " ORDER BY step, gemm, tensor LIMIT 1"
    )
    found = run.sql(query, [trace.module, trace.cast_name]).to_pylist()
    return f"{found[0]['gemm']} {found[0]['tensor']}" if found else None


def _is_of_cached_weight(run: Run, row: Mapping[str, Any]) -> bool:
    """Return whether the weight of a GEMM was finite at the step's first read, and no element of it at the second one.

    The sums of the second read are over pairs of finite elements.
    """
    if not run.has("num_reread"):
        return False
    query = (
        "SELECT 1 FROM sites WHERE actual AND reference = 'operand' AND tensor = 'weight' AND module = ? AND gemm = ?"
        " AND step = ? AND num_reread > 0 AND reread_sum_x2 = 0 AND sum_x2 > 0 AND num_nan + num_inf + num_actual_nonfinite = 0"
    )
    return bool(run.sql(query, [row["module"], row["gemm"], row["step"]]).num_rows)


def _without_zero_blocks(run: Run, row: Mapping[str, Any]) -> int:
    """Return at how many sampled steps before a row's both operands of its GEMM had no block of zeros; 0 where one had.

    A cast that makes NaN of such blocks would have made it there; where they never came, one step more hardly has one.
    """
    if not run.has("num_zero_blocks"):
        return 0
    query = (
        "SELECT count(DISTINCT step) AS num, count(DISTINCT tensor) AS operands, max(num_zero_blocks) AS most FROM sites"
        " WHERE actual AND reference = 'operand' AND module = ? AND gemm = ? AND step < ? AND num_zero_blocks IS NOT NULL"
    )
    found = run.sql(query, [row["module"], row["gemm"], row["step"]]).to_pylist()[0]
    return int(found["num"]) if found["operands"] == 2 and not found["most"] else 0


def _is_still_up(run: Run, begun: int, step: int, num: int) -> bool:
    """Return whether one of so many losses before a step lies above all losses up to the step at which a divergence began."""
    losses = [(s, loss) for s, loss in zip(*read_losses(run), strict=True) if s < step and math.isfinite(loss)]
    before = [loss for s, loss in losses if s <= begun]
    after = [loss for s, loss in losses if max(begun, step - num - 1) < s]
    return bool(before and after) and max(after) > max(before)


def _codes_or_scale(trace: Trace, row: Mapping[str, Any]) -> str:
    """Return in words whether the codes or the scale of a block of zeros are NaN, or what would tell.

    A scale of NaN takes all elements of its block. No statistic holds the scales of blocks of zeros.
    """
    tile = GRANULARITIES[trace.cast.granularity] if trace.cast is not None else (None, None)
    elements = (tile[0] or 0) * (tile[1] or 0)
    if elements and row["numel"] == elements * row["num_blocks"] and row["num_actual_nonfinite"] < elements:
        return f"; fewer elements than the {elements} of a block, so that codes are NaN, and not a scale"
    return (
        "; whether codes or scales are NaN there is not in the statistics, and the tensors of"
        f" dump=['{trace.module}:{trace.gemm}:{trace.tensor}@{row['step']}'] tell"
    )


def _others(trace: Trace, sqnr_db: float | None) -> str:
    """Return in words how far the elements that stayed finite are from their tensor, where no rounding can put them there.

    A delayed or static scale that is out of date can.
    """
    if sqnr_db is None or trace.cast is None or trace.cast.scaling != "current" or sqnr_db >= cast_floor_db(trace.cast):
        return ""
    return f" and the finite elements are wrong too ({sqnr_db:.1f} dB)"


RULES.add(ZeroTileNan.code, ZeroTileNan())

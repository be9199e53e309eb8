"""Classification of an FP8 training problem into three classes; it comes before any layer is examined.

(a) The loss spikes: FP8's doing, or not. (b) It diverges: at once and everywhere (software, flags, learning rate,
warm-up), after a change of the configuration, or numerically, with an origin. (c) It is fine, and if downstream metrics
are off all the same, training and inference differ. The division is that of the NVIDIA talk which fp8debug follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import Finding, Rule, Severity
from fp8debug.rules.reading.bf16_verdict import Bf16Verdict, bf16_verdict
from fp8debug.rules.reading.changes import Change, changes_of
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.losses import OTHER_LOSS, divergence, first_nonfinite, has_other_loss, nonfinite, read_losses, spikes
from fp8debug.rules.reading.lost import Lost, in_one_sentence
from fp8debug.rules.reading.movements import movements_before
from fp8debug.rules.reading.optimizer_steps import OUT_OF_SIZE
from fp8debug.rules.reading.traces import has_fp8, is_inference, sampled_steps
from fp8debug.rules.reading.unwatched import in_words, unwatched, why_without_fp8
from fp8debug.store.read.files import CUT_SHORT

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: ``kind`` in words; (a) to (c) are the three classes of an FP8 training problem.
TITLES = {
    "loss-spike": "(a) loss spike",
    "divergence": "(b) divergence",
    "loss-fine": "no loss problem",
    "inference": "inference",
    "unknown": "unknown",
}
#: Words for losses in which no spike and no divergence was found.
FINE = "the loss is fine"
MISMATCH_TITLE = "(c) loss fine, inference off"


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The class, its cause, and why.

    Attributes:
        kind: ``loss-spike``, ``divergence``, ``loss-fine``, ``inference`` or ``unknown`` (no loss recorded).
        cause: ``fp8``, ``not-fp8``, ``undecided`` of a spike; ``at-once``, ``configuration``, ``numerical``, ``not-fp8``,
            ``undecided`` of a divergence; ``healthy``, ``not-judged`` (no FP8, or statistics that cannot be read), ``findings``,
            ``mismatch`` of a fine loss, ``incomplete`` where something was not recorded to the end; else ``no-loss``.
        what: one sentence.
        evidence: further sentences.
        step: at which the loss left its course; None when it did not.
        module: the origin; None when no layer is to blame.
        code: of the finding at the origin.
        bf16: whether BF16 would have left its course too; None where the loss did not.
        rate_jump: step at which the learning rate jumped, where that is the cause.
    """

    kind: str
    cause: str
    what: str
    evidence: tuple[str, ...] = ()
    step: int | None = None
    module: str | None = None
    code: str | None = None
    bf16: Bf16Verdict | None = None
    rate_jump: int | None = None

    @property
    def title(self) -> str:
        """The class in words."""
        return MISMATCH_TITLE if self.cause == "mismatch" else TITLES[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON values."""
        return {
            "class": self.kind,
            "title": self.title,
            "cause": self.cause,
            "what": self.what,
            "evidence": list(self.evidence),
            "step": self.step,
            "module": self.module,
            "code": self.code,
            "bf16": asdict(self.bf16) if self.bf16 else None,
        }


def at_first(classification: Classification, culprits: Sequence[Finding]) -> Classification:
    """Return the classification with the first culprit as its origin."""
    if not culprits:
        return classification
    return replace(classification, module=culprits[0].module, code=culprits[0].code)


def begun_by(step: int, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of modules that began up to a step: what a later sampled step shows may be its consequence."""
    return [f for f in findings if f.module and f.steps[0] <= step]


def first_seen_after(run: Run, step: int, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of modules that began at the first sampled step after a step that was not sampled itself."""
    until = min((s for s in sampled_steps(run) if s >= step), default=step)
    return [f for f in findings if f.module and step < f.steps[0] <= until]


def near_before(run: Run, step: int, limits: CourseLimits) -> int:
    """Return the sampled step ``near_steps`` sampled steps before a step."""
    return min([s for s in sampled_steps(run) if s <= step][-limits.near_steps :], default=step)


def course_limits(rules: Mapping[str, Rule]) -> CourseLimits:
    """Return the thresholds of the classification, which are those of F125."""
    limits = rules["F125"]
    assert isinstance(limits, CourseLimits)
    return limits


def name_of(finding: Finding) -> str:
    """Return module, code and name."""
    return f"{finding.module or 'the run'} ({finding.code} {finding.name})"


def since(finding: Finding) -> str:
    """Return the same with the first step."""
    return f"{name_of(finding)} since step {finding.steps[0]}"


def number_of(findings: Sequence[Finding]) -> str:
    """Return how many there are."""
    return f"{len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}"


#: Codes of a run whose inference differs from its training (numerics.md, 5).
MISMATCH = ("F121", "F122")

#: Of a run that diverges at its start, and what it asks for.
AT_START = "F127"
SUSPECT = "Suspect software, flags, learning rate or warm-up, not a layer"
#: What the cause of a divergence is called where the loss comes back.
_AS_SPIKE: Mapping[str, dict[str, Any]] = {
    "numerical": {"kind": "loss-spike", "cause": "fp8"},
    "not-fp8": {"kind": "loss-spike"},
    "undecided": {"kind": "loss-spike"},
}
COMPARE = "record both paths on the same tokens and compare them: fp8debug parity TRAIN ROLLOUT"


def classify(
    run: Run,
    findings: Sequence[Finding],
    rules: Mapping[str, Rule],
    comparison: Mapping[str, Any] | None = None,
    num_skipped: int = 0,
) -> Classification:
    """Return the class of a run.

    Args:
        run: the run.
        findings: all that stand, the culprit first.
        rules: by code, with the thresholds in force.
        comparison: with a baseline, if there is one.
        num_skipped: of these rules, as they lacked what they need.
    """
    harmful = [f for f in findings if f.code in rules and rules[f.code].is_harmful and f.severity > Severity.INFO]
    limits = course_limits(rules)
    steps, losses = read_losses(run)
    if is_inference(run):
        return _of_inference(run, findings, harmful, (len(rules) - num_skipped, len(rules)))
    if not steps:
        what = f"no loss was recorded; {number_of(findings)}"
        evidence = ("give the loss to watch.step(loss=loss), so that spikes and divergence are detected",)
        return at_first(Classification(kind="unknown", cause="no-loss", what=what, evidence=evidence), harmful)
    sick = first_nonfinite(losses)
    found = list(spikes(steps[:sick], losses[:sick], limits))
    diverged = None if sick is not None else divergence(steps, losses, limits)
    start = next((f for f in findings if f.code == AT_START and f.severity > Severity.INFO), None)
    exploded = next((f for f in findings if f.name == OUT_OF_SIZE and f.severity > Severity.INFO), None)
    if exploded is not None and not any(f.steps[0] < exploded.steps[0] for f in harmful if f is not exploded):
        return _exploded(run, exploded, steps, losses)
    start = start if start is not exploded else None
    if start is not None:
        what = f"{start.message}: at once and everywhere. {SUSPECT}"
        told = tuple(f"step {c.step}: {c.what}" for c in changes_of(run, limits) if c.step <= start.steps[1])
        return Classification(kind="divergence", cause="at-once", what=what, evidence=told, step=start.steps[0], code=AT_START)
    if sick is None and has_other_loss(run):
        words = f"the loss is finite, and rises and spikes are not judged: {OTHER_LOSS}"
        return _fine(run, findings, harmful, (len(rules) - num_skipped, len(rules)), words)
    if sick is not None:
        lost = nonfinite(steps, losses)
        assert lost is not None
        found_it = _divergence(run, steps[0], lost.step, lost.what, findings, harmful, limits)
        # A loss that comes back is a spike, whoever made it.
        return replace(found_it, **_AS_SPIKE.get(found_it.cause, {})) if lost.recovers_at is not None else found_it
    if diverged is not None:
        words = f"the loss rises from {diverged.best:.4g} to {diverged.last:.4g} from step {diverged.step} on and stays there"
        return _divergence(run, steps[0], diverged.step, words, findings, harmful, limits)
    if found:
        worst = max(found, key=lambda spike: (spike.loss - spike.usual) / max(spike.noise, 1e-12))
        more = f" (the largest of {len(found)} spikes)" if len(found) > 1 else ""
        return _spike(run, worst.step, f"the loss spikes at step {worst.step}{more}: {worst.size}", harmful, limits)
    if comparison is not None and comparison["diverges_at"] is not None and comparison["loss_gap"] > 0:
        return _gap(comparison, harmful)
    too_short = len(steps) <= limits.min_history
    return _fine(run, findings, harmful, (len(rules) - num_skipped, len(rules)), _few(len(steps)) if too_short else FINE)


def _few(num_losses: int) -> str:
    return f"{num_losses} loss{'' if num_losses == 1 else 'es, all'} finite, too few to tell a spike or a divergence"


def with_lost(classification: Classification, lost: Sequence[Lost]) -> Classification:
    """Return the class of a run that stopped recording something: what was not recorded cannot be ruled out as the cause."""
    if not lost:
        return classification
    what, cause = classification.what, classification.cause
    if cause == "healthy":
        loss = what.split("; ")[0]
        what, cause = f"{loss}; no rule found a fault in what was recorded", "incomplete"
    elif cause == "not-fp8" and (classification.step is None or lost[0].step <= classification.step):
        what, cause = f"{what}, or at what was not recorded", "undecided"
    return replace(classification, cause=cause, what=f"{what}; {in_one_sentence(lost)}")


def with_bf16(
    run: Run,
    classification: Classification,
    findings: Sequence[Finding],
    rules: Mapping[str, Rule],
    comparison: Mapping[str, Any] | None,
) -> Classification:
    """Return the class of a run whose loss left its course, with whether BF16 would have left it too."""
    if classification.step is None or classification.kind not in ("loss-spike", "divergence"):
        return classification
    found = bf16_verdict(run, classification.step, classification.cause, findings, comparison, course_limits(rules))
    return replace(classification, bf16=found, evidence=(*classification.evidence, found.words))


def _spike(run: Run, step: int, words: str, harmful: Sequence[Finding], limits: CourseLimits) -> Classification:
    begun = [f for f in begun_by(step, harmful) if f.steps[0] < step or any(site.gemm == "fprop" for site in f.sites)]
    near = [f for f in begun if f.severity is Severity.ERROR or f.steps[1] >= near_before(run, step, limits)]
    moved = movements_before(run, step, limits)
    changes = [c for c in changes_of(run, limits) if near_before(run, step, limits) <= c.step <= step and c.module is None]
    told = tuple(f"step {c.step}: {c.what}" for c in changes)
    base = Classification(kind="loss-spike", cause="fp8", what=words, evidence=(moved.words, *told), step=step)
    if near:
        return at_first(replace(base, what=f"{words}. FP8's doing: {since(near[0])}"), near)
    jump = None if moved.found else _rate_jump(changes, step)
    if jump is not None:
        return replace(base, cause="not-fp8", what=f"{words}. Not FP8's doing: {_change(jump)}", rate_jump=jump.step)
    later = first_seen_after(run, step, harmful)
    if later:
        return replace(
            base, cause="undecided", what=f"{words}. Whether FP8 did it is not decided: {_maybe_consequence(later[0])}"
        )
    if moved.found or not moved.steps:
        unclear = "a cast moved before it, but no rule found a fault" if moved.found else "too little was recorded before it"
        return replace(base, cause="undecided", what=f"{words}. Whether FP8 did it is not decided: {unclear}")
    return replace(base, cause="not-fp8", what=f"{words}. Not FP8's doing: look at the batch and the learning rate")


def _divergence(
    run: Run,
    first: int,
    step: int,
    words: str,
    findings: Sequence[Finding],
    harmful: Sequence[Finding],
    limits: CourseLimits,
) -> Classification:
    base = Classification(kind="divergence", cause="numerical", what=words, step=step)
    before = begun_by(step, harmful)
    sick = {name for f in before for name in (f.module, *f.also) if name}
    num_modules = len([m for m in run.modules if m["call_index"] is not None])
    is_everywhere = len(sick) >= max(2, limits.min_everywhere_share * num_modules)
    changes = [c for c in changes_of(run, limits) if near_before(run, step, limits) <= c.step <= step]
    evidence = tuple(f"step {c.step}: {c.what}" for c in changes)
    lost = next((f for f in findings if f.code == "F125" and f.severity is Severity.ERROR), None)
    ours = [c for c in changes if c.module is None]
    if step - first <= limits.at_once_steps and (is_everywhere or not before) and lost is None:
        extent = f"{len(sick)} of {num_modules} modules at once" if sick else "no layer before the others"
        what = f"{words}: at once and everywhere ({extent}). {SUSPECT}"
        return replace(base, cause="at-once", what=what, evidence=evidence)
    if ours and (is_everywhere or not before):
        return replace(base, cause="configuration", what=f"{words}, after a change: {_change(ours[-1])}", evidence=evidence)
    if lost is not None and (lost.origin == "outside" or lost.name == "nonfinite-overflow"):
        return _from_outside(base, lost, [f for f in before if f.severity is Severity.ERROR], evidence)
    if before:
        return at_first(replace(base, what=f"{words}: numerical, origin {since(before[0])}", evidence=evidence), before)
    if lost is not None:
        return replace(base, cause="undecided", what=lost.message, evidence=(*evidence, lost.cure))
    moved = movements_before(run, step, limits)
    jump = None if moved.found else _rate_jump(changes, step)
    if jump is not None:
        return replace(base, cause="not-fp8", what=f"{words}. Not FP8's doing: {_change(jump)}", rate_jump=jump.step)
    later = first_seen_after(run, step, harmful)
    if later:
        unclear = _maybe_consequence(later[0])
        return replace(base, cause="undecided", what=f"{words}; {unclear}", evidence=(*evidence, moved.words))
    cause = "undecided" if moved.found or not moved.steps else "not-fp8"
    told = "no cast shows a fault: look at the data, the learning rate and the optimizer"
    return replace(base, cause=cause, what=f"{words}; {told}", evidence=(*evidence, moved.words))


def _rate_jump(changes: Sequence[Change], step: int) -> Change | None:
    """Return a jump of the learning rate before a step: its update acts on the loss of the next one."""
    return next((change for change in changes if change.is_learning_rate and change.step < step), None)


def _maybe_consequence(finding: Finding) -> str:
    """Return in words that a finding is first seen after the loss had left its course."""
    first = finding.steps[0]
    return f"{name_of(finding)} is first seen at step {first}, the next sampled step, and may be its consequence"


def _from_outside(base: Classification, lost: Finding, before: Sequence[Finding], evidence: tuple[str, ...]) -> Classification:
    """Return the class of a first NaN or Inf that no Linear produced; errors of casts before it leave open what led to it."""
    found = replace(base, cause="not-fp8", what=lost.message, evidence=(*evidence, lost.cure))
    if not before:
        return found
    return replace(found, cause="undecided", what=f"{lost.message}; before it: {since(before[0])}")


def _exploded(run: Run, finding: Finding, steps: Sequence[int], losses: Sequence[float]) -> Classification:
    """Return the class of a run whose optimizer changes weights by as much as they are large, before any cast was at fault."""
    before = [loss for step, loss in zip(steps, losses, strict=True) if step <= finding.steps[0]]
    after = [loss for step, loss in zip(steps, losses, strict=True) if step > finding.steps[0]]
    level = before[-1] if before else None
    rises = [loss for loss in after if level is not None and not loss <= level]
    told = f"; the loss rises from {level:.4g} to {max(rises):.4g} after it" if rises and level is not None else ""
    what = f"{finding.message}{told}. Not FP8's doing: look at the optimizer"
    return Classification(kind="divergence", cause="not-fp8", what=what, evidence=(finding.cure,), step=finding.steps[0],
                          code=finding.code)  # fmt: skip


def _gap(comparison: Mapping[str, Any], harmful: Sequence[Finding]) -> Classification:
    gap, error, step = comparison["loss_gap"], comparison["loss_gap_error"], comparison["diverges_at"]
    what = f"the loss lies {gap:.3g} (+- {error:.1g}) above that of {comparison['run']}, beyond the noise from step {step} on"
    what += f": numerical, origin {name_of(harmful[0])}" if harmful else "; no rule found its origin"
    cause = "numerical" if harmful else "undecided"
    return at_first(Classification(kind="divergence", cause=cause, what=what, step=step), harmful)


def _fine(run: Run, findings: Sequence[Finding], harmful: Sequence[Finding], ran: tuple[int, int], loss: str) -> Classification:
    mismatch = [f for f in findings if f.code in MISMATCH and f.severity > Severity.INFO and f.gemm != "dgrad"]
    if mismatch:
        what = f"{loss}, and training and inference differ: {since(mismatch[0])}"
        return at_first(Classification(kind="loss-fine", cause="mismatch", what=what, evidence=(COMPARE,)), mismatch)
    advice = f"if downstream metrics are off all the same, training and inference differ: {COMPARE}"
    if not findings:
        return _nothing_found(run, ran, advice, loss)
    what = f"{loss}{' so far' if loss == FINE else ''}; {number_of(findings)}" + (
        f", first {since(harmful[0])}" if harmful else ""
    )
    return at_first(Classification(kind="loss-fine", cause="findings", what=what, evidence=(advice,)), harmful)


def _of_inference(run: Run, findings: Sequence[Finding], harmful: Sequence[Finding], ran: tuple[int, int]) -> Classification:
    """Return the class of a run of inference: what its forward passes show, and nothing about a training."""
    num_steps, num_modules = len(sampled_steps(run)), len({m["fqn"] for m in run.modules if m["call_index"] is not None})
    extent = f"{num_steps} sampled pass{'' if num_steps == 1 else 'es'}, {num_modules} module{'' if num_modules == 1 else 's'}"
    evidence = ("forward GEMMs alone were judged; to compare with the training: fp8debug parity TRAIN ROLLOUT",)
    base = Classification(kind="inference", cause="findings", what="", evidence=(*evidence, *in_words(unwatched(run))))
    if findings:
        what = f"inference; {number_of(findings)}" + (f", first {since(harmful[0])}" if harmful else "")
        return at_first(replace(base, what=what), harmful)
    if not has_fp8(run):
        what = f"inference; {_why_not_judged(run)}; {ran[0]} of {ran[1]} rules ran ({extent})"
        return replace(base, cause="not-judged", what=what)
    return replace(base, cause="healthy", what=f"inference; {ran[0]} of {ran[1]} rules ran; none found a fault ({extent})")


def _nothing_found(run: Run, ran: tuple[int, int], advice: str, loss: str) -> Classification:
    """Return the class of a run in which no rule found a fault, with what this rests on."""
    rules = f"{ran[0]} of {ran[1]} rules ran"
    num_steps, num_modules = len(sampled_steps(run)), len({m["fqn"] for m in run.modules if m["call_index"] is not None})
    extent = f"{num_steps} sampled step{'' if num_steps == 1 else 's'}, {num_modules} module{'' if num_modules == 1 else 's'}"
    unread = tuple(f"not read: {problem}" for problem in run.problems if not problem.endswith(CUT_SHORT))
    outside = tuple(in_words(unwatched(run)))
    if not has_fp8(run):
        what = f"{loss}, and {_why_not_judged(run)}; {rules}; none found a fault ({extent})"
        return Classification(kind="loss-fine", cause="not-judged", what=what, evidence=(advice, *outside, *unread))
    what = f"{loss}; {rules}; none found a fault ({extent})"
    if unread:
        what += ", and part of the run could not be read"
    return Classification(
        kind="loss-fine", cause="not-judged" if unread else "healthy", what=what, evidence=(advice, *outside, *unread)
    )


def _why_not_judged(run: Run) -> str:
    """Return why no cast of a run without rows of FP8 operands was judged."""
    why = why_without_fp8(run)
    return "no operand ran in FP8, so no cast was judged" if why is None else f"no cast was judged: {why}"


def _change(change: Change) -> str:
    return f"{change.what} at step {change.step}"

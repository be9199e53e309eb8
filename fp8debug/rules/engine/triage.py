"""``triage()``: every rule over a run, findings of one cause joined, the culprit first.

Sites of one module join into the worst of them. Modules of one code join into the first by culprit order: one wrong
cast on forty layers is one finding with 39 names in ``also``, and so are layers that share a sick input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from fp8debug.errors import RunError, UsageError
from fp8debug.rules.base import Finding, FollowingRule, Rule, Severity
from fp8debug.rules.classification import classify, course_limits, with_bf16, with_lost
from fp8debug.rules.comparison.configuration import compare
from fp8debug.rules.engine.findings import Findings
from fp8debug.rules.engine.selection import Thresholds, chosen, configured
from fp8debug.rules.reading.batches import batch_growth
from fp8debug.rules.reading.lost import losses_of
from fp8debug.rules.reading.nonfinite import SICK
from fp8debug.rules.reading.optimizer_steps import OUT_OF_SIZE
from fp8debug.rules.reading.prefilter import is_kept_whole, screen
from fp8debug.rules.reading.traces import has_fp8, is_inference, sampled_steps
from fp8debug.rules.reading.unwatched import unwatched, why_without_fp8
from fp8debug.store.read.resumed import open_runs
from fp8debug.store.read.run import Run

#: Cure of what a batch does that is far larger than the others.
_OF_BATCH = "look at the batch of that step (units, normalisation, a bad sample), or clip what the model reads; no cast helps"


def triage(
    run: Run | str | Path | Sequence[str | Path],
    baseline: Run | str | Path | None = None,
    select: Sequence[str] = ("F",),
    ignore: Sequence[str] = (),
    *,
    thresholds: Thresholds | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Findings:
    """Judge a run by every rule.

    Args:
        run: a run, its folder, or the folders of a run and its resumed parts, which count as one.
        baseline: a run (usually of BF16) to compare loss and configuration with.
        select: codes, beginnings of codes (``F10``) or names of rules to report.
        ignore: the same, not to report.
        thresholds: by rule (code or name), limits to use in place of the rule's own: ``{"F101": {"max_rate": 0.02}}``.
        progress: called before each rule with rules done, rules in all, and the rule's code.

    Returns:
        the findings, errors first, then in order of first appearance, with ``classification``, ``skipped`` and
        ``verdict``.

    Raises:
        UnknownNameError: a code that no rule begins with, or a threshold that a rule does not have.
        UsageError: no rule is left to report.
        RunError: the run cannot be read.
    """
    rules = configured(thresholds)
    wanted = chosen([select] if isinstance(select, str) else select, "select")
    wanted -= chosen([ignore] if isinstance(ignore, str) else ignore)
    if not wanted:
        raise UsageError("nothing is left to report: every rule that is selected is ignored")
    if not callable(progress) and progress is not None:
        raise UsageError(f"progress is a function of (done, all, code), got {progress!r}")
    run = run if isinstance(run, Run) else open_runs([run] if isinstance(run, str | Path) else run)
    comparison = None
    if baseline is not None:
        comparison = compare(run, baseline if isinstance(baseline, Run) else Run(baseline), course_limits(rules))
    if run.problems and not run.num_rows:
        raise RunError(f"{run.name} has no statistics that can be read: {run.problems[0]}")
    standing, reasons = judge(run, rules, progress)
    skipped = [(code, reason) for code, reason in reasons.items() if reason is not None and code in wanted]
    lost = losses_of(run)
    classification = with_lost(classify(run, standing, rules, comparison, sum(map(bool, reasons.values()))), lost)
    standing = _after_rate_jump(standing, rules, classification.rate_jump)
    return Findings(
        [finding for finding in standing if finding.code in wanted],
        run=run.name,
        steps=run.steps_range,
        skipped=skipped,
        baseline=comparison,
        classification=with_bf16(run, classification, standing, rules, comparison).to_dict(),
        lost=[one.to_dict() for one in lost],
        not_watched=[one.to_dict() for one in unwatched(run)],
        thresholds={code: rule.thresholds for code, rule in rules.items() if code in wanted},
    )


def judge(
    run: Run, rules: Mapping[str, Rule], progress: Callable[[int, int, str], None] | None = None
) -> tuple[list[Finding], dict[str, str | None]]:
    """Return the findings of some rules in culprit order, and by code the reason why a rule cannot judge.

    Args:
        run: the run.
        rules: by code.
        progress: as of :func:`triage`.
    """
    findings: list[Finding] = []
    unexplained: dict[str, list[Finding]] = {}
    is_kept_whole(run)
    reasons = {rule.code: _missing(rule, run) for rule in rules.values()}
    screen(run, [SICK, *(look for rule in rules.values() if reasons[rule.code] is None for look in rule.looks())])
    for done, rule in enumerate(rules.values()):
        if progress is not None:
            progress(done, len(rules), rule.code)
        if reasons[rule.code] is None:
            found = list(rule.check(run))
            if rule.only_unexplained:
                unexplained[rule.code] = found
            else:
                findings += _joined(found)
    known = _explained(findings)
    for found in unexplained.values():
        findings += _joined(f for f in found if (f.module, f.tensor) not in known)
    # Rules that nobody selected still bear witness: a spike is not FP8's doing only if no rule says otherwise.
    ordered = sorted(findings, key=lambda f: (f.order, f.code))
    ordered = _after_batch(mark_victims(ordered, rules, sampled_steps(run)), rules, run)
    standing = [f for f in ordered if rules[f.code].holds_beside(f, [o for o in ordered if o is not f], run)]
    return sorted(standing, key=lambda f: (f.order, f.code)), reasons


def _missing(rule: Rule, run: Run) -> str | None:
    """Return why a rule cannot judge this run; None when it can."""
    if rule.needs_training and is_inference(run):
        return "the run is of inference: it has no gradients, optimizer steps or loss"
    if rule.needs_fp8 and not has_fp8(run):
        rows = f"the run has {'what-if rows only' if run.num_rows else 'no statistics'}"
        why = why_without_fp8(run)
        return f"no operand ran in FP8: {rows}" if why is None else f"no FP8 operand was recorded: {rows}, and {why}"
    columns = [column for column in rule.columns if not run.has(column)]
    return f"not recorded: {', '.join(columns)}" if columns else rule.needs(run)


def _explained(findings: Iterable[Finding]) -> set[tuple[str | None, str | None]]:
    """Return the modules and tensors for which a rule names a cause that does harm."""
    return {(site.module, site.tensor) for f in findings if f.severity > Severity.INFO for site in f.sites}


def _joined(found: Iterable[Finding]) -> list[Finding]:
    """Join one rule's findings per site into one with ``parts``: faults apart from information, without a module each alone."""
    ordered = sorted(found, key=lambda f: f.order)
    apart = [f for f in ordered if f.module is None]
    named = [f for f in ordered if f.module is not None]
    kinds = [[f for f in named if (f.severity > Severity.INFO) is is_fault] for is_fault in (True, False)]
    return [*(_joined_parts(parts) for parts in kinds if parts), *apart]


def _joined_parts(parts: Sequence[Finding]) -> Finding:
    """Join findings per site, in culprit order, into the first module's worst."""
    first = parts[0]
    own = [f for f in parts if f.module == first.module and f.severity == first.severity]
    worst = max(own, key=_excess)
    others = {f.module: f.call_index for f in reversed(parts) if f.module and f.module != first.module}
    victims = {module: None for f in parts for module in f.victims if module != first.module and module not in others}
    return replace(
        worst,
        steps=(first.steps[0], max(f.steps[1] for f in own)),
        ranks=tuple(sorted({rank for f in own for rank in f.ranks})),
        also=tuple(sorted(others, key=lambda module: (others[module], module))),
        victims=tuple(victims),
        call_index=first.call_index,
        parts=tuple(parts) if len(parts) > 1 else (),
    )


def _excess(finding: Finding) -> tuple[bool, float]:
    """Order sites of one module: fprop before the others, then by how far the value lies from its threshold."""
    if finding.value is None or finding.threshold is None:
        return finding.gemm == "fprop", 0.0
    return finding.gemm == "fprop", abs(finding.value - finding.threshold)


def mark_victims(findings: Sequence[Finding], rules: Mapping[str, Rule], sampled: Sequence[int]) -> list[Finding]:
    """Return the findings with victims under their culprits.

    A culprit is an error that no size of its input explains (a wrong factor, a NaN, a wrong format: no
    :class:`FollowingRule`), or an optimizer whose updates are as large as the weights. A finding of a rule that does (clipping,
    underflow: too large or too small for its scale) is its victim when it begins with it or soon after, in a layer that ran
    after it; of such an optimizer, whenever it begins later. It stays in the list as information.

    Args:
        findings: in culprit order.
        rules: by code.
        sampled: the sampled steps.
    """
    culprits = [f for f in findings if f.module and f.severity is Severity.ERROR and _is_culprit(rules, f)]
    exploded = next((f for f in findings if f.name == OUT_OF_SIZE and f.severity > Severity.INFO), None)
    told: dict[int, list[str]] = {}
    result = list(findings)
    for place, finding in enumerate(findings):
        rule = rules[finding.code]
        if not finding.module or not isinstance(rule, FollowingRule):
            continue
        if exploded is not None and finding.steps[0] >= exploded.steps[0]:
            result[place] = _as_consequence(finding, f"{exploded.code} {exploded.name}")
            continue
        culprit = next((c for c in culprits if _may_cause(c, finding, sampled, rule.follow_steps)), None)
        if culprit is not None:
            result[place] = _as_consequence(finding, f"{culprit.code} at {culprit.module}")
            told.setdefault(id(culprit), []).extend((finding.module, *finding.also))
    for place, finding in enumerate(findings):
        names = [*finding.victims, *told.get(id(finding), ())]
        own = {finding.module, *finding.also}
        if id(finding) in told:
            result[place] = replace(finding, victims=tuple(dict.fromkeys(name for name in names if name not in own)))
    return result


def _as_consequence(finding: Finding, cause: str) -> Finding:
    words = f"{finding.message}; it follows {cause} and may be its consequence"
    return replace(finding, severity=Severity.INFO, message=words, parts=())


def _after_batch(findings: Sequence[Finding], rules: Mapping[str, Rule], run: Run) -> list[Finding]:
    """Return the findings, as information those that a batch far larger than the others explains.

    It has the steps of such batches alone, in a module that does not read the batch itself.
    """
    growth_at = cache(partial(batch_growth, run))
    result = []
    for finding in findings:
        rule = rules[finding.code]
        if finding.module and finding.severity > Severity.INFO and isinstance(rule, FollowingRule):
            grown = [growth_at(step) for step in sorted(set(finding.steps))]
            if all(g is not None and g.ratio >= rule.min_batch_growth and g.module != finding.module for g in grown):
                first = next(g for g in grown if g is not None)
                cause = f"the input of {first.module}, {first.ratio:.2g} times as large as before at step {finding.steps[0]},"
                finding = replace(_as_consequence(finding, cause), cure=_OF_BATCH)
        result.append(finding)
    return result


def _after_rate_jump(findings: Sequence[Finding], rules: Mapping[str, Rule], jump: int | None) -> list[Finding]:
    """Return the findings, as information those that a jump of the learning rate explains, by which the loss left its course.

    Updates were not recorded at that step, or are not of the size that F127 asks of one; with them :func:`mark_victims` says
    the same.
    """
    result = [
        _as_consequence(f, f"the jump of the learning rate at step {jump}")
        if jump is not None and f.severity > Severity.INFO and f.steps[0] > jump and isinstance(rules[f.code], FollowingRule)
        else f
        for f in findings
    ]
    return sorted(result, key=lambda f: (f.order, f.code))


def _is_culprit(rules: Mapping[str, Rule], finding: Finding) -> bool:
    return rules[finding.code].is_harmful and not isinstance(rules[finding.code], FollowingRule)


def _may_cause(culprit: Finding, finding: Finding, sampled: Sequence[int], follow_steps: int) -> bool:
    """Return whether a finding in another module begins after a culprit: in time, or in the same step by execution."""
    if culprit.module == finding.module or finding.steps[0] < culprit.steps[0]:
        return False
    soon = sum(culprit.steps[0] < step <= finding.steps[0] for step in sampled)
    if soon:
        return soon <= follow_steps
    return culprit.order[2:] < finding.order[2:]

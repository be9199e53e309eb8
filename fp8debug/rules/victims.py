"""Which findings are consequences of another: listed as victims of their culprit, and no longer accused themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fp8debug.rules.base import Finding, Rule, Severity
from fp8debug.rules.optimizer_steps import OUT_OF_SIZE

#: Sampled steps after the culprit's first within which a consequence shows. No published basis.
NEAR = 2


def with_victims(findings: Sequence[Finding], rules: Mapping[str, Rule], sampled: Sequence[int]) -> list[Finding]:
    """Return the findings with victims under their culprits.

    A culprit is an error that no size of its input explains (a wrong factor, a NaN, a wrong format: a rule that does not
    ``follow``), or an optimizer whose updates are as large as the weights. A finding of a rule that does (clipping,
    underflow: too large or too small for its scale) is its victim when it begins with it or soon after, in a layer that ran
    after it; of such an optimizer, whenever it begins later. It stays in the list as information.

    Args:
        findings: in culprit order.
        rules: by code.
        sampled: the sampled steps.
    """
    culprits = [f for f in findings if f.module and f.severity is Severity.ERROR and _is_culprit(rules, f)]
    exploded = next((f for f in findings if f.name == OUT_OF_SIZE), None)
    told: dict[int, list[str]] = {}
    result = list(findings)
    for place, finding in enumerate(findings):
        if not finding.module or not rules[finding.code].follows:
            continue
        if exploded is not None and finding.steps[0] >= exploded.steps[0]:
            words = f"{finding.message}; it follows {exploded.code} {exploded.name} and may be its consequence"
            result[place] = replace(finding, severity=Severity.INFO, message=words, parts=())
            continue
        culprit = next((c for c in culprits if _may_cause(c, finding, sampled)), None)
        if culprit is not None:
            words = f"{finding.message}; it follows {culprit.code} at {culprit.module} and may be its consequence"
            result[place] = replace(finding, severity=Severity.INFO, message=words, parts=())
            told.setdefault(id(culprit), []).extend((finding.module, *finding.also))
    for place, finding in enumerate(findings):
        names = [*finding.victims, *told.get(id(finding), ())]
        own = {finding.module, *finding.also}
        if id(finding) in told:
            result[place] = replace(finding, victims=tuple(dict.fromkeys(name for name in names if name not in own)))
    return result


def _is_culprit(rules: Mapping[str, Rule], finding: Finding) -> bool:
    return rules[finding.code].is_harmful and not rules[finding.code].follows


def _may_cause(culprit: Finding, finding: Finding, sampled: Sequence[int]) -> bool:
    """Tell whether a finding in another module begins after a culprit: in time, or in the same step by execution."""
    if culprit.module == finding.module or finding.steps[0] < culprit.steps[0]:
        return False
    soon = sum(culprit.steps[0] < step <= finding.steps[0] for step in sampled)
    if soon:
        return soon <= NEAR
    return culprit.order[2:] < finding.order[2:]

"""Difference of two paths between the head's output and the logits: a cap (softcap), a factor or a temperature in one of them.

A path has logits of its own where its model changes what the head gives; else the head's output is its logits. Logits that
differ by a number for each token are equal: softmax gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fp8debug.escaping import one_line
from fp8debug.parity.dump import PathDump, aligned, sampled
from fp8debug.parity.logprobs import HEADS, Logits, head_of, logits_of
from fp8debug.parity.measures import Measures, nmse
from fp8debug.parity.rules import KernelDiffers, PathFinding

Array = np.ndarray[Any, Any]
#: Tokens whose logits are compared.
MAX_TOKENS = 64
#: Caps that are tried, and steps between them.
_LEAST_CAP, _LARGEST_CAP, _STEPS = 1.0, 200.0, 200
#: What a cap or a factor may leave of the square of the logits: 1 % of their size.
_MAX_REST = 1e-4
#: What rounding leaves; times as much nothing leaves as a cap or a factor (capping in BF16 rounds three times).
_ROUNDING, _MIN_BETTER = 1e-6, 2.0
_PATHS = ("training", "rollout")
_SMALL = "by too little to tell a cap or a factor from rounding"
_NOTHING, _OTHER = "takes the head's output", "makes other logits of the head's output, by no cap and no factor"


def judge_logits(
    findings: list[PathFinding],
    ours: PathDump,
    theirs: PathDump,
    modules: Sequence[Measures],
    rule: KernelDiffers,
    problems: list[str],
) -> list[PathFinding]:
    """Return the findings with one where the heads agree and the logits do not, and without that of a head whose logits agree.

    An engine's head may give the logits that the other path's model makes of its head's output.

    Args:
        findings: of the modules.
        ours: training's path.
        theirs: the rollout's.
        modules: in execution order.
        rule: whose limits hold.
        problems: takes a line where something cannot be read.
    """
    head = next((m for m in reversed(modules) if m.module.rpartition(".")[2] in HEADS), None)
    if head is None:
        return findings
    try:
        pair = _rows(logits_of(ours), logits_of(theirs), ours, theirs)
        difference = None if pair is None else nmse(*(x - x.mean(1, keepdims=True) for x in pair))
        if pair is None or difference is None:
            return findings
        has_own = [bool(dump.numbers.get("logits")) for dump in (ours, theirs)]
        limit = max(rule.max_same, rule.max_growth * (head.input or 0.0))
        if difference <= limit:
            return _without(findings, head.module) if has_own[0] != has_own[1] else findings
        is_judged = any(_is_of_output(f, head.module) for f in findings)
        if not is_judged and difference <= rule.max_growth * (head.output or 0.0):
            return findings
        changes = _changes(pair, has_own, ours, theirs)
    except (OSError, ValueError, KeyError) as error:
        problems.append(f"logits cannot be read: {one_line(str(error))}")
        return findings
    if is_judged and (_OTHER in changes or changes == [_NOTHING, _NOTHING]):
        return findings  # of the head itself
    told = " and ".join(f"the {path} {text}" for path, text in zip(_PATHS, changes, strict=True))
    told = _SMALL if changes == [_NOTHING, _NOTHING] else told
    text = f"the logits differ by {difference:.2g} of their square, beyond what differs before {head.module} gives them: {told}"
    cure = "give both paths one final_logit_softcapping, logits scale and temperature"
    where = {"module": head.module, "theirs": head.theirs, "tensor": "logits"}
    found = rule.found(text, **where, value=difference, threshold=limit, cure=cure)
    return [*_without(findings, head.module), found]


def _is_of_output(finding: PathFinding, head: str) -> bool:
    return finding.module == head and finding.tensor not in ("weight", "bias")


def _without(findings: list[PathFinding], head: str) -> list[PathFinding]:
    """Return the findings without those of a head's output."""
    kept = []
    for finding in findings:
        if not _is_of_output(finding, head):
            kept.append(finding)
        elif finding.also:
            kept.append(replace(finding, module=finding.also[0], theirs=None, also=finding.also[1:]))
    return kept


def _rows(first: Logits | None, second: Logits | None, ours: PathDump, theirs: PathDump) -> tuple[Array, Array] | None:
    """Return the logits of the same tokens, in FP64; None where they are not finite or do not correspond."""
    if first is None or second is None or first.columns != second.columns:
        return None
    rows = aligned(ours, theirs)
    if rows is None:
        if first.number != second.number:
            return None
        rows = np.arange(first.number), np.arange(first.number)
    if not len(rows[0]) or first.number <= rows[0].max() or second.number <= rows[1].max():
        return None
    places = sampled(rows[0], MAX_TOKENS)
    a, b = first.rows(rows[0][places]), second.rows(rows[1][places])
    return (a, b) if np.isfinite(a).all() and np.isfinite(b).all() else None


def _changes(pair: tuple[Array, Array], has_own: list[bool], ours: PathDump, theirs: PathDump) -> list[str]:
    """Return what each path makes of the output of a head: of its own where it has logits beside it, else of the other's."""
    heads = _rows(head_of(ours), head_of(theirs), ours, theirs)
    if heads is None:
        return [_OTHER, _OTHER]
    of_ours = heads[0] if has_own[0] or not has_own[1] else heads[1]
    of_theirs = heads[1] if has_own[1] or not has_own[0] else heads[0]
    if not any(has_own):  # one of both heads may give what the other's model would make of it
        of_theirs = heads[0]
    return [_change(x, y) for x, y in zip((of_ours, of_theirs), pair, strict=True)]


def _change(x: Array, y: Array) -> str:
    """Return the cap or factor by which one is the other; nothing where they explain no more than rounding."""
    factor = float((x * y).sum() / (x * x).sum())
    cap = min(np.geomspace(_LEAST_CAP, _LARGEST_CAP, _STEPS).tolist(), key=lambda c: _rest(c * np.tanh(x / c), y))
    cap = min((cap * np.linspace(0.97, 1.03, 61)).tolist(), key=lambda c: _rest(c * np.tanh(x / c), y))
    rests = {f"caps it at {cap:.3g}": _rest(cap * np.tanh(x / cap), y), f"multiplies it by {factor:.3g}": _rest(factor * x, y)}
    text, rest = min(rests.items(), key=lambda item: item[1])
    same = _rest(x, y)
    if same <= _MAX_REST and (same <= _MIN_BETTER * rest or same <= _ROUNDING):
        return _NOTHING
    return text if rest <= _MAX_REST else _OTHER


def _rest(x: Array, y: Array) -> float:
    error = nmse(y, x)
    return float("inf") if error is None else error

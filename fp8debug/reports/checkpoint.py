"""A checked checkpoint as SARIF, as GitHub workflow commands, and as one page of HTML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from fp8debug import __version__
from fp8debug.checkpoints import CHECKS, CheckReport, TensorFinding
from fp8debug.reports.github import COMMANDS, command_line
from fp8debug.reports.page import MAX_CARDS, badge, bullets, document, manual_page
from fp8debug.reports.sarif import LEVELS, SCHEMA, describe

#: The base against which the checkpoint's files are named.
BASE = "CHECKPOINT"
#: Names and tensors that a page lists.
MAX_NAMES, MAX_ROWS = 200, 2_000


def to_sarif(report: CheckReport) -> str:
    """Return the log file of one checkpoint; a finding's place is its file and, as a logical location, its tensor."""
    asked = [rule for rule in CHECKS if rule.code in report.thresholds]
    places = {rule.code: place for place, rule in enumerate(asked)}
    run = {
        "tool": {"driver": {"name": "fp8debug", "version": __version__, "rules": [describe(rule) for rule in asked]}},
        "automationDetails": {"id": f"fp8debug-check/{report.checkpoint}"},
        "originalUriBaseIds": {BASE: {"description": {"text": f"The folder of the checkpoint {report.checkpoint}."}}},
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {"level": "note", "message": {"text": f"skipped {code}: {reason}"}, "associatedRule": {"id": code}}
                    for code, reason in report.skipped
                ],
            }
        ],
        "results": [_result(finding, places[finding.code]) for finding in report],
        "columnKind": "unicodeCodePoints",
        "properties": {"verdict": report.verdict, "layouts": report.layouts, "against": report.against},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _result(finding: TensorFinding, place: int) -> dict[str, Any]:
    identity = json.dumps((finding.code, finding.name, finding.tensor, finding.file))
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": place,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.message}. Cure: {finding.cure}."},
        "locations": [_location(finding.file, finding.tensor)],
        "partialFingerprints": {"fp8debugTensor/v1": hashlib.sha256(identity.encode()).hexdigest()},
        "properties": finding.to_dict(),
    }
    if finding.also:
        result["relatedLocations"] = [
            {"id": number, "message": {"text": "same cause"}, **_location(None, name)} for number, name in enumerate(finding.also)
        ]
    return result


def _location(file: str | None, tensor: str | None) -> dict[str, Any]:
    location: dict[str, Any] = {}
    if file is not None:
        location["physicalLocation"] = {"artifactLocation": {"uri": file, "uriBaseId": BASE}}
    if tensor is not None:
        location["logicalLocations"] = [{"name": tensor.rpartition(".")[2], "fullyQualifiedName": tensor, "kind": "member"}]
    return location


def _others(finding: TensorFinding) -> str:
    """Return the tensors with the same cause, of very many the first."""
    rest = len(finding.also) - MAX_NAMES
    return ", ".join(finding.also[:MAX_NAMES]) + (f" and {rest} more in the JSON" if rest > 0 else "")


def to_github(report: CheckReport) -> str:
    """Return one workflow command per finding, after one for the summary."""
    lines = [command_line("notice", f"fp8debug check {report.checkpoint}", f"{report.verdict}: {report.summary}")]
    for finding in report:
        where = finding.tensor or finding.file or report.checkpoint
        also = f"\nalso: {_others(finding)}" if finding.also else ""
        text = f"{where}: {finding.message}\ncure: {finding.cure}{also}"
        lines.append(command_line(COMMANDS[finding.severity], f"{finding.code} {finding.name} in {where}", text))
    return "".join(f"{line}\n" for line in lines)


def to_html(report: CheckReport) -> str:
    """Return the page: verdict, findings with their manual pages, every weight's numbers."""
    number = f"{len(report)} finding{'' if len(report) == 1 else 's'}"
    cards = "".join(_card(finding) for finding in report[:MAX_CARDS]) or "<p>None.</p>"
    skipped = bullets(f"{code}: {reason}" for code, reason in report.skipped) or "<p>None.</p>"
    rest = len(report.not_judged) - MAX_NAMES
    not_judged = bullets(f"{name}: {reason}" for name, reason in report.not_judged[:MAX_NAMES])
    not_judged += f"<p>and {rest} more in the JSON</p>" if rest > 0 else ""
    body = [
        f"<header><h1>{badge(report.verdict)} {escape(report.checkpoint)}</h1>"
        f"<p class='muted'>{escape(number)} · {escape(report.summary)}</p></header>",
        f"<section><h2>Findings</h2>{cards}</section>",
        _weights(report),
        f"<section class='panel'><details><summary>Rules skipped ({len(report.skipped)})</summary>{skipped}</details>"
        f"<details><summary>Tensors not judged ({len(report.not_judged)})</summary>{not_judged}</details></section>"
        f"<footer class='muted'>fp8debug {escape(__version__)}</footer>",
    ]
    return document(f"{report.checkpoint}: {report.verdict}", body)


def _card(finding: TensorFinding) -> str:
    facts = {"file": finding.file, "layout": finding.layout, "same cause": _others(finding)}
    rows = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    return (
        f"<article class='panel {escape(str(finding.severity))}'><h3>{badge(str(finding.severity))} {escape(finding.code)}"
        f" {escape(finding.name)} <code>{escape(finding.tensor or finding.file or '')}</code></h3>"
        f"<p class='lead'>{escape(finding.message)}.</p><p><b>Cure.</b> {escape(finding.cure)}.</p>"
        f"<dl>{rows}</dl>{manual_page(CHECKS.get(finding.code))}</article>"
    )


def _weights(report: CheckReport) -> str:
    entries: list[Mapping[str, Any]] = report.to_dict()["weights"]
    columns = ["tensor", "layout", "format", "granularity", "rms"]
    if report.against is not None:
        columns += ["gain", "sqnr_db", "ideal_sqnr_db", "worst_block_sqnr_db", "num_bad_blocks"]
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = "".join(f"<tr>{''.join(f'<td>{_cell(e[c])}</td>' for c in columns)}</tr>" for e in entries[:MAX_ROWS])
    more = f"<p>and {len(entries) - MAX_ROWS} more in the JSON</p>" if len(entries) > MAX_ROWS else ""
    return (
        f"<section class='panel'><details><summary>Quantized weights ({len(entries)})</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}</details></section>"
    )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else escape(str(value))

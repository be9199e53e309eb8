"""A comparison of two paths as SARIF, as GitHub workflow commands, and as one page of HTML."""

from __future__ import annotations

import hashlib
import json
from html import escape
from typing import Any

from fp8debug import __version__
from fp8debug.parity.report import ParityReport, row
from fp8debug.parity.rules import PATHS, PathFinding
from fp8debug.reports.github import COMMANDS, command_line
from fp8debug.reports.page import MAX_CARDS, badge, bullets, document, manual_page
from fp8debug.reports.sarif import LEVELS, SCHEMA, describe

#: Modules that a page lists, and notes that are workflow commands.
MAX_ROWS, MAX_NOTES = 2_000, 20


def to_sarif(report: ParityReport) -> str:
    """Return the log file; a finding's place is its module as a logical location."""
    places = {rule.code: place for place, rule in enumerate(PATHS)}
    run = {
        "tool": {"driver": {"name": "fp8debug", "version": __version__, "rules": [describe(rule) for rule in PATHS]}},
        "automationDetails": {"id": f"fp8debug-parity/{report.train}/{report.rollout}"},
        "results": [_result(finding, places[finding.code]) for finding in report],
        "columnKind": "unicodeCodePoints",
        "properties": {"verdict": report.verdict, "metrics": report.to_dict()["metrics"], "problems": report.problems},
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _result(finding: PathFinding, place: int) -> dict[str, Any]:
    identity = json.dumps((finding.code, finding.name, finding.module))
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": place,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.message}. Cure: {finding.cure}."},
        "partialFingerprints": {"fp8debugModule/v1": hashlib.sha256(identity.encode()).hexdigest()},
        "properties": finding.to_dict(),
    }
    if finding.module is not None:
        name = finding.module.rpartition(".")[2]
        result["locations"] = [
            {"logicalLocations": [{"name": name, "fullyQualifiedName": finding.module, "kind": "module"}]},
        ]
    return result


def to_github(report: ParityReport) -> str:
    """Return one workflow command per finding, after one for the summary."""
    title = f"fp8debug parity {report.train} {report.rollout}"
    lines = [command_line("notice", title, f"{report.verdict}: {report.summary}")]
    for finding in report:
        also = f"\nalso: {', '.join(finding.also)}" if finding.also else ""
        where = f" in {finding.module}" if finding.module else ""
        text = f"{finding.message}\ncure: {finding.cure}{also}"
        lines.append(command_line(COMMANDS[finding.severity], f"{finding.code} {finding.name}{where}", text))
    lines += [command_line("notice", title, f"note: {problem}") for problem in report.problems[:MAX_NOTES]]
    return "".join(f"{line}\n" for line in lines)


def to_html(report: ParityReport) -> str:
    """Return the page: verdict, findings with their manual pages, every module's numbers in execution order."""
    cards = "".join(_card(finding) for finding in report[:MAX_CARDS]) or "<p>None.</p>"
    unmatched = bullets(f"{name} ({path} alone)" for name, path in report.unmatched[:200])
    body = [
        f"<header><h1>{badge(report.verdict)} {escape(report.train)} and {escape(report.rollout)}</h1>"
        f"<p class='muted'>{escape(report.summary)}</p></header>",
        f"<section><h2>Findings</h2>{cards}</section>",
        _modules(report),
        f"<section class='panel'><details><summary>Modules of one path alone ({len(report.unmatched)})</summary>{unmatched}"
        f"</details><details><summary>Notes ({len(report.problems)})</summary>{bullets(report.problems)}</details></section>"
        f"<footer class='muted'>fp8debug {escape(__version__)}</footer>",
    ]
    return document(f"{report.train} and {report.rollout}: {report.verdict}", body)


def _card(finding: PathFinding) -> str:
    facts = {"in the rollout": finding.theirs, "same cause": ", ".join(finding.also[:200])}
    rows = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    return (
        f"<article class='panel {escape(str(finding.severity))}'><h3>{badge(str(finding.severity))} {escape(finding.code)}"
        f" {escape(finding.name)} <code>{escape(finding.module or '')}</code></h3>"
        f"<p class='lead'>{escape(finding.message)}.</p><p><b>Cure.</b> {escape(finding.cure)}.</p>"
        f"<dl>{rows}</dl>{manual_page(PATHS.get(finding.code))}</article>"
    )


def _modules(report: ParityReport) -> str:
    columns = ("module", "input_nmse", "output_nmse", "weight_nmse", "error_train", "error_rollout", "routing_flip_rate")
    head = "".join(f"<th>{name}</th>" for name in columns)
    entries = [row(one) for one in report.modules[:MAX_ROWS]]
    rows = "".join(f"<tr>{''.join(f'<td>{_cell(e[c])}</td>' for c in columns)}</tr>" for e in entries)
    return (
        f"<section class='panel'><details open><summary>Modules in execution order ({len(report.modules)})</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></details></section>"
    )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else escape(str(value))

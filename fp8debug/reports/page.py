"""A run's verdict as one self-contained page of HTML, to attach to a ticket: no network, no script, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from fp8debug import __version__
from fp8debug.reports.evidence import charts_of, loss_chart
from fp8debug.reports.style import CSS
from fp8debug.rules import RULES, Finding, Findings, Severity
from fp8debug.rules.base import Documented, asks_for_cast
from fp8debug.rules.comparison.configuration import configuration_words, gap_words
from fp8debug.rules.reading.lost import Lost
from fp8debug.store.read.module_names import folded_words
from fp8debug.store.read.run import Run

WORDS = {"error": "✖ error", "warning": "▲ warning", "info": "● info", "ok": "✔ ok"}
#: The three classes of an FP8 training problem, and "class" of the classification.
CLASSES = (
    ("loss-spike", "(a) The loss spikes", "Is it FP8's doing or not? A spike of the data leaves every cast as it was before."),
    (
        "divergence",
        "(b) The loss diverges",
        "At once and everywhere (software, flags, learning rate, warm-up), after a change of the configuration, or"
        " numerically, with one layer as its origin.",
    ),
    (
        "loss-fine",
        "(c) The loss is fine",
        "If downstream metrics are off all the same, training and inference differ: compare the trained weights in BF16"
        " and in FP8.",
    ),
)
#: Steps at which the loss is marked on a wide and on a narrow page, and findings whose cures are listed first.
MAX_MARKS, MAX_MARKS_NARROW, MAX_STEPS = 12, 6, 3
#: Findings drawn in full; the rest are in the table.
MAX_CARDS = 40


def to_html(run: Run, findings: Findings) -> str:
    """Return the page.

    Args:
        run: the run that was judged.
        findings: what triage found in it.
    """
    body = [*verdict_sections(run, findings), *finding_sections(run, findings), appendix(run, findings)]
    return document(f"{findings.run}: {findings.verdict}", body)


def verdict_sections(run: Run, findings: Findings, baseline: Run | None = None) -> list[str]:
    """Return the sections that a reader needs first: verdict, class of the problem, what to do, loss.

    Args:
        run: the run.
        findings: in it.
        baseline: a run whose loss is drawn beside it.
    """
    classification = _classification(findings.classification or {})
    return [_header(run, findings), classification, _todo(findings), loss_section(run, findings, baseline)]


def finding_sections(run: Run, findings: Findings) -> list[str]:
    """Return the findings with their evidence, and the comparison with the baseline that they were made with."""
    return [_findings(run, findings), _unwatched(findings), _baseline(findings.baseline, findings.thresholds.get("F125"))]


def document(title: str, body: Iterable[str]) -> str:
    """Return a page without network and scripts.

    Args:
        title: plain text.
        body: its sections, HTML.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
base-uri 'none'; form-action 'none'">
<title>{escape(title)} - fp8debug</title>
<style>{CSS}</style>
</head>
<body>
<main>
{"".join(body)}
</main>
</body>
</html>
"""


def badge(word: str) -> str:
    """Return a severity as a badge."""
    return f"<span class='badge {escape(word)}'>{escape(WORDS.get(word, word))}</span>"


def _header(run: Run, findings: Findings) -> str:
    first, last = findings.steps
    number = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
    facts = [number, f"steps {first} to {last}", *_facts(run)]
    return (
        f"<header><h1>{badge(findings.verdict)} {escape(findings.run)}</h1>"
        f"<p class='muted'>{escape(' · '.join(facts))}</p>"
        + "".join(f"<p class='lead'>{escape(str(Lost(**entry)))}.</p>" for entry in findings.lost)
        + "</header>"
    )


def _facts(run: Run) -> list[str]:
    environment, recipe = run.manifest.get("environment"), run.manifest.get("recipe")
    known = environment if isinstance(environment, Mapping) else {}
    facts = [f"{len(run.ranks)} ranks"] if len(run.ranks) > 1 else []
    facts += [f"recipe {recipe.get('name')}"] if isinstance(recipe, Mapping) else []
    facts += [f"torch {known['torch']}"] if "torch" in known else []
    facts += [str(known["device"])] if "device" in known else []
    return [*facts, f"recorded {run.manifest['created']}"] if "created" in run.manifest else facts


def _classification(classification: Mapping[str, Any]) -> str:
    if not classification:
        return ""
    kind = classification["class"]
    title = f"Class: {classification['title']}"
    evidence = bullets(classification["evidence"])
    here = {name: " class='here'" for name, _, _ in CLASSES if name == kind}
    rows = "".join(f"<li{here.get(name, '')}><b>{escape(word)}.</b> {escape(text)}</li>" for name, word, text in CLASSES)
    return (
        f"<section class='panel'><h2>{escape(title)}</h2><p class='lead'>{escape(classification['what'])}.</p>{evidence}"
        "<details><summary>The three classes of an FP8 training problem</summary>"
        f"<ul class='classes'>{rows}</ul></details></section>"
    )


def _unwatched(findings: Findings) -> str:
    """Return what was not watched, where the evidence of the class does not say so already."""
    told = (findings.classification or {}).get("evidence", ())
    lines = [entry["text"] for entry in findings.not_watched if not any(line.endswith(entry["text"]) for line in told)]
    return f"<section class='panel'><h2>Not watched</h2>{bullets(lines)}</section>" if lines else ""


def _todo(findings: Findings) -> str:
    steps = []
    accused = [f for f in findings if f.severity > Severity.INFO] or list(findings[:1])
    for finding in accused[:MAX_STEPS]:
        where = f" in <code>{escape(finding.module)}</code>" if finding.module else ""
        steps.append(f"<b>{escape(finding.code)}</b>{where}: {escape(finding.cure)}.")
    if len(accused) > MAX_STEPS:
        more = len(accused) - MAX_STEPS
        steps.append(f"Then the cures of {more} more finding{'' if more == 1 else 's'}, below.")
    if accused:
        steps.append(f"Read the cause: <code>fp8debug explain {escape(accused[0].code)}</code>.")
    if any(asks_for_cast(site) for f in accused for site in f.sites):
        steps.append("List what to run in another cast or in BF16, with its price: <code>fp8debug fallback RUN</code>.")
    if not steps:
        asked = len(findings.thresholds)
        steps.append(f"Nothing: {asked - len(findings.skipped)} of {asked} rules ran; none found a fault.")
    return f"<section class='panel'><h2>What to do now</h2><ol>{''.join(f'<li>{step}</li>' for step in steps)}</ol></section>"


def loss_section(run: Run, findings: Findings, baseline: Run | None = None) -> str:
    """Return the section of the loss: one chart for a wide page, one for a narrow one."""
    chart = loss_chart(run, findings, baseline)
    if chart is None:
        return "<section class='panel'><h2>Loss</h2><p class='muted'>not recorded</p></section>"
    sizes = (("wide", MAX_MARKS, chart), ("narrow", MAX_MARKS_NARROW, replace(chart, width=430, height=220)))
    drawn = [
        f"<div class='{name}'>{replace(sized, marks=sized.marks[:most]).to_svg()}{_marked(len(sized.marks), most)}</div>"
        for name, most, sized in sizes
    ]
    return f"<section class='panel'><h2>Loss</h2>{''.join(drawn)}</section>"


def _marked(num: int, most: int) -> str:
    """Return what the lines of a chart are, and how many are not drawn."""
    if not num:
        return ""
    few = f" The first {most} of {num} such steps are marked." if num > most else ""
    return f"<p class='muted'>A line marks where a finding begins.{few}</p>"


def _findings(run: Run, findings: Findings) -> str:
    if not findings:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    cards = "".join(_card(run, finding) for finding in findings[:MAX_CARDS])
    rest = findings[MAX_CARDS:]
    more = bullets(f"{f.code} {f.module or ''}: {f.message}" for f in rest)
    return f"<section><h2>Findings, the culprit first</h2>{cards}{more}</section>"


def _card(run: Run, finding: Finding) -> str:
    site = " ".join(word for word in (finding.gemm, finding.tensor) if word)
    facts = {
        "site": site,
        "cast": finding.cast,
        "steps": " to ".join(map(str, dict.fromkeys(finding.steps))),
        "ranks": ", ".join(map(str, finding.ranks)),
        "same cause": folded_words(finding.also),
        "victims": folded_words(finding.victims),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    charts = "".join(f"<div>{chart.to_svg()}</div>" for chart in charts_of(run, finding))
    charts = f"<div class='charts'>{charts}</div>" if charts else ""
    return (
        f"<article class='panel {escape(str(finding.severity))}'><h3>{badge(str(finding.severity))} {escape(finding.code)}"
        f" {escape(finding.name)} <code>{escape(finding.module or 'no layer')}</code></h3>"
        f"<p class='lead'>{escape(finding.message)}.</p><p><b>Cure.</b> {escape(finding.cure)}.</p>"
        f"<dl>{rows}</dl>{charts}{manual_page(RULES.get(finding.code))}</article>"
    )


def manual_page(rule: Documented) -> str:
    """Return a rule's manual page, folded."""
    sections = "".join(f"<h4>{escape(heading)}</h4><p>{_prose(text)}</p>" for heading, text in rule.manual().items())
    return f"<details><summary>Manual page of {escape(rule.code)}</summary><p>{escape(rule.summary)}</p>{sections}</details>"


def _prose(text: str) -> str:
    """Return a docstring's section: its list items on lines of their own."""
    return "<br>".join(escape(" ".join(item.split())) for item in text.replace("\n- ", "\n\0").split("\0"))


def _baseline(baseline: Mapping[str, Any] | None, limits: Mapping[str, float] | None) -> str:
    if baseline is None:
        return ""
    lines = [gap_words(baseline, (baseline["run"], "this run"), limits)]
    lines += [f"{what}: {_told(theirs)} → {_told(ours)}" for what, theirs, ours in configuration_words(baseline["configuration"])]
    return f"<section class='panel'><h2>Against {escape(baseline['run'])}</h2>{bullets(lines)}</section>"


def appendix(run: Run, findings: Findings) -> str:
    """Return what could not be read or judged, the thresholds, and the version."""
    skipped = bullets(f"{code}: {reason}" for code, reason in findings.skipped) or "<p>None.</p>"
    limits = bullets(f"{code}: {_limits(values)}" for code, values in findings.thresholds.items())
    problems = bullets(run.problems)
    damage = f"<h3>What could not be read</h3>{problems}" if problems else ""
    return (
        f"<section class='panel'>{damage}<details><summary>Rules skipped ({len(findings.skipped)})</summary>"
        f"{skipped}</details><details><summary>Thresholds in force</summary>{limits}</details></section>"
        f"<footer class='muted'>fp8debug {escape(__version__)}</footer>"
    )


def _limits(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def bullets(lines: Iterable[str]) -> str:
    """Return lines of plain text as a list; nothing for none."""
    found: Sequence[str] = list(lines)
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in found)}</ul>" if found else ""


def _told(value: object) -> str:
    return "-" if value is None else str(value)

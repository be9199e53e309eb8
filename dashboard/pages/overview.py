"""The first page of a run: is it ill, where, since when, what runs in FP8 at all, and what to do now."""

from __future__ import annotations

import re
import shlex
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError

from ..data import queries
from ..data.coverage import coverage
from ..data.metric_labels import label_of
from ..data.nonfinite import NAMES
from ..data.step_ranges import step_range
from ..data.worst_modules import WorstModule, with_series, worst_modules
from ..figures import base as figures
from ..figures.sparkline import HEIGHT, WIDTH, ends_in_words, sparkline
from ..figures.theme import BY_NUMBER, BY_SEVERITY, GRID_NUMBER, ICONS, NO_DATA, WORDS, level, plain_number
from ..web import source
from ..web.run_view import Judgement, RunView
from ..web.urls import View, href
from ..widgets import SITE_WIDTH, badge, card, code, facts, graph, grid, not_finite, note, number, percent, poster, table
from .axes import controls, shaped
from .base import Page
from .notes import notes_card

if TYPE_CHECKING:
    from fp8debug import Finding

COLUMNS: tuple[dict[str, Any], ...] = (
    {
        "field": "severity",
        "headerName": "Severity",
        "cellRenderer": "Severity",
        "comparator": BY_SEVERITY,
        "width": 96,
        "maxWidth": 110,
    },
    {"field": "code", "headerName": "Code", "width": 72, "maxWidth": 84},
    {"field": "name", "headerName": "What", "width": 200, "minWidth": 150, "tooltipField": "name"},
    {"field": "module", "headerName": "Module", "cellRenderer": "Link", "width": 180, "tooltipField": "module"},
    {"field": "site", "headerName": "Site", "width": 134, "minWidth": SITE_WIDTH},
    {"field": "since", "headerName": "Since step", "type": "rightAligned", "width": 104, "minWidth": 98, "maxWidth": 110},
    {"field": "until", "headerName": "Until", "type": "rightAligned", "width": 76, "maxWidth": 100},
    {
        "field": "value",
        "headerName": "Value",
        "type": "rightAligned",
        "valueFormatter": GRID_NUMBER,
        "comparator": BY_NUMBER,
        "width": 84,
        "maxWidth": 110,
    },
    {
        "field": "threshold",
        "headerName": "Limit",
        "type": "rightAligned",
        "valueFormatter": GRID_NUMBER,
        "comparator": BY_NUMBER,
        "width": 80,
        "maxWidth": 110,
    },
    {"field": "unit", "headerName": "Unit", "width": 62, "maxWidth": 76},
    {"field": "message", "headerName": "Evidence", "width": 330, "minWidth": 140, "tooltipField": "message"},
    {"field": "others", "headerName": "Also / victims", "width": 120, "tooltipField": "others"},
)


#: Modules outside FP8 that the page lists.
MAX_SKIPPED = 200


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    verdict, kind, todo, worst, loss, rows, covered, happened = parts(view, run_view)
    return html.Div(
        [
            html.Div(verdict, id="verdict"),
            html.Div(kind, id="classification"),
            html.Div(
                [
                    card("What to do now", html.Div(todo, id="todo")),
                    card(
                        "Training",
                        controls(view, run_view),
                        graph("loss", loss),
                        note="findings (above) and events (below) marked where they begin",
                    ),
                    card("Modules by severity", html.Div(worst, id="worst")),
                ],
                className="columns columns-todo-first",
            ),
            card(
                "Findings",
                grid("findings", COLUMNS, rows, none_yet(run_view)),
                note="culprit first; click a module to see its numbers",
            ),
            card("Timeline", html.Div(happened, id="timeline"), note="findings where they begin, and what else happened"),
            notes_card(view, run_view),
            card(
                "Coverage", html.Div(covered, id="coverage"), note="what runs in FP8, under which cast, and why the rest does not"
            ),
        ],
        className="page",
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return verdict, class, what to do, worst modules, training figure, findings, coverage and timeline."""
    judged = run_view.judged()
    findings = judged.known or ()
    curves, lost_at = run_view.training()
    happened, num_events = run_view.cache("events", lambda: queries.events(run_view.run))
    marks = [(event["step"], _event_line(event)) for event in happened if event["step"] is not None]
    figure = shaped(figures.training(curves, source.marks(findings), lost_at, marks), view, run_view)
    figure.about(run_view.name, "training")
    return (
        _verdict(run_view, judged),
        _classification(view, judged),
        _todo(view, run_view, judged),
        _worst(view, run_view, findings),
        figure,
        [row(finding, view.run) for finding in findings],
        _coverage(view, run_view),
        _timeline(view, judged, happened, num_events, lost_at),
    )


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether the findings, or the modules by severity, are still to come."""
    return not run_view.is_triaged or not run_view.has_health()


def settle(view: View, run_view: RunView) -> object:
    """Read the run's health, judge it, and see what could be recommended."""
    with suppress(Fp8DebugError):  # the page says what is wrong
        if not run_view.is_triaged:  # the rules look in a process of their own meanwhile
            threading.Thread(target=run_view.judge, daemon=True).start()
        run_view.heat(run=run_view.second_connection())
    judged = run_view.judge()
    with suppress(Fp8DebugError):
        _modules(run_view, judged.known or (), True)
    with suppress(Fp8DebugError):  # the fallback page says what went wrong
        run_view.fallbacks()
    return None


def row(finding: Finding, run: str | None) -> dict[str, Any]:
    """Return a finding as a row of the grid."""
    site = " ".join(word for word in (finding.gemm, finding.tensor) if word)
    others = [*finding.also, *finding.victims]
    return {
        "id": f"{finding.code} {finding.module} {finding.gemm} {finding.tensor} {finding.steps[0]}",
        "severity": level(finding.severity),
        "icon": ICONS[level(finding.severity)],
        "word": WORDS[level(finding.severity)],
        "code": finding.code,
        "name": finding.name,
        "module": finding.module or "(no layer)",
        "href": module_href(finding, run) if finding.module else None,
        "site": site or NO_DATA,
        "since": finding.steps[0],
        "until": finding.steps[1],
        "value": plain_number(finding.value),
        "threshold": plain_number(finding.threshold),
        "unit": "" if finding.unit == "1" else finding.unit,
        "message": finding.message,
        "others": ", ".join(others) or NO_DATA,
    }


def none_yet(run_view: RunView) -> str:
    """Return what a list of findings says that has none: of a run that goes on, or is being judged, there may be some later."""
    is_over = run_view.is_triaged and source.state(run_view.run.path, run_view.run.rank_manifests) == "ended"
    return "No finding" if is_over else "No finding so far"


def module_href(finding: Finding, run: str | None, other: str | None = None) -> str:
    """Return the module page at the finding's site and first step.

    Args:
        finding: where the link stands.
        run: of the URL.
        other: another module that the finding names; a victim's sick site is its own.
    """
    has_site = finding.gemm and finding.tensor and other not in finding.victims
    site = f"{finding.gemm}.{finding.tensor}" if has_site else None
    return href("module", run, module=other or finding.module, site=site, step=finding.steps[0])


def _every(steps: int | None) -> str:
    """Return how often a run was sampled."""
    return NO_DATA if not steps else "every step" if steps == 1 else f"every {steps:,} steps"


def _verdict(run_view: RunView, judged: Judgement) -> list[Component | None]:
    run, verdict = run_view.run, judged.verdict
    steps = step_range(run) or (0, 0)
    pairs = [
        ("recipe", source.recipe_name(run.manifest)),
        ("steps", f"{steps[0]:,} to {steps[1]:,}"),
        ("sampled", _every(run.manifest.get("every"))),
        ("ranks", number(len(run.ranks))),
        ("last loss", number(run_view.last_loss())),
        ("state", source.state(run.path, run.rank_manifests)),
    ]
    word = "Triage running" if judged.is_pending and verdict == "unknown" else ""
    words: list[Component] = [badge(verdict, word)]
    doubt = few_rules(judged)
    if verdict == "ok" and doubt:
        words.append(badge("warning", doubt))
    return [html.Div([*words, html.P(sentence(judged)), facts(pairs)], className=f"verdict verdict-{verdict}")]


def few_rules(judged: Judgement) -> str:
    """Return how many rules were skipped where most of them were, else "": a verdict of few rules is a weak one."""
    if judged.known is None:  # the rules are not imported before the first paint
        return ""
    from fp8debug.rules import RULES

    num, skipped = len(RULES), len(judged.known.skipped)
    return f"{skipped} of {num} rules skipped: no data for them" if 2 * skipped > num else ""


def sentence(judged: Judgement) -> str:
    """Return the verdict in words."""
    findings = judged.known
    if judged.failure:
        return f"Triage could not run: {judged.failure}"
    if findings is None:
        return "Triage is running; its findings appear here."
    from fp8debug.rules.reading.lost import Lost

    again = " The run has grown since: triage is running again." if judged.is_pending else ""
    lost = f" Not all was recorded: {Lost(**findings.lost[0])}." if findings.lost else ""
    if not findings:
        return f"{lost} {rules_in_words(judged)}{skipped_in_words(judged)}; none found a fault.{again}".strip()
    first = findings[0]
    where = f"{first.module} is the first culprit" if first.module else "No single layer is the cause"
    counts = Counter(level(f.severity) for f in findings)
    counted = ", ".join(f"{n} {name}{'s' if n > 1 and name != 'info' else ''}" for name, n in counts.items())
    return f"{where}: {first.name.replace('-', ' ')} since step {first.steps[0]:,} ({first.code}). {counted}.{lost}{again}"


def rules_in_words(judged: Judgement) -> str:
    """Return how many rules a verdict rests on: "22 of 27 rules ran"."""
    from fp8debug.rules import RULES

    num, skipped = len(RULES), 0 if judged.known is None else len(judged.known.skipped)
    return f"{num - skipped} of {num} rules ran"


def skipped_in_words(judged: Judgement) -> str:
    """Return how many rules were skipped, after a comma; "" where none was."""
    num = len(judged.known.skipped) if judged.known is not None else 0
    return f", {num} skipped" if num else ""


def _classification(view: View, judged: Judgement) -> Component | None:
    found = judged.known.classification if judged.known is not None else None
    if not found:
        return None
    origin: Component | None = None
    if found.get("module"):
        target = href("module", view.run, module=found["module"], step=found.get("step"))
        origin = html.Span(["origin ", dcc.Link(str(found["module"]), href=target)])
    evidence = [html.Li(str(line)) for line in found.get("evidence") or ()]
    more = html.Details([html.Summary("why"), html.Ul(evidence)]) if evidence else None
    title = re.sub(r"^\([a-c]\) ", "", str(found["title"]))  # the letters are those of docs/triage.md
    choice = "" if found.get("class") == "unknown" else "of three: loss spike, divergence, loss fine but inference off"
    words = [html.B(f"Class: {title}", title=choice), html.Span(str(found["what"])), origin, more]
    return html.Div([word for word in words if word is not None], className="class-line")


def _nothing(judged: Judgement) -> str:
    """Return what to do where there is no finding."""
    lost = judged.known.lost if judged.known is not None else ()
    if lost and all(one.get("ended") for one in lost):
        return "No rule found a fault in what was recorded. Look at the exception that ended the program."
    if lost:
        return "No rule found a fault in what was recorded. Find out why fp8debug failed, and record those steps again."
    return f"Nothing: {rules_in_words(judged)}; none found a fault." if judged.verdict == "ok" else "No verdict yet."


def skipped_title(num: int) -> str:
    """Return the line above the rules that were skipped, each with its reason: one rank only, say, or a column not recorded."""
    return f"{num} rule{'s' if num != 1 else ''} skipped: no data for {'them' if num != 1 else 'it'}"


def _todo(view: View, run_view: RunView, judged: Judgement) -> list[Component | None]:
    path = shlex.quote(str(run_view.run.path))
    findings, skipped = judged.known or (), judged.known.skipped if judged.known is not None else ()
    silent = html.Details(
        [
            html.Summary(skipped_title(len(skipped))),
            html.Ul([html.Li([code(rule), f" {reason}"]) for rule, reason in skipped]),
        ]
    )
    hints: list[Component | None] = [silent if skipped else None]
    if run_view.last_loss() is None:
        hints.append(note("No loss was recorded; pass it on: ", code("watch.step(loss=loss)")))
    if not findings:
        if judged.known is None and not judged.failure:
            return [poster("Triage is running."), *hints]
        return [html.P(_nothing(judged)), *hints]
    items: list[Component] = []
    for finding in list(dict.fromkeys(f for f in findings if level(f.severity) != "info"))[:3] or [findings[0]]:
        name = finding.module or "the whole run"
        link = dcc.Link(name, href=module_href(finding, view.run)) if finding.module else name
        items.append(html.Li([badge(level(finding.severity), finding.code), " ", link, html.P(finding.cure)]))
    candidates = 0
    if not judged.is_pending and (run_view.is_small or run_view.has_fallbacks):
        with suppress(Fp8DebugError):
            candidates = len(run_view.fallbacks())
    more: list[Component] = [html.Li(["Read the manual page: ", code(f"fp8debug explain {findings[0].code}")])]
    if candidates:
        text = f"{candidates} fallback candidate{'s' if candidates != 1 else ''}"
        command = code(f"fp8debug fallback {path} --to json -o fallback.json")
        more.append(html.Li(["Or apply what is recommended: ", dcc.Link(text, href=href("fallback", view.run)), ", ", command]))
    return [html.Ol(items, className="todo"), html.Ul(more, className="todo"), *hints]


def _modules(run_view: RunView, findings: Sequence[Finding], may_read: bool) -> tuple[list[WorstModule], int]:
    """Return the worst modules, those of findings first, and how many there are; with their lines where these are known."""
    named = tuple(dict.fromkeys(f.module for f in findings if f.module and level(f.severity) in ("error", "warning")))
    found, total = worst_modules(run_view.heat(), named)
    key = ("sparklines", tuple(one.module for one in found))
    if may_read or run_view.is_cached(key):
        run = run_view.run if run_view.is_small else run_view.second_connection()
        found = run_view.cache(key, lambda: with_series(run, found, run_view.default_cast(), run_view.is_huge))
    return found, total


def _worst(view: View, run_view: RunView, findings: Sequence[Finding]) -> list[Component | None]:
    """Return the modules by severity; of a large run those of an earlier state of its files until they have been read."""
    kept = run_view.verdicts.kept
    if run_view.is_small or run_view.has_health():
        try:
            kept["modules"] = (*_modules(run_view, findings, run_view.is_small), len(run_view.heat().modules))
        except Fp8DebugError as error:
            return [note(str(error), kind="warning")]
    if "modules" not in kept:
        return [poster("The modules are read when triage has ended.")]
    found, total, num = kept["modules"]
    if not num:
        return [note("No error of an operand or result was recorded.")]
    if not found:
        link = dcc.Link("heatmap", href=href("heatmap", view.run))
        return [html.P([badge("ok", "None"), f" of {num:,} modules is beyond a warn threshold at any sampled step: ", link, "."])]
    codes: dict[str, list[Finding]] = {}
    for finding in findings:
        for module in dict.fromkeys((finding.module, *finding.also)):
            codes.setdefault(module or "", []).append(finding)
    body = [_module_row(view, one, codes.get(one.module, [])) for one in found]
    rest = dcc.Link(f"all {total:,}", href=href("heatmap", view.run, sort="worst"))
    more = html.P([f"The {len(found)} worst of ", rest, "."], className="hint") if total > len(found) else None
    return [table(["Module", "Worst", "Its worst metric over steps"], body, name="modules-by-severity"), more]


def _module_row(view: View, one: WorstModule, named: Sequence[Finding]) -> list[Any]:
    reason = one.reason
    site = f"{reason.gemm}.{reason.tensor}" if reason is not None else None
    params = {"module": one.module, "site": site, "metric": reason.metric if reason is not None else None, "step": one.since}
    link = dcc.Link(figures.shorten(one.module, 30), href=href("module", view.run, **params), title=one.module)
    findings = html.Span([" ".join(dict.fromkeys(f.code for f in named))], className="dim") if named else None
    since = f" from step {one.since:,}" if one.since is not None else ""
    if one.state:
        grade: Any = not_finite(NAMES[one.state].partition(" made")[0], "NaN or Inf among its elements")
    else:
        words = next((word for limit, word in ((3.0, "lost"), (2.0, "act"), (1.0, "warn")) if one.severity >= limit), "healthy")
        kind = "error" if one.severity >= 2 else "warning" if one.severity >= 1 else "ok"
        title = f"severity {one.severity:.2f} of 3: 1 the warn threshold, 2 the act threshold"
        grade = html.Span([badge(kind, words)], title=title)
    image = sparkline(one.series, one.since)
    drawn = None
    if image and one.series is not None:
        alt = f"{one.series.name}: {ends_in_words(one.series.steps, one.series.values)}"
        drawn = html.Img(src=image, alt=alt, title=alt, width=WIDTH, height=HEIGHT, className="sparkline")
    metric = f"{label_of(reason.metric)} of the {reason.gemm} {reason.tensor}" if reason is not None else "no finite value"
    what = f"{NAMES[one.state] if one.state else metric}{since}"
    about = html.Div(what, className="dim")
    return [
        html.Span([link, " ", findings] if findings else [link]),
        grade,
        html.Div([about] if drawn is None else [drawn, about]),
    ]


def _event_line(event: Mapping[str, Any]) -> str:
    words = " ".join(str(part) for part in (event["kind"], event["module"]) if part)
    return f"{words}: {figures.shorten(str(event['message'] or ''), 110)}"


def _timeline(
    view: View, judged: Judgement, events: Sequence[Mapping[str, Any]], num_events: int, lost_at: int | None
) -> list[Component | None]:
    """Return what happened in the order of steps: findings where they begin, events, and the loss where it is lost."""
    rows: list[tuple[int, int, list[Any]]] = []
    for finding in judged.known or ():
        where: Any = NO_DATA
        if finding.module:
            where = dcc.Link(figures.shorten(finding.module, 40), href=module_href(finding, view.run), title=finding.module)
        message = html.Span([html.B(finding.code), f" {finding.name.replace('-', ' ')}"], title=finding.message)
        rows.append((finding.steps[0], 0, [f"{finding.steps[0]:,}", badge(level(finding.severity)), where, message]))
    if lost_at is not None:
        rows.append((lost_at, 1, [f"{lost_at:,}", badge("error", "Loss"), NO_DATA, "the loss is NaN or Inf from here on"]))
    for event in events:
        step, module = event["step"], event["module"]
        where = NO_DATA
        if module:
            target = href("module", view.run, module=module, step=step)
            where = dcc.Link(figures.shorten(str(module), 40), href=target, title=str(module))
        ranks = f" ({event['ranks']} ranks)" if event["ranks"] > 1 else ""
        words = [
            NO_DATA if step is None else f"{step:,}",
            badge("unknown", str(event["kind"])),
            where,
            f"{event['message']}{ranks}",
        ]
        rows.append((-1 if step is None else step, 2, words))
    if not rows:
        if judged.known is None and not judged.failure:
            return [poster("No event was recorded; triage is running.")]
        return [note("No finding, and no event was recorded.")]
    rows.sort(key=lambda row: row[:2])
    total = len(rows) + num_events - len(events)
    rest = "fp8debug show and the run's events have all"
    head = ["Step", "What", "Where", "Message"]
    return [table(head, [row[2] for row in rows], numeric=(0,), name="timeline", total=total, rest=rest)]


def _coverage(view: View, run_view: RunView) -> list[Component | None]:
    manifest = run_view.run.manifest
    found = coverage(manifest.get("modules") or [], manifest.get("filters") or [], run_view.run.gemms)
    if not found.num_linears:
        return [note("The manifest lists no modules, so coverage is not known.")]
    whose = "the FLOPs of all GEMMs" if found.is_of_all else "their FLOPs"
    share = "" if found.flops_share is None else f", {percent(found.flops_share)} of {whose}"
    casts = table(
        ["Modules", "FLOPs", "Cast"],
        [[number(n), percent(part), name] for name, n, part in found.casts],
        numeric=(0, 1),
        name="casts",
    )
    skipped = table(
        ["Not in FP8", "Kind", "Asked for", "Why"],
        [
            [dcc.Link(name, href=href("module", view.run, module=name)), kind, asked, reason]
            for name, kind, asked, reason in found.skipped[:MAX_SKIPPED]
        ],
        name="not-in-fp8",
        total=len(found.skipped),
        rest="fp8debug show and manifest.json name all",
    )
    idle = [f"{kind} {pattern!r}" for kind, pattern, matched in found.filters if not matched]
    return [
        html.P([html.B(f"{found.num_fp8} of {found.num_linears}"), f" Linears run in FP8{share}."]),
        note("Filters that matched nothing: " + ", ".join(idle), kind="warning") if idle else None,
        table(
            ["GEMMs outside the Linears", "Kind", "FLOPs", "Precision"],
            [[name, kind, percent(part), reason] for name, kind, part, reason in found.rest[:50]],
            numeric=(2,),
            name="gemms-outside",
        )
        if found.rest
        else None,
        _unwatched(run_view),
        html.Div([casts, skipped if found.skipped else note("Every Linear runs in FP8.")], className="columns"),
    ]


def _unwatched(run_view: RunView) -> Component | None:
    """Return what the run did not look at, when the rules have read it."""
    found = run_view.judged().known
    if found is None or not found.not_watched:
        return None
    return html.Div([html.P("Not watched:"), html.Ul([html.Li(entry["text"]) for entry in found.not_watched])], id="unwatched")


PAGE = Page(name="overview", layout=layout, parts=parts, is_pending=is_pending, settle=settle)

"""Two to eight runs, each judged against one reference by itself: loss gap, configuration, and where their sites diverge."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dash import html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError
from fp8debug.rules.comparison.configuration import configuration_words
from fp8debug.rules.comparison.sites import TOLERANCES, SiteDifference, unwrapped

from ..data import queries
from ..data.metric_labels import label_of
from ..figures.base import empty
from ..figures.compare import losses, site_in_both
from ..figures.theme import NO_DATA, level
from ..web.run_view import RunView
from ..web.urls import View, href
from ..widgets import SITE_WIDTH, badge, card, code, control, graph, grid, note, number, poster, table
from .axes import controls, scale_of, shaped
from .base import Page
from .heatmap import metric_options

if TYPE_CHECKING:
    from fp8debug.rules.comparison.runs import Differences

    from ..data.records import StepSeries

#: What one site is drawn by unasked, where it was recorded, and else.
METRICS = ("sqnr_db", "rms")
#: What a folder name cannot hold: it separates names in the URL.
SEPARATOR = "/"
#: Differences of configuration and sites that the page lists; the command line has all of them.
MAX_SETTINGS, MAX_SITES = 60, 300
#: Runs of one comparison, this one and the reference among them: as many as lines of one plot can be told apart.
MAX_RUNS = 8
#: Height of the plot of one site, in pixels: kept free while runs are compared.
SITE_HEIGHT = 260
REST = "fp8debug diff --format json has all"
COLUMNS: tuple[dict[str, Any], ...] = (
    {"field": "run", "headerName": "Run", "width": 130, "tooltipField": "run"},
    {"field": "at", "headerName": "Diverges at", "type": "rightAligned", "width": 104},
    {"field": "module", "headerName": "Module", "cellRenderer": "Link", "width": 220, "tooltipField": "module"},
    {"field": "site", "headerName": "Site", "width": 150, "minWidth": SITE_WIDTH},
    {"field": "reference", "headerName": "Against", "width": 90},
    {"field": "what", "headerName": "What", "width": 300, "minWidth": 236, "tooltipField": "what"},
    {"field": "differs", "headerName": "Differs since", "type": "rightAligned", "width": 100},
    {"field": "sqnr_db", "headerName": "SQNR dB", "width": 140, "minWidth": 112, "sortable": False},
    {"field": "rms", "headerName": "rms", "width": 170, "minWidth": 140, "sortable": False},
)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Runs that a URL compares.

    Attributes:
        reference: run that the others are judged against; None where nothing can be compared.
        judged: the others, that of the URL first.
        problems: names that cannot be compared, each with the reason, in words.
    """

    reference: RunView | None
    judged: tuple[RunView, ...]
    problems: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[RunView, ...]:
        """All of them, the reference first."""
        return (*([] if self.reference is None else [self.reference]), *self.judged)


def others(view: View, run_view: RunView) -> list[str]:
    """Return the names of the URL beside this run, each once."""
    asked = [name for name in view.get("with").split(SEPARATOR) if name]
    return [name for name in dict.fromkeys(asked) if name != run_view.name]


def chosen(view: View, run_view: RunView) -> Chosen:
    """Return the runs of the URL that can be compared, and why the rest cannot.

    The reference is the one that the URL names, else the first of those beside this run: the good one, or the one in BF16.
    """
    if run_view.open_sibling is None:
        return Chosen(reference=None, judged=())
    found, problems = [run_view], []
    names = others(view, run_view)
    for name in names[: MAX_RUNS - 1]:
        if name not in run_view.siblings():
            problems.append(f"No run {name!r} in this folder.")
            continue
        try:
            found.append(run_view.open_sibling(name))
        except Fp8DebugError as error:
            problems.append(f"{name} cannot be read: {error}")
    left_out = names[MAX_RUNS - 1 :]
    if left_out:
        problems.append(f"{MAX_RUNS} runs are compared at a time; left out: {', '.join(left_out)}.")
    if len(found) < 2:
        return Chosen(reference=None, judged=(), problems=tuple(problems))
    reference = next((one for one in found if one.name == view.get("reference")), found[1])
    return Chosen(reference=reference, judged=tuple(one for one in found if one is not reference), problems=tuple(problems))


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether a run is still to be compared or judged, which reads the sites of both."""
    runs = chosen(view, run_view)
    if runs.reference is None:
        return False
    return any(one.differences(runs.reference.name) is None or not one.is_triaged for one in runs.judged)


def settle(view: View, run_view: RunView) -> object:
    """Compare each run with the reference, and have triage say where its own fault began."""
    runs = chosen(view, run_view)
    if runs.reference is not None:
        for one in runs.judged:
            one.compare([runs.reference.name])
            one.judge()
    return None


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    about, figure, settings, rows, site = parts(view, run_view)
    runs = chosen(view, run_view)
    names = [name for name in run_view.siblings() if name != run_view.name]
    value = view.get("with")
    options = [{"value": "", "label": "(choose a run)"}, *names]
    if SEPARATOR in value:
        options.append({"value": value, "label": value.replace(SEPARATOR, " and ")})
    metrics, metric = [name for name in TOLERANCES if run_view.run.has(name)], _metric(run_view)
    pairs = {"--pairs": max(1, len(runs.judged))}
    default = runs.reference.name if runs.reference is not None else ""
    first = next((one.name for one in runs.all if one.name in others(view, run_view)), "")
    picks = [
        control("with", "", value, options, "with", 260),
        control("reference", first, default, [one.name for one in runs.all] or [""], "reference", 200),
    ]
    return html.Div(
        [
            card(
                "Loss",
                html.Div(about, id="compare-about", style=pairs),
                controls(view, runs.reference or run_view),
                graph("compare-loss", figure),
                note=html.Div(picks, className="controls"),
            ),
            card(
                "One site in these runs",
                graph("compare-site", site),
                note=html.Div(
                    [control("metric", metric, view.get("metric", metric), metric_options(metrics or [metric]), "metric", 240)],
                    className="controls",
                ),
            ),
            # Below the plots: its height is known only after the comparison.
            card(
                "Where they diverge",
                grid("compare-sites", COLUMNS, rows, "No site to list"),
                note="of each run the origin that triage names on top, then the first divergence; click a module to see it above",
            ),
            card("Configuration differences", html.Div(settings, id="compare-settings")),
        ],
        className="page",
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return lines about each run, the losses, the configuration, the sites that diverge, and one site in all runs."""
    runs = chosen(view, run_view)
    if runs.reference is None:
        return _nothing(view, run_view, runs)
    lines: list[Component] = [note(problem, kind="error") for problem in runs.problems]
    curves = [(one.name, next((t for t in queries.training(one.run) if t.name == "loss"), None)) for one in runs.all]
    pairs = [(one, found) for one in runs.judged if (found := one.differences(runs.reference.name)) is not None]
    since = [found.loss["diverges_at"] for _, found in pairs]
    figure = losses(curves, since, _nonfinite_at([found for _, found in pairs]))
    own = {one.name: scale for one in runs.judged if (scale := scale_of(one, view.get("x"))) is not None}
    names = " and ".join(one.name for one in runs.all)
    figure = shaped(figure, view, runs.reference, own).about(names, "loss")
    if len(pairs) < len(runs.judged):
        judged = " and ".join(one.name for one in runs.judged)
        waiting = poster(f"The sites of {judged} are being compared with those of {runs.reference.name}.")
        return [*lines, waiting], figure, None, [], empty("not known yet", SITE_HEIGHT)
    places = {one.name: origin_of(one, found) for one, found in pairs}
    lines += [line for one, found in pairs for line in [*_about(found, places[one.name]), *_shorter(one, runs.reference)]]
    rows = _rows(pairs, places, view)
    return lines, figure, [_settings(found) for _, found in pairs], rows, _site(view, run_view, runs, pairs, places)


class TriagedOrigin(NamedTuple):
    """Place at which triage has the fault of a run begin.

    Attributes:
        module: FQN without wrappers.
        gemm: GEMM, or "" where the finding is about no single one.
        tensor: tensor, or "".
        step: the step.
        words: about it, in a clause.
    """

    module: str
    gemm: str
    tensor: str
    step: int
    words: str

    def is_at(self, site: SiteDifference) -> bool:
        """Return whether a site is this place; of a module as a whole each site is."""
        return site.module == self.module and self.gemm in ("", site.gemm) and self.tensor in ("", site.tensor)


def origin_of(run_view: RunView, found: Differences) -> TriagedOrigin | None:
    """Return where triage has the fault of a judged run begin: its first NaN or Inf, else its first finding at a module."""
    if found.origin is not None and found.origin[0] == run_view.name:
        row, step = found.origin[1].row, found.origin[1].step
        place = (unwrapped(str(row["module"])), str(row["gemm"]), str(row["tensor"]))
        return TriagedOrigin(*place, step, f"first NaN or Inf: {' '.join(place)} at step {step:,}")
    for finding in run_view.latest().findings:
        if finding.module is not None and level(finding.severity) in ("error", "warning"):
            place = (unwrapped(finding.module), finding.gemm or "", finding.tensor or "")
            words = f"{finding.code} {finding.name} at {' '.join(part for part in place if part)} from step {finding.steps[0]:,}"
            return TriagedOrigin(*place, finding.steps[0], words)
    return None


def _nonfinite_at(pairs: Sequence[Differences]) -> dict[str, int]:
    """Return by run the first step whose loss is NaN or Inf, for the runs that have one."""
    steps = {name: step for found in pairs for name, step in zip(found.names, found.loss["nonfinite_at"], strict=True)}
    return {name: step for name, step in steps.items() if step is not None}


def _nothing(view: View, run_view: RunView, runs: Chosen) -> tuple[Any, ...]:
    if run_view.open_sibling is None:
        folder = run_view.run.path.resolve().parent
        about = note("One run is served. To compare runs serve their folder: ", code(f"fp8debug dashboard {folder}"))
    elif len(run_view.siblings()) < 2:
        about = note("This folder holds one run; record a second one, in BF16 say, beside it.")
    else:
        about = note("Choose a run to compare with: the good one, or the one in BF16.")
    if runs.problems:
        about = html.Div([note(problem, kind="error") for problem in runs.problems])
    return about, empty("nothing to compare with yet", 160), None, [], empty("nothing to compare with yet", 120)


def _about(found: Differences, origin: TriagedOrigin | None) -> list[Component]:
    is_lost = any(step is not None for step in found.loss["nonfinite_at"])
    loss_level = "error" if is_lost else "ok" if found.loss["diverges_at"] is None else "warning"
    if not is_lost and not found.loss["steps"]:  # nothing was compared
        loss_level = "unknown"
    site_level = "error" if found.origin is not None else "ok" if found.first is None else "warning"
    if found.origin is None and not found.sites:
        site_level = "unknown"
    reference, name = found.names
    lines: list[Component] = [
        html.P([badge(loss_level, "loss"), f" {reference} -> {name}, {found.loss_words}"]),
        html.P([badge(site_level, "sites"), f" {reference} -> {name}, {found.site_words}"]),
    ]
    if origin is not None and found.origin is None:  # the line about the sites names a NaN
        lines.append(html.P([badge("warning", "origin"), f" triage of {name}: {origin.words}"]))
    parted = sum(site.diverges_at is not None for site in found.sites)
    if parted > MAX_SITES:
        lines.append(note(f"{MAX_SITES} of {parted} rows of {name} below; {REST}."))
    for run, only in zip(found.names, found.only, strict=True):
        if only:
            more = f" and {len(only) - 8} more: {REST}" if len(only) > 8 else ""
            lines.append(note(f"Only in {run}: {', '.join(only[:8])}{more}", kind="warning"))
    return lines


def _shorter(judged: RunView, reference: RunView) -> list[Component]:
    """Return a line that one of two runs has fewer steps so far: the last ones of the other were not compared."""
    ends = [(one.run.steps_range[1], one.name) for one in (judged, reference)]
    (last, short), (longest, long) = min(ends), max(ends)
    recorded = f"{short} is recorded up to step {last:,}, {long} up to step {longest:,}"
    words = f"{recorded}: what comes after step {last:,} was not compared."
    return [note(words, kind="warning")] if last < longest else []


def _settings(found: Differences) -> Component:
    words = configuration_words(found.configuration)
    reference, name = found.names
    if not words:
        return note(f"{reference} -> {name}: no difference.")
    body = [[what, _cell(first), _cell(second)] for what, first, second in words[:MAX_SETTINGS]]
    return table(["What", reference, name], body, name=f"configuration-{name}", total=len(words), rest=REST)


def _cell(value: Any) -> str:
    if value is None:
        return NO_DATA
    return value if isinstance(value, str) else json.dumps(value)


def _diverging(found: Differences, origin: TriagedOrigin | None) -> list[SiteDifference]:
    """Return the sites that diverge: the origin that triage names first, then in the order of their divergence."""
    parted = [site for site in found.sites if site.diverges_at is not None]
    return sorted(parted, key=lambda site: origin is None or not origin.is_at(site))


def _rows(
    pairs: Sequence[tuple[RunView, Differences]], places: Mapping[str, TriagedOrigin | None], view: View
) -> list[dict[str, Any]]:
    """Return the sites that diverge, run by run, after the first of each run: that of the last run is in sight too."""
    of_runs = [
        [_row(site, view, one.name, places[one.name]) for site in _diverging(found, places[one.name])[:MAX_SITES]]
        for one, found in pairs
    ]
    return [row for rows in of_runs for row in rows[:1]] + [row for rows in of_runs for row in rows[1:]]


def _row(site: SiteDifference, view: View, run: str, origin: TriagedOrigin | None) -> dict[str, Any]:
    name = f"{site.gemm}.{site.tensor}"
    pairs = {key: " -> ".join(number(v, 3) for v in site.medians.get(key, (None, None))) for key in ("sqnr_db", "rms")}
    kept = {"with": view.get("with"), "reference": view.get("reference"), "of": site.module, "site": name}
    is_origin = origin is not None and origin.is_at(site)
    return {
        "id": f"{run}/{site.module} {name} {site.reference}",
        "run": run,
        "at": site.diverges_at,
        "module": site.module,
        "href": href("compare", view.run, **kept),
        "site": name.replace(".", " "),
        "reference": site.reference,
        "what": f"origin (triage); {site.what}" if is_origin else site.what,
        "differs": site.differs_at,
        **pairs,
    }


def _metric(run_view: RunView) -> str:
    """Return what one site is drawn by unasked: the error of its cast parts runs that the size of the tensor does not."""
    return METRICS[0] if run_view.run.has(METRICS[0]) else METRICS[1]


def _site(
    view: View,
    run_view: RunView,
    runs: Chosen,
    pairs: Sequence[tuple[RunView, Differences]],
    places: Mapping[str, TriagedOrigin | None],
) -> Any:
    """Return one site in all runs: of the URL, or an origin, or the first that diverges; this run's before those of others."""
    found: dict[tuple[str, str, str], int] = {}
    origins = [place for _, place in sorted(places.items(), key=lambda item: item[0] != run_view.name) if place is not None]
    for place in origins:
        if place.gemm and place.tensor:
            found.setdefault((place.module, place.gemm, place.tensor), place.step)
    for one, differences in pairs:
        for site in _diverging(differences, places[one.name]):
            found.setdefault((site.module, site.gemm, site.tensor), int(site.diverges_at or 0))
    first = next(iter(found), ("", "fprop", "input"))
    module = view.get("of") or first[0] or unwrapped(str(next((m["fqn"] for m in runs.all[0].run.modules), "")))
    gemm, _, tensor = (view.get("site") or ".".join(first[1:])).partition(".")
    metric = view.get("metric") or _metric(run_view)
    lines: list[tuple[str, list[StepSeries] | None]] = []
    for name, run in ((one.name, one.run) for one in runs.all):
        own = next((str(m["fqn"]) for m in run.modules if unwrapped(str(m["fqn"])) == module), None)
        if own is None:
            lines.append((name, None))
            continue
        try:
            lines.append((f"{name}: {own} {gemm} {tensor}", queries.module_traces(run, own, metric, (gemm, tensor))))
        except Fp8DebugError as error:
            return empty(str(error), 160)
    scales = {
        line[0]: scale
        for line in lines
        for one in runs.judged
        if line[1] is not None and line[0].startswith(f"{one.name}: ") and (scale := scale_of(one, view.get("x"))) is not None
    }
    return shaped(site_in_both(lines, metric, found.get((module, gemm, tensor))), view, runs.all[0], scales).about(
        " and ".join(one.name for one in runs.all), f"{module} {gemm} {tensor}", label_of(metric)
    )


PAGE = Page(name="compare", layout=layout, parts=parts, is_pending=is_pending, settle=settle)

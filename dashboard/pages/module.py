"""One Linear: its nine sites over steps, and one site at one step under every cast that was recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError, suggest
from fp8debug.types import RESULTS, Gemm

from ..data import history as history_data
from ..data import nonfinite, queries
from ..data.coverage import in_words
from ..data.history import ModuleHistory
from ..data.metric_labels import label_of
from ..data.nonfinite import FINITE
from ..data.records import StepSeries
from ..data.step_ranges import step_condition, step_range
from ..data.worst_modules import LISTED, every_module
from ..figures import history as history_figures
from ..figures import module as module_figures
from ..figures.base import empty
from ..figures.module import SITES
from ..figures.theme import NO_DATA, level
from ..web.run_view import SMALL_BYTES, Judgement, RunView
from ..web.urls import View, href
from ..widgets import badge, card, code, control, facts, graded, graph, not_finite, note, number, poster, segments, table
from .axes import controls, shaped
from .base import Page
from .heatmap import metric_options, read_thinly
from .notes import notes_card
from .overview import module_href, rules_in_words, skipped_title

#: The site of the URL, where it names none, is the one that is sick: "auto" in the choice of sites.
METRIC, SITE, CAST = "sqnr_db", "", "running"
#: Metrics whose lines are there whichever one is chosen.
_ALWAYS = ("sqnr_db", "scale_inv_mean_log2", "headroom")
#: Steps in a list to choose from, spread over the run; those near the chosen one are there as well.
MAX_CHOICES = 1000
#: Dumps of a module that are listed; the others are counted.
MAX_DUMPS = 24
NAMES = tuple(f"{gemm}.{tensor}" for line in SITES for gemm, tensor in line)
#: What the table of casts shows; rates are printed in percent.
COLUMNS = (
    "sqnr_db",
    "cosine",
    "gain",
    "mse",
    "underflow_rate",
    "overflow_rate",
    "headroom",
    "scale_inv_min",
    "scale_inv_max",
    "amax",
    "worst_block_sqnr_db",
    "num_zero_blocks",
)
#: Counts that stand first in that table where there is any such element.
NOT_FINITE = ("num_nan", "num_inf", "num_actual_nonfinite")


def chosen_module(view: View, run_view: RunView) -> str | None:
    """Return the module of the URL, or the first culprit, or the first module."""
    names = [str(m["fqn"]) for m in run_view.run.modules]
    asked = view.get("module")
    if asked:
        return asked if asked in names else None
    culprit = next((f.module for f in run_view.judged().known or () if f.module in names), None)
    return culprit or next(iter(names), None)


def chosen_site(view: View, run_view: RunView, module: str) -> tuple[str, str]:
    """Return (gemm, tensor) of the URL, or those of the module's sick site."""
    name = view.get("site")
    gemm, _, tensor = (name if name in NAMES else sick_site(run_view, module)).partition(".")
    return gemm, tensor


def sick_site(run_view: RunView, module: str) -> str:
    """Return the site that a finding accuses, else the first with NaN or Inf, else the worst; of a healthy module the first."""
    findings = run_view.judged().known or ()
    for finding in (*(f for f in findings if f.module == module), *(f for f in findings if module in f.also)):
        if f"{finding.gemm}.{finding.tensor}" in NAMES:
            return f"{finding.gemm}.{finding.tensor}"
    if not (run_view.is_small or run_view.has_health()):
        return NAMES[0]
    with suppress(Fp8DebugError):
        found = next((one for one in every_module(run_view.heat()) if one.module == module), None)
        if found is not None and found.state > FINITE:
            key = ("first not finite", module)
            return str(run_view.cache(key, lambda: queries.first_not_finite_site(run_view.run, module)) or NAMES[0])
        if found is not None and found.reason is not None and found.severity >= LISTED:
            return f"{found.reason.gemm}.{found.reason.tensor}"
    return NAMES[0]


def default_step(run_view: RunView, module: str, steps: list[int]) -> int | None:
    """Return the step at which a finding that names the module begins, or the last one."""
    begins = [f.steps[0] for f in run_view.judged().known or () if module in (f.module, *f.also)]
    return _nearest(steps, min(begins)) if begins else steps[-1] if steps else None


def _nearest(steps: list[int], wanted: int) -> int | None:
    return min(steps, key=lambda step: abs(step - wanted)) if steps else None


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    module = chosen_module(view, run_view)
    if module is None:
        why = suggest(view.get("module"), [str(m["fqn"]) for m in run_view.run.modules])
        words = note(f"No module {view.get('module')!r} in this run: {why}", kind="error")
        heading = html.H1("No such module", className="only-read")
        return html.Div([heading, card("Cannot show this", words, note("Press / to search all modules."))], className="page")
    head, about, nine, table_of_casts, scale, hist, over_time, split, dumped, choices = parts(view, run_view)
    asked = view.get_int("step")
    steps = _sampled(run_view, module) if asked is not None else []
    step = "" if asked is None or not steps else str(_nearest(steps, asked))
    site = view.get("site") if view.get("site") in NAMES else SITE
    metrics = metric_options(run_view.recorded())
    tensor_options = [{"value": SITE, "label": "auto"}, *({"value": n, "label": n.replace(".", " ")} for n in NAMES)]
    casts = [{"value": CAST, "label": "running cast"}]
    casts += [{"value": name, "label": name} for name, _ in run_view.casts()]
    return html.Div(
        [
            html.Div(head, id="module-head"),
            controls(view, run_view),
            card(
                "Nine sites over steps",
                html.Div(about, id="module-about"),
                note(
                    "Dashed across: limits of the running cast, orange to warn, red to act. Dashed upright: the step shown below."
                ),
                graph("nine", nine),
                note=html.Div(
                    [control("metric", METRIC, view.get("metric", METRIC), metrics, "metric", 240)], className="controls"
                ),
            ),
            card(
                "One site at one step",
                html.Div([segments("site", SITE, site, tensor_options, "site")], className="controls"),
                html.Div(table_of_casts, id="casts"),
                html.Div(
                    [
                        html.Div([html.H3("scale_inv of each cast, and its headroom: above 1 it clips"), graph("scales", scale)]),
                        html.Div([html.H3("exponents and what the cast can represent"), graph("hist", hist)]),
                    ],
                    className="columns",
                ),
                html.Div(
                    [
                        html.Div(
                            [
                                html.H3("exponents over steps (colour: share of nonzeros), and the ends of the cast's range"),
                                graph("history", over_time),
                            ]
                        ),
                        html.Div(
                            [html.H3("error of this GEMM's result, split; dashed: its limit to warn"), graph("split", split)]
                        ),
                    ],
                    className="columns",
                ),
                html.Div(dumped, id="dumped"),
                note=html.Div(
                    [
                        control("step", "", step, choices, "step", 140),
                        control("cast", CAST, view.get("cast", CAST), casts, "range drawn for", 340),
                    ],
                    className="controls",
                ),
            ),
            notes_card(View(view.page, view.run, {**view.params, "module": module}), run_view),
        ],
        className="page",
    )


def step_choices(steps: list[int], default: int | None, chosen: int | None) -> list[dict[str, Any]]:
    """Return the choices of step: the default, which follows a run that is being written, then all, or some of very many."""
    first: dict[str, Any] = {"value": "", "label": "none" if default is None else f"{default} (auto)"}
    apart = -(-len(steps) // MAX_CHOICES)
    at = bisect_left(steps, steps[-1] if chosen is None else chosen) if steps else 0
    near = steps[max(0, at - MAX_CHOICES // 20) : at + MAX_CHOICES // 20]
    listed = sorted({*steps[::apart], *near, *steps[-1:]}) if apart > 1 else steps
    choices: list[dict[str, Any]] = [first, *({"value": str(step), "label": str(step)} for step in listed)]
    if apart > 1:
        told = f"{len(listed):,} of {len(steps):,} steps are listed; the address takes each (step=...)"
        choices.insert(1, {"value": "some", "label": told, "disabled": True})
    return choices


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return head, line about the metric, nine sites, casts, scales, histogram, its history, split error, block map and steps."""
    module = chosen_module(view, run_view)
    if module is None:
        nothing = empty("no such module")
        return [], [], nothing, [], nothing, nothing, nothing, nothing, None, []
    site, metric = chosen_site(view, run_view, module), view.get("metric", METRIC)
    steps = _sampled(run_view, module)
    default = default_step(run_view, module, steps)  # once: the findings may come while the page is being made
    step = default if view.get_int("step") is None else _nearest(steps, int(view.get("step")))
    choices, about = step_choices(steps, default, step), _about(run_view, metric)
    try:
        lines = _lines(run_view, module, metric)
        nine = shaped(module_figures.sites(lines[metric], metric, site, step), view, run_view)
    except Fp8DebugError as error:
        lines = _lines(run_view, module, METRIC)
        about, nine = note(str(error), kind="warning"), empty("not recorded", 300)
    scale, headroom = ([t for t in lines[name] if (t.gemm, t.tensor) == site] for name in ("scale_inv_mean_log2", "headroom"))
    result = (site[0], RESULTS[Gemm(site[0])].value)
    traces = [t for t in lines["sqnr_db"] if (t.gemm, t.tensor) == result]
    words, place = (run_view.name, module), " ".join(site)
    nine.about(*words, label_of(metric))
    split = shaped(history_figures.error_split(traces, step), view, run_view)
    split.about(*words, " ".join(result), "SQNR of the error, split")
    if step is None:
        return (
            _head(view, run_view, module),
            about,
            nine,
            note(_why_empty(run_view, module)),
            module_figures.scales([], []),
            module_figures.histogram(None),
            history_figures.exponents(None),
            split,
            None,
            choices,
        )
    cast = None if view.get("cast", CAST) == CAST else view.get("cast")
    rows = _rows(run_view, module, step)
    hist = queries.histogram(rows, site, cast)
    lost = 0 if hist is not None else queries.lost_at(rows, site)
    return (
        _head(view, run_view, module),
        about,
        nine,
        _casts(run_view, rows, module, site, step),
        shaped(module_figures.scales(scale, headroom, step), view, run_view).about(*words, place, "scale_inv and headroom"),
        module_figures.histogram(hist, lost).about(*words, place, f"exponents at step {step}"),
        shaped(_history(view, run_view, module, site, step, lost), view, run_view).about(*words, place, "exponents over steps"),
        split,
        _dumped(view, run_view, module, site, step),
        choices,
    )


def _dumped(view: View, run_view: RunView, module: str, site: tuple[str, str], step: int) -> list[Component] | None:
    """Return the map of the nearest dump of the site, or which sites of the module have one; None without any."""
    try:
        found = history_data.block_map(run_view.run, module, site, step)
        if found is not None:
            return [html.H3(f"SQNR of each tile: {found.title}"), graph("blocks", history_figures.blocks(found))]
        listed = history_data.dumped_steps(run_view.run, module)
    except Fp8DebugError as error:
        return [note(str(error), kind="warning")]
    if not listed:
        return None
    links = [
        dcc.Link(
            f"{name.replace('.', ' ')} at {at:,}", href=href("module", view.run, **{**view.params, "site": name, "step": at})
        )
        for at, name in listed[:MAX_DUMPS]
    ]
    more = f"and {len(listed) - MAX_DUMPS} more, in the folder dumps of the run" if len(listed) > MAX_DUMPS else ""
    return [note("Dumped are ", *(part for link in links for part in (link, " ")), more)]


def _sampled(run_view: RunView, module: str) -> list[int]:
    is_thin = run_view.is_thin()
    found: list[int] = run_view.cache(
        ("sampled", module, is_thin), lambda: queries.sampled_steps(run_view.run, module, run_view.metric_cache, is_thin)
    )
    return found


def _about(run_view: RunView, metric: str) -> Component | None:
    """Return what a reader has to know of the lines: that some steps of a huge run are there only."""
    shown = step_range(run_view.run)
    apart = step_condition(run_view.run, *shown, run_view.is_thin(metric, *_ALWAYS))[1] if shown else 1
    return note(read_thinly(apart)) if apart > 1 else None


def _lines(run_view: RunView, module: str, metric: str) -> dict[str, list[StepSeries]]:
    names = (metric, *_ALWAYS)
    is_thin = run_view.is_thin(*names)
    key = ("lines", module, metric, is_thin)
    found: dict[str, list[StepSeries]] = run_view.cache(
        key, lambda: queries.several_traces(run_view.run, module, names, run_view.metric_cache, is_thin)
    )
    return found


def _key(module: str) -> tuple[str, str]:
    return "history", module


def _read_history(run_view: RunView, module: str) -> ModuleHistory:
    found: ModuleHistory = run_view.cache(
        _key(module), lambda: history_data.module_history(run_view.second_connection(), module, run_view.is_huge)
    )
    return found


def _columns(run_view: RunView) -> list[str]:
    return [name for name in (*COLUMNS, *NOT_FINITE) if run_view.run.has(name)]


def _rows(run_view: RunView, module: str, step: int) -> list[dict[str, Any]]:
    """Return the rows of all sites at a step, kept: the next site of the module asks for no more."""
    found: list[dict[str, Any]] = run_view.cache(
        ("rows", module, step), lambda: queries.rows_at(run_view.run, module, step, _columns(run_view))
    )
    return found


def _history(view: View, run_view: RunView, module: str, site: tuple[str, str], step: int, lost: int) -> Any:
    """Return the exponents over steps; of a large run they come later, as they are the widest column there is."""
    if run_view.size >= SMALL_BYTES and not run_view.is_cached(_key(module)):
        return empty("reading the histograms of all steps", 320)
    cast = None if view.get("cast", CAST) == CAST else view.get("cast")
    return history_figures.exponents(_read_history(run_view, module).of(site, cast), step, lost)


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether findings or the histograms of all steps are still to come."""
    return not run_view.is_triaged or not run_view.is_cached(_key(chosen_module(view, run_view) or ""))


def settle(view: View, run_view: RunView) -> object:
    """Read the histograms of the module and judge the run."""
    return _read_history(run_view, chosen_module(view, run_view) or ""), run_view.judge()


def _why_empty(run_view: RunView, module: str) -> str:
    entry = next((m for m in run_view.run.modules if m["fqn"] == module), {})
    return f"Nothing was recorded for {module}: {entry.get('reason') or 'no reason recorded'}."


def _head(view: View, run_view: RunView, module: str) -> list[Component | None]:
    modules = run_view.run.modules
    names = [str(m["fqn"]) for m in modules]
    at = names.index(module)
    entry = modules[at]
    kept = {key: value for key, value in view.params.items() if key != "module"}
    steps = [
        _neighbour("← ", names[at - 1] if at else None, view, kept),
        html.Span(f"{at + 1} of {len(names)} in execution order", className="dim"),
        _neighbour("→ ", names[at + 1] if at + 1 < len(names) else None, view, kept),
    ]
    beside: dict[str, Any] = {"aria-label": "neighbours in execution order"}
    pairs = [
        ("kind", str(entry.get("kind") or NO_DATA)),
        ("in x out", f"{number(entry.get('in_features'))} x {number(entry.get('out_features'))}"),
        (
            "runs in",
            in_words(entry.get("casts")) if entry.get("fp8") else f"not FP8: {entry.get('reason') or 'no reason recorded'}",
        ),
    ]
    judged = run_view.judged()
    named = [f for f in judged.known or () if module in (f.module, *f.also)]
    suffers = [f for f in judged.known or () if module in f.victims]
    lines = [
        html.Div(
            [
                badge(level(f.severity), f.code),
                html.Span(f" {f.name}: {f.message} "),
                dcc.Link("show", href=module_href(f, view.run)),
            ],
            className="named",
        )
        for f in named
    ]
    lines += [
        html.Div(
            [badge("info", f"victim of {f.code}"), f" of {f.module or 'the run'}: its input was bad, its arithmetic is not"],
            className="named",
        )
        for f in suffers
    ]
    return [
        html.Div([html.H1(module), html.Nav(steps, className="neighbours", **beside)], className="module-title"),
        facts(pairs),
        *(lines or (_silent(run_view, module, judged),)),
    ]


def _silent(run_view: RunView, module: str, judged: Judgement) -> Component:
    """Return that no finding names a module, with what that rests on; a module that nobody looked at is not healthy."""
    if judged.failure:
        return html.Div([badge("unknown", "Not judged"), f": triage could not run: {judged.failure}"], className="named")
    if judged.known is None:
        return poster("Triage is running.")
    rests = f"No finding names this module; {rules_in_words(judged)}"
    doubts = _doubts(run_view, module, judged.known.lost)
    if doubts:
        words = f": {'; '.join(doubts)}. {rests}."
        return html.Div([badge("unknown", "Not known to be healthy"), words], className="named")
    skipped = [html.Li([code(rule), f" {reason}"]) for rule, reason in judged.known.skipped]
    title = skipped_title(len(skipped))
    more = html.Details([html.Summary(title), html.Ul(skipped)]) if skipped else None
    words = f" names this module; {rules_in_words(judged)} on this run"
    return html.Div([badge("ok", "No finding"), words, *([more] if more else [])], className="named")


def _doubts(run_view: RunView, module: str, lost: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why statistics of a module say less than those of others: none, none of the last steps, NaN, or unreadable files."""
    from fp8debug.rules.reading.lost import Lost

    steps, last, found = (
        _sampled(run_view, module),
        run_view.cache("last sampled", lambda: queries.last_sampled(run_view.run)),
        [],
    )
    entry = next((m for m in run_view.run.modules if m["fqn"] == module), {})
    if not steps:
        found.append(f"nothing was recorded for it ({entry.get('reason') or 'no reason recorded'})")
    gone = [str(Lost(**one)) for one in lost if not one["ended"] and one["module"] in (None, module)]
    if gone:
        found += gone
    elif steps and last is not None and steps[-1] < last:
        found.append(f"recorded until step {steps[-1]:,} only, of {last:,}")
    bad = run_view.cache(("not finite", module), lambda: queries.first_not_finite(run_view.run, module))
    if bad is not None:
        found.append(f"its tensors hold NaN or Inf from step {bad:,}")
    if run_view.run.problems:
        found.append("not all files of the run could be read")
    return found


def _neighbour(arrow: str, name: str | None, view: View, kept: dict[str, str]) -> Component:
    side = "neighbour-before" if arrow.startswith("←") else "neighbour-after"
    if name is None:
        return html.Span()
    text = f"←\u00a0{name}" if arrow.startswith("←") else f"{name}\u00a0→"
    link = dcc.Link(
        text, href=href("module", view.run, module=name, **kept), title=f"{name}  ( {'[' if side.endswith('before') else ']'} )"
    )
    return html.Span(link, className=side)


def _casts(run_view: RunView, rows: Sequence[dict[str, Any]], module: str, site: tuple[str, str], step: int) -> Component:
    rows = queries.side_by_side(rows, site)
    if not rows:
        return note(f"Nothing was recorded at {site[0]} {site[1]} in step {step:,}.")
    bad = any(row["state"] for row in rows)
    counts = [name for name in ("num_nan", "num_inf", "num_actual_nonfinite") if bad and any(row.get(name) for row in rows)]
    columns = [name for name in _columns(run_view) if bad or any(row[name] is not None for row in rows)]
    columns = [*counts, *(name for name in columns if name not in NOT_FINITE)]
    body: list[list[Any]] = []
    for row in rows:
        running = "running" if row["actual"] else "what-if"
        what = running if row["reference"] == "operand" else f"against {row['reference']}"
        body.append([row["cast_name"], what, *(_value(name, row) for name in columns)])
    numeric = range(2, 2 + len(columns))
    caption = f"{site[0]} {site[1]} at step {step:,}"
    return html.Div(
        [
            html.H3(f"casts side by side: {caption}"),
            table(
                ["Cast", "Role", *map(_head_of, columns)],
                body,
                tuple(numeric),
                name="casts",
                about=(module, *site, f"step {step}"),
            ),
        ]
    )


def _value(name: str, row: dict[str, Any]) -> Component | str | None:
    """Return a statistic of one cast: of a tensor without finite elements there is none, and 0 would be false."""
    if row["lost"] and name not in nonfinite.COUNTS:
        return not_finite(nonfinite.NAMES[row["state"]], "no element is finite")
    return graded(name, row[name], row["kind"])


def _head_of(name: str) -> Component:
    """Return the head of a column in words, with the column's name as a hint."""
    head: Component = html.Abbr(label_of(name), title=name)
    return head


PAGE = Page(name="module", layout=layout, parts=parts, is_pending=is_pending, settle=settle)

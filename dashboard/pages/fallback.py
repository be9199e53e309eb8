"""Fallback page: modules to take out of FP8 or into a better cast, what a budget buys, the file, and its proof."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError
from fp8debug.exporters import EXPORTERS
from fp8debug.store.speed_file import cost_basis

from ..data.trial_files import read_trial
from ..figures.base import empty
from ..figures.fallback import HEIGHT, BudgetPoint, pareto, trials
from ..figures.theme import BY_NUMBER, GRID_NUMBER, GRID_PERCENT, NO_DATA, plain_number
from ..web.run_view import SMALL_BYTES, RunView
from ..web.urls import View, href
from ..widgets import badge, card, code, control, graph, grid, note, number, percent, poster, segments, slider, table
from .axes import shaped
from .base import Page

if TYPE_CHECKING:
    from fp8debug import Fallback

BUDGET, TO, FILL = 10, "json", "no"
#: Budgets of the curve, in percent.
CURVE = (0, 1, 2, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)
GRADES = {"closed": "ok", "nothing_to_close": "ok", "found": "ok", "partly": "warning", "not_closed": "error", "failed": "error"}
COLUMNS: tuple[dict[str, Any], ...] = (
    {"field": "module", "headerName": "Module", "cellRenderer": "Link", "width": 190, "tooltipField": "module"},
    {
        "field": "gemms",
        "headerName": "GEMMs",
        "width": 130,
        "minWidth": 122,
        "headerTooltip": "which of its three GEMMs leave their cast",
    },
    {"field": "tensor", "headerName": "Tensor", "width": 84},
    {"field": "cast", "headerName": "Run in", "width": 170, "minWidth": 168, "tooltipField": "cast"},
    {"field": "reasons", "headerName": "Reasons", "width": 110, "headerTooltip": "codes of findings; fp8debug explain CODE"},
    {
        "field": "damage",
        "headerName": "Damage",
        "width": 90,
        "type": "rightAligned",
        "valueFormatter": GRID_NUMBER,
        "comparator": BY_NUMBER,
        "headerTooltip": "mean over sampled rows of the output, in loss^2: what its rounding errors do to the loss",
    },
    {
        "field": "cost",
        "headerName": "Given back",
        "width": 100,
        "type": "rightAligned",
        "valueFormatter": GRID_PERCENT,
        "comparator": BY_NUMBER,
        "headerTooltip": "share of what FP8 saves over BF16 in all Linears together",
    },
    {
        "field": "cheaper",
        "headerName": "Cheaper cure first",
        "width": 320,
        "tooltipField": "cheaper",
        "headerTooltip": "a change of the cast to try before BF16",
    },
)


def row(fallback: Fallback, run: str | None) -> dict[str, Any]:
    """Return a candidate as a row of the grid."""
    site = None if fallback.tensor == "*" or not fallback.gemms else f"{fallback.gemms[0]}.{fallback.tensor}"
    return {
        "id": f"{fallback.module} {fallback.gemms} {fallback.tensor} {fallback.cast}",
        "module": fallback.module,
        "href": href("module", run, module=fallback.module, site=site),
        "gemms": " ".join(str(gemm) for gemm in fallback.gemms),
        "tensor": "all" if fallback.tensor == "*" else str(fallback.tensor),
        "cast": "BF16" if fallback.cast is None else str(fallback.cast),
        "reasons": " ".join(fallback.reasons),
        "damage": plain_number(fallback.damage),
        "cost": plain_number(fallback.cost),
        "cheaper": fallback.cheaper or NO_DATA,
    }


def budget_of(view: View) -> int:
    """Return the budget of the URL in percent."""
    asked = view.get_int("budget")
    return BUDGET if asked is None else min(100, max(0, asked))


def _choice(run_view: RunView, budget: int, total: float) -> BudgetPoint:
    return _chosen(run_view.fallbacks(budget / 100, fill=True), budget, total)


def damage(fallbacks: list[Fallback]) -> float | None:
    """Return the recorded damage of the modules whose forward GEMM a list takes out of FP8.

    None where a list has candidates and the damage of none of them is known: what another cast or a backward GEMM takes away is
    not recorded, nor is that of a module whose error is NaN.
    """
    taken = {f.module: f.damage for f in fallbacks if f.cast is None and "fprop" in f.gemms and f.damage is not None}
    known = [value for value in taken.values() if math.isfinite(value)]
    return sum(known) if known or not fallbacks else None


def lost_damage(run_view: RunView) -> tuple[int, int] | None:
    """Return at how many sampled steps the damage of an output is not known, as that holds NaN or Inf, and the first; or None."""

    def ask() -> tuple[int, int] | None:
        if not run_view.run.has("damage"):
            return None
        query = (
            "SELECT count(DISTINCT step) AS num, min(step) AS first FROM sites WHERE actual AND gemm = 'fprop'"
            " AND reference = 'shadow' AND (num_nan + num_inf > 0 OR NOT isfinite(damage))"
        )
        (found,) = run_view.run.sql(query).to_pylist()
        return (found["num"], found["first"]) if found["num"] else None

    lost: tuple[int, int] | None = run_view.cache("lost damage", ask)
    return lost


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether triage or the curve is still to be computed."""
    return not run_view.is_triaged or not run_view.has_list(CURVE[-1] / 100, fill=True)


def settle(view: View, run_view: RunView) -> object:
    """Judge the run and fill every budget of the curve."""
    lost_damage(run_view)
    return [run_view.fallbacks(budget / 100, fill=True) for budget in CURVE]


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    rows, text, about, notes, curve, proof = parts(view, run_view)
    fill = [{"value": "no", "label": "modules with findings"}, {"value": "yes", "label": "fill the budget"}]
    controls = html.Div(
        [
            slider("budget", BUDGET, budget_of(view), "budget: share of the FP8 speed-up to give back", (0, 10, 25, 50, 75, 100)),
            segments("fill", FILL, view.get("fill", FILL), fill, "spend it on"),
        ],
        className="controls",
    )
    to = control("to", TO, view.get("to", TO), EXPORTERS.names(), "for", 150)
    copied: dict[str, Any] = {"data-copy": "exported"}
    copy = html.Button("Copy", id="fallback-copy", className="linkish", **copied)
    save = html.Button("Download", id="fallback-save", className="linkish")
    return html.Div(
        [
            card("Candidates", controls, html.Div(about, id="fallback-about"), grid("candidates", COLUMNS, rows, "No candidate")),
            html.Div(
                [
                    card(
                        "The file",
                        html.Div(notes, id="fallback-notes"),
                        html.Pre(text, id="exported", tabIndex=0),
                        dcc.Download(id="fallback-file"),
                        note=html.Div([to, copy, save], className="controls"),
                    ),
                    card("What a budget buys", graph("pareto", curve), note="every budget filled by damage per speed"),
                ],
                className="columns columns-file",
            ),
            card("Verification", html.Div(proof, id="fallback-proof"), note="trainings with and without the candidates"),
        ],
        className="page",
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return the rows, the exported text, lines about both, the curve, and the proof."""
    budget, judged, proof = budget_of(view), run_view.judged(), _proof(view, run_view)
    if judged.is_pending or (run_view.size >= SMALL_BYTES and is_pending(view, run_view)):
        waiting = poster("Triage is running; candidates follow from its findings.")
        return [], "", waiting, None, empty("not known yet", HEIGHT), proof
    if judged.failure:
        failed = note(f"Triage could not run, so nothing is recommended: {judged.failure}", kind="warning")
        return [], "", failed, None, empty("nothing to choose from", 200), proof
    try:
        fallbacks = run_view.fallbacks(budget / 100, fill=view.get("fill") == "yes")
        is_too_dear = not fallbacks and bool(run_view.fallbacks(1.0, fill=view.get("fill") == "yes"))
        basis = cost_basis(run_view.run) or "Costs are shares of the FLOPs; fp8debug speed RUN measures them."
        total = damage(run_view.fallbacks(1.0, fill=True)) or 1.0
        curve = pareto([_choice(run_view, share, total) for share in CURVE], _chosen(fallbacks, budget, total))
        lost = lost_damage(run_view)
        curve.about(run_view.name, "damage recovered over speed-up given back", _steps(run_view))
    except Fp8DebugError as error:
        return [], "", note(str(error), kind="error"), None, empty("nothing to choose from", 200), proof
    cost = sum(f.cost for f in fallbacks)
    count = f"{len(fallbacks) or 'No'} candidate{'' if len(fallbacks) == 1 else 's'}"
    words = f"{count}, giving back {percent(cost) if cost else 'nothing'} of the FP8 speed-up. {basis[:1].upper()}{basis[1:]}"
    if is_too_dear:
        words = f"No candidate within the budget: each costs more than {budget} % of the FP8 speed-up; raise the budget."
    elif not fallbacks:
        from fp8debug.fallback.policy import without_candidates  # not before the first paint

        words = f"No candidate: {without_candidates(judged.findings)}."
    if lost is not None:
        many = f"{lost[0]:,} sampled step{'s' if lost[0] > 1 else ''}, the first {lost[1]:,}"
        words += f" The curve lacks the damage of outputs with NaN or Inf, which is not known: at {many}."
    exporter = EXPORTERS.get(_format(view))
    limits = [note(f"{exporter.name} {line}", kind="warning") for line in exporter.notes(run_view.run, fallbacks)]
    return (
        [row(f, view.run) for f in fallbacks],
        _text(view, run_view, fallbacks),
        note(words),
        [_use(view, run_view), *limits],
        curve,
        proof,
    )


def _steps(run_view: RunView) -> str:
    """Return the steps that the damage was recorded in, for the picture's title: its axes are none of steps."""
    first, last = run_view.run.steps_range
    return f"steps {first} to {last}"


def _chosen(fallbacks: list[Fallback], budget: int, total: float) -> BudgetPoint:
    cost = sum(f.cost for f in fallbacks)
    taken = damage(fallbacks)
    recovered = None if taken is None else taken / total
    return BudgetPoint(budget=budget / 100, cost=cost, recovered=recovered, count=len(fallbacks))


def _format(view: View) -> str:
    asked = view.get("to", TO)
    return asked if asked in EXPORTERS.names() else TO


def _text(view: View, run_view: RunView, fallbacks: list[Fallback]) -> str:
    files = EXPORTERS.get(_format(view)).files(run_view.run, fallbacks)
    if len(files) == 1:
        return next(iter(files.values()))
    return "\n".join(f"# file: fallback{stem}\n{text}" for stem, text in files.items())


def _use(view: View, run_view: RunView) -> Component:
    path, name = shlex.quote(str(run_view.run.path)), _format(view)
    more = f" --budget {budget_of(view)}%" if budget_of(view) != BUDGET else ""
    more += " --fill" if view.get("fill") == "yes" else ""
    command = f"fp8debug fallback {path}{more} --to {name} -o fallback{EXPORTERS.get(name).suffix}"
    apply: list[Component | str] = []
    if name == "json":
        apply = [". Apply it after convert(): ", code("fp8debug.apply(model, 'fallback.json')")]
    return note("The same file: ", code(command), *apply)


def _proof(view: View, run_view: RunView) -> list[Component]:
    path = shlex.quote(str(run_view.run.path))
    shown: list[Component] = []
    for name, ask in (
        ("verify.json", "how much of the loss gap the list closes"),
        ("bisect.json", "which modules must leave FP8, judged by the loss alone"),
    ):
        command = f"fp8debug {name.removesuffix('.json')} {path} --script train.py"
        try:
            found = read_trial(run_view.run.path, name)
        except Fp8DebugError as error:
            shown.append(note(str(error), kind="warning"))
            continue
        if found is None:
            shown.append(note(f"Not measured yet: {ask}. To measure it: ", code(command)))
            continue
        verdict = str(found.get("verdict", "unknown"))
        shown.append(html.H3([badge(GRADES.get(verdict, "unknown"), f"{name}: {verdict.replace('_', ' ')}")]))
        shown.append(html.Ul([html.Li(line) for line in found["statements"]]))
        if found.get("arms"):
            curves = trials(found).about(run_view.name, f"arms of fp8debug {name.removesuffix('.json')}", "loss")
            shown += [_arms(found), graph("trials", shaped(curves, view, run_view))]
    return shown


def _arms(found: Mapping[str, Any]) -> Component:
    body: list[list[Any]] = []
    for arm in found["arms"]:
        if isinstance(arm, Mapping):
            bands = [_band(arm.get("above_bf16")), _band(arm.get("share"))]
            body.append(
                [
                    str(arm.get("name")),
                    number(arm.get("loss")),
                    *bands,
                    str(arm.get("closed") or NO_DATA),
                    str(arm.get("about") or ""),
                ]
            )
    return table(["Arm", "Loss", "Above BF16", "Share of the gap closed", "Closed", "What"], body, numeric=(1,), name="verify")


def _band(value: Any) -> str:
    if not isinstance(value, Mapping):
        return NO_DATA
    return f"{number(value.get('value'), 3)} [{number(value.get('low'), 3)}, {number(value.get('high'), 3)}]"


def exported(view: View, run_view: RunView) -> dict[str, Any]:
    """Return the file on view, as the browser saves it."""
    text = _text(view, run_view, run_view.fallbacks(budget_of(view) / 100, fill=view.get("fill") == "yes"))
    return {"content": text, "filename": f"fallback{EXPORTERS.get(_format(view)).suffix}", "type": "text/plain"}


PAGE = Page(name="fallback", layout=layout, parts=parts, is_pending=is_pending, settle=settle)

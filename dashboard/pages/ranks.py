"""The same site on every rank: how far they lie apart, which one lies apart, and whether their scales agree."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError

from ..data import ranks as rank_data
from ..data.heat_rows import MAX_ROWS, arranged
from ..data.metric_labels import label_of
from ..data.nonfinite import INF
from ..data.nonfinite import NAMES as NAMES_OF
from ..figures.base import empty, heatmap
from ..figures.module import SITES
from ..figures.ranks import spread
from ..figures.theme import BY_NUMBER, GRID_NUMBER, NO_DATA, plain_number
from ..web.run_view import RunView
from ..web.urls import View, href
from ..widgets import SITE_WIDTH, card, code, control, graph, grid, note, number, poster, table
from .axes import controls as axis_controls
from .axes import shaped
from .base import Page
from .heatmap import metric_options, read_thinly

SITE = "fprop.input"
#: Ranks that the page lists.
MAX_RANKS = 256
NAMES = tuple(f"{gemm}.{tensor}" for row in SITES for gemm, tensor in row)
_NUMBER: dict[str, Any] = {"type": "rightAligned", "valueFormatter": GRID_NUMBER, "comparator": BY_NUMBER, "width": 110}
COLUMNS: tuple[dict[str, Any], ...] = (
    {"field": "module", "headerName": "Module", "cellRenderer": "Link", "width": 220, "tooltipField": "module"},
    {"field": "site", "headerName": "Site", "width": 150, "minWidth": SITE_WIDTH},
    {"field": "spread", "headerName": "Largest spread", **_NUMBER},
    {"field": "step", "headerName": "At step", "type": "rightAligned", "width": 90},
    {"field": "median", "headerName": "Median", **_NUMBER},
    {"field": "outlier", "headerName": "Outlier rank", "type": "rightAligned", "width": 110},
    {"field": "value", "headerName": "Its value", **_NUMBER},
    {"field": "scale_spread", "headerName": "Scales differ by 2^", **_NUMBER},
)


def default_metric(run_view: RunView) -> str:
    """Return the scale, about which ranks should agree most, or what else was recorded."""
    return "scale_inv_mean_log2" if "scale_inv_mean_log2" in run_view.recorded() else "sqnr_db"


def _metric(view: View, run_view: RunView) -> str:
    return view.get("metric") or default_metric(run_view)


def _key(view: View, run_view: RunView) -> tuple[str, str]:
    return "ranks", _metric(view, run_view)


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether the sites are still to be compared, which reads the whole run."""
    return len(run_view.run.ranks) > 1 and not run_view.is_cached(_key(view, run_view))


def settle(view: View, run_view: RunView) -> object:
    """Compare all sites over the ranks; of a metric that is none, or was not recorded, there are none."""
    metric = _metric(view, run_view)
    if len(run_view.run.ranks) < 2 or metric not in run_view.recorded():
        return run_view.cache(_key(view, run_view), list)
    return run_view.cache(
        _key(view, run_view), lambda: rank_data.disagreement(run_view.second_connection(), metric, run_view.is_huge)
    )


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    listed, about, rows, heat, lines = parts(view, run_view)
    is_one = len(run_view.run.ranks) < 2  # there is nothing to compare
    metric, default = _metric(view, run_view), default_metric(run_view)
    names = [str(m["fqn"]) for m in run_view.run.modules]
    sites = [{"value": "", "label": "(largest spread)"}, *({"value": n, "label": n.replace(".", " ")} for n in NAMES)]
    controls = html.Div(
        [
            control("metric", default, metric, metric_options(run_view.recorded()), "metric", 340),
            control("of", "", view.get("of"), [{"value": "", "label": "(largest spread)"}, *names], "module", 280),
            control("site", "", view.get("site"), sites, "site", 180),
        ],
        className="controls",
    )
    return html.Div(
        [
            card(
                "One site on every rank",
                html.Div(controls, hidden=is_one),
                html.Div(about, id="ranks-about"),
                html.Div([axis_controls(view, run_view), graph("rank-lines", lines), graph("rank-heat", heat)], hidden=is_one),
            ),
            html.Div(
                card(
                    "Sites by disagreement",
                    grid("rank-sites", COLUMNS, rows, "No site with two ranks"),
                    note=f"the largest spread first, {rank_data.MAX_SITES} sites at most; click a module to see it above",
                ),
                hidden=is_one,
            ),
            card("Ranks", html.Div(listed, id="rank-list")),
        ],
        className="page",
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return the ranks, a line about the site, the sites by disagreement, ranks by steps, and the band of all ranks."""
    run, metric, listed = run_view.run, _metric(view, run_view), _ranks(run_view)
    if len(run.ranks) < 2:
        about = note(
            "This run has one rank, so there is nothing to compare. Several processes that record into one folder give one: ",
            code("torchrun --nproc-per-node 2 -m fp8debug.run --out RUN train.py"),
        )
        return listed, about, [], empty("one rank only", 120), empty("one rank only", 120)
    if run_view.is_small:  # at once, so that the site that is shown first is the one that lies apart
        settle(view, run_view)
    found = run_view.cached(_key(view, run_view))
    rows = [_row(one, view, metric) for one in found or ()]
    try:
        module, site, worst = _site(view, run_view, found or ())
        rank = worst["outlier"] if worst is not None else run.ranks[0]
        step = worst["step"] if worst is not None else None
        heat = rank_data.by_rank(run, module, site, metric, run_view.is_huge)
        drawn = arranged(heat, order="order" if len(heat.modules) <= MAX_ROWS else "worst")
        lines = spread(rank_data.spread_over_steps(run, module, site, metric, rank, run_view.is_huge), metric, step)
    except Fp8DebugError as error:
        return listed, note(str(error), kind="warning"), rows, empty("not recorded", 160), empty("not recorded", 160)
    words = f"{module}, {site[0]} {site[1]}, running cast, on {len(run.ranks)} ranks."
    if worst is not None and worst["state"]:
        rest = len(run.ranks) - worst["num_lost"]
        others = f" and {worst['num_lost'] - 1} more" if worst["num_lost"] > 1 else ""
        whole = "the other rank has none" if rest == 1 else f"the other {rest} ranks have none"
        words += f" {NAMES_OF[worst['state']]} on rank {rank}{others} from step {worst['step']:,}; {whole}."
    elif worst is not None:
        beside = f"{number(worst['value'])} beside {number(worst['median'])}"
        words += f" Rank {rank} lies farthest from the median, at step {worst['step']:,}: {beside}."
    words += f" {read_thinly(heat.steps_apart)}" if heat.steps_apart > 1 else ""
    words += f" The {MAX_ROWS} worst of {drawn.total:,} ranks are drawn." if drawn.total > MAX_ROWS else ""
    about = note(words) if found is not None else poster(words + " All sites are being compared.")
    named = (run_view.name, module, " ".join(site), label_of(metric))
    heats = shaped(heatmap(drawn.heat, rows=drawn), view, run_view).about(*named, "by rank")
    return listed, about, rows, heats, shaped(lines, view, run_view).about(*named, "ranks")


def _site(view: View, run_view: RunView, found: Any) -> tuple[str, tuple[str, str], dict[str, Any] | None]:
    """Return module, site and what is known of their disagreement: of those that the URL leaves open the largest spread."""
    names = [str(m["fqn"]) for m in run_view.run.modules]
    module = view.get("of") if view.get("of") in names else ""
    site = view.get("site") if view.get("site") in NAMES else ""
    for one in found:  # the largest spread first
        if module in ("", one["module"]) and site in ("", f"{one['gemm']}.{one['tensor']}"):
            return one["module"], (one["gemm"], one["tensor"]), one
    gemm, _, tensor = (site or SITE).partition(".")
    return module or next(iter(names), ""), (gemm, tensor), None


def _row(one: dict[str, Any], view: View, metric: str) -> dict[str, Any]:
    site = f"{one['gemm']}.{one['tensor']}"
    target = href("ranks", view.run, of=one["module"], site=site, metric=view.get("metric"))
    numbers = {name: plain_number(one[name]) for name in ("spread", "median", "value", "scale_spread")}
    if one["state"]:
        numbers |= {"spread": "NaN", "value": "Inf" if one["state"] == INF else "NaN"}  # as text: worse than every number
    return {**one, **numbers, "id": f"{one['module']} {site} {one['reference']}", "site": site.replace(".", " "), "href": target}


def _ranks(run_view: RunView) -> list[Component]:
    manifests = run_view.run.rank_manifests
    body: list[list[Any]] = []
    listed = rank_data.rank_rows(run_view.run)
    for one in listed[:MAX_RANKS]:
        own = manifests.get(one["rank"], {})
        state = "ended" if own.get("ended") else "not closed" if own else "no manifest"
        body.append([number(one["rank"]), number(one["last"]), number(one["n"]), str(own.get("device") or NO_DATA), state])
    missing = [note(problem, kind="warning") for problem in run_view.run.problems if "rank" in problem]
    head = ["Rank", "Last step", "Rows", "Device", "State"]
    rest = "the folders rank=... of the run have all"
    return [*missing, table(head, body, numeric=(0, 1, 2), name="ranks", total=len(listed), rest=rest)]


PAGE = Page(name="ranks", layout=layout, parts=parts, is_pending=is_pending, settle=settle)

"""The same site on every rank: how far they lie apart, which one lies apart, and whether their scales agree."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError

from ..data import ranks as rank_data
from ..figures.base import empty, heatmap
from ..figures.module import SITES
from ..figures.ranks import spread
from ..figures.theme import BY_NUMBER, GRID_NUMBER, NO_DATA, plain_number
from ..web.run_view import Opened
from ..web.urls import View, href
from ..widgets import card, code, control, graph, grid, note, number, poster, table
from .base import Page
from .heatmap import metric_options, read_thinly

SITE = "fprop.input"
#: Ranks that the page lists.
MAX_RANKS = 256
NAMES = tuple(f"{gemm}.{tensor}" for row in SITES for gemm, tensor in row)
_NUMBER: dict[str, Any] = {"type": "rightAligned", "valueFormatter": GRID_NUMBER, "comparator": BY_NUMBER, "width": 110}
COLUMNS: tuple[dict[str, Any], ...] = (
    {"field": "module", "headerName": "Module", "cellRenderer": "Link", "width": 220, "tooltipField": "module"},
    {"field": "site", "headerName": "Site", "width": 150},
    {"field": "spread", "headerName": "Largest spread", **_NUMBER},
    {"field": "step", "headerName": "At step", "type": "rightAligned", "width": 90},
    {"field": "median", "headerName": "Median", **_NUMBER},
    {"field": "outlier", "headerName": "Outlier rank", "type": "rightAligned", "width": 110},
    {"field": "value", "headerName": "Its value", **_NUMBER},
    {"field": "scale_spread", "headerName": "Scales differ by 2^", **_NUMBER},
)


def default_metric(opened: Opened) -> str:
    """Return the scale, about which ranks should agree most, or what else was recorded."""
    return "scale_inv_mean_log2" if "scale_inv_mean_log2" in opened.recorded() else "sqnr_db"


def _metric(view: View, opened: Opened) -> str:
    return view.get("metric") or default_metric(opened)


def _key(view: View, opened: Opened) -> tuple[str, str]:
    return "ranks", _metric(view, opened)


def is_pending(view: View, opened: Opened) -> bool:
    """Tell whether the sites are still to be compared, which reads the whole run."""
    return len(opened.run.ranks) > 1 and not opened.is_kept(_key(view, opened))


def settle(view: View, opened: Opened) -> object:
    """Compare all sites over the ranks; of a metric that is none, or was not recorded, there are none."""
    metric = _metric(view, opened)
    if len(opened.run.ranks) < 2 or metric not in opened.recorded():
        return opened.keep(_key(view, opened), list)
    return opened.keep(_key(view, opened), lambda: rank_data.disagreement(opened.aside(), metric, opened.is_huge))


def layout(view: View, opened: Opened) -> Component:
    """Return the page."""
    listed, about, rows, heat, lines = parts(view, opened)
    metric, default = _metric(view, opened), default_metric(opened)
    names = [str(m["fqn"]) for m in opened.run.modules]
    sites = [{"value": "", "label": "(largest spread)"}, *({"value": n, "label": n.replace(".", " ")} for n in NAMES)]
    controls = html.Div(
        [
            control("metric", default, metric, metric_options(opened.recorded()), "metric", 230),
            control("of", "", view.get("of"), [{"value": "", "label": "(largest spread)"}, *names], "module", 280),
            control("site", "", view.get("site"), sites, "site", 180),
        ],
        className="controls",
    )
    return html.Div(
        [
            card(
                "One site on every rank",
                controls,
                html.Div(about, id="ranks-about"),
                graph("rank-lines", lines),
                graph("rank-heat", heat),
            ),
            card(
                "Sites by disagreement",
                grid("rank-sites", COLUMNS, rows, "No site with two ranks"),
                note=f"the largest spread first, {rank_data.MAX_SITES} sites at most; click a module to see it above",
            ),
            card("Ranks", html.Div(listed, id="rank-list")),
        ],
        className="page",
    )


def parts(view: View, opened: Opened) -> tuple[Any, ...]:
    """Return the ranks, a line about the site, the sites by disagreement, ranks by steps, and the band of all ranks."""
    run, metric, listed = opened.run, _metric(view, opened), _ranks(opened)
    if len(run.ranks) < 2:
        about = note(
            "This run has one rank, so there is nothing to compare. Several processes that record into one folder give one: ",
            code("torchrun --nproc-per-node 2 -m fp8debug.run --out RUN train.py"),
        )
        return listed, about, [], empty("one rank only", 120), empty("one rank only", 120)
    found = opened.kept(_key(view, opened))
    rows = [_row(one, view, metric) for one in found or ()]
    try:
        module, site, worst = _site(view, opened, found or ())
        rank = worst["outlier"] if worst is not None else run.ranks[0]
        step = worst["step"] if worst is not None else None
        heat = rank_data.by_rank(run, module, site, metric, opened.is_huge)
        lines = spread(rank_data.spread_over_steps(run, module, site, metric, rank, opened.is_huge), metric, step)
    except Fp8DebugError as error:
        return listed, note(str(error), kind="warning"), rows, empty("not recorded", 160), empty("not recorded", 160)
    words = f"{module}, {site[0]} {site[1]}, running cast, on {len(run.ranks)} ranks."
    if worst is not None:
        beside = f"{number(worst['value'])} beside {number(worst['median'])}"
        words += f" Rank {rank} lies farthest from the median, at step {worst['step']:,}: {beside}."
    words += f" {read_thinly(heat.steps_apart)}" if heat.steps_apart > 1 else ""
    about = note(words) if found is not None else poster(words + " All sites are being compared.")
    return listed, about, rows, heatmap(heat), lines


def _site(view: View, opened: Opened, found: Any) -> tuple[str, tuple[str, str], dict[str, Any] | None]:
    """Return module, site and what is known of their disagreement: of those that the URL leaves open the largest spread."""
    names = [str(m["fqn"]) for m in opened.run.modules]
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
    return {**one, **numbers, "id": f"{one['module']} {site} {one['reference']}", "site": site.replace(".", " "), "href": target}


def _ranks(opened: Opened) -> list[Component]:
    manifests = opened.run.rank_manifests
    body: list[list[Any]] = []
    listed = rank_data.rank_rows(opened.run)
    for one in listed[:MAX_RANKS]:
        own = manifests.get(one["rank"], {})
        state = "ended" if own.get("ended") else "not closed" if own else "no manifest"
        body.append([number(one["rank"]), number(one["last"]), number(one["n"]), str(own.get("device") or NO_DATA), state])
    missing = [note(problem, kind="warning") for problem in opened.run.problems if "rank" in problem]
    head = ["Rank", "Last step", "Rows", "Device", "State"]
    rest = "the folders rank=... of the run have all"
    return [*missing, table(head, body, numeric=(0, 1, 2), name="ranks", total=len(listed), rest=rest)]


PAGE = Page(name="ranks", layout=layout, parts=parts, is_pending=is_pending, settle=settle)

"""Every page can be read and used: widths from a telephone's up, contrasts, what moves while a page loads, and titles."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fp8debug.errors import UsageError
from fp8debug.rules.comparison.sites import SiteDifference
from fp8debug.store.write.writer import RunWriter
from fp8debug_dashboard.figures import theme
from fp8debug_dashboard.pages import compare, findings, overview, runs
from fp8debug_dashboard.web import run_view as opened_module
from fp8debug_dashboard.web.screens import title_of
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from fp8debug_dashboard.widgets import column_definitions, table
from tests.dashboard import samples
from tests.dashboard.data.test_dashboard_nonfinite import text
from tests.dashboard.pages.test_dashboard_browser import go
from tests.dashboard.serving import served
from tests.shortened import shortened
from tests.synthetic import Override, Plan, manifest_of, steps_row

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
PlaywrightTimeout = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").TimeoutError
browser_test = pytest.mark.browser

WIDTHS = (390, 768, 1024, 1256, 1600, 3840)
HERE = Path(__file__).parents[1]
#: Run in a page: the pieces of text, and the icons of plots, whose contrast is below WCAG 2.2 AA (1.4.3, 1.4.11).
POOR = (HERE / "contrast.js").read_text()
#: Run in a page: the pieces of text that are cut, or lie over each other.
CUT = (HERE / "cut_text.js").read_text()
#: Run before a page loads: sums up the layout shifts that no input caused.
SHIFTS = """
window.shift = { sum: 0, worst: [] };
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.hadRecentInput) continue;
    window.shift.sum += entry.value;
    window.shift.worst.push([entry.value, entry.sources.map(({ node, previousRect, currentRect }) => [
      node && (node.id || node.className || node.nodeName),
      [previousRect.y, previousRect.height], [currentRect.y, currentRect.height],
    ])]);
  }
}).observe({ type: "layout-shift", buffered: true });
"""
#: Run in a page: what reaches out of the window to the right, and stands in nothing that scrolls or cuts.
OUTSIDE = """
() => Array.from(document.querySelectorAll("body *")).filter((at) => {
  if (!at.checkVisibility({ visibilityProperty: true }) || at.getBoundingClientRect().width === 0) return false;
  if (at.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let one = at.parentElement; one; one = one.parentElement) {
    if (getComputedStyle(one).overflowX !== "visible") return false;
  }
  return true;
}).map((at) => at.tagName + "." + at.className)
"""


@pytest.fixture
def narrow_page(browser: Browser, warm: None, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of the width and colours that the test asks for."""
    width, scheme = getattr(request, "param", (390, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light")
    context.set_default_timeout(180_000)  # the machine may be busy with other tests
    expect.set_options(timeout=180_000)
    yield context.new_page()
    context.close()


def settle(page: Page, address: str) -> None:
    """Wait until a page has everything that it draws by itself."""
    go(page, address)
    page.locator(".pulse").first.wait_for(state="detached")
    page.wait_for_function(
        "() => Array.from(document.querySelectorAll('.saved-plot')).every((box) => box.querySelector('.main-svg'))"
        " && Array.from(document.querySelectorAll('.saved-grid')).every((box) => box.querySelector('.ag-root'))"
    )
    page.wait_for_load_state("networkidle")


@browser_test
@pytest.mark.parametrize("narrow_page", [(390, "light")], indirect=True)
@pytest.mark.parametrize("name", shortened(samples.PAGES, 2))
def test_no_page_scrolls_sideways_and_its_head_is_whole(narrow_page: Page, site: str, name: str) -> None:
    settle(narrow_page, site + samples.PAGES[name])
    for width in WIDTHS:
        narrow_page.set_viewport_size({"width": width, "height": 900})
        narrow_page.wait_for_function(
            f"width => innerWidth === width && document.documentElement.scrollWidth <= width && !({OUTSIDE.strip()})().length",
            arg=width,
        )
        for label in ("follow", "Refresh", "dark or light"):
            box = narrow_page.get_by_label(label).or_(narrow_page.get_by_role("button", name=label)).first.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, f"{label} is cut at {width}"


@pytest.fixture(scope="module")
def nonfinite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with a run of NaN beside seven others to compare it with."""
    root = tmp_path_factory.mktemp("many")
    samples.write_nan(root / "nan")
    samples.write_sick(root / "sick", num_steps=400, every=10)
    for i in range(6):
        samples.write_healthy(root / f"sweep-{i}", num_steps=40)
    with served(root) as address:
        yield address


@browser_test
@pytest.mark.parametrize("narrow_page", [(390, "light")], indirect=True)
def test_no_text_of_a_plot_or_number_of_a_table_is_cut_at_any_width(narrow_page: Page, site: str, nonfinite: str) -> None:
    others = "/".join(["sick", *(f"sweep-{i}" for i in range(6))])
    pages = [site + address for address in samples.PAGES.values()]
    pages += [nonfinite + address for address in ("/?run=nan", "/module?run=nan", "/heatmap?run=nan", "/findings?run=nan")]
    pages.append(f"{nonfinite}/parity?run=sick&with=sweep-0")
    for address in (*pages, f"{nonfinite}/compare?run=nan&with={others}"):
        settle(narrow_page, address)
        for width in (390, 768, 1024, 1280, 1920, 2560, 3840, 390):  # back again: plots are drawn anew for their room
            narrow_page.set_viewport_size({"width": width, "height": 900})
            try:
                narrow_page.wait_for_function(f"() => !({CUT.strip()})().length", timeout=60_000)
            except PlaywrightTimeout:
                raise AssertionError(f"{address} at {width}: {narrow_page.evaluate(CUT)}") from None


@browser_test
@pytest.mark.parametrize("narrow_page", [(390, "light")], indirect=True)
def test_on_a_telephone_every_page_is_reached_from_the_menu(narrow_page: Page, site: str) -> None:
    settle(narrow_page, f"{site}/?run=sick")
    menu = narrow_page.get_by_role("button", name=re.compile("Overview"))
    tabs = narrow_page.locator("#tabs a")
    expect(tabs.first).to_be_hidden()
    for i, title in enumerate(["Overview", "Heatmap", "Model", "Module", "Ranks", "Findings", "Fallback", "Compare"]):
        narrow_page.locator("#menu").click()
        expect(narrow_page.locator("#menu")).to_have_attribute("aria-expanded", "true")
        expect(tabs.nth(i)).to_be_in_viewport()
        tabs.nth(i).click()
        expect(narrow_page.locator("#menu")).to_contain_text(title)
        expect(tabs.first).to_be_hidden()
    assert menu.count() == 0
    narrow_page.locator("#module-search").fill("5.mlp.down")
    narrow_page.get_by_role("option", name="blocks.5.mlp.down").click()
    expect(narrow_page.locator("h1")).to_have_text("blocks.5.mlp.down")


@browser_test
@pytest.mark.parametrize("narrow_page", [(1024, "light")], indirect=True)
def test_no_word_is_broken_to_fit_a_column(narrow_page: Page, site: str) -> None:
    settle(narrow_page, f"{site}/?run=sick")
    broken = narrow_page.evaluate(
        """() => Array.from(document.querySelectorAll(".table td, .table th")).flatMap((cell) => {
          const range = document.createRange(), walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), found = [];
          for (let node = walk.nextNode(); node; node = walk.nextNode()) {
            for (const match of node.data.matchAll(/[\\w.]+/g)) {
              range.setStart(node, match.index); range.setEnd(node, match.index + match[0].length);
              if (new Set(Array.from(range.getClientRects(), ({ top }) => Math.round(top))).size > 1) found.push(match[0]);
            }
          }
          return found;
        })"""
    )
    assert broken == []


def violations(page: Page) -> list[str]:
    """Return what axe-core finds against WCAG and good practice, each with the first element that it is about."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed").Axe()
    found = axe.run(page).response["violations"]
    return [f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:120]}" for one in found]


@browser_test
@pytest.mark.parametrize("narrow_page", [(1256, "light"), (1256, "dark")], indirect=True, ids=["light", "dark"])
def test_nothing_keeps_people_from_reading_or_using_a_page(narrow_page: Page, site: str) -> None:
    for name, address in samples.PAGES.items():
        settle(narrow_page, site + address)
        assert narrow_page.evaluate(POOR) == [], f"too little contrast on {name}"
        assert violations(narrow_page) == [], name


@browser_test
@pytest.mark.parametrize("narrow_page", [(390, "dark")], indirect=True)
def test_menus_and_pages_that_are_none_can_be_used_too(narrow_page: Page, site: str) -> None:
    for address in ("/module?run=sick&module=no.such", "/nowhere?run=sick"):
        settle(narrow_page, site + address)
        assert violations(narrow_page) == [], address
    settle(narrow_page, f"{site}/heatmap?run=sick")
    narrow_page.locator("#menu").click()
    assert violations(narrow_page) == []
    narrow_page.get_by_label("metric").click()
    expect(narrow_page.get_by_role("option").first).to_be_visible()
    assert violations(narrow_page) == []


@browser_test
@pytest.mark.parametrize("narrow_page", [(1256, "light"), (1256, "dark")], indirect=True, ids=["light", "dark"])
def test_the_box_of_a_finding_in_the_heatmap_can_be_read(narrow_page: Page, site: str) -> None:
    settle(narrow_page, f"{site}/heatmap?run=sick")
    mark = narrow_page.locator("#heat .scatterlayer .point").first
    mark.hover(force=True)
    box = narrow_page.locator("#heat .hoverlayer .hovertext").filter(has_text="F101").first
    expect(box).to_be_attached()
    ratios = box.evaluate(f"(at) => ({POOR.strip()})(at)")
    assert ratios and min(ratios) >= 4.5


@browser_test
@pytest.mark.alone  # what is painted before the server answers depends on what else is at work
@pytest.mark.parametrize("narrow_page", [(390, "light"), (1256, "light")], indirect=True, ids=["390", "1256"])
@pytest.mark.parametrize("is_large", [False, True], ids=["at once", "later"])
def test_what_stands_on_a_page_stays_where_it_is_while_it_loads(
    narrow_page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:  # the verdict, and what else takes long, come after the first paint
        monkeypatch.setattr(opened_module, "SMALL_BYTES", 0)
    narrow_page.add_init_script(SHIFTS)
    with served(folder) as address:
        for name, page in samples.PAGES.items():
            settle(narrow_page, address + page)
            found = narrow_page.evaluate("window.shift")
            assert found["sum"] <= 0.1, f"{name} moves while it loads: {sorted(found['worst'], reverse=True)[:2]}"


@browser_test
@pytest.mark.alone  # what is painted before the server answers depends on what else is at work
@pytest.mark.parametrize("narrow_page", [(390, "light")], indirect=True, ids=["390"])
@pytest.mark.parametrize("write", [samples.write_nan, samples.write_healthy], ids=["NaN", "healthy"])
def test_the_overview_of_any_run_stays_where_it_is_when_its_verdict_comes(
    narrow_page: Page, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    write(tmp_path / "run")
    narrow_page.add_init_script(SHIFTS)
    with served(tmp_path / "run") as address:
        settle(narrow_page, address)
        found = narrow_page.evaluate("window.shift")
        assert found["sum"] <= 0.1, sorted(found["worst"], reverse=True)[:2]


@browser_test
def test_the_verdict_and_what_to_do_come_first_at_every_width(clean_page: Page, site: str) -> None:
    settle(clean_page, f"{site}/?run=sick")
    places = ["#verdict", "#todo", "#loss", "#worst", "#findings"]
    for width in WIDTHS:
        clean_page.set_viewport_size({"width": width, "height": 900})
        clean_page.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)
        corners = clean_page.evaluate(
            "(names) => names.map((name) => document.querySelector(name).getBoundingClientRect())"
            ".map(({ top, left, bottom, right }) => ({ top, left, bottom, right }))",
            places,
        )
        verdict, todo, loss, worst, findings = corners
        assert verdict["bottom"] <= todo["top"] and max(loss["bottom"], worst["bottom"]) <= findings["top"]
        assert todo["bottom"] <= loss["top"] or (todo["right"] <= loss["left"] and todo["top"] <= loss["top"]), width
        assert todo["bottom"] <= worst["top"], width
    keys = "#todo a, #todo summary, #loss .modebar-btn, #worst a, .card .mantine-SegmentedControl-input"
    order = clean_page.evaluate(
        "(keys) => Array.from(document.querySelectorAll(keys)).map((at) => at.closest('#todo, #worst')?.id ?? 'training')", keys
    )
    assert [id for id, _ in itertools.groupby(order)][:3] == ["todo", "training", "worst"]


@browser_test
@pytest.mark.parametrize("narrow_page", [(1280, "light"), (1920, "dark")], indirect=True, ids=["1280", "1920"])
def test_the_modules_that_are_counted_as_the_worst_are_all_in_sight(
    narrow_page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Override(module="*", actual=None, slots=samples.LOST, steps=(20, None))
    samples.write_healthy(tmp_path / "run", num_steps=40, modules=samples.gpt_modules(3), overrides=[lost])
    monkeypatch.setattr(opened_module, "SMALL_BYTES", 0)  # the modules come after the first paint
    narrow_page.add_init_script(SHIFTS)
    with served(tmp_path / "run") as address:
        settle(narrow_page, address)
        table = narrow_page.locator("#worst .table")
        expect(table.locator("tbody tr")).to_have_count(10)
        assert table.evaluate("(at) => at.scrollHeight - at.clientHeight") == 0
        assert narrow_page.evaluate("window.shift.sum") <= 0.1


@browser_test
def test_the_head_is_one_line_from_a_laptop_on_with_a_step_chosen_too(clean_page: Page, site: str) -> None:
    settle(clean_page, f"{site}/?run=sick&step=300")
    for width in (1240, 1280, 1470, 1920):
        clean_page.set_viewport_size({"width": width, "height": 900})
        clean_page.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)
        box = clean_page.locator(".top").bounding_box()
        assert box is not None and box["height"] < 50, f"the head breaks at {width}"


@browser_test
@pytest.mark.parametrize("narrow_page", [(768, "light")], indirect=True, ids=["768"])
def test_a_choice_has_room_for_its_words_on_a_tablet(narrow_page: Page, site: str) -> None:
    for name in ("module", "compare", "ranks", "findings"):
        settle(narrow_page, site + samples.PAGES[name])
        boxes = narrow_page.locator(".page .mantine-Select-input").evaluate_all("(at) => at.map((one) => one.clientWidth)")
        assert min(boxes) >= 120, (name, boxes)


@browser_test
@pytest.mark.parametrize("narrow_page", [(1280, "light")], indirect=True, ids=["1280"])
def test_tables_have_all_their_columns_in_sight_on_a_laptop(narrow_page: Page, site: str, folder: Path, tmp_path: Path) -> None:
    """The list of runs too, unless one of them is not readable: then a column more says why."""
    for name in ("sick", "healthy"):
        shutil.copytree(folder / name, tmp_path / name)
    with served(tmp_path) as readable:
        for name, address in samples.PAGES.items():
            settle(narrow_page, (readable if name == "runs" else site) + address)
            narrow_page.wait_for_function(  # a grid spreads its columns when it knows its width
                "() => Array.from(document.querySelectorAll('.ag-center-cols-viewport'))"
                ".every((at) => at.scrollWidth <= at.clientWidth)"
            )


@browser_test
def test_every_page_has_its_own_title(clean_page: Page, site: str) -> None:
    titles = {}
    for name, address in samples.PAGES.items():
        go(clean_page, site + address)
        clean_page.wait_for_function("() => document.title.includes(' · ')")
        titles[name] = clean_page.title()
    assert len(set(titles.values())) == len(samples.PAGES)
    assert titles["heatmap"] == "Heatmap · sick · fp8debug" and titles["module"] == f"Module · {samples.SICK} · sick · fp8debug"
    clean_page.get_by_role("link", name="Fallback").click()
    clean_page.wait_for_function("() => document.title === 'Fallback · sick · fp8debug'")


def test_titles_of_one_run_and_of_a_page_that_is_none(folder: Path) -> None:
    source = ServedFolder(folder / "sick")
    assert title_of(View("overview"), source) == "Overview · sick · fp8debug"
    assert title_of(View("nowhere"), source) == "No such page · sick · fp8debug"


@browser_test
def test_an_empty_folder_waits_for_its_first_run(clean_page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    with served(folder) as address:
        go(clean_page, f"{address}/")
        expect(clean_page.locator("#runs")).to_contain_text("No run yet")
        expect(clean_page.locator(".page")).to_contain_text("fp8debug.watch(model, ")
        samples.write_healthy(folder / "first", num_steps=20, modules=samples.gpt_modules(1))
        expect(clean_page.locator("#runs").get_by_role("link", name="first")).to_be_visible()
        expect(clean_page.get_by_text("This folder is empty")).to_be_hidden()
        expect(clean_page.locator("#runs")).to_contain_text("Healthy")


def test_a_run_that_has_just_begun_is_not_called_unreadable(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", manifest=manifest_of(Plan()), rank_manifest={"device": "cpu"})
    source = ServedFolder(tmp_path)
    (row,) = runs.parts(source, 60)
    assert (row["finding"], row["state"], row["problems"]) == (runs.NO_STEP, "writing", theme.NO_DATA)
    assert "Not readable" not in [column.get("headerName") for column in runs.configured(View("runs"), source)[0]]
    writer.steps(steps_row(Plan(), 0, is_sampled=False))
    writer.close()
    (row,) = runs.parts(source, 60)
    assert row["last"] == 0 and row["finding"] != runs.NO_STEP


@browser_test
def test_an_empty_folder_that_becomes_a_run_is_shown_as_one(clean_page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with served(folder) as address:
        go(clean_page, f"{address}/")
        samples.write_healthy(tmp_path / "made", num_steps=20, modules=samples.gpt_modules(1))
        shutil.copytree(tmp_path / "made", folder, dirs_exist_ok=True)
        expect(clean_page.locator("#verdict")).to_contain_text("Healthy")


def test_the_list_and_the_choice_of_runs_have_one_order_that_of_the_last_write(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        samples.write_healthy(tmp_path / name, num_steps=20, modules=samples.gpt_modules(1))
    longer = samples.write_healthy(tmp_path.parent / f"{tmp_path.name}-longer", num_steps=30, modules=samples.gpt_modules(1))
    source = ServedFolder(tmp_path)
    assert source.names() == ["c", "b", "a"]
    for part in (longer / "rank=00000").rglob("*"):  # the folder of a run is not touched when its files are
        if part.is_file():
            shutil.copyfile(part, tmp_path / "a" / part.relative_to(longer))
    source.stamp(None)
    rows = runs.parts(source, 60)
    assert source.names() == [row["name"] for row in rows] == ["a", "c", "b"]


@browser_test
def test_a_column_of_grades_or_numbers_is_sorted_by_what_they_mean(clean_page: Page, tmp_path: Path) -> None:
    samples.write_sick(tmp_path / "ill", num_steps=400, every=10)
    samples.write_nan(tmp_path / "nan")
    samples.write_healthy(tmp_path / "well", num_steps=40)
    with served(tmp_path) as address:
        go(clean_page, f"{address}/")
        grid = clean_page.locator("#runs")
        expect(grid).not_to_contain_text(runs.LOOKING)
        for column, last in (("severity", "Error"), ("loss", "NaN")):
            head = grid.locator(f".ag-header-cell[col-id={column}]")
            head.locator(".ag-header-cell-text").click()
            expect(head).to_have_attribute("aria-sort", "ascending")
            expect(grid.locator(f".ag-row[row-index='2'] [col-id={column}]")).to_contain_text(last)
        expect(grid.locator(".ag-row[row-index='2'] [col-id=name]")).to_have_text("nan")


def test_every_column_of_numbers_is_sorted_as_numbers() -> None:
    from fp8debug_dashboard.pages import fallback, ranks

    for column in (*overview.COLUMNS, *findings.COLUMNS, *runs.COLUMNS, *ranks.COLUMNS, *fallback.COLUMNS):
        if column.get("valueFormatter") in (theme.GRID_NUMBER, theme.GRID_PERCENT):
            assert column["comparator"] == theme.BY_NUMBER, column["field"]
        if column["field"] == "severity" if "field" in column else False:
            assert column["comparator"] == theme.BY_SEVERITY


def test_a_column_has_room_for_its_longest_number_and_one_without_a_width_is_named() -> None:
    from fp8debug_dashboard.pages import parity, ranks

    for column in column_definitions((*parity.COLUMNS, *overview.COLUMNS, *ranks.COLUMNS)):
        if column.get("valueFormatter") == theme.GRID_NUMBER:
            assert column["minWidth"] >= 7 * len("-1.234e-12") + 28
    with pytest.raises(UsageError, match=r"^column 'cause' of a grid has no width: give it one"):
        column_definitions([{"field": "cause", "headerName": "Cause"}])


def test_a_table_that_stops_says_so() -> None:
    shown = table(["a"], [["1"], ["2"]], name="t", total=378, rest="the command has all")
    assert "2 of 378 rows; the command has all." in text(shown)
    assert "rows" not in text(table(["a"], [["1"]], total=1))


def test_the_sites_of_a_comparison_that_are_not_listed_are_counted() -> None:
    class Found:
        loss: dict[str, Any] = {"steps": (0, 9), "diverges_at": 3, "nonfinite_at": [None, None]}  # noqa: RUF012  # a stand-in
        first = origin = None
        names = ("a", "b")
        only: tuple[list[str], list[str]] = ([], [])
        loss_words = site_words = ""
        sites = [object.__new__(SiteDifference) for _ in range(378)]  # noqa: RUF012  # a stand-in

    for site in Found.sites:
        object.__setattr__(site, "diverges_at", 1)
    assert "300 of 378 rows of b below; fp8debug diff --format json has all." in text(compare._about(Found, None))  # type: ignore[arg-type]  # has what is read


@browser_test
@pytest.mark.parametrize("narrow_page", [(1256, "light"), (1256, "dark")], indirect=True, ids=["light", "dark"])
def test_a_page_that_waits_for_its_layout_has_the_readers_colours(narrow_page: Page, site: str) -> None:
    narrow_page.route("**/_dash-layout", lambda route: None)  # never answered
    narrow_page.goto(f"{site}/?run=sick", wait_until="commit")
    narrow_page.get_by_text("Loading").wait_for()
    narrow_page.wait_for_function("() => getComputedStyle(document.body).fontSize === '13px'")
    ground = narrow_page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = narrow_page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ground == ("rgb(20, 21, 23)" if is_dark else "rgb(245, 246, 247)")


#: Run in a page: where the axes of the nine plots stand, and how its legend lies.
PLACES = """() => {
  const { _fullLayout: full } = document.querySelector("#nine .js-plotly-plot");
  const axes = Object.keys(full).filter((name) => /^[xy]axis\\d*$/.test(name)).sort();
  const places = axes.map((name) => full[name].domain.map((end) => end.toFixed(6)));
  return [full.legend.orientation, full.margin.t, full.height, ...places];
}"""


@browser_test
@pytest.mark.parametrize("narrow_page", [(1280, "light")], indirect=True)
@pytest.mark.parametrize("is_zoomed", [False, True])
def test_a_plot_that_was_narrow_is_as_it_was_where_it_has_room_again(narrow_page: Page, site: str, is_zoomed: bool) -> None:
    settle(narrow_page, site + samples.PAGES["module"])
    before = narrow_page.evaluate(PLACES)
    text = json.dumps(before, separators=(",", ":"))  # as JSON.stringify writes it
    narrow_page.set_viewport_size({"width": 390, "height": 900})
    narrow_page.wait_for_function(f"before => JSON.stringify(({PLACES})()) !== before", arg=text)
    narrow_page.wait_for_timeout(600)
    if is_zoomed:
        narrow_page.evaluate("Plotly.relayout(document.querySelector('#nine .js-plotly-plot'), { 'xaxis.range': [100, 300] })")
        narrow_page.wait_for_function("() => location.search.includes('zoom=100..300')")
    narrow_page.set_viewport_size({"width": 1280, "height": 900})
    narrow_page.wait_for_function("() => document.querySelector('#nine').clientWidth > 1000")
    narrow_page.wait_for_function(f"before => JSON.stringify(({PLACES})()) === before", arg=text)
    narrow_page.wait_for_timeout(1500)
    assert json.loads(json.dumps(narrow_page.evaluate(PLACES))) == before
    shown = narrow_page.evaluate("document.querySelector('#nine .js-plotly-plot')._fullLayout.xaxis.range")
    assert (shown == [100, 300]) == is_zoomed

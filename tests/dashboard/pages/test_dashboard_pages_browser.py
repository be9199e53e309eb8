"""Ranks, findings, fallback and comparison in Chromium; files that are saved, keys, zoom, and runs with parts missing."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.dashboard import samples
from tests.dashboard.pages.test_dashboard_browser import go
from tests.dashboard.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = pytest.mark.browser


def saved(page: Page, selector: str) -> str:
    """Click what saves a file and return the file's name and text."""
    with page.expect_download() as waiting:
        page.locator(selector).click()
    return str(Path(waiting.value.path()).read_text(errors="replace"))


def name_of_saved(page: Page, selector: str) -> str:
    """Click what saves a file and return the file's name."""
    with page.expect_download() as waiting:
        page.locator(selector).click()
    return str(waiting.value.suggested_filename)


def test_a_csv_file_is_named_after_what_it_holds(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module={samples.SICK}&site=dgrad.weight&step=300")
    assert name_of_saved(clean_page, "[data-csv=casts]") == "sick-casts-blocks.3.mlp.gate-dgrad-weight-step-300.csv"
    go(clean_page, f"{site}/ranks?run=ranks")
    expect(clean_page.locator("#rank-sites .ag-row").first).to_be_attached()
    default = name_of_saved(clean_page, "[data-csv-grid=rank-sites]")
    assert re.fullmatch(r"ranks-rank-sites-\w+\.csv", default), "the metric, which the address leaves out"
    go(clean_page, f"{site}/ranks?run=ranks&metric=amax&site=fprop.weight&of=blocks.1.mlp.up")
    expect(clean_page.locator("#rank-sites .ag-row").first).to_be_attached()
    assert name_of_saved(clean_page, "[data-csv-grid=rank-sites]") == "ranks-rank-sites-blocks.1.mlp.up-fprop.weight-amax.csv"
    go(clean_page, f"{site}/compare?run=sick&with=healthy")
    expect(clean_page.locator("#compare-sites .ag-row").first).to_be_attached()
    assert name_of_saved(clean_page, "[data-csv-grid=compare-sites]").startswith("sick-compare-sites-healthy-")
    go(clean_page, f"{site}/findings?run=sick")
    expect(clean_page.locator("#all-findings .ag-row").first).to_be_attached()
    assert name_of_saved(clean_page, "#findings-csv") == "sick-findings.csv"


def test_the_ranks_page_names_the_rank_that_lies_apart(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/ranks?run=ranks")
    expect(clean_page.locator("#ranks-about")).to_contain_text(f"Rank {samples.SICK_RANK} lies farthest from the median")
    expect(clean_page.locator("#rank-heat .hm image")).to_be_attached()
    expect(clean_page.locator("#rank-lines .scatterlayer .trace").first).to_be_attached()
    expect(clean_page.locator("#rank-list tbody tr")).to_have_count(4)
    clean_page.locator("#rank-sites").get_by_role("link").nth(1).click()
    expect(clean_page).to_have_url(re.compile("of=.*site="))
    go(clean_page, f"{site}/ranks?run=sick")
    expect(clean_page.locator("#ranks-about")).to_contain_text("one rank, so there is nothing to compare")


def test_a_finding_has_its_evidence_its_manual_page_and_its_files(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/findings?run=sick")
    expect(clean_page.locator("#finding-head")).to_contain_text("F101 stale-scale-saturation")
    expect(clean_page.locator("#finding-manual")).to_contain_text("What it detects")
    expect(clean_page.locator("#evidence .scatterlayer .trace").first).to_be_attached()
    document = json.loads(saved(clean_page, "#findings-json"))
    assert document["findings"][0]["module"] == samples.SICK and document["verdict"] == "error"
    rows = list(csv.DictReader(saved(clean_page, "#findings-csv").splitlines()))
    assert rows[0]["code"] == "F101"
    clean_page.get_by_text("by culprit", exact=True).click()
    expect(clean_page.locator("#all-findings .ag-row").first).to_contain_text("finding; ")
    assert "group=culprit" in clean_page.url
    clean_page.locator("#all-findings").get_by_role("link").first.click()
    expect(clean_page.locator("#finding-head")).to_contain_text(samples.SICK)
    expect(clean_page).to_have_url(re.compile("culprit="))


#: Run before a page loads: notes every height that the box of a grid has, by the grid.
HEIGHTS = """
window.heights = {};
const note = () => {
  for (const button of document.querySelectorAll("[data-csv-grid]")) {
    const seen = window.heights[button.dataset.csvGrid] ||= [], height = button.parentElement.getBoundingClientRect().height;
    if (seen.at(-1) !== height) seen.push(height);
  }
  requestAnimationFrame(note);
};
note();
"""


@pytest.mark.parametrize("address", ["", "?run=sick", "fallback?run=sick&fill=yes", "ranks?run=ranks"])
def test_a_grid_has_its_place_before_it_is_drawn(clean_page: Page, site: str, address: str) -> None:
    go(clean_page, f"{site}/{address}")
    expect(clean_page.locator(".ag-row").first).to_be_visible()  # what it waits for has been worked out
    clean_page.add_init_script(HEIGHTS)
    go(clean_page, f"{site}/{address}")
    expect(clean_page.locator(".ag-row").first).to_be_visible()
    (heights,) = clean_page.evaluate("window.heights").values()
    assert max(heights) - min(heights) <= 1, "what stands below has moved under the pointer"


def test_a_link_in_a_grid_is_followed_by_key(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    cell = clean_page.locator("#findings .ag-row").first.locator("[col-id=module]")
    expect(cell).to_contain_text(samples.SICK)
    cell.focus()
    clean_page.keyboard.press("Enter")
    expect(clean_page.locator("h1")).to_have_text(samples.SICK)


def test_the_budget_is_solved_again_and_the_file_is_that_of_the_stack(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/fallback?run=sick")
    expect(clean_page.locator("#candidates .ag-row")).to_have_count(1)
    expect(clean_page.locator("#pareto .scatterlayer .trace").first).to_be_attached()
    clean_page.get_by_text("fill the budget", exact=True).click()
    expect(clean_page.locator("#candidates .ag-row").nth(1)).to_be_attached()
    before = clean_page.locator("#fallback-about").text_content() or ""
    thumb = clean_page.get_by_role("slider")
    thumb.focus()
    clean_page.keyboard.press("End")
    expect(clean_page.locator("#fallback-about")).not_to_have_text(before)
    assert "budget=100" in clean_page.url and "fill=yes" in clean_page.url
    go(clean_page, f"{site}/fallback?run=sick&to=torchtitan&budget=40&fill=yes")
    expect(clean_page.locator("#exported")).to_contain_text("FILTER_FQNS")
    assert saved(clean_page, "#fallback-save") == clean_page.locator("#exported").text_content()
    expect(clean_page.locator("#fallback-proof")).to_contain_text("the candidates close 93 % of the gap")
    expect(clean_page.locator("#trials .scatterlayer .trace").first).to_be_attached()
    expect(clean_page.locator("#fallback-proof")).to_contain_text("fp8debug bisect")


def test_the_budget_is_solved_while_the_slider_moves_and_its_last_value_counts(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/fallback?run=sick&fill=yes")
    about, curve = clean_page.locator("#fallback-about"), clean_page.locator("#pareto .scatterlayer .trace").nth(1)
    expect(curve).to_be_attached()
    thumb, track = clean_page.get_by_role("slider"), clean_page.locator(".mantine-Slider-track").bounding_box()
    assert track is not None
    before, middle = about.text_content() or "", track["y"] + track["height"] / 2
    entries = clean_page.evaluate("history.length")
    thumb.hover()
    clean_page.mouse.down()
    clean_page.mouse.move(track["x"] + 0.5 * track["width"], middle, steps=10)
    expect(about).not_to_have_text(before)  # the button is still down
    clean_page.mouse.move(track["x"] + 0.95 * track["width"], middle, steps=30)
    clean_page.mouse.move(track["x"] + 0.7 * track["width"], middle, steps=30)
    last = thumb.get_attribute("aria-valuenow")
    expect(clean_page).to_have_url(f"{site}/fallback?run=sick&fill=yes&budget={last}")
    clean_page.mouse.up()
    expect(clean_page.locator("#fallback-notes")).to_contain_text(f"--budget {last}%")
    assert thumb.get_attribute("aria-valuenow") == last and clean_page.evaluate("history.length") <= entries + 1
    solved = about.text_content() or ""
    clean_page.reload()
    expect(about).to_have_text(solved)


def test_two_runs_are_chosen_in_the_list_and_compared(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/")
    expect(clean_page.locator("#runs .ag-row").first).to_be_attached()
    expect(clean_page.locator("#runs")).not_to_contain_text("triage is running")
    for name in ("sick", "healthy", "ranks"):
        clean_page.get_by_role("checkbox", name=f"tick {name}", exact=True).check()
    clean_page.locator("#compare-chosen a").click()
    expect(clean_page.locator("#compare-loss .scatterlayer .trace")).to_have_count(5)  # three losses, two gaps
    expect(clean_page.locator("#compare-about")).to_contain_text("sites")
    expect(clean_page.locator("#compare-settings")).to_contain_text("recipe")
    clean_page.locator("#compare-sites").get_by_role("link").nth(2).click()
    expect(clean_page).to_have_url(re.compile("of=.*site="))
    expect(clean_page.locator("#compare-site .scatterlayer .trace")).to_have_count(3)
    go(clean_page, f"{site}/compare?run=sick&with=nope")
    expect(clean_page.locator("#compare-about .hint-error")).to_be_visible()


def test_a_tick_stays_whatever_the_list_does(clean_page: Page, tmp_path: Path) -> None:
    folder, row = tmp_path / "runs", "#runs .ag-row[row-id='{}']"
    for name in ("first", "second", "third"):
        samples.write_healthy(folder / name, num_steps=20, modules=samples.gpt_modules(1))
    longer = samples.write_healthy(tmp_path / "third", num_steps=30, modules=samples.gpt_modules(1))
    with served(folder) as address:
        go(clean_page, f"{address}/")
        clean_page.get_by_role("checkbox", name="tick third").check()  # triage may still be running
        clean_page.locator(row.format("first")).locator("[col-id=tick]").focus()
        clean_page.keyboard.press("Space")
        expect(clean_page.locator("#runs")).not_to_contain_text("triage is running")
        samples.write_healthy(folder / "fourth", num_steps=20, modules=samples.gpt_modules(1))
        shutil.copytree(longer, folder / "third", dirs_exist_ok=True)
        clean_page.get_by_role("button", name="Refresh").click()
        expect(clean_page.locator(row.format("third")).locator("[col-id=last]")).to_have_text("29")
        expect(clean_page.locator(row.format("fourth"))).to_be_attached()
        for name, is_ticked in (("first", True), ("second", False), ("third", True), ("fourth", False)):
            expect(clean_page.get_by_role("checkbox", name=f"tick {name}")).to_be_checked(checked=is_ticked)
        expect(clean_page.locator("#compare-chosen")).to_have_text("compare third with first")
        shutil.rmtree(folder / "third")
        clean_page.get_by_role("button", name="Refresh").click()
        expect(clean_page.locator("#compare-chosen")).to_have_text("tick two or more to compare them")
        clean_page.get_by_role("checkbox", name="tick fourth").check()
        expect(clean_page.locator("#compare-chosen")).to_have_text("compare first with fourth")
        rows = list(csv.DictReader(saved(clean_page, "[data-csv-grid=runs]").lstrip("\ufeff").splitlines()))
        assert [rows[0]["Run"], next(iter(rows[0]))] == ["fourth", "Run"]  # no column of boxes


def test_the_module_page_shows_exponents_over_time_the_split_error_and_the_dump(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module={samples.SICK}&step=300")
    expect(clean_page.locator("#history .hm image")).to_be_attached()
    expect(clean_page.locator("#split .scatterlayer .trace").first).to_be_attached()
    expect(clean_page.locator("#blocks .hm image")).to_be_attached()
    clean_page.keyboard.press("]")
    expect(clean_page.locator("h1")).to_have_text("blocks.3.mlp.up")
    clean_page.keyboard.press("[")
    expect(clean_page.locator("h1")).to_have_text(samples.SICK)


def test_a_key_that_is_pressed_while_a_page_is_drawn_counts(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module=blocks.0.attn.qkv")
    for key in "]]]][]":
        clean_page.keyboard.press(key)
    expect(clean_page).to_have_url(f"{site}/module?run=sick&module=blocks.0.mlp.down")
    expect(clean_page.locator("h1")).to_have_text("blocks.0.mlp.down")
    expect(clean_page.locator(".neighbour-after")).to_contain_text("blocks.1.attn.qkv")


def test_tables_are_saved_as_csv_and_plots_as_png(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module={samples.SICK}&step=300")
    rows = list(csv.reader(saved(clean_page, "[data-csv=casts]").splitlines()))
    assert rows[0][0] == "Cast" and rows[1][1] == "running" and len(rows) == 4
    with clean_page.expect_download() as waiting:
        clean_page.locator("[data-png=nine]").click()
    assert waiting.value.suggested_filename == "sick-blocks.3.mlp.gate-SQNR-dB-steps-0-to-390.png"
    assert Path(waiting.value.path()).read_bytes().startswith(b"\x89PNG")
    picture = saved(clean_page, "[data-svg=nine]")
    assert "sick · blocks.3.mlp.gate · SQNR, dB · steps 0 to 390" in picture
    faces = set(re.findall(r"font-family: ([^;]*);", picture))
    assert faces and all(face.startswith("Helvetica, Arial") and face.endswith("sans-serif") for face in faces)
    head, first, *_ = saved(clean_page, "[data-csv=casts]").splitlines()
    assert head.startswith("Cast,Role,sqnr_db,cosine") and "overflow_rate" in head
    numbers = first.split(",running,")[1].split(",")
    assert all(math.isfinite(float(number)) for number in numbers), "no percent, no comma, no icon"
    go(clean_page, f"{site}/?run=sick")
    expect(clean_page.locator("#findings .ag-row").first).to_be_attached()
    assert samples.SICK in saved(clean_page, "[data-csv-grid=findings]")


def test_a_box_on_the_heatmap_asks_for_its_steps(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/heatmap?run=sick")
    expect(clean_page.locator("#heat .hm image")).to_be_attached()
    box = clean_page.locator("#heat .nsewdrag").bounding_box()
    assert box is not None
    clean_page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 9.5 / 30 * box["height"])
    clean_page.mouse.down()
    clean_page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 18.5 / 30 * box["height"], steps=4)
    clean_page.mouse.up()
    expect(clean_page).to_have_url(re.compile("from=.*to=.*rows="))
    labels = clean_page.locator("#heat .ytick")
    expect(labels.first).to_have_text(samples.gpt_modules()[9][0])
    expect(labels).to_have_count(10)
    clean_page.reload()  # the URL is the view
    expect(labels).to_have_count(10)
    clean_page.get_by_role("link", name="show all steps").click()
    clean_page.get_by_role("link", name="show all rows").click()
    expect(clean_page).to_have_url(f"{site}/heatmap?run=sick")
    expect(labels).to_have_count(30)


def test_a_fold_opens_where_it_is_clicked_and_rows_are_sorted_and_filtered(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/heatmap?run=sick&fold=blocks&sort=worst")
    labels = clean_page.locator("#heat .ytick")
    expect(labels.first).to_have_text("blocks.3.* (5)")
    expect(labels).to_have_count(6)
    box = clean_page.locator("#heat .nsewdrag").bounding_box()
    assert box is not None
    clean_page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.5 * box["height"] / 6)
    expect(clean_page.locator("#heat .hoverlayer")).to_contain_text(re.compile(rf"{samples.SICK}: \w+ at \w+\.input"))
    clean_page.mouse.down()
    clean_page.mouse.up()
    expect(labels).to_have_count(10)
    expect(labels.first).to_have_text(samples.SICK)
    clean_page.get_by_label("filter").fill("*.mlp.*")
    expect(labels).to_have_count(8)  # three of the opened block, five folds
    expect(clean_page).to_have_url(re.compile(r"open=blocks\.3\.\*.*filter=\*\.mlp\.\*"))
    clean_page.get_by_role("link", name="fold again").click()
    expect(labels).to_have_count(6)


def test_two_clicks_lead_from_a_fold_to_the_nine_sites_of_its_worst_module(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/heatmap?run=sick&fold=blocks&sort=worst")
    labels = clean_page.locator("#heat .ytick")
    for count in (6, 10):
        expect(labels).to_have_count(count)
        box = clean_page.locator("#heat .nsewdrag").bounding_box()
        assert box is not None
        clean_page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.5 * box["height"] / count)
        expect(clean_page.locator("#heat .hoverlayer")).to_contain_text(samples.SICK)
        clean_page.mouse.down()
        clean_page.mouse.up()
    expect(clean_page.locator("h1")).to_have_text(samples.SICK)
    expect(clean_page.locator("#nine .scatterlayer .trace").first).to_be_attached()


def test_the_heatmap_lies_over_tokens_too_and_marks_the_cursor(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/heatmap?run=sick&step=200&x=tokens")
    expect(clean_page.locator("#heat .xtitle")).to_have_text("tokens")
    marked = clean_page.evaluate(MARKED)["heat"]
    steps, at = clean_page.evaluate("(({ steps, at }) => [steps, at])(document.querySelector('.js-plotly-plot').layout.meta)")
    assert marked == pytest.approx(at[steps.index(200)])
    box = clean_page.locator("#heat .nsewdrag").bounding_box()
    assert box is not None
    clean_page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 9.5 / 30 * box["height"])
    clean_page.mouse.down()
    clean_page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 9.5 / 30 * box["height"], steps=4)
    clean_page.mouse.up()
    expect(clean_page).to_have_url(re.compile(r"from=19\d&to=(29|30)\d"))


def test_the_search_of_the_runs_stands_in_the_address(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/")
    expect(clean_page.locator("#runs .ag-row").nth(1)).to_be_attached()
    clean_page.get_by_label("search the runs").fill("sick")
    expect(clean_page.locator("#runs .ag-row")).to_have_count(1)
    assert clean_page.url == f"{site}/?q=sick"
    clean_page.reload()
    expect(clean_page.locator("#runs .ag-row")).to_have_count(1)
    expect(clean_page.get_by_label("search the runs")).to_have_value("sick")


def test_an_empty_table_is_its_words_until_what_draws_tables_has_come(clean_page: Page, site: str) -> None:
    """Of a large run nothing is found yet when the first page is painted, and a click waits for what sets tables up."""
    clean_page.goto(f"{site}/?run=healthy")
    expect(clean_page.locator("#loss .scatterlayer .trace").first).to_be_attached()
    expect(clean_page.locator(".grid-to-come")).to_contain_text("No finding")
    asked = clean_page.evaluate(
        "performance.getEntriesByType('resource').filter((one) => one.name.includes('dash_ag_grid')).length"
    )
    assert asked == 0
    expect(clean_page.locator(".saved-grid .ag-root-wrapper")).to_contain_text("No finding")


def test_a_browser_without_idle_callbacks_has_tables_and_one_that_lost_their_script_says_so(
    page: Page, warm: None, site: str
) -> None:
    page.add_init_script("delete window.requestIdleCallback; delete Window.prototype.requestIdleCallback")
    page.route(re.compile("dash_ag_grid"), lambda route: route.abort())
    page.goto(f"{site}/?run=sick")
    expect(page.locator(".problems").first).to_contain_text("The tables did not load: reload the page")
    assert page.evaluate("window.requestIdleCallback === undefined")
    page.unroute_all()
    page.reload()
    expect(page.locator("#findings .ag-row").first).to_contain_text(samples.SICK)
    expect(page.locator(".problems")).to_have_count(0)


def test_what_can_be_read_is_shown_and_what_cannot_is_named(clean_page: Page, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "ranks", tmp_path / "torn")
    shutil.rmtree(tmp_path / "torn" / "rank=00003")
    part = next((tmp_path / "torn" / "rank=00001").rglob("*stats*/part-*.parquet"))
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with served(tmp_path / "torn") as address:
        go(clean_page, address)
        expect(clean_page.locator(".problems")).to_contain_text(part.name)
        expect(clean_page.locator(".problems")).to_contain_text("rank 3")
        expect(clean_page.locator("#loss .scatterlayer .trace").first).to_be_attached()
        go(clean_page, f"{address}/ranks")
        expect(clean_page.locator("#rank-list")).to_contain_text("0")


def test_a_run_without_its_manifest_is_shown(clean_page: Page, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "healthy", tmp_path / "bare")
    (tmp_path / "bare" / "manifest.json").write_text("{")
    with served(tmp_path / "bare") as address:
        go(clean_page, address)
        expect(clean_page.locator(".problems")).to_contain_text("manifest.json")
        go(clean_page, f"{address}/heatmap")
        expect(clean_page.locator("#heat .hm image")).to_be_attached()


#: Run in a page: for each plot over steps the places at which the cursor is marked, by its id.
MARKED = """() => Object.fromEntries(Array.from(document.querySelectorAll(".js-plotly-plot"))
  .filter((plot) => plot.layout && (plot.layout.meta || {}).x).map((plot) => {
    const own = (plot.layout.shapes || []).filter(({ name }) => name === "cursor").map(({ x0 }) => x0);
    return [plot.parentElement.id, plot.layout.meta.cursor ?? own[0] ?? null];
  }))"""
ZOOMS = """() => Array.from(document.querySelectorAll(".js-plotly-plot"))
  .filter((plot) => plot.layout && (plot.layout.meta || {}).x).map((plot) => JSON.stringify(plot.layout.xaxis.range))"""


def test_a_step_and_a_zoom_are_shared_by_the_plots(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    expect(clean_page.locator("#loss .main-svg").first).to_be_visible()
    clean_page.evaluate("""document.querySelector("#loss .js-plotly-plot").emit("plotly_click", { points: [{ x: 200 }] })""")
    expect(clean_page.locator("#cursor")).to_have_text("step 200 ✕")
    assert clean_page.evaluate(MARKED) == {"loss": 200}
    clean_page.keyboard.press(".")
    expect(clean_page.locator("#cursor")).to_have_text("step 201 ✕")
    clean_page.locator("#tabs").get_by_role("link", name="Module").click()
    expect(clean_page).to_have_url(re.compile(r"/module\?run=sick&step=201$"))
    clean_page.wait_for_function("() => document.querySelectorAll('.saved-plot .main-svg').length >= 5")
    clean_page.wait_for_function(f"() => Object.values(({MARKED})()).length >= 4")
    assert set(clean_page.evaluate(MARKED).values()) == {200}, "the sampled step nearest to it, which the page shows"
    clean_page.evaluate("""Plotly.relayout(document.querySelector("#split .js-plotly-plot"), { "xaxis.range": [100, 300] })""")
    clean_page.wait_for_function(f"() => new Set(({ZOOMS})()).size === 1")
    assert "zoom=100..300" in clean_page.url
    clean_page.reload()
    clean_page.wait_for_function(f"() => ({ZOOMS})().length >= 4 && ({ZOOMS})().every((range) => range === '[100,300]')")
    clean_page.keyboard.press("Escape")
    expect(clean_page.locator("#cursor")).to_be_hidden()
    expect(clean_page).to_have_url(re.compile(r"/module\?run=sick&zoom=100..300$"))

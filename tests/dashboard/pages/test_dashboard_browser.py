"""Every page in Chromium: what it shows, that its controls and links work, and that the console stays silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fp8debug.store.write.writer import RunWriter
from tests.dashboard import samples
from tests.dashboard.serving import served
from tests.shortened import shortened
from tests.synthetic import Plan, manifest_of, stats_rows, steps_row

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = pytest.mark.browser


#: Run in the page: the plot of the losses, the steps it shows, and its last step.
PLOT = "document.querySelector('#loss .js-plotly-plot')"
RANGE = f"Array.from({PLOT}._fullLayout.xaxis.range)"
LAST_STEP = f"Math.max(...{PLOT}._fullData.flatMap(trace => Array.from(trace.x)))"


def go(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.locator(".page")).to_be_visible(timeout=180_000)


def test_the_list_of_runs_names_verdicts_and_opens_a_run(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/")
    grid = clean_page.locator("#runs")
    expect(grid.get_by_text("Error", exact=True)).to_be_visible()
    expect(grid.get_by_text("Healthy", exact=True).first).to_be_visible()
    expect(grid.get_by_text("unreadable")).to_be_visible()
    clean_page.keyboard.press("/")
    clean_page.keyboard.type("sick")
    expect(grid.get_by_role("link")).to_have_count(1)
    grid.get_by_role("link", name="sick").click()
    expect(clean_page.locator("#verdict")).to_contain_text(samples.SICK)
    assert clean_page.url == f"{site}/?run=sick"


def test_the_overview_says_what_is_ill_since_when_and_what_to_do(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    expect(clean_page.locator("#verdict .badge").first).to_have_text("✖Error")
    expect(clean_page.locator("#verdict")).to_contain_text(f"{samples.SICK} is the first culprit")
    expect(clean_page.locator("#todo")).to_contain_text("fp8debug explain F101")
    worst = clean_page.locator("#worst tbody tr")
    expect(worst).to_have_count(1)
    expect(worst).to_contain_text("lost")
    assert clean_page.locator("#worst img.sparkline").evaluate("image => image.complete && image.naturalWidth > 0")
    expect(clean_page.locator("#findings .ag-row").first).to_be_visible()  # all rows are drawn at once
    expect(clean_page.locator("#timeline tbody tr")).to_have_count(clean_page.locator("#findings .ag-row").count())
    expect(clean_page.locator("#coverage")).to_contain_text("30 of 31")
    expect(clean_page.locator("#coverage")).to_contain_text("an override left it in BF16")
    expect(clean_page.locator("#loss .scatterlayer .trace").first).to_be_attached()
    clean_page.locator("#findings").get_by_role("link", name=samples.SICK).click()
    expect(clean_page.locator("h1")).to_have_text(samples.SICK)
    assert "module=blocks.3.mlp.gate" in clean_page.url and "step=" in clean_page.url


def test_the_heatmap_answers_its_controls_keeps_them_in_the_url_and_leads_to_the_module(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/heatmap?run=sick")
    expect(clean_page.locator("#heat .hm image")).to_be_attached()
    clean_page.get_by_role("combobox", name="metric").or_(clean_page.get_by_label("metric")).first.click()
    clean_page.get_by_role("option", name="overflow_rate").click()
    expect(clean_page.locator("#heat-about")).to_contain_text("elements that saturate")
    assert clean_page.url == f"{site}/heatmap?run=sick&metric=overflow_rate"
    clean_page.reload()
    expect(clean_page.locator("#heat-about")).to_contain_text("elements that saturate")
    plot = clean_page.locator("#heat .nsewdrag")
    expect(clean_page.locator("#heat .hm image")).to_be_attached()
    box = plot.bounding_box()
    assert box is not None
    row = [name for name, _, _ in samples.gpt_modules()].index(samples.SICK)
    clean_page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * (row + 0.5) / 30)
    expect(clean_page.locator("#heat .hoverlayer")).to_contain_text(samples.SICK)
    expect(clean_page.locator("#heat .hoverlayer")).to_contain_text(re.compile(r"step 3\d0.*overflow_rate 0\.0\d+"))
    clean_page.mouse.down()
    # As new data of a live run do, or a scrollbar that comes: plotly forgets then what the pointer is over.
    clean_page.evaluate("() => window.Plotly.redraw(document.querySelector('#heat .js-plotly-plot'))")
    clean_page.mouse.up()
    expect(clean_page.locator("h1")).to_have_text(samples.SICK)
    assert "/module?" in clean_page.url and "metric=overflow_rate" in clean_page.url
    clean_page.go_back()
    expect(clean_page.locator("#heat-about")).to_contain_text("elements that saturate")


def test_the_module_page_shows_nine_sites_casts_scales_and_exponents(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module={samples.SICK}&step=300")
    expect(clean_page.locator("#module-head")).to_contain_text("stale-scale-saturation")
    expect(clean_page.locator("#nine .subplot")).to_have_count(9)
    expect(clean_page.locator("#casts tbody tr")).to_have_count(3)
    expect(clean_page.locator("#casts tbody tr").first.locator(".badge-error").first).to_be_visible()
    expect(clean_page.locator("#scales .scatterlayer .trace").first).to_be_attached()
    expect(clean_page.locator("#hist .barlayer .point").first).to_be_attached()
    clean_page.get_by_text("dgrad weight", exact=True).click()
    expect(clean_page.locator("#casts h3")).to_contain_text("dgrad weight at step 300")
    assert "site=dgrad.weight" in clean_page.url
    clean_page.get_by_role("link", name="blocks.3.mlp.up").click()
    expect(clean_page.locator("h1")).to_have_text("blocks.3.mlp.up")
    expect(clean_page.locator("#casts h3")).to_contain_text("dgrad weight at step 300")
    expect(clean_page.locator("#module-head")).to_contain_text("names this module")


def test_a_module_outside_fp8_says_why_it_is_empty(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module=lm_head")
    expect(clean_page.locator("#module-head")).to_contain_text("an override left it in BF16")
    expect(clean_page.locator("#casts")).to_contain_text("Nothing was recorded for lm_head")


def test_the_fallback_page_shows_candidates_and_the_file(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/fallback?run=sick")
    expect(clean_page.locator("#candidates")).to_contain_text(samples.SICK)
    expect(clean_page.locator("#exported")).to_contain_text('"reasons"')
    go(clean_page, f"{site}/fallback?run=healthy")
    expect(clean_page.locator("#fallback-about")).to_contain_text("No candidate")


def test_a_healthy_run_and_one_without_a_loss_say_so(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=healthy")
    expect(clean_page.locator("#verdict")).to_contain_text("Healthy")
    expect(clean_page.locator("#findings")).to_contain_text("No finding")
    go(clean_page, f"{site}/?run=no-loss")
    expect(clean_page.locator("#loss")).to_contain_text("No loss was recorded")


@pytest.mark.parametrize(
    "address", ["/?run=nope", "/module?run=sick&module=nope", "/nowhere?run=sick", "/?run=empty", "/?run=../x"]
)
def test_what_is_not_there_is_said_in_words(clean_page: Page, site: str, address: str) -> None:
    go(clean_page, site + address)
    expect(clean_page.locator(".hint-error")).to_be_visible()


def test_hostile_names_are_shown_as_text(clean_page: Page, site: str, folder: Path) -> None:
    clean_page.on("dialog", lambda dialog: pytest.fail(f"a name ran as code: {dialog.message}"))
    go(clean_page, f"{site}/heatmap?run=%3Cb%3Ehostile%3Cb%3E")
    for name, _, _ in samples.HOSTILE_MODULES:
        expect(clean_page.locator("#heat .ytick").get_by_text(name, exact=True)).to_be_attached()
    assert clean_page.locator("#heat a, #heat b, #heat img").count() == 0
    clean_page.locator("#module-search").fill("img")
    clean_page.get_by_role("option").first.click()
    expect(clean_page.locator("h1")).to_have_text(samples.HOSTILE_MODULES[0][0])
    go(clean_page, f"{site}/")
    expect(clean_page.locator("#runs").get_by_role("link", name="<b>hostile<b>")).to_be_visible()


def test_slash_finds_a_module(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    clean_page.keyboard.press("/")
    expect(clean_page.locator("#module-search")).to_be_focused()
    clean_page.keyboard.type("5.mlp.down")
    clean_page.get_by_role("option", name="blocks.5.mlp.down").click()
    expect(clean_page.locator("h1")).to_have_text("blocks.5.mlp.down")


def test_the_head_of_a_page_is_reached_by_the_tab_key_in_reading_order(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module={samples.SICK}")
    reached = []
    for _ in range(15):
        clean_page.keyboard.press("Tab")
        reached.append(
            clean_page.evaluate("(at => at.getAttribute('aria-label') || at.innerText || at.id)(document.activeElement)")
        )
    pages = ["Overview", "Heatmap", "Model", "Module", "Ranks", "Findings", "Fallback", "Compare", "Parity"]
    assert reached == ["fp8debug", "run", *pages, "find a module", "follow", "Refresh", "dark or light"]


@pytest.mark.parametrize(
    "address",
    shortened(
        ["/", "/ranks?run=ranks", "/compare?run=sick&with=healthy"]
        + [f"/{page}?run=sick" for page in ("overview", "heatmap", "module", "findings", "fallback")],
        2,
    ),
)
def test_every_table_is_saved_as_csv_and_every_plot_as_png_and_they_are_few(clean_page: Page, site: str, address: str) -> None:
    go(clean_page, site + address)
    count = {name: clean_page.locator(f".page {name}").count() for name in (".plot", "[data-png]", "table", "[data-csv]")}
    assert count[".plot"] == count["[data-png]"] <= 7 and count["table"] == count["[data-csv]"]
    expect(clean_page.locator(".ag-root-wrapper")).to_have_count(clean_page.locator("[data-csv-grid], #findings-csv").count())


def test_dark_and_light_are_one_click_apart(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    html = clean_page.locator("html")
    before = html.get_attribute("data-mantine-color-scheme")
    clean_page.get_by_label("dark or light").click()
    after = "dark" if before == "light" else "light"
    expect(html).to_have_attribute("data-mantine-color-scheme", after)


def test_a_token_is_asked_for_once(page: Page, folder: Path) -> None:
    with served(folder / "healthy", token="abc") as address:
        assert page.goto(address).status == 403  # type: ignore[union-attr]  # a response, for http
        go(page, f"{address}/?token=abc")
        assert page.url == f"{address}/"
        go(page, f"{address}/heatmap")
        cookie = page.context.cookies()[0]
        assert cookie["httpOnly"] and cookie["sameSite"] == "Lax"


def test_a_run_that_is_being_written_grows_on_the_page(clean_page: Page, tmp_path: Path) -> None:
    plan = Plan(num_steps=40, every=5, modules=samples.gpt_modules(1))
    writer = RunWriter(tmp_path / "live", manifest=manifest_of(plan), rank_manifest={"device": "cpu"})

    def write(first: int, end: int) -> None:
        for step in range(first, end):
            if step % plan.every == 0:
                rows = stats_rows(plan, step)
                writer.stats({name: [row.get(name) for row in rows] for name in {n for row in rows for n in row}})
            writer.steps(steps_row(plan, step, is_sampled=step % plan.every == 0))
        writer.flush()

    write(0, 11)
    with served(tmp_path / "live") as address:
        go(clean_page, address)
        expect(clean_page.locator("#live")).to_have_text("● writing")
        expect(clean_page.locator("#verdict")).to_contain_text("0 to 10")
        expect(clean_page.locator("#loss .main-svg").first).to_be_attached()
        clean_page.evaluate(f"() => {{ {PLOT}.mark = 'the same'; }}")
        before, box = clean_page.evaluate(RANGE), clean_page.locator("#loss .nsewdrag").first.bounding_box()
        assert box is not None
        clean_page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.5 * box["height"])
        clean_page.mouse.down()
        clean_page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=4)
        clean_page.mouse.up()
        clean_page.wait_for_function(f"start => {RANGE}[0] > start", arg=before[0])
        zoomed = clean_page.evaluate(RANGE)
        # plotly's "Double-click to zoom back out" lies over the head of the page, at the first zoom in each plot.
        assert clean_page.locator(".notifier-note").count() == 0
        write(11, 31)
        expect(clean_page.locator("#verdict")).to_contain_text("0 to 30")
        clean_page.wait_for_function(f"() => {LAST_STEP} === 30")
        assert clean_page.evaluate(f"[{PLOT}.mark, {RANGE}]") == ["the same", zoomed], "drawn anew, or the zoom is lost"
        clean_page.get_by_role("switch", name="follow").click(force=True)
        clean_page.wait_for_function("() => window.dash_component_api.getLayout('tick').props.disabled === true")
        write(31, 40)
        clean_page.get_by_role("button", name="Refresh").click()
        expect(clean_page.locator("#verdict")).to_contain_text("0 to 39")
        writer.close()
        clean_page.get_by_role("button", name="Refresh").click()
        expect(clean_page.locator("#live")).to_have_text("ended")

"""One page after the other as a reader uses it: copy and download, another cast, a table that is filtered, sorted and grouped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fp8debug.exporters import EXPORTERS
from tests.dashboard import samples
from tests.dashboard.pages.test_dashboard_browser import go
from tests.dashboard.serving import served
from tests.synthetic import Override

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = pytest.mark.browser

#: Run in the page: where the range of the cast ends in the histogram.
RANGE_END = "Math.max(...document.querySelector('#hist .js-plotly-plot').layout.shapes.map(shape => shape.x1))"


def choose(page: Page, label: str, option: str) -> None:
    """Choose an option of a control."""
    page.get_by_role("combobox", name=label).or_(page.get_by_label(label)).first.click()
    page.get_by_role("option", name=option, exact=True).click()


def test_the_file_of_every_stack_is_downloaded_as_it_is_shown_and_copied(clean_page: Page, site: str) -> None:
    clean_page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    go(clean_page, f"{site}/fallback?run=sick&fill=yes")
    shown, texts = clean_page.locator("#exported"), set()
    for name in [*(name for name in EXPORTERS.names() if name != "json"), "json"]:  # json is what it begins with
        choose(clean_page, "for", name)
        expect(clean_page.locator("#fallback-notes")).to_contain_text(f"--to {name} ")
        with clean_page.expect_download() as waiting:
            clean_page.get_by_role("button", name="Download").click()
        assert waiting.value.suggested_filename == f"fallback{EXPORTERS.get(name).suffix}"
        text = Path(waiting.value.path()).read_text()
        assert text == shown.text_content()
        texts.add(text)
    assert len(texts) == len(EXPORTERS.names())
    copy = clean_page.locator("#fallback-copy")
    copy.focus()
    clean_page.keyboard.press("Enter")
    expect(copy).to_have_text("Copied")
    assert clean_page.evaluate("navigator.clipboard.readText()") == shown.text_content()
    expect(copy).to_have_text("Copy")


def test_another_cast_has_its_own_range_on_the_module_page(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/module?run=sick&module={samples.SICK}&step=300")
    expect(clean_page.locator("#hist .barlayer .point").first).to_be_attached()
    before = clean_page.evaluate(RANGE_END)
    choose(clean_page, "range drawn for", "e4m3fn tensorwise current")
    clean_page.wait_for_function(f"before => {RANGE_END} > before + 1", arg=before)  # the delayed one clips at this step
    assert clean_page.url.endswith("&cast=e4m3fn+tensorwise+current")
    clean_page.reload()
    expect(clean_page.locator("#hist .barlayer .point").first).to_be_attached()
    assert clean_page.evaluate(RANGE_END) > before + 1


def test_findings_are_filtered_sorted_and_grouped(clean_page: Page, tmp_path: Path) -> None:
    clips = {"num_saturated": lambda row: row["numel"] // 4, "headroom": 8.0, "gain": 0.9, "sqnr_db": 10.0}
    module = "blocks.1.mlp.up"
    old = {**clips, "headroom": 2.0}  # an older weight's values, which the weight has outgrown
    tensors = (("input", 60, clips), ("weight", 75, old))
    overrides = [Override(module=module, gemm="fprop", tensor=name, slots=s, steps=(step, None)) for name, step, s in tensors]
    samples.write_healthy(tmp_path / "two", every=5, overrides=overrides, recipe="tensorwise_delayed")
    with served(tmp_path / "two") as address:
        go(clean_page, f"{address}/findings")
        table = clean_page.locator("#all-findings")
        codes = table.locator(".ag-row [col-id=code]")
        expect(codes).to_have_text(["F101", "F112"])
        table.locator(".ag-header-cell[col-id=since] .ag-header-cell-text").click()
        table.locator(".ag-header-cell[col-id=since][aria-sort=ascending] .ag-header-cell-text").click()
        expect(codes).to_have_text(["F112", "F101"])
        head = table.locator(".ag-header-cell[col-id=code]")
        head.hover()
        head.locator(".ag-header-cell-filter-button").click()
        words = clean_page.get_by_role("textbox", name="Filter Value").first
        words.fill("F101")
        expect(codes).to_have_text(["F101"])
        clean_page.locator("#finding-head").hover()
        button = head.locator(".ag-header-cell-filter-button")
        expect(button).to_be_visible()  # while it filters
        words.fill("")
        expect(codes).to_have_count(2)
        expect(button).to_be_hidden()
        assert button.evaluate("at => at.getBoundingClientRect().width") > 0, (
            "the grid closes the box of a button without a place"
        )
        clean_page.keyboard.press("Escape")
        clean_page.get_by_text("by culprit", exact=True).click()
        expect(codes).to_have_text(["F101 F112"])
        expect(table.locator(".ag-row [col-id=message]")).to_contain_text("2 findings; ")


def test_the_overview_has_the_loss_scale_under_the_findings(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    for name in ("loss", "gradient norm", "loss scale", "learning rate"):
        expect(clean_page.locator("#loss").get_by_text(name, exact=True)).to_be_attached()
    expect(clean_page.locator("#loss")).to_contain_text("F101")


@pytest.mark.parametrize(("copies", "says"), [("document.execCommand", "Copied"), ("() => false", "Selected: press Ctrl-C")])
def test_without_a_clipboard_the_text_is_selected(clean_page: Page, site: str, copies: str, says: str) -> None:
    clean_page.add_init_script(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        f" const copies = ({copies}); document.execCommand = (command) => copies.call(document, command);"
    )
    go(clean_page, f"{site}/fallback?run=sick")
    copy, text = clean_page.locator("#fallback-copy"), clean_page.locator("#exported").text_content()
    copy.click()
    expect(copy).to_have_text(says)
    assert text is not None and clean_page.evaluate("getSelection().toString()").strip() == text.strip()
    expect(copy).to_have_text("Copy")


def test_an_empty_plot_offers_no_picture(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/findings?run=healthy")
    expect(clean_page.get_by_text("there is no evidence to show")).to_be_visible()
    expect(clean_page.locator("[data-png=evidence]")).to_be_hidden()
    go(clean_page, f"{site}/findings?run=sick")
    expect(clean_page.locator("#evidence .scatterlayer .trace").first).to_be_attached()
    expect(clean_page.locator("[data-png=evidence]")).to_be_visible()


def test_the_class_of_a_problem_is_said_in_words(clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    said = clean_page.locator("#classification b")
    expect(said).to_have_text("Class: divergence")
    expect(said).to_have_attribute("title", "of three: loss spike, divergence, loss fine but inference off")

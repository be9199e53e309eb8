"""Windows of screens that nobody has scaled: what is read grows with the window from 2200 px on, and nothing changes below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboard import samples
from tests.dashboard.pages.test_dashboard_legible_browser import CUT, OUTSIDE, narrow_page, settle

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["narrow_page"]  # a fixture
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
browser_test = pytest.mark.browser

#: Width of a window of 4K that is not scaled, and how much larger its text is.
WIDE, GROWTH = 3840, 1.745
#: Run in a page: [size, words] of the smallest text that is seen, but for the small digits and powers of a plot's ticks.
SMALLEST = """() => {
  const sizes = Array.from(document.querySelectorAll("body *")).filter((at) => at.checkVisibility({ visibilityProperty: true })
    && at.tagName !== "OPTION" && !at.closest(".only-read, tspan")
    && Array.from(at.childNodes).some((one) => one.nodeType === 3 && one.textContent.trim()))
    .map((at) => [parseFloat(getComputedStyle(at).fontSize), at.textContent.slice(0, 40)]);
  return sizes.reduce((least, one) => (one[0] < least[0] ? one : least));
}"""
#: Run in a page: sizes of what is read, in pixels.
SIZES = """() => {
  const size = (name) => { const at = document.querySelector(name); return at ? parseFloat(getComputedStyle(at).fontSize) : 0; };
  const plot = document.querySelector(".js-plotly-plot"), row = document.querySelector(".ag-center-cols-container .ag-row");
  const { margin, hoverlabel } = plot._fullLayout;
  return { body: size("body"), input: size(".mantine-Select-input"), cell: size(".ag-cell"), tick: size("[class$=tick] text"),
    row: row.clientHeight, plot: plot.clientHeight, margin: margin.l, hover: hoverlabel.font.size };
}"""


def sizes(page: Page, width: int) -> dict[str, float]:
    """Return the sizes of a page in a window of a width, once its plots and grids have been drawn for it."""
    page.set_viewport_size({"width": width, "height": 900})
    growth = min(1.75, max(1.0, width / 2200))
    page.wait_for_function(
        f"growth => Math.abs(({SIZES})().tick / 11 - growth) < 0.01 && Math.abs(({SIZES})().row / 28 - growth) < 0.1", arg=growth
    )
    found: dict[str, float] = page.evaluate(SIZES)
    return found


@browser_test
@pytest.mark.parametrize("narrow_page", [(1920, "light")], indirect=True)
def test_text_grows_with_a_wide_window_and_is_as_before_in_others(narrow_page: Page, site: str) -> None:
    settle(narrow_page, f"{site}/?run=sick")
    before = sizes(narrow_page, 1920)
    assert (before["body"], before["cell"], before["input"], before["tick"]) == (13, 12, 12, 11)
    wide = sizes(narrow_page, WIDE)
    for name, size in wide.items():
        assert size / before[name] == pytest.approx(GROWTH, rel=0.04), name
    assert sizes(narrow_page, 1280) == sizes(narrow_page, 2200) == before
    assert wide["body"] > sizes(narrow_page, 2560)["body"] > before["body"]


@browser_test
@pytest.mark.parametrize("narrow_page", [(WIDE, "dark")], indirect=True)
def test_no_text_of_a_wide_window_is_small_cut_or_outside(narrow_page: Page, site: str) -> None:
    for name, address in samples.PAGES.items():
        settle(narrow_page, site + address)
        size, words = narrow_page.evaluate(SMALLEST)
        assert size >= 10 * GROWTH - 0.1, f"{name}: {words!r} has {size} px"
        narrow_page.wait_for_function(f"() => !({CUT.strip()})().length && !({OUTSIDE.strip()})().length")


@browser_test
@pytest.mark.parametrize("narrow_page", [(WIDE, "light"), (1280, "light")], indirect=True, ids=["3840", "1280"])
def test_the_point_under_the_pointer_is_the_one_that_is_told(narrow_page: Page, site: str) -> None:
    settle(narrow_page, f"{site}/?run=sick")
    place: dict[str, Any] = narrow_page.evaluate(
        """() => {
          const plot = document.querySelector("#loss .js-plotly-plot"), { xaxis2: x, yaxis2: y } = plot._fullLayout;
          const point = plot.calcdata.find(([{ trace }]) => trace.yaxis === "y2")[200], box = plot.getBoundingClientRect();
          return { x: box.x + x._offset + x.c2p(point.x), y: box.y + y._offset + y.c2p(point.y), step: point.x };
        }"""
    )
    narrow_page.mouse.move(place["x"] + 30, place["y"])
    narrow_page.mouse.move(place["x"], place["y"], steps=3)
    told = narrow_page.locator("#loss .hoverlayer .axistext, #loss .hoverlayer .hovertext")
    expect(told.filter(has_text=str(place["step"])).first).to_be_attached()
    narrow_page.mouse.click(place["x"], place["y"])
    narrow_page.wait_for_function("step => new URLSearchParams(location.search).get('step') === String(step)", arg=place["step"])


@browser_test
@pytest.mark.parametrize("narrow_page", [(1280, "light")], indirect=True)
def test_a_run_without_a_finding_has_no_empty_card(narrow_page: Page, site: str) -> None:
    settle(narrow_page, f"{site}/findings?run=healthy")
    expect(narrow_page.get_by_text("there is no evidence to show")).to_be_visible()
    assert not narrow_page.locator("#evidence, .axes").filter(visible=True).count()
    heights = narrow_page.locator(".columns > .card").evaluate_all("(at) => at.map((one) => one.clientHeight)")
    assert heights[0] < 90 and heights[1] < 330
    settle(narrow_page, f"{site}/findings?run=sick")
    assert narrow_page.locator("#evidence, .axes").filter(visible=True).count() == 2


@browser_test
@pytest.mark.parametrize("narrow_page", [(1280, "light")], indirect=True)
@pytest.mark.parametrize("run", ["sick", "healthy"])
def test_the_file_is_as_high_as_the_curve_beside_it(narrow_page: Page, site: str, run: str) -> None:
    settle(narrow_page, f"{site}/fallback?run={run}")
    boxes = narrow_page.locator(".columns-file > .card").evaluate_all(
        "(at) => at.map((one) => one.getBoundingClientRect().toJSON())"
    )
    assert boxes[0]["bottom"] == boxes[1]["bottom"] and boxes[0]["height"] < 440
    text = narrow_page.locator("#exported")
    assert text.evaluate("(at) => at.scrollHeight >= at.clientHeight && at.clientHeight > 200")

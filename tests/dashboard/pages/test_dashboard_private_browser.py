"""Nothing leaves the machine: no request to another origin on any page, and no control of a plot that would make one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from fp8debug import Run, triage
from fp8debug.reports.page import to_html
from fp8debug_dashboard.web.early_shell import Front
from fp8debug_dashboard.web.server import guard
from tests.dashboard import samples
from tests.dashboard.pages.test_dashboard_browser import go
from tests.dashboard.serving import listening
from tests.dashboard.web.test_dashboard_start import made
from tests.shortened import shortened

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
pytestmark = pytest.mark.browser

#: Run in the page: the plots that are drawn, and what their options and buttons say.
DRAWN = "Array.from(document.querySelectorAll('.js-plotly-plot')).filter(plot => plot._context)"
OPTIONS = f"{DRAWN}.map(({{_context: it}}) => [it.showSendToCloud, it.showEditInChartStudio, it.showLink, it.plotlyServerURL])"
BUTTONS = "Array.from(document.querySelectorAll('.modebar-btn'), (button) => button.dataset.title || button.dataset.attr || '')"
#: What a control that uploads is called.
UPLOADS = ("share", "cloud", "studio", "upload", "send", "edit in", "produced with")


@pytest.fixture
def asked_for(page: Page, site: str) -> Iterator[list[str]]:
    """Every address that the browser asks for, pages that it opens included."""
    found: list[str] = []
    page.context.on("request", lambda request: found.append(request.url))
    page.context.on("page", lambda run_view: found.append(run_view.url))
    yield found
    abroad = [url for url in found if urlsplit(url).scheme not in ("data", "blob") and not url.startswith(site)]
    assert abroad == [], "the browser asked another origin"


@pytest.mark.parametrize("name", shortened(samples.PAGES, 3))
def test_a_page_asks_its_own_server_only_and_no_button_of_a_plot_uploads_it(
    asked_for: list[str], clean_page: Page, site: str, name: str
) -> None:
    go(clean_page, site + samples.PAGES[name])
    if name == "runs":
        expect(clean_page.locator("#runs .ag-row").first).to_be_attached()
        return
    count = clean_page.locator(".page .plot").count()
    clean_page.wait_for_function(f"count => {DRAWN}.length >= count", arg=count)
    assert clean_page.evaluate(OPTIONS) == [[False, False, False, ""]] * count
    assert [
        link for link in clean_page.evaluate("Array.from(document.links, link => link.href)") if not link.startswith(site)
    ] == []
    buttons = [text.lower() for text in clean_page.evaluate(BUTTONS)]
    assert not [text for text in buttons if any(word in text for word in UPLOADS)]
    clean_page.evaluate("document.querySelectorAll('.modebar-btn').forEach((button) => button.click())")
    clean_page.wait_for_load_state("networkidle")
    assert len(clean_page.context.pages) == 1
    assert asked_for


def test_a_plot_without_options_of_its_own_has_no_such_button_either(asked_for: list[str], clean_page: Page, site: str) -> None:
    go(clean_page, f"{site}/?run=sick")
    clean_page.wait_for_function(f"() => {DRAWN}.length")
    clean_page.evaluate(
        "async () => { const box = document.createElement('div'); document.body.append(box); box.id = 'bare';"
        " await window.Plotly.newPlot(box, [{ y: [1, 2] }]); }"
    )
    options = clean_page.evaluate(
        "(({_context: it}) => [it.showSendToCloud, it.plotlyServerURL])(document.getElementById('bare'))"
    )
    assert options == [False, ""]
    buttons = clean_page.evaluate("Array.from(document.querySelectorAll('#bare .modebar-btn'), (one) => one.dataset.title)")
    assert buttons and not [text for text in buttons if any(word in text.lower() for word in UPLOADS)]


def test_a_page_can_neither_reach_another_origin_nor_turn_text_into_code(page: Page, warm: None, site: str) -> None:
    go(page, f"{site}/?run=healthy")
    elsewhere = site.replace("127.0.0.1", "localhost")
    refused = page.evaluate(
        "async (url) => { const broken = [];"
        " addEventListener('securitypolicyviolation', (told) => broken.push(told.effectiveDirective));"
        " const tried = await fetch(url).then(() => 'sent', () => 'refused');"
        " const image = new Image(); image.src = url + '/x.png'; await new Promise((told) => { image.onerror = told; });"
        " const script = document.createElement('script'); script.textContent = 'window.ran = true';"
        " document.body.append(script);"
        " let code = 'ran'; try { new Function('return 1')(); } catch { code = 'refused'; }"
        " return [tried, code, window.ran === undefined, broken]; }",
        elsewhere,
    )
    tried, code, is_clean, broken = refused
    assert (tried, code, is_clean) == ("refused", "refused", True)
    assert {"connect-src", "img-src"} <= set(broken)


def test_the_first_page_of_a_server_runs_its_own_scripts_only(asked_for: list[str], folder: Path, clean_page: Page) -> None:
    front = Front()
    guard(front, None)
    with listening(front) as address:
        response = clean_page.goto(f"{address}/?run=sick", wait_until="commit")
        assert response is not None
        front.become(lambda: made(folder))
        clean_page.locator("#loss .scatterlayer .trace").first.wait_for(state="attached")
        policy = response.headers["content-security-policy"]
        assert "'nonce-" in policy and "script-src 'self' 'unsafe" not in policy and "'unsafe-eval'" not in policy
        asked_for[:] = [url for url in asked_for if not url.startswith(address)]


def test_a_report_asks_for_nothing(asked_for: list[str], page: Page, folder: Path, tmp_path: Path) -> None:
    run = Run(folder / "sick")
    file = tmp_path / "report.html"
    file.write_text(to_html(run, triage(run)))
    page.goto(file.as_uri())
    expect(page.locator("svg").first).to_be_visible()
    assert page.locator("script, link, iframe, img, form, [onclick]").count() == 0
    assert page.evaluate("Array.from(document.links).length") == 0
    assert asked_for == [file.as_uri()]
    asked_for.clear()

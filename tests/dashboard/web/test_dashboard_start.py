"""How the dashboard starts: it listens before the app is there, sends the head of a page at once, and the rest when it can."""

from __future__ import annotations

import gc
import queue
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import dash
import flask
import pytest
from werkzeug.test import create_environ, run_wsgi_app

from fp8debug.errors import UsageError
from fp8debug_cli.main import status
from fp8debug_dashboard import make_app, serve
from fp8debug_dashboard.web import run_view, server, start
from fp8debug_dashboard.web.early_shell import HEAD, Front, inline_scripts, with_nonce
from fp8debug_dashboard.web.plot_library import PATH
from fp8debug_dashboard.web.source import ServedFolder
from tests.dashboard.serving import listening, served

if TYPE_CHECKING:
    from playwright.sync_api import Page

TOKEN = "s3cret-token"
#: Dash gives each page another one.
END_ID = re.compile(rb'"end_id":"[^"]*"')
#: Of a page that comes in two parts, anew each time.
NONCE = re.compile(rb' nonce="[\w-]{20,}"')


def asked(front: Front, path: str, query: str = "") -> tuple[Iterator[bytes], str]:
    """Return what a server would send in answer to a browser, as it comes, and the status."""
    environ = create_environ(path, "http://localhost", query_string=query)
    chunks, told, _ = run_wsgi_app(front, environ)
    return iter(chunks), told


def app_scripts(folder: Path) -> list[str]:
    """Return the scripts that stand in a page itself."""
    app = made(folder)
    app.test_client().get("/", base_url="http://localhost")
    return inline_scripts(app)


@pytest.fixture
def front() -> Front:
    found = Front()
    server.guard(found, None)
    return found


def made(folder: Path) -> flask.Flask:
    app = make_app(folder)
    server.guard(app, None)
    found: flask.Flask = app.server
    return found


def test_the_head_of_a_page_comes_before_there_is_an_app(front: Front, folder: Path) -> None:
    page, told = asked(front, "/module", "run=sick")
    head = next(page)
    assert NONCE.search(head) and (NONCE.sub(b"", head), told) == (HEAD.replace(' nonce="{nonce}"', "").encode(), "200 OK")
    assert PATH in HEAD
    library, told = asked(front, PATH)
    assert told == "200 OK" and b"Plotly" in b"".join(library)
    front.become(lambda: made(folder))
    rest = END_ID.sub(b"", b"".join(page))
    assert set(NONCE.findall(rest)) == set(NONCE.findall(head)) and rest.count(b" nonce=") == len(app_scripts(folder))
    rest = NONCE.sub(b"", rest)
    later, told = asked(front, "/module", "run=sick")
    whole = END_ID.sub(b"", b"".join(later))
    assert told == "200 OK" and whole.partition(b"<head>")[2] == rest and b"react-entry-point" in rest
    assert b"earlyPlots" not in whole, "from then on pages come whole"


def test_pages_that_are_asked_for_at_once_have_all_scripts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dash finds its scripts once, and takes them for found from the moment it begins."""
    find = dash.Dash._walk_assets_directory

    def find_slowly(app: dash.Dash) -> None:
        time.sleep(0.5)
        find(app)

    monkeypatch.setattr(dash.Dash, "_walk_assets_directory", find_slowly)
    app = make_app(folder).server
    with ThreadPoolExecutor(2) as pool:
        pages = list(pool.map(lambda _: app.test_client().get("/").text, range(2)))
    assert ["assets/fp8debug.js" in page for page in pages] == [True, True]


def test_only_our_own_scripts_get_the_nonce() -> None:
    page = "<script>ours()</script><script>theirs()</script><script id='a'>ours()</script>"
    assert with_nonce(page, ["ours()"], "N") == (
        '<script nonce="N">ours()</script><script>theirs()</script><script nonce="N" id=\'a\'>ours()</script>'
    )


def test_all_else_waits_for_the_app(front: Front, folder: Path) -> None:
    answers: queue.Queue[str] = queue.Queue()
    paths = ("/_dash-layout", "/_dash-dependencies", "/nowhere")
    threads = [threading.Thread(target=lambda path=path: answers.put(asked(front, path)[1])) for path in paths]
    for thread in threads:
        thread.start()
    assert answers.empty()
    front.become(lambda: made(folder))
    assert [answers.get(timeout=30) for _ in threads] == ["200 OK"] * 3
    for thread in threads:
        thread.join()


def test_without_the_token_not_even_the_head_is_sent() -> None:
    guarded = Front()
    server.guard(guarded, TOKEN)
    for path in ("/", "/heatmap", PATH):
        chunks, told = asked(guarded, path)
        assert told == "403 FORBIDDEN" and b"token" in b"".join(chunks)
    assert asked(guarded, "/heatmap", f"token={TOKEN}")[1] == "303 SEE OTHER"
    foreign = create_environ("/", "http://evil.example")
    open_to_all = Front()
    server.guard(open_to_all, None)
    assert run_wsgi_app(open_to_all, foreign)[1] == "403 FORBIDDEN"


def test_an_app_that_cannot_be_made_ends_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: ServedFolder, token: str | None) -> flask.Flask:
        raise UsageError("of an app")

    monkeypatch.setattr(start, "_made", fail)
    collects = gc.isenabled()
    with pytest.raises(UsageError, match="of an app"):
        serve(folder, port=0)
    assert gc.isenabled() == collects and gc.get_freeze_count() == 0
    waits = Front()
    with pytest.raises(UsageError, match="of an app"):
        waits.become(lambda: fail(ServedFolder(folder), None))
    with pytest.raises(RuntimeError, match="could not be made"):
        asked(waits, "/_dash-layout")


def test_a_package_that_is_missing_is_named_before_anything_listens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "_PACKAGES", ("flask", "no_such_package"))
    assert status(["dashboard", str(folder), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said == "error: the dashboard needs no_such_package, which is not installed: pip install 'fp8debug[dashboard]'\n"


@pytest.mark.browser
def test_a_browser_sets_up_the_plots_before_there_is_an_app(front: Front, folder: Path, clean_page: Page) -> None:
    with listening(front) as address:
        clean_page.goto(f"{address}/?run=sick", wait_until="commit")
        assert clean_page.evaluate("() => window.earlyPlots.then((library) => typeof library.react)") == "function"
        assert clean_page.locator("body *").count() == 0
        front.become(lambda: made(folder))
        clean_page.locator("#loss .scatterlayer .trace").first.wait_for(state="attached")
        asked_for = clean_page.evaluate("() => performance.getEntriesByType('resource').map(e => new URL(e.name).pathname)")
        assert asked_for.count(PATH) == 1


@pytest.mark.browser
def test_plots_that_did_not_come_early_come_later(front: Front, folder: Path, page: Page) -> None:
    page.route(f"**{PATH}", lambda route: route.abort(), times=1)
    with listening(front) as address:
        page.goto(f"{address}/?run=sick", wait_until="commit")
        assert page.evaluate("() => window.earlyPlots.catch((error) => error.message)") == f"{PATH} did not load"
        front.become(lambda: made(folder))
        page.locator("#loss .scatterlayer .trace").first.wait_for(state="attached")


@pytest.mark.browser
def test_the_search_of_a_large_run_is_filled_when_its_page_has_been_painted(
    folder: Path, clean_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "SMALL_BYTES", 0)
    with served(folder / "sick") as address:
        clean_page.goto(address)
        clean_page.locator("#loss .scatterlayer .trace").first.wait_for(state="attached")
        clean_page.keyboard.press("/")
        clean_page.locator("#module-search").fill("mlp")
        clean_page.get_by_role("option").filter(has_text="mlp").first.click()
        clean_page.wait_for_url("**/module?module=*mlp*")
        clean_page.locator("#nine .scatterlayer .trace").first.wait_for(state="attached")

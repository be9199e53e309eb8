"""Who may look: the token, its cookie, hosts, headers; and that looking changes nothing."""

from __future__ import annotations

import hashlib
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from dash import dcc
from flask.testing import FlaskClient
from werkzeug.serving import make_server

from fp8debug.errors import RunError, UsageError
from fp8debug_cli.dashboard import command
from fp8debug_dashboard import make_app, serve
from fp8debug_dashboard.figures.theme import NO_DATA
from fp8debug_dashboard.pages import runs
from fp8debug_dashboard.web import plot_library, screens, server, start
from fp8debug_dashboard.web.app import EARLY, _shell
from fp8debug_dashboard.web.mantine import dmc
from fp8debug_dashboard.web.screens import PAGES, is_pending, settled
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.shortened import shortened

TOKEN = "s3cret-token"


def client(path: Path, token: str | None) -> FlaskClient:
    app = make_app(path)
    server.guard(app, token)
    found: FlaskClient = app.server.test_client()
    return found


def test_without_the_token_nothing_is_served(folder: Path) -> None:
    for path in ("/", "/_dash-layout", "/_dash-dependencies", "/assets/style.css", "/?token=wrong", "/?token="):
        reply = client(folder, TOKEN).get(path)
        assert reply.status_code == 403 and b"token" in reply.data, path


def test_the_token_becomes_a_cookie_and_leaves_the_address(folder: Path) -> None:
    browser = client(folder, TOKEN)
    reply = browser.get(f"/module?module=a%26b&run=sick&token={TOKEN}")
    assert reply.status_code == 303 and reply.headers["Location"] == "/module?run=sick&module=a%26b"
    cookie = reply.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
    assert browser.get("/").status_code == 200
    assert browser.get("/_dash-layout").status_code == 200


def test_the_redirect_stays_on_this_server(folder: Path) -> None:
    for path in ("//evil.example/x", "/\\evil.example/x"):
        reply = client(folder, TOKEN).get(f"{path}?token={TOKEN}", base_url="http://localhost")
        location = reply.headers.get("Location", "/")
        assert location.startswith("/") and not location.startswith(("//", "/\\"))


@pytest.mark.parametrize("host", ["127.0.0.1:8050", "localhost", "localhost:1", "[::1]:8050"])
def test_without_a_token_loopback_names_are_answered(folder: Path, host: str) -> None:
    assert client(folder, None).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8050", "10.0.0.1", "127.0.0.1.evil.example"])
def test_a_name_that_someone_points_at_us_is_not(folder: Path, host: str) -> None:
    assert client(folder, None).get("/", headers={"Host": host}).status_code == 403


def test_a_page_of_another_site_cannot_write_a_note(tmp_path: Path) -> None:
    run = samples.write_healthy(tmp_path / "run", num_steps=20, modules=samples.gpt_modules(1))
    asked = {"pathname": "/", "search": "", "key": None, "text": "hello", "at": 1}
    outputs = [{"id": "notes-list", "property": "children"}, {"id": "note-status", "property": "children"}]
    outputs.append({"id": "note-text", "property": "value"})
    names = "..." + "...".join(f"{one['id']}.{one['property']}" for one in outputs)
    body = {
        "output": f"..{names.removeprefix('...')}..",
        "outputs": outputs,
        "inputs": [{"id": "noted", "property": "data", "value": asked}],
        "changedPropIds": ["noted.data"],
    }
    browser = client(run, None)
    for where in ("cross-site", "same-site"):
        reply = browser.post("/_dash-update-component", json=body, headers={"Sec-Fetch-Site": where})
        assert reply.status_code == 403 and not (run / "notes.json").exists(), where
    text = browser.post("/_dash-update-component", data=json.dumps(body), content_type="text/plain")
    assert text.status_code >= 400 and not (run / "notes.json").exists(), "what a form of an old browser could post"
    reply = browser.post("/_dash-update-component", json=body, headers={"Sec-Fetch-Site": "same-origin"})
    assert reply.status_code == 200 and "hello" in (run / "notes.json").read_text()


def test_a_page_may_reach_this_server_only(folder: Path) -> None:
    reply = client(folder, None).get("/")
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "connect-src 'self'" in policy and "http" not in policy
    scripts = next(part for part in policy.split(";") if "script-src" in part)
    assert "unsafe" not in scripts
    inline = re.findall(
        rb"<script(?![^>]*(?:src|json))[^>]*>(.*?)</script>", re.sub(rb"<!--.*?-->", b"", reply.data, flags=re.S), re.S
    )
    assert inline and all(server.source_of(text.decode()) in scripts for text in inline), "a script of the page would not run"
    assert b"https://" not in reply.data and b"//cdn" not in reply.data


@pytest.mark.parametrize("name", ["DASH_DEBUG", "DASH_UI"])
def test_the_tools_of_dashs_developers_stay_off(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "true")
    page = client(folder, None).get("/").get_data(as_text=True)
    found = re.search(r'<script id="_dash-config"[^>]*>(.*?)</script>', page)
    assert found is not None
    config = json.loads(found[1])
    assert config["ui"] is False and config["disable_version_check"] is True, "it asks for the newest version elsewhere"


@pytest.mark.parametrize("word", server.JOB_WORDS)
def test_no_request_reaches_controls_of_background_jobs(folder: Path, word: str) -> None:
    browser = client(folder, None)
    assert browser.post(f"/_dash-update-component?{word}=1", json={}).status_code == 400
    told = browser.get("/_dash-dependencies").json
    assert told and not any(entry.get("background") or entry.get("running") for entry in told)


def test_a_short_token_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="16 or more"):
        command.main([str(folder), "--token", "short"], standalone_mode=False)


@pytest.mark.parametrize(
    ("host", "is_open"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("node17", True)]
)
def test_any_other_address_gets_a_token(
    folder: Path, host: str, is_open: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(server, "guard", lambda app, token: seen.append(token))

    class Stopped:
        server_port = 8050

        def serve_forever(self) -> None:
            raise KeyboardInterrupt

        def server_close(self) -> None:
            pass

    monkeypatch.setattr(server, "make_server", lambda *args, **options: Stopped())
    monkeypatch.setattr(start, "check_address", lambda host, port: None)
    serve(folder, host)
    said = capsys.readouterr().err
    assert (seen[0] is not None) == is_open == ("?token=" in said)
    assert seen[0] is None or (len(seen[0]) >= 32 and seen[0] in said)


def test_serve_answers_and_names_its_address(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: queue.Queue[Any] = queue.Queue()

    def cache(*args: Any, **options: Any) -> Any:
        found = make_server(*args, **options)
        made.put(found)
        return found

    monkeypatch.setattr(server, "make_server", cache)
    thread = threading.Thread(target=serve, args=(folder / "sick",), kwargs={"port": 0, "token": TOKEN}, daemon=True)
    thread.start()
    running = made.get(timeout=30)
    address = f"http://127.0.0.1:{running.server_port}/"
    cookies = urllib.request.HTTPCookieProcessor()
    browser = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)
    with browser.open(f"{address}assets/style.css?token={TOKEN}", timeout=30) as reply:
        assert (reply.status, reply.geturl()) == (200, f"{address}assets/style.css")
        assert reply.read()  # to the end: a server whose client leaves early drops the file unclosed
    running.shutdown()
    thread.join(30)
    assert not thread.is_alive()
    assert f"{address}?token={TOKEN}" in capsys.readouterr().err


def test_an_address_where_nobody_can_listen_is_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"^cannot listen on 127.0.0.1, port {port}: Address already in use; choose another"
        ):
            serve(folder, port=port)
    with pytest.raises(UsageError, match=r"^cannot listen on 999.1.1.1, port 0: "):
        serve(folder, "999.1.1.1", 0)
    for port in (70000, -1):
        with pytest.raises(UsageError, match=rf"^cannot listen on 127.0.0.1, port {port}: ports are 0 to 65535; choose another"):
            serve(folder, port=port)


def test_a_path_that_is_no_run_fails_before_anything_is_bound(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    with pytest.raises(RunError, match="neither a run nor a folder of runs"):
        serve(tmp_path)


def digest(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_looking_at_every_page_writes_nothing(folder: Path) -> None:
    before, source = digest(folder), ServedFolder(folder)
    runs.layout(View("overview"), source)
    for name in ("sick", "healthy", "no-loss", "<b>hostile<b>"):
        for page in PAGES.values():
            view, run_view = View(page.name, name, {"with": "healthy"}), source.open(name)
            page.layout(view, run_view)
            page.settle(view, run_view)
            page.parts(view, run_view)
    assert digest(folder) == before


@pytest.mark.parametrize("page", list(PAGES.values()), ids=lambda page: page.name)
@pytest.mark.parametrize(
    "params",
    shortened(
        [
            {},
            {"metric": "nothing", "site": "x.y", "cast": "no cast", "step": "x", "from": "1e9"},
            {"metric": "log2_hist", "site": "fprop.output", "step": "-5", "module": "no.such"},
            {"metric": "damage", "module": "lm_head"},
            {"with": "healthy/no-loss/nope", "of": "no.such", "budget": "900", "to": "nope", "fill": "yes", "code": "F999"},
            {"with": "../x", "group": "culprit", "budget": "-3", "to": "torchtitan"},
        ],
        2,
    ),
)
def test_any_url_gives_a_page_that_agrees_with_its_outputs(folder: Path, page: Any, params: dict[str, str]) -> None:
    run_view = ServedFolder(folder).open("sick")
    view = View(page.name, "sick", params)
    text = json.dumps(page.layout(view, run_view).to_plotly_json(), default=lambda o: o.to_plotly_json(), skipkeys=True)
    assert len(page.parts(view, run_view)) == len(page.outputs)
    page.settle(view, run_view)
    assert not page.is_pending(view, run_view)
    assert len(page.parts(view, run_view)) == len(page.outputs)
    if params.get("module") != "no.such" or page.name != "module":
        assert all(json.dumps(name) in text for name, _ in page.outputs)


def test_what_comes_right_after_the_layout_is_shown(folder: Path) -> None:
    source, view = ServedFolder(folder), View("overview", "healthy")
    assert is_pending(view, source)
    run_view = source.open("healthy")
    assert settled(PAGES["overview"], view, run_view, False) and not is_pending(view, source)
    assert settled(PAGES["overview"], view, run_view, True), "it was drawn without what is known now"
    assert not settled(PAGES["overview"], view, run_view, False)
    assert not is_pending(View("overview", None), source) and not is_pending(View("overview", "nope"), source)


@pytest.mark.parametrize("page", list(PAGES.values()), ids=lambda page: page.name)
def test_a_run_of_the_first_schema_is_shown_on_every_page(tmp_path: Path, page: Any) -> None:
    samples.write_old(tmp_path / "old")
    run_view = ServedFolder(tmp_path).open("old")
    view = View(page.name, "old", {})
    page.layout(view, run_view)
    page.settle(view, run_view)
    parts = page.parts(view, run_view)
    assert len(parts) == len(page.outputs) and run_view.judge().failure == "" and run_view.run.problems == []
    if page.name in ("heatmap", "module"):
        names = [name for name, _ in page.outputs]
        drawn = parts[names.index("heat" if page.name == "heatmap" else "nine")]
        assert drawn.data


def test_the_list_says_when_a_run_was_written(folder: Path) -> None:
    rows = {row["name"]: row for row in runs.parts(ServedFolder(folder), 60)}
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", rows["sick"]["written"])
    assert rows["empty"]["written"] == NO_DATA


def test_the_plot_library_sets_up_the_kinds_that_are_drawn_only(folder: Path) -> None:
    text = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    short = plot_library.shortened(text)
    assert short != text, "plotly.js writes its list of traces in another way: the browser sets up all of them"
    assert b'new Set(["bar","heatmap"])' in short and abs(len(short) - len(text)) < 2000
    assert plot_library.shortened(b"a.register([b(),c()]);") == b"a.register([b(),c()]);"
    early = plot_library.compiled_early(short)
    assert early != short, "plotly.js begins or ends in another way: the browser compiles it late"
    assert all(early.count(bracket) == short.count(bracket) + 1 for bracket in (b"(", b")")) and b"(function() {" in early[:2000]
    assert plot_library.compiled_early(b"var Plotly;") == b"var Plotly;"
    browser = client(folder, None)
    assert plot_library.PATH.encode() in browser.get("/").data
    reply = browser.get(plot_library.PATH)
    assert reply.data == early and "immutable" in reply.headers["Cache-Control"]
    assert client(folder, TOKEN).get(plot_library.PATH).status_code == 403


def test_the_components_of_mantine_come_when_they_are_asked_for() -> None:
    code = (
        "import sys; from fp8debug_dashboard.web.mantine import dmc; n = 'dash_mantine_components.Table';"
        " assert n not in sys.modules;"
        " import dash_mantine_components as whole; assert dmc is whole and whole.Table().to_plotly_json()['type'] == 'Table';"
        " assert n in sys.modules and whole.Table.__name__ == 'Table'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="NoSuchThing"):
        dmc.NoSuchThing  # noqa: B018  # asking is the test


def test_the_first_page_comes_with_the_layout_and_names_its_address(folder: Path) -> None:
    browser = client(folder, None)
    index = browser.get("/module?run=sick")
    assert EARLY.encode() in index.data and index.headers["Referrer-Policy"] == "same-origin"
    assert b"module-head" not in browser.get("/_dash-layout").data
    address = f"http://localhost/module?run=sick&module={samples.SICK}&step=300"
    told = browser.get("/_dash-layout", headers={"Referer": address})
    assert told.data.count(b'"module-head"') == 1 and samples.SICK.encode() in told.data
    parts = [part["props"] for part in json.loads(told.data)["props"]["children"]]
    stores = {part["id"]: part.get("data") for part in parts if "id" in part}
    assert stores["asked"] == {"pathname": "/module", "search": f"?run=sick&module={samples.SICK}&step=300", "n": 1}
    assert stores["here"]["n"] == 1 and stores["here"]["head"] == ["module", "sick"]
    nothing = browser.get("/_dash-layout", headers={"Referer": "http://localhost/module?run=nope"})
    assert nothing.status_code == 200 and b"Cannot show this" in nothing.data
    for reply in (told, nothing):  # one address, another answer for each page
        assert reply.headers["Cache-Control"] == "no-store" and "Referer" in reply.headers["Vary"]


def test_a_page_that_fails_leaves_the_shell_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(asked: Any, source: Any) -> Any:
        raise ZeroDivisionError("of a page")

    monkeypatch.setattr(screens, "screen", fail)
    browser = client(folder, None)
    shell = browser.get("/_dash-layout").json
    told = browser.get("/_dash-layout", headers={"Referer": "http://localhost/module?run=sick"})
    assert told.status_code == 200 and told.json == shell, "not the shell, which asks for the page"
    assert capsys.readouterr().err.count("ZeroDivisionError: of a page") == 1
    outputs = [{"id": name, "property": prop} for name, prop in (("nav", "children"), ("page", "children"), ("here", "data"))]
    place = {"pathname": "/module", "search": "?run=sick", "n": 1}
    question = {
        "output": "..nav.children...page.children...here.data..",
        "outputs": outputs,
        "inputs": [{"id": "place", "property": "data", "value": place}],
        "changedPropIds": ["place.data"],
        "state": [{"id": "here", "property": "data", "value": None}],
    }
    answer = browser.post("/_dash-update-component", json=question)
    assert answer.status_code == 200 and b"Cannot show this page: ZeroDivisionError: of a page" in answer.data
    assert answer.json is not None and answer.json["response"]["here"]["data"]["n"] == 1 and "nav" not in answer.json["response"]
    assert caplog.text.count("Traceback") == 1 and "/module?run=sick" in caplog.text


def test_the_app_starts_without_what_reads_a_run() -> None:
    code = "import sys, fp8debug_dashboard; assert not {'numpy', 'pyarrow', 'duckdb', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_that_opens_a_run_imports_pandas(folder: Path) -> None:
    code = (
        "import sys; from fp8debug_dashboard.data import queries as data; from fp8debug_dashboard.web.source import ServedFolder;"
        " run = ServedFolder(sys.argv[1]).open(None).run; data.training(run); data.health(run); data.events(run);"
        " data.heat(run, 'sqnr_db'); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder / "healthy")], check=True)


def test_the_first_heatmap_of_a_large_run_imports_no_functions_of_arrow(folder: Path) -> None:
    """To import them takes a tenth of its time."""
    code = (
        "import sys; from fp8debug_dashboard.data import queries; from fp8debug_dashboard.web.source import ServedFolder;"
        " run = ServedFolder(sys.argv[1]).open(None).run; assert queries.health(run, is_thin=True, part=8).modules;"
        " assert 'pyarrow.compute' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder / "sick")], check=True)


def test_dots_show_that_another_page_comes_and_not_that_a_live_one_is_drawn_anew() -> None:
    dots = [part for part in _shell()._traverse() if isinstance(part, dcc.Loading)]
    assert [part.to_plotly_json()["props"]["target_components"] for part in dots] == [{"page": "children"}]

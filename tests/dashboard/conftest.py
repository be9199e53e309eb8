"""One folder of runs and one server for all browser tests; a page fails its test on any console message of a bug."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.dashboard import samples
from tests.dashboard.serving import browser_args, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_type_launch_args, "args": browser_args()}


@pytest.fixture(scope="session")
def base_url() -> None:
    """Nothing: the fixture of pytest-base-url warns of its own end under pytest 9, and warnings are errors here."""


@pytest.fixture(scope="session")
def browser_context_args(browser_context_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_context_args, "viewport": {"width": 1440, "height": 900}}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: sick, healthy, of four ranks, without a loss, with names that look like HTML; and a folder that is none."""
    root = tmp_path_factory.mktemp("runs")
    samples.write_sick(root / "sick", num_steps=400, every=10)
    samples.write_dump(root / "sick")
    samples.write_verify(root / "sick")
    samples.write_healthy(root / "healthy")
    samples.write_ranks(root / "ranks")
    nothing = {"loss": None, "grad_norm": None, "lr": None}
    samples.write_healthy(root / "no-loss", num_steps=40, steps=dict.fromkeys(range(40), nothing))
    samples.write_healthy(root / "<b>hostile<b>", num_steps=40, modules=samples.HOSTILE_MODULES)
    (root / "empty").mkdir()
    (root / "empty" / "manifest.json").write_text('{"schema_version": 999}')  # of a newer fp8debug
    (root / "notes").mkdir()
    return root


@pytest.fixture(scope="session")
def site(folder: Path) -> Iterator[str]:
    """Address of a server that serves the folder."""
    with served(folder) as address:
        yield address


@pytest.fixture(scope="session")
def warm(browser: Browser, site: str) -> None:
    """A browser that has loaded the scripts once, which a cold one may take long for; no test waits for that."""
    first = browser.new_page()
    first.goto(f"{site}/", timeout=150_000)
    first.close()


def _leaves(url: str) -> bool:
    """Tell whether an address is of another machine, or of this one by another name."""
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob", "about", "file") and parts.hostname != "127.0.0.1"


@pytest.fixture
def clean_page(page: Page, warm: None) -> Iterator[Page]:
    """A page; the test fails when the console had an error or a warning, or a request failed or left this machine."""
    from playwright.sync_api import expect

    expect.set_options(timeout=180_000)  # the machine may be busy with other tests
    page.set_default_timeout(180_000)
    said: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            said.append(f"{message.type}: {message.text}")

    page.on("console", listen)
    page.on("pageerror", lambda error: said.append(f"exception: {error}"))
    page.on("response", lambda r: said.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    page.context.on("request", lambda r: said.append(f"left: {r.url}") if _leaves(r.url) else None)
    yield page
    assert said == []

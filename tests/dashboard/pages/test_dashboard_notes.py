"""Notes on a page: those of a module, those of the run, adding, deleting, and a folder that takes none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fp8debug.store.read.notes import NOTES_FILE, add_note, read_notes
from fp8debug_dashboard.pages import notes
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.dashboard.data.test_dashboard_nonfinite import text
from tests.dashboard.serving import served

if TYPE_CHECKING:
    from playwright.sync_api import Page

MODULE = "blocks.0.mlp.up"


@pytest.fixture
def run_view(tmp_path: Path) -> RunView:
    samples.write_healthy(tmp_path / "run", num_steps=20, modules=samples.gpt_modules(1))
    return ServedFolder(tmp_path / "run").open(None)


def test_a_module_shows_its_own_notes_and_the_overview_all(run_view: RunView) -> None:
    module, overview = View("module", None, {"module": MODULE, "step": "10"}), View("overview", None, {})
    assert notes.add(module, run_view, "scale <b>stale</b>?") == "" and notes.add(overview, run_view, "new data") == ""
    first, second = read_notes(run_view.run.path)
    assert (first.module, first.step, second.module, second.step) == (MODULE, 10, None, None)
    assert "scale <b>stale</b>?" in text(notes.listed(module, run_view))
    assert "1 notes are about other things" in text(notes.listed(module, run_view))
    assert text(notes.listed(overview, run_view)).index("new data") < text(notes.listed(overview, run_view)).index("stale")
    assert notes.delete(run_view, notes.key_of(first)) == "" and read_notes(run_view.run.path) == [second]
    assert notes.delete(run_view, "gone") == ""


def test_what_cannot_be_kept_is_told(run_view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    view, folder = View("overview", None, {}), run_view.run.path
    assert notes.add(view, run_view, " ") == "The note was not kept: a note needs some text."
    add_note(folder, "seen")

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        assert notes.add(view, run_view, "x") == "The note was not kept: No space left on device."
    assert [one.text for one in read_notes(folder)] == ["seen"]
    monkeypatch.setattr(notes, "why_not_writable", lambda folder: f"{folder} is read-only for this user")
    card = text(notes.notes_card(view, run_view))
    assert f"No note can be added: {folder} is read-only for this user." in card
    assert "seen" in card and "Add note" not in card and "delete" not in card
    (folder / NOTES_FILE).write_text("{")
    assert "notes.json cannot be read" in text(notes.listed(view, run_view))
    assert "notes.json cannot be read" in notes.delete(run_view, "any")


@pytest.mark.browser
def test_a_note_is_written_kept_and_deleted(clean_page: Page, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    samples.write_healthy(tmp_path / "run", num_steps=20, modules=samples.gpt_modules(1))
    with served(tmp_path / "run") as address:
        clean_page.goto(f"{address}/module?module={MODULE}&step=10")
        clean_page.get_by_label("a note", exact=True).fill("look at this, . [ ]")
        clean_page.get_by_role("button", name="Add note").click()
        shown = clean_page.locator("#notes-list .one-note")
        expect(shown).to_contain_text(f"{MODULE}, step 10")
        expect(clean_page.get_by_label("a note", exact=True)).to_have_value("")
        assert [(one.text, one.module, one.step) for one in read_notes(tmp_path / "run")] == [("look at this, . [ ]", MODULE, 10)]
        clean_page.goto(f"{address}/")
        expect(shown).to_contain_text("look at this")
        clean_page.get_by_role("button", name="delete the note on").click()
        expect(shown).to_have_count(0)
        assert read_notes(tmp_path / "run") == []

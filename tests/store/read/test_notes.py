"""Notes beside a run: written and read back, damaged, of a newer version, too many, and in a folder that is only read."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from fp8debug.errors import RunError, UsageError
from fp8debug.store.locations import place_of
from fp8debug.store.read import notes
from fp8debug.store.read.notes import NOTES_FILE, Note, add_note, delete_note, read_notes, why_not_writable


def test_notes_come_back_in_the_order_of_writing(tmp_path: Path) -> None:
    assert read_notes(tmp_path) == []
    first = add_note(tmp_path, "  scale looks stale ", module="blocks.3.mlp.up", step=120)
    second = add_note(tmp_path, "restarted with lr/2\non <b>node 7</b>")
    assert read_notes(tmp_path) == [first, second]
    assert (first.text, first.about, second.about) == ("scale looks stale", "blocks.3.mlp.up, step 120", "the run")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first.written)
    delete_note(tmp_path, first)
    delete_note(tmp_path, first)
    assert read_notes(tmp_path) == [second]
    assert [path.name for path in tmp_path.iterdir()] == [NOTES_FILE], "nothing half-written is left"


def test_about_names_what_a_note_is_about() -> None:
    assert Note(text="x", step=1200).about == "step 1,200"
    assert Note(text="x", module="lm_head").about == "lm_head"


@pytest.mark.parametrize(
    "content",
    (
        *("[]", "{", '{"schema": 1}', '{"schema": "1", "notes": []}', '{"schema": 1, "notes": [7]}'),
        *('{"schema": 1, "notes": [{"text": 3}]}', '{"schema": 1, "notes": [{"text": "a", "step": "3"}]}'),
        '{"schema": 1, "notes": [{"text": "a", "module": 3}]}',
    ),
)
def test_a_damaged_file_is_named_and_never_overwritten(tmp_path: Path, content: str) -> None:
    (tmp_path / NOTES_FILE).write_text(content)
    with pytest.raises(RunError, match=r"notes\.json cannot be read .*; mend it, or move it away"):
        add_note(tmp_path, "x")
    assert (tmp_path / NOTES_FILE).read_text() == content


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / NOTES_FILE).write_text(json.dumps({"schema": 2, "notes": []}))
    with pytest.raises(RunError, match="has version 2, newer than 1; install a newer fp8debug"):
        read_notes(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret.json").write_text('{"schema": 1, "notes": []}')
    (tmp_path / "run" / NOTES_FILE).symlink_to(tmp_path / "secret.json")
    with pytest.raises(RunError, match="leads out"):
        read_notes(tmp_path / "run")


def test_a_note_is_neither_empty_nor_a_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a note needs some text"):
        add_note(tmp_path, " \n")
    with pytest.raises(UsageError, match="a note has at most 2,000 letters, not 2,001"):
        add_note(tmp_path, "x" * 2_001)
    monkeypatch.setattr(notes, "MAX_NOTES", 1)
    add_note(tmp_path, "x")
    with pytest.raises(UsageError, match="a run has at most 1 notes"):
        add_note(tmp_path, "y")


def test_notes_written_at_once_are_all_kept(tmp_path: Path) -> None:
    threads = [threading.Thread(target=add_note, args=(tmp_path, f"note {i}")) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(note.text for note in read_notes(tmp_path)) == sorted(f"note {i}" for i in range(16))


def test_a_place_that_is_only_read_says_so(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path) == ""
    assert why_not_writable(place_of("s3://bucket/run")) == "object storage is only read"
    if os.geteuid() != 0:  # root writes everywhere
        tmp_path.chmod(0o500)
        assert "is read-only for this user" in why_not_writable(tmp_path)

"""``notes.json`` in a run's folder: what people wrote about its steps and modules, with the dashboard.

It lies beside ``manifest.json``, never in a rank's folder, and is replaced as a whole. It holds
``{"schema": 1, "notes": [{"text", "module", "step", "written"}]}``: ``module`` an FQN or null, ``step`` a number or null,
``written`` the time in UTC as ISO 8601.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from fp8debug.errors import RunError, UsageError
from fp8debug.store.file_checks import read_json

NOTES_FILE = "notes.json"
#: 1: first version. A reader refuses newer ones.
NOTES_VERSION = 1
#: Letters of one note, notes of one run, and bytes of their file at most: 1,000 notes of 2,000 letters, each letter escaped.
MAX_LETTERS, MAX_NOTES, MAX_BYTES = 2_000, 1_000, 32 << 20

_WRITING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Note:
    """Note on a step, a module, both, or the whole run.

    Attributes:
        text: what was written, of one line or more.
        module: FQN of the module that it is about; None for no single one.
        step: optimizer step that it is about; None for no single one.
        written: when, in UTC: ``2026-11-26T18:57:12Z``.
    """

    text: str
    module: str | None = None
    step: int | None = None
    written: str = ""

    @property
    def about(self) -> str:
        """Return in words what it is about: ``blocks.3.mlp.up, step 120``, ``step 120`` or ``the run``."""
        words = [*([self.module] if self.module is not None else []), *([f"step {self.step:,}"] if self.step is not None else [])]
        return ", ".join(words) or "the run"


def read_notes(folder: Path) -> list[Note]:
    """Return the notes of a run in the order of writing; none where nobody wrote any.

    Raises:
        RunError: the file is damaged or of a newer version.
    """
    path = folder / NOTES_FILE
    try:
        found = read_json(path, folder, MAX_BYTES)
        if found["schema"] > NOTES_VERSION:
            raise RunError(f"{path} has version {found['schema']}, newer than {NOTES_VERSION}; install a newer fp8debug")
        return [_note(entry) for entry in found["notes"]]
    except FileNotFoundError:
        return []
    except RunError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} cannot be read ({error!r:.80}); mend it, or move it away") from None


def _note(entry: dict[str, object]) -> Note:
    text, module, step, written = entry["text"], entry.get("module"), entry.get("step"), entry.get("written", "")
    if not isinstance(text, str) or not isinstance(written, str) or not isinstance(module, str | None):
        raise ValueError("a note whose text, module or time is no text")
    if step is not None and type(step) is not int:
        raise ValueError("a note whose step is no whole number")
    return Note(text=text, module=module, step=step, written=written)


def add_note(folder: Path, text: str, *, module: str | None = None, step: int | None = None) -> Note:
    """Append a note to those of a run; return it with its time.

    Raises:
        UsageError: it is empty or too long, or the run has too many.
        RunError: the earlier notes cannot be read; they stay as they are.
        OSError: the folder cannot be written to.
    """
    text = text.strip()
    if not text:
        raise UsageError("a note needs some text")
    if len(text) > MAX_LETTERS:
        raise UsageError(f"a note has at most {MAX_LETTERS:,} letters, not {len(text):,}")
    note = Note(text=text, module=module, step=step, written=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    with _WRITING:
        notes = [*read_notes(folder), note]
        if len(notes) > MAX_NOTES:
            raise UsageError(f"a run has at most {MAX_NOTES:,} notes; delete some")
        _write(folder, notes)
    return note


def delete_note(folder: Path, note: Note) -> None:
    """Take one note of a run away; one that is gone already is no error.

    Raises:
        RunError: the notes cannot be read; they stay as they are.
        OSError: the folder cannot be written to.
    """
    with _WRITING:
        notes = read_notes(folder)
        if note in notes:
            notes.remove(note)
            _write(folder, notes)


def why_not_writable(folder: Path) -> str:
    """Return why no note can be kept beside a run, in a clause; "" where nothing is known against it."""
    from fp8debug.store.locations import is_remote

    if is_remote(folder):
        return "object storage is only read"
    return "" if os.access(folder, os.W_OK) else f"{folder} is read-only for this user"


def _write(folder: Path, notes: Sequence[Note]) -> None:
    """Replace the file, whole or not at all."""
    document = {"schema": NOTES_VERSION, "notes": [asdict(note) for note in notes]}
    half = folder / f".{NOTES_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        half.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        half.replace(folder / NOTES_FILE)
    finally:
        half.unlink(missing_ok=True)

"""Work that no reader waits for: its priority, its errors, and what it leaves of the thread that asked for it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from fp8debug_dashboard.web.app import settled_stamp
from fp8debug_dashboard.web.background import NICER, in_background
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own elsewhere")
def test_it_runs_in_a_thread_of_low_priority_as_do_those_that_it_starts() -> None:
    own = _nice()

    def work() -> tuple[int, int]:
        found: list[int] = []
        started = threading.Thread(target=lambda: found.append(_nice()))
        started.start()
        started.join()
        return _nice(), found[0]

    lowered = min(19, own + NICER)
    assert in_background(work) == (lowered, lowered)
    assert _nice() == own, "answers would be slow for ever"


def test_what_it_raises_is_raised_to_who_asked() -> None:
    def fail() -> None:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        in_background(fail)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own elsewhere")
def test_runs_are_not_opened_there_whose_threads_answer_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        samples.write_healthy(tmp_path / name, num_steps=20, modules=samples.gpt_modules(1))
    own, opened, new = _nice(), dict[str, int](), ServedFolder._new

    def noted(self: ServedFolder, folder: Path, stamp: str) -> RunView:
        opened[folder.name] = _nice()
        return new(self, folder, stamp)

    monkeypatch.setattr(ServedFolder, "_new", noted)
    assert settled_stamp(View("compare", "a", {"with": "b"}), ServedFolder(tmp_path), False)
    assert opened == {"a": own, "b": own}

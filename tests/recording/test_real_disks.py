"""Disks that fail for real under a run: the same loss to the bit, one line, and what was recorded before is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: A mount namespace of its own: nothing stays mounted, however the program ends.
ALONE = ("unshare", "--mount", "--propagation", "private")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    try:
        subprocess.run([*ALONE, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no right to mount: {getattr(error, 'stderr', None) or error}")
    folder = tmp_path_factory.mktemp("disks")
    command = [*ALONE, sys.executable, "-m", "tests.recording.real_disks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("name", "line", "steps"),
    [
        ("full", "recording stopped: No space left on device", ["0", "2"]),
        ("read_only", "recording stopped: Read-only file system", ["0", "2"]),
        ("dead", "recording stopped: Input/output error", ["0", "2"]),
        ("gone", "recording stopped: No such file or directory", None),
        ("frozen", "gave up waiting for {run}: nothing got done; the last rows may be missing", ["0", "2", "4"]),
        ("silent", "not recorded: {run} does not answer", None),
    ],
)
def test_a_disk_that_fails_for_real(found: dict[str, Any], name: str, line: str, steps: list[str] | None) -> None:
    """Of a frozen disk all is there once it thaws; one that went away took what it had with it."""
    seen = found[name]
    if "skipped" in seen:
        pytest.skip(seen["skipped"])
    assert seen["losses"] == found["alone"]["losses"]
    said = [one for one in seen["said"] if not one.startswith("fp8debug: will record ")]
    assert said == [f"fp8debug: {line.format(run=seen['run'])}"]
    if steps is not None:
        assert list(seen["rows"]) == steps and len(set(seen["rows"].values())) == 1
        assert seen["steps"][:3] == [0, 1, 2]  # all before it failed
        assert seen["problems"] == []
    assert seen.get("left", []) == []

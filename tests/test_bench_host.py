"""The bench that tells what a watch costs the host: its stand-in takes the way of a GPU, and its steps are recorded whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
BENCH = Path(__file__).parent / "bench" / "host.py"


def test_a_short_run_takes_the_way_of_the_kernels() -> None:
    command = [sys.executable, str(BENCH), "--linears", "2", "--steps", "40"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("unwatched", "thrown away", "made", "written"))]
    assert [row[0] for row in rows] == ["unwatched", "thrown", "made", "written"]
    assert sum(int(row[-9]) for row in rows[1:]) == 40
    for row in rows:
        assert all(float(number) > 0 for number in row[-8:-1]), row
    found = re.search(r"kernels a Linear: (\S+) unwatched, (\S+) watched", done.stdout)
    assert found is not None, done.stdout
    # A weight, and a pair of each input and gradient, which are counted in the same pass (16 if not); on top of these three
    # samples of GEMMs, three comparisons, damage, rows, columns and what joins them.
    assert 3 <= float(found[1]) < 5 < 12 <= float(found[2]) < 15.5

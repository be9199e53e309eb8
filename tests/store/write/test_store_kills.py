"""SIGKILL at random moments: every step that was acknowledged is read back, whole, and at most the step in flight is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fp8debug.store.read.run import Run
from tests.store.recording import ROOT

NUM_KILLS, NUM_ROWS = 50, 3

#: One process imports everything and forks each victim, which acknowledges steps on a pipe; parts are made all the time.
FORKS = f"""
import os, random, select, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from fp8debug.store.write import writer
from tests.store.recording import site_rows
writer.PART_ROWS = 20
chance = random.Random(7)
for kill in range({NUM_KILLS}):
    path = Path(sys.argv[1]) / f"run{{kill:02d}}"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        opened = writer.RunWriter(path, manifest={{"modules": []}})
        for step in range(10**6):
            opened.stats(site_rows(step, {NUM_ROWS}))
            opened.steps({{"step": step, "loss": 1.0}})
            opened.flush()
            os.write(writing, f"{{step}}\\n".encode())
    os.close(writing)
    heard = b""
    for _ in range(chance.randrange(1, 30)):
        heard += os.read(reading, 65536)
    select.select([], [], [], chance.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    while more := os.read(reading, 65536):
        heard += more
    os.close(reading)
    print(path.name, heard.decode().split("\\n")[-2], flush=True)
"""


def test_fifty_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kills = [line.split() for line in done.stdout.splitlines()]
    assert len(kills) == NUM_KILLS
    num_with_parts = 0
    for name, acknowledged in kills:
        run = Run(tmp_path / name)
        assert run.problems == []
        counts = run.sql("SELECT step, count(*) AS n FROM raw GROUP BY step ORDER BY step").to_pylist()
        steps = [row["step"] for row in counts]
        assert steps == list(range(len(steps))) and {row["n"] for row in counts} == {NUM_ROWS}
        assert int(acknowledged) <= steps[-1] <= int(acknowledged) + 1, name
        losses = run.sql("SELECT count(loss) AS n FROM raw_steps").to_pylist()[0]["n"]
        assert int(acknowledged) + 1 <= losses <= len(steps)
        num_with_parts += any((tmp_path / name).glob("rank=00000/stats/*.parquet"))
    assert num_with_parts >= NUM_KILLS // 4

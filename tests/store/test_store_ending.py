"""A program may end while daemon threads read runs: it neither aborts nor waits, and says nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dashboard import samples

#: Threads ask until they are ended: long questions, short ones, and runs that are opened; the main thread leaves meanwhile.
PROGRAM = """
import atexit, sys, threading, time
from fp8debug import Run

path = sys.argv[1]
run, begun = Run(path), threading.Event()
LONG = "SELECT count(*) AS n FROM raw a, raw b, raw c WHERE a.amax + b.amax + c.amax > 1e30"

def ask(query):
    begun.set()
    while True:
        run.sql(query)

def reopen():
    while True:
        Run(path).sql("SELECT max(step) AS last FROM sites")

def keep(run):
    time.sleep(1000)

for target, args in ((ask, (LONG,)), (ask, ("SELECT step, amax FROM sites",)), (reopen, ()), (keep, (run,))):
    threading.Thread(target=target, args=args, daemon=True).start()
begun.wait()
atexit.register(lambda: print("last", other.sql("SELECT max(step) AS last FROM raw")["last"][0]))
other = Run(path)
time.sleep(float(sys.argv[2]))
print("leaves", flush=True)
"""


@pytest.mark.parametrize("after_s", [0.2, 0.45])
def test_a_program_that_ends_while_threads_read_neither_aborts_nor_waits(tmp_path: Path, after_s: float) -> None:
    run = samples.write_healthy(tmp_path / "run")
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run), str(after_s)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["leaves", "last", "110"], "what the main thread does at the end still gets its answers"
    assert not done.stderr
    assert time.monotonic() - begun < 100

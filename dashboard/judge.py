"""Judges a large run in a process of its own: ``python -m fp8debug_dashboard.judge RUN`` writes what it found to stdout.

Triage of millions of rows holds the interpreter and a gigabyte for seconds; pages are answered meanwhile, and the memory goes
back with the process. The bytes between the two processes are a pickle that nobody else can write.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from fp8debug.errors import Fp8DebugError, RunError
from fp8debug.rules.findings import Findings


def triage_apart(path: Path) -> Findings:
    """Return the findings of a run, from a process of its own.

    Raises:
        RunError: the run cannot be read, or the process ended without findings.
    """
    done = subprocess.run([sys.executable, "-m", __spec__.name, str(path)], capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RunError(said[-1] if said else f"triage ended with code {done.returncode}")
    try:
        found: Findings = pickle.loads(done.stdout)
    except (pickle.UnpicklingError, EOFError):
        raise RunError(f"triage of {path} was cut off") from None
    return found


def main(path: str) -> int:
    """Write the findings of a run to stdout; return the exit code."""
    from fp8debug import triage

    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # DuckDB draws a progress bar on stdout when a query takes long
    try:
        found = triage(path)
    except Fp8DebugError as error:
        print(error, file=sys.stderr)
        return 1
    with answer:
        pickle.dump(found, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

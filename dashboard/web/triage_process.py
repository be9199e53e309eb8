"""Triage of a large run in a process of its own: ``python -m fp8debug_dashboard.web.triage_process RUN`` prints its findings.

Triage of millions of rows holds the interpreter and a gigabyte for seconds; pages are answered meanwhile, and the memory goes
back with the process. What goes between the two processes is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8debug.errors import Fp8DebugError, RunError
from fp8debug.rules import Finding
from fp8debug.rules.engine.findings import Findings


def triage_in_process(path: Path) -> Findings:
    """Return the findings of a run, from a process of its own.

    Raises:
        RunError: the run cannot be read, or the process ended without findings.
    """
    watched, held = os.pipe()  # it ends with us, however we end: nobody else holds this end of it
    try:
        command = [sys.executable, "-m", __spec__.name, str(path)]
        done = subprocess.run(command, stdin=watched, capture_output=True, check=False)
    finally:
        os.close(watched)
        os.close(held)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RunError(said[-1] if said else f"triage ended with code {done.returncode}")
    try:
        return unpacked(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):
        raise RunError(f"triage of {path} was cut off") from None


def packed(findings: Findings) -> dict[str, Any]:
    """Return findings, their parts too, as plain values that :func:`unpacked` reads."""
    kept = ("run", "steps", "skipped", "baseline", "classification", "thresholds", "lost", "not_watched")
    return {"findings": [asdict(f) for f in findings], **{name: getattr(findings, name) for name in kept}}


def unpacked(document: dict[str, Any]) -> Findings:
    """Return the findings that :func:`packed` wrote."""
    rest = {name: value for name, value in document.items() if name != "findings"}
    rest |= {"steps": tuple(rest["steps"]), "skipped": [tuple(entry) for entry in rest["skipped"]]}
    return Findings([Finding.unpacked(values) for values in document["findings"]], **rest)


def _end_with_the_server() -> None:
    """End when the server has ended: it holds the other end of stdin, and writes nothing."""
    os.read(0, 1)
    os._exit(1)


def main(path: str) -> int:
    """Write the findings of a run to stdout; return the exit code."""
    from fp8debug import triage

    if hasattr(os, "nice"):
        os.nice(10)  # the pages, and the browser that paints them, come first
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # DuckDB draws a progress bar on stdout when a query takes long
    try:
        found = triage(path)
    except Fp8DebugError as error:
        print(error, file=sys.stderr)
        return 1
    with answer:
        json.dump(packed(found), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Runs an example in the process of a test, which has its libraries loaded already."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import fp8debug

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> fp8debug.Run | None:
    """Start ``python examples/NAME WORDS --out run`` in a folder; return its run, or None where it ends with another code."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *words, "--out", "run"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == code
    return None if code else fp8debug.Run(folder / "run")

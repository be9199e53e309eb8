"""Shared by the exporter tests: a run with names that formats trip over, and a list that no format but our own can hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback
from fp8debug.recipes import Cast
from fp8debug.store.read.run import Run
from tests.synthetic import build

#: One name is a part of others, one holds every character that is markup somewhere; the head stayed in BF16.
NAMES = ("layers.1.mlp.fc2", "layers.10.mlp.fc2", "layers.1.mlp.fc2_b", "x.layers.1.mlp.fc1", "layers.1.mlp.fc1", "head")
ODD = 'blocks.0.it\'s "odd" [a-b]* | <b>\\n #{x}: é'

GEMMS = ("fprop", "dgrad", "wgrad")
#: A whole module, one GEMM, one operand, a cast, a schedule.
EVERYTHING = (
    Fallback(module="layers.1.mlp.fc2", gemms=GEMMS, reasons=("F101",), cost=0.1),
    Fallback(module="layers.10.mlp.fc2", gemms=("dgrad",), reasons=("error",), cost=0.02),
    Fallback(module="layers.1.mlp.fc1", gemms=("fprop",), tensor="input", reasons=("F105",)),
    Fallback(module="layers.1.mlp.fc1", gemms=("wgrad",), tensor="input", cast=Cast(amax_eps=1e-12), reasons=("F103",)),
    Fallback(module="x.layers.1.mlp.fc1", gemms=GEMMS, until_step=200),
)


def recorded(path: Path, names: Sequence[str] = NAMES, **plan: Any) -> Run:
    """Return a short run of these modules, the head in BF16."""
    modules = [(name, 64, 64) for name in names]
    plan = {"recipes": {"head": None} if "head" in names else {}, **plan}
    return build(path, modules=modules, num_steps=2, every=1, **plan)


def exported(name: str, run: Run, fallbacks: Sequence[Fallback] = EVERYTHING) -> str:
    """Return the file's text."""
    return EXPORTERS.get(name).export(run, fallbacks)


def executed(text: str) -> dict[str, Any]:
    """Return the globals of an exported Python file."""
    found: dict[str, Any] = {}
    exec(compile(text, "exported.py", "exec"), found)
    return found

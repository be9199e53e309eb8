"""Hints of a recorded run for a search: the modules that triage names, and the damage by module."""

from __future__ import annotations

from fp8debug.rules import Severity, triage
from fp8debug.store.read.run import Run

_DAMAGE = """
SELECT module, sum(damage) AS damage FROM sites
WHERE actual AND reference = 'shadow' AND tensor = 'output' AND isfinite(damage) GROUP BY module
"""


def hints(run: Run) -> tuple[list[str], dict[str, float]]:
    """Return the modules that triage names, culprits first, and the recorded damage by module."""
    named = [f.module for f in triage(run) if f.module and f.severity > Severity.INFO]
    return list(dict.fromkeys(named)), {row["module"]: row["damage"] for row in run.sql(_DAMAGE).to_pylist()}

"""A run beside its baseline: how far the losses lie apart, and what differs in the configuration that was in force."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from fp8debug.store.run import Run

#: Losses are compared by the median of the last common steps, so that one batch does not decide. No published basis.
WINDOW = 20


def compare(run: Run, baseline: Run) -> dict[str, Any]:
    """Return the comparison as plain JSON values.

    Returns:
        ``run``: the baseline's name. ``steps``: the common steps whose losses were compared, or None. ``loss`` and
        ``baseline_loss``: their medians; ``loss_gap``: the difference, positive where the run is worse.
        ``configuration``: ``{key: [baseline's value, run's value]}`` of what differs.
    """
    query = "SELECT step, loss FROM steps WHERE loss IS NOT NULL AND isfinite(loss) ORDER BY step"
    ours = {row["step"]: row["loss"] for row in run.sql(query).to_pylist()}
    theirs = {row["step"]: row["loss"] for row in baseline.sql(query).to_pylist()}
    common = sorted(ours.keys() & theirs.keys())[-WINDOW:]
    loss = median(ours[step] for step in common) if common else None
    baseline_loss = median(theirs[step] for step in common) if common else None
    ours_in_force, theirs_in_force = _configuration(run), _configuration(baseline)
    return {
        "run": baseline.name,
        "steps": [common[0], common[-1]] if common else None,
        "loss": loss,
        "baseline_loss": baseline_loss,
        "loss_gap": loss - baseline_loss if loss is not None and baseline_loss is not None else None,
        "configuration": {
            key: [theirs_in_force.get(key), ours_in_force.get(key)]
            for key in dict.fromkeys([*ours_in_force, *theirs_in_force])
            if ours_in_force.get(key) != theirs_in_force.get(key)
        },
    }


def _configuration(run: Run) -> dict[str, Any]:
    """Return what was in force, flat: recipe, environment, argv, and the casts of each module."""
    recipe = run.manifest.get("recipe")
    flat: dict[str, Any] = {"recipe": recipe.get("name") if isinstance(recipe, Mapping) else None}
    environment = run.manifest.get("environment")
    if isinstance(environment, Mapping):
        flat |= {f"environment.{key}": value for key, value in environment.items()}
    flat["argv"] = run.manifest.get("argv")
    query = (
        "SELECT DISTINCT module, gemm, tensor, cast_name FROM sites WHERE actual AND reference = 'operand'"
        " ORDER BY module, gemm, tensor, cast_name"
    )
    for row in run.sql(query).to_pylist():
        flat.setdefault(f"{row['module']}.{row['gemm']}.{row['tensor']}", row["cast_name"])
    return flat

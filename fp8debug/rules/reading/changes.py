"""Configuration changes during a run: casts of modules, a resume, a recipe, a jump of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.store.configuration import differences
from fp8debug.store.read.resumed import JoinedRun

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Kinds of events that tell of a change.
EVENTS = ("recipe", "resume")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change.

    Attributes:
        step: the first step, or sampled step, under the new configuration.
        what: one clause.
        module: whose; None when it is the run's.
        is_learning_rate: True of a jump of the learning rate, whose first update changes the loss of the step after.
    """

    step: int
    what: str
    module: str | None = None
    is_learning_rate: bool = False


def changes_of(run: Run, limits: CourseLimits) -> list[Change]:
    """Return the changes in order of their steps."""
    kinds = ", ".join(f"'{kind}'" for kind in EVENTS)
    query = f"SELECT DISTINCT step, module, message FROM events WHERE kind IN ({kinds}) AND step IS NOT NULL"
    rows = run.sql(f"{query} ORDER BY step, module, length(message), message").to_pylist()  # what names most comes last
    found = [Change(step=r["step"], what=r["message"], module=r["module"]) for r in rows]
    found += [*_parts(run), *_casts(run, limits), *_learning_rate(run, limits)]
    return sorted(found, key=lambda change: (change.step, change.module or ""))


def in_force(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says was in force, flat: recipe, environment and argv."""
    recipe, environment = manifest.get("recipe"), manifest.get("environment")
    flat: dict[str, Any] = {"recipe": recipe.get("name") if isinstance(recipe, Mapping) else None}
    if isinstance(environment, Mapping):
        flat |= {f"environment.{key}": value for key, value in environment.items()}
    return {**flat, "argv": manifest.get("argv")}


def _parts(run: Run) -> list[Change]:
    """Return what differs between the folders of a run that was resumed in another."""
    if not isinstance(run, JoinedRun):
        return []
    found = []
    for step, manifests in zip(run.starts[1:], pairwise(run.manifests), strict=True):
        before, after = map(in_force, manifests)
        differing = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        settings = [str(one) for one in differences(*manifests) if not one.setting.startswith("environment.")]
        named = "; ".join([*(f"{key}: {before.get(key)} -> {after.get(key)}" for key in differing), *settings])
        found.append(Change(step=step, what="resumed in another folder" + (f", {named}" if named else "")))
    return found


def _casts(run: Run, limits: CourseLimits) -> list[Change]:
    query = (
        "SELECT module, gemm, tensor, cast_name, min(step) AS step, min(call_index) AS place FROM raw"
        " WHERE actual AND reference = 'operand' GROUP BY module, gemm, tensor, cast_name ORDER BY step, place, module, gemm"
    )
    modules: set[str] = set()
    running: dict[tuple[str, str, str], str] = {}
    changed: dict[int, dict[str, str]] = {}
    for row in run.sql(query).to_pylist():
        site = (row["module"], row["gemm"], row["tensor"])
        modules.add(row["module"])
        if site in running:
            what = f"{row['gemm']} {row['tensor']} goes from {running[site]} to {row['cast_name']}"
            changed.setdefault(row["step"], {}).setdefault(row["module"], what)
        running[site] = row["cast_name"]
    found = []
    for step, whats in changed.items():
        if len(whats) >= limits.min_changed_share * len(modules) and len(modules) > 1:
            module, what = next(iter(whats.items()))
            found.append(
                Change(step=step, what=f"the casts of {len(whats)} of {len(modules)} modules change, first {module}: {what}")
            )
        else:
            found += [Change(step=step, what=f"the cast of {m} changes: {what}", module=m) for m, what in whats.items()]
    return found


def _learning_rate(run: Run, limits: CourseLimits) -> list[Change]:
    rows = run.sql("SELECT step, lr FROM steps WHERE lr > 0 ORDER BY step").to_pylist()
    return [
        Change(step=b["step"], what=f"the learning rate jumps from {a['lr']:.3g} to {b['lr']:.3g}", is_learning_rate=True)
        for a, b in pairwise(rows)
        if b["lr"] >= limits.min_lr_jump * a["lr"] and b["step"] > rows[0]["step"] + 1
    ]

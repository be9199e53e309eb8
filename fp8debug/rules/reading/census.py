"""Read the census of parameters that no watched GEMM has: a row of sums for each, and what holds it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

NOT_RECORDED = "not recorded: other parameters (a run of inference, of an older version, or without a torch optimizer)"
_NUMBERS = re.compile(r"\d+")
_HAS_VALUE = "(grad_amax > 0 OR grad_nonfinite IS NOT NULL)"
_STANDINGS = (
    "SELECT parameter, min(role) AS role, min(dtype) AS dtype, min(shape) AS shape, max(optimizer) AS optimizer,"
    " bool_and(coalesce(requires_grad, FALSE)) AS requires_grad, count(*) AS num, min(step) AS first, max(step) AS last,"
    " count(*) FILTER (WHERE has_grad) AS num_given,"
    f" count(*) FILTER (WHERE {_HAS_VALUE}) AS num_nonzero,"
    " count(*) FILTER (WHERE grad_amax = 0) AS num_zero, count(*) FILTER (WHERE num_moved > 0) AS num_moved,"
    " max(amax_before) = min(amax_before) AS is_same FROM parameters WHERE role <> 'buffer' GROUP BY parameter"
)


@dataclass(frozen=True)
class Census:
    """Parameters of a run that are no watched weights, as they stood over its sampled steps.

    Attributes:
        rows: by name: role, dtype, shape, optimizer (None where none stepped with it), requires_grad, num (sampled steps), first,
            last, and of these steps num_given (with a gradient), num_nonzero, num_zero, num_moved; is_same says that its largest
            magnitude never changed.
        alive: modules of watched weights that have gradients.
        watched: modules of watched weights.
        places: position of each module in execution order.
    """

    rows: Mapping[str, Mapping[str, Any]]
    alive: Collection[str]
    watched: Collection[str]
    places: Mapping[str, int]
    _kinds: dict[str, list[str]] = field(default_factory=dict)

    def alike(self, name: str) -> list[str]:
        """Return the other parameters whose names differ from one's in numbers alone: the same role in other layers."""
        if not self._kinds:
            for other in self.rows:
                self._kinds.setdefault(role_of(other), []).append(other)
        kind = role_of(name)
        return [other for other in self._kinds[kind] if other != name] if kind != name else []

    def around(self, name: str) -> list[str]:
        """Return the modules of watched weights in the smallest part of the model that has the parameter and any of these."""
        part = module_of(name)
        while part := part.rpartition(".")[0]:
            found = [module for module in self.watched if module.startswith(f"{part}.")]
            if found:
                return found
        return []

    def runs_around(self, name: str) -> bool | None:
        """Return whether the part of the model around a parameter has gradients; None where nothing of it is watched."""
        found = self.around(name)
        return any(module in self.alive for module in found) if found else None

    def place(self, name: str) -> int:
        """Return the position in execution order of the first watched module around a parameter."""
        return min((self.places.get(module, 0) for module in self.around(name)), default=0)


def role_of(name: str) -> str:
    """Return a name without its numbers: one role in all layers."""
    return _NUMBERS.sub("*", name)


def census_of(run: Run) -> Census:
    """Return the census of a run."""

    def read() -> Census:
        rows = {row["parameter"]: row for row in run.sql(f"{_STANDINGS} ORDER BY parameter").to_pylist()}
        found = run.sql("SELECT module, bool_or(num_grad > 0) AS is_alive FROM updates GROUP BY module").to_pylist()
        places = {m["fqn"]: m["call_index"] or 0 for m in run.modules}
        return Census(rows, {row["module"] for row in found if row["is_alive"]}, [row["module"] for row in found], places)

    return run.memo("census", read)


def has_census(run: Run) -> bool:
    """Return whether a run has rows of parameters."""
    return bool(run.sql("SELECT step FROM raw_parameters LIMIT 1").num_rows)


def module_of(parameter: str) -> str:
    """Return the FQN of the module that holds a parameter; of one of the model's own the parameter's name."""
    return parameter.rpartition(".")[0] or parameter


def described(row: Mapping[str, Any]) -> str:
    """Return a parameter's name, dtype and shape in words."""
    return f"{row['parameter']} ({row['dtype']}{row['shape'] or ''})"


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in order, numbers in them by size."""
    return sorted(
        names, key=lambda name: [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
    )

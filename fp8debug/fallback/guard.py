"""An automatic fallback for a run that nobody watches: after M sampled steps of hard evidence a module runs in BF16.

    with fp8debug.watch(model, "runs/exp1", guard=fp8debug.Guard(after=3, budget="10%")) as watch: ...

The evidence is what the watch records anyway: counts that arrive on the host without waiting for the device, usually one step
after the sampled one. A guard that never fires changes nothing, to the bit. One that fires changes the run, which is its
purpose, and says so in an event. Each rank decides for itself, without collectives: replicas may then multiply in different
precisions, while their weights stay equal, because their gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8debug.errors import UsageError
from fp8debug.types import parse_share


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Conditions under which a module goes to BF16 automatically; passed to ``fp8debug.watch(..., guard=...)``.

    A sampled step is evidence against a module when one of its running FP8 casts or GEMMs made a NaN or Inf out of finite
    numbers, or when an operand clipped: above 0.1 % of its elements under current scaling, above 1 % under delayed or static
    scaling with an amax clearly beyond what the scale holds (numerics.md, 4, act).

    Attributes:
        after: sampled steps of evidence in a row; one without evidence in between starts the count anew.
        budget: share of the FP8 FLOPs that the guard may move to BF16 in all: ``0.1`` or ``"10%"``.
        max_saturation: share of clipped elements under current scaling; numerics.md, 4.
        max_saturation_delayed: the same under delayed and static scaling; numerics.md, 4.
        warmup: first steps, in which clipping does not count: a delayed scale is healthy and clips while activations grow
            from their initial values (rule F101).

    Raises:
        UsageError: a value out of range.
    """

    after: int = 3
    budget: float | str = 0.10
    max_saturation: float = 0.001
    max_saturation_delayed: float = 0.01
    warmup: int = 8

    def __post_init__(self) -> None:
        whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (self.after, self.warmup))
        if not whole or self.after < 1 or self.warmup < 0:
            raise UsageError(f"a guard needs after >= 1 and warmup >= 0, got after={self.after!r}, warmup={self.warmup!r}")
        for name in ("budget", "max_saturation", "max_saturation_delayed"):
            share = parse_share(getattr(self, name), f"{name} of a guard")
            object.__setattr__(self, name, share)


class Verdict(NamedTuple):
    """A module that should go to BF16: why, in words, and its share of the FP8 FLOPs; or that the budget forbids it."""

    module: str
    reason: str
    share: float
    is_within_budget: bool


class Evidence:
    """Evidence that a guard has gathered in one run.

    Args:
        guard: when it fires.
        shares: share of the FP8 FLOPs by module; others are not judged.
        first_step: of the run.
    """

    def __init__(self, guard: Guard, shares: Mapping[str, float], first_step: int) -> None:
        self.guard = guard
        self.shares = dict(shares)
        self.spent = 0.0
        self._first_step = first_step
        self._steps: dict[str, list[int]] = {}
        self._decided: set[str] = set()

    def see(self, step: int, columns: Mapping[str, Any]) -> list[Verdict]:
        """Take the rows of ``stats`` of one sampled step; return the modules for which this one was enough."""
        against = self._against(step, columns)
        seen = set(columns["module"])
        for module in [m for m in self._steps if m in seen and m not in against]:
            del self._steps[module]
        verdicts = []
        for module, what in against.items():
            if module in self._decided or module not in self.shares:
                continue
            steps = self._steps.setdefault(module, [])
            if step not in steps:
                steps.append(step)
            if len(steps) >= self.guard.after:
                self._decided.add(module)
                verdicts.append(self._verdict(module, what, steps))
        return verdicts

    def _verdict(self, module: str, what: str, steps: list[int]) -> Verdict:
        share = self.shares[module]
        is_within = self.spent + share <= float(self.guard.budget) + 1e-12
        self.spent += share if is_within else 0.0
        shown = ", ".join(str(step) for step in steps[-8:])
        return Verdict(module, f"{what} at sampled steps {shown}", share, is_within)

    def _against(self, step: int, columns: Mapping[str, Any]) -> dict[str, str]:
        """Return by module the first evidence of this step, in words."""
        made = _numbers(columns["num_actual_nonfinite"]) * (_numbers(columns["num_nan"]) + _numbers(columns["num_inf"]) == 0)
        rate = _numbers(columns["num_saturated"]) / np.maximum(_numbers(columns["numel"]), 1)
        headroom = _numbers(columns["headroom"], missing=np.inf)
        found: dict[str, str] = {}
        rows = zip(columns["module"], columns["gemm"], columns["tensor"], columns["cast_name"], columns["actual"], strict=True)
        for place, (module, gemm, tensor, cast, actual) in enumerate(rows):
            if not actual or cast == "bf16":
                continue
            if made[place]:
                found.setdefault(module, f"NaN or Inf made by the cast or GEMM of its {gemm} {tensor}")
            elif step >= self._first_step + self.guard.warmup and self._clips(str(cast), rate[place], headroom[place]):
                found.setdefault(module, f"{rate[place]:.2g} of its {gemm} {tensor} clipped")
        return found

    def _clips(self, cast: str, rate: float, headroom: float) -> bool:
        if " delayed(" in cast or " static(" in cast:
            return bool(rate > self.guard.max_saturation_delayed and headroom > MIN_HEADROOM)
        return bool(rate > self.guard.max_saturation)


#: Below, clipping costs little more than the rounding error of E4M3 (rule F101).
MIN_HEADROOM = 1.25


def _numbers(values: Any, missing: float = 0.0) -> Any:
    """Return a column as numbers, ``missing`` where it has none."""
    return np.ma.filled(np.ma.masked_invalid(np.ma.asarray(values, dtype=np.float64)), missing)

"""Delayed scaling's live state: is the scale in force the one that its amax history gives?

``module.fp8_meta["scaling_fwd"]`` and ``["scaling_bwd"]`` hold ``scale [slots]`` and ``amax_history [length, slots]``. The newest
amax that a scale can come from lies in the last row; row 0 collects the step under way. A scale larger than max / amax of the
history clips what the history has seen: it came from elsewhere, from a checkpoint or another rank. How the scale in force suits
the *present* tensor is in that operand's row (``headroom``, ``scale_log2_ratio``). Nothing is written, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8debug.observer.host_copy import HostScalar

#: How much larger than the history allows a scale may be: FP32 rounding, no more.
TOLERANCE = 1.01


def recipe_of_scales(module: Any, which: str) -> Any:
    """Return the recipe by which a module's live scales are updated: a ``CustomRecipe`` keeps one for each direction.

    Args:
        module: one of the library's.
        which: ``fwd`` for inputs and weights, ``bwd`` for gradients.
    """
    meta = getattr(module, "fp8_meta", {})
    return getattr(meta.get(f"scaling_{which}"), "_inner_delayed_scaling_recipe", None) or meta.get("recipe")


def excess(module: Any) -> Tensor | None:
    """Return how many times too large the largest of a module's live scales is, FP32 ``[]``; None where there is none."""
    found = []
    for which in ("fwd", "bwd"):
        recipe, state = recipe_of_scales(module, which), module.fp8_meta.get(f"scaling_{which}")
        algo = getattr(recipe, "amax_compute_algo", None)
        if state is None or algo not in ("max", "most_recent") or recipe.scaling_factor_compute_algo is not None:
            continue
        if state.amax_history.shape[0] < 2:
            continue
        history, largest = state.amax_history.detach(), getattr(recipe.fp8_format.value, f"max_{which}")
        amax = history[1:].amax(0) if algo == "max" else history[-1]
        times = state.scale.detach() * amax * (2.0**recipe.margin / largest)
        found.append(torch.where(amax.isfinite(), times, 0.0).amax())
    return torch.stack(found).amax() if found else None


class ScaleCheck:
    """Looks at modules' scales on sampled steps, and reports one that its history does not give when the number has arrived.

    Args:
        report: called with a module's FQN and the text, once a module.
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._pending: list[tuple[str, HostScalar | float]] = []
        self._told: set[str] = set()

    def look(self, fqn: str, module: Any) -> None:
        """Start reading a module's state, before a forward pass."""
        times = excess(module)
        if times is not None and fqn not in self._told:
            self._pending.append((fqn, HostScalar(times) if times.is_cuda else float(times)))

    def settle(self) -> bool:
        """Report what has arrived, and return whether that is all."""
        while self._pending:
            fqn, number = self._pending[0]
            if isinstance(number, HostScalar) and not number.is_done():
                return False
            self._pending.pop(0)
            times = number.read() if isinstance(number, HostScalar) else number
            if times > TOLERANCE and fqn not in self._told:
                self._told.add(fqn)
                self._report(fqn, f"recorded, but a delayed scale of it is {times:.3g} times what its amax history allows")
        return True

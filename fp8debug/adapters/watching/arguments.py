"""Arguments of ``watch()``, checked before the model is changed: a mistake is one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp8debug.errors import UsageError
from fp8debug.recipes import Recipe, get_recipe
from fp8debug.trainers import loop_of


def check_arguments(
    path: Any,
    every: Any,
    shadow_rows: Any,
    shadow: Any,
    optimizer: Any,
    resume_from: Any,
    check_finite: Any,
    compiled: Any,
    turns: Any,
) -> None:
    """Look at the arguments of :func:`fp8debug.watch` by these names.

    Raises:
        UsageError: one cannot be used.
    """
    _check_counts(every, shadow_rows, resume_from)
    if not isinstance(path, str | Path) or not str(path).strip() or "\0" in str(path):
        raise UsageError(f"expected the path of a run's folder, got {path!r}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if shadow not in ("sample", "full"):
        raise UsageError(f"shadow must be 'sample' or 'full', got {shadow!r}")
    if not isinstance(check_finite, bool | None):
        raise UsageError(f"check_finite must be True, False or None, got {check_finite!r}")
    _check_compiled(compiled, turns)


def _check_counts(every: Any, shadow_rows: Any, resume_from: Any) -> None:
    if not all(isinstance(n, int) for n in (every, shadow_rows)):
        raise UsageError(f"every and shadow_rows must be whole numbers, got every={every!r}, shadow_rows={shadow_rows!r}")
    if every < 1 or shadow_rows < 1:
        raise UsageError(f"every and shadow_rows must be at least 1, got every={every}, shadow_rows={shadow_rows}")
    if resume_from is not None and (not isinstance(resume_from, int) or resume_from < 0):
        raise UsageError(f"resume_from is the number of the first step, 0 or more, got {resume_from!r}")


def _check_compiled(compiled: Any, turns: Any) -> None:
    if compiled not in ("auto", "repeat", "as_is", "eager"):
        raise UsageError(f"compiled must be 'auto', 'repeat', 'as_is' or 'eager', got {compiled!r}")
    if turns is not None and (not isinstance(turns, int) or isinstance(turns, bool) or turns < 1):
        raise UsageError(f"turns must be a whole number, 1 or more, got {turns!r}")


def check_inference(inference: Any, target: object, **of_training: Any) -> None:
    """Look at the argument ``inference`` of :func:`fp8debug.watch`, and at those that make no sense with it.

    Raises:
        UsageError: it is no bool, or an argument of training is given with it.
    """
    if not isinstance(inference, bool):
        raise UsageError(f"inference must be True or False, got {inference!r}")
    given = [name for name, value in of_training.items() if value is not None]
    if inference and given:
        raise UsageError(f"{' and '.join(given)} and inference=True do not go together: no optimizer steps in inference")
    if inference and loop_of(target) is not None:
        raise UsageError(f"inference=True takes a model, not {type(target).__name__}: give the model that the trainer evaluates")


def own_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer inside the wrappers of libraries, which do not run the hooks of one."""
    while optimizer is not None and not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def several(values: Sequence[Any] | str) -> Sequence[Any]:
    """Return a sequence; a lone string is one value, not its letters.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(values, str | Recipe):
        return (values,)
    if not isinstance(values, Sequence) or not all(isinstance(value, str | Recipe) for value in values):
        raise UsageError(f"expected a name or a list of names, got {values!r}")
    return values


def recipe_of(recipe: str | Recipe) -> Recipe:
    """Return a recipe, or the built-in one of that name."""
    return recipe if isinstance(recipe, Recipe) else get_recipe(recipe)

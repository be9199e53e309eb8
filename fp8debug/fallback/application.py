"""``apply``: a fallback list put into effect on a model of Fp8Linear modules; scheduled entries get a Schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8debug.errors import NoMatchError, UsageError
from fp8debug.fallback.candidates import Fallback, load_fallbacks
from fp8debug.fallback.schedule import Schedule, Span
from fp8debug.types import plain_name

if TYPE_CHECKING:
    import torch
    from torch import nn


def apply(
    model: nn.Module,
    fallbacks: Iterable[Fallback | Mapping[str, Any]] | str | Path | Mapping[str, Any],
    *,
    start_step: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Give the modules of a list the casts that it names, in place; nothing changes when any entry is wrong.

    Entries with ``from_step`` or ``until_step`` switch at these optimizer steps: ``model.fp8debug_schedule`` then holds the
    :class:`~fp8debug.fallback.schedule.Schedule`, which counts steps, and whose ``set_step`` overrides the count.

    Args:
        model: a model with Fp8Linear modules.
        fallbacks: what ``recommend`` returned, or a JSON file, text or document of it. Later entries win.
        start_step: number of the next optimizer step, when training goes on from a checkpoint.
        optimizer: steps are counted from it; without it, from any torch optimizer that holds a parameter of the model.

    Returns:
        The same model.

    Raises:
        NoMatchError: the model has no such module; the message has the closest names.
        UsageError: a module is not an Fp8Linear, the list cannot be read, a schedule is in force already, or an argument has
            another type.
    """
    _check_arguments(model, optimizer)
    spans: dict[str, list[Span]] = {}
    for fallback in load_fallbacks(fallbacks):
        for name in _modules(model, fallback.module):
            span = Span(fallback.gemms, fallback.tensor, fallback.cast, fallback.from_step, fallback.until_step)
            spans.setdefault(name, []).append(span)
    if not isinstance(start_step, int) or isinstance(start_step, bool) or start_step < 0:
        raise UsageError(f"start_step is the number of the next optimizer step, 0 or more; got {start_step!r}")
    root = _root(model)
    scheduled = {name: found for name, found in spans.items() if any(span.is_bounded for span in found)}
    _check_schedule(getattr(root, "fp8debug_schedule", None), spans, scheduled)
    modules = dict(root.named_modules())
    for name in spans.keys() - scheduled.keys():
        _change(modules[name], spans[name])
    if scheduled:
        Schedule(root, scheduled, start_step, optimizer)
    return model


def _check_arguments(model: object, optimizer: object) -> None:
    if not hasattr(model, "named_modules"):
        raise UsageError(f"expected a model with Fp8Linear modules, got {type(model).__name__}")
    if optimizer is not None and not hasattr(optimizer, "register_step_post_hook"):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")


def _check_schedule(running: Schedule | None, named: Iterable[str], scheduled: Collection[str]) -> None:
    """Refuse to change modules of a schedule that is in force, or to begin a second schedule."""
    if running is None:
        return
    if overlap := sorted(set(running.modules).intersection(named)):
        raise UsageError(f"{overlap[0]} has a schedule already; model.fp8debug_schedule.remove() ends it")
    if scheduled:
        raise UsageError("the model has a schedule already; model.fp8debug_schedule.remove() ends it")


def _change(module: Any, spans: Iterable[Span]) -> None:
    """Give an Fp8Linear the recipe that some changes make of its own."""
    recipe = module.recipe
    for span in spans:
        recipe = span.change(recipe)
    module.set_recipe(recipe)
    module.fp8debug_request = "bf16" if recipe.is_high_precision else "fp8"


def _root(model: nn.Module) -> Any:
    """Return what a run's names start from: DistributedDataParallel adds a level that they do not have."""
    return model.module if type(model).__name__ == "DistributedDataParallel" else model


def _modules(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the Fp8Linear modules that an entry means; a run's names lack those of wrappers.

    Raises:
        NoMatchError: there is none.
        UsageError: it is a module of another kind.
    """
    modules = {plain_name(name): (name, module) for name, module in _root(model).named_modules()}
    linears = [plain for plain, (_, module) in modules.items() if hasattr(module, "set_recipe")]
    pattern = plain_name(pattern)
    if pattern in modules:
        name, module = modules[pattern]
        if pattern not in linears:
            kind = type(module).__name__
            raise UsageError(f"{pattern} is a {kind}, not an Fp8Linear; convert() the model first")
        return [name]
    matched = [modules[plain][0] for plain in linears if fnmatchcase(plain, pattern)]
    if not matched:
        raise NoMatchError("fallback module", pattern, linears)
    return matched

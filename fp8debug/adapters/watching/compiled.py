"""Modules under torch.compile: which of them are not recorded and why; sampled steps without torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fp8debug.adapters.interception.calls import is_compiled, was_called_eagerly
from fp8debug.observer.observer import Observer


def run_samples_eagerly(observer: Observer) -> tuple[Callable[[], None], Callable[[], None]]:
    """Run every sampled step without torch.compile, whose compiled code is used again between.

    Args:
        observer: whose steps.

    Returns:
        What to call when an optimizer has stepped and the step is not closed yet, and what ends it.
    """

    def at_start() -> None:
        _set_stance(observer.sampling and not observer.is_off)

    def at_optimizer() -> None:
        _set_stance((observer.step + 1) % observer.settings.every == 0 and not observer.is_off)

    def undo() -> None:
        if at_start in observer.on_end_step:
            observer.on_end_step.remove(at_start)
        _set_stance(False)

    observer.on_end_step.append(at_start)
    at_start()
    return at_optimizer, undo


def _set_stance(is_eager: bool) -> None:
    torch.compiler.set_stance("force_eager" if is_eager else "default")


_WITHOUT_COMPILE = "watch(..., compiled='eager') runs sampled steps without torch.compile"
#: Reason in coverage for a module that no eager code called in a sampled step of a program that compiles, by ``compiled``.
NOT_RECORDED = {
    "as_is": "not called outside code under torch.compile, which is not recorded with compiled='as_is';"
    f" without it sampled calls are repeated in eager code, {_WITHOUT_COMPILE}",
    "eager": "not called outside code under torch.compile",
}
NOT_RECORDED["auto"] = NOT_RECORDED["repeat"] = (
    "called by code under torch.compile that is no compiled module of the watched model, whose sampled calls alone are repeated;"
    f" call compile() of one of its modules, or {_WITHOUT_COMPILE}"
)


def modules_in_compiled_code(roots: Sequence[nn.Module], *, inference: bool = False) -> set[int]:
    """Return the ids of modules that compiled code may call.

    These are all of a root that eager code never called with gradients (for ``inference``: without), as far as the observer of
    its calls knows, and all within a module that is compiled itself.
    """
    found: set[int] = set()
    if is_compile_in_use():
        for root in roots:
            is_eager = was_called_eagerly(root, gradients=not inference)
            tops = [m for m in root.modules() if is_compiled(m)] if is_eager else [root]
            found.update(id(m) for top in tops for m in top.modules())
    return found


def is_compile_in_use() -> bool:
    """Return whether anything was compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"].get("unique_graphs"))

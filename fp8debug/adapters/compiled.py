"""Code under torch.compile is traced without our hooks and runs without them: it is left alone, or sampled steps avoid it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from fp8debug.observer import Observer


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


def is_compile_in_use() -> bool:
    """Return whether anything was compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"].get("unique_graphs"))

"""What keeps an error of ours, and a moment at which nothing can be recorded, from the training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    from fp8debug.observer import Observer

    P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Shielded")


class Shielded(Protocol):
    """What has methods that may fail: it knows whether one did."""

    observer: Observer
    module: str
    failed: bool
    given_up: bool
    is_fresh: bool

    def give_up(self, reason: str) -> None:
        """End the sample of this step."""


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Keep an error of ours from reaching the training step: the module is reported once and watched no more.

    Too little memory for a sample ends the sample alone: the module is watched again from the next step on. What it computes
    is seen by no mode (see :func:`unseen`).
    """

    @wraps(method)
    def call(probe: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if probe.failed or probe.given_up:
            return None
        probe.is_fresh = False
        try:
            if not torch.is_grad_enabled() and not is_overheard():
                return method(probe, *args, **kwargs)
            with torch.no_grad(), unseen():
                return method(probe, *args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError):
            probe.give_up("out of memory in a sample; training goes on")
            return None
        except Exception as error:  # whatever it is, the user's step goes on
            probe.failed = True
            lines = str(error).splitlines() or [""]
            probe.observer.report(probe.module, f"not watched any more: {type(error).__name__}: {lines[0]}"[:300], True)
            return None

    return call


def is_overheard() -> bool:
    """Return whether a mode that is not ours hears the ops that run now."""
    count = _len_torch_dispatch_stack()
    return count > 0 and any(not getattr(_get_dispatch_stack_at(i), "is_ours", False) for i in range(count))


def unseen() -> AbstractContextManager[Any]:
    """Let no mode hear the ops that follow, where one that is not ours would.

    Selective activation checkpointing counts the ops of a forward pass and takes results by these numbers when it runs the pass
    once more: one of ours, which does not run again, would hand the training another tensor.
    """
    return _disable_current_modes() if is_overheard() else nullcontext()


def is_capturing() -> bool:
    """Return whether a CUDA graph captures what runs now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]  # torch's

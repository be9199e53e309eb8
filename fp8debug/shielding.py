"""What keeps an error of ours, and a moment at which nothing can be recorded, from the training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C import (
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    from fp8debug.observer import Observer

    P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Shielded")


class Shielded:
    """What has methods that may fail, and holds something of a step: it forgets that at its first call in a later one.

    Args:
        observer: whose steps they are.
        module: FQN of what it belongs to.
    """

    def __init__(self, observer: Observer, module: str) -> None:
        self.observer = observer
        self.module = module
        self.failed = False
        self._told = False
        self._generation = self._gave_up = -1  # the step that it was last called in, and the last one whose sample it ended

    @property
    def is_over(self) -> bool:
        """Whether the step that it was last called in has ended."""
        return self._generation != self.observer.generation

    @property
    def given_up(self) -> bool:
        """Whether the sample of this step has ended."""
        return self._gave_up == self.observer.generation

    def begin_step(self) -> None:
        """Forget an earlier step."""
        self.forget()
        self._generation = self.observer.generation
        self.observer.touched.append(self)

    def forget(self) -> None:
        """Forget the step that it was last called in."""

    def give_up(self, reason: str) -> None:
        """End the sample of this step, for want of memory or because it cannot be taken; the first time is said aloud."""
        self._gave_up = self.observer.generation
        self.observer.report(self.module, f"not recorded in full at step {self.observer.step}: {reason}", not self._told)
        self._told = True


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Keep an error of ours from reaching the training step: the module is reported once and watched no more.

    Too little memory for a sample ends the sample alone: the module is watched again from the next step on. What it computes
    is seen by no mode (see :func:`unseen`), and by autograd neither.
    """

    return _kept_apart(method, runs_ops=True)


def shielded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Do as :func:`guarded` does, for a method that runs no ops."""
    return _kept_apart(method, runs_ops=False)


def _kept_apart(method: Callable[Concatenate[S, P], R], *, runs_ops: bool) -> Callable[Concatenate[S, P], R | None]:
    @wraps(method)
    def call(probe: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        generation = probe.observer.generation
        if probe.failed or probe._gave_up == generation:
            return None
        try:
            if probe._generation != generation:
                probe.begin_step()
            if not runs_ops or not (torch.is_grad_enabled() or _len_torch_dispatch_stack()):
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


class _Aside:
    """Takes modes of ours off the stack: what we compute is not for them, and an op that is heard takes far longer."""

    def __enter__(self) -> None:
        self._modes = [_pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack())]

    def __exit__(self, *_: object) -> None:
        for mode in reversed(self._modes):
            _push_on_torch_dispatch_stack(mode)


def unseen() -> AbstractContextManager[Any]:
    """Let no mode hear the ops that follow.

    Selective activation checkpointing counts the ops of a forward pass and takes results by these numbers when it runs the pass
    once more: one of ours, which does not run again, would hand the training another tensor.
    """
    if not _len_torch_dispatch_stack():
        return nullcontext()
    return _disable_current_modes() if is_overheard() else _Aside()


def is_capturing() -> bool:
    """Return whether a CUDA graph captures what runs now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]  # torch's

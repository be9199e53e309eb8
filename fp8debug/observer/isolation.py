"""Methods that record inside a training step: their errors do not reach it, and no dispatch mode sees the ops they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import torch

from fp8debug.interruptions import is_ours
from fp8debug.kernels.torch_state import TorchState, is_overridden, is_own_capture, ordinary_torch, untraced
from fp8debug.types import NOT_WATCHED, NOT_WATCHED_CODE

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    from fp8debug.observer.observer import Observer

    P = ParamSpec("P")

R = TypeVar("R")
S = TypeVar("S", bound="StepState")


class StepState:
    """Per-step recorder state, reset at the first call of a new step and disabled after an error.

    Args:
        observer: whose steps they are.
        module: FQN of what it belongs to.
    """

    def __init__(self, observer: Observer, module: str) -> None:
        self.observer = observer
        self.module = module
        self.failed = False
        self._told = False
        self._step_count = self._gave_up = -1  # the step that it was last called in, and the last one whose sample it ended

    @property
    def is_over(self) -> bool:
        """True if the step that it was last called in has ended."""
        return self._step_count != self.observer.step_count

    @property
    def given_up(self) -> bool:
        """True if the sample of this step has ended."""
        return self._gave_up == self.observer.step_count

    def begin_step(self) -> None:
        """Forget an earlier step."""
        self.forget()
        self._step_count = self.observer.step_count
        self.observer.active_probes.append(self)

    def forget(self) -> None:
        """Forget the step that it was last called in."""

    def give_up(self, reason: str) -> None:
        """End the sample of this step, for want of memory or because it cannot be taken; the first time is printed."""
        self._gave_up = self.observer.step_count
        self.observer.modules_given_up.add(self.module)
        self.observer.report(self.module, f"not recorded in full at step {self.observer.step}: {reason}", not self._told)
        self._told = True

    def interrupt(self, error: BaseException) -> None:
        """End the sample of this step because an exception of the program ended a method in the middle; record it as an event."""
        self._gave_up = self.observer.step_count
        self.observer.interrupt()
        text = f"not recorded in full at step {self.observer.step}: {type(error).__name__} was raised while it was recorded"
        self.observer.report(self.module, text, False)


def isolated(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Keep an error of fp8debug from reaching the training step: the module is reported once and watched no more.

    Too little memory for a sample ends the sample alone: the module is watched again from the next step on. The method runs
    in :func:`ordinary_torch`. An exception of the program, which a signal handler may raise in the middle of the method, passes
    through: the sample ends, and gradient mode and modes are what they were before.
    """

    return _isolate(method, runs_ops=True)


def isolated_without_ops(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Do as :func:`isolated` does, for a method that runs no ops."""
    return _isolate(method, runs_ops=False)


def _isolate(method: Callable[Concatenate[S, P], R], *, runs_ops: bool) -> Callable[Concatenate[S, P], R | None]:
    @wraps(method)
    def call(probe: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        step_count = probe.observer.step_count
        if probe.failed or probe._gave_up == step_count:
            return None
        before = TorchState() if runs_ops else None
        try:
            if probe._step_count != step_count:
                probe.begin_step()
            overridden = runs_ops and is_overridden()
            if not overridden and not (runs_ops and torch.is_grad_enabled()):
                return method(probe, *args, **kwargs)
            with ordinary_torch() if overridden else torch.no_grad():
                return method(probe, *args, **kwargs)
        except BaseException as error:
            if before is not None:
                before.restore()
            if not is_ours(error):
                probe.interrupt(error)
                raise
            if is_own_capture():  # ends the capture, not the module: it runs without a graph next time
                raise
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                probe.give_up("out of memory in a sample; training goes on")
                return None
            probe.failed = True
            lines = str(error).splitlines() or [""]
            text = f"{NOT_WATCHED}: {type(error).__name__}: {lines[0]}"[:300]
            probe.observer.report(probe.module, text, True, NOT_WATCHED_CODE)
            return None

    return untraced(call)

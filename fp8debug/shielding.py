"""Methods that record inside a training step: their errors do not reach it, and no dispatch mode sees the ops they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import (
    _DisableAutocast,
    _get_dispatch_stack_at,
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
)
from torch._C import _dynamo as _dynamo_c
from torch.fx import _symbolic_trace as _fx
from torch.utils._python_dispatch import _disable_current_modes

from fp8debug.interruptions import is_ours
from fp8debug.types import NOT_WATCHED

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    from fp8debug.observer import Observer

    P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound="Callable[..., Any]")
S = TypeVar("S", bound="Shielded")


_FRAMES: Any = _dynamo_c.eval_frame
_IS_TORCH_2_6 = not hasattr(_FRAMES, "set_code_exec_strategy")


def skipped_by_dynamo(function: F) -> F:
    """Keep Dynamo from compiling a function's own frame, where code of a compiled function runs after a graph break.

    Functions that it calls may be compiled; torch._dynamo is not imported for it.
    """
    code = function.__code__
    if _IS_TORCH_2_6:
        _FRAMES.skip_code(code)
    else:
        skip, default = _FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.DEFAULT
        _FRAMES.set_code_exec_strategy(code, _FRAMES._FrameExecStrategy(skip, default))
    return function


@skipped_by_dynamo
def _frame_callback() -> Any:
    """Return what compiles a frame that begins in this thread; None outside of code under torch.compile."""
    if not _IS_TORCH_2_6:
        return _FRAMES.get_eval_frame_callback()
    callback = _FRAMES.set_eval_frame(None)  # the getter of torch 2.6 gives a reference away that it does not own
    _FRAMES.set_eval_frame(callback)
    return callback


def untraced(function: F) -> F:
    """Let Dynamo compile neither a function of ours nor what it calls, as :func:`torch.compiler.disable` does at lower cost."""

    @skipped_by_dynamo
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        callback = _frame_callback()
        if callback is None:
            return function(*args, **kwargs)
        _FRAMES.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _FRAMES.set_eval_frame(callback)

    return cast("F", call)


@skipped_by_dynamo
def is_under_dynamo() -> bool:
    """Return whether torch.compile runs the code that called: a frame that begins now may be compiled."""
    return _frame_callback() is not None


@skipped_by_dynamo
def is_traced() -> bool:
    """Return whether a module's call is traced into a graph (torch.jit.trace, torch.fx, torch.export) and trains nothing."""
    return torch._C._get_tracing_state() is not None or bool(getattr(_fx, "_is_fx_tracing_flag", False))


class Shielded:
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
        self.observer.modules_given_up.add(self.module)
        self.observer.report(self.module, f"not recorded in full at step {self.observer.step}: {reason}", not self._told)
        self._told = True

    def interrupt(self, error: BaseException) -> None:
        """End the sample of this step because an exception of the program ended a method in the middle; record it as an event."""
        self._gave_up = self.observer.generation
        self.observer.interrupt()
        text = f"not recorded in full at step {self.observer.step}: {type(error).__name__} was raised while it was recorded"
        self.observer.report(self.module, text, False)


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Keep an error of fp8debug from reaching the training step: the module is reported once and watched no more.

    Too little memory for a sample ends the sample alone: the module is watched again from the next step on. The method runs
    in :func:`ordinary_torch`. An exception of the program, which a signal handler may raise in the middle of the method, passes
    through: the sample ends, and gradient mode and modes are what they were before.
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
        before = TorchState() if runs_ops else None
        try:
            if probe._generation != generation:
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
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                probe.give_up("out of memory in a sample; training goes on")
                return None
            probe.failed = True
            lines = str(error).splitlines() or [""]
            probe.observer.report(probe.module, f"{NOT_WATCHED}: {type(error).__name__}: {lines[0]}"[:300], True)
            return None

    return untraced(call)


class TorchState:
    """The gradient mode, dispatch modes and function modes of this thread, to be restored after an exception.

    A context manager does not restore them where a signal handler raises inside its ``__enter__``.
    """

    __slots__ = ("_functions", "_has_gradients", "_modes")

    def __init__(self) -> None:
        self._has_gradients = torch.is_grad_enabled()
        self._modes = active_modes()
        self._functions = _function_modes()

    def restore(self) -> None:
        """Set all three to what they were."""
        if torch.is_grad_enabled() != self._has_gradients:
            torch._C._set_grad_enabled(self._has_gradients)
        set_modes(self._modes)
        if len(_function_modes()) != len(self._functions):
            while _len_torch_function_stack():
                _pop_torch_function_stack()
            for mode in self._functions:
                _push_on_torch_function_stack(mode)


def _function_modes() -> list[Any]:
    return [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]


def set_modes(modes: list[Any]) -> None:
    """Make these the dispatch modes of this thread, the outermost first; those that stay where they are are not touched."""
    now = active_modes()
    same = next(
        (i for i, (one, other) in enumerate(zip(now, modes, strict=False)) if one is not other), min(len(now), len(modes))
    )
    while _len_torch_dispatch_stack() > same:
        _pop_torch_dispatch_stack(None)
    for mode in modes[same:]:
        _push_on_torch_dispatch_stack(mode)


def active_modes() -> list[Any]:
    """Return the dispatch modes of this thread, the outermost first."""
    return [_get_dispatch_stack_at(i) for i in range(_len_torch_dispatch_stack())]


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


def is_overridden() -> bool:
    """Return whether the program has changed what torch's ops do on this thread: by a mode, autocast or inference mode."""
    return bool(
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _is_any_autocast_enabled()
        or torch.is_inference_mode_enabled()
    )


@contextmanager
def ordinary_torch() -> Iterator[None]:
    """Run our own ops as torch does by default: without autograd, and outside every mode of the program.

    Dispatch modes would count the ops, function modes (a default device is one) would place or replace them, autocast would
    round their operands, and what inference mode makes could not be written to after it.
    """
    modes = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    try:
        with torch.no_grad(), unseen():
            if not (_is_any_autocast_enabled() or torch.is_inference_mode_enabled()):
                yield
            else:
                with torch.inference_mode(False), torch.no_grad(), _DisableAutocast():
                    yield
    finally:
        for mode in reversed(modes):
            _push_on_torch_function_stack(mode)


def is_transformed() -> bool:
    """Return whether a transform of torch.func (grad, vmap, jvp) runs, under which tensors are wrappers without memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batched(x: Tensor) -> bool:
    """Return whether a tensor stands for many at once: under vmap, or as a gradient of ``is_grads_batched=True``."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


def is_capturing() -> bool:
    """Return whether a CUDA graph captures what runs now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]  # torch's

"""Torch's state on this thread: dispatch and function modes, transforms, tracing, graph capture; and ops of ours beside them."""

from __future__ import annotations

import sys
import threading
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

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

F = TypeVar("F", bound="Callable[..., Any]")


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


def outside_of_graphs(function: F) -> F:
    """Let Dynamo leave a hook that returns None out of what it traces, and compile nothing of it where it runs."""
    untraced_function = untraced(function)

    @skipped_by_dynamo
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            untraced_function(*args, **kwargs)

    return cast("F", call)


@skipped_by_dynamo
def is_under_dynamo() -> bool:
    """Return whether torch.compile runs the code that called: a frame that begins now may be compiled."""
    return _frame_callback() is not None


@skipped_by_dynamo
def is_traced() -> bool:
    """Return whether a module's call is traced into a graph (torch.jit.trace, torch.fx, torch.export) and trains nothing."""
    return torch._C._get_tracing_state() is not None or bool(getattr(_fx, "_is_fx_tracing_flag", False))


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


def foreign_mode_active() -> bool:
    """Return whether a mode that is not ours sees the ops that run now."""
    count = _len_torch_dispatch_stack()
    return count > 0 and any(not getattr(_get_dispatch_stack_at(i), "is_ours", False) for i in range(count))


class _OurModesHidden:
    """Takes modes of ours off the stack: what we compute is not for them, and an op that is observed takes far longer."""

    def __enter__(self) -> None:
        self._modes = [_pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack())]

    def __exit__(self, *_: object) -> None:
        for mode in reversed(self._modes):
            _push_on_torch_dispatch_stack(mode)


def hidden_from_modes() -> AbstractContextManager[Any]:
    """Let no mode see the ops that follow.

    Selective activation checkpointing counts the ops of a forward pass and takes results by these numbers when it runs the pass
    once more: one of ours, which does not run again, would hand the training another tensor.
    """
    if not _len_torch_dispatch_stack():
        return nullcontext()
    return _disable_current_modes() if foreign_mode_active() else _OurModesHidden()


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
        with torch.no_grad(), hidden_from_modes():
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


class _Captures(threading.local):
    """Memory on the host that a capture of ours on this thread sends from; None where there is none."""

    numbers: Any = None


_CAPTURES = _Captures()


@contextmanager
def own_capture(numbers: Any) -> Iterator[None]:
    """Capture what follows on this thread as work of ours, which is recorded all the same; one at a time.

    Args:
        numbers: what :func:`numbers_of_capture` returns meanwhile; it has to live as long as the graph.
    """
    _CAPTURES.numbers = numbers
    try:
        yield
    finally:
        _CAPTURES.numbers = None


def numbers_of_capture() -> Any:
    """Return what a capture of ours on this thread sends to the device by, at each replay again; None outside of one."""
    return _CAPTURES.numbers


def is_own_capture() -> bool:
    """Return whether a capture of ours is under way on this thread."""
    return _CAPTURES.numbers is not None


class NotReplayableError(Exception):
    """A replay cannot record this; its text says what."""


def refuse_replays(what: str) -> None:
    """Raise where a capture of ours is under way on this thread, for what a replay would not do as the host does it.

    Such are reads of state of the host that changes from step to step, and memory that takes the place of other memory, which
    earlier graphs use.
    """
    if is_own_capture():
        raise NotReplayableError(what)


def is_capturing() -> bool:
    """Return whether a CUDA graph of the program's captures what runs now."""
    return not is_own_capture() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]  # torch's


def is_of_cuda_graph() -> bool:
    """Return whether a graph of the program's captures what runs now, or inductor runs it once before: memory is the graph's.

    Inductor ends the program where memory of a graph that is not its own output lives on.
    """
    if is_own_capture() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return False
    device = torch._C._cuda_getDevice()
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not stream:  # the default stream, which nobody can capture
        return False
    if torch._C._cuda_isCurrentStreamCapturing():
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = None if trees is None else trees.get_manager(device, create_if_none_exists=False)
    return manager is not None and stream == manager.stream.cuda_stream

"""Megatron-LM, whose loop is the functions of ``megatron.training.training``, and Megatron-Bridge, which has callbacks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8debug.interruptions import is_ours
from fp8debug.trainers.base import LOOPS, LoopRecorder, ending, is_a, rate_of, replace, undoing


class Megatron:
    """The module itself is the target: ``watch(megatron.training.training, ...)`` before ``pretrain()``."""

    name = "megatron"

    def matches(self, target: object) -> bool:
        """Return whether it is a module with Megatron's two functions."""
        return isinstance(target, ModuleType) and hasattr(target, "setup_model_and_optimizer") and hasattr(target, "train_step")

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Wrap both: the first returns the chunks of the model, the second trains a step and returns its losses."""

        def setup(own: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                chunks = result[0] if isinstance(result[0], list | tuple) else [result[0]]
                arguments = _arguments(target)
                graphs = getattr(arguments, "cuda_graph_impl", None) or "none"
                if graphs != "none":
                    recorder.refuse("Megatron replays CUDA graphs, inside which nothing is seen: set --cuda-graph-impl none")
                else:
                    recorder.begin([_unwrapped(chunk) for chunk in chunks], getattr(arguments, "iteration", 0) or 0)
                return result

            return recorded

        def step(own: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                optimizer = kwargs.get("optimizer", args[3] if len(args) > 3 else None)
                recorder.note(lr=rate_of(optimizer))
                try:
                    result = own(*args, **kwargs)
                except BaseException as error:
                    recorder.finish(error)
                    raise
                losses = result[0] if isinstance(result, tuple) and isinstance(result[0], dict) else {}
                recorder.note(loss=_scalar(next(iter(losses.values()), None)), grad_norm=_norm(result))
                recorder.end_step()
                return result

            return recorded

        undo = [replace(target, "setup_model_and_optimizer", setup), replace(target, "train_step", step)]
        if hasattr(target, "train"):
            undo.append(replace(target, "train", ending(recorder)))
        return undoing(undo)


class Bridge:
    """Megatron-Bridge: ``watch(callback_manager, ...)``; its callbacks tell of the steps."""

    name = "megatron_bridge"

    def matches(self, target: object) -> bool:
        """Return whether it is a CallbackManager."""
        return is_a(target, "CallbackManager", "megatron")

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Register functions for the events; nothing can be taken out again, so that they fall silent instead."""
        active = [True]

        def begin(context: Any) -> None:
            if active:
                state = getattr(getattr(context, "state", None), "train_state", None)
                recorder.begin([_unwrapped(chunk) for chunk in context.model], getattr(state, "step", 0) or 0)

        def end_step(context: Any) -> None:
            if active:
                losses = getattr(context, "loss_dict", None) or {}
                recorder.note(
                    loss=_scalar(next(iter(losses.values()), None)),
                    grad_norm=getattr(context, "grad_norm", None),
                    lr=rate_of(getattr(context, "optimizer", None)),
                )
                recorder.end_step()

        def end(context: Any) -> None:
            if active:
                recorder.finish()

        target.register("on_train_start", begin)
        target.register("on_train_step_end", end_step)
        target.register("on_train_end", end)
        return active.clear


def _arguments(module: Any) -> Any:
    try:
        return module.get_args()
    except Exception as error:  # not parsed yet, or not of this version
        if not is_ours(error):
            raise
        return None


def _unwrapped(chunk: Any) -> Any:
    """Return the model inside Megatron's DDP and Float16Module."""
    while type(chunk).__name__ in ("DistributedDataParallel", "Float16Module", "FullyShardedDataParallel"):
        chunk = chunk.module
    return chunk


def _scalar(value: Any) -> Any:
    """Return a loss; Megatron also reports pairs of (sum, number of tokens), as a tensor or a tuple."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0] / value[1]
    if getattr(value, "numel", lambda: 1)() == 2:
        return value[0] / value[1]
    return value


def _norm(result: Any) -> Any:
    """Return the gradient norm out of what ``train_step`` returns, whose length differs between versions."""
    if not isinstance(result, tuple):
        return None
    norm = result[5] if len(result) > 5 else result[2] if len(result) == 4 else None
    return None if isinstance(norm, bool) else norm


LOOPS.add(Megatron.name, Megatron())
LOOPS.add(Bridge.name, Bridge())

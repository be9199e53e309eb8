"""torchtitan's Trainer: no callbacks, so its steps are wrapped; its model parts are there from the beginning."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from fp8debug.errors import AttachError
from fp8debug.trainers.base import LOOPS, LoopRecorder, LossSum, ending, is_a, notifying, replace, undoing


class TorchTitan:
    """``torchtitan.trainer.Trainer`` (``torchtitan.train.Trainer`` of older releases), called before its ``train()``."""

    name = "torchtitan"

    def matches(self, target: object) -> bool:
        """Return whether it is a Trainer."""
        return is_a(target, "Trainer", "torchtitan") and hasattr(target, "model_parts")

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Wrap ``train``, ``train_step`` and ``forward_backward_step``; the loss is this rank's, summed over the microbatches.

        Where it is divided by the tokens of all ranks it is multiplied by their number, so that its mean is the whole loss; a
        number that is not known is reported.

        Raises:
            AttachError: CUDA graphs are on, inside which nothing of ours would run.
        """
        training = getattr(getattr(target, "config", None), "training", None)
        if torch.cuda.is_available() and getattr(training, "disable_cuda_graphs", True) is False:
            raise AttachError("torchtitan replays CUDA graphs, which cannot be recorded; set training.disable_cuda_graphs")
        losses = LossSum()
        module = sys.modules[type(target).__module__]

        begun: list[bool] = []
        is_of_all = "global_valid_tokens" in inspect.signature(target.forward_backward_step).parameters
        parts, unknown = _data_ranks(getattr(target, "parallel_dims", None)) if is_of_all else (1, None)

        def train_step(own: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                if not begun:  # a checkpoint has been loaded by now; its steps count from 1
                    begun.append(True)
                    recorder.begin(list(target.model_parts), target.step - 1)
                    if unknown is not None:
                        recorder.tell(
                            f"the losses recorded are this rank's parts: torchtitan divides them by the tokens of all ranks, and"
                            f" how many these are is not known ({unknown})"
                        )
                groups = [g for o in getattr(target, "optimizers", ()) for g in o.param_groups]
                recorder.note(lr=groups[0].get("lr") if groups else None)
                utils = getattr(module, "dist_utils", None)
                restore = replace(utils, "clip_grad_norm_", clip) if hasattr(utils, "clip_grad_norm_") else None
                try:
                    result = own(*args, **kwargs)
                finally:  # a loss that is not finite ends the training here
                    if restore is not None:
                        restore()
                    loss = losses.take()
                    recorder.note(loss=loss if loss is None else loss * parts)
                recorder.end_step()
                return result

            return recorded

        def add(loss: Any) -> None:
            if getattr(target, "pp_has_last_stage", True):  # the others return -1
                losses.add(loss)

        clip = notifying(lambda norm: recorder.note(grad_norm=norm))
        undo = [replace(target, "train", ending(recorder)), replace(target, "train_step", train_step)]
        undo.append(replace(target, "forward_backward_step", notifying(add)))
        return undoing(undo)


def _data_ranks(dims: Any) -> tuple[int, str | None]:
    """Return how many ranks have tokens of their own, and what it is not known from; 1 then."""
    num = 1
    for name in ("dp_replicate", "dp_shard", "cp"):
        size = getattr(dims, name, None)
        if type(size) is not int or size < 1:
            return 1, f"parallel_dims.{name} is {size!r}"
        num *= size
    return num, None


LOOPS.add(TorchTitan.name, TorchTitan())

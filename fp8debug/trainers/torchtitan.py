"""torchtitan's Trainer: no callbacks, so its steps are wrapped; its model parts are there from the beginning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fp8debug.errors import AttachError
from fp8debug.trainers.base import LOOPS, LossSum, Recorder, ending, is_a, replace, telling, undoing


class TorchTitan:
    """``torchtitan.trainer.Trainer`` (``torchtitan.train.Trainer`` of older releases), called before its ``train()``."""

    name = "torchtitan"

    def matches(self, target: object) -> bool:
        """Return whether it is a Trainer."""
        return is_a(target, "Trainer", "torchtitan") and hasattr(target, "model_parts")

    def attach(self, target: Any, recorder: Recorder) -> Callable[[], None]:
        """Wrap ``train``, ``train_step`` and ``forward_backward_step``; the loss is this rank's, summed over the microbatches.

        Raises:
            AttachError: CUDA graphs are on, inside which nothing of ours would run.
        """
        training = getattr(getattr(target, "config", None), "training", None)
        if torch.cuda.is_available() and getattr(training, "disable_cuda_graphs", True) is False:
            raise AttachError("torchtitan replays CUDA graphs, which cannot be recorded; set training.disable_cuda_graphs")
        losses = LossSum()
        module = sys.modules[type(target).__module__]

        begun: list[bool] = []

        def train_step(own: Callable[..., Any]) -> Callable[..., Any]:
            def heard(*args: Any, **kwargs: Any) -> Any:
                if not begun:  # a checkpoint has been loaded by now; its steps count from 1
                    begun.append(True)
                    recorder.begin(list(target.model_parts), target.step - 1)
                groups = [g for o in getattr(target, "optimizers", ()) for g in o.param_groups]
                recorder.note(lr=groups[0].get("lr") if groups else None)
                utils = getattr(module, "dist_utils", None)
                restore = replace(utils, "clip_grad_norm_", clip) if hasattr(utils, "clip_grad_norm_") else None
                try:
                    result = own(*args, **kwargs)
                finally:  # a loss that is not finite ends the training here
                    if restore is not None:
                        restore()
                    recorder.note(loss=losses.take())
                recorder.end_step()
                return result

            return heard

        def add(loss: Any) -> None:
            if getattr(target, "pp_has_last_stage", True):  # the others return -1
                losses.add(loss)

        clip = telling(lambda norm: recorder.note(grad_norm=norm))
        undo = [replace(target, "train", ending(recorder)), replace(target, "train_step", train_step)]
        undo.append(replace(target, "forward_backward_step", telling(add)))
        return undoing(undo)


LOOPS.add(TorchTitan.name, TorchTitan())

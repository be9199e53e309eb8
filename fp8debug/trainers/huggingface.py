"""Transformers' Trainer and what comes from it (TRL's trainers): a callback, and hooks on the loss and the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8debug.trainers.base import LOOPS, LoopRecorder, LossSum, is_a, notifying, rate_of, replace, scale_of, undoing


class HuggingFace:
    """``transformers.Trainer``: the model is watched as ``prepare`` left it, when training begins."""

    name = "transformers"

    def matches(self, target: object) -> bool:
        """Return whether it is a Trainer."""
        return is_a(target, "Trainer", "transformers")

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Add a callback; the loss of every step is the sum of what ``training_step`` returns, as the Trainer logs it."""
        from transformers import TrainerCallback

        losses = LossSum()
        norms: list[Any] = []

        class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]  # a class of a library without types
            """Tells the recorder."""

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                losses.take()
                recorder.begin([target.model_wrapped], state.global_step)

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                scale = scale_of(getattr(target.accelerator, "scaler", None))
                recorder.note(lr=rate_of(target.optimizer), loss_scale=scale, grad_norm=norms[0] if norms else None)

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                recorder.note(loss=losses.take())
                norms.clear()
                recorder.end_step()

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                recorder.finish()

        callback = HuggingFaceCallback()
        target.add_callback(callback)
        undo = [
            replace(target, "training_step", notifying(losses.add)),
            replace(target.accelerator, "clip_grad_norm_", notifying(norms.append)),
        ]
        undo.append(lambda: target.remove_callback(callback))
        return undoing(undo)


LOOPS.add(HuggingFace.name, HuggingFace())

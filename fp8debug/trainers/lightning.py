"""Lightning's Trainer: a callback, which learns of the model when ``fit()`` has set it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8debug.trainers.base import LOOPS, LoopRecorder, LossSum, is_a, notifying, rate_of, replace, scale_of, undoing


class Lightning:
    """``lightning.Trainer``, also under the name ``pytorch_lightning``."""

    name = "lightning"

    def matches(self, target: object) -> bool:
        """Return whether it is a Trainer."""
        return is_a(target, "Trainer", "lightning", "pytorch_lightning")

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Add a callback; a step is a batch after which ``global_step`` is another, so that microbatches are one step."""
        if type(target).__module__.startswith("pytorch_lightning"):
            from pytorch_lightning.callbacks import Callback
        else:
            from lightning.pytorch.callbacks import Callback
        losses = LossSum()
        undo: list[Callable[[], None]] = []

        class LightningCallback(Callback):  # type: ignore[misc]  # a class of a library without types
            """Tells the recorder."""

            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                losses.take()
                self.step = trainer.global_step
                recorder.begin([pl_module], self.step)
                if hasattr(trainer.precision_plugin, "clip_grad_by_norm"):
                    undo.append(replace(trainer.precision_plugin, "clip_grad_by_norm", clip))

            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                scaler = getattr(trainer.precision_plugin, "scaler", None)
                recorder.note(lr=rate_of(optimizer), loss_scale=scale_of(scaler))

            def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                losses.add(outputs.get("loss") if isinstance(outputs, dict) else outputs)
                if trainer.global_step != self.step:
                    self.step = trainer.global_step
                    # automatic optimization has divided each by their number
                    recorder.note(loss=losses.take(mean=not pl_module.automatic_optimization))
                    recorder.end_step()

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                recorder.finish()

            def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
                recorder.finish(exception)

        def clip(own: Callable[..., Any]) -> Callable[..., Any]:
            def clipped(*args: Any, **kwargs: Any) -> Any:
                restore = replace(torch.nn.utils, "clip_grad_norm_", listen)
                try:
                    return own(*args, **kwargs)
                finally:
                    restore()

            return clipped

        listen = notifying(lambda norm: recorder.note(grad_norm=norm))
        callback = LightningCallback()
        target.callbacks.append(callback)

        def leave() -> None:
            if callback in target.callbacks:
                target.callbacks.remove(callback)

        undo.append(leave)
        return undoing(undo)


LOOPS.add(Lightning.name, Lightning())

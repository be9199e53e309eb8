"""Lightning's Trainer: a callback, which learns of the model when ``fit()`` has set it up."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
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
        # the library's class comes last: it has methods of the same names that do nothing
        callback = type("LightningCallback", (_Hooks, Callback), {})(recorder)
        target.callbacks.append(callback)

        def leave() -> None:
            if callback in target.callbacks:
                target.callbacks.remove(callback)

        callback.undo.append(leave)
        return undoing(callback.undo)


class _Hooks:
    """Methods that the library's loop calls, for a recorder; ``undo`` ends what they changed."""

    def __init__(self, recorder: LoopRecorder) -> None:
        self.undo: list[Callable[[], None]] = []
        self._recorder, self._losses, self._step = recorder, LossSum(), 0

    def __deepcopy__(self, memo: Any) -> _Hooks:
        return copy(self)  # for the same recorder: a copied Trainer is no second run

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._losses.take()
        self._step = trainer.global_step
        self._recorder.begin([pl_module], self._step)
        if hasattr(trainer.precision_plugin, "clip_grad_by_norm"):
            listen = notifying(lambda norm: self._recorder.note(grad_norm=norm))
            self.undo.append(replace(trainer.precision_plugin, "clip_grad_by_norm", partial(_clip_observed, listen)))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._recorder.note(lr=rate_of(optimizer), loss_scale=scale_of(scaler))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.add(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            # automatic optimization has divided each by their number
            self._recorder.note(loss=self._losses.take(mean=not pl_module.automatic_optimization))
            self._recorder.end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._recorder.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._recorder.finish(exception)


def _clip_observed(listen: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a precision plugin's method that clips, with torch's function that it calls replaced while it runs."""

    def clipped(*args: Any, **kwargs: Any) -> Any:
        restore = replace(torch.nn.utils, "clip_grad_norm_", listen)
        try:
            return own(*args, **kwargs)
        finally:
            restore()

    return clipped


LOOPS.add(Lightning.name, Lightning())

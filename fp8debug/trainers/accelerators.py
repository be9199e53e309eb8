"""Accelerate: a loop of the user's own around ``accelerator.backward`` and the prepared optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8debug.errors import AttachError
from fp8debug.trainers.base import (
    LOOPS,
    LoopRecorder,
    LossSum,
    is_a,
    notifying,
    rate_of,
    recording_losses,
    replace,
    scale_of,
    undoing,
)


class Accelerate:
    """``accelerate.Accelerator`` after ``prepare()``: its models are watched, the last optimizer ends the steps."""

    name = "accelerate"

    def matches(self, target: object) -> bool:
        """Return whether it is an Accelerator."""
        return is_a(target, "Accelerator", "accelerate")

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Listen to ``backward``, ``clip_grad_norm_`` and the optimizer; the loss is the mean over the microbatches.

        Raises:
            AttachError: nothing was prepared yet.
        """
        if not target._models or not target._optimizers:
            raise AttachError("the Accelerator has prepared no model and optimizer yet; call watch() after accelerator.prepare()")
        losses = LossSum()
        optimizer = target._optimizers[-1]

        def step(own: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                is_last = optimizer.gradient_state.sync_gradients
                if is_last:
                    recorder.note(lr=rate_of(optimizer), loss_scale=scale_of(target.scaler))
                result = own(*args, **kwargs)
                if is_last:
                    recorder.note(loss=losses.take(mean=True))
                    recorder.end_step()
                return result

            return recorded

        recorder.begin(target._models)
        norm = notifying(lambda norm: recorder.note(grad_norm=norm))
        undo = [replace(target, "backward", recording_losses(losses)), replace(target, "clip_grad_norm_", norm)]
        undo.append(replace(optimizer, "step", step))
        return undoing(undo)


LOOPS.add(Accelerate.name, Accelerate())

"""DeepSpeed's engine: ``engine.backward(loss)`` and ``engine.step()`` in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8debug.errors import AttachError
from fp8debug.trainers.base import LOOPS, LoopRecorder, LossSum, is_a, rate_of, recording_losses, replace, undoing


class DeepSpeed:
    """``deepspeed.DeepSpeedEngine`` as ``deepspeed.initialize()`` returns it: its ``module`` is watched."""

    name = "deepspeed"

    def matches(self, target: object) -> bool:
        """Return whether it is an engine."""
        return is_a(target, "DeepSpeedEngine", "deepspeed")

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Wrap ``backward`` and ``step``; ``step`` at a boundary of gradient accumulation ends the step.

        Its optimizers hold no parameter of the model under ZeRO, so that steps cannot be counted from them.

        Raises:
            AttachError: it is a pipeline engine, which runs its microbatches itself.
        """
        if is_a(target, "PipelineEngine", "deepspeed"):
            raise AttachError(
                "DeepSpeed's PipelineEngine runs its microbatches itself: watch(engine.module, ...), and call watch.step() after"
                " each train_batch()"
            )
        losses = LossSum()

        def step(own: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                is_last = target.is_gradient_accumulation_boundary()
                if is_last:
                    recorder.note(lr=rate_of(target.optimizer), loss_scale=getattr(target.optimizer, "cur_scale", None))
                result = own(*args, **kwargs)
                if is_last:
                    norm = target.get_global_grad_norm() if hasattr(target, "get_global_grad_norm") else None
                    recorder.note(loss=losses.take(mean=True), grad_norm=norm)
                    recorder.end_step()
                return result

            return recorded

        recorder.begin([target.module], getattr(target, "global_steps", 0) or 0)
        return undoing([replace(target, "backward", recording_losses(losses)), replace(target, "step", step)])


LOOPS.add(DeepSpeed.name, DeepSpeed())

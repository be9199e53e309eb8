"""What a script that nobody changed gives away of its loss: the scalars it calls ``backward()`` on, and its gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8debug.adapters.watching import Watch
from fp8debug.trainers.base import replace, scale_of, undoing


class LossMeter:
    """Sees every scalar on which ``backward()`` is called, before a gradient scaler multiplied it, and the scale.

    Args:
        watch: returns the watch that is to be told, None before there is one.
    """

    def __init__(self, watch: Callable[[], Watch | None]) -> None:
        self._watch = watch
        self._step = -1
        self._total: Tensor | None = None
        self._num = 0
        self._scaled: Tensor | None = None

    def start(self) -> Callable[[], None]:
        """Begin; return what ends it."""

        def backward(own: Callable[..., Any]) -> Callable[..., Any]:
            def heard(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                if tensor is not self._scaled:
                    self._note(tensor)
                self._scaled = None
                return own(tensor, *args, **kwargs)

            return heard

        def scale(own: Callable[..., Any]) -> Callable[..., Any]:
            def heard(scaler: Any, outputs: Any) -> Any:
                scaled = own(scaler, outputs)
                if isinstance(outputs, Tensor) and scaled is not outputs:
                    self._note(outputs)
                    self._scaled = scaled
                    if (watch := self._watch()) is not None and (factor := scale_of(scaler)) is not None:
                        watch.note(loss_scale=factor)
                return scaled

            return heard

        def step(own: Callable[..., Any]) -> Callable[..., Any]:
            def heard(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                result = own(scaler, optimizer, *args, **kwargs)
                if (watch := self._watch()) is not None:
                    watch.count_step(optimizer)  # also one that an overflow made the scaler skip
                return result

            return heard

        scaler = torch.amp.GradScaler
        return undoing([replace(Tensor, "backward", backward), replace(scaler, "scale", scale), replace(scaler, "step", step)])

    def _note(self, loss: Tensor) -> None:
        watch = self._watch()
        if watch is None or loss.dim() != 0:
            return
        watch.close_counted_step()  # compiled code does not tell that the next step has begun
        if watch.current_step != self._step or self._total is None:
            self._step, self._total, self._num = watch.current_step, loss.detach(), 1
            watch.note(loss=loss.detach())
        else:
            self._total, self._num = self._total + loss.detach(), self._num + 1
            watch.note(loss=self._total / self._num)

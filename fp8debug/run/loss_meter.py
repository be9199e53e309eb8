"""Losses of a script that nobody changed: the scalars on which it calls ``backward()``, and its gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fp8debug.adapters.watching.handle import Watch
from fp8debug.adapters.watching.separate_losses import Turns
from fp8debug.kernels.torch_state import skipped_by_dynamo, untraced
from fp8debug.observer.autograd_nodes import name_of
from fp8debug.trainers.base import replace, scale_of, undoing


class _Mark(NamedTuple):
    """A loss whose backward pass has begun, at one of several watches, with the gradients that its model had before."""

    watch: Watch
    gradients: Any
    loss: Tensor
    divisor: int


class LossMeter:
    """Sees every scalar on which ``backward()`` is called, before a gradient scaler multiplied it, and the scale.

    A loss belongs to every watch whose model it gives gradients to. With one watch that is not looked at: it has all losses.

    Args:
        watches: returns the watches, of which there may be none yet.
        before_backward: called with the tensor at each ``backward()``, first of all.
    """

    def __init__(self, watches: Callable[[], Sequence[Watch]], before_backward: Callable[[Tensor], None]) -> None:
        self._watches = watches
        self._before_backward = before_backward
        self._unscaled: Tensor | None = None  # of the loss that a scaler multiplied for the backward pass that comes next
        self._means: WeakKeyDictionary[Watch, _Mean] = WeakKeyDictionary()
        self._turns = Turns()

    def start(self) -> Callable[[], None]:
        """Begin; return what ends it."""

        def backward(own: Callable[..., Any]) -> Callable[..., Any]:
            before, after = untraced(self._begin), untraced(self._end)

            def measured(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                marks = before(tensor)
                result = own(tensor, *args, **kwargs)
                after(marks)
                return result

            return skipped_by_dynamo(measured)

        def scale(own: Callable[..., Any]) -> Callable[..., Any]:
            note = untraced(self._note_scaled)

            def measured(scaler: Any, outputs: Any) -> Any:
                scaled = own(scaler, outputs)
                note(scaler, outputs, scaled)
                return scaled

            return skipped_by_dynamo(measured)

        def step(own: Callable[..., Any]) -> Callable[..., Any]:
            count = untraced(self._count_step)

            def measured(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                result = own(scaler, optimizer, *args, **kwargs)
                count(optimizer)
                return result

            return skipped_by_dynamo(measured)

        scaler = torch.amp.GradScaler
        return undoing([replace(Tensor, "backward", backward), replace(scaler, "scale", scale), replace(scaler, "step", step)])

    def _begin(self, tensor: Tensor) -> list[_Mark]:
        """At a backward pass: note its loss, or return what tells afterwards to whom it belongs."""
        self._before_backward(tensor)
        loss = tensor if self._unscaled is None else self._unscaled
        self._unscaled = None
        watches = list(self._watches())
        for watch in watches:
            watch.begin_backward()
        if loss.dim() != 0:
            return []
        for watch in watches:
            watch.look_at_terms(loss, watches)
        divisor, loss = divisor_of(loss), loss.detach()
        if len(watches) == 1:
            self._mean_of(watches[0]).add(loss, divisor)
            return []
        return [_Mark(watch, watch.gradients(), loss, divisor) for watch in watches]

    def _end(self, marks: list[_Mark]) -> None:
        reached = [mark for mark in marks if mark.watch.gradients() != mark.gradients]
        for mark in reached or marks:
            self._mean_of(mark.watch).add(mark.loss, mark.divisor, mark.gradients)
        if len(reached) == 1 and len(marks) > 1:
            self._note_own_loss(reached[0].watch)
        for watch in self._watches():
            watch.end_backward()

    def _note_own_loss(self, one: Watch) -> None:
        """Note that a loss gave gradients to one watch's model alone: where they do so by turns, each has a loss of its own."""
        for other in self._watches():
            if other is not one and self._turns.add(id(one), id(other)) and not one.is_copy_of(other):
                for watch in (one, other):
                    watch.note_other_loss("losses give gradients to this model and to another one by turns, never to both")

    def _mean_of(self, watch: Watch) -> _Mean:
        if watch not in self._means:
            self._means[watch] = _Mean(watch)
        return self._means[watch]

    def _note_scaled(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if isinstance(outputs, Tensor) and scaled is not outputs:
            self._unscaled = outputs
            if (factor := scale_of(scaler)) is not None:
                for watch in self._watches():
                    watch.note(loss_scale=factor)

    def _count_step(self, optimizer: Any) -> None:
        for watch in self._watches():
            watch.count_step(optimizer)  # also one that an overflow made the scaler skip


def divisor_of(loss: Tensor) -> int:
    """Return the Python integer that a loss was divided by last, as ``loss / accumulation_steps`` is; 1 for any other."""
    node = loss.grad_fn
    if node is None or name_of(node) != "DivBackward0":
        return 1
    other = node._saved_other  # type: ignore[attr-defined]  # of DivBackward0; a number is a tensor on the CPU
    if not isinstance(other, Tensor) or other.device.type != "cpu" or other.dim() != 0:
        return 1
    value = float(other)
    return int(value) if value.is_integer() and value > 1 else 1


class _Mean:
    """The mean of the losses of one watch's step.

    Where the program divides each loss by the number of backward passes of the step, the mean is that of the losses before the
    division, which is their sum: the value that the program reports.

    A loss whose gradients were thrown away before the optimizer used them does not count: a generator's loss also reaches the
    discriminator, which sets its gradients to zero and then has a loss of its own.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._step = -1
        self._total: Tensor | None = None
        self._num = 0
        self._divisor = 1  # of every loss of the step; 1 where they differ
        self._left: Any = None  # the gradients that the last loss left

    def add(self, loss: Tensor, divisor: int, before: Any = None) -> None:
        """Add a loss.

        Args:
            loss: a scalar, detached.
            divisor: see :func:`divisor_of`.
            before: the gradients before its backward pass; None where they were not looked at.
        """
        watch = self._watch
        was_cleared = before is not None and before != self._left
        if watch.current_step != self._step or self._total is None or was_cleared:
            self._step, self._total, self._num, self._divisor = watch.current_step, loss, 1, divisor
        else:
            self._total, self._num = self._total + loss, self._num + 1
            self._divisor = divisor if divisor == self._divisor else 1
        watch.note(loss=self._total if self._num in (1, self._divisor) else self._total / self._num)
        if before is not None:
            self._left = watch.gradients()

"""Interface of a loop: somebody else's trainer, which says when training begins and what each step's loss, norm and rate are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from fp8debug.registry import Registry


class LoopRecorder(Protocol):
    """Recorder of a loop's steps. Nothing here raises while training runs."""

    def begin(self, models: Sequence[nn.Module], first_step: int = 0) -> None:
        """Watch the prepared model, or its chunks, from the step of that number on."""
        ...

    def refuse(self, reason: str) -> None:
        """Say why this training cannot be recorded."""
        ...

    def note(self, **values: Any) -> None:
        """Give numbers of the step under way: loss, grad_norm, lr, loss_scale, tokens; None is not known."""
        ...

    def tell(self, text: str) -> None:
        """Say something of the steps' numbers, on stderr and as an event, once training has begun."""
        ...

    def end_step(self) -> None:
        """End the step; one call per optimizer step, after it."""
        ...

    def finish(self, error: BaseException | None = None) -> None:
        """End the run; ``error`` is what ended the training."""
        ...


class Loop(Protocol):
    """One kind of trainer: one file in ``trainers/``, registered in ``LOOPS``.

    Attributes:
        name: name in the registry.
    """

    name: str

    def matches(self, target: object) -> bool:
        """Return whether the target of ``watch()`` is such a trainer; its library is not imported for that."""
        ...

    def attach(self, target: Any, recorder: LoopRecorder) -> Callable[[], None]:
        """Have the trainer tell the recorder what it does, and return what undoes it.

        Raises:
            AttachError: the trainer is not ready, or runs in a way that cannot be recorded.
        """
        ...


LOOPS: Registry[Loop] = Registry("trainer")


def loop_of(target: object) -> Loop | None:
    """Return the loop that knows a target; None for a model, or for nothing that is known."""
    return next((loop for loop in LOOPS if loop.matches(target)), None)


def is_a(target: object, name: str, *packages: str) -> bool:
    """Return whether the target's class, or one that it comes from, has that name and is of one of these packages."""
    return any(c.__name__ == name and c.__module__.split(".")[0] in packages for c in type(target).__mro__)


class LossSum:
    """The loss of a step from those of its microbatches, without a look at their values."""

    def __init__(self) -> None:
        self._total: Any = None
        self._num = 0

    def add(self, loss: Any) -> None:
        """Add what a microbatch gave; anything but a number or a scalar tensor is no loss."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                return
            loss = loss.detach().reshape(())
            loss = loss.clone() if self._total is None else loss
        elif not isinstance(loss, int | float):
            return
        self._total = loss if self._total is None else self._total + loss
        self._num += 1

    def take(self, *, mean: bool = False) -> Any:
        """Return the sum, or the mean, since the last call; None when there was no loss."""
        total, num = self._total, self._num
        self._total, self._num = None, 0
        return total / num if mean and num > 1 else total


def scale_of(scaler: Any) -> Tensor | None:
    """Return the loss scale in force; not by ``get_scale()``, which waits for the device."""
    scale = getattr(scaler, "_scale", None)
    return scale.detach().clone() if isinstance(scale, Tensor) else None


def rate_of(optimizer: Any) -> float | Tensor | None:
    """Return the learning rate of an optimizer's first group."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else None
    return rate if isinstance(rate, float | int | Tensor) else None


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put another function in the place of ``owner.name``, made from the one there, and return what undoes it."""
    own = getattr(owner, name)
    is_own = name in vars(owner)
    ours = make(own)
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is not ours:  # somebody else put a function over ours
            return
        if is_own:
            setattr(owner, name, own)
        else:
            delattr(owner, name)

    return undo


#: Makes a function that stands in for another.
Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def recording_losses(losses: LossSum) -> Make:
    """Return what makes a ``backward(loss, ...)`` that does the same and adds the loss."""

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(loss: Any, *args: Any, **kwargs: Any) -> Any:
            losses.add(loss)
            return own(loss, *args, **kwargs)

        return recorded

    return make


def notifying(tell: Callable[[Any], None]) -> Make:
    """Return what makes a function that does the same and tells its result."""

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            tell(result)
            return result

        return recorded

    return make


def ending(recorder: LoopRecorder) -> Make:
    """Return what makes a function that does the same, and after which the run has ended."""

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                result = own(*args, **kwargs)
            except BaseException as error:
                recorder.finish(error)
                raise
            recorder.finish()
            return result

        return train

    return make


def undoing(undo: list[Callable[[], None]]) -> Callable[[], None]:
    """Return what calls them, the last first, each once."""

    def detach() -> None:
        while undo:
            undo.pop()()

    return detach

"""Steps of a recording without gradients: each call of the model is one, unless ``Watch.step()`` says where they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fp8debug.adapters.interception.calls import observe_calls
from fp8debug.observer.observer import Observer


class InferenceSteps:
    """Observer of the roots' calls that closes a step when a root that was called in it is called again.

    A step is closed that late so that ``Watch.step()`` may follow the call that it belongs to. Where no root is called (the model
    is compiled, or its parts are called one by one), the next call of the first watched module begins a step.

    Args:
        roots: the models.
        observer: whose steps they are.
        end: closes the step under way.
    """

    def __init__(self, roots: Sequence[nn.Module], observer: Observer, end: Callable[[], None]) -> None:
        self._roots, self._observer, self._end = roots, observer, end
        self._depth = 0
        self._called: set[int] = set()
        self._first: str | None = None
        observer.on_end_step.append(self._forget)

    @property
    def has_pass(self) -> bool:
        """True if anything was called in the step under way."""
        return bool(self._called or self._first is not None)

    def follow(self) -> Callable[[], None]:
        """Observe the roots' calls; return what ends it."""
        ends = [observe_calls(root, self) for root in self._roots]

        def undo() -> None:
            for end in ends:
                end()

        return undo

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a root's call."""
        if not self._observer.takes_pass:
            return
        if not self._depth and (id(module) in self._called or self._first is not None):
            self._end()
        self._depth += 1
        self._called.add(id(module))

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End it."""
        if self._observer.takes_pass:
            self._depth = max(0, self._depth - 1)

    def see(self, module: str) -> None:
        """Take note of a watched module's call, by its FQN."""
        if self._depth:
            return
        if self._first == module:
            self._end()
        self._first = self._first or module

    def _forget(self) -> None:
        self._called.clear()
        self._first = None

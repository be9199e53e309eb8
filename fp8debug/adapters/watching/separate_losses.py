"""Tell whether a process trains models against each other: two optimizers, each with gradients of backward passes of its own.

The loss of an actor or of a generator is no measure of progress: it depends on a critic or a discriminator that trains too. A
program that gives parts of one model to two optimizers (Muon and AdamW) lets both step after one backward pass. So consecutive
steps of optimizers are one group as long as no gradient is new: a group is what one backward pass, or several, were for. Two
optimizers have losses of their own when one steps in a group without the other, then the other without it, and so on again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from fp8debug.adapters.watching.weight_updates import is_in_backward, spread

#: Times that the turn must change from one optimizer to the other: A, B, A.
NUM_CHANGES = 2
#: Optimizers that are followed; a program that has more gives one to each parameter or layer.
MAX_OPTIMIZERS = 16

_Gradients = tuple["ref[Tensor] | None", ...]


class Turns:
    """Changes of turn between two of several that act without each other.

    Attributes:
        are_found: whether two acted by turns: A, B, A.
    """

    def __init__(self) -> None:
        self.are_found = False
        self._last: dict[tuple[int, int], int] = {}
        self._changes: dict[tuple[int, int], int] = {}

    def add(self, one: int, other: int) -> bool:
        """Note that one of two acted without the other, by their ids; return whether these two act by turns."""
        pair = min(one, other), max(one, other)
        if self._last.get(pair) not in (None, one):
            self._changes[pair] = self._changes.get(pair, 0) + 1
        self._last[pair] = one
        is_found = self._changes.get(pair, 0) >= NUM_CHANGES
        self.are_found |= is_found
        return is_found


class SeparateLosses:
    """Steps of a process's optimizers, until one of the watched model and another one turn out to have losses of their own.

    Args:
        params: ``id`` of the watched model's parameters.
    """

    def __init__(self, params: Set[int]) -> None:
        self._params = params
        self._known: WeakKeyDictionary[torch.optim.Optimizer, _Parameters] = WeakKeyDictionary()
        self._gradients: WeakKeyDictionary[torch.optim.Optimizer, _Gradients] = WeakKeyDictionary()  # at the last step of any
        self._group: set[int] = set()  # of the optimizers, by id
        self._turns = Turns()
        self._is_over = False

    def note(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that an optimizer has stepped; return True the first time that two are known to have losses of their own.

        Gradients are told apart by the tensors that hold them: an optimizer whose gradients are zeroed in place has no new ones.
        """
        if self._is_over or is_in_backward():  # steps that hooks take within one backward pass
            return False
        if optimizer not in self._known:
            self._known[optimizer] = _Parameters(optimizer)
            self._is_over = len(self._known) > MAX_OPTIMIZERS
        if len(self._known) == 1:
            self._group.add(id(optimizer))
            return False
        before = self._gradients.get(optimizer)
        now = self._known[optimizer].gradients()
        if before is not None and any(_is_new(*pair) for pair in zip(now, before, strict=True)):
            self._end_group()
        self._group.add(id(optimizer))
        for other, held in self._known.items():
            self._gradients[other] = held.gradients()
        self._is_over = self._is_over or self._turns.are_found
        return self._turns.are_found

    def _end_group(self) -> None:
        """Count, for each pair of optimizers, one of them the watched model's, which stepped without the other."""
        group, self._group = self._group, set()
        held = {id(optimizer): found for optimizer, found in self._known.items()}
        for one in group & held.keys():
            for other in held.keys() - group:
                if held[one].is_apart_from(held[other]) and (held[one].has(self._params) or held[other].has(self._params)):
                    self._turns.add(one, other)


class _Parameters:
    """Parameters of an optimizer: their identities, their shapes, and some whose gradients are looked at."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._ids = {id(p) for p in parameters}
        self._shapes = sorted(tuple(p.shape) for p in parameters)
        self._looked_at = [ref(p) for p in spread(parameters)] if parameters else []

    def gradients(self) -> _Gradients:
        """Return references to the gradients that are there, which keep none of them alive."""
        found: Sequence[Tensor | None] = [p.grad if (p := held()) is not None else None for held in self._looked_at]
        return tuple(None if grad is None else ref(grad) for grad in found)

    def has(self, params: Set[int]) -> bool:
        """Return whether one of some parameters is the optimizer's."""
        return not self._ids.isdisjoint(params)

    def is_apart_from(self, other: _Parameters) -> bool:
        """Return whether no parameter is shared; two of the same shapes are copies of one model, compared side by side."""
        return self._ids.isdisjoint(other._ids) and self._shapes != other._shapes


def _is_new(now: ref[Tensor] | None, before: ref[Tensor] | None) -> bool:
    """Return whether a gradient is there, in another tensor than before."""
    return now is not None and (before is None or before() is not now())

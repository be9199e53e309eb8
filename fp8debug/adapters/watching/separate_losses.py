"""Tell whether a process trains models against each other: two optimizers, each with gradients of backward passes of its own,
or one loss that is a sum of losses of separate models.

The loss of an actor or of a generator is no measure of progress: it depends on a critic or a discriminator that trains too. A
program that gives parts of one model to two optimizers (Muon and AdamW) lets both step after one backward pass. So consecutive
steps of optimizers are one group as long as no gradient is new: a group is what one backward pass, or several, were for. Two
optimizers have losses of their own when one steps in a group without the other, then the other without it, and so on again.

An actor and a critic often have one optimizer and one loss, policy + c * value - d * entropy. Terms of a sum that reach no
common parameter are of models that each have a loss of their own; a loss for several tasks, a regularizer and an auxiliary loss
of inner layers reach parameters that the rest of the loss reaches too, and a probe of detached activations has few parameters.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from fp8debug.adapters.watching.weight_updates import is_in_backward, spread
from fp8debug.observer.autograd_nodes import leaf_of, name_of

#: Times that the turn must change from one optimizer to the other: A, B, A.
NUM_CHANGES = 2
#: Losses of a run whose terms are looked at, the first ones.
MAX_LOSSES = 3
#: Share of the parameters' elements that a separate model has at least.
MIN_SHARE = 0.1
#: Nodes of autograd's graph that add terms of a loss, and those that a term is multiplied, or converted, by.
_SUMS = ("AddBackward0", "SubBackward0")
_FACTORS = ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0")
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


def separate_models(loss: Tensor, params: Set[int]) -> list[set[int]]:
    """Return by model the parameters that a loss reaches: those of all terms of its sum that have one in common.

    Models of less than ``MIN_SHARE`` of all elements are left out.

    Args:
        loss: a scalar with its graph, whose backward pass may have been.
        params: ``id`` of the parameters that count.
    """
    sizes: dict[int, int] = {}
    groups: list[set[int]] = []
    for term in _terms(loss.grad_fn):
        if reached := _reached(term, params, sizes):
            joined = [group for group in groups if not group.isdisjoint(reached)]
            groups = [group for group in groups if group.isdisjoint(reached)] + [reached.union(*joined)]
    least = MIN_SHARE * sum(sizes.values())
    return [group for group in groups if sum(sizes[one] for one in group) >= least]


def _next(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions if following is not None]


def _terms(node: Any) -> list[Any]:
    """Return the nodes of the terms of which a node is the sum."""
    found, left = [], [node]
    while left:
        node = left.pop()
        name, following = name_of(node), _next(node)
        if name in _SUMS or (name in _FACTORS and len(following) == 1):
            left += following
        else:
            found.append(node)
    return found


def _reached(node: Any, params: Set[int], sizes: dict[int, int]) -> set[int]:
    """Return which parameters a node's gradient reaches, and add their numbers of elements to ``sizes``."""
    found, seen, left = set[int](), {node}, [node]
    while left:
        node = left.pop()
        if (leaf := leaf_of(node)) is not None and id(leaf) in params:
            found.add(id(leaf))
            sizes[id(leaf)] = leaf.numel()
        following = [one for one in _next(node) if one not in seen]
        seen.update(following)
        left += following
    return found


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

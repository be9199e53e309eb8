"""Modules that hold several Linears: what coverage and recording call each of them.

A fused module (norm, first Linear, activation, second Linear) or a list of experts is one ``nn.Module``; a :class:`SubLinear`
stands for one Linear of it, under the FQN of the module and a suffix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from fp8debug.adapters.base import class_of, num_dims
from fp8debug.errors import AttachError
from fp8debug.observer.attributes import COMPUTED, stored
from fp8debug.observer.isolation import isolated
from fp8debug.observer.observer import Observer
from fp8debug.observer.probe import Probe
from fp8debug.recipes import Cast, Recipe
from fp8debug.types import OPERAND_SITES, Gemm, TensorRole

#: Modules that a sampled step of their last watch ran, in whatever precision, and of which nothing but FP8 is recorded.
CALLED: WeakSet[nn.Module] = WeakSet()
#: Modules known by their GEMMs alone that ran in high precision, and of which what FP8 would do was recorded.
WHAT_IF_MODULES: WeakSet[nn.Module] = WeakSet()
#: Experts of one module that are watched; the others are in coverage with that reason.
MAX_EXPERTS = 8

#: Words in the names of parameters that are added or looked up, and multiply nothing.
_OF_NO_GEMM = re.compile(r"(^|_)(alibi|bias|cls|emb|mask|pe$|pos(_|$|ition)|register|rel(_|$|ative)|rope|table|token)")


def stacks_of(module: nn.Module) -> list[str]:
    """Return the names of the module's own parameters that hold one matrix for each of several experts.

    A parameter has three dimensions for other reasons too: ``cls_token`` [1, 1, width], position embeddings
    [1, tokens, width], a table of position biases [heads, tokens, tokens]. Those are told by their names. One matrix alone is an
    expert (as each rank holds one under expert parallelism) only in a module without children that has several such parameters.
    """
    found = {
        name: p
        for name, p in module._parameters.items()
        if p is not None and num_dims(p) == 3 and min(p.shape[1:]) > 1 and not _OF_NO_GEMM.search(name)
    }
    may_be_one = len(found) > 1 and not module._modules
    return [name for name, p in found.items() if p.shape[0] != 1 or may_be_one]


class SubLinear(nn.Module):
    """One Linear of a module that runs several. It owns nothing: the model does not know it.

    Args:
        owner: the module.
        index: which of its Linears it is.
        weight_names: attributes of the owner with its weight ``[out_features, in_features]``, or with parts of it from the top.
        has_bias: whether it adds one.
        reason: why it is not watched; None when it is.

    Attributes:
        fp8debug_kind: what coverage calls it.
        was_called: whether a sampled step ran it, in whatever precision.
        weight: the parameter; a tensor without data of its shape where it lies in several, or of one expert's where it holds all.
    """

    weight: Tensor

    def __init__(
        self, owner: nn.Module, index: int, weight_names: Sequence[str], *, has_bias: bool, reason: str | None = None
    ) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, or it would be registered
        self.index = index
        self.weight_names = tuple(weight_names)
        self.reason = reason
        self.was_called = False
        self.bias = True if has_bias else None
        found = [stored(owner, name) for name in weight_names]
        if any(weight is None for weight in found):
            self.reason, found, weight_names = reason or COMPUTED, [torch.empty(0, dtype=torch.float32, device="meta")], ()
        wrapper = type(found[0])
        around = f" of {wrapper.__name__}" if wrapper.__module__.startswith("torchao.") else ""
        self.fp8debug_kind = type(owner).__name__ + around
        for name, weight in zip(weight_names, found, strict=False):
            if isinstance(weight, nn.Parameter):
                self.register_parameter(f"of_{name}", weight)
        whole = found[0]
        if whole.dim() == 3:
            whole = torch.empty(whole.shape[1:], dtype=whole.dtype, device="meta")
        elif len(found) > 1:
            whole = torch.empty(sum(w.shape[0] for w in found), whole.shape[1], dtype=whole.dtype, device="meta")
        self.__dict__["weight"] = whole  # not a second registration

    @property
    def owner(self) -> nn.Module:
        """The module that it is a sublinear of."""
        return self._owner[0]

    def current_weight(self) -> Tensor:
        """Return the weight as the owner holds it now, without its history."""
        found = [stored(self.owner, name) for name in self.weight_names]
        if any(weight is None for weight in found):
            raise AttachError(COMPUTED)
        return found[0].detach() if len(found) == 1 else torch.cat([weight.detach() for weight in found])


@runtime_checkable
class HasSubLinears(Protocol):
    """An adapter whose modules run several Linears."""

    def sublinears(self, module: nn.Module) -> dict[str, SubLinear]:
        """Return the Linears of a module by what is added to its FQN."""
        ...


def was_called(module: nn.Module) -> bool:
    """Return whether a sampled step ran it, as far as that is known of a module without rows."""
    return module in CALLED or bool(getattr(module, "was_called", False))


def sublinears_of(adapter: object, module: nn.Module) -> dict[str, nn.Module]:
    """Return the Linears that a module stands for by what is added to its FQN: by itself, one without a suffix."""
    return {**adapter.sublinears(module)} if isinstance(adapter, HasSubLinears) else {"": module}


def chosen(count: int) -> set[int]:
    """Return the numbers of the experts that are watched: all, or MAX_EXPERTS that are evenly spread."""
    return set(range(count)) if count <= MAX_EXPERTS else {i * count // MAX_EXPERTS for i in range(MAX_EXPERTS)}


def kind_of_sublinear(module: nn.Module) -> str:
    """Return the class that coverage names: a SubLinear's owner's."""
    return module.fp8debug_kind if isinstance(module, SubLinear) else class_of(module).__name__


#: Casts as they were observed, and GEMMs that sum in the tensor core, by SubLinear.
CASTS: WeakKeyDictionary[nn.Module, dict[tuple[Gemm, TensorRole], Cast | None]] = WeakKeyDictionary()
FAST: WeakKeyDictionary[nn.Module, set[Gemm]] = WeakKeyDictionary()


def seen_recipe(module: nn.Module, name: str) -> Recipe | None:
    """Return the casts that were observed of a SubLinear as a recipe of that name; None before the first."""
    casts = CASTS.get(module)
    return Recipe(name, {site: casts.get(site) for site in OPERAND_SITES}, tuple(FAST.get(module, ()))) if casts else None


class SubLinearProbe(Probe):
    """The probe of one Linear of a module that runs several.

    Args:
        observer: where it records.
        module: FQN of the module and what is added to it.
        sublinear: the Linear.
    """

    def __init__(self, observer: Observer, module: str, sublinear: SubLinear) -> None:
        super().__init__(observer, module)
        self.sublinear = sublinear

    @isolated
    def guard(self, method: Callable[..., None], *args: Any) -> None:
        """Call what belongs to the module as a whole; an error of ours ends the watch of this Linear and not the step."""
        method(*args)

    def report_once(self, text: str, code: str | None = None) -> None:
        """Report something of this Linear, the first time in the life of the watch; the event's code tells programs."""
        report_once(self.observer, self.module, text, code)


#: Modules of which something was reported, by watch and text.
_REPORTED: WeakKeyDictionary[Observer, dict[str, set[str]]] = WeakKeyDictionary()


def report_once(observer: Observer, module: str, text: str, code: str | None = None) -> None:
    """Report something of a module once; a model of a thousand Linears says it aloud of the first."""
    modules = _REPORTED.setdefault(observer, {}).setdefault(text, set())
    if module not in modules:
        modules.add(module)
        observer.report(module, text, len(modules) == 1, *(() if code is None else (code,)))


#: Takes (step, module, tokens of each of its experts), by watch.
TOKENS: WeakKeyDictionary[Observer, Callable[[int, str, list[int]], None]] = WeakKeyDictionary()


def record_tokens(observer: Observer, step: int, module: str, tokens: list[int]) -> None:
    """Record how many tokens each expert of one tensor had, whose rows describe all of them together."""
    if (take := TOKENS.get(observer)) is not None:
        take(step, module, tokens)

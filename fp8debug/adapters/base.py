"""Interface of an adapter: it finds the modules of one backend and gives each a Probe, called with the tensors of its GEMMs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from torch import nn
from torch.nn.parameter import is_lazy

from fp8debug.errors import AttachError
from fp8debug.formats import TRANSPOSED
from fp8debug.observer.observer import Observer
from fp8debug.recipes import Cast, Recipe
from fp8debug.registry import Registry

#: A cast of these attributes, the same object every time: what is known of a cast at a site is found by its identity.
same_cast = lru_cache(maxsize=1024)(Cast)


@lru_cache(maxsize=1024)
def changed(cast: Cast, **changes: Any) -> Cast:
    """Return a cast with other attributes; the same object every time."""
    return replace(cast, **changes)


def turned(cast: Cast) -> Cast:
    """Return the cast of the transposed tensor; the same object every time."""
    return changed(cast, granularity=TRANSPOSED[cast.granularity])


#: Oldest versions of other libraries that are read, by distribution: Transformer Engine's ``QuantizedTensorStorage`` came with
#: 2.9, torchao's ``Float8TrainingTensor`` with 0.13. pyproject.toml has the same.
FLOORS = {"transformer-engine": "2.9", "torchao": "0.13"}


@cache
def require_floor(adapter: str) -> None:
    """Refuse a library that is older than the oldest that is read; one without metadata, built in place, is taken as it is.

    Args:
        adapter: name of an adapter; those of no other library need none.

    Raises:
        AttachError: it is older.
    """
    distribution = adapter.replace("_", "-")
    if distribution not in FLOORS:
        return
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return
    floor = FLOORS[distribution]
    if _numbers(installed) < _numbers(floor):
        way_out = f"pip install '{distribution}>={floor}'"
        raise AttachError(f"{distribution} {installed} is older than {floor}, the oldest that fp8debug reads: {way_out}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


class Adapter(Protocol):
    """One backend: one file in ``adapters/``, registered in ``ADAPTERS``; the first that matches a module takes it.

    Attributes:
        name: name in the registry.
        kind: what coverage calls its modules; empty for the name of their class.
        fp8: whether its modules run in FP8 (else they are only tried under a recipe).
        is_intercepted: whether its GEMMs are only intercepted (see ``interception.listener``), so that one may turn out to be
        in FP8 or not.
    """

    name: str
    kind: str
    fp8: bool
    is_intercepted: bool

    def matches(self, module: nn.Module) -> bool:
        """Return whether the module is of this backend."""
        ...

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return the recipe in force at the module; None when it is not in FP8."""
        ...

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Watch the module under that FQN and return what undoes it.

        Raises:
            AttachError: another watch has it.
        """
        ...


def num_dims(parameter: nn.Parameter | None) -> int:
    """Return the number of a parameter's dimensions; 0 for None, and for a lazy module's before its first call."""
    return 0 if parameter is None or is_lazy(parameter) else parameter.dim()


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class as it was before ``fully_shard`` or ``replicate`` put one of theirs in its place."""
    bases = type(module).__bases__
    is_theirs = len(bases) == 2 and bases[0].__name__ in ("FSDPModule", "ReplicateModule")
    return bases[1] if is_theirs else type(module)


ADAPTERS: Registry[Adapter] = Registry("adapter")

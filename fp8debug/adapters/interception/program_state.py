"""The state that the Python code of modules can change outside of tensors, kept so that a second run of it leaves no trace.

Looked for, from the modules on: attributes, lists, dictionaries, sets and deques, and what the functions of their classes name:
globals, closures, class attributes, and the objects behind those. Libraries are left out: their state is not the program's.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Objects that are looked at; with more the program is not known well enough to run twice.
MAX_OBJECTS = 100_000
_LIBRARIES = frozenset({"torch", "torchao", "torchvision", "triton", "transformer_engine", "numpy", "fp8debug", "builtins"})
_PLAIN = (int, float, complex, bool, str, bytes, type(None), CodeType, np.generic, torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_Undo = Callable[[], None]


class TooManyObjectsError(Exception):
    """The program's functions reach more objects than are looked at."""


class ProgramState:
    """The state that the functions of modules can reach, as it is now.

    Args:
        modules: whose ``forward`` and other functions are followed.

    Attributes:
        tensors: those among it.
        values: the numbers, texts and the like among it, in the order of the search, and where that meets an object again, which.

    Raises:
        TooManyObjectsError: more than :data:`MAX_OBJECTS` are reached.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[Hashable] = []
        self._undo: list[_Undo] = []
        self._seen: dict[int, int] = {}  # number of an object by its id
        self._kept: list[Any] = []  # alive, so that no other object gets the id of one that was seen
        self._left: deque[Any] = deque(modules)
        while self._left:
            self._look_at(self._left.popleft())
        self._seen.clear()

    def restore(self) -> None:
        """Put back what has changed since."""
        for undo in self._undo:
            undo()

    def _look_at(self, x: Any) -> None:
        if isinstance(x, _PLAIN):
            self.values.append(x)
            return
        if id(x) in self._seen:
            self.values.append((self._seen[id(x)],))
            return
        if len(self._seen) >= MAX_OBJECTS:
            raise TooManyObjectsError(f"its functions reach more than {MAX_OBJECTS:,} objects, which a second run might change")
        self._seen[id(x)] = len(self._seen)
        self._kept.append(x)
        if isinstance(x, Tensor):
            self.tensors.append(x)
        elif isinstance(x, (list, dict, set, deque)):
            self._contents(x)
        elif isinstance(x, (tuple, frozenset)):
            self._left.extend(x)
        elif isinstance(x, FunctionType):
            self._function(x)
        elif isinstance(x, (MethodType, classmethod, staticmethod, property)):
            self._left.extend(getattr(x, name, None) for name in ("__self__", "__func__", "fget", "fset"))
        elif not isinstance(x, ModuleType):
            self._object(x)

    def _contents(self, x: Any) -> None:
        copied = dict(x) if isinstance(x, dict) else list(x)
        self._undo.append(lambda: _put_back(x, copied))
        if isinstance(x, dict):
            self._left.extend(x.keys())
            self._left.extend(x.values())
        else:
            self._left.extend(x)

    def _function(self, function: FunctionType) -> None:
        if _is_of_library(function):
            return
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # of a variable that has no value yet
                continue
            self._binding(value, partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
        self._left.extend(function.__defaults__ or ())
        self._left.extend((function.__kwdefaults__ or {}).values())
        self._left.append(getattr(function, "__wrapped__", None))
        names, space = set(_names(function.__code__)), function.__globals__
        for name in names & space.keys():
            value = space[name]
            self._binding(value, partial(space.get, name), partial(space.__setitem__, name))
            if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _skipped():
                inside = vars(value)
                for inner in names & inside.keys():
                    self._binding(inside[inner], partial(inside.get, inner), partial(inside.__setitem__, inner))

    def _object(self, x: Any) -> None:
        kind = x if isinstance(x, type) else type(x)
        if isinstance(x, type):
            if not _is_of_library(x):
                for base in x.__mro__:
                    if not _is_of_library(base):
                        self._class(base)
            return
        if not isinstance(x, nn.Module) and _is_of_library(kind):
            return
        self._left.append(kind)
        for name in _slots(kind):
            if hasattr(x, name):
                self._binding(getattr(x, name), partial(getattr, x, name, None), partial(object.__setattr__, x, name))
        attributes = getattr(x, "__dict__", None)
        if isinstance(attributes, dict):
            own = {n: v for n, v in attributes.items() if not (isinstance(x, nn.Module) and n in _OF_EVERY_MODULE)}
            if not isinstance(x, nn.Module):
                self._undo.append(lambda: _put_back(attributes, own))
            self._left.extend(own.values())

    def _class(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if name.startswith("__") and name != "__call__":
                continue
            if isinstance(value, (FunctionType, classmethod, staticmethod, property)):
                self._left.append(value)
            elif not hasattr(type(value), "__set__"):
                self._binding(value, partial(vars(kind).get, name), partial(setattr, kind, name))

    def _binding(self, value: Any, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._left.append(value)

        def undo() -> None:
            if get() is not value:
                put(value)

        self._undo.append(undo)


def _put_back(x: Any, copied: Any) -> None:
    """Give a container its contents again, past what a class of the program's makes of such calls."""
    if isinstance(x, dict):
        if len(x) != len(copied) or any(k not in x or x[k] is not v for k, v in copied.items()):
            dict.clear(x)
            dict.update(x, copied)
    elif len(x) != len(copied) or any(a is not b for a, b in zip(x, copied, strict=True)):
        kind: Any = next(k for k in (list, set, deque) if isinstance(x, k))
        kind.clear(x)
        (kind.update if kind is set else kind.extend)(x, copied)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _skipped() -> frozenset[str]:
    return _LIBRARIES | sys.stdlib_module_names


def _is_of_library(x: Any) -> bool:
    name = getattr(x, "__module__", None)
    return not isinstance(name, str) or (name.partition(".")[0] in _skipped())


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__")]

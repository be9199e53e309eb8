"""A name -> object table that refuses duplicates and helps with a wrong name, and the import of the files that fill one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Generic, TypeVar

from fp8debug.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Holds the registered extensions of one axis (metric, recipe, rule, ...) in order of registration.

    Args:
        kind: what an entry is called in error messages, e.g. ``"rule"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}
        self.version = 0  #: goes up with every change

    def add(self, name: str, item: T) -> T:
        """Register ``item`` under ``name`` and return it; a second item under one name is a bug of ours."""
        assert name not in self._items, f"{self.kind} {name!r} is registered twice"
        self._items[name] = item
        self.version += 1
        return item

    def remove(self, name: str) -> None:
        """Take the item of that name out."""
        del self._items[name]
        self.version += 1

    def get(self, name: str) -> T:
        """Return the item of that name.

        Raises:
            UnknownNameError: there is none; the message has the closest names.
        """
        try:
            return self._items[name]
        except KeyError:
            raise UnknownNameError(self.kind, name, self._items) from None

    def names(self) -> list[str]:
        """Return the names in order of registration."""
        return list(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items


def register_all(package: str, path: Iterable[str], pattern: str = "") -> None:
    """Import the modules of a package by name, so that each registers its extensions; the order is alphabetical.

    Args:
        package: its ``__name__``.
        path: its ``__path__``.
        pattern: regular expression that the names of the modules begin with; all modules by default.
    """
    for name in sorted(found.name for found in iter_modules(path) if re.match(pattern, found.name)):
        import_module(f"{package}.{name}")

"""Wait for a module that somebody else's program may import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call a function once a module is imported: now where it is, else right after its import.

    Args:
        name: absolute name of the module.
        then: called without arguments, at most once.

    Returns:
        A function that ends the wait.
    """
    if name in sys.modules:
        then()
        return lambda: None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.end


class _Finder(MetaPathFinder):
    """Finds nothing itself: asks the finders after it for one module, and calls a function when that is loaded."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def end(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        self.end()
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, own = spec.loader, spec.loader.exec_module

            def exec_module(module: Any) -> None:
                vars(loader).pop("exec_module", None)  # which is the class's own again
                own(module)
                self._then()

            loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec

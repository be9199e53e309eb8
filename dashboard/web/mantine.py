"""The Mantine components that the first page uses: all of the package would take 0.3 s, a fifth of the way to the first paint.

The package's list of components is replaced while it is imported. It stays whole: any other component is imported when it is
asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_PACKAGE = "dash_mantine_components"
_USED = ("Button", "ColorSchemeToggle", "MantineProvider", "Select", "Switch")


def _component(name: str) -> Any:
    try:
        found = getattr(import_module(f"{_PACKAGE}.{name}"), name)
    except ModuleNotFoundError:
        raise AttributeError(f"{_PACKAGE} has no {name}") from None
    if _PACKAGE in sys.modules:
        setattr(sys.modules[_PACKAGE], name, found)  # where the import has put the module
    return found


def _package() -> Any:
    listing = f"{_PACKAGE}._imports_"
    if _PACKAGE in sys.modules:
        return sys.modules[_PACKAGE]
    stand_in: Any = ModuleType(listing)
    stand_in.__all__, stand_in.__getattr__ = list(_USED), _component
    sys.modules[listing] = stand_in
    try:
        found: Any = import_module(_PACKAGE)
    finally:
        del sys.modules[listing]
    found.__getattr__ = _component
    return found


dmc = _package()

#: Of every choice: its list is made when it opens, inside the page's main part, where screen readers look for content.
COMBO_BOX: dict[str, Any] = {"keepMounted": False, "portalProps": {"target": "#page"}}

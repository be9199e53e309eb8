"""What a page is: a layout for a view, and the parts of it that change when a setting or the run changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dash.development.base_component import Component

from ..source import Opened
from ..urls import View


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a run.

    Attributes:
        name: path of its URL.
        title: what the navigation says.
        layout: the whole page for a view.
        outputs: (component id, property) of what changes.
        parts: new values of ``outputs`` for a view, in their order.
    """

    name: str
    title: str
    layout: Callable[[View, Opened], Component]
    outputs: tuple[tuple[str, str], ...]
    parts: Callable[[View, Opened], tuple[Any, ...]]

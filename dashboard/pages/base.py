"""Interface of a page: a layout for a view, and the parts of it that change when a setting or the run changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dash.development.base_component import Component

from ..web.run_view import RunView
from ..web.urls import View
from .contents import CONTENTS


def _is_judging(view: View, run_view: RunView) -> bool:
    return not run_view.is_triaged


def _judge(view: View, run_view: RunView) -> object:
    return run_view.judge()


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a run.

    Attributes:
        name: path of its URL; ``contents`` has its title and what of it changes.
        layout: the whole page for a view.
        parts: new values of ``outputs`` for a view, in their order.
        is_pending: tells whether parts of the page wait for something that takes long.
        settle: computes that; the page is redrawn after it.
    """

    name: str
    layout: Callable[[View, RunView], Component]
    parts: Callable[[View, RunView], tuple[Any, ...]]
    is_pending: Callable[[View, RunView], bool] = _is_judging
    settle: Callable[[View, RunView], object] = _judge

    @property
    def outputs(self) -> tuple[tuple[str | dict[str, str], str], ...]:
        """(component id, property) of what changes."""
        return CONTENTS[self.name].outputs

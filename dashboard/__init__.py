"""The dashboard: ``serve(path)`` shows a run, or a folder of runs, in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .web.app import make_app
    from .web.start import serve

__all__ = ["make_app", "serve"]


def __getattr__(name: str) -> Any:
    if name == "make_app":
        from .web.app import make_app

        return make_app
    if name == "serve":
        from .web.start import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

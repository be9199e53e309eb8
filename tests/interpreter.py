"""Triton's interpreter without its repetitions, which are a third of what the kernels' tests take on a CPU."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any


def patch_language_once() -> None:
    """Have the interpreter put its own functions into ``triton.language`` once a launch.

    It does so again at each call of a device function, a hundred times a program, where all of them are in place; a launch takes
    them out when it ends. Another release that goes about it differently is left as it is.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    own, scope_type = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope"))
    if own is None or scope_type is None or getattr(own, "is_ours", False):
        return
    from triton import language

    languages = language, language.core
    in_place: set[int] = set()

    def patch(fn: FunctionType) -> Any:
        seen = {id(value) for value in fn.__globals__.values() if isinstance(value, ModuleType) and value in languages}
        if in_place and seen <= in_place:
            return scope_type()
        is_launch = not in_place and _is_launch()
        scope = own(fn)
        if is_launch:
            taking_out = scope.restore

            def restore() -> None:
                taking_out()
                in_place.clear()

            scope.restore = restore
        if is_launch or in_place:
            in_place.update(seen)
        return scope

    patch.is_ours = True  # type: ignore[attr-defined]
    vars(interpreter)["_patch_lang"] = patch


def _is_launch() -> bool:
    """Return whether a grid of programs is started, and no device function called, by who asks for the patch."""
    caller = inspect.currentframe()
    for _ in range(2):
        caller = None if caller is None else caller.f_back
    return caller is not None and type(caller.f_locals.get("self")).__name__ == "GridExecutor"

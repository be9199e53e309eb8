"""Triton's interpreter without its repetitions, which are half of what the kernels' tests take on a CPU."""

from __future__ import annotations

import inspect
import os
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
    seen_by: dict[FunctionType, set[int]] = {}

    def patch(fn: FunctionType) -> Any:
        if (seen := seen_by.get(fn)) is None:
            seen = {id(value) for value in fn.__globals__.values() if isinstance(value, ModuleType) and value in languages}
            seen_by[fn] = seen
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


def keep_types_once() -> None:
    """Have the interpreter work out once what follows from a type and a shape alone; it does so for every value of a program.

    That is the NumPy type of a type, the members of a block's type, and the shape and size of a tensor.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    own_dtype = getattr(interpreter, "_get_np_dtype", None)
    if own_dtype is None or getattr(own_dtype, "is_ours", False) or os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.language import core

    dtypes: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = own_dtype(dtype)
        return dtypes[name]

    np_dtype.is_ours = True  # type: ignore[attr-defined]
    vars(interpreter)["_get_np_dtype"] = np_dtype

    own_block, own_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = None if type(element_ty) is not core.dtype else (element_ty.name, *(getattr(n, "value", n) for n in shape))
        if key in blocks:
            vars(self).update(blocks[key])
            return
        own_block(self, element_ty, shape)
        if key is not None:
            blocks[key] = dict(vars(self))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[key]
            return
        own_tensor(self, handle, type)
        if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
            shapes[key] = self.shape, self.numel

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _is_launch() -> bool:
    """Return whether a grid of programs is started, and no device function called, by who asks for the patch."""
    caller = inspect.currentframe()
    for _ in range(2):
        caller = None if caller is None else caller.f_back
    return caller is not None and type(caller.f_locals.get("self")).__name__ == "GridExecutor"

"""GEMMs of DeepGEMM, whose kernels are no torch ops: its entry points are wrapped while a watch listens.

``fp8_gemm_nt((a, sfa), (b, sfb), d, c=None, ...)`` writes ``d[m, n] = a[m, k] @ b[n, k].T`` (+ c). A module is listened to by the
adapter of ``scaled_mm``. Names imported from the library before the watch began (``from deep_gemm import ...``) stay unwrapped:
their GEMMs are not gemm, and coverage says that none was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from fp8debug.adapters.interception.listener import Listener, SeenGemm
from fp8debug.adapters.scaled_mm import side_of

#: Entry points by the layout of their operands: whether the first and the second are stored transposed.
ENTRY_POINTS = {
    "fp8_gemm_nt": (False, True),
    "fp8_gemm_nn": (False, False),
    "fp8_gemm_tn": (True, False),
    "fp8_gemm_tt": (True, True),
}
_BLOCKS = ("1x128", "128x128")


def wrap_deep_gemm(listener: Listener) -> Callable[[], None]:
    """Wrap the library's entry points where the program has imported it, and return what undoes it."""
    library: Any = sys.modules.get("deep_gemm")
    originals = {name: getattr(library, name) for name in ENTRY_POINTS if hasattr(library, name)}
    for name, original in originals.items():
        setattr(library, name, _wrapped(name, original, listener))

    def undo() -> None:
        for name, original in originals.items():
            setattr(library, name, original)

    return undo


def _wrapped(name: str, original: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    @wraps(original)
    def call(a: Any, b: Any, d: Any, *args: Any, **kwargs: Any) -> Any:
        with listener.muted():
            result = original(a, b, d, *args, **kwargs)
        scopes = listener.scopes
        if listener.counter is not None and listener.counter.is_on:
            listener.counter.see_library(name, d, a[0])
        if scopes and (on_gemm := scopes[-1].on_gemm) is not None:
            scopes[-1].guard(lambda: on_gemm(_gemm_of(name, a, b, d, args[0] if args else kwargs.get("c"))))
        return result

    return call


def _gemm_of(name: str, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, c: Tensor | None) -> SeenGemm:
    if c is not None:
        raise ValueError(f"{name} adds to its result, which is not read")
    if d.element_size() == 1:
        raise ValueError("its result is in FP8")
    first, second = side_of(*a, among=_BLOCKS), side_of(*b, among=_BLOCKS)
    turn_first, turn_second = ENTRY_POINTS[name]
    return SeenGemm(name, first.t() if turn_first else first, second.t() if turn_second else second, d, is_opaque=True)

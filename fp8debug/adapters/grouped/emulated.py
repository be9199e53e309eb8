"""Experts of torchao in emulated MXFP8: BF16 GEMMs of dequantized operands. Its functions are wrapped while a watch listens.

``_compute_fwd_emulated(x[M, K], weight_t[E, K, N], offs)``, ``_compute_dgrad_emulated(grad[M, N], weight_t, offs)`` and
``_compute_wgrad_emulated(grad, x, offs)`` cast both operands by ``to_mx`` and multiply. The codes and scales that ``to_mx``
returns are those of the GEMM; a module is listened to by the adapter of grouped GEMMs. On a GPU with units for MXFP8 the same
experts run ``torch._scaled_grouped_mm``, which needs no wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fp8debug.adapters.base import changed
from fp8debug.adapters.grouped.gemms import SeenGroupedGemm
from fp8debug.adapters.interception.listener import Listener
from fp8debug.adapters.interception.scale_layouts import SCALE_MODES, block_cast, power_of_two

_MODULE = "torchao.prototype.moe_training.mxfp8_grouped_mm"
_CASTS = "to_mx"
_GEMMS = ("_compute_fwd_emulated", "_compute_dgrad_emulated", "_compute_wgrad_emulated")


def wrap_emulated_experts(listener: Listener) -> Callable[[], None]:
    """Wrap torchao's functions where the program has imported them, and return what undoes it."""
    library: Any = sys.modules.get(_MODULE)
    if any(not hasattr(library, name) for name in (_CASTS, *_GEMMS)):
        return lambda: None
    originals = {name: getattr(library, name) for name in (_CASTS, *_GEMMS)}
    made: list[list[tuple[Tensor, Tensor]]] = []  # (data, scale) of the casts of the GEMMs that run, the innermost last

    @wraps(originals[_CASTS])
    def cast(*args: Any, **kwargs: Any) -> Any:
        scale, data = originals[_CASTS](*args, **kwargs)
        if made:
            made[-1].append((data, scale))
        return scale, data

    setattr(library, _CASTS, cast)
    for name in _GEMMS:
        setattr(library, name, _wrapped(name, originals[name], listener, made))

    def undo() -> None:
        for name, original in originals.items():
            setattr(library, name, original)

    return undo


def _wrapped(
    name: str, original: Callable[..., Any], listener: Listener, made: list[list[tuple[Tensor, Tensor]]]
) -> Callable[..., Any]:
    @wraps(original)
    def call(first: Any, second: Any, offs: Tensor, size: int, dtype: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        scope = listener.scopes[-1] if listener.scopes else None
        if scope is None or (on_gemm := scope.on_gemm) is None:
            return original(first, second, offs, size, dtype, mode, *args, **kwargs)
        made.append([])
        try:
            with listener.muted():
                result = original(first, second, offs, size, dtype, mode, *args, **kwargs)
        finally:
            casts = made.pop()
        if casts:  # a wgrad in high precision has none
            scope.guard(lambda: on_gemm(_gemm_of(name, casts, offs, result, mode)))  # type: ignore[arg-type]  # a grouped one
        return result

    return call


def _gemm_of(name: str, casts: list[tuple[Tensor, Tensor]], offs: Tensor, result: Tensor, mode: Any) -> SeenGroupedGemm:
    if len(casts) != 2:
        raise ValueError(f"{name} of an operand that was cast before is not read")
    (first, scale_first), (second, scale_second) = casts
    scales = power_of_two(scale_first.view(torch.uint8)), power_of_two(scale_second.view(torch.uint8))
    cast = changed(block_cast(first, scale_first), scale_rounding=SCALE_MODES[mode.value])
    result = result.transpose(-2, -1) if name == "_compute_wgrad_emulated" else result
    return SeenGroupedGemm(
        first.detach(), second.transpose(-2, -1).detach(), *scales, offs.clone(), result.detach(), is_fast=False, cast=cast
    )

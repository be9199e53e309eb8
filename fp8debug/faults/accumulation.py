"""The fault of a GEMM's sums: an accumulator that keeps too few bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, Fault, Layer, Target
from fp8debug.kernels.dispatch import Operand
from fp8debug.kernels.reference import short_gemm
from fp8debug.types import Gemm


def _short_accumulator(where: Target) -> Callable[[], None]:
    bits = int(where.options["bits"])
    if not 2 <= bits <= 24:
        raise UsageError(f"bits of short_accumulator is a whole number from 2 to 24, got {where.options['bits']!r}")

    def shorten(
        layer: Layer, which: Gemm, first: Operand, second: Operand, dtype: torch.dtype, ordinary: Callable[[], Tensor]
    ) -> Tensor:
        if layer.is_in_force and where.active and isinstance(first, tuple) and isinstance(second, tuple):
            return short_gemm(which, first, second, dtype=dtype, bits=bits)
        found: Tensor = layer.inner(which, first, second, dtype, ordinary) if layer.inner else ordinary()
        return found

    return Layer(where.linear, "summation", shorten).remove


FAULTS.add(
    "short_accumulator",
    Fault(
        name="short_accumulator",
        code="F108",
        description="sums keep few bits over all of K: 14 on Hopper, felt at K of thousands; 7 where K is small (DeepGEMM #37)",
        options={"bits": 7},
        plant=_short_accumulator,
    ),
)

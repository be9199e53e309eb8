"""Quantize on the GPU, with the statistics of the cast in the same pass; importable only where Triton is.

Twins of ``reference.quantize`` and ``reference.statistics``, equal bit for bit in data, scale_inv, counts and extremes (the
code of a NaN is always 0x7f: its sign is lost, as on the hardware); sums agree to 1e-6 of the sum of magnitudes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fp8debug.kernels.gpu.launcher import eager
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_TENSOR
from fp8debug.kernels.gpu.quantize.tile_plan import run
from fp8debug.kernels.gpu.quantize.tiling import (
    ACROSS,
    DOWN,
    Job,
    Statistics,
    contiguous_copies,
    cut,
    empty_statistics,
    new_outputs,
    scale_memory,
)
from fp8debug.recipes import Cast
from fp8debug.types import Quantized

parse = lru_cache(maxsize=None)(Cast.parse)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports(x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> bool:
    """Return whether the kernels take this tensor and cast; else ``reference.quantize`` does."""
    given = scale_inv is not None or cast.scaling == "static"
    return x.dtype in DTYPES and not (given and cast.granularity in ("rowwise", "columnwise"))


def _quantize_now(x: Tensor, cast: str, layout: str, scale_inv: Tensor | None, statistics: bool, histogram: bool) -> list[Tensor]:
    made, found = run(x, [Job(parse(cast), layout, statistics, scale_inv)], histogram)
    return [*made[0], *(found or ())]


@torch.library.custom_op("fp8debug::quantize", mutates_args=())
def _quantize(x: Tensor, cast: str, layout: str, scale_inv: Tensor | None, statistics: bool, histogram: bool) -> list[Tensor]:
    found = _quantize_now(x, cast, layout, scale_inv, statistics, histogram)
    return [*found[:-5], *contiguous_copies(found[-5:])] if statistics else found


@_quantize.register_fake
def _(x: Tensor, cast: str, layout: str, scale_inv: Tensor | None, statistics: bool, histogram: bool) -> list[Tensor]:
    outputs = list(new_outputs(x, parse(cast), layout))
    return outputs + (list(empty_statistics(x, 1, histogram)) if statistics else [])


def quantize(
    x: Tensor,
    cast: Cast,
    scale_inv: Tensor | None = None,
    *,
    layout: str = "rows",
    statistics: bool = False,
    histogram: bool = False,
) -> tuple[Quantized, Statistics | None]:
    """Quantize a tensor.

    Args:
        x: bf16, fp16 or fp32 of any shape; blocks lie on the view ``[rows, last dimension]``.
        cast: how.
        scale_inv: FP32 of one element, to use in place of the tensor's own, for delayed scaling.
        layout: "rows", or "columns" to store the data transposed, as a GEMM that contracts the rows reads it; the result has
            x's shape either way.
        statistics: fill the slots of the cast in the same pass.
        histogram: the exponent histogram too.

    Returns:
        the quantized tensor as ``reference.quantize`` gives it, and the statistics or None.
    """
    if layout == "columns" and not _can_turn(x, cast):
        q, slots = quantize(x, cast, scale_inv, statistics=statistics, histogram=histogram)
        return Quantized(_turned(q.data), q.scale_inv), slots
    run_it = _quantize_now if eager(x) else _quantize
    data, inverse, *found = run_it(x, str(cast), layout, scale_inv, statistics, histogram)
    return Quantized(data, inverse), Statistics(*found) if statistics else None


def _can_turn(x: Tensor, cast: Cast) -> bool:
    """Return whether the kernel stores these data transposed: it writes words of four rows.

    Its byte by byte variant, which ragged rows took, loses every second byte of some columns in Triton 3.6's code.
    """
    rows = x.numel() // max(x.shape[-1], 1) if x.dim() else 1
    return cast.granularity in DOWN or rows % 4 == 0


def _turned(data: Tensor) -> Tensor:
    """Return 2-D data stored transposed, of the same shape; others, which no GEMM reads, as they are."""
    return data if data.dim() != 2 else data.view(torch.uint8).t().contiguous().view(data.dtype).t()


def largest(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of a non-empty tensor in one read, FP32 ``[]``."""
    return scale_memory(Job(Cast()), cut(x, ACROSS, False, 0), KIND_TENSOR.value)[0].reshape(())

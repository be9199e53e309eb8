"""A GEMM's result beside the shadow and the exact GEMM, on sampled rows (fprop, dgrad) or columns of the input (wgrad).

On a GPU the exact GEMM reads FP8 codes as they lie and one launch fills the slots of both pairs; elsewhere, and for operands
that no kernel takes, plain torch ops do the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8debug.formats import block_shape
from fp8debug.kernels.dispatch import Operand, Slots, dequantize, gemm, on_device, takes_kernels, twin
from fp8debug.kernels.reference import statistics
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.base import spread, uncovered
from fp8debug.metrics.damage import Damage
from fp8debug.metrics.rows import Rows
from fp8debug.types import OPERANDS, Gemm, TensorRole

#: Of the sampled rows the exact GEMM has one in so many, at least as many as this: it measures an accumulator's loss, of which
#: each row holds thousands of samples, and no rows that differ.
EXACT_SHARE, MIN_EXACT = 4, 64
#: Rows of an operand that are dequantized at once where no kernel takes it.
CHUNK = 1024
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_DAMAGE, _ROWS = Damage(), Rows()


class OutputError(NamedTuple):
    """What fprop keeps of its sampled output until the gradient is known: of the rows that the exact GEMM has.

    Attributes:
        error: actual minus shadow; None where ``pair`` holds both.
        pair: shadow and actual; None on a GPU.
        rows: which rows they are.
    """

    error: Tensor | None
    pair: Pair | None
    rows: Tensor | slice


class Compared(NamedTuple):
    """Slots against the shadow and against the exact GEMM (None where that is the actual result), and the error."""

    shadow: Slots
    exact: Slots | None
    error: OutputError


def compare_result(
    which: Gemm,
    high_precision: tuple[Tensor, Tensor],
    operands: tuple[Operand, Operand],
    result: Tensor | None,
    sample: Tensor | slice,
    *,
    keep: bool = False,
    picked: Tensor | None = None,
) -> Compared:
    """Describe a result.

    Args:
        which: the GEMM.
        high_precision: its operands before the cast, that which is sampled cut to the sample.
        operands: its operands as it read them, whole.
        result: what it gave, whole; None where FP8 is only tried, and the exact GEMM stands for it.
        sample: int64 rows of the first operand, for wgrad columns of the second; a slice is all.
        keep: what :func:`damage_of` needs is wanted.
        picked: the sampled columns of the result, of wgrad and where they are at hand.
    """
    shadow, dim = shadow_product(which, *high_precision), int(which is Gemm.WGRAD)
    index = sample if isinstance(sample, Tensor) else None
    fast = takes_kernels(shadow) and shadow.numel() > 0
    num = None if index is None or result is None else num_exact(index.numel())
    exact = _exact(which, *operands, sample, fast, num)
    actual = exact if result is None else result.detach()
    if fast and (result is None or actual.dtype in (torch.bfloat16, torch.float16, torch.float32)):
        with on_device(shadow):
            lines = None if result is None else index
            if picked is not None and lines is not None:
                actual, lines = picked, None
            found, error = twin("observe_results").compare(
                actual, shadow, None if result is None else exact, lines, dim=dim, keep=keep
            )
        more = uncovered(twin("observe_results").FILLED, shadow.shape[1], operand=False, whole_rows=not dim)
        if more:
            whole = (actual if lines is None else actual.index_select(dim, lines)).float()
            for slots, reference in zip(found, (shadow, exact), strict=False):
                y = whole.narrow(dim, 0, reference.shape[dim])
                slots.update(statistics(Pair(source=Source(reference), y=y, whole_rows=not dim), only=more))
        return Compared(found[0], found[1] if len(found) > 1 else None, OutputError(error, None, _first(sample, num)))
    if picked is None or result is None:
        picked = actual if result is None else actual[:, sample] if dim else actual[sample]
    pair = Pair(source=Source(shadow.float()), y=picked.float(), whole_rows=not dim)
    against = None
    if result is not None:
        y = pair.y.narrow(dim, 0, exact.shape[dim])
        against = statistics(Pair(source=Source(exact), y=y, whole_rows=not dim))
    few = pair if num is None else Pair(source=Source(pair.source.x[:num]), y=pair.y[:num])
    return Compared(statistics(pair), against, OutputError(None, few, _first(sample, num)))


def _first(sample: Tensor | slice, num: int | None) -> Tensor | slice:
    return sample[:num] if isinstance(sample, Tensor) and num is not None else sample


def num_exact(num_sampled: int) -> int:
    """Return how many of the sampled rows or columns of a result the exact GEMM works out: the first ones."""
    return min(num_sampled, max(MIN_EXACT, num_sampled // EXACT_SHARE))


def sampled_columns(x: Tensor, sample: Tensor | slice) -> Tensor:
    """Return sampled columns of a tensor, a copy."""
    x = x.detach()
    if not isinstance(sample, Tensor):
        return x[:, sample].clone()
    if takes_kernels(x) and x.dtype in (torch.bfloat16, torch.float16, torch.float32):
        with on_device(x):
            found: Tensor = twin("gemm_sampled").columns_of(x, sample)
            return found
    return x.index_select(1, sample)


def weight_rows(weight: Tensor, operand: Operand, rows: Tensor | slice) -> Slots:
    """Return the slots of ``Rows`` for sampled rows of a weight ``[N, K]`` beside what a GEMM reads of them."""
    if not weight.numel():
        return {}
    if isinstance(operand, tuple) and isinstance(rows, Tensor) and takes_kernels(weight):
        (data, scale_inv), cast = operand
        if data.dtype in FP8_DTYPES and weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
            block = block_shape(cast.granularity, *weight.shape)
            with on_device(weight):
                slots: Slots = twin("observe_results").row_slots(weight, data, scale_inv, block, rows)
                return slots
    picked, read = weight.detach()[rows], values_of(operand, 0, rows)
    return _ROWS.partial(Pair(source=Source(picked), y=read))


def damage_of(kept: OutputError, grad_output: Tensor) -> Slots:
    """Return the slots of fprop's output that its gradient ``[M, N]`` fills."""
    if kept.error is not None:
        with on_device(kept.error):
            index = kept.rows if isinstance(kept.rows, Tensor) else None
            slots: Slots = twin("observe_results").damage(kept.error, grad_output, index)
            return slots
    pair = kept.pair
    if pair is None or not pair.y.numel():
        return {}
    return _DAMAGE.partial(Pair(source=pair.source, y=pair.y, grad=grad_output.detach()[kept.rows].float()))


def shadow_product(which: Gemm, first: Tensor, second: Tensor) -> Tensor:
    """Return the GEMM in BF16 with FP32 accumulation, rounded to BF16; on a CPU as FP32."""
    a, b = first.detach(), second.detach()
    if not a.dtype == b.dtype == torch.bfloat16:
        a, b = a.bfloat16(), b.bfloat16()
    if a.is_cuda:
        return gemm(which, a, b, dtype=torch.bfloat16)
    # BF16 products in FP32 arithmetic: the same numbers, and far faster on most CPUs
    return gemm(which, a.float(), b.float(), dtype=torch.bfloat16, accumulate=torch.float32).float()


def _exact(which: Gemm, first: Operand, second: Operand, sample: Tensor | slice, fast: bool, num: int | None = None) -> Tensor:
    """Return the GEMM of what the operands stand for, FP32; of ``num`` of the sampled rows, the first ones."""
    dim = int(which is Gemm.WGRAD)
    data = values_tensor(second if dim else first)
    if fast:
        index = sample if isinstance(sample, Tensor) else torch.arange(data.shape[dim], device=data.device)
        with on_device(data):
            product: Tensor | None = twin("gemm_sampled").exact_gemm(which, first, second, index, num)
        if product is not None:
            return product
        return _in_chunks(which, first, second, index[:num])
    sample = _first(sample, num)
    cut = (values_of(first), values_of(second, 1, sample)) if dim else (values_of(first, 0, sample), values_of(second))
    return gemm(which, *cut, accumulate=torch.float64 if data.is_cuda else torch.float32)


def _in_chunks(which: Gemm, first: Operand, second: Operand, index: Tensor) -> Tensor:
    """Return the exact GEMM in FP64, the operand that is not sampled dequantized a part at a time."""
    wgrad = which is Gemm.WGRAD
    few = values_of(second, 1, index) if wgrad else values_of(first, 0, index)
    whole = first if wgrad else second
    dim = 1 if TensorRole.WEIGHT not in OPERANDS[which] or which is Gemm.DGRAD else 0
    length = values_tensor(whole).shape[dim]
    parts = []
    for start in range(0, length, CHUNK):
        part = values_of(whole, dim, torch.arange(start, min(start + CHUNK, length), device=index.device))
        pair = (part, few) if wgrad else (few, part)
        parts.append(gemm(which, *pair, accumulate=torch.float64))
    return torch.cat(parts, 0 if wgrad else 1)


def values_tensor(operand: Operand) -> Tensor:
    """Return the tensor that an operand's shape and device are those of."""
    return operand if isinstance(operand, Tensor) else operand[0].data


def values_of(operand: Operand, dim: int = 0, index: Tensor | slice | None = None) -> Tensor:
    """Return what the GEMM reads, in FP32; with an index tensor those rows (dim 0) or columns (dim 1) of it alone."""
    if not isinstance(index, Tensor):
        return operand.detach().float() if isinstance(operand, Tensor) else dequantize(*operand)
    if isinstance(operand, Tensor):
        return operand.detach().index_select(dim, index).float()
    (data, scale_inv), cast = operand
    block = block_shape(cast.granularity, *data.shape)
    if takes_kernels(data) and data.dtype in FP8_DTYPES:
        with on_device(data):
            found: Tensor = twin("gemm_sampled").dequantize_lines(data, scale_inv, block, dim, index)
            return found
    if scale_inv.shape[dim] > 1:
        scale_inv = scale_inv.index_select(dim, index // block[dim])
    codes = data.view(torch.uint8) if data.element_size() == 1 else data  # a fault's data are in BF16
    values = codes.index_select(dim, index).view(data.dtype).float()
    across, along = (1, block[1]) if dim == 0 else (block[0], 1)
    return values * spread(scale_inv, across, along, *values.shape)

"""A GEMM's result beside the shadow and the exact GEMM, on a sample of it (see ``sample``).

On a GPU two launches multiply the sample and fill the slots of both pairs; elsewhere, and for operands that no kernel takes,
plain torch ops do the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fp8debug.formats import block_shape
from fp8debug.kernels.backend import gpu
from fp8debug.kernels.dispatch import Operand, Slots, dequantize, gemm, on_device, takes_kernels
from fp8debug.kernels.reference import statistics
from fp8debug.kernels.sampling import Sample, num_exact
from fp8debug.kernels.slot_rows import by_name
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.base import spread, uncovered
from fp8debug.metrics.damage import Damage
from fp8debug.metrics.rows import Rows
from fp8debug.types import Gemm

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: Lines of an operand that are dequantized at once where no kernel multiplies it.
CHUNK = 1024
_DAMAGE, _ROWS = Damage(), Rows()


class OutputError(NamedTuple):
    """Part of fprop's output that is kept until the gradient is known: of the rows that the exact GEMM has, in their whole width.

    Attributes:
        error: actual minus shadow; None where ``pair`` holds both.
        pair: shadow and actual; None on a GPU.
        lines: which rows they are, perhaps followed by others; None is all.
    """

    error: Tensor | None
    pair: Pair | None
    lines: Tensor | None


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
    sample: Sample,
    *,
    bias: Tensor | None = None,
    keep: bool = False,
) -> Compared:
    """Describe a result.

    Args:
        which: the GEMM.
        high_precision: its operands before the cast; of wgrad's input the sampled columns alone.
        operands: its operands as it read them, whole.
        result: what it gave, whole; None where FP8 is only tried, and the exact GEMM stands for it.
        sample: rows of the first operand, for wgrad columns of the second; and a share of the other dimension of a result
            that there is.
        bias: what fprop added to each row of what it gave; it is taken off what is compared, in FP32.
        keep: what :func:`damage_of` needs is wanted.
    """
    a, b = high_precision
    if result is None:
        sample, bias = sample._replace(shift=None), None
    elif bias is not None:
        bias = bias.detach().reshape(-1).expand(result.shape[1]).contiguous()
    is_read = (result is None or result.dtype in FLOATS) and (bias is None or type(bias) is Tensor)
    is_read = is_read and all(isinstance(o, Tensor) or o[1].is_plain for o in operands)
    if is_read and takes_kernels(a) and a.numel() and b.numel():
        actual = result.detach() if result is not None and result.requires_grad else result
        whole = not is_wide(which, high_precision, sample)
        width = a.shape[1] if which is Gemm.WGRAD else b.shape[int(which is Gemm.DGRAD)]
        more = uncovered(gpu().RESULT_SLOTS, width, operand=False, whole_rows=whole)
        with on_device(a):
            found = gpu().compare(which, high_precision, operands, actual, sample, bias=bias, keep=keep, tell=bool(more))
        if found is not None:
            described, error, products = found
            slots_of: list[Slots] = [*described]
            if products is not None:
                pairs = _paired(which, products, result, sample, bias, whole=whole)
                for slots, pair in zip(slots_of, pairs, strict=False):
                    if pair is not None:
                        slots.update(statistics(pair, only=more))
            return Compared(slots_of[0], slots_of[1] if len(slots_of) > 1 else None, OutputError(error, None, sample.lines))
    pair, against = _pairs(which, high_precision, operands, result, sample, bias)
    few = len(pair.y) if against is None or which is Gemm.WGRAD else len(against.y)
    kept = Pair(source=Source(pair.source.x[:few]), y=pair.y[:few].clone())  # a view of an FP32 result, whose memory is reused
    if keep and result is not None and is_wide(which, high_precision, sample):
        lines = slice(None) if sample.lines is None else sample.lines[:few]
        kept = Pair(source=Source(shadow_product(which, a.detach()[lines], b).float()), y=_without(bias, result, lines))
    exact: Slots | None = None if against is None else by_name(statistics(against))
    return Compared(by_name(statistics(pair)), exact, OutputError(None, kept, sample.lines))


def is_wide(which: Gemm, high_precision: tuple[Tensor, Tensor], sample: Sample) -> bool:
    """Return whether rows of the result are not compared in their whole width."""
    second = high_precision[1]
    return which is Gemm.WGRAD or sample.is_share(second.shape[int(which is Gemm.DGRAD)])


def _pairs(
    which: Gemm,
    high_precision: tuple[Tensor, Tensor],
    operands: tuple[Operand, Operand],
    result: Tensor | None,
    sample: Sample,
    bias: Tensor | None = None,
) -> tuple[Pair, Pair | None]:
    """Return the sample of a result beside the shadow and beside the exact GEMM (None: it is the result), by torch ops."""
    (a, b), (first, second) = high_precision, operands
    whole = not is_wide(which, high_precision, sample)
    lines: Tensor | slice = slice(None) if sample.lines is None else sample.lines
    few = lines if result is None or isinstance(lines, slice) else lines[: num_exact(lines.numel())]
    a, b, device = a.detach(), b.detach(), a.device
    rows: Tensor | slice
    if which is Gemm.WGRAD:
        rows = sample.share(a.shape[1], device)
        shadow = shadow_product(which, a[:, rows], b)
        exact = _exact(which, values_of(second, 1, few), first, rows)
    else:
        dim = int(which is Gemm.DGRAD)
        share = sample.share(b.shape[dim], device)
        shadow = shadow_product(which, a[lines], b[:, share] if dim else b[share])
        exact = _exact(which, values_of(first, 0, few), second, share)
    return _paired(which, (shadow.float(), exact), result, sample, bias, whole=whole)


def _paired(
    which: Gemm,
    products: tuple[Tensor, Tensor],
    result: Tensor | None,
    sample: Sample,
    bias: Tensor | None = None,
    *,
    whole: bool,
) -> tuple[Pair, Pair | None]:
    """Return the shadow and the exact GEMM of a sample, in FP32, each beside what of the result it stands for."""
    shadow, exact = products
    if result is None:
        return Pair(source=Source(shadow), y=exact, whole_rows=whole), None
    lines: Tensor | slice = slice(None) if sample.lines is None else sample.lines
    share = sample.share(result.shape[int(which is not Gemm.WGRAD)], result.device)
    rows, columns = (share, lines) if which is Gemm.WGRAD else (lines, share)
    actual = _without(bias, result, rows, columns)
    part = actual[:, : exact.shape[1]] if which is Gemm.WGRAD else actual[: exact.shape[0]]
    return Pair(source=Source(shadow), y=actual, whole_rows=whole), Pair(source=Source(exact), y=part, whole_rows=whole)


def _without(bias: Tensor | None, result: Tensor, rows: Tensor | slice, columns: Tensor | slice = slice(None)) -> Tensor:
    """Return a part of a result in FP32, without what was added to it."""
    found = result.detach()[rows][:, columns].float()
    return found if bias is None else found - bias[columns].float()


def sampled_columns(x: Tensor, sample: Sample) -> Tensor:
    """Return sampled columns of a tensor, a copy."""
    x = x.detach() if x.requires_grad else x
    if sample.lines is None:
        return x.clone()
    if takes_kernels(x) and x.dtype in FLOATS:
        with on_device(x):
            return gpu().columns_of(x, sample.lines, sample.size)
    return x.index_select(1, sample.lines)


def weight_rows(weight: Tensor, operand: Operand, rows: Tensor | None) -> Slots:
    """Return the slots of ``Rows`` for sampled rows of a weight ``[N, K]`` beside what a GEMM reads of them."""
    if not weight.numel():
        return {}
    if isinstance(operand, tuple) and rows is not None and takes_kernels(weight):
        (data, scale_inv), cast = operand
        if cast.is_plain and data.dtype in FP8_DTYPES and weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
            block = block_shape(cast.granularity, *weight.shape)
            with on_device(weight):
                return gpu().row_slots(weight, data, scale_inv, block, rows)
    picked, read = weight.detach() if rows is None else weight.detach()[rows], values_of(operand, 0, rows)
    return by_name(_ROWS.partial(Pair(source=Source(picked), y=read)))


def damage_of(kept: OutputError, grad_output: Tensor) -> Slots:
    """Return the slots of fprop's output that its gradient ``[M, N]`` fills."""
    if kept.error is not None:
        with on_device(kept.error):
            return gpu().damage(kept.error, grad_output, kept.lines)
    pair = kept.pair
    if pair is None or not pair.y.numel():
        return {}
    grad = grad_output.detach()
    grad = grad if kept.lines is None else grad[kept.lines[: len(pair.y)]]
    return by_name(_DAMAGE.partial(Pair(source=pair.source, y=pair.y, grad=grad.float())))


def shadow_product(which: Gemm, first: Tensor, second: Tensor) -> Tensor:
    """Return the GEMM in BF16 with FP32 accumulation, rounded to BF16; on a CPU as FP32."""
    a, b = first.detach(), second.detach()
    if not a.dtype == b.dtype == torch.bfloat16:
        a, b = a.bfloat16(), b.bfloat16()
    if a.is_cuda:
        return gemm(which, a, b, dtype=torch.bfloat16)
    # BF16 products in FP32 arithmetic: the same numbers, and far faster on most CPUs
    return gemm(which, a.float(), b.float(), dtype=torch.bfloat16, accumulate=torch.float32).float()


def _exact(which: Gemm, few: Tensor, other: Operand, index: Tensor | slice) -> Tensor:
    """Return the GEMM of what the operands stand for, FP32 from products in more where that costs little.

    Args:
        which: the GEMM.
        few: what is sampled, dequantized: rows of the first operand, of wgrad columns of the second.
        other: the other operand, which is dequantized ``CHUNK`` rows (fprop) or columns at a time.
        index: which of these; a slice is all.
    """
    dim, accumulate = int(which is not Gemm.FPROP), torch.float64 if few.is_cuda else torch.float32
    length = (other if isinstance(other, Tensor) else other[0].data).shape[dim]
    chunks: Iterable[Tensor | slice] = (index,)
    if isinstance(index, Tensor):
        chunks = torch.split(index, CHUNK)
    elif length > CHUNK:
        chunks = torch.split(torch.arange(length, dtype=torch.int64, device=few.device), CHUNK)
    parts = []
    for chunk in chunks:
        values = values_of(other, dim, chunk)
        pair = (values, few) if which is Gemm.WGRAD else (few, values)
        parts.append(gemm(which, *pair, accumulate=accumulate))
    return parts[0] if len(parts) == 1 else torch.cat(parts, int(which is not Gemm.WGRAD))


def values_of(operand: Operand, dim: int = 0, index: Tensor | slice | None = None) -> Tensor:
    """Return what the GEMM reads, in FP32; with an index tensor those rows (dim 0) or columns (dim 1) of it alone."""
    if not isinstance(index, Tensor):
        return operand.detach().float() if isinstance(operand, Tensor) else dequantize(*operand)
    if isinstance(operand, Tensor):
        return operand.detach().index_select(dim, index).float()
    (data, scale_inv), cast = operand
    if cast.hadamard:
        return dequantize(*operand).index_select(dim, index)
    block = block_shape(cast.granularity, *data.shape)
    if takes_kernels(data) and cast.is_plain and data.dtype in FP8_DTYPES:
        with on_device(data):
            return gpu().dequantize_lines(data, scale_inv, block, dim, index)
    if scale_inv.shape[dim] > 1:
        scale_inv = scale_inv.index_select(dim, index // block[dim])
    codes = data.view(torch.uint8) if data.element_size() == 1 else data  # a fault's data are in BF16
    values = codes.index_select(dim, index).view(data.dtype).float()
    across, along = (1, block[1]) if dim == 0 else (block[0], 1)
    return values * spread(scale_inv, across, along, *values.shape)

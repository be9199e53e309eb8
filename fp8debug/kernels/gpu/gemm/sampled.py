"""The shadow and the exact GEMM of a sample on the GPU, the latter straight from FP8 codes; importable only where Triton is.

The twin of what ``results`` does by torch ops. Nothing is gathered or dequantized before: one launch reads the sample of all four
operands where it lies, and leaves both products in parts of the contracted dimension, which their reader adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8debug.formats import TRANSPOSED
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.gemm import sampled_kernel as ts
from fp8debug.kernels.gpu.launcher import Kernel, PlanCache, address, launch
from fp8debug.kernels.gpu.quantize.tiling import is_native, num_sms
from fp8debug.kernels.reference import Operand
from fp8debug.kernels.sampling import Sample
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm

#: Tiles: lines of the share, sampled lines of the shadow, of the exact GEMM, which takes two such tiles, and of the wide shadow,
#: and the shadow's step along the contracted dimension; the exact GEMM's is 128, or 32 where scales want it.
TILES = (128, 32, 16, 32, 64) if INTERPRETED else (128, 128, 32, 64, 64)
WARPS = 8
#: Major compute capabilities whose multiprocessors hold four stages of the shadow's operands, 128 KiB; others hold three.
SPACIOUS = (9, 10)
#: Parts of the contracted dimension are multiples of this; how many there are at most, and what they may take in memory.
CHUNK, MAX_SPLITS, MAX_BYTES = 128, 12, 8 << 20
#: Programs a multiprocessor that are aimed at, and the shortest part, in chunks.
PROGRAMS_PER_SM, MIN_CHUNKS = 1, 4
_FORMS = {
    torch.float8_e4m3fn: ts.FORM_E4M3.value,
    torch.float8_e5m2: ts.FORM_E5M2.value,
    torch.bfloat16: ts.FORM_BF16.value,
}
_SCALED = {
    "tensorwise": ts.SCALED_ROWS.value,
    "rowwise": ts.SCALED_ROWS.value,
    "1x128": ts.SCALED_TILES.value,
    "1x32": ts.SCALED_TILES.value,
    "128x128": ts.SCALED_BLOCKS.value,
}


class _SampledOperand(NamedTuple):
    """An operand ``[rows, K]`` with the contracted dimension last; block is the length of K that shares a scale, 0 for all."""

    data: Tensor
    scale: Tensor
    stride_row: int
    stride_k: int
    form: int
    scaled: int
    block: int


def _side(operand: Operand, rows_contract: bool) -> _SampledOperand | None:
    """Return an operand as the kernels read it; None where they cannot."""
    if isinstance(operand, Tensor):
        data = operand.detach()
        data = data.t() if rows_contract else data
        scaled = ts.SCALED_NOT.value
        return _SampledOperand(data, data, 0, 0, _FORMS[data.dtype], scaled, 0) if data.dtype is torch.bfloat16 else None
    (data, scale), cast = operand
    name = TRANSPOSED[cast.granularity] if rows_contract else cast.granularity
    if rows_contract:
        data, scale = data.t(), scale.t()
    if name not in _SCALED or data.dtype not in _FORMS:
        return None
    stride_row, stride_k = scale.stride()
    if name == "tensorwise":
        stride_row = 0
    block = 0 if _SCALED[name] == ts.SCALED_ROWS.value else 32 if name == "1x32" else 128
    return _SampledOperand(data, scale, stride_row, stride_k, _FORMS[data.dtype], _SCALED[name], block)


def dequantize_lines(data: Tensor, scale_inv: Tensor, block: tuple[int, int], dim: int, index: Tensor) -> Tensor:
    """Return rows (``dim`` 0) or columns (1) of FP8 data, dequantized to FP32.

    Args:
        data: FP8 ``[rows, columns]``.
        scale_inv: FP32, one for each block.
        block: shape of a block.
        dim: see above.
        index: int64, which.
    """
    length, lines = data.shape[1 - dim], index.numel()
    out = index.new_empty((lines, length) if dim == 0 else (length, lines), dtype=torch.float32)
    if out.numel():
        size = 64 if INTERPRETED else 1024
        order = (dim, 1 - dim)
        strides = (t.stride(d) for t in (data, scale_inv, out) for d in order)
        launch(
            ts.lines_kernel, (lines, -(-length // size)),
            (_bits(data), index, out, scale_inv, length, *strides, *(block[d] for d in order)),
            (data.dtype is torch.float8_e5m2, size), num_warps=4,
        )  # fmt: skip
    return out


def columns_of(x: Tensor, index: Tensor, size: int = 1) -> Tensor:
    """Return sampled columns ``[rows, samples]`` of x in BF16, FP16 or FP32, at less cost to the host than ``index_select``.

    Args:
        x: ``[rows, columns]``.
        index: int64, which columns.
        size: how many of them lie next to each other from a multiple of this on.
    """
    out = x.new_empty((x.shape[0], index.numel()))
    if not out.numel():
        return out
    key = x.shape, x.stride(), x.dtype, index.numel(), size, x.data_ptr() & 15, index.data_ptr() & 15, x.device
    kernel = _GATHERS.get(key)
    if kernel is None:
        bits = _BITS[x.element_size()]
        types = bits, torch.int64, bits, None, None, None, None
        kernel = Kernel(ts.columns_kernel, x.device.index, types, (size, *_COLUMNS_BLOCK), num_warps=4)
        _GATHERS.keep(key, kernel)
    down, across = _COLUMNS_BLOCK
    rows, samples = out.shape
    at = (
        (x.detach().view(_BITS[x.element_size()]), index, out.view(_BITS[x.element_size()]))
        if INTERPRETED
        else (x.data_ptr(), index.data_ptr(), out.data_ptr())
    )
    kernel((-(-rows // down), -(-samples // across), 1), *at, rows, samples, *x.stride())
    return out


def _bits(data: Tensor) -> Tensor:
    return data.view(torch.int16 if data.element_size() == 2 else torch.int8)


class Products(NamedTuple):
    """Multiplication of a sample, and layout of its products: ``[splits, ...]`` of FP32 to be added up.

    Attributes:
        wide: where the shadow of the exact lines and the whole other dimension begins; 0 where it is not wanted.
        shadow: lines of the shadow GEMM.
        exact: lines of the exact GEMM, which follow in ``few``.
        far: lines of the other dimension, of which there is a share.
        shared: lines of that share.
        size: of what is written.
        stride_few: elements from one sampled line to the next.
        stride_shared: elements from one line of the share to the next.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    wide: int
    shadow: int
    exact: int
    far: int
    shared: int
    size: tuple[int, int]
    stride_few: int
    stride_shared: int
    is_empty: bool

    def __call__(
        self,
        which: Gemm,
        high: tuple[Tensor, Tensor],
        operands: tuple[Operand, Operand],
        sample: Sample,
    ) -> Tensor:
        """Return the parts ``[splits, numbers of one]``."""
        out = high[0].new_empty(self.size, dtype=torch.float32)
        if self.is_empty:
            return out.zero_()
        (near, far), (few, other) = (high, operands) if which is not Gemm.WGRAD else (high[::-1], operands[::-1])
        codes, codes_scale = few[0] if isinstance(few, tuple) else (few, few)
        data, data_scale = other[0] if isinstance(other, tuple) else (other, other)
        near_at = _detached(near)
        self.kernel(
            self.grid, near_at, _detached(far), _codes(codes), _codes(data),
            near_at if sample.lines is None else address(sample.lines), address(out), _detached(codes_scale),
            _detached(data_scale), sample.shift or 0, *self.numbers,
        )  # fmt: skip
        return out

    def joined(self, parts: Tensor, *, turned: bool) -> tuple[Tensor, Tensor]:
        """Return the shadow, rounded to BF16, and the exact GEMM out of what a call gave, in FP32.

        Args:
            parts: what a call gave.
            turned: whether the sampled lines are columns of the result, as of grad_weight.
        """
        lines = self.shadow + self.exact
        sums = parts[:, : lines * self.shared].sum(0)
        whole = sums.view(self.shared, lines) if turned else sums.view(lines, self.shared)
        shadow, exact = torch.split(whole, [self.shadow, self.exact], int(turned))
        return shadow.bfloat16().float(), exact


_GATHERS: PlanCache[Kernel] = PlanCache()
_BITS = {2: torch.int16, 4: torch.int32}
#: Rows and samples of a program that gathers columns.
_COLUMNS_BLOCK = (8, 32) if INTERPRETED else (8, 256)


def products_of(
    which: Gemm,
    high: tuple[Tensor, Tensor],
    operands: tuple[Operand, Operand],
    sample: Sample,
    num_exact: int,
    *,
    wide: bool = False,
) -> Products | None:
    """Return how a sample of a GEMM is multiplied; None where operands have scales, or a dtype, that no kernel takes.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        high: operands before the cast; of wgrad's input the sampled columns alone.
        operands: as the GEMM reads them, whole: quantized, or in BF16.
        sample: of rows of the first operand, for wgrad columns of the second.
        num_exact: how many of them the exact GEMM has, the first ones.
        wide: of these the shadow is wanted for the whole of the other dimension too; not of wgrad.
    """
    roles = OPERANDS[which]
    turned = [(which, role) in CONTRACTS_ROWS for role in roles]
    sides = [_side(o, t) for o, t in zip(operands, turned, strict=True)]
    highs = [x.detach().t() if t else x.detach() for x, t in zip(high, turned, strict=True)]
    few, other = sides if which is not Gemm.WGRAD else sides[::-1]
    near, far = highs if which is not Gemm.WGRAD else highs[::-1]
    if few is None or other is None or (few.block and other.block and few.block != other.block):
        return None
    if any(x.dtype not in (torch.bfloat16, torch.float16, torch.float32) for x in highs):
        return None
    device, native = near.device, is_native(near.device)
    step, length, count = few.block or other.block or 128, near.shape[1], far.shape[0]
    samples = near.shape[0] if sample.lines is None else sample.lines.numel()
    shared = sample.num_shared(count)
    half = ts.FORM_BF16.value not in (few.form, other.form)
    across, shadow, exact, whole, _ = TILES
    tiles = -(-shared // across) * (-(-samples // shadow) + -(-num_exact // (2 * exact)))
    lines = samples + num_exact
    elements, num_wide = lines * shared, num_exact if wide else 0
    if wide:
        tiles += -(-count // across) * -(-num_wide // whole)
    chunks = -(-length // CHUNK)
    splits = min(MAX_SPLITS, chunks // MIN_CHUNKS, PROGRAMS_PER_SM * num_sms(device) // max(tiles, 1))
    splits = max(1, min(splits, MAX_BYTES // max(1, 4 * (elements + num_wide * count))))
    chunk = -(-chunks // splits) * CHUNK
    splits = max(1, -(-length // chunk)) if chunk else 1
    strides = (shared, 1) if which is not Gemm.WGRAD else (1, lines)
    types = (
        near.dtype, far.dtype, _code(few), _code(other), near.dtype if sample.lines is None else torch.int64, torch.float32,
        few.scale.dtype, other.scale.dtype, *[None] * 24,
    )  # fmt: skip
    indexed = sample.lines is not None
    constants = (
        indexed and which is not Gemm.WGRAD, indexed, sample.is_share(count), wide, few.form, few.scaled, other.form,
        other.scaled, half, length % CHUNK == 0, native, *TILES, step,
    )  # fmt: skip
    stages = 4 if native and torch.cuda.get_device_capability(device)[0] in SPACIOUS else 3
    kernel = Kernel(ts.sample_kernel, device.index, types, constants, num_warps=WARPS, num_stages=stages)
    numbers = (
        length, chunk, samples, num_exact, shared, count, num_wide, elements, *near.stride(), *far.stride(), *few.data.stride(),
        *other.data.stride(), few.stride_row, few.stride_k, other.stride_row, other.stride_k,
        elements + num_wide * count, *strides,
    )  # fmt: skip
    size, empty = (splits, elements + num_wide * count), not (samples and shared and length)
    grid = tiles, splits, 1
    return Products(kernel, grid, numbers, elements if wide else 0, samples, num_exact, count, shared, size, *strides, empty)


def layout_of(high: tuple[Tensor, Tensor], operands: tuple[Operand, Operand], sample: Sample) -> Any:
    """Return all that :func:`products_of` looks at but the GEMM and the number of exact lines."""
    (x, y), (a, b), lines = high, operands, sample.lines
    (a_data, a_scale), a_name = (a[0], a[1].granularity) if isinstance(a, tuple) else ((a, a), "")
    (b_data, b_scale), b_name = (b[0], b[1].granularity) if isinstance(b, tuple) else ((b, b), "")
    pointers = (
        x.data_ptr(), y.data_ptr(), a_data.data_ptr(), a_scale.data_ptr(), b_data.data_ptr(), b_scale.data_ptr(),
        0 if lines is None else lines.data_ptr(),
    )  # fmt: skip
    odd = (pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4] | pointers[5] | pointers[6]) & 15
    return (
        x.shape, x.stride(), x.dtype, y.shape, y.stride(), y.dtype, a_data.shape, a_data.stride(), a_data.dtype,
        a_scale.stride(), a_name, b_data.shape, b_data.stride(), b_data.dtype, b_scale.stride(), b_name,
        odd and tuple([pointer & 15 for pointer in pointers]),
        None if lines is None else lines.numel(), sample.shift is None, sample.size, x.device,
    )  # fmt: skip


def _code(side: _SampledOperand) -> torch.dtype:
    return torch.int16 if side.form == ts.FORM_BF16.value else torch.int8


#: What a :class:`Kernel` takes for codes or 16-bit values, and for a tensor that may want a gradient.
_codes: Callable[[Tensor], Any] = (lambda data: _bits(data.detach())) if INTERPRETED else Tensor.data_ptr
_detached: Callable[[Tensor], Any] = Tensor.detach if INTERPRETED else Tensor.data_ptr

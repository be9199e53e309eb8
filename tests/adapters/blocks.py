"""GEMMs of blocks of 16 and 32 elements on a CPU, for which torch has no kernel: the tests bring one, by cuBLAS's formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8debug import Cast, quantize
from fp8debug.formats import FORMATS

newer: Any = functional
#: Blocks of each kind, as torch numbers the kinds.
SIZES = {2: 16, 3: 32}
E2M1 = [FORMATS["e2m1fn"].value(code) for code in range(16)]
MX = Cast(granularity="1x32", scale_rounding="pow2_ceil")
NV = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor")


def place(row: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return where a scale lies: cuBLAS's documentation, "1D block scaling factors layout"."""
    tile = (row // 128) * (-(-columns // 4)) + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def swizzled(scales: Tensor) -> Tensor:
    """Return a grid ``[rows, columns]`` of one-byte scales as cuBLAS reads it, flat; the padding holds 77."""
    rows, columns = scales.shape
    flat = torch.full((-(-rows // 128) * -(-columns // 4) * 512,), 77, dtype=torch.uint8)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    flat[place(row, column, columns).reshape(-1)] = scales.contiguous().view(torch.uint8).reshape(-1)
    return flat.view(scales.dtype)


def packed(values: Tensor) -> Tensor:
    """Return values of E2M1 ``[rows, columns]`` two to a byte."""
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    for code, value in enumerate(E2M1):
        codes[(values.float() == value) & (values.float().signbit() == (code > 7))] = code
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return pairs.view(torch.float4_e2m1fn_x2)


def decoded(data: Tensor, scales: list[Tensor], kinds: list[int], swizzles: list[int]) -> Tensor:
    """Return ``[rows, K]`` in FP32, element by element."""
    if data.dtype is torch.float4_e2m1fn_x2:
        byte = data.view(torch.uint8).long()
        values = torch.tensor(E2M1)[torch.stack((byte & 15, byte >> 4), -1).flatten(1)]
    else:
        values = data.float()
    size = SIZES[kinds[0]]
    rows, columns = values.shape[0], -(-values.shape[1] // size)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(values.shape[1]) // size, indexing="ij")
    grid = scales[0].reshape(-1)[place(row, column, columns)] if any(swizzles) else scales[0].reshape(rows, columns)[row, column]
    return values * grid.float() * (scales[1].float() if len(scales) > 1 else 1)


class Scales(NamedTuple):
    """Scales of an operand as ``aten._scaled_mm_v2`` and its relatives get them: of each level its values, kind and swizzle."""

    values: list[Tensor]
    kinds: list[int]
    swizzles: list[int]


def of_two_sides(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an op of these from ``multiply(first, second, scales of each, what follows)``."""

    def op(first: Tensor, second: Tensor, *given: Any, **named: Any) -> Tensor:
        return multiply(first, second, Scales(*given[:3]), Scales(*given[3:6]), *given[6:], **named)

    return op


def scaled_mm_v2(
    self: Tensor, mat2: Tensor, a: Scales, b: Scales, bias: Any = None, out_dtype: Any = None, *_: Any, **__: Any
) -> Tensor:
    """Multiply as ``aten._scaled_mm_v2`` does on Blackwell."""
    product = decoded(self, *a) @ decoded(mat2.t(), *b).t()
    return (product if bias is None else product + bias).to(out_dtype or torch.bfloat16)


@contextmanager
def kernels() -> Iterator[None]:
    """Give torch the kernel for a CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm_v2", of_two_sides(scaled_mm_v2), "CPU")
    try:
        yield
    finally:
        library._destroy()


def operand(x: Tensor, cast: Cast, is_swizzled: bool) -> tuple[Tensor, list[Tensor]]:
    """Return data and scales of x ``[rows, K]`` as the op gets them."""
    q = quantize(x, cast)
    if cast.format != "e2m1fn":
        scales = q.scale_inv.to(torch.float8_e8m0fnu)
        return q.data, [swizzled(scales) if is_swizzled else scales]
    if cast.scale_format == "e8m0":
        scales = q.scale_inv.to(torch.float8_e8m0fnu)
        return packed(q.data), [swizzled(scales) if is_swizzled else scales]
    top = x.float().abs().amax() / (448 * 6)
    blocks = (q.scale_inv / top).to(torch.float8_e4m3fn)
    return packed(q.data), [swizzled(blocks) if is_swizzled else blocks, top]


def multiply(a: Tensor, b: Tensor, cast: Cast, is_swizzled: bool) -> Tensor:
    """Return ``a [m, K] @ b [n, K].T`` by ``F.scaled_mm``."""
    kinds = [newer.ScalingType.BlockWise1x16, newer.ScalingType.TensorWise]
    if cast.granularity == "1x32":
        kinds = [newer.ScalingType.BlockWise1x32]
    swizzle = newer.SwizzleType.SWIZZLE_32_4_4 if is_swizzled else newer.SwizzleType.NO_SWIZZLE
    swizzles = [swizzle, newer.SwizzleType.NO_SWIZZLE][: len(kinds)]
    (first, scale_a), (second, scale_b) = operand(a, cast, is_swizzled), operand(b, cast, is_swizzled)
    found: Tensor = newer.scaled_mm(first, second.t(), scale_a, kinds, scale_b, kinds, swizzles, swizzles)
    return found


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Cast, is_swizzled: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = cast, is_swizzled
        return multiply(x, weight, *ctx.options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dgrad = multiply(grad, weight.t().contiguous(), *ctx.options)
        return dgrad, multiply(grad.t().contiguous(), x.t().contiguous(), *ctx.options), None, None


class BlockLinear(nn.Linear):
    """A Linear over ``F.scaled_mm`` with blocks of 16 or 32 elements."""

    cast = MX
    is_swizzled = True

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = _Blocks.apply(flat, self.weight, self.cast, self.is_swizzled)
        return out.reshape(*x.shape[:-1], -1)

"""What a short accumulator makes of a GEMM, in plain torch: the specification of ``fast_accum``, and a fault for any device.

A tensor core of Hopper adds 32 FP8 products to its accumulator at a time: it aligns all of them to the largest exponent among
them and the accumulator, cuts off what lies below ``bits`` significant bits of that, and adds. So a product loses the more the
larger the sum has grown, and on operands of one sign the loss adds up (DeepSeek-V3, arXiv 2412.19437, section 3.3.2:
about 14 bits, hence sums that leave the tensor core every 128 elements).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8debug.kernels.reference import Operand, dequantize, power_of_2
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm

#: Significant bits that Hopper's FP8 tensor cores keep of a sum, and products that they add at once.
HOPPER_BITS, GROUP = 14, 32
#: Elements of a block of products: 64 MiB in FP32.
_BLOCK = 2**24


def short_gemm(
    which: Gemm, first: Operand, second: Operand, *, dtype: torch.dtype = torch.float32, bits: int = HOPPER_BITS
) -> Tensor:
    """One GEMM of a Linear whose sums keep ``bits`` significant bits over all of the contracted dimension.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        first: left operand.
        second: right operand.
        dtype: of the result.
        bits: significant bits of the accumulator, at most 24.

    Returns:
        output ``[M, N]``, grad_input ``[M, K]`` or grad_weight ``[N, K]``.
    """
    roles = OPERANDS[which]
    a, b = (_contracting_last(o, (which, r) in CONTRACTS_ROWS) for o, r in zip((first, second), roles, strict=True))
    rows = max(1, _BLOCK // max(1, b.shape[0] * GROUP))
    parts = [_product(part, b, bits) for part in torch.split(a, rows)]
    return torch.cat(parts).to(dtype) if parts else a.new_zeros(0, b.shape[0], dtype=dtype)


def _contracting_last(operand: Operand, rows_contract: bool) -> Tensor:
    values = operand.detach().float() if isinstance(operand, Tensor) else dequantize(*operand)
    return values.t() if rows_contract else values


def _product(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """Return a ``[M, K]`` @ b ``[N, K]``.T by the short accumulator."""
    total = a.new_zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], GROUP):
        terms = a[:, None, start : start + GROUP] * b[None, :, start : start + GROUP]
        largest = torch.maximum(terms.abs().amax(-1), total.abs())
        _, exponent = torch.frexp(largest)  # largest = m * 2^exponent, 0.5 <= m < 1
        unit = power_of_2(exponent - bits, total.dtype)
        unit = torch.where(largest > 0, unit, 1.0)  # an unfit unit (of NaN or Inf) is harmless: the sum is NaN or Inf as well
        cut = (terms / unit[..., None]).trunc_().sum(-1) + (total / unit).trunc_()
        total = cut * unit
    return total

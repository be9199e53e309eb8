"""F148: block scales in a format with few exponents, and nothing over them that brings a tensor into their range."""

from __future__ import annotations

from dataclasses import dataclass

from fp8debug.rules.base import RULES
from fp8debug.rules.reading.stored_scales import ScaleRange


@dataclass(frozen=True)
class BlockScaleRange(ScaleRange):
    """E4M3 block scales without a second level saturate, or underflow to zero.

    What it detects
        Block scales in E4M3 under no scale of the tensor: values beyond what the largest one, 448, holds; or blocks whose scale
        is zero (below 2^-10) in an operand that has lost more than its cast can.

    Why it matters
        E4M3 spans 2^-9 to 448, eighteen binades. Gradients of 1e-5 have scales of 1e-6: every block becomes zero, and the layers
        below get no gradient. A second scale in FP32 is why NVFP4 has two levels (arXiv 2509.25149).

    Example
        blocks.1.down, dgrad grad_output, e2m1fn 1x16 current scale=e4m3fn: 98 % of the block scales are zero from step 12 on.

    Cure
        tensor_scale='tensor', or 'row', for this operand; or scales in E8M0 (MXFP4, MXFP8); else BF16 for this GEMM.

    Thresholds
        - min_headroom 1.25: amax over what the scales hold; rounding alone gives 1.0625, and to a subnormal scale 1.5, which
          counts under a Hadamard transform (F147); numerics.md, 2.
        - margin_db 0.1: how far below the closed-form bound of its cast an operand with zero scales must lie (F128).
        - min_own_share 0.86, min_own_share_transformed 0.6: amax over the largest scale's range, as a share of headroom, from
          which on the scales are cut off and none is another block's: 1 in closed form, but that scales are
          rounded, by 1/17, and a Hadamard transform moves the amax. No published basis for the margin.
        - min_elements 256: elements. No published basis.
    """

    code = "F148"
    name = "block-scale-range"
    cure = "tensor_scale='tensor' for this operand, or E8M0 scales; else BF16 for this GEMM"
    keys = "cast_name NOT LIKE '% tensor_scale=%'"
    saturates = "its block scales saturate in E4M3, {} times below its amax, with none over them"
    is_zero = "E4M3 does not reach down to them, with no scale over them"


RULES.add(BlockScaleRange.code, BlockScaleRange())

"""F147: the second-level scale of a tensor is older than the tensor, so that its block scales saturate or are zero."""

from __future__ import annotations

from dataclasses import dataclass

from fp8debug.rules.base import RULES
from fp8debug.rules.reading.stored_scales import ScaleRange


@dataclass(frozen=True)
class StaleTensorScale(ScaleRange):
    """The FP32 scale over E4M3 block scales was made for another amax than the tensor's.

    What it detects
        Under scales in two levels (NVFP4), values beyond what the largest block scale holds: the second level maps the tensor's
        amax to the largest E4M3 scale, 448, so that no block scale saturates while it is the tensor's own. Or blocks whose scale
        is zero in an operand that has lost more than its cast can: a second level made for a larger tensor. Scales of
        other blocks (F119) leave the largest value within the largest scale.

    Why it matters
        The block scales follow each block, and hide for 2^17 of growth or decline that the tensor scale does not. Then all
        large blocks clip at once, or all blocks become zero.

    Example
        blocks.1.down, fprop input, e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor: 80 % of the elements clip from step 12
        on, the amax is 64 times what the second-level scale was made for.

    Cure
        Compute the second-level scale from this very tensor, over all ranks that share it; or current scaling with
        tensor_scale='row'; else MXFP8 or BF16 for this GEMM.

    Thresholds
        - min_headroom 1.25: amax over what the scales hold. Rounding a scale to E4M3 makes it 1/17 too small at most, 1.0625;
          numerics.md, 2. Under a Hadamard transform 1.5, as rounding to a subnormal scale can do (closed form): the amax there
          is that before the transform, and does not tell which block lacks it.
        - margin_db 0.1: how far below the closed-form bound of its cast an operand with zero scales must lie (F128).
        - min_own_share 0.86, min_own_share_transformed 0.6: amax over the largest scale's range, as a share of headroom, from
          which on the scales are cut off and none is another block's: 1 in closed form, but that scales are
          rounded, by 1/17, and a Hadamard transform moves the amax. No published basis for the margin.
        - min_elements 256: elements. No published basis.
        - Asked for in TransformerEngine #2801.
    """

    code = "F147"
    name = "stale-tensor-scale"
    cure = "compute the second-level scale from this tensor's own amax; else MXFP8 or BF16 for this GEMM"
    keys = "cast_name LIKE '% tensor_scale=%'"
    saturates = "its amax is {} times what the second-level scale was made for: the block scales saturate"
    is_zero = "the second-level scale was made for a larger tensor"


RULES.add(StaleTensorScale.code, StaleTensorScale())

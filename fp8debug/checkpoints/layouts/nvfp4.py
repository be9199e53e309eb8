"""NVFP4: packed E2M1 codes, an E4M3 scale per 1x16 elements and an FP32 scale for the tensor.

compressed-tensors: ``NAME_packed``, ``NAME_scale`` and ``NAME_global_scale``, by which one divides: x ~= data * scale / global.
Model Optimizer: ``NAME`` in U8, ``NAME_scale`` and ``NAME_scale_2``, by which one multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8debug.checkpoints.files import Checkpoint
from fp8debug.checkpoints.layouts.base import LAYOUTS, Layout, Weight, weight_of


class NvFp4(Layout):
    """``weight_packed`` or U8 ``weight`` with E4M3 scales."""

    name = "nvfp4"

    def weights(self, checkpoint: Checkpoint, claimed: set[str]) -> Iterator[Weight]:
        """Yield each packed tensor with E4M3 scales."""
        tensors = checkpoint.tensors
        for name, data in tensors.items():
            if name in claimed or data.dtype not in ("U8", "F4"):
                continue
            stem = name.removesuffix("_packed")
            scale = tensors.get(f"{stem}_scale")
            second, divisor = tensors.get(f"{stem}_scale_2"), tensors.get(f"{stem}_global_scale")
            is_ours = (scale is not None and scale.dtype == "F8_E4M3") or (scale is None and (second or divisor) is not None)
            if not is_ours:
                continue
            claimed.update(one.name for one in (data, scale, second, divisor) if one is not None)
            yield weight_of(
                self.name,
                checkpoint,
                data,
                scale,
                name=stem,
                number_format="e2m1fn",
                blocks=((1, 16),),
                tensor_scale=second or divisor,
                tensor_scale_as="multiplier" if second is not None else "divisor",
            )


LAYOUTS.add(NvFp4.name, NvFp4())

"""The layout of compressed-tensors, vLLM, FBGEMM and Model Optimizer in FP8: ``NAME`` and ``NAME_scale``, x ~= data * scale.

One scale for the tensor (``[]`` or ``[1]``), for each row (``[rows, 1]``), or for each block. ComfyUI names the tensor's scale
``MODULE.scale_weight``, and marks a file by an FP8 tensor ``scaled_fp8`` that means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8debug.checkpoints.codes import OF_DTYPE
from fp8debug.checkpoints.files import Checkpoint
from fp8debug.checkpoints.layouts.base import LAYOUTS, Block, Layout, Weight, declared_block, weight_of
from fp8debug.checkpoints.names import comfy_scale

#: Scales of OCP MX.
_E8M0 = ("U8", "F8_E8M0")
BLOCKS: tuple[Block, ...] = ((128, 128), (1, 128), (64, 64), (256, 256), (1, 64))


class CompressedTensors(Layout):
    """``weight_scale``."""

    name = "compressed-tensors"

    def weights(self, checkpoint: Checkpoint, claimed: set[str]) -> Iterator[Weight]:
        """Yield each FP8 tensor that has scales named after it, other than those of OCP MX."""
        declared = declared_block(checkpoint)
        blocks = tuple(dict.fromkeys([*([declared] if declared else []), *BLOCKS]))
        for name, data in checkpoint.tensors.items():
            scale = checkpoint.tensors.get(f"{name}_scale") or checkpoint.tensors.get(comfy_scale(name))
            if scale is None or name in claimed or data.dtype not in OF_DTYPE or scale.dtype in _E8M0:
                continue
            claimed.update((name, scale.name))
            yield weight_of(self.name, checkpoint, data, scale, blocks=blocks, is_declared=declared is not None)


LAYOUTS.add(CompressedTensors.name, CompressedTensors())

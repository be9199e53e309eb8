"""DeepSeek's layout, which transformers, SGLang and vLLM read: ``NAME`` in FP8 and ``NAME_scale_inv`` per 128x128 block.

Scales are FP32, or E8M0 (``scale_fmt: ue8m0``). DeepSeek's own inference code names them ``MODULE.scale``. Experts may be packed
E2M1 in I8 with a scale per 1x32 elements, beside weights in FP8.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8debug.checkpoints.codes import OF_DTYPE
from fp8debug.checkpoints.files import Checkpoint, Tensor
from fp8debug.checkpoints.layouts.base import LAYOUTS, Block, Layout, Weight, declared_block, weight_of

BLOCKS: tuple[Block, ...] = ((128, 128), (1, 128), (1, 32), (64, 64), (256, 256))


class DeepSeek(Layout):
    """``weight_scale_inv``."""

    name = "deepseek"

    def weights(self, checkpoint: Checkpoint, claimed: set[str]) -> Iterator[Weight]:
        """Yield each tensor that has scales named after it."""
        declared = declared_block(checkpoint)
        blocks = tuple(dict.fromkeys([*([declared] if declared else []), *BLOCKS]))
        tensors = checkpoint.tensors
        for name, data in tensors.items():
            scale = tensors.get(f"{name}_scale_inv") or _native(name, tensors.get(f"{name.removesuffix('.weight')}.scale"), data)
            if scale is None or name in claimed:
                continue
            is_fp4 = data.dtype in ("I8", "U8") and scale.dtype in ("F8_E8M0", "U8")
            if data.dtype not in OF_DTYPE and not is_fp4:
                continue
            claimed.update((name, scale.name))
            candidates = ((1, 32), (1, 16)) if is_fp4 else blocks
            yield weight_of(
                self.name,
                checkpoint,
                data,
                scale,
                number_format="e2m1fn" if is_fp4 else None,
                blocks=candidates,
                bytes_are="e8m0",
                is_declared=declared is not None and not is_fp4,
            )


def _native(name: str, scale: Tensor | None, data: Tensor) -> Tensor | None:
    return scale if name.endswith(".weight") and data.dtype != "BF16" else None


LAYOUTS.add(DeepSeek.name, DeepSeek())

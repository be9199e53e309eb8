"""OCP MX layouts: a power-of-two scale (E8M0, as U8 or F8_E8M0) for each 1x32 elements.

MXFP8: ``NAME`` in FP8 and ``NAME_scale``. MXFP4: ``NAME_packed`` and ``NAME_scale`` (compressed-tensors), or ``NAME_blocks``
``[..., columns / 32, 16]`` and ``NAME_scales`` (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8debug.checkpoints.codes import OF_DTYPE
from fp8debug.checkpoints.files import Checkpoint, Tensor
from fp8debug.checkpoints.layouts.base import LAYOUTS, Layout, Weight, weight_of

_E8M0 = ("U8", "F8_E8M0")


class Mx(Layout):
    """``weight_scale`` in E8M0."""

    name = "mx"

    def weights(self, checkpoint: Checkpoint, claimed: set[str]) -> Iterator[Weight]:
        """Yield each tensor with E8M0 scales named after it."""
        tensors = checkpoint.tensors
        for name, data in tensors.items():
            if name in claimed:
                continue
            stem = name.removesuffix("_packed").removesuffix("_blocks")
            scale = tensors.get(f"{stem}_scales" if name.endswith("_blocks") else f"{stem}_scale")
            if scale is None or scale.dtype not in _E8M0 or scale.name in claimed:
                continue
            is_fp4 = stem != name and data.dtype in ("U8", "I8", "F4")
            if data.dtype not in OF_DTYPE and not is_fp4:
                continue
            claimed.update((name, scale.name))
            yield weight_of(
                self.name,
                checkpoint,
                _flat(data) if name.endswith("_blocks") else data,
                scale,
                name=stem,
                number_format="e2m1fn" if is_fp4 else None,
                blocks=((1, 32),),
                bytes_are="e8m0",
            )


def _flat(data: Tensor) -> Tensor:
    """Return gpt-oss's blocks as rows: ``[..., groups, 16 bytes]`` becomes ``[..., 16 * groups]``."""
    return replace(data, shape=(*data.shape[:-2], data.shape[-2] * data.shape[-1])) if len(data.shape) > 1 else data


LAYOUTS.add(Mx.name, Mx())

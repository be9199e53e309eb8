"""Transformer Engine's exported FP8 state: the storages' own tensors by name.

``NAME._data`` and ``NAME._scale_inv`` (per tensor); ``NAME._rowwise_data`` and ``NAME._rowwise_scale_inv`` (blocks). Codes and
E8M0 or E4M3 scales are U8. Scales per 128x128 are padded to 4 columns, scales per 1x128 lie transposed and padded to 4 rows.
Those of MXFP8 and NVFP4 are padded to 128x4. The format of U8 codes is E4M3 unless the file's metadata say ``fp8_dtype``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8debug.checkpoints.codes import OF_DTYPE
from fp8debug.checkpoints.files import Checkpoint, Tensor
from fp8debug.checkpoints.layouts.base import LAYOUTS, Block, Layout, Weight, extent, weight_of
from fp8debug.formats import FORMATS

_ROWWISE = ("_rowwise_data", "_rowwise_scale_inv")
#: Read by Transformer Engine beside the row-wise copy: a second copy for the other GEMMs, and amaxes.
_OTHERS = ("_columnwise_data", "_columnwise_scale_inv", "_transpose", "_amax_rowwise", "_amax_columnwise")


class TransformerEngineLayout(Layout):
    """``_rowwise_data`` and ``_data``."""

    name = "transformer-engine"

    def weights(self, checkpoint: Checkpoint, claimed: set[str]) -> Iterator[Weight]:
        """Yield the row-wise copy of each tensor."""
        tensors = checkpoint.tensors
        for name, data in tensors.items():
            suffix = next((s for s in (_ROWWISE[0], "_data") if name.endswith(s)), None)
            if suffix is None or name in claimed or data.dtype not in ("U8", *OF_DTYPE) or name.endswith(_OTHERS[0]):
                continue
            stem = name.removesuffix(suffix)
            scale = tensors.get(stem + suffix.replace("data", "scale_inv"))
            if scale is None and not stem.endswith("."):
                continue
            claimed.update(
                one for one in (name, scale.name if scale else name, *(stem + other for other in _OTHERS)) if one in tensors
            )
            yield self._weight(checkpoint, stem.rstrip("._"), data, scale, tensors.get(f"{stem}_amax_rowwise"))

    def _weight(self, checkpoint: Checkpoint, name: str, data: Tensor, scale: Tensor | None, amax: Tensor | None) -> Weight:
        _, rows, columns = extent(data.shape)
        codes = OF_DTYPE.get(data.dtype) or _declared_format(checkpoint, data)
        if amax is not None:
            codes, columns = "e2m1fn", 2 * columns
        weight = weight_of(
            self.name,
            checkpoint,
            data,
            scale,
            name=name,
            number_format=codes,
            blocks=((1, 16),) if amax is not None else ((128, 128), (1, 32)),
            bytes_are="e4m3fn" if amax is not None else "e8m0",
            tensor_scale=amax,
            tensor_scale_as="amax",
        )
        if scale is None or scale.numel == 1:
            return weight
        for block, arrangement, shape in _arrangements(rows, columns, is_fp32=scale.dtype == "F32", is_fp4=amax is not None):
            if scale.shape == shape:
                return replace(weight, block=block, arrangement=arrangement, grid_fault=None, shares_scale=False)
        return weight


def _arrangements(rows: int, columns: int, *, is_fp32: bool, is_fp4: bool) -> Iterator[tuple[Block, str, tuple[int, int]]]:
    """Yield (block, arrangement, shape of the scale tensor) of the storages."""
    if is_fp32:
        block_rows, block_columns = -(-rows // 128), -(-columns // 128)
        yield (128, 128), "padded", (block_rows, _padded(block_columns, 4))
        yield (1, 128), "transposed", (block_columns, _padded(rows, 4))
    else:
        size = 16 if is_fp4 else 32
        yield (1, size), "padded", (_padded(rows, 128), _padded(-(-columns // size), 4))


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _declared_format(checkpoint: Checkpoint, data: Tensor) -> str:
    said = checkpoint.metadata.get(data.file.name, {}).get("fp8_dtype", "")
    found = (f.name for f in FORMATS.values() if f.name.removesuffix("fn") in said.lower())
    return next(found, "e4m3fn")


LAYOUTS.add(TransformerEngineLayout.name, TransformerEngineLayout())

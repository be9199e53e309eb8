"""torchao's safetensors: ``MODULE._weight_qdata`` and ``MODULE._weight_scale``, described in the file's metadata.

The metadata hold one JSON object for each tensor: its class (Float8Tensor, MXTensor, NVFP4Tensor) and attributes such as
``block_size`` and ``is_swizzled_scales``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fp8debug.checkpoints.codes import OF_DTYPE
from fp8debug.checkpoints.files import Checkpoint, Tensor
from fp8debug.checkpoints.layouts.base import LAYOUTS, Block, Layout, Weight, weight_of
from fp8debug.store.file_checks import parse_json

_CLASSES = ("Float8Tensor", "MXTensor", "NVFP4Tensor")
_PARTS = ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale")


class TorchAoLayout(Layout):
    """``_weight_qdata``."""

    name = "torchao"

    def weights(self, checkpoint: Checkpoint, claimed: set[str]) -> Iterator[Weight]:
        """Yield each tensor that the metadata describe as FP8, MX or NVFP4."""
        described = {name: entry for metadata in checkpoint.metadata.values() for name, entry in _described(metadata)}
        for name, entry in described.items():
            module, _, attribute = name.rpartition(".")
            prefix = f"{module}._{attribute}_" if module else f"_{attribute}_"
            parts = {part: checkpoint.tensors.get(prefix + part) for part in _PARTS}
            data = parts["qdata"]
            if data is None:
                continue
            claimed.update(tensor.name for tensor in parts.values() if tensor is not None)
            yield self._weight(checkpoint, name, entry, data, parts)

    def _weight(
        self, checkpoint: Checkpoint, name: str, entry: Mapping[str, Any], data: Tensor, parts: Mapping[str, Tensor | None]
    ) -> Weight:
        attributes = entry["_data"]
        given = attributes.get("block_size")
        kind, size = entry["_type"], given if isinstance(given, int) and given > 0 else {"MXTensor": 32}.get(entry["_type"], 16)
        block: Block = (1, size) if kind != "Float8Tensor" else _block(given, data)
        is_fp4 = data.dtype not in OF_DTYPE
        weight = weight_of(
            self.name,
            checkpoint,
            data,
            parts["scale"],
            name=name,
            number_format="e2m1fn" if is_fp4 else None,
            blocks=(block,),
            bytes_are="e8m0" if kind == "MXTensor" else "e4m3fn",
            tensor_scale=parts["per_tensor_scale"],
        )
        scale = parts["scale"]
        if attributes.get("is_swizzled_scales") is True and scale is not None:
            weight = replace(weight, block=block)
            tiles = weight.batch * (-(-weight.grid[0] // 128) * 128) * (-(-weight.grid[1] // 4) * 4)
            fault = None if scale.numel == tiles else f"{scale.numel} swizzled scales, expected {tiles}"
            weight = replace(weight, arrangement="swizzled", shares_scale=False, grid_fault=fault)
        return weight


def _block(given: Any, data: Tensor) -> Block:
    """Return rows and columns of a Float8Tensor's block; its size may span the tensor."""
    if isinstance(given, list) and len(given) >= 2 and all(type(n) is int and n > 0 for n in given):
        return given[-2], given[-1]
    return (data.shape[-2] if len(data.shape) > 1 else 1), data.shape[-1] if data.shape else 1


def _described(metadata: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, text in metadata.items():
        if '"_type"' not in text:
            continue
        try:
            entry = parse_json(text)
        except ValueError:
            continue
        if isinstance(entry, Mapping) and entry.get("_type") in _CLASSES and isinstance(entry.get("_data"), Mapping):
            yield name, entry


LAYOUTS.add(TorchAoLayout.name, TorchAoLayout())

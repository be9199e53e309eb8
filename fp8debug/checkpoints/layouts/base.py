"""Layouts: how a naming convention spells a quantized weight, its scales and the blocks that share one.

A layout is one file with one registered class. It yields the :class:`Weight` of each tensor that it recognizes and claims every
tensor that its readers read; what no layout claims is judged as unread or without a scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fp8debug.checkpoints.codes import OF_DTYPE, decoded, is_float, table
from fp8debug.checkpoints.files import Checkpoint, Tensor
from fp8debug.formats import FORMATS, SWIZZLE, SWIZZLED_COLUMNS, SWIZZLED_ROWS, format_named
from fp8debug.registry import Registry

Array = np.ndarray[Any, Any]
Block = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A quantized weight: codes, and scales of which each holds for one block.

    Attributes:
        name: as the model has it.
        layout: name of the layout.
        data: the codes.
        format: of the codes.
        is_packed: two codes share a byte.
        batch: number of matrices, one below the other (experts).
        rows: of one matrix.
        columns: of one matrix, in elements.
        scale: the block scales; None where there are none.
        scale_format: float, e8m0 or e4m3fn: how the scale's bytes are read.
        block: rows and columns that share a scale.
        arrangement: how scales lie in their tensor: plain, padded, transposed or swizzled.
        shares_scale: one scale holds for all matrices.
        tensor_scale: second level: one scale for the tensor.
        tensor_scale_as: multiplier, divisor or amax.
        grid_fault: why the scales do not fit the data; None when they do.
        wants_pow2: the file or its configuration says that scales are powers of two.
    """

    name: str
    layout: str
    data: Tensor
    format: str
    is_packed: bool = False
    batch: int = 1
    rows: int
    columns: int
    scale: Tensor | None = None
    scale_format: str = "float"
    block: Block
    arrangement: str = "plain"
    shares_scale: bool = False
    tensor_scale: Tensor | None = None
    tensor_scale_as: str = "multiplier"
    grid_fault: str | None = None
    wants_pow2: bool = False

    @property
    def grid(self) -> Block:
        """Rows and columns of one matrix's scales."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def num_blocks(self) -> int:
        """Blocks of all matrices."""
        return self.batch * self.grid[0] * self.grid[1]

    @property
    def granularity(self) -> str:
        """Block as the glossary spells it."""
        rows, columns = self.block
        if (rows, columns) == (self.rows, self.columns):
            return "tensorwise"
        return "rowwise" if rows == 1 and columns == self.columns else f"{rows}x{columns}"

    def scales(self, raw: Array) -> Array:
        """Return the scales that bytes stand for, FP32 ``[batch, grid rows, grid columns]``, without the tensor's own.

        Args:
            raw: all bytes of ``scale``.
        """
        assert self.scale is not None
        values = _numbers(raw, self.scale.dtype, self.scale_format)
        rows, columns = self.grid
        if self.shares_scale:
            return np.broadcast_to(values.reshape(1, 1, 1), (self.batch, rows, columns))
        if self.arrangement == "swizzled":
            return unswizzled(values, self.batch, rows, columns)
        if self.arrangement == "transposed":
            return np.ascontiguousarray(values.reshape(self.scale.shape)[:columns, :rows].T)[None]
        if self.arrangement == "padded":
            return np.ascontiguousarray(values.reshape(self.scale.shape)[:rows, :columns])[None]
        return values.reshape(self.batch, rows, columns)


def _numbers(raw: Array, dtype: str, scale_format: str) -> Array:
    if scale_format != "float":
        return table(scale_format)[raw]
    with np.errstate(over="ignore"):
        return decoded(raw, dtype).astype(np.float32, copy=False)


def unswizzled(values: Array, batch: int, rows: int, columns: int) -> Array:
    """Return scales that lie in tiles of 128x4 as cuBLAS wants them, ``[batch, rows, columns]``.

    Each tile of 128 rows and 4 columns holds 32 groups of 16: row r, column c lies at ``(r % 32) * 16 + (r // 32) * 4 + c``
    (cuBLAS documentation, "1D block scaling factors layout").
    """
    row_tiles, column_tiles = -(-rows // SWIZZLED_ROWS), -(-columns // SWIZZLED_COLUMNS)
    tiles = values.reshape(batch, row_tiles, column_tiles, *SWIZZLE).transpose(0, 1, 4, 3, 2, 5)
    return np.ascontiguousarray(
        tiles.reshape(batch, row_tiles * SWIZZLED_ROWS, column_tiles * SWIZZLED_COLUMNS)[:, :rows, :columns]
    )


class Layout(ABC):
    """Base of every layout.

    Attributes:
        name: spelling in reports.
    """

    name: ClassVar[str]

    @abstractmethod
    def weights(self, checkpoint: Checkpoint, claimed: set[str]) -> Iterator[Weight]:
        """Yield the weights of this layout; add the names of all tensors that its readers read to ``claimed``."""


LAYOUTS: Registry[Layout] = Registry("layout")


def format_of(tensor: Tensor, checkpoint: Checkpoint) -> str | None:
    """Return the format of a tensor's codes: by its type, or None where it has none."""
    return OF_DTYPE.get(tensor.dtype)


def extent(shape: Sequence[int], *, is_packed: bool = False) -> tuple[int, int, int]:
    """Return (batch, rows, columns) of a tensor of any number of dimensions; a vector is one row."""
    columns = (shape[-1] if shape else 1) * (2 if is_packed else 1)
    rows = shape[-2] if len(shape) > 1 else 1
    return math.prod(shape[:-2]), rows, columns


def declared_block(checkpoint: Checkpoint) -> Block | None:
    """Return the block that the configuration declares for weights, ``weight_block_size`` or ``block_structure``."""
    config = checkpoint.quantization or {}
    for found in (config.get("weight_block_size"), *_block_structures(config)):
        if isinstance(found, str):
            found = [int(n) for n in found.split("x") if n.isdigit()]
        if isinstance(found, Sequence) and len(found) == 2 and all(type(n) is int and n > 0 for n in found):
            return found[0], found[1]
    return None


def _block_structures(config: Mapping[str, Any]) -> Iterator[Any]:
    groups = config.get("config_groups")
    found = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    )
    structures = [weights.get("block_structure") for weights in found if isinstance(weights, Mapping)]
    if len(structures) == 1:
        yield structures[0]


def declares_pow2(checkpoint: Checkpoint) -> bool:
    """Return whether the configuration says that scales are powers of two (DeepSeek's ``scale_fmt``)."""
    declared = format_named(str((checkpoint.quantization or {}).get("scale_fmt", "")).lower().removeprefix("u"))
    return declared is not None and declared.scale_only


def scale_format_of(tensor: Tensor, *, bytes_are: str | None = None) -> str | None:
    """Return how a scale's bytes are read, or None for a type that holds no scales.

    Args:
        tensor: the scales.
        bytes_are: the format of U8 scales in this layout.
    """
    if tensor.dtype == "F8_E8M0":
        return "e8m0"
    if tensor.dtype in ("F8_E4M3", "F8_E5M2"):
        return OF_DTYPE[tensor.dtype]
    if is_float(tensor.dtype):
        return "float"
    return bytes_are if tensor.dtype == "U8" else None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fit of a scale's shape to a weight.

    Attributes:
        block: rows and columns that share a scale.
        shares_scale: one scale holds for all matrices.
        fault: why they do not fit; None when they do.
    """

    block: Block
    shares_scale: bool = False
    fault: str | None = None


def fit(shape: Sequence[int], batch: int, rows: int, columns: int, blocks: Sequence[Block], *, is_declared: bool = False) -> Fit:
    """Return the block of scales of that shape.

    Args:
        shape: of the scale tensor.
        batch: number of matrices.
        rows: of one matrix.
        columns: of one matrix.
        blocks: candidates, the likeliest first; it is the one that a fault is measured against.
        is_declared: the first candidate is the configuration's: scales of the whole tensor or of rows do not replace it.

    Returns:
        The first candidate that gives this grid; else tensorwise, rowwise; else the fault.
    """
    whole, row = (max(rows, 1), max(columns, 1)), (1, max(columns, 1))
    numel = math.prod(shape)
    grid = _grid(shape, batch)
    if numel == 1 and len(shape) < 2 and not is_declared:
        return Fit(block=whole, shares_scale=batch > 1)
    for block in blocks[:1] if is_declared else blocks:
        if grid == _expected(block, rows, columns):
            return Fit(block=block)
    if not is_declared:
        if numel == 1:
            return Fit(block=whole, shares_scale=batch > 1)
        if numel == batch and batch > 1:
            return Fit(block=whole)
        if grid in ((rows, 1), (1, rows)) and numel == batch * rows and (len(shape) == 1 or grid == (rows, 1)):
            return Fit(block=row)
    elif numel == 1 and _expected(blocks[0], rows, columns) == (1, 1):
        return Fit(block=blocks[0])
    return Fit(block=blocks[0] if blocks else whole, fault=_fault(shape, grid, batch, rows, columns, blocks))


def _grid(shape: Sequence[int], batch: int) -> tuple[int, int] | None:
    """Return rows and columns of one matrix's scales; None where the leading dimensions differ from the data's."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return (shape[-2], shape[-1]) if math.prod(shape[:-2]) == batch else None


def _expected(block: Block, rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def _fault(
    shape: Sequence[int], grid: tuple[int, int] | None, batch: int, rows: int, columns: int, blocks: Sequence[Block]
) -> str:
    block = blocks[0] if blocks else (rows, columns)
    wanted = _expected(block, rows, columns)
    text = f"{'x'.join(map(str, shape)) or '1'} scales, expected {wanted[0]}x{wanted[1]} for blocks of {block[0]}x{block[1]}"
    if batch > 1:
        text += f" in each of {batch} matrices"
    if grid is None:
        return f"{text}: the leading dimensions differ from those of the weight"
    other = next((other for other in blocks[1:] if grid == _expected(other, rows, columns)), None)
    if other is not None:
        return f"{text}: the grid is that of blocks of {other[0]}x{other[1]}"
    if any(grid == _expected(other, rows, columns)[::-1] for other in blocks):
        return f"{text}: the grid is transposed"
    if grid in ((1, columns), (columns, 1)) and rows != columns:
        return f"{text}, or {rows}x1 for rows: there is one for each column"
    more, fewer = (any(a * s > b * s for a, b in zip(grid, wanted, strict=True)) for s in (1, -1))
    kind = "too many" if more and not fewer else "too few" if fewer and not more else "another grid"
    return f"{text}: {kind}"


def weight_of(
    layout: str,
    checkpoint: Checkpoint,
    data: Tensor,
    scale: Tensor | None,
    *,
    name: str | None = None,
    number_format: str | None = None,
    blocks: Sequence[Block],
    bytes_are: str | None = None,
    tensor_scale: Tensor | None = None,
    tensor_scale_as: str = "multiplier",
    is_declared: bool = False,
) -> Weight:
    """Return the weight of plainly arranged codes and scales.

    Args:
        layout: its name.
        checkpoint: that holds both.
        data: the codes.
        scale: the block scales, or None.
        name: of the weight; the data's by default.
        number_format: of the codes; by the data's type by default.
        blocks: candidates, the likeliest first.
        bytes_are: format of U8 scales.
        tensor_scale: second level.
        tensor_scale_as: multiplier, divisor or amax.
        is_declared: the first candidate is the configuration's.
    """
    codes = number_format or format_of(data, checkpoint)
    assert codes is not None
    is_packed = FORMATS[codes].bits == 4 and data.dtype != "F4"
    batch, rows, columns = extent(data.shape, is_packed=is_packed)
    kind = scale_format_of(scale, bytes_are=bytes_are) if scale is not None else None
    if scale is None:
        found = Fit(block=(max(rows, 1), max(columns, 1)), shares_scale=batch > 1)
    elif kind is None:
        found = Fit(block=(max(rows, 1), max(columns, 1)), fault=f"scales of type {scale.dtype}, expected floating-point numbers")
    else:
        found = fit(scale.shape, batch, rows, columns, blocks, is_declared=is_declared)
    return Weight(
        name=name or data.name,
        layout=layout,
        data=data,
        format=codes,
        is_packed=is_packed or data.dtype == "F4",
        batch=batch,
        rows=rows,
        columns=columns,
        scale=scale,
        scale_format=kind or "float",
        block=found.block,
        shares_scale=found.shares_scale,
        tensor_scale=tensor_scale,
        tensor_scale_as=tensor_scale_as,
        grid_fault=found.fault,
        wants_pow2=declares_pow2(checkpoint) and kind == "float",
    )

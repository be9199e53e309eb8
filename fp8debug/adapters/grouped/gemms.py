"""Grouped GEMMs of torch, ``aten._scaled_grouped_mm`` and ``_scaled_grouped_mm_v2``: one op multiplies the tokens of all experts.

    fprop  out[M, N]    = first[M, K]    @ second[E, K, N]     rows offs[e-1]:offs[e] by expert e
    dgrad  out[M, K]    = first[M, N]    @ second[E, N, K]     the same
    wgrad  out[E, N, K] = first[N, M]    @ second[M, K]        columns and rows offs[e-1]:offs[e] for expert e

Which rows are whose stands in ``offs``, on the device: nobody may wait for it. So nothing here is sliced by expert; rows are
weighted by a mask, and a loop over the experts, whose number is known, does the rest.

In MXFP8, MXFP4 and NVFP4 the scales of 1x32 or 1x16 blocks lie in cuBLAS's tiles of 128x4, the tiles of each expert behind those
of the one before it: its rows padded to 128 where the tokens are rows, its blocks padded to 4 where they are contracted (as in
torchao's ``mxfp8_grouped_mm``). NVFP4 has a second level for each expert. FP4 codes are two to a byte along the contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8debug.adapters.interception.listener import DECODERS, version_of
from fp8debug.adapters.interception.scale_layouts import E8M0, block_cast, power_of_two, unpacked, unswizzled
from fp8debug.formats import FORMATS, GRANULARITIES
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.recipes import Cast

_TENSORWISE, _ROWWISE, _BLOCKS_OF_16, _BLOCKS_OF_32 = range(4)  # of torch.nn.functional.ScalingType
#: Bytes of a factor of 1 in the formats of block scales.
_ONE_E8M0, _ONE_E4M3 = 127, 56


class SeenGroupedGemm(NamedTuple):
    """One grouped GEMM that ran.

    Without ``cast`` a decode factor belongs to a row of ``first`` and a column of ``second``, for wgrad of each expert. With
    it the factors are those of blocks along the contracted dimension: ``scale_first [rows, blocks]``, ``scale_second [E, N,
    blocks]``, for wgrad ``[columns, blocks]``; the cast is that of ``first``, and of ``second`` transposed.
    """

    first: Tensor
    second: Tensor
    scale_first: Tensor
    scale_second: Tensor
    offs: Tensor
    result: Tensor
    is_fast: bool
    is_fp8: bool = False  # to the scopes of a Linear it is none of its own
    cast: Cast | None = None
    versions: tuple[int | None, ...] = ()

    @property
    def block(self) -> int:
        """Elements of a block; 1 where a scale belongs to a row."""
        return 1 if self.cast is None else GRANULARITIES[self.cast.granularity][1] or 1

    def held(self) -> SeenGroupedGemm:
        """Return it to be read later, with the versions of its tensors, as autograd counts writes to them."""
        return self._replace(versions=tuple(version_of(x) for x in (self.first, self.second, self.result)))

    @property
    def is_overwritten(self) -> bool:
        """True if the program has written to its operands or its result since it was held."""
        now = zip((self.first, self.second, self.result), self.versions, strict=False)
        return any(version is not None and x._version != version for x, version in now)


def _read(
    args: Mapping[str, Any], scales: Sequence[Tensor], result: Tensor, tensor_scales: Sequence[Tensor] = ()
) -> SeenGroupedGemm:
    first, second, offs = args["self"], args["mat2"], args.get("offs")
    if offs is None or first.dim() != 2 or args.get("bias") is not None or args.get("scale_result") is not None:
        raise ValueError(f"a grouped GEMM of {first.dim()}-D by {second.dim()}-D without offsets, or with a bias, is not read")
    if tensor_scales or all(scale.dtype is E8M0 for scale in scales):
        return _read_blocks(first, second, scales, offs, result, tensor_scales)
    experts = offs.shape[0]
    lines = first.shape[0] * (experts if second.dim() == 2 else 1), second.shape[-1] * experts
    if first.dtype not in FORMAT_OF or any(s.dtype is not torch.float32 for s in scales):
        raise ValueError(f"a grouped GEMM of {first.dtype} with scales in {scales[0].dtype} is not read")
    if (scales[0].numel(), scales[1].numel()) != lines:
        raise ValueError(f"scales {[list(s.shape) for s in scales]} of a grouped GEMM are not of rows")
    is_fast = bool(args.get("use_fast_accum"))
    scale_first, scale_second = (scale.detach().clone() for scale in scales)  # a program may use their memory for the next ones
    return SeenGroupedGemm(first.detach(), second.detach(), scale_first, scale_second, offs.clone(), result.detach(), is_fast)


def _read_blocks(
    first: Tensor, second: Tensor, scales: Sequence[Tensor], offs: Tensor, result: Tensor, tensor_scales: Sequence[Tensor]
) -> SeenGroupedGemm:
    cast, experts = block_cast(first, scales[0], has_tensor_scale=bool(tensor_scales)), offs.shape[0]
    first, second = first.detach(), second.detach()
    if FORMATS[cast.format].bits == 4:
        first, second = unpacked(first), _unpacked_second(second)
    length, block, one = first.shape[1], GRANULARITIES[cast.granularity][1] or 1, _ONE_E4M3 if tensor_scales else _ONE_E8M0
    if length % (4 * block) or any(len(scale.reshape(-1)) != experts for scale in tensor_scales):
        raise ValueError(f"a grouped GEMM in blocks of {first.dtype} that contracts {length} elements is not read")
    blocks = length // block
    if second.dim() == 3:
        grid_first = _of_rows(scales[0], offs, first.shape[0], blocks, one)
        parts = [unswizzled(scale, second.shape[-1], blocks) for scale in scales[1].reshape(experts, -1)]
        grid_second = torch.stack([part.view(torch.uint8) for part in parts])
    else:
        grid_first = _of_columns(scales[0], offs, first.shape[0], blocks, block, one)
        grid_second = _of_columns(scales[1], offs, second.shape[1], blocks, block, one)
    if not tensor_scales:
        factors = power_of_two(grid_first), power_of_two(grid_second)
    else:
        places = torch.arange(first.shape[0] if second.dim() == 3 else blocks, dtype=torch.int64, device=offs.device)
        expert = expert_of(places, offs if second.dim() == 3 else offs // block)
        of_first, of_second = (scale.detach().reshape(-1).float() for scale in tensor_scales)
        mine = expert.clamp(max=experts - 1)
        first_scale = of_first[mine][:, None] if second.dim() == 3 else of_first[mine]
        second_scale = of_second[:, None, None] if second.dim() == 3 else of_second[mine]
        grids = (grid.view(torch.float8_e4m3fn).float() for grid in (grid_first, grid_second))
        factors = next(grids) * first_scale, next(grids) * second_scale
    return SeenGroupedGemm(first, second, *factors, offs.clone(), result.detach(), False, cast=cast)


def _unpacked_second(second: Tensor) -> Tensor:
    """Return the values ``[E, c, s]`` or ``[c, s]`` of codes whose dimension c is packed."""
    lines = second.view(torch.uint8).transpose(-2, -1)
    values = unpacked(lines.reshape(-1, lines.shape[-1]))
    return values.reshape(*lines.shape[:-1], values.shape[-1]).transpose(-2, -1)


def _place(row: Tensor, column: Tensor, columns: Tensor | int) -> Tensor:
    """Return where a scale lies in tiles of 128x4, ``columns`` a row of tiles."""
    return (row // 128 * (columns // 4) + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def _of_rows(scales: Tensor, offs: Tensor, rows: int, blocks: int, one: int) -> Tensor:
    """Return the bytes ``[rows, blocks]`` of scales whose experts begin at whole tiles of rows."""
    row = torch.arange(rows, dtype=torch.int64, device=scales.device)
    expert, start, padded = _starts(row, offs, 128)
    block = torch.arange(blocks, dtype=torch.int64, device=scales.device)
    place = _place((row - start + padded)[:, None], block, blocks)
    return _taken(scales, place, expert[:, None] < len(offs), one)


def _of_columns(scales: Tensor, offs: Tensor, rows: int, blocks: int, size: int, one: int) -> Tensor:
    """Return the bytes ``[rows, blocks]`` of scales whose experts begin at whole tiles of blocks."""
    block, ends = torch.arange(blocks, dtype=torch.int64, device=scales.device), offs // size
    expert, start, padded = _starts(block, ends, 4)
    widths = -(-ends.diff(prepend=ends.new_zeros(1)).long() // 4) * 4
    width = widths[expert.clamp(max=len(offs) - 1)]
    row = torch.arange(rows, dtype=torch.int64, device=scales.device)[:, None]
    place = padded * (-(-rows // 128) * 128) + _place(row, block - start, width)
    return _taken(scales, place, expert < len(offs), one)


def _starts(places: Tensor, ends: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the expert of each place, where it begins, and where it begins once all before it are padded to a multiple."""
    expert = expert_of(places, ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).long()
    padded = -(-sizes // multiple) * multiple
    mine = expert.clamp(max=len(ends) - 1)
    return expert, (sizes.cumsum(0) - sizes)[mine], (padded.cumsum(0) - padded)[mine]


def _taken(scales: Tensor, place: Tensor, is_of_expert: Tensor, one: int) -> Tensor:
    """Return the bytes at places of the memory; that of a factor of 1 where nothing belongs to an expert."""
    flat = scales.as_strided((scales.numel(),), (1,)).view(torch.uint8)
    found = flat[place.clamp(0, max(0, len(flat) - 1))]
    return torch.where(is_of_expert, found, one)


def _scaled_grouped_mm(args: Mapping[str, Any], result: Any) -> SeenGroupedGemm:
    return _read(args, (args["scale_a"], args["scale_b"]), result)


def _scaled_grouped_mm_v2(args: Mapping[str, Any], result: Any) -> SeenGroupedGemm:
    kinds = [list(args[f"recipe_{end}"]) for end in "ab"]
    swizzles = [list(args[f"swizzle_{end}"]) for end in "ab"]
    is_rowwise = kinds == [[_ROWWISE], [_ROWWISE]] and not any(map(any, swizzles))
    is_mx = kinds == [[_BLOCKS_OF_32], [_BLOCKS_OF_32]] and all(map(any, swizzles))
    is_nv = kinds == [[_BLOCKS_OF_16, _TENSORWISE]] * 2 and all(s[0] and not any(s[1:]) for s in swizzles)
    if not (is_rowwise or is_mx or is_nv) or args.get("contraction_dim"):
        raise ValueError(f"scaling types {kinds} of _scaled_grouped_mm_v2, swizzled {swizzles}, are not read")
    scales = args["scale_a"], args["scale_b"]
    return _read(args, tuple(each[0] for each in scales), result, tuple(each[1] for each in scales) if is_nv else ())


_READERS: dict[str, Callable[[Mapping[str, Any], Any], Any]] = {
    "_scaled_grouped_mm": _scaled_grouped_mm,
    "_scaled_grouped_mm_v2": _scaled_grouped_mm_v2,
}
for _name, _reader in _READERS.items():
    if hasattr(torch.ops.aten, _name):
        DECODERS[getattr(torch.ops.aten, _name)] = _reader


def expert_of(rows: Tensor, offs: Tensor) -> Tensor:
    """Return which expert each row belongs to, int64; one past the last for rows that belong to none."""
    return torch.searchsorted(offs.to(rows.dtype), rows, right=True)


def by_expert(x: Tensor, expert: Tensor, weights: Callable[[int], Tensor], experts: int) -> Tensor:
    """Return ``x[r] @ weights(expert of r)`` ``[R, N]``, FP32; 0 for a row of no expert.

    Args:
        x: ``[R, K]``.
        expert: which each row belongs to.
        weights: of an expert, ``[K, N]``.
        experts: how many there are.
    """
    x = torch.where((expert < experts)[:, None], x.float(), 0.0)
    total: Tensor | None = None
    for e in range(experts):
        part = torch.where((expert == e)[:, None], x, 0.0) @ weights(e).float()
        total = part if total is None else total + part
    assert total is not None
    return total


def contracted(first: Tensor, second: Tensor, expert: Tensor, e: int) -> Tensor:
    """Return ``first.t() @ second`` ``[N, K]`` over the rows of one expert, FP32."""
    mine = (expert == e)[:, None]
    return torch.where(mine, first.float(), 0.0).t() @ torch.where(mine, second.float(), 0.0)


def decoded(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the FP32 values of codes ``[rows, c]`` under the factors ``[rows, blocks]`` of a row's blocks, or of the row."""
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(block, 1)[:, : codes.shape[1]]
    return codes.float() * scales

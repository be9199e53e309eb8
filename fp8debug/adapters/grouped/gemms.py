"""Grouped GEMMs of torch, ``aten._scaled_grouped_mm`` and ``_scaled_grouped_mm_v2``: one op multiplies the tokens of all experts.

    fprop  out[M, N]    = first[M, K]    @ second[E, K, N]     rows offs[e-1]:offs[e] by expert e
    dgrad  out[M, K]    = first[M, N]    @ second[E, N, K]     the same
    wgrad  out[E, N, K] = first[N, M]    @ second[M, K]        columns and rows offs[e-1]:offs[e] for expert e

Which rows are whose stands in ``offs``, on the device: nobody may wait for it. So nothing here is sliced by expert; rows are
weighted by a mask, and a loop over the experts, whose number is known, does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8debug.adapters.interception.listener import DECODERS, version_of
from fp8debug.kernels.reference import FORMAT_OF

_ROWWISE = 1  # torch.nn.functional.ScalingType.RowWise


class SeenGroupedGemm(NamedTuple):
    """One grouped GEMM that ran, decode factors a row of ``first`` and a column of ``second``, for wgrad of each expert."""

    first: Tensor
    second: Tensor
    scale_first: Tensor
    scale_second: Tensor
    offs: Tensor
    result: Tensor
    is_fast: bool
    is_fp8: bool = False  # to the scopes of a Linear it is none of its own
    versions: tuple[int | None, ...] = ()

    def held(self) -> SeenGroupedGemm:
        """Return it to be read later, with the versions of its tensors, as autograd counts writes to them."""
        return self._replace(versions=tuple(version_of(x) for x in (self.first, self.second, self.result)))

    @property
    def is_overwritten(self) -> bool:
        """True if the program has written to its operands or its result since it was held."""
        now = zip((self.first, self.second, self.result), self.versions, strict=False)
        return any(version is not None and x._version != version for x, version in now)


def _read(args: Mapping[str, Any], scales: Sequence[Tensor], result: Tensor) -> SeenGroupedGemm:
    first, second, offs = args["self"], args["mat2"], args.get("offs")
    if offs is None or first.dim() != 2 or args.get("bias") is not None or args.get("scale_result") is not None:
        raise ValueError(f"a grouped GEMM of {first.dim()}-D by {second.dim()}-D without offsets, or with a bias, is not read")
    experts = offs.shape[0]
    lines = first.shape[0] * (experts if second.dim() == 2 else 1), second.shape[-1] * experts
    if first.dtype not in FORMAT_OF or any(s.dtype is not torch.float32 for s in scales):
        raise ValueError(f"a grouped GEMM of {first.dtype} with scales in {scales[0].dtype} is not read")
    if (scales[0].numel(), scales[1].numel()) != lines:
        raise ValueError(f"scales {[list(s.shape) for s in scales]} of a grouped GEMM are not of rows")
    is_fast = bool(args.get("use_fast_accum"))
    scale_first, scale_second = (scale.detach().clone() for scale in scales)  # a program may use their memory for the next ones
    return SeenGroupedGemm(first.detach(), second.detach(), scale_first, scale_second, offs.clone(), result.detach(), is_fast)


def _scaled_grouped_mm(args: Mapping[str, Any], result: Any) -> SeenGroupedGemm:
    return _read(args, (args["scale_a"], args["scale_b"]), result)


def _scaled_grouped_mm_v2(args: Mapping[str, Any], result: Any) -> SeenGroupedGemm:
    kinds = [list(args[f"recipe_{end}"]) for end in "ab"]
    if kinds != [[_ROWWISE], [_ROWWISE]] or any(args["swizzle_a"]) or any(args["swizzle_b"]) or args.get("contraction_dim"):
        raise ValueError(f"scaling types {kinds} of _scaled_grouped_mm_v2 are not read")
    return _read(args, (args["scale_a"][0], args["scale_b"][0]), result)


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

"""Linears over sharded tensors (DTensor): the GEMMs that run on a rank, and which piece of the whole each of their tensors is.

On every dimension of the weight's mesh the weight decides how the three GEMMs are split:

    weight          input           output           grad_input        grad_weight
    Shard(0)        Replicate       Shard(last)      sum of the ranks  Shard(0)          (column-wise)
    Shard(1)        Shard(last)     sum of the ranks Shard(last)       Shard(1)          (row-wise)
    Replicate       Shard(rows)     Shard(rows)      Shard(rows)       sum of the ranks
    Replicate       Replicate       Replicate        Replicate         Replicate
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8debug.types import TensorRole


class TensorShard(NamedTuple):
    """Part of the logical tensor that a rank holds.

    Attributes:
        replicated: other ranks may hold the same piece.
        shard: which piece; ranks with the same number hold copies of one.
    """

    replicated: bool
    shard: int


ShardLayout = Mapping[TensorRole, TensorShard]


class Sharded(NamedTuple):
    """One rank's part of a Linear's call.

    Attributes:
        x: input as this rank multiplies it.
        weight: weight as this rank multiplies it.
        join: makes the DTensor of all ranks from this rank's output.
        layout: which piece each tensor of the three GEMMs is.
    """

    x: Tensor
    weight: Tensor
    join: Callable[[Tensor], Tensor]
    layout: ShardLayout


def is_sharded(tensor: Any) -> bool:
    """Return whether it is a DTensor; nothing is imported for that."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, outside autograd."""
    tensor = tensor.detach()
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def split(x: Any, weight: Any) -> Sharded:
    """Return a rank's part of ``x @ weight.T``; an input that lies differently is redistributed, as torch's Linear does it.

    Args:
        x: input ``[..., K]``, a DTensor, or a tensor that every rank of the mesh has.
        weight: DTensor ``[N, K]``.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = weight.device_mesh
    if not is_sharded(x):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    last = x.dim() - 1
    wanted = [_input_placement(at, w, last) for at, w in zip(x.placements, weight.placements, strict=True)]
    if list(x.placements) != wanted:
        x = x.redistribute(placements=wanted)
    output: list[Any] = []
    grad_input: list[Any] = []
    grad_weight: list[Any] = []
    for at, w in zip(wanted, weight.placements, strict=True):
        if w.is_shard(0):
            output.append(Shard(last))
            grad_input.append(Partial())
        else:
            output.append(Partial() if w.is_shard() else at)
            grad_input.append(at)
        grad_weight.append(Partial() if w.is_replicate() and at.is_shard() else w)

    def join(part: Tensor) -> Tensor:
        whole = (*x.shape[:-1], weight.shape[0])
        strides = tuple(prod(whole[d + 1 :]) for d in range(len(whole)))
        joined: Tensor = DTensor.from_local(part, mesh, output, run_check=False, shape=torch.Size(whole), stride=strides)
        return joined

    layout = layout_of(mesh, wanted, weight.placements)
    return Sharded(x.to_local(grad_placements=grad_input), weight.to_local(grad_placements=grad_weight), join, layout)


def fits(x: Any, weight: Any) -> bool:
    """Return whether an input lies as the weight's GEMM reads it, so that local parts are what is multiplied."""
    if not is_sharded(x) or x.device_mesh != weight.device_mesh:
        return False
    return all(at == _input_placement(at, w, x.dim() - 1) for at, w in zip(x.placements, weight.placements, strict=True))


def layout_of(mesh: Any, x: Any, weight: Any) -> ShardLayout:
    """Return which piece each tensor of the three GEMMs is on this rank.

    Args:
        mesh: of the weight.
        x: placements of the input as it is multiplied.
        weight: placements of the weight.
    """
    dims = range(mesh.ndim)
    rows = {d for d in dims if weight[d].is_shard(0)}  # split by columns of the output
    columns = {d for d in dims if weight[d].is_shard(1)}
    tokens = {d for d in dims if weight[d].is_replicate() and x[d].is_shard()}
    copied = set(dims) - rows - columns - tokens
    return {
        TensorRole.INPUT: _activation(mesh, rows | copied),
        TensorRole.WEIGHT: TensorShard(True, _place(mesh, rows | columns)),
        TensorRole.OUTPUT: _activation(mesh, copied),
        TensorRole.GRAD_OUTPUT: _activation(mesh, columns | copied),
        TensorRole.GRAD_INPUT: _activation(mesh, copied),
        TensorRole.GRAD_WEIGHT: _activation(mesh, copied),
    }


def layout_by_marks(module: Any, weight: Any) -> ShardLayout | None:
    """Return which piece each tensor of a Linear is on this rank, by Megatron's marks; None without its tensor parallelism.

    Megatron and Transformer Engine split a weight by hand and mark it: ``tensor_model_parallel``, ``partition_dim``; an expert's
    has ``allreduce=False`` and may be split over another group.

    Args:
        module: what holds the weight; Transformer Engine's know their group.
        weight: its parameter.
    """
    rank, size, first = _tensor_group(module, is_expert=getattr(weight, "allreduce", True) is False)
    if size < 2:
        return None
    copies, own = TensorShard(True, first), TensorShard(False, 0)
    if not getattr(weight, "tensor_model_parallel", False):
        if getattr(weight, "sequence_parallel", False):
            return None  # a copy of the weight, and tokens of its own
        return {**dict.fromkeys(TensorRole, copies), TensorRole.WEIGHT: TensorShard(True, 0)}
    by_rows = weight.partition_dim == 0
    return {
        **dict.fromkeys(TensorRole, own),
        TensorRole.WEIGHT: TensorShard(True, rank),
        TensorRole.INPUT if by_rows else TensorRole.GRAD_OUTPUT: copies,
    }


def _tensor_group(module: Any, *, is_expert: bool) -> tuple[int, int, int]:
    """Return (rank in the group, its size, its first global rank) of tensor parallelism; a group of one where there is none."""
    group = getattr(module, "tp_group", None)
    if group is not None and getattr(module, "tp_size", 1) > 1:
        ranks = torch.distributed.get_process_group_ranks(group)
        return torch.distributed.get_rank(group), len(ranks), ranks[0]
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 0, 1, 0
    if is_expert:
        if not hasattr(state, "get_expert_tensor_parallel_group"):
            return 0, 1, 0
        group = state.get_expert_tensor_parallel_group()
        ranks = torch.distributed.get_process_group_ranks(group)
        return torch.distributed.get_rank(group), len(ranks), ranks[0]
    names = ("rank", "world_size", "src_rank")
    rank, size, first = (getattr(state, f"get_tensor_model_parallel_{name}")() for name in names)
    return rank, size, first


def _input_placement(x: Any, weight: Any, last: int) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if weight.is_shard(0):
        return Replicate()
    if weight.is_shard(1):
        return Shard(last)
    return x if x.is_shard() and x.dim != last else Replicate()


def _activation(mesh: Any, copied: set[int]) -> TensorShard:
    """Ranks along the copied dimensions hold the same; the lowest of them names the piece, whatever else the job is split by."""
    copied = {d for d in copied if mesh.size(d) > 1}
    if not copied:
        return TensorShard(False, 0)
    at = mesh.get_coordinate()
    ranks = mesh.mesh[tuple(slice(None) if d in copied else at[d] for d in range(mesh.ndim))]
    return TensorShard(True, int(ranks.min()))


def _place(mesh: Any, split_by: set[int]) -> int:
    """Return the number of a rank along the dimensions that split a weight."""
    at, number = mesh.get_coordinate(), 0
    for d in sorted(split_by):
        number = number * mesh.size(d) + at[d]
    return number


def describe_mesh(parameters: Iterable[Any]) -> dict[str, Any]:
    """Return the names, sizes and coordinate of this rank on the largest mesh that a parameter lies on; empty without one."""
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters if is_sharded(p)}
    mesh = max(meshes.values(), key=lambda one: (one.ndim, one.size()), default=None)
    if mesh is not None:
        names = mesh.mesh_dim_names or [f"dim{d}" for d in range(mesh.ndim)]
        return {"dims": list(names), "shape": list(mesh.shape), "coordinate": list(mesh.get_coordinate() or ())}
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    dims = {"dp": "data", "pp": "pipeline_model", "tp": "tensor_model"}
    shape = [getattr(state, f"get_{dim}_parallel_world_size")() for dim in dims.values()]
    return {
        "dims": list(dims),
        "shape": shape,
        "coordinate": [getattr(state, f"get_{dim}_parallel_rank")() for dim in dims.values()],
    }


def is_first_replica(mesh: Mapping[str, Any], rank: int) -> bool:
    """Return whether a rank belongs to the first of the copies of the model that train side by side on different data.

    Args:
        mesh: what :func:`describe_mesh` returned; without one, or where its dimensions have no names of data parallelism,
            the first rank is the replica.
        rank: global rank.
    """
    dims = list(zip(mesh.get("dims", ()), mesh.get("coordinate", ()), strict=True))
    if not any(_splits_data(name) for name, _ in dims):
        return rank == 0 if not dims else all(at == 0 for _, at in dims)
    return all(at == 0 for name, at in dims if _splits_data(name))


def place_in_replica(mesh: Mapping[str, Any]) -> tuple[int, int]:
    """Return a rank's number among those of its copy of the model, and how many they are; ``(0, 1)`` where nobody says."""
    dims = list(zip(mesh.get("dims", ()), mesh.get("shape", ()), mesh.get("coordinate", ()), strict=True))
    number, size = 0, 1
    if any(_splits_data(name) for name, _, _ in dims):
        for name, extent, at in dims:
            if not _splits_data(name):
                number, size = number * extent + at, size * extent
    return number, size


def _splits_data(name: str) -> bool:
    return any(word in name.lower() for word in ("dp", "data", "replicate", "shard", "batch", "cp"))

"""High-precision tensor behind a parameter that a library keeps in FP8 or FP4, or wraps: what its codes are the cast of."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from fp8debug.observer.optimizer_hooks import after_any_optimizer
from fp8debug.observer.sharding import is_sharded, local_of

#: Optimizers that have stepped; one holds its master weights from its first step on.
_STEPPED: WeakSet[torch.optim.Optimizer] = WeakSet()
_FOLLOWS: list[Any] = []
#: Word in the name of an optimizer's state that is the parameter in high precision: ``master_param`` of Transformer Engine's and
#: apex's FusedAdam.
_MASTER = "master"


def follow_optimizers() -> None:
    """Note the optimizers that step from now on, without a reference that keeps one."""
    if not _FOLLOWS:
        _FOLLOWS.append(after_any_optimizer(lambda optimizer, args, kwargs: _STEPPED.add(optimizer)))


def master_weight(parameter: Tensor) -> Tensor | None:
    """Return what a parameter was quantized from, or None where it is not to be found.

    It is, of a wrapper that is cast where it is gathered (torchao's FP8 all-gather), the tensor inside; else Megatron's
    ``main_param``; else the master weight in the state of an optimizer that has stepped. A shard of it is none.

    Args:
        parameter: ``[N, K]``, as the module holds it.

    Returns:
        a tensor of its shape in a dtype of 16 bits or more, which the optimizer writes to; its values are the parameter's until
        the next step.
    """
    held: list[Any] = [getattr(parameter, "_tensor", None), getattr(parameter, "main_param", None)]
    for optimizer in _STEPPED:
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            held += [value for name, value in state.items() if _MASTER in str(name)] if isinstance(state, dict) else []
    return next((tensor.detach() for tensor in held if _stands_for(tensor, parameter)), None)


class WeightShard(NamedTuple):
    """Rows of a weight that this rank has in high precision; the whole is gathered in FP8 (torchao under FSDP2).

    Attributes:
        values: ``[rows, K]``, which the optimizer writes to.
        first: number of the first of them in the weight.
        place: number of the shard; replicas of one have the same.
    """

    values: Tensor
    first: int
    place: int


def shard_of(parameter: Any) -> WeightShard | None:
    """Return this rank's rows of a sharded parameter; None of one that is not split by its rows over one mesh dimension.

    Args:
        parameter: ``[N, K]``, as FSDP2's module holds it between two passes.
    """
    if not is_sharded(parameter):
        return None
    split_by = [d for d, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    at = parameter.device_mesh.get_coordinate()
    if len(split_by) != 1 or type(parameter.placements[split_by[0]]).__name__ != "Shard" or at is None:
        return None
    if not parameter.placements[split_by[0]].is_shard(0):
        return None
    local = local_of(parameter)
    values = getattr(local, "_tensor", local)
    place = at[split_by[0]]
    rows = -(-parameter.shape[0] // parameter.device_mesh.size(split_by[0]))
    is_plain = type(values) is Tensor and values.is_floating_point() and values.element_size() > 1
    return WeightShard(values.detach(), min(place * rows, parameter.shape[0]), place) if is_plain else None


def _stands_for(tensor: Any, parameter: Tensor) -> bool:
    is_plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
    return is_plain and tensor.is_floating_point() and tensor.element_size() > 1 and tensor.shape == parameter.shape

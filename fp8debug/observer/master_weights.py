"""High-precision tensor behind a parameter that a library keeps in FP8 or FP4, or wraps: what its codes are the cast of."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fp8debug.observer.optimizer_hooks import after_any_optimizer

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


def _stands_for(tensor: Any, parameter: Tensor) -> bool:
    is_plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
    return is_plain and tensor.is_floating_point() and tensor.element_size() > 1 and tensor.shape == parameter.shape

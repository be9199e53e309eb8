"""Call functions before and after every optimizer's step; they may come and go while torch goes through its own hooks.

torch iterates over its hooks without a copy: to register or remove one from within another raises "OrderedDict mutated during
iteration" in the program's ``optimizer.step()``. torch therefore has one hook of ours before a step and one after it, which stay
registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8debug.kernels.torch_state import outside_of_graphs

#: Called with the optimizer and the arguments of its step.
Hook = Callable[[torch.optim.Optimizer, Any, Any], None]

_BEFORE: dict[object, Hook] = {}
_AFTER: dict[object, Hook] = {}
_REGISTERED: list[Any] = []  # torch's handles, once there are any
_UNDER_WAY: WeakSet[torch.optim.Optimizer] = WeakSet()
_COUNT = [0]


def before_any_optimizer(hook: Hook) -> Callable[[], None]:
    """Call a function before each step of each ``torch.optim.Optimizer``; as :func:`after_any_optimizer`."""
    return _add(_BEFORE, hook)


def after_any_optimizer(hook: Hook) -> Callable[[], None]:
    """Call a function after each step of each ``torch.optim.Optimizer``, from the next step on.

    Compiled steps are left alone.

    Args:
        hook: called in the order of registration; its exceptions reach the program.

    Returns:
        A function that ends the calls, also for the step under way; calling it again does nothing.
    """
    return _add(_AFTER, hook)


def optimizers_under_way() -> list[torch.optim.Optimizer]:
    """Return the optimizers whose step has begun and not ended: what runs now is the closure of one, as of LBFGS.

    Steps are seen from the first hook on; one that an exception ended counts until the same optimizer's next step.
    """
    return list(_UNDER_WAY)


def num_optimizer_steps() -> int:
    """Return how many steps of any optimizer have ended since the first hook was added."""
    return _COUNT[0]


def _add(hooks: dict[object, Hook], hook: Hook) -> Callable[[], None]:
    key = object()
    hooks[key] = hook
    if not _REGISTERED:
        _REGISTERED.append(register_optimizer_step_pre_hook(_before_step))
        _REGISTERED.append(register_optimizer_step_post_hook(_after_step))

    def end() -> None:
        hooks.pop(key, None)

    return end


@outside_of_graphs
def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    _UNDER_WAY.add(optimizer)
    _call(_BEFORE, optimizer, args, kwargs)


@outside_of_graphs
def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    _UNDER_WAY.discard(optimizer)
    _COUNT[0] += 1
    _call(_AFTER, optimizer, args, kwargs)


def _call(hooks: dict[object, Hook], optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for key, hook in list(hooks.items()):
        if key in hooks:
            hook(optimizer, args, kwargs)

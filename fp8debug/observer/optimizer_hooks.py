"""Call functions after every optimizer's step; they may come and go while torch goes through its own hooks.

torch iterates over its hooks without a copy: to register or remove one from within another raises "OrderedDict mutated during
iteration" in the program's ``optimizer.step()``. torch therefore has one hook of ours, which stays registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

#: Called with the optimizer and the arguments of its step.
Hook = Callable[[torch.optim.Optimizer, Any, Any], None]

_HOOKS: dict[object, Hook] = {}
_REGISTERED: list[Any] = []  # torch's handle, once there is one


def after_any_optimizer(hook: Hook) -> Callable[[], None]:
    """Call a function after each step of each ``torch.optim.Optimizer``, from the next step on.

    Compiled steps are left alone.

    Args:
        hook: called in the order of registration; its exceptions reach the program.

    Returns:
        A function that ends the calls, also for the step under way; calling it again does nothing.
    """
    key = object()
    _HOOKS[key] = hook
    if not _REGISTERED:
        _REGISTERED.append(register_optimizer_step_post_hook(_after_step))

    def end() -> None:
        _HOOKS.pop(key, None)

    return end


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling():
        return
    for key, hook in list(_HOOKS.items()):
        if key in _HOOKS:
            hook(optimizer, args, kwargs)

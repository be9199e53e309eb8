"""Autograd nodes, whatever a program set on them.

The node of a ``torch.autograd.Function`` is the ``ctx`` of its forward, on which programs keep what they like: a ``ctx.name``
hides the method ``name``. So methods are called by the node's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def name_of(node: Any) -> str:
    """Return a node's name, such as ``AddmmBackward0``."""
    name: str = type(node).name(node)
    return name


def sequence_number_of(node: Any) -> int:
    """Return the number of a node in the order in which its thread made them."""
    number: int = type(node)._sequence_nr(node)
    return number


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf whose gradient a node accumulates; None if it does something else."""
    return None if isinstance(node, torch._C._FunctionBase) else getattr(node, "variable", None)


def add_prehook(node: Any, hook: Callable[..., Any]) -> Any:
    """Call a hook with grad_outputs before a node runs; return the handle that removes it."""
    return type(node).register_prehook(node, hook)


def add_hook(node: Any, hook: Callable[..., Any]) -> Any:
    """Call a hook with grad_inputs and grad_outputs after a node ran; return the handle that removes it."""
    return type(node).register_hook(node, hook)

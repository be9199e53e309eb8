"""How kernels are started at little cost to the host: Triton's own way of choosing a compiled kernel takes tens of microseconds.

``launch`` chooses by what Triton specializes on, and hands the arguments to what Triton compiled for the first such call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.kernels.triton_common import INTERPRETED

_COMPILED: dict[Any, Any] = {}
_INT32_MAX = 2**31 - 1


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...], **options: Any) -> Any:
    """Start a kernel on the current device and stream.

    Args:
        kernel: a function under ``triton.jit``, none of whose parameters opts out of specialization.
        grid: programs.
        arguments: what is known at run time: tensors, int, float.
        constants: the ``constexpr`` arguments, which follow them.
        options: ``num_warps`` and the like.

    Returns:
        the compiled kernel, for all calls with the same sizes and alignments; None in the interpreter.
    """
    if INTERPRETED:
        kernel[grid](*arguments, *constants, **options)
        return None
    key = (kernel, torch.cuda.current_device(), *map(_kind, arguments), constants, *options.values())
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = _COMPILED[key] = kernel[grid](*arguments, *constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
    return compiled


def _kind(value: Any) -> Any:
    """Return what Triton specializes on: the type, alignment to 16, and whether an int is 1 or wider than 32 bits."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return 1 if value == 1 else (value % 16 == 0, -_INT32_MAX <= value <= _INT32_MAX)
    return type(value)


def eager(x: Tensor) -> bool:
    """Return whether an op on x may run at once: nothing traces, compiles or transforms the program."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )

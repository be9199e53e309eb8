"""Casts of an input that several Linears read, such as that of q, k and v: each is made once.

Of the input that was read last alone, so that nothing is held which a training without this would have let go of long before.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from fp8debug.kernels.torch_state import foreign_mode_active, is_capturing
from fp8debug.recipes import Cast
from fp8debug.types import Quantized

#: The quantized input by its cast, whether the GEMM that reads it contracts rows, and the dtype that it was cast from.
CastCache = dict[tuple[Cast, bool, torch.dtype], Quantized]


class _Read(NamedTuple):
    """An input that was read: which, in what state and on which stream, and what was made of it."""

    tensor: ref[Tensor]
    state: tuple[int, ...]
    made: CastCache


_last: _Read | None = None


def cached_casts(x: Tensor) -> CastCache | None:
    """Return what was made of an input by now, to be added to, as long as it is the same tensor, unchanged.

    Autograd has to count who writes to it, so that it is a result of an op whose gradient is wanted: what autograd does not see,
    such as a replayed graph, would between two Linears spoil the gradients of the first in BF16 too. A tensor that is handed
    out again, with other numbers, is the result of another op.

    Args:
        x: as a module's ``forward`` got it.

    Returns:
        None where nobody could tell whether it changes, where a CUDA graph captures what runs now, and where a mode that is not
        ours counts the ops.
    """
    global _last
    if type(x) is not Tensor or x.grad_fn is None or not torch.is_grad_enabled():
        return None
    if foreign_mode_active() or is_capturing() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
    state, last = (x._version, x.grad_fn._sequence_nr(), x.data_ptr(), stream), _last
    if last is not None and last.tensor() is x and last.state == state:
        return last.made
    found = _last = _Read(ref(x, _end), state, {})
    return found.made


def clear() -> None:
    """Let go of what was made, when the forward pass is over."""
    global _last
    _last = None


def _end(tensor: ref[Tensor]) -> None:
    """Let go of what was made of a tensor that nobody has any more."""
    last = _last
    if last is not None and last.tensor is tensor:
        clear()

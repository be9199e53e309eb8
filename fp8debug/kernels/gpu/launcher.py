"""Launching kernels at little cost to the host: Triton's own way of choosing a compiled kernel takes tens of microseconds.

``launch`` chooses by what Triton specializes on, and hands the arguments to what Triton compiled for the first such call. A
``Kernel`` belongs to one plan, whose sizes and alignments never change: it takes addresses in place of tensors, which spares
Triton's launcher a question to the driver for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor, nn

from fp8debug.interruptions import is_ours
from fp8debug.kernels.gpu.device import INTERPRETED

P = TypeVar("P")
_INT32_MAX = 2**31 - 1
#: Plans of one kind that are kept: shapes times casts of a model.
MAX_PLANS = 4096
#: Releases whose compiled kernels are started as :meth:`Kernel.__call__` does it; others go through Triton's public way.
_KNOWN = ("3.4", "3.5", "3.6", "3.7")
#: Of these, those whose launcher in C takes what its wrapper in Python gives it for a kernel without scratch memory.
_DIRECT = ("3.6",)
#: The driver's numbers of what a function may ask for, and of the share of a multiprocessor's memory that is not its cache.
_MAX_DYNAMIC, _CARVEOUT = 8, 9


class PlanCache(dict[Hashable, P], Generic[P]):
    """Plans by all that they depend on; a program that makes more than ``MAX_PLANS`` starts over.

    A key may name an object, such as a cast, by its ``id()``, which costs less than its hash, if :meth:`keep` gets the object: as
    long as the plan is here, no other object has that id.
    """

    def __init__(self) -> None:
        super().__init__()
        self._named: dict[Hashable, tuple[object, ...]] = {}

    def keep(self, key: Hashable, plan: P, *named: object) -> P:
        """Keep a plan, with the objects that its key names by their ids, and return it."""
        if len(self) >= MAX_PLANS:
            self.clear()
            self._named.clear()
        if named:
            self._named[key] = named
        self[key] = plan
        return plan


_COMPILED: PlanCache[Any] = PlanCache()


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
    key = (id(kernel), torch.cuda.current_device(), *map(_kind, arguments), constants, *options.values())
    compiled = _COMPILED.get(key)
    if compiled is None:
        compiled = _COMPILED.keep(key, kernel[grid](*arguments, *constants, **options), kernel)
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


class _Pointer:
    """An address with the type of what lies there, which is all that Triton asks of a tensor."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


class Kernel:
    """A kernel with all that is known before its first launch; its other sizes and alignments are the same at every one.

    Args:
        kernel: a function under ``triton.jit``.
        device: index of the GPU, which is current at every launch; None in the interpreter.
        types: for each argument, the dtype of what an address points to, or None for a number.
        constants: the ``constexpr`` arguments, which follow.
        shared: bytes of shared memory that each program asks for, where that is more than Triton knows of, and the share of a
            multiprocessor's memory, in percent, that all of its programs' shared memory takes.
        options: ``num_warps`` and the like.
    """

    def __init__(
        self,
        kernel: Any,
        device: Any,
        types: tuple[Any, ...],
        constants: tuple[Any, ...],
        *,
        shared: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        self._kernel, self._device, self._types, self._constants, self._options = kernel, device, types, constants, options
        self._shared = shared
        self._run: Any = None
        self._head: tuple[Any, ...] = ()

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Start it on the current stream; arguments are numbers, and of tensors what :func:`address` returns."""
        if self._run is None:
            self._first(grid, arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._run(*grid, stream, *self._head, *arguments, *self._constants)

    def _first(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        if INTERPRETED:
            self._kernel[grid](*arguments, *self._constants, **self._options)
            return
        typed = [a if t is None else _Pointer(t, a) for a, t in zip(arguments, self._types, strict=True)]
        if self._shared:
            share(self._kernel.warmup(*typed, *self._constants, grid=grid, **self._options), *self._shared)
        compiled = self._kernel[grid](*typed, *self._constants, **self._options)
        release, run = triton.__version__.rpartition(".")[0], compiled.run
        metadata = compiled.packed_metadata, None, None, None
        if release in _DIRECT and not (run.global_scratch_size or run.profile_scratch_size):
            self._head = compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, *metadata
            self._run = run.launch
        elif release in _KNOWN:
            self._head, self._run = (compiled.function, *metadata), run


@cache
def can_share() -> bool:
    """Return whether a kernel can be given more shared memory than this release of Triton knows of."""
    try:
        return triton.__version__.rpartition(".")[0] in _KNOWN and _driver() is not None
    except OSError as error:
        if not is_ours(error):
            raise
        return False


def share(compiled: Any, size: int, carveout: int) -> None:
    """Have all launches of a compiled kernel, of which there was none, ask for shared memory; see :class:`Kernel`.

    Triton would leave all of a multiprocessor's memory to be shared: loads on their way then wait for room in the cache.
    """
    compiled._init_handles()
    for attribute, value in ((_MAX_DYNAMIC, size), (_CARVEOUT, carveout)):
        status = _driver().cuFuncSetAttribute(ctypes.c_void_p(compiled.function), attribute, value)
        assert status == 0, (attribute, value, status)
    num_warps, num_ctas, _, *more = compiled.packed_metadata
    compiled.packed_metadata = num_warps, num_ctas, size, *more


@cache
def _driver() -> Any:
    """Return the driver's library, which torch has loaded."""
    return ctypes.CDLL("libcuda.so.1")


#: What a :class:`Kernel` takes for a tensor.
address: Callable[[Tensor], Any] = (lambda x: x) if INTERPRETED else Tensor.data_ptr


def eager(x: Tensor) -> bool:
    """Return whether an op on x may run at once: nothing traces, compiles or transforms the program."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )

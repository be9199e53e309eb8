# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Delayed scaling's next scale, and the ring of amaxes, in one launch of one warp; torch takes fourteen for the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8debug.kernels.gpu.device import INF, scale_of
from fp8debug.kernels.gpu.launcher import launch
from fp8debug.kernels.gpu.quantize.tiling import ROUNDINGS, is_e5m2
from fp8debug.recipes import Cast

#: Amaxes that are loaded at once.
CHUNK = 1024
#: A place that is none; those that are one are above it, and odd too.
NOWHERE = tl.constexpr(3)


@triton.jit
def history_kernel(
    amax_ptr, ring, before, after, known_at, put_at, eps, margin, LENGTH: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr, E5M2: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Write the scale_inv of a call, and its amax to the ring at ``put_at``.

    ``known_at``: where the amax lies that counts; NOWHERE: the call's own. ``WHOLE``: else the largest of the ring counts.
    Places are odd and above 1, ``_odd``: Triton would compile anew for a 1 and for multiples of 16.
    """
    amax = tl.load(amax_ptr)
    known = amax
    if known_at > NOWHERE:
        if WHOLE:
            known = tl.full([], 0.0, tl.float32)
            for start in range(0, LENGTH, CHUNK):
                slot = start + tl.arange(0, CHUNK)
                values = tl.load(ring + slot, slot < LENGTH, 0.0)
                known = tl.maximum(known, tl.max(tl.where(values == values, values, INF), axis=0))
        else:
            known = tl.load(ring + (known_at - NOWHERE) // 2 - 1)
    usable = (known > 0.0) & (known < INF)
    _, scale_inv, _ = scale_of(tl.where(usable, known, 1.0), eps, margin, E5M2, ROUNDING)
    tl.store(after, tl.where(usable, scale_inv, tl.load(before)))
    tl.debug_barrier()  # what is put may lie where something was read
    if put_at > NOWHERE:
        tl.store(ring + (put_at - NOWHERE) // 2 - 1, amax)


def next_scale_inv(cast: Cast, amax: Tensor, ring: Tensor, scale_inv: Tensor, num_calls: int, *, put: bool) -> Tensor:
    """Return the FP32 ``[]`` scale_inv of a call, bit for bit that of ``history.AmaxHistory``.

    Args:
        cast: a delayed cast.
        amax: of the call's tensor, FP32 ``[]``.
        ring: FP32 ``[history]``, on the same GPU.
        scale_inv: of the call before, FP32 ``[]``.
        num_calls: calls before this one.
        put: write the amax to the ring.
    """
    length = cast.history
    known_at = _odd((num_calls - 1) % length if num_calls else None)
    put_at = _odd(num_calls % length if put else None)
    found = torch.empty_like(scale_inv)
    arguments = amax, ring, scale_inv, found, known_at, put_at, float(cast.amax_eps), 2.0**-cast.margin
    chunk = min(CHUNK, triton.next_power_of_2(length))
    constants = length, chunk, cast.algo == "max", bool(is_e5m2(cast)), ROUNDINGS[cast.scale_rounding]
    launch(history_kernel, (1,), arguments, constants, num_warps=1)
    return found


def _odd(place: int | None) -> int:
    """Return a place as the kernel takes it."""
    nowhere = int(NOWHERE.value)
    return nowhere if place is None else nowhere + 2 * (place + 1)

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Delayed scaling's next scale, and its state after the call, in one launch of one warp; torch takes forty for the same."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8debug.kernels.gpu.device import INF, scale_of
from fp8debug.kernels.gpu.launcher import launch
from fp8debug.kernels.gpu.quantize.tiling import ROUNDINGS, is_e5m2
from fp8debug.recipes import Cast

#: Amaxes that are loaded at once.
CHUNK = 1024
#: What a call is. Odd and above 1: Triton would compile anew for a 1 and for multiples of 16.
USES = {"evaluate": 3, "train": 5, "recompute": 7}
EVALUATE, TRAIN, RECOMPUTE = (tl.constexpr(use) for use in USES.values())


@triton.jit
def history_kernel(
    amax_ptr, state, scale_ptr, use, eps, margin, LENGTH: tl.constexpr, RECENT: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr, E5M2: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Write the scale_inv of a call, and the state after it (``kernels/amax_history.py``).

    ``WHOLE``: the largest amax of the ring counts; else the last one.
    """
    amax = tl.load(amax_ptr)
    before = tl.load(state)
    calls = tl.load(state + 1).to(tl.int32)
    ring = state + 2
    if WHOLE:
        known = tl.full([], 0.0, tl.float32)
        for start in range(0, LENGTH, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            values = tl.load(ring + slot, slot < LENGTH, 0.0)
            known = tl.maximum(known, tl.max(tl.where(values == values, values, INF), axis=0))
    else:
        known = tl.load(ring + (calls + LENGTH - 1) % LENGTH)
    known = tl.where(calls > 0, known, amax)
    usable = (known > 0.0) & (known < INF)
    _, scale_inv, _ = scale_of(tl.where(usable, known, 1.0), eps, margin, E5M2, ROUNDING)
    scale_inv = tl.where(usable, scale_inv, before)

    tail = ring + LENGTH
    seen = tl.load(tail)
    recent = tl.load(tail + 1).to(tl.int32)
    place = tl.arange(0, RECENT)
    amaxes = tl.load(tail + 2 + place)
    scales = tl.load(tail + 2 + RECENT + place)
    age = (recent + 2 * RECENT - 1 - place) % RECENT
    best = tl.min(tl.where((amaxes == amax) & (age < recent), age, RECENT), axis=0)
    best = tl.where(best < RECENT, best, 0)
    again = tl.sum(tl.where(age == best, scales, 0.0), axis=0)
    is_again = (use == RECOMPUTE) & (seen > 0.0) & (recent > 0)
    tl.store(scale_ptr, tl.where(is_again, again, scale_inv))

    tl.debug_barrier()  # what is put may lie where something was read
    puts = (use != EVALUATE) & (is_again == 0)
    tl.store(state, scale_inv, puts)
    tl.store(state + 1, _counted(calls, LENGTH).to(tl.float32), puts)
    tl.store(ring + calls % LENGTH, amax, puts)
    tl.store(tail, tl.where(use == TRAIN, 1.0, seen), puts)
    tl.store(tail + 1, _counted(recent, RECENT).to(tl.float32), puts)
    tl.store(tail + 2 + recent % RECENT, amax, puts)
    tl.store(tail + 2 + RECENT + recent % RECENT, scale_inv, puts)


@triton.jit
def _counted(number, LENGTH: tl.constexpr):
    return tl.where(number + 1 < 2 * LENGTH, number + 1, LENGTH)


def next_scale_inv(cast: Cast, amax: Tensor, state: Tensor, use: str, num_recent: int) -> Tensor:
    """Return the FP32 ``[]`` scale_inv of a call, bit for bit that of ``ReferenceAmaxHistory``, whose state moves on.

    Args:
        cast: a delayed cast.
        amax: of the call's tensor, FP32 ``[]``.
        state: FP32 ``[4 + history + 2 * num_recent]``, on the same GPU.
        use: ``train``, ``evaluate`` or ``recompute``.
        num_recent: calls whose scales are kept for a recomputation.
    """
    found = state.new_empty(())
    arguments = amax, state, found, USES[use], float(cast.amax_eps), 2.0**-cast.margin
    chunk = min(CHUNK, triton.next_power_of_2(cast.history))
    constants = cast.history, num_recent, chunk, cast.algo == "max", bool(is_e5m2(cast)), ROUNDINGS[cast.scale_rounding]
    launch(history_kernel, (1,), arguments, constants, num_warps=1)
    return found

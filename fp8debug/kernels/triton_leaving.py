# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""What leaves the GPU at a step's end, written by kernels into memory of the host that the GPU sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def state_kernel(state, neutral, host, count, BLOCK: tl.constexpr):
    """``count`` words of a state go to the host, and become neutral again."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + at, tl.load(state + at, at < count), at < count)
    tl.store(state + at, tl.load(neutral + at, at < count), at < count)


@triton.jit
def number_kernel(value, host):
    """A number goes to the host as FP64."""
    tl.store(host, tl.load(value).to(tl.float64))

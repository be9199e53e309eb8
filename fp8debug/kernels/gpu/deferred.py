# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The second stages of many kernels' sums in one launch: program i joins the parts that item i names, in their order."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.describe.foreign_kernel import finish as finish_foreign
from fp8debug.kernels.gpu.device import float_of
from fp8debug.kernels.gpu.gemm.error_kernel import finish
from fp8debug.kernels.gpu.quantize.statistics import MAXIMA_AT, MINIMA_AT, NUM_COUNTS, reduce_cast

#: Integers of an item: address of the partials, address of the row of words, and of the cast: programs, elements, padding,
#: blocks, blocks counted by the tiles, scale rounding, and the bits of the format's max, of eps and of the margin.
OPERAND_ITEM = tl.constexpr(11)
#: Address of the parts, address of the row of words, programs, and which columns are used.
RESULT_ITEM = tl.constexpr(4)
#: The same, then whether the tensor is one block, and the bits of what the amax of a block lies below that eps lifted.
FOREIGN_ITEM = tl.constexpr(5)


@triton.jit
def operands_kernel(items, CHUNK: tl.constexpr):
    """Slots of a cast whose scales the tiles know alone, from partials ``[programs, 3, 24]``, to ``OPERAND`` of a row."""
    at = items + tl.program_id(0) * OPERAND_ITEM
    partials = tl.load(at).to(tl.pointer_type(tl.float64))
    words = tl.load(at + 1).to(tl.pointer_type(tl.int64))
    sums = words.to(tl.pointer_type(tl.float64)) + NUM_COUNTS
    reals = words.to(tl.pointer_type(tl.float32))
    top = float_of(tl.load(at + 8).to(tl.int32))
    eps = float_of(tl.load(at + 9).to(tl.int32))
    margin = float_of(tl.load(at + 10).to(tl.int32))
    reduce_cast(partials, words, sums, reals + MAXIMA_AT, reals + MINIMA_AT, tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), 0,
                margin, tl.load(at + 5), tl.load(at + 6), eps, top, tl.load(at + 7).to(tl.int32), margin, CHUNK)  # fmt: skip


@triton.jit
def results_kernel(items):
    """Slots of a result, of rows or of damage, from parts ``[programs, 24]``."""
    at = items + tl.program_id(0) * RESULT_ITEM
    parts = tl.load(at).to(tl.pointer_type(tl.float64))
    words = tl.load(at + 1).to(tl.pointer_type(tl.int64))
    finish(parts, words, tl.load(at + 2), tl.load(at + 3))


@triton.jit
def described_kernel(items):
    """Slots of an operand beside codes that are not ours, from parts ``[programs, 32]``, to ``OPERAND`` of a row."""
    at = items + tl.program_id(0) * FOREIGN_ITEM
    parts = tl.load(at).to(tl.pointer_type(tl.float64))
    words = tl.load(at + 1).to(tl.pointer_type(tl.int64))
    finish_foreign(parts, words, tl.load(at + 2), tl.load(at + 3), float_of(tl.load(at + 4).to(tl.int32)))

"""Statistics of a GEMM's result on the GPU, in two launches; importable only where Triton is.

The twin of ``reference.statistics`` for results, for the slots named in ``error_kernel``, which lie in a row of ``slot_rows``.
The rows are filled by the next ``scratch.flush``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.gemm import error_kernel as tr
from fp8debug.kernels.gpu.gemm.sampled import Products, layout_of, products_of
from fp8debug.kernels.gpu.launcher import Kernel, PlanCache, address
from fp8debug.kernels.gpu.scratch import RESULTS, pool
from fp8debug.kernels.reference import Operand
from fp8debug.kernels.sampling import Sample, num_exact
from fp8debug.kernels.slot_rows import RowLayout, SlotGroup, Slots
from fp8debug.types import Gemm

#: Slots that :func:`compare` and :func:`damage` fill.
FILLED = frozenset((*tr.COUNTS, *tr.SUMS, *tr.MAXIMA, *tr.MINIMA, *tr.DAMAGE_COUNTS, *tr.DAMAGE_SUMS))
RESULT = RowLayout(
    SlotGroup(tr.COUNTS, torch.int64, 0),
    SlotGroup(tr.SUMS, torch.float64, 80),
    SlotGroup(tr.MAXIMA, torch.float32, 128, "max"),
    SlotGroup(tr.MINIMA, torch.float32, 140, "min"),
)
LINES = RowLayout(SlotGroup(tr.ROW_COUNTS, torch.int64, 48), SlotGroup(tr.ROW_MAXIMA, torch.float32, 136, "max"))
DAMAGE = RowLayout(SlotGroup(tr.DAMAGE_COUNTS, torch.int64, 0), SlotGroup(tr.DAMAGE_SUMS, torch.float64, 80))
#: Parts of a result's statistics: two programs a multiprocessor of an H200.
MAX_PARTS = 264
#: Warps of a program.
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Found = Slots


class _ErrorPlan(NamedTuple):
    """A kernel for tensors of one shape, its programs, and the FP64 numbers of their parts."""

    kernel: Kernel
    grid: tuple[int, int, int]
    parts: int


class _Comparison(NamedTuple):
    """Comparison of a result: its products, then the kernel that reads them; ``numbers`` are its sizes.

    Attributes:
        error: shape and dtype of actual minus shadow.
        parts: FP64 numbers that the kernel leaves of a pair.
        rest: what the second stage is told of them.
    """

    products: Products
    kernel: Kernel
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    error: tuple[tuple[int, int], torch.dtype]
    parts: int
    rest: tuple[int, int]


_PLANS: PlanCache[_ErrorPlan] = PlanCache()
_COMPARISONS: PlanCache[_Comparison | None] = PlanCache()


def compare(
    which: Gemm,
    high: tuple[Tensor, Tensor],
    operands: tuple[Operand, Operand],
    actual: Tensor | None,
    sample: Sample,
    *,
    bias: Tensor | None = None,
    keep: bool = False,
    tell: bool = False,
) -> tuple[list[Found], Tensor | None, tuple[Tensor, Tensor] | None] | None:
    """Describe a result against the shadow and the exact GEMM.

    Args:
        which: the GEMM.
        high: its operands before the cast; of wgrad's input the sampled columns alone.
        operands: its operands as it read them.
        actual: the result, whole; None where the exact GEMM stands for it.
        sample: what of the result is compared.
        bias: contiguous, one number a column, which is in the actual result and is taken off what is compared of it.
        keep: return actual minus shadow too, for :func:`damage`; of wgrad only for the share.
        tell: return the products too, for metrics that no kernel knows.

    Returns:
        slots against the shadow and, where there is an actual result, against exact; and actual minus shadow, of the rows that
        exact has in their whole width, 0 where a side is not finite, in BF16 if actual is and has no bias (exact but for results
        far from their shadow), else in FP32; and the shadow, rounded to BF16, and the exact GEMM of the sample, in FP32 and laid
        out as the result. None where no kernel takes the operands.
    """
    result = () if actual is None else (actual.stride(), actual.dtype, actual.data_ptr() & 15)
    if bias is not None:
        result = *result, bias.dtype, bias.data_ptr() & 15
    key = which, keep, result, layout_of(high, operands, sample)
    plan = _COMPARISONS.get(key)
    if plan is None:
        if key not in _COMPARISONS:
            plan = _COMPARISONS.keep(key, _comparison(which, high, operands, actual, sample, bias, keep))
        if plan is None:
            return None
    products = plan.products(which, high, operands, sample)
    error = products.new_empty(plan.error[0], dtype=plan.error[1]) if keep else None
    parts, rows = pool(products.device).defer(RESULTS, plan.parts, plan.rest, 1 if actual is None else 2)
    near = address(products)
    plan.kernel(
        plan.grid, near if actual is None else address(actual), near if sample.lines is None else address(sample.lines), near,
        near if error is None else address(error), near if bias is None else address(bias), parts, sample.shift or 0,
        *plan.numbers,
    )  # fmt: skip
    return [{RESULT: row} for row in rows], error, plan.products.joined(products, turned=which is Gemm.WGRAD) if tell else None


def _comparison(
    which: Gemm,
    high: tuple[Tensor, Tensor],
    operands: tuple[Operand, Operand],
    actual: Tensor | None,
    sample: Sample,
    bias: Tensor | None,
    keep: bool,
) -> _Comparison | None:
    turned = which is Gemm.WGRAD
    samples = high[turned].shape[int(turned)] if sample.lines is None else sample.lines.numel()
    few = samples if actual is None or sample.lines is None else num_exact(samples)
    far = high[1 - int(turned)].shape[int(which is not Gemm.FPROP)]
    wide = keep and not turned and sample.is_share(far)
    assert actual is not None or not (wide or bias is not None)
    products = products_of(which, high, operands, sample, few, wide=wide)
    if products is None:
        return None
    shadow, exact = (products.shadow, products.shared), (products.exact, products.shared)
    if turned:
        shadow, exact = shadow[::-1], exact[::-1]
    rows, columns = shadow
    lanes = 256 if INTERPRETED else 1024
    across = max(4, min(lanes, 1 << max(columns - 1, 1).bit_length()))
    down = max(1, lanes // across)
    programs = max(1, min(-(-rows // down), 3 if INTERPRETED else MAX_PARTS))
    dtype = torch.float32 if actual is None else actual.dtype
    kept = torch.bfloat16 if dtype is torch.bfloat16 and bias is None else torch.float32
    types = (
        dtype, torch.float32 if sample.lines is None else torch.int64, torch.float32, kept if keep else torch.float32,
        torch.float32 if bias is None else bias.dtype, torch.float64, *[None] * 14,
    )  # fmt: skip
    constants = (
        actual is not None, sample.lines is not None, bias is not None, sample.is_share(products.far), sample.size, turned, keep,
        wide, down, across,
    )  # fmt: skip
    registers = 64 if down == 1 else 128
    device = high[0].device
    kernel = Kernel(tr.compare_kernel, device.index, types, constants, num_warps=WARPS, maxnreg=registers)
    strides = (products.stride_few, products.stride_shared)
    numbers = (
        *products.size, *shadow, *exact, products.shadow * products.stride_few, products.wide, products.far,
        *(strides[::-1] if turned else strides), *((0, 0) if actual is None else actual.stride()),
    )  # fmt: skip
    grid = 1 if actual is None else 3 if wide else 2, programs, 1
    error, rest = ((products.exact, products.far) if wide else exact, kept), (programs, int(tr.WHOLE.value))
    return _Comparison(products, kernel, grid, numbers, error, programs * tr.NUM_COLUMNS, rest)


def row_slots(x: Tensor, data: Tensor, scale_inv: Tensor, block: tuple[int, int], index: Tensor) -> Found:
    """Return the slots of ``metrics/rows.py`` of sampled rows of an operand.

    Args:
        x: ``[rows, columns]``, high precision.
        data: FP8 of that shape, laid out in any way.
        scale_inv: FP32, one for each block.
        block: shape of a block.
        index: int64 ``[samples]``, which rows.
    """
    key = (
        "rows", x.shape, x.stride(), data.stride(), scale_inv.stride(), x.dtype, data.dtype, block, index.numel(),
        x.data_ptr() & 15, data.data_ptr() & 15, scale_inv.data_ptr() & 15, index.data_ptr() & 15, x.device,
    )  # fmt: skip
    plan, samples = _PLANS.get(key), index.numel()
    if plan is None:
        types = x.dtype, torch.int64, torch.int8, torch.float32, torch.float64, *[None] * 9
        constants = data.dtype is torch.float8_e5m2, 64 if INTERPRETED else 1024
        kernel = Kernel(tr.rows_kernel, x.device.index, types, constants, num_warps=4)
        plan = _PLANS.keep(key, _ErrorPlan(kernel, (samples, 1, 1), samples * tr.NUM_COLUMNS))
    parts, (row,) = pool(x.device).defer(RESULTS, plan.parts, (samples, tr.ROWS.value))
    codes = data.view(torch.int8) if INTERPRETED else data.data_ptr()
    plan.kernel(
        plan.grid, address(x), address(index), codes, address(scale_inv), parts, x.shape[1], *x.stride(), *data.stride(),
        *scale_inv.stride(), *block,
    )  # fmt: skip
    return {LINES: row}


def damage(error: Tensor, grad: Tensor, index: Tensor | None = None) -> Found:
    """Return the damage of sampled rows of fprop's output.

    Args:
        error: ``[rows, N]`` from :func:`compare`.
        grad: grad_output ``[M, N]``.
        index: int64, which rows of grad they are, and perhaps more that error has not; None is all.
    """
    key = (
        "damage", error.shape, grad.stride(), error.dtype, grad.dtype, error.data_ptr() & 15, grad.data_ptr() & 15,
        index is None or index.data_ptr() & 15, error.device,
    )  # fmt: skip
    plan, rows = _PLANS.get(key), error.shape[0]
    if plan is None:
        types = error.dtype, grad.dtype, error.dtype if index is None else torch.int64, torch.float64, None, None, None
        constants = index is not None, 64 if INTERPRETED else 1024
        kernel = Kernel(tr.damage_kernel, error.device.index, types, constants, num_warps=4)
        plan = _PLANS.keep(key, _ErrorPlan(kernel, (rows, 1, 1), rows * tr.NUM_COLUMNS))
    parts, (row,) = pool(error.device).defer(RESULTS, plan.parts, (rows, tr.SUMMED.value))
    plan.kernel(
        plan.grid, address(error), address(grad.detach() if INTERPRETED else grad),
        address(error if index is None else index), parts, error.shape[1], *grad.stride(),
    )  # fmt: skip
    return {DAMAGE: row}

"""The kernels that the rest of the package calls: the Triton backend for tensors on a GPU, ``reference`` for all others.

Triton is loaded at the first tensor on a GPU, not before. Where the backend cannot take a tensor, a cast or a GEMM, the reference
does it by plain torch ops, far slower, and says so once a reason on stderr, naming the first site that met it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8debug.kernels import reference
from fp8debug.kernels.backend import gpu, why_no_kernels
from fp8debug.kernels.reference import Operand, dequantize, measure, operand_pair, short_gemm, statistics
from fp8debug.kernels.slot_rows import RowLayout, Slots, by_name
from fp8debug.metrics import Metric, Pair, Source
from fp8debug.metrics.base import uncovered
from fp8debug.metrics.histogram import Histogram
from fp8debug.recipes import Cast
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized

if TYPE_CHECKING:
    from fp8debug.kernels.gpu.describe.value_counts import ValueCounts
    from fp8debug.kernels.gpu.quantize.fast_plan import FastPlan
    from fp8debug.kernels.gpu.quantize.tile_plan import TilePlan
    from fp8debug.kernels.gpu.quantize.tiling import Statistics
    from fp8debug.kernels.gpu.quantize.two_way_plan import TwoWayPlan
    from fp8debug.kernels.gpu.step_end import Joiner

__all__ = [
    "CastWithSlots",
    "Operand",
    "Slots",
    "countable",
    "dequantize",
    "describe",
    "finite_amax",
    "gemm",
    "has_gemm_layout",
    "histogram",
    "measure",
    "new_joiner",
    "new_value_counts",
    "observe",
    "on_device",
    "operand_pair",
    "quantize",
    "quantize_observed",
    "quantize_pair",
    "statistics",
    "takes_kernels",
    "unfilled",
]

#: A quantized tensor with the slots of its cast, where they were asked for.
CastWithSlots = tuple[Quantized, Slots | None]
#: Where a tensor belongs, for warnings: (module, gemm, tensor), or as much of it as is known.
Where = Sequence[str]
_HERE = nullcontext()
#: Warnings that were given.
_said: set[str] = set()


def quantize(
    x: Tensor, cast: Cast, scale_inv: Tensor | None = None, *, contracts_rows: bool = False, where: Where = ()
) -> Quantized:
    """Quantize a tensor.

    Args:
        x: bf16, fp16, fp32 (fp64 is rounded to fp32) of any shape; blocks lie on the view ``[rows, last dimension]``.
        cast: how.
        scale_inv: FP32 ``[]`` decode factor to use in place of the tensor's own, for delayed scaling.
        contracts_rows: the GEMM that reads it contracts its rows; on a GPU the data are then stored transposed.
        where: the tensor's site, for a warning.

    Returns:
        data of x's shape in the FP8 dtype, scale_inv FP32 ``[block rows, block columns]``.

    Raises:
        UsageError: x is not a floating-point tensor, or cast no Cast.
    """
    is_valid = isinstance(x, Tensor) and isinstance(cast, Cast)
    if is_valid and (made := _quantize_low_bit(x, cast, scale_inv, False)) is not None:
        return made[0]
    if is_valid and x.is_cuda:
        if scale_inv is None and (plan := _plan(x, cast, contracts_rows, False)) is not None:
            with on_device(x):
                return _made(plan(x)[0])
        if not _takes(x, cast, scale_inv, where):
            return reference.quantize(x, cast, scale_inv)
        with on_device(x):
            return gpu().quantize(x, cast, scale_inv, layout=_layout(contracts_rows))[0]
    return reference.quantize(x, cast, scale_inv)


def quantizes_on_gpu(x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> bool:
    """Return whether :func:`quantize` has a kernel for the tensor, whose outputs have a layout of their own; x may be fake."""
    return x.is_cuda and _why_not(x, cast, scale_inv) is None


def quantize_observed(
    x: Tensor,
    cast: Cast,
    scale_inv: Tensor | None = None,
    *,
    contracts_rows: bool = False,
    where: Where = (),
    deferred: bool = False,
    value_counts: ValueCounts | None = None,
    casts: Collection[Cast] = (),
) -> tuple[Quantized, Slots | None]:
    """Quantize a tensor, the same to the last bit, and fill the slots of the cast in the same pass where a kernel can.

    Args:
        x: as for :func:`quantize`.
        cast: how.
        scale_inv: as for :func:`quantize`.
        contracts_rows: as for :func:`quantize`.
        where: as for :func:`quantize`.
        deferred: the slots may be filled as late as when they are joined to a table: many at once.
        value_counts: from :func:`new_value_counts`, which is to count the tensor in the same pass where a kernel can.
        casts: what will be wanted of the counts.

    Returns:
        the quantized tensor, and its slots without the histogram, or None where :func:`statistics` has to be asked for them.
    """
    if scale_inv is None and (plan := _plan(x, cast, contracts_rows, True)) is not None:
        with on_device(x):
            found = _counted(value_counts, x, casts, plan.counting, deferred)
            made, row = found or plan(x, deferred)
        assert row is not None  # statistics were asked for
        return _made(made), {gpu().OPERAND: row}
    if (low_bit := _quantize_low_bit(x, cast, scale_inv, True)) is not None:
        return low_bit
    if x.is_cuda and x.numel() and _takes(x, cast, scale_inv, where):
        with on_device(x):
            q, filled = gpu().quantize(x, cast, scale_inv, layout=_layout(contracts_rows), statistics=True)
            return q, None if filled is None else _packed(filled, 0)
    return reference.quantize(x, cast, scale_inv), None


def _quantize_low_bit(x: Tensor, cast: Cast, scale_inv: Tensor | None, statistics: bool) -> CastWithSlots | None:
    """Quantize by the kernels of casts that no FP8 unit has, laid out as by the reference; None where they do not take it."""
    if cast.is_plain or not x.numel() or not takes_kernels(x):
        return None
    if not gpu().eager(x) or not gpu().takes_low_bit(x, cast, scale_inv):
        return None
    with on_device(x):
        return gpu().quantize_low_bit(x, cast, scale_inv, statistics=statistics)


def quantize_pair(
    x: Tensor,
    across: Cast,
    down: Cast,
    *,
    observed: bool = False,
    value_counts: ValueCounts | None = None,
    casts: Collection[Cast] = (),
) -> tuple[CastWithSlots, CastWithSlots] | None:
    """Quantize a tensor as :func:`quantize` does it twice, to the last bit.

    Args:
        x: BF16 ``[rows, columns]``.
        across: how, for the GEMM that contracts the columns.
        down: how, for the one that contracts the rows; stored transposed.
        observed: the slots of both casts too, filled as late as when they are joined to a table.
        value_counts: from :func:`new_value_counts`, which is to count the tensor in the same pass.
        casts: what will be wanted of the counts.

    Returns:
        x for the first GEMM and for the second, or None where no kernel makes both at once.
    """
    takes = across.is_plain and down.is_plain and may_plan(x)
    plan = gpu().two_way_plan_of(x, across, down, observed) if takes else None
    if plan is None:
        return None
    with on_device(x):
        found = _counted(value_counts, x, casts, plan.counting, observed)
        (first, second), rows = found or plan(x, observed)
    if rows is None:
        return (Quantized(*first), None), (Quantized(*second), None)
    layout = gpu().OPERAND
    return (Quantized(*first), {layout: rows[0]}), (Quantized(*second), {layout: rows[1]})


def _counted(
    value_counts: ValueCounts | None, x: Tensor, casts: Collection[Cast], plan: FastPlan | TwoWayPlan | None, deferred: bool
) -> Any:
    """Quantize a tensor by a plan that counts its values too, where these are wanted and were not counted; else return None."""
    if not casts or value_counts is None or plan is None:
        return None
    return value_counts.count_alongside(x, casts, partial(plan, x, deferred))


def _made(tensors: tuple[Tensor, Tensor] | None) -> Quantized:
    assert tensors is not None  # a plan for a job with an output
    return Quantized(*tensors)


def _plan(x: Tensor, cast: Cast, contracts_rows: bool, statistics: bool) -> TilePlan | FastPlan | None:
    """Return how tensors like this one are quantized, where that is known by now; it makes (data, scale_inv), and slots."""
    return gpu().plan_of(x, cast, _layout(contracts_rows), statistics) if may_plan(x) and cast.is_plain else None


def may_plan(x: Tensor) -> bool:
    """Return whether a kernel may be started on x as a plan for tensors like it says."""
    return x.is_cuda and x.dim() == 2 and why_no_kernels() is None and gpu().eager(x)


def observe(
    source: Source, casts: Sequence[Cast], scale_invs: Sequence[Tensor | None], *, histogram: bool = False
) -> list[Slots]:
    """Return the slots of casts that are not running, one dictionary for each; the reference adds the histogram to all.

    Args:
        source: the tensor.
        casts: what it is described under.
        scale_invs: for each cast a given decode factor, as delayed scaling has, or None.
        histogram: the exponent histogram too, with the first cast.
    """
    x = source.x
    # One that is not taken here is looked at alone below, which says so where no other kernel takes it either.
    if x.is_cuda and x.numel() and all(_why_not(x, c, s) is None for c, s in zip(casts, scale_invs, strict=True)):
        with on_device(x):
            found = gpu().observe(x, casts, scale_invs, histogram=histogram)
            return [_packed(found, i) for i in range(len(casts))]
    return [
        _observe_one(source, cast, scale, histogram and i == 0)
        for i, (cast, scale) in enumerate(zip(casts, scale_invs, strict=True))
    ]


def _observe_one(source: Source, cast: Cast, scale_inv: Tensor | None, with_histogram: bool) -> Slots:
    """Return the slots of one cast that is not running, where no kernel takes all of a tensor's casts at once."""
    x = source.x
    made = _quantize_low_bit(x, cast, scale_inv, True)
    if made is not None:
        found = describe(source, cast, *made)
    elif x.is_cuda and x.numel() and _takes(x, cast, scale_inv):
        return observe(source, [cast], [scale_inv], histogram=with_histogram)[0]
    else:
        return by_name(statistics(operand_pair(source, cast, reference.quantize(x, cast, scale_inv))))
    return {**found, "log2_hist": histogram(source)} if with_histogram else found


def describe(source: Source, cast: Cast, q: Quantized, found: Slots | None = None) -> Slots:
    """Return the slots of an operand beside its FP8 twin, without the histogram.

    Args:
        source: the tensor.
        cast: the cast that made the codes, as far as their library tells.
        q: FP8 data and scale_inv, each laid out in any way.
        found: slots that were filled in the pass of the cast; None where the codes are not ours.
    """
    if found is None and source.x.numel() and cast.is_plain and takes_kernels(source.x):
        with on_device(source.x):
            found = gpu().describe(source, cast, q)
    if found is None:
        return by_name(statistics(operand_pair(source, cast, q), "log2_hist"))
    left = unfilled(found, source)
    if not left:
        return found
    return {**found, **by_name(statistics(operand_pair(source, cast, q), only=left))}


def takes_kernels(x: Tensor) -> bool:
    """Return whether our kernels run on the tensor's device."""
    return x.is_cuda and _has_kernels(x.device.index)


@cache
def _has_kernels(index: int) -> bool:
    return why_no_kernels() is None and _capability(index) >= (8, 9)


def countable(x: Tensor, casts: Iterable[Cast]) -> bool:
    """Return whether these casts can be worked out from counts of the tensor's values, by :func:`new_value_counts`."""
    return takes_kernels(x) and gpu().counts_suffice(x, casts)


def new_value_counts(device: torch.device) -> ValueCounts:
    """Return what counts tensors and works out casts of them, for one device."""
    return gpu().new_value_counts(device)


def new_joiner(state: Mapping[tuple[str, str], Tensor], columns: Mapping[str, int]) -> Joiner:
    """Return what joins rows of ``slot_rows`` to a table's state on a GPU (``kernels/gpu/step_end.py``)."""
    return gpu().new_joiner(state, columns)


def unfilled(slots: Slots, source: Source) -> list[Metric]:
    """Return the metrics of operands whose slots a kernel did not fill, such as one that a user registered."""
    (first, *others) = slots or (None,)
    if first is None:
        return []
    if isinstance(first, RowLayout) and not others:
        return uncovered(_covered(first), source.x.shape[1], operand=True)
    names: set[str] = {"log2_hist"}
    for key in slots:
        names.update((key,) if isinstance(key, str) else key.names if isinstance(key, RowLayout) else key)
    return uncovered(names, source.x.shape[1], operand=True)


@cache
def _covered(layout: RowLayout) -> frozenset[str]:
    return layout.names | {"log2_hist"}


def _packed(found: Statistics, cast: int) -> Slots:
    """Return one cast's statistics as they lie in memory: joining them to a table takes a launch a kind, not a slot."""
    counts, sums, maxima, minima = (group.names for group in gpu().OPERAND.groups)
    slots: Slots = {
        counts: found.counts[cast],
        sums: found.sums[cast],
        maxima: found.maxima[cast],
        minima: found.minima[cast],
    }
    return {**slots, "log2_hist": found.log2_hist} if found.log2_hist.numel() else slots


def histogram(source: Source) -> Tensor:
    """Return the exponent histogram of a tensor, int64 ``[64]``."""
    cast = Cast(granularity="1x128")
    if source.x.is_cuda and source.x.numel() and _takes(source.x, cast):
        counted = observe(source, [cast], [None], histogram=True)[0]["log2_hist"]
        assert isinstance(counted, Tensor)
        return counted
    return Histogram().partial(Pair(source=source, y=source.x))["log2_hist"]


def finite_amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of a tensor, FP32 ``[]``, 0 for an empty one."""
    if x.is_cuda and x.numel() and _why_not(x, Cast()) is None:
        with on_device(x):
            return gpu().finite_amax(x)
    return reference.finite_amax(x)


def gemm(
    which: Gemm,
    first: Operand,
    second: Operand,
    *,
    dtype: torch.dtype = torch.float32,
    accumulate: torch.dtype | None = None,
    fast_accum: bool = False,
    where: Where = (),
) -> Tensor:
    """One GEMM of a Linear (see ``types``) from quantized or high-precision operands; the FP8 tensor cores where they can.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        first: left operand.
        second: right operand.
        dtype: of the result.
        accumulate: dtype of products and sums, by the reference; None is that of the running GEMM, FP32 or the tensor core's.
        fast_accum: sums stay in the tensor core's short accumulator; by ``accumulator.short_gemm`` where there is none.
        where: FQN of the module, for a warning.

    Returns:
        output ``[M, N]``, grad_input ``[M, K]`` or grad_weight ``[N, K]``.
    """
    if accumulate is None and _first_tensor(first).is_cuda:
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            if first.dtype == second.dtype == dtype and dtype in (torch.bfloat16, torch.float16):
                return _matmul(which, first, second)
        else:
            if _are_plain(first, second) and not fast_accum and why_no_kernels() is None:
                assert isinstance(first, tuple) and isinstance(second, tuple)
                prepared = gpu().prepared(which, first, second, dtype)
                if prepared is not None:
                    with on_device(first[0].data):
                        return prepared(first[0], second[0])
            reason = _why_no_fp8_gemm(first, second, dtype)
            if reason is None:
                assert isinstance(first, tuple) and isinstance(second, tuple)  # else there is a reason
                with on_device(first[0].data):
                    backend = gpu().fastest(which, first, second, dtype, fast_accum)
                    product = gpu().gemm(which, first, second, dtype=dtype, backend=backend, fast_accum=fast_accum)
                    gpu().prepare(which, first, second, dtype, backend)
                    return product
            text = f"{which} of {_described(first)} by {_described(second)} runs in plain torch ops, slowly: {reason}"
            _say(text, where)
    if fast_accum:
        return short_gemm(which, first, second, dtype=dtype)
    return reference.gemm(which, first, second, dtype=dtype, accumulate=accumulate)


def has_gemm_layout(q: Quantized, contracts_rows: bool) -> bool:
    """Return whether the data are stored as a GEMM on a GPU reads them: contiguous where it contracts; a CPU reads any."""
    return not q.data.is_cuda or q.data.stride(0 if contracts_rows else -1) == 1


def _first_tensor(operand: Operand) -> Tensor:
    return operand if isinstance(operand, Tensor) else operand[0].data


def _matmul(which: Gemm, first: Tensor, second: Tensor) -> Tensor:
    """Return the GEMM of two 16-bit tensors, summed in FP32 by the tensor cores."""
    roles = OPERANDS[which]
    a = first.t() if (which, roles[0]) in CONTRACTS_ROWS else first
    return a @ (second if (which, roles[1]) in CONTRACTS_ROWS else second.t())


def _why_no_fp8_gemm(first: Operand, second: Operand, dtype: torch.dtype) -> str | None:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return "one operand is not quantized"
    if not _are_plain(first, second):
        return "it is emulated: no GEMM of ours has operands of this format, or scales of this kind"
    if first[0].data.element_size() > 1 or second[0].data.element_size() > 1:
        return f"the data are {first[0].data.dtype} and {second[0].data.dtype}, not FP8"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"no FP8 GEMM has a result in {dtype}"
    if _capability(first[0].data.device.index) < (9, 0):
        return "the GPU is older than Hopper"
    if why_no_kernels() is None and not gpu().takes_scales(first[1], second[1]):
        return "no FP8 GEMM has scales of this granularity"
    return why_no_kernels()


def _are_plain(first: Operand, second: Operand) -> bool:
    return isinstance(first, tuple) and isinstance(second, tuple) and first[1].is_plain and second[1].is_plain


def _described(operand: Operand) -> str:
    return str(operand.dtype).removeprefix("torch.") if isinstance(operand, Tensor) else f"({operand[1]})"


def _takes(x: Tensor, cast: Cast, scale_inv: Tensor | None = None, where: Where = ()) -> bool:
    """Return whether the kernels quantize this tensor; where not, say so once."""
    reason = _why_not(x, cast, scale_inv)
    if reason is not None:
        _say(f"{str(x.dtype).removeprefix('torch.')} to ({cast}) runs in plain torch ops, slowly: {reason}", where)
    return reason is None


def _why_not(x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> str | None:
    reason = why_no_kernels()
    if reason is None and _capability(x.device.index) < (8, 9):
        reason = "the GPU is older than Ada and has no FP8"
    if reason is None and not (cast.is_plain and gpu().takes_cast(x, cast, scale_inv)):
        reason = "no kernel takes it"
    return reason


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _say(text: str, where: Where = ()) -> None:
    """Print a line once in the life of the process, with the site that met it first."""
    if text not in _said:
        _said.add(text)
        print(f"fp8debug: {' '.join([*where, ''])}{text}", file=sys.stderr)


def _layout(contracts_rows: bool) -> str:
    return "columns" if contracts_rows else "rows"


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's GPU the current one: Triton launches there."""
    return _HERE if torch._C._cuda_getDevice() == x.device.index else torch.cuda.device(x.device)

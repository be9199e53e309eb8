"""Casts of FP4, FP6, fnuz, two levels of scale and stochastic rounding on the GPU, with the statistics in the same pass.

Twin of ``reference.quantize`` and ``reference.statistics``, equal bit for bit in data, scale_inv, counts and extremes, but for a
NaN's sign, which no GPU keeps; sums agree to rounding. Two launches make a tensor that no tile knows enough about, three with
statistics; nothing here reads a value back from the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8debug.formats import FORMATS, GRANULARITIES, OF_TORCH_DTYPE, SCALE_FORMATS, block_shape
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.launcher import launch
from fp8debug.kernels.gpu.low_bit import scales as ls
from fp8debug.kernels.gpu.low_bit.kernel import (
    COUNTS,
    MAXIMA,
    MINIMA,
    PARTS,
    SUMS,
    finish_low_bit_kernel,
    low_bit_kernel,
    totals_kernel,
)
from fp8debug.kernels.gpu.quantize import tile_cast as tc
from fp8debug.kernels.gpu.quantize.tiling import ACROSS, Job, cut, num_sms, scale_memory
from fp8debug.kernels.reference import as_cast_reads
from fp8debug.kernels.slot_rows import RowLayout, SlotGroup, Slots
from fp8debug.metrics import Source
from fp8debug.metrics.elements import Elements
from fp8debug.metrics.error import Error
from fp8debug.metrics.magnitude import Magnitude
from fp8debug.metrics.noise import Noise
from fp8debug.metrics.rounding import SATURATION_GUARD
from fp8debug.recipes import Cast
from fp8debug.types import Quantized

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Elements of a tile, the least columns of one, and threads for eight elements each: statistics need many registers.
_TILE, _COLUMNS, _THREAD = 2048, 128, 8
#: Programs for each multiprocessor without statistics and with them, whose registers of a thread are bounded.
_PROGRAMS_PER_SM, _REGISTERS = (8, 4), 128
#: How the kernel's results lie in its words, and how many there are.
_EXTREMES_AT = 8 * (len(COUNTS) + len(SUMS))
_LAYOUT = RowLayout(
    SlotGroup(COUNTS, torch.int64, 0),
    SlotGroup(SUMS, torch.float64, 8 * len(COUNTS)),
    SlotGroup(MAXIMA, torch.float32, _EXTREMES_AT, "max"),
    SlotGroup(MINIMA, torch.float32, _EXTREMES_AT + 4 * len(MAXIMA), "min"),
)
_WORDS = len(COUNTS) + len(SUMS) + (len(MAXIMA) + len(MINIMA)) // 2
#: Slots of the tensor itself and of its error, which a cast with a Hadamard transform does not see as its kernel does.
_UNTRANSFORMED = frozenset(slot.name for metric in (Elements, Magnitude, Error) for slot in metric.slots)
_OF_NOISE = frozenset(slot.name for slot in Noise.slots)
#: Bits of an amax's mantissa from which its exponent counts one more, by the rounding; see ``reference._AMAX_ROUNDINGS``.
_NEVER = 1 << 23


class Plan(NamedTuple):
    """All that a launch of the kernel needs to know of a cast: sizes of a tile and of a block, and constants."""

    tile: tuple[int, int]
    block: tuple[int, int]
    is_whole: bool
    facts: tuple[Any, ...]
    scale: tuple[Any, ...]
    warps: int


def supports(x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> bool:
    """Return whether the kernel takes this tensor and cast; else ``reference.quantize`` does."""
    rows, columns = GRANULARITIES[cast.granularity]
    is_whole = rows is None and columns is None
    if (rows is None or columns is None) and not is_whole:
        return False  # one scale to a row or a column
    if scale_inv is not None and not (isinstance(scale_inv, Tensor) and scale_inv.numel() == 1):
        return False  # which the reference explains
    return x.dtype in DTYPES and x.layout == torch.strided and not (is_whole and (cast.four_over_six or cast.hadamard))


@lru_cache(maxsize=1024)
def facts_of(name: str) -> tuple[Any, ...]:
    """Return a format as the kernel reads it (``elements``)."""
    fmt = FORMATS[name]
    codes = OF_TORCH_DTYPE[fmt.data_dtype]
    special = codes.nan_code if codes.inf_code is None else codes.inf_code
    assert special is not None
    nan = special if codes.is_unsigned_zero else (1 << (codes.bits - 1)) - 1
    limit = fmt.max * SATURATION_GUARD
    numbers = codes.mantissa_bits, codes.bias, nan, special, int(codes.is_unsigned_zero)
    return (fmt.mantissa_bits, fmt.bias, fmt.max, limit, fmt.min_normal, *numbers)


@lru_cache(maxsize=1024)
def plan_of(cast: Cast, given: bool) -> Plan:
    """Return how a cast is made, by its own scales or by a given one."""
    rows, columns = GRANULARITIES[cast.granularity]
    is_whole = rows is None or columns is None
    block = (16, 128) if rows is None or columns is None else (rows, columns)
    width = max(block[1], min(_COLUMNS, _TILE // block[0]))
    tile = max(block[0], _TILE // width), width
    fmt, stored = FORMATS[cast.format], SCALE_FORMATS[cast.scale_format]
    roundings = {
        "none": ls.ROUND_NONE.value,
        "pow2_ceil": ls.ROUND_UP.value,
        "pow2_floor": _NEVER,
        "pow2_amax_ceil": 1,
        "pow2_even": _NEVER - (1 << (22 - fmt.mantissa_bits)),
    }
    lines = {"none": ls.LINE_NONE.value, "tensor": ls.LINE_TENSOR.value, "row": cast.line}
    source = ls.FROM_SCALE_INV if given or cast.scaling == "static" else ls.FROM_AMAX if is_whole else ls.FROM_BLOCK
    kept = ls.STORED_FP32 if stored is None else ls.STORED_POWER if stored.scale_only else ls.STORED_E4M3
    scale = (
        source.value, roundings[cast.scale_rounding], kept.value, lines[cast.tensor_scale], int(cast.four_over_six),
        int(cast.scaling == "current"), fmt.emax,
    )  # fmt: skip
    warps = min(16, tile[0] * tile[1] // (32 * _THREAD))
    return Plan(tile, block if not is_whole else tile, is_whole, facts_of(cast.format), scale, warps)


def quantize(
    x: Tensor, cast: Cast, scale_inv: Tensor | None = None, *, statistics: bool = False
) -> tuple[Quantized, Slots | None]:
    """Quantize a tensor.

    Args:
        x: bf16, fp16 or fp32 of any shape; blocks lie on the view ``[rows, last dimension]``.
        cast: one that :func:`supports` takes.
        scale_inv: FP32 of one element, to use in place of the tensor's own.
        statistics: fill the slots of the cast in the same pass.

    Returns:
        what ``reference.quantize`` returns, and the slots without the histogram, or None. A cast with a Hadamard transform
        leaves out those of the tensor itself and of its error.
    """
    shape, device = x.shape, x.device
    source = Source(x)
    flat = as_cast_reads(source, cast).value if cast.hadamard else source.x
    flat = flat if flat.stride(1) == 1 or flat.shape[1] < 2 else flat.contiguous()
    rows, columns = flat.shape
    block = block_shape(cast.granularity, rows, columns)
    grid = -(-rows // block[0]), -(-columns // block[1])
    data = torch.empty(shape, dtype=getattr(torch, FORMATS[cast.format].data_dtype), device=device)
    made = torch.empty(grid, dtype=torch.float32, device=device)
    if not flat.numel():
        return Quantized(data, made.fill_(1.0)), {} if statistics else None
    plan = plan_of(cast, scale_inv is not None)
    (height, width), stride = plan.tile, flat.stride(0) if rows > 1 else columns
    tiles = -(-rows // height), -(-columns // width)
    num_tiles = tiles[0] * tiles[1]
    programs = min(num_tiles, num_sms(device) * _PROGRAMS_PER_SM[statistics])
    sizes = flat, stride, rows, columns, num_tiles, tiles[1]
    is_random = cast.rounding == "stochastic"
    given, key = _beforehand(sizes, plan, cast, scale_inv, programs, is_random)
    partials = torch.empty(programs * PARTS.value if statistics else 1, dtype=torch.float64, device=device)
    margin = 2.0**-cast.margin if cast.scaling == "delayed" else 1.0
    constants = (
        height, width, *plan.block, int(plan.is_whole), plan.facts, plan.scale, int(is_random), int(columns % 4 == 0),
        int(statistics),
    )  # fmt: skip
    launch(
        low_bit_kernel,
        (programs,),
        (*sizes, data.view(torch.int8), made, given, key, partials, float(cast.amax_eps), margin),
        constants,
        num_warps=plan.warps,
        enable_fp_fusion=False,
        maxnreg=_REGISTERS if statistics else None,
    )
    if not statistics:
        return Quantized(data, made), None
    words = torch.empty(_WORDS, dtype=torch.int64, device=device)
    launch(
        finish_low_bit_kernel,
        (1,),
        (partials, words, made, programs, flat.numel(), grid[0] * grid[1], float(cast.amax_eps)),
        (int(plan.is_whole), plan.facts, plan.scale, 16 if INTERPRETED else 64),
        num_warps=8,
    )
    return Quantized(data, made), _slots(words, cast)


def _beforehand(
    sizes: tuple[Any, ...], plan: Plan, cast: Cast, scale_inv: Tensor | None, programs: int, is_random: bool
) -> tuple[Tensor, Tensor]:
    """Return what the kernel reads of the tensor as a whole: its scale or amaxes, FP32, and the key of the random numbers."""
    flat = sizes[0]
    device = flat.device
    source, line = plan.scale[0], plan.scale[3]
    given = torch.empty(1, dtype=torch.float32, device=device)
    key = torch.empty(1, dtype=torch.int64, device=device)
    if scale_inv is not None:
        given = scale_inv.detach().to(device, torch.float32).reshape(1)
    elif source == ls.FROM_SCALE_INV.value:
        assert cast.scale_inv is not None
        given = torch.full((1,), cast.scale_inv, dtype=torch.float32, device=device)
    needs_amax = source == ls.FROM_AMAX.value or (source == ls.FROM_BLOCK.value and line == ls.LINE_TENSOR.value)
    if needs_amax or is_random:
        amaxes = torch.empty(programs, dtype=torch.float32, device=device)
        checksums = torch.empty(programs if is_random else 1, dtype=torch.int64, device=device)
        launch(
            totals_kernel, (programs,), (*sizes, amaxes, checksums), (*plan.tile, int(is_random)), num_warps=plan.warps
        )  # fmt: skip
        given = amaxes.amax().reshape(1) if needs_amax else given
        seed = cast.seed - (1 << 64) if cast.seed >> 63 else cast.seed
        key = checksums.sum().bitwise_xor(seed) if is_random else key
    if source == ls.FROM_BLOCK.value and line >= 0:
        kind, lines = (tc.KIND_ROWS, "rowwise") if line == ls.LINE_ROW.value else (tc.KIND_COLUMNS, "columnwise")
        given = scale_memory(Job(Cast(granularity=lines)), cut(flat, ACROSS, False, 0), kind.value)[0]
    return given, key


def _slots(words: Tensor, cast: Cast) -> Slots:
    """Return the kernel's results by the names of their slots."""
    left_out = (_UNTRANSFORMED if cast.hadamard else frozenset()) | (_OF_NOISE if cast.rounding != "stochastic" else frozenset())
    found: Slots = {}
    for group in _LAYOUT.groups:
        names, numbers = group.names, group.of(words)
        kept = [i for i, name in enumerate(names) if name not in left_out]
        for start, stop in _runs(tuple(kept)):
            found[names[start:stop]] = numbers[start:stop]
    return found


@lru_cache(maxsize=64)
def _runs(numbers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return runs of consecutive numbers, each from its first to the one after its last."""
    starts = [n for n in numbers if n - 1 not in numbers]
    return tuple((start, next(n for n in range(start, start + len(numbers) + 1) if n not in numbers)) for start in starts)

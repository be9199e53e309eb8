"""The specification of quantize, dequantize, scaled GEMM and measure, in plain torch; every other kernel is tested equal to it.

    a         = max(amax of the block's finite values, eps)
    scale     = max / a, the largest finite FP32 where that is Inf         (FP32)
    data      = round_to_format(clamp(x * scale, -max, max))                (nearest even)
    scale_inv = 1 / scale                                                   x ~= data * scale_inv

A block whose amax is 0 takes scale_inv = 1. NaN stays NaN; Inf stays Inf where the format has one (E5M2) and becomes NaN
where not (E4M3), so that it can never pass for a large finite value. FP4 and FP6 have no code for NaN either: their data are in
E4M3's dtype, which holds all of their values, and keep it.

Scales in two levels (NVFP4, arXiv 2509.25149, and Transformer Engine's ``custom_recipes``), m the format's max, s the scale
format's (448), t the tensor's amax, all in FP32:

    g         = s * m / t, the largest finite FP32 where that is Inf, 1 where t is 0 or there is no second level
    d         = round_to_scale_format(clamp(a * (g * (1 / m)), -s, s))
    scale_inv = d * (1 / g)
    data      = round_to_format(clamp(x * min(1 / scale_inv, largest finite), -m, m))

Stochastic rounding draws from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): a function of
a counter, the place of an element, and of a key, the cast's seed and a checksum of the tensor. So nothing has a state: the
global generators are neither read nor advanced, a recomputed tensor is rounded as it was before, eager and compiled code agree,
and two tensors that differ are rounded independently.

What a short accumulator makes of a GEMM, in plain torch: the specification of ``fast_accum``, and a fault for any device.

A tensor core of Hopper adds 32 FP8 products to its accumulator at a time: it aligns all of them to the largest exponent among
them and the accumulator, cuts off what lies below ``bits`` significant bits of that, and adds. So a product loses the more the
larger the sum has grown, and on operands of one sign the loss adds up (DeepSeek-V3, arXiv 2412.19437, section 3.3.2:
about 14 bits, hence sums that leave the tensor core every 128 elements).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS, OF_TORCH_DTYPE, SCALE_FORMATS, Format, block_shape
from fp8debug.metrics import METRICS, Metric, Pair, Source, derive
from fp8debug.metrics.base import blocked, spread
from fp8debug.recipes import HADAMARD, HADAMARD_SIGNS, Cast
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized

FLOAT32_MAX = torch.finfo(torch.float32).max
#: DeepSeek-V3 section 3.3.2: partial sums leave the tensor core every 128 elements of the contracted dimension.
PROMOTION = 128

#: Formats by the dtypes of torch that hold their codes, one to a byte.
FORMAT_OF: dict[torch.dtype, str] = {getattr(torch, f.torch_dtype): f.name for f in OF_TORCH_DTYPE.values() if not f.scale_only}

#: An operand of a GEMM: quantized with its cast, or high precision.
Operand = tuple[Quantized, Cast] | Tensor


def quantize(x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> Quantized:
    """Quantize a tensor.

    Args:
        x: bf16, fp16, fp32 (fp64 is rounded to fp32) of any shape; blocks lie on the view ``[rows, last dimension]``.
        cast: how.
        scale_inv: FP32 ``[]`` decode factor to use in place of the tensor's own, for delayed scaling.

    Returns:
        data of x's shape in the FP8 dtype, scale_inv FP32 ``[block rows, block columns]``.

    Raises:
        UsageError: x is not a floating-point tensor, or cast no Cast.
    """
    source = Source(_checked(x))
    _check_cast(cast)
    if scale_inv is not None and (not isinstance(scale_inv, Tensor) or scale_inv.numel() != 1):
        raise UsageError(f"scale_inv is a tensor with one number, got {scale_inv!r}")
    source = as_cast_reads(source, cast)
    rows, columns = source.value.shape
    block = block_shape(cast.granularity, rows, columns)
    if scale_inv is None and cast.scaling == "static":
        assert cast.scale_inv is not None
        scale_inv = source.value.new_full((), cast.scale_inv)
    if scale_inv is None:
        scale, inverse = block_scales(source, cast)
    else:
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        inverse = scale_inv.to(source.value.device, torch.float32).reshape(1, 1).expand(grid).contiguous()
        scale = inverse.reciprocal().clamp(max=FLOAT32_MAX)
    scaled = source.value * spread(scale, *block, rows, columns)
    inf = None if source.nonfinite is None else source.value.isinf()
    noise = uniform(source.value, cast.seed) if cast.rounding == "stochastic" else None
    return Quantized(round_to_format(scaled, FORMATS[cast.format], inf, noise).reshape(x.shape), inverse)


def as_cast_reads(source: Source, cast: Cast) -> Source:
    """Return the tensor that is cast: the transformed one where the cast has a Hadamard transform."""
    if not cast.hadamard:
        return source
    assert cast.line is not None
    return Source(hadamard(source.value, cast.line, cast.hadamard_signs))


#: Largest E4M3 scale of a block under ``four_over_six``, 1.5 times which E4M3 has (arXiv 2512.02010; Transformer Engine).
_FOUR_OVER_SIX_MAX = 256.0
#: Mantissa in [0.5, 1) from which an amax counts as the next power of two, by the rounding that takes its exponent: never
#: (OCP MX 1.0, section 6.3), when it is no power of two, and when it rounds up in the format's mantissa (torchao's EVEN).
_AMAX_ROUNDINGS: dict[str, Callable[[Format], float]] = {
    "pow2_floor": lambda fmt: 1.0,
    "pow2_amax_ceil": lambda fmt: 0.5 + 2.0**-24,
    "pow2_even": lambda fmt: 1 - 2.0 ** -(fmt.mantissa_bits + 2),
}


def block_amax(source: Source, cast: Cast) -> Tensor:
    """Return the largest finite magnitude of each block, FP32 ``[block rows, block columns]``; 0 for an empty grid."""
    magnitude = source.magnitude
    grid = blocked(magnitude, block_shape(cast.granularity, *magnitude.shape), 0.0)
    if not grid.numel():
        return magnitude.new_zeros(grid.shape[0], grid.shape[2])
    return grid.amax((1, 3))


def block_scales(source: Source, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return (scale, scale_inv) of each block under current scaling, FP32 ``[block rows, block columns]``.

    Args:
        source: as the cast reads it.
        cast: how.
    """
    amax = block_amax(source, cast)
    stored = SCALE_FORMATS[cast.scale_format]
    if stored is None or stored.scale_only:
        return scale_of(amax, cast)
    bound = _FOUR_OVER_SIX_MAX if cast.four_over_six else stored.max
    zero, fmt = amax == 0, FORMATS[cast.format]
    a = amax.clamp(min=cast.amax_eps)
    encode = _tensor_scale(amax, cast, bound * fmt.max)
    if not cast.four_over_six:
        # Not a / max * encode: Transformer Engine's kernels fold 1 / max into the tensor's scale.
        return _stored_scale(a * (encode * torch.full_like(encode, fmt.max).reciprocal()), encode, stored, zero)
    base = torch.div(a, torch.full_like(a, fmt.max)) * encode  # by a number, a GPU multiplies by its reciprocal
    six, four = (_stored_scale(base * factor, encode, stored, zero) for factor in (1.0, 1.5))
    take_four = _absolute_error(source, cast, four) < _absolute_error(source, cast, six)
    return torch.where(take_four, four[0], six[0]), torch.where(take_four, four[1], six[1])


def _tensor_scale(amax: Tensor, cast: Cast, largest: float) -> Tensor:
    """Return the second level as a factor on the data, FP32, broadcastable to the grid of blocks."""
    if cast.tensor_scale == "none" or not amax.numel():
        return amax.new_ones(1, 1)
    if cast.tensor_scale == "tensor":
        top = amax.amax().reshape(1, 1)
    else:
        assert cast.line is not None
        top = amax.amax(cast.line, keepdim=True)
    return (torch.full_like(top, largest) / top).clamp(max=FLOAT32_MAX).masked_fill(top == 0, 1.0)


def _stored_scale(decode: Tensor, encode: Tensor, stored: Format, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, scale_inv) of blocks whose decode factor is rounded to a scale format."""
    rounded = round_to_format(decode.clamp(max=FLOAT32_MAX), stored).float()
    inverse = (rounded * encode.reciprocal()).masked_fill(zero, 1.0)
    return inverse.reciprocal().clamp(max=FLOAT32_MAX), inverse


def _absolute_error(source: Source, cast: Cast, scales: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sum of absolute errors of each block under these scales, rounded to nearest; FP64 over the grid."""
    block, shape = block_shape(cast.granularity, *source.value.shape), source.value.shape
    scale, inverse = (spread(t, *block, *shape) for t in scales)
    y = round_to_format(source.value * scale, FORMATS[cast.format]).double() * inverse
    return blocked((y - source.x64).abs().nan_to_num(0.0, 0.0), block, 0.0).sum((1, 3))


def scale_of(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return (scale, scale_inv) in FP32 for blocks of that amax; powers of two come from exponent bits, not from log2."""
    fmt = FORMATS[cast.format]
    a = amax.clamp(min=cast.amax_eps)
    zero = amax == 0
    a = a.masked_fill(zero, 1.0)
    if cast.scale_rounding in _AMAX_ROUNDINGS:
        # Exact: a mantissa in [0.5, 1) that reaches the bound takes the next power of two.
        mantissa, exponent = a.frexp()
        bound = _AMAX_ROUNDINGS[cast.scale_rounding](fmt)
        exponent = exponent + (mantissa >= bound).to(exponent.dtype)
        scale = power_of_2((fmt.emax + 1 - exponent).clamp(max=127), a.dtype)
    else:
        # Not fmt.max / a: torch computes number / tensor as reciprocal times number, which rounds twice.
        scale = (torch.full_like(a, fmt.max) / a).clamp(max=FLOAT32_MAX)
        if cast.scale_rounding == "pow2_ceil":
            scale = power_of_2(scale.frexp().exponent - 1, a.dtype)
    if cast.scaling == "delayed" and cast.margin:
        scale = (scale * 2.0**-cast.margin).clamp(2.0**-127, FLOAT32_MAX)
    scale = scale.masked_fill(zero, 1.0)
    return scale, scale.reciprocal()


def power_of_2(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2 to the power of integers in a dtype; ``torch.ldexp`` computes it in torch's default dtype instead.

    Args:
        exponent: integers of any shape.
        dtype: of the result; a power beyond its range is 0 or Inf.
    """
    return torch.pow(2.0, exponent.to(dtype))


def round_to_format(scaled: Tensor, fmt: Format, inf: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
    """Round to nearest even or at random, after an explicit clamp: torch's cast of values beyond max changed between releases.

    Args:
        scaled: FP32; a finite x times its scale may be Inf here, and saturates like any other.
        fmt: format of the result.
        inf: bool, where x itself is infinite; None is nowhere.
        noise: FP32 in [0, 1): rounds away from 0 where the distance to the value below, in units of the spacing, exceeds it.

    Returns:
        values of the format in its ``data_dtype``.
    """
    dtype = getattr(torch, fmt.data_dtype)
    clamped = scaled.clamp(-fmt.max, fmt.max)
    data = (clamped if noise is None and fmt.bits == 8 else _on_grid(clamped, fmt, noise)).to(dtype)
    if inf is None:
        return data
    code = data.view(torch.uint8)
    own = OF_TORCH_DTYPE[fmt.data_dtype]
    special = own.nan_code if own.inf_code is None else own.inf_code
    assert special is not None
    if own.is_unsigned_zero:
        return code.masked_fill(inf, special).view(dtype)
    return torch.where(inf, (scaled.signbit().to(torch.uint8) << 7) | special, code).view(dtype)


def _on_grid(clamped: Tensor, fmt: Format, noise: Tensor | None) -> Tensor:
    """Round FP32 values within +-max to those of a format; NaN stays."""
    exponent = (clamped.frexp().exponent - 1).clamp(min=1 - fmt.bias) - fmt.mantissa_bits
    spacing = power_of_2(exponent, clamped.dtype)
    units = clamped / spacing
    if noise is None:
        return units.round() * spacing
    magnitude = units.abs()
    below = magnitude.floor()
    above = (magnitude - below > noise).to(units.dtype)
    return ((below + above) * spacing).copysign(clamped)


def dequantize(q: Quantized, cast: Cast, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return data * scale_inv, multiplied in FP32, its Hadamard transform undone, and rounded to ``dtype``; shape of ``q.data``.

    Raises:
        UsageError: q is not what :func:`quantize` returns, cast no Cast, or dtype no torch.dtype.
    """
    if not isinstance(q, Quantized):
        raise UsageError(f"expected a Quantized(data, scale_inv), got {type(q).__name__}; make one with fp8debug.quantize")
    if not isinstance(q.data, Tensor) or not isinstance(q.scale_inv, Tensor):
        raise UsageError(f"data and scale_inv are tensors, got {type(q.data).__name__} and {type(q.scale_inv).__name__}")
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype must be a torch.dtype such as torch.float32, got {dtype!r}")
    _check_cast(cast)
    return _values(q.data.float(), q.scale_inv, cast).to(dtype)


def _values(data: Tensor, scale_inv: Tensor, cast: Cast) -> Tensor:
    """Return ``data * scale_inv`` in FP32, its Hadamard transform undone; ``data`` are codes as FP32."""
    columns = data.shape[-1] if data.dim() else 1
    flat = data.reshape(data.numel() // max(columns, 1), columns)
    block = block_shape(cast.granularity, *flat.shape)
    grid = [-(-extent // size) for extent, size in zip(flat.shape, block, strict=True)]
    if flat.numel() and list(scale_inv.shape) != grid:
        raise UsageError(f"data {list(data.shape)} under {cast} has scale_inv {grid}, got {list(scale_inv.shape)}")
    values = flat * spread(scale_inv, *block, *flat.shape)
    if cast.hadamard:
        assert cast.line is not None
        values = hadamard(values, cast.line, cast.hadamard_signs, undo=True)
    return values.reshape(data.shape)


def gemm(
    which: Gemm, first: Operand, second: Operand, *, dtype: torch.dtype = torch.float32, accumulate: torch.dtype | None = None
) -> Tensor:
    """One GEMM of a Linear (see ``types``) from quantized or high-precision operands.

    FP8 products are summed over ``PROMOTION`` elements of the contracted dimension (fewer where a scale's block is
    smaller), multiplied by both scales and added to the accumulator: the accumulation is exact up to its dtype. Operands with
    blocks of less than 32 elements are dequantized first, in that dtype.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        first: left operand.
        second: right operand.
        dtype: of the result.
        accumulate: dtype of products and sums, FP32 by default; FP64 for references.

    Returns:
        output ``[M, N]``, grad_input ``[M, K]`` or grad_weight ``[N, K]``.
    """
    accumulate = accumulate or torch.float32
    roles = OPERANDS[which]
    first, second = _with_one_transform(first, second)
    a, a_scale, a_block = _contracting_last(first, (which, roles[0]) in CONTRACTS_ROWS)
    b, b_scale, b_block = _contracting_last(second, (which, roles[1]) in CONTRACTS_ROWS)
    length = a.shape[1]
    if min(a_block[1], b_block[1]) < _MIN_STEP and length > _MIN_STEP:
        a, b = (_dequantized(v, s, block, accumulate) for v, s, block in ((a, a_scale, a_block), (b, b_scale, b_block)))
        a_scale, b_scale, a_block, b_block = None, None, (1, length), (1, length)
    step = min(a_block[1], b_block[1], length)
    step = length if step == length else min(step, PROMOTION)
    total = a.new_zeros(a.shape[0], b.shape[0], dtype=accumulate)
    for start in range(0, length if total.numel() else 0, max(step, 1)):
        part = a[:, start : start + step].to(accumulate) @ b[:, start : start + step].to(accumulate).t()
        if a_scale is not None:
            column = a_scale[:, start // a_block[1]].to(accumulate)[:, None]
            part = part * spread(column, a_block[0], 1, a.shape[0], 1)  # a new one: a checkpoint may have kept the product
        if b_scale is not None:
            column = b_scale[:, start // b_block[1]].to(accumulate)[:, None]
            part = part * spread(column, b_block[0], 1, b.shape[0], 1).t()
        total += part
    return total.to(dtype)


#: Blocks of fewer elements of the contracted dimension are not summed one by one: as many small GEMMs take too long.
_MIN_STEP = 32


def _with_one_transform(first: Operand, second: Operand) -> tuple[Operand, Operand]:
    """Return operands that are both transformed alike, so that their product is that of the originals, or neither of them."""
    signs = [o[1].hadamard_signs if isinstance(o, tuple) and o[1].hadamard else None for o in (first, second)]
    if signs[0] is not None and signs[0] == signs[1]:
        return first, second
    first, second = (
        dequantize(*o) if isinstance(o, tuple) and s is not None else o for o, s in zip((first, second), signs, strict=True)
    )
    return first, second


def _dequantized(values: Tensor, scale_inv: Tensor | None, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    values = values.to(dtype)
    if scale_inv is None or not values.numel():
        return values
    return values * spread(scale_inv.to(dtype), *block, *values.shape)


def _contracting_last(operand: Operand, rows_contract: bool) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """Return (values, scale_inv or None, block) turned so that the contracted dimension is the last."""
    if isinstance(operand, Tensor):
        values, scale_inv, block = operand, None, (1, max(1, operand.shape[0 if rows_contract else 1]))
        return (values.t() if rows_contract else values), None, block
    (values, scale_inv), cast = operand
    block = block_shape(cast.granularity, *values.shape)
    if rows_contract:
        return values.t(), scale_inv.t(), (block[1], block[0])
    return values, scale_inv, block


def statistics(pair: Pair, skip: str = "", only: Sequence[Metric] | None = None) -> dict[str, Tensor]:
    """Return every slot that the pair contributes to, as tensors on its device; nothing for an empty tensor.

    Args:
        pair: the observation.
        skip: name of a slot whose metric is left out.
        only: these metrics alone, where the others are filled already.
    """
    if only is not None:
        return {name: value for metric in only for name, value in metric.partial(pair).items()}
    partials: dict[str, Tensor] = {"num_tensors": torch.ones((), dtype=torch.int64, device=pair.y.device)}
    for metric in METRICS if pair.y.numel() else ():
        if skip not in {slot.name for slot in metric.slots} and (metric.of_results or pair.quantized is not None):
            partials.update(metric.partial(pair))
    return partials


def operand_pair(x: Tensor | Source, cast: Cast, q: Quantized) -> Pair:
    """Return the observation of an operand: the tensor and its dequantized twin."""
    source = x if isinstance(x, Source) else Source(x)
    data = q.data.float()
    y = _values(data, q.scale_inv, cast).reshape(source.x.shape)
    read = as_cast_reads(source, cast) if cast.hadamard else None
    return Pair(source=source, y=y, quantized=q, cast=cast, read=read, decoded=data.reshape(source.x.shape))


def measure(x: Tensor, cast: Cast, amax_history: Sequence[float] = ()) -> dict[str, object]:
    """Return every statistic of one tensor under one cast: slots and derived values by their column names.

    Args:
        x: bf16, fp16 or fp32 tensor of any shape.
        cast: how it is quantized.
        amax_history: for delayed scaling, the amaxes of earlier calls, oldest first; without any, the tensor's own.

    Returns:
        counts as int, other slots and rates as float, ``log2_hist`` as a list; None where there is no data.

    Raises:
        UsageError: x is not a floating-point tensor, cast is no Cast, or amax_history holds no numbers.
    """
    source = Source(_checked(x))
    _check_cast(cast)
    scale_inv = None
    try:
        known = [a for a in map(float, amax_history[-cast.history :]) if 0 < a < float("inf")]
    except (TypeError, ValueError):
        raise UsageError(f"amax_history is a list of numbers, oldest first, got {amax_history!r}") from None
    if cast.scaling == "delayed" and known:
        a = known[-1] if cast.algo == "most_recent" else max(known)
        scale_inv = scale_of(torch.tensor(a, dtype=torch.float32, device="cpu"), cast)[1]
    q = quantize(x, cast, scale_inv)
    if cast.scaling == "delayed" and scale_inv is None:  # which is current scaling with a margin
        cast = replace(cast, scaling="current")
    return all_values(statistics(operand_pair(source, cast, q)))


def all_values(found: Mapping[str, Tensor]) -> dict[str, object]:
    """Return every slot and derived value as plain numbers; None where there is no data."""
    values: dict[str, object] = {}
    for metric in METRICS:
        for slot in metric.slots:
            if not int(found.get(metric.present, 0)):
                none: object = [0] * slot.size if slot.size > 1 else 0
                values[slot.name] = none if slot.kind == "int64" else None
            else:
                values[slot.name] = readable(found[slot.name].tolist())
    return {**values, **derive(values)}  # type: ignore[arg-type]  # lists are never named in an expression


def readable(value: object) -> object:
    """Turn the neutral element of an extreme into None: "no data"."""
    return None if value in (float("inf"), float("-inf")) else value


def _checked(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise UsageError(f"expected a tensor, got {type(x).__name__}; make one with torch.tensor(...)")
    if not x.is_floating_point() or x.element_size() == 1:
        raise UsageError(
            f"expected a bf16, fp16 or fp32 tensor, got {str(x.dtype).removeprefix('torch.')}{list(x.shape)};"
            " convert it with .float() first"
        )
    if x.layout != torch.strided:
        raise UsageError(f"expected a dense tensor, got {str(x.layout).removeprefix('torch.')}; use .to_dense() first")
    if x.is_meta:
        raise UsageError(
            f"expected a tensor with values, got one of device 'meta', {list(x.shape)}; move the module off it first"
        )
    return x.detach()


def _check_cast(cast: Cast) -> None:
    if not isinstance(cast, Cast):
        raise UsageError(f"expected a Cast such as fp8debug.Cast(granularity='1x128'), got {repr(cast)[:80]}")


def finite_amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of a tensor, FP32 ``[]``, 0 for an empty one."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    x = x.detach().float().abs()
    return x.masked_fill(~x.isfinite(), 0.0).amax()


#: Significant bits that Hopper's FP8 tensor cores keep of a sum, and products that they add at once.
HOPPER_BITS, GROUP = 14, 32
#: Elements of a block of products: 64 MiB in FP32.
_BLOCK = 2**24


def short_gemm(
    which: Gemm, first: Operand, second: Operand, *, dtype: torch.dtype = torch.float32, bits: int = HOPPER_BITS
) -> Tensor:
    """One GEMM of a Linear whose sums keep ``bits`` significant bits over all of the contracted dimension.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        first: left operand.
        second: right operand.
        dtype: of the result.
        bits: significant bits of the accumulator, at most 24.

    Returns:
        output ``[M, N]``, grad_input ``[M, K]`` or grad_weight ``[N, K]``.
    """
    roles = OPERANDS[which]
    a, b = (_values_contracting_last(o, (which, r) in CONTRACTS_ROWS) for o, r in zip((first, second), roles, strict=True))
    rows = max(1, _BLOCK // max(1, b.shape[0] * GROUP))
    parts = [_product(part, b, bits) for part in torch.split(a, rows)]
    return torch.cat(parts).to(dtype) if parts else a.new_zeros(0, b.shape[0], dtype=dtype)


def _values_contracting_last(operand: Operand, rows_contract: bool) -> Tensor:
    values = operand.detach().float() if isinstance(operand, Tensor) else dequantize(*operand)
    return values.t() if rows_contract else values


def _product(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """Return a ``[M, K]`` @ b ``[N, K]``.T by the short accumulator."""
    total = a.new_zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], GROUP):
        terms = a[:, None, start : start + GROUP] * b[None, :, start : start + GROUP]
        largest = torch.maximum(terms.abs().amax(-1), total.abs())
        _, exponent = torch.frexp(largest)  # largest = m * 2^exponent, 0.5 <= m < 1
        unit = power_of_2(exponent - bits, total.dtype)
        unit = torch.where(largest > 0, unit, 1.0)  # an unfit unit (of NaN or Inf) is harmless: the sum is NaN or Inf as well
        cut = (terms / unit[..., None]).trunc_().sum(-1) + (total / unit).trunc_()
        total = cut * unit
    return total


_MASK = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
#: Bits of a random number: as many as an FP32 mantissa has.
_RANDOM_BITS = 24
#: Bits of the NaN that stands for all of them.
_NAN_BITS = 0x7FC00000


def philox(counter: Tensor, key: tuple[Tensor, Tensor]) -> Tensor:
    """Return four random words for each counter, int64 ``[len(counter), 4]``, each below 2^32.

    Args:
        counter: int64 ``[n]``, the low two words of the counter; the others are 0.
        key: int64 ``[]``, two words below 2^32.
    """
    c0, c1 = counter & _MASK, counter >> 32
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The product of two words fills 64 bits; a signed shift, masked, gives its upper half all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), 1)


def uniform(x: Tensor, seed: int) -> Tensor:
    """Return a random number in [0, 1) for each element, multiples of 2^-24, which the tensor's bits and the seed decide.

    Args:
        x: FP32, any shape.
        seed: below 2^64.

    Returns:
        FP32 of x's shape.
    """
    x = x.contiguous()
    # Devices differ in what they leave of a NaN's sign and payload.
    bits = x.view(torch.int32).masked_fill(x.isnan(), _NAN_BITS).reshape(-1).long()
    place = torch.arange(bits.numel(), dtype=torch.int64, device=x.device)
    checksum = (bits * (2 * place + 1)).sum()
    key = (checksum ^ seed & _MASK) & _MASK, (checksum >> 32 ^ seed >> 32) & _MASK
    words = philox(place[: -(-bits.numel() // 4)], key).reshape(-1)[: bits.numel()]
    numbers: Tensor = (words >> (32 - _RANDOM_BITS)).float() * 2.0**-_RANDOM_BITS
    return numbers.reshape(x.shape)


@cache
def _matrix(device: torch.device, signs: int) -> Tensor:
    """Return diag(signs) @ H / 4 in FP64, H by Sylvester's construction: orthogonal. Nothing is copied from the host."""
    place = torch.arange(HADAMARD, dtype=torch.int64, device=device)
    both = place[:, None] & place  # H[i, j] is -1 to the number of bits of i & j
    both = both ^ both >> 2
    is_negative = (both ^ both >> 1 ^ (place.new_full((), signs) >> place)[:, None]) & 1
    matrix: Tensor = (1 - 2 * is_negative).double() * HADAMARD**-0.5
    return matrix


def hadamard(x: Tensor, dim: int, signs: int = HADAMARD_SIGNS, *, undo: bool = False) -> Tensor:
    """Transform groups of 16 neighbours along a dimension: x' = x diag(signs) H / 4; those after the last whole group stay.

    The matrix is orthogonal, so that two operands transformed along the dimension that their GEMM contracts have the same
    product (arXiv 2509.25149, section 4.3). Sums are in FP64 and rounded to FP32 once. A NaN or Inf spreads over its group.

    Args:
        x: FP32 ``[rows, columns]``.
        dim: 0 or 1.
        signs: 16 bits; bit i is set where element i of a group is negated.
        undo: the inverse.
    """
    whole = x.shape[dim] // HADAMARD * HADAMARD
    if not whole or not x.numel():
        return x
    matrix = _matrix(x.device, signs)
    part = x.narrow(dim, 0, whole).double()
    part = part.t() if dim == 0 else part
    groups = part.reshape(-1, HADAMARD) @ (matrix.t() if undo else matrix)
    made = groups.reshape(part.shape).float()
    made = made.t() if dim == 0 else made
    return made if whole == x.shape[dim] else torch.cat([made, x.narrow(dim, whole, x.shape[dim] - whole)], dim)

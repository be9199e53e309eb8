"""Faults of FP4 and of block formats: random rounding, Hadamard signs, scales in two levels, swizzled scales, formats unmet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, Fault, Key, Ordinary, Target, distort, quantized, run_as_others
from fp8debug.faults.wholerun import this_rank
from fp8debug.formats import (
    FORMATS,
    GRANULARITIES,
    SCALE_FORMATS,
    SWIZZLED_COLUMNS,
    SWIZZLED_FOURS,
    SWIZZLED_LINES,
    SWIZZLED_ROWS,
    Format,
    block_shape,
)
from fp8debug.kernels.dispatch import Operand
from fp8debug.kernels.reference import as_cast_reads, block_amax, round_to_format, uniform
from fp8debug.metrics import Source
from fp8debug.metrics.base import spread
from fp8debug.recipes import HADAMARD, HADAMARD_SIGNS, Cast
from fp8debug.types import Quantized, TensorRole


def _sites(where: Target, holds: Callable[[Key, Cast], bool], what: str) -> list[Key]:
    """Return the operands of the target whose cast meets a condition.

    Raises:
        UsageError: none does.
    """
    found = [key for key, cast in where.linear.recipe.casts.items() if cast is not None and holds(key, cast)]
    if not found:
        raise UsageError(f"{where.name} has no operand with {what} (recipe {where.linear.recipe.name}); try the recipe 'nvfp4'")
    return found


def _is_random(key: Key, cast: Cast) -> bool:
    return cast.rounding == "stochastic"


def _has_stored_scale(cast: Cast) -> bool:
    stored = SCALE_FORMATS[cast.scale_format]
    return stored is not None and not stored.scale_only


def _scaled(x: Tensor, q: Quantized, cast: Cast) -> Tensor:
    """Return x as the cast reads it in units of its data, FP32 ``[rows, columns]``."""
    source = as_cast_reads(Source(x), cast)
    block = block_shape(cast.granularity, *x.shape)
    return source.value / spread(q.scale_inv, *block, *x.shape)


def _rounded(noise_of: Callable[[Tensor], Tensor | None]) -> Callable[[Target], Callable[[], None]]:
    """Round by the random numbers that a function makes of the scaled tensor, in place of independent ones; None: to nearest."""

    def plant(where: Target) -> Callable[[], None]:
        def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
            q, cast = quantized(ordinary(x, cast))
            scaled = _scaled(x, q, cast)
            data = round_to_format(scaled, FORMATS[cast.format], noise=noise_of(scaled))
            return Quantized(data.reshape(q.data.shape), q.scale_inv), cast

        return distort(where, change, *_sites(where, _is_random, "stochastic rounding"))

    return plant


def _same_numbers(scaled: Tensor) -> Tensor:
    """Return random numbers in [0, 1) that are the same in each call: a generator seeded anew."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.rand(scaled.shape, dtype=torch.float32, device="cpu", generator=generator).to(scaled.device)


def _half_numbers(scaled: Tensor) -> Tensor:
    """Return numbers in [0, 1/2) that vary with the tensor: the highest bit of a word is taken for a sign."""
    bits = scaled.contiguous().view(torch.int32).to(torch.int64)
    return ((bits * 2654435761 >> 8) & 0xFFFF).float() * 2.0**-17


def _zeros(where: Target) -> Callable[[], None]:
    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        return Quantized(torch.zeros_like(q.data), q.scale_inv), cast

    return distort(where, change, *_sites(where, _is_random, "stochastic rounding"))


def _hadamard_signs(where: Target) -> Callable[[], None]:
    """Transform one operand of wgrad by other signs than the other operand is."""
    role, rank, signs = TensorRole(where.options["tensor"]), int(where.options["rank"]), int(where.options["signs"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        other = replace(cast, hadamard_signs=signs)
        return (quantized(ordinary(x, other))[0] if this_rank() >= rank else quantized(ordinary(x, cast))[0]), cast

    if signs >= 2**HADAMARD or signs == HADAMARD_SIGNS:
        raise UsageError(
            f"signs of {where.name}: hadamard_signs takes {HADAMARD} bits, other than those of the recipe, got {signs}"
        )
    keys = _sites(where, lambda key, cast: key[1] is role and cast.hadamard > 0, f"a Hadamard transform of its {role}")
    return distort(where, change, *keys)


def _two_level(x: Tensor, cast: Cast, tensor_amax: Tensor) -> Quantized:
    """Return x cast with scales in two levels whose second one is made for another amax of the tensor (NUMERICS, NVFP4)."""
    stored, fmt = SCALE_FORMATS[cast.scale_format], FORMATS[cast.format]
    assert stored is not None
    source = as_cast_reads(Source(x), cast)
    encode = stored.max * fmt.max / tensor_amax
    return _stored(source, cast, fmt, stored, encode)


def _stored(source: Source, cast: Cast, fmt: Format, stored: Format, encode: Tensor) -> Quantized:
    amax = block_amax(source, cast)
    decode = (amax / fmt.max * encode).clamp(max=stored.max)
    inverse = (round_to_format(decode, stored).float() / encode).masked_fill(amax == 0, 1.0)
    scale = inverse.reciprocal().clamp(max=torch.finfo(torch.float32).max)
    block = block_shape(cast.granularity, *source.value.shape)
    noise = uniform(source.value, cast.seed) if cast.rounding == "stochastic" else None
    scaled = source.value * spread(scale, *block, *source.value.shape)
    return Quantized(round_to_format(scaled, fmt, noise=noise), inverse)


def _stale_tensor_scale(where: Target) -> Callable[[], None]:
    """Keep the second-level scale of a tensor ``ratio`` times smaller than the one at the fault's first step."""
    role, ratio = TensorRole(where.options["tensor"]), float(where.options["ratio"])
    kept: dict[Key, Tensor] = {}

    def change_of(key: Key) -> Callable[[Tensor, Cast, Ordinary, dict[str, Any]], Operand]:
        def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
            if key not in kept:
                kept[key] = as_cast_reads(Source(x), cast).magnitude.amax() / ratio
            return (_two_level(x, cast, kept[key]) if kept[key] > 0 else quantized(ordinary(x, cast))[0]), cast

        return change

    holds = lambda key, cast: key[1] is role and cast.tensor_scale == "tensor"  # noqa: E731  # of one line
    undo = [distort(where, change_of(key), key) for key in _sites(where, holds, f"a tensor scale of its {role}")]

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def _block_scale_range(where: Target) -> Callable[[], None]:
    """Store the block scales of a tensor in their format under a constant in place of a second level."""
    role, factor = TensorRole(where.options["tensor"]), float(where.options["factor"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        single = replace(cast, tensor_scale="none", four_over_six=False)
        stored, fmt = SCALE_FORMATS[cast.scale_format], FORMATS[cast.format]
        assert stored is not None
        source = as_cast_reads(Source(x), single)
        return _stored(source, single, fmt, stored, source.value.new_full((1, 1), factor)), single

    keys = _sites(where, lambda key, cast: key[1] is role and _has_stored_scale(cast), f"E4M3 block scales of its {role}")
    return distort(where, change, *keys)


def _swizzled(where: Target) -> Callable[[], None]:
    """Read scales that lie swizzled, in tiles of 128x4 as 32x4x4, as if they lay in rows."""
    role = TensorRole(where.options["tensor"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        grid = q.scale_inv
        is_turned = cast.line == 0
        lines = grid.t() if is_turned else grid
        rows, columns = lines.shape
        tiles, across = -(-rows // SWIZZLED_ROWS), -(-columns // SWIZZLED_COLUMNS)
        padded = lines.new_ones(tiles * SWIZZLED_ROWS, across * SWIZZLED_COLUMNS)
        padded[:rows, :columns] = lines
        tiled = padded.reshape(tiles, SWIZZLED_FOURS, SWIZZLED_LINES, across, SWIZZLED_COLUMNS).permute(0, 3, 2, 1, 4)
        read = tiled.reshape(tiles * SWIZZLED_ROWS, across * SWIZZLED_COLUMNS)[:rows, :columns]
        return Quantized(q.data, (read.t() if is_turned else read).contiguous()), cast

    def holds(key: Key, cast: Cast) -> bool:
        block = GRANULARITIES[cast.granularity]
        return key[1] is role and cast.line is not None and max(block[0] or 64, block[1] or 64) <= 32

    return distort(where, change, *_sites(where, holds, f"block scales of 16 or 32 elements of its {role}"))


def _not_low(where: Target) -> Callable[[], None]:
    """Hand through FP8 data, of the format with most mantissa bits, where less than 8 bits are declared."""
    wide = max((f for f in FORMATS.values() if f.bits == 8 and not f.scale_only), key=lambda f: (f.mantissa_bits, f.max))

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        return Quantized(round_to_format(_scaled(x, q, cast), wide).reshape(q.data.shape), q.scale_inv), cast

    return distort(where, change, *_sites(where, lambda key, cast: FORMATS[cast.format].bits < 8, "less than 8 bits"))


def _last_layers(where: Target) -> Callable[[], None]:
    """Run a Linear that was to stay in BF16 in the recipe of the others, as a count of last layers that is off by one."""
    undo = run_as_others(where, "a low precision; plant this fault in a Linear that an override leaves in BF16", "nvfp4")
    vars(where.module)["fp8debug_request"] = "bf16"  # what the recipe says of it
    return undo


def _are_twins(one: Format, other: Format) -> bool:
    """Return whether two formats of 8 bits round alike and end at different values."""
    return one.bits == other.bits == 8 and one.mantissa_bits == other.mantissa_bits and one.max != other.max


def _other_maximum(where: Target) -> Callable[[], None]:
    """Map an amax to AMD's largest E4M3 value, 240, and decode by the scale of 448, or the other way round."""
    role = TensorRole(where.options["tensor"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        fmt = FORMATS[cast.format]
        other = next(f for f in FORMATS.values() if _are_twins(f, fmt))
        narrow, wide = sorted((fmt.max, other.max))
        data = round_to_format(_scaled(x, q, cast) * (narrow / fmt.max), fmt).reshape(q.data.shape)
        return Quantized(data, q.scale_inv * (fmt.max / wide)), cast

    def holds(key: Key, cast: Cast) -> bool:
        return key[1] is role and any(_are_twins(f, FORMATS[cast.format]) for f in FORMATS.values())

    return distort(where, change, *_sites(where, holds, f"E4M3 data of its {role}"))


_GRADIENT, _INPUT, _WEIGHT = (role.value for role in (TensorRole.GRAD_OUTPUT, TensorRole.INPUT, TensorRole.WEIGHT))
for _fault in (
    Fault(
        name="stochastic_zeros",
        code="F145",
        description="stochastic rounding returns zeros, as without a generator state (TransformerEngine #3281)",
        plant=_zeros,
    ),
    Fault(
        name="stochastic_nearest",
        code="F145",
        description="stochastic rounding is asked for, and the kernel rounds to nearest (a class of bug)",
        plant=_rounded(lambda scaled: None),
    ),
    Fault(
        name="stochastic_biased",
        code="F145",
        description="the random numbers fill half of [0, 1), so that rounding goes away from zero too often (a class of bug)",
        plant=_rounded(_half_numbers),
    ),
    Fault(
        name="stochastic_repeats",
        code="F145",
        description="the generator is seeded anew in each step, so that an element meets the same number (a class of bug)",
        plant=_rounded(_same_numbers),
    ),
    Fault(
        name="hadamard_signs",
        code="F146",
        description="one operand of wgrad is transformed by other signs than its partner, from a rank on (arXiv 2509.25149)",
        options={"tensor": _GRADIENT, "rank": 0, "signs": 0x5A3C},
        plant=_hadamard_signs,
    ),
    Fault(
        name="stale_tensor_scale",
        code="F147",
        description="the FP32 scale over E4M3 block scales is that of a tensor `ratio` times smaller (arXiv 2509.25149)",
        options={"tensor": _INPUT, "ratio": 64.0},
        plant=_stale_tensor_scale,
    ),
    Fault(
        name="block_scale_range",
        code="F148",
        description="a constant over E4M3 block scales, not the tensor's scale: they saturate or underflow (arXiv 2509.25149)",
        options={"tensor": _INPUT, "factor": 2.0**16},
        plant=_block_scale_range,
    ),
    Fault(
        name="swizzled_scales",
        code="F119",
        description="block scales that lie swizzled for the tensor core are read in rows (a class of bug)",
        options={"tensor": _INPUT},
        plant=_swizzled,
    ),
    Fault(
        name="fp4_not_on",
        code="F111",
        description="FP4 is asked for, and FP8 data run (Megatron-LM #3423)",
        plant=_not_low,
    ),
    Fault(
        name="last_layers_in_fp4",
        code="F110",
        description="a last layer that the recipe keeps in BF16 runs in FP4 (arXiv 2509.25149, section 4); acts at once",
        plant=_last_layers,
    ),
    Fault(
        name="max_240_as_448",
        code="F113",
        description="an amax is cast to AMD's 240 and decoded by the scale of 448 (TransformerEngine #982, sglang #25733)",
        options={"tensor": _WEIGHT},
        plant=_other_maximum,
    ),
):
    FAULTS.add(_fault.name, _fault)

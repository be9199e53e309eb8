"""Closed-form bounds: the most that a correct cast, or a correct accumulator of limited width, can do to a tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fp8debug.formats import FORMATS
from fp8debug.recipes import Cast

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Bits of a sum that Hopper's FP8 tensor cores keep (DeepSeek-V3, section 3.3.2), the shortest accumulator in use.
ACCUMULATOR_BITS = 14


def cast_floor_db(cast: Cast) -> float:
    """Return the lowest SQNR, in dB, that a correct cast under current scaling can give any tensor.

    Rounding to nearest with m mantissa bits changes a normal value by at most 1 / (2^(m + 1) + 1) of itself. Values in the
    subnormals lie so far below their block's amax that their error adds less than 1e-9 of the block's energy. A scale
    rounded down (``pow2_floor``) clips up to 1/8 of a value.
    """
    rounding = 1 / (2.0 ** (FORMATS[cast.format].mantissa_bits + 1) + 1)
    clipping = 1 / 8 if cast.scale_rounding == "pow2_floor" else 0.0
    return -20 * math.log10(max(rounding, clipping))


def accumulator_floor_db(length: int | None) -> float:
    """Return the lowest SQNR, in dB, that a sum of ``length`` products can have in an accumulator of 14 bits.

    Truncating each of ``length`` partial sums loses at most 2^-14 of the sum each: 12 dB at K = 4096 (measured there: 7 %
    of uniform operands, 23 dB), 33 dB at K = 384. Without a length, that of K = 16384.
    """
    return -20 * math.log10(min(1.0, (length or 16384) * 2.0**-ACCUMULATOR_BITS))


def contracted_length(run: Run, module: str, gemm: str) -> int | None:
    """Return how many products each element of a GEMM's result sums, K; None where it is not recorded.

    For wgrad it is the number of tokens: the elements of its input over the module's input features.
    """
    entry = next((m for m in run.modules if m["fqn"] == module), None)
    if entry is None or gemm != "wgrad":
        return None if entry is None else entry.get("in_features" if gemm == "fprop" else "out_features")
    if not entry.get("in_features"):
        return None
    query = (
        "SELECT max(numel) AS numel FROM sites WHERE module = ? AND gemm = 'wgrad' AND tensor = 'input' AND reference = 'operand'"
    )
    numel = run.sql(query, [module])["numel"][0].as_py()
    return numel // entry["in_features"] if numel else None

"""FP8 number formats and scale granularities as frozen tables of facts; a new one is one literal.

Sources: OCP OFP8 1.0 for E4M3 and E5M2, OCP MX 1.0 for E8M0 and the 1x32 block, DeepSeek-V3 (arXiv 2412.19437) section 3.3.2
for 1x128 and 128x128.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Format:
    """Facts about one 8-bit format; values are plain floats, ``torch_dtype`` is an attribute name of torch.

    Attributes:
        name: spelling used in casts, files and on the command line.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored mantissa.
        bias: exponent bias.
        max: largest finite value.
        has_inf: whether infinities have a code; without one an Inf becomes NaN.
        torch_dtype: name of the torch dtype.
        scale_only: a format for block scales, not for data: powers of two, no zero, no subnormals.
    """

    name: str
    torch_dtype: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    scale_only: bool = False

    @property
    def emax(self) -> int:
        """floor(log2(max)): 8 for E4M3, 15 for E5M2 (OCP MX 1.0, section 6.3)."""
        return int(self.max).bit_length() - 1

    @property
    def min_normal(self) -> float:
        """Smallest value with full precision; E8M0 spends no code on zero and starts one power lower."""
        return 2.0 ** ((0 if self.scale_only else 1) - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest nonzero value."""
        return self.min_normal * 2.0**-self.mantissa_bits

    @property
    def gaussian_sqnr_db(self) -> float | None:
        """SQNR of Gaussian data in dB, in closed form (numerics.md, 4); None for a format of scales."""
        return {"e4m3fn": 31.5, "e5m2": 25.55}.get(self.name)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="e4m3fn",
            torch_dtype="float8_e4m3fn",
            exponent_bits=4,
            mantissa_bits=3,
            bias=7,
            max=448.0,
            has_inf=False,
        ),
        Format(
            name="e5m2",
            torch_dtype="float8_e5m2",
            exponent_bits=5,
            mantissa_bits=2,
            bias=15,
            max=57344.0,
            has_inf=True,
        ),
        Format(
            name="e8m0",
            torch_dtype="float8_e8m0fnu",
            exponent_bits=8,
            mantissa_bits=0,
            bias=127,
            max=2.0**127,
            has_inf=False,
            scale_only=True,
        ),
    )
}

#: Rows x columns of the region that shares a scale; None is the whole extent of the tensor.
GRANULARITIES: dict[str, tuple[int | None, int | None]] = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "columnwise": (None, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "1x32": (1, 32),
    "32x1": (32, 1),
}

#: The same granularity for the transposed tensor.
TRANSPOSED: dict[str, str] = {
    name: next(other for other, o in GRANULARITIES.items() if o == (block[1], block[0])) for name, block in GRANULARITIES.items()
}


def block_shape(granularity: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the block's (rows, columns) for a tensor of that size; at least 1 so that an empty tensor has a grid."""
    block_rows, block_columns = GRANULARITIES[granularity]
    return (
        max(1, rows if block_rows is None else block_rows),
        max(1, columns if block_columns is None else block_columns),
    )

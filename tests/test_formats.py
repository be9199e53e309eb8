"""The tables of facts: formats against ml_dtypes' own numbers, granularities and their transposes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8debug.formats import FORMATS, GRANULARITIES, TRANSPOSED, block_shape

FACTS = {  # name: max, min normal, min subnormal, emax; written down from OCP OFP8 1.0 and OCP MX 1.0
    "e4m3fn": (448.0, 2.0**-6, 2.0**-9, 8),
    "e5m2": (57344.0, 2.0**-14, 2.0**-16, 15),
    "e8m0": (2.0**127, 2.0**-127, 2.0**-127, 127),
}


def test_every_format_has_its_facts_here() -> None:
    assert list(FORMATS) == list(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_facts(name: str) -> None:
    fmt = FORMATS[name]
    assert fmt.name == name
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.emax) == FACTS[name]
    assert hasattr(torch, fmt.torch_dtype)


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_those_of_ml_dtypes(name: str) -> None:
    fmt = FORMATS[name]
    dtype = getattr(ml_dtypes, fmt.torch_dtype)
    info: Any = ml_dtypes.finfo(dtype)
    assert float(info.max) == fmt.max
    assert float(info.smallest_normal) == fmt.min_normal
    assert float(info.smallest_subnormal) == fmt.min_subnormal
    assert (info.nexp, info.nmant) == (fmt.exponent_bits, fmt.mantissa_bits)
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    assert bool(np.isinf(codes).any()) == fmt.has_inf
    assert float(codes[np.isfinite(codes)].max()) == fmt.max
    assert float(codes[np.isfinite(codes) & (codes > 0)].min()) == fmt.min_subnormal
    if not fmt.scale_only:
        one = fmt.bias << fmt.mantissa_bits
        assert codes[one] == 1


@pytest.mark.parametrize("name", FACTS)
def test_emax_is_the_exponent_of_max(name: str) -> None:
    fmt = FORMATS[name]
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)


def test_a_format_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["e4m3fn"].max = 240.0  # type: ignore[misc]  # that it may not is the test


def test_a_new_format_is_one_literal() -> None:
    fnuz = dataclasses.replace(FORMATS["e4m3fn"], name="e4m3fnuz", torch_dtype="float8_e4m3fnuz", bias=8, max=240.0)
    assert (fnuz.emax, fnuz.min_normal, fnuz.min_subnormal) == (7, 2.0**-7, 2.0**-10)
    assert fnuz.gaussian_sqnr_db is None


def test_transposed_twice_is_the_same() -> None:
    assert {TRANSPOSED[TRANSPOSED[name]] for name in GRANULARITIES} == set(GRANULARITIES)
    assert {name for name in GRANULARITIES if TRANSPOSED[name] == name} == {"tensorwise", "128x128"}
    assert TRANSPOSED["1x128"] == "128x1" and TRANSPOSED["rowwise"] == "columnwise"


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        ("tensorwise", (300, 200), (300, 200)),
        ("rowwise", (300, 200), (1, 200)),
        ("columnwise", (300, 200), (300, 1)),
        ("1x128", (300, 200), (1, 128)),
        ("1x128", (3, 20), (1, 128)),
        ("128x128", (3, 20), (128, 128)),
        ("32x1", (3, 20), (32, 1)),
        ("tensorwise", (0, 200), (1, 200)),
        ("rowwise", (5, 0), (1, 1)),
    ],
)
def test_block_shape(granularity: str, shape: tuple[int, int], expected: tuple[int, int]) -> None:
    assert block_shape(granularity, *shape) == expected

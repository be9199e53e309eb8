"""The tables of facts: formats against ml_dtypes' own numbers, granularities and their transposes."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8debug.formats import FORMATS, GRANULARITIES, TRANSPOSED, block_shape
from fp8debug.kernels.reference import measure, quantize, round_to_format
from fp8debug.recipes import SCALE_ROUNDINGS, Cast

ROOT = Path(__file__).parents[1]

#: name: max, min normal, min subnormal, emax, bits, code of NaN, code of Inf; written down from OCP OFP8 1.0, OCP MX 1.0 and
#: arXiv 2206.02915
FACTS: dict[str, tuple[float, float, float, int, int, int | None, int | None]] = {
    "e4m3fn": (448.0, 2.0**-6, 2.0**-9, 8, 8, 0x7F, None),
    "e5m2": (57344.0, 2.0**-14, 2.0**-16, 15, 8, 0x7E, 0x7C),
    "e4m3fnuz": (240.0, 2.0**-7, 2.0**-10, 7, 8, 0x80, None),
    "e5m2fnuz": (57344.0, 2.0**-15, 2.0**-17, 15, 8, 0x80, None),
    "e2m3fn": (7.5, 1.0, 2.0**-3, 2, 6, None, None),
    "e3m2fn": (28.0, 2.0**-2, 2.0**-4, 4, 6, None, None),
    "e2m1fn": (6.0, 1.0, 0.5, 2, 4, None, None),
    "e8m0": (2.0**127, 2.0**-127, 2.0**-127, 127, 8, 0xFF, None),
}
DATA = [name for name in FACTS if name != "e8m0"]


def ml_dtype(name: str) -> Any:
    """Return the type of ml_dtypes, whose names have the number of bits in front."""
    theirs = {"e8m0": "float8_e8m0fnu"}.get(name, f"float{FACTS[name][4]}_{name}")
    assert hasattr(ml_dtypes, theirs), f"ml_dtypes has no {theirs}: leave {name} out of the test that compares with it"
    return getattr(ml_dtypes, theirs)


def every_code(name: str) -> Any:
    return np.arange(1 << FACTS[name][4]).astype(np.uint8).view(ml_dtype(name)).astype(np.float32)


def neighbourhood(name: str) -> Any:
    """Return every value, every midpoint, what lies beyond the largest, and the FP32 numbers on both sides of all these."""
    values = np.unique(every_code(name)[np.isfinite(every_code(name))].astype(np.float64))
    midpoints = (values[1:] + values[:-1]) / 2
    largest, step = values[-1], values[-1] - values[-2]
    beyond = np.array([largest + step / 2, largest + step, 2 * largest, 1e30])
    points = np.concatenate([values, midpoints, beyond, -beyond]).astype(np.float32)
    return np.concatenate([points, *(np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf))])


def test_every_format_has_its_facts_here() -> None:
    assert list(FORMATS) == list(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_facts(name: str) -> None:
    fmt = FORMATS[name]
    assert fmt.name == name
    found = (fmt.max, fmt.min_normal, fmt.min_subnormal, fmt.emax, fmt.bits, fmt.nan_code, fmt.inf_code)
    assert found == FACTS[name]
    assert fmt.scale_only or hasattr(torch, fmt.data_dtype)  # torch 2.6 has no float8_e8m0fnu


@pytest.mark.parametrize("name", FACTS)
def test_facts_are_those_of_ml_dtypes(name: str) -> None:
    fmt = FORMATS[name]
    info: Any = ml_dtypes.finfo(ml_dtype(name))
    assert float(info.max) == fmt.max
    assert float(info.smallest_normal) == fmt.min_normal
    assert float(info.smallest_subnormal) == fmt.min_subnormal
    assert (info.nexp, info.nmant) == (fmt.exponent_bits, fmt.mantissa_bits)
    np.testing.assert_array_equal([fmt.value(code) for code in range(1 << fmt.bits)], every_code(name))
    nan = int(np.array([np.nan], np.float32).astype(ml_dtype(name)).view(np.uint8)[0])
    assert fmt.nan_code in (None, nan)


@pytest.mark.parametrize("name", DATA)
def test_data_dtype_holds_every_value(name: str) -> None:
    values = torch.tensor(every_code(name))
    held = values.to(getattr(torch, FORMATS[name].data_dtype)).float()
    assert torch.equal(held.nan_to_num(-1), values.nan_to_num(-1))
    assert bool(held.signbit().eq(values.signbit()).logical_or(held.isnan()).all())


@pytest.mark.parametrize("name", DATA)
def test_rounding_is_that_of_ml_dtypes(name: str) -> None:
    fmt, x = FORMATS[name], neighbourhood(name)
    found = round_to_format(torch.tensor(x), fmt).float().numpy()
    inside = np.abs(x) <= fmt.max
    np.testing.assert_array_equal(found[inside], x[inside].astype(ml_dtype(name)).astype(np.float32))
    assert not fmt.is_unsigned_zero or not np.signbit(found[found == 0]).any()
    assert fmt.is_unsigned_zero or np.array_equal(np.signbit(found), np.signbit(x))
    # Beyond the largest value we clamp: ml_dtypes clamps formats without NaN, and makes NaN or Inf of the others.
    np.testing.assert_array_equal(found[~inside], np.copysign(np.float32(fmt.max), x[~inside]))
    theirs = x[~inside].astype(ml_dtype(name)).astype(np.float32)
    assert bool(np.isfinite(theirs).all()) == (not fmt.has_nan)


@pytest.mark.parametrize("name", DATA)
def test_nan_and_inf(name: str) -> None:
    fmt = FORMATS[name]
    q = quantize(torch.tensor([[1.0, float("nan"), float("inf"), -float("inf")]]), Cast(format=name))
    found = q.data.float()[0, 1:].tolist()
    if fmt.has_inf:
        assert found[1:] == [float("inf"), -float("inf")]
    assert [math.isnan(v) for v in found] == [True, not fmt.has_inf, not fmt.has_inf]
    assert q.data.view(torch.uint8)[0, 2] == (fmt.inf_code or fmt.nan_code or 0x7F)


@pytest.mark.parametrize("name", FACTS)
def test_emax_is_the_exponent_of_max(name: str) -> None:
    fmt = FORMATS[name]
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)


def test_a_format_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["e4m3fn"].max = 240.0  # type: ignore[misc]  # that it may not is the test


def test_a_new_format_is_one_literal() -> None:
    e3m4 = dataclasses.replace(FORMATS["e5m2"], name="e3m4", exponent_bits=3, mantissa_bits=4, bias=3, max=15.5)
    assert (e3m4.emax, e3m4.min_normal, e3m4.min_subnormal) == (3, 0.25, 2.0**-6)
    values = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e3m4).astype(np.float32)
    np.testing.assert_array_equal([e3m4.value(code) for code in range(256)], values)
    assert e3m4.gaussian_sqnr_db == pytest.approx(37.5, abs=0.2)


def test_no_code_asks_for_a_format_by_its_name() -> None:
    """A name is compared nowhere; where one stands, it is chosen: a default, a fault's, a library's, a recipe's."""
    for path in sorted((ROOT / "fp8debug").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                names = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & set(FORMATS)
                assert not names, f"{path.relative_to(ROOT)}:{node.lineno} compares with {names}"


def test_largest_values_stand_in_the_formats_alone() -> None:
    """A kernel reads them, and the limits that are made of them, from there."""
    largest = [fmt.max for fmt in FORMATS.values() if 100 < fmt.max < 1e30]
    for path in sorted((ROOT / "fp8debug").rglob("*.py")):
        if path.name == "formats.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                near = [top for top in largest if abs(node.value - top) <= 2e-6 * top]
                assert not near, f"{path.relative_to(ROOT)}:{node.lineno} has {node.value}, a format's largest value"


@pytest.mark.parametrize(
    ("cast", "sqnr_db", "underflow_rate"),
    [
        ("e4m3fn tensorwise current", 31.54, 0.0),
        ("e5m2 tensorwise current", 25.56, 0.0),
        ("e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor", 20.4, 0.07),
        ("e2m1fn 16x16 current scale=e4m3fn tensor_scale=tensor", 19.1, 0.10),
        ("e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor stochastic", 17.2, 0.07),
        ("e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor hadamard=16", 20.4, 0.07),
        *((f"{f} 1x32 current {r} scale=e8m0", None, None) for f in ("e2m1fn", "e2m3fn", "e4m3fn") for r in SCALE_ROUNDINGS[1:]),
        ("e3m2fn 1x32 current pow2_ceil scale=e8m0 stochastic", None, None),
        ("e4m3fn 1x128 current", None, None),
    ],
)
def test_the_closed_form_is_what_gaussian_data_measure(cast: str, sqnr_db: float | None, underflow_rate: float | None) -> None:
    expected = Cast.parse(cast).gaussian
    # Over a binade of standard deviations: the scale's place between two powers of two is averaged in the closed form.
    x = torch.randn(8, 128, 512, generator=torch.Generator().manual_seed(0))
    found = [measure(part * 2.0 ** (i / 8), Cast.parse(cast)) for i, part in enumerate(x)]
    mean = {name: np.mean([f[name] for f in found]) for name in ("nmse", "underflow_rate", "overflow_rate")}
    assert -10 * math.log10(mean["nmse"]) == pytest.approx(expected.sqnr_db, abs=0.1)
    assert mean["underflow_rate"] == pytest.approx(expected.underflow_rate, rel=0.06, abs=2e-5)
    assert mean["overflow_rate"] == pytest.approx(expected.saturation_rate, rel=0.15, abs=1e-5)
    if sqnr_db is not None and underflow_rate is not None:
        assert expected.sqnr_db == pytest.approx(sqnr_db, abs=0.06)
        assert expected.underflow_rate == pytest.approx(underflow_rate, abs=0.003)


def test_transposed_twice_is_the_same() -> None:
    assert {TRANSPOSED[TRANSPOSED[name]] for name in GRANULARITIES} == set(GRANULARITIES)
    assert {name for name in GRANULARITIES if TRANSPOSED[name] == name} == {"tensorwise", "128x128", "16x16"}
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

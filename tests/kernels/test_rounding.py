"""Hand-written values at the borders of the formats and of FP32, and every FP8 neighbour against ml_dtypes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8debug.formats import FORMATS
from fp8debug.kernels.dispatch import dequantize, measure, quantize
from fp8debug.recipes import Cast
from tests.kernels import oracle

NAN, INF = float("nan"), float("inf")
TINY = 2.0**-149  # the smallest positive FP32
FLOAT32_MAX = float(np.finfo(np.float32).max)

#: value -> what the format makes of it under scale 1
E4M3FN = {
    0.0: 0.0,
    447.0: 448.0,
    448.0: 448.0,
    449.0: 448.0,
    463.0: 448.0,
    464.0: 448.0,  # the tie between 448 and the code that is NaN: to even, and clamped anyway
    465.0: 448.0,
    480.0: 448.0,
    1e30: 448.0,
    432.0: 448.0,  # ties of the last binade: 416 | 432 | 448
    400.0: 384.0,
    2.0**-6: 2.0**-6,
    2.0**-9: 2.0**-9,
    2.0**-10: 0.0,  # half the smallest subnormal, a tie: to even, which is 0
    2.0**-10 * (1 + 2.0**-23): 2.0**-9,
    2.0**-10 * (1 - 2.0**-24): 0.0,
    1.5 * 2.0**-10: 2.0**-9,
    1.5 * 2.0**-9: 2.0**-8,  # a tie between 1 and 2 subnormals: to even
    2.5 * 2.0**-9: 2.0**-8,
    7.5 * 2.0**-9: 2.0**-6,  # rounds up into the normals
    1.0625: 1.0,
    1.1875: 1.25,
    1.0626: 1.125,
    TINY: 0.0,
}
E5M2 = {
    0.0: 0.0,
    57344.0: 57344.0,
    61439.0: 57344.0,
    61440.0: 57344.0,  # torch and IEEE round this to Inf; a finite value is clamped
    65536.0: 57344.0,
    1e30: 57344.0,
    53248.0: 49152.0,  # a tie: to even
    45056.0: 49152.0,
    2.0**-14: 2.0**-14,
    2.0**-16: 2.0**-16,
    2.0**-17: 0.0,
    1.5 * 2.0**-17: 2.0**-16,
    1.5 * 2.0**-16: 2.0**-15,
    3.5 * 2.0**-16: 2.0**-14,
    1.125: 1.0,
    1.375: 1.5,
    TINY: 0.0,
}


def _one(number_format: str) -> Cast:
    return Cast(format=number_format, scaling="static", scale_inv=1.0)


@pytest.mark.parametrize(
    ("number_format", "x", "expected"),
    [*(("e4m3fn", *pair) for pair in E4M3FN.items()), *(("e5m2", *pair) for pair in E5M2.items())],
)
def test_border_values(number_format: str, x: float, expected: float) -> None:
    q = quantize(torch.tensor([x, -x]), _one(number_format))
    assert q.data.float().tolist() == [expected, -expected]
    assert oracle.round_to_format(np.array([x], np.float32), number_format).tolist() == [expected]


@pytest.mark.parametrize(
    ("number_format", "codes"),
    [
        ("e4m3fn", {NAN: 0x7F, INF: 0x7F, -INF: 0xFF, 448.0: 0x7E, -448.0: 0xFE, 0.0: 0x00, 2.0**-9: 0x01}),
        ("e5m2", {NAN: 0x7F, INF: 0x7C, -INF: 0xFC, 57344.0: 0x7B, -1e9: 0xFB, 0.0: 0x00, 2.0**-16: 0x01}),
    ],
)
def test_codes_of_special_values(number_format: str, codes: dict[float, int]) -> None:
    for x, code in [*codes.items(), (-0.0, 0x80)]:
        q = quantize(torch.tensor([x]), _one(number_format))
        found = int(q.data.view(torch.uint8))
        assert found == code or (math.isnan(x) and found & 0x7F == code), f"{x}: {found:#x}"


def test_infinity_becomes_nan_where_the_format_has_none() -> None:
    x = torch.tensor([1.0, INF, -INF, NAN])
    assert dequantize(quantize(x, _one("e4m3fn")), _one("e4m3fn")).isnan().tolist() == [False, True, True, True]
    assert dequantize(quantize(x, _one("e5m2")), _one("e5m2"))[:3].tolist() == [1.0, INF, -INF]


@pytest.mark.parametrize("number_format", ["e4m3fn", "e5m2"])
def test_every_code_half_way_and_neighbour_against_ml_dtypes(number_format: str) -> None:
    fmt = FORMATS[number_format]
    codes = oracle.values_of(number_format)
    middles = (codes[1:] + codes[:-1]) / 2
    points = np.concatenate([codes, middles]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))])
    points = np.clip(np.concatenate([points, -points]), -fmt.max, fmt.max)
    expected = points.astype(getattr(ml_dtypes, fmt.torch_dtype)).view(np.uint8)
    found = quantize(torch.from_numpy(points), _one(number_format)).data.view(torch.uint8).numpy()
    assert np.array_equal(found, expected)
    assert np.array_equal(oracle.round_to_format(points, number_format), expected.view(fmt.torch_dtype).astype(float))


@pytest.mark.parametrize("number_format", ["e4m3fn", "e5m2"])
def test_a_million_values_against_ml_dtypes(number_format: str) -> None:
    fmt = FORMATS[number_format]
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    points = bits.view(np.float32)
    points = points[np.isfinite(points)].clip(-fmt.max, fmt.max)
    found = quantize(torch.from_numpy(points), _one(number_format)).data.view(torch.uint8).numpy()
    assert np.array_equal(found, points.astype(getattr(ml_dtypes, fmt.torch_dtype)).view(np.uint8))


@pytest.mark.parametrize("number_format", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("exponent", range(-100, 100, 7))
def test_scales_at_exact_powers_of_two(number_format: str, exponent: int) -> None:
    """2^floor(log2(max / a)) by exponent bits: one ulp decides, and log2 in floating point would miss it."""
    largest = FORMATS[number_format].max
    emax = FORMATS[number_format].emax
    for factor, ceil, floor in (
        (1.0, 0, 0),
        (1.75, 0, 0),  # max is 1.75 * 2^emax: the last amax that this scale holds
        (np.nextafter(np.float32(1.75), np.float32(2)), 1, 0),
        (np.nextafter(np.float32(1.75), np.float32(1)), 0, 0),
        (np.nextafter(np.float32(2), np.float32(1)), 1, 0),
        (2.0, 1, 1),
    ):
        x = torch.tensor([float(factor) * 2.0**exponent])
        for rounding, up in (("pow2_ceil", ceil), ("pow2_floor", floor)):
            q = quantize(x, Cast(format=number_format, scale_rounding=rounding))
            assert float(q.scale_inv) == 2.0 ** (exponent - emax + up), f"{factor} {rounding}"
            clips = float(x) / float(q.scale_inv) > largest
            assert clips == (rounding == "pow2_floor" and 1.75 < float(factor) < 2)


@pytest.mark.parametrize(("factor", "saturated"), [(1.0, 0), (1.75, 0), (1.7501, 1), (1.999, 1), (2.0, 0)])
def test_pow2_floor_clips_above_175(factor: float, saturated: int) -> None:
    x = torch.tensor([[factor, -0.3, 0.1]])
    assert measure(x, Cast(granularity="1x32", scale_rounding="pow2_floor"))["num_saturated"] == saturated
    assert measure(x, Cast(granularity="1x32", scale_rounding="pow2_ceil"))["num_saturated"] == 0
    assert measure(x, Cast(granularity="1x32"))["num_saturated"] == 0


def test_saturation_has_a_guard_of_eight_ulps() -> None:
    cast = _one("e4m3fn")
    limit = 448 * (1 + 2.0**-20)
    above = float(np.nextafter(np.float32(limit), np.float32(1e3)))
    assert measure(torch.tensor([limit, -limit, 448.0]), cast)["num_saturated"] == 0
    assert measure(torch.tensor([above, -above, 448.0]), cast)["num_saturated"] == 2


def test_current_scaling_never_saturates() -> None:
    x = torch.rand(2000, 1, generator=torch.Generator().manual_seed(1)).exp()
    for number_format in ("e4m3fn", "e5m2"):
        for rounding in ("none", "pow2_ceil"):
            found: dict[str, Any] = measure(x, Cast(format=number_format, granularity="rowwise", scale_rounding=rounding))
            assert found["num_saturated"] == 0 and found["sqnr_db"] > 19


@pytest.mark.parametrize("number_format", ["e4m3fn", "e5m2"])
def test_a_finite_value_saturates_even_when_its_scaled_value_is_beyond_fp32(number_format: str) -> None:
    cast = Cast(format=number_format, scaling="static", scale_inv=1e-3)
    x = torch.tensor([1e38, -1e38, 3e37])
    largest = FORMATS[number_format].max
    assert quantize(x, cast).data.float().tolist() == [largest, -largest, largest]
    found: dict[str, Any] = measure(x, cast)
    assert found["num_saturated"] == 3 and found["num_actual_nonfinite"] == 0
    assert found["headroom"] > 1e30


@pytest.mark.parametrize(
    ("amax", "rounding", "scale", "eps_blocks"),
    [
        (2e-36, "none", None, 0),
        (448 / FLOAT32_MAX, "none", None, 0),
        (1e-38, "none", FLOAT32_MAX, 1),
        (1e-41, "none", FLOAT32_MAX, 1),
        (TINY, "none", FLOAT32_MAX, 1),
        (TINY, "pow2_ceil", 2.0**127, 1),
        (TINY, "pow2_floor", 2.0**127, 1),
        (1e-38, "pow2_floor", 2.0**127, 1),
        (0.0, "none", 1.0, 0),
        (0.0, "pow2_floor", 1.0, 0),
    ],
)
def test_a_scale_beyond_fp32(amax: float, rounding: str, scale: float | None, eps_blocks: int) -> None:
    x = torch.tensor([[amax, 0.0, -amax]])
    cast = Cast(granularity="1x128", scale_rounding=rounding)
    q = quantize(x, cast)
    expected = np.float32(448) / np.float32(amax) if scale is None else np.float32(scale)
    assert q.scale_inv.item() == float(np.float32(1) / expected)
    assert dequantize(q, cast).isfinite().all()
    found: dict[str, Any] = measure(x, cast)
    assert found["num_eps_blocks"] == eps_blocks
    assert found["num_zero_blocks"] == (amax == 0)
    assert found["num_nan"] == found["num_inf"] == found["num_actual_nonfinite"] == 0


@pytest.mark.parametrize("rounding", ["none", "pow2_ceil", "pow2_floor"])
@pytest.mark.parametrize("granularity", ["tensorwise", "1x128", "128x128"])
def test_zeros_have_scale_one_with_and_without_eps(rounding: str, granularity: str) -> None:
    for eps in (0.0, 1e-12):
        cast = Cast(granularity=granularity, scale_rounding=rounding, amax_eps=eps)
        q = quantize(torch.zeros(4, 200), cast)
        assert (q.scale_inv == 1).all() and (q.data.float() == 0).all()


def test_amax_eps_is_a_lower_bound() -> None:
    x = torch.tensor([[1e-6], [1e-3], [1e-4], [0.0]])
    cast = Cast(granularity="rowwise", amax_eps=1e-4)
    expected = [float(np.float32(1) / (np.float32(448) / np.float32(a))) for a in (1e-4, 1e-3, 1e-4)]
    assert quantize(x, cast).scale_inv.flatten().tolist() == [*expected, 1.0]
    found: dict[str, Any] = measure(x, cast)
    assert (found["num_eps_blocks"], found["num_zero_blocks"], found["num_blocks"]) == (1, 1, 4)


def test_minus_zero() -> None:
    found: dict[str, Any] = measure(torch.tensor([[-0.0, 0.0, 1.0, -(2.0**-40)]]), Cast())
    assert (found["num_zero"], found["num_underflow"]) == (2, 1)
    assert found["underflow_rate"] == 0.25 and found["underflow_nonzero_rate"] == 0.5
    data = quantize(torch.tensor([[-0.0, 1.0, -(2.0**-40)]]), Cast()).data
    assert data.float().signbit().tolist() == [[True, False, True]]


def test_a_block_with_nan_takes_the_amax_of_its_finite_values() -> None:
    x = torch.tensor([[NAN, 2.0, -INF, 1.0], [NAN, INF, NAN, INF]])
    cast = Cast(granularity="rowwise")
    q = quantize(x, cast)
    assert q.scale_inv.flatten().tolist() == [float(np.float32(1 / 224)), 1.0]
    found: dict[str, Any] = measure(x, cast)
    assert (found["num_nan"], found["num_inf"], found["num_zero_blocks"]) == (3, 3, 1)
    assert found["amax"] == 2.0 and found["amin"] == 1.0
    assert found["sqnr_db"] == INF and found["sum_x2"] == 5.0


def test_subnormals_and_underflow() -> None:
    cast = _one("e4m3fn")
    x = torch.tensor([2.0**-6, 2.0**-7, -(2.0**-9), 2.0**-10, 2.0**-11, 0.0, 1.0])
    found: dict[str, Any] = measure(x, cast)
    assert (found["num_subnormal"], found["num_underflow"], found["num_zero"]) == (2, 2, 1)


def test_histogram_bins() -> None:
    x = torch.tensor([2.0**-46, 2.0**-45, 2.0**-44, 1.0, 1.999, 2.0, -(2.0**18), 2.0**60, TINY, 0.0, INF, NAN])
    hist: Any = measure(x, Cast())["log2_hist"]
    assert {i - 45: n for i, n in enumerate(hist) if n} == {-45: 3, -44: 1, 0: 2, 1: 1, 18: 2}
    below = float(np.nextafter(np.float32(2), np.float32(1)))
    one: Any = measure(torch.tensor([below]), Cast())["log2_hist"]
    assert one[45] == 1

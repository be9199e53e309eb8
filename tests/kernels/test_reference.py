"""``measure`` and ``quantize`` against the oracle, over distributions, shapes, dtypes and casts; then properties by name."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS, GRANULARITIES
from fp8debug.kernels.dispatch import dequantize, measure, quantize
from fp8debug.recipes import SCALE_ROUNDINGS, Cast
from tests.kernels import oracle

COUNTS = (
    *("numel", "num_zero", "num_nan", "num_inf", "num_underflow", "num_subnormal", "num_saturated"),
    *("num_blocks", "num_zero_blocks", "num_eps_blocks", "log2_hist"),
)


def _seeded(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _uniform(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _zero_block() -> Tensor:
    x = _seeded((256, 384), 5)
    x[:128, 128:256] = 0
    x[130] = -0.0
    return x


def _outliers() -> Tensor:
    x = _seeded((130, 300), 6)
    x[3, 7], x[100, 299] = 3e4, -1e5
    return x


def _not_finite() -> Tensor:
    x = _seeded((129, 257), 7)
    x[0, :130] = float("nan")
    x[1, 5], x[1, 200], x[40, 40] = float("inf"), float("-inf"), float("nan")
    x[2, :128] = float("inf")
    return x


def _unequal_rows() -> Tensor:
    return _seeded((64, 256), 8) * torch.logspace(-9, 3, 64)[:, None]


def _ties() -> Tensor:
    """Under scale 1 or a power of two, every value lies on a code or half way between two."""
    steps = torch.arange(-448, 449)
    return torch.cat([steps, steps / 16, steps / 2**9, steps / 2**10]).float().reshape(4, -1)


def _subnormal() -> Tensor:
    return _seeded((40, 256), 9) * torch.logspace(-44.5, -36, 40, dtype=torch.float64)[:, None].float()


DISTRIBUTIONS: dict[str, Any] = {
    "normal": lambda: _seeded((128, 384)),
    "normal bf16 ragged": lambda: _seeded((131, 389), 1).bfloat16(),
    "uniform fp16": lambda: _uniform((96, 256), 2).half(),
    "lognormal wide": lambda: (_seeded((100, 500), 3) * 6).exp() * _seeded((100, 500), 4).sign(),
    "sparse": lambda: _seeded((64, 640), 5) * (_uniform((64, 640), 6) < 0.02),
    "outliers": _outliers,
    "heavy tail": lambda: _seeded((128, 256), 7) / _seeded((128, 256), 8).abs().clamp(min=1e-6),
    "constant": lambda: torch.full((130, 130), 0.3),
    "constant at the maximum": lambda: torch.full((4, 256), -448.0),
    "zeros": lambda: torch.zeros(100, 200),
    "zero block": _zero_block,
    "subnormal": _subnormal,
    "all subnormal": lambda: _seeded((64, 128), 10) * 1e-41,
    "smallest": lambda: torch.full((3, 128), 1e-45),
    "huge": lambda: (_uniform((64, 200), 11) - 0.5) * 3e38,
    "not finite": _not_finite,
    "only NaN": lambda: torch.full((4, 130), float("nan")),
    "gradients bf16": lambda: (_seeded((256, 256), 12) * 1e-9).bfloat16(),
    "unequal rows": _unequal_rows,
    "ties": _ties,
    "3-D bf16": lambda: _seeded((3, 50, 260), 13).bfloat16(),
    "1-D": lambda: _seeded((1000,), 14),
    "0-d": lambda: torch.tensor(-0.7),
    "one column": lambda: _seeded((300, 1), 15),
    "empty": lambda: torch.zeros(0, 128),
    "empty columns": lambda: torch.zeros(7, 0),
    "empty 1-D": lambda: torch.zeros(0),
    "transposed": lambda: _seeded((200, 150), 16).t(),
    "strided bf16": lambda: _seeded((128, 600), 17).bfloat16()[::2, ::3],
    "expanded": lambda: _seeded((1, 256), 18).expand(40, 256),
}

MX = ("e2m1fn", "e2m3fn", "e3m2fn", "e4m3fn", "e5m2")
POW2 = tuple(r for r in SCALE_ROUNDINGS if r != "none")
NVFP4 = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor")

CASTS: list[tuple[Cast, tuple[float, ...]]] = [
    *((Cast(granularity=granularity), ()) for granularity in GRANULARITIES),
    *((Cast(format=f, granularity=g), ()) for f in FORMATS if not FORMATS[f].scale_only for g in ("tensorwise", "1x32", "16x16")),
    *((Cast(format=f, granularity="1x32", scale_format="e8m0", scale_rounding=r), ()) for f, r in product(MX, POW2)),
    (Cast(granularity="32x1", scale_format="e8m0"), ()),
    *((replace(NVFP4, granularity=g), ()) for g in ("1x16", "16x1", "16x16", "1x32")),
    *((replace(NVFP4, tensor_scale=t), ()) for t in ("none", "row")),
    (replace(NVFP4, granularity="16x1", tensor_scale="row", amax_eps=1e-12), ()),
    *((replace(NVFP4, granularity=g, hadamard=16), ()) for g in ("1x16", "16x1")),
    (replace(NVFP4, tensor_scale="row", granularity="16x1", hadamard=16), ()),
    *((replace(NVFP4, granularity=g, four_over_six=True), ()) for g in ("1x16", "16x16")),
    *((Cast(format=f, granularity="1x32", rounding="stochastic", seed=s), ()) for f, s in (("e4m3fn", 0), ("e2m1fn", 2**40))),
    (replace(NVFP4, granularity="16x1", rounding="stochastic", hadamard=16), ()),
    *((Cast(granularity=g, format="e5m2"), ()) for g in ("tensorwise", "rowwise", "1x128", "128x128", "1x32")),
    *((Cast(granularity=g, scale_rounding="pow2_ceil"), ()) for g in ("tensorwise", "1x128", "128x128", "1x32")),
    *((Cast(granularity=g, scale_rounding="pow2_floor"), ()) for g in ("tensorwise", "rowwise", "128x1", "1x32")),
    *((Cast(granularity="1x32", format="e5m2", scale_rounding=r), ()) for r in ("pow2_ceil", "pow2_floor")),
    *((Cast(granularity="1x128", amax_eps=e), ()) for e in (1e-12, 1e-10, 1e-4)),
    (Cast(granularity="128x128", amax_eps=1e-12, scale_rounding="pow2_ceil"), ()),
    (Cast(granularity="128x1", amax_eps=1e-4, scale_rounding="pow2_floor", format="e5m2"), ()),
    *((Cast(scaling="static", scale_inv=s), ()) for s in (1.0, 0.01, 3e-5)),
    (Cast(scaling="static", scale_inv=0.125, granularity="1x128", format="e5m2"), ()),
    (Cast(scaling="static", scale_inv=2.0**-127), ()),
    *((Cast(scaling="delayed", format=f, amax_eps=e), ()) for f, e in (("e4m3fn", 0.0), ("e5m2", 1e-4))),
    (Cast(scaling="delayed", margin=2), ()),
    (Cast(scaling="delayed", history=4), (100.0, 1.0, 2.5, 0.5, 0.75)),
    (Cast(scaling="delayed", history=5, margin=-1), (100.0, 1.0, 2.5, 0.5, 0.75)),
    (Cast(scaling="delayed", algo="most_recent"), (9.0, 3.0)),
    (Cast(scaling="delayed", algo="most_recent", margin=1, scale_rounding="pow2_ceil"), (9.0, 1e-3)),
    (Cast(scaling="delayed", history=2, format="e5m2"), (1e-9, 1e-8)),
    (Cast(scaling="delayed", history=2), (1e-30, 1e-31)),
]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_measure_equals_the_oracle(name: str) -> None:
    x = DISTRIBUTIONS[name]()
    as_numpy = x.float().numpy()
    for cast, history in CASTS:
        if cast.scaling == "static" and cast.scale_inv == 2.0**-127 and "huge" in name:
            continue  # sums beyond float64 are no question of ours
        found, expected = measure(x, cast, history), oracle.measure(as_numpy, cast, history)
        for key in COUNTS:
            assert found[key] == expected[key], f"{key} of {name} under {cast}"
        _compare(found, expected, f"of {name} under {cast}")


def _compare(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    if expected.get("sqnr_db") is not None:
        # Beyond 80 dB FP32's own error in y = data * scale_inv, at 150 dB, begins to count.
        assert min(found["sqnr_db"], 80) == pytest.approx(min(expected["sqnr_db"], 80), abs=1e-3), where
        lossless = expected["sqnr_db"] > 80
    else:
        assert found["sqnr_db"] is None, where
        lossless = True
    close = {"sum_x", "sum_x2", "amax", "amin", "scale_inv_min", "scale_inv_max", "scale_inv_sum_log2"}
    noise = {"sum_err2", "max_abs_err", "mse", "nmse", "worst_block_nmse"}
    for key, value in expected.items():
        if key in COUNTS or key == "sqnr_db" or (key in noise and lossless):
            continue
        got = found[key]
        if key == "headroom" and value is not None and not 1e-35 < value < 1e33:
            assert got < 1e-35 or got > 1e33, where  # at the ends of FP32, which is what holds the scaled value
            continue
        if value is None or got is None:
            assert got is None and value is None, f"{key} {where}: {got}, {value}"
            continue
        tolerance = 1e-12 if key in close else 5e-3 if key in noise and expected["sqnr_db"] > 45 else 1e-5
        # What cancels is as exact as the terms it is made of.
        size = {"sum_x": expected["numel"] * expected["amax"]}
        size |= {"sum_err": expected["numel"] * expected["amax"], "bias": expected["amax"]}
        assert got == pytest.approx(value, rel=tolerance, abs=tolerance * size.get(key, 0)), f"{key} {where}"


@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if "empty" not in name])
def test_data_and_scale_inv_equal_the_oracle(name: str) -> None:
    x = DISTRIBUTIONS[name]()
    flat = x.float().reshape(-1, x.shape[-1] if x.dim() else 1).numpy()
    for cast, history in CASTS:
        if history:
            continue
        q = quantize(x, cast)
        assert q.data.shape == x.shape and str(q.data.dtype) == f"torch.{FORMATS[cast.format].data_dtype}"
        _, finite, data, _, scale_inv, _ = oracle.quantize(flat, cast)
        np.testing.assert_array_equal(q.scale_inv.numpy(), scale_inv, err_msg=f"{name} under {cast}")
        found = q.data.float().reshape(flat.shape).numpy()
        np.testing.assert_array_equal(found[finite], data[finite], err_msg=f"{name} under {cast}")
        assert not np.isfinite(found[~finite]).any()
        y = dequantize(q, cast)
        assert y.dtype == torch.float32 and y.shape == x.shape
        assert torch.equal(dequantize(q, cast, torch.bfloat16), y.bfloat16()) or not finite.all()


def test_the_scale_is_rounded_once() -> None:
    """448 / a, not 448 * (1 / a): a quarter of all amaxes differ by one ulp."""
    amaxes = _uniform((4096, 1)) + 0.5
    q = quantize(amaxes, Cast(granularity="rowwise"))
    expected = np.float32(1) / (np.float32(448) / amaxes.numpy())
    assert np.array_equal(q.scale_inv.numpy(), expected)


def test_blocks_of_a_column_are_those_of_the_transposed_row() -> None:
    x = _seeded((300, 200), 20)
    for across, down in (("1x128", "128x1"), ("1x32", "32x1"), ("rowwise", "columnwise")):
        a, b = quantize(x, Cast(granularity=across)), quantize(x.t(), Cast(granularity=down))
        assert torch.equal(a.data.float(), b.data.t().float())
        assert torch.equal(a.scale_inv, b.scale_inv.t())


@pytest.mark.parametrize(
    ("shape", "granularity", "grid"),
    [
        ((300, 200), "1x128", (300, 2)),
        ((300, 200), "128x1", (3, 200)),
        ((300, 200), "128x128", (3, 2)),
        ((300, 200), "tensorwise", (1, 1)),
        ((300, 200), "rowwise", (300, 1)),
        ((2, 3, 64), "1x32", (6, 2)),
        ((130,), "1x128", (1, 2)),
        ((), "128x128", (1, 1)),
        ((0, 200), "1x128", (0, 2)),
    ],
)
def test_grid_of_scales(shape: tuple[int, ...], granularity: str, grid: tuple[int, int]) -> None:
    q = quantize(torch.ones(shape), Cast(granularity=granularity))
    assert q.data.shape == shape
    assert q.scale_inv.shape == grid and q.scale_inv.dtype == torch.float32
    assert dequantize(q, Cast(granularity=granularity)).shape == shape


def test_gradients_are_left_alone() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    assert not quantize(x, Cast()).scale_inv.requires_grad
    assert measure(x, Cast())["numel"] == 16


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_only_high_precision_tensors(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 5).to(dtype)
    message = f"expected a bf16, fp16 or fp32 tensor, got {str(dtype)[6:]}[3, 5]; convert it with .float() first"
    for call in (quantize, measure):
        with pytest.raises(UsageError) as error:
            call(x, Cast())
        assert str(error.value) == message


def test_a_tensor_without_values_is_refused() -> None:
    for call in (quantize, measure):
        with pytest.raises(UsageError) as error:
            call(torch.ones(3, 5, device="meta"), Cast(granularity="1x128"))
        assert str(error.value) == "expected a tensor with values, got one of device 'meta', [3, 5]; move the module off it first"


def test_fp64_is_rounded_to_fp32() -> None:
    x = _seeded((64, 64), 21)
    assert measure(x.double(), Cast()) == measure(x, Cast())


def test_every_statistic_is_a_plain_number_or_none() -> None:
    for name in ("normal", "zeros", "empty", "only NaN"):
        for key, value in measure(DISTRIBUTIONS[name](), Cast(granularity="1x128")).items():
            if key == "log2_hist":
                assert isinstance(value, list) and len(value) == 64 and all(type(v) is int for v in value)
            else:
                assert value is None or type(value) is int or (isinstance(value, float) and not math.isnan(value)), key


@pytest.mark.parametrize("name", ["empty", "zeros", "only NaN"])
def test_no_data_is_none(name: str) -> None:
    found: dict[str, Any] = measure(DISTRIBUTIONS[name](), Cast(granularity="1x128"))
    for key in ("sqnr_db", "nmse", "cosine", "gain", "norm_ratio", "underflow_nonzero_rate", "amin", "headroom"):
        assert found[key] is None, key
    for key in ("scale_inv_min", "scale_inv_max", "worst_block_nmse", "max_block_range_log2", "scale_log2_ratio"):
        assert found[key] is None, key
    for key in ("mse", "bias"):  # over finite pairs
        assert found[key] == (0 if name == "zeros" else None), key
    for key in ("underflow_rate", "zero_rate", "nonfinite_rate"):
        assert found[key] == (None if name == "empty" else {"zeros": "zero", "only NaN": "nonfinite"}[name] in key), key


def test_closed_form_of_gaussian_data() -> None:
    x = _seeded((1024, 1024), 22)
    for cast, sqnr_db in (
        (Cast(granularity="rowwise"), 31.5),
        (Cast(format="e5m2", granularity="rowwise"), 25.55),
        (Cast(format="e5m2"), 25.55),
    ):
        found: dict[str, Any] = measure(x, cast)
        assert found["sqnr_db"] == pytest.approx(sqnr_db, abs=0.15), str(cast)
        assert found["gain"] == pytest.approx(1, abs=0.002 if cast.format == "e4m3fn" else 0.005)
        assert found["num_saturated"] == 0
        assert found["headroom"] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("number_format", "worst"), [("e4m3fn", 1 / 17), ("e5m2", 1 / 9)])
def test_largest_relative_error_of_a_normal_value(number_format: str, worst: float) -> None:
    x = torch.linspace(1, 2, 2**14 + 1)
    cast = Cast(format=number_format, scaling="static", scale_inv=1.0)
    error = ((dequantize(quantize(x, cast), cast) - x).abs() / x).max()
    assert float(error) == pytest.approx(worst, rel=1e-3)


@pytest.mark.parametrize(
    ("history", "cast", "amax"),
    [
        ((), Cast(scaling="delayed"), 2.0),
        ((8.0, 4.0), Cast(scaling="delayed"), 8.0),
        ((8.0, 4.0), Cast(scaling="delayed", history=1), 4.0),
        ((8.0, 4.0), Cast(scaling="delayed", algo="most_recent"), 4.0),
        ((0.0, 0.0), Cast(scaling="delayed"), 2.0),
        ((8.0, 0.0), Cast(scaling="delayed", algo="most_recent"), 8.0),
        ((8.0, float("inf"), float("nan")), Cast(scaling="delayed"), 8.0),
        ((8.0,), Cast(scaling="delayed", margin=1), 16.0),
    ],
)
def test_delayed_scale(history: tuple[float, ...], cast: Cast, amax: float) -> None:
    found: dict[str, Any] = measure(torch.tensor([1.0, 2.0]), cast, history)
    assert found["headroom"] == pytest.approx(2.0 / amax)
    assert found["scale_log2_ratio"] == pytest.approx(math.log2(amax / 2.0), abs=1e-6)


def test_a_scale_off_by_two_shows_in_gain_alone() -> None:
    x = _seeded((128, 128), 23)
    cast = Cast(scaling="static", scale_inv=1 / 64)
    wrong = dequantize(quantize(x, cast), Cast()) * 2
    x64, y64 = x.double().flatten(), wrong.double().flatten()
    assert float((x64 @ y64) / (x64 @ x64)) == pytest.approx(2, abs=0.005)

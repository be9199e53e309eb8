"""Closed-form bounds hold for tensors of every kind, and tell a wrong operand where blocks of few bits bound little."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fp8debug
from fp8debug.formats import FORMATS
from fp8debug.metrics.limits import cast_floor_db
from fp8debug.recipes import RECIPES, Cast
from fp8debug.rules.reading.bounds import most_underflow, tensor_floor_db

TENSORS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(96, 128),
    "uniform": lambda: torch.rand(96, 128) - 0.5,
    "outliers": lambda: torch.randn(96, 128) * torch.randn(96, 128).exp2() ** 4,
    "tiny rows": lambda: torch.randn(96, 128) * torch.logspace(-6, 0, 96)[:, None],
    "all but flushed": lambda: torch.where(torch.rand(96, 128) < 1 / 64, 6.0, 0.24),
    "single elements": lambda: torch.randn(96, 128) * torch.nn.functional.one_hot(torch.randint(0, 128, (96,)), 128),
    "a row among tiny ones": lambda: torch.randn(96, 128) * torch.randn(96, 1).mul(4).exp(),
    "zero blocks": lambda: torch.randn(96, 128) * (torch.arange(128) < 64),
}


def _casts() -> Iterator[Cast]:
    names = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", "blockwise", "rowwise")
    found = {cast for name in names for cast in dict(RECIPES.get(name).casts).values() if cast is not None}
    return iter(sorted((cast for cast in found if cast.scaling == "current"), key=str))


@pytest.mark.parametrize("cast", list(_casts()), ids=str)
@pytest.mark.parametrize("name", TENSORS)
def test_no_correct_cast_lies_below_its_bounds(name: str, cast: Cast) -> None:
    for seed in range(16 if cast.rounding == "stochastic" else 1):
        torch.manual_seed(seed)
        found = fp8debug.measure(TENSORS[name](), replace(cast, seed=seed))
        sqnr = found["sqnr_db"]
        if sqnr is not None:  # no error at all
            assert float(str(sqnr)) >= max(cast_floor_db(cast), _floor(cast, found)), seed


@pytest.mark.parametrize("size_log2", [-120, -40, 18, 25, 80])
@pytest.mark.parametrize("cast", [cast for cast in _casts() if FORMATS[cast.format].bits < 8], ids=str)
def test_tensors_beyond_the_histogram_keep_their_bound(cast: Cast, size_log2: int) -> None:
    torch.manual_seed(0)
    found = fp8debug.measure(torch.randn(96, 128) * 2.0**size_log2, cast)
    assert float(str(found["sqnr_db"])) >= _floor(cast, found)


@pytest.mark.parametrize("format_name", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "1x128", "128x1", "128x128", "1x32"])
def test_rounding_to_nearest_makes_no_more_zeros_than_the_histogram_has(granularity: str, format_name: str) -> None:
    torch.manual_seed(0)
    for scale_rounding in ("none", "pow2_ceil", "pow2_floor"):
        cast = Cast(format=format_name, granularity=granularity, scale_rounding=scale_rounding)
        for name, tensor in TENSORS.items():
            for size_log2 in (-120, -40, 0, 25, 80):
                assert _unexplained(tensor() * 2.0**size_log2, cast) <= 0, (name, size_log2)


def test_zeros_under_a_stale_scale_are_those_of_the_histogram() -> None:
    torch.manual_seed(0)
    cast = Cast(granularity="tensorwise", scaling="delayed", history=4)
    for factor_log2 in range(0, 24, 4):
        x = torch.randn(96, 128)
        assert _unexplained(x, cast, [float(x.abs().amax()) * 2.0**factor_log2]) <= 0


def _unexplained(x: Tensor, cast: Cast, history: Sequence[float] = ()) -> int:
    found = fp8debug.measure(x, cast, history)
    scale, histogram = found["scale_inv_max"], found["log2_hist"]
    assert isinstance(scale, float) and isinstance(histogram, list)
    return int(str(found["num_underflow"])) - most_underflow(FORMATS[cast.format], histogram, scale)


def test_few_elements_that_are_rounded_at_random_may_all_have_bad_luck() -> None:
    for seed in range(300):
        torch.manual_seed(seed)
        x = torch.nn.functional.one_hot(torch.randint(0, 32, (32,)), 32) * torch.randn(32, 1).mul(3).exp()
        cast = Cast(
            format="e2m1fn",
            granularity="32x1",
            scale_rounding="pow2_ceil",
            scale_format="e8m0",
            rounding="stochastic",
            seed=seed,
        )
        found = fp8debug.measure(x, cast)
        assert found["sqnr_db"] is None or float(str(found["sqnr_db"])) >= _floor(cast, found), seed


def test_the_magnitudes_of_a_tensor_bound_a_square_block_of_four_bits() -> None:
    torch.manual_seed(0)
    (cast,) = (c for c in _casts() if c.granularity == "16x16")
    assert cast_floor_db(cast) < 3 and FORMATS[cast.format].bits == 4
    assert _floor(cast, fp8debug.measure(TENSORS["normal"](), cast)) > 9


def test_other_magnitudes_or_none_bound_nothing() -> None:
    (cast,) = (c for c in _casts() if c.hadamard and c.rounding != "stochastic")
    assert tensor_floor_db(cast, [1] * 64, 1.0, 1.0, 1.0) == -math.inf
    assert tensor_floor_db(Cast(), None, 1.0, 1.0, 1.0) == -math.inf


def _floor(cast: Cast, row: dict[str, object]) -> float:
    histogram, numbers = row["log2_hist"], [row[name] for name in ("amax", "scale_inv_max", "sum_x2")]
    assert isinstance(histogram, list | tuple)
    return tensor_floor_db(cast, histogram, *(float(str(number)) for number in numbers))

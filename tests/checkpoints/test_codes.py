"""Codes and rounding, against ml_dtypes and values by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8debug.checkpoints.codes import OF_DTYPE, decoded, rounded, spacing, table, unpacked
from fp8debug.checkpoints.layouts.base import unswizzled
from fp8debug.formats import FORMATS
from tests.test_formats import ml_dtype

DATA = [name for name, fmt in FORMATS.items() if not fmt.scale_only]


@pytest.mark.parametrize("name", DATA)
def test_rounding_is_to_nearest_even(name: str) -> None:
    largest, theirs = FORMATS[name].max, ml_dtype(name)
    grid = np.unique(table(name)[np.isfinite(table(name))])
    midpoints = (grid[1:].astype(np.float64) + grid[:-1]) / 2
    values = np.concatenate([grid, midpoints.astype(np.float32), np.random.default_rng(0).uniform(-largest, largest, 5000)])
    values = values.astype(np.float32)
    np.testing.assert_array_equal(rounded(values, name), values.astype(theirs).astype(np.float32))
    np.testing.assert_array_equal(rounded(np.array([1e30, -1e30, np.inf], np.float32), name), [largest, -largest, largest])


def test_spacing_at_the_borders() -> None:
    np.testing.assert_array_equal(
        spacing(np.array([448, 256, 1, 2**-6, 2**-9, 0], np.float32), "e4m3fn"), [32, 32, 2**-3, 2**-9, 2**-9, 2**-9]
    )


def test_the_types_of_files() -> None:
    names = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2", "F8_E4M3FNUZ": "e4m3fnuz", "F8_E5M2FNUZ": "e5m2fnuz", "F4": "e2m1fn"}
    assert OF_DTYPE == names
    np.testing.assert_array_equal(decoded(np.array([0x7F], np.uint8), "F4"), [-6.0, 6.0])


def test_other_types() -> None:
    x = torch.tensor([1.5, -2.0, 65280.0, float("inf")])
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")):
        raw = x.to(dtype).view(torch.uint8).numpy().copy()
        np.testing.assert_array_equal(decoded(raw, name), x.to(dtype).float().numpy())
    np.testing.assert_array_equal(
        decoded(np.array([127, 0, 254, 255], np.uint8), "F8_E8M0"), np.array([1, 2**-127, 2.0**127, np.nan], np.float32)
    )
    np.testing.assert_array_equal(unpacked(np.array([0x21, 0xF0], np.uint8)), [1, 2, 0, 15])


def test_swizzled_scales_lie_as_torchao_writes_them() -> None:
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scales = torch.arange(200 * 10, dtype=torch.float32).reshape(200, 10)
    np.testing.assert_array_equal(unswizzled(to_blocked(scales).numpy().ravel(), 1, 200, 10)[0], scales.numpy())

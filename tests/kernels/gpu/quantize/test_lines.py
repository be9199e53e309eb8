"""Slots of blocks that are whole rows or columns, from more lines and tiles than a program takes at once."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels.gpu.quantize.amax import LINES, TILES, finish_lines
from fp8debug.kernels.gpu.quantize.statistics import COUNTS, MAXIMA, MINIMA, SUMS

pytestmark = [pytest.mark.twins, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, TOP = 0.25, 448.0


@pytest.mark.parametrize("empty", ["none", "some", "all"])
@pytest.mark.parametrize(("lines", "tiles"), [(1, 1), (2 * LINES + 5, TILES + 3), (70 * LINES + 1, 2)])
def test_the_blocks_of_lines(lines: int, tiles: int, empty: str) -> None:
    """Against torch in FP64: counts and extremes equal, sums and what is made of them to a rounding; nothing but zeros too."""
    torch.manual_seed(lines)
    amax, parts = torch.rand(lines) + 0.01, torch.rand(tiles, 3, lines) + 0.01
    parts[:, 2] *= 0.01  # amin
    zero = {"none": amax < 0, "some": torch.arange(lines) % 3 == 0, "all": amax > 0}[empty]
    amax[zero], parts[:, :2, zero], parts[:, 2, zero] = 0.0, 0.0, math.inf
    scale_inv = torch.where(zero, 1.0, amax / TOP)
    slots = (
        torch.zeros(len(COUNTS), dtype=torch.int64, device=DEVICE),
        torch.zeros(len(SUMS), dtype=torch.float64, device=DEVICE),
        torch.zeros(len(MAXIMA), device=DEVICE),
        torch.zeros(len(MINIMA), device=DEVICE),
    )
    finish_lines(torch.cat([amax, parts.flatten()]).to(DEVICE), scale_inv.to(DEVICE), lines, EPS, TOP, slots)
    counts, sums, maxima, minima = (
        dict(zip(names, values.tolist(), strict=True))
        for names, values in zip((COUNTS, SUMS, MAXIMA, MINIMA), slots, strict=True)
    )
    filled = ~zero
    assert counts["num_zero_blocks"] == int(zero.sum())
    assert counts["num_eps_blocks"] == int((filled & (amax < EPS)).sum())
    if not filled.any():
        assert sums["scale_inv_sum_log2"] == 0.0 and minima["scale_inv_min"] == math.inf
        assert {maxima[name] for name in MAXIMA[2:]} == {-math.inf}
        return
    log2 = scale_inv[filled].double().log2()
    assert counts["num_scales"] == int(filled.sum())
    assert sums["scale_inv_sum2_log2"] == pytest.approx(float(log2.square().sum()), rel=1e-12)
    assert sums["scale_inv_sum_log2"] == pytest.approx(float(log2.sum()), rel=1e-12)
    assert maxima["scale_inv_max"] == float(scale_inv[filled].max()) and minima["scale_inv_min"] == float(scale_inv[filled].min())
    assert maxima["headroom"] == float((amax / scale_inv)[filled].max() / torch.tensor(TOP))
    signal, noise = parts[:, 0, filled].double().sum(0), parts[:, 1, filled].double().sum(0)
    assert maxima["worst_block_nmse"] == pytest.approx(float((noise / signal).max()), rel=1e-6)
    span = amax[filled].double() / parts[:, 2, filled].amin(0).double()
    assert maxima["max_block_range_log2"] == pytest.approx(float(span.log2().max()), rel=1e-6)

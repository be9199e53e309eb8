"""The short accumulator of numerics.md, 2: what it cuts, how that grows with K, and where promotion keeps it out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8debug.kernels import reference
from fp8debug.kernels.dispatch import Operand, gemm, quantize
from fp8debug.kernels.reference import short_gemm
from fp8debug.recipes import Cast
from fp8debug.types import Gemm

TENSORWISE = Cast()


def sqnr_db(actual: Tensor, exact: Tensor) -> float:
    return -10 * math.log10(float((actual - exact).double().square().sum() / exact.double().square().sum()))


def operands(m: int, n: int, k: int, *, uniform: bool = True) -> tuple[Operand, Operand]:
    generator = torch.Generator().manual_seed(k)
    draw = torch.rand if uniform else torch.randn
    a, b = (draw(rows, k, generator=generator).bfloat16() for rows in (m, n))
    return (quantize(a, TENSORWISE), TENSORWISE), (quantize(b, TENSORWISE), TENSORWISE)


def test_a_product_loses_what_lies_below_the_sum() -> None:
    """Bits of the sum so far decide: 1 + 2^-3 fits into four significant bits, 8 + 2^-3 does not."""
    ones = torch.ones(1, 33)
    values = torch.zeros(1, 33)
    values[0, 0], values[0, 32] = 1.0, 2.0**-3
    assert short_gemm(Gemm.FPROP, values, ones, bits=4).item() == 1.125
    values[0, 0] = 8.0
    assert short_gemm(Gemm.FPROP, values, ones, bits=4).item() == 8.0
    assert short_gemm(Gemm.FPROP, values, ones, bits=7).item() == 8.125
    values[0, 1] = -(2.0**-3)  # cut towards zero, each by itself
    assert short_gemm(Gemm.FPROP, values, ones, bits=4).item() == 8.0


@pytest.mark.parametrize("which", list(Gemm))
def test_with_all_bits_it_is_the_gemm(which: Gemm) -> None:
    m, n, k = 5, 7, 70
    shapes = {Gemm.FPROP: ((m, k), (n, k)), Gemm.DGRAD: ((m, n), (n, k)), Gemm.WGRAD: ((m, n), (m, k))}[which]
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes))
    exact = reference.gemm(which, a, b, accumulate=torch.float64)
    found = short_gemm(which, a, b, bits=24, dtype=torch.float64)
    assert found.shape == exact.shape and found.dtype == torch.float64
    assert sqnr_db(found, exact) > 120


def test_what_is_not_finite_stays_so() -> None:
    a = torch.tensor([[1.0, math.nan], [math.inf, 1.0], [0.0, 0.0]])
    found = short_gemm(Gemm.FPROP, a, torch.ones(1, 2))
    assert math.isnan(found[0, 0]) and not math.isfinite(found[1, 0]) and found[2, 0] == 0
    assert short_gemm(Gemm.FPROP, torch.ones(0, 4), torch.ones(3, 4)).shape == (0, 3)
    assert torch.equal(short_gemm(Gemm.FPROP, torch.ones(2, 0), torch.ones(3, 0)), torch.zeros(2, 3))


@pytest.mark.parametrize(("k", "lost", "db"), [(4096, 0.072, 22.8), (16384, 0.256, 11.8)], ids=["K=4096", "K=16384"])
def test_uniform_operands_lose_what_an_h200_loses(k: int, lost: float, db: float) -> None:
    """numerics.md, 2: 7.2 % and 25.6 % measured there; cutting each product explains them."""
    first, second = operands(16, 16, k)
    exact = reference.gemm(Gemm.FPROP, first, second, accumulate=torch.float64)
    fast = gemm(Gemm.FPROP, first, second, fast_accum=True)
    worst = float(((fast - exact) / exact).abs().max())
    assert worst == pytest.approx(lost, rel=0.2)
    assert sqnr_db(fast, exact) == pytest.approx(db, abs=1.5)
    assert sqnr_db(gemm(Gemm.FPROP, first, second), exact) > 100


def test_operands_of_both_signs_lose_far_less() -> None:
    found = {}
    for k in (1024, 4096):
        first, second = operands(16, 16, k, uniform=False)
        exact = reference.gemm(Gemm.FPROP, first, second, accumulate=torch.float64)
        found[k] = sqnr_db(gemm(Gemm.FPROP, first, second, fast_accum=True), exact)
    assert 45 < found[4096] < found[1024] < 65

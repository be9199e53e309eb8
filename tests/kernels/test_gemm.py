"""The three GEMMs of every recipe against float64 products of the dequantized operands."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8debug.kernels.dispatch import Operand, dequantize, gemm, quantize
from fp8debug.kernels.reference import PROMOTION
from fp8debug.recipes import Cast, Recipe, get_recipe, list_recipes
from fp8debug.types import OPERANDS, Gemm, TensorRole

#: M tokens, K in_features, N out_features: even tiles, ragged ones, smaller than a tile, single rows.
SHAPES = [(128, 256, 128), (130, 257, 200), (5, 33, 7), (1, 128, 1), (300, 31, 129)]


def _tensors(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> dict[TensorRole, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    shapes = {TensorRole.INPUT: (m, k), TensorRole.WEIGHT: (n, k), TensorRole.GRAD_OUTPUT: (m, n)}
    sizes = {TensorRole.INPUT: 1.0, TensorRole.WEIGHT: 0.02, TensorRole.GRAD_OUTPUT: 1e-6}
    return {role: (torch.randn(shapes[role], generator=generator) * sizes[role]).to(dtype) for role in shapes}


def _operand(x: Tensor, cast: Cast | None) -> Operand:
    return x if cast is None else (quantize(x, cast), cast)


def _operands(which: Gemm, recipe: Recipe, tensors: dict[TensorRole, Tensor]) -> tuple[Operand, Operand]:
    first, second = OPERANDS[which]
    return tuple(_operand(tensors[role], recipe.casts[which, role]) for role in (first, second))  # type: ignore[return-value]  # two


def _values64(operand: Operand) -> Tensor:
    if isinstance(operand, Tensor):
        return operand.double()
    return dequantize(*operand).double()


def _product(which: Gemm, a: Tensor, b: Tensor) -> Tensor:
    return {Gemm.FPROP: lambda: a @ b.t(), Gemm.DGRAD: lambda: a @ b, Gemm.WGRAD: lambda: a.t() @ b}[which]()


def _sqnr_db(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return -10 * math.log10(float((y - x).square().sum() / x.square().sum()))


@pytest.mark.parametrize("name", list_recipes())
@pytest.mark.parametrize("which", list(Gemm))
def test_gemm_is_the_product_of_the_dequantized_operands(name: str, which: Gemm) -> None:
    for m, k, n in SHAPES:
        tensors = _tensors(m, k, n)
        a, b = _operands(which, get_recipe(name), tensors)
        expected = _product(which, _values64(a), _values64(b))
        exact = gemm(which, a, b, dtype=torch.float64, accumulate=torch.float64)
        assert exact.shape == expected.shape == {"fprop": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[which.value]
        # FP32 rounds data * scale_inv when it dequantizes; the GEMM scales whole sums instead.
        size = float(_product(which, _values64(a).abs(), _values64(b).abs()).max())
        assert torch.allclose(exact, expected, rtol=0, atol=2e-7 * size), (m, k, n)
        fp32 = gemm(which, a, b)
        assert fp32.dtype == torch.float32
        assert torch.allclose(fp32.double(), expected, rtol=0, atol=2e-6 * size), (m, k, n)


@pytest.mark.parametrize("which", list(Gemm))
def test_the_scales_of_each_block_reach_their_own_products(which: Gemm) -> None:
    """Power-of-two data in blocks of very unequal size: every product and sum is exact, so the GEMM must be."""
    m, k, n = 260, 390, 257
    generator = torch.Generator().manual_seed(0)
    for name in ("blockwise_pow2", "mxfp8"):
        tensors = {}
        for role, x in _tensors(m, k, n).items():
            rows, columns = torch.arange(x.shape[0])[:, None] // 128, torch.arange(x.shape[1])[None, :] // 128
            tensors[role] = torch.randint(-4, 5, x.shape, generator=generator) * 2.0 ** (2 * rows - 3 * columns)
        recipe = get_recipe(name)
        a, b = _operands(which, recipe, tensors)
        first, second = (tensors[role] for role in OPERANDS[which])
        assert torch.equal(_values64(a), first.double()) and torch.equal(_values64(b), second.double())
        expected = _product(which, first.double(), second.double())
        assert torch.equal(gemm(which, a, b, dtype=torch.float64, accumulate=torch.float64), expected)


@pytest.mark.parametrize("which", list(Gemm))
@pytest.mark.parametrize("high", ["first", "second"])
@pytest.mark.parametrize("name", ["blockwise", "tensorwise_current", "mxfp8", "rowwise"])
def test_one_operand_in_high_precision(which: Gemm, high: str, name: str) -> None:
    role = OPERANDS[which][0 if high == "first" else 1]
    recipe = get_recipe(name).replace(which.value, role.value, cast=None)
    tensors = _tensors(130, 200, 140, torch.bfloat16)
    a, b = _operands(which, recipe, tensors)
    expected = _product(which, _values64(a), _values64(b))
    assert _sqnr_db(expected, gemm(which, a, b)) > 120
    result = gemm(which, a, b, dtype=torch.bfloat16)
    assert result.dtype == torch.bfloat16
    assert 50 < _sqnr_db(expected, result) < 60


@pytest.mark.parametrize("name", list_recipes())
@pytest.mark.parametrize(("m", "k", "n"), [(0, 256, 130), (130, 0, 64), (64, 130, 0), (0, 0, 0)])
def test_empty_dimensions(name: str, m: int, k: int, n: int) -> None:
    tensors = _tensors(m, k, n)
    for which, shape in ((Gemm.FPROP, (m, n)), (Gemm.DGRAD, (m, k)), (Gemm.WGRAD, (n, k))):
        result = gemm(which, *_operands(which, get_recipe(name), tensors))
        assert result.shape == shape and not result.count_nonzero()


def test_recipes_may_mix_granularities_and_formats() -> None:
    casts = [Cast(), Cast(granularity="1x32"), Cast(granularity="rowwise"), Cast(granularity="128x128", format="e5m2")]
    tensors = _tensors(130, 300, 140)
    for first in casts:
        for second in casts:
            for which in Gemm:
                a_role, b_role = OPERANDS[which]
                recipe = get_recipe("bf16").replace(which.value, a_role.value, cast=first)
                recipe = recipe.replace(which.value, b_role.value, cast=second)
                a, b = _operands(which, recipe, tensors)
                expected = _product(which, _values64(a), _values64(b))
                assert _sqnr_db(expected, gemm(which, a, b, accumulate=torch.float64, dtype=torch.float64)) > 130


def test_partial_sums_are_promoted_every_128() -> None:
    """In FP32 2^24 + 1 is 2^24: a hundred ones survive only when they are summed before they are added."""
    x, w = torch.zeros(1, 2 * PROMOTION), torch.zeros(1, 2 * PROMOTION)
    x[0, 0], w[0, 0] = 2.0**12, 2.0**12
    x[0, PROMOTION:], w[0, PROMOTION:] = 1.0, 1.0
    assert PROMOTION == 128
    for cast in (Cast(granularity="1x128"), Cast(granularity="1x128", scale_rounding="pow2_ceil")):
        result = gemm(Gemm.FPROP, (quantize(x, cast), cast), (quantize(w, cast), cast))
        assert float(result) == pytest.approx(2.0**24 + 128, abs=4)


def test_nan_and_infinity_reach_the_rows_that_read_them() -> None:
    tensors = _tensors(130, 256, 64)
    tensors[TensorRole.INPUT][3, 5] = float("inf")
    tensors[TensorRole.GRAD_OUTPUT][7, 9] = float("nan")
    recipe = get_recipe("blockwise")
    output = gemm(Gemm.FPROP, *_operands(Gemm.FPROP, recipe, tensors))
    assert output[3].isnan().all() and output.isfinite().sum() == 129 * 64
    grad_weight = gemm(Gemm.WGRAD, *_operands(Gemm.WGRAD, recipe, tensors))
    assert grad_weight[9].isnan().all() and grad_weight[:, 5].isnan().all()
    assert grad_weight.isfinite().sum() == 63 * 255


def test_closed_form_of_a_gemm() -> None:
    """Two operands of 31.5 dB make a result of 28.5 dB, in E5M2 of 25.55 dB one of 22.5 dB."""
    tensors = _tensors(512, 512, 512)
    e5m2 = get_recipe("rowwise").replace(format="e5m2")
    for recipe, sqnr_db in ((get_recipe("tensorwise_current"), 28.5), (get_recipe("rowwise"), 28.5), (e5m2, 22.55)):
        for which in Gemm:
            shadow = _product(which, *(tensors[role].double() for role in OPERANDS[which]))
            result = gemm(which, *_operands(which, recipe, tensors))
            assert _sqnr_db(shadow, result) == pytest.approx(sqnr_db, abs=0.25), (recipe.name, which)
    blockwise = [
        _sqnr_db(
            _product(which, *(tensors[role].double() for role in OPERANDS[which])),
            gemm(which, *_operands(which, get_recipe("blockwise"), tensors)),
        )
        for which in Gemm
    ]
    assert all(28.4 < sqnr_db < 29.3 for sqnr_db in blockwise), blockwise


def test_weight_blocks_serve_fprop_and_dgrad_alike() -> None:
    weight = _tensors(8, 300, 200)[TensorRole.WEIGHT]
    recipe = get_recipe("blockwise")
    fprop, dgrad = (recipe.casts[which, TensorRole.WEIGHT] for which in (Gemm.FPROP, Gemm.DGRAD))
    assert fprop is not None and fprop == dgrad
    grad_output = torch.eye(200)
    turned = gemm(Gemm.DGRAD, grad_output, (quantize(weight, fprop), fprop))
    straight = gemm(Gemm.FPROP, torch.eye(300), (quantize(weight, fprop), fprop))
    assert torch.equal(turned, straight.t())

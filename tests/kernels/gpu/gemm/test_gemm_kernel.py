"""The Triton GEMM equals the reference's: on the GPU, and on the CPU by Triton's interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.errors import UsageError
from fp8debug.kernels import dispatch, reference
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.gemm.gemm import fastest, gemm, prepared
from fp8debug.kernels.gpu.quantize.quantize import quantize
from fp8debug.recipes import Cast, Recipe, get_recipe
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized, TensorRole

pytestmark = [
    pytest.mark.twins,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Operands = list[tuple[Quantized, Cast]]


def operands(which: Gemm, m: int, n: int, k: int, recipe: Recipe) -> Operands:
    """The two operands of a Linear's GEMM with M tokens, N out_features and K in_features."""
    generator = torch.Generator().manual_seed(m + n + k)
    shapes = {TensorRole.INPUT: (m, k), TensorRole.WEIGHT: (n, k), TensorRole.GRAD_OUTPUT: (m, n)}
    found = []
    for role in OPERANDS[which]:
        cast = recipe.casts[which, role]
        assert cast is not None
        x = torch.randn(shapes[role], generator=generator)
        x *= torch.logspace(-1, 1, x.shape[0])[:, None]
        layout = "columns" if (which, role) in CONTRACTS_ROWS else "rows"
        found.append((quantize(x.to(torch.bfloat16).to(DEVICE), cast, layout=layout)[0], cast))
    return found


def sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = (actual.double() - expected.double()).square().sum() / expected.double().square().sum()
    return float(-10 * error.clamp(min=1e-30).log10())


@pytest.mark.parametrize(
    "recipe", ["blockwise", "tensorwise_current", "rowwise", "blockwise_pow2"][: 4 if DEVICE == "cuda" else 3]
)
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_equals_reference(which: Gemm, recipe: str) -> None:
    for m, n, k in ((48, 32, 256), (40, 72, 144), (37, 50, 133))[0 if DEVICE == "cuda" else 2 :]:
        first, second = operands(which, m, n, k, get_recipe(recipe))
        wanted = reference.gemm(which, first, second, accumulate=torch.float64)
        found = gemm(which, first, second, dtype=torch.float32)
        assert found.shape == wanted.shape
        # A tensor core keeps about 14 bits of a sum over 128 products; the interpreter sums in FP32.
        assert sqnr_db(found, wanted) > (120 if INTERPRETED else 65)
        assert sqnr_db(gemm(which, first, second, dtype=torch.bfloat16), wanted) > (45 if INTERPRETED else 50)  # it truncates


def test_adds_to_a_gradient() -> None:
    first, second = operands(Gemm.WGRAD, 144, 40, 24, get_recipe("blockwise"))
    gradient = torch.ones(40, 24, device=DEVICE)
    assert gemm(Gemm.WGRAD, first, second, out=gradient) is gradient
    assert sqnr_db(gradient, 1 + reference.gemm(Gemm.WGRAD, first, second, accumulate=torch.float64)) > 65


def test_fast_accum_needs_one_scale() -> None:
    first, second = operands(Gemm.FPROP, 32, 32, 256, get_recipe("blockwise"))
    with pytest.raises(UsageError, match="with fast_accum"):
        gemm(Gemm.FPROP, first, second, fast_accum=True)
    first, second = operands(Gemm.FPROP, 32, 32, 256, get_recipe("tensorwise_current"))
    wanted = reference.gemm(Gemm.FPROP, first, second, accumulate=torch.float64)
    assert sqnr_db(gemm(Gemm.FPROP, first, second, fast_accum=True), wanted) > 40


def test_refuses_other_granularities() -> None:
    first, second = operands(Gemm.FPROP, 32, 32, 256, get_recipe("mxfp8"))
    with pytest.raises(UsageError, match="per 128 of the contracted dimension"):
        gemm(Gemm.FPROP, first, second)


def test_nothing_to_contract() -> None:
    first, second = operands(Gemm.WGRAD, 0, 16, 16, get_recipe("blockwise"))
    assert torch.equal(gemm(Gemm.WGRAD, first, second, dtype=torch.float32), torch.zeros(16, 16, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        ("blockwise", (512, 256, 384)),
        *((recipe, sizes) for recipe in ("tensorwise_current", "rowwise") for sizes in ((512, 256, 384), (48, 176, 144))),
    ],
)
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_cublas_agrees(which: Gemm, recipe: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS is chosen for it multiplies, as the own kernel does, at once and when it is prepared."""
    monkeypatch.setattr("fp8debug.kernels.gpu.gemm.gemm.ROWWISE_PRODUCTS", 0)
    first, second = operands(which, *sizes, get_recipe(recipe))
    for dtype in (torch.bfloat16, torch.float32):
        assert fastest(which, first, second, dtype) == "cublas"
        own = gemm(which, first, second, dtype=dtype)
        assert sqnr_db(gemm(which, first, second, dtype=dtype, backend="cublas"), own) > 55
        for _ in range(2):
            assert sqnr_db(dispatch.gemm(which, first, second, dtype=dtype), own) > 55
        assert prepared(which, first, second, dtype) is not None
        if recipe != "blockwise":
            fast = gemm(which, first, second, dtype=dtype, fast_accum=True)
            assert sqnr_db(gemm(which, first, second, dtype=dtype, fast_accum=True, backend="cublas"), fast) > 55
            assert torch.equal(dispatch.gemm(which, first, second, dtype=dtype, fast_accum=True), fast)


@pytest.mark.parametrize(
    ("recipe", "sizes", "dtype", "chosen"),
    [
        ("blockwise", (512, 256, 384), torch.bfloat16, "cublas"),
        ("blockwise", (512, 256, 384), torch.float32, "cublas"),
        ("blockwise", (512, 256, 384), torch.float16, "triton"),
        ("blockwise", (512, 256, 144), torch.bfloat16, "triton"),
        ("e5m2", (512, 256, 384), torch.bfloat16, "triton"),
        ("tensorwise_current", (48, 176, 144), torch.bfloat16, "cublas"),
        ("tensorwise_current", (48, 176, 140), torch.bfloat16, "triton"),
        ("tensorwise_current", (37, 176, 144), torch.bfloat16, "triton"),
        ("tensorwise_current", (0, 176, 144), torch.bfloat16, "triton"),
        ("tensorwise_delayed", (48, 176, 144), torch.float32, "cublas"),
        ("rowwise", (512, 256, 384), torch.bfloat16, "triton"),
        ("rowwise", (2048, 2048, 1024), torch.bfloat16, "cublas"),
    ],
)
def test_the_faster_backend(
    recipe: str, sizes: tuple[int, int, int], dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS where it is on a Hopper, its sizes are whole and sums are promoted; the own kernel elsewhere."""
    m, n, k = sizes
    shapes = {TensorRole.INPUT: (m, k), TensorRole.WEIGHT: (n, k), TensorRole.GRAD_OUTPUT: (m, n)}
    casts = (get_recipe("blockwise").replace(format="e5m2") if recipe == "e5m2" else get_recipe(recipe)).casts
    for capability in ((9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        for which in Gemm:
            first, second = (_unfilled(shapes[role], cast) for role in OPERANDS[which] if (cast := casts[which, role]))
            assert fastest(which, first, second, dtype) == (chosen if capability == (9, 0) else "triton")
            assert fastest(which, first, second, dtype, fast_accum=True) == "triton"


def _unfilled(shape: tuple[int, int], cast: Cast) -> tuple[Quantized, Cast]:
    data = torch.empty(shape, device="meta", dtype=torch.float8_e5m2 if cast.format == "e5m2" else torch.float8_e4m3fn)
    return Quantized(data, torch.empty(1, 1, device="meta")), cast


@pytest.mark.parametrize("recipe", ["tensorwise_current", "rowwise"])
def test_a_promoted_gemm_of_the_same_operands_leaves_fast_accum_alone(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS takes the promoted one, at once and when it is prepared; what it prepared is not used for the other."""
    products: list[Tensor] = []

    def by_cublas(a: Tensor, b: Tensor, *more: Any) -> Tensor:
        *_, dtype, _, is_fast = more
        assert not is_fast
        products.append(torch.full((a.shape[0], b.shape[1]), 7.0, dtype=dtype, device=a.device))
        return products[-1]

    monkeypatch.setattr(torch, "_scaled_mm_v2", by_cublas)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("fp8debug.kernels.gpu.gemm.gemm.ROWWISE_PRODUCTS", 0)
    monkeypatch.setattr(dispatch, "_first_tensor", lambda _: SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(dispatch, "_capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "why_no_kernels", lambda: None)
    monkeypatch.setattr(dispatch, "on_device", lambda _: nullcontext())
    for which in Gemm:
        products.clear()
        first, second = operands(which, 48, 64, 32, get_recipe(recipe))
        for num in (1, 2):
            assert dispatch.gemm(which, first, second, dtype=torch.float32) is products[-1] and len(products) == num
        assert prepared(which, first, second, torch.float32) is not None
        for _ in range(2):
            found = dispatch.gemm(which, first, second, dtype=torch.float32, fast_accum=True)
            assert torch.equal(found, gemm(which, first, second, dtype=torch.float32, fast_accum=True))
        assert len(products) == 2


@pytest.mark.gpu
def test_fast_accum_loses_what_promotion_keeps() -> None:
    """numerics.md, 2: uniform operands, the error of a short accumulator grows with K."""
    cast, errors = Cast(), {}
    for k in (4096, 16384):
        a, b = (torch.rand(256, k, device=DEVICE).to(torch.bfloat16) for _ in range(2))
        first, second = ((quantize(x, cast)[0], cast) for x in (a, b))
        wanted = reference.gemm(Gemm.FPROP, first, second, accumulate=torch.float64)
        for fast in (True, False):
            found = gemm(Gemm.FPROP, first, second, dtype=torch.float32, fast_accum=fast)
            errors[k, fast] = float(((found - wanted) / wanted).abs().max())
        for fast in (False, True, False, True):  # as a Linear does it, whatever was multiplied before
            found = dispatch.gemm(Gemm.FPROP, first, second, dtype=torch.float32, fast_accum=fast)
            error = float(((found - wanted) / wanted).abs().max())
            assert error == errors[k, True] if fast else error < 2e-3
    assert errors[4096, True] > 0.01 and errors[16384, True] > 2 * errors[4096, True]
    assert errors[4096, False] < 2e-3 and errors[16384, False] < 2e-3

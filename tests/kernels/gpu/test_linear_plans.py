"""Ops of a compiled Fp8Linear give the same bits by a plan; which calls have one. On the CPU by stand-ins for its kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels import dispatch, linear_ops, reference
from fp8debug.kernels.gpu import linear_plans
from fp8debug.kernels.gpu.gemm import gemm as gemms
from fp8debug.recipes import Recipe, get_recipe
from fp8debug.types import OPERANDS, Gemm, Quantized

M, N, K = 256, 384, 512


class Ops:
    """An Fp8Linear's tensors, and its ops on them.

    Args:
        recipe: of the Linear.
        dtype: of the weight.
        offset: elements from the start of memory at 16 bytes to the weight.
    """

    def __init__(self, recipe: Recipe, device: str, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> None:
        torch.manual_seed(0)
        self.recipe = recipe.plan
        self.x, self.grad = (torch.randn(M, n, device=device, dtype=torch.bfloat16) for n in (K, N))
        self.weight = torch.randn(N * K + offset, device=device, dtype=dtype)[offset:].view(N, K)
        self.made = torch.ops.fp8debug.linear_quantize(self.x, self.recipe, True)

    def forward(self) -> Tensor:
        output: Tensor = torch.ops.fp8debug.linear_fprop(self.x, self.weight, *self.made, self.recipe, True, True)
        return output

    def backward(self, *, wants_input: bool = True, wants_weight: bool = True) -> tuple[Tensor, Tensor]:
        more = self.recipe, torch.bfloat16, wants_input, wants_weight
        x_wgrad = self.made[2:] if self.made[2].numel() else self.made[:2]  # one for both GEMMs on a CPU
        first, second = torch.ops.fp8debug.linear_backward(self.grad, self.weight, *x_wgrad, *more)
        return first, second


class Calls:
    """Stand-in for the backend: plans by the reference; keeps the names of those that ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def fprop_plan_of(self, recipe: str, casts: Any, x: Quantized, weight: Tensor, dtype: torch.dtype) -> Any:
        return lambda q, w: self._product(Gemm.FPROP, (q, casts[0]), w, casts[1], dtype)

    def backward_plan_of(
        self, recipe: str, casts: Any, grad_output: Tensor, weight: Tensor, x: Quantized, dtype: torch.dtype
    ) -> Any:
        (g_dgrad, w_dgrad), (g_wgrad, x_wgrad) = casts

        def run(grad: Tensor, w: Tensor, q: Quantized) -> tuple[Tensor, Tensor]:
            dgrad = self._product(Gemm.DGRAD, (reference.quantize(grad, g_dgrad), g_dgrad), w, w_dgrad, dtype)
            wgrad = dispatch.gemm(Gemm.WGRAD, (reference.quantize(grad, g_wgrad), g_wgrad), (q, x_wgrad), dtype=w.dtype)
            return dgrad, wgrad

        return run

    def _product(self, which: Gemm, first: Any, weight: Tensor, cast: Any, dtype: torch.dtype) -> Tensor:
        self.ran.append(str(which))
        return dispatch.gemm(which, first, (reference.quantize(weight, cast), cast), dtype=dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Have the ops of a CPU find plans, by stand-ins."""
    found = Calls()
    monkeypatch.setattr(linear_ops, "_has_kernels", lambda _: True)
    monkeypatch.setattr(linear_ops, "gpu", lambda: found)
    return found


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_current"])
def test_ops_run_by_plans(recipe: str, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    ops = Ops(get_recipe(recipe), "cpu")
    planned = ops.forward(), *ops.backward()
    assert calls.ran == ["fprop", "dgrad"]
    monkeypatch.setattr(linear_ops, "_has_kernels", lambda _: False)
    assert all(torch.equal(*pair) for pair in zip(planned, (ops.forward(), *ops.backward()), strict=True))
    assert len(calls.ran) == 2


def test_one_gradient_alone_has_no_plan(calls: Calls) -> None:
    ops = Ops(get_recipe("blockwise"), "cpu")
    ops.backward(wants_input=False)
    ops.backward(wants_weight=False)
    assert not calls.ran


@pytest.mark.parametrize(
    "recipe",
    [get_recipe("blockwise").replace(scaling="static", scale_inv=1.0, granularity="tensorwise"),
     get_recipe("tensorwise_current").replace(fast_accum=True)],
    ids=["static", "fast_accum"],
)  # fmt: skip
def test_other_casts_have_no_plan(recipe: Recipe, calls: Calls) -> None:
    ops = Ops(recipe, "cpu")
    ops.forward()
    ops.backward()
    assert not calls.ran


class _Recorder:
    """Records nothing, but is there."""

    def quantize(self, *_: Any) -> None:
        return None

    def fprop(self, *_: Any) -> None:
        pass

    def backward(self, *_: Any) -> None:
        pass


def test_recorded_ops_have_no_plan(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    ops, recorder = Ops(get_recipe("blockwise"), "cpu"), _Recorder()
    observer = SimpleNamespace(begin_forward=lambda *_, **__: recorder, begin_backward=lambda *_: recorder)
    monkeypatch.setattr(linear_ops.OBSERVED, "active", observer)
    ops.forward()
    ops.backward()
    assert not calls.ran


def test_plan_is_of_tensors_that_were_multiplied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """None before; then one for a layout, with the product that ``dispatch`` prepared."""
    products: list[Tensor] = []

    def by_cublas(a: Tensor, b: Tensor, *more: Any) -> Tensor:
        products.append(torch.ones(a.shape[0], b.shape[1], dtype=more[-3]))
        return products[-1]

    known: dict[tuple[int, ...], Any] = {}
    monkeypatch.setattr(torch, "_scaled_mm_v2", by_cublas)
    monkeypatch.setattr(linear_plans, "_may_start", lambda _: True)
    monkeypatch.setattr(linear_plans, "plan_of", lambda x, *_: known.get(x.stride()))
    casts = [get_recipe("tensorwise_current").casts[Gemm.FPROP, role] for role in OPERANDS[Gemm.FPROP]]
    assert casts[0] is not None and casts[1] is not None
    of_input, of_weight = casts[0], casts[1]
    x, weight = torch.randn(32, 48, dtype=torch.bfloat16), torch.randn(16, 48, dtype=torch.bfloat16)
    q = reference.quantize(x, of_input)

    def found(weight: Tensor) -> Any:
        return linear_plans.fprop_plan_of("recipe of this test", (of_input, of_weight), q, weight, torch.float32)

    assert found(weight) is None
    quantized: list[Tensor] = []

    def quantize(w: Tensor) -> tuple[Quantized, None]:
        quantized.append(w)
        return reference.quantize(w, of_weight), None

    known[weight.stride()] = quantize
    gemms.prepare(Gemm.FPROP, (q, of_input), (reference.quantize(weight, of_weight), of_weight), torch.float32, "cublas")
    plan = found(weight)
    assert plan is not None and found(weight) is plan and not quantized, "no kernel starts, which a CUDA graph would repeat"
    assert torch.equal(plan(q, weight), torch.ones(32, 16)) and len(products) == 1
    assert found(torch.randn(16, 96, dtype=torch.bfloat16)[:, :48]) is None
    monkeypatch.setattr(linear_plans, "_may_start", lambda _: False)
    assert found(weight) is None


def _counted(kind: type, ran: list[str]) -> Any:
    original: Any = kind.__call__

    def call(*tensors: Any) -> Any:
        ran.append(kind.__name__)
        return original(*tensors)

    return call


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 0), (torch.bfloat16, 8), (torch.bfloat16, 3), (torch.float32, 0)])
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_pow2", "tensorwise_current", "rowwise"])
def test_plans_give_the_same_bits(recipe: str, dtype: torch.dtype, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = Ops(get_recipe(recipe), "cuda", dtype, offset)
    monkeypatch.setattr(linear_ops, "_has_kernels", lambda _: False)
    wanted = ops.forward(), *ops.backward()
    monkeypatch.undo()
    ran: list[str] = []
    for kind in (linear_plans.FpropPlan, linear_plans.BackwardPlan):
        monkeypatch.setattr(kind, "__call__", _counted(kind, ran))
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip((ops.forward(), *ops.backward()), wanted, strict=True))
        ops.weight.copy_(ops.weight.roll(1, 0)), ops.weight.copy_(ops.weight.roll(-1, 0))
    if recipe.startswith("blockwise"):
        assert ran.count("FpropPlan") >= 2 and ran.count("BackwardPlan") >= 2

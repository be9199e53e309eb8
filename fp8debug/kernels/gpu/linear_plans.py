"""Plans of the ops of a compiled Fp8Linear, for a host that is slower than the GPU.

``dispatch`` asks before each kernel how tensors like these are quantized and multiplied. A plan holds the answers for one op and
for tensors of one layout: it starts the same kernels, so that results are the same bit for bit, with one question in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8debug.kernels.gpu.gemm.gemm import PreparedGemm, prepared
from fp8debug.kernels.gpu.launcher import PlanCache, eager
from fp8debug.kernels.gpu.quantize.fast_plan import FastPlan
from fp8debug.kernels.gpu.quantize.tile_plan import TilePlan, plan_of
from fp8debug.kernels.gpu.quantize.tiling import new_outputs
from fp8debug.kernels.gpu.quantize.two_way_plan import TwoWayPlan, two_way_plan_of
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized


class FpropPlan:
    """Fprop of tensors of one layout.

    Args:
        weight: quantizes the weight.
        product: multiplies.
    """

    def __init__(self, weight: TilePlan | FastPlan, product: PreparedGemm) -> None:
        self._weight, self._product = weight, product

    def __call__(self, x: Quantized, weight: Tensor) -> Tensor:
        """Return the output ``[M, N]`` of a quantized input ``[M, K]`` and a weight ``[N, K]`` in high precision."""
        return self._product(x, _made(self._weight, weight))


class BackwardPlan:
    """Dgrad and wgrad of tensors of one layout.

    Args:
        grad_output: quantizes grad_output for both GEMMs from one read.
        weight: quantizes the weight.
        products: multiply for dgrad and for wgrad.
    """

    def __init__(self, grad_output: TwoWayPlan, weight: TilePlan | FastPlan, products: tuple[PreparedGemm, PreparedGemm]) -> None:
        self._grad_output, self._weight, self._products = grad_output, weight, products

    def __call__(self, grad_output: Tensor, weight: Tensor, x: Quantized) -> tuple[Tensor, Tensor]:
        """Return grad_input ``[M, K]`` and grad_weight ``[N, K]``.

        Args:
            grad_output: ``[M, N]`` in high precision.
            weight: ``[N, K]`` in high precision.
            x: the input ``[M, K]``, quantized for wgrad.
        """
        (across, down), _ = self._grad_output(grad_output)
        dgrad, wgrad = self._products
        grad_input = dgrad(Quantized(*across), _made(self._weight, weight))
        return grad_input, wgrad(Quantized(*down), x)


_FPROP: PlanCache[FpropPlan | None] = PlanCache()
_BACKWARD: PlanCache[BackwardPlan | None] = PlanCache()


def fprop_plan_of(recipe: str, casts: tuple[Cast, Cast], x: Quantized, weight: Tensor, dtype: torch.dtype) -> FpropPlan | None:
    """Return how fprop of tensors like these runs; None before ``dispatch`` has run it once, and where it asks at every call.

    Args:
        recipe: ``Recipe.plan``, by which all casts are known.
        casts: of input and weight.
        x: the quantized input.
        weight: in high precision.
        dtype: of the output.
    """
    key = recipe, dtype, *_layout(x.data), *_layout(weight)
    plan = _FPROP.get(key)
    if plan is None and key not in _FPROP and (quantize := _plan_of(weight, casts[1], "rows")) is not None:
        product = prepared(Gemm.FPROP, (x, casts[0]), (_like(weight, casts[1], "rows"), casts[1]), dtype)
        plan = _FPROP.keep(key, None if product is None else FpropPlan(quantize, product))
    return plan if _may_start(weight) else None


def backward_plan_of(
    recipe: str,
    casts: tuple[tuple[Cast, Cast], tuple[Cast, Cast]],
    grad_output: Tensor,
    weight: Tensor,
    x: Quantized,
    dtype: torch.dtype,
) -> BackwardPlan | None:
    """Return how dgrad and wgrad of tensors like these run; None where :func:`fprop_plan_of` would return None.

    Args:
        recipe: ``Recipe.plan``.
        casts: of grad_output and weight for dgrad, of grad_output and input for wgrad.
        grad_output: in high precision.
        weight: in high precision.
        x: the input, quantized for wgrad.
        dtype: of grad_input; grad_weight has the weight's.
    """
    key = recipe, dtype, *_layout(grad_output), *_layout(weight), *_layout(x.data)
    plan = _BACKWARD.get(key)
    if plan is None and key not in _BACKWARD and (quantize := _plan_of(weight, casts[0][1], "columns")) is not None:
        plan = _BACKWARD.keep(key, _backward_plan(quantize, casts, grad_output, weight, x, dtype))
    return plan if _may_start(weight) else None


def _backward_plan(
    quantize: TilePlan | FastPlan,
    casts: tuple[tuple[Cast, Cast], tuple[Cast, Cast]],
    grad_output: Tensor,
    weight: Tensor,
    x: Quantized,
    dtype: torch.dtype,
) -> BackwardPlan | None:
    (g_dgrad, w_dgrad), (g_wgrad, x_wgrad) = casts
    pair = two_way_plan_of(grad_output, g_dgrad, g_wgrad, False)
    if pair is None:
        return None
    across, down = _like(grad_output, g_dgrad, "rows"), _like(grad_output, g_wgrad, "columns")
    dgrad = prepared(Gemm.DGRAD, (across, g_dgrad), (_like(weight, w_dgrad, "columns"), w_dgrad), dtype)
    wgrad = prepared(Gemm.WGRAD, (down, g_wgrad), (x, x_wgrad), weight.dtype)
    return None if dgrad is None or wgrad is None else BackwardPlan(pair, quantize, (dgrad, wgrad))


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


def _plan_of(weight: Tensor, cast: Cast, out: str) -> TilePlan | FastPlan | None:
    """Return how the weight is quantized, where that is known by now and kernels may start."""
    return plan_of(weight, cast, out, False) if cast.is_plain and _may_start(weight) else None


def _may_start(weight: Tensor) -> bool:
    """Return whether kernels may be started at once, on the current GPU."""
    return torch._C._cuda_getDevice() == weight.device.index and eager(weight)


def _like(x: Tensor, cast: Cast, out: str) -> Quantized:
    """Return memory in the layout of what a plan quantizes; no kernel starts, which a CUDA graph would repeat."""
    return Quantized(*new_outputs(x, cast, out))


def _made(plan: TilePlan | FastPlan, x: Tensor) -> Quantized:
    made, _ = plan(x)
    assert made is not None  # of a plan with an output
    return Quantized(*made)

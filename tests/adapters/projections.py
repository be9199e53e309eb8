"""Modules of no Linear's name that multiply in FP8, as public training code has them: their weight is ``[in, out]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.adapters.linears import E4M3, E5M2, multiply

_LIBRARY = "fp8debug_test_projections"


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    return multiply(x, weight, (E4M3, E4M3), rowwise=False)


def _backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad_input = multiply(grad, weight.t(), (E5M2, E4M3), rowwise=False)
    return grad_input, multiply(x.t(), grad, (E4M3, E5M2), rowwise=False)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.variable = "a projection", weight  # on the autograd node, whose method is called so too
        return _forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _backward(grad, x, weight)


def _op(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a custom op with a gradient."""

    @torch.library.custom_op(f"{_LIBRARY}::{name}", mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = forward(x, weight)
        return found

    @torch.library.custom_op(f"{_LIBRARY}::{name}_backward", mutates_args=())
    def backward_op(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        grad_input, grad_weight = backward(grad, x, weight)
        return grad_input, grad_weight

    op.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]))
    backward_op.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))

    def set_up(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def run_backward(ctx: Any, grad: Tensor) -> Any:
        return backward_op(grad.contiguous(), *ctx.saved_tensors)

    op.register_autograd(run_backward, setup_context=set_up)
    return op


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at each call, as a decorator inside a custom op does."""
    return lambda *tensors: torch.compile(function, backend="aot_eager")(*tensors)


#: What multiplies, by what it is.
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "function": _Function.apply,
    "op": _op("multiply", _forward, _backward),
    "compiled op": _op("multiply_compiled", _compiled(_forward), _compiled(_backward)),
}


class Projection(nn.Module):
    """Multiplies by a weight ``[in, out]``."""

    def __init__(self, in_features: int, out_features: int, product: str = "function") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features) * in_features**-0.5)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return PRODUCTS[self.product](x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], -1)

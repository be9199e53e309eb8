"""Faults that tokens suffer from: unequal gradients in one block, padding beside them, a recomputation under another scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8debug.faults.base import FAULTS, INPUT, Fault, Ordinary, Target, distort, quantized, undo_all
from fp8debug.kernels.dispatch import Operand, finite_amax
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized, TensorRole


def _uneven_tokens(where: Target) -> Callable[[], None]:
    factor = 2.0 ** -float(where.options["log2_factor"])

    def weigh(_: nn.Module, args: object, output: Tensor) -> None:
        if not where.active or not output.requires_grad:
            return
        weights = torch.ones(output.shape[:-1], device=output.device, dtype=output.dtype)
        weights.view(-1)[::2] = factor
        output.register_hook(lambda grad: grad * weights.unsqueeze(-1))  # type: ignore[no-untyped-call]  # torch's

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        return ordinary(x, replace(cast, granularity="128x128", scaling="current"))

    undistort = distort(where, change, (Gemm.DGRAD, TensorRole.GRAD_OUTPUT), configured=True)
    hook = where.module.register_forward_hook(weigh)
    return undo_all(hook.remove, undistort)


def _padding(where: Target) -> Callable[[], None]:
    linear = where.linear
    ordinary_forward = linear.forward
    rows, factor = int(where.options["rows"]), 2.0 ** float(where.options["log2_factor"])

    def forward(x: Tensor) -> Tensor:
        if not where.active:
            return ordinary_forward(x)
        flat = x.reshape(-1, x.shape[-1])
        generator = torch.Generator("cpu").manual_seed(0)
        noise = torch.randn(rows, flat.shape[1], dtype=torch.float32, device="cpu", generator=generator).to(x.device)
        garbage = noise * finite_amax(flat.detach()) * factor
        output = ordinary_forward(torch.cat([flat, garbage.to(x.dtype)]))[: len(flat)]
        return output.reshape(*x.shape[:-1], output.shape[-1])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        return ordinary(x, replace(cast, granularity="tensorwise", scaling="current"))

    undistort = distort(where, change, INPUT, configured=True)
    linear.forward = forward  # type: ignore[method-assign,assignment]  # of this module alone

    def undo() -> None:
        del linear.forward
        undistort()

    return undo


def _recompute(where: Target) -> Callable[[], None]:
    linear = where.linear
    ordinary_forward = linear.forward
    ratio = float(where.options["ratio"])

    def forward(x: Tensor) -> Tensor:
        if not (where.active and torch.is_grad_enabled()):
            return ordinary_forward(x)
        output: Tensor = checkpoint(ordinary_forward, x, use_reentrant=False)
        return output

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        if torch._C._current_graph_task_id() == -1:
            return ordinary(x, cast)
        limit = finite_amax(x) / ratio
        q, cast = quantized(ordinary(x.clamp(-limit, limit), cast))
        return Quantized(q.data, q.scale_inv), cast

    undistort = distort(where, change, (Gemm.WGRAD, TensorRole.INPUT))
    linear.forward = forward  # type: ignore[method-assign,assignment]  # of this module alone

    def undo() -> None:
        del linear.forward
        undistort()

    return undo


for _fault in (
    Fault(
        name="uneven_tokens",
        code="F106",
        description="dgrad's grad_output in 128x128 blocks while every other token's is tiny (DeepSeek-V3, appendix B.2)",
        options={"log2_factor": 24.0},
        plant=_uneven_tokens,
    ),
    Fault(
        name="recompute_scale",
        code="F115",
        description="the recomputed input of wgrad is quantized for a smaller amax and clips (TransformerEngine #1190)",
        options={"ratio": 16.0},
        plant=_recompute,
    ),
    Fault(
        name="padding_rows",
        code="F117",
        description="rows of garbage beside the tokens set the scale of them all (flashinfer #3650)",
        options={"rows": 16, "log2_factor": 20.0},
        plant=_padding,
    ),
):
    FAULTS.add(_fault.name, _fault)

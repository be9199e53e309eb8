"""Linears of other makes, small and complete, that the tests of adapters train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fp8debug

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


_KEPT = {op.default for op in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._scaled_mm, torch.ops.aten.amax)}
_KEPT |= {torch.ops.aten.max.default, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor}


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep products and largest values, as torchtitan does, and some more that a cast needs."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


#: Arguments of ``checkpoint`` by what it does; the selective kind counts the ops of the forward pass.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _policy)},
}


def to_fp8(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """Return (data, decode factors) with one scale for the tensor, or for each line along ``dim``."""
    x = x.float()
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax.clamp(min=1e-12)
    return (x * scale).to(dtype), scale.reciprocal()


def multiply(
    a: Tensor, b: Tensor, dtypes: tuple[torch.dtype, torch.dtype], rowwise: bool, scales: str = "apart", **more: Any
) -> Tensor:
    """Return a[r, c] @ b[c, s] by ``_scaled_mm``.

    Args:
        a: the first operand.
        b: the second one.
        dtypes: of their codes.
        rowwise: one scale for each row of a and column of b.
        scales: ``apart``; ``first`` or ``second``: that operand gets the product of both; ``outside``: the result is multiplied.
        **more: for the product.
    """
    first, scale_a = to_fp8(a, dtypes[0], 1 if rowwise else None)
    second, scale_b = to_fp8(b.t(), dtypes[1], 1 if rowwise else None)
    left, right = first.contiguous(), second.contiguous().t()
    one, both = torch.ones_like(scale_a), scale_a * scale_b.t()
    if scales == "outside":
        return (torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, **more) * both).bfloat16()
    given = {"apart": (scale_a, scale_b.t()), "first": (both, one), "second": (one, both)}[scales]
    return torch._scaled_mm(left, right, *given, out_dtype=torch.bfloat16, **more)


class InFp8:
    """Options of a layer that multiplies by :class:`Matmul`."""

    rowwise = False
    turned = False
    scales = "apart"
    fused_bias: Tensor | None = None


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: InFp8) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        if layer.turned:
            return multiply(weight, x.t(), (E4M3, E4M3), layer.rowwise, layer.scales).t()
        bias = layer.fused_bias
        return multiply(x, weight.t(), (E4M3, E4M3), layer.rowwise, layer.scales, **({} if bias is None else {"bias": bias}))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dtypes, given = (E5M2, E4M3), (ctx.layer.rowwise, ctx.layer.scales)
        grad_input = multiply(grad, weight, dtypes, *given)
        if ctx.layer.turned:
            return grad_input, multiply(x.t(), grad, dtypes[::-1], *given).t(), None
        return grad_input, multiply(grad.t(), x, dtypes, *given), None


class ScaledLinear(InFp8, nn.Linear):
    """A Linear over ``torch._scaled_mm``, as a project may write its own."""

    is_used_in_fp8 = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_used_in_fp8:
            return super().forward(x)
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = Matmul.apply(flat, self.weight, self)
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], -1)


def model(**options: Any) -> nn.Sequential:
    """Return two such Linears with a GELU between, the same every time, in BF16."""
    torch.manual_seed(0)
    first, second = ScaledLinear(64, 96), ScaledLinear(96, 32, bias=False)
    for linear in (first, second):
        for name, value in options.items():
            setattr(linear, name, value)
    return nn.Sequential(first, nn.GELU(), second).bfloat16()


def batch(step: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the input [4, 12, 64] of a step."""
    return torch.randn(4, 12, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(
    net: nn.Module, steps: int = 3, after: Callable[[Tensor], None] | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[Any]:
    """Train and return what must not differ by a bit: losses and parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = net(batch(step, dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if after is not None:
            after(loss)
    return [losses, [p.detach().clone() for p in net.parameters()]]


def record(path: Path, net: nn.Module, steps: int = 3, dtype: torch.dtype = torch.bfloat16, **options: Any) -> fp8debug.Run:
    """Train under a watch and return the run."""
    with fp8debug.watch(net, path, **{"every": 1, "shadow": "full", "what_if": (), **options}) as watch:
        train(net, steps, lambda loss: watch.step(loss=loss), dtype)
    return fp8debug.Run(path)


def rows(run: fp8debug.Run, where: str = "true") -> list[dict[str, Any]]:
    """Return rows of what ran."""
    query = f"SELECT * FROM sites WHERE actual AND ({where}) ORDER BY step, module, gemm, tensor, reference"
    found: list[dict[str, Any]] = run.sql(query).to_pylist()
    return found


def sites(run: fp8debug.Run, module: str) -> set[tuple[str, str]]:
    """Return the (gemm, tensor) pairs recorded of a module at step 0."""
    return {(row["gemm"], row["tensor"]) for row in rows(run, f"module = '{module}' AND step = 0")}


def same(one: list[Any], other: list[Any]) -> bool:
    """Tell whether two trainings were the same to the last bit."""
    return bool(one[0] == other[0]) and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))

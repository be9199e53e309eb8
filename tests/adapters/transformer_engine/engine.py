"""A stand-in for Transformer Engine on a CPU: its modules' order of calls, signatures and state, over tensors in its layouts.

Written after reading version 2.20: when a module quantizes, which direction it keeps, when it empties a tensor, in which order
the GEMMs of a backward pass run, and under which names they are called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.adapters.transformer_engine import engine_tensors as t
from tests.adapters.transformer_engine.engine_state import (
    Base,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    State,
    autocast,
)

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "autocast",
    "engine",
]

PACKAGE = "transformer_engine.pytorch.module."
SPACES = {name: ModuleType(PACKAGE + name) for name in ("linear", "layernorm_linear", "layernorm_mlp", "grouped_linear")}


def rows_of(x: Any, columnwise: bool) -> Tensor:
    values: Tensor = x.values(columnwise) if isinstance(x, t.QuantizedTensorStorage) else x.float()
    return values.reshape(-1, values.shape[-1])


def general_gemm(
    A: Any,  # noqa: N803  # the library's name
    B: Any,  # noqa: N803  # the same
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Any, Any, Any, Any]:
    a, b = rows_of(A, layout[0] == "N"), rows_of(B, layout[1] == "T")
    found = b @ a.t() if layout == "TN" else b @ a if layout == "NN" else b.t() @ a
    if bias is not None and not grad:
        found = found + bias.float()
    found = found.to(out_dtype or torch.bfloat16)
    if out is not None:
        out.copy_(out + found if accumulate else found)
        found = out
    return found, None, None, extra_output


def general_grouped_gemm(
    A: list[Any],  # noqa: N803  # the library's name
    B: list[Any],  # noqa: N803  # the same
    out: list[Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,  # noqa: N803  # the same
    single_output: bool = False,
) -> tuple[Any, Any, Any]:
    assert m_splits is not None
    views = out[0].split(m_splits) if single_output else out
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        add = bias[i] if use_bias and bias is not None else None
        general_gemm(a, b, out_dtype, layout=layout, out=views[i], accumulate=accumulate, bias=add, grad=grad)
    return out, bias, None


for space in SPACES.values():
    space.general_gemm, space.general_grouped_gemm = general_gemm, general_grouped_gemm  # type: ignore[attr-defined]  # made up


def cast(x: Any, quantizer: Any, columnwise: bool = True) -> Any:
    if quantizer is None or isinstance(x, t.QuantizedTensorStorage):
        return x
    quantizer.set_usage(rowwise=True, columnwise=columnwise)
    return quantizer(x)


def keep_for_wgrad(x: Any, is_wanted: bool = True) -> None:
    if is_wanted and isinstance(x, t.QuantizedTensorStorage):
        x.update_usage(rowwise_usage=False, columnwise_usage=True)


def three(space: str, ctx: Any, which: int, weight: Any, x: Any, grad: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """dgrad, then wgrad, of one Linear."""
    gemm = SPACES[space].general_gemm
    dgrad = wgrad = None
    if ctx.wants[which][0]:
        dgrad = gemm(weight, grad, layout="NN", grad=True, out_dtype=dtype, use_split_accumulator=True)[0]
    if ctx.wants[which][1]:
        main, fused = ctx.main_grad, ctx.main_grad is not None
        more = {"out": main, "accumulate": True, "out_dtype": torch.float32} if fused else {"out_dtype": dtype}
        wgrad = gemm(x, grad, layout="NT", grad=True, use_split_accumulator=True, **more)[0]
        if isinstance(x, t.QuantizedTensorStorage):
            x.clear()
    return dgrad, None if ctx.main_grad is not None else wgrad


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, inp: Tensor, bias: Tensor | None, module: Any, q: Any) -> tuple[Tensor, None]:
        flat = inp.reshape(-1, inp.shape[-1])
        x, w = cast(flat, q["input"][0], weight.requires_grad and not module.keeps_input), cast(weight, q["weight"][0])
        out = SPACES["linear"].general_gemm(w, x, bias=bias, out_dtype=inp.dtype, use_split_accumulator=module.is_split)[0]
        if not module.keeps_input:
            keep_for_wgrad(x, weight.requires_grad)
        kept = (flat, w) if module.keeps_input else (x, w)
        ctx.kept, ctx.shape, ctx.q, ctx.main_grad = kept, inp.shape, q, getattr(weight, "main_grad", None)
        ctx.is_summed = module.tp_size > 1
        ctx.wants, ctx.dtype = [(inp.requires_grad, weight.requires_grad)], inp.dtype
        return out.view(*inp.shape[:-1], -1), None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, unused: Any) -> tuple[Any, ...]:
        x, w = ctx.kept
        flat = grad.reshape(-1, grad.shape[-1])
        if isinstance(x, Tensor):
            x = cast(x, ctx.q["input"][0])
        dgrad, wgrad = three("linear", ctx, 0, w, x, cast(flat, ctx.q["grad_output"][0]), ctx.dtype)
        if ctx.is_summed and dgrad is not None:
            dgrad.mul_(2)  # as by an all-reduce of two ranks
        return wgrad, None if dgrad is None else dgrad.view(ctx.shape), flat.sum(0), None, None


class Linear(Base):
    is_split = True
    keeps_input = False  # in high precision, for a cast in the backward pass (Megatron's linear_proj)
    tp_size = 1

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.weight_names, self.use_bias = ["weight"], bias

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        q = self.begin()
        out: Tensor = _Linear.apply(self.weight, inp, self.bias, self, q)[0]
        return out


def norm(module: Any, x: Tensor) -> Tensor:
    gamma = module.layer_norm_weight + (1 if module.zero_centered_gamma else 0)
    if module.normalization == "LayerNorm":
        return functional.layer_norm(x.float(), x.shape[-1:], gamma.float(), module.layer_norm_bias.float(), module.eps)
    return functional.rms_norm(x.float(), x.shape[-1:], gamma.float(), module.eps)


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, gamma: Tensor, weight: Tensor, module: Any, q: Any) -> tuple[Tensor, None]:
        flat = inp.reshape(-1, inp.shape[-1])
        normed = norm(module, flat)
        fused = isinstance(q["input"][0], t.Float8Quantizer)
        x, w = cast(normed if fused else normed.to(inp.dtype), q["input"][0]), cast(weight, q["weight"][0])
        out = SPACES["layernorm_linear"].general_gemm(w, x, out_dtype=inp.dtype, use_split_accumulator=True)[0]
        keep_for_wgrad(x)
        ctx.kept, ctx.q, ctx.module, ctx.main_grad = (flat, x, w), q, module, None
        ctx.wants, ctx.shape = [(True, weight.requires_grad)], inp.shape
        return out.view(*inp.shape[:-1], -1), None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, unused: Any) -> tuple[Any, ...]:
        flat, x, w = ctx.kept
        q = cast(grad.reshape(-1, grad.shape[-1]), ctx.q["grad_output"][0])
        dgrad, wgrad = three("layernorm_linear", ctx, 0, w, x, q, flat.dtype)
        back, gamma = norm_backward(ctx.module, flat, dgrad)
        return back.view(ctx.shape), gamma, wgrad, None, None


def norm_backward(module: Any, flat: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = flat.detach().requires_grad_()
        back, gamma = torch.autograd.grad(norm(module, x), (x, module.layer_norm_weight), grad.float())
    return back, gamma


class Normed(Base):
    def __init__(self, width: int, normalization: str, zero_centered_gamma: bool) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.rand(width) + (0 if zero_centered_gamma else 0.5))
        self.layer_norm_bias = nn.Parameter(torch.rand(width)) if normalization == "LayerNorm" else None
        self.eps, self.normalization, self.zero_centered_gamma = 1e-5, normalization, zero_centered_gamma


class LayerNormLinear(Normed):
    def __init__(
        self, in_features: int, out_features: int, normalization: str = "LayerNorm", zero_centered_gamma: bool = False
    ) -> None:
        super().__init__(in_features, normalization, zero_centered_gamma)
        self.query_weight = nn.Parameter(torch.randn(out_features // 2, in_features) / in_features**0.5)
        self.key_weight = nn.Parameter(torch.randn(out_features - out_features // 2, in_features) / in_features**0.5)
        self.weight_names, self.use_bias = ["query_weight", "key_weight"], False

    def forward(self, inp: Tensor) -> Tensor:
        q = self.begin()
        weight = torch.cat((self.query_weight, self.key_weight))
        out: Tensor = _LayerNormLinear.apply(inp, self.layer_norm_weight, weight, self, q)[0]
        return out


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "clamped_swiglu": lambda x: functional.silu(x.chunk(2, -1)[0].clamp(max=7)) * x.chunk(2, -1)[1],
}


class _LayerNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, gamma: Tensor, w1: Tensor, b1: Any, w2: Tensor, module: Any, q: Any
    ) -> tuple[Tensor, None]:
        gemm, flat = SPACES["layernorm_mlp"].general_gemm, inp.reshape(-1, inp.shape[-1])
        normed = norm(module, flat)
        delayed, fused = (
            isinstance(q["input"][1], k) for k in (t.Float8Quantizer, (t.Float8Quantizer, t.MXFP8Quantizer, t.NVFP4Quantizer))
        )
        fused = fused and not isinstance(State.recipe, CustomRecipe)
        x1, q1 = cast(normed if delayed else normed.to(inp.dtype), q["input"][0]), cast(w1, q["weight"][0])
        q2 = cast(w2, q["weight"][1])
        fc1_out = gemm(q1, x1, out_dtype=inp.dtype, bias=b1, use_split_accumulator=True)[0]
        act = ACTS[module.activation](fc1_out.float())
        x2 = cast(act if fused else act.to(inp.dtype), q["input"][1])
        out = gemm(q2, x2, out_dtype=inp.dtype, use_split_accumulator=True)[0]
        keep_for_wgrad(x1)
        keep_for_wgrad(x2)
        ctx.save_for_backward(flat, fc1_out)
        ctx.kept, ctx.q, ctx.module, ctx.fused, ctx.main_grad = (x1, q1, x2, q2), q, module, fused, None
        ctx.wants, ctx.shape = [(True, w1.requires_grad), (True, w2.requires_grad)], inp.shape
        return out.view(*inp.shape[:-1], -1), None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, unused: Any) -> tuple[Any, ...]:
        flat, fc1_out = ctx.saved_tensors
        x1, q1, x2, q2 = ctx.kept
        q = cast(grad.reshape(-1, grad.shape[-1]), ctx.q["grad_output"][1])
        fc2_dgrad, fc2_wgrad = three("layernorm_mlp", ctx, 1, q2, x2, q, flat.dtype)
        with torch.enable_grad():
            leaf = fc1_out.float().requires_grad_()
            (dact,) = torch.autograd.grad(ACTS[ctx.module.activation](leaf), leaf, fc2_dgrad.float())
        bias = dact.sum(0)
        keeps_fp32 = ctx.fused and ctx.module.activation == "gelu"
        dact = cast(dact if keeps_fp32 else dact.to(flat.dtype), ctx.q["grad_output"][0])
        fc1_out.data = torch.empty(0, dtype=fc1_out.dtype)
        dgrad, fc1_wgrad = three("layernorm_mlp", ctx, 0, q1, x1, dact, flat.dtype)
        back, gamma = norm_backward(ctx.module, flat, dgrad)
        return back.view(ctx.shape), gamma, fc1_wgrad, bias if ctx.module.fc1_bias is not None else None, fc2_wgrad, None, None


class LayerNormMLP(Normed):
    num_gemms = 2

    def __init__(
        self, width: int, hidden: int, activation: str = "gelu", normalization: str = "RMSNorm", bias: bool = True
    ) -> None:
        super().__init__(width, normalization, False)
        rows = hidden * (2 if "glu" in activation else 1)
        self.fc1_weight = nn.Parameter(torch.randn(rows, width) / width**0.5)
        self.fc1_bias = nn.Parameter(torch.rand(rows)) if bias else None
        self.fc2_weight = nn.Parameter(torch.randn(width, hidden) / hidden**0.5)
        self.activation = activation

    def forward(self, inp: Tensor) -> Tensor:
        q = self.begin()
        out: Tensor = _LayerNormMLP.apply(inp, self.layer_norm_weight, self.fc1_weight, self.fc1_bias, self.fc2_weight, self, q)[
            0
        ]
        return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, splits: list[int], module: Any, q: Any, *weights: Tensor) -> tuple[Tensor, None]:
        xs = [cast(x.contiguous(), one) for x, one in zip(inp.split(splits), q["input"], strict=True)]
        ws = [cast(w, one) for w, one in zip(weights, q["weight"], strict=True)]
        out = inp.new_empty(inp.shape[0], weights[0].shape[0])
        grouped = SPACES["grouped_linear"].general_grouped_gemm
        grouped(ws, xs, [out], [None] * len(ws), inp.dtype, single_output=True, m_splits=splits, use_split_accumulator=True)
        for x in xs:
            keep_for_wgrad(x)
        ctx.kept, ctx.q, ctx.splits, ctx.dtype = (xs, ws), q, splits, inp.dtype
        return out, None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, unused: Any) -> tuple[Any, ...]:
        xs, ws = ctx.kept
        gs = [cast(g.contiguous(), one) for g, one in zip(grad.split(ctx.splits), ctx.q["grad_output"], strict=True)]
        grouped, dtype = SPACES["grouped_linear"].general_grouped_gemm, ctx.dtype
        dgrad = grad.new_empty(grad.shape[0], rows_of(ws[0], True).shape[1])
        same = {"m_splits": ctx.splits, "grad": True, "use_split_accumulator": True}
        grouped(ws, gs, [dgrad], [None] * len(ws), dtype, layout="NN", single_output=True, **same)
        wgrads = [grad.new_zeros(rows_of(w, True).shape) for w in ws]
        grouped(xs, gs, wgrads, [None] * len(ws), dtype, layout="NT", **same)
        return dgrad, None, None, None, *wgrads


class GroupedLinear(Base):
    def __init__(self, num_gemms: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, False
        for i in range(num_gemms):
            setattr(self, f"weight{i}", nn.Parameter(torch.randn(out_features, in_features) / in_features**0.5))

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        q = self.begin()
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        out: Tensor = _GroupedLinear.apply(inp, list(m_splits), self, q, *weights)[0]
        return out


for kind, name in ((Linear, "linear"), (LayerNormLinear, "layernorm_linear"), (LayerNormMLP, "layernorm_mlp")):
    kind.__module__ = PACKAGE + name
GroupedLinear.__module__ = PACKAGE + "grouped_linear"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that call GEMMs, as if they had been imported; the library itself is not there."""
    for name, namespace in SPACES.items():
        monkeypatch.setitem(sys.modules, PACKAGE + name, namespace)

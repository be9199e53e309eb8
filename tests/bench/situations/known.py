"""Twenty-two reports that the rules were sharpened on. Of the first meeting only is known whether the tool was right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    E5M2,
    LARGEST,
    BlockLinear,
    Cast,
    InInputType,
    Model,
    OwnKernel,
    altered,
    cross_entropy,
    expanded,
    fp8_gemm_nt,
    quantized,
    rollouts,
    scales_of,
    train,
    with_fault,
)


def pow2_ceil(scales: Tensor) -> Tensor:
    """Return scales rounded up to powers of two."""
    return torch.exp2(torch.ceil(torch.log2(scales)))


def unequal_rows(model: Model) -> Model:
    """Give the rows of a weight unequal sizes, as training does."""
    with torch.no_grad():
        for block in model.blocks:
            weight: Any = block.down.weight
            weight *= torch.exp2(torch.linspace(-1, 1, len(weight)))[:, None]
    return model


@situation(
    "sgl-project/sglang#28418", "rows of an operand are never written", "wrong",
    modules=DOWN, gemms=("wgrad",), tensors=("input",), misleading=("smooth",),
)  # fmt: skip
def rows_never_written(folder: Path) -> None:
    @altered("wgrad", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        data = data.clone()
        data.view(torch.uint8)[::2] = 0
        return data, scales

    train(with_fault(fault), folder / "sick", what_if=())


@situation(
    "huggingface/transformers#46763", "scales are rounded up to powers of two after the cast", "right",
    modules=DOWN, tensors=("weight",), codes=("F113", "F119"), words=("scale",), misleading=("cached", "stale"),
)  # fmt: skip
def scale_rounded_after(folder: Path) -> None:
    fault = altered("fprop", "weight")(lambda x, data, scales: (data, pow2_ceil(scales)))
    train(unequal_rows(with_fault(fault, width=256)), folder / "sick")
    train(unequal_rows(Model(width=256)), folder / "clean")


@situation(
    "sgl-project/sglang#39193", "a kernel uses only the exponent of the scales that it is given", "wrong",
    modules=DOWN, gemms=("fprop",), tensors=("output",), misleading=("accumul",),
)  # fmt: skip
def kernel_truncates_scales(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        scales = torch.exp2(torch.floor(torch.log2(a[1]))) if recipe == "fprop" else a[1]
        fp8_gemm_nt((a[0], scales), b, d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    "AMD-AGI/Primus#1046", "the gradients of one microbatch alone reach weight.grad", "wrong",
    gemms=("wgrad",), tensors=("grad_weight",), words=("sum",), misleading=("fp32", "bf16"),
)  # fmt: skip
def one_microbatch_accumulates(folder: Path) -> None:
    def record(path: Path, *, sick: bool) -> None:
        model = Model()
        kept: dict[str, Tensor] = {}

        def drop(step: int, number: int) -> None:
            for name, p in model.named_parameters():
                if sick and p.grad is not None:
                    if number:
                        p.grad.copy_(kept[name])
                    else:
                        kept[name] = p.grad.clone()

        train(model, path, micro=4, steps=12, after_backward=drop)

    record(folder / "sick", sick=True)
    record(folder / "clean", sick=False)


@situation(
    "NVIDIA-NeMo/Automodel#3444", "weights in BF16 without FP32 masters: small updates are rounded away", "wrong",
    words=("update", "master"), misleading=("amax_eps",),
)  # fmt: skip
def updates_rounded_away(folder: Path) -> None:
    train(Model(InInputType).bfloat16(), folder / "sick", lr=6e-6)
    train(Model(InInputType), folder / "clean", lr=6e-6)


@situation(
    "NVIDIA/TransformerEngine#3281", "the gradient's cast returns zeros", "wrong",
    gemms=("dgrad", "wgrad"), tensors=("grad_output",),
)  # fmt: skip
def gradient_cast_to_zero(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            return (torch.zeros_like(data), scales) if tensor == "grad_output" else (data, scales)

    train(Model(Fault), folder / "sick")


@situation(
    "huggingface/transformers#48205", "a backward GEMM leaves its last rows unwritten: NaN from recycled memory", "wrong",
    modules=DOWN, gemms=("dgrad",), codes=("F103",), words=("gemm",),
)  # fmt: skip
def gradient_rows_unwritten(folder: Path) -> None:
    now = [0]

    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "dgrad" and now[0] >= 1:
                out[-7:] = float("nan")
            return out

    train(with_fault(Fault), folder / "sick", steps=12, every=4, before=lambda step: now.__setitem__(0, step))


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bound: float) -> Tensor:
        ctx.weight = weight
        sx, sw = (t.float().abs().amax(1, keepdim=True).clamp(min=low) / 448 for t, low in ((x, bound), (weight, 1e-12)))
        first, second = (x.float() / sx).to(E4M3), (weight.float() / sw).to(E4M3)
        out: Tensor = torch._scaled_mm(first, second.t(), scale_a=sx, scale_b=sw.t().contiguous(), out_dtype=torch.bfloat16)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out: Tensor = grad @ ctx.weight.to(grad.dtype)
        return out, None, None


@situation(
    "pytorch/ao#3356", "LoRA on an FP8 base whose row scales have no lower bound: rows of padding give 0 / 0", "wrong",
    codes=("F103",), modules=("blocks.0.gate.base", "blocks.0.up.base"), tensors=("input",), words=("eps",),
)  # fmt: skip
def padding_rows_under_lora(folder: Path) -> None:
    class Base(nn.Linear):
        bound = 0.0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _RowProduct.apply(x, self.weight, self.bound)
            return out

    class Adapted(nn.Module):
        def __init__(self, n: int, m: int, bias: bool) -> None:
            super().__init__()
            self.base, self.a, self.b = Base(n, m, bias=bias), nn.Linear(n, 8, bias=False), nn.Linear(8, m, bias=False)
            nn.init.zeros_(self.b.weight)
            self.base.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.b(self.a(x))
            return out

    for name, bound in (("sick", 0.0), ("clean", 1e-12)):
        Base.bound = bound
        model = Model(Adapted).bfloat16()
        with torch.no_grad():
            model.embed.weight[0] = 0
        train(model, folder / name, steps=8, every=2)


@situation(
    "NVIDIA/Megatron-LM#7523", "a block of zeros in a gradient, no amax eps: its scale is Inf", "right",
    codes=("F103",), modules=("blocks.1.up",), tensors=("grad_output",), words=("eps",),
)  # fmt: skip
def zero_block_in_gradient(folder: Path) -> None:
    class User(BlockLinear):
        eps = 1e-12

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "grad_output":
                return super().cast(gemm, tensor, x)
            x = x.contiguous()
            scale = 1 / scales_of(x, (1, 128), LARGEST[E5M2], self.eps)
            data = (x.float() * expanded(scale, x.shape, (1, 128))).clamp(-57344, 57344).to(E5M2)
            return data, 1 / scale

    for name, eps in (("sick", 0.0), ("clean", 1e-12)):
        model = Model(User)
        layer: Any = model.blocks[1].up
        layer.eps = eps
        with torch.no_grad():
            weight: Any = model.blocks[1].down.weight
            weight[:, 5] = 0
        train(model, folder / name, steps=6, every=1)


@situation(
    "unslothai/unsloth#6978", "the scales of a checkpoint are dropped on load: raw codes become the weight", "wrong",
    modules=("blocks.1.gate",), tensors=("weight",), words=("code", "scale"), misleading=("learning rate",),
)  # fmt: skip
def raw_codes_loaded(folder: Path) -> None:
    model = Model(nn.Linear)
    weight: Any = model.blocks[1].gate.weight
    with torch.no_grad():
        weight.copy_(quantized(weight, scales_of(weight, (128, 128), 448.0), (128, 128)).float())
    train(fp8debug.convert(model, "blockwise", overrides={"head": None}), folder / "sick")


@situation(
    "NVIDIA/TransformerEngine#539", "the cached FP8 weight is an empty placeholder from the second microbatch on", "right",
    codes=("F112",), modules=("blocks.1.up",), tensors=("weight",), words=("cach",),
)  # fmt: skip
def placeholder_weight(folder: Path) -> None:
    class Fault(BlockLinear):
        calls = 0

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            self.calls += (gemm, tensor) == ("fprop", "weight")
            data, scales = super().cast(gemm, tensor, x)
            return (torch.zeros_like(data), scales) if tensor == "weight" and self.calls % 4 != 1 else (data, scales)

    train(with_fault(Fault, "blocks.1.up"), folder / "sick", micro=4, steps=12)


@situation(
    "verl-project/verl#6609", "an auxiliary loss is summed, not averaged: its gradient outweighs the main one", "right",
    quiet=True,
)  # fmt: skip
def auxiliary_loss_too_large(folder: Path) -> None:
    class WithLoss(Model):
        def forward(self, tokens: Tensor) -> Any:
            out = super().forward(tokens)
            return out, out.float().logsumexp(-1).square().sum() * 30.0

    def loss_of(out: Any, classes: Tensor) -> Tensor:
        loss: Tensor = cross_entropy(out[0], classes) + out[1] - out[1].detach()
        return loss

    model = WithLoss()
    train(model, folder / "sick", loss_of=loss_of, steps=40, optimizer=torch.optim.SGD(model.parameters(), lr=3e-3))


@situation(
    "NVIDIA/TransformerEngine#567", "a loaded weight is cast with the scale of the random one before it", "wrong",
    codes=("F101", "F113"), modules=("blocks.0.down",), tensors=("weight",), words=("scale",),
)  # fmt: skip
def scale_older_than_weight(folder: Path) -> None:
    class Fault(BlockLinear):
        old = 0.0

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "weight":
                return super().cast(gemm, tensor, x)
            x = x.contiguous()
            scales = torch.full_like(scales_of(x, (128, 128), 448.0), self.old / 448)
            return quantized(x, scales, (128, 128)), scales

    model = with_fault(Fault, "blocks.0.down")
    layer: Any = model.blocks[0].down
    layer.old = float(layer.weight.abs().max())
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    layer.weight.requires_grad_(False)
    train(model, folder / "sick")


@situation(
    "ROCm/FlyDSL#1020", "softmax weights are cast to FP8 inside attention, where most underflow", "wrong",
    words=("attention", "matmul", "not watched"), quiet=True,
)  # fmt: skip
def attention_loses_mass(folder: Path) -> None:
    class Attention(nn.Module):
        fp8 = False

        def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
            super().__init__()
            self.norm, self.qkv = nn.RMSNorm(width), linear(width, 3 * width, bias=bias)
            self.out = linear(width, width, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            scores = q @ k.t() / 8
            p = torch.exp(scores - scores.amax(-1, keepdim=True))
            total = p.sum(-1, keepdim=True)
            if self.fp8:
                p = p + ((p / 4).to(E4M3).float() * 4 - p).detach()
            out: Tensor = x + self.out(p @ v / total)
            return out

    for name, fp8 in (("sick", True), ("clean", False)):
        Attention.fp8 = fp8
        model = Model(nn.Linear, block=Attention)
        with torch.no_grad():
            for block in model.blocks:
                weight: Any = block.qkv.weight
                weight[:256] *= 3
        train(fp8debug.convert(model, "blockwise", overrides={"head": None}), folder / name)


@situation(
    "PrimeIntellect-ai/prime-rl#2438", "the rollout engine caches one weight, which later updates leave behind", "wrong",
    codes=("F122",), modules=("head",), words=("weight",),
)  # fmt: skip
def stale_head_in_rollout(folder: Path) -> None:
    first = Model(nn.Linear).head.weight.detach()
    rollouts(folder / "sick", lambda engine: engine.head.weight.copy_(first), steps=32)


@situation(
    "pytorch/torchtitan#1056", "no fault: torchao with the filter of its README, which leaves the head in BF16", "wrong",
    clean=True,
)  # fmt: skip
def clean_torchao(folder: Path) -> None:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def converted() -> nn.Module:
        model = Model(nn.Linear)
        config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
        return model

    train(converted(), folder / "clean")
    train(converted(), folder / "sick")


@situation(
    "vllm-project/vllm#38083", "weights that lie on an FP8 grid are cast again with power-of-two scales", "wrong",
    tensors=("weight",), words=("twice", "again", "already"),
)  # fmt: skip
def rounded_twice(folder: Path) -> None:
    model = Model(nn.Linear, width=256)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("blocks") and p.dim() == 2:
                scales = scales_of(p, (128, 128), 448.0)
                p.copy_(quantized(p, scales, (128, 128)).float() * expanded(scales, p.shape, (128, 128)))
    fp8debug.convert(model, "blockwise_e8m0", overrides={"head": None})
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, folder / "sick", optimizer=frozen, steps=8, every=1, what_if=("blockwise",))


@situation(
    "vllm-project/vllm#36297", "a static scale is multiplied by where it must be divided by", "wrong",
    modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F113", "F119", "F128"), words=("scale",),
)  # fmt: skip
def scale_for_inverse(folder: Path) -> None:
    class Static(BlockLinear):
        inverse = False

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            scales = torch.full((x.shape[0], -(-x.shape[1] // 128)), 64.0 / 448)
            factor = scales[:, :1] if self.inverse else 1 / scales[:, :1]
            return (x.float() * factor).clamp(-448, 448).to(E4M3), scales

    for name, inverse in (("sick", True), ("clean", False)):
        Static.inverse = inverse
        train(with_fault(Static), folder / name)


@situation(
    "vllm-project/vllm#45835", "the scale of a weight is never loaded: NaN in its buffer", "wrong",
    modules=DOWN, tensors=("weight",), words=("scale",), misleading=("eps",),
)  # fmt: skip
def scale_never_loaded(folder: Path) -> None:
    fault = altered("fprop", "weight")(lambda x, data, scales: (data, torch.full_like(scales, float("nan"))))
    train(with_fault(fault), folder / "sick", steps=6, every=1)


@situation(
    "pytorch/torchtitan#742", "the optimizer's second moment in FP8 with one scale: updates explode", "wrong",
    quiet=True,
)  # fmt: skip
def moments_in_fp8(folder: Path) -> None:
    class Adam(torch.optim.Optimizer):
        def __init__(self, parameters: Any, *, low: bool) -> None:
            super().__init__(parameters, {"lr": 2e-3})
            self.low = low

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                m, v = state.get("m", torch.zeros_like(p)), state.get("v", torch.zeros_like(p))
                m, v = 0.9 * m + 0.1 * p.grad, 0.95 * v + 0.05 * p.grad**2
                if self.low:
                    scale = v.abs().max().clamp(min=1e-30) / 448
                    v = (v / scale).to(E4M3).to(p.dtype) * scale
                state["m"], state["v"] = m, v
                p -= self.param_groups[0]["lr"] * m / (v.sqrt() + 1e-8)

    for name, low in (("sick", True), ("clean", False)):
        model = Model()
        train(model, folder / name, every=2, steps=32, optimizer=Adam(model.parameters(), low=low))

"""Scales that are computed wrong: their amax, their history, their rounding, their limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    E5M2,
    LARGEST,
    TOKENS,
    Block,
    BlockLinear,
    Cast,
    Model,
    altered,
    block_of,
    copy_plain_run,
    expanded,
    quantized,
    scaled,
    scales_of,
    train,
    values,
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
    1, "huggingface/transformers#46763", "scales are rounded up to powers of two after the cast", "right",
    modules=DOWN, tensors=("weight",), codes=("F113", "F119"), words=("scale",), misleading=("cached", "stale"),
)  # fmt: skip
def scale_rounded_after(folder: Path) -> None:
    fault = altered("fprop", "weight")(lambda x, data, scales: (data, pow2_ceil(scales)))
    train(unequal_rows(with_fault(fault, width=256)), folder / "sick")
    train(unequal_rows(Model(width=256)), folder / "clean")


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
    1, "pytorch/ao#3356", "LoRA on an FP8 base whose row scales have no lower bound: rows of padding give 0 / 0", "wrong",
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
    1, "NVIDIA/Megatron-LM#7523", "a block of zeros in a gradient, no amax eps: its scale is Inf", "right",
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
    1, "NVIDIA/TransformerEngine#567", "a loaded weight is cast with the scale of the random one before it", "wrong",
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
    1, "vllm-project/vllm#36297", "a static scale is multiplied by where it must be divided by", "wrong",
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
    2, "marin-community/marin#7659",
    "gradient accumulation keeps the amax of the last microbatch alone: the delayed scale clips the others",
    first="incomplete", codes=("F101", "F113"), modules=("blocks.0.gate", "blocks.0.up", "blocks.0.down"), gemms=("fprop",),
    tensors=("input",), words=("scale",), misleading=("eps",),
)  # fmt: skip
def amax_of_last_microbatch(folder: Path) -> None:
    calls = [0]

    class Fault(BlockLinear):
        last = 0.0

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            amax = float(x.abs().max())
            scales = torch.full((x.shape[0], -(-x.shape[1] // 128)), (self.last or amax) / LARGEST[E4M3])
            if calls[0] % 4 == 3:  # microbatches differ, as long and short sequences do
                self.last = amax
            return quantized(x.contiguous(), scales, (1, 128)), scales

    class Uneven(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            size = 1.0 if calls[0] % 4 == 3 else 3.0
            x = self.embed(tokens) * size
            for block in self.blocks:
                x = x + block.down(functional.silu(block.gate(x)) * block.up(x))
            out: Tensor = self.head(self.norm(x))
            return out

    model = Uneven()
    for block in model.blocks:
        for name in ("gate", "up", "down"):
            block.get_submodule(name).__class__ = Fault
    train(model, folder / "sick", micro=4, after_backward=lambda step, micro: calls.__setitem__(0, micro + 1))


@situation(
    2, "kekzl/imp#89",
    "a static scale is calibrated on synthetic warm-up tokens: real activations clip",
    first="right", codes=("F101", "F113"), modules=DOWN, gemms=("fprop",), tensors=("input",), words=("scale",),
    misleading=("eps", "smooth"),
)  # fmt: skip
def scale_of_warm_up(folder: Path) -> None:
    calibrated: list[float] = []

    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        if not calibrated:
            calibrated.append(float(x.abs().max()) / 8)  # of tokens that are all the same
        return torch.full((x.shape[0], -(-x.shape[1] // 128)), calibrated[0] / LARGEST[E4M3])

    train(with_fault(fault), folder / "sick")


@situation(
    2, "sgl-project/sglang#18818",
    "scales are read from a file and never passed on: the cast runs with scale 1, far above small activations",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F102", "F113", "F128"), words=("scale",),
    misleading=("smooth", "eps"),
)  # fmt: skip
def unit_scale(folder: Path) -> None:
    class Small(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h) * 1e-2) * 1e2
            return out

    fault = scaled("fprop", "input")(lambda x: torch.ones(x.shape[0], -(-x.shape[1] // 128)))
    train(with_fault(fault, block=Small), folder / "sick")
    train(Model(block=Small), folder / "clean")


@situation(
    2, "NVIDIA/TransformerEngine#825",
    "the amax history of a cached FP8 weight rolls in microbatches that do not cast it: its scale moves, its data do not",
    first="silent", modules=DOWN, tensors=("weight",), codes=("F112", "F113"), words=("scale", "microbatch", "cache"),
    misleading=("eps",),
)  # fmt: skip
def scale_of_cached_weight(folder: Path) -> None:
    micro = [0]

    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            return (data, scales * 2.0) if tensor == "weight" and micro[0] >= 2 else (data, scales)

    train(
        with_fault(Fault), folder / "sick", micro=4, steps=12,
        before=lambda step: micro.__setitem__(0, 0), after_backward=lambda step, number: micro.__setitem__(0, number + 1),
    )  # fmt: skip


@situation(
    2, "kekzl/imp#91",
    "amax is taken over a buffer wider than the tensor, whose rest is old memory: the scale is far too large",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F102", "F113", "F128", "F129"),
    words=("scale",), misleading=("smooth",),
)  # fmt: skip
def amax_of_junk(folder: Path) -> None:
    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        junk = 3e4 * (1 + torch.rand(1, generator=torch.Generator().manual_seed(x.shape[1])).item())
        return torch.full((x.shape[0], -(-x.shape[1] // 128)), junk / LARGEST[E4M3])

    train(with_fault(fault), folder / "sick")


@situation(
    3, "AI-Hypercomputer/maxtext#5021",
    "the FP8 state of a step is overwritten with what it was before: delayed scales stay at their initial 1",
    first="incomplete", tensors=("grad_output",), codes=("F102", "F113", "F128", "F129"), words=("scale",),
    misleading=("eps", "smooth"),
)  # fmt: skip
def scales_never_updated(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            block = (128, 128) if tensor == "weight" else (1, 128)
            scales = torch.ones(-(-x.shape[0] // block[0]), -(-x.shape[1] // 128))
            return quantized(x.contiguous(), scales, block), scales

    train(Model(Fault), folder / "sick")
    copy_plain_run(folder / "clean")


@situation(
    4, "intel/auto-round#1611",
    "the scale of a weight comes from its greatest value, not from its greatest magnitude",
    first="incomplete", modules=DOWN, gemms=("fprop", "dgrad"), tensors=("weight",), codes=("F101", "F104", "F113", "F128"),
    words=("clip", "saturat", "scale"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def greatest_value_for_magnitude(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "weight":
                return super().cast(gemm, tensor, x)
            scales = scales_of(x.clamp(min=0), (128, 128), LARGEST[E4M3])
            return quantized(x.contiguous(), scales, (128, 128)), scales

    model = with_fault(Fault)
    with torch.no_grad():  # a few large weights, of either sign, as in a trained model
        weight = model.get_parameter("blocks.1.down.weight")
        weight[::37, ::29] *= -4.0 * weight[::37, ::29].sign()
    train(model, folder / "sick")


@situation(
    4, "NVIDIA/Model-Optimizer#1397",
    "an all-zero block of a weight gets a scale beyond its format: a NaN byte in the scales",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("weight", "output"), codes=("F103",), words=("scale", "zero", "eps"),
    misleading=("smooth", "optimizer", "learning rate"),
)  # fmt: skip
def zero_block_of_a_weight(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if tensor == "weight":
                blocks = x.abs().unfold(0, 128, 128).unfold(1, 128, 128).amax((2, 3))
                scales = torch.where(blocks == 0, torch.nan, scales)
            return data, scales

    model = with_fault(Fault)
    weight = model.get_parameter("blocks.1.down.weight")
    with torch.no_grad():
        weight[:128, :128] = 0
    train(
        model, folder / "sick", steps=6, every=1, before=lambda step: None, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
    )


@situation(
    6, "AMD-AGI/Primus-Turbo#306",
    "the amax of a tensor is that of its first 8192 elements: whatever is larger behind them clips",
    first="incomplete", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F101", "F113", "F128"),
    words=("scale", "amax", "clip"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def amax_of_the_first_tile(folder: Path) -> None:
    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        amax = x.float().abs().reshape(-1)[:8192].amax()
        return (amax / LARGEST[E4M3]).expand(len(x), -(-x.shape[1] // 128)).contiguous()

    train(with_fault(fault), folder / "sick")


@situation(
    6, "sgl-project/sglang#30900",
    "scales are made for a maximum of 224, which is another device's: half of the format's range is never used",
    first="silent", codes=("F102", "F113", "F120", "F128"), words=("224", "maximum", "range", "headroom"),
    misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def scales_for_half_the_maximum(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor == "weight":
                return super().cast(gemm, tensor, x)
            scales = scales_of(x, (1, 128), 224.0)
            return quantized(x.contiguous(), scales, (1, 128)), scales

    train(Model(Fault), folder / "sick")
    copy_plain_run(folder / "clean")


@situation(
    6, "huggingface/transformers#42775",
    "a static activation scale and a cast that does not clamp: what lies beyond is NaN, and the kernel's 0",
    first="misled", modules=DOWN, gemms=("fprop",), tensors=("input", "output"), codes=("F101", "F103", "F113", "F128"),
    words=("clamp", "saturat", "clip", "scale"),
    misleading=("amax_eps", "before its first use", "smooth", "optimizer", "learning rate"),
)  # fmt: skip
def static_cast_without_clamp(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            scales = torch.full((TOKENS, -(-x.shape[1] // 128)), 0.25 / LARGEST[E4M3])
            scaled = x.float() / expanded(scales, x.shape, block_of(x, scales))
            inside = scaled.clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3)
            beyond = torch.full_like(inside.view(torch.uint8), 0x7F).view(E4M3).float()
            return torch.where(scaled.abs() > 464, beyond, inside.float()).to(E4M3), scales

        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            return out.nan_to_num(nan=0.0) if gemm == "fprop" else out

    train(with_fault(Fault), folder / "sick")


@situation(
    9, "vllm-project/vllm#53668",
    "the fused SwiGLU and cast maps the maximum of a block to [1, 2) instead of the format's: eight binades are not used",
    first="silent", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F101", "F102", "F104", "F113"),
    words=("headroom", "range", "scale"), misleading=("smooth", "outlier", "history", "optimizer"),
)  # fmt: skip
def maximum_below_two(folder: Path) -> None:
    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        return scales_of(x, (1, 128), 1.0).log2().floor().exp2()

    train(with_fault(fault), folder / "sick")
    copy_plain_run(folder / "clean")


@situation(
    10, "NVIDIA/TransformerEngine#2007",
    "the fused kernel of bias gradient and cast computes neither amax nor scale: gradients are cast under a scale of one",
    first="right", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F101", "F102", "F113", "F128"),
    words=("scale",), misleading=("smooth", "optimizer", "learning rate", "lower the eps", "loss scal"),
)  # fmt: skip
def fused_bias_kernel_has_no_scale(folder: Path) -> None:
    class Fault(BlockLinear):
        has_fault = True

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if tensor != "grad_output" or not self.has_fault:
                return data, scales
            one = torch.ones_like(scales)
            return quantized(x.contiguous(), one, (1, 128)), one

    class Sound(Fault):
        has_fault = False

    train(Model(Fault, bias=True), folder / "sick")
    train(Model(Sound, bias=True), folder / "clean")


class _Padded(BlockLinear):
    """A Linear of tokens that are padded to a multiple of 128; wgrad's input is made of the forward pass's FP8 values.

    Scales of inputs are powers of two, so that the second cast costs nothing.
    """

    padding = 0.0

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        if tensor != "input":
            return super().cast(gemm, tensor, x)
        data, scales = self._power_of_two(x if gemm == "fprop" else x.t())
        scales[TOKENS:] = self.padding
        return (data, scales) if gemm == "fprop" else self._power_of_two(values((data, scales)).t())

    def _power_of_two(self, x: Tensor) -> Cast:
        scales = pow2_ceil(scales_of(x, (1, 128), LARGEST[E4M3]))
        return quantized(x.contiguous(), scales, (1, 128)), scales


class _UnwrittenPadding(_Padded):
    padding = float("nan")


class _PaddedBlock(Block):
    """A block whose down projection gets its tokens in a padded buffer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = functional.silu(self.gate(h)) * self.up(h)
        out: Tensor = x + self.down(functional.pad(h, (0, 0, 0, -len(h) % 128)))[: len(h)]
        return out


@situation(
    11, "NVIDIA/TransformerEngine#2547",
    "nobody writes the scales of padding rows: NaN in the buffer, which the cast for wgrad spreads over a block of tokens",
    first="misled", modules=DOWN, gemms=("fprop", "wgrad"), tensors=("input",), codes=("F103", "F113", "F117", "F128"),
    words=("pad", "never written", "unwritten", "uninitialized", "nan scale", "scale is nan", "scales are nan"),
    misleading=("smooth", "eps", "learning rate", "optimizer", "loss scal"),
)  # fmt: skip
def unwritten_scales_of_padding(folder: Path) -> None:
    for name, last in (("sick", _UnwrittenPadding), ("clean", _Padded)):
        model = Model(block=_PaddedBlock)
        model.get_submodule("blocks.1.down").__class__ = last
        model.get_submodule("blocks.0.down").__class__ = _Padded
        train(model, folder / name, steps=12)


class _Histories(BlockLinear):
    """A Linear under delayed scaling whose amax histories travel as gradients, and are reduced over the microbatches."""

    length = 16

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.histories: dict[str, Tensor] = {}
        self.gradients: dict[str, list[Tensor]] = {}

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        x, amax = x.contiguous(), x.detach().abs().max().float()
        old = self.histories.get(tensor, torch.zeros(self.length))
        if (gemm, tensor) in (("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad_output")):
            self.gradients.setdefault(tensor, []).append(torch.cat([amax[None], old[:-1]]))
        block = (128, 128) if tensor == "weight" else (1, 128)
        largest = old.max() if old.any() else amax
        scales = torch.full_like(scales_of(x, block, LARGEST[E4M3]), float(largest) / LARGEST[E4M3])
        return quantized(x, scales, block), scales

    def overwrite(self, *, sums: bool) -> None:
        """Set each history to the sum, or the maximum, of what the microbatches gave."""
        for tensor, given in self.gradients.items():
            self.histories[tensor] = torch.stack(given).sum(0) if sums else torch.stack(given).amax(0)
        self.gradients.clear()


@situation(
    15, "google/praxis#40",
    "amax histories that travel as gradients are added over the microbatches of a pipeline: scales grow with every step",
    first="false alarm", codes=("F101", "F102", "F113"), gemms=("fprop", "dgrad"), tensors=("input", "weight", "grad_output"),
    words=("sum", "accumul", "microbatch", "never"), misleading=("smooth", "eps", "optimizer", "learning rate", "loss scal"),
)  # fmt: skip
def amax_histories_are_added(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(_Histories)
        layers = [module for module in model.modules() if isinstance(module, _Histories)]

        def reduce(step: int, number: int, layers: Sequence[_Histories] = layers, sums: bool = name == "sick") -> None:
            if number:
                for layer in layers:
                    layer.overwrite(sums=sums)

        train(model, folder / name, micro=2, after_backward=reduce)


class _CachedWeight(BlockLinear):
    """A Linear under delayed scaling that casts its weight in the first of four microbatches.

    Its scale is updated after that forward pass; later microbatches read the cached data under the scale of the cast, or under
    the updated one.
    """

    updates = True

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.num, self.amax, self.scale_inv = 0, 0.0, 1.0
        self.cached: dict[str, Tensor] = {}

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        if tensor != "weight":
            return super().cast(gemm, tensor, x)
        x, block = x.contiguous(), (128, 128)
        shape = scales_of(x, block, LARGEST[E4M3])
        if gemm == "fprop":
            self.num += 1
            if self.num % 4 == 1:
                self.scale_inv = self.amax / LARGEST[E4M3] if self.amax else 1.0
                data = quantized(x, torch.full_like(shape, self.scale_inv), block)
                self.cached = {"fprop": data, "dgrad": data.t().contiguous()}
                self.amax = max(self.amax, float(x.abs().max()))
        later = self.updates and self.num % 4 != 1
        return self.cached[gemm], torch.full_like(shape, self.amax / LARGEST[E4M3] if later else self.scale_inv)


@situation(
    15, "NVIDIA/TransformerEngine#1047",
    "scales are updated between microbatches, the cached FP8 weight is not: from the second on its data have another scale",
    first="misled", codes=("F112", "F113", "F119", "F121"), gemms=("fprop", "dgrad"), tensors=("weight",),
    words=("microbatch", "cach"), misleading=("smooth", "eps", "optimizer", "learning rate", "loss scal"),
)  # fmt: skip
def scale_updated_between_microbatches(folder: Path) -> None:
    class Kept(_CachedWeight):
        updates = False

    train(Model(_CachedWeight), folder / "sick", micro=4, steps=16)
    train(Model(Kept), folder / "clean", micro=4, steps=16)


@situation(
    16, "AI-Hypercomputer/maxtext#672",
    "amax histories that travel as gradients are clipped with them: their scales are too small for what comes next",
    first="right", codes=("F101", "F104", "F113"), gemms=("fprop", "dgrad"), tensors=("input", "weight", "grad_output"),
    words=("scale", "amax", "history", "clip"),
    misleading=("smooth", "amax_eps", "optimizer", "learning rate", "loss scal", "longer history"),
)  # fmt: skip
def amax_histories_are_clipped(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(_Histories)
        layers = [module for module in model.modules() if isinstance(module, _Histories)]

        def clip(step: int, number: int, model: Model = model, layers: Any = layers, name: str = name) -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            histories = [one for layer in layers for given in layer.gradients.values() for one in given]
            norm = torch.stack([one.norm() for one in gradients + (histories if name == "sick" else [])]).norm()
            for one in gradients + (histories if name == "sick" else []):
                one.mul_((1.0 / norm).clamp(max=1.0))
            for layer in layers:
                layer.overwrite(sums=False)

        train(model, folder / name, after_backward=clip)


@situation(
    17, "pytorch/ao#904",
    "a correct program: eager code computes scales in BF16, compiled code in FP32; codes and scales belong together in both",
    first="right", clean=True,
)  # fmt: skip
def clean_scales_in_bf16(folder: Path) -> None:
    class Eager(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            x, block = x.contiguous(), (128, 128) if tensor == "weight" else (1, 128)
            scale = (1 / scales_of(x.bfloat16(), block, LARGEST[E4M3])).bfloat16().float()
            return quantized(x, 1 / scale, block), 1 / scale

    train(Model(Eager), folder / "sick")

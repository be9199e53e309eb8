"""Codes that a cast writes wrong: rounding, format, order, transposed copies, rows that stay unwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.faults.base import Clock, Target, distort
from fp8debug.faults.base import quantized as known
from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels.reference import as_cast_reads, round_to_format
from fp8debug.metrics import Source
from fp8debug.metrics.base import spread
from fp8debug.types import Gemm, Quantized, TensorRole
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    E5M2,
    LARGEST,
    BlockLinear,
    Cast,
    Model,
    altered,
    copy_plain_run,
    expanded,
    quantized,
    scales_of,
    train,
    with_fault,
)


@situation(
    1, "sgl-project/sglang#28418", "rows of an operand are never written", "wrong",
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
    1, "NVIDIA/TransformerEngine#3281", "the gradient's cast returns zeros", "wrong",
    gemms=("dgrad", "wgrad"), tensors=("grad_output",),
)  # fmt: skip
def gradient_cast_to_zero(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            return (torch.zeros_like(data), scales) if tensor == "grad_output" else (data, scales)

    train(Model(Fault), folder / "sick")


@situation(
    1, "NVIDIA/TransformerEngine#539", "the cached FP8 weight is an empty placeholder from the second microbatch on", "right",
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
    1, "vllm-project/vllm#38083", "weights that lie on an FP8 grid are cast again with power-of-two scales", "wrong",
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
    2, "NVIDIA/TransformerEngine#524",
    "the transposed FP8 weight is cached over the optimizer step: dgrad multiplies by last step's, fprop by this one's",
    first="right", modules=("blocks.0.down", "blocks.1.down"), gemms=("dgrad",), tensors=("weight",), codes=("F112", "F128"),
    words=("cache", "stale", "older", "step"), misleading=("eps", "smooth"),
)  # fmt: skip
def stale_transpose(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            made = super().cast(gemm, tensor, x)
            if (gemm, tensor) != ("dgrad", "weight"):
                return made
            kept: list[Cast] = self.__dict__.setdefault("kept", [])
            if not kept:
                kept.append(made)
            return kept[0]

    train(with_fault(Fault), folder / "sick", lr=4e-3)


@situation(
    4, "vllm-project/tpu-inference#1926",
    "the cast cuts mantissas off in place of rounding them: every value is a little too small",
    first="silent", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F113", "F118", "F120", "F128"),
    words=("truncat", "cut", "toward zero", "towards zero", "rounds down"),
    misleading=("e4m3fn forward", "smooth", "format='e4m3fn'"),
)  # fmt: skip
def cast_that_truncates(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            scales = scales_of(x, (1, 128), LARGEST[E4M3])
            scaled = x.float() / expanded(scales, x.shape, (1, 128))
            spacing = torch.exp2(torch.frexp(scaled)[1].clamp(min=-5) - 4.0)
            return ((scaled / spacing).trunc() * spacing).to(E4M3), scales

    train(with_fault(Fault), folder / "sick")


@situation(
    5, "mlc-ai/pith-train#74",
    "transposing an FP8 tile inside the kernel puts a quarter of the bytes of dgrad's weight in other places",
    first="incomplete", modules=DOWN, gemms=("dgrad",), tensors=("weight",), codes=("F119", "F121", "F128"),
    words=("place", "permut", "transpos", "layout"), misleading=("refresh", "cache", "smooth", "eps", "optimizer"),
)  # fmt: skip
def transposed_in_pieces(folder: Path) -> None:
    @altered("dgrad", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        codes = data.view(torch.uint8).clone()
        codes[0::4, ::2], codes[1::4, ::2] = codes[1::4, ::2].clone(), codes[0::4, ::2].clone()
        return codes.view(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    5, "NVIDIA/TransformerEngine#530",
    "shards of the transposed input are gathered along the wrong dimension: wgrad reads its tokens in another order",
    first="incomplete", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F119", "F121", "F128"),
    words=("place", "permut", "order", "transpos"), misleading=("smooth", "eps", "cache", "optimizer"),
)  # fmt: skip
def tokens_in_another_order(folder: Path) -> None:
    @altered("wgrad", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        codes = data.view(torch.uint8)
        return torch.cat(codes.chunk(2, 1), 0).reshape(codes.shape).view(E4M3), scales

    train(with_fault(fault), folder / "sick")


class _CastOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = (_tensorwise(one, E4M3) for one in (x, weight))
        ctx.save_for_backward(a, scale_a, b, scale_b)
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, scale_a, b, scale_b = ctx.saved_tensors
        g, scale_g = _tensorwise(grad, E5M2)
        dgrad = torch._scaled_mm(g, b.t().contiguous().t(), scale_g, scale_b, out_dtype=torch.bfloat16)
        wgrad = torch._scaled_mm(g.t().contiguous(), a.t().contiguous().t(), scale_g, scale_a, out_dtype=torch.bfloat16)
        return dgrad.float(), wgrad.float()


def _tensorwise(x: Tensor, kind: torch.dtype) -> Cast:
    scale = x.float().abs().amax().clamp(min=1e-12) / LARGEST[kind]
    return (x.float() / scale).to(kind), scale


class CastOnce(nn.Linear):
    """A Linear that casts each tensor once, and reads the bytes again in its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, out_features]``."""
        out: Tensor = _CastOnce.apply(x, self.weight)
        return out.float()


@situation(
    5, "karpathy/nanochat#531", "a correct program: the bytes of the forward pass and one cast of the gradient serve both GEMMs",
    first="right", clean=True,
)  # fmt: skip
def clean_cast_once(folder: Path) -> None:
    train(Model(CastOnce), folder / "sick", steps=60)


@situation(
    6, "sgl-project/sglang#37140",
    "a conversion by hand takes the format's highest exponent for overflow: 256 to 448 is all written as 448",
    first="incomplete", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F113", "F128"),
    words=("rounds away", "larger", "largest value", "conversion"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def highest_exponent_is_overflow(folder: Path) -> None:
    @altered("fprop", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        codes = data.float()
        return torch.where(codes.abs() >= 256, codes.sign() * LARGEST[E4M3], codes).to(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    6, "pytorch/ao#4900",
    "the cast writes with a row stride of 1: rows overlap, and most of the buffer is never written",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("grad_output",), codes=("F119", "F121", "F128"),
    words=("never written", "zero", "place", "another tensor"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def rows_that_overlap(folder: Path) -> None:
    @altered("wgrad", "grad_output")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        rows, columns = data.shape
        places = (torch.arange(rows)[:, None] + torch.arange(columns)).reshape(-1)
        written = torch.zeros(data.numel(), dtype=torch.uint8)
        written[places] = data.view(torch.uint8).reshape(-1)
        return written.reshape(data.shape).view(E4M3), scales

    train(with_fault(fault), folder / "sick")


def _rounded_at_random(recipe: str, rounding: Callable[[Tensor, Any], Tensor]) -> Model:
    """Return the model in a recipe of few bits whose gradients are rounded by another function of the scaled values."""
    model = Model(nn.Linear)
    fp8debug.convert(model, recipe, overrides={"head": None})

    def corrupt(x: Tensor, cast: Any, ordinary: Any, options: dict[str, Any]) -> Any:
        q, cast = known(ordinary(x, cast))
        if cast.rounding != "stochastic":
            return q, cast
        scaled = as_cast_reads(Source(x), cast).value / spread(q.scale_inv, *block_shape(cast.granularity, *x.shape), *x.shape)
        return Quantized(rounding(scaled, FORMATS[cast.format]).reshape(q.data.shape), q.scale_inv), cast

    clock = Clock(model)
    for name, module in model.named_modules():
        if isinstance(module, fp8debug.Fp8Linear) and not module.recipe.is_high_precision:
            keys = ((Gemm("dgrad"), TensorRole("grad_output")), (Gemm("wgrad"), TensorRole("grad_output")))
            distort(Target(model, module, name, 0, {}, clock), corrupt, *keys)
    return model


@situation(
    7, "axolotl-ai-cloud/axolotl#3767",
    "the fallback of stochastic rounding dithers with twice the distance of two FP4 values: too much noise, and a bias",
    first="right", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F145",), words=("round",),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def dither_of_twice_the_step(folder: Path) -> None:
    random = torch.Generator().manual_seed(11)

    def rounding(scaled: Tensor, fmt: Any) -> Tensor:
        exponent = torch.frexp(scaled.abs().clamp(min=fmt.min_normal))[1] - 1
        step = torch.exp2(exponent.float())  # of FP4 the distance is half of that
        dithered = scaled + (torch.rand(scaled.shape, generator=random) - 0.5) * step
        return round_to_format(dithered, fmt)

    train(_rounded_at_random("nvfp4", rounding), folder / "sick")
    model = Model(nn.Linear)
    train(fp8debug.convert(model, "nvfp4", overrides={"head": None}), folder / "clean")


@situation(
    7, "AMD-AGI/Primus-Turbo#365",
    "the seed of stochastic rounding is zero in every launch: an element meets the same random number in each step",
    first="right", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F145",),
    words=("come back", "seed", "generator"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def zero_seed_in_every_launch(folder: Path) -> None:
    def rounding(scaled: Tensor, fmt: Any) -> Tensor:
        noise = torch.rand(scaled.shape, generator=torch.Generator().manual_seed(0))
        return round_to_format(scaled, fmt, noise=noise)

    train(_rounded_at_random("mxfp4", rounding), folder / "sick")


@situation(
    7, "pytorch/ao#1516",
    "the mask of a transposing cast has rows and columns exchanged: most of dgrad's weight is never written",
    first="misled", modules=DOWN, gemms=("dgrad",), tensors=("weight",), codes=("F103", "F113", "F125", "F128"),
    words=("never written", "the cast", "uninitialized"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def mask_of_the_other_shape(folder: Path) -> None:
    random = torch.Generator().manual_seed(5)

    @altered("dgrad", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        rows, columns = data.shape
        behind = torch.randn(rows, columns, generator=random).bfloat16().view(torch.uint8)[:, :columns].clone()
        behind[:columns] = data.view(torch.uint8)[:columns]  # in bounds of the other shape
        return behind.view(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    8, "NVIDIA/TransformerEngine#3342",
    "the fused backward pass reads gradients that were cast to E5M2 as E4M3: far too small, each in another way",
    first="misled", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F113", "F120", "F128"),
    words=("e5m2", "other format", "another format"), misleading=("scale layout", "smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def e5m2_read_as_e4m3(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "grad_output":
                return super().cast(gemm, tensor, x)
            x = x.contiguous()
            scales = scales_of(x, (1, 128), LARGEST[E5M2])
            return quantized(x, scales, (1, 128), E5M2).view(E4M3), scales

    train(Model(Fault), folder / "sick")


@situation(
    8, "ROCm/TransformerEngine#665",
    "the transposed cast does not shuffle the codes for the GEMM that expects them so: wgrad's input has them in other places",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F119", "F121", "F128"),
    words=("order", "place", "permut", "layout", "rows"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def codes_are_not_shuffled(folder: Path) -> None:
    @altered("wgrad", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        rows, columns = data.shape
        tiles = data.float().reshape(rows // 16, 16, columns // 32, 2, 16)
        return tiles.permute(0, 2, 3, 1, 4).reshape(rows, columns).to(data.dtype), scales

    train(with_fault(fault), folder / "sick")


@situation(
    10, "PaddlePaddle/PaddleFleet#1523",
    "the results of a weight's cast are unpacked in the wrong order: fprop gets dgrad's transposed copy, and dgrad fprop's",
    first="incomplete", gemms=("fprop",), tensors=("weight",), codes=("F112", "F119", "F121", "F128"),
    words=("transpos", "place", "layout"), misleading=("smooth", "eps", "optimizer", "learning rate", "refresh"),
)  # fmt: skip
def transpose_unpacked_first(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            return super().cast(gemm, tensor, x.t() if tensor == "weight" else x)

    train(Model(Fault, hidden=128), folder / "sick")
    train(Model(hidden=128), folder / "clean")


@situation(
    10, "NVIDIA/TransformerEngine#3215",
    "at times the kernel that casts and transposes leaves a tile of a gradient at the largest code: finite, and far too large",
    first="right", modules=("blocks.1.up", "blocks.0.down", "blocks.0.gate"), gemms=("dgrad",), tensors=("grad_output",),
    codes=("F113", "F117", "F128"), words=("cast", "race", "backend", "single elements", "kernel"),
    misleading=("smooth", "eps", "optimizer", "learning rate", "loss scal"),
)  # fmt: skip
def tile_at_the_largest_code(folder: Path) -> None:
    hit = {9: "blocks.1.up", 16: "blocks.0.down", 21: "blocks.0.gate"}
    now = {"step": 0}

    class Fault(BlockLinear):
        name = ""

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if (gemm, tensor) == ("dgrad", "grad_output") and hit.get(now["step"]) == self.name:
                codes = data.view(torch.uint8).clone()
                codes[64:96, 32:64] = 0x7E
                data = codes.view(E4M3)
            return data, scales

    model = Model(Fault)
    for name, module in model.named_modules():
        if isinstance(module, Fault):
            module.name = name
    train(model, folder / "sick", before=lambda step: now.update(step=step))
    copy_plain_run(folder / "clean")


@situation(
    11, "pytorch/ao#4652",
    "a miscompiled kernel stores garbage in the transposed FP8 copy, some of it NaN; the copy of the forward pass is correct",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F103", "F113", "F117", "F119", "F121", "F128"),
    words=("cast", "kernel", "copy", "backend"), misleading=("smooth", "eps", "learning rate", "optimizer", "loss scal"),
)  # fmt: skip
def garbage_in_the_transposed_copy(folder: Path) -> None:
    @altered("wgrad", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        codes = data.view(torch.uint8).clone()
        garbage = torch.randint(256, codes[8::64, :16].shape, generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
        codes[8::64, :16] = garbage
        codes[8, 3] = 0x7F
        return codes.view(E4M3), scales

    train(with_fault(fault), folder / "sick", steps=12)
    train(Model(), folder / "clean", steps=12)

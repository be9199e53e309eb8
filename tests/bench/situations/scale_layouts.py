"""Right scales that a kernel reads at another place, of another block, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    UP,
    Block,
    BlockLinear,
    Cast,
    FusedBlock,
    Model,
    OwnKernel,
    altered,
    copy_plain_run,
    fp8_gemm_nt,
    quantized,
    scales_of,
    train,
    values,
    with_fault,
)


@situation(
    1, "sgl-project/sglang#39193", "a kernel uses only the exponent of the scales that it is given", "wrong",
    modules=DOWN, gemms=("fprop",), tensors=("output",), misleading=("accumul",),
)  # fmt: skip
def kernel_truncates_scales(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        scales = torch.exp2(torch.floor(torch.log2(a[1]))) if recipe == "fprop" else a[1]
        fp8_gemm_nt((a[0], scales), b, d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    2, "NVIDIA/TransformerEngine#3070",
    "the padding of MXFP8's scales is read by the GEMM: NaN from finite operands, where a dimension is no multiple of 128",
    first="right", codes=("F103", "F108", "F128"), modules=DOWN, gemms=("fprop",), tensors=("output",),
    words=("gemm", "kernel"), misleading=("amax_eps",),
)  # fmt: skip
def padded_scales(folder: Path) -> None:
    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "fprop":
                out[-(shape[0] % 128 or 128) :, :4] = float("nan")
            return out

    train(with_fault(Fault), folder / "sick", steps=6, every=2)


@situation(
    2, "guoqingbao/xinfer#358",
    "a fused weight has a scale for each shard, and the first one is used for all of it",
    first="right", modules=("blocks.0.up",), gemms=("fprop",), tensors=("weight",), codes=("F113", "F119", "F128"),
    words=("scale",), misleading=("eps", "stale", "optimizer"),
)  # fmt: skip
def scale_of_first_shard(folder: Path) -> None:
    fault = altered("fprop", "weight")(lambda x, data, scales: (data, scales[:1].expand_as(scales).contiguous()))

    def unequal(model: Model) -> Model:
        with torch.no_grad():  # the shards of a trained model differ in size
            for block in model.blocks:
                weight: Any = block.up.weight
                weight[128:256] *= 2.7
                weight[256:] *= 0.3
        return model

    train(unequal(with_fault(fault, "blocks.0.up")), folder / "sick")
    train(unequal(Model()), folder / "clean")


@situation(
    3, "flashinfer-ai/flashinfer#3882",
    "an operand is quantized along its rows, and its scales are read along the contracted dimension",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("weight",), codes=("F113", "F119", "F128"), words=("scale",),
    misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def blocks_along_the_wrong_dimension(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "weight"):
                return super().cast(gemm, tensor, x)
            x = x.contiguous()
            scales = scales_of(x, (128, 1), LARGEST[E4M3])  # [1, K]
            data = quantized(x, scales, (128, 1))
            read = scales.reshape(-1)[: len(x) * -(-x.shape[1] // 128)].reshape(len(x), -1)
            return data, read

    with_columns = with_fault(Fault)
    with torch.no_grad():  # columns of a trained weight differ in size
        weight = with_columns.get_parameter("blocks.1.down.weight")
        weight.mul_(torch.linspace(-2, 2, weight.shape[1]).exp2())
    train(with_columns, folder / "sick")


@situation(
    4, "sgl-project/sglang#39637",
    "a compute tile spans several quantization blocks: the kernel never moves on from the first block's scale along K",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F128"),
    words=("kernel", "scale"), misleading=("smooth", "optimizer", "fast accumulation"),
)  # fmt: skip
def scale_never_moves_on(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        if recipe == "fprop":
            a, b = ((data, scales[:, :1].expand_as(scales)) for data, scales in (a, b))
        fp8_gemm_nt(a, b, d)

    model = with_fault(OwnKernel)
    with torch.no_grad():  # blocks of a trained model differ in size
        weight = model.get_parameter("blocks.1.down.weight")
        weight.mul_(torch.linspace(-1, 1, weight.shape[1]).exp2())
    train(model, folder / "sick", kernel=kernel)


@situation(
    4, "flashinfer-ai/flashinfer#2809",
    "the gate's scales are never read: the rows of a fused weight's first half are multiplied with those of the second",
    first="incomplete", modules=("blocks.1.gate_up",), gemms=("fprop",), tensors=("weight", "output"),
    codes=("F108", "F113", "F119", "F128"), words=("scale", "kernel"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def scales_of_the_gate_unread(folder: Path) -> None:
    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            if gemm == "fprop":
                data, scales = b
                b = data, torch.cat([scales[len(scales) // 2 :]] * 2)
            return super().product(gemm, a, b, shape)

    model = with_fault(Fault, "blocks.1.gate_up", block=FusedBlock)
    with torch.no_grad():
        weight = model.get_parameter("blocks.1.gate_up.weight")
        weight[: len(weight) // 2] *= 3
    train(model, folder / "sick")
    train(Model(block=FusedBlock), folder / "clean")


@situation(
    5, "ROCm/aiter#2900",
    "scales are written with one row stride and read with a padded one: all rows behind the first 32 get scales of others",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F119", "F128"),
    words=("scale", "layout", "kernel"), misleading=("smooth", "optimizer", "fast accumulation", "eps"),
)  # fmt: skip
def scales_with_another_stride(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        data, scales = a
        if recipe == "fprop":
            rows, columns = scales.shape
            places = torch.arange(rows)[:, None] // 32 * 32 * (columns + 1) + torch.arange(rows)[:, None] % 32 * columns
            scales = scales.reshape(-1)[(places + torch.arange(columns)) % scales.numel()]
        fp8_gemm_nt((data, scales), b, d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    5, "pytorch/pytorch#190979",
    "the scale of an FP8 result is dropped on the way to the GEMM: the module divides by a scale that was never applied",
    first="misled", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F128"),
    words=("factor", "scale", "times"), misleading=("smooth", "optimizer", "eps", "fast_accum"),
)  # fmt: skip
def scale_of_the_result_dropped(folder: Path) -> None:
    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            if gemm != "fprop":
                return super().product(gemm, a, b, shape)
            out, scale_result = torch.empty(tuple(shape), dtype=E4M3), 64.0
            sys.modules["deep_gemm"].fp8_gemm_nt(a, b, out)
            return (out.float() / scale_result).bfloat16()

    train(with_fault(Fault), folder / "sick")


def _columnwise(x: Tensor, kind: torch.dtype = E4M3) -> Cast:
    """Return data and scale_inv of rows ``[rows, 1]``."""
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST[kind]
    return (x.float() / scales).to(kind), scales


class _ScaledAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (a, scale_a), (b, scale_b), one = _columnwise(x), _columnwise(weight), torch.ones(())
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32).mul_(scale_b.t()).mul_(scale_a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (a, scale_a), (b, scale_b), one = _columnwise(grad), _columnwise(weight.t()), torch.ones(())
        dgrad = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32).mul_(scale_b.t()).mul_(scale_a)
        return dgrad, grad.t() @ x


class ScaledAfter(nn.Linear):
    """A Linear whose scales are applied to the result of its GEMM."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, out_features]``."""
        out: Tensor = _ScaledAfter.apply(x, self.weight)
        return out


@situation(
    5, "Nerogar/OneTrainer#1108", "a correct program: the GEMM gets scales of one, and its result is multiplied by the scales",
    first="false alarm", clean=True,
)  # fmt: skip
def clean_scaled_after(folder: Path) -> None:
    train(Model(ScaledAfter), folder / "sick", steps=60)


@situation(
    6, "pytorch/FBGEMM#6159",
    "the scales of the last block along K are never applied, as a strict comparison misses the last iteration",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F119", "F128"),
    words=("kernel", "scale"), misleading=("smooth", "optimizer", "eps", "fast accumulation"),
)  # fmt: skip
def last_scale_block_unapplied(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        if recipe == "fprop":
            a, b = ((data, torch.cat([scales[:, :-1], torch.ones_like(scales[:, -1:])], 1)) for data, scales in (a, b))
        fp8_gemm_nt(a, b, d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    6, "sgl-project/sglang#35703",
    "rows of a fused weight are put in another order as it is loaded, and its block scales stay in the old one",
    first="incomplete", modules=("blocks.1.gate_up",), gemms=("fprop",), tensors=("weight",), codes=("F113", "F119", "F128"),
    words=("scale",), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def scales_in_the_old_order(folder: Path) -> None:
    @altered("fprop", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        return data, scales[torch.arange(len(scales)).reshape(2, -1).t().reshape(-1)]

    model = with_fault(fault, "blocks.1.gate_up", block=FusedBlock)
    with torch.no_grad():  # heads of a trained model differ in size
        weight = model.get_parameter("blocks.1.gate_up.weight")
        weight.mul_(torch.linspace(-1, 1, len(weight)).exp2()[:, None])
    train(model, folder / "sick")
    train(Model(block=FusedBlock), folder / "clean")


class _Masked(Block):
    """A gated MLP of which some tokens switch a third of the hidden units off."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        hidden = nn.functional.silu(self.gate(h)) * self.up(h)
        kept = torch.ones_like(hidden)
        kept[::5, 128:256] = 0
        out: Tensor = x + self.down(hidden * kept)
        return out


@situation(
    7, "NVIDIA/TransformerEngine#2589",
    "the inverse scale of an empty block has mantissa bits, which spill into its neighbour's exponent as four scales are packed",
    first="right", modules=("blocks.0.down",), gemms=("fprop",), tensors=("output", "input"),
    codes=("F103", "F108", "F113", "F125"), words=("kernel", "scale", "gemm"),
    misleading=("smooth", "optimizer", "learning rate", "fast accumulation"),
)  # fmt: skip
def empty_block_spills_over(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        data, scales = a
        if recipe == "fprop" and scales.shape[1] > 1:
            spills = torch.zeros_like(scales, dtype=torch.bool)
            spills[:, :-1] = scales[:, 1:] < 2.0**-120
            exponent = (scales.contiguous().view(torch.int32) >> 23) | (spills.int() << 7)
            a = (data, (exponent << 23).view(torch.float32))
        fp8_gemm_nt(a, b, d)

    class Rounded(OwnKernel):
        """Block scales that are powers of two, of an empty block the smallest."""

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            x, block = x.contiguous(), (128, 128) if tensor == "weight" else (1, 128)
            scales = torch.exp2(scales_of(x, block, 448.0, eps=1e-30).log2().ceil())
            scales = torch.where(scales < 2.0**-100, 2.0**-126, scales)
            return quantized(x, scales, block), scales

    train(Model(Rounded, block=_Masked), folder / "sick", kernel=kernel)


@situation(
    8, "AMD-AGI/Primus-Turbo#427",
    "a workspace that is not padded to 256 rows: in dgrad the scales of the last rows are those of the next group",
    first="right", modules=DOWN, gemms=("dgrad",), tensors=("grad_output",), codes=("F113", "F119", "F128"),
    words=("scale",), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def scales_of_the_next_group(folder: Path) -> None:
    @altered("dgrad", "grad_output")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        return data, torch.cat([scales[:256], scales[: len(scales) - 256]])

    train(with_fault(fault), folder / "sick")


@situation(
    9, "vllm-project/vllm#54683",
    "each rank casts its tokens under a scale of its own, and the kernel reads the gathered codes under the first rank's",
    first="misled", modules=UP, gemms=("fprop",), tensors=("input",), codes=("F113", "F119", "F128"), words=("scale",),
    misleading=("smooth", "eps", "optimizer", "history", "nearest even"),
)  # fmt: skip
def scale_of_the_first_rank(folder: Path) -> None:
    class Fault(BlockLinear):
        ranks = 1

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            local = [(part, (part.abs().amax() / LARGEST[E4M3]).expand(len(part), 1)) for part in x.chunk(self.ranks)]
            codes = torch.cat([quantized(part, scales, (1, part.shape[1])).view(torch.uint8) for part, scales in local])
            scales = local[0][1][:1].expand(len(x), -(-x.shape[1] // 128)).contiguous()
            return codes.view(E4M3), scales

    class Gathered(Fault):
        ranks = 4

    train(with_fault(Gathered, *UP), folder / "sick")
    train(with_fault(Fault, *UP), folder / "clean")


@situation(
    9, "pytorch/ao#4229",
    "the scales of wgrad's second operand have the right values in the orientation that the kernel does not expect",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("grad_weight",), codes=("F108", "F113", "F119", "F128"),
    words=("scale", "layout", "kernel"), misleading=("smooth", "optimizer", "fast accumulation", "eps"),
)  # fmt: skip
def scales_in_the_other_orientation(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        scales = b[1].t().contiguous().reshape(b[1].shape) if recipe == "wgrad" else b[1]
        fp8_gemm_nt(a, (b[0], scales), d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)
    copy_plain_run(folder / "clean")


@situation(
    9, "aws-neuron/neuronx-distributed-inference#35",
    "the scales of all experts are averaged into one when their weights are fused, and the codes stay as they were",
    first="misled", modules=("blocks.1.gate", *UP), gemms=("fprop", "dgrad"), tensors=("weight",),
    codes=("F113", "F119", "F121", "F128"), words=("scale",), misleading=("smooth", "eps", "optimizer", "history"),
)  # fmt: skip
def scales_of_experts_averaged(folder: Path) -> None:
    class Averaged(BlockLinear):
        experts: Sequence[BlockLinear] = ()

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if tensor != "weight" or not self.experts:
                return data, scales
            each = [expert.weight if gemm == "fprop" else expert.weight.t() for expert in self.experts]
            return data, torch.stack([scales_of(weight, (128, 128), LARGEST[E4M3]) for weight in each]).mean(0)

    for name in ("sick", "clean"):
        model = with_fault(Averaged, *UP, "blocks.1.gate")
        block = model.blocks[1]
        with torch.no_grad():
            block.gate.weight *= 2.0
        Averaged.experts = (block.gate, block.up) if name == "sick" else ()
        train(model, folder / name)


@situation(
    10, "vllm-project/vllm#49596",
    "the kernel takes rows over scale blocks for the size of a block, 112 in place of 128: its last rows get the next scale",
    first="right", modules=("blocks.1.up",), gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F119", "F128"),
    words=("kernel", "scale"), misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def block_size_from_the_shape(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        data, scales = b
        if recipe == "wgrad":
            fp8_gemm_nt(a, b, d)
            return
        spread = scales.repeat_interleave(len(data) // len(scales), 0).repeat_interleave(128, 1)
        d.copy_(values(a) @ (data.float() * spread[:, : data.shape[1]]).t())

    def made() -> Model:
        model = Model(OwnKernel, hidden=448)
        with torch.no_grad():  # blocks of a trained model differ in size
            weight = model.get_parameter("blocks.1.up.weight")
            weight.mul_(torch.linspace(-1, 1, len(weight)).exp2()[:, None])
        return model

    train(made(), folder / "sick", kernel=kernel)
    train(made(), folder / "clean")

"""Weights and scales that are loaded wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    Block,
    BlockLinear,
    Cast,
    InInputType,
    Model,
    altered,
    batch,
    copy_plain_run,
    cross_entropy,
    quantized,
    scales_of,
    train,
    train_for_both,
    values,
    with_fault,
)


@situation(
    1, "unslothai/unsloth#6978", "the scales of a checkpoint are dropped on load: raw codes become the weight", "wrong",
    modules=("blocks.1.gate",), tensors=("weight",), words=("code", "scale"), misleading=("learning rate",),
)  # fmt: skip
def raw_codes_loaded(folder: Path) -> None:
    model = Model(nn.Linear)
    weight: Any = model.blocks[1].gate.weight
    with torch.no_grad():
        weight.copy_(quantized(weight, scales_of(weight, (128, 128), 448.0), (128, 128)).float())
    train(fp8debug.convert(model, "blockwise", overrides={"head": None}), folder / "sick")


@situation(
    1, "vllm-project/vllm#45835", "the scale of a weight is never loaded: NaN in its buffer", "wrong",
    modules=DOWN, tensors=("weight",), words=("scale",), misleading=("eps",),
)  # fmt: skip
def scale_never_loaded(folder: Path) -> None:
    fault = altered("fprop", "weight")(lambda x, data, scales: (data, torch.full_like(scales, float("nan"))))
    train(with_fault(fault), folder / "sick", steps=6, every=1)


@situation(
    2, "NVIDIA-NeMo/Megatron-Bridge#4082",
    "FP32 master weights are not loaded with the checkpoint: the first optimizer step writes the random initialization back",
    first="incomplete", quiet=True, words=("weight",),
)  # fmt: skip
def stale_masters(folder: Path) -> None:
    model = fp8debug.convert(Model(nn.Linear), "blockwise", overrides={"head": None})
    masters = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(60):  # what the checkpoint holds
        tokens, classes = batch(step)
        cross_entropy(model(tokens), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    small = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def overwrite(step: int) -> None:
        if step == 1:
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters, strict=True):
                    p.copy_(master)

    train(model, folder / "sick", optimizer=small, before=overwrite, steps=30)


@situation(
    5, "modelscope/mcore-bridge#125",
    "loading quantized weights fills the copy of fprop alone: dgrad reads a transposed copy of zeros",
    first="right", gemms=("dgrad",), tensors=("weight",), codes=("F112", "F121", "F128"), words=("zero",),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def transposed_copy_of_zeros(folder: Path) -> None:
    @altered("dgrad", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        return torch.zeros_like(data.view(torch.uint8)).view(E4M3), torch.ones_like(scales)

    train(Model(fault), folder / "sick")
    copy_plain_run(folder / "clean")


@situation(
    7, "NVIDIA/Megatron-LM#6920",
    "after a checkpoint is loaded the ranks' parameters are not gathered: until the next step most of the model is its start",
    first="silent", codes=("F125", "F144", "F150"), words=("resume", "checkpoint", "loaded"),
    misleading=("smooth", "eps", "learning rate", "scale_rounding"),
)  # fmt: skip
def not_gathered_after_loading(folder: Path) -> None:
    class Masters:
        """Adam over FP32 copies, which are written to the parameters after each step."""

        def __init__(self, model: nn.Module) -> None:
            self.parameters = list(model.parameters())
            self.copies = [p.detach().float().clone() for p in self.parameters]
            self.inner = torch.optim.AdamW(self.copies, lr=2e-3)

        def step(self) -> None:
            for copy, p in zip(self.copies, self.parameters, strict=True):
                copy.grad = p.grad.float()  # type: ignore[union-attr]  # after a backward pass
            self.inner.step()
            with torch.no_grad():
                for copy, p in zip(self.copies, self.parameters, strict=True):
                    p.copy_(copy)

        def zero_grad(self) -> None:
            for p in self.parameters:
                p.grad = None

    model = Model()
    optimizer: Any = Masters(model)
    train(model, folder / "sick", steps=24, every=2, optimizer=optimizer)
    saved = [copy.clone() for copy in optimizer.copies]
    again = Model()
    other: Any = Masters(again)
    with torch.no_grad():
        for copy, old in zip(other.copies, saved, strict=True):
            copy.copy_(old)
        for name, p in again.named_parameters():
            if name.startswith(("embed", "blocks.0")):  # what this rank owns
                p.copy_(model.get_parameter(name))
    train(again, folder / "sick", steps=24, every=2, optimizer=other, resume_from=24)


@situation(
    8, "verl-project/verl#7224",
    "after a refit the scales of a rollout's weight stay zero, as the loader wrote them into an older tensor",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("weight",), codes=("F103", "F113", "F121", "F128"),
    words=("scale",), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def scales_are_zero_after_a_refit(folder: Path) -> None:
    class Fault(BlockLinear):
        has_refit = False

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            return data, scales * 0 if self.has_refit and tensor == "weight" else scales

    model = with_fault(Fault)
    with torch.no_grad(), fp8debug.watch(model, folder / "sick", inference=True) as watch:
        for number in range(12):
            Fault.has_refit = number >= 6
            model(batch(number)[0])
            watch.step()


@situation(
    8, "NVIDIA/Megatron-LM#6666",
    "on a reload the parameters are made of the FP8 values in the checkpoint, not of the masters: rounded before they are cast",
    first="silent", tensors=("weight",), codes=("F137", "F150"), words=("round", "grid"),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def rounded_by_a_reload(folder: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, folder / "sick", steps=24, every=2, optimizer=optimizer)
    masters: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BlockLinear):
                masters.append((module.weight, module.weight.clone()))
                module.weight.copy_(values(module.cast("fprop", "weight", module.weight)))

    def after_backward(step: int, micro: int) -> None:
        with torch.no_grad():
            for weight, master in masters:  # the optimizer steps with its masters
                weight.copy_(master)
        masters.clear()

    train(model, folder / "sick", steps=24, every=2, optimizer=optimizer, resume_from=24, after_backward=after_backward)


class _Delayed(BlockLinear):
    """A Linear with delayed scaling: one scale for a tensor, of the largest of the last four maxima."""

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        history: dict[tuple[str, str], Tensor] = self.__dict__.setdefault("history", {})
        amax, key = x.float().abs().amax().reshape(1), (gemm, tensor)
        known = history.get(key, amax.expand(4))
        scale = LARGEST[E4M3] / known.amax()
        history[key] = torch.cat([known[1:], amax])
        scales = (1 / scale).expand(len(x), -(-x.shape[1] // 128)).contiguous()
        if torch.isfinite(scale):
            return quantized(x.contiguous(), scales, (1, 128)), scales
        return (x.float() * scale).to(E4M3), scales


@situation(
    11, "NVIDIA-NeMo/Megatron-Bridge#1730",
    "the checkpoint lacks the amax history of delayed scaling: zeros after the resume, an infinite scale, NaN in the first step",
    first="false alarm", tensors=("input", "weight"), gemms=("fprop",), words=("resume", "restor", "history", "checkpoint"),
    misleading=("smooth", "learning rate", "optimizer", "loss scal"),
)  # fmt: skip
def history_lost_on_resume(folder: Path) -> None:
    model = Model(_Delayed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_for_both(model, folder, steps=24, every=2, optimizer=optimizer)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for module in model.modules():
        if isinstance(module, _Delayed):
            history = module.__dict__["history"]
            history.update({key: torch.zeros(4) for key in history})
    train(model, folder / "sick", steps=12, every=2, optimizer=optimizer, resume_from=24)
    train(twin, folder / "clean", steps=12, every=2, optimizer=twin_optimizer, resume_from=24)


@situation(
    11, "modelscope/mcore-bridge#183",
    "the FP8 codes of an embedding are loaded without their scale: a table that is thousands of times too large",
    first="silent", modules=("embed",), words=("scale", "codes"),
    misleading=("smooth", "eps", "optimizer", "learning rate", "loss scal", "history"),
)  # fmt: skip
def raw_codes_in_the_embedding(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for number in range(60):  # the model of the checkpoint
            tokens, classes = batch(number)
            cross_entropy(model(tokens), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            weight = model.embed.weight
            scale = weight.abs().amax() / LARGEST[E4M3] if name == "sick" else torch.ones(())
            weight.copy_((weight / scale).to(E4M3).float() if name == "sick" else weight)
        train(model, folder / name, lr=1e-4)


@situation(
    11, "KempnerInstitute/KempnerForge#115",
    "a resume restores the weights and drops Adam's moments: its first updates are as large as at the start of training",
    first="silent", words=("moment", "optimizer state", "optimizer's state"),
    misleading=("smooth", "eps", "scale_rounding", "bf16"),
)  # fmt: skip
def moments_lost_on_resume(folder: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_for_both(model, folder, steps=48, every=2, optimizer=optimizer)
    for name in ("sick", "clean"):
        again = copy.deepcopy(model)
        other = torch.optim.AdamW(again.parameters(), lr=2e-3)
        if name == "clean":
            other.load_state_dict(optimizer.state_dict())
        train(again, folder / name, steps=24, every=2, optimizer=other, resume_from=48)


@situation(
    12, "ultralytics/ultralytics#24085",
    "the checkpoint keeps Adam's second moment in FP16, where most of it is zero: after the resume updates are divided by eps",
    first="misled", words=("moment", "optimizer state", "optimizer's state", "exp_avg_sq"),
    misleading=("smooth", "amax", "scale_rounding", "bf16", "learning rate"),
)  # fmt: skip
def second_moment_rounds_to_zero(folder: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_for_both(model, folder, steps=36, every=2, optimizer=optimizer)
    for name in ("sick", "clean"):
        saved = copy.deepcopy(optimizer.state_dict())
        if name == "sick":
            for state in saved["state"].values():
                state.update({key: state[key].half().float() for key in ("exp_avg", "exp_avg_sq")})
        again = copy.deepcopy(model)
        other = torch.optim.AdamW(again.parameters(), lr=2e-3)
        other.load_state_dict(saved)
        train(again, folder / name, steps=24, every=2, optimizer=other, resume_from=36)


@situation(
    13, "verl-project/verl#7834",
    "materializing a sharded model gives each name its own storage: the head is no longer the embedding that it is meant to be",
    first="silent", modules=("head", "embed"), words=("tied", "tie_word_embeddings", "share"),
    misleading=("smooth", "eps", "scale_rounding", "learning rate", "optimizer"),
)  # fmt: skip
def tie_lost(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()
        model.head.weight = model.embed.weight
        vars(model)["config"] = SimpleNamespace(tie_word_embeddings=True)
        if name == "sick":
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        train(model, folder / name)


class _Attention(Block):
    """A block that begins with causal attention of two heads, whose projections of queries, keys and values are one."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__(linear, width, hidden, bias)
        self.before, self.qkv = nn.RMSNorm(width), linear(width, 3 * width, bias=bias)
        self.out = linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(0, 1) for one in self.qkv(self.before(x)).float().chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + self.out(mixed.transpose(0, 1).flatten(-2).to(x.dtype)))


@situation(
    16, "PrimeIntellect-ai/prime-rl#3451",
    "a checkpoint's queries, keys and values are loaded into copies of the packed weight, which stays zero",
    first="silent", modules=("blocks.0.qkv", "blocks.1.qkv"), words=("zero",),
    misleading=("smooth", "amax_eps", "scale_rounding", "learning rate", "loss scal", "bf16"),
)  # fmt: skip
def packed_weights_load_as_zeros(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(block=_Attention)
        if name == "sick":
            with torch.no_grad():
                for block in model.blocks:
                    block.qkv.weight.zero_()
        train(model, folder / name)


class _Masters(torch.optim.Optimizer):
    """AdamW that keeps each parameter's master in its state, and steps with it in the master's own type."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, master_weight=p.float(), exp_avg=torch.zeros(p.shape), exp_avg_sq=torch.zeros(p.shape))
                state["step"] += 1
                first = state["exp_avg"].lerp_(p.grad.float(), 0.1)
                second = state["exp_avg_sq"].lerp_(p.grad.float().square(), 0.001)
                size = (second / (1 - 0.999 ** state["step"])).sqrt() + 1e-8
                update = group["lr"] * first / (1 - 0.9 ** state["step"]) / size
                state["master_weight"].copy_(state["master_weight"].float() - update)
                p.copy_(state["master_weight"])


@situation(
    17, "NVIDIA/Megatron-LM#1359",
    "the checkpoint's FP32 masters come back in BF16, and stay so: from the resume on small updates round away",
    first="silent", codes=("F135", "F150"), words=("bf16", "master", "round"),
    misleading=("smooth", "amax_eps", "scale_rounding", "loss scal"),
)  # fmt: skip
def masters_in_bf16_after_a_resume(folder: Path) -> None:
    model = Model(InInputType).bfloat16()
    optimizer = _Masters(model.parameters(), 2e-5)
    train_for_both(model, folder, steps=48, every=2, optimizer=optimizer)
    for name in ("sick", "clean"):
        again, other = copy.deepcopy((model, optimizer))
        if name == "sick":
            for state in other.state.values():
                state["master_weight"] = state["master_weight"].bfloat16()
        train(again, folder / name, steps=48, every=2, optimizer=other, resume_from=48)

"""The cures that are applied, and those that no program can apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug
from fp8debug import Cast
from tests.bench.remedies.bench import Setting, Trial, deep, mixture, wide

SUMS = Setting(micro=4)
#: Of two microbatches F134 cannot judge the sum, and F149 has what the optimizer gets.
TWO = Setting(micro=2)
#: Updates of 1e-4 round away in BF16 weights of 0.1, whose spacing is 5e-4.
SMALL_RATE = Setting(steps=60, lr=1e-4, dtype=torch.bfloat16)

#: A second moment whose bias correction still counts at the end of the run.
LONG_MEMORY = Setting(betas=(0.9, 0.999))
#: Of the first 20 steps F127 calls it a divergence at the start.
AFTER_START = Setting(steps=36)
RESUMED = Setting(resumes=12)


def _in_bf16(module: str, *gemms: str) -> Callable[[nn.Module], None]:
    """Return a change that runs GEMMs of a module in BF16, all by default, as ``overrides={FQN: None}`` does."""

    def change(model: nn.Module) -> None:
        fp8debug.apply(model, [{"module": module, "gemms": list(gemms or ("fprop", "dgrad", "wgrad"))}])

    return change


def _weights_in(module: str, cast: Cast) -> Callable[[nn.Module], None]:
    """Return a change that gives a module's weight another cast."""

    def change(model: nn.Module) -> None:
        entry = {"module": module, "gemms": ["fprop", "dgrad"], "tensor": "weight", "cast": str(cast)}
        fp8debug.apply(model, [entry])

    return change


def _input_in(module: str, cast: Cast) -> Callable[[nn.Module], None]:
    """Return a change that gives a module's input another cast."""

    def change(model: nn.Module) -> None:
        fp8debug.apply(model, [{"module": module, "gemms": ["fprop"], "tensor": "input", "cast": str(cast)}])

    return change


def _convert(model: nn.Module) -> None:
    """Convert the module that a filter missed."""
    fp8debug.convert(model, "blockwise", {"head": None})


def _load_scales(model: nn.Module) -> None:
    """Load the scales with the codes: dequantize what the loader left as codes."""
    linear: Any = model.get_submodule("blocks.1.down")
    cast = Cast(granularity="128x128")
    scales: list[Tensor] = []

    def multiply(_: nn.Module, args: object) -> None:
        with torch.no_grad():
            if linear.weight.abs().max() == 448.0:
                rows = scales[-1].repeat_interleave(128, 0)[: linear.out_features]
                linear.weight.mul_(rows.repeat_interleave(128, 1)[:, : linear.in_features])
            scales[:] = [fp8debug.quantize(linear.weight.detach(), cast).scale_inv]

    with torch.no_grad():
        multiply(linear, ())
    linear.register_forward_pre_hook(multiply)


TRIALS: tuple[Trial, ...] = (
    Trial(fault="stale_scale", code="F101", cure="scaling=current", recommended=True, situation=True),
    Trial(fault="stale_history", code="F102", cure="scaling=current", recommended=True, situation=True),
    Trial(fault="zero_tile", code="F103", cure="amax_eps", recommended=True, situation=True),
    Trial(
        fault="unwritten_padding", code="F103", finding="nonfinite-unwritten", cure="a buffer of zeros",
        cured_options={"rows": 1, "fill": 0}, situation=True,
    ),
    Trial(
        fault="unwritten_padding", code="F103", finding="nonfinite-unwritten", cure="BF16 for the GEMM", recommended=True,
        situation=True,
    ),
    Trial(fault="e8m0_floor", code="F104", cure="pow2_ceil", recipe="blockwise_pow2", recommended=True),
    Trial(
        fault="swiglu_outlier", code="F105", cure="1x128", build=wide, module="1", recipe="tensorwise_current",
        setting=Setting(lr=1e-3), options={"spacing": 10_000}, recommended=True, situation=True,
    ),
    Trial(
        fault="swiglu_outlier", code="F105", cure="BF16, as 1x128 would not do", recipe="tensorwise_current",
        options={"spacing": 10_000}, recommended=True, situation=True,
    ),
    Trial(fault="swiglu_outlier", code="F105", cure="BF16 for fprop", recommended=True, situation=True),
    Trial(fault="uneven_tokens", code="F106", cure="1x128", recommended=True, situation=True),
    Trial(fault="double_quantization", code="F107", cure="BF16 for wgrad", change=_in_bf16("blocks.1.down", "wgrad")),
    Trial(fault="short_accumulator", code="F108", cure="BF16 for the GEMM", recommended=True),
    Trial(
        fault="router_in_fp8", code="F109", cure="overrides", build=mixture, module="layers.0.moe.select", at=0,
        change=_in_bf16("layers.0.moe.select"),
    ),
    Trial(fault="unasked_fp8", code="F110", cure="overrides", module="head", at=0, change=_in_bf16("head")),
    Trial(fault="unconverted", code="F110", cure="convert", at=0, change=_convert),
    Trial(fault="stale_weight", code="F112", cure="BF16 for the module", change=_in_bf16("blocks.1.down")),
    Trial(fault="wrong_scale", code="F113", cure="BF16", recommended=True),
    Trial(
        fault="empty_history", code="F113", cure="scaling=current", recipe="tensorwise_current",
        change=_input_in("blocks.1.down", Cast()),
    ),
    Trial(fault="empty_history", code="F113", cure="BF16 for the GEMM", recommended=True),
    Trial(fault="recompute_scale", code="F115", cure="BF16 for wgrad", recommended=True),
    Trial(fault="padding_rows", code="F117", cure="1x128", recommended=True, situation=True),
    Trial(fault="clustered_weights", code="F118", cure="scale_rounding=none", recommended=True, situation=True),
    Trial(fault="scale_grid", code="F119", cure="BF16 for the GEMM", recommended=True),
    Trial(fault="wrong_format", code="F120", cure="e4m3fn", recommended=True),
    Trial(fault="fp8_gather", code="F121", cure="BF16 for the module", recommended=True),
    Trial(
        fault="stale_inference", code="F122", cure="serve in the training's recipe", setting=Setting(serves="bf16"),
        cured=Setting(serves="fp8"),
    ),
    Trial(
        fault=None, made="a module in BF16 in inference", code="F122", finding="other-precision", cure="FP8 in both",
        setting=Setting(serves="fp8 but"), cured=Setting(serves="fp8"),
    ),
    Trial(
        fault=None, made="inference after an export in BF16", code="F122", finding="rounded-before-cast",
        cure="export the training's weights", module=None, setting=Setting(serves="fp8 of rounded"),
        cured=Setting(serves="fp8"),
    ),
    Trial(
        fault="bf16_gradient_sum", code="F123", cure="sums in FP32", setting=SUMS, cured=replace(SUMS, sums_in_fp32=True),
    ),
    Trial(
        fault="depth_outliers", code="F124", cure="BF16 in the last layers", build=deep, module="layers.2",
        change=_in_bf16("layers.[345]"), situation=True,
    ),
    Trial(
        fault="clipped_while_scaled", code="F126", finding="clipped-while-scaled", cure="clip after the division", module=None,
        at=0, setting=Setting(loss_scale=2.0**16), reference=Setting(clip=1.0), cured=Setting(loss_scale=2.0**16, clip=1.0),
        cured_options={"limit": 1e30},
    ),
    Trial(
        fault="lost_second_moment", code="F127", finding="updates-out-of-size", cure="a checkpoint in FP32", module=None,
        setting=AFTER_START, at=24, cured_options={"log2_smallest": 126.0},
    ),
    Trial(
        fault="moment_underflow", code="F127", cure="scale per block and eps", cured=Setting(eps=1e-5),
        cured_options={"log2_outlier": 1e-6},
    ),
    Trial(
        fault="lr_too_high", code="F127", cure="lower learning rate", module=None, at=0,
        cured=Setting(lr=Setting().lr / 300),
    ),
    Trial(fault="unwritten_rows", code="F128", cure="BF16 for the GEMM", recommended=True),
    Trial(fault="wrong_signs", code="F128", cure="BF16 for the GEMM", recommended=True),
    Trial(fault="raw_codes", code="F133", cure="load the scales", change=_load_scales),
    Trial(
        fault="lost_microbatches", code="F134", cure="sums outside weight.grad", setting=SUMS,
        cured=replace(SUMS, sums_in_fp32=True),
    ),
    Trial(
        fault="overwritten_gradient", code="F149", cure="sums outside weight.grad", setting=TWO,
        cured=replace(TWO, sums_in_fp32=True),
    ),
    Trial(
        fault=None, code="F135", cure="FP32 masters", module=None, setting=SMALL_RATE,
        reference=replace(SMALL_RATE, masters=True), cured=replace(SMALL_RATE, masters=True),
    ),
    Trial(
        fault="standing_count", code="F135", finding="step-count-stands", cure="a count in FP32", module=None,
        setting=LONG_MEMORY, cured_options={"bits": 24},
    ),
    Trial(
        fault=None, made="a resume without moments", code="F150", finding="moments-begin-anew", cure="load the moments",
        module=None, setting=replace(RESUMED, saves_moments=False), reference=Setting(), cured=RESUMED,
    ),
    Trial(fault="stochastic_zeros", code="F145", cure="BF16 for the GEMM", recipe="nvfp4", change=_in_bf16("blocks.1.down")),
    Trial(fault="hadamard_signs", code="F146", cure="BF16 for wgrad", recipe="nvfp4", change=_in_bf16("blocks.1.down", "wgrad")),
    Trial(fault="stale_tensor_scale", code="F147", cure="BF16 for the GEMM", recipe="nvfp4", change=_in_bf16("blocks.1.down")),
    Trial(fault="block_scale_range", code="F148", cure="BF16 for the GEMM", recipe="nvfp4", change=_in_bf16("blocks.1.down")),
    Trial(
        fault="rounded_weights", code="F137", cure="the cast that holds them", recipe="blockwise_pow2",
        change=_weights_in("blocks.1.down", Cast(granularity="128x128")), what_if=("blockwise",),
    ),
)  # fmt: skip

#: Code -> why no program can apply the cure.
BY_HAND: dict[str, str] = {
    "F111": "the FP8 path hands BF16 through: its flag, dimensions or device are outside the model",
    "F114": "the process group of the amax reduction is the launcher's",
    "F116": "the router's balance is trained, and tokens are dropped by the dispatcher",
    "F125": "the batch and the learning rate are the program's; what the finding claims is that FP8 is not at fault",
    "F143": "the loss function that loses the gradient is the program's",
    "F151": "the kernel that does not write the bias's gradient, or the optimizer's groups, are the program's",
    "F144": "settings of a resume, no fault to plant; the same flags are the cure (tests/adapters/watching/test_resumption.py)",
}

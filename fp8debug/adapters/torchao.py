"""The adapter of torchao's Float8Linear: tensorwise, rowwise, rowwise_with_gw_hp, and any other config; emulated or not.

In eager its GEMMs are ``aten.mm`` of two Float8TrainingTensors, whose ``_scale`` is what the tensor was *multiplied* by. torchao
forms scales from amax clamped to 1e-12, in FP64, which rounds to the same FP32 as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.adapters.base import ADAPTERS
from fp8debug.adapters.interception.intercepting_probe import InterceptingProbe
from fp8debug.adapters.interception.listener import GemmOperand, SeenGemm
from fp8debug.adapters.scaled_mm import SUBCLASSES, side_of
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.observer.observer import Observer
from fp8debug.recipes import Cast, Recipe
from fp8debug.types import OPERANDS, Gemm, TensorRole

#: torchao.float8.float8_utils.EPS
AMAX_EPS = 1e-12
#: The field of Float8LinearConfig for each operand.
FIELDS = {
    (Gemm.FPROP, TensorRole.INPUT): "cast_config_input",
    (Gemm.FPROP, TensorRole.WEIGHT): "cast_config_weight",
    (Gemm.DGRAD, TensorRole.GRAD_OUTPUT): "cast_config_grad_output",
    (Gemm.DGRAD, TensorRole.WEIGHT): "cast_config_weight_for_grad_input",
    (Gemm.WGRAD, TensorRole.GRAD_OUTPUT): "cast_config_grad_output_for_grad_weight",
    (Gemm.WGRAD, TensorRole.INPUT): "cast_config_input_for_grad_weight",
}
_FAST = {Gemm.FPROP: "gemm_config_output", Gemm.DGRAD: "gemm_config_grad_input", Gemm.WGRAD: "gemm_config_grad_weight"}


@cache
def recipe_of_config(config: Any) -> Recipe:
    """Return a Float8LinearConfig as a recipe of ours: the same codes and scales for the same tensor."""
    casts = {key: _cast(getattr(config, name), config.round_scales_to_power_of_2) for key, name in FIELDS.items()}
    fast = [g for g, name in _FAST.items() if getattr(config, name).use_fast_accum and not config.emulate]
    fast = [g for g in fast if all(cast is not None for (which, _), cast in casts.items() if which is g)]
    kinds = {cast.granularity.replace("columnwise", "rowwise") for cast in casts.values() if cast is not None}
    return Recipe("torchao_" + "_".join(sorted(kinds)), casts, tuple(fast))


def _cast(config: Any, pow2: bool) -> Cast | None:
    if config.scaling_type.value != "dynamic":
        return None
    return Cast(
        format=FORMAT_OF[config.target_dtype],
        granularity={"tensorwise": "tensorwise", "axiswise": "rowwise"}[config.scaling_granularity.value],
        scale_rounding="pow2_ceil" if pow2 else "none",
        amax_eps=AMAX_EPS,
    )


def _training_tensors(first: Any, second: Any, result: Tensor) -> SeenGemm | None:
    if type(first).__name__ != "Float8TrainingTensor" or type(second).__name__ != "Float8TrainingTensor":
        return None
    roles = TensorRole(first._gemm_input_role.value), TensorRole(second._gemm_input_role.value)
    which = next(gemm for gemm, operands in OPERANDS.items() if set(operands) == set(roles))
    return SeenGemm("mm of Float8TrainingTensors", _side(first), _side(second), result, which=which)


def _side(x: Any) -> GemmOperand:
    return side_of(x._data, x._scale.reciprocal())


SUBCLASSES.append(_training_tensors)


class TorchAo:
    """Float8Linear modules of torchao."""

    name = "torchao"
    kind = "Float8Linear"
    fp8 = True
    is_intercepted = True

    def matches(self, module: nn.Module) -> bool:
        """Return whether it is torchao's Float8Linear; torchao is not imported for that."""
        return any(c.__name__ == "Float8Linear" and c.__module__ == "torchao.float8.float8_linear" for c in type(module).__mro__)

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return what its config says; None where that casts nothing."""
        recipe = recipe_of_config(module.config)
        return None if recipe.is_high_precision else recipe

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Listen to the module."""
        recipe = recipe_of_config(module.config)

        def cast_of(which: Gemm, role: TensorRole, number_format: str, granularity: str) -> Cast:
            cast = recipe.casts[which, role]
            same = cast is not None and granularity in (cast.granularity, "tensorwise")  # one row has one scale
            if cast is None or number_format != cast.format or not same:
                raise ValueError(f"{which} {role} is {number_format} {granularity}, and its config says {cast or 'bf16'}")
            return cast

        return InterceptingProbe(observer, name, cast_of, _input_dtype).install(module)


def _input_dtype() -> torch.dtype | None:
    """Return the dtype that Float8Linear.forward casts its input to; None where it does not."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else None


ADAPTERS.add(TorchAo.name, TorchAo())

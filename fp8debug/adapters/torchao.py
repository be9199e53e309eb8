"""The adapters of torchao's Linears: Float8Linear with any config, MXFP8Linear and NVFP4Linear; emulated or not.

In eager the GEMMs of Float8Linear are ``aten.mm`` of two Float8TrainingTensors, whose ``_scale`` is what the tensor was
*multiplied* by. torchao forms scales from amax clamped to 1e-12, in FP64, which rounds to the same FP32 as ours. Those of
MXFP8Linear are ``aten.mm`` of two MXTensors with E8M0 scales of 32 elements, plain or in cuBLAS's tiles; those of NVFP4Linear
``F.scaled_mm``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.adapters.base import ADAPTERS
from fp8debug.adapters.interception.intercepting_probe import InterceptingProbe
from fp8debug.adapters.interception.listener import GemmOperand, SeenGemm
from fp8debug.adapters.interception.regions import ECONOMIES
from fp8debug.adapters.interception.scale_layouts import SCALE_MODES, side_of_blocks
from fp8debug.adapters.scaled_mm import SUBCLASSES, side_of
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.observer.observer import Observer
from fp8debug.recipes import Cast, Recipe, get_recipe
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


def _mx_tensors(first: Any, second: Any, result: Tensor) -> SeenGemm | None:
    if type(first).__name__ != "MXTensor" or type(second).__name__ != "MXTensor":
        return None
    sides = _mx_side(first, first.qdata, first.scale), _mx_side(second, second.qdata.t(), second.scale.t()).t()
    return SeenGemm("mm of MXTensors", *sides, result)


def _mx_side(x: Any, data: Tensor, scale: Tensor) -> GemmOperand:
    """Return an operand ``[rows, K]`` in blocks along K."""
    if x.block_size != 32 or isinstance(x.elem_dtype, str):
        raise ValueError(f"an MXTensor of {x.elem_dtype} in blocks of {x.block_size} is not read")
    data = data.view(x.elem_dtype) if data.dtype is torch.uint8 else data
    return side_of_blocks(data, scale, is_swizzled=x.is_swizzled_scales)


SUBCLASSES.append(_mx_tensors)


@contextmanager
def _casting_once(observer: Observer) -> Iterator[None]:
    """Have Float8Linears cast a tensor once where they cast it again in the same way.

    Each casts its input and weight in the forward and in the backward pass and grad_output for two GEMMs, and q, k and v cast one
    input: eager code spends most of its time on that, where compiled code fuses it.
    """
    module: Any = sys.modules.get("torchao.float8.float8_linear")
    original = getattr(module, "hp_tensor_to_float8_dynamic", None)
    if original is None:
        yield
        return
    casts: dict[Hashable, Any] = {}

    def cast(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(x) not in (Tensor, nn.Parameter) or torch.is_grad_enabled():
            return original(x, *args, **kwargs)
        is_flat = x.is_contiguous() and kwargs.get("axiswise_dim") is None
        key = observer.cache_key(x.view(-1) if is_flat else x, (args, tuple(sorted(kwargs.items()))))
        if key is None:
            return original(x, *args, **kwargs)
        if key not in casts:
            casts[key] = original(x, *args, **kwargs)
        return casts[key].reshape(x.shape)

    module.hp_tensor_to_float8_dynamic = cast
    try:
        yield
    finally:
        module.hp_tensor_to_float8_dynamic = original


ECONOMIES.append(_casting_once)


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

        def cast_of(which: Gemm, role: TensorRole, seen: Cast) -> Cast:
            cast = recipe.casts[which, role]
            same = cast is not None and seen.granularity in (cast.granularity, "tensorwise")  # one row has one scale
            if cast is None or seen.format != cast.format or not same:
                found = f"{seen.format} {seen.granularity}"
                raise ValueError(f"{which} {role} is {found}, and its config says {cast or 'bf16'}")
            return cast

        return InterceptingProbe(observer, name, cast_of, _input_dtype).install(module)


def _input_dtype() -> torch.dtype | None:
    """Return the dtype that Float8Linear.forward casts its input to; None where it does not."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else None


@cache
def mx_recipe(mode: str, wgrad_in_high_precision: bool) -> Recipe:
    """Return the casts of an MXFP8Linear.

    Args:
        mode: value of its ScaleCalculationMode.
        wgrad_in_high_precision: whether its wgrad is left in high precision.
    """
    cast = Cast(granularity="1x32", scale_rounding=SCALE_MODES[mode])
    casts = {key: None if wgrad_in_high_precision and key[0] is Gemm.WGRAD else cast for key in FIELDS}
    return Recipe("torchao_mxfp8", casts)


@cache
def nvfp4_recipe(signs: tuple[int, ...]) -> Recipe:
    """Return the casts of an NVFP4Linear: those of ``nvfp4``, with the signs of its own Hadamard transform.

    Args:
        signs: 16 numbers, each 1 or -1.
    """
    mask = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
    casts = get_recipe("nvfp4").casts
    own = {key: replace(cast, hadamard_signs=mask) if cast and cast.hadamard else cast for key, cast in casts.items()}
    return Recipe("torchao_nvfp4", own)


def _recipe_of_blocks(module: Any) -> Recipe:
    if any(c.__name__ == "MXFP8Linear" for c in type(module).__mro__):
        return mx_recipe(module.scale_calculation_mode.value, module.wgrad_with_hp)
    return nvfp4_recipe(tuple(module.rht_sign_vector))


class TorchAoBlocks:
    """MXFP8Linear and NVFP4Linear modules of torchao."""

    name = "torchao_blocks"
    kind = ""  # the class's name
    fp8 = True
    is_intercepted = True

    def matches(self, module: nn.Module) -> bool:
        """Return whether it is one of the two; torchao is not imported for that."""
        return any(
            c.__name__ in ("MXFP8Linear", "NVFP4Linear") and c.__module__.startswith("torchao.prototype.")
            for c in type(module).__mro__
        )

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return what its attributes say."""
        return _recipe_of_blocks(module)

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Listen to the module."""
        casts = _recipe_of_blocks(module).casts

        def cast_of(which: Gemm, role: TensorRole, seen: Cast) -> Cast:
            cast = casts[which, role]
            shapes = {cast.granularity, *(("1x16", "16x1") if cast.granularity == "16x16" else ())} if cast else set()
            if cast is None or seen.format != cast.format or seen.granularity not in shapes:
                raise ValueError(f"{which} {role} is {seen.format} {seen.granularity}, and its module says {cast or 'bf16'}")
            return cast

        return InterceptingProbe(observer, name, cast_of).install(module)


ADAPTERS.add(TorchAo.name, TorchAo())
ADAPTERS.add(TorchAoBlocks.name, TorchAoBlocks())

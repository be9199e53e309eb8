"""State of the stand-in for Transformer Engine: recipes, what is in force, delayed scaling, and what its modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.adapters.transformer_engine import engine_tensors as t

HYBRID = SimpleNamespace(value=SimpleNamespace(max_fwd=448.0, max_bwd=57344.0))


@dataclass
class DelayedScaling:
    amax_history_len: int = 16
    amax_compute_algo: Any = "max"
    margin: int = 0
    scaling_factor_compute_algo: Any = None
    fp8_format: Any = field(default_factory=lambda: HYBRID, repr=False)


@dataclass
class Float8CurrentScaling:
    pass


@dataclass
class Float8BlockScaling:
    pow2: bool = True
    amax_epsilon: float = 0.0


@dataclass
class MXFP8BlockScaling:
    is_swizzled: bool = False


@dataclass
class NVFP4BlockScaling:
    is_swizzled: bool = False
    backward_override: str | None = None


@dataclass
class CustomRecipe:
    """Quantizers of the user's: ``qfactory(role)`` for each tensor, or a DelayedScaling for one whose scales come later."""

    qfactory: Callable[[Any], Any] = field(repr=False)


class State:
    """The recipe in force, and the modules whose delayed scales are updated when it ends."""

    recipe: Any = None
    used: list[Any]  # set by autocast


@contextmanager
def autocast(recipe: Any) -> Iterator[None]:
    State.recipe, State.used = recipe, []
    try:
        yield
    finally:
        for module in State.used:
            state = module.fp8_meta["scaling_fwd"]
            update(state, state._inner_delayed_scaling_recipe or recipe, 448.0)
        State.recipe = None


def update(state: Any, recipe: Any, largest: float) -> None:
    """Delayed scaling: scales from the history, which then moves on."""
    history = state.amax_history
    amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
    rolled = torch.roll(history, -1, 0)
    history.copy_(rolled)
    history[0].fill_(0)
    scale = largest / amax / 2**recipe.margin
    state.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, state.scale))


class Meta:
    _inner_delayed_scaling_recipe: Any = None  # a CustomRecipe's

    def __init__(self, count: int, length: int) -> None:
        self.scale, self.amax_history = torch.ones(count), torch.zeros(length, count)


class Base(nn.Module):
    """What the modules share: the recipe's quantizers, named by what they are for."""

    num_gemms = 1

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.fp8, self.activation_dtype = False, torch.bfloat16

    def begin(self) -> dict[str, list[t.Quantizer | None]]:
        recipe, g = State.recipe, self.num_gemms
        self.fp8 = recipe is not None
        if recipe is None:
            return {role: [None] * g for role in ("input", "weight", "grad_output")}
        self.fp8_meta["recipe"] = recipe
        e5m2 = t.DType.kFloat8E5M2
        given = recipe.qfactory(SimpleNamespace(tensor_type="input")) if isinstance(recipe, CustomRecipe) else None
        inner, recipe = (given, given) if isinstance(given, DelayedScaling) else (None, recipe)
        if isinstance(recipe, DelayedScaling):
            if "scaling_fwd" not in self.fp8_meta:
                self.fp8_meta["scaling_fwd"] = Meta(3 * g, recipe.amax_history_len)
                self.fp8_meta["scaling_bwd"] = Meta(2 * g, recipe.amax_history_len)
            forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
            forward._inner_delayed_scaling_recipe = backward._inner_delayed_scaling_recipe = inner
            State.used.append(self)

            def delayed(meta: Meta, place: int, dtype: t.DType) -> t.Quantizer:
                return t.Float8Quantizer(dtype, scale=meta.scale[place], amax=meta.amax_history[0][place])

            return {
                "input": [delayed(forward, 3 * i, t.DType.kFloat8E4M3) for i in range(g)],
                "weight": [delayed(forward, 3 * i + 1, t.DType.kFloat8E4M3) for i in range(g)],
                "grad_output": [delayed(backward, 2 * i, e5m2) for i in range(g)],
            }
        make: Callable[[str], t.Quantizer]
        if isinstance(recipe, CustomRecipe):
            factory = recipe.qfactory
            make = lambda role: factory(SimpleNamespace(tensor_type=role))  # noqa: E731
        elif isinstance(recipe, Float8BlockScaling):
            same: dict[str, Any] = {"force_pow_2_scales": recipe.pow2, "amax_epsilon": recipe.amax_epsilon}
            make = lambda role: t.Float8BlockQuantizer(block_scaling_dim=2 if role == "weight" else 1, **same)  # noqa: E731
        elif isinstance(recipe, MXFP8BlockScaling):
            make = lambda role: t.MXFP8Quantizer(optimize_for_gemm=recipe.is_swizzled)  # noqa: E731
        elif isinstance(recipe, NVFP4BlockScaling):

            def make(role: str) -> t.Quantizer:
                is_weight, is_grad = role == "weight", role == "grad_output"
                options: dict[str, Any] = {
                    "with_rht": not is_weight,
                    "with_2d_quantization": is_weight,
                    "stochastic_rounding": is_grad,
                }
                return t.NVFP4Quantizer(**options, optimize_for_gemm=recipe.is_swizzled)

        else:
            make = lambda role: t.Float8CurrentScalingQuantizer(*([e5m2] if role == "grad_output" else []))  # noqa: E731
        return {role: [make(role) for _ in range(g)] for role in ("input", "weight", "grad_output")}

"""Ten ways in which a user brings a model into FP8, the FP8 of this project among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from random import Random
from typing import Any

from torch import nn

import fp8debug
from tests.adapters.linears import ScaledLinear
from tests.bench.clean_programs.architectures import Program
from tests.bench.situations.stack import BlockLinear, library


def _is_left_out(model: Program, name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in model.high_precision)


def _own(*recipes: str) -> Callable[[Program, Random], dict[str, Any]]:
    def convert(model: Program, draw: Random) -> dict[str, Any]:
        fp8debug.convert(model, draw.choice(recipes), dict.fromkeys(model.high_precision))
        return {}

    return convert


def _own_excluding(model: Program, draw: Random) -> dict[str, Any]:
    """Convert all but the router; leave the head and more out of the recording instead."""
    fp8debug.convert(model, draw.choice(("blockwise", "rowwise")), {k: None for k in model.high_precision if "router" in k})
    return {"exclude": model.high_precision}


def _torchao(*recipes: str) -> Callable[[Program, Random], dict[str, Any]]:
    def convert(model: Program, draw: Random) -> dict[str, Any]:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        def is_wanted(module: nn.Module, name: str) -> bool:
            shape = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
            return not _is_left_out(model, name) and all(size % 16 == 0 for size in shape)

        config = replace(Float8LinearConfig.from_recipe_name(draw.choice(recipes)), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=is_wanted)
        return {}

    return convert


def _swap(model: Program, kind: type[nn.Linear], **attributes: Any) -> None:
    for name, module in model.named_modules():
        is_even = type(module) is nn.Linear and module.in_features % 16 == 0 and module.out_features % 16 == 0
        if is_even and not _is_left_out(model, name):
            module.__class__ = kind
            for key, value in attributes.items():
                setattr(module, key, value)


def _scaled_mm(model: Program, draw: Random) -> dict[str, Any]:
    _swap(model, ScaledLinear, rowwise=draw.random() < 0.5, turned=draw.random() < 0.25)
    return {}


def _deep_gemm(model: Program, draw: Random) -> dict[str, Any]:
    library()
    _swap(model, BlockLinear)
    return {}


#: (model, draw) -> arguments of ``watch``, by the stack's name.
STACKS: dict[str, Callable[[Program, Random], dict[str, Any]]] = {
    "own_blockwise": _own("blockwise"),
    "own_pow2": _own("blockwise_pow2", "blockwise_e8m0"),
    "own_delayed": _own("tensorwise_delayed"),
    "own_current": _own("tensorwise_current", "rowwise"),
    "own_mxfp8": _own("mxfp8"),
    "torchao_tensorwise": _torchao("tensorwise"),
    "torchao_rowwise": _torchao("rowwise", "rowwise_with_gw_hp"),
    "scaled_mm": _scaled_mm,
    "deep_gemm": _deep_gemm,
    "exclude": _own_excluding,
}

#: The same in formats of 4 and 6 bits and in AMD's FP8, all of them emulated: ``bench/clean.py --low-bit``.
LOW_BIT_STACKS = {
    "own_nvfp4": _own("nvfp4"),
    "own_mxfp4": _own("mxfp4"),
    "own_mxfp6": _own("mxfp6_e2m3", "mxfp6_e3m2"),
    "own_mxfp8": STACKS["own_mxfp8"],
    "own_fnuz": _own("tensorwise_fnuz"),
}

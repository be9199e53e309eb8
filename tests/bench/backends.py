"""The layers of ``step.py`` in the hands of each backend, for benches that compare what a watch costs on them.

A recipe is named ``backend:recipe``, such as ``native:blockwise`` or ``torchao:rowwise``. All run in eager, which is what a watch
records; torchao is made for torch.compile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import fp8debug
from tests.adapters.linears import ScaledLinear
from tests.bench.step import Layer

#: What a backend is run in unless something else is asked for, the most usual first.
RECIPES = {
    "native": ("blockwise",),
    "torchao": ("tensorwise", "rowwise"),
    "scaled_mm": ("tensorwise", "rowwise"),
    "te": ("Float8BlockScaling",),
}
#: (packages, how to get them)
_NEEDS = {
    "torchao": (("torchao",), "pip install torchao"),
    "te": (("transformer_engine", "nvdlfw_inspect"), "pip install 'transformer-engine[pytorch]' nvdlfw-inspect"),
}
#: Makes what the forward pass runs in.
Around = Callable[[], AbstractContextManager[Any]]


def missing(backends: Iterable[str]) -> str:
    """Return in one line what is not installed and how to get it; empty where nothing is."""
    lacks = []
    for backend in backends:
        packages, way = _NEEDS.get(backend, ((), ""))
        absent = [package for package in packages if find_spec(package) is None]
        if absent:
            lacks.append(f"{backend} needs {' and '.join(absent)}: {way}")
    return "; ".join(lacks)


def layers(num: int, width: int, hidden: int, device: str) -> nn.Sequential:
    """Return the layers in BF16, the same every time, their Linears torch's own."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(Layer(width, hidden) for _ in range(num))).bfloat16()


def convert_layers(model: nn.Sequential, name: str) -> Around:
    """Give every Linear to a backend, in place.

    Args:
        model: of ``layers``.
        name: ``backend:recipe``.

    Returns:
        what its forward pass must run in.
    """
    backend, recipe = name.split(":")
    return {"native": _to_native, "torchao": _to_torchao, "scaled_mm": _to_scaled_mm, "te": _to_te}[backend](model, recipe)


def _to_native(model: nn.Sequential, recipe: str) -> Around:
    fp8debug.convert(model, recipe)
    return nullcontext


def _to_torchao(model: nn.Sequential, recipe: str) -> Around:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    is_on_cpu = next(model.parameters()).device.type == "cpu"
    convert_to_float8_training(model, config=replace(Float8LinearConfig.from_recipe_name(recipe), emulate=is_on_cpu))
    return nullcontext


def _to_scaled_mm(model: nn.Sequential, recipe: str) -> Around:
    for linear in model.modules():
        if type(linear) is nn.Linear:
            linear.__class__ = ScaledLinear
            linear.rowwise = {"tensorwise": False, "rowwise": True}[recipe]  # type: ignore[assignment]  # of ScaledLinear
    return nullcontext


def _to_te(model: nn.Sequential, recipe: str) -> Around:
    """Take Transformer Engine's Linear, its weights drawn anew; in BF16 for the recipe ``bf16``."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    for name, layer in model.named_children():
        for part, linear in list(layer.named_children()):
            if isinstance(linear, nn.Linear):
                size = linear.in_features, linear.out_features
                twin = te.Linear(*size, bias=False, params_dtype=torch.bfloat16, device="cuda", name=f"{name}.{part}")
                setattr(layer, part, twin)
    if recipe == "bf16":
        return nullcontext
    return lambda: te.autocast(enabled=True, recipe=getattr(recipes, recipe)())

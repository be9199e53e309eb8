"""Codes of one format of 8 bits that a GEMM reads as another, planted in one module of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.faults.base import Clock, Target, distort, quantized
from fp8debug.formats import FORMATS
from fp8debug.recipes import get_recipe
from fp8debug.types import Gemm, Quantized, TensorRole
from tests.bench.situations.stack import Model, train

DOWN = "blocks.1.down"
#: Formats of 8 bits that hold data, and the ordered pairs of them: (made, read).
DATA_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.bits == 8 and not fmt.scale_only)
PAIRS = tuple((made, read) for made in DATA_FORMATS for read in DATA_FORMATS if made != read)


def as_codes_of(made: str, read: str, q: Quantized) -> Quantized:
    """Return the codes of one format as data of another."""
    assert q.data.dtype is getattr(torch, FORMATS[made].torch_dtype)
    return Quantized(q.data.view(torch.uint8).view(getattr(torch, FORMATS[read].torch_dtype)), q.scale_inv)


def record(path: Path, made: str, read: str, key: tuple[str, str], recipe: str = "rowwise") -> None:
    """Train a model with an operand declared ``read``, and in one module the codes and scales of ``made`` there."""
    torch.manual_seed(0)
    model = Model(nn.Linear)
    declared = get_recipe(recipe).replace(*key, name=f"{recipe}-{read}", format=read)
    fp8debug.convert(model, declared, {"head": None})

    def corrupt(x: Tensor, cast: Any, ordinary: Any, options: dict[str, Any]) -> Any:
        q, _ = quantized(ordinary(x, replace(cast, format=made)))
        return as_codes_of(made, read, q), cast

    target = Target(model, model.get_submodule(DOWN), DOWN, 0, {}, Clock(model))
    distort(target, corrupt, (Gemm(key[0]), TensorRole(key[1])))
    train(model, path, steps=4, every=2, what_if=())

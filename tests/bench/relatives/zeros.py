"""Blocks and rows of zeros under scales without a lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.bench.relatives import variant
from tests.bench.relatives.stack import (
    NOW,
    OwnLinear,
    RowLinear,
    TensorLinear,
    Transformer,
    both,
    lora,
    padded,
    zero_pad,
)


@variant(
    "11",
    modules=tuple(f"layers.0.attn.{k}_proj.base" for k in "qkv"),
    gemms=("fprop",),
    tensors=("input",),
    codes=("F103",),
    words=("eps",),
    first="right",
)
def lora_blocks_attention(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = zero_pad(Transformer(linear=lora(OwnLinear)))
        for layer in m.modules():
            if isinstance(layer, OwnLinear):
                layer.eps = 0.0 if sick else 1e-12
        return m.bfloat16(), dict(data=padded)

    both(folder, make, steps=10)


@variant(
    "11",
    modules=("layers.1.mlp.fc2",),
    gemms=("dgrad", "wgrad"),
    tensors=("grad_output",),
    codes=("F103",),
    words=("eps",),
    first="misled",
)
def masked_gradient_rows_late(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(linear=RowLinear)
        for layer in m.modules():
            if isinstance(layer, OwnLinear):
                layer.eps = 0.0 if sick else 1e-12
        return m, dict(data=lambda n: padded(n, 9))

    both(folder, make, steps=14)


@variant(
    "11",
    modules=("layers.1.attn.v_proj", "layers.1.attn.q_proj", "layers.1.attn.k_proj"),
    gemms=("fprop",),
    tensors=("input",),
    codes=("F103",),
    words=("eps",),
    first="right",
)
def whole_input_zero_tensorwise(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(linear=TensorLinear)
        for layer in m.modules():
            if isinstance(layer, OwnLinear):
                layer.eps = 0.0 if sick else 1e-12
        m.layers[1].norm1.register_forward_hook(lambda mod, a, out: out * (0.0 if NOW["step"] >= 8 else 1.0))  # a dropped branch
        return m, {}

    both(folder, make, steps=14)


@variant(
    "12",
    modules=("layers.0.mlp.fc1",),
    gemms=("wgrad",),
    tensors=("grad_output",),
    codes=("F103",),
    words=("eps",),
    first="right",
)
def dead_unit_rowwise_e5m2_late(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(linear=RowLinear)
        layer = m.layers[0].mlp
        if sick:
            layer.fc1.eps = 0.0

        def before(s: Any) -> None:
            if s >= 6:
                with torch.no_grad():
                    layer.fc2.weight[:, 9] = 0

        return m, dict(before=before)

    both(folder, make, steps=12)


@variant(
    "12",
    modules=("layers.1.attn.q_proj",),
    gemms=("fprop", "dgrad"),
    tensors=("weight",),
    codes=("F103",),
    words=("eps",),
    first="right",
)
def pruned_weight_block(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(width=256)
        layer = m.layers[1].attn.q_proj
        if sick:
            layer.eps = 0.0
        with torch.no_grad():
            layer.weight[:128, 128:] = 0
        return m, {}

    both(folder, make, steps=8, every=1)


@variant(
    "12", modules=("layers.0.attn.o_proj",), gemms=("wgrad",), tensors=("input",), codes=("F103",), words=("eps",), first="right"
)
def dead_head_wgrad_input(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer()
        a = m.layers[0].attn
        if sick:
            a.o_proj.eps = 0.0
        with torch.no_grad():
            a.v_proj.weight[32:64] = 0
        a.v_proj.weight.register_hook(lambda g: torch.cat([g[:32], g[32:64] * 0, g[64:]]))
        return m, {}

    both(folder, make, steps=10, every=5)

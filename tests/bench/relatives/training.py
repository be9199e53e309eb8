"""Microbatches that are lost, updates that are rounded away, runs that leave their course without FP8's doing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench.relatives import variant
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    NOW,
    Adam8,
    Muon,
    RowLinear,
    TensorLinear,
    Transformer,
    both,
    cross_entropy,
    low,
    same,
    train,
)


@variant("05", tensors=("grad_weight",), codes=("F134",), first="incomplete")
def only_last_microbatch(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer()

        def after(s: Any, k: Any) -> None:
            pass

        def hook(s: Any, k: Any) -> None:
            if sick and k < 1:
                for p in m.layers[0].attn.parameters():
                    p.grad.zero_()

        return m, dict(after_backward=hook, optimizer=torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))

    both(folder, make, micro=2)


@variant("05", tensors=("grad_weight",), codes=("F134",), first="right")
def middle_lost_rowwise_every5(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m, kept = Transformer(linear=RowLinear), {}
        ps: list[Any] = [p for n, p in m.named_parameters() if "layers" in n and p.dim() == 2]

        def hook(s: Any, k: Any) -> None:
            for i, p in enumerate(ps):
                if k == 0:
                    kept[i] = p.grad.clone()
                elif k == 1 and sick:
                    p.grad.copy_(kept[i])

        return m, dict(after_backward=hook)

    both(folder, make, micro=3, every=5, steps=16)


@variant("05", tensors=("grad_weight",), codes=("F134",), first="right")
def decayed_sum_tensorwise(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(linear=TensorLinear)

        def hook(s: Any, k: Any) -> None:
            if sick and k < 3 and s >= 6:
                for p in [*m.parameters()]:
                    p.grad = None if p.grad is None else p.grad * 0.5

        return m, dict(after_backward=hook)

    both(folder, make, micro=4, steps=12)


@variant("05", tensors=("grad_weight",), codes=("F134",), first="incomplete")
def twice_added_one_layer(folder: Path) -> Any:  # the hook adds the last microbatch twice in the MLPs
    def make(sick: bool) -> Any:
        m, kept = Transformer(), {}
        ps: list[Any] = [p for n, p in m.named_parameters() if "mlp" in n]

        def hook(s: Any, k: Any) -> None:
            for i, p in enumerate(ps):
                if k == 0:
                    kept[i] = p.grad.clone()
                elif sick:
                    p.grad.add_(p.grad - kept[i])

        return m, dict(after_backward=hook)

    both(folder, make, micro=2, steps=12)


@variant("06", words=("update", "master"), codes=("F135",), first="right")
def bf16_sgd_momentum_rowwise(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(linear=RowLinear)
        m = m.bfloat16() if sick else m
        return m, dict(optimizer=torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9))

    both(folder, make, steps=24)


@variant("06", words=("update", "master"), codes=("F135",), first="silent")
def bf16_written_back_every5(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer()
        ps: list[Any] = [p for n, p in m.named_parameters() if "layers" in n and p.dim() == 2]

        def grid() -> None:
            with torch.no_grad():
                for p in ps:
                    p.copy_(p.bfloat16())

        if sick:
            grid()
        return m, dict(after_step=lambda s, w: grid() if sick else None, lr=1e-5)

    both(folder, make, steps=24, every=5)


@variant("06", words=("update", "master"), codes=("F135",), first="silent")
def bf16_muon_like(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer()
        m = m.bfloat16() if sick else m
        return m, dict(optimizer=Muon(m.parameters(), lr=1e-3))

    both(folder, make, steps=24)


@variant("16", quiet=True, first="misled")
def sum_penalty_on_hidden(folder: Path) -> Any:
    class User(Transformer):
        def forward(self, t: Any) -> Any:
            x = self.hidden(t)
            y = self.lm_head(x)
            return y, y.float().pow(2).sum() * 5.0

    m = User()
    train(
        m,
        folder / "sick",
        loss_of=lambda o, y: cross_entropy(o[0], y) + o[1] - o[1].detach(),
        steps=30,
        optimizer=torch.optim.SGD(m.parameters(), lr=3e-3),
    )


@variant("16", quiet=True, first="misled")
def loss_not_divided_sgd(folder: Path) -> None:
    m = Transformer(linear=RowLinear)
    train(
        m,
        folder / "sick",
        micro=8,
        divide=False,
        steps=16,
        loss_of=lambda o, y: cross_entropy(o, y) * 320 / 40,
        optimizer=torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9),
        every=1,
    )


@variant("16", quiet=True, first="right")
def aux_from_step_15_torchao(folder: Path) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    class User(Transformer):
        def forward(self, t: Any) -> Any:
            y = self.lm_head(self.hidden(t))
            return y, y.float().logsumexp(-1).pow(2).sum() * (15.0 if NOW["step"] >= 15 else 0.0)

    m = User(linear=nn.Linear)
    convert_to_float8_training(
        m,
        config=dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True),
        module_filter_fn=lambda mod, n: n != "lm_head",
    )
    train(
        m,
        folder / "sick",
        exclude=("lm_head",),
        steps=36,
        loss_of=lambda o, y: cross_entropy(o[0], y) + o[1] - o[1].detach(),
        optimizer=torch.optim.SGD(m.parameters(), lr=4e-3),
    )


@variant("26", quiet=True, first="silent")
def second_moment_e5m2_late(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer()
        return m, dict(optimizer=Adam8(m.parameters(), 2e-3, same, low(E5M2) if sick else same, 10))

    both(folder, make, steps=30)


@variant("26", quiet=True, first="right")
def second_moment_blocks_rowwise(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(linear=RowLinear)
        return m, dict(optimizer=Adam8(m.parameters(), 4e-3, same, low(E4M3, 2048) if sick else same))

    both(folder, make, steps=30, every=5)


@variant("26", quiet=True, first="right")
def muon_momentum_fp8_update_too_large(folder: Path) -> Any:
    def make(sick: bool) -> Any:
        m = Transformer(linear=TensorLinear)
        return m, dict(optimizer=Muon(m.parameters(), lr=0.02, low=low(E4M3) if sick else same, scale=30.0 if sick else 1.0))

    both(folder, make, steps=24)

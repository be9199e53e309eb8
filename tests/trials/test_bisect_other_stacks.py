"""``bisect`` on a stack that is not ours: a kernel's fault that no arm of our own modules would reach."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.run.arms import Arm, apply_arm
from fp8debug.trials import Script, Trials, bisect_run
from fp8debug.trials.script import Ending
from fp8debug_cli.trial_options import modules_of_other_stacks
from tests.adapters import linears


class Backwards(torch.autograd.Function):
    """A GEMM that gives the gradient of the weight with the wrong sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: linears.ScaledLinear) -> Tensor:
        return linears.Matmul.forward(ctx, x, weight, layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_input, grad_weight, _ = linears.Matmul.backward(ctx, grad)
        return grad_input, -grad_weight, None


class BackwardsLinear(linears.ScaledLinear):
    """A Linear whose wgrad is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Backwards.apply(x, self.weight, self)
        return out


class Chain(nn.Module):
    """Four Linears of a user's own, the third of which is at fault: x[M, 64] -> [M, 16]."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [linears.ScaledLinear, linears.ScaledLinear, BackwardsLinear, linears.ScaledLinear]
        self.layers = nn.ModuleList([kind(64, 16 if i == 3 else 64, bias=False) for i, kind in enumerate(kinds)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(functional.silu(functional.rms_norm(x, x.shape[-1:])))
        return x


def train(arm: Arm, repeat: int, out: Path, *, every: int = 10**9) -> Ending:
    began = time.monotonic()
    torch.manual_seed(repeat)
    model = Chain().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with fp8debug.watch(model, out, every=every, what_if=()) as watch:
        (out / "arm.json").write_text(json.dumps(apply_arm(arm, [model])))
        for step in range(16):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * repeat + step))
            loss = functional.cross_entropy(model(x.bfloat16()).float(), x[:, :16].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    return Ending(0, time.monotonic() - began, False, "")


def test_a_gemm_of_a_users_own_is_found_by_the_loss(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "train.py").write_text("raise SystemExit('never started')")
    (tmp_path / "run").mkdir()
    train(Arm(name="fp8"), 0, tmp_path / "run", every=8)
    names = modules_of_other_stacks(fp8debug.Run(tmp_path / "run"), None)
    assert names == [f"layers.{i}" for i in range(4)]
    trials = Trials(tmp_path / "trials", Script(path=tmp_path / "train.py", steps=16), train=train)
    try:
        found = bisect_run(trials, further=names, repeats=1, run_name="run", save_as=tmp_path / "bisect.json")
    finally:
        trials.close()
    assert found["verdict"] == "found" and found["units"] == [{"module": "layers.2", "gemm": "wgrad"}], found
    assert found["num_modules"] == 4

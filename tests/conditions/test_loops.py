"""Conditions inside one training loop: recomputed, shared, repeated, frozen and adapted modules, evaluation, scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug.errors import AttachError
from tests.adapters.interception.test_buffers import Linear
from tests.adapters.linears import CHECKPOINTS
from tests.training import losses_of, watched


class Block(nn.Module):
    """A hidden layer that is called as often as it is told, in a checkpoint or not, beside a LoRA of its own."""

    def __init__(self, calls: int = 1, checkpointed: str | None = None, lora: bool = False) -> None:
        super().__init__()
        self.up, self.hidden, self.down = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 16)
        self.a = nn.Linear(32, 4, bias=False) if lora else None
        self.b = nn.Linear(4, 64, bias=False) if lora else None
        self.calls, self.checkpointed = calls, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.a is not None and self.b is not None:
            hidden = hidden + self.b(self.a(x))
        for _ in range(self.calls):
            if self.checkpointed is None:
                hidden = self.hidden(hidden).tanh()
            else:
                hidden = checkpoint(lambda y: self.hidden(y).tanh(), hidden, **CHECKPOINTS[self.checkpointed])
        out: Tensor = self.down(hidden)
        return out


def model(recipe: str | None = "blockwise", **options: Any) -> Block:
    torch.manual_seed(0)
    block = Block(**options)
    if recipe:
        fp8debug.convert(block, recipe)
    return block


def train(block: Block, path: Path | None, evaluate: bool = False) -> list[float]:
    def loss_of(step: int) -> Tensor:
        x = torch.randn(48, 32, generator=torch.Generator().manual_seed(step))
        loss: Tensor = block(x).square().mean()
        if evaluate:
            with torch.no_grad():
                block(x * 100)
        return loss

    with watched(block, path, every=1) as watch:
        return losses_of(block, loss_of, steps=3, watch=watch)


def counts(path: Path, module: str, fp8: bool = True) -> dict[str, int]:
    """Return how often each GEMM of a module was observed in step 1, in FP8 or tried."""
    where = f"step = 1 AND module = ? AND actual = {fp8} AND reference = 'shadow'"
    query = f"SELECT gemm, max(num_tensors) AS n FROM sites WHERE {where} GROUP BY gemm"
    return {row["gemm"]: row["n"] for row in fp8debug.Run(path).sql(query, [module]).to_pylist()}


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", None])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_all_kinds_of_checkpointing_count_once(kind: str, recipe: str | None, tmp_path: Path) -> None:
    assert train(model(recipe, checkpointed=kind), tmp_path / "run") == train(model(recipe, checkpointed=kind), None)
    # the reentrant kind runs its first forward without gradients, so that the one that is recorded is the second
    assert counts(tmp_path / "run", "hidden", fp8=recipe is not None) == {"fprop": 1, "dgrad": 1, "wgrad": 1}


def test_a_module_called_twice_counts_twice(tmp_path: Path) -> None:
    assert train(model(calls=2), tmp_path / "run") == train(model(calls=2), None)
    assert counts(tmp_path / "run", "hidden") == {"fprop": 2, "dgrad": 2, "wgrad": 2}


def test_a_shared_module_is_recorded_under_its_first_name(tmp_path: Path) -> None:
    block = model()
    block.again = block.hidden  # the same module under another name
    train(block, tmp_path / "run")
    assert counts(tmp_path / "run", "hidden") == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    assert [m["fqn"] for m in fp8debug.Run(tmp_path / "run").modules] == ["up", "hidden", "down"]


def test_a_frozen_weight_has_no_wgrad_and_a_lora_has(tmp_path: Path) -> None:
    def adapted() -> Block:
        block = model(lora=True)
        for module in (block.up, block.hidden, block.down):
            module.requires_grad_(False)
        return block

    assert train(adapted(), tmp_path / "run") == train(adapted(), None)
    assert counts(tmp_path / "run", "hidden") == {"fprop": 1, "dgrad": 1}
    assert counts(tmp_path / "run", "up") == {"fprop": 1}  # before the first weight that learns
    assert counts(tmp_path / "run", "a") == {"fprop": 1, "wgrad": 1}
    assert counts(tmp_path / "run", "b") == {"fprop": 1, "dgrad": 1, "wgrad": 1}


def test_evaluation_inside_training_is_not_recorded(tmp_path: Path) -> None:
    assert train(model(), tmp_path / "run", evaluate=True) == train(model(), None)
    assert counts(tmp_path / "run", "up") == {"fprop": 1, "wgrad": 1}


def test_one_watch_at_a_time_and_another_afterwards(tmp_path: Path) -> None:
    block = model()
    with fp8debug.watch(block, tmp_path / "one", every=1):
        with pytest.raises(AttachError, match="up is watched already; close the first watch"):
            fp8debug.watch(block, tmp_path / "two")
        block(torch.randn(8, 32)).sum().backward()
    with fp8debug.watch(block, tmp_path / "two", every=1):
        block(torch.randn(8, 32)).sum().backward()
    assert all(fp8debug.Run(tmp_path / name).steps_range == (0, 0) for name in ("one", "two"))


def test_a_loop_with_a_gradient_scaler(tmp_path: Path) -> None:
    block = model()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with fp8debug.watch(block, tmp_path / "run", every=1) as watch:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = block(torch.randn(8, 32)).float().square().mean()
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step(loss=loss, loss_scale=scale)
    steps = fp8debug.Run(tmp_path / "run").sql("SELECT loss_scale FROM steps").column("loss_scale").to_pylist()
    assert steps == [1024.0, 1024.0]


class Stage(Linear):
    """A Linear in FP8 whose output is scaled, so that a backward pass may end between the two."""

    def forward(self, input: Tensor) -> Tensor:
        self.product = super().forward(input)
        return self.product * 1.0


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_backward_pass_that_ends_before_both_gemms(tmp_path: Path, is_cut: bool) -> None:
    torch.manual_seed(0)
    stage, head = Stage(), nn.Linear(32, 16, dtype=torch.bfloat16)
    block = nn.Sequential(stage, head)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    with fp8debug.watch(block, tmp_path / "run", every=1, what_if=()) as watch:
        for _ in range(5):
            loss = block(torch.randn(48, 64, requires_grad=True).bfloat16()).float().square().mean()
            own = list((head if is_cut else block).parameters())
            for parameter, grad in zip(own, torch.autograd.grad(loss, [*own, stage.product]), strict=False):
                parameter.grad = grad
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss.detach())
    found = [(f.code, f.name, f.module) for f in fp8debug.triage(tmp_path / "run") if f.code == "F149"]
    assert found == ([("F149", "gradient-never-computed", "0")] if is_cut else [])

"""The optimizer's step as recorded: numbers from closed form, nothing changed, at sampled steps alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from tests.recording.models import net, train

LR = 2.0**-7


class Step(nn.Module):
    """One Linear whose gradient is a constant: the loss is the sum of its weight times it."""

    def __init__(self, dtype: torch.dtype = torch.float32, value: float = 0.5) -> None:
        super().__init__()
        self.only = nn.Linear(64, 32, bias=False, dtype=dtype)
        nn.init.constant_(self.only.weight, value)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.only(x)
        return output


def recorded(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, every: int = 1
) -> list[dict[str, Any]]:
    """Record steps whose gradients are 1 everywhere."""
    weight = next(model.parameters())
    with fp8debug.watch(model, path, every=every, what_if=(), optimizer=optimizer) as watch:
        for _ in range(steps):
            loss = model(torch.ones(4, 64, dtype=weight.dtype)).float().sum() / 4
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    rows: list[dict[str, Any]] = fp8debug.Run(path).sql("SELECT * FROM updates ORDER BY step, module").to_pylist()
    return rows


def test_adam_moves_every_element_by_the_learning_rate_at_first(tmp_path: Path) -> None:
    model = Step()
    (row,) = recorded(tmp_path / "run", model, torch.optim.Adam(model.parameters(), lr=LR))
    num = 64 * 32
    assert (row["module"], row["optimizer"], row["dtype"], row["lr"], row["beta1"]) == ("only", "Adam", "float32", LR, 0.9)
    assert (row["beta2"], row["num_steps"]) == (0.999, 1)
    counted = [row[name] for name in ("numel", "num_sampled", "num_moved", "num_grad", "num_intended", "num_moment")]
    assert counted == [num] * 5 + [2 * num]
    assert (row["num_lost"], row["num_moment_zero"], row["num_moment_clipped"], row["fan_in"]) == (0, 0, 0, 64)
    assert row["sum_weight2"] == num * 0.25 and row["sum_grad2"] == num
    assert row["sum_moment2"] == pytest.approx(num * 0.01)
    for name in ("sum_update2", "sum_intended2", "sum_intended_update"):
        assert row[name] == pytest.approx(num * LR**2, rel=1e-5)
    assert row["max_update"] == pytest.approx(LR, rel=1e-5)
    assert row["sum_spacing_log2"] == pytest.approx(num * (-7 + 24), rel=1e-5), "2^-7 over 2^-24, the distance of floats at 0.5"


@pytest.mark.parametrize(("lr", "is_lost"), [(2.0**-8, False), (2.0**-11, True)])
def test_an_update_below_half_the_distance_of_two_values_is_lost(tmp_path: Path, lr: float, is_lost: bool) -> None:
    model = Step(torch.bfloat16)  # at 0.5 two BF16 values lie 2^-8 apart, and 2^-9 apart below it
    (row,) = recorded(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=lr))
    num = 64 * 32
    assert (row["num_intended"], row["num_moved"], row["num_lost"]) == (num, 0 if is_lost else num, num if is_lost else 0)
    assert row["sum_intended_update"] == (0 if is_lost else num * lr**2)
    assert row["sum_spacing_log2"] / num == (-3 if is_lost else 0)


@pytest.mark.parametrize(("dtype", "num_bf16"), [(torch.float32, [64 * 32, 0]), (torch.bfloat16, [None, None])])
def test_fp32_elements_that_bf16_holds_when_a_step_begins(tmp_path: Path, dtype: torch.dtype, num_bf16: list[int | None]) -> None:
    model = Step(dtype)
    rows = recorded(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=2.0**-12), steps=2)
    assert [row["num_bf16"] for row in rows] == num_bf16, "0.5 is a value of BF16, 0.5 - 2^-12 is none"


def test_a_momentum_buffer_and_weight_decay_are_part_of_the_update(tmp_path: Path) -> None:
    model = Step()
    options: dict[str, Any] = {"lr": LR, "momentum": 0.5, "weight_decay": 0.25}
    rows = recorded(tmp_path / "run", model, torch.optim.SGD(model.parameters(), **options), steps=3)
    for row in rows:
        assert row["sum_intended_update"] == pytest.approx(row["sum_intended2"], rel=1e-5)
        assert row["sum_update2"] == pytest.approx(row["sum_intended2"], rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.3}), (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"maximize": True}), (torch.optim.SGD, {"maximize": True, "weight_decay": 0.3}),
        (torch.optim.Adam, {"fused": True}), (torch.optim.AdamW, {"foreach": True}), (torch.optim.Adam, {"weight_decay": 0.1}),
    ],
)  # fmt: skip
def test_the_formula_is_that_of_torch(tmp_path: Path, optimizer: Any, options: dict[str, Any]) -> None:
    model = Step()
    for row in recorded(tmp_path / "run", model, optimizer(model.parameters(), lr=LR, **options), steps=3):
        assert row["sum_intended_update"] == pytest.approx(row["sum_intended2"], rel=1e-4)
        assert row["sum_update2"] == pytest.approx(row["sum_intended2"], rel=1e-4)


def test_what_an_optimizer_without_a_known_formula_meant_is_not_recorded(tmp_path: Path) -> None:
    model = Step()
    (row,) = recorded(tmp_path / "run", model, torch.optim.Adagrad(model.parameters(), lr=LR))
    assert row["num_moved"] == row["num_grad"] == 64 * 32
    assert {row[name] for name in ("num_intended", "num_lost", "sum_intended2", "sum_spacing_log2", "sum_moment2")} == {None}


class Master(torch.optim.SGD):
    """Keeps an FP32 copy of a weight and its second moment in E4M3, which is 0 everywhere but in one place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it needs no closure
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["master_param"] = p.float()
            state["square_avg"] = torch.zeros_like(p, dtype=torch.float8_e4m3fn)
            state["square_avg"].view(torch.uint8)[0, 0] = 0x7E  # 448, the greatest


def test_states_out_of_range_and_master_weights_are_counted(tmp_path: Path) -> None:
    model = Step(torch.bfloat16)
    (row,) = recorded(tmp_path / "run", model, Master(model.parameters(), lr=LR))
    assert row["keeps_precision"] is True
    assert (row["num_moment_zero"], row["num_moment_clipped"], row["num_moved"]) == (64 * 32 - 1, 1, 0)


def test_only_sampled_steps_have_rows_and_nothing_is_changed(tmp_path: Path) -> None:
    plain, watched = net(), net()
    losses = train(plain, 7, optimizer := torch.optim.AdamW(plain.parameters(), lr=1e-3))
    own = torch.optim.AdamW(watched.parameters(), lr=1e-3)
    with fp8debug.watch(watched, tmp_path / "run", every=3, what_if=(), optimizer=own) as watch:
        same = train(watched, 7, own, after=lambda _, loss: watch.step(loss=loss))
    assert losses == same
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    assert [s.keys() for s in optimizer.state.values()] == [s.keys() for s in own.state.values()]
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT DISTINCT step FROM updates ORDER BY step")["step"].to_pylist() == [0, 3, 6]
    assert "blocks.1.down" in run.sql("SELECT module FROM updates WHERE step = 3")["module"].to_pylist()


def test_columns_of_a_wide_weight_are_all_met(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=(), optimizer=optimizer) as watch:
        x = torch.zeros(4, 512)
        x[:, ::2] = 1  # gradients of every other column
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        watch.step(loss=loss)
    (row,) = fp8debug.Run(tmp_path / "run").sql("SELECT * FROM updates").to_pylist()
    assert (row["num_sampled"], row["numel"]) == (8192, 512 * 512)
    assert row["num_moved"] == row["num_grad"] == 4096


def test_ranks_add_their_shards(tmp_path: Path) -> None:
    from tests.synthetic import build

    run = build(tmp_path / "run", world_size=2, num_steps=10, updates=lambda step, module: {})
    (row,) = run.sql("SELECT * FROM updates WHERE module = 'blocks.1.mlp.up'").to_pylist()
    assert (row["num_sampled"], row["numel"], row["lr"]) == (2 * 8192, 2 * 65536, 3e-4)

"""The sum of gradients over microbatches is looked at where it can be more than one gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import fp8debug
from fp8debug.observer import rechecks


@pytest.mark.parametrize(
    ("microbatches", "compared"),
    [([2, 2], [1, 1]), ([1, 1, 1], [0, 0, 0]), ([1, 2, 2, 1, 2, 3], [0, 0, 1, 0, 0, 2]), ([3, 1, 1, 2, 2], [2, 0, 0, 0, 1])],
)
def test_sums_are_compared_but_for_a_step_after_one_with_a_single_pass(
    microbatches: list[int], compared: list[int], tmp_path: Path
) -> None:
    """The first step is looked at whatever comes; a gradient that is expected to stay alone is not copied."""
    torch.manual_seed(0)
    model = fp8debug.convert(nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16)), "blockwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        for count in microbatches:
            for _ in range(count):
                model(torch.randn(8, 32, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    found = fp8debug.Run(tmp_path / "run").sql(
        "SELECT step, sum(coalesce(num_grad_sums, 0)) AS n FROM stats WHERE tensor = 'grad_weight' AND reference = 'shadow'"
        " GROUP BY step ORDER BY step"
    )
    assert found.column("n").to_pylist() == compared


def test_the_node_of_a_leaf_is_looked_up_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in each Linear of a compiled model costs the host more than what is recorded of it."""

    def handled(error: BaseException) -> bool:
        raise AssertionError("an exception was raised on the way") from error

    monkeypatch.setattr(rechecks, "is_ours", handled)
    weight = nn.Parameter(torch.ones(2, 3))
    with torch.no_grad():
        assert rechecks.accumulator_of(weight) is get_gradient_edge(weight).node
    for other in (weight * 1, weight.detach()):
        assert rechecks.accumulator_of(other) is None
    with torch._C._AutoDispatchBelowAutograd():
        assert rechecks.accumulator_of(weight) is None


@pytest.mark.parametrize(
    ("calls", "compared"), [([2, 2], [True, True]), ([1, 2, 2], [False, False, True]), ([3, 1], [True, False])]
)
def test_uses_of_a_weight_in_one_pass_are_summed(calls: list[int], compared: list[bool], tmp_path: Path) -> None:
    """What the optimizer gets is the sum of the uses, and no part of it; a use that is expected to stay alone is not copied."""
    torch.manual_seed(0)
    linear = fp8debug.convert(nn.Sequential(nn.Linear(32, 32)), "blockwise")
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-3)
    with fp8debug.watch(linear, tmp_path / "run", every=1, what_if=()) as watch:
        for count in calls:
            x = torch.randn(8, 32)
            for _ in range(count):
                x = linear(x).tanh()
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    rows = fp8debug.Run(tmp_path / "run").sql("SELECT * FROM updates ORDER BY step").to_pylist()
    assert [row["sum_passes2"] is not None for row in rows] == compared
    for row, count in zip(rows, calls, strict=True):
        if row["sum_passes2"] is not None:
            assert row["sum_given2"] == pytest.approx(row["sum_passes2"]) == pytest.approx(row["sum_given_passes"])
            assert row["sum_since2"] is None and 0 < row["sum_first2"] != row["sum_last2"] > 0
            two = row["sum_given_first"] + row["sum_given_last"]
            assert (two == pytest.approx(row["sum_given2"])) is (count == 2)

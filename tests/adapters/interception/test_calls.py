"""Every legal way to call a module is recorded, whoever multiplies, and computes the same under a watch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fp8debug
from tests.adapters.linears import ScaledLinear

RESULTS = {"output", "grad_input", "grad_weight"}


def plain() -> nn.Module:
    return nn.Linear(32, 48)


def ours() -> nn.Module:
    return fp8debug.convert(nn.Linear(32, 48), "blockwise")


def scaled() -> nn.Module:
    return ScaledLinear(32, 48).bfloat16()


def torchao() -> nn.Module:
    library = pytest.importorskip("torchao.float8", exc_type=ImportError)
    config = library.Float8LinearConfig(emulate=True)
    module: nn.Module = library.float8_linear.Float8Linear.from_float(nn.Linear(32, 48), config)
    return module


MAKES = {"plain": plain, "Fp8Linear": ours, "scaled_mm": scaled, "torchao": torchao}


class Shared(nn.Module):
    """One module under two names, called once."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = self.second = layer

    def forward(self, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        return call(self.second, x)


def by_keyword(layer: nn.Module, x: Tensor) -> Tensor:
    name = "x" if isinstance(layer, ScaledLinear) else "input"
    out: Tensor = layer(**{name: x})
    return out


def functionally(layer: nn.Module, x: Tensor) -> Tensor:
    weights = {name: p * 1.0 for name, p in layer.named_parameters()}
    out: Tensor = functional_call(layer, weights, (x,))
    return out


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


#: The input's shape, how the module is called, and how often. torchao's Float8Linear takes no input of one dimension.
WAYS: dict[str, tuple[tuple[int, ...], Callable[[nn.Module, Tensor], Tensor], int]] = {
    "two dimensions": ((16, 32), lambda layer, x: layer(x), 1),
    "keyword": ((16, 32), by_keyword, 1),
    "one row": ((1, 32), lambda layer, x: layer(x), 1),
    "one dimension": ((32,), lambda layer, x: layer(x), 1),
    "three dimensions": ((2, 8, 32), lambda layer, x: layer(x), 1),
    "four dimensions": ((2, 2, 4, 32), lambda layer, x: layer(x), 1),
    "twice": ((16, 32), lambda layer, x: layer(x) + layer(x * 2), 2),
    "functional_call": ((16, 32), functionally, 1),
    "not contiguous": ((16, 32), lambda layer, x: layer(x.t().contiguous().t()), 1),
    "checkpoint": ((16, 32), checkpointed, 1),
}


def step(make: str, way: str, path: Path | None) -> list[Tensor]:
    torch.manual_seed(0)
    net = Shared(MAKES[make]())
    shape, call, _ = WAYS[way]
    dtype = next(net.parameters()).dtype
    x = torch.randn(shape).to(dtype).requires_grad_()
    watch = fp8debug.watch(net, path, every=1, what_if=()) if path is not None else None
    loss = net(x, call).float().square().mean()
    loss.backward()
    if watch is not None:
        watch.step(loss=loss)
        watch.close()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("make", "way"), [(m, w) for m in MAKES for w in WAYS if (m, w) != ("torchao", "one dimension")])
def test_it_is_recorded_and_computes_the_same(tmp_path: Path, make: str, way: str) -> None:
    expected = step(make, way, None)
    watched = step(make, way, tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(watched, expected, strict=True))
    run = fp8debug.Run(tmp_path / "run")
    query = "SELECT gemm, tensor, num_tensors FROM sites WHERE module = 'first' AND reference = 'shadow'"
    rows: list[dict[str, Any]] = run.sql(query).to_pylist()
    assert {row["tensor"] for row in rows} == RESULTS, run.sql("SELECT * FROM events").to_pylist()
    assert {row["num_tensors"] for row in rows} == {WAYS[way][2]}


@pytest.mark.parametrize("make", ["plain", "Fp8Linear"])
def test_no_rows_at_all(tmp_path: Path, make: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(MAKES[make]())
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        net(torch.randn(0, 32).requires_grad_()).sum().backward()
        watch.step()
        assert watch.coverage()[0]["called"]
    events = fp8debug.Run(tmp_path / "run").sql("SELECT message FROM events").to_pylist()
    assert not [event for event in events if "not watched any more" in event["message"]], events

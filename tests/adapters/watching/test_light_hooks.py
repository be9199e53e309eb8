"""What hooks on modules of other makes, and a step's end, leave to others or do once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

import fp8debug
from fp8debug.adapters.transformer_engine.tensors import side_of_storage
from fp8debug.adapters.watching import handle as watching
from fp8debug.kernels.dispatch import dequantize
from fp8debug.kernels.dispatch import describe as describe_operand
from fp8debug.metrics import Source
from fp8debug.observer import probe
from fp8debug.observer.observer import Observer
from fp8debug.recipes import Cast
from fp8debug.types import Quantized
from tests.adapters.linears import ScaledLinear, batch, model, record, rows
from tests.adapters.transformer_engine.engine_tensors import Float8BlockQuantizer, Float8CurrentScalingQuantizer


def test_an_input_that_two_gemms_read_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[bool] = []

    def describe(source: Source, *operand: Any) -> Any:
        counted.append("log2_hist" in source.shared)
        return describe_operand(source, *operand)

    monkeypatch.setattr(probe, "describe", describe)
    run = record(tmp_path, model(), 1, what_if=("tensorwise_delayed",))
    assert counted == [True] * 10, "of six operands of a Linear; the first has no dgrad and two operands less"
    for module in ("0", "2"):
        first, second = rows(run, f"module = '{module}' AND tensor = 'input'")
        assert (first["gemm"], second["gemm"]) == ("fprop", "wgrad")
        assert sum(first["log2_hist"]) > 0 and second["log2_hist"] == first["log2_hist"]


def test_modes_of_ours_do_not_hear_what_a_hook_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are back for the next module, and after an error of ours too."""
    heard: list[int] = []

    def describe(source: Source, *operand: Any) -> Any:
        heard.append(_len_torch_dispatch_stack())
        if len(heard) == 1:
            raise ValueError("a fault of ours")
        return describe_operand(source, *operand)

    monkeypatch.setattr(probe, "describe", describe)
    run = record(tmp_path, model(), 1, what_if=())
    assert heard == [0] * 7, "one operand of the first Linear, six of the second"
    assert {row["module"] for row in rows(run)} == {"2"}


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(
    "quantizer", [Float8BlockQuantizer(), Float8BlockQuantizer(block_scaling_dim=2), Float8CurrentScalingQuantizer()]
)
def test_operands_of_transformer_engine_are_not_copied(quantizer: Any, columnwise: bool) -> None:
    """Codes and scales are there when the library has emptied its own tensors, and where they were."""
    storage = quantizer(torch.randn(256, 384))
    values = storage.values(columnwise)
    held = {tensor.data_ptr() for tensor in vars(storage).values() if isinstance(tensor, Tensor)}
    side = side_of_storage(storage, columnwise)
    assert side is not None and side.scale_inv is not None
    assert {side.values.data_ptr(), side.scale_inv.data_ptr()} <= held
    storage.clear()
    q = Quantized(side.values, side.scale_inv)
    assert torch.equal(dequantize(q, Cast(granularity=side.granularity)), values)


def test_a_steps_end_has_little_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are joined from the hooks on, and the end of a step asks nothing of a module that was not recorded in it."""
    relieved: list[int] = []
    monkeypatch.setattr(Observer, "flush_if_full", lambda self, device: relieved.append(self.step))
    net = nn.ModuleList([model(), ScaledLinear(32, 32)])  # of which the second is not called
    with fp8debug.watch(net, tmp_path, every=2) as watch:
        observer, ends = watch._observer, []
        for step in range(4):
            loss = net[0](batch(step)).square().mean()
            ends.append(len(observer.after_step))
            loss.backward()
            watch.step(loss=loss)
            assert not observer.after_step
    assert ends == [2, 0, 2, 0] and relieved == [0] * 5 + [2] * 5, "two forward passes, and dgrad and wgrad as each has run"


def test_rows_are_joined_after_the_optimizers_step_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that is sampled, and not into a graph that is being captured; what goes wrong there ends the recording alone."""
    joined: list[int] = []
    monkeypatch.setattr(Observer, "flush_many", lambda self: joined.append(self.step))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with fp8debug.watch(net, tmp_path / "run", every=2) as watch:
        for step in range(7):
            monkeypatch.setattr(watching, "is_capturing", lambda step=step: step == 2)
            if step == 6:
                monkeypatch.setattr(Observer, "flush_many", lambda self: 1 // 0)
            loss = net(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
        assert watch._observer.is_off
    assert joined == [0, 4]
    (event,) = fp8debug.Run(tmp_path / "run").sql("SELECT step, message FROM events").to_pylist()
    assert event == {"step": 6, "message": "recording stopped: ZeroDivisionError: integer division or modulo by zero"}

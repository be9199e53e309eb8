"""A bias that a GEMM adds to its output is no part of its error; to take it off, nothing of the output's size is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8debug
from fp8debug.adapters.interception.intercepting_probe import InterceptingProbe
from fp8debug.adapters.transformer_engine.probe import TeProbe
from fp8debug.kernels import gemm_error, sampling, torch_state
from fp8debug.observer import table
from fp8debug.observer.probe import Probe
from tests.adapters.linears import ScaledLinear, rows
from tests.adapters.transformer_engine import engine as te

TOKENS, WIDTH, OUT = 64, 32, 288
engine = te.engine


def scaled_mm() -> nn.Module:
    torch.manual_seed(0)
    net = ScaledLinear(WIDTH, OUT, bias=False).bfloat16()
    net.fused_bias = 3 * torch.randn(OUT).bfloat16()
    return nn.Sequential(net)


def transformer_engine() -> nn.Module:
    torch.manual_seed(0)
    net = te.Linear(WIDTH, OUT)
    net.bias = nn.Parameter(3 * torch.randn(OUT))
    return nn.Sequential(net).bfloat16()


#: A module, and the hook that records its fprop, by adapter.
MODULES: dict[str, tuple[Callable[[], nn.Module], type[Probe], str]] = {
    "scaled_mm": (scaled_mm, InterceptingProbe, "_record_fprop"),
    "te": (transformer_engine, TeProbe, "take_fprop"),
}


class Sizes(TorchDispatchMode):
    """Keeps what the largest FP32 or FP64 result of an op has of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(found) if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64)]
        self.most, self.num_ops = max([self.most, *made]), self.num_ops + 1
        return found


@pytest.fixture(params=["kernels", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is compared as on a GPU, by kernels in Triton's interpreter, and as on a CPU; of the few columns a share."""
    monkeypatch.setattr(sampling, "MIN_WIDE", OUT)
    if request.param == "kernels":
        common = pytest.importorskip("fp8debug.kernels.gpu.device", reason="Triton is not installed")
        if not common.INTERPRETED:
            pytest.skip("shown by the interpreter")
        for module in (gemm_error, table):
            monkeypatch.setattr(module, "takes_kernels", lambda x: True)
            monkeypatch.setattr(module, "on_device", lambda x: nullcontext())
        monkeypatch.delattr(gemm_error, "_pairs")  # the way of the CPU


def record(path: Path, net: nn.Module, *, trains: bool = True) -> list[dict[str, Any]]:
    """The rows of an output in one step, of which 8 tokens and a share of the columns are compared."""
    with fp8debug.watch(net, path, every=1, shadow_rows=8, what_if=()) as watch, te.autocast(te.Float8CurrentScaling()):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
        loss = net(x).float().square().mean()
        if trains:
            loss.backward()
        watch.step(loss=loss)
    run = fp8debug.Run(path)
    assert not run.sql("SELECT * FROM events").to_pylist()
    return rows(run, "tensor = 'output'")


@pytest.mark.usefixtures("_way", "engine")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("name", MODULES)
def test_the_figures_are_those_of_the_whole_output_without_its_bias(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fprop: Any = Probe.fprop
    make, seen = MODULES[name][0], list[bool]()
    found = record(tmp_path / "run", make())

    def copied(self: Probe, *args: Any, **more: Any) -> Any:
        *operands, output, bias = args
        seen.append(True)
        return fprop(self, *operands, output.float() - bias.detach().float(), **more)

    monkeypatch.setattr(Probe, "fprop", copied)
    wanted = record(tmp_path / "wanted", make())
    assert seen == [True] and len(found) == 2 and found == wanted
    shadow, exact = sorted(found, key=lambda row: row["reference"], reverse=True)
    assert shadow["numel"] == 8 * (OUT // 128 * 16 + OUT % 128) and shadow["damage"] > 0
    assert 20 < shadow["sqnr_db"] < exact["sqnr_db"] and exact["sqnr_db"] > 35  # BF16's rounding of output and bias


@pytest.mark.usefixtures("_way", "engine")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("name", MODULES)
def test_no_tensor_of_the_outputs_size_is_made_in_fp32(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, probe, method = MODULES[name]
    hook, sizes = getattr(probe, method), Sizes()

    def heard(self: Probe, *args: Any) -> Any:
        with sizes:
            return hook(self, *args)

    monkeypatch.setattr(probe, method, heard)
    monkeypatch.setattr(torch_state, "hidden_from_modes", nullcontext)
    assert len(record(tmp_path / "run", make(), trains=False)) == 2
    assert sizes.num_ops > 10 and sizes.most < TOKENS * OUT

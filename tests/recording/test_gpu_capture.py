"""CUDA graphs: an unsampled step of a watched model is captured and replayed, and the whole run is the eager one's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from tests.recording.models import rows_of

pytestmark = pytest.mark.gpu
EVERY, STEPS = 4, 12


class Loop:
    """A training step whose tensors stay where they are, as a capture needs it."""

    def __init__(self, recipe: str) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(256, 512, bias=False), nn.SiLU(), nn.Linear(512, 128))
        self.model = fp8debug.convert(nn.Sequential(*layers).bfloat16().cuda(), recipe)
        self.x = torch.zeros(384, 256, device="cuda", dtype=torch.bfloat16)
        self.loss = torch.zeros((), device="cuda")
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def step(self) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.loss.copy_(loss.detach())
        with torch.no_grad():
            for p in self.model.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)

    def capture(self) -> torch.cuda.CUDAGraph:
        state = [p.detach().clone() for p in self.model.parameters()]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self.step()
        with torch.no_grad():
            for p, old in zip(self.model.parameters(), state, strict=True):
                p.copy_(old)
        return graph


def batch(step: int) -> Tensor:
    return torch.randn(384, 256, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()


def train(path: Path, recipe: str, *, captured: bool) -> tuple[list[float], list[dict[str, Any]]]:
    loop, losses, graph = Loop(recipe), [], None
    with fp8debug.watch(loop.model, path, every=EVERY, shadow_rows=32) as watch:
        for step in range(STEPS):
            loop.x.copy_(batch(step))
            sampled = watch.current_step % EVERY == 0
            if captured and not sampled:
                graph = graph or loop.capture()
                graph.replay()
            else:
                loop.step()
            losses.append(loop.loss.item())
            watch.step(loss=loop.loss)
    return losses, rows_of(path)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_current", "rowwise"])
def test_replayed_steps_are_the_eager_ones_to_the_bit(recipe: str, tmp_path: Path) -> None:
    eager, rows = train(tmp_path / "eager", recipe, captured=False)
    replayed, same_rows = train(tmp_path / "captured", recipe, captured=True)
    assert replayed == eager and eager[-1] < eager[0]
    assert same_rows == rows and {row["step"] for row in rows} == {0, 4, 8}


def test_a_capture_of_a_sampled_step_is_left_unrecorded_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop("blockwise")
    loop.step()
    with fp8debug.watch(loop.model, tmp_path / "run", every=1) as watch:
        loop.x.copy_(batch(0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop.step()
        graph.replay()
        watch.step(loss=loop.loss)
    said = [line for line in capsys.readouterr().err.splitlines() if "captures" in line]
    assert said == [
        f"fp8debug: {module} is not recorded in full at step 0: a CUDA graph captures it; capture a step that is not sampled and"
        " run the sampled ones without it"
        for module in ("0", "2")
    ]


def test_a_graph_holds_delayed_scaling() -> None:
    """Each replay moves the amax history on, which lies on the device."""

    def run(captured: bool) -> list[float]:
        loop, losses, graph = Loop("tensorwise_delayed"), [], torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        loop.x.copy_(batch(0))
        with torch.cuda.stream(stream):
            loop.step()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            with torch.cuda.graph(graph):
                loop.step()
        for step in range(1, 6):
            loop.x.copy_(batch(step) * step)
            if captured:
                graph.replay()
            else:
                loop.step()
            losses.append(loop.loss.item())
        return losses

    assert run(True) == run(False)

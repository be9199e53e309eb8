"""An operand that one GEMM reads along its rows and another along its columns is quantized at once where a kernel can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import fp8debug
from fp8debug import linear
from fp8debug.errors import UsageError
from fp8debug.kernels import dispatch
from fp8debug.kernels.backend import why_no_kernels
from fp8debug.kernels.dispatch import CastWithSlots, quantize
from fp8debug.linear import Fp8Linear
from fp8debug.observer import fused_cast
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized, TensorRole
from tests.kernels.test_cast_cache import attention, batch, same, trained
from tests.recording.models import rows_of

pytestmark = pytest.mark.skipif(why_no_kernels() is not None, reason="no kernels here, which pairs stand in for")


@contextmanager
def paired() -> Iterator[list[tuple[int, ...]]]:
    """Have a CPU make pairs, by the reference; collects the shapes of what was quantized for two GEMMs at once."""
    seen: list[tuple[int, ...]] = []

    def pair(x: Tensor, across: Cast, down: Cast, **_: Any) -> tuple[CastWithSlots, CastWithSlots] | None:
        if (across.granularity, across.scaling, down.granularity) != ("1x128", "current", "128x1"):
            return None
        seen.append(tuple(x.shape))
        return (quantize(x, across), None), (quantize(x, down, contracts_rows=True), None)

    with ExitStack() as stack:
        for module in (linear, fused_cast):
            stack.enter_context(patch.object(module, "quantize_pair", pair))
        stack.enter_context(patch.object(fused_cast, "takes_kernels", lambda x: True))
        yield seen


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", "mxfp8"])
def test_a_training_is_the_same_whether_pairs_are_made_or_not(recipe: str, tmp_path: Path) -> None:
    expected, watched = trained("cpu", recipe), trained("cpu", recipe, tmp_path / "alone")
    with paired() as seen:
        assert same(trained("cpu", recipe), expected)
        # 2 blocks, 4 steps: 2 inputs of 5 Linears, which share them, and 5 gradients
        assert len(seen) == (4 * 2 * (2 + 5) if recipe == "blockwise" else 0)
        found = trained("cpu", recipe, tmp_path / "paired")
    assert same(found, expected) and same(watched, expected)
    assert rows_of(tmp_path / "paired") == rows_of(tmp_path / "alone")


def test_only_what_two_gemms_read() -> None:
    layer = Fp8Linear(128, 256, bias=False)
    x = torch.randn(128, 128)
    with paired() as seen:
        with torch.no_grad():
            layer(x)
        layer.weight.requires_grad_(False)
        layer(x.requires_grad_()).sum().backward()
        assert seen == []
        layer.weight.requires_grad_(True)
        layer(x.detach()).sum().backward()  # no gradient of the input
        assert seen == [(128, 128)]
        layer(x).sum().backward()
        assert seen == [(128, 128), (128, 128), (128, 256)]
        layer.set_recipe("tensorwise_current")
        layer(x).sum().backward()
        assert len(seen) == 3


def test_an_operand_with_a_fault_is_quantized_by_itself() -> None:
    layer, x = Fp8Linear(128, 256, bias=False), torch.randn(128, 128)
    asked: list[tuple[Gemm, TensorRole]] = []

    def distort(which: Gemm, role: TensorRole, x: Tensor, cast: Cast | None, ordinary: Any) -> Any:
        asked.append((which, role))
        return ordinary(x, cast)

    layer.distortion = distort
    with paired() as seen:
        layer(x.requires_grad_()).sum().backward()
    assert seen == [] and len(asked) == 6


def test_an_error_of_a_watch_in_a_pair_leaves_the_step_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = trained("cpu", "blockwise")

    def broken(*_: Any, **__: Any) -> None:
        raise UsageError("broken")

    with paired(), patch.object(fused_cast, "quantize_pair", broken):
        assert same(trained("cpu", "blockwise", tmp_path / "run"), expected)
    assert "broken" in capsys.readouterr().err


@contextmanager
def without_pairs() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (linear, fused_cast):
            stack.enter_context(patch.object(module, "quantize_pair", lambda *_, **__: None))
        yield


@contextmanager
def noted() -> Iterator[list[tuple[bool, Quantized]]]:
    """Collect what pairs a GPU makes, and whether observed."""
    made: list[tuple[bool, Quantized]] = []
    own = dispatch.quantize_pair

    def pair(x: Tensor, across: Cast, down: Cast, **options: Any) -> tuple[CastWithSlots, CastWithSlots] | None:
        found = own(x, across, down, **options)
        made.extend((bool(options.get("observed")), q) for q, _ in found or ())
        return found

    with ExitStack() as stack:
        for module in (linear, fused_cast):
            stack.enter_context(patch.object(module, "quantize_pair", pair))
        yield made


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Rows that differ by the order of sums alone."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if isinstance(value, float) and value == value:
            assert value == pytest.approx(expected[name], rel=2e-5, abs=1e-9), (name, value, expected[name])
        else:
            assert value == expected[name] or value != value, (name, value, expected[name])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_pow2"])
@pytest.mark.parametrize("what_if", [[], ["tensorwise_delayed"], ["mxfp8"]], ids=str)
def test_a_gpu_makes_pairs_and_the_same_training(recipe: str, what_if: list[str], tmp_path: Path) -> None:
    def watched(path: Path) -> list[Tensor]:
        model, losses = attention("cuda", recipe), []
        with fp8debug.watch(model, path, every=2, what_if=what_if) as watch:
            for step in range(4):
                loss = model(batch("cuda", step)).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
                watch.step(loss=loss)
        return losses + [p.grad for p in model.parameters() if p.grad is not None]

    with without_pairs():
        expected, rows = watched(tmp_path / "alone"), rows_of(tmp_path / "alone")
    with noted() as made:
        found = watched(tmp_path / "paired")
    assert same(found, expected)
    for sampled in (False, True):  # two steps each, of two blocks with two inputs and five gradients
        assert sum(observed == sampled for observed, _ in made) == 2 * 2 * 2 * (2 + 5)
    others = rows_of(tmp_path / "paired")
    assert len(others) == len(rows)
    for one, other in zip(others, rows, strict=True):
        close(one, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_pair_is_made_under_a_graph_and_without_waiting() -> None:
    layer = Fp8Linear(256, 256, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    gradients = [torch.zeros_like(x), torch.zeros_like(layer.weight)]
    x.requires_grad_().grad, layer.weight.grad = gradients

    def step() -> None:
        for gradient in gradients:
            gradient.zero_()
        layer(x).float().square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with noted() as made, torch.cuda.graph(graph):
        step()
    assert len(made) == 4
    graph.replay()
    replayed = [gradient.clone() for gradient in gradients]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(gradients, replayed) and all(gradient.any() for gradient in gradients)

"""Linears of one input quantize it once: the numbers are those of each by itself, and nothing is held or taken for another's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug import linear
from fp8debug.kernels import cast_cache
from fp8debug.observer import fused_cast
from tests.adapters.linears import CHECKPOINTS
from tests.recording.models import rows_of
from tests.shortened import shortened

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = ["blockwise", "blockwise_pow2", "tensorwise_current", "tensorwise_delayed", "rowwise", "mxfp8", "nvfp4", "mxfp4"]


class Attention(nn.Module):
    """Three projections of one normalized input, a gate and a way up of another."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.gate, self.up = (nn.Linear(width, width, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + functional.softmax(self.q(y) * self.k(y), -1) * self.v(y)
        y = self.norms[1](x)
        out: Tensor = x + functional.silu(self.gate(y)) * self.up(y)
        return out


def attention(device: str, recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(Attention(), Attention())
    fp8debug.convert(layers.to(device, torch.bfloat16), recipe)
    return layers


def batch(device: str, step: int = 0) -> Tensor:
    return torch.randn(256, 128, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)


@contextmanager
def alone() -> Iterator[None]:
    """Have every Linear quantize its input itself."""
    with patch.object(linear, "cached_casts", lambda _: None):
        yield


@contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """Collect what is quantized: the shapes of all tensors."""
    seen: list[tuple[int, ...]] = []

    def noted(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(tuple(x.shape))
            return own(x, *args, **kwargs)

        return call

    def noted_twice(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            pair = own(x, *args, **kwargs)
            seen.extend([tuple(x.shape)] * (0 if pair is None else 2))
            return pair

        return call

    with ExitStack() as stack:
        for module, name in ((linear, "quantize"), (fused_cast, "quantize"), (fused_cast, "quantize_observed")):
            stack.enter_context(patch.object(module, name, noted(getattr(module, name))))
        for module in (linear, fused_cast):
            stack.enter_context(patch.object(module, "quantize_pair", noted_twice(module.quantize_pair)))
        yield seen


def trained(device: str, recipe: str, path: Path | None = None, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Return the losses of four steps and the last gradients."""
    model, losses = attention(device, recipe), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = None if path is None else fp8debug.watch(model, path, every=2, what_if=["tensorwise_delayed", "mxfp8"])
    for step in range(4):
        optimizer.zero_grad()
        x = batch(device, step)
        loss = (model(x) if call is None else call(model, x)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    return losses + [p.grad for p in model.parameters() if p.grad is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", shortened(RECIPES, 3))
def test_a_training_is_the_same_to_the_bit_watched_and_not(device: str, recipe: str, tmp_path: Path) -> None:
    found, watched = trained(device, recipe), trained(device, recipe, tmp_path / "reused")
    with alone():
        expected, watched_alone = trained(device, recipe), trained(device, recipe, tmp_path / "alone")
    assert same(found, expected) and same(watched, expected) and same(watched_alone, expected)
    rows = rows_of(tmp_path / "reused")
    assert rows == rows_of(tmp_path / "alone") and {row["module"] for row in rows} >= {"0.q", "0.k", "1.v", "1.gate", "1.up"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("watched", [False, True])
def test_an_input_is_quantized_once_for_each_way_it_is_read(device: str, watched: bool, tmp_path: Path) -> None:
    model, x = attention(device, "blockwise"), batch(device)
    weights = 2 * 5 * (1 if device == "cpu" else 2)  # in the forward pass, and on a GPU in the backward pass again
    if watched:
        watch = fp8debug.watch(model, tmp_path / "run", every=1)
    with counted() as seen:
        loss = model(x).float().square().mean()
        forward = seen.count((256, 128))
        loss.backward()
    gradients = 2 * 5 * 2
    assert forward == 2 * 2 * 2  # of two layers, two inputs for two GEMMs
    assert seen.count((256, 128)) == forward + gradients and seen.count((128, 128)) == weights
    if watched:
        watch.close()
    with alone(), counted() as seen:
        model(x)
    assert seen.count((256, 128)) == 2 * 5 * 2


def outputs(model: nn.Module, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return what k makes of q's input after a change, and what it makes of the same when it is alone."""
    layer: Any = model[0]  # type: ignore[index]  # a Sequential
    y = layer.norms[0](batch(str(next(model.parameters()).device)))
    layer.q(y)
    y = change(y)
    found = layer.k(y)
    with alone():
        return found, layer.k(y)


def doubled(y: Tensor) -> Tensor:
    with torch.no_grad():
        return y.mul_(2)


def replaced(y: Tensor) -> Tensor:
    y.data = y.detach() * 2
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", [doubled, replaced, lambda y: y * 2, lambda y: y[::2], lambda y: y.float().bfloat16() * 3])
def test_a_changed_input_is_quantized_again(device: str, change: Callable[[Tensor], Tensor]) -> None:
    found, expected = outputs(attention(device, "blockwise"), change)
    assert torch.equal(found, expected)


class HandedOut(torch.autograd.Function):
    """Writes to a tensor that it returns again and again, as compiled code under CUDA graphs may; autograd counts no write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: list[Tensor]) -> Tensor:
        places[0].data.copy_(x)
        return places[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_that_is_handed_out_again_is_another_input(device: str) -> None:
    layer: Any = attention(device, "blockwise")[0]
    places = [torch.empty_like(batch(device))]
    y = HandedOut.apply(layer.norms[0](batch(device)), places)
    before, version = layer.q(y), y._version
    again = HandedOut.apply(layer.norms[0](batch(device, 1)), places)
    assert again is y and again._version == version
    found = layer.q(again)
    with alone():
        assert torch.equal(found, layer.q(again)) and not torch.equal(found, before)


def test_another_recipe_of_a_linear_is_its_own() -> None:
    model = attention("cpu", "blockwise")
    layer: Any = model[0]
    layer.k.set_recipe("mxfp8")
    layer.v.set_recipe("bf16")
    y = layer.norms[0](batch("cpu"))
    found = [f(y) for f in (layer.q, layer.k, layer.v)]
    with alone():
        assert same(found, [f(y) for f in (layer.q, layer.k, layer.v)])


def test_delayed_scaling_takes_each_linears_own_history() -> None:
    def run() -> Tensor:
        layer: Any = attention("cpu", "tensorwise_delayed")[0]
        layer.k(layer.norms[0](batch("cpu", 1)) * 100)
        y = layer.norms[0](batch("cpu"))
        layer.q(y)
        out: Tensor = layer.k(y)
        return out

    found = run()
    with alone():
        assert torch.equal(found, run())


def test_autocast_has_its_own_dtype() -> None:
    model = attention("cpu", "blockwise").float()
    layer: Any = model[0]
    y = layer.norms[0](batch("cpu").float())

    def all_of() -> list[Tensor]:
        plain = layer.q(y)
        with torch.autocast("cpu", torch.bfloat16):
            return [plain, layer.k(y), layer.v(y)]

    with counted() as seen:
        found = all_of()
    assert seen.count((256, 128)) == 4  # q's, and one for k and v
    with alone():
        assert same(found, all_of())


class Hearing(TorchDispatchMode):
    """Records ops, and runs them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["leaf", "no_grad", "detached", "mode", "capture"])
def test_where_nobody_counts_writes_each_quantizes_it(way: str) -> None:
    layer: Any = attention("cpu", "blockwise")[0]
    y = layer.norms[0](batch("cpu"))
    if way in ("leaf", "detached"):
        y = y.detach().requires_grad_(way == "leaf")
    context: Any = {"no_grad": torch.no_grad, "mode": Hearing}.get(way, torch.enable_grad)()
    with counted() as seen, context, patch.object(cast_cache, "is_capturing", lambda: way == "capture"):
        layer.q(y), layer.k(y)
    assert seen.count((256, 128)) == 2 * (1 if way == "no_grad" else 2)  # no wgrad will come there


def test_a_fault_in_one_linear_is_not_anothers() -> None:
    layer: Any = attention("cpu", "blockwise")[0]

    def emptied(which: Any, role: Any, x: Tensor, cast: Any, ordinary: Any) -> Any:
        q, how = ordinary(x, cast)
        q.data.view(torch.uint8).zero_()
        return q, how

    y = layer.norms[0](batch("cpu"))
    before = layer.q(y)
    layer.k.distortion = emptied
    assert not layer.k(y).any()
    assert torch.equal(layer.q(y), before) and layer.v(y).any()


def alive() -> list[weakref.ref[Tensor]]:
    """Return references to what is held."""
    return [weakref.ref(tensor) for q in (cast_cache._last.made.values() if cast_cache._last else ()) for tensor in q]


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_held_once_the_input_is_gone_or_the_backward_pass_begins(device: str) -> None:
    layer: Any = attention(device, "blockwise")[0]
    y = layer.norms[0](batch(device))
    layer.q(y)
    held = alive()
    assert len(held) == 4
    del y
    gc.collect()
    assert not alive() and all(one() is None for one in held)
    y = layer.norms[0](batch(device))
    out = layer.q(y)
    assert alive()
    out.sum().backward()
    assert not alive()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*CHECKPOINTS])
def test_checkpoints_recompute_the_same(device: str, name: str, tmp_path: Path) -> None:
    def call(model: nn.Sequential, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in model:
            x = checkpoint(block, x, **CHECKPOINTS[name])
        return x

    assert same(trained(device, "blockwise", tmp_path / "run", call), trained(device, "blockwise"))


@pytest.mark.gpu
def test_another_stream_does_not_read_what_may_not_be_there() -> None:
    layer: Any = attention("cuda", "blockwise")[0]
    y = layer.norms[0](batch("cuda"))
    layer.q(y)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with counted() as seen, torch.cuda.stream(side):
        layer.k(y)
    assert seen.count((256, 128)) == 2
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_graph_quantizes_what_it_reads() -> None:
    layer: Any = attention("cuda", "blockwise")[0]
    y = batch("cuda").requires_grad_() * 1.0
    layer.k(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.k(y)
    with torch.no_grad():
        y.copy_(batch("cuda", 1))
    graph.replay()
    with alone():
        assert torch.equal(out, layer.k(y))


def test_threads_of_their_own_inputs_do_not_mix() -> None:
    layer: Any = attention("cpu", "blockwise")[0]
    inputs = [layer.norms[0](batch("cpu", step)) for step in range(8)]
    with alone():
        expected = [[f(y).detach() for f in (layer.q, layer.k, layer.v)] for y in inputs]

    def work(y: Tensor) -> list[Tensor]:
        return [f(y).detach() for _ in range(20) for f in (layer.q, layer.k, layer.v)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, inputs))
    assert all(same(a, b * 20) for a, b in zip(found, expected, strict=True))

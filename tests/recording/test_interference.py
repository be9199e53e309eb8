"""Zero interference: the numbers of a training do not change by a bit, nothing grows, nothing stays behind."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.observer.rows import RowAllocator
from tests.recording.models import Net, net, train
from tests.shortened import shortened


def fingerprint(recipe: str | None, path: Path | None, seed_use: bool = False, **options: Any) -> tuple[Any, ...]:
    """Train 20 steps with dropout in the loop and return losses, parameters, gradients' sums and optimizer state."""
    model = net(recipe)
    model.blocks.append(nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    if path is None:
        losses = train(model, 20, optimizer)
    else:
        with fp8debug.watch(model, path, every=1, **options) as watch:
            losses = train(model, 20, optimizer, after=lambda _, loss: watch.step(loss=loss))
    state = [t for s in optimizer.state.values() for t in s.values()]
    return losses, [p.detach().clone() for p in model.parameters()], state, torch.get_rng_state()


@pytest.mark.parametrize(
    "recipe",
    shortened(
        [None, "blockwise", "blockwise_e8m0", "tensorwise_delayed", "rowwise", "mxfp8"], {None, "blockwise", "tensorwise_delayed"}
    ),
)
def test_training_is_bit_identical_with_and_without(recipe: str | None, tmp_path: Path) -> None:
    losses, params, state, rng = fingerprint(recipe, None)
    watched = fingerprint(recipe, tmp_path / "run")
    assert watched[0] == losses
    assert all(torch.equal(a, b) for a, b in zip(watched[1], params, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(watched[2], state, strict=True))
    assert torch.equal(watched[3], rng)
    assert fp8debug.Run(tmp_path / "run").table(columns=["numel"]).num_rows


def test_full_shadow_is_bit_identical_too(tmp_path: Path) -> None:
    assert fingerprint("blockwise", tmp_path / "run", shadow="full")[0] == fingerprint("blockwise", None)[0]


def test_state_dict_and_attributes_are_untouched_and_detach_restores(tmp_path: Path) -> None:
    for recipe in ("blockwise", None):
        model = net(recipe)
        before = {name: dict(module.__dict__) for name, module in model.named_modules()}
        hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
        keys = list(model.state_dict())
        watch = fp8debug.watch(model, tmp_path / f"run-{recipe}")
        assert list(model.state_dict()) == keys
        train(model, 2, after=lambda _, loss, watch=watch: watch.step(loss=loss))  # type: ignore[misc]  # bound now
        watch.detach()
        for name, module in model.named_modules():
            assert set(module.__dict__) == set(before[name])
            assert module.__dict__.get("probe") is None
            assert len(module._forward_hooks) == hooks[name]
        watch.close()


@pytest.mark.long
def test_memory_does_not_grow_over_500_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fp8debug.convert(model, "tensorwise_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 16)
    sizes = []

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        tracemalloc.start()
        for step in range(500):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
            if step in (50, 499):
                watch._writer.flush()
                sizes.append((tensors(), tracemalloc.get_traced_memory()[0]))
        tracemalloc.stop()
    (tensors_early, bytes_early), (tensors_late, bytes_late) = sizes
    assert tensors_late <= tensors_early + 2
    assert bytes_late - bytes_early < 1_000_000
    assert fp8debug.Run(tmp_path / "run").sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 500}]


def test_a_failing_hook_does_not_reach_the_step_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(net(), 6)
    calls = 0

    def broken(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise RuntimeError("no memory left on the moon\nsecond line")

    monkeypatch.setattr(RowAllocator, "record", broken)
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        losses = train(model, 6, after=lambda _, loss: watch.step(loss=loss))
    assert losses == expected
    said = [line for line in capsys.readouterr().err.splitlines() if "moon" in line]
    assert len(said) == 1 and "is not watched any more: RuntimeError: no memory left on the moon" in said[0]
    events = fp8debug.Run(tmp_path / "run").sql("SELECT kind, module FROM events WHERE kind = 'skipped'").to_pylist()
    assert [e["module"] for e in events][:1] == [said[0].split()[1]]


def test_a_wrong_loss_is_said_at_once_and_the_step_counts(tmp_path: Path) -> None:
    with fp8debug.watch(Net(), tmp_path / "run") as watch:
        with pytest.raises(fp8debug.Fp8DebugError, match=r"loss must be a number or a scalar tensor, got .*\[3\]"):
            watch.step(loss=torch.zeros(3))
        with pytest.raises(fp8debug.Fp8DebugError, match=r"loss must be a number or a scalar tensor, got 'abc'"):
            watch.step(loss="abc")  # type: ignore[arg-type]  # the mistake
        watch.step(loss=1.0)

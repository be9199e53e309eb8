"""Lightning's Trainer and a loop under Accelerate: the same training, and every step with what its owner knows of it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.errors import AttachError
from tests.example import run_example
from tests.recording.models import batch, net

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # a class of a library without types
    """A Net that trains by itself."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.net = net()
        self.fail_at = fail_at
        self.losses: list[float] = []

    def training_step(self, data: Any, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise KeyError("mine")
        loss = nn.functional.cross_entropy(self.net(data[0]), data[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, data: Any, index: int) -> None:
        self.net(data[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


def batches() -> Any:
    class Batches(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return batch(index, rows=32)

    return torch.utils.data.DataLoader(Batches(), batch_size=None)


def lightning_trainer(**options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, **quiet, **options)


def test_a_copied_callback_is_for_the_same_recorder(tmp_path: Path) -> None:
    trainer = lightning_trainer()
    with fp8debug.watch(trainer, tmp_path / "run"):
        own = trainer.callbacks[-1]
        copied = copy.deepcopy(own)
        assert copied is not own and type(copied) is type(own)
        assert copied._recorder is own._recorder and copied._losses is own._losses


def test_lightning_tells_its_steps_and_trains_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    alone, module = Module(), Module()
    lightning_trainer(**options).fit(alone, batches(), batches())
    trainer = lightning_trainer(**options)
    with fp8debug.watch(trainer, tmp_path / "run", every=2):
        trainer.fit(module, batches(), batches())
    assert module.losses == alone.losses and len(module.losses) == 8
    run = fp8debug.Run(tmp_path / "run")
    steps = run.sql("SELECT step, loss, lr, grad_norm FROM steps ORDER BY step").to_pylist()
    expected = [(a + b) / 2 for a, b in zip(module.losses[::2], module.losses[1::2], strict=True)]
    assert [s["loss"] for s in steps] == pytest.approx(expected, rel=1e-6)
    assert [s["lr"] for s in steps] == [0.5, 0.25, 0.125, 0.0625]
    assert all(s["grad_norm"] > 0.1 for s in steps)  # before it is clipped
    table = run.table(columns=["step", "num_tensors"], module="net.blocks.1.down", tensor="input", actual=True)
    assert set(table["step"].to_pylist()) == {0, 2} and set(table["num_tensors"].to_pylist()) == {2}
    assert run.rank_manifests[0]["ended"] and not [c for c in trainer.callbacks if "Fp8Debug" in type(c).__name__]


def test_an_exception_in_lightning_ends_the_record(tmp_path: Path) -> None:
    trainer = lightning_trainer(max_epochs=1)
    watch = fp8debug.watch(trainer, tmp_path / "run", every=1)
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(Module(fail_at=3), batches(), batches())
    run = fp8debug.Run(tmp_path / "run")
    assert run.steps_range == (0, 2) and run.rank_manifests[0]["ended"]
    assert run.sql("SELECT message FROM events").column("message").to_pylist() == ["ended by KeyError: 'mine'"]
    watch.close()


@pytest.mark.parametrize("way", ["accelerator", "model"])
def test_accelerate_after_prepare(way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train(path: Path | None) -> tuple[list[float], list[float]]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        if path is not None:
            with pytest.raises(AttachError, match=r"call watch\(\) after accelerator\.prepare\(\)"):
                fp8debug.watch(accelerator, tmp_path / "early")
        model = net()
        own = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, data = accelerator.prepare(model, own, batches())
        watch = None
        if path is not None:
            target = accelerator if way == "accelerator" else model
            watch = fp8debug.watch(target, path, every=2, optimizer=None if way == "accelerator" else optimizer)
        losses, norms = [], []
        for x, classes in data:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), classes)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
        if watch is not None:
            watch.close()
        assert "backward" not in vars(accelerator) and "step" not in vars(optimizer)
        return losses, norms

    alone, watched = train(None), train(tmp_path / "run")
    assert alone == watched
    run = fp8debug.Run(tmp_path / "run")
    steps = run.sql("SELECT step, loss, lr, grad_norm FROM steps ORDER BY step").to_pylist()
    assert [s["step"] for s in steps] == [0, 1, 2, 3] and {s["lr"] for s in steps} == {0.5}
    if way == "accelerator":
        losses, norms = watched
        means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
        assert [s["loss"] for s in steps] == pytest.approx(means, rel=1e-6)
        assert [s["grad_norm"] for s in steps] == pytest.approx(norms, rel=1e-6)
    table = run.table(columns=["step", "num_tensors"], module="blocks.1.down", tensor="input", actual=True)
    assert set(table["num_tensors"].to_pylist()) == {2}
    assert "not recorded" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["lightning_trainer.py", "accelerate_loop.py"])
def test_the_examples(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_example(name, "--steps", "3", folder=tmp_path, monkeypatch=monkeypatch)
    assert run is not None and sum(m["fp8"] for m in run.modules) == 3 and run.sampled_steps == [0]
    steps = run.sql("SELECT loss, lr, grad_norm FROM steps ORDER BY step").to_pylist()
    assert len(steps) == 3 and all(value is not None for step in steps for value in step.values())

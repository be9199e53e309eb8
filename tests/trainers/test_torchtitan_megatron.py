"""torchtitan, Megatron-LM, Megatron-Bridge and DeepSpeed: stand-ins with their classes, functions and order of calls."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fp8debug
from fp8debug.errors import AttachError
from tests.adapters.linears import ScaledLinear
from tests.recording.models import batch, net

STEPS = 4


def titan(graphs: bool = False, older: bool = False) -> Any:
    """Return a torchtitan Trainer: ``train`` counts from 1, ``train_step`` takes two microbatches and clips.

    Args:
        graphs: it replays CUDA graphs.
        older: it divides the loss by the tokens of its own rank.
    """
    module = ModuleType("torchtitan.trainer")
    utils = SimpleNamespace(clip_grad_norm_=lambda parameters, norm: torch.nn.utils.clip_grad_norm_(parameters, norm))
    module.dist_utils = utils  # type: ignore[attr-defined]
    sys.modules["torchtitan.trainer"] = module

    class Trainer:
        def __init__(self) -> None:
            self.config = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=not graphs))
            self.parallel_dims = SimpleNamespace(dp_replicate=2, dp_shard=2, cp=1, tp=8)
            self.model_parts = [net()]
            self.optimizers = [torch.optim.SGD(self.model_parts[0].parameters(), lr=0.5)]
            self.step = 0
            self.losses: list[float] = []
            self.norms: list[float] = []

        def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: int = 2 * 96 * 4) -> Any:
            # by the tokens of two microbatches on four ranks
            loss = functional.cross_entropy(self.model_parts[0](input_dict), labels, reduction="sum") / global_valid_tokens
            loss.backward()
            return loss

        def train_step(self, data: Iterator[Any]) -> None:
            self.optimizers[0].zero_grad()
            total = 0.0
            for _ in range(2):
                x, classes = next(data)
                total += self.forward_backward_step(input_dict=x, labels=classes).item()
            norm = utils.clip_grad_norm_(self.model_parts[0].parameters(), 0.1)
            self.optimizers[0].step()
            self.losses.append(total)
            self.norms.append(float(norm))
            if self.step == 4:
                raise RuntimeError("Loss is not finite")

        def train(self) -> None:
            data = (batch(number) for number in range(100))
            while self.step < 5:
                self.step += 1
                self.train_step(data)

    class Older(Trainer):
        def forward_backward_step(self, input_dict: Any, labels: Any) -> Any:  # type: ignore[override]  # its interface was another
            loss = functional.cross_entropy(self.model_parts[0](input_dict), labels) / 2
            loss.backward()
            return loss

    Older.__name__ = "Trainer"
    Trainer.__module__ = Older.__module__ = "torchtitan.trainer"
    return Older() if older else Trainer()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    sys.modules.pop("torchtitan.trainer", None)


@pytest.mark.parametrize(("older", "factor"), [(False, 4), (True, 1)])
def test_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool, factor: int) -> None:
    alone, trainer = titan(older=older), titan(older=older)
    with pytest.raises(RuntimeError):
        alone.train()
    watch = fp8debug.watch(trainer, tmp_path / "run", every=2)
    with pytest.raises(RuntimeError, match="not finite"):  # how torchtitan ends at a NaN
        trainer.train()
    assert trainer.losses == alone.losses
    run = fp8debug.Run(tmp_path / "run")
    steps = run.sql("SELECT step, loss, grad_norm, lr FROM steps ORDER BY step").to_pylist()
    assert [s["step"] for s in steps][:3] == [0, 1, 2]
    assert [s["loss"] for s in steps][:3] == pytest.approx([factor * loss for loss in trainer.losses[:3]], rel=1e-6)
    assert [s["grad_norm"] for s in steps][:3] == pytest.approx(trainer.norms[:3], rel=1e-6) and steps[0]["lr"] == 0.5
    assert run.sql("SELECT DISTINCT step FROM sites ORDER BY step").column("step").to_pylist() == [0, 2]
    assert "ended by RuntimeError" in str(run.sql("SELECT message FROM events").to_pylist())
    watch.close()
    assert "train_step" not in vars(trainer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AttachError, match=r"set training\.disable_cuda_graphs"):
        fp8debug.watch(titan(graphs=True), tmp_path / "graphs")


@pytest.mark.parametrize(
    ("dims", "what"),
    [
        (None, "parallel_dims.dp_replicate is None"),
        (SimpleNamespace(dp_replicate=2, dp_shard=-1, cp=1), "parallel_dims.dp_shard is -1"),
        (SimpleNamespace(dp_replicate=2, dp_shard=2), "parallel_dims.cp is None"),
    ],
)
def test_a_number_of_ranks_that_torchtitan_does_not_tell_is_said_once(
    tmp_path: Path, dims: Any, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = titan()
    trainer.parallel_dims = dims
    with fp8debug.watch(trainer, tmp_path / "run", every=2), pytest.raises(RuntimeError, match="not finite"):
        trainer.train()
    text = f"all ranks, and how many these are is not known ({what})"
    run = fp8debug.Run(tmp_path / "run")
    assert capsys.readouterr().err.count(text) == 1 == str(run.sql("SELECT message FROM events").to_pylist()).count(text)
    losses = run.sql("SELECT loss FROM steps ORDER BY step").column("loss").to_pylist()
    assert losses[:3] == pytest.approx(trainer.losses[:3], rel=1e-6)


def megatron(**arguments: Any) -> tuple[Any, Callable[[], list[float]]]:
    """Return Megatron's module and what trains with it, by its global names as Megatron does."""
    module: Any = ModuleType("megatron.training.training")
    parsed = SimpleNamespace(iteration=0, cuda_graph_impl="none", **arguments) if "cuda_graph_impl" not in arguments else None
    module.get_args = lambda: parsed or SimpleNamespace(iteration=0, **arguments)

    class Float16Module(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x)

    def setup_model_and_optimizer(provider: Any, kind: Any) -> Any:
        model = Float16Module(net())
        return [model], torch.optim.SGD(model.parameters(), lr=0.5), None

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any) -> Any:
        optimizer.zero_grad()
        x, classes = next(data)
        loss = functional.cross_entropy(model[0](x), classes)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.1))
        optimizer.step()
        return {"lm loss": torch.stack([loss.detach() * 96, torch.tensor(96.0)])}, 0, False, False, 0, norm, None

    module.setup_model_and_optimizer, module.train_step = setup_model_and_optimizer, train_step

    def pretrain() -> list[float]:
        data = (batch(number) for number in range(100))
        model, optimizer, scheduler = module.setup_model_and_optimizer(None, None)
        found = [module.train_step(None, data, model, optimizer, scheduler, None) for _ in range(STEPS)]
        return [float(step[0]["lm loss"][0] / 96) for step in found] + [step[5] for step in found]

    return module, pretrain


def test_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = megatron()[1]()
    module, pretrain = megatron()
    with fp8debug.watch(module, tmp_path / "run", every=2):
        assert pretrain() == alone
    run = fp8debug.Run(tmp_path / "run")
    steps = run.sql("SELECT loss, grad_norm, lr FROM steps ORDER BY step").to_pylist()
    assert [s["loss"] for s in steps] + [s["grad_norm"] for s in steps] == pytest.approx(alone, rel=1e-6)
    assert {s["lr"] for s in steps} == {0.5}
    assert "blocks.0.up" in {m["fqn"] for m in run.modules}  # not under the wrapper's name
    module, pretrain = megatron(cuda_graph_impl="local")
    with fp8debug.watch(module, tmp_path / "graphs"):
        assert pretrain() == alone
    assert (
        "not recorded: Megatron replays CUDA graphs, inside which nothing is seen: set --cuda-graph-impl none"
        in capsys.readouterr().err
    )


def test_what_megatron_splits_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank is the second of its tensor-parallel group, whose first is rank 2."""
    given = {"model_parallel_is_initialized": True, "get_tensor_model_parallel_src_rank": 2}
    for name in ("data", "pipeline_model", "tensor_model"):
        given |= {f"get_{name}_parallel_world_size": 2, f"get_{name}_parallel_rank": 1}
    state: Any = SimpleNamespace(**{name: lambda value=value: value for name, value in given.items()})
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    def marked(split: int | None, **marks: Any) -> nn.Module:
        linear = ScaledLinear(64, 64, bias=False).bfloat16()
        for name, value in {"tensor_model_parallel": split is not None, "partition_dim": split, **marks}.items():
            setattr(linear.weight, name, value)
        return linear

    parts = {"column": marked(0), "row": marked(1), "whole": marked(None), "router": marked(None, sequence_parallel=True)}
    model = nn.Sequential(OrderedDict(parts))
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        model(torch.randn(32, 64).bfloat16().requires_grad_()).sum().backward()
        watch.step()
    query = "SELECT DISTINCT module, tensor, replicated, shard FROM raw"
    found = {
        (r["module"], r["tensor"]): (r["replicated"], r["shard"]) for r in fp8debug.Run(tmp_path / "run").sql(query).to_pylist()
    }
    own, copies = (False, 0), (True, 2)
    expected = dict.fromkeys(found, own)
    expected.update({("column", "weight"): (True, 1), ("row", "weight"): (True, 1), ("router", "weight"): (True, 0)})
    expected.update({("column", "input"): copies, ("row", "grad_output"): copies})
    expected.update({site: copies for site in found if site[0] == "whole"})
    assert found == {**expected, ("whole", "weight"): (True, 0)}


def test_megatron_bridge(tmp_path: Path) -> None:
    class CallbackManager:
        def __init__(self) -> None:
            self.callbacks: dict[str, list[Any]] = {}

        def register(self, event: str, function: Any) -> None:
            self.callbacks.setdefault(event, []).append(function)

        def fire(self, event: str, **context: Any) -> None:
            for function in self.callbacks.get(event, ()):
                function(SimpleNamespace(**context))

    CallbackManager.__module__ = "megatron.bridge.training.callbacks"
    manager, model = CallbackManager(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = SimpleNamespace(train_state=SimpleNamespace(step=0))
    with fp8debug.watch(manager, tmp_path / "run", every=2):
        manager.fire("on_train_start", model=[model], state=state)
        for step in range(3):
            loss = functional.cross_entropy(model(batch(step)[0]), batch(step)[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.fire(
                "on_train_step_end", loss_dict={"lm loss": loss.detach()}, grad_norm=1.5, optimizer=optimizer, model=[model]
            )
        manager.fire("on_train_end", model=[model])
    steps = fp8debug.Run(tmp_path / "run").sql("SELECT step, loss, grad_norm FROM steps ORDER BY step").to_pylist()
    assert [s["step"] for s in steps] == [0, 1, 2] and steps[2]["loss"] == loss.item() and steps[0]["grad_norm"] == 1.5


class DeepSpeedEngine(nn.Module):
    """DeepSpeed's: two microbatches a step; its optimizer holds copies, of which the model knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.module = net()
        self.copies = [p.detach().clone() for p in self.module.parameters()]
        optimizer: Any = torch.optim.SGD(self.copies, lr=0.5)
        optimizer.cur_scale = 1024
        self.optimizer = optimizer
        self.global_steps = self.micro_steps = 0
        self.norm: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / 2).backward()

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % 2 == 0

    def get_global_grad_norm(self) -> Any:
        return self.norm

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            for copy, p in zip(self.copies, self.module.parameters(), strict=True):
                copy.grad = p.grad
            self.optimizer.step()
            for copy, p in zip(self.copies, self.module.parameters(), strict=True):
                p.data.copy_(copy)
                p.grad = None
            self.global_steps += 1
        self.micro_steps += 1

    def train_some(self) -> list[float]:
        losses = []
        for number in range(6):
            x, classes = batch(number)
            loss = functional.cross_entropy(self(x), classes)
            self.backward(loss)
            self.step()
            losses.append(loss.item())
        return losses


def test_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "__module__", "deepspeed.runtime.engine")
    alone, engine = DeepSpeedEngine().train_some(), DeepSpeedEngine()
    with fp8debug.watch(engine, tmp_path / "run", every=2):
        assert engine.train_some() == alone
    assert "step" not in vars(engine) and "backward" not in vars(engine)
    run = fp8debug.Run(tmp_path / "run")
    steps = run.sql("SELECT step, loss, lr, loss_scale, grad_norm FROM steps ORDER BY step").to_pylist()
    means = [(a + b) / 2 for a, b in zip(alone[::2], alone[1::2], strict=True)]
    assert [s["loss"] for s in steps] == pytest.approx(means) and {(s["lr"], s["loss_scale"]) for s in steps} == {(0.5, 1024)}
    assert steps[-1]["grad_norm"] == pytest.approx(float(engine.norm))
    assert set(run.sql("SELECT DISTINCT step FROM sites")["step"].to_pylist()) == {0, 2}
    assert "blocks.0.up" in {m["fqn"] for m in run.modules}

    class PipelineEngine(DeepSpeedEngine):
        pass

    monkeypatch.setattr(PipelineEngine, "__module__", "deepspeed.runtime.pipe.engine")
    with pytest.raises(AttachError, match=r"PipelineEngine runs its microbatches itself: watch\(engine\.module"):
        fp8debug.watch(PipelineEngine(), tmp_path / "pipeline")

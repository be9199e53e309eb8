"""Passes without gradients are recorded when asked: same outputs, one step a call or a batch, and nothing of a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

import fp8debug
from fp8debug.adapters import native
from fp8debug.errors import AttachError, RunError, UsageError
from fp8debug.run.__main__ import main as run_program
from tests.adapters import linears
from tests.recording.models import batch, net

FPROP = {("fprop", "input"), ("fprop", "weight"), ("fprop", "output")}
WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def torchao_model() -> nn.Module:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False)).bfloat16()
    converted: nn.Module = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    return converted


#: kind -> (model, input of a step, whether it runs in FP8).
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], bool]] = {
    "Fp8Linear": (lambda: net("blockwise"), lambda step: batch(step)[0], True),
    "delayed": (lambda: net("tensorwise_delayed"), lambda step: batch(step)[0], True),
    "_scaled_mm": (linears.model, linears.batch, True),
    "torchao": (torchao_model, linears.batch, True),
    "plain": (lambda: net(None), lambda step: batch(step)[0], False),
}


def sites(run: fp8debug.Run, where: str = "true") -> set[tuple[str, str]]:
    return {(row["gemm"], row["tensor"]) for row in run.sql(f"SELECT gemm, tensor FROM sites WHERE {where}").to_pylist()}


@pytest.mark.parametrize("without", WITHOUT.values(), ids=list(WITHOUT))
@pytest.mark.parametrize("kind", MODELS)
def test_forward_sites_are_recorded_and_outputs_stay_the_same(
    tmp_path: Path, kind: str, without: Callable[[], AbstractContextManager[Any]]
) -> None:
    make, data, is_fp8 = MODELS[kind]
    model = make()
    with without():
        expected = [model(data(step)).clone() for step in range(5)]
    model = make()
    with fp8debug.watch(model, tmp_path / "run", every=2, inference=True):
        with without():
            found = [model(data(step)).clone() for step in range(5)]
            assert not _len_torch_dispatch_stack()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    run = fp8debug.Run(tmp_path / "run")
    assert run.manifest["inference"] is True
    assert sites(run) == FPROP
    assert run.sampled_steps == [0, 2, 4] and run.sql("SELECT count(*) AS n FROM steps").to_pylist()[0]["n"] == 5
    assert bool(sites(run, "actual")) is is_fp8
    modules = [m["fqn"] for m in run.modules if m["observed"]]
    assert len(modules) == sum(isinstance(m, nn.Linear) for m in model.modules())
    findings = fp8debug.triage(run)
    assert not findings, [f.message for f in findings]
    assert findings.classification is not None and findings.classification["class"] == "inference"
    assert findings.classification["cause"] == ("healthy" if is_fp8 else "not-judged")


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_batch_of_several_passes_is_one_step_where_that_is_said_before(tmp_path: Path, is_announced: bool) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True) as watch, torch.no_grad():
        if is_announced:
            watch.step()
        for number in range(3):
            for part in range(2):
                model(batch(2 * number + part)[0])
            watch.step()
    run = fp8debug.Run(tmp_path / "run")
    assert run.sampled_steps == list(range(3 if is_announced else 4))


def test_rules_over_gradients_skip_with_the_reason(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True), torch.no_grad():
        model(batch(0)[0])
    skipped = dict(fp8debug.triage(tmp_path / "run").skipped)
    for code in ("F106", "F107", "F115", "F122", "F123", "F125", "F126", "F127", "F134", "F135", "F143"):
        assert skipped[code] == "the run is of inference: it has no gradients, optimizer steps or loss"
    assert not {"F101", "F104", "F111", "F113", "F119", "F120", "F128"} & skipped.keys()


@pytest.mark.parametrize(("fault", "code"), [("wrong_scale", "F113"), ("e5m2", "F120")])
def test_a_fault_in_inference_is_found(tmp_path: Path, fault: str, code: str) -> None:
    model = net()
    names = {one.name for one in fp8debug.list_faults()}
    fault = fault if fault in names else "wrong_format"
    fp8debug.inject(model, fault, module="blocks.1.up")
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True), torch.no_grad():
        for step in range(4):
            model(batch(step)[0])
    findings = fp8debug.triage(tmp_path / "run")
    assert findings and (findings[0].code, findings[0].module) == (code, "blocks.1.up")


def test_a_watch_of_training_and_one_of_inference_share_a_model(tmp_path: Path) -> None:
    def train(model: nn.Module, after: Callable[[Tensor], None]) -> list[Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        for step in range(4):
            x, classes = batch(step)
            loss = nn.functional.cross_entropy(model(x), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after(loss)
            with torch.no_grad():
                seen += [loss.item(), model(batch(100 + step)[0]).sum().item(), model(batch(200 + step)[0]).sum().item()]
        return [*seen, *(p.detach().clone() for p in model.parameters())]

    expected = train(net(), lambda loss: None)
    alone = net()
    with fp8debug.watch(alone, tmp_path / "alone", every=1) as watch:
        train(alone, lambda loss: watch.step(loss=loss))
    model = net()
    with (
        fp8debug.watch(model, tmp_path / "train", every=1) as watch,
        fp8debug.watch(model, tmp_path / "evaluation", every=1, inference=True),
    ):
        found = train(model, lambda loss: watch.step(loss=loss))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))
    training, evaluation = fp8debug.Run(tmp_path / "train"), fp8debug.Run(tmp_path / "evaluation")
    query = "SELECT * EXCLUDE (rank) FROM raw ORDER BY ALL"
    assert training.sql(query).equals(fp8debug.Run(tmp_path / "alone").sql(query))  # evaluation left no trace in it
    assert training.sampled_steps == [0, 1, 2, 3]
    assert sites(evaluation) == FPROP and evaluation.sampled_steps == list(range(8))
    assert all(getattr(m, "inference_probe", None) is None for m in model.modules())


def test_evaluation_is_no_part_of_a_training_unless_asked(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1), torch.no_grad():
        model(batch(0)[0])
    with pytest.raises(RunError, match="holds no recorded step yet"):
        fp8debug.Run(tmp_path / "run")


def test_passes_with_gradients_are_no_part_of_inference(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True):
        model(batch(0)[0]).sum().backward()
    with pytest.raises(RunError, match="holds no recorded step yet"):
        fp8debug.Run(tmp_path / "run")


def test_step_ends_a_batch_of_calls(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True) as watch, torch.no_grad():
        for number in range(3):
            for call in range(1 if number == 0 else 3):
                model(batch(10 * number + call)[0])
            watch.step()
    run = fp8debug.Run(tmp_path / "run")
    query = "SELECT step, numel FROM sites WHERE module = 'head' AND tensor = 'input' AND actual ORDER BY step"
    assert [(r["step"], r["numel"]) for r in run.sql(query).to_pylist()] == [(0, 96 * 64), (1, 3 * 96 * 64), (2, 3 * 96 * 64)]


def test_a_loop_of_generation_is_a_step_a_token(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = nn.Embedding(32, 64), net(), nn.Linear(16, 32)

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.inner(self.embed(tokens)))
            return out

        @torch.no_grad()
        def generate(self, tokens: Tensor, number: int) -> Tensor:
            for _ in range(number):
                tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
            return tokens

    torch.manual_seed(0)
    model = fp8debug.convert(Model(), "blockwise")
    assert isinstance(model, Model)
    start = torch.arange(6).view(2, 3)
    expected = model.generate(start, 7)
    with fp8debug.watch(model, tmp_path / "run", every=3, inference=True):
        assert torch.equal(model.generate(start, 7), expected)
    run = fp8debug.Run(tmp_path / "run")
    query = "SELECT step, numel FROM sites WHERE module = 'inner.head' AND tensor = 'input' AND actual ORDER BY step"
    assert [(r["step"], r["numel"]) for r in run.sql(query).to_pylist()] == [(s, 2 * (3 + s) * 64) for s in (0, 3, 6)]


def test_a_compiled_model_compiles_no_more_often_and_ends_its_steps(tmp_path: Path) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            return [compiled(batch(step)[0]).clone() for step in range(4)]

    expected = run(net())
    frames = dict(torch._dynamo.utils.counters["frames"])
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True):
        found = run(model)
        assert dict(torch._dynamo.utils.counters["frames"]) == frames
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    recorded = fp8debug.Run(tmp_path / "run")
    assert sites(recorded) == FPROP and recorded.sampled_steps == [0, 1, 2, 3]


def test_the_amax_history_does_not_move(tmp_path: Path) -> None:
    model = net("tensorwise_delayed")
    model(batch(0)[0]).sum().backward()
    before = str(model.state_dict()["head._extra_state"])
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True), torch.no_grad():
        model(batch(1)[0] * 100)
    assert str(model.state_dict()["head._extra_state"]) == before


def test_two_watches_of_inference_do_not_share_a_model(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", inference=True), pytest.raises(AttachError, match="watched already"):
        fp8debug.watch(model, tmp_path / "other", inference=True)
    assert native.Native().matches(model.head)


def test_arguments_of_training_are_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="optimizer and inference=True do not go together: no optimizer steps in inference"):
        fp8debug.watch(model, tmp_path / "run", optimizer=optimizer, inference=True)
    with pytest.raises(UsageError, match="inference must be True or False, got 1"):
        fp8debug.watch(model, tmp_path / "run", inference=1)  # type: ignore[arg-type]  # the mistake


def test_a_script_of_inference_is_recorded_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "infer.py"
    script.write_text(
        "import torch\nfrom tests.recording.models import batch, net\nmodel = net()\n"
        "with torch.inference_mode():\n    for step in range(3):\n        model(batch(step)[0])\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run_program(["--out", "run", "--every", "1", "--inference", str(script)]) == 0
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run) == FPROP and run.sampled_steps == [0, 1, 2]

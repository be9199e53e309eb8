"""Transformers' Trainer: a Llama and a mixture of experts train as without a watch, and the record has what the Trainer knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8debug
from fp8debug.errors import UsageError
from tests.example import run_example

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same sequences every time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def trainer_of(model: Any, folder: Path, **arguments: Any) -> Any:
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        **{
            "max_steps": 5,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **arguments,
        },
    )
    return transformers.Trainer(model=model, args=settings, train_dataset=Tokens(), eval_dataset=Tokens())


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_llama_trains_the_same_and_the_trainer_tells_its_steps(tmp_path: Path) -> None:
    alone = trainer_of(
        fp8debug.convert(llama(), "blockwise", overrides={"lm_head": None}), tmp_path, gradient_accumulation_steps=2
    )
    alone.train()
    model = fp8debug.convert(llama(), "blockwise", overrides={"lm_head": None})
    trainer = trainer_of(model, tmp_path, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2)
    watch = fp8debug.watch(trainer, tmp_path / "run", every=2)
    callbacks = len(trainer.callback_handler.callbacks)
    trainer.train()
    assert torch.equal(weights(alone.model), weights(model))
    with pytest.raises(UsageError, match="the trainer counts the steps"):
        watch.step(loss=1.0)
    watch.close()
    assert len(trainer.callback_handler.callbacks) == callbacks - 1 and "training_step" not in vars(trainer)

    run = fp8debug.Run(tmp_path / "run")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = run.sql("SELECT step, loss, grad_norm, lr, sampled FROM steps ORDER BY step").to_pylist()
    assert [s["step"] for s in steps] == [0, 1, 2, 3, 4] and [s["sampled"] for s in steps] == [True, False, True, False, True]
    for step, entry in zip(steps, logged, strict=True):
        assert step["loss"] == pytest.approx(entry["loss"], abs=1e-3)  # the Trainer rounds to four decimals
        assert step["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-5)
        assert step["lr"] == pytest.approx(entry["learning_rate"], rel=1e-6)
    table = run.table(columns=["step", "num_tensors"], module="model.layers.1.mlp.down_proj", tensor="input", actual=True)
    assert set(table["step"].to_pylist()) == {0, 2, 4}
    assert set(table["num_tensors"].to_pylist()) == {2}  # microbatches; evaluation is not counted
    assert run.rank_manifests[0]["ended"]


def test_a_mixture_of_experts_without_fp8_is_tried(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)
    trainer = trainer_of(transformers.MixtralForCausalLM(config), tmp_path, max_steps=2)
    with fp8debug.watch(trainer, tmp_path / "run", every=1):
        trainer.train()
    run = fp8debug.Run(tmp_path / "run")
    recorded = set(run.sql("SELECT DISTINCT module FROM sites").column("module").to_pylist())
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj", "lm_head"} <= recorded
    reasons = {entry["fqn"]: entry["reason"] for entry in run.modules}
    assert "no FP8 GEMM observed" in reasons["model.layers.0.mlp.experts.gate_up_proj"]  # named, not silent
    assert not run.sql("SELECT 1 AS one FROM sites WHERE actual").num_rows


def test_a_checkpoint_goes_on_in_the_same_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = trainer_of(llama(), tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    with fp8debug.watch(first, tmp_path / "run", every=1):
        first.train()
    second = trainer_of(llama(), tmp_path, max_steps=4)
    with fp8debug.watch(second, tmp_path / "run", every=1):
        second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT step FROM steps ORDER BY step").column("step").to_pylist() == [0, 1, 2, 3]
    assert set(run.sql("SELECT DISTINCT step FROM sites").column("step").to_pylist()) == {0, 1, 2, 3}
    assert "not recorded" not in capfd.readouterr().err
    third = trainer_of(llama(), tmp_path, max_steps=1)
    with fp8debug.watch(third, tmp_path / "run", every=1):
        third.train()  # from step 0, into a folder that holds a run
    assert "not recorded" in capfd.readouterr().err
    assert fp8debug.Run(tmp_path / "run").steps_range == (0, 3)


def test_an_exception_ends_the_record_and_comes_through(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), tmp_path)

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]  # a class of a library without types
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyError("mine")

    trainer.add_callback(Stop())
    with pytest.raises(KeyError, match="mine"), fp8debug.watch(trainer, tmp_path / "run", every=1):
        trainer.train()
    run = fp8debug.Run(tmp_path / "run")
    assert run.steps_range == (0, 1)
    messages = run.sql("SELECT message FROM events WHERE kind = 'note'").column("message").to_pylist()
    assert messages == ["ended by KeyError: 'mine'"]


def test_a_trainer_that_never_trains_and_a_model_that_cannot_be_watched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fp8debug.watch(trainer_of(llama(), tmp_path), tmp_path / "never").close()
    assert "nothing recorded" in capfd.readouterr().err and not (tmp_path / "never").exists()
    trainer = trainer_of(llama(), tmp_path, max_steps=1)
    with fp8debug.watch(trainer, tmp_path / "none", include=("nope*",)):
        trainer.train()  # goes on
    assert "not recorded: none of" in capfd.readouterr().err
    with pytest.raises(UsageError, match="unknown recipe"):
        fp8debug.watch(trainer, tmp_path / "other", plain_recipe="blokwise")


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_example("transformers_trainer.py", "--steps", "3", folder=tmp_path, monkeypatch=monkeypatch)
    assert run is not None and sum(m["fp8"] for m in run.modules) == 14 and run.sampled_steps == [0]
    steps = run.sql("SELECT loss, lr, grad_norm FROM steps ORDER BY step").to_pylist()
    assert len(steps) == 3 and all(value is not None for step in steps for value in step.values())

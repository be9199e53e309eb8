"""A run resumed with other FP8 settings says so at watch(), in an event and in F144; the same settings say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.recipes import Recipe
from tests.recording.models import Net, net, train

OTHER = fp8debug.get_recipe("blockwise_pow2").replace(amax_eps=1e-6)


def record(path: Path, recipe: str | Recipe, start: int, *, model: nn.Module | None = None, **options: object) -> None:
    """Train four steps; one that is given no model goes on with the weights of the part before, all with its moments."""
    weights, moments = path.parent / "weights.pt", path.parent / "moments.pt"
    if model is None:
        model = net(recipe)  # type: ignore[arg-type]  # a recipe is as good as its name
        if start and weights.exists():
            model.load_state_dict(torch.load(weights))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if start and moments.exists():
        optimizer.load_state_dict(torch.load(moments))
    with fp8debug.watch(model, path, every=2, resume_from=start or None, what_if=(), **options) as watch:  # type: ignore[arg-type]
        train(model, 4, optimizer=optimizer, after=lambda _, loss: watch.step(loss=loss))
    torch.save(model.state_dict(), weights)
    torch.save(optimizer.state_dict(), moments)


def differing(path: Path) -> list[str]:
    return [f.message for f in fp8debug.triage(path) if f.code == "F144"]


def test_other_settings_are_printed_an_event_and_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run", "blockwise", 0)
    capsys.readouterr()
    record(tmp_path / "run", OTHER, 4)
    text = (
        "resumed at step 4 with other settings than the earlier part of the run: scale_rounding: none -> pow2_ceil (7 modules,"
        " first blocks.0.gate); amax_eps: 0.0 -> 1e-06 (7 modules, first blocks.0.gate)"
    )
    assert capsys.readouterr().err.count(text) == 1
    run = fp8debug.Run(tmp_path / "run")
    assert text in [row["message"] for row in run.sql("SELECT message FROM events WHERE kind = 'resume'").to_pylist()]
    (finding,) = fp8debug.triage(run)
    assert (finding.code, finding.severity, finding.steps, finding.message) == ("F144", "warning", (4, 7), text)


def test_the_same_settings_say_nothing_and_an_earlier_change_stays_on_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "run", "blockwise", 0)
    record(tmp_path / "run", "blockwise", 4)
    assert list(fp8debug.triage(tmp_path / "run")) == []
    assert "F144" not in dict(fp8debug.triage(tmp_path / "run").skipped)
    record(tmp_path / "run", OTHER, 8)
    capsys.readouterr()
    record(tmp_path / "run", OTHER, 12)
    assert "other settings" not in capsys.readouterr().err
    assert [message.partition(" with")[0] for message in differing(tmp_path / "run")] == ["resumed at step 8"]
    record(tmp_path / "run", "blockwise", 8)
    assert differing(tmp_path / "run")[0].count("pow2_ceil -> none") == 1


def test_modules_that_leave_fp8_on_request_are_information(tmp_path: Path) -> None:
    record(tmp_path / "run", "blockwise", 0)
    record(tmp_path / "run", "", 4, model=net("blockwise", {"head": None}))
    (finding,) = (f for f in fp8debug.triage(tmp_path / "run") if f.code == "F144")
    assert (finding.severity, "precision: FP8 -> high precision (head)" in finding.message) == ("info", True)


def test_a_conversion_that_was_forgotten_is_a_warning(tmp_path: Path) -> None:
    record(tmp_path / "run", "blockwise", 0)
    record(tmp_path / "run", "", 4, model=Net())
    (message,) = differing(tmp_path / "run")
    assert "precision: FP8 -> high precision (7 modules, first blocks.0.gate)" in message


def test_other_dtypes_of_weights_and_variables_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "run", "blockwise", 0)
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    with fp8debug.watch(net("blockwise").to(torch.bfloat16), tmp_path / "run", resume_from=4):
        pass
    (message,) = differing(tmp_path / "run")
    assert "weights: float32 -> bfloat16 (7 modules" in message
    assert "environment.NVTE_FP8_DPA_BWD: unset -> 0" in message


def test_folders_of_one_run_are_compared(tmp_path: Path) -> None:
    record(tmp_path / "first", "blockwise", 0)
    record(tmp_path / "second", OTHER, 4)
    (finding,) = (f for f in fp8debug.triage([tmp_path / "first", tmp_path / "second"]) if f.code == "F144")
    assert "amax_eps: 0.0 -> 1e-06" in finding.message
    assert "F144" in dict(fp8debug.triage(tmp_path / "second").skipped)


@pytest.mark.parametrize("scale_fmt", ["ue8m0", None])
def test_what_a_checkpoint_declares_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scale_fmt: str | None
) -> None:
    declared = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {"quantization_config": {**declared, "scale_fmt": scale_fmt}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    record(tmp_path / "run", "blockwise", 0, checkpoint=tmp_path)
    text = "than the checkpoint: scale_rounding: pow2_ceil -> none (fprop weight; 7 modules, first blocks.0.gate)"
    assert (text in capsys.readouterr().err) is (scale_fmt is not None)
    assert len(differing(tmp_path / "run")) == (scale_fmt is not None)


def test_a_manifest_in_the_checkpoint_is_compared(tmp_path: Path) -> None:
    record(tmp_path / "first", "blockwise", 0)
    record(tmp_path / "second", OTHER, 4, checkpoint=tmp_path / "first")
    (message,) = differing(tmp_path / "second")
    assert "amax_eps: 0.0 -> 1e-06" in message


def test_a_checkpoint_without_settings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="states no FP8 settings"):
        record(tmp_path / "run", "blockwise", 0, checkpoint=tmp_path)
    record(tmp_path / "run2", "blockwise", 0)


def test_moments_that_were_not_loaded_are_a_finding(tmp_path: Path) -> None:
    record(tmp_path / "run", "blockwise", 0)
    (tmp_path / "moments.pt").unlink()
    record(tmp_path / "run", "blockwise", 4)
    (finding,) = fp8debug.triage(tmp_path / "run")
    assert (finding.code, finding.name, finding.severity, finding.steps) == ("F150", "moments-begin-anew", "warning", (4, 4))
    assert "in 7 of 7 weights" in finding.message
    (tmp_path / "again").mkdir()
    record(tmp_path / "again" / "run", "blockwise", 0)
    record(tmp_path / "again" / "run", "blockwise", 4)
    assert [f.message for f in fp8debug.triage(tmp_path / "again" / "run")] == []


def test_weights_that_were_not_loaded_are_a_finding_and_loaded_ones_are_none(tmp_path: Path) -> None:
    model = net("blockwise")
    record(tmp_path / "run", "blockwise", 0, model=model)
    record(tmp_path / "run", "blockwise", 4, model=model)
    assert [f.message for f in fp8debug.triage(tmp_path / "run")] == []
    untrained = net("blockwise").state_dict()
    loaded = net("blockwise")
    loaded.load_state_dict(
        {name: untrained[name] if name.startswith("blocks.0") else p for name, p in model.state_dict().items()}
    )
    record(tmp_path / "run", "blockwise", 8, model=loaded)
    (finding,) = fp8debug.triage(tmp_path / "run")
    assert (finding.code, finding.name, finding.severity, finding.steps) == ("F150", "older-weights", "error", (8, 8))
    assert {finding.module, *finding.also} == {m["fqn"] for m in fp8debug.Run(tmp_path / "run").modules if "blocks.0" in m["fqn"]}
    assert "is that of step 0, and not that of step 6" in finding.message

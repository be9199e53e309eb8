"""``fp8debug run`` hands the options of ``watch`` on, refuses wrong ones before the script starts, and keeps arms alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fp8debug
from fp8debug.run.__main__ import main

PLAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(16, 32)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

OWN = """
import torch
from torch import nn
import fp8debug

torch.manual_seed(0)
model = fp8debug.convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), "blockwise")
fp8debug.inject(model, "zero_tile", module="2")
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with fp8debug.watch(model, "own", every=1, guard=fp8debug.Guard(after=1, budget=1.0)) as watch:
    for _ in range(3):
        loss = model(torch.ones(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        watch.step(loss=loss)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PLAIN)
    return tmp_path / "train.py"


def test_the_options_of_watch_reach_it(script: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    words = [
        "--dump",
        "0:fprop:input@2",
        "--exclude",
        "2",
        "--what-if",
        "mxfp8",
        "--plain-recipe",
        "rowwise",
        "--shadow-rows",
        "8",
        "--budget",
        "1GB",
        "--total-steps",
        "4",
        "--ranks",
        "0,1",
    ]
    assert main(["--out", out, "--every", "2", *words, str(script)]) == 0
    run = fp8debug.Run(out)
    assert [path.name for path in Path(out).rglob("*.safetensors")] == ["0.fprop.input.safetensors"]
    assert (run.manifest["plain_recipe"], run.manifest["what_if"], run.manifest["exclude"]) == ("rowwise", ["mxfp8"], ["2"])
    assert run.manifest["shadow_rows"] == 8 and run.manifest["ranks"] == [0, 1]
    assert (run.manifest["planned"]["budget"], run.manifest["planned"]["steps"]) == (10**9, 4)
    assert main(["--out", out, "--resume-from", "4", str(script)]) == 0
    run = fp8debug.Run(out)
    assert run.steps_range == (0, 7)


def test_the_settings_of_a_checkpoint_are_compared(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = 'fp8debug.convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), "RECIPE")'
    plain = "nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))"
    text = "import fp8debug\n" + PLAIN.replace(plain, model)
    script.write_text(text.replace("RECIPE", "blockwise"))
    assert main(["--out", str(tmp_path / "first"), str(script)]) == 0
    script.write_text(text.replace("RECIPE", "blockwise_pow2"))
    capsys.readouterr()
    assert main(["--out", str(tmp_path / "second"), "--checkpoint", str(tmp_path / "first"), str(script)]) == 0
    assert "the checkpoint: scale_rounding: none -> pow2_ceil (2 modules, first 0)" in capsys.readouterr().err
    (finding,) = fp8debug.triage(tmp_path / "second")
    assert finding.code == "F144"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dump", "a:b"], "unknown gemm of dump 'a:b' 'b'"),
        (["--what-if", "mxfp9"], "unknown recipe 'mxfp9': did you mean 'mxfp8' or 'mxfp4' or 'mxfp6_e3m2'?"),
        (["--shadow-rows", "0"], "--shadow-rows must be at least 1, got 0"),
        (["--budget", "much"], "a size is a number of bytes or a text such as '50GB', got 'much'"),
        (["--total-steps", "0"], "--total-steps must be at least 1, got 0"),
        (["--ranks", "some"], "ranks must be 'all' or a list of global ranks, got 'some'"),
        (["--ranks", "1,2"], "ranks must hold rank 0, which writes the manifest of the run, got [1, 2]"),
        (["--checkpoint", "."], "checkpoint . states no FP8 settings: neither a run's manifest.json nor quantization_config"),
        (["--guard", "0"], "a guard needs after >= 1"),
        (["--resume-from", "-1"], "--resume-from is the number of the first step, 0 or more, got -1"),
        (
            ["--arm", "nix"],
            "--arm is one of bf16, fp8, fp8_tensors or a JSON file of an arm, got 'nix': No such file or directory",
        ),
        (["--arm", "fp8", "--dump", "a", "--include", "b"], "--dump, --include and --arm do not go together"),
    ],
)
def test_a_wrong_option_is_refused_before_the_script_starts(
    words: list[str], message: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("raise AssertionError('started')")
    assert main([*words, "--out", "out", str(script)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not Path("out").exists()


def test_a_guard_of_the_script_is_off_in_an_arm(script: Path, tmp_path: Path) -> None:
    script.write_text(OWN)
    arm = tmp_path / "arm.json"
    arm.write_text(json.dumps({"name": "fp8", "compute": "fp8", "fallbacks": [], "recipe": None}))
    (tmp_path / "out").mkdir()
    assert main(["--arm", str(arm), "--every", "1", "--out", "out", str(script)]) == 0
    run = fp8debug.Run("out")
    assert not run.sql("SELECT * FROM events WHERE kind = 'recipe'").to_pylist()
    assert run.sql("SELECT count(*) AS n FROM steps WHERE isnan(loss)").to_pylist() == [{"n": 3}], "nothing cured it"
    assert not Path("own").exists()

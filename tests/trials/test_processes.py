"""Experiments as processes: killed, terminated, timed out, failing; and one real script from end to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8debug.errors import UsageError
from fp8debug.run.arms import Arm
from fp8debug.store.write.writer import RunWriter
from fp8debug.trials import Script
from fp8debug.trials.script import with_seed
from tests.trials.quick_launcher import MODULES

ROOT = Path(__file__).parents[2]
LAUNCHER = f"{sys.executable} {ROOT / 'tests' / 'trials' / 'quick_launcher.py'}"

#: A user's script that knows nothing of FP8: two microbatches a step, no watch, far more steps than the window.
PLAIN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print(sys.argv[1:], flush=True)
for step in range(10**6):
    for _ in range(2):
        x = torch.randn(64, 64)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fp8debug_cli.main", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def of(path: Path) -> list[int]:
    """Return the ids of the running processes whose command line names a path."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(path).encode() in (process / "cmdline").read_bytes() and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script and a run that hints at nothing."""
    (tmp_path / "train.py").write_text("raise SystemExit('the quick launcher does not start it')")
    writer = RunWriter(tmp_path / "run", manifest={"modules": [{"fqn": name, "fp8": True} for name in MODULES]})
    for step in range(12):
        writer.steps({"step": step, "sampled": False, "loss": 2.0})
    writer.close()
    return tmp_path


def bisect(folder: Path, *args: str) -> subprocess.Popen[str]:
    words = ("--launcher", LAUNCHER, "--yes", "--repeats", "1", "-o", "list.json", "--script", str(folder / "train.py"))
    return start(folder, "bisect", "run", *words, "layers.2.dgrad", *args)


def test_a_killed_bisect_goes_on_and_leaves_no_process(folder: Path) -> None:
    process = bisect(folder, "0.1")
    state = folder / "run" / "bisect" / "trials.json"
    wait_for(lambda: state.exists() and len(json.loads(state.read_text())["trials"]) >= 3)
    process.kill()
    _, _, before = finish(process)
    wait_for(lambda: not of(folder / "train.py"))
    done = len(json.loads(state.read_text())["trials"])
    code, out, err = finish(bisect(folder, "0.1"))
    found = json.loads((folder / "run" / "bisect.json").read_text())
    assert code == 0, err
    assert found["units"] == [{"module": "layers.2", "gemm": "dgrad"}] and found["complete"]
    assert before.count(", repeat 1") in (done, done + 1)  # the one that was under way
    assert err.count(", repeat 1") == found["runs"] - done, "a training that was done was done again"
    assert "4 modules in FP8: about 8 trainings" in err and "64 at most" in err and "Wrote list.json" in err
    assert "layers.2  dgrad" in out and "1-minimal" in out and "share of the gap closed 1" in out
    assert json.loads((folder / "list.json").read_text())["fallbacks"][0]["gemms"] == ["dgrad"]
    code, _, err = finish(bisect(folder, "0.2"))
    assert code == 2 and err.splitlines()[-1].startswith(
        "error: run/bisect holds trainings of another experiment: arguments differ"
    )


def test_sigterm_ends_an_experiment_and_its_training(folder: Path) -> None:
    process = bisect(folder, "100")
    wait_for(lambda: (folder / "run" / "bisect" / "bf16-0" / "arm.json").exists())
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, out) == (130, "") and err.split("\n")[-4:-3] == ["what was trained is kept; the same command goes on"]
    wait_for(lambda: not of(folder / "train.py"))


def test_bisect_asks_before_it_searches(folder: Path) -> None:
    code, _, err = finish(start(folder, "bisect", "run", "--script", str(folder / "train.py")))
    assert (code, err.splitlines()[-1]) == (2, "error: bisect asks before it starts, and stdin is no terminal; say --yes")


def script(folder: Path, shell: str, **options: Any) -> Script:
    """Return a script whose launcher is a line of shell."""
    (folder / "train.py").write_text("")
    return Script(path=folder / "train.py", steps=3, launcher=("sh", "-c", shell), **options)


def test_a_training_whose_time_is_up_is_ended_with_all_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    shell = f"sleep 1000 & echo $! > {tmp_path}/worker; echo last words >&2; sleep 1000"
    ending = script(tmp_path, shell, timeout_s=0.5).train(Arm(name="fp8"), 0, tmp_path)
    assert ending.timed_out and ending.returncode and ending.stderr == "last words" and time.monotonic() - began < 30
    worker = Path(f"/proc/{(tmp_path / 'worker').read_text().strip()}/stat")
    wait_for(lambda: not worker.exists() or worker.read_text().split()[2] == "Z")


def test_the_last_lines_of_stderr_are_kept_without_progress_bars(tmp_path: Path) -> None:
    ending = script(tmp_path, r"printf '10%%\r20%%\rdone\nError: mine\n' >&2; exit 3").train(Arm(name="fp8"), 0, tmp_path)
    assert ending[0] == 3 and ending.stderr == "done\nError: mine"


def test_a_launcher_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match="cannot start no-such-launcher: "):
        Script(path=tmp_path / "train.py", steps=3, launcher=("no-such-launcher",)).train(Arm(name="fp8"), 0, tmp_path)


@pytest.mark.parametrize(
    ("args", "seeded"),
    [
        (["--lr", "1"], ["--lr", "1", "--seed", "2"]),
        (["--seed", "40", "--lr", "1"], ["--seed", "42", "--lr", "1"]),
        (["--seed=40"], ["--seed=42"]),
    ],
)
def test_a_seed_argument_is_raised_or_added(args: list[str], seeded: list[str]) -> None:
    assert with_seed(args, "--seed", 2) == seeded


@pytest.mark.parametrize("args", [["--seed"], ["--seed", "x"], ["--seed="]])
def test_a_seed_that_is_no_number(args: list[str]) -> None:
    with pytest.raises(UsageError, match="--seed is to be varied, but its value"):
        with_seed(args, "--seed", 2)


def test_a_plain_script_is_verified_from_end_to_end(tmp_path: Path) -> None:
    """Recorded in BF16 by ``fp8debug run``, then trained in the FP8 that it was tried under; its words reach it unchanged."""
    (tmp_path / "train.py").write_text(PLAIN)
    code, _, err = finish(start(tmp_path, "run", "--arm", "bf16", "--steps", "9", "--every", "4", "--out", "run", "train.py"))
    assert code == 0, err
    own = ("--arms", "fp8", "--repeats", "1", "--format", "json", "--steps", "6", "--inference", "4")
    code, out, err = finish(start(tmp_path, "verify", "run", *own, "--script", "train.py", "--steps", "--lr"))
    found = json.loads(out)
    assert code in (0, 1) and found["verdict"] in ("nothing_to_close", "no_candidates"), err
    assert [len(arm["losses"][0]) for arm in found["arms"]] == [6, 6] and found["gap"]["value"] is not None
    bf16, fp8 = (arm["losses"][0] for arm in found["arms"])
    assert bf16 != fp8 and bf16 == pytest.approx(fp8, rel=0.05)
    arm = json.loads((tmp_path / "run" / "verify" / "fp8-0" / "arm.json").read_text())
    assert arm["recipe"] == "blockwise" and arm["applied"] == {"fp8": 2, "linears": 2}
    ledger = json.loads((tmp_path / "run" / "verify" / "trials.json").read_text())["trials"]
    trials = {trial["arm"]: trial for trial in ledger.values()}
    for name, weights in (("fp8_inference", "bf16"), ("bf16_inference", "fp8")):
        assert trials[name]["losses"] == trials[weights]["losses"], "weights that were trained alike"
        assert len(trials[name]["held_losses"]) == len(trials[weights]["held_losses"]) == 4
        assert trials[name]["held_losses"] != trials[weights]["held_losses"]
        assert trials[name]["held_losses"] == pytest.approx(trials[weights]["held_losses"], rel=0.05)
    assert [(entry["weights"], entry["inference"]) for entry in found["inference"]] == [("BF16", "FP8"), ("FP8", "BF16")]
    assert (tmp_path / "run" / "verify" / "fp8-0" / "stdout.txt").read_text() == "['--steps', '--lr']\n"
    assert json.loads((tmp_path / "run" / "verify.json").read_text()) == found


def test_a_script_that_trains_nothing_is_named(folder: Path) -> None:
    (folder / "train.py").write_text("print('hello')")
    code, out, err = finish(start(folder, "verify", "run", "--arms", "fp8", "--repeats", "2", "--script", "train.py"))
    assert code == 1 and "failed" in out and "nothing can be compared" in out
    assert "warning: arm fp8: the script trained no model with a Linear: no forward ran with gradients on" in err


@pytest.mark.long
def test_a_script_of_another_stack_is_verified_from_end_to_end(tmp_path: Path) -> None:
    """Its one FP8 Linear is of its own making, over ``_scaled_mm``: BF16 and the candidates are trained, not fp8_tensors."""
    model = "nn.Sequential(nn.Linear(64, 128), nn.GELU(), ScaledLinear(128, 64).bfloat16())"
    script = PLAIN.replace("nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))", model)
    script = script.replace("from torch import nn", "from torch import nn\nfrom tests.adapters.linears import ScaledLinear")
    script = script.replace(".square()", ".float().square()")
    (tmp_path / "train.py").write_text(script.replace("nn.Linear(64, 128)", "nn.Linear(64, 128).bfloat16()").replace(
        "torch.randn(64, 64)", "torch.randn(64, 64).bfloat16()"))  # fmt: skip
    module = {"fqn": "2", "kind": "ScaledLinear", "fp8": True, "in_features": 128, "out_features": 64}
    writer = RunWriter(tmp_path / "run", manifest={"modules": [module]})
    writer.steps({"step": 0, "sampled": False, "loss": 1.0})
    writer.close()
    entry = {"module": "2", "gemms": ["fprop", "dgrad", "wgrad"], "tensor": "*", "cast": None}
    (tmp_path / "list.json").write_text(json.dumps({"fallbacks": [entry]}))
    own = ("--arms", "fp8_tensors,candidates", "--fallbacks", "list.json", "--repeats", "1", "--format", "json", "--steps", "6")
    code, out, err = finish(start(tmp_path, "verify", "run", *own, "--script", "train.py"))
    assert code in (0, 1) and "warning: no arm fp8_tensors: 2 is of another stack" in err, err
    losses = {arm["name"]: arm["losses"][0] for arm in json.loads(out)["arms"]}
    assert list(losses) == ["bf16", "fp8", "candidates"]
    assert losses["candidates"] == losses["bf16"] != losses["fp8"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.05)


def test_a_missing_script(folder: Path) -> None:
    code, out, err = finish(start(folder, "verify", "run", "--script", "nope.py"))
    assert (code, out, err) == (2, "", "error: no script nope.py; expected the path of a Python file\n")

"""Scripts that nobody changed: under torchrun with DDP and FSDP2, with a gradient scaler, and by the environment alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8debug
from fp8debug.startup import parse
from tests.shortened import shortened

ROOT = Path(__file__).parents[2]
SCRIPT = """
import gc
import sys
import torch
import torch.distributed as dist
from torch import nn


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    if sys.argv[1] == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(4):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    open(f"{sys.argv[2]}-{dist.get_rank()}", "w").write(repr(losses))


dist.init_process_group("gloo")
main()
gc.collect()  # what still holds the group when it is destroyed leaves gloo threads that may abort the exit, pytorch#190489
dist.destroy_process_group()
"""


def start(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    alone = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **alone, **variables}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, env=environment, timeout=240, check=False
    )


@pytest.mark.parametrize("way", shortened(["fsdp2", "ddp"], 2))
def test_a_script_under_torchrun(way: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
    )
    recorded = start(tmp_path, *torchrun, "-m", "fp8debug.run", "--out", "out", "--every", "2", "train.py", way, "watched")
    assert recorded.returncode == 0, recorded.stderr
    alone = start(tmp_path, *torchrun, "train.py", way, "alone")
    assert alone.returncode == 0, alone.stderr
    assert recorded.stderr.count("fp8debug: recording") == 1 and "not recorded" not in recorded.stderr
    run = fp8debug.Run(tmp_path / "out")
    assert run.ranks == [0, 1] and run.problems == []
    for rank in (0, 1):
        text = (tmp_path / f"alone-{rank}").read_text()
        assert (tmp_path / f"watched-{rank}").read_text() == text
        rows = run.sql("SELECT step, loss, lr FROM raw_steps WHERE rank = ? ORDER BY step", [rank]).to_pylist()
        assert [row["step"] for row in rows] == [0, 1, 2, 3] and repr([row["loss"] for row in rows]) == text
    sites = run.sql("SELECT DISTINCT step, module FROM sites ORDER BY step, module").to_pylist()
    assert [(row["step"], row["module"]) for row in sites] == [(0, "0"), (0, "2"), (2, "0"), (2, "2")]
    (weight,) = run.sql(
        "SELECT numel FROM sites WHERE module = '2' AND gemm = 'fprop' AND tensor = 'weight' AND step = 0 LIMIT 1"
    ).to_pylist()
    assert weight["numel"] == 128 * 64  # of a shard that was put together


SCALED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
for step in range(6):
    x = torch.randn(32, 64)
    loss = (model(x) - x).square().mean()
    if step == 2:
        loss = loss * 1e38
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_the_loss_scale_and_the_step_that_the_scaler_skipped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCALED)
    done = start(tmp_path, "-m", "fp8debug.run", "--out", "out", "--every", "2", "train.py")
    assert done.returncode == 0, done.stderr
    rows = fp8debug.Run(tmp_path / "out").sql("SELECT step, loss_scale, loss FROM steps ORDER BY step").to_pylist()
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["loss_scale"] for row in rows] == [2.0**10, 2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    assert rows[2]["loss"] > 1e37 > rows[1]["loss"]


def test_a_process_of_somebody_else_is_recorded_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCALED + "import sys\nprint(sys.argv, 'theirs' in sys.modules)\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys\nsys.modules['theirs'] = sys\n")
    hook = start(tmp_path, "-m", "fp8debug.startup").stdout.strip()
    path = os.pathsep.join([hook, str(tmp_path / "own"), str(ROOT)])
    done = start(tmp_path, "train.py", "a", PYTHONPATH=path, FP8DEBUG="runs/ray,every=3")
    assert done.returncode == 0 and done.stdout == "['train.py', 'a'] True\n", done.stderr
    run = fp8debug.Run(tmp_path / "runs" / "ray")
    assert run.sql("SELECT DISTINCT step FROM sites ORDER BY step").column("step").to_pylist() == [0, 3]
    # without the variable nothing of ours is loaded
    quiet = start(tmp_path, "-c", "import sys; print([m for m in sys.modules if m.split('.')[0] == 'fp8debug'])", PYTHONPATH=path)
    assert quiet.stdout == "[]\n", quiet.stderr
    wrong = start(tmp_path, "-c", "print('on')", PYTHONPATH=path, FP8DEBUG="runs/ray,evry=3")
    assert wrong.stdout == "on\n" and wrong.stderr.startswith(
        "fp8debug: not recorded: FP8DEBUG=runs/ray,evry=3: 'evry=3' is none of every="
    )


def test_what_the_variable_may_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("a/b") == (tmp_path / "a" / "b", {"every": 10})
    assert parse("a,every=2,compiled=eager")[1] == {"every": 2, "compiled": "eager"}
    for text in (",every=2", "a,every=two", "a,every"):
        with pytest.raises(ValueError):
            parse(text)

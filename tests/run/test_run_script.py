"""``fp8debug run`` and ``python -m fp8debug.run``: an unmodified script is recorded and behaves as before."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fp8debug
from fp8debug.rules.reading.losses import has_other_loss
from tests.shortened import shortened

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(100, 64)
for _ in range(7):
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sys.argv[1:], repr(loss.item()), __name__)
"""

OWN_WATCH = """
import fp8debug, torch
model = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "blockwise")
with fp8debug.watch(model, "own") as watch:
    model(torch.randn(4, 64)).sum().backward()
    watch.step(loss=1.0)
"""


def start(folder: Path, *words: str, by: str = "fp8debug.run") -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", *by.split(), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.fixture
def printed_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what a script prints that runs without us, in this process, which has imported torch already."""

    def run(script: Path, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [script.name, *words])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("by", shortened(["fp8debug.run", "fp8debug_cli.main run"], 2))
def test_an_unmodified_script_is_recorded(by: str, printed_by: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = printed_by(tmp_path / "train.py", "a", "--every")
    done = start(tmp_path, "--out", "out", "--every", "3", "train.py", "a", "--every", by=by)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone  # the same loss to the last digit
    assert "recording Sequential into out" in done.stderr
    run = fp8debug.Run(tmp_path / "out")
    steps = run.sql("SELECT step, sampled, loss, lr FROM steps ORDER BY step").to_pylist()
    assert [s["step"] for s in steps] == list(range(7))
    assert [s["step"] for s in steps if s["sampled"]] == [0, 3, 6]
    assert repr(steps[-1]["loss"]) in alone and {s["lr"] for s in steps} == {0.1}
    assert run.table(columns=["sqnr_db"], module="2", tensor="input").num_rows


CLOSURE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
x = torch.randn(32, 8)

def closure():
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    return loss

for _ in range(4):
    print(optimizer.step(closure).item())
"""


def test_a_step_of_an_optimizer_that_calls_the_model_itself_is_one_step(printed_by: Callable[..., str], tmp_path: Path) -> None:
    """Its weights change between the passes of the step, the first of which is the first that the tool sees of the program."""
    (tmp_path / "train.py").write_text(CLOSURE)
    done = start(tmp_path, "--out", "out", "--every", "2", "train.py")
    assert done.returncode == 0 and done.stdout == printed_by(tmp_path / "train.py")
    steps = fp8debug.Run(tmp_path / "out").sql("SELECT step, sampled, lr FROM steps ORDER BY step").to_pylist()
    assert [(s["step"], s["sampled"], s["lr"]) for s in steps] == [(n, n % 2 == 0, 0.5) for n in range(4)]


def test_a_script_that_watches_itself_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_WATCH)
    done = start(tmp_path, "--out", "out", "train.py")
    assert done.returncode == 0 and done.stderr.startswith("fp8debug: will record ") and done.stderr.count("\n") == 1
    assert (tmp_path / "own" / "manifest.json").exists() and not (tmp_path / "out").exists()


def test_a_script_that_fails_keeps_its_traceback_and_its_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("    optimizer.zero_grad()", "    if _ == 3: raise KeyError('mine')"))
    done = start(tmp_path, "--out", "out", "train.py")
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr
    assert fp8debug.Run(tmp_path / "out").steps_range == (0, 3)


def test_a_script_without_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    done = start(tmp_path, "train.py")
    assert done.stdout == "hello\n" and done.stderr == "fp8debug: nothing recorded: the program did not import torch\n"


def test_a_script_that_trains_in_processes_of_its_own_says_how_to_record_them(tmp_path: Path) -> None:
    run = "import sys, subprocess, torch\nprint(subprocess.check_output([sys.executable, '-c', 'print(1)']).decode().strip())"
    (tmp_path / "train.py").write_text(run)
    done = start(tmp_path, "--out", "out", "train.py")
    assert done.returncode == 0 and done.stdout == "1\n" and not (tmp_path / "out").exists()
    assert "in this process; to record processes that a script starts, start them with torchrun" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope.py",), "error: no script nope.py; expected the path of a Python file"),
        (("--every", "0", "train.py"), "error: --every must be at least 1, got 0"),
        (("--steps", "5", "train.py"), "error: --steps needs --arm; `--arm fp8` is the script as it is"),
        (
            ("--out", "taken", "train.py"),
            "error: taken already holds a run; choose another --out or delete it, or go on with --resume-from STEP",
        ),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never')")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "manifest.json").write_text("{}")
    done = start(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message + "\n")


MICROBATCHES = SCRIPT.replace(
    "    loss = (model(x) - x).square().mean()\n    loss.backward()\n",
    "    for part in x.split(50):\n        loss = (model(part) - part).square().mean()\n        BACKWARD\n",
)


@pytest.mark.parametrize("backward", shortened(["scaler.scale(loss).backward()", "loss.backward()"], 2))
def test_the_loss_of_a_step_is_the_mean_of_its_microbatches(backward: str, tmp_path: Path) -> None:
    text = MICROBATCHES.replace("BACKWARD", f"{backward}; print(repr(loss.item()))")
    (tmp_path / "train.py").write_text("import torch\nscaler = torch.amp.GradScaler('cpu', init_scale=4.0)\n" + text)
    done = start(tmp_path, "--out", "out", "--every", "100", "train.py")
    assert done.returncode == 0, done.stderr
    printed = [float(line) for line in done.stdout.splitlines()[:-1]]
    losses = [row["loss"] for row in fp8debug.Run(tmp_path / "out").sql("SELECT loss FROM steps ORDER BY step").to_pylist()]
    assert losses == pytest.approx([(a + b) / 2 for a, b in zip(printed[::2], printed[1::2], strict=True)], rel=1e-6)
    assert len(losses) == 7


@pytest.mark.parametrize(
    "backward",
    shortened(["(loss / 2).backward()", "loss /= 2; loss.backward(); loss = loss * 2", "scaler.scale(loss / 2).backward()"], 2),
)
def test_losses_divided_by_the_number_of_microbatches_are_recorded_undivided(backward: str, tmp_path: Path) -> None:
    text = MICROBATCHES.replace("BACKWARD", f"{backward}; print(repr(loss.item()))")
    (tmp_path / "train.py").write_text("import torch\nscaler = torch.amp.GradScaler('cpu', init_scale=4.0)\n" + text)
    done = start(tmp_path, "--out", "out", "--every", "100", "train.py")
    assert done.returncode == 0, done.stderr
    printed = [float(line) for line in done.stdout.splitlines()[:-1]]
    losses = fp8debug.Run(tmp_path / "out").sql("SELECT loss FROM steps ORDER BY step")["loss"].to_pylist()
    assert losses == pytest.approx([(a + b) / 2 for a, b in zip(printed[::2], printed[1::2], strict=True)], rel=1e-6)


def test_a_loss_divided_by_another_number_is_recorded_as_it_is(tmp_path: Path) -> None:
    text = MICROBATCHES.replace("BACKWARD", "loss = loss / 50; loss.backward(); print(repr(loss.item()))")
    (tmp_path / "train.py").write_text(text)
    done = start(tmp_path, "--out", "out", "--every", "100", "train.py")
    printed = [float(line) for line in done.stdout.splitlines()[:-1]]
    losses = fp8debug.Run(tmp_path / "out").sql("SELECT loss FROM steps ORDER BY step")["loss"].to_pylist()
    assert losses == pytest.approx([(a + b) / 2 for a, b in zip(printed[::2], printed[1::2], strict=True)], rel=1e-6)


OWN = """
import fp8debug, torch
from pathlib import Path
torch.manual_seed(3)
model = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)), "blockwise")
fp8debug.inject(model, "zero_tile", module="0", step=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
Path("started").write_text(str(float(model[0].weight.detach().sum())))
with fp8debug.watch(model, "own", every=1) as watch:
    for step in range(1000):
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss=loss)
Path("ended").touch()
"""


def test_an_arm_changes_a_script_that_converts_and_watches_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN)
    weights = []
    for number, words in enumerate((("fp8",), ("bf16",), ("bf16", "--seed-offset", "1"))):
        done = start(tmp_path, "--out", f"out{number}", "--steps", "5", "--arm", *words, "train.py")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        run = fp8debug.Run(tmp_path / f"out{number}")
        losses = [row["loss"] for row in run.sql("SELECT loss FROM steps ORDER BY step").to_pylist()]
        is_finite = [loss == loss for loss in losses]
        assert is_finite == [True] * 5 if "bf16" in words else is_finite == [True, True, False, False, False]
        assert not run.sql("SELECT 1 AS one FROM raw").num_rows, "an arm records its losses alone"
        weights.append((tmp_path / "started").read_text())
    assert not (tmp_path / "own").exists() and not (tmp_path / "ended").exists()
    assert weights[0] == weights[1] != weights[2]


def test_an_arm_that_cannot_be_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = start(tmp_path, "--out", "out", "--arm", "fp8", "train.py")
    assert done.returncode == 2 and done.stdout == ""
    reason = "the script's model has no module in FP8; give --recipe NAME to convert every nn.Linear of it"
    assert done.stderr == f"fp8debug: this arm cannot be trained: {reason}\n"


def test_help_is_plain_text() -> None:
    done = start(Path.cwd(), "--help", by="fp8debug_cli.main run")
    assert done.returncode == 0 and "``" not in done.stdout and ":func:" not in done.stdout
    assert done.stdout.startswith("usage: fp8debug run [--out DIR] [--every N]")


SEVERAL = """
import os, torch
from torch import nn
os.makedirs("elsewhere"); os.chdir("elsewhere")
class Teacher(nn.Sequential): pass
class Actor(nn.Sequential): pass
class Critic(nn.Sequential): pass
torch.manual_seed(0)
teacher, actor, critic = Teacher(nn.Linear(32, 32)), Actor(nn.Linear(32, 32)), Critic(nn.Linear(32, 32))
optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
x = torch.randn(16, 32)
for step in range(4):
    with torch.no_grad():
        y = teacher(x)
    loss = (actor(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for part in x.split(8):  # accumulation: one step
        value = critic(part).square().mean() + 100
        value.backward()
    with torch.no_grad():
        for p in critic.parameters():
            p -= 0.1 * p.grad
            p.grad = None
"""


def test_all_models_of_a_script_are_recorded_or_named_with_their_own_steps_and_losses(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEVERAL)
    done = start(tmp_path, "--out", "out", "--every", "2", "train.py")
    assert done.returncode == 0, done.stderr
    for text in (
        "recording Actor into",
        "recording Critic into",
        "not recorded: Teacher, whose forward pass runs without gradients",
    ):
        assert text in done.stderr
    assert not list((tmp_path / "elsewhere").rglob("manifest.json")), "--out is where the user stood"
    for folder, least in (("out", 0.0), ("out/Critic", 100.0)):
        run = fp8debug.Run(tmp_path / folder)
        steps = run.sql("SELECT step, loss FROM steps ORDER BY step").to_pylist()
        assert [s["step"] for s in steps] == [0, 1, 2, 3]
        assert all(least < s["loss"] < least + 50 for s in steps)


TWO_LOSSES = """
import torch
from torch import nn
class Actor(nn.Sequential): pass
class Critic(nn.Sequential): pass
torch.manual_seed(0)
actor, critic = Actor(nn.Linear(32, 16)), Critic(nn.Linear(32, {columns}))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (actor, critic)]
for step in range(4):
    x = torch.randn(16, 32)
    value = critic(x)
    advantage = (x[:, :1] - value).detach().mean(1, keepdim=True)
    of_actor, of_critic = -(actor(x) * advantage).mean(), (value - x[:, :1]).square().mean()
    {backward}
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("columns", "backward", "is_told"),
    shortened(
        [
            (4, "(of_actor + of_critic).backward()", True),  # a sum, of terms that reach one model each
            (1, "of_actor.backward(); of_critic.backward()", True),
            (1, "(of_actor * of_critic).backward()", False),  # one loss
            (16, "of_actor.backward(); of_critic.backward()", False),  # copies of one model
        ],
        2,
    ),
)
def test_models_whose_optimizers_step_together_and_whose_losses_are_apart(
    columns: int, backward: str, is_told: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TWO_LOSSES.format(columns=columns, backward=backward))
    done = start(tmp_path, "--out", "out", "train.py")
    assert done.returncode == 0, done.stderr
    assert [has_other_loss(fp8debug.Run(tmp_path / folder)) for folder in ("out", "out/Actor")] == [is_told] * 2


COMPILED = """
import os
assert "torch" not in __import__("sys").modules, "the program sets its environment before it imports torch"
import torch
from torch import nn
from torch._dynamo.utils import counters
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
    def forward(self, x):
        return x + self.a(x).relu()
torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
HOW
x = torch.randn(8, 16)
for step in range(4):
    if step % 2 == 0:
        with torch.no_grad():
            print("eval", repr(model(x).square().mean().item()))
        seen = dict(counters["stats"]) if step else {}
    (model(x) - x).square().mean().backward()
    if not step:
        print(len(torch.nn.modules.module._global_forward_pre_hooks))
        print(dict(counters["stats"]), sum(counters["graph_break"].values()))
    optimizer.step()
    optimizer.zero_grad()
names = [name for name in sorted(vars()) if not name.startswith("__compiled_fn_")]  # Dynamo's, with a random part
print(names, __builtins__.__class__, __spec__, __file__, __loader__.__class__)
"""


@pytest.mark.parametrize(
    "how",
    shortened(
        [
            "model = torch.compile(model, backend='eager')",
            "for block in model[:2]: block.compile(backend='eager', fullgraph=True)",
        ],
        2,
    ),
)
def test_nothing_of_ours_is_in_what_dynamo_traces_while_training_is_waited_for(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COMPILED.replace("HOW", how))
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    done = start(tmp_path, "--out", "out", "--every", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone.stdout and "global hooks" not in done.stderr
    assert "recording Sequential into out" in done.stderr
    steps = fp8debug.Run(tmp_path / "out").sql("SELECT step FROM steps ORDER BY step").to_pylist()
    assert [s["step"] for s in steps] == [0, 1, 2, 3]


@pytest.mark.parametrize("words", [("train.py", "a"), ("-m", "package.inner", "a"), ("folder", "-m", "a")])
def test_a_program_runs_as_by_python(words: tuple[str, ...], tmp_path: Path) -> None:
    text = "import sys\nfrom HELPER import name\nclass A: pass\n"
    text += "print(__name__, __package__, sys.argv, sys.path[:2], sorted(vars()), name)\n"
    text += "import pickle; print(pickle.loads(pickle.dumps(A())).__class__ is A)\nraise KeyError('mine')\n"
    for folder, module, helper in ((".", "train", "helper"), ("package", "inner", ".helper"), ("folder", "__main__", "helper")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{module}.py").write_text(text.replace("HELPER", helper))
        (tmp_path / folder / "helper.py").write_text("name = __name__")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, *words]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    done = start(tmp_path, *words)
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    shown = done.stderr.replace("fp8debug: nothing recorded: the program did not import torch\n", "")
    assert shown == alone.stderr and "KeyError: 'mine'" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-m", "nowhere.at_all"), "error: no module nowhere.at_all; expected a name that `python -m` runs from this folder"),
        (("taken",), "error: taken has no __main__.py; give the path of a Python file in it"),
        (
            ("--recipe", "mxfp8", "train.py"),
            "error: --recipe needs --arm; to try a recipe on a model without FP8, give --plain-recipe",
        ),
    ],
)
def test_a_program_that_is_not_there_is_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "train.py").write_text("print('never')")
    done = start(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message + "\n")


FORWARD_FORWARD = """
import torch
from torch import nn
class Layer(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
    def forward(self, x):
        return torch.relu(torch.mm(x, self.weight.T) + self.bias)
    def fit(self, x):
        for _ in range(4):
            loss = (self.forward(x).square().mean() - 1).square()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            print(repr(loss.item()))
        return self.forward(x).detach()
torch.manual_seed(0)
x = torch.randn(16, 32)
for layer in [Layer(32, 32), Layer(32, 32), Layer(32, 32)]:
    x = layer.fit(x)
"""


def test_models_that_are_never_called_and_train_in_turn_go_on_and_are_named(
    printed_by: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FORWARD_FORWARD)
    alone = printed_by(tmp_path / "train.py")
    done = start(tmp_path, "--out", "out", "--every", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone and len(alone.split()) == 12
    losses = [float(line) for line in alone.split()]
    for i, folder in enumerate(("out", "out/Layer-2", "out/Layer-3")):
        assert f"recording Layer into {folder}\n" in done.stderr
        recorded = fp8debug.Run(tmp_path / folder).sql("SELECT loss FROM steps ORDER BY step")["loss"].to_pylist()
        # the first is found at its first backward pass, the others by their optimizer at the end of their first step
        assert recorded == losses[4 * i + (i > 0) : 4 * i + 4]
    assert "never called in a sampled step, no statistics: Layer; a direct call of forward() is not seen" in done.stderr
    arm = start(tmp_path, "--out", "arm", "--arm", "fp8", "--recipe", "blockwise", "train.py")
    assert arm.returncode == 2 and "call model(x), not model.forward(x)" in arm.stderr and "torch.compile" not in arm.stderr

"""Programs around compiled regions that are repeated in eager code: checkpoints, shared modules, shapes that vary, LoRA, modes.

In each the bits, graphs and recompilations are those of a run without a watch, and the rows those of eager code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug.adapters.interception import linear_ops
from tests.adapters.linears import CHECKPOINTS, ScaledLinear
from tests.conditions.compiled import COMPILES
from tests.conditions.test_compiled_linear import assert_same_rows, rows
from tests.shortened import shortened

BLOCKS, WIDTH, STEPS, TURNS, EVERY = 3, 32, 4, 8, 2
pytestmark = [*COMPILES, pytest.mark.filterwarnings("ignore::UserWarning")]


class Lora(nn.Module):
    """A Linear that does not learn, and two small ones beside it that do."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = ScaledLinear(fan_in, fan_out).requires_grad_(False)
        self.a, self.b = nn.Linear(fan_in, 16, bias=False), nn.Linear(16, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x) + self.b(self.a(x)))


def without_bias(fan_in: int, fan_out: int) -> nn.Linear:
    return nn.Linear(fan_in, fan_out, bias=False)


class Block(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = make(WIDTH, 2 * WIDTH), make(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.down(torch.relu(self.up(x))))


class Program(NamedTuple):
    """A way to train.

    Attributes:
        make: class of the Linears.
        checkpointed: kind of activation checkpointing of each block; empty for none.
        whole: compile the model, not each block.
        calls: calls of each block in a forward pass.
        returns: "output", "loss" or "both": what the model returns.
        passes: forward passes before the backward pass of all of them.
        is_shared: one block stands for all.
        batches: rows of x by step; ``mark_dynamic`` where they vary.
        options: of ``compile``.
        recipe: of ``convert``; empty where the Linears stay as they are.
        device: of the model.
    """

    make: Callable[[int, int], nn.Module] = ScaledLinear
    checkpointed: str = ""
    whole: bool = False
    calls: int = 1
    returns: str = "output"
    passes: int = 1
    is_shared: bool = False
    batches: tuple[int, ...] = (16,)
    options: dict[str, Any] = {"backend": "aot_eager"}  # noqa: RUF012 - a NamedTuple's default
    recipe: str = ""
    device: str = "cpu"


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        blocks = [Block(program.make) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(blocks[:1] * BLOCKS if program.is_shared else blocks)
        self.program = program

    def forward(self, x: Tensor) -> Any:
        how = CHECKPOINTS.get(self.program.checkpointed)
        for block in self.blocks:
            for _ in range(self.program.calls):
                x = cast(Tensor, block(x) if how is None else checkpoint(block, x, **how))
        loss = x.float().square().mean()
        return {"output": x, "loss": loss, "both": (x, loss)}[self.program.returns]


def train(
    program: Program, path: Path | None, *, compiles: bool = True, recorded: Literal["as_is", "repeat"] = "repeat"
) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    """Return losses, gradients of the last step, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model: nn.Module = Net(program).bfloat16().to(program.device)
    if program.recipe:
        model = fp8debug.convert(model, program.recipe)
    for region in ([model] if program.whole else cast(Net, model).blocks) if compiles else []:
        region.compile(fullgraph=True, **program.options)
    watch = fp8debug.watch(model, path, every=EVERY, what_if=(), compiled=recorded) if path else None
    losses = []
    for step in range(STEPS):
        losses_now = []
        for part in range(program.passes):
            given = torch.Generator().manual_seed(step + 10 * part)
            x = torch.randn(program.batches[step % len(program.batches)], WIDTH, generator=given).bfloat16().to(program.device)
            if len(program.batches) > 1:
                torch._dynamo.mark_dynamic(x, 0)
            output = model(x.requires_grad_())
            if program.returns == "output":
                output = output.float().square().mean()
            losses_now.append(output[-1] if program.returns == "both" else output)
        loss = cast(Tensor, sum(losses_now[1:], start=losses_now[0]))  # the only one is itself the root of the backward pass
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)
                    p.grad = None
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    return losses, gradients, {name: dict(counters[name]) for name in ("stats", "graph_break", "recompiles", "recompile_limit")}


PROGRAMS = {
    "selective checkpoints of blocks": Program(checkpointed="selective"),
    "selective checkpoints in a graph": Program(checkpointed="selective", whole=True),
    "full checkpoints of blocks": Program(checkpointed="plain"),
    "full checkpoints in a graph": Program(checkpointed="plain", whole=True),
    "reentrant checkpoints": Program(checkpointed="reentrant"),
    "a block for all": Program(is_shared=True),
    "a block for all, in a graph": Program(is_shared=True, whole=True),
    "two calls a step": Program(calls=2),
    "two calls a step, in a graph": Program(calls=2, whole=True),
    "two calls a step under checkpoints": Program(calls=2, checkpointed="plain"),
    "two forward passes before the backward pass": Program(passes=2),
    "batches that vary": Program(batches=(16, 24, 32, 8)),
    "a model that returns its loss": Program(whole=True, returns="loss"),
    "a model that returns its output and loss": Program(whole=True, returns="both"),
    "LoRA": Program(make=Lora),
    "code of inductor for batches that vary": Program(batches=(16, 32), options={"backend": "inductor"}),
    "reduce-overhead": Program(options={"mode": "reduce-overhead"}),
    "max-autotune": Program(options={"mode": "max-autotune"}),
}


CUDA_GRAPHS = {
    f"{mode} of {what}": Program(make=make, recipe=recipe, options={"mode": mode}, device="cuda")
    for what, make, recipe in (("any Linear", ScaledLinear, ""), ("Fp8Linear", without_bias, "blockwise"))
    for mode in ("reduce-overhead", "max-autotune")
}


def compare(program: Program, tmp_path: Path) -> None:
    alone = train(program, None)
    watched = train(program, tmp_path / "run")
    assert watched[0] == alone[0] and watched[2] == alone[2] and not alone[2]["recompile_limit"]
    assert all(torch.equal(a, b) for a, b in zip(watched[1], alone[1], strict=True))
    # Eager checkpoints have let go of the input when wgrad runs: a repetition of what lies in one records more than they do.
    kept = program.checkpointed if program.whole or program.checkpointed == "reentrant" else ""
    eager = train(program._replace(checkpointed=kept), tmp_path / "eager", compiles=False)
    if "backend" in program.options and program.options["backend"] == "aot_eager":
        assert eager[0] == alone[0]
        assert_same_rows(tmp_path / "run", tmp_path / "eager")
    keys = [
        {(r["step"], r["module"], r["gemm"], r["tensor"], r["reference"]) for r in rows(tmp_path / n)} for n in ("run", "eager")
    ]
    assert keys[0] == keys[1] and {key[0] for key in keys[0]} == {0, 2}


def train_two(program: Program, path: Path | None, attached_at: int) -> tuple[list[float], list[Tensor], list[dict[str, Any]]]:
    """Train two models in turn, the second on what the first gives and by both losses; watch the first from a step on."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    models = [Net(program).bfloat16().to(program.device) for _ in range(2)]
    if program.recipe:
        models = [cast(Net, fp8debug.convert(model, program.recipe)) for model in models]
    for block in (block for model in models for block in model.blocks):
        block.compile(fullgraph=True, **program.options)
    watch: Any = None
    losses = []
    gradients: list[Tensor] = []
    for step in range(TURNS):
        torch.compiler.cudagraph_mark_step_begin()
        if path is not None and step == attached_at:
            watch = fp8debug.watch(models[0], path, every=EVERY, what_if=(), compiled="repeat")
        given = torch.Generator().manual_seed(step)
        x = torch.randn(16, WIDTH, generator=given).bfloat16().to(program.device)
        with torch.no_grad():
            wanted = models[1](x).clone()
        made = models[0](x)
        judged = models[1](made.detach().clone())
        loss = (made.float() - wanted.float()).square().mean() + judged.float().square().mean()
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in (p for model in models for p in model.parameters() if p.grad is not None):
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.01)
                p.grad = None
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    return losses, gradients, rows(path) if path else []


def compare_two(program: Program, attached_at: int, tmp_path: Path) -> None:
    alone = train_two(program, None, attached_at)
    watched = train_two(program, tmp_path / "run", attached_at)
    assert watched[0] == alone[0] and all(torch.equal(a, b) for a, b in zip(watched[1], alone[1], strict=True))
    steps = {row["step"] for row in watched[2]}
    assert steps == {step for step in range(TURNS - attached_at) if step % EVERY == 0}
    assert {row["module"] for row in watched[2]} == {f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("up", "down")}
    assert {row["gemm"] for row in watched[2]} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("attached_at", [0, 3])
def test_two_compiled_models_one_watched(attached_at: int, tmp_path: Path) -> None:
    compare_two(Program(), attached_at, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("attached_at", [0, 1, 4])
@pytest.mark.parametrize("name", [name for name in CUDA_GRAPHS if name.startswith("reduce-overhead")])
def test_two_models_share_cuda_graphs_one_watched_while_they_are_captured(name: str, attached_at: int, tmp_path: Path) -> None:
    compare_two(CUDA_GRAPHS[name], attached_at, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_GRAPHS)
def test_replayed_cuda_graphs_are_recorded(name: str, tmp_path: Path) -> None:
    compare(CUDA_GRAPHS[name], tmp_path)


def test_ops_that_a_cuda_graph_takes_are_left_to_the_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear_ops, "is_of_cuda_graph", lambda: True)
    program = Program(make=without_bias, recipe="blockwise")
    compare(program, tmp_path)
    capsys.readouterr()
    alone = train(program, None)
    assert train(program, tmp_path / "as_is", recorded="as_is")[0] == alone[0]
    said = (
        "blocks.0.up is not recorded in full at step 0: a CUDA graph replays it,"
        " and no compiled module around it is repeated beside it"
    )
    assert capsys.readouterr().err.count(said) == 1 and not rows(tmp_path / "as_is")


@pytest.mark.parametrize("name", shortened(PROGRAMS, 3))
def test_bits_graphs_and_rows_are_those_without_a_watch_and_of_eager_code(name: str, tmp_path: Path) -> None:
    compare(PROGRAMS[name], tmp_path)

"""Fp8Linear inside one graph of torch.compile: the numbers, graphs and rows of eager code, with a watch and without one."""

from __future__ import annotations

import copy
import math
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8debug
from fp8debug.adapters.interception.linear_ops import LinearOps
from fp8debug.kernels import linear_ops
from tests.conditions.compiled import COMPILES
from tests.shortened import shortened

BLOCKS, WIDTH, STEPS = 3, 32, 4
pytestmark = COMPILES
RECIPES = ["blockwise", "rowwise", "tensorwise_current", "mxfp8", "nvfp4", "tensorwise_delayed"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 48), (WIDTH, 48), (48, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.down(torch.relu(self.gate(x)) * self.up(x)))


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = cast(Tensor, checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x))
        return x


class Trained:
    """Losses, last gradients, and how many graphs were compiled."""

    def __init__(self, losses: list[float], gradients: list[Tensor]) -> None:
        self.losses, self.gradients = losses, gradients
        self.graphs = counters["stats"]["unique_graphs"]

    def equals(self, other: Trained) -> bool:
        same = all(torch.equal(a, b) for a, b in zip(self.gradients, other.gradients, strict=True))
        return same and self.losses == other.losses and self.graphs == other.graphs


def train(
    recipe: str | fp8debug.Recipe,
    path: Path | None = None,
    *,
    backend: str | None = "aot_eager",
    when: str = "before",
    checkpointed: bool = False,
    microbatches: int = 1,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Trained:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = fp8debug.convert(Net(checkpointed).to(device, dtype), recipe)
    watch = None
    if path and when == "before":
        watch = fp8debug.watch(model, path, every=2, what_if=())
    if backend:
        for region in [model] if whole else cast(Net, model).blocks:
            region.compile(backend=backend, fullgraph=True)
    if path and when == "after":
        watch = fp8debug.watch(model, path, every=2, what_if=())
    losses = []
    for step in range(STEPS):
        for part in range(microbatches):
            x = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(step + 10 * part)).to(device, dtype)
            loss = model(x).float().square().mean()
            loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            model(x)
        gradients = [cast(Tensor, p.grad).clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(cast(Tensor, p.grad), alpha=0.05)
                p.grad = None
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    return Trained(losses, gradients)


def rows(path: Path) -> list[dict[str, Any]]:
    table = fp8debug.Run(path).table()
    return cast(
        "list[dict[str, Any]]",
        sorted(table.to_pylist(), key=lambda r: (r["step"], r["module"], r["gemm"], r["tensor"], r["cast_name"], r["reference"])),
    )


def rounding(row: dict[str, Any], name: str) -> float:
    """Return what another order of an FP32 sum of both signs can change it by: terms that cancel leave no relative error."""
    squares = row.get({"sum_x": "sum_x2", "sum_err": "sum_err2", "bias": "sum_err2"}.get(name, "")) or 0.0
    terms = 1e-6 * math.sqrt((row["numel"] or 0) * squares)
    return max(terms / row["numel"] if name == "bias" else terms, 1e-12)


def assert_same_rows(compiled: Path, eager: Path) -> None:
    found, wanted = rows(compiled), rows(eager)
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        for name in one:
            a, b = one[name], other[name]
            if isinstance(a, float) and isinstance(b, float):
                assert a == pytest.approx(b, rel=1e-6, abs=rounding(other, name), nan_ok=True), (name, one["module"], one["gemm"])
            else:
                assert a == b, (name, one["module"], one["gemm"], one["tensor"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_computes_what_eager_code_does(recipe: str) -> None:
    compiled = train(recipe)
    eager = train(recipe, backend=None)
    assert compiled.losses == eager.losses and compiled.graphs == 3  # of the first block, of the others, and of evaluation
    assert all(torch.equal(a, b) for a, b in zip(compiled.gradients, eager.gradients, strict=True))


def test_so_does_code_of_inductor_and_a_watch_changes_no_bit_and_no_graph(tmp_path: Path) -> None:
    alone, eager = train("blockwise", backend="inductor"), train("blockwise", tmp_path / "eager", backend=None)
    assert alone.losses == eager.losses
    assert all(torch.equal(a, b) for a, b in zip(alone.gradients, eager.gradients, strict=True))
    for when in ("before", "after"):
        assert train("blockwise", tmp_path / when, backend="inductor", when=when).equals(alone)
        assert_same_rows(tmp_path / when, tmp_path / "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_so_does_code_of_inductor_on_a_gpu(recipe: str, tmp_path: Path) -> None:
    alone = train(recipe, backend="inductor", device="cuda")
    eager = train(recipe, tmp_path / "eager", backend=None, device="cuda")
    assert alone.losses == eager.losses
    assert all(torch.equal(a, b) for a, b in zip(alone.gradients, eager.gradients, strict=True))
    assert train(recipe, tmp_path / "run", backend="inductor", device="cuda").equals(alone)
    assert_same_rows(tmp_path / "run", tmp_path / "eager")


@pytest.mark.parametrize("options", [{"whole": True}, {"microbatches": 3}], ids=["whole", "microbatches"])
@pytest.mark.parametrize("recipe", shortened(["rowwise", "tensorwise_current", "tensorwise_delayed"], 2))
def test_rows_are_those_of_eager_code(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    alone = train(recipe, **options)
    assert train(recipe, tmp_path / "run", **options).equals(alone)
    eager = train(recipe, tmp_path / "eager", backend=None, microbatches=options.get("microbatches", 1))
    assert alone.losses == eager.losses
    assert_same_rows(tmp_path / "run", tmp_path / "eager")


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed"])
def test_a_recomputed_block_is_recorded_once(recipe: str, tmp_path: Path) -> None:
    alone = train(recipe, checkpointed=True)
    assert train(recipe, tmp_path / "run", checkpointed=True).equals(alone)
    assert train(recipe, tmp_path / "eager", backend=None, checkpointed=True).losses == alone.losses
    assert_same_rows(tmp_path / "run", tmp_path / "eager")


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_backward_passes_may_wait_for_several_forward_passes(frozen: bool, tmp_path: Path) -> None:
    """In the order of a pipeline's micro-batches; a frozen weight saves no operand that tells them apart."""

    def trained(path: Path, backend: str | None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fp8debug.convert(Net(False).requires_grad_(not frozen), "rowwise")
        for block in cast(Net, model).blocks if backend else ():
            block.compile(backend=backend, fullgraph=True)
        with fp8debug.watch(model, path, every=2, what_if=()) as watch:
            for step in range(3):
                inputs = [torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(step + 10 * i)) for i in range(2)]
                losses = [model((x * (1 + 9 * i)).requires_grad_()).square().mean() for i, x in enumerate(inputs)]
                for loss in losses:
                    loss.backward()
                watch.step()

    trained(tmp_path / "run", "aot_eager")
    trained(tmp_path / "eager", None)
    found, expected = rows(tmp_path / "run"), rows(tmp_path / "eager")
    counted = ("step", "module", "gemm", "tensor", "reference", "numel", "num_tensors")
    assert [[r[name] for name in counted] for r in found] == [[r[name] for name in counted] for r in expected]
    known = [r["damage"] is not None for r in expected]
    assert [r["damage"] is not None for r in found] == [k and not frozen for k in known] and any(known)


def test_a_gemm_that_a_recipe_leaves_in_bf16_stays_there(tmp_path: Path) -> None:
    recipe = fp8debug.get_recipe("rowwise").replace(gemm="wgrad", cast=None, name="rowwise_wgrad_bf16")
    alone = train(recipe, dtype=torch.bfloat16)
    eager = train(recipe, tmp_path / "eager", backend=None, dtype=torch.bfloat16)
    assert alone.losses == eager.losses
    assert train(recipe, tmp_path / "run", dtype=torch.bfloat16).equals(alone)
    assert_same_rows(tmp_path / "run", tmp_path / "eager")
    assert not [r for r in rows(tmp_path / "run") if r["gemm"] == "wgrad" and r["reference"] == "operand"]


def test_linears_that_read_one_input_quantize_it_once() -> None:
    block = fp8debug.convert(Block(), "blockwise")
    compiled: Any = torch.compile(block, fullgraph=True)
    x = torch.randn(16, WIDTH, requires_grad=True)
    _, sources = run_and_get_code(lambda: compiled(x).sum().backward())
    quantized = [line for text in sources for line in text.splitlines() if "linear_quantize.default(" in line]
    assert len(quantized) == 2  # for gate and up, and for down


def test_codes_in_a_graph_are_those_of_quantize() -> None:
    cast_ = fp8debug.get_recipe("blockwise").casts[fp8debug.types.Gemm.FPROP, fp8debug.types.TensorRole.INPUT]
    assert cast_ is not None
    x = torch.randn(24, 200).bfloat16()
    plan = fp8debug.get_recipe("blockwise").plan
    data, scale_inv, *_ = torch.compile(torch.ops.fp8debug.linear_quantize, fullgraph=True)(x, plan, True)
    wanted = fp8debug.quantize(x, cast_)
    assert torch.equal(data.view(torch.uint8), wanted.data.view(torch.uint8)) and torch.equal(scale_inv, wanted.scale_inv)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(24, 200), (16, 32), (0, 32)])
def test_ops_keep_what_they_promise_to_a_compiler(recipe: str, shape: tuple[int, int]) -> None:
    plan = fp8debug.get_recipe(recipe).plan
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(40, shape[1], requires_grad=True)
    checks: Any = ("test_faketensor",)  # the check of a schema compares tensors in a way that FP8 has no kernel for
    torch.library.opcheck(torch.ops.fp8debug.linear_quantize, (x.detach(), plan, True), test_utils=("test_schema", *checks))
    made = torch.ops.fp8debug.linear_quantize(x.detach(), plan, True)
    given = (x, weight, *made, plan, True, True)
    torch.library.opcheck(torch.ops.fp8debug.linear, given, test_utils=(*checks, "test_autograd_registration"))
    torch.library.opcheck(torch.ops.fp8debug.linear_fprop, (x.detach(), weight.detach(), *given[2:]), test_utils=checks)
    saved = made[:2] if not made[2].numel() else made[2:]
    backward = (torch.randn(shape[0], 40), weight.detach(), *saved, plan, torch.float32, True, True)
    torch.library.opcheck(torch.ops.fp8debug.linear_backward, backward, test_utils=checks)


def test_a_recipe_that_is_set_later_holds_in_compiled_code() -> None:
    model = fp8debug.convert(Block(), "rowwise")
    model.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(16, WIDTH)
    before = model(x)
    for linear in (model.gate, model.up, model.down):
        cast(fp8debug.linear.Fp8Linear, linear).set_recipe("bf16")
    plain = Block()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x)) and not torch.equal(model(x), before)


def test_passes_without_gradients_are_recorded_where_that_is_wanted(tmp_path: Path) -> None:
    def infer(path: Path | None, backend: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = fp8debug.convert(nn.Sequential(Block(), Block()), "rowwise")
        for block in cast("list[nn.Module]", model) if backend else []:
            block.compile(backend=backend, fullgraph=True)
        watch = fp8debug.watch(model, path, every=1, what_if=(), inference=True) if path else None
        outputs = []
        for step in range(3):
            with torch.no_grad():
                outputs.append(model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))))
        if watch is not None:
            watch.close()
        return outputs

    alone, watched = infer(None, "aot_eager"), infer(tmp_path / "run", "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    infer(tmp_path / "eager", None)
    assert_same_rows(tmp_path / "run", tmp_path / "eager")


@pytest.mark.parametrize("recipe", sorted(set(fp8debug.list_recipes()) - set(RECIPES)))
def test_every_recipe_is_part_of_a_graph(recipe: str) -> None:
    block: Any = fp8debug.convert(Block(), recipe)
    x = torch.randn(16, WIDTH, requires_grad=True)
    wanted = [block(x), *torch.autograd.grad(block(x).sum(), [x, *block.parameters()])]
    block.compile(backend="aot_eager", fullgraph=True)
    found = [block(x), *torch.autograd.grad(block(x).sum(), [x, *block.parameters()])]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.fp8debug.linear_fprop.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Loops(nn.Module):
    """Blocks that are called once or twice, under a kind of activation checkpointing."""

    def __init__(self, calls: int, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.calls, self.options = calls, dict[str, Any]()
        self.how = how
        if how == "selective":
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(self.calls):
                if self.how:
                    x = cast(Tensor, checkpoint(block, x, use_reentrant=self.how == "reentrant", **self.options))
                else:
                    x = block(x)
        return x


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("calls", "how", "whole", "graphs_alive", "backend"),
    shortened(
        [(2, "", True, 1, "aot_eager"), (2, "", False, 1, "inductor"), (1, "", True, 3, "inductor"),
         (1, "full", True, 1, "inductor"), (1, "full", False, 2, "aot_eager"), (1, "selective", True, 1, "inductor"),
         (1, "reentrant", False, 1, "aot_eager")],
        2,
    ),
)  # fmt: skip
def test_an_amax_history_advances_in_a_graph_as_in_eager_code(
    calls: int, how: str, whole: bool, graphs_alive: int, backend: str
) -> None:
    """Called twice, with other calls whose backward pass is to come, and computed again by a checkpoint."""

    def run(backend: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = fp8debug.convert(Loops(calls, how), "tensorwise_delayed")
        for region in ([model] if whole else model.blocks) if backend else []:
            region.compile(backend=backend, fullgraph=True)
        found = []
        for step in range(3):
            x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
            loss = sum(model(x * (part + step + 1)).square().mean() for part in range(graphs_alive))
            found += [loss, *torch.autograd.grad(loss, [x])] if how != "reentrant" else [loss]
            sum(model(x).square().mean() for _ in range(graphs_alive)).backward()
            with torch.no_grad():
                model(x * 9)
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.05)
                    p.grad = None
        histories = {name: states for name, states in model.state_dict().items() if name.endswith("_extra_state")}
        return found, {f"{name} {site}": state for name, states in histories.items() for site, state in states.items()}

    (eager, states), (compiled, found) = run(None), run(backend)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
    assert found.keys() == states.keys() and len(states) == 2 * 3 * 6
    assert [name for name in states if not torch.equal(found[name], states[name])] == []


def test_compiled_and_eager_code_share_an_amax_history(tmp_path: Path) -> None:
    """A checkpoint of either loads into the other; blocks made, copied and loaded later have histories too."""

    def step(model: nn.Module, factor: float) -> Tensor:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return torch.autograd.grad(model(x * factor).square().sum(), [x])[0]

    eager = fp8debug.convert(Block(), "tensorwise_delayed")
    step(eager, 1.0)
    torch.save(eager, tmp_path / "model.pt")
    torch.save(eager.state_dict(), tmp_path / "state.pt")
    copies: list[nn.Module] = [copy.deepcopy(eager), torch.load(tmp_path / "model.pt", weights_only=False)]
    copies.append(fp8debug.convert(Block(), "tensorwise_delayed"))
    for model in copies:
        model.compile(backend="aot_eager", fullgraph=True)
    copies[2].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    wanted = [step(eager, factor) for factor in (3.0, 0.5)]
    for model in copies:
        assert all(torch.equal(step(model, factor), x) for factor, x in zip((3.0, 0.5), wanted, strict=True))
    again = fp8debug.convert(Block(), "tensorwise_delayed")
    again.load_state_dict(copies[0].state_dict())
    assert torch.equal(step(again, 2.0), step(eager, 2.0)) and counters["stats"]["unique_graphs"] == 1


def test_a_history_of_a_recipe_that_comes_back_starts_anew() -> None:
    model: Any = fp8debug.convert(Block(), "tensorwise_delayed")
    model.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(16, WIDTH)
    first = model(x)
    for recipe in ("bf16", "tensorwise_delayed"):
        model(9 * x)
        for linear in (model.gate, model.up, model.down):
            linear.set_recipe(recipe)
    assert torch.equal(model(x), first) and counters["stats"]["unique_graphs"] == 2


def test_what_is_left_outside_of_graphs_is_named(tmp_path: Path) -> None:
    model = fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "tensorwise_delayed")
    fp8debug.inject(model, "wrong_signs", module="0", step=0)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(torch.ones(2, WIDTH))
    assert str(caught.value).splitlines()[0] == (
        "Fp8Linear with an injected fault cannot be part of a graph that torch.compile(fullgraph=True) asks for: it runs outside"
        " of compiled code; compile with fullgraph=False, or leave the modules around it uncompiled"
    )


def test_a_watch_that_ends_leaves_no_recorder(tmp_path: Path) -> None:
    train("rowwise", tmp_path / "run")
    assert linear_ops.OBSERVED.active is None
    linear_ops.OBSERVED.resume()
    assert linear_ops.OBSERVED.active is None


def test_a_step_without_a_sample_quantizes_as_one_without_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[object] = []
    monkeypatch.setattr(linear_ops, "quantize_pair", lambda x, *_: pairs.append(x))
    model = fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "blockwise")
    model.compile(backend="aot_eager", fullgraph=True)
    counts = []
    for every in (None, 10):
        watch = None if every is None else fp8debug.watch(model, tmp_path / "run", every=every, what_if=(), check_finite=False)
        for _ in range(2):  # of a watch, the first is sampled: an input of two casts, and a gradient that is quantized twice
            pairs.clear()
            model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
            counts.append(len(pairs))
            if watch is not None:
                watch.step()
    assert watch is not None
    watch.close()
    assert counts == [2, 2, 1, 2]


def test_a_backward_pass_that_gets_a_copy_of_its_weight_is_said_not_to_be_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    model = fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), "blockwise")
    model.compile(backend="aot_eager", fullgraph=True)
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
                loss = model(torch.ones(4, WIDTH, requires_grad=True)).sum()
            loss.backward()
            watch.step()
        model(torch.ones(4, WIDTH))  # of a forward pass alone nothing is said
        watch.step()
    said = fp8debug.Run(tmp_path / "run").sql("SELECT module, message FROM events WHERE kind = 'skipped'").to_pylist()
    assert sorted(event["module"] for event in said) == ["0", "1"]
    assert all("at step 0: its backward pass got a copy of its weight" in event["message"] for event in said)
    assert capsys.readouterr().err.count("got a copy of its weight") == 1


def test_compiled_code_calls_ops_without_a_gradient() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append({node.target for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    model = fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "blockwise")
    model.compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
    ops = torch.ops.fp8debug
    assert [ops.linear_fprop.default in graphs[0], ops.linear_backward.default in graphs[1]] == [True, True]
    assert not any(ops.linear.default in graph for graph in graphs)


def two_models(trained: nn.Module, other: nn.Module, watch: Any, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        for model in (trained, other):
            cast(Tensor, model(x)).float().square().mean().backward()
        watch.step()


def test_a_model_that_nobody_watches_costs_no_look_at_the_watched_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    watched, other = (fp8debug.convert(Net(False).bfloat16(), "blockwise") for _ in range(2))
    for model in (watched, other):
        for block in cast(nn.ModuleList, model.blocks):
            block.compile(backend="aot_eager", fullgraph=True)
    looks: list[object] = []
    look = LinearOps._find_addresses

    def counted(self: LinearOps) -> None:
        looks.append(None)
        look(self)

    monkeypatch.setattr(LinearOps, "_find_addresses", counted)
    with fp8debug.watch(watched, tmp_path / "run", every=2, what_if=()) as watch:
        two_models(watched, other, watch, 1)
        looks.clear()
        two_models(watched, other, watch, 4)
        assert len(looks) == 4  # once a step
        # Memory that was the other model's: the weight is found there.
        mine, theirs = (cast(Any, model).blocks[0].gate.weight for model in (watched, other))
        mine.data, theirs.data = theirs.data, mine.data
        two_models(watched, other, watch, 2)
    assert {row["step"] for row in rows(tmp_path / "run") if row["module"] == "blocks.0.gate"} == {0, 2, 4, 6}


def test_an_op_of_a_step_without_a_sample_looks_for_no_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "blockwise")
    model.compile(backend="aot_eager", fullgraph=True)
    looks: list[object] = []
    look = LinearOps._of

    def counted(self: LinearOps, weight: Tensor, trains: bool) -> Any:
        looks.append(weight)
        return look(self, weight, trains)

    monkeypatch.setattr(LinearOps, "_of", counted)
    counts = []
    for check_finite in (False, True):
        with fp8debug.watch(model, tmp_path / str(check_finite), every=2, what_if=(), check_finite=check_finite) as watch:
            for _ in range(4):
                looks.clear()
                model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
                counts.append(len(looks))
                watch.step()
    assert counts == [2, 0, 2, 0, 2, 2, 2, 2]
    assert {row["step"] for row in rows(tmp_path / "False")} == {0, 2}


@pytest.mark.parametrize(("check_finite", "expected"), [(False, [8, 1, 1, 8, 1, 1]), (None, [8] * 6)])
def test_ops_after_the_first_are_not_observed_in_a_step_without_anything_to_record(
    check_finite: bool | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = fp8debug.convert(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), "blockwise")
    model.compile(backend="aot_eager", fullgraph=True)
    asked: list[object] = []

    def counted(self: LinearOps, real: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(None)
        return real(self, *args, **kwargs)

    for name in ("begin_forward", "begin_backward"):
        monkeypatch.setattr(LinearOps, name, partialmethod(counted, getattr(LinearOps, name)))
    counts = []
    with fp8debug.watch(model, tmp_path / "run", every=3, what_if=(), check_finite=check_finite) as watch:
        for _ in range(13):
            asked.clear()
            model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
            counts.append(len(asked))
            watch.step()
    assert counts[6:12] == expected
    assert {row["step"] for row in rows(tmp_path / "run")} == {0, 3, 6, 9, 12}


def test_two_watches_of_one_process_sample_at_steps_of_their_own(tmp_path: Path) -> None:
    torch._dynamo.reset()
    models = [fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "blockwise") for _ in range(2)]
    watches = []
    for number, model in enumerate(models):
        model.compile(backend="aot_eager", fullgraph=True)
        run = tmp_path / str(number)
        watches.append(fp8debug.watch(model, run, every=2 + number, what_if=(), check_finite=False))
    for _ in range(7):
        for model, watch in zip(models, watches, strict=True):
            model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
            watch.step()
    for watch in watches:
        watch.close()
    assert {row["step"] for row in rows(tmp_path / "0")} == {0, 2, 4, 6}
    assert {row["step"] for row in rows(tmp_path / "1")} == {0, 3, 6}
    assert {row["gemm"] for row in rows(tmp_path / "1")} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("passes", [1, 2], ids=["before the step", "between two microbatches"])
def test_a_recipe_that_is_set_between_samples_is_told_at_its_step(passes: int, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model: Any = fp8debug.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "blockwise")

    @torch.compile(backend="aot_eager")
    def loss_of(x: Tensor) -> Tensor:
        return cast(Tensor, model(x)).sum()

    with fp8debug.watch(model, tmp_path / "run", every=5, what_if=(), check_finite=False) as watch:
        for step in range(6):
            for number in range(passes):
                if step == 3 and number == passes - 1:
                    model[0].set_recipe("rowwise")
                loss_of(torch.ones(4, WIDTH, requires_grad=True)).backward()
            watch.step()
    told = fp8debug.Run(tmp_path / "run").sql("SELECT step FROM events WHERE kind = 'recipe'").to_pylist()
    assert [event["step"] for event in told] == [3]

"""A watch on compiled models changes no graph, break, recompilation or bit; pickles and copies have no trace of it."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug.adapters.interception.calls import observe_calls
from fp8debug.linear import Fp8Linear
from tests.adapters.linears import ScaledLinear
from tests.conditions.compiled import COMPILES
from tests.shortened import shortened

BLOCKS, WIDTH, STEPS = 3, 32, 4
WHEN = ["before", "after", "running"]

pytestmark = COMPILES


class Block(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Linear]) -> None:
        super().__init__()
        self.up, self.down = make(WIDTH, 2 * WIDTH), make(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks and a head that is never compiled; ``is_checkpointed`` recomputes each block in the backward pass."""

    def __init__(self, make: Callable[[int, int], nn.Linear], blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(make) for _ in range(blocks))
        self.head = make(WIDTH, WIDTH)
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = cast(Tensor, checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x))
        return cast(Tensor, self.head(x))


def net(kind: str, blocks: int = BLOCKS) -> Net:
    torch.manual_seed(0)
    if kind == "scaled":
        return Net(ScaledLinear, blocks).bfloat16()
    model = Net(nn.Linear, blocks).bfloat16()
    if kind.startswith("torchao"):
        float8 = pytest.importorskip("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(kind.split()[1])
        if "emulated" in kind:
            config = float8.Float8LinearConfig(emulate=True)
        model = float8.convert_to_float8_training(model, config=config)
    return fp8debug.convert(model, "tensorwise_current") if kind == "native" else model  # type: ignore[return-value]


def train(
    kind: str,
    path: Path | None,
    when: str,
    *,
    whole: bool = False,
    checkpointed: bool = False,
    varied: bool = False,
    hook: bool = False,
    device: str = "cpu",
    backend: str = "eager",
    recorded: str = "auto",
    blocks: int = BLOCKS,
) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    """Return losses, last gradients and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    model = net(kind, blocks).to(device)
    model.is_checkpointed = checkpointed
    if hook:
        for block in model.blocks:
            cast(Block, block).up.register_forward_hook(doubled)
    watch = None

    def attach() -> None:
        nonlocal watch
        if path is not None:
            watch = fp8debug.watch(model, path, every=2, what_if=(), compiled=cast(Any, recorded))

    if when == "before":
        attach()
    compiled: nn.Module = model
    if whole:
        compiled = cast(nn.Module, torch.compile(model, backend=backend, fullgraph=True))
    else:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    if when == "after":
        attach()
    losses = []
    for step in range(STEPS):
        if when == "running" and step == 2:
            attach()
        rows = 24 if varied and step == 1 else 16
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
        with torch.no_grad():
            losses.append(compiled(x).float().square().mean().item())
        loss = compiled(x).float().square().mean()
        loss.backward()
        gradients = [cast(Tensor, p.grad).clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(cast(Tensor, p.grad), alpha=0.01)
                p.grad = None
        losses.append(loss.item())
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    counted = {name: dict(counters[name]) for name in ("stats", "graph_break", "recompiles", "recompile_limit")}
    return losses, gradients, counted


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def assert_same(watched: tuple[list[float], list[Tensor], Any], alone: tuple[list[float], list[Tensor], Any]) -> None:
    assert watched[0] == alone[0] and watched[2] == alone[2]
    assert all(torch.equal(a, b) for a, b in zip(watched[1], alone[1], strict=True))


KINDS = ["plain", "scaled", "torchao tensorwise", "torchao rowwise", "torchao tensorwise emulated", "native"]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
@pytest.mark.parametrize("kind", shortened(KINDS, {"scaled", "torchao rowwise"}))
def test_compiled_code_is_as_without_a_watch(kind: str, whole: bool, tmp_path: Path) -> None:
    alone = train(kind, None, "never", whole=whole)
    for when in WHEN:
        assert_same(train(kind, tmp_path / when, when, whole=whole), alone)
    assert_same(train(kind, tmp_path / "repeated", "before", whole=whole, recorded="repeat"), alone)


@pytest.mark.parametrize("kind", ["scaled", "torchao tensorwise"])
def test_more_blocks_than_dynamo_recompiles_share_a_graph(kind: str, tmp_path: Path) -> None:
    """A guard on something of ours in each block had ended the job at the ninth."""
    blocks = torch._dynamo.config.recompile_limit + 2
    watched = train(kind, tmp_path / "run", "before", blocks=blocks)
    assert_same(watched, train(kind, None, "never", blocks=blocks))
    assert not watched[2]["recompile_limit"] and watched[2]["stats"]["unique_graphs"] == 3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
@pytest.mark.parametrize("kind", ["plain", "scaled", "torchao tensorwise", "torchao rowwise", "native"])
def test_code_of_inductor_on_a_gpu_is_as_without_a_watch(kind: str, whole: bool, tmp_path: Path) -> None:
    alone = train(kind, None, "never", whole=whole, device="cuda", backend="inductor")
    again = train(kind, None, "never", whole=whole, device="cuda", backend="inductor")
    assert_same(again, alone)
    for when in WHEN:
        assert_same(train(kind, tmp_path / when, when, whole=whole, device="cuda", backend="inductor"), alone)


@pytest.mark.parametrize("change", ["checkpointed", "varied", "hook"])
def test_it_is_so_with_checkpoints_dynamic_shapes_and_hooks_of_the_users(change: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {change: True}
    alone = train("plain", None, "never", **options)
    for when in WHEN:
        assert_same(train("plain", tmp_path / when, when, **options), alone)


def test_eager_modules_are_recorded_and_compiled_ones_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("scaled", tmp_path / "run", "before", recorded="as_is")
    lines = [line for line in capsys.readouterr().err.splitlines() if "torch.compile" in line]
    assert lines == [
        "fp8debug: 6 of 7 modules are not recorded at step 0 (blocks.0.up is the first): not called outside code under"
        " torch.compile, which is not recorded with compiled='as_is'; without it sampled calls are repeated in eager code,"
        " watch(..., compiled='eager') runs sampled steps without torch.compile"
    ]
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT DISTINCT module FROM sites").column("module").to_pylist() == ["head"]
    told = {m["fqn"]: (m["observed"], m["reason"]) for m in run.modules}
    assert told["head"] == (True, None)
    assert told["blocks.2.down"][0] is False and "not called outside code under torch.compile" in told["blocks.2.down"][1]


def test_code_of_ours_that_runs_after_a_graph_break_is_not_compiled(tmp_path: Path) -> None:
    """A training step that is compiled as a whole, with a break in the model."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return cast(Tensor, self.second(x))

    def run(path: Path | None) -> tuple[list[float], dict[str, Any]]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Broken()
        watch = fp8debug.watch(model, path, every=1) if path else None

        @torch.compile(backend="eager")
        def step(x: Tensor) -> Tensor:
            loss = cast(Tensor, model(x)).square().mean()
            loss.backward()
            return loss

        losses = [step(torch.full((4, WIDTH), float(i))).item() for i in range(1, 4)]
        if watch is not None:
            watch.close()
        return losses, {name: dict(counters[name]) for name in ("stats", "graph_break")}

    assert run(tmp_path / "run") == run(None)


def test_a_model_that_compiles_itself_in_its_forward_trains_on(tmp_path: Path) -> None:
    """As unit scaling's transforms do: torch puts back the dispatch keys that it found when compiled code began."""

    class Transformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.is_inside = ScaledLinear(WIDTH, WIDTH), False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_inside:
                return cast(Tensor, self.linear(x))
            self.is_inside = True
            try:
                return cast(Tensor, cast(nn.Module, torch.compile(self, backend="eager")).forward(x))
            finally:
                self.is_inside = False

    def run(path: Path | None) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Transformed().bfloat16()
        watch = fp8debug.watch(model, path, every=1) if path else None
        losses = []
        for i in range(1, 4):
            loss = model(torch.full((16, WIDTH), 1 / i).bfloat16()).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            if watch is not None:
                watch.step(loss=loss)
        if watch is not None:
            watch.close()
        return losses

    assert run(tmp_path / "run") == run(None)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python)


def strings(model: nn.Module) -> list[str]:
    """Return every name in a pickle: classes, functions, attributes."""
    return [value for _, value, _ in pickletools.genops(pickle.dumps(model)) if isinstance(value, str)]


def saved(model: nn.Module) -> bytes:
    torch.save(model, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["plain", "scaled", "native"])
def test_a_pickle_a_copy_and_a_checkpoint_have_no_trace_of_a_watch(kind: str, tmp_path: Path) -> None:
    model, x = net(kind), torch.randn(16, WIDTH).bfloat16()
    for linear in (model.head, cast(Block, model.blocks[0]).up):
        linear.register_forward_pre_hook(cast(Any, no_change))
    model(x).sum().backward()
    keys, state = list(model.state_dict()), {name: dict(vars(m)) for name, m in model.named_modules()}
    alone = [strings(m) for m in (model, model.head, copy.deepcopy(model))]
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        model(x).sum().backward()
        assert b"fp8debug.adapters" not in saved(model) and b"fp8debug.observer.probe" not in saved(model)
        model.zero_grad()
        model(x).sum().backward()
        assert [strings(m) for m in (model, model.head, copy.deepcopy(model))] == alone
        assert list(model.state_dict()) == keys
        other = copy.deepcopy(model)
        other(x).sum().backward()
        assert all(m.probe is None for m in other.modules() if isinstance(m, Fp8Linear))
        seen = watch._observer.step, len(watch._observer.modules_seen)
        watch.step()
        other(x).sum().backward()
        watch.step()
    assert seen == (0, 2 * BLOCKS + 1)
    steps = fp8debug.Run(tmp_path / "run").sql("SELECT DISTINCT step FROM sites").column("step").to_pylist()
    assert steps == [0], "a copy is not watched"
    for name, m in model.named_modules():
        assert {k: v for k, v in vars(m).items() if k != "_use"}.keys() == {
            k: v for k, v in state[name].items() if k != "_use"
        }.keys()
    assert "_compiled_call_impl" not in vars(nn.Linear) and "_compiled_call_impl" not in vars(Net)


def no_change(module: nn.Module, args: Any) -> None:
    pass


def test_a_model_that_was_saved_while_watched_loads_without_this_package(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with fp8debug.watch(model, tmp_path / "run", every=1):
        model(torch.randn(4, 16)).sum().backward()
        torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear]):
        torch.load(tmp_path / "model.pt", weights_only=True)
    code = "import sys; sys.modules['fp8debug'] = None; import torch; torch.load(sys.argv[1], weights_only=False)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True)


def test_traced_scripted_and_exported_programs_are_as_without_a_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 16)

    def programs(model: nn.Module) -> list[str]:
        traced: Any = torch.jit.trace(model, x)
        scripted: Any = torch.jit.script(model)
        symbolic = torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (x,))
        return [str(traced.graph), scripted.code, symbolic.code, exported.graph_module.code]

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    alone = programs(model)
    with fp8debug.watch(model, tmp_path / "run", every=1):
        watched = programs(model)
        model(x).sum().backward()
    assert [text.replace(" ", "") for text in watched[1:]] == [text.replace(" ", "") for text in alone[1:]]
    assert watched[0].count("aten::linear") == alone[0].count("aten::linear")
    assert "not watched any more" not in capsys.readouterr().err


class Order:
    """Observer of calls that writes down what it is told."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.told.append("before")

    def after_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.told.append("after" if output is not None else "failed")


def test_observers_run_directly_around_forward_and_hooks_keep_their_order() -> None:
    told: list[str] = []

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            told.append("forward")
            if input.shape[0] == 3:
                raise ValueError("a fault of the program's")
            return super().forward(input)

    layer = Layer(4, 4)
    end = observe_calls(layer, Order(told))
    x = torch.ones(2, 4)
    layer(x)
    assert told == ["before", "forward", "after"]
    first = layer.register_forward_pre_hook(lambda *_: told.append("pre 1"))
    layer.register_forward_pre_hook(lambda *_: told.append("pre 2"))
    layer.register_forward_hook(lambda *_: told.append("post 1"))
    layer.register_forward_hook(lambda *_: told.append("post 0"), prepend=True)
    expected = ["pre 1", "pre 2", "before", "forward", "after", "post 0", "post 1"]
    told.clear()
    layer(x)
    assert told == expected
    told.clear()
    first.remove()
    layer(x)
    assert told == expected[1:]
    told.clear()
    with pytest.raises(ValueError, match="a fault of the program's"):
        layer(torch.ones(3, 4))
    assert told == ["pre 2", "before", "forward", "failed"]
    assert len(layer._forward_pre_hooks) == 1 and len(layer._forward_hooks) == 2
    told.clear()
    end()
    end()
    layer(x)
    assert told == ["pre 2", "forward", "post 0", "post 1"]

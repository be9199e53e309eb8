"""The census of parameters that no watched GEMM has: numbers from closed form, nothing changed, at sampled steps alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8debug
from fp8debug.adapters.watching import parameter_census
from fp8debug.adapters.watching.optimizer_steps import NUM_SAMPLED

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]
LR = 2.0**-7
VOCABULARY, WIDTH = 300, 64


class Model(nn.Module):
    """An embedding, a norm, two Linears and parameters of several kinds."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96, bias=False), nn.Linear(96, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.full((5,), 2.0), requires_grad=False)
        self.register_buffer("load", torch.ones(4))
        self.register_buffer("mask", torch.full((128, 128), -math.inf).triu(1), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(self.embed(tokens)))) * self.gain
        return out


def model_of(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    steps: int,
    watch: Any = None,
    before_step: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """Train and return the losses; no step waits for the device."""
    losses = []
    device = next(model.parameters()).device
    batches = [torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(k))[:32].to(device) for k in range(steps)]
    for step in range(steps):
        loss = model(batches[step]).float().square().mean()
        loss.backward()
        if before_step is not None:
            before_step(step)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.detach())
        if watch is not None:
            watch.step(loss=losses[-1])
    return losses


def rows_of(path: Path, where: str = "TRUE") -> dict[str, dict[str, Any]]:
    """Return the rows of ``parameters`` by name; of several steps the last."""
    rows = fp8debug.Run(path).sql(f"SELECT * FROM parameters WHERE {where} ORDER BY step, parameter").to_pylist()
    return {row["parameter"]: row for row in rows}


def recorded(path: Path, model: Model, *, steps: int = 1, every: int = 1, skip: tuple[str, ...] = (), **options: Any) -> Any:
    """Record steps of Adam on all parameters but some, and return the rows of the last sampled one."""
    given = [p for name, p in model.named_parameters() if name not in skip]
    optimizer = torch.optim.Adam(given, lr=LR)
    with fp8debug.watch(model, path, every=every, what_if=(), **options) as watch:
        train(model, [optimizer], steps, watch)
    return rows_of(path)


def test_what_an_optimizer_does_to_a_norm(tmp_path: Path) -> None:
    row = recorded(tmp_path / "run", model_of())["norm.weight"]
    named = {"role": "norm", "shape": "[64]", "optimizer": "Adam", "dtype": "float32", "state_dtype": "float32", "lr": LR}
    assert {name: row[name] for name in named} == named
    counts = ("numel", "num_sampled", "num_moved", "num_grad", "num_intended")
    assert [row[name] for name in counts] == [WIDTH] * 5 and row["num_steps"] == 1 and row["num_moment"] == 2 * WIDTH
    assert (row["requires_grad"], row["has_grad"], row["keeps_precision"], row["num_lost"]) == (True, True, False, 0)
    assert row["sum_weight2"] == WIDTH and row["amax_before"] == 1
    assert row["sum_update2"] == pytest.approx(WIDTH * LR**2, rel=1e-3)
    assert row["amax"] == pytest.approx(1 + LR) or row["amax"] == pytest.approx(1 - LR)
    assert row["sum_grad2"] > 0 and 0 < row["grad_amax"] < math.sqrt(row["sum_grad2"])
    assert row["nonfinite"] is row["nonfinite_before"] is row["grad_nonfinite"] is row["num_writes"] is None


def test_updates_that_bf16_cannot_hold_at_1_are_counted(tmp_path: Path) -> None:
    model = model_of().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.0**-11)  # two BF16 values lie 2^-7 apart from 1 on, 2^-8 below
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        train(model, [optimizer], 1, watch)
    row = rows_of(tmp_path / "run")["norm.weight"]
    assert (row["dtype"], row["num_intended"], row["num_lost"], row["num_moved"]) == ("bfloat16", WIDTH, WIDTH, 0)


def test_all_parameters_have_rows_but_watched_weights(tmp_path: Path) -> None:
    rows = recorded(tmp_path / "run", model_of())
    names = ("down.bias", "embed.weight", "frozen", "gain", "load", "mask", "norm.bias", "norm.weight", "unused")
    assert tuple(sorted(rows)) == names
    roles = {"embed.weight": "embedding", "norm.bias": "norm", "down.bias": "bias", "gain": "other", "load": "buffer"}
    assert {name: rows[name]["role"] for name in roles} == roles
    assert fp8debug.Run(tmp_path / "run").sql("SELECT DISTINCT module FROM updates ORDER BY 1")["module"].to_pylist() == [
        "down",
        "up",
    ]
    gain = rows["gain"]
    assert (gain["shape"], gain["numel"], gain["num_moved"]) == ("[]", 1, 1)
    unused = rows["unused"]
    assert (unused["has_grad"], unused["grad_amax"], unused["num_grad"], unused["num_moved"]) == (False, None, None, 0)
    embedding = rows["embed.weight"]
    assert embedding["numel"] == VOCABULARY * WIDTH > NUM_SAMPLED == embedding["num_sampled"]


def test_a_parameter_in_no_optimizer_has_a_row_without_one(tmp_path: Path) -> None:
    model = model_of()
    rows = recorded(tmp_path / "run", model, steps=3, skip=("norm.bias", "embed.weight"))
    for name, amax in (("norm.bias", 0.0), ("embed.weight", float(model.embed.weight.detach().abs().max()))):
        row = rows[name]
        assert (row["step"], row["optimizer"], row["requires_grad"], row["has_grad"]) == (2, None, True, True)
        assert row["amax_before"] == pytest.approx(amax, rel=1e-6) and row["grad_amax"] > 0
        assert row["num_moved"] is row["num_sampled"] is row["amax"] is None


def test_frozen_parameters_have_one_row(tmp_path: Path) -> None:
    model = model_of()
    given = [p for p in model.parameters() if p.requires_grad]
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        train(model, [torch.optim.SGD(given, lr=LR)], 4, watch)
    run = fp8debug.Run(tmp_path / "run")
    query = "SELECT step, requires_grad, amax_before, optimizer FROM parameters WHERE parameter = 'frozen'"
    assert run.sql(query).to_pylist() == [{"step": 0, "requires_grad": False, "amax_before": 2.0, "optimizer": None}]


def test_parameters_are_whole_where_one_element_is_not_finite(tmp_path: Path) -> None:
    model = model_of()

    def spoil(step: int) -> None:
        assert model.embed.weight.grad is not None and model.norm.bias.grad is not None
        if step == 1:
            model.embed.weight.grad.view(-1)[12345] = math.nan
            model.norm.bias.grad[3] = math.inf

    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        train(model, [optimizer], 2, watch, before_step=spoil)
    first, last = rows_of(tmp_path / "run", "step = 0"), rows_of(tmp_path / "run", "step = 1")
    columns = ("nonfinite_before", "grad_nonfinite", "nonfinite")
    assert [last["embed.weight"][name] for name in columns] == [None, "nan", "nan"]
    assert [last["norm.bias"][name] for name in columns] == [None, "inf", "inf"]
    assert last["embed.weight"]["amax"] is last["norm.bias"]["grad_amax"] is None
    assert {row[name] for row in first.values() if row["role"] != "buffer" for name in columns} == {None}


def test_buffers(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)

    def count(step: int) -> None:
        load: Any = model.load
        load[1].add_(1)
        if step == 2:
            load[2] = math.nan

    with fp8debug.watch(model, tmp_path / "run", every=2, what_if=()) as watch:
        train(model, [optimizer], 5, watch, before_step=count)
    run = fp8debug.Run(tmp_path / "run")
    found = run.sql("SELECT * FROM parameters WHERE role = 'buffer' ORDER BY parameter, step").to_pylist()
    load, masks = [row for row in found if row["parameter"] == "load"], [row for row in found if row["parameter"] == "mask"]
    assert [row["step"] for row in masks] == [0], "a large buffer has a row when it was written"
    assert masks[0]["nonfinite_before"] == "inf" and masks[0]["requires_grad"] is None
    assert [(row["step"], row["num_moved"], row["num_writes"], row["nonfinite_before"]) for row in load] == [
        (0, None, None, None), (2, 2, 3, "nan"), (4, 2, 2, "nan"),
    ]  # fmt: skip
    assert [row["amax_before"] for row in load] == [2.0, None, None]


def test_filters_hold_for_parameters_too(tmp_path: Path) -> None:
    rows = recorded(tmp_path / "one", model_of(), exclude=("norm", "*embed.w*", "mask"))
    assert sorted(rows) == ["down.bias", "frozen", "gain", "load", "unused"]
    rows = recorded(tmp_path / "two", model_of(), include=("up", "norm"))
    assert sorted(rows) == ["norm.bias", "norm.weight"]
    assert recorded(tmp_path / "none", model_of(), include=("up",)) == {}


def test_a_shared_parameter_is_told_once_and_a_watched_one_not(tmp_path: Path) -> None:
    model = model_of()
    model.second = nn.LayerNorm(WIDTH)
    model.second.weight = model.norm.weight
    model.table = nn.Embedding(96, WIDTH)
    model.table.weight = model.up.weight
    rows = recorded(tmp_path / "run", model)
    assert "norm.weight" in rows and "second.weight" not in rows and "table.weight" not in rows


def test_sparse_gradients_are_left_alone(tmp_path: Path) -> None:
    model = model_of(sparse=True)
    table, rest = model.embed.weight, [p for name, p in model.named_parameters() if name != "embed.weight"]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SparseAdam([table], lr=LR), torch.optim.SGD(rest, lr=LR)]
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=(), optimizer=optimizers[1]) as watch:
        train(model, optimizers, 2, watch)
    row = rows_of(tmp_path / "run")["embed.weight"]
    assert (row["optimizer"], row["has_grad"], row["grad_amax"], row["num_grad"]) == ("SparseAdam", True, None, None)
    assert fp8debug.Run(tmp_path / "run").sql("SELECT * FROM events").num_rows == 0


def test_each_of_several_optimizers_tells_of_its_own(tmp_path: Path) -> None:
    model = model_of()
    table, rest = model.embed.weight, [p for name, p in model.named_parameters() if name != "embed.weight"]
    optimizers = [torch.optim.SGD([table], lr=LR), torch.optim.Adam(rest, lr=LR)]
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    optimizers.insert(0, torch.optim.SGD(other.parameters(), lr=LR))  # of another model
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=(), optimizer=optimizers[2]) as watch:
        train(model, optimizers, 2, watch)
    run = fp8debug.Run(tmp_path / "run")
    query = "SELECT parameter, step, rank, count(*) AS n FROM raw_parameters GROUP BY ALL HAVING n > 1"
    assert run.sql(query).num_rows == 0
    rows = rows_of(tmp_path / "run", "step = 0")
    assert (rows["embed.weight"]["optimizer"], rows["norm.weight"]["optimizer"]) == ("SGD", "Adam")


def test_what_a_step_measures_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_census, "MAX_STACKS", 2)
    model = model_of()
    model.more = nn.ParameterList([torch.ones(n) for n in range(2, 9)])
    groups: Any = [{"params": [p]} for p in model.parameters() if p.requires_grad]
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        train(model, [torch.optim.SGD(groups, lr=LR)], 12, watch)
    run = fp8debug.Run(tmp_path / "run")
    query = "SELECT step, count(*) AS n FROM parameters WHERE optimizer IS NOT NULL GROUP BY step"
    assert {row["n"] for row in run.sql(query).to_pylist()} == {2}
    names = run.sql("SELECT DISTINCT parameter FROM parameters WHERE optimizer IS NOT NULL")["parameter"].to_pylist()
    assert len(names) == len(groups) - 2, "all but the watched weights have had their turn"


class Ops(TorchDispatchMode):
    """Counts the operations that would be launches: all but views and numbers that are read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._local_scalar_dense.default:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_more_norms_of_a_width_are_not_more_launches() -> None:
    counted = []
    for num in (4, 40):
        model = nn.Sequential(*(nn.RMSNorm(WIDTH) for _ in range(num)))
        model(torch.randn(8, WIDTH)).sum().backward()
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        optimizer.step()
        census = parameter_census.ParameterCensus([model])
        with Ops() as ops, torch.no_grad():
            census.see(optimizer, 0, 1)
            rows = list(census.end(optimizer, 1))
            census.finish(1)
        assert sum(len(found.columns["module"]) for found in rows) == num
        counted.append(ops.counts)
    assert counted[1] == counted[0]
    assert counted[0].total() < 120, counted[0]


def test_an_error_ends_the_census_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(parameter_census, "_amax_of", broken)
    model = model_of()
    alone = model_of()
    losses = train(alone, [torch.optim.Adam(alone.parameters(), lr=LR)], 3)
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        assert train(model, [torch.optim.Adam(model.parameters(), lr=LR)], 3, watch) == losses
    assert capsys.readouterr().err.count("other parameters are not recorded: RuntimeError: no room") == 1
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT DISTINCT step FROM updates").num_rows == 3 == len(run.sampled_steps)


def test_a_run_of_inference_has_no_rows(tmp_path: Path) -> None:
    model = model_of()
    with fp8debug.watch(model, tmp_path / "run", every=1, inference=True), torch.no_grad():
        model(torch.arange(8))
    assert rows_of(tmp_path / "run") == {}


@contextmanager
def no_synchronizing(device: str) -> Iterator[None]:
    """Let every synchronization with the GPU raise; on a CPU there is none."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_changed_and_nothing_waits(device: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path / "run"):
        model = model_of().to(device, dtype)
        given = [p for name, p in model.named_parameters() if name != "norm.bias"]
        optimizer = torch.optim.AdamW(given, lr=1e-3, **options)
        losses = train(model, [optimizer], 2)
        watch = fp8debug.watch(model, path, every=2, what_if=()) if path else None
        losses += train(model, [optimizer], 2, watch)
        batch = torch.arange(32, device=device)  # no token twice, whose gradients are added in any order
        with no_synchronizing(device):
            for _ in range(4):
                loss = model(batch).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if watch is not None:
                    watch.step(loss=losses[-1])
        if watch is not None:
            watch.close()
        state = [x for kept in optimizer.state.values() for x in kept.values()]
        found.append((losses, list(model.parameters()), list(model.buffers()), state))
    for one, other in zip(*found, strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))
    rows = rows_of(tmp_path / "run")
    assert (rows["embed.weight"]["step"], rows["norm.bias"]["optimizer"]) == (4, None)
    assert fp8debug.Run(tmp_path / "run").sql("SELECT * FROM events").num_rows == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_outside_the_sample_is_found_on_each_device(device: str, tmp_path: Path) -> None:
    model = model_of().to(device)
    with torch.no_grad():
        model.embed.weight[299, 63] = math.nan
        model.embed.weight[7, 7] = 5e4
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        train(model, [torch.optim.SGD(model.parameters(), lr=0.0)], 1, watch)
    row = rows_of(tmp_path / "run")["embed.weight"]
    assert (row["nonfinite_before"], row["amax_before"], row["nonfinite"]) == ("nan", None, "nan")

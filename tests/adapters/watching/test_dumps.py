"""Dumps while training goes on: they agree with the recorded rows, change nothing, and stay within memory and disk."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.adapters.watching import dumps
from fp8debug.adapters.watching.dumps import Dumper, DumpLimits
from fp8debug.metrics import METRICS, slots
from fp8debug.store.dump_files import Dump, dumps_of, find_dumps, open_dump
from fp8debug.store.dump_selectors import parse_selectors
from fp8debug.tools.replay import replay, tensor_of
from fp8debug.types import OPERAND_SITES, Gemm, TensorRole
from tests.recording.models import Net, batch, net, record, train

SITES = {(str(g), str(t)) for g, t in OPERAND_SITES}


def steps_on_disk(run: Path) -> list[int]:
    return sorted({step for step, _, _ in find_dumps(run)})


def events(run: fp8debug.Run) -> list[tuple[int, str]]:
    found = run.sql("SELECT step, message FROM events WHERE kind = 'dump' ORDER BY time").to_pylist()
    return [(row["step"], row["message"]) for row in found]


def recorded_row(run: fp8debug.Run, dump: Dump) -> dict[str, Any]:
    keys = ("step", "module", "gemm", "tensor", "cast_name")
    where = " AND ".join(f"{key} = ?" for key in keys)
    values = [getattr(dump, key) for key in keys]
    (row,) = run.sql(f"SELECT * FROM stats WHERE reference = 'operand' AND {where}", values).to_pylist()
    return dict(row)


def of_one_tensor(values: dict[str, Any]) -> list[str]:
    """Return the slots that one tensor fills; others come from several tensors or from a second look at a sample."""
    return [slot.name for metric in METRICS if values[metric.present] for slot in metric.slots]


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", "mxfp8", None])
def test_replaying_the_running_cast_gives_the_recorded_row(recipe: str | None, tmp_path: Path) -> None:
    run = record(tmp_path / "run", net(recipe), steps=3, dump="blocks.*.down@2")
    found = dumps_of(run, "blocks.1.down")
    assert {(d.gemm, d.tensor) for d in found} == SITES and {d.step for d in found} == {2}
    assert all(d.actual is (recipe is not None) and d.reason == "blocks.*.down@2" for d in found)
    for dump in found:
        row, values = recorded_row(run, dump), replay(dump)[dump.cast_name]
        for name in of_one_tensor(values):
            if row[name] is not None:
                assert values[name] == row[name], (dump.gemm, dump.tensor, name)
        assert values["sqnr_db"] == pytest.approx(row["sqnr_db"], rel=1e-12)
        assert dump.sum_err2.sum() == pytest.approx(row["sum_err2"], rel=1e-12)
        assert dump.sum_x2.sum() == pytest.approx(row["sum_x2"], rel=1e-12)
        if "tensorwise" not in dump.cast_name:
            assert (dump.sum_err2 / dump.sum_x2).max() == pytest.approx(row["worst_block_nmse"], rel=1e-6)
    assert dumps_of(run, "head") == []


def test_a_dump_is_the_tensor_as_it_came(tmp_path: Path) -> None:
    model: nn.Module = net("blockwise").bfloat16()
    seen: list[Tensor] = []
    up = model.get_submodule("blocks.0.up")
    up.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with fp8debug.watch(model, tmp_path / "run", dump="blocks.0.up:fprop") as watch:
        model(batch(0)[0].bfloat16()).sum().backward()
        watch.step()
    of_input, of_weight = dumps_of(tmp_path / "run", "blocks.0.up")
    assert torch.equal(tensor_of(of_input, "reference"), seen[0])
    assert torch.equal(tensor_of(of_weight, "reference"), up.get_parameter("weight").detach())
    with safe_open(of_input.path, "pt") as file:  # the library's own reader sees the same
        assert torch.equal(file.get_tensor("reference"), seen[0])
        assert file.get_tensor("data").dtype is torch.float8_e4m3fn
        assert file.get_tensor("scale_inv").shape == (96, 1)
        assert file.metadata()["module"] == "blocks.0.up"


def test_an_operand_in_high_precision_has_its_reference_alone(tmp_path: Path) -> None:
    recipe = fp8debug.get_recipe("blockwise").replace(gemm="fprop", tensor="input", cast=None)
    record(tmp_path / "run", net("blockwise", {"head": recipe}), steps=1, dump="head:fprop:input")
    (dump,) = dumps_of(tmp_path / "run", "head")
    assert (dump.cast_name, set(dump.stored)) == ("", {"reference"})
    assert list(replay(dump, ["rowwise"])) == ["e4m3fn rowwise current"]


def test_microbatches_are_dumped_one_by_one(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", dump="head:fprop") as watch:
        for number in range(3):
            functional.cross_entropy(model(batch(number)[0]), batch(number)[1]).backward()
        watch.step()
    run = fp8debug.Run(tmp_path / "run")
    found = dumps_of(run, "head")
    assert [(d.tensor, d.call) for d in found] == [("input", 0), ("input", 1), ("input", 2), ("weight", 0)]
    row = recorded_row(run, found[0])
    assert sum(int(d.stored["reference"].shape[0]) * 64 for d in found[:3]) == row["numel"]
    assert sum(float(d.sum_err2.sum()) for d in found[:3]) == pytest.approx(row["sum_err2"], rel=1e-12)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", None])
def test_training_is_bit_identical_with_dumps(recipe: str | None, tmp_path: Path) -> None:
    alone, watched = net(recipe), net(recipe)
    losses = train(alone, 5)
    with fp8debug.watch(watched, tmp_path / "run", every=1, what_if=(), dump=("*@2:", "on-finding")) as watch:
        assert train(watched, 5, after=lambda _, loss: watch.step(loss=loss)) == losses
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), watched.parameters(), strict=True))
    assert steps_on_disk(tmp_path / "run") == [2, 3, 4]


def poison(model: Net, step: int, counter: list[int]) -> None:
    """Make one element of blocks.1's input NaN at that forward pass."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        counter[0] += 1
        if counter[0] - 1 != step:
            return None
        x = args[0].clone()
        x[3, 5] = float("nan")
        return (x,)

    model.blocks[1].register_forward_pre_hook(hook)


def test_a_nan_puts_the_steps_before_it_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    poison(model, 8, [0])
    run = record(tmp_path / "run", model, steps=14, what_if=(), dump="blocks.1.*@on-finding", dump_steps=2)
    assert steps_on_disk(tmp_path / "run") == [4, 6, 8], "two clean sampled steps and the one of the NaN; then quiet"
    ((step, message),) = events(run)
    assert step == 8
    assert message == (
        "dumps of steps 4, 6, 8 are written because of step 8: blocks.1.gate fprop input: first NaN or Inf,"
        " in the high-precision tensor: 1"
    )
    assert f"fp8debug: {message}" in capsys.readouterr().err.splitlines()
    bad = next(d for d in dumps_of(run, "blocks.1.gate", 8) if (d.gemm, d.tensor) == ("fprop", "input"))
    assert bad.reason.startswith("on-finding: step 8")
    assert bad.num_nonfinite.shape == (96, 1) and bad.num_nonfinite[3, 0] == 1 and bad.num_nonfinite.sum() == 1
    assert dumps_of(run, "blocks.0.gate") == []


@pytest.mark.parametrize(("loss", "words"), [(50.0, "the loss spikes to 50"), (float("nan"), "the loss is nan")])
def test_a_loss_spike_between_two_sampled_steps(loss: float, words: str, tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=4, include="head", what_if=(), dump="on-finding", dump_steps=2) as watch:
        train(model, 24, after=lambda step, _: watch.step(loss=loss if step == 17 else 3.0 - step * 0.01))
    run = fp8debug.Run(tmp_path / "run")
    assert steps_on_disk(tmp_path / "run") == [12, 16, 20], "the last two sampled, and the first that shows it"
    assert events(run) == [(17, f"dumps of steps 12, 16 are written because of step 17: {words}")]


def test_nothing_happens_nothing_is_written(tmp_path: Path) -> None:
    run = record(tmp_path / "run", net(), steps=6, every=1, what_if=(), dump="on-finding")
    assert steps_on_disk(tmp_path / "run") == [] and events(run) == []
    assert run.manifest["dump"] == ["on-finding"]


class Fed:
    """A Dumper that is fed by hand, one operand of 64 KiB and its FP8 twin a step."""

    BYTES = 64 * 1024 * 5 + 512 * 4

    def __init__(self, path: Path, *texts: str, every: int = 1, **limits: int) -> None:
        self.said: list[str] = []
        self.x = torch.randn(512, 128)
        self.cast = fp8debug.Cast(granularity="1x128")
        self.dumper = Dumper(
            path,
            0,
            parse_selectors(texts, ["m"], every),
            every,
            DumpLimits(**limits),
            lambda step, text: self.said.append(f"{step}: {text}"),
        )

    def step(self, step: int, nonfinite: tuple[str, ...] = (), judged: bool = True) -> None:
        operand = fp8debug.quantize(self.x, self.cast), self.cast
        self.dumper.observe(step, "m", True, Gemm.FPROP, TensorRole.INPUT, self.x, operand)
        if judged:
            self.dumper.judge(step, nonfinite, 1.0)


def test_memory_is_bounded_the_oldest_step_goes_first(tmp_path: Path) -> None:
    fed = Fed(tmp_path, "on-finding", memory_bytes=3 * Fed.BYTES, ring_steps=100)
    for step in range(20):
        fed.step(step)
        assert fed.dumper._held_bytes <= 3 * Fed.BYTES
    fed.step(20, ("m is nan",))
    fed.dumper.close()
    assert steps_on_disk(tmp_path) == [18, 19, 20] and fed.dumper._held_bytes == 0


def test_steps_whose_statistics_are_on_their_way_are_held_beyond_the_ring(tmp_path: Path) -> None:
    fed = Fed(tmp_path, "on-finding", ring_steps=2)
    for step in range(9):
        fed.step(step, judged=False)
    for step in range(6):
        fed.dumper.judge(step, ("m is nan",) if step == 5 else (), None)
    fed.dumper.close()
    assert steps_on_disk(tmp_path) == [3, 4, 5], "though step 8 was there when the NaN of step 5 became known"


def test_a_slow_disk_drops_and_counts_and_never_holds_up_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save: Callable[..., int] = dumps._save

    def slow(*args: Any) -> int:
        time.sleep(0.2)
        return save(*args)

    monkeypatch.setattr(dumps, "_save", slow)
    fed = Fed(tmp_path, "m", memory_bytes=3 * Fed.BYTES)
    before = time.perf_counter()
    for step in range(40):
        fed.step(step)
    assert time.perf_counter() - before < 2.0, "40 writings alone take 8 seconds"
    fed.dumper.close()
    assert fed.dumper.num_dropped >= 30 and len(steps_on_disk(tmp_path)) == 40 - fed.dumper.num_dropped
    assert fed.said[0].endswith(
        "a dump was dropped: the memory for dumps is full; more are only counted; select fewer sites or raise"
        " dump_memory_bytes= or dump_max_bytes="
    )
    assert fed.said[1:] == [f"39: {fed.dumper.num_dropped} dumps were dropped"]


def test_disk_space_is_bounded_and_files_of_a_finding_stay(tmp_path: Path) -> None:
    fed = Fed(tmp_path, "m", "on-finding", disk_bytes=4 * (Fed.BYTES + 20_000))
    for step in range(12):
        fed.step(step)
        if step == 5:
            fed.dumper._write_until, fed.dumper._reason = 6, "on-finding: step 5: m is nan"
        if step == 6:
            fed.dumper._write_until = -1
    fed.dumper.close()
    assert steps_on_disk(tmp_path) == [6, 9, 10, 11]
    assert sum(path.stat().st_size for _, _, path in find_dumps(tmp_path)) <= 4 * (Fed.BYTES + 20_000)
    again = Fed(tmp_path, "m", disk_bytes=4 * (Fed.BYTES + 20_000))
    again.step(20)
    again.dumper.close()
    assert steps_on_disk(tmp_path) == [6, 9, 10, 11], "what an earlier writing left counts, and stays"
    assert "the disk space for dumps is used up" in again.said[0]


def test_a_full_disk_stops_the_dumps_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files is a full disk for the one large file, not for the many small ones."""
    torch.manual_seed(0)
    model = fp8debug.convert(nn.Sequential(nn.Linear(512, 512)), "blockwise")
    losses, before = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, before[1]))
    try:
        with fp8debug.watch(model, tmp_path / "run", every=1, what_if=(), dump="*:fprop") as watch:
            for _ in range(4):
                loss = model(torch.ones(16, 512)).square().mean()
                loss.backward()
                watch.step(loss=loss)
                losses.append(loss.item())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert losses == [losses[0]] * 4
    said = [line for line in capsys.readouterr().err.splitlines() if "dump" in line]
    assert said == ["fp8debug: dumping stopped: File too large (os error 27)"]
    run = fp8debug.Run(tmp_path / "run")
    assert run.steps_range == (0, 3) and run.table(["numel"], steps="3:4").num_rows
    assert [message for _, message in events(run)] == [said[0].removeprefix("fp8debug: ")]
    assert [path.name for path in (tmp_path / "run" / "dumps").rglob(".*")] == [], "no half-written file stays"


def test_an_error_of_ours_stops_the_dumps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(tensor: Tensor) -> Tensor:
        raise RuntimeError("no memory left on the moon\nsecond line")

    expected = train(net(), 3)
    monkeypatch.setattr(dumps, "_to_host", broken)
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1, dump="*") as watch:
        assert train(model, 3, after=lambda _, loss: watch.step(loss=loss)) == expected
    planned, *said = capsys.readouterr().err.splitlines()
    assert planned.startswith("fp8debug: will record ") and said == ["fp8debug: dumping stopped: no memory left on the moon"]
    assert fp8debug.Run(tmp_path / "run").table(["numel"], steps="2:3").num_rows


def test_a_missing_library_is_said_at_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(fp8debug.Fp8DebugError, match=r"^dump= needs safetensors, .*: pip install 'fp8debug\[dumps\]'$"):
        fp8debug.watch(net(), tmp_path / "run", dump="on-finding")
    assert not (tmp_path / "run").exists()
    fp8debug.watch(net(), tmp_path / "run").close()


def test_a_hostile_name_stays_in_its_folder(tmp_path: Path) -> None:
    dumper = Dumper(tmp_path / "a" / "run", 0, parse_selectors(["*"], ["../../escape me"], 1), 1, DumpLimits(), lambda *_: None)
    cast, x = fp8debug.Cast(), torch.ones(16, 16)
    dumper.observe(0, "../../escape me", True, Gemm.FPROP, TensorRole.WEIGHT, x, (fp8debug.quantize(x, cast), cast))
    dumper.close()
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path.is_relative_to(tmp_path / "a" / "run" / "dumps")
    assert open_dump(path).module == "../../escape me"
    assert len(dumps_of(tmp_path / "a" / "run", "../../escape me")) == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", None])
def test_on_a_gpu_nothing_waits_and_the_numbers_agree(recipe: str | None, tmp_path: Path) -> None:
    alone, watched = net(recipe).cuda(), net(recipe).cuda()
    x, classes = (t.cuda() for t in batch(0))
    losses = []
    for model, path in ((alone, None), (watched, tmp_path / "run")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        watch = path and fp8debug.watch(model, path, every=1, what_if=(), dump=("*@3", "on-finding"))
        seen = []
        for step in range(5):
            if step == 2:  # Triton compiles and allocators grow before
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            loss = functional.cross_entropy(model(x), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
            if watch:
                watch.step(loss=seen[-1])
        torch.cuda.set_sync_debug_mode("default")
        if watch:
            watch.close()
        losses.append(torch.stack(seen))
    assert torch.equal(*losses)
    parts = sorted((tmp_path / "run").glob("rank=*/stats/*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part, partitioning=None).to_pylist()]
    found = dumps_of(tmp_path / "run", "blocks.0.down")
    assert {(d.gemm, d.tensor) for d in found} == SITES and {d.step for d in found} == {3}
    for dump in found:
        keys = {key: getattr(dump, key) for key in ("step", "module", "gemm", "tensor", "cast_name")}
        (row,) = [r for r in rows if r["reference"] == "operand" and keys.items() <= r.items()]
        values: dict[str, Any] = replay(dump)[dump.cast_name]
        for name in of_one_tensor(values):
            if row[name] is not None and slots()[name].kind == "int64":
                assert values[name] == row[name], (dump.gemm, dump.tensor, name)
        assert values["sum_err2"] == pytest.approx(row["sum_err2"], rel=1e-6)

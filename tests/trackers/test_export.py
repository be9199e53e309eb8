"""``fp8debug export RUN --to TRACKER``, and the logger for Transformer Engine's statistics."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8debug.errors import UsageError
from fp8debug.store.read.recent import RecentRun
from fp8debug.store.read.run import Run
from fp8debug.trackers import base, judging
from fp8debug.trackers.judging import Judge
from fp8debug.trackers.summary import SCALARS, step_scalars, worst_modules
from fp8debug_dashboard.data.queries import loss_lost_at
from tests.cli.said import Said
from tests.synthetic import Override, build
from tests.trackers import readers

SICK = Override(module="blocks.1.mlp.up", gemm="fprop", tensor="input", steps=(20, None), slots={"gain": 2.0})


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return build(tmp_path_factory.mktemp("runs") / "run", num_steps=41, every=10, overrides=[SICK])


def test_a_run_becomes_event_files_without_torch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(sys.modules, "torch", None)
    done = Said(capsys, sick.path.parent, f"export RUNS/run --to tensorboard -o {tmp_path / 'tb'}")
    assert done.code == 0 and done.out == f"5 sampled steps of run to tensorboard; tensorboard --logdir {tmp_path / 'tb'}\n"
    monkeypatch.undo()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    expected = step_scalars(sick, [])
    for name in expected[0]:
        values = {event.step: event.value for event in events.Scalars(f"fp8debug/{name}")}
        assert list(values) == [0, 10, 20, 30, 40]
        if not name.startswith("findings"):
            assert values == pytest.approx({step: row[name] for step, row in expected.items()}, rel=1e-6)
    assert [event.value for event in events.Scalars("fp8debug/findings_error")] == [0, 0, 1, 1, 1]
    (table,) = events.Tensors("fp8debug/findings")
    assert b"| F113 | error | blocks.1.mlp.up | fprop | input | 20 | 40 |" in table.tensor_proto.string_val[0]
    assert "wrong-scale" in (tmp_path / "tb" / "fp8debug-report.html").read_text()


def test_a_loss_that_is_not_finite_reaches_the_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Left out, the plot would end with the last loss that was finite."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = {step: {"loss": math.nan if step < 40 else math.inf} for step in range(25, 41)}
    build(tmp_path / "run", num_steps=41, every=10, steps=losses)
    assert Said(capsys, tmp_path, f"export RUNS/run --to tensorboard -o {tmp_path / 'tb'}").code == 0
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    sent = [event.value for event in events.Scalars("fp8debug/loss")]
    assert len(sent) == 5 and all(map(math.isfinite, sent[:3])) and math.isnan(sent[3]) and sent[4] == math.inf


def test_a_run_goes_to_wandb_with_a_row_for_each_sampled_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = Said(capsys, sick.path.parent, "export RUNS/run --to wandb --name again")
    assert done.code == 0, done.err
    rows = [row for row in readers.wandb_history(tmp_path) if "fp8debug/loss" in row]
    assert [row["fp8debug/step"] for row in rows] == [0, 10, 20, 30, 40]
    kinds = [record.WhichOneof("record_type") for record in readers.wandb_records(tmp_path)]
    assert "alert" not in kinds and "artifact" in kinds


def test_a_run_goes_to_mlflow_and_trackio(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[Any]] = {}

    class Seen:
        """Stands in for a run: what these libraries write is read back in test_real_trackers."""

        def __init__(self, name: str) -> None:
            self._calls = seen.setdefault(name, [])

        def __getattr__(self, name: str) -> Any:
            return lambda *args: self._calls.append((name, *args))

    from fp8debug.trackers import TRACKERS

    for name in ("mlflow", "trackio"):
        pytest.importorskip(name)
        monkeypatch.setattr(TRACKERS.get(name), "create", lambda *args, name=name: Seen(name))
        assert Said(capsys, sick.path.parent, f"export RUNS/run --to {name}").code == 0
        calls = [call[0] for call in seen[name]]
        assert calls == [*["scalars"] * 5, "table", "table", "report", "close"]


def test_what_cannot_be_exported_is_one_line(
    capsys: pytest.CaptureFixture[str], sick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Said(capsys, sick.path.parent, "export RUNS/run --to wandbb")
    assert (done.code, done.err) == (2, "error: unknown tracker 'wandbb': did you mean 'wandb'?\n")
    done = Said(capsys, sick.path.parent, "export RUNS/run --to mlflow -o somewhere")
    assert (done.code, done.err) == (
        2,
        "error: -o is for --to tensorboard; mlflow keeps its files where its own settings say\n",
    )
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    done = Said(capsys, sick.path.parent, "export RUNS/run --to wandb")
    assert (done.code, done.err) == (
        2,
        "error: wandb is not installed: pip install wandb, or name another tracker after --to\n",
    )


def test_scalars_are_few_finite_and_documented(sick: Run) -> None:
    assert len(SCALARS) <= 20
    for values in step_scalars(sick).values():
        assert set(values) <= set(SCALARS) and all(value == value and abs(value) != float("inf") for value in values.values())
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    assert [name for name in SCALARS if "/" not in name and f"`{name}`" not in page] == []


def test_a_model_without_fp8_gives_the_numbers_of_the_recipe_that_was_tried(tmp_path: Path) -> None:
    """Which is not that of the worst what-if."""
    modules = [("up", 64, 64)]
    run = build(
        tmp_path / "run", num_steps=1, modules=modules, recipe="bf16", what_if=("blockwise", "tensorwise_current"),
        manifest={"plain_recipe": "blockwise"},
        overrides=[Override(actual=False, cast_name="e4m3fn tensorwise current", slots={"sqnr_db": 5.0})],
    )  # fmt: skip
    values = step_scalars(run)[0]
    assert values["operand_sqnr_db_min/fprop"] > 30
    assert [row["module"] for row in worst_modules(run)] == ["up"]


def test_a_recent_run_is_the_end_of_the_run(sick: Run) -> None:
    recent = RecentRun(sick.path, num_sampled=2)
    assert recent.sampled_steps == [0, 10, 20, 30, 40] and (recent.first, recent.last) == (30, 40)
    both = [run.table(steps="30:").to_pylist() for run in (recent, sick)]
    assert both[0] == both[1] and recent.num_rows == len(both[0])
    assert recent.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 41}]


def test_a_step_that_one_rank_lacks_is_not_judged_yet(tmp_path: Path) -> None:
    build(tmp_path / "run", num_steps=21, every=10, world_size=2, overrides=[])
    assert RecentRun(tmp_path / "run").last == 20
    from tests.store.recording import record

    record(tmp_path / "ahead", range(3), world_size=2).close()
    record(tmp_path / "ahead", range(2), world_size=2, rank=1).close()
    assert RecentRun(tmp_path / "ahead").last == 1


def test_a_step_whose_statistics_were_not_read_yet_is_left_for_the_next_time(tmp_path: Path) -> None:
    """The steps' file is read after that of the statistics, and a step may be written in between."""
    from tests.store.recording import record, site_rows

    writer = record(tmp_path / "run", range(0))
    for step in (0, 1):
        writer.stats(site_rows(step))
        writer.steps({"step": step, "sampled": True})
    writer.steps({"step": 2, "sampled": True})
    writer.flush()
    recent = RecentRun(tmp_path / "run")
    assert (recent.last, recent.sampled_steps) == (1, [0, 1])
    writer.stats(site_rows(2))
    writer.close()
    recent.refresh()
    assert (recent.last, recent.sampled_steps) == (2, [0, 1, 2])


def test_the_judge_tells_each_finding_once_and_a_healthy_run_has_none(tmp_path: Path, sick: Run) -> None:
    judge = Judge(str(sick.path))
    first = judge.step()
    assert list(first["steps"]) == [0, 10, 20, 30, 40] and [f["code"] for f in first["findings"]] == ["F113"]
    assert judge.step() == {"steps": {}, "findings": []}
    last = judge.finish(None)
    assert last["findings"] == [] and [f["code"] for f in last["all"]] == ["F113"] and last["report"] is False
    build(tmp_path / "healthy", num_steps=31, every=10)
    healthy = Judge(str(tmp_path / "healthy"))
    assert healthy.step()["findings"] == [] == healthy.finish(None)["findings"]
    json.dumps(last)


@pytest.mark.parametrize("ends", [False, True])
def test_numbers_of_a_step_that_come_late_are_told_with_the_next(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may show a step before its rows."""
    from tests.store.recording import record, site_rows

    writer = record(tmp_path / "run", range(0))
    judge = Judge(str(tmp_path / "run"))
    told = []
    for step in (0, 2, 4):
        writer.stats(site_rows(step))
        writer.steps({"step": step, "sampled": True})
        writer.flush()
        with monkeypatch.context() as patch:
            if step == 2:
                patch.setattr(judging, "step_scalars", lambda *_, **__: {})
            if step < 4 or not ends:
                told.append(list(judge.step()["steps"]))
    writer.close()
    assert [*told, list(judge.finish(None)["steps"])] == ([[0], [], [2, 4]] if ends else [[0], [], [2, 4], []])


@pytest.mark.parametrize("value", [math.nan, math.copysign(math.nan, -1.0), math.inf, -math.inf])
def test_a_loss_that_is_lost_between_sampled_steps_is_an_error_at_the_next(tmp_path: Path, value: float) -> None:
    lost = {step: {"loss": value} for step in range(25, 31)}  # NaN that x86 makes has a sign
    build(tmp_path / "run", num_steps=31, every=10, steps=lost)
    findings = Judge(str(tmp_path / "run")).step()["findings"]
    assert [(f["code"], f["severity"], f["steps"][0]) for f in findings] == [("F125", "error", 25)]
    assert loss_lost_at(Run(tmp_path / "run")) == 25


def test_statistics_of_transformer_engine_go_to_a_tracker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logging = pytest.importorskip("nvdlfw_inspect.logging")
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from fp8debug.trackers.metric_logger import metric_logger

    with SummaryWriter(str(tmp_path)) as writer:
        logger = metric_logger(writer)
        assert isinstance(logger, logging.BaseLogger)
        logging.MetricLogger.add_logger(logger)
        try:
            for iteration in range(3):
                logging.MetricLogger.log_scalar("decoder.0.qkv_activation_underflows%", torch.tensor(iteration / 2), iteration)
                logging.MetricLogger.log_scalar("decoder.0.qkv_activation_cur_amax", 1.5, iteration)
        finally:
            logging.MetricLogger.enabled_loggers.remove(logger)
        logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == [
        f"fp8debug/te/decoder.0.qkv_activation_{name}" for name in ("cur_amax", "underflows%")
    ]
    values = events.Scalars("fp8debug/te/decoder.0.qkv_activation_underflows%")
    assert [(event.step, event.value) for event in values] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    with pytest.raises(UsageError, match="to= names no tracker: 'tb'"):
        metric_logger("tb")


def test_the_end_of_transformer_engines_debugging_sends_the_last_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    debug_api = pytest.importorskip("nvdlfw_inspect.api")
    from nvdlfw_inspect.logging import MetricLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from fp8debug.trackers.metric_logger import metric_logger

    config = tmp_path / "stats.yaml"
    config.write_text("all:\n  enabled: True\n  layers:\n    layer_name_regex_pattern: .*\n")
    writer = SummaryWriter(str(tmp_path / "tb"))
    debug_api.initialize(config_file=str(config), feature_dirs=[], log_dir=str(tmp_path), statistics_logger=metric_logger(writer))
    for iteration in range(2):
        MetricLogger.log_scalar("layer_activation_underflows%", iteration / 2, iteration)
    debug_api.end_debug()
    writer.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    values = events.Scalars("fp8debug/te/layer_activation_underflows%")
    assert [(event.step, event.value) for event in values] == [(0, 0.0), (1, 0.5)]
    late = metric_logger(writer)
    late.log_scalar("layer_activation_underflows%", 1.0, 2)
    late.close()
    assert "the SummaryWriter was closed first: close the watch, or the logger of metric_logger()" in capsys.readouterr().err

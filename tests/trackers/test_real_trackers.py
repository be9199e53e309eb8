"""One training under a watch with the four trackers' own libraries, offline; what they wrote is read back."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fp8debug.store.read.run import Run
from fp8debug.trackers.summary import SCALARS
from tests.trackers import job, readers

NAMES = ("wandb", "tensorboard", "mlflow", "trackio")
SAMPLED = list(range(0, job.NUM_STEPS, job.EVERY))


class Trained(NamedTuple):
    """A training that has ended: its folder, what it saw, and its stderr."""

    folder: Path
    answer: dict[str, Any]
    err: str


def train(folder: Path, names: str) -> Trained:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": str(folder),
        "WANDB_CACHE_DIR": str(folder),
        "WANDB_CONFIG_DIR": str(folder),
        "MLFLOW_TRACKING_URI": str(folder / "mlruns"),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # what mlflow-skinny has; a database needs SQLAlchemy
        "TRACKIO_DIR": str(folder / "trackio"),
        "GIT_PYTHON_REFRESH": "quiet",
    }
    command = [sys.executable, job.__file__, str(folder), names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return Trained(folder, json.loads((folder / "answer.json").read_text()), done.stderr)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    for name in NAMES:
        pytest.importorskip(name)
    return train(tmp_path_factory.mktemp("tracked"), ",".join(NAMES))


def test_losses_and_random_numbers_are_those_without_trackers(tracked: Trained, tmp_path: Path) -> None:
    plain = train(tmp_path, "")
    assert plain.answer["losses"] == tracked.answer["losses"]
    assert plain.answer["random"] == tracked.answer["random"]
    lines = [line for line in tracked.err.splitlines() if line.startswith("fp8debug:")]
    assert len(lines) == 1 and "will record" in lines[0]


def test_the_first_error_comes_within_two_sampled_steps(tracked: Trained) -> None:
    first = tracked.answer["found"][0]
    assert (first["code"], first["severity"], first["module"], first["steps"][0]) == ("F113", "error", "2", job.FAULT)
    assert first["came_in"] <= job.FAULT + 2 * job.EVERY
    assert len({(f["code"], f["module"]) for f in tracked.answer["found"]}) == len(tracked.answer["found"])


def test_tensorboard_has_every_sampled_step(tracked: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.folder / "tensorboard"))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("fp8debug/")]
    assert names == [f"fp8debug/{name}" for name in SCALARS] and len(names) <= 20
    for name in names:
        assert [event.step for event in events.Scalars(name)] == SAMPLED
    sqnr = {event.step: event.value for event in events.Scalars("fp8debug/operand_sqnr_db_min/fprop")}
    assert min(sqnr[0], sqnr[2]) > 31 and max(sqnr[step] for step in SAMPLED if step >= job.FAULT) < 1
    texts = {name: events.Tensors(f"fp8debug/{name}/text_summary") for name in ("findings", "worst_modules")}
    assert b"F113 wrong-scale: 2" in texts["findings"][0].tensor_proto.string_val[0]
    assert b"| module | findings |" in texts["worst_modules"][-1].tensor_proto.string_val[0]
    assert "wrong-scale" in (tracked.folder / "tensorboard" / "fp8debug-report.html").read_text()


def test_tracker_values_are_those_of_the_run(tracked: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.folder / "tensorboard"))
    events.Reload()
    rows = (
        Run(tracked.folder / "run").table(["step", "gemm", "sqnr_db"], gemm="wgrad", reference="operand", actual=True).to_pylist()
    )
    for event in events.Scalars("fp8debug/operand_sqnr_db_min/wgrad"):
        assert event.value == pytest.approx(min(row["sqnr_db"] for row in rows if row["step"] == event.step), rel=1e-6)


def test_wandb_rows_keep_the_steps_of_the_training(tracked: Trained) -> None:
    rows = readers.wandb_history(tracked.folder)
    assert [row["_step"] for row in rows] == list(range(job.NUM_STEPS))
    assert [row["loss"] for row in rows] == [float.fromhex(loss) for loss in tracked.answer["losses"]]
    own = [row for row in rows if "fp8debug/step" in row]
    assert own and own[-1]["fp8debug/step"] == SAMPLED[-1] and set(own[-1]) >= {f"fp8debug/{name}" for name in SCALARS}
    records = list(readers.wandb_records(tracked.folder))
    (axis,) = (r.metric for r in records if r.WhichOneof("record_type") == "metric" and r.metric.glob_name)
    assert (axis.glob_name, axis.step_metric) == ("fp8debug/*", "fp8debug/step")
    alerts = [r.alert for r in records if r.WhichOneof("record_type") == "alert"]
    assert [(a.level, a.title) for a in alerts][:1] == [("ERROR", "F113 wrong-scale: 2")]
    artifacts = {r.artifact.type: r.artifact for r in records if r.WhichOneof("record_type") == "artifact"}
    assert [file.path for file in artifacts["report"].manifest.contents] == ["report.html"]


def test_mlflow_has_metrics_tags_and_artifacts(tracked: Trained) -> None:
    (run,) = (tracked.folder / "mlruns" / "0").glob("*/")
    lines = (run / "metrics" / "fp8debug" / "operand_sqnr_db_min" / "fprop").read_text().splitlines()
    assert [int(line.split()[2]) for line in lines] == SAMPLED
    assert "F113 wrong-scale: 2" in (run / "tags" / "fp8debug.error.1").read_text()
    table = json.loads((run / "artifacts" / "fp8debug" / "worst_modules.json").read_text())
    assert table["columns"][:2] == ["module", "findings"] and table["data"][0][:2] == ["2", "F113"]
    assert "wrong-scale" in (run / "artifacts" / "fp8debug" / "report.html").read_text()


def test_trackio_rows_keep_the_steps_of_the_training(tracked: Trained) -> None:
    with sqlite3.connect(tracked.folder / "trackio" / "job.db") as store:
        rows = [(step, json.loads(values)) for step, values in store.execute("SELECT step, metrics FROM metrics")]
        alerts = store.execute("SELECT title, level, step FROM alerts").fetchall()
        reports = store.execute("SELECT name FROM artifacts").fetchall()
    assert sorted(step for step, values in rows if "loss" in values) == list(range(job.NUM_STEPS))
    assert sorted(step for step, values in rows if "fp8debug/loss" in values) == SAMPLED
    assert alerts[0] == ("F113 wrong-scale: 2", "error", job.FAULT)
    assert reports == [("fp8debug-job",)]

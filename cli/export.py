"""``fp8debug export RUN --to TRACKER``: a run that is over into W&B, TensorBoard, MLflow or Trackio."""

from __future__ import annotations

from pathlib import Path

import click

from fp8debug.errors import UsageError
from fp8debug.rules import triage
from fp8debug.store.locations import ObjectPath
from fp8debug.trackers import TRACKERS
from fp8debug.trackers.export import export

from .console import open_run, progress, warn
from .output import echo


@click.command("export")
@click.argument("run")
@click.option("--to", "name", metavar="TRACKER", required=True, help=f"One of {', '.join(TRACKERS.names())}.")
@click.option("-o", "--output", metavar="DIR", help="Folder for TensorBoard's files.  [default: RUN/tensorboard]")
@click.option("--project", metavar="NAME", default="fp8debug", show_default=True, help="Project, or experiment of MLflow.")
@click.option("--name", "run_name", metavar="NAME", help="Name of the tracker's run.  [default: that of RUN]")
def command(run: str, name: str, output: str | None, project: str, run_name: str | None) -> None:
    """Write RUN's numbers, worst modules, findings and HTML report into a new run of a tracker.

    Where it goes is the tracker's own setting: WANDB_MODE=offline, MLFLOW_TRACKING_URI and so on; TensorBoard's files stay
    here. A run that is being recorded is sent by fp8debug run --to.
    """
    tracker = TRACKERS.get(name)
    tracker.require("name another tracker after --to")
    if output is not None and name != "tensorboard":
        raise UsageError(f"-o is for --to tensorboard; {name} keeps its files where its own settings say")
    opened = open_run(run)
    if output is None and isinstance(opened.path, ObjectPath) and name == "tensorboard":
        raise UsageError("-o DIR is needed for a run on object storage")
    with progress("judging") as report:
        findings = triage(opened, progress=report)
    folder = Path(output) if output is not None else Path(str(opened.path)) / "tensorboard"
    num_steps, has_report = export(opened, findings, tracker.create(run_name or opened.name, project, folder))
    if not has_report:
        warn("the HTML report could not be made: fp8debug report RUN says why")
    where = f"; tensorboard --logdir {folder}" if name == "tensorboard" else ""
    echo(f"{num_steps} sampled steps of {opened.name} to {name}{where}")

"""MLflow: ``mlflow.active_run()``, written to through a client, whose calls name the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8debug.trackers.base import TRACKERS, Tracker, TrackerRun, is_class, set_default

#: By MLflow: characters of a tag, and numbers in one request.
MAX_TAG, MAX_METRICS = 5000, 1000


class MlflowRun(TrackerRun):
    """A run of MLflow.

    Args:
        client: an ``MlflowClient``.
        run_id: of the run.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self._num_alerts = 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers at their step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MAX_METRICS])

    def alert(self, step: int, title: str, text: str, severity: str) -> None:
        """Set a tag: MLflow has no alerts."""
        self._num_alerts += 1
        self._client.set_tag(self._run_id, f"fp8debug.{severity}.{self._num_alerts}", f"step {step}: {title}: {text}"[:MAX_TAG])

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table as the JSON of pandas' ``orient="split"``, which MLflow's pages show as one."""
        table = {"columns": list(columns), "data": [[row.get(column) for column in columns] for row in rows]}
        self._client.log_dict(self._run_id, table, f"{name}.json")

    def report(self, path: Path) -> None:
        """Keep the page as an artifact."""
        self._client.log_artifact(self._run_id, str(path), "fp8debug")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)


class Mlflow(Tracker):
    """MLflow."""

    name, module, package = "mlflow", "mlflow", "mlflow"
    opening = "mlflow.start_run()"

    def find(self) -> TrackerRun | None:
        """Return the active run of this thread."""
        mlflow: Any = sys.modules.get("mlflow")
        run = getattr(mlflow, "active_run", lambda: None)()
        return None if run is None else self._wrapped(run)

    def wrap(self, given: object) -> TrackerRun | None:
        """Take what ``mlflow.start_run()`` returned."""
        return self._wrapped(given) if is_class(type(given), "Run", "mlflow") else None

    def create(self, name: str, project: str, folder: Path) -> TrackerRun:
        """Open a run in an experiment, where ``MLFLOW_TRACKING_URI`` says."""
        from mlflow import MlflowClient

        client = MlflowClient()
        experiment = client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment is not None else client.create_experiment(project)
        return MlflowRun(client, client.create_run(number, run_name=name).info.run_id)

    def _wrapped(self, run: Any) -> TrackerRun:
        import mlflow

        if mlflow.get_tracking_uri().startswith("http"):
            # Waiting for a server that is away, MLflow draws from the `random` that the training may shuffle its data with.
            set_default("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
        return MlflowRun(mlflow.MlflowClient(), run.info.run_id)


TRACKERS.add("mlflow", Mlflow())

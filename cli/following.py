"""``--follow``: a run that is being recorded, step by step until it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import sleep

from fp8debug.errors import RunError
from fp8debug.store.read.resumed import open_runs
from fp8debug.store.read.run import Run

from .output import echo, has_reader

#: Seconds between two looks at the files.
INTERVAL_S = 1.0

#: The last step that every rank has written a row of; what stands before it is whole.
_LAST = "SELECT min(last) AS last FROM (SELECT rank, max(step) AS last FROM raw_steps GROUP BY rank)"


def follow(paths: Sequence[str], show: Callable[[Run, list[int]], None], interval_s: float = INTERVAL_S) -> None:
    """Call ``show`` with the run and the sampled steps that are new in it, until all of its ranks have ended, or nobody reads on.

    A run that is not there yet is waited for. A step is shown once a later one was begun on every rank.

    Args:
        paths: of the run and its resumed parts.
        show: prints the steps.
        interval_s: seconds between two looks.
    """
    seen = -1
    is_waiting = False
    while True:
        run = _opened(paths)
        if run is None:
            if not is_waiting:
                echo(f"waiting for {paths[-1]}", err=True)
            is_waiting = True
        else:
            has_ended = all(manifest.get("ended") for manifest in run.rank_manifests.values())
            last = run.sql(_LAST).to_pylist()[0]["last"]
            whole = [s for s in run.sampled_steps if s > seen and (has_ended or (last is not None and s < last))]
            if whole:
                seen = whole[-1]
                show(run, whole)
            if has_ended or not has_reader():
                return
        sleep(interval_s)


def _opened(paths: Sequence[str]) -> Run | None:
    """Return the run as it is now; None where nothing of it can be read yet."""
    try:
        run = open_runs(paths)
        return run if run.rank_manifests and (run.sampled_steps or run.sql("SELECT 1 FROM raw_steps LIMIT 1").num_rows) else None
    except RunError:
        return None

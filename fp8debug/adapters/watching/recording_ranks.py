"""Recording ranks of a large job, and standby ranks, which record from the first value that is not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8debug.errors import UsageError
from fp8debug.observer.sharding import is_first_replica, place_in_replica
from fp8debug.store.write.writer import RunWriter

#: A job of more ranks records one replica, unless ``ranks`` says otherwise.
MAX_RANKS = 16
#: Steps before an anomaly whose losses are written with it.
KEPT_STEPS = 50

Ranks = Sequence[int] | str | None


def check_ranks(ranks: Any) -> None:
    """Look at the argument ``ranks`` of :func:`fp8debug.watch`.

    Raises:
        UsageError: it is neither None, ``"all"`` nor ranks with rank 0 among them, which writes what the run is.
    """
    if ranks is None or ranks == "all":
        return
    if isinstance(ranks, str) or not isinstance(ranks, Sequence) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        raise UsageError(f"ranks must be 'all' or a list of global ranks, got {ranks!r}")
    if 0 not in ranks:
        raise UsageError(f"ranks must hold rank 0, which writes the manifest of the run, got {list(ranks)}")


def records_from_start(ranks: Ranks, rank: int, world_size: int, mesh: Mapping[str, Any], most: int | None = None) -> bool:
    """Return whether a rank records from the beginning; at most ``most`` of those of the default do, spread evenly."""
    if ranks is not None:
        return isinstance(ranks, str) or rank in ranks
    if world_size > MAX_RANKS and not is_first_replica(mesh, rank):
        return rank == 0
    place, size = (rank, world_size) if world_size <= MAX_RANKS else place_in_replica(mesh)
    return place % -(-size // min(most or size, size)) == 0


def num_recording(ranks: Ranks, world_size: int, mesh: Mapping[str, Any]) -> int:
    """Return how many ranks record from the beginning where no budget forbids it."""
    if ranks is None:
        return world_size if world_size <= MAX_RANKS else place_in_replica(mesh)[1]
    return world_size if isinstance(ranks, str) else len({rank for rank in ranks if rank < world_size})


def ranks_entry(ranks: Ranks, world_size: int, most: int) -> Any:
    """Return what the manifest says of the ranks that have rows: None for all, else a list or words."""
    if ranks is None:
        few = world_size > MAX_RANKS
        return "first replica" if few else None if most >= world_size else f"{most} of {world_size}"
    return None if isinstance(ranks, str) else sorted(set(ranks))


class StandbyWriter(RunWriter):
    """Stands in for the writer of a rank that keeps quiet; becomes one at the first loss, norm or GEMM that is not finite.

    Args:
        make: makes the writer.
        path: the run directory.
        rank: global rank.
    """

    def __init__(self, make: Callable[[], RunWriter], path: str | Path, rank: int) -> None:
        self.path, self.rank = Path(path), rank
        self.num_dropped = 0
        #: Called when the rank begins to record.
        self.on_activate: Callable[[], None] = lambda: None
        self._make = make
        self._writer: RunWriter | None = None
        self._kept: deque[Mapping[str, Any]] = deque(maxlen=KEPT_STEPS)
        self._events: list[tuple[Any, ...]] = []
        self._added: dict[str, Any] = {}

    @property
    def stopped(self) -> str | None:  # type: ignore[override]  # of the writer, once there is one
        """Reason why recording stopped, or None."""
        return None if self._writer is None else self._writer.stopped

    def steps(self, row: Any, *, once: bool = False) -> Any:
        """Keep a step's row, or write it; a number that is not finite wakes the rank."""
        if self._writer is not None:
            return self._writer.steps(row, once=once)
        found: Mapping[str, Any] = row() if callable(row) else row
        self._kept.append(found)
        odd = [name for name in ("loss", "grad_norm") if not math.isfinite(_number(found.get(name)))]
        if found.get("nonfinite_module") is not None:
            odd.append(str(found["nonfinite_module"]))
        if odd:
            self._activate(found["step"], f"rank {self.rank} records from here on: {odd[0]} is not finite")
        return None

    def stats(self, *args: Any, **kwargs: Any) -> Any:
        """Write rows, once awake."""
        return False if self._writer is None else self._writer.stats(*args, **kwargs)

    def updates(self, *args: Any, **kwargs: Any) -> None:
        """Write what an optimizer step did, once awake."""
        if self._writer is not None:
            self._writer.updates(*args, **kwargs)

    def parameters(self, *args: Any, **kwargs: Any) -> None:
        """Write rows of parameters, once awake."""
        if self._writer is not None:
            self._writer.parameters(*args, **kwargs)

    def event(self, step: int | None, kind: str, module: str | None, message: str, code: str | None = None) -> None:
        """Keep an event, or write it."""
        if self._writer is not None:
            self._writer.event(step, kind, module, message, code)
        elif len(self._events) < KEPT_STEPS:
            self._events.append((step, kind, module, message, code))

    def breathe(self) -> None:
        """Let other threads run, as the writer does."""
        if self._writer is not None:
            self._writer.breathe()

    def update_manifest(self, changes: Mapping[str, Any], *, add: bool = False) -> None:
        """Keep what is to be in the rank's manifest, or write it."""
        if self._writer is not None:
            self._writer.update_manifest(changes, add=add)
        elif add:
            self._added.update(changes)

    def then(self, job: Callable[[], object]) -> None:
        """Have a function called by the writer, once awake."""
        if self._writer is not None:
            self._writer.then(job)

    def flush(self) -> None:
        """Wait for the disk, once awake."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """End, and leave nothing behind where nothing was wrong."""
        if self._writer is not None:
            self._writer.close()

    def _activate(self, step: int, message: str) -> None:
        self._writer = self._make()
        self._writer.update_manifest(self._added, add=True)
        for event in self._events:
            self._writer.event(*event)
        for row in self._kept:
            self._writer.steps(row)
        self._writer.event(step, "recording", None, message)
        self.on_activate()


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0

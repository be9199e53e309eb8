"""Steps of a run as tokens seen or wall time: what an axis over steps may be drawn in instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .arrays import ints
from .step_ranges import width_of

if TYPE_CHECKING:
    from fp8debug import Run

#: Steps whose place is read; those between lie on a line between them.
MAX_PLACES = 500
#: Unit of an axis of time, in seconds, and its name; the largest that the run lasts twice as long as.
_UNITS = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True, kw_only=True)
class StepScale:
    """Places of steps on another axis.

    Attributes:
        name: ``tokens`` or ``time``.
        title: of the axis, with its unit.
        steps: int32 ``[places]``, rising.
        at: float64 ``[places]``, never falling: tokens since the first step, or the time since it.
    """

    name: str
    title: str
    steps: NDArray[np.int32]
    at: NDArray[np.float64]

    def __call__(self, steps: Any) -> NDArray[np.float64]:
        """Return where steps lie; those outside the recorded ones lie at its ends."""
        return np.interp(np.asarray(steps, dtype=np.float64), self.steps, self.at)


def step_scale(run: Run, name: str) -> StepScale | None:
    """Return the scale ``tokens`` or ``time`` of a run; None for another name, and where it was not recorded.

    Tokens are the sum over ranks of ``steps.tokens``. Wall time runs from the first row's ``steps.time``: pauses count.
    """
    column = {"tokens": "tokens", "time": "time"}.get(name)
    if column is None or not run.has(column):
        return None
    bounds = run.sql(f"SELECT min(step) AS a, max(step) AS b FROM steps WHERE {column} IS NOT NULL").to_pylist()[0]
    if bounds["a"] is None:
        return None
    width = width_of(run, "raw_steps", bounds["a"], bounds["b"], MAX_PLACES)
    edge, value = ("max", "sum(tokens)") if name == "tokens" else ("min", "min(time)")  # of the steps that share a place
    table = run.sql(
        f"SELECT {edge}(step) AS step, {value} AS v FROM steps WHERE {column} IS NOT NULL"
        f" GROUP BY CAST(floor((step - {int(bounds['a'])}) / {width}) AS BIGINT) ORDER BY 1"
    )
    steps, values = ints(table, "step"), table.column("v").to_numpy()
    if len(steps) < 2:
        return None
    if name == "tokens":
        return StepScale(name=name, title="tokens", steps=steps, at=np.cumsum(values.astype(np.float64)))
    microseconds = values.astype("datetime64[us]").astype(np.int64)
    seconds = np.maximum.accumulate(microseconds - microseconds[0]) / 1e6
    unit, words = next(((u, w) for u, w in _UNITS if seconds[-1] >= 2 * u), _UNITS[-1])
    return StepScale(name=name, title=f"wall time, {words}", steps=steps, at=seconds / unit) if seconds[-1] > 0 else None

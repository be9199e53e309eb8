"""NaN and Inf as states of a value beside its number, so that no page draws them as 0 or takes them for "not recorded".

Statistics are those of the finite elements of a tensor: of a tensor that is all NaN the amax is 0, the SQNR null. The states come
from the counts of elements that are not finite. Where no finite element is left there is no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fp8debug import Run

States = NDArray[np.int8]

#: What a tensor holds beside finite elements, the largest counts: infinities, what its cast or GEMM made of finite elements, NaN;
#: and a value that was not recorded.
FINITE, INF, MADE, NAN, MISSING = 0, 1, 2, 3, 4
#: In words, for legends, tables and notes beside lines.
NAMES = {INF: "Inf", MADE: "NaN or Inf made here", NAN: "NaN", MISSING: "not recorded"}

#: SQL over ``sites``, ``stats`` or ``raw``: the state of a row, and whether the reference has no finite element.
STATE_SQL = (
    f"CASE WHEN num_nan > 0 THEN {NAN} WHEN num_actual_nonfinite > 0 THEN {MADE} WHEN num_inf > 0 THEN {INF} ELSE {FINITE} END"
)
LOST_SQL = "coalesce(num_nan + num_inf >= numel AND numel > 0, FALSE)"
#: Metrics that count all elements, blocks or rows: they are as good where elements are not finite.
COUNTS = frozenset(
    (
        *("numel", "num_tensors", "num_nan", "num_inf", "num_actual_nonfinite", "nonfinite_rate", "actual_nonfinite_rate"),
        *("num_rows", "num_nonfinite_rows", "num_blocks", "num_choice_rows", "num_damage_rows"),
    )
)


def has_nonfinite(run: Run) -> bool:
    """Return whether any tensor of a run holds NaN or Inf; asked once, answered for most runs by the statistics of the files."""
    columns = [name for name in ("num_nan", "num_inf", "num_actual_nonfinite") if name in run.columns]
    asked = (f"SELECT 1 AS one FROM raw WHERE {name} > 0 LIMIT 1" for name in columns)
    return bool(run.memo("has nonfinite", lambda: any(run.sql(query).num_rows for query in asked)))


def state_sql(run: Run, metric: str = "") -> str:
    """Return SQL for the state of a row of a metric."""
    return STATE_SQL if metric not in COUNTS and has_nonfinite(run) else str(FINITE)


def value_sql(run: Run, metric: str) -> str:
    """Return SQL for a metric that is null where no finite element is left."""
    return f"CASE WHEN {LOST_SQL} THEN NULL ELSE {metric} END" if state_sql(run, metric) == STATE_SQL else metric


def states_of(values: Iterable[float | None]) -> States:
    """Return the states of plain numbers, a loss say: NaN, Inf, or finite; None was not recorded."""
    found = [MISSING if v is None else NAN if v != v else INF if v in (np.inf, -np.inf) else FINITE for v in values]
    return np.array(found, dtype=np.int8)


def spans_of(steps: NDArray[np.int32], states: States) -> Iterator[tuple[int, int | None, int]]:
    """Yield (first step, last step, state) of each stretch that is not finite; the last is None where it lasts to the end.

    The state is the largest of the stretch. What was not recorded is no stretch.
    """
    lost = (states > FINITE) & (states < MISSING)
    for is_lost, group in groupby(range(len(steps)), key=lambda i: bool(lost[i])):
        if is_lost:
            places = list(group)
            last = None if places[-1] == len(steps) - 1 else int(steps[places[-1]])
            yield int(steps[places[0]]), last, int(states[places].max())


def in_words(first: int, last: int | None, state: int) -> str:
    """Return a stretch in words: "NaN from step 40", "Inf at step 7", "NaN in steps 40 to 60"."""
    where = (
        f"from step {first:,}" if last is None else f"at step {first:,}" if first == last else f"in steps {first:,} to {last:,}"
    )
    return f"{NAMES[state]} {where}"

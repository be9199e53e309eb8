"""The steps of a run: the first and the last, a part of them, and how many share a cell or a point."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from fp8debug.store.stream import ROWS_PER_GROUP

from .records import Ints

if TYPE_CHECKING:
    from fp8debug import Run

#: Rows that are unpacked of a huge run while a reader waits, about a second, and the sampled steps that are read for it.
MOST_ROWS = 8_000_000
FEWEST_READ, MOST_READ = 16, 256
#: Of these the part that is read for a picture that a reader waits for, and that comes closer by itself: the health, which
#: takes five times what one metric takes.
GLANCE = 8


def cell_width_of(run: Run, first: int, last: int, most: int) -> int:
    """Return how many steps share a cell of a picture of all modules: each that takes turns has a row in each cell."""
    turns = turns_of(run)
    least = turns * (run.manifest.get("every") or 1) if turns > 1 else 1
    return max(width_of(run, "raw", first, last, most), least)


def turns_of(run: Run) -> int:
    """Return in how many sampled steps a module was recorded once; 1 where modules take no turns."""
    return max(1, run.manifest.get("turns") or 1)


def width_of(run: Run, view: str, first: int, last: int, most: int) -> int:
    """Return how many steps share a cell or point: one, as long as no more than ``most`` of them have rows.

    Sampled steps share a cell by whole intervals of sampling: cells of one width are a picture, others are painted one by one.
    """
    if last - first < most:
        return 1
    every = 1
    if view == "raw":
        steps = [step for step in run.sampled_steps if step is not None and first <= step <= last]
        num, every = len(steps), min((b - a for a, b in pairwise(steps)), default=1)
    else:
        count = f"SELECT count(DISTINCT step) AS n FROM {view} WHERE step BETWEEN {first} AND {last}"
        num = run.sql(count).column("n")[0].as_py()
    return 1 if num <= most else every * -(-(last - first + 1) // (most * every))


def step_condition(run: Run, first: int, last: int, is_thin: bool = False, part: int = 1) -> tuple[str, int]:
    """Return the SQL condition on the steps from one to another, and of how many sampled steps it takes one.

    Args:
        run: the run.
        first: first step.
        last: last step.
        is_thin: take ``MOST_READ`` sampled steps at most, as far apart as one another, the last among them. Each takes a
            row group of every rank to be unpacked, and these have no more than ``MOST_ROWS`` rows together.
        part: of these rows one in so many.
    """
    apart = _apart(run, first, last, part) if is_thin else 1
    if apart <= 1:
        return f"step BETWEEN {first} AND {last}", 1
    return f"step IN ({', '.join(map(str, steps_read(run, first, last, is_thin, part).tolist()))})", apart


def steps_read(run: Run, first: int, last: int, is_thin: bool = False, part: int = 1) -> Ints:
    """Return the sampled steps under :func:`step_condition`, ascending."""
    sampled = _sampled(run, first, last)
    apart = _apart(run, first, last, part) if is_thin else 1
    return np.array(sampled[(len(sampled) - 1) % apart :: apart], dtype=np.int32)


def _sampled(run: Run, first: int, last: int) -> list[int]:
    return [step for step in run.sampled_steps if step is not None and first <= step <= last]


def _apart(run: Run, first: int, last: int, part: int) -> int:
    rows = max(ROWS_PER_GROUP * len(run.ranks), run.num_rows // max(1, len(run.sampled_steps)))
    apart = -(-len(_sampled(run, first, last)) // max(FEWEST_READ, min(MOST_READ, MOST_ROWS // (part * rows))))
    while apart > 1 and gcd(apart, turns_of(run)) > 1:  # or some modules would never have their turn in the steps that are read
        apart += 1
    return max(1, apart)


def sites_within(run: Run, first: int, last: int, is_thin: bool = False, part: int = 1) -> tuple[str, int]:
    """Return the SQL text of ``sites`` under ``step_condition``, to which more conditions can be added, and the same number."""
    within, apart = step_condition(run, first, last, is_thin, part)
    if apart == 1:
        return f"sites WHERE {within}", 1
    # The steps are chosen before ranks are joined: a list of values is not pushed through the join.
    return f"({run.sites_of(f'(SELECT * FROM raw WHERE {within}) AS chosen', run.slots)}) AS few WHERE TRUE", apart


def step_range(run: Run, first: int | None = None, last: int | None = None) -> tuple[int, int] | None:
    """Return the steps of a run, inclusive, cut to what is asked for; None where nothing is left of them."""
    low, high = run.steps_range
    low, high = max(low, low if first is None else first), min(high, high if last is None else last)
    return (low, high) if low <= high else None

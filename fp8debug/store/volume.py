"""Volume that a run will write: rows of a sampled step times bytes of a row, and the ``every`` that keeps a budget.

What is chosen hangs on the model and the options alone, never on what was written so far: all ranks sample the same steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.errors import UsageError
from fp8debug.recipes import Recipe
from fp8debug.types import OPERAND_SITES, RESULTS

#: Bytes of a row in a Parquet part: 80 and 45 as tests/bench/volume.py measures them (docs/robustness.md), and a margin.
STATS_ROW_BYTES, STEPS_ROW_BYTES = 100, 50
#: Steps a run is planned for when nobody says how many it will have.
DEFAULT_STEPS = 1_000_000
#: A step in so many is worth recording at least; a smaller budget records fewer ranks.
MAX_EVERY = 1000

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Expected size of a run.

    Attributes:
        rows_per_step: rows of ``stats`` of a sampled step on one rank.
        every: one step in so many is sampled.
        ranks: ranks that record.
        steps: steps of the whole run.
        budget: bytes that it may take, or None.
    """

    rows_per_step: int
    every: int
    ranks: int
    steps: int = DEFAULT_STEPS
    budget: int | None = None

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of a sampled step on one rank."""
        return self.rows_per_step * STATS_ROW_BYTES

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of the whole run on one rank."""
        return self.bytes_per_sample * -(-self.steps // self.every) + STEPS_ROW_BYTES * self.steps

    @property
    def bytes_in_all(self) -> int:
        """Bytes of the whole run."""
        return self.bytes_per_rank * self.ranks

    def __str__(self) -> str:
        sampled = f"{self.rows_per_step} rows, {in_words(self.bytes_per_sample)}, of each sampled step, one in {self.every}"
        ranks = f"{self.ranks} rank" + ("s" if self.ranks > 1 else "")
        within = "" if self.budget is None else f", within the budget of {in_words(self.budget)}"
        return f"{sampled}, on {ranks}: {in_words(self.bytes_in_all)} in {self.steps:,} steps{within}"


def plan_volume(
    rows_per_step: int, *, every: int = 10, ranks: int = 1, steps: int = DEFAULT_STEPS, budget: int | str | None = None
) -> Volume:
    """Choose ``every``, and if that is not enough the number of ranks, such that a run stays within a budget.

    Args:
        rows_per_step: rows of ``stats`` of a sampled step on one rank; :func:`rows_of_module` counts them.
        every: the wish; a budget makes it a multiple of this, of at most ``MAX_EVERY`` where that can be.
        ranks: ranks that would record.
        steps: of the whole run.
        budget: bytes or a text such as ``50GB`` for all ranks together; None is no limit.

    Returns:
        the plan; its ``ranks`` are fewer than asked when the budget cannot hold all of them.

    Raises:
        UsageError: a number below 1, a budget that is no size, or one that does not hold a single rank.
    """
    if min(rows_per_step, every, ranks, steps) < 1:
        raise UsageError(
            f"a plan needs rows, every, ranks and steps of at least 1, got {rows_per_step}, {every}, {ranks}, {steps}"
        )
    limit = None if budget is None else parse_size(budget)
    wished = Volume(rows_per_step=rows_per_step, every=every, ranks=ranks, steps=steps, budget=limit)
    if limit is None or wished.bytes_in_all <= limit:
        return wished
    most = max(every, MAX_EVERY // every * every)
    for count in (ranks, *(ranks // 2**halving for halving in range(1, ranks.bit_length()))):
        left = limit / count - STEPS_ROW_BYTES * steps
        samples = math.floor(left / wished.bytes_per_sample)
        needed = -(-steps // samples) if samples > 0 else most + 1
        chosen = -(-needed // every) * every
        if chosen <= most:
            return Volume(rows_per_step=rows_per_step, every=chosen, ranks=count, steps=steps, budget=limit)
    least = Volume(rows_per_step=rows_per_step, every=most, ranks=1, steps=steps).bytes_in_all
    raise UsageError(
        f"a budget of {in_words(limit)} does not hold {steps:,} steps of one rank, which take {in_words(least)} at every={most};"
        " give more, fewer steps (total_steps=), or watch fewer modules (include=)"
    )


def rows_of_module(running: Recipe, what_if: Iterable[Recipe]) -> int:
    """Return how many rows a Linear has in a sampled step, given its recipe and those that are tried beside it."""
    recipes = [running, *what_if]
    casts = [{str(cast) for recipe in recipes if (cast := recipe.casts[site]) is not None} for site in OPERAND_SITES]
    return sum(map(len, casts)) + 2 * len(RESULTS)


def parse_size(size: int | str) -> int:
    """Return bytes from a number of them or a text such as ``50GB`` (decimal units).

    Raises:
        UsageError: it is neither, or below one byte.
    """
    number: float | str = size
    if isinstance(size, str) and (found := _SIZE.fullmatch(size)):
        number = float(found[1]) * _UNITS[found[2].upper().removesuffix("B")]
    if isinstance(number, bool) or not isinstance(number, int | float) or not 1 <= number < 2**62:
        raise UsageError(f"a size is a number of bytes or a text such as '50GB', got {size!r}")
    return int(number)


def in_words(size: float) -> str:
    """Return bytes as people read them: ``1.9 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"

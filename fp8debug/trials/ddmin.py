"""Delta debugging (Zeller and Hildebrandt, IEEE TSE 28(2), 2002): a small set of items that still passes a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def minimize(
    items: Sequence[T], test: Callable[[list[T]], bool], keep: Callable[[list[T]], None] = lambda found: None
) -> list[T]:
    """Return a subset that passes the test and of which no single item can be taken away.

    Where the test is monotonic (a superset of a passing set passes) that is a minimal set; otherwise a local minimum. Earlier
    items are tried first.

    Args:
        items: a set that is known to pass; the empty set is known not to.
        test: passes or not; never called twice with the same set.
        keep: called with every smaller set that passed.
    """
    known: dict[tuple[T, ...], bool] = {}

    def passes(subset: list[T]) -> bool:
        key = tuple(subset)
        if key not in known:
            known[key] = test(subset)
            if known[key]:
                keep(subset)
        return known[key]

    found = list(items)
    num_chunks = 2
    while len(found) > 1:
        chunks = _split(found, num_chunks)
        smaller = next((chunk for chunk in chunks if passes(chunk)), None)
        if smaller is not None:
            found, num_chunks = smaller, 2
            continue
        # With two chunks each is the other's complement.
        complements = [[x for x in found if x not in chunk] for chunk in chunks] if num_chunks > 2 else []
        smaller = next((rest for rest in complements if passes(rest)), None)
        if smaller is not None:
            found, num_chunks = smaller, max(num_chunks - 1, 2)
        elif num_chunks < len(found):
            num_chunks = min(2 * num_chunks, len(found))
        else:
            break
    return found


def _split(items: list[T], num_chunks: int) -> list[list[T]]:
    bounds = [len(items) * i // num_chunks for i in range(num_chunks + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


def count_tests(num_items: int, culprits: Sequence[int]) -> int:
    """Return how many tests :func:`minimize` takes when the set passes that holds all these items (by position)."""
    count = 0

    def test(subset: list[int]) -> bool:
        nonlocal count
        count += 1
        return set(culprits) <= set(subset)

    minimize(range(num_items), test)
    return count

"""Variations of known faults: another layer, GEMM, granularity, format, optimizer, step; ``variants.py`` keeps the score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8debug.registry import register_all
from tests.bench.situations import OUTCOMES, Expected


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variation of a known fault.

    Attributes:
        kind: number of the fault that it varies, of a failure mode (``m40``), or ``clean``.
        name: short, unique.
        met: set of variations that the tool met together, 1 the oldest; the rules were sharpened on each before the next.
        first: outcome when the tool first met it, which is never changed.
        expected: what is right, written down before.
        record: trains into ``folder/sick``, and ``folder/clean`` where it has a healthy twin.
        judge: the outcome of what was recorded, where it is no run that triage reads.
    """

    kind: str
    name: str
    met: int
    first: str
    expected: Expected
    record: Callable[[Path], None]
    judge: Callable[[Path], str] | None


VARIANTS: list[Variant] = []


def variant(
    kind: str, judge: Callable[[Path], str] | None = None, *, first: str, met: int = 1, **expected: Any
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a function that records a variation."""
    assert first in OUTCOMES, first

    def add(record: Callable[[Path], None]) -> Callable[[Path], None]:
        name = record.__name__
        assert name not in {one.name for one in VARIANTS}
        right = Expected(**expected)
        VARIANTS.append(Variant(kind=kind, name=name, met=met, first=first, expected=right, record=record, judge=judge))
        return record

    return add


register_all(__name__, __path__)

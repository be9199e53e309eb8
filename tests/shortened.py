"""Parameters of which `make test` runs some of each kind, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def shortened(cases: Iterable[Any], short: int | Collection[Any]) -> list[Any]:
    """Return parameters, marked ``long`` but for every ``short``-th from the first, or for those that ``short`` holds.

    A case that is a tuple is one of several arguments.
    """
    cases = list(cases)
    kept = cases[::short] if isinstance(short, int) else [case for case in cases if case in short]
    assert kept and (isinstance(short, int) or len(kept) == len(short)), f"none of {short}"
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]

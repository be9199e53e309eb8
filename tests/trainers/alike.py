"""Requirements on every trainer of several ranks: it trains the same under a watch, and the run is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp8debug
from tests.ranks import found_by

SITES = "SELECT module, count(DISTINCT gemm || tensor) AS n FROM sites WHERE actual GROUP BY module"


def trained_alike(folder: Path, name: str) -> tuple[list[Any], fp8debug.Run]:
    """Return what both ranks found alone and watched, which is the same to the last bit, and the run of both."""
    ranks = found_by(folder, name)
    for alone, watched in ranks:
        assert watched == alone
    run = fp8debug.Run(folder / name)
    assert run.ranks == [0, 1] and run.problems == []
    return ranks, run


def num_sites(run: fp8debug.Run) -> dict[str, int]:
    """Return how many sites each module that was recorded has."""
    return {row["module"]: row["n"] for row in run.sql(SITES).to_pylist()}

"""History of one operand, and its dumps: exponents at every step, and the error of each tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fp8debug.errors import RunError
from fp8debug.formats import FORMATS
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.store.dump_files import Dump, dumps_of

from .arrays import floats, ints, states
from .nonfinite import LOST_SQL, STATE_SQL, has_nonfinite, spans_of
from .records import BlockMap, History, Ints
from .step_ranges import sites_within, step_range, width_of

if TYPE_CHECKING:
    from fp8debug import Run

#: Columns of the history, and rows and columns of a block map, that a screen can show.
MAX_COLUMNS, MAX_TILES = 240, 192


def history(run: Run, module: str, site: tuple[str, str], cast: str | None = None, is_thin: bool = False) -> History | None:
    """Return the exponents of a site over steps, several steps added up where there are many; None without any.

    Args:
        run: the run.
        module: FQN.
        site: (gemm, tensor).
        cast: name of the cast whose range is drawn in; the running one by default.
        is_thin: read some of many steps, see ``spans.step_condition``.
    """
    first, last = step_range(run) or (0, 0)
    width = width_of(run, "raw", first, last, MAX_COLUMNS)
    cell = f"CAST(floor((step - {first}) / {width}) AS BIGINT)"
    bins = ", ".join(f"sum(log2_hist[{i + 1}]) AS b{i}" for i in range(NUM_BINS))
    sites, _ = sites_within(run, first, last, is_thin)
    of_site = "module = ? AND gemm = ? AND tensor = ? AND reference = 'operand'"
    # Not a condition on the rows: pushed into the scan it unpacks the histograms of all modules before the others are dropped.
    counted = run.sql(
        f"SELECT min(step) FILTER (WHERE log2_hist IS NOT NULL) AS step, {cell} AS cell, {bins} FROM {sites} AND {of_site}"
        f" GROUP BY {cell} HAVING count(log2_hist) > 0 ORDER BY 2",
        [module, *site],
    )
    if not counted.num_rows:
        return None
    which, named = ("cast_name = ?", [cast]) if cast is not None else ("actual", [])
    scaled = run.sql(
        f"SELECT {cell} AS cell, min(cast_name) AS cast_name, avg(scale_inv_mean_log2) AS s FROM {sites}"
        f" AND {of_site} AND {which} AND scale_inv_mean_log2 IS NOT NULL GROUP BY {cell} ORDER BY 1",
        [module, *site, *named],
    )
    counts = np.stack([floats(counted, f"b{i}") for i in range(NUM_BINS)])
    scale = dict(zip(ints(scaled, "cell").tolist(), floats(scaled, "s").tolist(), strict=True))
    name = str(scaled.column("cast_name")[0].as_py()) if scaled.num_rows else ""
    total = counts.sum(axis=0)
    return History(
        first_log2=FIRST_LOG2,
        steps=ints(counted, "step"),
        shares=(counts / np.where(total > 0, total, 1)).astype(np.float32),
        scale_inv_log2=np.array([scale.get(c, np.nan) for c in ints(counted, "cell").tolist()], dtype=np.float32),
        format=name.split(" ")[0] if name.split(" ")[0] in FORMATS else "",
        cast_name=name,
        lost=tuple(_lost(run, f"{sites} AND {of_site}", [module, *site], ints(counted, "step"))),
    )


def _lost(run: Run, sites: str, params: list[str], counted: Ints) -> Iterator[tuple[int, int | None, int]]:
    """Yield the stretches of steps at which a site has no finite element, and so no exponents."""
    if not has_nonfinite(run):
        return
    table = run.sql(f"SELECT step, max({STATE_SQL}) AS state FROM {sites} AND {LOST_SQL} GROUP BY step ORDER BY step", params)
    steps = np.concatenate([counted, ints(table, "step")])
    found = np.concatenate([np.zeros(len(counted), np.int8), states(table, "state")])
    order = np.argsort(steps, kind="stable")
    yield from spans_of(steps[order], found[order])


def dumped_steps(run: Run, module: str) -> list[tuple[int, str]]:
    """Return (step, site) of every dump of a module."""
    return sorted({(dump.step, f"{dump.gemm}.{dump.tensor}") for dump in dumps_of(run, module)})


def block_map(run: Run, module: str, site: tuple[str, str], step: int) -> BlockMap | None:
    """Return the error of each tile of a site's dump, of the step nearest to the given one; None without a dump.

    Raises:
        RunError: the file cannot be read.
    """
    found = [d for d in dumps_of(run, module) if (d.gemm, d.tensor) == site and d.cast_name]
    if not found:
        return None
    dump = min(found, key=lambda d: (abs(d.step - step), d.rank, d.call))
    values = _maps(dump)
    strides = (-(-values.shape[0] // MAX_TILES), -(-values.shape[1] // MAX_TILES))
    title = (
        f"{dump.gemm} {dump.tensor} at step {dump.step:,}, rank {dump.rank}, {dump.cast_name}; why it was dumped: {dump.reason}"
    )
    return BlockMap(title=title, sqnr_db=_worst(values, strides), tile=dump.tile, stride=strides)


def _maps(dump: Dump) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    values = np.asarray(dump.sqnr_db, dtype=np.float32)
    if values.ndim != 2 or not values.size:
        raise RunError(f"{dump.path} holds no map of its tiles")
    return np.minimum(values, np.float32(140))  # no error at all: as good as FP32


def _worst(
    values: np.ndarray[tuple[int, int], np.dtype[np.float32]], strides: tuple[int, int]
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return the smallest of each strides[0] x strides[1] values, NaN only where all of them are."""
    filled = np.where(np.isnan(values), np.float32(np.inf), values)
    for axis, stride in enumerate(strides):
        filled = np.minimum.reduceat(filled, np.arange(0, filled.shape[axis], stride), axis=axis)
    return np.where(np.isinf(filled), np.float32(np.nan), filled).astype(np.float32)

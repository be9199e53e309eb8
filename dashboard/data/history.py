"""History of one operand, and its dumps: exponents at every step, and the error of each tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp8debug.errors import RunError
from fp8debug.formats import FORMATS
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.store.dump_files import Dump, dumps_of

from .arrays import floats, ints
from .nonfinite import LOST_SQL, STATE_SQL, has_nonfinite, spans_of
from .records import BlockMap, Floats, History, Ints
from .step_ranges import sites_within, step_range, width_of

if TYPE_CHECKING:
    from fp8debug import Run

#: Columns of the history, and rows and columns of a block map, that a screen can show.
MAX_COLUMNS, MAX_TILES = 240, 192


@dataclass(frozen=True, kw_only=True)
class ModuleHistory:
    """Exponents of all operands of one module over steps, whatever the cast: rows of (gemm, tensor, cast name, running, cell).

    Attributes:
        sites: (gemm, tensor) of each row.
        casts: (cast name, running) of each row.
        cells: int64 ``[rows]``.
        steps: first step with a histogram, int32 ``[rows]``; of rows without one any number.
        counts: of each exponent, float32 ``[bins, rows]``.
        has_counts: where a row has a histogram, bool ``[rows]``.
        scale_sum: of the mean log2 of scale_inv, float32 ``[rows]``.
        scale_count: summands of it, int64 ``[rows]``.
        lost: of each site what ``History.lost`` is.
        end: what ``History.end`` is.
    """

    sites: tuple[tuple[str, str], ...]
    casts: tuple[tuple[str, bool], ...]
    cells: Ints
    steps: Ints
    counts: Floats
    has_counts: NDArray[np.bool_]
    scale_sum: Floats
    scale_count: Ints
    lost: Mapping[tuple[str, str], tuple[tuple[int, int | None, int], ...]]
    end: int | None = None

    def of(self, site: tuple[str, str], cast: str | None = None) -> History | None:
        """Return the exponents of a site, with the scales of a cast (the running one by default); None without any."""
        own = np.array([one == site for one in self.sites], np.bool_)
        counted = np.flatnonzero(own & self.has_counts)
        if not len(counted):
            return None
        cells, column = np.unique(self.cells[counted], return_inverse=True)
        counts = np.zeros((NUM_BINS, len(cells)), np.float64)
        np.add.at(counts.T, column, self.counts[:, counted].T)
        steps = np.full(len(cells), np.iinfo(np.int32).max, np.int32)
        np.minimum.at(steps, column, self.steps[counted])
        is_cast = np.array([actual if cast is None else name == cast for name, actual in self.casts], np.bool_)
        scaled = np.flatnonzero(own & is_cast & (self.scale_count > 0) & np.isin(self.cells, cells))
        sums, numbers = np.zeros(len(cells)), np.zeros(len(cells))
        at = np.searchsorted(cells, self.cells[scaled])
        np.add.at(sums, at, self.scale_sum[scaled])
        np.add.at(numbers, at, self.scale_count[scaled])
        name = min(((int(self.cells[i]), self.casts[i][0]) for i in scaled.tolist()), default=(0, ""))[1]
        total = counts.sum(axis=0)
        return History(
            first_log2=FIRST_LOG2,
            steps=steps,
            shares=(counts / np.where(total > 0, total, 1)).astype(np.float32),
            scale_inv_log2=np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan).astype(np.float32),
            format=name.split(" ")[0] if name.split(" ")[0] in FORMATS else "",
            cast_name=name,
            lost=self.lost.get(site, ()),
            end=self.end,
        )


def module_history(run: Run, module: str, is_thin: bool = False) -> ModuleHistory:
    """Return the exponents of a module's operands over steps, several steps added up where there are many.

    One pass has all sites and casts: nearly all of it goes into unpacking the histograms of all modules.

    Args:
        run: the run.
        module: FQN.
        is_thin: read some of many steps, see ``step_ranges.step_condition``.
    """
    first, last = step_range(run) or (0, 0)
    width = width_of(run, "raw", first, last, MAX_COLUMNS)
    cell = f"CAST(floor((step - {first}) / {width}) AS BIGINT)"
    bins = ", ".join(f"sum(log2_hist[{i + 1}]) AS b{i}" for i in range(NUM_BINS))
    sites, _ = sites_within(run, first, last, is_thin)
    of_module = "module = ? AND reference = 'operand'"
    # Not a condition on the rows: pushed into the scan it unpacks the histograms of all modules before the others are dropped.
    table = run.sql(
        f"SELECT gemm, tensor, cast_name, actual, {cell} AS cell, coalesce(min(step) FILTER (WHERE log2_hist IS NOT NULL), 0)"
        f" AS step, count(log2_hist) AS num, sum(scale_inv_mean_log2) AS s, count(scale_inv_mean_log2) AS num_s, {bins}"
        f" FROM {sites} AND {of_module} GROUP BY gemm, tensor, cast_name, actual, {cell} ORDER BY 1, 2, 3, 4, 5",
        [module],
    )
    gemm, tensor, name, actual = (table.column(i).to_pylist() for i in range(4))
    found = tuple(zip(gemm, tensor, strict=True))
    counted: dict[tuple[str, str], list[int]] = {site: [] for site in found}
    steps, has_counts = ints(table, "step"), ints(table, "num") > 0
    for site, step, has in zip(found, steps.tolist(), has_counts.tolist(), strict=True):
        if has:
            counted[site].append(step)
    lost = _lost(run, f"{sites} AND {of_module}", module, counted)
    return ModuleHistory(
        sites=found,
        casts=tuple((one, bool(running)) for one, running in zip(name, actual, strict=True)),
        cells=ints(table, "cell"),
        steps=steps,
        counts=np.stack([np.nan_to_num(floats(table, f"b{i}")) for i in range(NUM_BINS)]),
        has_counts=has_counts,
        scale_sum=np.nan_to_num(floats(table, "s")),
        scale_count=ints(table, "num_s"),
        lost=lost,
        end=max((step for step in run.sampled_steps if step is not None), default=None) if any(lost.values()) else None,
    )


def _lost(
    run: Run, sites: str, module: str, counted: Mapping[tuple[str, str], Sequence[int]]
) -> dict[tuple[str, str], tuple[tuple[int, int | None, int], ...]]:
    """Return of each site the stretches of steps at which it has no finite element, and so no exponents."""
    if not has_nonfinite(run):
        return {}
    rows = run.sql(
        f"SELECT gemm, tensor, step, max({STATE_SQL}) AS state FROM {sites} AND {LOST_SQL} GROUP BY gemm, tensor, step", [module]
    )
    found = {site: dict.fromkeys(steps, 0) for site, steps in counted.items()}
    for row in rows.to_pylist():
        found.setdefault((row["gemm"], row["tensor"]), {})[row["step"]] = row["state"]
    spans = {}
    for site, states in found.items():
        steps = np.array(sorted(states), np.int32)
        spans[site] = tuple(spans_of(steps, np.array([states[step] for step in steps.tolist()], np.int8)))
    return spans


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

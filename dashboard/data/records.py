"""Records that queries hand to figures: small frozen records of numpy arrays, so that a figure is tested without a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .nonfinite import States

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class StepSeries:
    """One line over steps; one point may stand for several sampled steps.

    Attributes:
        name: what the legend says.
        steps: int32 ``[points]``.
        values: float32 ``[points]``, NaN where there is no data.
        states: of ``nonfinite``, int8 ``[points]``, or None where all values are finite.
        low: smallest value behind each point, float32 ``[points]``, or None when a point is one value.
        high: largest value behind each point.
        gemm: GEMM of the site, or "".
        tensor: tensor of the site, or "".
        cast_name: cast of the values, or "".
        reference: ``operand``, ``shadow``, ``exact`` or "".
        actual: False for a what-if.
    """

    name: str
    steps: Ints
    values: Floats
    states: States | None = None
    low: Floats | None = None
    high: Floats | None = None
    gemm: str = ""
    tensor: str = ""
    cast_name: str = ""
    reference: str = ""
    actual: bool = True


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Marker of the step at which findings begin: their codes, the worst severity and one line each for the hover text."""

    step: int
    severity: str
    codes: tuple[str, ...]
    lines: tuple[str, ...]
    module: str | None = None


@dataclass(frozen=True, kw_only=True)
class Heat:
    """One metric over modules and steps.

    Attributes:
        metric: column name.
        unit: unit of the column.
        modules: names in execution order.
        steps: first step of each column of cells, int32 ``[columns]``.
        values: float32 ``[modules, columns]``, NaN where nothing finite was recorded.
        states: of ``nonfinite``, int8 ``[modules, columns]``: tells NaN, Inf and what was not recorded apart.
        kinds: bits of ``envelopes``, int32 ``[modules, columns]``.
        reasons: of a health, the codes of ``health``, int32 ``[modules, columns]``, negative where there is none.
        sites: of a health, (gemm, tensor, reference) by their places in those numbers.
        steps_per_cell: how many steps one cell spans; above 1 it shows the worst of them.
        steps_apart: above 1 each so many-th sampled step was read.
        marks: findings that name a module.
    """

    metric: str
    unit: str
    modules: tuple[str, ...]
    steps: Ints
    values: Floats
    kinds: Ints
    states: States | None = None
    reasons: Ints | None = None
    sites: tuple[tuple[str, str, str], ...] = ()
    steps_per_cell: int = 1
    steps_apart: int = 1
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CastRange:
    """Range of a cast, as log2 of the magnitude before the cast; min and max over its blocks.

    Attributes:
        name: cast name.
        actual: False for a what-if.
        scale_inv_log2: (smallest, mean, largest) log2 of scale_inv.
        format: name of the number format.
    """

    name: str
    actual: bool
    scale_inv_log2: tuple[float, float, float]
    format: str


@dataclass(frozen=True, kw_only=True)
class ExponentHistogram:
    """Exponents of one tensor at one step.

    Attributes:
        first_log2: floor(log2(abs x)) of the first bin.
        counts: int64 ``[bins]``.
        step: the step.
        cast: range of the cast to draw in, or None.
    """

    first_log2: int
    counts: NDArray[np.int64]
    step: int
    cast: CastRange | None = None


@dataclass(frozen=True, kw_only=True)
class History:
    """Exponents of one tensor over steps, with the range of a cast at each.

    Attributes:
        first_log2: floor(log2(abs x)) of the first bin.
        steps: int32 ``[points]``.
        shares: of all nonzeros, float32 ``[bins, points]``; 0 where there are none.
        scale_inv_log2: mean log2 of scale_inv, float32 ``[points]``, NaN where it is not known.
        format: name of the number format of the cast, or "".
        cast_name: of the cast, or "".
        lost: (first step, last step or None, state) of the stretches without any finite element.
        end: the last sampled step, where the last of these stretches ends; None where there are none.
    """

    first_log2: int
    steps: Ints
    shares: Floats
    scale_inv_log2: Floats
    format: str = ""
    cast_name: str = ""
    lost: tuple[tuple[int, int | None, int], ...] = ()
    end: int | None = None

    def with_gaps(self) -> tuple[Ints, Floats, Floats]:
        """Return steps, shares and scale_inv_log2 with columns of NaN at the ends of the stretches without finite elements."""
        ends = {step for first, last, _ in self.lost for step in (first, self.end if last is None else last) if step is not None}
        more = np.array(sorted(ends - set(self.steps.tolist())), np.int32)
        steps = np.concatenate([self.steps, more])
        order = np.argsort(steps, kind="stable")
        gap = np.full(len(more), np.nan, np.float32)
        shares = np.concatenate([self.shares, np.tile(gap, (len(self.shares), 1))], axis=1)
        return steps[order], shares[:, order], np.concatenate([self.scale_inv_log2, gap])[order]


@dataclass(frozen=True, kw_only=True)
class BlockMap:
    """SQNR of each tile of a dumped operand.

    Attributes:
        title: what it is of.
        sqnr_db: float32 ``[tile rows, tile columns]``; NaN where the tile is 0.
        tile: rows and columns of a tile.
        stride: tiles per cell that is drawn, (rows, columns); above 1 a cell shows the worst of them.
    """

    title: str
    sqnr_db: Floats
    tile: tuple[int, int]
    stride: tuple[int, int] = (1, 1)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Coverage of a run's Linears by FP8.

    Attributes:
        num_linears: all that were found.
        num_fp8: those that run in FP8.
        flops_share: share of FLOPs that run in FP8, in [0, 1]; None when neither counts nor shapes are recorded.
        is_of_all: whether the shares are of all forward GEMMs, or else of the Linears'.
        rest: (module, class, share, reason) of GEMMs outside the Linears, the largest first.
        casts: (casts in words, number of modules, share of FLOPs), most first.
        skipped: (module, kind, asked for, reason) of those that do not, in execution order.
        filters: (kind, pattern, modules matched).
    """

    num_linears: int
    num_fp8: int
    flops_share: float | None
    casts: tuple[tuple[str, int, float], ...] = ()
    skipped: tuple[tuple[str, str, str, str], ...] = ()
    is_of_all: bool = False
    rest: tuple[tuple[str, str, float, str], ...] = ()
    filters: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One line about a run: what the list of runs and the head of a page say.

    Attributes:
        name: folder name.
        recipe: name of the recipe, or "".
        first: first step, or None for a run without data.
        last: last step.
        sampled: number of sampled steps.
        ranks: number of ranks.
        loss: last loss, or None.
        state: ``writing``, ``ended`` or ``not closed``.
        written: when the newest file was written, in seconds since 1970; 0 when it is not known.
        problems: what could not be read.
        error: why the run cannot be shown, or "".
        is_empty: it holds no step yet, which is no fault of a run that is being written.
        line: the loss over steps, few points; None where none was recorded.
        settings: see ``run_settings.settings_of``.
    """

    name: str
    recipe: str = ""
    first: int | None = None
    last: int | None = None
    sampled: int = 0
    ranks: int = 0
    loss: float | None = None
    state: str = ""
    written: float = 0.0
    problems: tuple[str, ...] = field(default_factory=tuple)
    error: str = ""
    is_empty: bool = False
    line: StepSeries | None = None
    settings: Mapping[str, str | float] = field(default_factory=dict)

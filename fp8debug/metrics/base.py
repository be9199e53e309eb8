"""Interface of a metric: what one tensor contributes (slots), how contributions join (merge), and what is derived when read.

A metric's author writes ``slots``, ``partial()`` and ``derived``. The same merge rule then serves microbatches, ranks and
steps, and one property test holds it for every metric: ``merge(partial(a), partial(b)) == partial(cat(a, b))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from fp8debug.formats import FORMATS, block_shape
from fp8debug.metrics import expression
from fp8debug.recipes import Cast
from fp8debug.registry import Registry
from fp8debug.types import Quantized

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

Merge = Literal["sum", "max", "min"]
Kind = Literal["int64", "float64", "float32"]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One mergeable number (or ``size`` of them) that is stored.

    Attributes:
        name: column name.
        merge: how two contributions join.
        kind: int64 for counts, float64 for sums, float32 for extremes; a float32 count is exact only to 2^24.
        unit: ``1``, ``x`` (unit of the tensor), ``x^2``, ``log2``, ``dB``.
        doc: one sentence for the schema.
        size: how many numbers; more than one is stored as a list.
    """

    name: str
    merge: Merge
    kind: Kind
    unit: str
    doc: str
    size: int = 1

    @property
    def neutral(self) -> float:
        """The value that changes nothing when merged."""
        return {"sum": 0.0, "max": -math.inf, "min": math.inf}[self.merge]


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A column computed when read, from an expression over slot names (see ``expression``)."""

    expression: str
    unit: str
    doc: str


class Source:
    """The high-precision side of an observation, with what several casts of one tensor share.

    Args:
        x: tensor of any shape and float dtype; it is viewed as ``[rows, last dimension]``. FP32 holds BF16 and FP16 exactly.
    """

    def __init__(self, x: Tensor) -> None:
        x = x.detach() if x.requires_grad else x
        columns = x.shape[-1] if x.dim() else 1
        self.x = x.new_zeros(0, columns) if not x.numel() else x if x.dim() == 2 else x.reshape(-1, columns)
        #: What metrics found out about the reference alone, kept for the next cast of the same tensor.
        self.shared: dict[str, Tensor] = {}
        self._extremes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @cached_property
    def value(self) -> Tensor:
        """FP32 ``[rows, columns]``."""
        return self.x.float()

    @cached_property
    def nonfinite(self) -> Tensor | None:
        """Bool ``[rows, columns]``, or None when a tensor on the CPU, where looking costs no synchronization, has none."""
        if not self.value.is_cuda and self.value.numel() and bool(self.value.abs().amax().isfinite()):
            return None
        return ~self.value.isfinite()

    @cached_property
    def magnitude(self) -> Tensor:
        """FP32 absolute values, 0 where not finite."""
        return blanked(self.value.abs(), self.nonfinite)

    @cached_property
    def x64(self) -> Tensor:
        """FP64 ``[rows, columns]``."""
        return self.value.double()

    def block_extremes(self, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return amax and nonzero amin of each block, FP32 ``[grid rows, grid columns]``; 0 and Inf of a zero block."""
        if block not in self._extremes:
            amax = blocked(self.magnitude, block, 0.0).amax((1, 3))
            amin = blocked(self.magnitude.masked_fill(self.magnitude == 0, math.inf), block, math.inf).amin((1, 3))
            self._extremes[block] = amax, amin
        return self._extremes[block]


def blanked(values: Tensor, where: Tensor | None) -> Tensor:
    """Return values with 0 at ``where``; None is nowhere."""
    return values if where is None else values.masked_fill(where, 0.0)


@dataclass(frozen=True)
class Pair:
    """One observation: a reference and the actual tensor that stands for it.

    Attributes:
        source: the reference side.
        y: actual values ``[rows, columns]`` in FP32 (for an operand: dequantized).
        quantized: FP8 data and scale_inv; None for a GEMM's result.
        cast: the cast that made them; None for a result.
        grad: for fprop's output in the backward pass, grad_output of the same rows, ``[rows, columns]``.
        kind: empty, or what else than an operand or a result it is, for the metric of that: ``reread``, ``first_sum`` or
            ``later_sum``.
        whole_rows: False where columns were left out.
        read: the transformed reference, where the cast has a Hadamard transform; ``y`` has it undone.
        decoded: FP8 data as FP32 in the shape of the reference, where ``y`` was made of them.
    """

    source: Source
    y: Tensor
    quantized: Quantized | None = None
    cast: Cast | None = None
    grad: Tensor | None = None
    kind: str = ""
    whole_rows: bool = True
    read: Source | None = None
    decoded: Tensor | None = None

    @property
    def as_read(self) -> Source:
        """The reference as the cast and its GEMM read it: transformed where the cast has a Hadamard transform."""
        return self.source if self.read is None else self.read

    @property
    def format_max(self) -> float:
        """Largest finite value of the cast's format."""
        assert self.cast is not None
        return FORMATS[self.cast.format].max

    @property
    def block(self) -> tuple[int, int]:
        """Shape of the cast's blocks in this tensor."""
        assert self.cast is not None
        rows, columns = self.source.x.shape
        return block_shape(self.cast.granularity, rows, columns)

    @cached_property
    def data(self) -> Tensor:
        """FP8 data as FP32, before the scale."""
        assert self.quantized is not None
        return self.quantized.data.float().reshape(self.source.x.shape) if self.decoded is None else self.decoded

    @cached_property
    def scaled(self) -> Tensor:
        """FP32 ``abs(x) / scale_inv`` of what the cast reads, 0 where that is not finite."""
        return self.as_read.magnitude / self.spread_scale_inv

    @cached_property
    def spread_scale_inv(self) -> Tensor:
        """scale_inv repeated over its blocks: FP32, broadcastable to ``[rows, columns]``."""
        assert self.quantized is not None
        rows, columns = self.source.x.shape
        return spread(self.quantized.scale_inv, *self.block, rows, columns)

    @cached_property
    def made_nonfinite(self) -> Tensor | None:
        """Bool: finite in the reference, not in y; None when a tensor on the CPU has none."""
        if not self.y.is_cuda and self.source.nonfinite is None and bool(self.y.abs().amax().isfinite()):
            return None
        bad = ~self.y.isfinite()
        return bad if self.source.nonfinite is None else bad & ~self.source.nonfinite

    @cached_property
    def invalid(self) -> Tensor | None:
        """Bool: one side is not finite; sums skip these. None when there are none."""
        made, before = self.made_nonfinite, self.source.nonfinite
        if made is None or before is None:
            return made if before is None else before
        return made | before

    @cached_property
    def finite_rows(self) -> Tensor:
        """Bool ``[rows]``: both sides are finite in the whole row."""
        if self.invalid is None:
            return self.y.new_ones(len(self.y)).bool()
        return ~self.invalid.any(1)

    @cached_property
    def x64(self) -> Tensor:
        """Reference in FP64, 0 where a side is not finite."""
        return blanked(self.source.x64, self.invalid)

    @cached_property
    def y64(self) -> Tensor:
        """Actual in FP64, 0 where a side is not finite."""
        return blanked(self.y.double(), self.invalid)

    @cached_property
    def error64(self) -> Tensor:
        """y - x in FP64, 0 where a side is not finite."""
        return self.y64 - self.x64

    @cached_property
    def block_sides(self) -> tuple[Tensor, Tensor]:
        """Reference and error in FP64 as the cast reads them, 0 where a side is not finite."""
        if self.read is None:
            return self.x64, self.error64
        y = self.data * self.spread_scale_inv
        invalid = ~(y.isfinite() & self.read.value.isfinite())
        x = blanked(self.read.x64, invalid)
        return x, blanked(y.double(), invalid) - x

    def sum_per_block(self, values: Tensor) -> Tensor:
        """Sum ``[rows, columns]`` over each block of the cast: ``[grid rows, grid columns]``."""
        return blocked(values, self.block, 0.0).sum((1, 3))


def blocked(values: Tensor, block: tuple[int, int], fill: float) -> Tensor:
    """Return ``[grid rows, block rows, grid columns, block columns]``, the ragged edge filled with ``fill``."""
    (rows, columns), (block_rows, block_columns) = values.shape, block
    grid_rows, grid_columns = -(-rows // block_rows), -(-columns // block_columns)
    if (grid_rows * block_rows, grid_columns * block_columns) != (rows, columns):
        padded = values.new_full((grid_rows * block_rows, grid_columns * block_columns), fill)
        padded[:rows, :columns] = values
        values = padded
    return values.reshape(grid_rows, block_rows, grid_columns, block_columns)


def spread(grid: Tensor, block_rows: int, block_columns: int, rows: int, columns: int) -> Tensor:
    """Repeat a ``[grid rows, grid columns]`` tensor over its blocks; a dimension of one block stays 1 and broadcasts."""
    if grid.shape[0] > 1 and block_rows > 1:
        grid = grid.repeat_interleave(block_rows, 0, output_size=grid.shape[0] * block_rows)[:rows]
    if grid.shape[1] > 1 and block_columns > 1:
        grid = grid.repeat_interleave(block_columns, 1, output_size=grid.shape[1] * block_columns)[:, :columns]
    return grid


class Metric(Protocol):
    """One file in ``metrics/``: the slots one tensor fills, and what is derived from them; five constants and a function.

    Further constants keep it from being asked in vain, see :func:`uncovered`.
    """

    @property
    def name(self) -> str:
        """Name in the registry."""

    @property
    def of_results(self) -> bool:
        """False for a metric that needs FP8 data and scales, which a GEMM's result has not."""

    @property
    def present(self) -> str:
        """Name of the count slot that is 0 when the metric had nothing to see, so that its slots read as "no data"."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots that are stored."""

    @property
    def derived(self) -> Mapping[str, Derived]:
        """Values that are computed when read, by column name."""

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Return what one non-empty tensor contributes to each slot, as tensors on its device, without synchronizing."""
        ...


METRICS: Registry[Metric] = Registry("metric")


def uncovered(filled: Collection[str], columns: int, *, operand: bool, whole_rows: bool = True) -> list[Metric]:
    """Return the metrics with slots that no kernel has filled, of those that say something of such a tensor.

    Of what a metric has nothing to say, it tells by optional constants: ``of_operands = False``; ``max_columns``, of a result;
    ``of_whole_rows = True``; ``kinds``, the values of ``Pair.kind`` that it is for, where that is not the ordinary pair.

    Args:
        filled: names of slots.
        columns: of the tensor.
        operand: an operand with its FP8 twin, not a GEMM's result.
        whole_rows: False where columns of a result were left out.
    """
    found = _uncovered(METRICS.version, frozenset(filled), operand)
    return found and [
        metric
        for metric in found
        if (operand or columns <= getattr(metric, "max_columns", columns))
        and (whole_rows or not getattr(metric, "of_whole_rows", False))
    ]


@cache
def _uncovered(version: int, filled: frozenset[str], operand: bool) -> list[Metric]:
    return [
        metric
        for metric in METRICS
        if not {slot.name for slot in metric.slots} <= filled
        and "" in getattr(metric, "kinds", ("",))
        and (getattr(metric, "of_operands", True) if operand else metric.of_results)
    ]


def slots() -> dict[str, Slot]:
    """Return every slot of every registered metric by name, in schema order."""
    return {slot.name: slot for metric in METRICS for slot in metric.slots}


def derived_columns() -> dict[str, Derived]:
    """Return every derived column of every registered metric by name."""
    return {name: derived for metric in METRICS for name, derived in metric.derived.items()}


def derive(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Compute every derived column from slot values; None is "no data"."""
    return {name: expression.evaluate(d.expression, values) for name, d in derived_columns().items()}

"""Rechecks of a tensor after its first read in a step: a second read in the backward pass, a sum over microbatches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels.dispatch import Slots
from fp8debug.kernels.gemm_error import OutputError
from fp8debug.kernels.reference import as_cast_reads
from fp8debug.kernels.sampling import Sample
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.base import spread
from fp8debug.metrics.gradient_sum import GradientSum
from fp8debug.metrics.noise import roundings
from fp8debug.metrics.reread import Reread
from fp8debug.recipes import Cast
from fp8debug.types import Quantized

#: Columns of weight.grad whose sum over microbatches is checked.
SUMMED_COLUMNS = 16
#: Rows and columns of an operand whose stochastic roundings are compared with those of the sampled step before.
_CORNER = 64
#: Distance between two values, in spacings, up to which they are one value: the same bits round it alike, as they should.
_SAME = 2.0**-10
_REREAD, _GRADIENT_SUM = Reread(), GradientSum()
HISTOGRAM = "log2_hist"
#: Slots of one tensor by the cast's name.
WhatIfSlots = dict[str, Slots]


@dataclass
class SavedForBackward:
    """Part of a sampled forward pass that is kept for its backward: sampled rows and columns, never a whole tensor.

    Attributes:
        output: fprop's error.
        columns: which columns of the input.
        input_columns: these.
        what_if: the what-if casts of the input.
        histogram: of the input, if it is known.
    """

    output: OutputError
    columns: Sample
    input_columns: Tensor
    what_if: WhatIfSlots = field(default_factory=dict)
    histogram: Tensor | None = None

    def source(self, x: Tensor) -> Source:
        """Return the input as what a cast of it is recorded by that was made in the backward pass."""
        found = Source(x)
        if self.histogram is not None:
            found.shared[HISTOGRAM] = self.histogram
        return found


def recheck(x: Tensor, read: Tensor, q: Quantized, cast: Cast) -> Slots:
    """Return the slots of ``Reread``: a sample ``x`` of a tensor that a GEMM reads as ``read``, and the whole of it in FP8."""
    return _REREAD.partial(Pair(source=Source(x), y=read, quantized=q, cast=cast, kind="reread")) if x.numel() else {}


class GradientSumCheck:
    """The FP32 sum of a weight's gradients in one step, on a few columns, beside what ``weight.grad`` holds of them.

    Autograd joins what one backward pass contributes before it touches ``weight.grad``; hence the sum of the passes before is
    compared when the next one begins. Nothing is compared where the weight is no leaf, so that the gradient goes elsewhere.
    After a step with one pass another such is expected: what it adds is not copied, and if a second pass comes all the same,
    nothing is compared in that step.

    Attributes:
        weight: the parameter, as the forward pass got it.
    """

    def __init__(self) -> None:
        self._num_passes, self._is_one = 0, False
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.weight: Tensor | None = None
        self._sum: Tensor | None = None
        if self._num_passes:
            self._is_one = self._num_passes == 1
        self._num_passes, self._graph_task = 0, -1

    def add(self, columns: Sample, gradient: Tensor | None) -> Slots:
        """Add a gradient and return the slots of ``GradientSum`` for those before it.

        Args:
            columns: which columns.
            gradient: ``[N, K]``.
        """
        if gradient is None or self.weight is None or not self.weight.is_leaf:
            return {}
        found: Slots = {}
        held = self.weight.grad
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            if self._sum is not None and held is not None and self._sum.numel():
                held = columns.few(held, SUMMED_COLUMNS).float()
                kind = "first_sum" if self._num_passes == 1 else "later_sum"
                found = _GRADIENT_SUM.partial(Pair(source=Source(self._sum.float()), y=held, kind=kind))
            self._num_passes += 1
        if self._is_one:
            return found
        new = columns.copy_of_few(gradient.detach(), SUMMED_COLUMNS)
        self._sum = new if self._sum is None else self._sum.float() + new.float()
        return found


class RepeatCheck:
    """Compare the stochastic roundings of an operand's corner with those of the sampled step before it.

    Roundings of two steps are independent, so that the sum of the products r r' over n elements has the mean 0 and the variance
    of the sum of f (1 - f) f' (1 - f'). Random numbers that come back correlate them: for values spread evenly over a spacing
    the sum is n / 12, sqrt(n) / 2 standard deviations. Elements that have not changed are left out: a generator whose
    state is made of the tensor rounds them alike. Nothing leaves the device.
    """

    def __init__(self) -> None:
        self._before: tuple[Tensor, Tensor] | None = None

    def compare(self, x: Tensor, q: Quantized, cast: Cast) -> Slots:
        """Return ``noise_repeat`` and ``noise_repeat_variance`` of an operand; zeros at the first of its shape.

        Args:
            x: high precision ``[rows, columns]``.
            q: the operand.
            cast: with stochastic rounding.
        """
        rows, columns = (min(extent, _CORNER) for extent in x.shape)
        source = as_cast_reads(Source(x[:rows, :columns]), cast)
        block = block_shape(cast.granularity, *x.shape)
        grid = q.scale_inv[: -(-rows // block[0]), : -(-columns // block[1])]
        scaled = source.magnitude / spread(grid, *block, rows, columns)
        data = q.data.reshape(x.shape)[:rows, :columns].float()
        up, rest = roundings(scaled, data, FORMATS[cast.format])
        r = (up - rest).masked_fill(~data.isfinite() | (rest == 0), 0.0)
        before, self._before = self._before, (r, rest)
        if before is None or before[0].shape != r.shape:
            none = r.new_zeros((), dtype=torch.float64)
            return {"noise_repeat": none, "noise_repeat_variance": none}
        has_changed = ((rest - before[1]).abs() > _SAME) & (r != 0) & (before[0] != 0)
        product = (r.double() * before[0]).masked_fill(~has_changed, 0.0)
        variance = (rest * (1 - rest) * before[1] * (1 - before[1])).double().masked_fill(~has_changed, 0.0)
        return {"noise_repeat": product.sum(), "noise_repeat_variance": variance.sum()}

"""Rechecks of a tensor after its first read in a step: a second read in the backward pass, a sum over microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8debug.formats import FORMATS, block_shape
from fp8debug.interruptions import is_ours
from fp8debug.kernels.dispatch import Slots
from fp8debug.kernels.gemm_error import OutputError
from fp8debug.kernels.reference import as_cast_reads
from fp8debug.kernels.sampling import Sample
from fp8debug.kernels.slot_rows import by_name
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.base import spread
from fp8debug.metrics.gradient_sum import GradientSum
from fp8debug.metrics.noise import roundings
from fp8debug.metrics.reread import Reread
from fp8debug.observer.optimizer_hooks import num_optimizer_steps
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
    return by_name(_REREAD.partial(Pair(source=Source(x), y=read, quantized=q, cast=cast, kind="reread"))) if x.numel() else {}


class GradientSumCheck:
    """The FP32 sum of a weight's gradients in one step, on a few columns, beside what ``weight.grad`` holds of them.

    Autograd joins what one backward pass contributes before it touches ``weight.grad``; hence the sum of the passes before is
    compared when the next one begins, and that of all of them when an optimizer steps. Nothing is compared where the weight is no
    leaf, so that the gradient goes elsewhere; ``weight.main_grad`` counts for it where a program has that. After a step with one
    pass that uses the weight once another such is expected: what it adds is not copied, and if a second pass comes all the same,
    nothing is compared in that step. Of a single pass that uses the weight several times (a module that is called so often) the
    sum of its uses is compared when an optimizer steps. A pass that does not add to ``weight.grad`` does not count:
    ``torch.autograd.grad``, as of gradient penalties, of gradient surgery over several losses and of inner loops, or
    ``backward(inputs=...)`` without the weight.

    Attributes:
        weight: the parameter, as the forward pass got it.
    """

    def __init__(self) -> None:
        self._num_passes, self._num_uses, self._is_one, self._weight = 0, 0, False, None
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.weight: Tensor | None = None
        self._accumulator: Any = None  # the autograd node that adds to weight.grad, where it is known
        if self._num_passes:
            self._is_one = self._num_passes == 1 and self._num_uses == 1
        self._restart()

    def _restart(self) -> None:
        """Forget the passes so far: an optimizer has used up what they gave."""
        self._sums: _Sums | None = None
        self._before: tuple[Sample, Tensor] | None = None  # what weight.grad held when the first pass began
        self._num_passes, self._num_uses, self._graph_task, self._state = 0, 0, -1, (-1, -1)
        self._adds = True  # the pass under way adds to weight.grad

    def begin(self, weight: Tensor) -> None:
        """Begin a forward pass with a parameter."""
        if self.weight is not weight or self._accumulator is None:
            self.weight, self._accumulator = weight, accumulator_of(weight)

    def add(self, columns: Sample, gradient: Tensor | None, adds: Mapping[int, bool]) -> Slots:
        """Add a gradient and return the slots of ``GradientSum`` for those before it.

        Args:
            columns: which columns.
            gradient: ``[N, K]``.
            adds: of a repetition, whether the pass that it repeats adds to the gradient of a parameter, by the id of its alias.
        """
        if gradient is None or self.weight is None or not self.weight.is_leaf:
            return {}
        found: Slots = {}
        task = torch._C._current_graph_task_id()
        if is_new := task != self._graph_task:
            repeated = adds.get(id(self.weight))
            self._adds = runs_now(self._accumulator) if repeated is None else repeated
            if self._adds:
                found = self._begin_pass(self.weight, columns, gradient.shape)
            self._graph_task = task
        if self._adds:
            self._num_uses = 1 if is_new else self._num_uses + 1
        if self._adds and not self._is_one:
            new = columns.copy_of_few(gradient.detach(), SUMMED_COLUMNS)
            if self._sums is None:
                self._sums = _Sums(columns, new)
            else:
                self._sums.add(new, is_new)
        return found

    def _begin_pass(self, weight: Tensor, columns: Sample, shape: torch.Size) -> Slots:
        """Begin a backward pass that adds to the gradient, and compare what the weight holds with the sum of those before it."""
        found: Slots = {}
        version = -1 if weight.is_inference() else weight._version
        # Another optimizer's step between two passes: the first is of that one's loss (a generator's, an actor's), whose
        # gradients of this weight nobody wants.
        state = version, num_optimizer_steps()
        if state != self._state:
            self._restart()
        self._state = state
        held = _accumulated(weight)
        if self._sums is not None and self._sums.all.numel():
            few = None if held is None else columns.few(held, SUMMED_COLUMNS).float()
            self._sums.meet(few)
            if few is not None:
                kind = "first_sum" if self._num_passes == 1 else "later_sum"
                found = by_name(_GRADIENT_SUM.partial(Pair(source=Source(self._sums.all.float()), y=few, kind=kind)))
        elif not self._num_passes and held is not None and held.shape == shape:
            self._before = columns, columns.few(held, SUMMED_COLUMNS).double().square().sum()
        self._num_passes += 1
        return found

    @property
    def is_known(self) -> bool:
        """True if the step has had several passes or uses whose sum is known, or began with a weight.grad that was not None."""
        return self._before is not None or (self._has_several and self._sums is not None)

    @property
    def _has_several(self) -> bool:
        """True if the weight got several gradients: of passes, or of uses in the only one."""
        return self._num_passes > 1 or (self._num_passes == 1 and self._num_uses > 1)

    def given(self, parameter: Tensor) -> Tensor | None:
        """Return what an optimizer that is about to step gets of the passes, and forget them.

        Args:
            parameter: as the optimizer holds it.

        Returns:
            float64, as ``GIVEN`` names them, NaN where one is not known; None where nothing can be compared.
        """
        sums, is_one_pass = self._sums if self._has_several else None, self._num_passes == 1
        before, is_own = self._before, parameter is self.weight
        self._restart()
        held = parameter.grad
        columns = sums.columns if sums is not None else before[0] if before is not None else None
        if columns is None or not is_own or type(held) is not Tensor or held.shape != parameter.shape:
            return None
        y = columns.few(held, SUMMED_COLUMNS).double()
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=y.device)
        found = [unknown if before is None else before[1], y.square().sum()]
        if sums is None:
            return torch.stack([*found, *[unknown] * (len(GIVEN) - len(found))])
        since, last, first = (None, sums.last_use, sums.first_use) if is_one_pass else (sums.since, sums.last, sums.first)
        for part in (sums.all, since, last, first):
            x = None if part is None else part.double()
            found += [unknown, unknown] if x is None else [x.square().sum(), (x * y).sum()]
        return torch.stack(found)


#: What :meth:`GradientSumCheck.given` returns, in order: squares, and products with what the optimizer gets. Of a single pass the
#: parts are its uses of the weight, and the sum since the gradient was emptied is not known.
GIVEN = (
    *("sum_before2", "sum_given2", "sum_passes2", "sum_given_passes", "sum_since2", "sum_given_since"),
    *("sum_last2", "sum_given_last", "sum_first2", "sum_given_first"),
)


class _Sums:
    """FP32 sums of a weight's gradients in one step, on a few columns: of all passes, and of parts of them.

    Attributes:
        columns: which columns.
        all: of all passes.
        since: of those since ``weight.grad`` was found empty at the beginning of one.
        last: of the last pass.
        first: of the first.
        last_use: the last gradient alone.
        first_use: the first.
    """

    def __init__(self, columns: Sample, gradient: Tensor) -> None:
        self.columns, self._is_first = columns, True
        self.all = self.since = self.last = self.first = self.last_use = self.first_use = gradient

    def meet(self, held: Tensor | None) -> None:
        """Begin a pass: note whether ``weight.grad`` still holds anything."""
        self._is_first = False
        self.since = self.since * (0.0 if held is None else (held != 0).any())

    def add(self, gradient: Tensor, begins: bool) -> None:
        """Add a gradient, the first of its pass or a further one."""
        gradient = self.last_use = gradient.float()
        self.all, self.since = self.all.float() + gradient, self.since.float() + gradient
        self.last = gradient if begins else self.last.float() + gradient
        if self._is_first:
            self.first = self.all


def accumulator_of(weight: Tensor) -> Any:
    """Return the autograd node that adds to a leaf's ``grad``; None where it has none, or below autograd, in an op's kernel.

    ``torch.autograd.graph.get_gradient_edge`` would raise there, in every compiled ``Fp8Linear``, at a price for the host.
    """
    if not (weight.requires_grad and weight.is_leaf):
        return None
    try:
        with torch.enable_grad():
            node = weight.view_as(weight).grad_fn
        return None if node is None else node.next_functions[0][0]
    except (RuntimeError, AttributeError) as error:  # a subclass that makes no view
        if not is_ours(error):
            raise
        return None


def runs_now(accumulator: Any) -> bool:
    """Return whether the backward pass under way adds to a leaf's gradient; True where that is not known."""
    try:
        return accumulator is None or bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError as error:  # torch raises it for a leaf that autograd.grad() was given
        if not is_ours(error):
            raise
        return "autograd.grad" not in str(error)


def _accumulated(weight: Tensor) -> Tensor | None:
    """Return the tensor that backward passes add a weight's gradient to."""
    main = getattr(weight, "main_grad", None)
    return main if isinstance(main, Tensor) and main.shape == weight.shape else weight.grad


class RepeatCheck:
    """Compare the stochastic roundings of an operand's corner with those of the sampled step before it.

    Roundings of two steps are independent, so that the sum of the products r r' over n elements has the mean 0 and the variance
    of the sum of f (1 - f) f' (1 - f'). Random numbers that come back correlate them: for values spread evenly over a spacing
    the sum is n / 12, sqrt(n) / 2 standard deviations. Elements that have not changed are left out: a generator whose
    state is made of the tensor rounds them alike. Nothing leaves the device.
    """

    def __init__(self) -> None:
        self._before: tuple[Tensor, Tensor] | None = None

    def compare(self, x: Tensor, q: Quantized, cast: Cast) -> dict[str, Tensor]:
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

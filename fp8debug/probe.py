"""What is recorded at a GEMM: operands beside their FP8 twins, results beside the shadow and the exact GEMM.

An adapter calls a module's Probe with the tensors of each of its GEMMs. The shadow and exact GEMMs run on sampled rows (fprop,
dgrad) or columns of the input (wgrad), chosen by the step number; their MSE, cosine and SQNR estimate those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fp8debug.formats import block_shape
from fp8debug.kernels.dispatch import (
    AmaxHistory,
    Operand,
    Slots,
    dequantize,
    finite_amax,
    gemm,
    histogram,
    observe,
    operand_pair,
    quantize_observed,
    statistics,
)
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.base import spread
from fp8debug.metrics.damage import Damage
from fp8debug.observer import Observer, RowInfo, RowKey
from fp8debug.recipes import Cast
from fp8debug.types import CONTRACTS_ROWS, RESULTS, Gemm, Quantized, Reference, TensorRole

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Probe")

#: Slots of one tensor by the cast's name.
Tried = dict[str, Slots]
#: The operands of a GEMM as it reads them and its result, None where FP8 is only tried.
Product = tuple[Operand, Operand, "Tensor | None"]

HISTOGRAM = "log2_hist"
_DAMAGE = Damage()


@dataclass
class Kept:
    """What a sampled forward pass keeps for its backward: sampled rows and columns, never a whole tensor."""

    rows: Tensor | slice
    output: Pair
    columns: Tensor | slice
    input_columns: Tensor


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Keep an error of ours from reaching the training step: the module is reported once and watched no more.

    Too little memory for a sample ends the sample alone: the module is watched again from the next step on.
    """

    @wraps(method)
    def call(probe: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if probe.failed or probe.given_up:
            return None
        try:
            with torch.no_grad():
                return method(probe, *args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError):
            probe.give_up("out of memory in a sample; training goes on")
            return None
        except Exception as error:  # whatever it is, the user's step goes on
            probe.failed = True
            lines = str(error).splitlines() or [""]
            probe.observer.report(probe.module, f"not watched any more: {type(error).__name__}: {lines[0]}"[:300], True)
            return None

    return call


class Probe:
    """The ears of an Observer at one module.

    Args:
        observer: where it records.
        module: FQN.
        actual: False for a module that does not run in FP8 and is only tried under a recipe.
    """

    def __init__(self, observer: Observer, module: str, *, actual: bool = True) -> None:
        self.observer = observer
        self.module = module
        self.actual = actual
        self.failed = False
        self._told = False
        self.num_calls = 0
        self._first_row = observer.num_modules * observer.settings.rows_per_module
        observer.num_modules += 1
        observer.on_end_step.append(self._forget)
        self._histories: dict[tuple[TensorRole, Cast], AmaxHistory] = {}
        self._forget()

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a watched model is not watched."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A pickle of a watched model is not watched."""
        return (_none, ())

    def _forget(self) -> None:
        self.call_index = -1
        self.given_up = False  # the sample of this step
        self._rows: dict[RowKey, int] = {}
        self._weights_seen: set[Gemm] = set()
        self._seen_outside_backward = False
        self._histogram_of: dict[tuple[Gemm, TensorRole], str] = {}
        self._tried_weight: Tried = {}
        self._output_key: RowKey | None = None
        self._ridden: dict[int, tuple[Quantized, Slots]] = {}

    def give_up(self, reason: str) -> None:
        """End the sample of this step, for want of memory or because it cannot be taken; the first time is said aloud."""
        self.given_up = True
        self._ridden.clear()
        self.observer.report(self.module, f"not recorded in full at step {self.observer.step}: {reason}", not self._told)
        self._told = True

    def begin(self) -> bool:
        """Return whether this forward call is observed; call it before the autograd function.

        It is not when the step is not sampled, when gradients are off (evaluation), or when it is the recomputation of a
        checkpointed forward that was seen already.
        """
        if not torch.is_grad_enabled():
            return False
        self.observer.before_forward()
        if not self.observer.sampling or self.failed or self.given_up:
            return False
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.give_up("a CUDA graph captures it; capture a step that is not sampled and run the sampled ones without it")
            return False
        if torch._C._current_graph_task_id() == -1:
            self._seen_outside_backward = True
        elif self._seen_outside_backward:
            return False
        if self.call_index < 0:
            self.call_index = self.observer.next_call_index()
            self.num_calls += 1
        return True

    @guarded
    def quantize(self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, scale_inv: Tensor | None) -> Quantized | None:
        """Quantize an operand, and keep the slots that ride along until its GEMM is recorded.

        Slots belong to the very Quantized they were worked out with: one that a fault made is described on its own.

        Returns:
            None where nothing is to be recorded of it, or an error of ours kept it from being quantized here.
        """
        which, role = key
        if role is TensorRole.WEIGHT and which in self._weights_seen:
            return None
        q, found = quantize_observed(x, cast, scale_inv, contracts_rows=key in CONTRACTS_ROWS, where=(self.module, *key))
        if found is not None:
            self._ridden[id(q)] = q, found
        return q

    @guarded
    def fprop(self, x: Tensor, weight: Tensor, a: Operand, b: Operand, x_wgrad: Operand | None, output: Tensor | None) -> Kept:
        """Record fprop, and wgrad's input, which is quantized in the forward pass.

        Args:
            x: input ``[M, K]``, high precision.
            weight: ``[N, K]``, high precision.
            a: x as fprop reads it.
            b: weight as fprop reads it.
            x_wgrad: x as wgrad reads it; None when no gradient of the weight is wanted.
            output: ``[M, N]``; None when FP8 is only tried, and the exact GEMM stands for it.
        """
        source, tried = Source(x), Tried()
        self._operand(Gemm.FPROP, TensorRole.INPUT, source, a, tried)
        self._weight(Gemm.FPROP, weight, b)
        if x_wgrad is not None:
            self._operand(Gemm.WGRAD, TensorRole.INPUT, source, x_wgrad, tried)
        rows, columns = self._sample(x.shape[0], x.device), self._sample(x.shape[1], x.device)
        actual = None if output is None else output[rows]
        pair = self._result(Gemm.FPROP, (x[rows], weight), (_values(a, 0, rows), _values(b)), actual, (a, b))
        self._ridden.clear()
        return Kept(rows, pair, columns, x.detach()[:, columns].clone())

    @guarded
    def backward(
        self, grad_output: Tensor, weight: Tensor, dgrad: Product | None, wgrad: Product | None, kept: Kept | None
    ) -> None:
        """Record dgrad and wgrad, and the damage of fprop's output error, now that its gradient is known.

        Args:
            grad_output: ``[M, N]``, high precision.
            weight: ``[N, K]``, high precision.
            dgrad: grad_output and weight as dgrad reads them, and grad_input ``[M, K]``; None when it did not run.
            wgrad: grad_output and input as wgrad reads them, and grad_weight ``[N, K]``; None when it did not run.
            kept: what :meth:`fprop` returned.
        """
        source, tried = Source(grad_output), Tried()
        if dgrad is not None:
            a, b, result = dgrad
            self._operand(Gemm.DGRAD, TensorRole.GRAD_OUTPUT, source, a, tried)
            self._weight(Gemm.DGRAD, weight, b)
            rows = self._sample(grad_output.shape[0], grad_output.device)
            actual = None if result is None else result[rows]
            self._result(Gemm.DGRAD, (grad_output[rows], weight), (_values(a, 0, rows), _values(b)), actual, (a, b))
        if wgrad is not None:
            a, b, result = wgrad
            self._operand(Gemm.WGRAD, TensorRole.GRAD_OUTPUT, source, a, tried)
            if kept is not None:
                actual = None if result is None else result[:, kept.columns]
                exact = (_values(a), _values(b, 1, kept.columns))
                self._result(Gemm.WGRAD, (grad_output, kept.input_columns), exact, actual, (a, b))
        if kept is not None and self._output_key is not None and kept.output.y.numel():
            pair = Pair(source=kept.output.source, y=kept.output.y, grad=grad_output.detach()[kept.rows].float())
            self._merge(self._output_key, _DAMAGE.partial(pair), pair.y.device)
        self._ridden.clear()

    def _weight(self, which: Gemm, weight: Tensor, operand: Operand) -> None:
        if which not in self._weights_seen:
            self._weights_seen.add(which)
            self._operand(which, TensorRole.WEIGHT, Source(weight), operand, self._tried_weight)

    def _operand(self, which: Gemm, role: TensorRole, source: Source, operand: Operand, tried: Tried) -> None:
        """Record the running cast and the what-if casts; those are worked out once for all GEMMs that read the tensor."""
        if self.observer.on_operand is not None:
            self.observer.on_operand(self.module, self.actual, which, role, source.x, operand)
        running = str(operand[1]) if isinstance(operand, tuple) else ""
        casts = {str(c): c for recipe in self.observer.settings.what_if if (c := recipe.casts[which, role]) is not None}
        casts.pop(running, None)
        new = {name: cast for name, cast in casts.items() if name not in tried}
        if new:
            scales = [self.scale_inv(role, cast, source) for cast in new.values()]
            uncounted = HISTOGRAM not in source.shared
            tried.update(zip(new, observe(source, list(new.values()), scales, histogram=uncounted), strict=True))
            if (counted := tried[next(iter(new))].get(HISTOGRAM)) is not None:
                source.shared[HISTOGRAM] = counted
        if isinstance(operand, tuple):
            q, cast = operand
            _, found = self._ridden.get(id(q), (q, None))
            if found is None:
                found = statistics(operand_pair(source, cast, q), HISTOGRAM)
            self._record(RowKey(which, role, running, Reference.OPERAND, self.actual), found, source)
        for name in casts:
            self._record(RowKey(which, role, name, Reference.OPERAND, False), tried[name], source)

    def _record(self, key: RowKey, found: Slots, source: Source) -> None:
        """Merge slots into a row; the histogram, which is the tensor's whatever the cast, with a site's first cast alone."""
        found = {name: value for name, value in found.items() if name != HISTOGRAM}
        first = self._histogram_of.setdefault((key.gemm, key.tensor), key.cast_name) == key.cast_name
        if first and source.x.numel():
            if HISTOGRAM not in source.shared:
                source.shared[HISTOGRAM] = histogram(source)
            found[HISTOGRAM] = source.shared[HISTOGRAM]
        self._merge(key, found, source.x.device)

    def scale_inv(self, role: TensorRole, cast: Cast, source: Source) -> Tensor | None:
        """Return the scale_inv that a cast which is not running would have used here; None unless it is delayed."""
        if cast.scaling != "delayed":
            return None
        history = self._histories.get((role, cast))
        if history is None:
            history = self._histories[role, cast] = AmaxHistory(cast, source.x.device)
        return history.next_scale_inv(finite_amax(source.x))

    def _result(
        self,
        which: Gemm,
        high_precision: tuple[Tensor, Tensor],
        dequantized: tuple[Tensor, Tensor],
        actual: Tensor | None,
        operands: tuple[Operand, Operand],
    ) -> Pair:
        shadow = _shadow(which, *high_precision)
        exact = gemm(which, *dequantized, accumulate=torch.float64 if shadow.is_cuda else torch.float32)
        y = exact if actual is None else actual.detach().float()
        name = " @ ".join("bf16" if isinstance(operand, Tensor) else str(operand[1]) for operand in operands)
        key = RowKey(which, RESULTS[which], name, Reference.SHADOW, self.actual)
        pair = Pair(source=Source(shadow), y=y)
        if which is Gemm.FPROP:
            self._output_key = key
        self._merge(key, statistics(pair), y.device)
        if actual is not None:
            exact_key = key._replace(reference=Reference.EXACT)
            self._merge(exact_key, statistics(Pair(source=Source(exact), y=y)), y.device)
        return pair

    def _merge(self, key: RowKey, partials: Slots, device: torch.device) -> None:
        if key not in self._rows:
            if len(self._rows) == self.observer.settings.rows_per_module:
                raise RuntimeError("the casts of this module changed too often within one step")
            self._rows[key] = self._first_row + len(self._rows)
        info = RowInfo(self.module, self.call_index, key)
        self.observer.record(self._rows[key], info, partials, device)

    def _sample(self, length: int, device: torch.device) -> Tensor | slice:
        """Return which of ``length`` rows or columns are sampled: evenly spread, shifted by a hash of the step."""
        count = self.observer.settings.shadow_rows
        if count is None or count >= length:
            return slice(None)
        shift = self.observer.step * 2654435761 % length
        return (torch.arange(count, device=device) * length // count + shift) % length


def _values(operand: Operand, dim: int = 0, index: Tensor | slice | None = None) -> Tensor:
    """Return what the GEMM reads, in FP32; with an index tensor those rows (dim 0) or columns (dim 1) of it alone."""
    if not isinstance(index, Tensor):
        return operand.detach().float() if isinstance(operand, Tensor) else dequantize(*operand)
    if isinstance(operand, Tensor):
        return operand.detach().index_select(dim, index).float()
    (data, scale_inv), cast = operand
    block = block_shape(cast.granularity, *data.shape)
    if scale_inv.shape[dim] > 1:
        scale_inv = scale_inv.index_select(dim, index // block[dim])
    codes = data.view(torch.uint8) if data.element_size() == 1 else data  # a fault's data are in BF16
    values = codes.index_select(dim, index).view(data.dtype).float()
    across, along = (1, block[1]) if dim == 0 else (block[0], 1)
    return values * spread(scale_inv, across, along, *values.shape)


def _shadow(which: Gemm, first: Tensor, second: Tensor) -> Tensor:
    """Return the GEMM in BF16 with FP32 accumulation, rounded to BF16, as FP32."""
    a, b = first.detach().bfloat16(), second.detach().bfloat16()
    if not a.is_cuda:  # BF16 products in FP32 arithmetic: the same numbers, and far faster on most CPUs
        a, b = a.float(), b.float()
    product = gemm(which, a, b, dtype=torch.bfloat16, accumulate=a.dtype)
    return product.float()


def _none() -> None:
    return None

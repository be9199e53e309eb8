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

from fp8debug.kernels import AmaxHistory, Operand, dequantize, gemm, operand_pair, quantize, statistics
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.damage import Damage
from fp8debug.observer import Observer, RowInfo, RowKey
from fp8debug.recipes import Cast
from fp8debug.types import RESULTS, Gemm, Reference, TensorRole

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")
R = TypeVar("R")

_DAMAGE = Damage()


@dataclass
class Kept:
    """What a sampled forward pass keeps for its backward: sampled rows and columns, never a whole tensor."""

    rows: Tensor | slice
    output: Pair
    columns: Tensor | slice
    input_columns: Tensor


def guarded(method: Callable[Concatenate[Probe, P], R]) -> Callable[Concatenate[Probe, P], R | None]:
    """Keep an error of ours from reaching the training step: the module is reported once and watched no more."""

    @wraps(method)
    def call(probe: Probe, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if probe.failed:
            return None
        try:
            with torch.no_grad():
                return method(probe, *args, **kwargs)
        except Exception as error:  # whatever it is, the user's step goes on
            probe.failed = True
            lines = str(error).splitlines() or [""]
            probe.observer.report(probe.module, f"{type(error).__name__}: {lines[0]}"[:300])
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
        self.num_calls = 0
        self._first_row = observer.num_modules * observer.settings.rows_per_module
        observer.num_modules += 1
        observer.on_end_step.append(self._forget)
        self._histories: dict[tuple[Gemm, TensorRole, Cast], AmaxHistory] = {}
        self._forget()

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a watched model is not watched."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A pickle of a watched model is not watched."""
        return (_none, ())

    def _forget(self) -> None:
        self.call_index = -1
        self._rows: dict[RowKey, int] = {}
        self._weights_seen: set[Gemm] = set()
        self._seen_outside_backward = False
        self._histograms: set[tuple[Gemm, TensorRole, str]] = set()

    def begin(self) -> bool:
        """Return whether this forward call is observed; call it before the autograd function.

        It is not when the step is not sampled, when gradients are off (evaluation), or when it is the recomputation of a
        checkpointed forward that was seen already.
        """
        if not torch.is_grad_enabled():
            return False
        self.observer.before_forward()
        if not self.observer.sampling or self.failed:
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
    def fprop(
        self, x: Tensor, weight: Tensor, a: Operand, b: Operand, x_wgrad: Operand | None, output: Tensor | None
    ) -> Kept:
        """Record fprop, and wgrad's input, which is quantized in the forward pass.

        Args:
            x: input ``[M, K]``, high precision.
            weight: ``[N, K]``, high precision.
            a: x as fprop reads it.
            b: weight as fprop reads it.
            x_wgrad: x as wgrad reads it; None when no gradient of the weight is wanted.
            output: ``[M, N]``; None when FP8 is only tried, and the exact GEMM stands for it.
        """
        source = Source(x)
        self._operand(Gemm.FPROP, TensorRole.INPUT, source, a)
        self._weight(Gemm.FPROP, weight, b)
        if x_wgrad is not None:
            self._operand(Gemm.WGRAD, TensorRole.INPUT, source, x_wgrad)
        rows, columns = self._sample(x.shape[0], x.device), self._sample(x.shape[1], x.device)
        output_pair = self._result(
            Gemm.FPROP, (x[rows], weight), (_values(a)[rows], _values(b)), None if output is None else output[rows], a, b
        )
        return Kept(rows, output_pair, columns, x.detach()[:, columns].clone())

    @guarded
    def dgrad(self, grad_output: Tensor, weight: Tensor, a: Operand, b: Operand, grad_input: Tensor | None) -> None:
        """Record dgrad: grad_output ``[M, N]``, weight ``[N, K]``, the same as the GEMM reads them, grad_input ``[M, K]``."""
        self._operand(Gemm.DGRAD, TensorRole.GRAD_OUTPUT, Source(grad_output), a)
        self._weight(Gemm.DGRAD, weight, b)
        rows = self._sample(grad_output.shape[0], grad_output.device)
        actual = None if grad_input is None else grad_input[rows]
        self._result(Gemm.DGRAD, (grad_output[rows], weight), (_values(a)[rows], _values(b)), actual, a, b)

    @guarded
    def wgrad(
        self, grad_output: Tensor, a: Operand, b: Operand, grad_weight: Tensor | None, kept: Kept | None
    ) -> None:
        """Record wgrad: grad_output ``[M, N]``, it and the input as the GEMM reads them, grad_weight ``[N, K]``."""
        self._operand(Gemm.WGRAD, TensorRole.GRAD_OUTPUT, Source(grad_output), a)
        if kept is None:
            return
        columns = kept.columns
        actual = None if grad_weight is None else grad_weight[:, columns]
        exact = (_values(a), _values(b)[:, columns])
        self._result(Gemm.WGRAD, (grad_output, kept.input_columns), exact, actual, a, b)

    @guarded
    def damage(self, grad_output: Tensor, kept: Kept | None) -> None:
        """Record the damage of fprop's output error, now that its gradient ``[M, N]`` is known."""
        if kept is None:
            return
        output = kept.output
        pair = Pair(source=output.source, y=output.y, grad=grad_output.detach()[kept.rows].float())
        if pair.y.numel() and self._output_key is not None:
            self._merge(self._output_key, _DAMAGE.partial(pair), pair.y.device)

    def _operand(self, which: Gemm, role: TensorRole, source: Source, operand: Operand) -> None:
        names = set()
        if isinstance(operand, tuple):
            q, cast = operand
            names.add(str(cast))
            self._operand_row(which, role, operand_pair(source, cast, q), actual=self.actual)
        for recipe in self.observer.settings.what_if:
            tried = recipe.casts[which, role]
            if tried is not None and str(tried) not in names:
                names.add(str(tried))
                q = quantize(source.x, tried, self.scale_inv(which, role, tried, source))
                self._operand_row(which, role, operand_pair(source, tried, q), actual=False)

    def _operand_row(self, which: Gemm, role: TensorRole, pair: Pair, *, actual: bool) -> None:
        key = RowKey(which, role, str(pair.cast), Reference.OPERAND, actual)
        holders = {name for g, t, name in self._histograms if (g, t) == (which, role)}
        if not holders or key.cast_name in holders:
            self._histograms.add((which, role, key.cast_name))
            self._merge(key, statistics(pair), pair.y.device)
        else:
            self._merge(key, statistics(pair, skip="histogram"), pair.y.device)

    def scale_inv(self, which: Gemm, role: TensorRole, cast: Cast, source: Source) -> Tensor | None:
        """Return the scale_inv that a cast which is not running would have used here; None unless it is delayed."""
        if cast.scaling != "delayed":
            return None
        magnitude = source.magnitude
        amax = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
        history = self._histories.get((which, role, cast))
        if history is None:
            history = self._histories[which, role, cast] = AmaxHistory(cast, magnitude.device)
        return history.next_scale_inv(amax)

    def _weight(self, which: Gemm, weight: Tensor, operand: Operand) -> None:
        if which not in self._weights_seen:
            self._weights_seen.add(which)
            self._operand(which, TensorRole.WEIGHT, Source(weight), operand)

    def _result(
        self,
        which: Gemm,
        high_precision: tuple[Tensor, Tensor],
        dequantized: tuple[Tensor, Tensor],
        actual: Tensor | None,
        a: Operand,
        b: Operand,
    ) -> Pair:
        shadow = _shadow(which, *high_precision)
        exact = gemm(which, *dequantized, accumulate=torch.float64 if shadow.is_cuda else torch.float32)
        y = exact if actual is None else actual.detach().float()
        name = f"{_cast_name(a)} @ {_cast_name(b)}"
        key = RowKey(which, RESULTS[which], name, Reference.SHADOW, self.actual)
        pair = Pair(source=Source(shadow), y=y)
        if which is Gemm.FPROP:
            self._output_key = key
        self._merge(key, statistics(pair), y.device)
        if actual is not None:
            exact_key = key._replace(reference=Reference.EXACT)
            self._merge(exact_key, statistics(Pair(source=Source(exact), y=y)), y.device)
        return pair

    _output_key: RowKey | None = None

    def _merge(self, key: RowKey, partials: dict[str, Tensor], device: torch.device) -> None:
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


def _values(operand: Operand) -> Tensor:
    """Return what the GEMM reads, in FP32."""
    return operand.detach().float() if isinstance(operand, Tensor) else dequantize(*operand)


def _cast_name(operand: Operand) -> str:
    return "bf16" if isinstance(operand, Tensor) else str(operand[1])


def _shadow(which: Gemm, first: Tensor, second: Tensor) -> Tensor:
    """Return the GEMM in BF16 with FP32 accumulation, rounded to BF16, as FP32."""
    a, b = first.detach().bfloat16(), second.detach().bfloat16()
    if not a.is_cuda:  # BF16 products in FP32 arithmetic: the same numbers, and far faster on most CPUs
        a, b = a.float(), b.float()
    product = gemm(which, a, b, dtype=torch.bfloat16, accumulate=a.dtype)
    return product.float()


def _none() -> None:
    return None



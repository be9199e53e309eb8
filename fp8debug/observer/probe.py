"""Recording of one module's GEMMs: operands beside their FP8 twins, results beside the shadow and the exact GEMM.

An adapter calls a module's Probe with the tensors of each of its GEMMs. The shadow and exact GEMMs run on sampled rows (fprop,
dgrad) or columns of the input (wgrad), chosen by the step number, and where the result is wide on a share of its other dimension;
their MSE, cosine and SQNR estimate those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

import torch
from torch import Tensor

from fp8debug.kernels.amax_history import AmaxHistory
from fp8debug.kernels.dispatch import (
    CastWithSlots,
    Operand,
    Slots,
    countable,
    describe,
    finite_amax,
    histogram,
    observe,
    on_device,
)
from fp8debug.kernels.gemm_error import OutputError, compare_result, damage_of, sampled_columns, values_of, weight_rows
from fp8debug.kernels.sampling import Sample
from fp8debug.kernels.slot_rows import by_name
from fp8debug.kernels.torch_state import foreign_mode_active, is_capturing, is_transformed, refuse_replays
from fp8debug.metrics import Source
from fp8debug.observer.fused_cast import CastRecorder
from fp8debug.observer.isolation import StepState, isolated, isolated_without_ops
from fp8debug.observer.observer import Extremes, Observer, RowKey, extremes_of
from fp8debug.observer.rechecks import HISTOGRAM, GradientSumCheck, RepeatCheck, SavedForBackward, WhatIfSlots, recheck
from fp8debug.observer.rows import RowAllocator
from fp8debug.observer.sharding import ShardLayout
from fp8debug.recipes import Cast
from fp8debug.types import RESULTS, Gemm, Quantized, Reference, TensorRole

#: The operands of a GEMM as it reads them and its result, None where FP8 is only tried.
Product = tuple[Operand, Operand, "Tensor | None"]

#: Rows that are recorded together; best the same object in every step.
Keys = tuple[RowKey, ...]
_ORDER = {which: i for i, which in enumerate(Gemm)}


class Probe(StepState):
    """Record one module into an Observer.

    Args:
        observer: where it records.
        module: FQN.
        actual: False for a module that does not run in FP8 and is only tried under a recipe.
    """

    def __init__(self, observer: Observer, module: str, *, actual: bool = True) -> None:
        super().__init__(observer, module)
        self.actual = actual
        self._casts = CastRecorder(observer, module, actual)
        self._weights_seen = set[Gemm]()
        self.call_index = -1
        self.layout: ShardLayout | None = None  #: which piece of the whole each tensor is, where the module is split over ranks
        self._lines = RowAllocator(observer, module)
        self._number = observer.add_module(module)
        self._histories: dict[tuple[TensorRole, Cast], AmaxHistory] = {}
        self._known_results: dict[Gemm, tuple[Cast | None, Cast | None, Keys, Keys]] = {}
        self._num_reads: dict[Gemm, int] = {}  # of a weight in this step, after the first
        self._waited = -1  # the last step in which it was called without a turn
        self._seen_outside_backward = self._recomputed = False
        self._gradients = GradientSumCheck()
        self._repeats: dict[tuple[Gemm, TensorRole], tuple[RepeatCheck, int]] = {}
        self._histogram_of: dict[tuple[Gemm, TensorRole], str] = {}
        self._what_if_weight: WhatIfSlots = {}
        self._weight_shared: dict[str, Tensor] = {}
        self._output_key: Keys | None = None

    def forget(self) -> None:
        """Forget the step that it was last called in; nothing is made anew, which the garbage collector would have to look at."""
        self.call_index = -1
        self._weights_seen.clear()
        self._num_reads.clear()
        self._seen_outside_backward = self._recomputed = False
        self._gradients.clear()
        self._histogram_of.clear()
        self._what_if_weight.clear()
        self._weight_shared.clear()
        self._output_key = None
        self._casts.clear()

    def give_up(self, reason: str) -> None:
        """End the sample of this step."""
        self._casts.clear()
        super().give_up(reason)

    def interrupt(self, error: BaseException) -> None:
        """End the sample of this step."""
        self._casts.clear()
        super().interrupt(error)

    def begin(self) -> bool:
        """Return whether this forward call is observed; call it before the autograd function.

        It is not when the step is not sampled or the module waits for its turn, when gradients are off (evaluation; where
        inference is recorded, when they are on), or when it is the recomputation of a checkpointed forward that was seen already.
        """
        self.observer.deferred_release.release_some()
        if not self.observer.takes_pass or self.observer.in_shape_inference:
            return False
        if self.observer.settings.inference:
            self.observer.before_inference(self.module)
        else:
            self.observer.before_forward()
        if not self.observer.sampling:
            return False
        if not self.takes_step:
            self._wait()
            return False
        return self._begin() is True

    @property
    def takes_step(self) -> bool:
        """True if the module is recorded in the step under way: one that is sampled, in its turn or that of what is repeated."""
        observer = self.observer
        return observer.sampling and (observer.is_repeating or observer.has_turn(self.module))

    def _wait(self) -> None:
        """Take note of a call that is not recorded because the module has no turn; its place in execution order stays its own."""
        observer = self.observer
        if self._waited != observer.step_count:
            self._waited = observer.step_count
            observer.modules_called.add(self.module)
            observer.next_call_index()
        if observer.begun.modules is not None:  # a compiled module is not repeated for it
            observer.begun.modules.add(self.module)

    @isolated_without_ops
    def _begin(self) -> bool:
        if self.module in self.observer.not_again:
            return False
        if is_capturing():
            self.give_up("a CUDA graph captures it; capture a step that is not sampled and run the sampled ones without it")
            return False
        if is_transformed():
            self.give_up("a transform of torch.func (grad, vmap, jvp) runs it, whose tensors cannot be read; call it without one")
            return False
        if torch._C._current_graph_task_id() == -1 or self.observer.repeats_forward:
            self._seen_outside_backward = True
        elif self._seen_outside_backward:
            self._recomputed = True
            self.observer.modules_recomputed[self.module] = "again"
            return False
        else:  # a reentrant checkpoint, whose first pass has no gradients
            self.observer.modules_recomputed[self.module] = "alone"
        if self.call_index < 0:
            self.observer.modules_called.add(self.module)
            self.call_index = self.observer.next_call_index()
        if self.observer.begun.modules is not None:
            self.observer.begun.modules.add(self.module)
        return True

    def quantize(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, scale_inv: Tensor | None, made: Quantized | None = None
    ) -> Quantized | None:
        """Quantize an operand, recording its cast in the same pass, as :meth:`CastRecorder.quantize` does.

        Returns:
            None where nothing is to be recorded of it, where a mode is to see the ops of an ordinary pass, or where an error
            of ours kept it from being quantized here.
        """
        if foreign_mode_active():
            return None
        if made is not None and self._casts.knows(made):  # with another operand
            return made
        return self._quantize(key, x, cast, scale_inv, made)

    @isolated
    def _quantize(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, scale_inv: Tensor | None, made: Quantized | None
    ) -> Quantized | None:
        self.observer.flush_if_full(x.device)
        if key[1] is TensorRole.WEIGHT and key[0] in self._weights_seen:
            return None
        return self._casts.quantize(key, x, cast, scale_inv, made)

    def quantize_pair(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, other: Cast
    ) -> tuple[CastWithSlots, CastWithSlots] | None:
        """Quantize an operand for two GEMMs at once, as :meth:`CastRecorder.quantize_pair` does; None as :meth:`quantize`."""
        return None if foreign_mode_active() or not self._casts.makes_pairs(x) else self._quantize_pair(key, x, cast, other)

    @isolated
    def _quantize_pair(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, other: Cast
    ) -> tuple[CastWithSlots, CastWithSlots] | None:
        return self._casts.quantize_pair(key, x, cast, other)

    def check(self, x: Tensor, weight: Tensor | None, output: Tensor) -> None:
        """Note whether a training forward GEMM is finite; a recomputed one is left out."""
        if self.checks(output):
            self._check(x, weight, output)

    def check_backward(self, grad_output: Tensor | Extremes, results: Mapping[Gemm, Tensor]) -> None:
        """Note whether the results of backward GEMMs are finite, by GEMM; of grad_output its extremes are enough."""
        if any(self.checks(result) for result in results.values()):
            self._check_backward(grad_output, results)

    def searches(self, x: Tensor) -> bool:
        """Return whether a result that is not recorded is searched for NaN and Inf."""
        wanted = self.observer.settings.check_finite
        return bool(wanted or (wanted is None and x.is_cpu)) and not self.takes_step and self.checks(x)

    def checks(self, x: Tensor) -> bool:
        """Return whether results of the step under way are searched for NaN and Inf on a tensor's device."""
        wanted, observer = self.observer.settings.check_finite, self.observer
        if observer.is_off or observer.in_shape_inference:
            return False
        return bool(wanted or (wanted is None and (self.takes_step or x.device.type == "cpu")))

    @isolated
    def _check(self, x: Tensor, weight: Tensor | None, output: Tensor) -> None:
        if is_capturing() or (torch._C._current_graph_task_id() != -1 and not self.observer.repeats_forward):
            return
        given, result = extremes_of(x), extremes_of(output)
        if given is not None and result is not None:
            self.observer.check(self.module, Gemm.FPROP, given, None if weight is None else extremes_of(weight), result)

    @isolated
    def _check_backward(self, grad_output: Tensor | Extremes, results: Mapping[Gemm, Tensor]) -> None:
        if is_capturing():
            return
        given = extremes_of(grad_output) if isinstance(grad_output, Tensor) else grad_output
        for gemm, x in results.items():
            result = extremes_of(x)
            if given is not None and result is not None:
                self.observer.check(self.module, gemm, given, None, result)

    @isolated
    def fprop(
        self, x: Tensor, weight: Tensor, a: Operand, b: Operand, x_wgrad: Operand | None, output: Tensor | None,
        bias: Tensor | None = None, parameter: Tensor | None = None,
    ) -> SavedForBackward:  # fmt: skip
        """Record fprop, and wgrad's input, which is quantized in the forward pass.

        Args:
            x: input ``[M, K]``, high precision.
            weight: ``[N, K]``, high precision.
            a: x as fprop reads it.
            b: weight as fprop reads it.
            x_wgrad: x as wgrad reads it; None when no gradient of the weight is wanted.
            output: ``[M, N]``; None when FP8 is only tried, and the exact GEMM stands for it.
            bias: what the GEMM added to the output; it is no part of what is compared.
            parameter: the leaf whose ``grad`` accumulates wgrad's results; by default the weight itself.
        """
        self.observer.flush_if_full(x.device)
        source, what_if = Source(x), WhatIfSlots()
        self._gradients.begin(weight if parameter is None else parameter)
        self._operand(Gemm.FPROP, TensorRole.INPUT, source, a, what_if)
        self._weight(Gemm.FPROP, weight, b)
        if x_wgrad is not None:
            self._operand(Gemm.WGRAD, TensorRole.INPUT, source, x_wgrad, what_if)
        error = self._result(Gemm.FPROP, (x, weight), (a, b), output, self._part(Gemm.FPROP, x), bias=bias, keep=True)
        self._casts.clear()
        if self.observer.settings.inference:
            return SavedForBackward(error, self._part(Gemm.WGRAD, x), x[:0], what_if, None)
        columns = self._part(Gemm.WGRAD, x)
        return SavedForBackward(error, columns, self._columns(x, columns), what_if, source.shared.get(HISTOGRAM))

    @isolated
    def backward(
        self,
        grad_output: Tensor,
        weight: Tensor,
        dgrad: Product | None,
        wgrad: Product | None,
        kept: SavedForBackward | None,
        *,
        known: tuple[Source, WhatIfSlots] | None = None,
        damage: bool = True,
    ) -> None:
        """Record dgrad and wgrad, and the damage of fprop's output error, now that its gradient is known.

        Args:
            grad_output: ``[M, N]``, high precision.
            weight: ``[N, K]``, high precision.
            dgrad: grad_output and weight as dgrad reads them, and grad_input ``[M, K]``; None when it did not run.
            wgrad: grad_output and input as wgrad reads them, and grad_weight ``[N, K]``; None when it did not run.
            kept: what :meth:`fprop` returned.
            known: what was found out about grad_output, where dgrad and wgrad are given in two calls: the same object in both.
            damage: whether to record the damage, which is once in a backward pass.
        """
        self.observer.flush_if_full(grad_output.device)
        source, what_if = (Source(grad_output), WhatIfSlots()) if known is None else known
        if dgrad is not None:
            a, b, result = dgrad
            self._operand(Gemm.DGRAD, TensorRole.GRAD_OUTPUT, source, a, what_if)
            self._weight(Gemm.DGRAD, weight, b)
            self._result(Gemm.DGRAD, (grad_output, weight), (a, b), result, self._part(Gemm.DGRAD, grad_output))
        if wgrad is not None:
            a, b, result = wgrad
            self._operand(Gemm.WGRAD, TensorRole.GRAD_OUTPUT, source, a, what_if)
            if kept is not None:
                summed = self._gradients.add(kept.columns, result, self.observer.adds)
                if self._gradients.is_known:
                    self.observer.gradient_sums[self.module] = self._gradients
                self._result(Gemm.WGRAD, (grad_output, kept.input_columns), (a, b), result, kept.columns, more=summed)
                if self._recomputed:
                    read = values_of(b, 1, kept.columns.lines)
                    self._reread((Gemm.WGRAD, TensorRole.INPUT), kept.input_columns, read, b)
        if damage and kept is not None and self._output_key is not None and (found := damage_of(kept.output, grad_output)):
            self._merge(self._output_key, [found], grad_output.device)
        self._casts.clear()

    def _weight(self, which: Gemm, weight: Tensor, operand: Operand) -> None:
        if which not in self._weights_seen:
            self._weights_seen.add(which)
            rows = self.observer.sample(weight.shape[0], weight.device).lines
            sampled = weight_rows(weight, operand, rows) if which is Gemm.FPROP and self.actual else {}
            source = Source(weight)
            source.shared.update(self._weight_shared)
            self._operand(which, TensorRole.WEIGHT, source, operand, self._what_if_weight, sampled)
            self._weight_shared = {k: v for k, v in source.shared.items() if k == HISTOGRAM}
        elif self.actual:
            number = self._num_reads[which] = self._num_reads.get(which, 0) + 1
            if number & (number + 1):  # the second, fourth, eighth ... microbatch is read again
                return
            lines = self._sample(weight.shape[0], weight.device)
            self._reread((which, TensorRole.WEIGHT), weight[lines], values_of(operand, 0, lines), operand)

    def _reread(self, site: tuple[Gemm, TensorRole], x: Tensor, read: Tensor, operand: Operand) -> None:
        """Record an operand that is read once more in the step: ``read`` is what the GEMM sees of the sample ``x`` of it."""
        if isinstance(operand, tuple):
            key = RowKey(*site, str(operand[1]), Reference.OPERAND, self.actual)
            self._merge((key,), [recheck(x, read, *operand)], x.device)

    def _operand(
        self, which: Gemm, role: TensorRole, source: Source, operand: Operand, what_if: WhatIfSlots, more: Slots | None = None
    ) -> None:
        """Record the running cast and the what-if casts; those are worked out once for all GEMMs that read the tensor."""
        if self.observer.on_operand is not None:
            self.observer.on_operand(self.module, self.actual, which, role, source.x, operand)
        site = self._casts.site(which, role, operand[1] if isinstance(operand, tuple) else None)
        if not site.what_if.keys() <= what_if.keys():
            self._try(
                role, source, {n: c for n, c in site.what_if.items() if n not in what_if} if what_if else site.what_if, what_if
            )
        found: list[Slots] = []
        if isinstance(operand, tuple):
            q, cast = operand
            slots = describe(source, cast, q, self._casts.slots_of(q))
            if cast.rounding == "stochastic" and self.actual and source.x.numel():
                slots = {**slots, **self._repeated(which, role, source.x, q, cast)}
            found.append({**slots, **more} if more else slots)
        found += [what_if[name] for name in site.what_if]
        if found:
            self._record(site.keys, found, source)

    def _repeated(self, which: Gemm, role: TensorRole, x: Tensor, q: Quantized, cast: Cast) -> Slots:
        """Compare stochastic roundings with those of the sampled step before, once in a step: its first microbatch."""
        refuse_replays("stochastic rounding")
        check, step = self._repeats.get((which, role), (RepeatCheck(), -1))
        self._repeats[which, role] = check, self.observer.step_count
        return by_name(check.compare(x, q, cast)) if step != self.observer.step_count else {}

    def _try(self, role: TensorRole, source: Source, casts: dict[str, Cast], what_if: WhatIfSlots) -> None:
        """Work out casts that are not running, from counts of the tensor's values where they can be."""
        if countable(source.x, casts.values()):
            what_if.update(self._count(role, source, casts))
            return
        counted = {name: cast for name, cast in casts.items() if countable(source.x, [cast])}
        what_if.update(self._count(role, source, counted))
        what_if.update(self._observe(role, source, {name: cast for name, cast in casts.items() if name not in counted}))

    def _count(self, role: TensorRole, source: Source, casts: dict[str, Cast]) -> WhatIfSlots:
        """Work out casts with one scale for the whole tensor, many at once at the end of the step."""
        if not casts:
            return {}
        x, value_counts = source.x, self.observer.table(source.x.device).value_counts
        place = self._number, role  # whose amax history it is
        with on_device(x):
            found: WhatIfSlots
            found, source.shared[HISTOGRAM] = value_counts.what_if(x, casts, place)
        return found

    def _observe(self, role: TensorRole, source: Source, casts: dict[str, Cast]) -> WhatIfSlots:
        """Work out any casts by reading the tensor for them."""
        if not casts:
            return {}
        scales = [self.scale_inv(role, cast, source) for cast in casts.values()]
        uncounted = HISTOGRAM not in source.shared
        what_if = dict(zip(casts, observe(source, list(casts.values()), scales, histogram=uncounted), strict=True))
        for slots in what_if.values():
            if isinstance(counted := slots.pop(HISTOGRAM, None), Tensor):
                source.shared[HISTOGRAM] = counted
        return what_if

    def _columns(self, x: Tensor, columns: Sample) -> Tensor:
        """Return sampled columns of an input, a copy; modules that share the input share it as long as one of them keeps it."""
        copied: list[Tensor] = []

        def copy() -> Tensor:
            copied.append(sampled_columns(x, columns))
            return copied[-1]

        kept = self.observer.shared(x, "columns", lambda: ref(copy()))()
        return copy() if kept is None else kept

    def _record(self, keys: Keys, found: list[Slots], source: Source) -> None:
        """Merge slots into rows of a site; the histogram, which is the tensor's whatever the cast, with its first cast alone."""
        first = keys[0]
        if self._histogram_of.setdefault(first[:2], first.cast_name) == first.cast_name and source.x.numel():
            if HISTOGRAM not in source.shared:
                source.shared[HISTOGRAM] = histogram(source)
            found[0] = {**found[0], HISTOGRAM: source.shared[HISTOGRAM]}
        self._merge(keys, found, source.x.device)

    def scale_inv(self, role: TensorRole, cast: Cast, source: Source) -> Tensor | None:
        """Return the scale_inv that a cast which is not running would have used here; None unless it is delayed."""
        if cast.scaling != "delayed":
            return None
        refuse_replays("the amax history of a cast that is tried")
        history = self._histories.get((role, cast))
        if history is None:
            history = self._histories[role, cast] = AmaxHistory(cast, source.x.device)
        return history.next_scale_inv(finite_amax(source.x))

    def _result(
        self,
        which: Gemm,
        high_precision: tuple[Tensor, Tensor],
        operands: tuple[Operand, Operand],
        result: Tensor | None,
        sample: Sample,
        *,
        more: Slots | None = None,
        bias: Tensor | None = None,
        keep: bool = False,
    ) -> OutputError:
        found = compare_result(which, high_precision, operands, result, sample, bias=bias, keep=keep)
        device = high_precision[0].device
        alone, both = self._result_keys(which, *operands)
        if which is Gemm.FPROP:
            self._output_key = alone
        shadow = {**found.shadow, **more} if more else found.shadow
        if found.exact is None:
            self._merge(alone, [shadow], device)
        else:
            self._merge(both, [shadow, found.exact], device)
        return found.error

    def _result_keys(self, which: Gemm, first: Operand, second: Operand) -> tuple[Keys, Keys]:
        """Return the row of a result against the shadow, and that and the one against the exact GEMM."""
        casts = None if isinstance(first, Tensor) else first[1], None if isinstance(second, Tensor) else second[1]
        known = self._known_results.get(which)
        if known is None or known[0] is not casts[0] or known[1] is not casts[1]:
            name = " @ ".join("bf16" if cast is None else str(cast) for cast in casts)
            key = RowKey(which, RESULTS[which], name, Reference.SHADOW, self.actual)
            known = self._known_results[which] = *casts, (key,), (key, key._replace(reference=Reference.EXACT))
        return known[2], known[3]

    def _merge(self, keys: Keys, found: list[Slots], device: torch.device) -> None:
        self._lines.record(keys, self.call_index, self.layout, found, device)

    def _part(self, which: Gemm, x: Tensor) -> Sample:
        """Return what of a result is compared: rows of x, for wgrad columns of it; neighbouring modules and GEMMs differ."""
        columns = which is Gemm.WGRAD
        sample = self.observer.sample(x.shape[int(columns)], x.device, columns=columns)
        if sample.shift is None:
            return sample
        return Sample(sample.lines, sample.shift + len(_ORDER) * self._number + _ORDER[which], sample.size, sample.start)

    def _sample(self, length: int, device: torch.device) -> Tensor | slice:
        return slice(None) if (lines := self.observer.sample(length, device).lines) is None else lines

"""The probe of a module whose GEMMs are only intercepted: it fits each GEMM to input, weight and gradient, and records it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fp8debug.adapters.interception.calls import observe_calls
from fp8debug.adapters.interception.listener import GemmOperand, SeenGemm, listener_of, nodes_between, version_of
from fp8debug.adapters.interception.sublinears import CALLED, WHAT_IF_MODULES, report_once
from fp8debug.adapters.plain import WhatIfProbe
from fp8debug.errors import AttachError
from fp8debug.formats import block_shape
from fp8debug.kernels.dispatch import Operand, dequantize
from fp8debug.kernels.torch_state import is_batched, is_transformed, untraced
from fp8debug.metrics import Source
from fp8debug.observer.attributes import COMPUTED, stored
from fp8debug.observer.autograd_nodes import add_hook, add_prehook, leaf_of
from fp8debug.observer.isolation import isolated, isolated_without_ops
from fp8debug.observer.master_weights import WeightShard, master_weight, shard_of
from fp8debug.observer.observer import Extremes, Observer, extremes_of
from fp8debug.observer.probe import Probe, Product
from fp8debug.observer.rechecks import SavedForBackward, WhatIfSlots
from fp8debug.observer.sharding import TensorShard, layout_by_marks
from fp8debug.recipes import Cast
from fp8debug.types import OPERANDS, Gemm, Quantized, TensorRole, not_observed, not_observed_code

#: (gemm, tensor, cast as far as the GEMM shows it) -> the cast that is in force there.
CastOf = Callable[[Gemm, TensorRole, Cast], Cast]
#: Multiples that tokens are padded to: cuBLAS asks for 16 of what is contracted, casts in blocks for 32 to 128.
PADDED_TO = (16, 32, 64, 128)
#: Modules that a watch listens to, by whether it records inference.
_INTERCEPTED: dict[bool, WeakSet[nn.Module]] = {False: WeakSet(), True: WeakSet()}


def _gone() -> None:
    return None


class ForwardCall:
    """One forward call of a module: what its backward needs, sampled, and what was observed of it."""

    def __init__(self, *, copies: bool = False) -> None:
        self.gemms: list[SeenGemm] = []
        self.copies = copies
        self.kept: SavedForBackward | None = None
        self.x: Callable[[], Tensor | None] = _gone
        self.input_dtype: torch.dtype | None = None
        self.weight: Tensor | None = None
        self.shard: WeightShard | None = None
        self.wanted: set[Gemm] = set()
        self.unsure: list[dict[Gemm, SeenGemm]] = []
        self.recorded: set[Gemm] = set()
        self.grad_output: Tensor | None = None
        self.known: tuple[Source, WhatIfSlots] | None = None
        self.versions: dict[str, int | None] = {}
        self.arguments: dict[int, int | None] = {}
        self.nodes_left = 0

    def as_quantized(self, x: Tensor) -> Tensor:
        """Return the input ``[M, K]`` as it was before it was quantized, after the cast of autocast."""
        return x.detach().to(self.input_dtype or x.dtype).reshape(-1, x.shape[-1])

    def on_gemm(self, gemm: SeenGemm) -> None:
        """Keep a GEMM of the forward pass until the module's output is known."""
        if isinstance(gemm, SeenGemm):
            self.gemms.append(gemm.held(copied=self.copies) if gemm.is_fp8 else gemm.noted())

    def note(self, **tensors: Tensor) -> None:
        """Note the versions of tensors that are read later."""
        self.versions.update({name: version_of(x) for name, x in tensors.items()})

    def is_as_noted(self, name: str, x: Tensor) -> bool:
        """Return whether nothing has written to a tensor since its version was noted."""
        return self.versions.get(name) is None or x._version == self.versions[name]


class InterceptingProbe(Probe):
    """A probe that records what the listener sees of its module's GEMMs.

    Args:
        observer: where it records.
        module: FQN.
        cast_of: names the cast of an operand that was observed.
        input_dtype: returns, while the module's forward runs, the dtype that it casts its input to before it is quantized; None
            where it does not.
        trial: records what FP8 would do to the module's GEMM where it runs in high precision, in a model without FP8; None for
            nothing.
    """

    def __init__(
        self,
        observer: Observer,
        module: str,
        cast_of: CastOf,
        input_dtype: Callable[[], torch.dtype | None] = _gone,
        trial: WhatIfProbe | None = None,
    ) -> None:
        super().__init__(observer, module)
        self._cast_of = cast_of
        self._input_dtype = input_dtype
        self._listener = listener_of(observer)
        self._unfinished: list[ForwardCall] = []
        self._copies = False  # whether the program was seen to overwrite operands: from the next step on they are copied
        self._trial = trial
        self._kind: type[nn.Module] | None = None
        self._parameter: Callable[[], Any] = _gone  # the weight as it was given, which FSDP2 replaces during a pass
        self._shard: WeightShard | None = None  # of the call that is being recorded

    def install(self, module: nn.Module) -> Callable[[], None]:
        """Observe the module's calls and return what ends it.

        Raises:
            AttachError: another watch listens to it.
        """
        watched = _INTERCEPTED[self.observer.settings.inference]
        if module in watched:
            raise AttachError(f"{self.module} is watched already; close the first watch before attaching another")
        watched.add(module)
        self._kind = type(module)
        CALLED.discard(module)  # by an earlier watch
        weight = stored(module, "weight")
        self.layout = layout_by_marks(module, weight)
        self._parameter = ref(weight) if isinstance(weight, Tensor) else _gone
        end = observe_calls(module, self)

        def undo() -> None:
            watched.discard(module)
            end()

        return undo

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Listen until the call ends."""
        call = ForwardCall(copies=self._copies) if self.begin() else None
        if call is not None:
            CALLED.add(module)
            call.arguments = {id(x): version_of(x) for x in args if isinstance(x, Tensor)}
        self._listener.begin(self, call, None if call is None else call.on_gemm, self._fail)

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record fprop, and wait for the backward pass."""
        scope = self._listener.end(self)
        if output is not None and self.observer.takes_pass:
            self._check_call(module, args[0] if args else next(iter(kwargs.values()), None), output)
        if scope is None or not isinstance(scope.call, ForwardCall):
            return
        scope.call.input_dtype = self._input_dtype()
        if any(gemm.is_fp8 for gemm in scope.call.gemms):
            self.observer.has_fp8 = True
            self._record_fprop(scope.call, module, args[0] if args else next(iter(kwargs.values()), None), output)
        elif self._trial is not None and output is not None and not self.observer.has_fp8 and self._trial.begin():
            self._record_trial(scope.call, module, self._trial)

    @isolated
    def _fail(self, error: BaseException) -> None:
        raise error

    def _check_call(self, module: nn.Module, x: Any, output: Any) -> None:
        """Search what leaves the module for NaN and Inf: its output, and what its autograd nodes deliver in the backward pass.

        A GEMM's result is recorded when the GEMM has run. What the module writes to it afterwards shows here alone.
        """
        output = output[0] if isinstance(output, tuple) and output else output
        if type(x) is not Tensor or type(output) is not Tensor or not self.checks(output) or is_transformed():
            return
        weight = stored(module, "weight")
        self.check(x, weight if isinstance(weight, Tensor) else None, output)
        if output.requires_grad:
            self._check_nodes(x, weight, output)

    @isolated_without_ops
    def _check_nodes(self, x: Tensor, weight: Any, output: Tensor) -> None:
        given: list[Extremes | None] = [None]

        @untraced
        def take(place: int, grads: Sequence[Tensor | None]) -> None:
            grad = grads[place]
            given[0] = None if grad is None or is_batched(grad) else self._extremes(grad)

        @untraced
        def see(places: Mapping[int, Gemm], grads: Sequence[Tensor | None], _: Any) -> None:
            found = {gemm: grad for place, gemm in places.items() if (grad := grads[place]) is not None}
            if given[0] is not None and not any(is_batched(grad) for grad in found.values()):
                self.check_backward(given[0], found)

        delivered = [(node, places) for node in nodes_between(output, x, weight) if (places := _delivers(node, x, weight))]
        if delivered and output.grad_fn is not None:
            add_prehook(output.grad_fn, partial(take, output.output_nr))
            for node, places in delivered:
                add_hook(node, partial(see, places))

    @isolated
    def _extremes(self, x: Tensor) -> Extremes | None:
        return extremes_of(x)

    @isolated
    def _record_trial(self, call: ForwardCall, module: nn.Module, trial: WhatIfProbe) -> None:
        """Have what FP8 would do recorded of the GEMM ``[M, K] @ [K, N]`` that the module ran in high precision."""
        weight = stored(module, "weight")
        is_packed = weight is None or not weight.is_floating_point()  # integers that hold several values each, as of QLoRA
        n, k = (stored(module, "out_features"), stored(module, "in_features")) if is_packed else weight.shape
        if n is None or k is None:
            self.report_once("not recorded: its weight and its in_features and out_features are computed at each access")
            return
        one = next((h for h in call.gemms if h.first.values.shape[1] == k and h.second.values.shape == (k, n)), None)
        if one is None:
            self.report_once(f"not recorded: no GEMM of [tokens, {k}] by [{k}, {n}] was seen in its forward pass")
            return
        if (overwritten := one.overwritten()) is not None:
            self.give_up(f"the {overwritten} of its forward GEMM was overwritten before the end of its forward pass")
            return
        WHAT_IF_MODULES.add(module)
        x, second = one.first.values, one.second.values
        trial.layout = self.layout
        wants = [one.requires_grad and not self.observer.settings.inference for one in (x, second)]
        trial.try_gemm(x.detach(), second.detach().t(), one.result.grad_fn, *wants)

    @isolated
    def _record_fprop(self, call: ForwardCall, module: nn.Module, x: Any, output: Any) -> None:
        gemms, call.gemms = [h for h in call.gemms if h.is_fp8], []
        output = output[0] if isinstance(output, tuple) else output
        if output is None:  # an exception
            return
        weight = stored(module, "weight")
        reference = self._reference_weight(call, x, weight)
        if reference is None:
            return
        flat, call.weight = call.as_quantized(x), reference
        gemm = self._forward_gemm(gemms, flat, reference, output)
        if gemm is None:
            return
        version = call.arguments.get(id(x))
        overwritten = gemm.overwritten() or ("input" if version is not None and x._version != version else None)
        if overwritten is not None:
            self._copies = True
            self.give_up(f"the {overwritten} of its forward GEMM was overwritten before the end of its forward pass")
            return
        if (why := self._scaled_afterwards(Gemm.FPROP, gemm)) is not None:
            self.give_up(why)
            return
        a, b, result = self._product(Gemm.FPROP, gemm)
        self._take_shard(call)
        read = reference if call.shard is None else _values(b, flat.dtype)
        call.kept = self.fprop(flat, read, a, b, None, result, gemm.bias, parameter=weight)
        if call.kept is not None and output.requires_grad:
            self._await_backward(call, x, weight, reference, output)

    def _reference_weight(self, call: ForwardCall, x: Any, weight: Any) -> Tensor | None:
        """Return the weight ``[N, K]`` that fprop's is compared with, where input and weight are recorded; else give up.

        Of a weight that was gathered in FP8 it has the shape alone: ``call.shard`` holds the rows that are compared.
        """
        if weight is None:
            self.give_up(COMPUTED)
            return None
        found = weight if type(weight) in (Tensor, nn.Parameter) else master_weight(weight)
        if found is None and (codes := _codes(weight)) is not None:
            call.shard = shard_of(self._parameter())
            found = codes if call.shard is not None else None
        compared = {"input": x, "weight": weight if found is None else found}
        if call.shard is not None:
            del compared["weight"]
        for name, value in compared.items():
            if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter) or value.element_size() == 1:
                self.give_up(f"its {name} is a {type(value).__name__}, and plain tensors in high precision alone are recorded")
                return None
        assert found is not None  # or it had been given up
        return found.detach()

    def _forward_gemm(self, gemms: Sequence[SeenGemm], x: Tensor, weight: Tensor, output: Tensor) -> SeenGemm | None:
        """Return the FP8 GEMM of a forward pass that is input by weight, as fprop has it; give up where none is."""
        tokens = x.shape[0]
        if output.dim() > 1 and output.stride(-2) == 1 != output.stride(-1):  # a view of weight by input, or as that lies
            self._listener.is_turned.setdefault((self._kind, Gemm.FPROP), True)
        fits = [fit for gemm in gemms if (fit := self._fitting(Gemm.FPROP, gemm, tokens, weight)) is not None]
        if not fits:
            self.give_up(f"{gemms[0]} is not input {list(x.shape)} by weight {list(weight.shape)} (padded, or in parts)")
            return None
        if len(gemms) > 1:
            self.report_once(f"recorded by one of {len(gemms)} FP8 GEMMs of its forward pass")
        for gemm in gemms:
            self._note_orientation(Gemm.FPROP, gemm, tokens, weight)
        return fits[0]

    def _await_backward(self, call: ForwardCall, x: Tensor, weight: Tensor, reference: Tensor, output: Any) -> None:
        """Note what the backward pass of a call is to be compared with, and listen to its autograd nodes."""
        wanted = {Gemm.DGRAD: x.requires_grad, Gemm.WGRAD: weight.requires_grad}
        call.wanted = {which for which, is_wanted in wanted.items() if is_wanted}
        call.x = weak_view(x)  # a strong reference could keep what the module itself does not
        call.note(input=x, weight=reference if call.shard is None else call.shard.values)
        nodes = nodes_between(output, x, weight)
        call.nodes_left = len(nodes)
        if not self._unfinished:
            self.observer.after_step.append(self._end_step)
        self._unfinished.append(call)

        @untraced
        def before(grads: Any) -> None:
            self._listener.begin(call, call, partial(self._take, call), self._fail)

        @untraced
        def after(grads: Any, others: Any) -> None:
            self._listener.end(call)
            call.nodes_left -= 1
            self._sort(call)

        @untraced
        def take(grad: Tensor) -> None:
            if call in self._unfinished:
                call.grad_output = grad.detach().reshape(-1, grad.shape[-1])
                call.note(grad_output=call.grad_output)

        output.register_hook(take)
        for node in nodes:
            add_prehook(node, before)
            add_hook(node, after)

    @isolated
    def _take(self, call: ForwardCall, gemm: SeenGemm) -> None:
        """Record a GEMM of the backward pass when it has run: the program may overwrite what it read as soon as that.

        One that its shapes do not tell apart from the other is kept until its node has run.
        """
        grad_output, weight = call.grad_output, call.weight
        if call not in self._unfinished or grad_output is None or weight is None:
            return
        tokens = grad_output.shape[0]
        fits = {w: f for w in (Gemm.DGRAD, Gemm.WGRAD) if (f := self._fitting(w, gemm, tokens, weight)) is not None}
        if gemm.which is not None:
            fits = {w: f for w, f in fits.items() if w is gemm.which}
        elif len(fits) == 2:
            held = gemm.held()
            call.unsure.append({w: f for w in fits if (f := self._fitting(w, held, tokens, weight)) is not None})
            return
        elif not fits and gemm.is_fp8:
            self.report_once(f"not recorded in full: {gemm} in its backward pass is neither dgrad nor wgrad")
        for which, fit in fits.items():
            self._note_orientation(which, gemm, tokens, weight)
            self._record_backward(call, which, fit)

    @isolated
    def _sort(self, call: ForwardCall) -> None:
        """Record, after a node, those of its GEMMs that shapes do not tell apart; end the call after its last node."""
        unsure, call.unsure = call.unsure, []
        if call not in self._unfinished or call.grad_output is None or call.weight is None:
            return
        if len(unsure) == 2:  # as many tokens as outputs: the order of the equations, which every library keeps
            self._record_backward(call, Gemm.DGRAD, unsure[0][Gemm.DGRAD])
            self._record_backward(call, Gemm.WGRAD, unsure[1][Gemm.WGRAD])
        elif unsure:
            left = call.wanted - call.recorded
            if len(left) == 1 and len(unsure) == 1:
                for which in left:
                    self._record_backward(call, which, unsure[0][which])
            else:
                self.report_once("not recorded in full: with as many tokens as outputs its GEMMs cannot be told apart")
        if not call.nodes_left or call.recorded == call.wanted:
            self._finish(call)

    def _record_backward(self, call: ForwardCall, which: Gemm, gemm: SeenGemm) -> None:
        """Record dgrad or wgrad, once in a backward pass."""
        grad_output, weight, kept = call.grad_output, call.weight, call.kept
        if which not in call.wanted or which in call.recorded or grad_output is None or weight is None:
            return
        if weight.numel() and not weight.untyped_storage().nbytes():
            self.give_up("its weight was taken away before the end of its backward pass")
            return
        is_first = not call.recorded
        call.recorded.add(which)
        why = self._why_unread(call, which, gemm, grad_output, weight)
        if why is not None:
            self.report_once(f"not recorded in full: {why}")
            return
        if call.known is None:
            call.known = Source(grad_output), WhatIfSlots()
        product = self._product(which, gemm)
        if which is Gemm.WGRAD and kept is not None:
            x = call.x()
            if x is None or not call.is_as_noted("input", x):
                why = "gone" if x is None else "overwritten"
                self.report_once(
                    f"not recorded in full: its input in high precision is {why} before wgrad, whose cast has no row"
                )
            else:
                flat = call.as_quantized(x)
                self._operand(Gemm.WGRAD, TensorRole.INPUT, kept.source(flat), product[1], kept.what_if)
        dgrad, wgrad = (product, None) if which is Gemm.DGRAD else (None, product)
        self._take_shard(call)
        if call.shard is not None and dgrad is not None:
            weight = _values(dgrad[1], grad_output.dtype)
        self.backward(grad_output, weight, dgrad, wgrad, kept, known=call.known, damage=is_first)

    def _why_unread(self, call: ForwardCall, which: Gemm, gemm: SeenGemm, grad_output: Tensor, weight: Tensor) -> str | None:
        """Return why a GEMM of a backward pass cannot be recorded; None if it can."""
        overwritten = gemm.overwritten()
        if overwritten is None and not call.is_as_noted("grad_output", grad_output):
            overwritten = "grad_output"
        reference = weight if call.shard is None else call.shard.values
        if overwritten is None and which is Gemm.DGRAD and not call.is_as_noted("weight", reference):
            overwritten = "weight in high precision"
        if overwritten is not None:
            return f"the {overwritten} of its {which} was overwritten before it could be read"
        return self._scaled_afterwards(which, gemm)

    def _take_shard(self, call: ForwardCall) -> None:
        """Have the weight of a call recorded whole, or by the rows that this rank has in high precision."""
        self._shard = call.shard
        if call.shard is not None:
            self.report_once(
                "not recorded in full: its weight is gathered in FP8, so its GEMMs are compared with those of the codes,"
                " and the weight's cast by the rows of each rank"
            )
            piece = TensorShard(True, call.shard.place)
            if self.layout is None or self.layout.get(TensorRole.WEIGHT) != piece:
                self.layout = {**(self.layout or {}), TensorRole.WEIGHT: piece}

    def _weight(self, which: Gemm, weight: Tensor, operand: Operand) -> None:
        """Record the weight's cast; of one that was gathered in FP8 that of this rank's rows."""
        if self._shard is None:
            super()._weight(which, weight, operand)
        elif isinstance(operand, tuple) and operand[0].scale_inv.numel() == 1:
            rows = slice(self._shard.first, self._shard.first + self._shard.values.shape[0])
            q, cast = operand
            super()._weight(which, self._shard.values, (Quantized(q.data[rows], q.scale_inv), cast))

    @isolated
    def _finish(self, call: ForwardCall) -> None:
        """End a backward pass."""
        if call not in self._unfinished:
            return
        self._unfinished.remove(call)
        has_gradient = call.grad_output is not None
        call.grad_output = call.weight = call.shard = call.kept = call.known = None
        if has_gradient:
            for which in sorted(call.wanted - call.recorded):
                self.report_once(f"not recorded in full: {not_observed(which)} in its backward pass", not_observed_code(which))

    def _fitting(self, which: Gemm, gemm: SeenGemm, tokens: int, weight: Tensor) -> SeenGemm | None:
        """Return the GEMM as :func:`fitting` does; where its shapes fit both ways, as it ran in other modules of the class.

        Values would tell, but to read them is to wait for the device; the layout of the first module's output does, where no
        shapes have told yet. A wgrad of which nothing is known is turned with fprop.
        """
        as_is, turned = readings(which, gemm, tokens, weight)
        if as_is is None or turned is None:
            return as_is or turned
        known = self._listener.is_turned
        like_fprop = which is Gemm.WGRAD and known.get((self._kind, Gemm.FPROP), False)
        return turned if known.get((self._kind, which), like_fprop) else as_is

    def _note_orientation(self, which: Gemm, gemm: SeenGemm, tokens: int, weight: Tensor) -> None:
        """Note whether this class of modules runs a GEMM transposed, where its shapes tell."""
        as_is, turned = readings(which, gemm, tokens, weight)
        if (as_is is None) is not (turned is None):
            self._listener.is_turned[self._kind, which] = as_is is None

    def _product(self, which: Gemm, gemm: SeenGemm) -> Product:
        """Return a GEMM's operands as their casts are named, each in the orientation of its site."""
        (first, a), (second, b) = _sides(which, gemm)
        return self._as_operand(which, first, a), self._as_operand(which, second, b), gemm.result

    def _scaled_afterwards(self, which: Gemm, gemm: SeenGemm) -> str | None:
        """Return why a GEMM cannot be recorded where an operand has one scale and its cast one for each row or column.

        torchao multiplies rowwise products without fast accumulation by their scales afterwards, which shows where the op
        itself is intercepted, in a compiled Linear, and not where a Float8TrainingTensor brings its scale.
        """
        for role, side in _sides(which, gemm):
            if side.scale_inv is not None and side.scale_inv.numel() == 1:
                cast, shape = self._cast_of(which, role, side.seen_cast), side.values.shape
                if any(b < n for b, n in zip(block_shape(cast.granularity, *shape), shape, strict=True)):
                    return (
                        f"{gemm} reads no scales of its rows, by which compiled code multiplies its {which} afterwards;"
                        " watch(..., compiled='eager') records it"
                    )
        return None

    def _as_operand(self, which: Gemm, role: TensorRole, side: GemmOperand) -> Operand:
        if side.scale_inv is None:
            return side.values
        cast, scale_inv = self._cast_of(which, role, side.seen_cast), side.scale_inv.float()
        if cast.granularity == "16x16":  # whose GEMM reads a scale for each row or column of a block
            scale_inv = scale_inv[::16] if side.granularity == "1x16" else scale_inv[:, ::16]
        return Quantized(side.values, scale_inv), cast

    def report_once(self, text: str, code: str | None = None) -> None:
        """Report something of this module, the first time in the life of the watch; the event's code tells programs."""
        report_once(self.observer, self.module, text, code)

    def _end_step(self) -> None:
        for call in self._unfinished:
            if call.grad_output is not None:
                missing = call.wanted - call.recorded
                if missing:
                    text = f"not recorded in full: {not_observed(*missing)} before the step ended"
                    self.report_once(text, not_observed_code(*missing))
        self._unfinished.clear()


def _sides(which: Gemm, gemm: SeenGemm) -> tuple[tuple[TensorRole, GemmOperand], tuple[TensorRole, GemmOperand]]:
    """Return the operands of a GEMM with their roles, each in the orientation of its site."""
    first, second = OPERANDS[which]
    a = gemm.first.t() if which is Gemm.WGRAD else gemm.first
    b = gemm.second.t() if which is Gemm.FPROP else gemm.second
    return (first, a), (second, b)


def _codes(weight: Any) -> Tensor | None:
    """Return the data ``[N, K]`` of a weight that a library gathered in FP8 under one scale; None of any other tensor."""
    codes = getattr(weight, "_data", None)
    return codes if isinstance(codes, Tensor) and codes.element_size() == 1 and codes.shape == weight.shape else None


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand in high precision, where nothing else than its codes is there to compare with."""
    return dequantize(*operand, dtype) if isinstance(operand, tuple) else operand.to(dtype)


def _delivers(node: Any, x: Tensor, weight: Any) -> dict[int, Gemm]:
    """Return by place which results of an autograd node leave a module: grad_input or grad_weight, named by their GEMM."""
    found: dict[int, Gemm] = {}
    for place, (following, number) in enumerate(node.next_functions):
        variable = leaf_of(following)
        if variable is not None and variable is weight:
            found[place] = Gemm.WGRAD
        elif (following is not None and following is x.grad_fn and number == x.output_nr) or variable is x:
            found[place] = Gemm.DGRAD
    return found


def readings(which: Gemm, gemm: SeenGemm, tokens: int, weight: Tensor) -> tuple[SeenGemm | None, SeenGemm | None]:
    """Return the GEMM as it is and transposed, each where its shapes are those of ``which``, else None.

    A bias is a Linear's in fprop alone, where it is added to every row of the output. Where tokens were added to reach a multiple
    of ``PADDED_TO``, as FP8 GEMMs ask for, it is returned without them: they come last, and are zero.
    """
    if gemm.bias is not None and which is not Gemm.FPROP:
        return None, None
    (n, k), m = weight.shape, tokens
    as_is, turned = _readings(which, gemm, (m, n, k))
    for padded in () if as_is or turned else sorted({-(-m // multiple) * multiple for multiple in PADDED_TO} - {m}):
        found = _readings(which, gemm, (padded, n, k))
        if any(found):
            size = (n, m) if which is Gemm.WGRAD else (m, k if which is Gemm.FPROP else n)
            as_is, turned = (None if one is None else one.cut(*size) for one in found)
            break
    return as_is, turned


def _readings(which: Gemm, gemm: SeenGemm, sizes: tuple[int, int, int]) -> tuple[SeenGemm | None, SeenGemm | None]:
    """Return the GEMM as it is and transposed, each where its shapes are those of ``which`` with tokens, outputs and inputs."""
    m, n, k = sizes
    first, second = {Gemm.FPROP: ((m, k), (k, n)), Gemm.DGRAD: ((m, n), (n, k)), Gemm.WGRAD: ((n, m), (m, k))}[which]
    left, right = gemm.first.values.shape, gemm.second.values.shape
    as_is = gemm if left == first and right == second else None
    is_turned = gemm.bias is None and right[::-1] == first and left[::-1] == second
    return as_is, gemm.t() if is_turned else None


def fitting(which: Gemm, gemm: SeenGemm, tokens: int, weight: Tensor) -> SeenGemm | None:
    """Return the GEMM, transposed where it ran so, if its shapes are those of ``which``; None if they are not."""
    as_is, turned = readings(which, gemm, tokens, weight)
    return as_is or turned


def weak_view(x: Tensor) -> Callable[[], Tensor | None]:
    """Return what finds a tensor as long as it, or another view of what it views, is kept: FSDP2's modules get a view."""
    own, base = TensorWeakRef(x), None if x._base is None else TensorWeakRef(x._base)
    place = x.shape, x.stride(), x.storage_offset()

    def find() -> Tensor | None:
        found: Tensor | None = own()
        whole = base() if found is None and base is not None else None
        return found if whole is None else whole.detach().as_strided(*place)

    return find

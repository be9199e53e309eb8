"""The adapter of Transformer Engine: Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, and whatever is built of them.

Operands and results come from the library's GEMM functions (``transformer_engine_gemms``), high precision from hooks: the
module's input, the gradient that its autograd node gets, and what follows from these (``transformer_engine_modules``). What a
GEMM reads is taken when it ran; the library's own state, amax histories and scales among it, is read and never written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fp8debug.adapters.base import ADAPTERS
from fp8debug.adapters.interception.calls import observe_calls
from fp8debug.adapters.interception.intercepting_probe import weak_view
from fp8debug.adapters.interception.listener import nodes_between
from fp8debug.adapters.interception.sublinears import SubLinear, seen_recipe
from fp8debug.adapters.transformer_engine.gemms import GEMMS, SeenTeGemm, read_gemm
from fp8debug.adapters.transformer_engine.modules import (
    activated,
    activation_gradient,
    is_fused,
    kind_of,
    normalized,
    sublinears_of_module,
)
from fp8debug.adapters.transformer_engine.probe import SavedLinear, TeProbe, recipe_in_force
from fp8debug.adapters.transformer_engine.scale_state import ScaleCheck
from fp8debug.errors import AttachError
from fp8debug.observer.attributes import stored
from fp8debug.observer.autograd_nodes import add_hook, add_prehook, name_of
from fp8debug.observer.observer import Observer
from fp8debug.observer.sharding import layout_by_marks
from fp8debug.recipes import Recipe
from fp8debug.types import Gemm

_NODES = ("_Linear", "_LayerNormLinear", "_LayerNormMLP", "_GroupedLinear")


class TeCall:
    """One forward call of a module on a sampled step, and its backward pass.

    Args:
        module: one of the library's.
        probes: of those of its Linears that are observed in this call, by their number.
        x: the module's input.
    """

    def __init__(self, module: Any, probes: dict[int, TeProbe], x: Tensor) -> None:
        self.module, self.probes = module, probes
        self.kind = kind_of(module)
        self.lines: dict[int, SavedLinear] = {}
        self._x: Tensor | None = x.detach()
        self._find = weak_view(x)
        self._norm: Tensor | None = None
        self._between: Tensor | None = None  # fc1's result until fc2 has run
        self._fc1_out: Callable[[], Tensor | None] = _gone
        self._grad_output: Tensor | None = None
        self._in_backward = False
        self._num = {Gemm.FPROP: 0, Gemm.DGRAD: 0}
        self._fc2_gradient: Tensor | None = None

    def on_gemm(self, function: str, bound: Callable[[], dict[str, Any]], result: Any) -> None:
        """Take note of a GEMM of the module; errors end the watch of one of its Linears."""
        alive = next((p for p in self.probes.values() if not p.failed and not p.given_up), None)
        if alive is not None:
            alive.guard(self._on_gemm, function, bound, result)

    def _on_gemm(self, function: str, bound: Callable[[], dict[str, Any]], result: Any) -> None:
        gemm = read_gemm(function, bound(), result)
        in_backward = self._in_backward
        if gemm.which is Gemm.FPROP:
            number = self._num[Gemm.FPROP]
            self._num[Gemm.FPROP] += 1
            if self.kind == "LayerNormMLP" and (number == 0 or in_backward):
                self._see_fc1(gemm, in_backward)
            if not in_backward:
                self._each(gemm, number, TeProbe.take_fprop)
                if number == self._last:
                    self._x = self._norm = self._between = None
            return
        if not in_backward:
            return
        number = self._last - max(0, self._num[Gemm.DGRAD] - (gemm.which is Gemm.WGRAD))
        self._each(gemm, number, TeProbe.take_backward)
        if gemm.which is Gemm.DGRAD:
            self._num[Gemm.DGRAD] += 1
            if self.kind == "LayerNormMLP" and number == 1:
                self._pass_through(gemm)

    @property
    def _last(self) -> int:
        return int(self.kind == "LayerNormMLP")

    def _each(self, gemm: SeenTeGemm, number: int, take: Callable[[TeProbe, TeCall, SeenTeGemm, int], None]) -> None:
        """Give each Linear its operands: those of all experts come at once, fc1 and fc2 one after the other."""
        for place in range(len(gemm.first)):
            probe = self.probes.get(place if self.kind == "GroupedLinear" else number)
            if probe is not None:
                take(probe, self, gemm, place)

    def _see_fc1(self, gemm: SeenTeGemm, in_backward: bool) -> None:
        """Remember fc1's result, which the activation reads: in the forward pass and, where that is checkpointed, once more."""
        out = gemm.results[0] if gemm.before_activation is None else gemm.before_activation
        if isinstance(out, Tensor):
            self._fc1_out = TensorWeakRef(out)
            self._between = None if in_backward else out.detach()

    def _pass_through(self, gemm: SeenTeGemm) -> None:
        """Work out fc1's grad_output from fc2's grad_input, as long as fc1's result is there."""
        fc1_out, grad = self._fc1_out(), gemm.results[0]
        if 0 not in self.lines or not isinstance(grad, Tensor):
            return
        if fc1_out is None or not fc1_out.numel():
            self.probes[0].report_once("not recorded in full: fc1's result is gone before its gradient is known (checkpointing)")
            return
        found = activation_gradient(self.module, fc1_out.reshape(-1, fc1_out.shape[-1]), grad)
        fused = is_fused(gemm.first[0], "gradient", self.module)
        self._fc2_gradient = found if fused else found.to(grad.dtype)

    def input_of(self, number: int, storage: Any, place: int, splits: list[int] | None) -> Tensor | None:
        """Return the input of one of its Linears before the cast, ``[M, K]``; None when it is not to be had.

        Raises:
            ValueError: the activation before it is of a kind that is not read.
        """
        if self._x is None:
            return None
        x = self._x.reshape(-1, self._x.shape[-1])
        if self.kind == "GroupedLinear" and splits is not None:
            return rows_of(x, splits, place)
        if self.kind == "Linear":
            return x
        if number == 0:
            if self._norm is None:
                found = normalized(self.module, x)
                self._norm = found if is_fused(storage, "norm", self.module) else found.to(self.module.activation_dtype)
            return self._norm
        if self._between is None:
            return None
        found = activated(self.module, self._between.reshape(-1, self._between.shape[-1]))
        return found if is_fused(storage, "activation", self.module) else found.to(self.module.activation_dtype)

    def find_input(self, number: int) -> Callable[[], Tensor | None]:
        """Return what finds the input of one of its Linears later: only where that is the module's own."""
        return self._find if self.kind == "Linear" else _gone

    def begin_backward(self, grads: Any) -> None:
        """Before its autograd node runs."""
        GEMMS.calls.append(self)
        self._in_backward = True
        self._num = {Gemm.FPROP: 0, Gemm.DGRAD: 0}
        self._grad_output = None if grads[0] is None else grads[0].detach()

    def end_backward(self, grads: Any, others: Any) -> None:
        """After it ran: record what was observed."""
        calls = GEMMS.calls
        if calls and calls[-1] is self:
            calls.pop()
        lines, self.lines = self.lines, {}
        for number, line in lines.items():
            self.probes[number].finish(line)
        self._grad_output = self._fc2_gradient = None

    def gradient_of(self, number: int, place: int, splits: list[int] | None) -> Tensor | None:
        """Return grad_output of one of its Linears before the cast, ``[M, N]``; None when it is not to be had."""
        if self.kind == "LayerNormMLP" and number == 0:
            return self._fc2_gradient
        if self._grad_output is None:
            return None
        grad = self._grad_output.reshape(-1, self._grad_output.shape[-1])
        return grad if splits is None else rows_of(grad, splits, place)


class TeCallObserver:
    """Observer of the calls of one module of the library, for all its Linears that a watch records."""

    def __init__(self, module: nn.Module, observer: Observer) -> None:
        self.module, self.observer = module, observer
        self.probes: dict[int, TeProbe] = {}
        self._end = observe_calls(module, self)
        self._is_called_back = False  # when the step ends
        self._check = ScaleCheck(lambda fqn, text: observer.report(fqn, text, True))

    def detach(self, number: int) -> None:
        """Take one Linear off, and with the last of them the observation of calls."""
        self.probes.pop(number, None)
        if not self.probes:
            self._end()
            _CALL_OBSERVERS.pop(self.module, None)
            self._end_step()

    def _call_back(self) -> None:
        if not self._is_called_back:
            self._is_called_back = True
            self.observer.after_step.append(self._end_step)

    def _end_step(self) -> None:
        self._is_called_back = False
        GEMMS.done(self)
        if not self._check.settle():
            self._call_back()

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Collect the GEMMs that the library runs until the call ends."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        observed = {number: probe for number, probe in self.probes.items() if probe.begin()}
        for probe in observed.values():
            probe.sublinear.was_called = True
        call = None
        if observed and isinstance(x, Tensor):
            call = TeCall(module, observed, x)
            self._call_back()
            first = next(iter(observed.values()))
            first.guard(self._install, first.module)
        GEMMS.calls.append(call)

    def _install(self, name: str) -> None:
        GEMMS.install(self)
        self._check.look(name, self.module)

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record fprop, and wait for the backward pass."""
        if not GEMMS.calls:
            return
        call = GEMMS.calls.pop()
        if isinstance(call, TeCall) and call.module is module and call.lines and output is not None:
            next(iter(call.probes.values())).guard(self._follow, call, args, output)

    def _follow(self, call: TeCall, args: Any, output: Any) -> None:
        """Wait for the backward pass of a call."""
        output = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        node = output.grad_fn  # which it nearly always is
        is_own = node is not None and name_of(node).startswith(_NODES)
        if not is_own or any(isinstance(x, Tensor) and x.grad_fn is node for x in args):
            weights = [p for p in self.module.parameters(recurse=False)]
            node = next((n for n in nodes_between(output, *args, *weights) if name_of(n).startswith(_NODES)), None)
        if node is None:
            for number in call.lines:
                call.probes[number].report_once("not recorded in full: its backward pass is not the library's own (compiled?)")
            return
        add_prehook(node, call.begin_backward)
        add_hook(node, call.end_backward)


_CALL_OBSERVERS: WeakKeyDictionary[nn.Module, TeCallObserver] = WeakKeyDictionary()


class TransformerEngine:
    """Modules of Transformer Engine that multiply."""

    name = "transformer_engine"
    kind = ""  # the class's name
    fp8 = True
    is_intercepted = True
    intercepts_ops = False

    def matches(self, module: nn.Module) -> bool:
        """Return whether it is one of the library's; that is not imported for it."""
        return kind_of(module) is not None and bool(sublinears_of_module(module))

    def sublinears(self, module: nn.Module) -> dict[str, SubLinear]:
        """Return its Linears."""
        return sublinears_of_module(module)

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return the casts that were observed of one of its Linears; None before the first, and without any."""
        if not isinstance(module, SubLinear):
            return None
        recipe = recipe_in_force(module.owner)
        # Of NVTE_BACKWARD_OVERRIDE, which the library reads when a recipe is made: dgrad and wgrad read other operands then.
        backward = getattr(recipe, "backward_override", None)
        return seen_recipe(module, f"te_{type(recipe).__name__}" + (f" backward={backward}" if backward else ""))

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Listen to one of a module's Linears.

        Raises:
            AttachError: another watch listens to the module.
        """
        assert isinstance(module, SubLinear)
        calls = _CALL_OBSERVERS.get(module.owner)
        if calls is not None and (calls.observer is not observer or module.index in calls.probes):
            raise AttachError(f"{name} is watched already; close the first watch before attaching another")
        if calls is None:
            calls = _CALL_OBSERVERS[module.owner] = TeCallObserver(module.owner, observer)
        probe = calls.probes[module.index] = TeProbe(observer, name, module)
        probe.layout = layout_by_marks(module.owner, stored(module.owner, module.weight_names[0]))
        kept = calls
        return lambda: kept.detach(module.index)


def rows_of(x: Tensor, splits: list[int], place: int) -> Tensor:
    """Return the rows of one expert."""
    return x.narrow(0, sum(splits[:place]), splits[place])


def _gone() -> None:
    return None


ADAPTERS.add(TransformerEngine.name, TransformerEngine())

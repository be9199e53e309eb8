"""The adapter of modules that hold the weights of several experts in one 3-D tensor and multiply by torch's grouped GEMM.

Each such parameter is a Linear of its own in coverage, ``experts.w1``; its rows describe all experts together, as one weight and
one batch of tokens, because which token is whose is known on the device alone. An expert without tokens is named in an event.

The high-precision input is the one that the GEMM's autograd function saves, and the weight's parameter is found by the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from fp8debug.adapters.base import ADAPTERS, num_dims
from fp8debug.adapters.grouped.gemms import SeenGroupedGemm
from fp8debug.adapters.grouped.probe import GroupProbe
from fp8debug.adapters.interception.calls import observe_calls
from fp8debug.adapters.interception.listener import listener_of, nodes_between
from fp8debug.adapters.interception.regions import as_it_is
from fp8debug.adapters.interception.sublinears import SubLinear, seen_recipe, stacks_of
from fp8debug.errors import AttachError
from fp8debug.kernels.torch_state import untraced
from fp8debug.observer.autograd_nodes import add_hook, add_prehook, leaf_of, sequence_number_of
from fp8debug.observer.observer import Observer
from fp8debug.recipes import Recipe

#: Nodes between a GEMM and its weight: views, transposes, casts.
_MAX_STEPS = 16


class GroupCall:
    """One forward call of a module: the grouped GEMMs that were observed in it."""

    def __init__(self) -> None:
        self.gemms: list[SeenGroupedGemm] = []

    def on_gemm(self, gemm: Any) -> None:
        """Take note of a GEMM; those of other kinds are of no interest."""
        if isinstance(gemm, SeenGroupedGemm):
            self.gemms.append(gemm.held())


class GroupedCallObserver:
    """Observer of one module's calls, for all its 3-D weights that a watch records."""

    def __init__(self, module: nn.Module, observer: Observer) -> None:
        self.module, self.observer, self._listener = module, observer, listener_of(observer)
        self.probes: dict[str, GroupProbe] = {}
        self._is_turned: bool | None = None  # whether weights are saved transposed to what the GEMM reads
        self._end = observe_calls(module, self)

    def detach(self, name: str) -> None:
        """Take one weight off, and with the last of them the observation of calls."""
        self.probes.pop(name, None)
        if not self.probes:
            self._end()
            _CALL_OBSERVERS.pop(self.module, None)

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Listen until the call ends."""
        observed = [probe.sublinear for probe in self.probes.values() if probe.begin()]
        for part in observed:
            part.was_called = True
        call = GroupCall() if observed else None
        self._listener.begin(self, call, None if call is None else call.on_gemm, self._fail)

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record fprop, and wait for the backward pass."""
        scope = self._listener.end(self)
        if scope is not None and isinstance(scope.call, GroupCall) and scope.call.gemms:
            first = next(iter(self.probes.values()))
            first.guard(self._record, scope.call.gemms, args, output)

    def _fail(self, error: BaseException) -> None:
        for probe in self.probes.values():
            probe.give_up(f"{error}")

    def _record(self, gemms: list[SeenGroupedGemm], args: Any, output: Any) -> None:
        """Fit what was observed to the autograd functions that ran it, in order, and these to the parameters they lead to."""
        output = output[0] if isinstance(output, tuple) else output
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        hooks = None if top is None else top(True)
        if hooks is not None and hooks[1] is not as_it_is:
            self._say("its GEMMs run under activation checkpointing, where their inputs are not to be had")
            return
        nodes = [] if output is None or not output.requires_grad else nodes_between(output, *args)
        found = [(node, name) for node in nodes if (name := self._weight_of(node)) is not None]
        found.sort(key=lambda pair: sequence_number_of(pair[0]))
        if len(found) != len(gemms):
            self._say(
                f"{len(gemms)} grouped GEMMs in FP8 ran in it and {len(found)} of its autograd functions save what they read"
            )
            return
        for (node, name), gemm in zip(found, gemms, strict=True):
            probe = self.probes.get(name)
            if probe is not None and probe.takes_step:
                self._one(probe, node, gemm)

    def _say(self, text: str) -> None:
        for probe in self.probes.values():
            probe.report_once(f"not recorded: {text}")

    def _weight_of(self, node: Any) -> str | None:
        """Return the 3-D parameter that a function multiplies by; None for a node of another kind."""
        if not _multiplies(node):
            return None
        names = {id(p): name for name, p in self.module.named_parameters(recurse=False) if num_dims(p) == 3}
        todo = [(following, 0) for following, _ in node.next_functions]
        while todo:
            following, depth = todo.pop()
            if following is None or depth > _MAX_STEPS or _multiplies(following):
                continue
            if (name := names.get(id(leaf_of(following)))) is not None:
                return name
            todo.extend((deeper, depth + 1) for deeper, _ in following.next_functions)
        return None

    def _as_read(self, stack: Tensor, second: Tensor) -> Tensor | None:
        """Return saved weights ``[E, K, N]`` as the GEMM reads them; None of square ones of which nothing tells.

        They are saved as the GEMM reads them or as the parameter lies. The shape tells; where it does not, other weights of the
        module, or memory in which K is contiguous, as FP8 GEMMs want it.

        Args:
            stack: weights that a function saved, ``[E, K, N]`` or ``[E, N, K]``.
            second: codes ``[E, K, N]``.
        """
        if stack.shape[1] != stack.shape[2]:
            self._is_turned = stack.shape != second.shape
        is_turned = False if self._is_turned is None and stack.stride(-2) == 1 else self._is_turned
        return None if is_turned is None else stack.transpose(-2, -1) if is_turned else stack

    def _one(self, probe: GroupProbe, node: Any, gemm: SeenGroupedGemm) -> None:
        saved = [getattr(t, "_data", t).detach() for t in node.saved_tensors if t is not None]
        wide = [t for t in saved if t.is_floating_point() and t.element_size() > 1]
        x = next((t for t in wide if t.shape == gemm.first.shape), None)
        stack = next((t for t in wide if t.dim() == 3 and set(t.shape[1:]) == set(gemm.second.shape[1:])), None)
        weight = None if stack is None else self._as_read(stack, gemm.second)
        if stack is not None and weight is None:
            probe.report_once("not recorded: its square weights may be read either way, and no other weight of the module tells")
            return
        if x is None or weight is None:
            probe.report_once("not recorded: its autograd function saves no input and weight in high precision")
            return
        line = probe.take_fprop(x, weight, gemm)
        if line is None:
            return
        call = GroupCall()

        @untraced
        def before(grads: Any) -> None:
            line.grad_output = None if grads[0] is None else grads[0].detach()
            self._listener.begin(line, line, call.on_gemm, self._fail)

        @untraced
        def after(grads: Any, others: Any) -> None:
            self._listener.end(line)
            probe.take_backward(line, call.gemms)
            call.gemms = []

        add_prehook(node, before)
        add_hook(node, after)


def _multiplies(node: Any) -> bool:
    """Return whether it is a function of the user's that saves weights of experts; others, that unwrap them say, do not."""
    return isinstance(node, BackwardCFunction) and any(t is not None and t.dim() == 3 for t in node.saved_tensors)


_CALL_OBSERVERS: WeakKeyDictionary[nn.Module, GroupedCallObserver] = WeakKeyDictionary()


class Grouped:
    """Modules with 3-D weights of their own, but those of ``torch.nn`` (a convolution's weight has three dimensions too)."""

    name = "grouped"
    kind = ""  # the class's name
    fp8 = True
    is_intercepted = True
    intercepts_ops = False  # but inside its own modules

    def matches(self, module: nn.Module) -> bool:
        """Return whether it holds stacks of matrices, and no other adapter knows better."""
        if type(module).__module__.startswith("torch.nn.") or isinstance(module, nn.Linear):
            return False
        return bool(stacks_of(module))

    def sublinears(self, module: nn.Module) -> dict[str, SubLinear]:
        """Return its stacks of matrices."""
        return {f".{name}": SubLinear(module, i, [name], has_bias=False) for i, name in enumerate(stacks_of(module))}

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return the casts that were observed; None before the first, and without any."""
        return seen_recipe(module, "grouped")

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Listen to the module of one of its weights.

        Raises:
            AttachError: another watch listens to it.
        """
        assert isinstance(module, SubLinear)
        weight, calls = module.weight_names[0], _CALL_OBSERVERS.get(module.owner)
        if calls is not None and (calls.observer is not observer or weight in calls.probes):
            raise AttachError(f"{name} is watched already; close the first watch before attaching another")
        if calls is None:
            calls = _CALL_OBSERVERS[module.owner] = GroupedCallObserver(module.owner, observer)
        calls.probes[weight] = GroupProbe(observer, name, module)
        kept = calls
        return lambda: kept.detach(weight)


ADAPTERS.add(Grouped.name, Grouped())

"""Record Fp8Linear inside compiled code, from its own ops (``kernels/linear_ops.py``), while they run.

The ops are in the graph with a watch and without one, so recording adds no graph, no guard and no node. Equal blocks share a
graph; an op's Linear is found by the address of its weight, and a backward op's forward op by the operand saved between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from fp8debug.kernels import linear_ops
from fp8debug.kernels.dispatch import Operand
from fp8debug.kernels.torch_state import is_of_cuda_graph
from fp8debug.linear import Fp8Linear
from fp8debug.observer.observer import Observer
from fp8debug.observer.probe import Probe, Product
from fp8debug.observer.rechecks import SavedForBackward
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized

#: Addresses of other models' weights that are remembered; those of weights that are computed anew are others each time.
MAX_UNKNOWN = 4096


class LinearOps:
    """Recorders of all Fp8Linears under watch, by the address of their weights."""

    def __init__(self) -> None:
        self._recorders: dict[tuple[int, bool], LinearRecorder] = {}  # by the module's id, and whether it is of training
        self._at: dict[tuple[int, bool], LinearRecorder] = {}  # by the weight's address when it was last looked for
        self._unknown: set[tuple[int, bool]] = set()  # addresses of weights that are no watched module's
        self._observers: dict[int, Observer] = {}  # of the recorders' watches, by their id
        self._end_steps: dict[int, Callable[[], None]] = {}  # callback of each watch at the end of a step, by its id
        self._begun: list[LinearRecorder] = []  # recorders of the ops that began in the steps under way
        self._unfound: set[torch.Size] = set()  # shapes of the weights of backward ops that no recorder was found for
        self._reported: set[LinearRecorder] = set()  # recorders whose missing backward pass was reported
        self._is_on_cpu: bool | None = None  # True if a watched module is not on a GPU; None is unknown
        self._steps = -1  # steps of all watches when the weights were looked for

    def add(self, layer: Fp8Linear, probe: Probe) -> Callable[[], None]:
        """Record a module until the function that is returned is called."""
        key = id(layer), not probe.observer.settings.inference
        recorder = self._recorders[key] = LinearRecorder(layer, probe)
        self._see_modules()

        def remove() -> None:
            if self._recorders.get(key) is recorder:
                del self._recorders[key]
            recorder.forget()
            self._reported.discard(recorder)
            self._see_modules()

        return remove

    def begin_forward(self, x: Tensor, weight: Tensor, *, trains: bool) -> linear_ops.OpRecorder | None:
        """Return what records a forward op; None where nothing is recorded of it."""
        if self._are_idle(x):
            if trains and not any(observer.in_shape_inference for observer in self._observers.values()):
                self._pause_until_step_ends()
            return None
        found = self._of(weight, trains)
        if found is not None and is_of_cuda_graph():
            found.leave_out()
            return None
        if found is not None and found.begin(x, weight, trains):
            self._begun.append(found)
            return found
        return None

    def _pause_until_step_ends(self) -> None:
        """Record the recipes that were set; ignore the other ops of the step if no watch has anything left to do in it."""
        for observer in self._observers.values():
            observer.before_forward()
        if self._is_on_cpu is None:
            self._is_on_cpu = not all(recorder.is_on_gpu for recorder in self._recorders.values())
        observers = self._observers.values()
        is_searched = self._is_on_cpu and any(observer.settings.check_finite is None for observer in observers)
        if not is_searched and all(observer.deferred_release.is_empty for observer in observers):
            linear_ops.OBSERVED.pause()

    def _end_step(self, observer: Observer) -> None:
        """Drop the state of a watch's step, and observe ops again."""
        if self._begun:
            for recorder in self._begun:
                if recorder.observer is observer:
                    if recorder not in self._reported and recorder.lacks_backward(self._unfound):
                        recorder.report_no_backward(observer.step - 1, not self._reported)
                        self._reported.add(recorder)
                    recorder.forget()
            self._unfound.clear()
            self._begun = [recorder for recorder in self._begun if recorder.observer is not observer]
            self._is_on_cpu = None
        linear_ops.OBSERVED.resume()

    def begin_backward(self, grad_output: Tensor, weight: Tensor) -> linear_ops.OpRecorder | None:
        """Return what records a backward op; None where nothing is recorded of it."""
        if self._are_idle(grad_output) or is_of_cuda_graph():
            return None
        found = self._of(weight, True)
        if found is None:
            self._unfound.add(weight.shape)
            return None
        return found if found.observes(grad_output) else None

    def _are_idle(self, x: Tensor) -> bool:
        """Return whether no watch records anything in this step, and no FLOPs are counted."""
        if Fp8Linear.counters:
            return False
        for observer in self._observers.values():
            if not observer.is_idle(x):
                return False
            observer.deferred_release.release_some()
        return True

    def _of(self, weight: Tensor, trains: bool) -> LinearRecorder | None:
        address = weight.data_ptr(), trains
        found = self._at.get(address)
        if found is not None and found.holds(weight):
            return found
        if found is None and address in self._unknown and not self._have_moved():
            return None
        if found is not None or len(self._unknown) > MAX_UNKNOWN:
            self._forget_addresses()
        self._find_addresses()
        found = self._at.get(address)
        if found is None:
            self._unknown.add(address)
        return found

    def _find_addresses(self) -> None:
        """Look for the weights of all watched modules."""
        self._at.clear()
        for (_, of_training), recorder in self._recorders.items():
            if (own := recorder.weight) is not None and own.data_ptr():
                self._at.setdefault((own.data_ptr(), of_training), recorder)

    def _have_moved(self) -> bool:
        """Return whether a watched weight has another address than before, perhaps one that was another's; asked once a step."""
        steps = sum(observer.step_count for observer in self._observers.values())
        if steps == self._steps:
            return False
        self._steps, before = steps, dict(self._at)
        self._find_addresses()
        if before == self._at:
            return False
        self._unknown.clear()
        return True

    def _forget_addresses(self) -> None:
        self._at.clear()
        self._unknown.clear()

    def _see_modules(self) -> None:
        """Note which modules there are, and of which watches."""
        self._forget_addresses()
        before, self._observers = self._observers, {id(r.observer): r.observer for r in self._recorders.values()}
        for key in self._observers.keys() - before.keys():
            observer = self._observers[key]
            self._end_steps[key] = partial(self._end_step, observer)
            observer.on_end_step.append(self._end_steps[key])
        for key in before.keys() - self._observers.keys():
            before[key].on_end_step.remove(self._end_steps.pop(key))
        self._is_on_cpu = None
        linear_ops.OBSERVED.set(self if self._recorders else None)


class LinearRecorder:
    """Recorder of one Fp8Linear's ops.

    Args:
        layer: the module.
        probe: where it records.
    """

    def __init__(self, layer: Fp8Linear, probe: Probe) -> None:
        self._layer, self._probe = layer, probe
        self._is_sampled = False
        self._kept: dict[int, list[SavedForBackward]] = {}  # by the address of wgrad's operand; 0 of frozen weights
        self._are_mixed = False  # whether several of a frozen weight wait, or did until all were taken

    @property
    def observer(self) -> Observer:
        """Observer of the watch."""
        return self._probe.observer

    @property
    def is_on_gpu(self) -> bool:
        """True if all its parameters are."""
        return all(parameter.is_cuda for parameter in self._layer.parameters())

    @property
    def weight(self) -> Tensor | None:
        """The weight as ops get it; None where it is computed, or split over ranks."""
        weight = self._layer._parameters.get("weight")
        return weight if type(weight) in (Tensor, torch.nn.Parameter) else None

    def holds(self, weight: Tensor) -> bool:
        """Return whether a tensor is the weight, where another may have had its memory before."""
        own = self.weight
        return own is weight or (own is not None and own.data_ptr() == weight.data_ptr() and own.shape == weight.shape)

    def begin(self, x: Tensor, weight: Tensor, trains: bool) -> bool:
        """Begin a forward op, and return whether anything is recorded of it."""
        for count in self._layer.counters:
            count(self._layer, 2 * x.numel() * weight.shape[0])
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(trains)  # the op of a pass that trains runs below autograd
        try:
            self._is_sampled = self._probe.begin()
        finally:
            torch._C._set_grad_enabled(before)
        if self._is_sampled:
            self._probe.layout = None
        return self._is_sampled or self._checks(x)

    def forget(self) -> None:
        """Let go of what the step that is over has kept."""
        self._kept.clear()
        self._are_mixed = False

    def lacks_backward(self, shapes: Collection[torch.Size]) -> bool:
        """Return whether no backward pass was recorded of a forward pass whose weight has one of these shapes."""
        return bool(self._kept) and (weight := self.weight) is not None and weight.shape in shapes

    def report_no_backward(self, step: int, aloud: bool) -> None:
        """Report that a backward pass was not recorded."""
        text = f"not recorded in full at step {step}: its backward pass got a copy of its weight, as from a saved-tensor hook"
        self.observer.report(self._probe.module, text, aloud)

    def observes(self, grad_output: Tensor) -> bool:
        """Return whether anything is recorded of a backward op."""
        return bool(self._kept) or self._checks(grad_output)

    def _keep(self, address: int, saved: SavedForBackward) -> None:
        others = [] if address else self._kept.get(address, [])  # an operand that had this address before is gone
        self._are_mixed |= bool(others)
        self._kept[address] = [*others, saved]

    def _take(self, address: int) -> SavedForBackward:
        # A recomputed forward op has saved the operand elsewhere; its backward op is that of the last one.
        found = address if address in self._kept else next(reversed(self._kept))
        taken = self._kept[found].pop()
        if not self._kept[found]:
            del self._kept[found]
        self._are_mixed &= bool(self._kept)
        return taken

    def _checks(self, x: Tensor) -> bool:
        return self._probe.searches(x)

    def leave_out(self) -> None:
        """Leave out a forward op that is captured: a replay records nothing, and rows of now would be in a graph's memory."""
        if self._probe.observer.begun.modules is None and self._probe.observer.sampling:
            self._probe.give_up("a CUDA graph replays it, and no compiled module around it is repeated beside it")

    def quantize(self, key: linear_ops.Key, x: Tensor, cast: Cast, scale_inv: Tensor | None) -> Quantized | None:
        """Quantize an operand and keep its statistics; None where the op is to do it."""
        if not (self._is_sampled if key[0] is Gemm.FPROP else self._kept):
            return None
        with self._nothing_known():
            return self._probe.quantize(key, x, cast, scale_inv)

    @contextmanager
    def _nothing_known(self) -> Iterator[None]:
        """Hide what the step knows of tensors: compiled code reuses their memory, which autograd does not count."""
        observer = self._probe.observer
        known, observer.tensor_cache = observer.tensor_cache, {}
        try:
            yield
        finally:
            observer.tensor_cache = known

    def fprop(self, x: Tensor, weight: Tensor, a: Operand, b: Operand, x_wgrad: Operand | None, output: Tensor) -> None:
        """Record fprop and the operand of wgrad that the forward pass quantizes, or whether they are finite."""
        if self._is_sampled:
            with self._nothing_known():
                kept = self._probe.fprop(x, weight, a, b, x_wgrad, output, parameter=self.weight)
            if kept is not None and not self._probe.observer.settings.inference:
                self._keep(_address(x_wgrad), kept)
        elif self._checks(output):
            self._probe.check(x, weight, output)

    def backward(self, grad_output: Tensor, weight: Tensor, dgrad: Product | None, wgrad: Product | None) -> None:
        """Record dgrad and wgrad, or whether they are finite."""
        if self._kept:
            # With several that saved no operand, which of them it was is not known; nor is, then, what its errors do to the loss.
            damage = not self._are_mixed
            kept = self._take(_address(None if wgrad is None else wgrad[1]))
            with self._nothing_known():
                self._probe.backward(grad_output, weight, dgrad, wgrad, kept, damage=damage)
        elif self._checks(grad_output):
            products = {Gemm.DGRAD: dgrad, Gemm.WGRAD: wgrad}
            results = {which: product[2] for which, product in products.items() if product and product[2] is not None}
            self._probe.check_backward(grad_output, results)


def _address(operand: Operand | None) -> int:
    return 0 if operand is None else (operand if isinstance(operand, Tensor) else operand[0].data).data_ptr()


#: Of all watches in the process.
LINEAR_OPS = LinearOps()

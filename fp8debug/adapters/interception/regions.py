"""Record modules inside compiled code: a sampled call of a compiled region is repeated in eager code, beside the trained one.

A region is a module that ``Module.compile()`` or ``torch.compile(module)`` compiled, whose ``forward`` is compiled, or which lies
in a compiled DistributedDataParallel. The trained call runs its code unchanged, in sampled steps too: no node, guard or graph is
added, so its bits cannot differ. When the gradient of its output is known, the region's own forward runs once more, uncompiled,
from the same inputs, weights and random numbers, and that gradient runs through it; the ordinary probes record both under its
modules' names. One region at a time: a repetition holds its activations no longer than its own backward pass, and until then its
inputs alone. Nothing of it reaches the training: weights are aliases without their hooks and ``grad``, buffers are copies, random
states, attributes and what else the program's functions reach (``program_state.py``) are put back, what autograd saves passes by
activation checkpointing, and a collective ends it.

The rows are those of eager code on the trained run's own inputs and gradients. Where torch.compile rounds less often between the
GEMMs than eager code does, that difference is in them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from fp8debug.adapters.interception.calls import call_eagerly, observe_regions
from fp8debug.adapters.interception.gemm_flops import GemmCounter
from fp8debug.adapters.interception.listener import OtherGemms, listener_of
from fp8debug.adapters.interception.program_state import ProgramState, TooManyObjectsError
from fp8debug.adapters.interception.region_threads import RegionThreads
from fp8debug.adapters.interception.repetition_graphs import Repetition, RepetitionGraphs, places_of
from fp8debug.interruptions import is_ours
from fp8debug.kernels.torch_state import (
    TorchState,
    active_modes,
    is_capturing,
    is_transformed,
    set_modes,
    skipped_by_dynamo,
    untraced,
)
from fp8debug.linear import Fp8Linear
from fp8debug.observer.autograd_nodes import add_prehook
from fp8debug.observer.observer import Observer
from fp8debug.observer.rechecks import accumulator_of, runs_now
from fp8debug.types import NOT_REPEATED, NOT_REPEATED_CODE

#: Part of a device's free memory that a repetition may keep for its backward pass.
MEMORY_SHARE = 0.5
#: Sampled steps in which a region is repeated once at most, unless the user says otherwise: eager code takes so much longer than
#: compiled code that each region at each sampled step more than doubles an average step (docs/performance.md).
FEWEST_TURNS = 8
_PLAIN = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)
#: torchao's parameters of experts: a tensor and the configuration of its GEMMs.
_WRAPPERS = ("Float8TrainingWeightWrapperTensor", "MXFP8TrainingWeightWrapperTensor")
#: Return contexts in which the eager code of a repetition runs: what a library computes twice it computes once there.
ECONOMIES: list[Callable[[Observer], AbstractContextManager[None]]] = []
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NotRepeatedError(Exception):
    """A region cannot run a second time without a trace; its text says why."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Ends a repetition at a collective: another rank may not repeat the region, and would not answer."""

    is_ours = True
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"):
            raise NotRepeatedError("its forward communicates with other ranks")
        return func(*args, **(kwargs or {}))


class _Random(NamedTuple):
    """States of the random generators that a forward pass may draw from; None is not restored."""

    python: Any
    numpy: Any
    cpu: Tensor | None
    gpus: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> _Random:
        gpus = {device: torch.cuda.get_rng_state(device) for device in devices}
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus)

    def drawn_by(self, after: _Random) -> _Random:
        """Return the states of the host's generators that have changed since, and those of all GPUs.

        Restoring the others would undo what a thread that prepares batches draws meanwhile.
        """
        is_same = self.numpy[2:] == after.numpy[2:] and np.array_equal(self.numpy[1], after.numpy[1])
        assert self.cpu is not None and after.cpu is not None  # as now() returns them
        return self._replace(
            python=None if self.python == after.python else self.python,
            numpy=None if is_same else self.numpy,
            cpu=None if torch.equal(self.cpu, after.cpu) else self.cpu,
        )

    def only(self, others: _Random) -> _Random:
        """Return the states of the generators that another one has."""
        return self._replace(
            python=None if others.python is None else self.python,
            numpy=None if others.numpy is None else self.numpy,
            cpu=None if others.cpu is None else self.cpu,
        )

    def restore(self) -> None:
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        for device, state in self.gpus.items():
            torch.cuda.set_rng_state(state, device)


class _Autocast(NamedTuple):
    """Autocast of one kind of device."""

    kind: str
    dtype: torch.dtype
    is_on: bool

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> list[_Autocast]:
        kinds = {"cpu", *(device.type for device in devices)}
        return [cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(kinds)]

    def again(self) -> torch.autocast:
        """Return the context; it keeps no casts of weights, whose aliases nobody reads again."""
        return torch.autocast(self.kind, self.dtype, self.is_on, cache_enabled=False)


class _Region(NamedTuple):
    """A compiled module, and what of it does not change between its calls.

    Attributes:
        num_matrices: matrices of its modules that are no watched module's, which a GEMM in it may read.
    """

    module: nn.Module
    name: str
    modules: list[nn.Module]
    watched: set[str]
    num_matrices: int
    devices: list[torch.device]
    fsdp: Any  #: FSDP2's state where ``fully_shard`` was called on the module itself, else None

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that it lies on; None where it lies on none or several."""
        return self.devices[0] if len(self.devices) == 1 else None


class _CallState(NamedTuple):
    """The state before a call of a region; ``random`` is None where the call waits for the region's turn.

    Attributes:
        region: which.
        unowned_gemms: GEMMs that belonged to no watched module.
        versions: tensors that the call may not write to if it is to be repeated: what each is, it, and its version.
        values: the numbers, texts and the like that its code can read.
        random: states of the random generators.
        is_followed: whether the GEMMs outside the watched modules are recorded too.
    """

    region: _Region
    unowned_gemms: dict[str, int]
    versions: list[tuple[str, Tensor, int]]
    values: list[Hashable]
    random: _Random | None
    is_followed: bool


class Regions:
    """Repeats sampled calls of the compiled regions of a model.

    Args:
        roots: the models.
        watched: FQN of every watched module, by its id.
        observer: of the watch.
        others: takes the GEMMs outside the watched modules.
        turns: sampled steps in which each region is repeated once, the first sampled step of a region apart; None for as many as
            there are regions, and at least ``FEWEST_TURNS``.
        only_whole: repeat a region only where torch.compile made one graph of its forward, which then does nothing but compute.

    Attributes:
        turns: those in force: 1 as long as no region has had to wait.
        reasons: why nothing is repeated, by the id of each module in a region that is left out.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        watched: Mapping[int, set[str]],
        observer: Observer,
        others: OtherGemms,
        turns: int | None = 1,
        *,
        only_whole: bool = False,
    ) -> None:
        self._roots, self._watched, self._observer, self._others = list(roots), watched, observer, others
        self._wanted_turns, self._only_whole = turns, only_whole
        self.turns = 1
        self.reasons: dict[int, str] = {}
        self._num_sampled = 0  # steps before this one in which a region's call was sampled
        self._first_sampled: dict[int, int] = {}  # by a region's id, in the order of their turns: step
        self._looked_at: dict[int, int] = {}  # by its id: the step in which GEMMs outside the watched modules were looked for
        self._is_whole: dict[int, bool] = {}  # by its id: whether its call is one graph
        self._listener = listener_of(observer)
        self._graphs = RepetitionGraphs(observer)
        self._regions: dict[int, _Region] = {}
        self._refused: set[int] = set()
        self._outputs: list[Any] = []  # hooks on trained outputs whose backward pass has not come yet
        self._threads = RegionThreads()
        self._skipped: set[int] = set()  # regions whose repetition was skipped for another thread, and reported
        self._counter: GemmCounter | None = None  # the listener's, while a repetition runs
        self._seen: set[tuple[int, int]] = set()  # regions that were called outside a backward pass, by step
        self._first: dict[int, int] = {}  # of the step: position of a region's first module in execution order, by its id
        observer.on_end_step.append(self._forget)
        modules = [module for root in self._roots for module in root.modules()]
        self._names = {
            id(m): name.replace("._orig_mod", "").removeprefix("_orig_mod")
            for root in self._roots
            for name, m in root.named_modules()
        }
        self._end = observe_regions([type(module) for module in modules], self._take)

    def remove(self) -> None:
        """End it."""
        self._end()
        self._forget()
        self._graphs.remove()
        if self._forget in self._observer.on_end_step:
            self._observer.on_end_step.remove(self._forget)

    def _forget(self) -> None:
        if self._observer.is_off:
            self._graphs.remove()
        for handle in self._outputs:
            handle.remove()
        self._outputs.clear()
        self._num_sampled += bool(self._seen)
        self._seen.clear()
        self._first.clear()

    @untraced
    def _take(self, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return what calls a compiled module in place of ``run``; None where its call is not to be recorded."""
        module = getattr(module, "_orig_mod", module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module  # which it calls with what it was given itself
        if id(module) not in self._names or self._threads.is_repeating:
            return None
        if self._observer.is_off or self._observer.settings.inference:
            return None
        is_recorded = self._observer.takes_pass and id(module) not in self._refused
        return partial(self._call, self._call_recorded if is_recorded else _call_as_it_is, module, run)

    @skipped_by_dynamo
    def _call(self, call: Callable[..., Any], module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a region when no other thread repeats one."""
        try:
            self._enter()
            return call(module, run, *args, **kwargs)
        finally:
            self._leave()

    @untraced
    def _enter(self) -> None:
        self._threads.enter()

    @untraced
    def _leave(self) -> None:
        self._threads.leave()

    @skipped_by_dynamo
    def _call_recorded(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a region; repeat the call if it is sampled."""
        before = self._begin(module, args, kwargs)
        if before is None:
            return run(*args, **kwargs)
        begun = self._observer.begun
        outer, begun.modules = begun.modules, set()
        modes, counted = self._hide_listener(module), self._counted()
        try:
            output = run(*args, **kwargs)
        finally:
            recorded, begun.modules = begun.modules, outer
            self._show_listener(modes)
        if before.is_followed or not before.region.watched <= recorded:
            self._repeat(before, recorded, args, kwargs, output, (counted, self._counted()))
        return output

    @untraced
    def _hide_listener(self, module: nn.Module) -> list[Any] | None:
        """Let nobody listen to the ops of a compiled call that are not recorded; return the dispatch modes to be set after it.

        A listener that is not needed takes its host longer than a launch of each op. It is needed where Python code runs between
        graphs, known from the region's first sampled call on, and where FLOPs are counted. Modules of eager code in the region
        listen for themselves. None where nothing has changed.
        """
        counter = self._listener.counter
        if not self._is_whole.get(id(module), False) or (counter is not None and counter.is_on):
            return None
        modes = active_modes()
        if self._listener not in modes:
            return None
        set_modes([mode for mode in modes if mode is not self._listener])
        return modes

    @untraced
    def _show_listener(self, modes: list[Any] | None) -> None:
        """Set the dispatch modes that :meth:`_hide_listener` returned; an exception that ended the call ends the root's too."""
        if modes is not None:
            set_modes(modes)

    @untraced
    def _counted(self) -> Mapping[Any, int]:
        """Return the FLOPs that the step has counted so far; empty where none are."""
        counter = self._listener.counter
        return counter.counted() if counter is not None and counter.is_wanted else {}

    @untraced
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _CallState | None:
        """Return the state before a sampled call; None for one that is never repeated."""
        observer = self._observer
        observer.before_forward()
        if not observer.sampling or observer.in_shape_inference or is_capturing() or is_transformed():
            return None
        if torch._C._current_graph_task_id() == -1:
            self._seen.add((id(module), observer.step_count))
        elif (id(module), observer.step_count) in self._seen:
            return None  # the recomputation of a checkpointed call that was repeated
        try:
            region = self._region(module)
            is_followed = self._is_followed(region)
            if not region.watched and not is_followed:
                self._first_sampled.pop(id(module), None)  # it has no turn
                return None
            unowned = dict(self._listener.unowned_gemms)
            if not self._has_turn(region):
                return _CallState(region, unowned, [], [], None, is_followed)
            state = ProgramState(region.modules)
            versions = _versions(region, state.tensors, args, kwargs)
            return _CallState(region, unowned, versions, state.values, _Random.now(region.devices), is_followed)
        except Exception as error:
            if not is_ours(error):
                raise
            self._refuse(module, error)
            return None

    def _region(self, module: nn.Module) -> _Region:
        found = self._regions.get(id(module))
        if found is None:
            modules = list(module.modules())
            watched = {name for m in modules for name in self._watched.get(id(m), ())}
            devices = sorted({t.device for t in (*module.parameters(), *module.buffers()) if t.is_cuda}, key=str)
            found = self._regions[id(module)] = _Region(
                module,
                self._names[id(module)],
                modules,
                watched,
                self._others.num_matrices(modules),
                devices,
                _fsdp_state_of(module),
            )
        return found

    def _is_followed(self, region: _Region) -> bool:
        """Return whether GEMMs outside the watched modules are looked for: in its first sampled step, or if it has some."""
        if not region.num_matrices:
            return False
        step = self._observer.step_count
        looked_at = self._looked_at.setdefault(id(region.module), step)
        return looked_at == step or self._others.has_recorded(region.modules)

    def _has_turn(self, region: _Region) -> bool:
        """Return whether a region is repeated in this sampled step: in its first one, and then in turn."""
        key, step = id(region.module), self._observer.step_count
        if self._first_sampled.setdefault(key, step) == step:
            return True
        order = list(self._first_sampled)
        turns = self._wanted_turns or max(FEWEST_TURNS, len(order))
        has_turn = (order.index(key) + self._num_sampled) % turns == 0
        if not has_turn:
            self.turns = turns
        return has_turn

    @untraced
    def _repeat(  # noqa: C901  # a hook of the output, inside it one of the gradient, and what both share
        self,
        before: _CallState,
        begun: set[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        counted: tuple[Mapping[Any, int], Mapping[Any, int]],
    ) -> None:
        """Have the region run once more when the gradient of the trained output is known.

        Args:
            before: the state before the call.
            begun: FQNs of the modules that the call recorded itself.
            args: of the call.
            kwargs: of the call.
            output: what it returned.
            counted: FLOPs that were counted before it, and after it.
        """
        region, observer = before.region, self._observer
        if id(region.module) not in self._first:  # repetitions come in the order of the backward passes
            self._first[id(region.module)] = observer.reserve_calls(len(region.watched) + region.num_matrices)
        if before.random is None:
            self._set_unowned(before.unowned_gemms)
            return
        state = TorchState()
        try:
            states = before.random.drawn_by(_Random.now(region.devices))
            self._is_whole[id(region.module)] = is_whole = not has_graph_breaks(region.module)
            if self._only_whole and not is_whole:
                raise NotRepeatedError(
                    "torch.compile breaks its graph, and code between graphs may print or write;"
                    " watch(..., compiled='repeat') runs it once more all the same"
                )
            _check(region, args, kwargs)
            _check_versions(before)
            trained = _pytree.tree_leaves(output)
            places = [i for i, x in enumerate(trained) if isinstance(x, Tensor) and x.requires_grad]
            if region.fsdp is None:
                _check_weights(region)
            first = self._first[id(region.module)]
            run = _Repetition(observer, region, frozenset(begun), _Autocast.now(region.devices), first)

            def repeat(args: tuple[Any, ...], kwargs: dict[str, Any], grads: Sequence[Tensor | None]) -> None:
                with self._isolated(region):
                    allocated = _allocated(region)
                    with self._recounted(*counted), self._following() if before.is_followed else nullcontext():
                        outputs = run.forward(args, kwargs)
                    self._graphs.note_memory(id(region.module), _allocated(region) - allocated)
                    if len(outputs) != len(trained):
                        raise NotRepeatedError("its compiled call returns other tensors than its forward")
                    run.backward([outputs[i] for i in places], grads)

            @untraced
            def backward(grads: Sequence[Tensor | None]) -> None:
                state = TorchState()
                try:
                    with self._threads.repeating() as is_alone:
                        if not is_alone:
                            self._leave_out(region)
                            return
                        _check_versions(before)
                        _check_weights(region)
                        after = _Random.now(region.devices).only(states)
                        try:
                            states.restore()
                            self._graphs.run(
                                Repetition(
                                    id(region.module),
                                    region.name or type(region.module).__name__,
                                    region.gpu,
                                    args,
                                    kwargs,
                                    grads,
                                    first,
                                    self._state_of(before, run),
                                    counted[0] != counted[1],
                                    repeat,
                                )
                            )
                        finally:
                            after.restore()
                except Exception as error:
                    state.restore()
                    if not is_ours(error):
                        raise
                    self._refuse(region.module, error)

            if places:
                self._outputs += _when_known([trained[i] for i in places], backward)
                self._set_unowned(before.unowned_gemms)
        except Exception as error:
            state.restore()
            if not is_ours(error):
                raise
            self._refuse(region.module, error)

    def _leave_out(self, region: _Region) -> None:
        """Report that a region is not repeated in this step: another thread would compute with the repetition's aliases."""
        text = (
            f"not recorded in full at step {self._observer.step}: another thread was in a call of a compiled module of the model"
        )
        if id(region.module) not in self._skipped:
            self._observer.report(region.name or type(region.module).__name__, text, not self._skipped)
            self._skipped.add(id(region.module))

    def _state_of(self, before: _CallState, run: _Repetition) -> Hashable:
        """Return what a repetition depends on besides its arguments; None where it depends on more."""
        region = before.region
        tensors = [x for what, x, _ in before.versions if what not in ("its input", "a parameter")]
        buffers = [b for module in region.modules for b in module._buffers.values() if b is not None]
        weights = [p for module in region.modules for p in module._parameters.values() if p is not None]
        is_known = (
            region.gpu is not None
            and region.fsdp is None
            and not before.is_followed
            and self._is_whole[id(region.module)]  # Python code between graphs may wait for the device
            and not run.recorded
            and all(type(x) in _PLAIN and x.layout is torch.strided for x in (*tensors, *buffers, *weights))
            and all(weight.grad is None for weight in weights)
        )
        if not is_known:
            return None
        modes = tuple((id(module), module.training) for module in region.module.modules())
        places = places_of((*tensors, *buffers, *weights))
        return places, tuple(before.values), modes, tuple(run.autocast), self._observer.has_fp8

    def _set_unowned(self, gemms: dict[str, int]) -> None:
        """Count GEMMs that belong to no watched module as before a region's call: its own are recorded, or were."""
        self._listener.unowned_gemms.clear()
        self._listener.unowned_gemms.update(gemms)

    @contextmanager
    def _isolated(self, region: _Region) -> Iterator[None]:
        """Run the program's forward as eager code that leaves no trace and that nobody else observes."""
        modes, self._counter = active_modes(), self._listener.counter
        self._listener.counter = None
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        try:
            is_one_of_many = is_distributed and torch.distributed.get_world_size() > 1
            set_modes([_NoCollectives()] if is_one_of_many else [])  # type: ignore[no-untyped-call]  # torch's
            saved = saved_tensors_hooks(_within_memory(region.devices), as_it_is)
            with _unchanged(region.modules), torch.compiler.set_stance("force_eager"), saved, ExitStack() as economies:
                for economy in ECONOMIES:
                    economies.enter_context(economy(self._observer))
                for module in region.modules:
                    vars(module).pop("_compiled_call_impl", None)  # called as if Module.compile() had not been
                yield
        finally:
            set_modes(modes)
            self._listener.counter, self._counter = self._counter, None

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Have the GEMMs outside the watched modules recorded."""
        others, listener = self._others, self._listener
        is_entered = listener.enter()
        try:
            others.begin()
            listener.begin(self, None, others.take, others.fail, others)
            yield
        finally:
            if listener.end(self) is not None:
                others.end()
            if is_entered:
                listener.leave()

    @contextmanager
    def _recounted(self, before: Mapping[Any, int], after: Mapping[Any, int]) -> Iterator[None]:
        """Count the FLOPs of a repetition's forward pass in place of those of the trained one, where those were counted."""
        counter, listener = self._counter, self._listener
        if counter is None or before == after:
            yield
            return
        listener.counter = counter
        try:
            listener.enter()
            with counter.recounting(before, after):
                yield
        finally:
            listener.counter = None
            listener.leave()

    def _refuse(self, module: nn.Module, error: Exception) -> None:
        """Leave a region out from now on and report that, the first of them on stderr."""
        reason = (
            str(error)
            if isinstance(error, (NotRepeatedError, TooManyObjectsError))
            else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        )
        name = self._names[id(module)] or type(module).__name__
        text = f"{NOT_REPEATED}: {reason}; watch(..., compiled='eager') runs sampled steps without torch.compile"
        self._observer.report(name, text[:300], not self._refused, NOT_REPEATED_CODE)
        self._refused.add(id(module))
        self.reasons |= dict.fromkeys(map(id, module.modules()), text[:300])


class _Repetition:
    """One call of a region in eager code, on aliases of its weights.

    Args:
        observer: of the watch.
        region: the region.
        recorded: FQNs of modules that the trained call recorded itself.
        autocast: of the trained call.
        first: position of its first module in execution order.

    Attributes:
        recorded: as given.
        autocast: as given.
    """

    def __init__(
        self, observer: Observer, region: _Region, recorded: frozenset[str], autocast: list[_Autocast], first: int
    ) -> None:
        self._observer, self._region, self.recorded = observer, region, recorded
        self.autocast, self._first = autocast, first
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}
        self._inputs: list[Tensor] = []

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of what the module's forward returns."""
        args, kwargs = _pytree.tree_map(self._alias_of_input, (args, kwargs))
        region, call = self._region, cast("Callable[..., Any]", call_eagerly)
        if region.fsdp is not None:  # its hooks would gather the weights, which are there for the backward pass
            args, kwargs = region.fsdp._cast_forward_inputs(args, kwargs)
            call = _call_impl
        with ExitStack() as stack:
            for autocast in self.autocast:
                stack.enter_context(autocast.again())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._in_place())
            stack.enter_context(self._observer.repeating(self.recorded, self._first))
            output = call(region.module, *args, **kwargs)
        return _pytree.tree_leaves(output)

    def backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Run the gradients of the trained outputs through the repetition."""
        given = [(output, grad.detach()) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        adds = {}
        for parameter, alias in self._aliases.values():
            alias.grad = parameter.grad  # what earlier microbatches have left there
            adds[id(alias)] = runs_now(accumulator_of(parameter))
        wanted = [*self._inputs, *(alias for _, alias in self._aliases.values() if alias.requires_grad)]
        if given and wanted:
            with self._in_place(), self._observer.repeating(self.recorded, adds=adds):
                torch.autograd.grad([o for o, _ in given], wanted, [g for _, g in given], allow_unused=True)

    def _alias_of_input(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        alias = x.detach()
        if x.requires_grad:
            self._inputs.append(alias.requires_grad_())
        return alias

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Put aliases in the place of parameters, and copies in that of buffers."""
        before = [(m, dict(m._parameters), dict(m._buffers)) for m in self._region.modules]
        try:
            for module, parameters, buffers in before:
                for name, p in parameters.items():
                    if p is not None:
                        if id(p) not in self._aliases:
                            self._aliases[id(p)] = p, p.detach().requires_grad_(p.requires_grad)
                        module._parameters[name] = self._aliases[id(p)][1]  # type: ignore[assignment]  # no second registration
                for name, b in buffers.items():
                    module._buffers[name] = None if b is None else b.clone()
            yield
        finally:
            for module, parameters, buffers in before:
                module._parameters.update(parameters)
                module._buffers.update(buffers)


@skipped_by_dynamo
def _call_as_it_is(_: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def has_graph_breaks(module: nn.Module) -> bool:
    """Return whether torch.compile made several graphs of a module's forward, with Python code between them.

    Dynamo compiles the frame of ``forward``, and code that a break leaves behind calls a function ``__resume_at...``. A frame
    with a break in a loop it leaves to Python as a whole. The forward of torch's own modules is part of another frame, of which
    nothing is known: there any break in the process counts [seen: torch 2.13].
    """
    from torch._dynamo import eval_frame, trace_rules, utils

    forward = eval_frame.innermost_fn(module.forward)
    code = getattr(forward, "__code__", None)
    entries = eval_frame._debug_get_cache_entry_list(code) if code is not None else []
    if not entries:
        return bool(utils.counters["graph_break"]) or not trace_rules.check(forward)
    return any(name.startswith("__resume_at") for entry in entries for name in entry.code.co_names)


@contextmanager
def _unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put back what the modules' attributes are, counters for instance, and all that their functions reach."""
    before, state = [(vars(m), dict(vars(m))) for m in modules], ProgramState(modules)
    try:
        yield
    finally:
        state.restore()
        for now, then in before:
            for name in now.keys() - then.keys():
                del now[name]
            for name, value in then.items():
                if name not in now or now[name] is not value:
                    now[name] = value


def _when_known(tensors: Sequence[Tensor], take: Callable[[Sequence[Tensor | None]], None]) -> list[RemovableHandle]:
    """Have a function take the gradients of tensors, in each backward pass that computes one of them.

    ``register_multi_grad_hook`` waits for good where the only root of a backward pass is one of the tensors: a compiled model
    that returns its loss, or a compiled block inside a reentrant checkpoint [seen: torch 2.13].

    Args:
        tensors: shape (...) each, with gradients.
        take: is given a gradient for each of them, None where there is none.

    Returns:
        Handles whose ``remove`` ends it.
    """
    edges = [get_gradient_edge(x) for x in tensors]
    nodes = {id(edge.node): edge.node for edge in edges}
    known: dict[int, dict[int, tuple[Tensor | None, ...]]] = {}  # of a node, by its id, in a backward pass

    def see(key: int, grads: tuple[Tensor | None, ...]) -> None:
        found = known.setdefault(torch._C._current_graph_task_id(), {})
        found[key] = grads
        if all(other in found or not torch._C._will_engine_execute_node(node) for other, node in nodes.items()):
            del known[torch._C._current_graph_task_id()]
            take([found[id(edge.node)][edge.output_nr] if id(edge.node) in found else None for edge in edges])

    return [add_prehook(node, partial(see, key)) for key, node in nodes.items()]


def _is_plain(x: Any) -> bool:
    """Return whether it is a tensor of torch's own, or one that torchao wraps to choose the precision of its GEMMs."""
    return type(x) in _PLAIN or type(x).__name__ in _WRAPPERS


def _check(region: _Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where a second run of a region's forward would not be without a trace."""
    for x in _pytree.tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and not _is_plain(x):
            raise NotRepeatedError(f"its input is a {type(x).__name__}")
    for module in region.modules:
        name = type(module).__name__
        hooks = [hook for kind in _HOOKS for hook in (vars(module).get(kind) or {}).values()]
        if module is region.module and region.fsdp is not None:
            hooks = [hook for hook in hooks if getattr(hook, "__self__", None) is not region.fsdp]
        if hooks:
            raise NotRepeatedError(f"hooks run in it ({name})")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise NotRepeatedError("it contains DistributedDataParallel; compile the module inside it")
        if isinstance(module, Fp8Linear) and " delayed(" in module.recipe.plan:
            raise NotRepeatedError("an Fp8Linear in it has delayed scaling")


def _check_weights(region: _Region) -> None:
    """Raise where a region's weights are not as its GEMMs read them; those of FSDP2 are while their gradients are computed."""
    for module in region.modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not _is_plain(tensor):
                raise NotRepeatedError(f"it holds a {type(tensor).__name__}")


def _fsdp_state_of(module: nn.Module) -> Any:
    """Return the state of FSDP2 that a module got by ``fully_shard``, None without."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return module._get_fsdp_state() if kind is not None and isinstance(module, kind) else None


def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module without its hooks; a frame of this name is where ``gemm_flops.py`` finds the module that runs."""
    return self.forward(*args, **kwargs)


def _versions(
    region: _Region, outside: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Tensor, int]]:
    """Return the tensors that a call may not write to if it is to be repeated, each with its version."""
    found = [("its input", x) for x in _pytree.tree_leaves((args, kwargs)) if _is_plain(x)]
    found += [("a tensor outside of it", x) for x in outside if _is_plain(x)]
    for module in region.modules:
        found += [(f"the attribute {name}", x) for name, x in vars(module).items() if _is_plain(x)]
        found += [("a parameter", p) for p in module._parameters.values() if p is not None]
    return [(what, x, x._version) for what, x in found if not x.is_inference()]


def _check_versions(before: _CallState) -> None:
    """Raise where what the call has read was written to since it began."""
    for what, tensor, version in before.versions:
        if tensor._version != version:
            raise NotRepeatedError(f"{what} is written to before its backward pass ends")


def _within_memory(devices: Sequence[torch.device]) -> Callable[[Tensor], Tensor]:
    """Return what autograd saves a tensor by; it raises when a repetition has taken its share of a device's free memory."""
    left: dict[torch.device, float] = {}
    for device in devices:
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left[device] = MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] + unused)

    def save(x: Tensor) -> Tensor:
        if x.device in left:
            left[x.device] -= x.numel() * x.element_size()
            if left[x.device] < 0:
                raise NotRepeatedError("too little memory for a second run; compile smaller regions, such as each block")
        return x

    return save


def _allocated(region: _Region) -> int:
    """Return the bytes that tensors take on a region's GPU."""
    return 0 if region.gpu is None else torch.cuda.memory_allocated(region.gpu)


def as_it_is(x: Tensor) -> Tensor:
    """Return what a repetition saved for its backward pass: the tensor itself."""
    return x

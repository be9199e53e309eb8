"""CUDA graphs of repetitions: a region that is repeated again and again asks of its host one launch, not thousands of ops.

The first repetition of a region is eager code, the second is captured with everything that records it, and from then on it is
replayed: its inputs and the gradients of its outputs are copied to where the graph reads them, and what it leaves in accumulators
of its own is added to those of the step. The capture writes to no memory that anybody else may get: what it allocates is the
graph's, and what else it writes to lives as long: where a capture would replace such memory, it ends. A graph that is given up
lives until the device has run its replays, which read memory of the host.

A replay computes what the repetition would, but for the lines that shadow and exact GEMMs are compared on: those of the captured
step in place of the step's own. It is used only where all that a repetition depends on is as it was when it was captured
(:class:`Repetition`); everything else runs as eager code, and so does a region from then on whose
graph could not be used.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree

from fp8debug.interruptions import is_ours
from fp8debug.kernels.backend import gpu, why_no_kernels
from fp8debug.kernels.torch_state import TorchState, ordinary_torch, own_capture
from fp8debug.observer.host_copy import new_event
from fp8debug.observer.observer import Observer, Replayable
from fp8debug.observer.table import Table

#: Share of a device's memory that no allocator of torch's may hold after a graph has taken its own; with less there is none.
FREE_SHARE = 0.1
#: Memory of a graph as a multiple of what the forward pass of its repetition holds: gradients and casts come to it.
MEMORY_FACTOR = 3
#: How long the end of a watch waits for the device.
PATIENCE_S = 60.0
_SIMPLE = (bool, int, float, str, type(None))


class Repetition(NamedTuple):
    """A repetition that is about to run.

    Attributes:
        region: what it repeats, by an id.
        name: FQN of that.
        device: of all its tensors; None where they have not one GPU.
        args: of the call.
        kwargs: of the call.
        grads: of the outputs that have one.
        first: the first of its places in execution order.
        state: what else it depends on; None where that is not known well enough for a graph.
        counts: FLOPs are counted in it, by code of ours that has to run.
        run: runs it as eager code, with such arguments and gradients.
    """

    region: int
    name: str
    device: torch.device | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads: Sequence[Tensor | None]
    first: int
    state: Hashable
    counts: bool
    run: Callable[[tuple[Any, ...], dict[str, Any], Sequence[Tensor | None]], None]

    @property
    def key(self) -> Hashable:
        """Key of a graph: all that it is made for; None where there can be none."""
        leaves, spec = _pytree.tree_flatten((self.args, self.kwargs))
        found = [_described(x, self.device) for x in (*leaves, *self.grads)]
        return None if self.state is None or None in found else (self.state, str(spec), tuple(found))


class _Graph(NamedTuple):
    """A captured repetition.

    Attributes:
        graph: torch's.
        inputs: where it reads the tensors among the arguments and gradients.
        found: what it records.
        first: the first of its places in execution order.
        numbers: what it sends to the device.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    found: Replayable
    first: int
    numbers: Any


class _RepeatedRegion:
    """Repetitions of one region so far."""

    def __init__(self) -> None:
        self.key: Hashable = None  #: of the last one
        self.graph: _Graph | None = None
        self.device: torch.device | None = None  #: of the graph
        self.step = self.replayed_at = -1  #: count of the last step that it was repeated in, and replayed in
        self.is_eager = False  #: it never runs by a graph again
        self.held = 0  #: bytes that its forward pass held, as eager code


class _Accumulators:
    """Accumulators of the replays on one device, whose memory is never replaced, and what captures share."""

    def __init__(self, device: torch.device, table: Table) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._memory = torch.cuda.MemPool()
        self.pool = cast("Any", self._memory.id)
        with torch.cuda.stream(self.stream):
            self.table = table.apart()
        torch.cuda.current_stream(device).wait_stream(self.stream)
        self._last: torch.cuda.Stream | None = None  # that a graph was replayed on
        self._retired: list[_Graph] = []
        self._has_run, self._is_noted = new_event(), False  # all of them, once that is noted
        self._num_users = self._memory.use_count()

    def begin_capture(self) -> None:
        """Note how many graphs the pool has before another one."""
        self._num_users = self._memory.use_count()

    def begin_replay(self) -> None:
        """Have what follows on the current stream wait for the replay before, which used the same memory."""
        now = torch.cuda.current_stream(self.table.device)
        if self._last is not None and self._last != now:
            now.wait_stream(self._last)
        self._last = now

    def retire(self, graph: _Graph) -> None:
        """Keep a graph that is given up until the device has run its replays: they read numbers from memory of the host."""
        self._retired.append(graph)
        with _errors_dropped():  # the device may be what failed: then they are kept for good
            self._note_end()

    def release(self) -> None:
        """Let go of the graphs that were given up, if their replays have run, without waiting for them."""
        if self._retired and self._is_noted and self._has_run.query():  # type: ignore[no-untyped-call]  # torch's
            self._retired.clear()

    def _note_end(self) -> None:
        """Have the device tell when it has run all that was started so far."""
        self._is_noted = False  # an event that could not be recorded says that it has come
        self._has_run.record(self.stream if self._last is None else self._last)
        self._is_noted = True

    def close(self) -> None:
        """Wait for the replays of all graphs, which were given up, and whose memory is given back next.

        Where the device has failed, or another rank has and this one's device waits for it, the memory is never given back: to do
        that would call cudaFree(), which ends the process at an error, and waits for as long as the device does.
        """
        end, has_run = time.monotonic() + PATIENCE_S, False
        with _errors_dropped():
            self._note_end()
            while not (has_run := bool(self._has_run.query())) and time.monotonic() < end:  # type: ignore[no-untyped-call]  # torch's
                time.sleep(0.001)
        if has_run:
            self._retired.clear()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def recover(self) -> None:
        """Have torch forget a capture that failed.

        Its random generator believes itself captured until a capture succeeds, an error waits for whoever asks CUDA next, and
        the pool believes itself in use, which an older torch ends the process for when it lets go of the pool.
        """
        device = self.table.device
        with _errors_dropped():
            torch._C._cuda_endAllocateToPool(device.index, self.pool)
        for _ in range(self._memory.use_count() - self._num_users):
            with _errors_dropped():
                torch._C._cuda_releasePool(device.index, self.pool)
        for _ in range(2):
            with _errors_dropped(), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch's
                x, graph = torch.zeros(1, dtype=torch.float32, device=device), torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="relaxed")
                try:
                    x.add_(1)
                finally:
                    graph.capture_end()


class RepetitionGraphs:
    """Runs the repetitions of a watch, by graphs where it can.

    Args:
        observer: of the watch.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._regions: dict[int, _RepeatedRegion] = {}
        self._accumulators: dict[torch.device, _Accumulators] = {}
        self._is_ended = False  # a capture has failed

    def note_memory(self, region: int, held: int) -> None:
        """Note how many bytes the forward pass of a repetition holds until its backward pass."""
        self._regions[region].held = held

    def remove(self) -> None:
        """Give the graphs' memory back, once the device has run them."""
        for region in self._regions.values():
            self._give_up(region)
        for accumulators in self._accumulators.values():
            accumulators.close()
        self._regions.clear()
        self._accumulators.clear()

    def run(self, one: Repetition) -> None:
        """Run a repetition, in autograd's thread of its device, and record it in the step under way."""
        region, step = self._regions.setdefault(one.region, _RepeatedRegion()), self._observer.step_count
        for accumulators in self._accumulators.values():
            accumulators.release()
        if region.step == step:  # microbatches: a replay does not tell the modules' probes of a first pass
            region.is_eager = True
            self._give_up(region)
            if region.replayed_at == step:
                return
        region.step = step
        key = None if region.is_eager or self._observer.on_operand is not None else self._key_of(one)
        if key is None or one.device is None or one.counts or region.key != key:
            region.is_eager |= region.graph is not None  # its weights, shapes or rows have changed, and may again
            self._give_up(region)
            region.key = key
            one.run(one.args, one.kwargs, one.grads)
            return
        if region.graph is not None or self._capture(region, one, one.device):
            region.replayed_at = step
            self._replay(region, one, one.device)

    def _key_of(self, one: Repetition) -> Hashable:
        """Return what a graph is made for, with the number of the step's rows; None where there can be none."""
        key = None if one.device is None else one.key
        return None if key is None or one.device is None else (key, self._observer.table(one.device).num_rows)

    def _give_up(self, region: _RepeatedRegion) -> None:
        """Replay a region's graph no more."""
        if region.graph is not None and region.device is not None:
            self._accumulators[region.device].retire(region.graph)
        region.graph = None

    def _replay(self, region: _RepeatedRegion, one: Repetition, device: torch.device) -> None:
        graph, accumulators = region.graph, self._accumulators[device]
        assert graph is not None
        accumulators.begin_replay()
        with ordinary_torch():
            for to, x in zip(graph.inputs, _tensors(one), strict=True):
                to.copy_(x)
            graph.graph.replay()
            self._observer.add(graph.found, accumulators.table, one.first - graph.first)

    def _capture(self, region: _RepeatedRegion, one: Repetition, device: torch.device) -> bool:
        """Capture a repetition; where that fails, nothing of the region is recorded in this step, and no graph is made later."""
        accumulators = self._accumulators_of(device, one.name) if self._has_room(region, device) else None
        if accumulators is None:
            region.is_eager = True
            one.run(one.args, one.kwargs, one.grads)
            return False
        try:
            region.graph, region.device = self._captured(one, accumulators), device
        except BaseException as error:
            self._is_ended, region.replayed_at = True, self._observer.step_count
            with ordinary_torch():
                accumulators.recover()
            if not is_ours(error):
                raise
            text = f"not recorded at step {self._observer.step}: no CUDA graph could be made of it, and none is any more"
            self._observer.report(one.name, f"{text} ({_reason(error)})"[:300], False)
            return False
        return True

    def _has_room(self, region: _RepeatedRegion, device: torch.device) -> bool:
        """Return whether a graph would leave the training enough memory."""
        free, total = torch.cuda.mem_get_info(device)
        return free - MEMORY_FACTOR * region.held > FREE_SHARE * total

    def _captured(self, one: Repetition, accumulators: _Accumulators) -> _Graph:
        device, table, stream = accumulators.table.device, accumulators.table, accumulators.stream
        leaves, spec = _pytree.tree_flatten((one.args, one.kwargs))
        with ordinary_torch():
            leaves = [_copy(x) for x in leaves]
            grads = [None if x is None else x.detach().clone() for x in one.grads]
        args, kwargs = _pytree.tree_unflatten(leaves, spec)
        gpu().flush(device)
        graph, stream_now, numbers = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device), gpu().new_numbers()
        stream.wait_stream(stream_now)
        accumulators.begin_capture()
        with torch.cuda.stream(stream), own_capture(numbers), gpu().pool_of_graph(device):
            with _capturing(graph, accumulators.pool), self._observer.recording_to(table) as found:
                with ordinary_torch():
                    table.begin()
                one.run(args, kwargs, grads)
                with ordinary_torch():
                    table.join()
        stream_now.wait_stream(stream)
        inputs = [x for x in (*leaves, *grads) if isinstance(x, Tensor)]
        return _Graph(graph, inputs, found, one.first, numbers)

    def _accumulators_of(self, device: torch.device, name: str) -> _Accumulators | None:
        """Return the accumulators of replays.

        None where no kernels of ours run, where the step records on other devices too, whose threads may run meanwhile, or where
        more is recorded now than the accumulators have memory for, which earlier graphs write to. Where none can be made, as with
        an allocator that has no pools, that is reported, and nothing is captured later.
        """
        if self._is_ended or why_no_kernels() is not None or self._observer.devices - {device}:
            return None
        table, found = self._observer.table(device), self._accumulators.get(device)
        if found is None:
            before = TorchState()
            try:
                with ordinary_torch():
                    found = self._accumulators[device] = _Accumulators(device, table)
            except Exception as error:
                before.restore()
                if not is_ours(error):
                    raise
                self._is_ended = True
                self._observer.report(name, f"repeated in eager code, without CUDA graphs: {_reason(error)}"[:300], False)
                return None
        return found if found.table.has_room_for(table) else None


@contextmanager
def _errors_dropped() -> Iterator[None]:
    """Drop errors of torch and CUDA in what only cleans up after another one, or before memory is given back."""
    try:
        yield
    except RuntimeError as error:
        if not is_ours(error):
            raise


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what runs on the current stream; an error of it is raised, not what CUDA says of a capture that it ended."""
    try:
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            yield
        except BaseException:
            with _errors_dropped():
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        with _errors_dropped():
            graph.reset()
        raise


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _tensors(one: Repetition) -> Iterable[Tensor]:
    """Return the tensors among the arguments and gradients of a repetition."""
    return (x for x in (*_pytree.tree_leaves((one.args, one.kwargs)), *one.grads) if isinstance(x, Tensor))


def _copy(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _described(x: Any, device: torch.device | None) -> Hashable:
    """Return what of an argument a graph depends on; None where that is not known: of a tensor that the host may read."""
    if isinstance(x, Tensor):
        is_known = x.device == device and x.layout is torch.strided
        return (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if is_known else None
    return (type(x), x) if isinstance(x, (*_SIMPLE, torch.dtype, torch.device)) else None


def places_of(tensors: Iterable[Tensor]) -> tuple[Hashable, ...]:
    """Return where tensors lie, and how; of single numbers on a CPU what they are too, which the host reads."""
    with ordinary_torch():
        return tuple(
            (x.data_ptr(), x.shape, x.stride(), x.dtype, x.requires_grad, x.item() if _is_number(x) else None) for x in tensors
        )


def _is_number(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() == 1

"""The Observer owns the tables and the step clock: it decides by the step number alone what is sampled, and hands steps on.

An adapter gives every watched module a Probe (see ``probe``) that records into it. Nothing here waits for the device while
training runs: a finished step goes to the sink when its copies have arrived, usually one step later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8debug.interruptions import is_ours
from fp8debug.kernels.reference import Operand
from fp8debug.kernels.sampling import SHARE_BLOCK, SHARE_GROUP, Sample, num_columns, shift_of, size_of_groups, spread_lines
from fp8debug.kernels.torch_state import refuse_replays
from fp8debug.observer.host_copy import HostScalar
from fp8debug.observer.sharding import TensorShard
from fp8debug.observer.table import MIN_JOINED, Snapshot, Table
from fp8debug.recipes import Recipe
from fp8debug.types import OPERAND_SITES, RESULTS, Gemm, Reference, TensorRole

#: Probes and facts about tensors that one call lets go of; a forward pass calls once a module, which leaves fewer.
AT_ONCE = 10
#: Steps whose deferred_release wait at most; only a watch whose modules are not called any more comes near.
MAX_STEPS = 4


class Releasable(Protocol):
    """Holder of state of one step."""

    @property
    def is_over(self) -> bool:
        """True if the step that it holds something of has ended."""
        ...

    def forget(self) -> None:
        """Let go of it."""


class DeferredRelease:
    """Of steps that have ended: probes that hold something, and what was known of tensors."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[Releasable], dict[Hashable, Any]]] = []

    def add(self, probes: list[Releasable], known: dict[Hashable, Any]) -> None:
        """Take what one step leaves.

        Args:
            probes: those that it touched.
            known: facts by where a tensor lies; under an integer a weak reference to the storage at that address.
        """
        if probes or known:
            self._steps.append((probes, known))
        if len(self._steps) > MAX_STEPS:
            self.release_all()

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        return not self._steps

    def release_some(self) -> None:
        """Let go of some."""
        if not self._steps:
            return
        try:
            probes, known = self._steps.pop()  # no other thread has it meanwhile
        except IndexError:
            return
        for _ in range(min(AT_ONCE, len(probes))):
            probe = probes.pop()
            if probe.is_over:
                probe.forget()
        for _ in range(min(AT_ONCE, len(known))):
            key, value = known.popitem()
            if type(key) is int:
                torch.UntypedStorage._free_weak_ref(value)  # type: ignore[no-untyped-call]  # torch's
        if probes or known:
            self._steps.append((probes, known))

    def release_all(self) -> None:
        """Let go of everything, when training is over."""
        while self._steps:
            self.release_some()


T = TypeVar("T")
#: The least and the greatest value of a tensor, 0-d.
Extremes = tuple[Tensor, Tensor]


class RowKey(NamedTuple):
    """Key of a row within a module."""

    gemm: Gemm
    tensor: TensorRole
    cast_name: str
    reference: Reference
    actual: bool


class RowInfo(NamedTuple):
    """A row's key with its module, that module's position in the step's execution order, and the piece that a rank holds."""

    module: str
    call_index: int
    key: RowKey
    piece: TensorShard | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sampling settings of a run.

    Attributes:
        every: a step is sampled when its number is a multiple.
        shadow_rows: rows (fprop, dgrad) or columns of the input (wgrad) in the shadow and exact GEMMs; of a wide input fewer,
            and of a wide result a share is compared (see ``kernels/sampling.py``); None is all.
        what_if: recipes whose casts are recorded beside the running one.
        plain_recipe: recipe that a plain nn.Linear is tried under.
        check_finite: whether steps that are not sampled are searched for their first NaN or Inf too, in the forward and the
            backward pass; None is yes for tensors on a CPU.
        inference: passes without gradients are recorded, and no others; otherwise the reverse.
        turns: sampled steps in which each module is recorded once, the first sampled step apart.
    """

    every: int = 10
    shadow_rows: int | None = 256
    what_if: tuple[Recipe, ...] = ()
    plain_recipe: Recipe
    check_finite: bool | None = None
    inference: bool = False
    turns: int = 1

    @property
    def rows_per_module(self) -> int:
        """Rows one module can fill: operands under each cast, results against two references; twice, for a changed recipe."""
        return 2 * (len(OPERAND_SITES) * (1 + len(self.what_if)) + len(RESULTS) * 2)


class Arrivals(Protocol):
    """Rows of ``updates`` or ``parameters`` on their way to the host."""

    def is_done(self) -> bool:
        """Return whether they have arrived."""

    def rows(self, step: int) -> dict[str, Any]:
        """Return them by column."""


class GradientSums(Protocol):
    """Sum of a weight's gradients over the backward passes of a step."""

    def given(self, parameter: Tensor) -> Tensor | None:
        """Return what an optimizer that is about to step gets of them, and forget them."""


class Replayable(NamedTuple):
    """Record of a pass apart from its step: its rows by their numbers, and which GEMMs it searched for NaN and Inf."""

    filled: dict[int, RowInfo]
    checked: list[tuple[str, Gemm, Tensor]]


@dataclass
class FinishedStep:
    """One step on its way to the sink; each table comes as (snapshot, what its rows are by their numbers).

    ``first_nonfinite`` in the scalars is a place in ``checked`` as :func:`place_of_first` writes it. ``progress`` is the
    sink's: how much of the step it has handed on, in case an exception of the program comes between.
    """

    step: int
    sampled: bool
    scalars: dict[str, Any]
    tables: list[tuple[Snapshot, dict[int, RowInfo]]] = field(default_factory=list)
    checked: list[tuple[str, Gemm]] = field(default_factory=list)
    updates: list[Arrivals] = field(default_factory=list)
    parameters: list[Arrivals] = field(default_factory=list)
    progress: Any = None
    is_written: bool = False

    def is_done(self) -> bool:
        """Return whether every copy has arrived."""
        moving = [v for v in self.scalars.values() if isinstance(v, HostScalar)]
        return (
            all(s.is_done() for s, _ in self.tables)
            and all(v.is_done() for v in moving)
            and all(rows.is_done() for rows in (*self.updates, *self.parameters))
        )


class Begun(threading.local):
    """Modules whose calls begin to be recorded in this thread, while that is asked for; None otherwise."""

    modules: set[str] | None = None


class Observer:
    """Device accumulators of one rank, and the step clock.

    Args:
        settings: what is sampled.
        sink: called with every finished step, in order, its scalars as numbers.
        report: called with a module's FQN, what is wrong with it (``not watched any more: ...``) and whether to say it aloud;
            with the ``code`` of the event, where it has one.
    """

    def __init__(self, settings: Settings, sink: Callable[[FinishedStep], None], report: Callable[..., None]) -> None:
        self.settings = settings
        self.report = report
        self.step = 0
        self.sampling = True
        self.is_off = False
        self.is_asleep = False  # nothing has been wrong so far on a rank that keeps quiet
        self.is_told_steps = False  # the program says when each step is over
        self.in_shape_inference = False  # what runs now is no training
        self.begun = Begun()
        self.not_again: frozenset[str] = frozenset()  # modules whose calls are recorded already, while they run once more
        self.adds: Mapping[
            int, bool
        ] = {}  # whether the pass that runs once more adds to gradients, by the id of a parameter's alias
        self.is_repeating = False  # a pass runs once more, to be recorded
        self.repeats_forward = False  # a forward pass runs once more, to be recorded, inside a backward pass
        self.num_modules = 0
        self._places: dict[str, int] = {}  # of modules in the order of their turns
        self._sharing: list[set[str]] = []  # modules that are recorded together, by their turn; empty where one was added since
        self._first_sampled = -1  # count of the first sampled step in which a turn was asked for
        self.has_fp8 = False  # whether any module ran in FP8 so far, as far as is known
        self.modules_called: set[str] = set()  # those that a forward pass of a sampled step ran
        self.modules_recomputed: dict[str, str] = {}  # those that a backward pass recomputed, and how (docs/backends.md)
        self.modules_seen: set[str] = set()  # those that have recorded anything
        self.modules_given_up: set[str] = set()  # those of which a sample ended early, which was reported
        self.step_count = 0  # how many steps have begun
        self.active_probes: list[Releasable] = []  # what holds something of the step under way
        self.deferred_release = DeferredRelease()
        self.before_forward: Callable[[], None] = _nothing
        #: Called with a module's FQN in place of ``before_forward`` where inference is recorded.
        self.before_inference: Callable[[str], None] = _ignored
        #: Called with (module, actual, gemm, tensor, high precision, operand) of every operand observed, for dumps.
        self.on_operand: Callable[[str, bool, Gemm, TensorRole, Tensor, Operand], None] | None = None
        #: Called with (module, kind, is in FP8, precision, FLOPs) of each forward GEMM that is no op of torch's.
        self.on_product: Callable[[str, str, bool, str, int], None] | None = None
        self.on_end_step: list[Callable[[], None]] = []
        self.on_interrupt: list[Callable[[], None]] = []  # called when an exception of the program ends a hook in the middle
        self.after_step: list[Callable[[], None]] = []  # called once, when the step under way has ended
        self._sink = sink
        self._tables: dict[torch.device, Table] = {}
        self._filled: dict[torch.device, tuple[Table, dict[int, RowInfo]]] = {}
        self._pending: list[FinishedStep] = []
        self._num_calls = 0
        self._is_starting = False  # the clock is being set
        self._samples: dict[tuple[int, torch.device, bool], Sample] = {}
        self._spread: dict[tuple[int, torch.device, bool], Tensor] = {}  # the sample of a step whose shift is 0
        self.updates: list[Arrivals] = []  # of the optimizer's step under way
        self.parameters: list[Arrivals] = []  # of the step under way
        self.gradient_sums: dict[str, GradientSums] = {}  # by module, of a step with more than one backward pass
        self.tensor_cache: dict[Hashable, Any] = {}  # and by a storage's address a weak reference to it
        self._checked: list[tuple[str, Gemm, Tensor]] = []

    def is_idle(self, x: Tensor) -> bool:
        """Return whether nothing is recorded of passes on x's device until the program says that the step is over."""
        settings = self.settings
        if self.sampling or not self.is_told_steps or settings.inference:
            return False
        return not (settings.check_finite or (settings.check_finite is None and not x.is_cuda))

    @property
    def takes_pass(self) -> bool:
        """True if the forward pass under way is of the kind that is recorded: with gradients, or for inference without."""
        return torch.is_grad_enabled() is not self.settings.inference

    def add_module(self, module: str) -> int:
        """Take note of what records a module; return its number."""
        self._places.setdefault(module, len(self._places))
        self._sharing = []
        self.num_modules += 1
        return self.num_modules - 1

    def has_turn(self, module: str) -> bool:
        """Return whether a module is recorded in the sampled step under way: in the first one, and then in turn.

        Neighbours have theirs together. The step's number decides, so that all ranks record the same modules.
        """
        turns = self.settings.turns
        if turns == 1 or self._is_first_sampled():
            return True
        if not self._sharing:
            self._sharing = [set() for _ in range(turns)]
            for other, place in self._places.items():
                self._sharing[place * turns // len(self._places)].add(other)
        return module in self._sharing[self._turn()]

    @property
    def begins_round(self) -> bool:
        """True if the step under way is sampled and has the turn of what is recorded of all modules at once."""
        return self.sampling and (self.settings.turns == 1 or self._is_first_sampled() or self._turn() == 0)

    def _is_first_sampled(self) -> bool:
        if self._first_sampled < 0:
            self._first_sampled = self.step_count
        return self._first_sampled == self.step_count

    def _turn(self) -> int:
        """Return whose turn it is in the sampled step under way."""
        return -(self.step // self.settings.every) % self.settings.turns

    @property
    def has_rows(self) -> bool:
        """True if the step under way has recorded anything."""
        return bool(self._filled)

    @property
    def has_gradients(self) -> bool:
        """True if the step under way has recorded a GEMM of the backward pass."""
        rows = (info for _, filled in self._filled.values() for info in filled.values())
        return any(info.key.gemm is not Gemm.FPROP for info in rows)

    def is_filled(self, row: int) -> bool:
        """Return whether the step under way has recorded anything in a row."""
        return any(row in filled for _, filled in self._filled.values())

    def next_call_index(self) -> int:
        """Return the position in execution order of a module that is called for the first time in this step."""
        self._num_calls += 1
        return self._num_calls - 1

    def reserve_calls(self, number: int) -> int:
        """Keep positions in execution order for modules that are recorded later; return the first."""
        first, self._num_calls = self._num_calls, self._num_calls + number
        return first

    @contextmanager
    def repeating(
        self, recorded: frozenset[str], first: int | None = None, adds: Mapping[int, bool] | None = None
    ) -> Iterator[None]:
        """Record what runs as the repetition of a pass.

        Args:
            recorded: FQNs of modules that are recorded already.
            first: of a forward pass, the first of its reserved positions.
            adds: of a backward pass, ``adds``.
        """
        before = self.not_again, self.is_repeating, self.repeats_forward, self._num_calls, self.adds
        self.not_again, self.is_repeating, self.repeats_forward, self.adds = recorded, True, first is not None, adds or {}
        if first is not None:
            self._num_calls = first
        try:
            yield
        finally:
            self.not_again, self.is_repeating, self.repeats_forward, self._num_calls, self.adds = before

    def filled(self, device: torch.device) -> tuple[Table, dict[int, RowInfo]]:
        """Return the accumulators of a device, and what its rows are that the step under way has recorded something in."""
        found = self._filled.get(device)
        if found is None:
            refuse_replays("tensors on another device")
            found = self._filled[device] = self.table(device), {}
        return found

    @property
    def devices(self) -> set[torch.device]:
        """Those that have accumulators."""
        return set(self._tables)

    def table(self, device: torch.device) -> Table:
        """Return the accumulators of a device."""
        if device not in self._tables:
            self._tables[device] = Table(self._num_rows, device)
        return self._tables[device]

    @contextmanager
    def recording_to(self, table: Table) -> Iterator[Replayable]:
        """Have what runs recorded in other accumulators of the table's device, and nothing of it in the step under way.

        Facts about tensors that the step knows are not used, and what is found out is not kept.
        """
        found = Replayable({}, [])
        before = self._filled, self._tables, self._samples, self._spread, self._checked, self.tensor_cache
        self._filled, self._tables = {table.device: (table, found.filled)}, {table.device: table}
        self._samples, self._spread, self._checked, self.tensor_cache = {}, dict(self._spread), found.checked, {}
        try:
            yield found
        finally:
            self.deferred_release.add([], self.tensor_cache)
            self._filled, self._tables, self._samples, self._spread, self._checked, self.tensor_cache = before

    def add(self, found: Replayable, table: Table, later_by: int) -> None:
        """Add what was recorded by :meth:`recording_to`, or by a replay of it, to the step under way.

        Args:
            found: what it was.
            table: its accumulators.
            later_by: places in execution order after those that it has.
        """
        own, filled = self.filled(table.device)
        own.absorb(table)
        filled.update((row, info._replace(call_index=info.call_index + later_by)) for row, info in found.filled.items())
        self.modules_called.update(info.module for info in found.filled.values())
        self._checked += [(module, gemm, is_finite.clone()) for module, gemm, is_finite in found.checked]

    @property
    def _num_rows(self) -> int:
        return self.settings.rows_per_module * self.num_modules

    def has_room(self, number: int, device: torch.device) -> bool:
        """Return whether the module of that number can record in this step; one that was added in it may have to wait."""
        return self.table(device).num_rows >= self.settings.rows_per_module * (number + 1)

    def flush_if_full(self, device: torch.device) -> None:
        """Join rows of the step under way to a device's accumulators, where many wait."""
        found = self._filled.get(device)
        if found is not None:
            found[0].flush_if_full()

    def flush_many(self) -> None:
        """Join what waits, where it pays, before the end of the step does: two short pauses of training for a long one."""
        for table, _ in self._filled.values():
            try:
                table.flush_if_full(MIN_JOINED)
            except (torch.OutOfMemoryError, MemoryError) as error:  # the end of the step reports what was lost
                if not is_ours(error):
                    raise

    def sample(self, length: int, device: torch.device, *, columns: bool = False) -> Sample:
        """Return which of ``length`` rows or columns are sampled: evenly spread, shifted by a hash of the step.

        Every fourth comes first: the exact GEMM has the first ones alone. Columns lie in groups, which memory gives together.
        """
        found = self._samples.get((length, device, columns))
        if found is None:
            found = self._samples[length, device, columns] = self._sample(length, device, columns)
        return found

    def _sample(self, length: int, device: torch.device, columns: bool) -> Sample:
        count = self.settings.shadow_rows
        if count is None:
            return Sample()
        count = num_columns(count, length) if columns else count
        share = shift_of(self.step, SHARE_BLOCK // SHARE_GROUP)
        if count >= length:
            return Sample(shift=share)
        size = size_of_groups(count, length) if columns else 1
        if (length, device, columns) not in self._spread:
            self._spread[length, device, columns] = spread_lines(count, length, size, device)
        shift = shift_of(self.step, length // size) * size
        return Sample((self._spread[length, device, columns] + shift) % length, share, size, shift)

    def shared(self, x: Tensor, what: Hashable, make: Callable[[], T]) -> T:
        """Return what is known of a tensor in this step, made once: modules that share an input read the same tensor.

        The same is the same part of the same storage, which nothing has written to since, as far as autograd counts that.
        """
        place = self.cache_key(x, what)
        if place is None:
            return make()
        if place not in self.tensor_cache:
            self.tensor_cache[place] = make()
        found: T = self.tensor_cache[place]
        return found

    def cache_key(self, x: Tensor, what: Hashable) -> tuple[Hashable, ...] | None:
        """Return where ``tensor_cache`` has what is known of a tensor in this step; None for one whose changes nobody counts.

        What is known of it comes last in the place.
        """
        if x.is_inference():
            return None
        storage = x.untyped_storage()
        at = storage._cdata
        if at not in self.tensor_cache:  # whose address no other has from now on
            self.tensor_cache[at] = storage._weak_ref()
        return at, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version, what

    def check(self, module: str, gemm: Gemm, operand: Extremes, weight: Extremes | None, result: Extremes) -> None:
        """Note whether what a GEMM was given and its result are finite: one read of each, no synchronization.

        Args:
            module: FQN.
            gemm: the GEMM.
            operand: of its input, or of grad_output in the backward pass.
            weight: of its weight; None where that was not read.
            result: of what it returned.
        """
        if weight is None:
            zero = result[0].new_zeros(())
            weight = zero, zero
        self._checked.append((module, gemm, torch.stack([*operand, *weight, *result]).isfinite().view(3, 2).all(1)))

    def end_step(self, scalars: dict[str, Any]) -> None:
        """Close the step: start its copies, hand over the steps that have arrived, and decide on the next one.

        An exception of the program that comes between is raised when the step is closed.

        Args:
            scalars: numbers or 0-d tensors: loss, grad_norm, lr, loss_scale, tokens, seconds.
        """
        step, finished = self.step, FinishedStep(self.step, self.sampling, {})
        try:
            self._collect(finished, scalars)
            self._pending.append(finished)
            self.hand_over()
            self.start_step(step + 1)
        except BaseException as error:
            if not is_ours(error):
                self._close_interrupted(finished, error)
            raise

    def _close_interrupted(self, finished: FinishedStep, error: BaseException) -> None:
        """Close a step that an exception of the program ended in the middle; rows that are not whole are left out."""
        if self._filled:
            kept = {id(filled) for _, filled in finished.tables}
            lost = [(device, filled) for device, (_, filled) in self._filled.items() if id(filled) not in kept]
            for device, filled in lost:
                if (table := self._tables.pop(device, None)) is not None:
                    table.discard()
                self._report_lost(filled, f"{type(error).__name__} was raised while it was recorded")
            self._filled, self._samples = {}, {}
        self._checked, self.updates, self.parameters = [], [], []
        if not finished.is_written and not any(finished is other for other in self._pending):
            self._pending.append(finished)
        if finished.step == self.step or self._is_starting:
            self.start_step(finished.step + 1)

    def _collect(self, finished: FinishedStep, scalars: dict[str, Any]) -> None:
        """Start the copies of what the step has recorded."""
        moving = finished.scalars
        for name, value in scalars.items():
            moving[name] = _to_host(value)
        finished.updates, self.updates = self.updates, []
        finished.parameters, self.parameters = self.parameters, []
        if self._checked:
            finished.checked = [(module, gemm) for module, gemm, _ in self._checked]
            moving["first_nonfinite"] = _to_host(place_of_first([found for *_, found in self._checked]))
            self._checked = []
        for device, (table, filled) in self._filled.items():
            try:
                finished.tables.append((table.snapshot(), filled))
            except (torch.OutOfMemoryError, MemoryError) as error:
                if not is_ours(error):
                    raise
                self._tables.pop(device).discard()  # half joined; the next sampled step makes a new one
                self._report_lost(filled, f"{table.lost or 'out of memory'}; training goes on")
        self._filled, self._samples = {}, {}  # a tensor's end lets go of the interpreter, for which nobody waits yet

    def _report_lost(self, filled: dict[int, RowInfo], reason: str) -> None:
        for number, module in enumerate(dict.fromkeys(info.module for info in filled.values())):
            self.report(module, f"not recorded at step {self.step}: {reason}", number == 0)

    def start_step(self, step: int) -> None:
        """Set the clock."""
        self._is_starting = True
        self.step = step
        self.sampling = not self.is_off and not self.is_asleep and step % self.settings.every == 0
        self.step_count += 1
        self._num_calls = 0
        self._samples = {}
        self.deferred_release.add(self.active_probes, self.tensor_cache)
        self.active_probes, self.tensor_cache, self.gradient_sums = [], {}, {}
        for device in [device for device, table in self._tables.items() if table.num_rows < self._num_rows]:
            self._tables.pop(device).discard()  # modules were added since; the next sampled step makes a larger one
        after, self.after_step = self.after_step, []
        interruption: BaseException | None = None
        for forget in (*self.on_end_step, *after):
            try:
                forget()
            except BaseException as error:
                if is_ours(error):
                    raise
                interruption = error  # the others still have to let go of the step
        self._is_starting = False
        if interruption is not None:
            raise interruption

    def interrupt(self) -> None:
        """Let go of what hooks have begun, because an exception of the program ended one of them: those after it may not run."""
        for release in self.on_interrupt:
            release()

    def turn_off(self) -> None:
        """Observe nothing more: nobody can take it."""
        self.is_off, self.sampling = True, False
        self._filled, self._checked, self.updates, self.parameters = {}, [], [], []
        self._drop_tables()

    def _drop_tables(self) -> None:
        """Let go of the accumulators and of the memory that kernels left something for them in."""
        for table in self._tables.values():
            table.discard()
        self._tables = {}

    def hand_over(self, *, wait: bool = False) -> None:
        """Give the sink every step that has arrived; with ``wait``, when training is over, every step."""
        while self._pending and (wait or self._pending[0].is_done()):
            first = self._pending[0]
            first.scalars = {k: v.read() if isinstance(v, HostScalar) else v for k, v in first.scalars.items()}
            try:
                self._sink(first)
            except BaseException as error:
                if is_ours(error):
                    del self._pending[0]
                raise
            first.is_written = True
            if self._pending and self._pending[0] is first:
                del self._pending[0]
        if wait:
            self._drop_tables()
            self.deferred_release.release_all()


def extremes_of(x: Tensor) -> Extremes | None:
    """Return the least and the greatest value, 0-d; both are NaN where one is. None for a tensor whose values are not read.

    A DTensor's would be a collective, and an FP8 tensor has none without its scale.
    """
    is_wrapped: bool = is_traceable_wrapper_subclass(x)
    if is_wrapped or not x.numel() or not x.is_floating_point() or x.element_size() < 2:
        return None
    least, greatest = x.detach().aminmax()
    return least, greatest


def place_of_first(found: list[Tensor]) -> Tensor:
    """Return 4 * place + 2 * (weight is not finite) + (operand is not finite) of the first result that is not; -1: all are.

    Args:
        found: bool ``[3]`` of each GEMM in order: the operand that it was given, its weight and its result are finite.
    """
    device = found[0].device
    sick = ~torch.stack([one.to(device, non_blocking=True) for one in found])
    first = sick[:, 2].int().argmax()
    row = sick.index_select(0, first[None])[0].int()
    return torch.where(row[2] > 0, 4 * first + 2 * row[1] + row[0], -1)


def _to_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return HostScalar(value) if value.is_cuda else float(value.detach())


def _nothing() -> None:
    pass


def _ignored(module: str) -> None:
    pass

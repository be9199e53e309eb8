"""Intercepting GEMMs that are not ours: which module and which of its three GEMMs an op belongs to.

A dispatch mode sees the ops of a watched module's forward, and of the autograd nodes between its output and its input; nothing
else runs under it but, to count GEMMs that belong to nobody, the forward pass of the root. It is entered on sampled steps only
and always in a scope that ends where it began (a module's forward, one node), so that it can never end up below a mode of the
user's. High-precision operands come from the forward hook and from a hook on the output. Compiled code keeps running: its GEMMs
are counted, and are nobody's.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C import (
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fp8debug.adapters.base import same_cast, turned
from fp8debug.adapters.interception.calls import observe_calls
from fp8debug.adapters.interception.gemm_flops import FLOPS, GemmCounter, is_of_fp8_linear
from fp8debug.formats import TRANSPOSED, block_shape
from fp8debug.interruptions import is_ours
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.kernels.torch_state import (
    TorchState,
    active_modes,
    is_capturing,
    is_of_cuda_graph,
    is_own_capture,
    ordinary_torch,
    set_modes,
)
from fp8debug.observer.autograd_nodes import name_of
from fp8debug.observer.observer import Observer
from fp8debug.recipes import Cast
from fp8debug.types import Gemm

#: Nodes looked at between a module's output and its input.
MAX_NODES = 64
#: A result of at most so many bytes is copied where it is read later than its GEMM ran.
MAX_COPIED = 2**29


class GemmOperand(NamedTuple):
    """One operand as its GEMM has it, ``[rows, columns]``: FP8 with scale_inv ``[block rows, block columns]``, or neither.

    ``version`` is autograd's count of writes to the values when the GEMM ran; None where it is not to be compared. ``cast`` is
    the cast where dtype and granularity do not name it: blocks of 16 or 32 elements.
    """

    values: Tensor
    scale_inv: Tensor | None = None
    granularity: str = ""
    version: int | None = None
    cast: Cast | None = None

    def t(self) -> GemmOperand:
        """Return it transposed."""
        if self.scale_inv is None:
            return GemmOperand(self.values.t(), version=self.version)
        cast = None if self.cast is None else turned(self.cast)
        return GemmOperand(self.values.t(), self.scale_inv.t(), TRANSPOSED[self.granularity], self.version, cast)

    def cut(self, rows: int, columns: int) -> GemmOperand:
        """Return its first rows and columns: what of it is no padding."""
        values, version = _cut(self.values, rows, columns, self.version)
        if self.scale_inv is None:
            return GemmOperand(values, version=version)
        height, width = block_shape(self.seen_cast.granularity, *self.values.shape)
        scale_inv = self.scale_inv[: -(-rows // height), : -(-columns // width)]
        return self._replace(values=values, scale_inv=scale_inv, version=version)

    @property
    def seen_cast(self) -> Cast:
        """The cast as far as the GEMM shows it."""
        return self.cast or same_cast(format=FORMAT_OF[self.values.dtype], granularity=self.granularity)

    def held(self, *, copied: bool) -> GemmOperand:
        """Return it to be read later: a copy, or the same with its version."""
        return self._replace(values=self.values.clone()) if copied else self._replace(version=version_of(self.values))


class SeenGemm(NamedTuple):
    """One GEMM that ran: ``result[r, s] = first[r, c] @ second[c, s]``, what was added to it, and which it is, if it says so.

    The tensors are the program's, which may write to them as soon as the GEMM has run. ``is_opaque``: it may do so without
    autograd's notice, because the GEMM ran inside a custom op or compiled code, or was given the memory of its result.
    """

    name: str
    first: GemmOperand
    second: GemmOperand
    result: Tensor
    bias: Tensor | None = None
    which: Gemm | None = None
    is_opaque: bool = False
    version: int | None = None

    @property
    def is_fp8(self) -> bool:
        """True if an operand is quantized."""
        return self.first.scale_inv is not None or self.second.scale_inv is not None

    def t(self) -> SeenGemm:
        """Return the same GEMM as ``result.t() = second.t() @ first.t()``."""
        return self._replace(first=self.second.t(), second=self.first.t(), result=self.result.t())

    def cut(self, rows: int, inner: int) -> SeenGemm:
        """Return what of it is no padding.

        Args:
            rows: those of the first operand and of the result that are kept.
            inner: columns of the first operand and rows of the second one that are kept.
        """
        columns = self.second.values.shape[1]
        result, version = _cut(self.result, rows, columns, self.version)
        return self._replace(
            first=self.first.cut(rows, inner), second=self.second.cut(inner, columns), result=result, version=version
        )

    def held(self, *, copied: bool = False) -> SeenGemm:
        """Return it to be read later: with copies of what the program may overwrite unnoticed, and of all that is small.

        Args:
            copied: copy all of it, because the program is known to overwrite such operands.
        """
        copied |= self.is_opaque or any(x.is_inference() for x in (self.first.values, self.second.values, self.result))
        is_small = self.result.numel() * self.result.element_size() <= MAX_COPIED
        return self._replace(
            first=self.first.held(copied=copied),
            second=self.second.held(copied=copied),
            result=self.result.clone() if copied or is_small else self.result,
            bias=None if self.bias is None else self.bias.clone(),
            version=None if copied or is_small else version_of(self.result),
        )

    def noted(self) -> SeenGemm:
        """Return it with the versions of its operands."""
        return self._replace(first=self.first.held(copied=False), second=self.second.held(copied=False))

    def overwritten(self) -> str | None:
        """Return what of it the program has written to since it was held; None is nothing."""
        for name, x, version in (
            ("first operand", self.first.values, self.first.version),
            ("second operand", self.second.values, self.second.version),
            ("result", self.result, self.version),
        ):
            if version is not None and x._version != version:
                return name
        return None

    def __str__(self) -> str:
        return f"{self.name} of {list(self.first.values.shape)} by {list(self.second.values.shape)}"


def _cut(x: Tensor, rows: int, columns: int, version: int | None) -> tuple[Tensor, int | None]:
    """Return the first rows and columns of a matrix, without gaps in memory, and their version: a copy has none."""
    part = x[:rows, :columns]
    return (part, version) if part.is_contiguous() or part.t().is_contiguous() else (part.contiguous(), None)


def version_of(x: Tensor) -> int | None:
    """Return how often autograd has counted a write to a tensor's memory; None where it does not count."""
    return None if x.is_inference() else x._version


#: Takes a GEMM that ran.
OnGemm = Callable[[SeenGemm], None]
#: Takes an error of fp8debug that arose while a GEMM was read.
Failed = Callable[[BaseException], None]


class Follower(Protocol):
    """Sees every op of a turn, not the GEMMs alone."""

    @property
    def is_followed(self) -> bool:
        """True if :meth:`before_op` is to be called."""
        ...

    def before_op(self) -> None:
        """Take note that autograd records the op that follows."""
        ...

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take note of an op that ran without autograd."""
        ...


class Scope(NamedTuple):
    """Recorder of the ops that run now: ``on_gemm`` takes every GEMM; None where they are known not to be recorded."""

    owner: object
    call: object
    on_gemm: OnGemm | None
    fail: Failed
    entered: bool
    follower: Follower | None = None

    def guard(self, take: Callable[..., None], *args: Any) -> None:
        """Call what takes note of an op, or records a GEMM; an error of ours goes to the owner."""
        before = TorchState()
        try:
            with ordinary_torch():
                take(*args)
        except BaseException as error:
            before.restore()
            if not is_ours(error) or is_own_capture():
                raise
            self.fail(error)


#: Reads a GEMM from (arguments by name, result); None where it is of no interest. By op, for any overload.
DECODERS: dict[object, Callable[[Mapping[str, Any], Any], SeenGemm | None]] = {}
#: Ops that are FP8 GEMMs whatever their arguments.
SCALED: set[object] = set()


class _RanOp(NamedTuple):
    """An op of torch's that ran: the packet of its overload, its arguments as they were given, and what it returned."""

    packet: Any
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    def arguments(self) -> dict[str, Any]:
        """Return its arguments by name."""
        return _bound(self.func, self.args, self.kwargs)


class Listener(TorchDispatchMode):
    """Mode that sees the GEMMs of one watch; see the module."""

    is_ours = True
    supports_higher_order_operators = True  # or torch refuses to run them, flex_attention among them

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        # torch imports it at the first op under a dispatch mode: a second that no training step should wait for.
        importlib.import_module("torch._dynamo")
        self._local = threading.local()
        self._stacks: list[list[Scope]] = []
        #: FP8 GEMMs of a forward pass that belong to no watched module, or that no adapter can read.
        self.unowned_gemms: Counter[str] = Counter()
        #: Counts the FLOPs of a forward pass, in one sampled step.
        self.counter: GemmCounter | None = None
        #: Whether modules of a class run a GEMM transposed, ``weight @ input.T``; of those whose shapes tell.
        self.is_turned: dict[tuple[type[nn.Module] | None, Gemm], bool] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile trace and run as if nobody listened (torch 2.9; the mode is not entered for it before)."""
        return True

    @property
    def scopes(self) -> list[Scope]:
        """Scopes open on this thread, the innermost last."""
        if not hasattr(self._local, "scopes"):
            self._local.scopes = []
            self._stacks.append(self._local.scopes)
        found: list[Scope] = self._local.scopes
        return found

    @property
    def _depth(self) -> int:
        """Number of custom ops that run on this thread, one inside the other."""
        return getattr(self._local, "depth", 0)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Report no op of this thread: a library's kernel runs, whose GEMM is reported as a whole."""
        before = self._is_muted
        self._local.is_muted = True
        try:
            yield
        finally:
            self._local.is_muted = before

    @property
    def _is_muted(self) -> bool:
        return getattr(self._local, "is_muted", False)

    def enter(self) -> bool:
        """Intercept the ops of this thread until :meth:`leave`; False where they are intercepted already.

        The stack is pushed to directly: entering by ``with`` also sets flags for the whole process, which would stay set
        where an exception ends a backward node.
        """
        if self._is_entered():
            return False
        _push_on_torch_dispatch_stack(self)
        return True

    def leave(self) -> None:
        """End what :meth:`enter` began; modes that somebody left above it stay."""
        others = [mode for mode in active_modes() if mode is not self]
        try:
            set_modes(others)
        except BaseException:  # a signal handler's
            set_modes(others)
            raise

    def _is_entered(self) -> bool:
        return any(_get_dispatch_stack_at(i) is self for i in range(_len_torch_dispatch_stack()))

    def begin(
        self,
        owner: object,
        call: object,
        on_gemm: OnGemm | None,
        fail: Failed,
        follower: Follower | None = None,
    ) -> None:
        """Let an owner on_gemm what runs on this thread from now on, for one of its calls."""
        scopes = self.scopes
        if on_gemm is None:
            scopes.append(Scope(owner, call, None, fail, False))
            return
        depth, before = len(scopes), TorchState()
        try:
            scopes.append(Scope(owner, call, on_gemm, fail, self.enter(), follower))
        except BaseException:  # a signal handler's: the call that would end this turn does not come
            del scopes[depth:]
            before.restore()
            raise

    def end(self, owner: object) -> Scope | None:
        """End the owner's turn; None where it had none, because an exception came before it."""
        scopes = self.scopes
        if not scopes or scopes[-1].owner is not owner:
            return None
        scope = scopes[-1]
        try:
            if scope.entered:
                self.leave()
        finally:
            scopes.pop()
        return scope

    def forget(self) -> None:
        """End every turn: a step ended, or an exception did."""
        for scopes in self._stacks:
            scopes.clear()
        self.leave()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the op, and tell the innermost listener of it when it is a GEMM."""
        kwargs = kwargs or {}
        if self._is_muted:
            return func(*args, **kwargs)
        scopes = self.scopes
        scope = scopes[-1] if scopes and not is_of_cuda_graph() else None  # whose memory nobody may hold
        on_gemm, follower = (None, None) if scope is None else (scope.on_gemm, scope.follower)
        counter = self.counter if self.counter is not None and self.counter.is_on else None
        key = None if on_gemm is None and counter is None else _inside(func, args)
        if scope is not None and follower is not None:
            result = self._run_followed(scope, follower, key, func, args, kwargs)
        else:
            result = func(*args, **kwargs) if key is None else self._run_inside(key, func, args, kwargs)
        packet = getattr(func, "overloadpacket", None)
        if key is None and (packet in DECODERS or packet in SCALED or packet in FLOPS):
            self._observe(_RanOp(packet, func, args, kwargs, result), scope, counter)
        return result

    def _run_followed(
        self, scope: Scope, follower: Follower, key: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an op, and have the scope's follower take note of it before, where autograd records it, else after."""
        is_recorded = torch.is_grad_enabled() and not self._depth  # by autograd
        if is_recorded and follower.is_followed:
            scope.guard(follower.before_op)
        result = func(*args, **kwargs) if key is None else self._run_inside(key, func, args, kwargs)
        if key is not None or not is_recorded:
            scope.guard(follower.after_op, func, args, kwargs, result)
        return result

    def _run_inside(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a user's custom op with the ops inside it intercepted too."""
        before, depth = TorchState(), self._depth
        self._local.depth = depth + 1
        try:
            with self:
                return func.redispatch(key, *args, **kwargs)
        except BaseException:
            before.restore()
            raise
        finally:
            self._local.depth = depth

    def _observe(self, op: _RanOp, scope: Scope | None, counter: GemmCounter | None) -> None:
        """Count the FLOPs of an op, and have it recorded where it is a GEMM that an adapter can read."""
        if counter is not None and op.packet in FLOPS:
            try:
                counter.see(op.packet, op.arguments(), op.result)
            except Exception as error:  # an op of other arguments than it has today; the training goes on
                if not is_ours(error):
                    raise
                counter.give_up()
        if op.packet in SCALED and not self.scopes and not is_of_fp8_linear():
            self.unowned_gemms[str(op.packet)] += 1
        elif op.packet in DECODERS and scope is not None and scope.on_gemm is not None:
            self._take_gemm(op, scope, scope.on_gemm)

    def _take_gemm(self, op: _RanOp, scope: Scope, on_gemm: OnGemm) -> None:
        """Read a GEMM and have it recorded; an error of ours goes to the owner."""
        before = TorchState()
        try:
            with ordinary_torch():
                gemm = DECODERS[op.packet](op.arguments(), op.result)
            if isinstance(gemm, SeenGemm) and (self._depth or _writes_to_arguments(op.func)):
                gemm = gemm._replace(is_opaque=True)
            if gemm is not None:
                on_gemm(gemm)  # in the program's gradient mode, which tells evaluation from training
        except BaseException as error:
            before.restore()
            if not is_ours(error) or is_own_capture():
                raise
            scope.fail(error)


#: Names of an op's arguments in their order; its schema makes them anew each time.
_ARGUMENTS: dict[object, list[str]] = {}


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name; trailing defaults are left out of ``args``."""
    if func not in _ARGUMENTS:
        _ARGUMENTS[func] = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}


#: Whether an op writes to its arguments; its schema makes them anew each time.
_WRITES: dict[object, bool] = {}


def _writes_to_arguments(func: Any) -> bool:
    found = _WRITES.get(func)
    if found is None:
        found = _WRITES[func] = bool(func._schema.is_mutable)
    return found


#: Whether an op has no others inside that we may on_gemm; its name is put together anew each time that it is asked for.
_IS_WHOLE: dict[object, bool] = {}
_WHOLE = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fp8debug", "higher_order")


def _inside(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the key under which a user's custom op runs its own ops; None for torch's, which have no others inside."""
    is_whole = _IS_WHOLE.get(func)
    if is_whole is None:
        is_whole = _IS_WHOLE[func] = getattr(func, "namespace", "aten") in _WHOLE
    if is_whole:
        return None
    device = next((a.device.type for a in args if isinstance(a, Tensor)), None)
    key = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}.get(device or "")
    if key is None:
        return None
    keys = (key, torch._C.DispatchKey.CompositeExplicitAutograd)  # the latter is an op for all devices
    has_kernel = any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), k) for k in keys)
    return torch._C.DispatchKeySet(key) if has_kernel else None


_LISTENERS: WeakKeyDictionary[Observer, Listener] = WeakKeyDictionary()


def listener_of(observer: Observer) -> Listener:
    """Return the one listener of a watch."""
    if observer not in _LISTENERS:
        listener = _LISTENERS[observer] = Listener()
        observer.on_end_step.append(listener.forget)
        observer.on_interrupt.append(listener.forget)
    return _LISTENERS[observer]


class OtherGemms(Follower, Protocol):
    """Takes the GEMMs of a forward pass that belong to no watched module."""

    @property
    def is_wanted(self) -> bool:
        """True if the forward passes of sampled steps are to be followed."""
        ...

    def num_matrices(self, modules: Iterable[nn.Module]) -> int:
        """Return how many matrices modules hold that are no watched module's, embeddings apart."""
        ...

    def has_recorded(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether something was recorded of such a matrix."""
        ...

    def begin(self) -> None:
        """Begin a forward pass."""
        ...

    def take(self, gemm: Any) -> None:
        """Take a GEMM that has run."""
        ...

    def fail(self, error: BaseException) -> None:
        """Take an error of ours that arose while a GEMM was read."""
        ...

    def end(self) -> None:
        """End the forward pass."""
        ...


class RootHooks:
    """Observer of the roots' calls: counts the FP8 GEMMs of sampled forward passes that belong to no watched module.

    They are reported at the end of the step: code under torch.compile, functions, modules that no adapter takes. In the first
    sampled step the FLOPs of all GEMMs are counted, whatever their precision.

    Args:
        roots: the modules.
        observer: of the watch.
        counter: of the FLOPs.
        intercepts: whether FP8 GEMMs are looked for in the other sampled steps too.
        is_reported: returns whether compiled code was reported on stderr, which need not be repeated.
        others: takes the GEMMs outside the watched modules; None where nobody does.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        observer: Observer,
        counter: GemmCounter,
        intercepts: bool,
        is_reported: Callable[[], bool],
        others: OtherGemms | None = None,
    ) -> None:
        self._counter, self._intercepts, self._others = counter, intercepts, others
        self._roots = list(roots)
        self._observer, self._listener = observer, listener_of(observer)
        self._calls: defaultdict[int, list[bool]] = defaultdict(list)  # by thread: of each call under way, whether it listens
        self._told, self._is_told = False, is_reported
        self._ends = [observe_calls(root, self) for root in self._roots]
        observer.on_end_step.append(self._report)

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Listen until the call ends, unless it is an evaluation; for a recording of inference, unless it is none.

        A call inside another one leaves it to that one: a root may call itself.
        """
        calls = self._calls[threading.get_ident()]
        calls.append(False)
        if not self._observer.takes_pass:
            return
        self._observer.before_forward()
        if not self._observer.sampling or not hasattr(TorchDispatchMode, "ignore_compile_internals"):
            return
        counts = self._counter.is_wanted and torch._C._current_graph_task_id() == -1 and not is_capturing()
        others = self._others if torch._C._current_graph_task_id() == -1 and not is_capturing() else None
        others = others if others is not None and others.is_wanted else None
        if (counts or self._intercepts or others is not None) and self._listener.enter():
            calls[-1] = True
            if others is not None:
                others.begin()
                self._listener.begin(self, None, others.take, others.fail, others)
            if counts:
                self._listener.counter = self._counter
                self._counter.begin()

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End it."""
        calls = self._calls[threading.get_ident()]
        if calls and calls.pop():
            if self._others is not None and self._listener.end(self) is not None:
                self._others.end()
            self._listener.leave()
            self._counter.end()

    def _report(self) -> None:
        self._calls.clear()
        unowned_gemms = self._listener.unowned_gemms
        if unowned_gemms:
            counts = ", ".join(f"{n} {name}" for name, n in sorted(unowned_gemms.items()))
            text = (
                f"not seen in full: {counts} in one forward pass belong to no watched module (code under torch.compile, a"
                " function, or a module that no adapter takes); run sampled steps without torch.compile to record them"
            )
            unowned_gemms.clear()
            self._observer.report("the model", text, not self._told and not self._is_told())
            self._told = True

    def remove(self) -> None:
        """End the observation."""
        for end in self._ends:
            end()
        self._report()
        self._counter.end()
        self._listener.forget()


def nodes_between(output: Tensor, *inputs: Any, limit: int = MAX_NODES) -> list[Any]:
    """Return the autograd nodes from a module's output to its inputs and parameters, without theirs: ``limit`` at most."""
    stop = [x.grad_fn for x in inputs if isinstance(x, Tensor)]
    found: list[Any] = []
    todo = [output.grad_fn]
    while todo and len(found) < limit:
        node = todo.pop()
        if node is None or name_of(node).endswith("AccumulateGrad") or any(node is other for other in (*stop, *found)):
            continue
        found.append(node)
        todo.extend(following for following, _ in node.next_functions)
    return found

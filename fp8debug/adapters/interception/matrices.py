"""GEMMs outside the watched modules, assigned to the 2-D parameter that each multiplies by: FP8 in a module of any class.

A module may multiply by several parameters of its own, by one of its parent's or by an embedding's; its input and its weight
need not be what ``forward`` gets. So a GEMM is assigned by its operands: the codes lead to the tensors that were cast
(:mod:`fp8debug.adapters.interception.origins`), and the weight among these to its parameter. A weight ``[in, out]`` is recorded
transposed.
In a model without FP8 the what-if statistics of a GEMM that reads such a parameter are recorded, as of GPT-2's Conv1D.

Only sampled steps are followed, and no module is observed for it: parameters that nothing multiplies by cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import TensorWeakRef

from fp8debug.adapters.base import num_dims
from fp8debug.adapters.interception.calls import runs_eagerly
from fp8debug.adapters.interception.gemm_flops import GemmCounter, is_of_fp8_linear
from fp8debug.adapters.interception.intercepting_probe import ForwardCall, InterceptingProbe, fitting, weak_view
from fp8debug.adapters.interception.listener import SeenGemm, listener_of
from fp8debug.adapters.interception.origins import Origin, Origins, joined_at, parameter_behind
from fp8debug.adapters.interception.sublinears import CASTS, WHAT_IF_MODULES, SubLinear, seen_recipe
from fp8debug.adapters.plain import WhatIfProbe
from fp8debug.adapters.watching.coverage import Candidate, named_modules
from fp8debug.kernels.torch_state import untraced
from fp8debug.linear import Fp8Linear
from fp8debug.observer.autograd_nodes import add_hook, add_prehook, leaf_of
from fp8debug.observer.isolation import isolated
from fp8debug.observer.observer import Observer
from fp8debug.observer.sharding import layout_by_marks
from fp8debug.recipes import Cast, Recipe
from fp8debug.types import Gemm, TensorRole

_PLAIN = (Tensor, nn.Parameter)
_FORWARD = CheckpointFunction.forward.__code__
_BACKWARD = BackwardCFunction.apply.__code__
_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = _FORWARD.co_filename
#: Matrices of whose FP8 GEMMs something is recorded.
_LIVE: WeakSet[nn.Module] = WeakSet()


class Matrix(SubLinear):
    """A 2-D parameter, a slice of one, or several in one matrix.

    Args:
        owner: the module that holds it.
        names: its attributes there.
        shape: ``[out_features, in_features]``.
    """

    def __init__(self, owner: nn.Module, names: Sequence[str], shape: tuple[int, int]) -> None:
        super().__init__(owner, 0, names, has_bias=False)
        self.set_shape(*shape)

    def set_shape(self, out_features: int, in_features: int) -> None:
        """Set (out_features, in_features), which are known once a GEMM has read it."""
        self.__dict__["weight"] = torch.empty(out_features, in_features, dtype=torch.bfloat16, device="meta")


class _Matrices:
    """The adapter of 2-D parameters: known at once, in coverage once a GEMM reads them."""

    name = "matrices"
    kind = ""  # the class of the module that holds it
    fp8 = True
    is_intercepted = True

    def matches(self, module: nn.Module) -> bool:
        """Return False: it takes parameters, which no other adapter reads, and not modules."""
        return False

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return the casts that were observed; None before the first."""
        return seen_recipe(module, "scaled_mm")

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Do nothing: its GEMMs are assigned by :class:`OutsideGemms`."""
        return lambda: None


MATRICES = _Matrices()


def matrices_of(roots: Sequence[nn.Module], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the 2-D parameters that no candidate holds, under the FQN of their module where they are its ``weight``.

    Those of torch.nn's own modules are left out, but for embeddings, whose weight an output head may share.
    """
    taken = {id(p) for c in candidates for p in c.module.parameters(recurse=False)}
    found: list[Candidate] = []
    for module, fqn in named_modules(roots):
        is_torchs = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Embedding)
        for name, parameter in module._parameters.items():
            if (
                is_torchs
                or num_dims(parameter) != 2
                or (type(parameter) is not nn.Parameter and not hasattr(parameter, "placements"))
            ):
                continue
            assert parameter is not None
            if id(parameter) in taken or parameter.element_size() == 1:
                continue
            taken.add(id(parameter))
            whole = f"{fqn}.{name}" if fqn else name
            whole = (fqn or type(module).__name__) if name == "weight" else whole
            shape = parameter.shape[0], parameter.shape[1]
            found.append(Candidate(whole, Matrix(module, [name], shape), MATRICES, None))
    return found


class MatrixProbe(InterceptingProbe):
    """The probe of one matrix: each of its GEMMs comes with the tensors that were cast.

    Args:
        observer: where it records.
        module: FQN.
        matrix: what it is of.
    """

    def __init__(self, observer: Observer, module: str, matrix: Matrix) -> None:
        super().__init__(observer, module, self._named, trial=WhatIfProbe(observer, module, actual=False))
        self.matrix = matrix
        name = matrix.weight_names[0]
        self.layout = layout_by_marks(matrix.owner, matrix.owner._parameters.get(name))

    def _named(self, which: Gemm, role: TensorRole, seen: Cast) -> Cast:
        CASTS.setdefault(self.matrix, {})[which, role] = seen
        return seen

    def _has_room(self, device: torch.device) -> bool:
        trial = self._trial
        return self.observer.has_room(self._number if trial is None else max(self._number, trial._number), device)

    @isolated
    def take_fprop(self, gemm: SeenGemm, x: Tensor, weight: Tensor, wants: tuple[bool, bool]) -> ForwardCall | None:
        """Record fprop and return what its backward pass needs; None where none is to come.

        Args:
            gemm: ``[M, K] @ [K, N]``.
            x: input ``[..., K]`` before its cast.
            weight: ``[N, K]`` before its cast.
            wants: whether the gradients of the input and of the weight are wanted.
        """
        if self.observer.in_shape_inference or not self._has_room(x.device) or self._begin() is not True:
            return None
        _LIVE.add(self.matrix)
        self.matrix.set_shape(*weight.shape)
        call = ForwardCall()
        flat, call.weight = call.as_quantized(x), weight
        a, b, result = self._product(Gemm.FPROP, gemm)
        call.kept = self.fprop(flat, weight, a, b, None, result, gemm.bias)
        call.wanted = {which for which, is_wanted in zip((Gemm.DGRAD, Gemm.WGRAD), wants, strict=True) if is_wanted}
        call.x = weak_view(x)
        call.note(input=x, weight=weight)
        return call if call.kept is not None and call.wanted else None

    def wait(self, call: ForwardCall, node: Any) -> None:
        """Record the backward pass of a call when its autograd node runs."""
        assert call.weight is not None
        features = call.weight.shape[0]
        call.nodes_left = 1
        if not self._unfinished:
            self.observer.after_step.append(self._end_step)
        self._unfinished.append(call)

        @untraced
        def before(grads: Any) -> None:
            grad = next((g for g in grads if g is not None and g.dim() and g.shape[-1] == features), None)
            if call in self._unfinished and grad is not None:
                call.grad_output = grad.detach().reshape(-1, features)
                call.note(grad_output=call.grad_output)
            follower = _Followed()
            self._listener.begin(call, call, partial(self._take_backward, call, follower.origins), self._fail, follower)

        @untraced
        def after(grads: Any, others: Any) -> None:
            self._listener.end(call)
            call.nodes_left -= 1
            self._sort(call)

        add_prehook(node, before)
        add_hook(node, after)

    def _take_backward(self, call: ForwardCall, origins: Origins, gemm: SeenGemm) -> None:
        """Record a GEMM of the node by the operand that was cast from grad_output.

        One whose operands were cast from other tensors is of the forward pass, which activation checkpointing runs once more.
        """
        grad_output = call.grad_output
        if not isinstance(gemm, SeenGemm) or grad_output is None:
            return
        first, second = origins.of(gemm.first.values), origins.of(gemm.second.values)
        if _is_of(first, grad_output) and first.is_turned is not None:
            gemm = gemm._replace(which=Gemm.WGRAD if first.is_turned else Gemm.DGRAD)
        elif _is_of(second, grad_output) and second.is_turned is not None:
            gemm = gemm.t()._replace(which=Gemm.DGRAD if second.is_turned else Gemm.WGRAD)
        elif (first is not None and second is not None and not _is_of(first, grad_output)) or _is_recomputed():
            return
        self._take(call, gemm)

    def take_trial(self, gemm: SeenGemm, wants: tuple[bool, bool]) -> Callable[[Any], None] | None:
        """Record what FP8 would do to ``[M, K] @ [K, N]`` in high precision; return what waits for its gradient."""
        trial = self._trial
        if trial is None or not self._has_room(gemm.result.device) or not trial.begin():
            return None
        trial.layout = self.layout
        weight = gemm.second.values.detach().t()
        attach = trial.try_forward(gemm.first.values.detach(), weight, *wants)
        if attach is not None:
            WHAT_IF_MODULES.add(self.matrix)
            self.matrix.set_shape(*weight.shape)
        return attach


class _Followed:
    """Follows the ops of one autograd node."""

    is_followed = False

    def __init__(self) -> None:
        self.origins = Origins()

    def before_op(self) -> None:
        """Do nothing: a node has one function."""

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Follow an op."""
        self.origins.follow(func, args, kwargs, result)


def _is_of(origin: Origin | None, grad_output: Tensor) -> TypeGuard[Origin]:
    """Return whether codes were cast from grad_output."""
    return origin is not None and origin.x.data_ptr() == grad_output.data_ptr() and origin.x.numel() == grad_output.numel()


class _Waiting:
    """A GEMM that has run and whose autograd node is not known yet: that of the function which returns its result."""

    def __init__(self, result: Tensor, attach: Callable[[Any], None]) -> None:
        self.result, self.attach = result, attach
        self._tensors = {id(result): TensorWeakRef(result)}

    def follow(self, inputs: Sequence[Any], result: Any) -> None:
        """Take note of a tensor that was made of the result."""
        if isinstance(result, Tensor) and result.numel() == self.result.numel():
            if any((held := self._tensors.get(id(x))) is not None and held() is x for x in inputs):
                self._tensors[id(result)] = TensorWeakRef(result)

    def settle(self) -> None:
        """Attach to the node, if a gradient is wanted."""
        for held in reversed(self._tensors.values()):
            x = held()
            if x is not None and x.grad_fn is not None:
                self.attach(x.grad_fn)
                return


class OutsideGemms:
    """Record the GEMMs of a forward pass that no watched module ran.

    Args:
        matrices: parameters that no other candidate holds.
        linears: candidates whose weight a function elsewhere may multiply by.
        observer: of the watch.
        counter: of the FLOPs, which belong to the matrix once it is known.
        intercepts: whether every sampled step is followed; otherwise only when the first one had such GEMMs.

    Attributes:
        unassigned: why FP8 GEMMs are not recorded, by the FQN of the module that ran them.
    """

    def __init__(
        self,
        matrices: Sequence[Candidate],
        linears: Sequence[Candidate],
        observer: Observer,
        counter: GemmCounter,
        intercepts: bool,
    ) -> None:
        self._matrices = list(matrices)
        self._linears = [c for c in linears if isinstance(c.module, nn.Linear) and not isinstance(c.module, Fp8Linear)]
        self._observer, self._counter, self._intercepts = observer, counter, intercepts
        self._listener = listener_of(observer)
        self._origins = Origins()
        self._waiting: list[_Waiting] = []
        self._probes: dict[str, MatrixProbe] = {}
        self._pieces: dict[str, Candidate] = {}
        self._excluded: dict[str, Candidate] = {}
        self._listed: set[str] = set()
        self._has_looked = self._has_found = False
        for c in matrices:
            if c.reason is None:
                self._probe(c)
        self.unassigned: dict[str, str] = {}

    @property
    def is_wanted(self) -> bool:
        """True if forward passes of sampled steps are to be followed."""
        return self._intercepts or self._has_found or not self._has_looked

    def num_matrices(self, modules: Iterable[nn.Module]) -> int:
        """Return how many matrices modules hold that are no watched module's, embeddings apart."""
        owners = {id(module) for module in modules if not isinstance(module, nn.Embedding)}
        return sum(c.reason is None and _owner(c) in owners for c in self._matrices)

    def has_recorded(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether something was recorded of such a matrix."""
        owners = {id(module) for module in modules if not isinstance(module, nn.Embedding)}
        return any(_is_live(c) and _owner(c) in owners for c in (*self._matrices, *self._pieces.values()))

    def begin(self) -> None:
        """Begin a forward pass."""
        self._has_looked = True

    @property
    def is_followed(self) -> bool:
        """True if something waits for the next op that autograd records."""
        return bool(self._waiting or self._origins)

    def before_op(self) -> None:
        """Attach to the nodes of what ran before: the function that held it has returned."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.settle()
        self._origins.leave_function()

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Follow an op that ran without autograd."""
        self._origins.follow(func, args, kwargs, result)
        for one in self._waiting:
            one.follow(args, result)

    def end(self) -> None:
        """End a forward pass."""
        self.before_op()
        self._origins.clear()

    def fail(self, error: BaseException) -> None:
        """Take note that a GEMM could not be read."""
        if not is_of_fp8_linear():
            self._not_recorded(f"{error}")

    def take(self, gemm: Any) -> None:
        """Record a GEMM that has run, if it can be assigned to a matrix."""
        if getattr(gemm, "is_fp8", True) and is_of_fp8_linear():
            return
        if not isinstance(gemm, SeenGemm):
            self._not_recorded("a grouped GEMM outside a module that holds its weights is not read")
        elif gemm.is_fp8:
            self._observer.has_fp8 = self._has_found = True
            try:
                self._take_fp8(gemm)
            except ValueError as error:
                self._not_recorded(f"{error}", str(gemm).split(" ")[0])
        elif not self._observer.has_fp8 and self._observer.takes_pass and not gemm.is_opaque:
            self._take_plain(gemm)

    def _not_recorded(self, reason: str, name: str = "FP8 GEMM") -> None:
        """Count a GEMM that is not recorded, under the module that runs it."""
        self._listener.unowned_gemms[name] += 1
        self.unassigned.setdefault(self._counter.running() or "", reason)

    def _take_fp8(self, gemm: SeenGemm) -> None:
        """Record an FP8 GEMM.

        Raises:
            ValueError: it cannot be assigned; the message says why.
        """
        if (obstacle := _obstacle()) is not None:
            raise ValueError(obstacle)
        first, second = self._origins.of(gemm.first.values), self._origins.of(gemm.second.values)
        turned = gemm.t(), second and second.turned(), first and first.turned()
        readings = [(gemm, first, second), turned]
        for one, x, w in readings:
            found = self._found(w)
            if found is not None and w is not None and self._found(x) is None:
                self._record(one, x, w, *found)
                return
        if first is None or second is None:
            for one, x, w in readings:
                if w is None and x is not None and (found := self._of_shape(one)) is not None:
                    self._record(one, x, Origin(found[1], None), *found)
                    return
        raise ValueError("its weight does not lead to a parameter of the model")

    def _record(self, gemm: SeenGemm, x: Origin | None, w: Origin, candidate: Candidate, parameter: Tensor) -> None:
        (m, k), n = gemm.first.values.shape, gemm.second.values.shape[1]
        if candidate.reason is not None:
            self._excluded[candidate.fqn] = candidate
            self._counter.assign(candidate.fqn)
            return
        is_turned = w.is_turned
        if is_turned is None and n == k:
            raise ValueError(f"whether its square weight {candidate.fqn} is transposed cannot be seen in the op that cast it")
        if is_turned is None:
            is_turned = w.x.shape == (n, k)
        weight = w.x.detach() if is_turned else w.x.detach().t()
        if weight.shape != (n, k):
            raise ValueError(f"its weight {list(w.x.shape)} is multiplied as {[n, k]} (padded, or in parts)")
        if x is None or x.is_turned:
            raise ValueError("its input before the cast is not known")
        if not x.x.dim() or x.x.shape[-1] != k or x.x.numel() != m * k or not x.x.is_floating_point():
            raise ValueError(f"its input {list(x.x.shape)} is multiplied as {[m, k]} (padded, or in parts)")
        if type(x.x) not in _PLAIN or fitting(Gemm.FPROP, gemm, m, weight) is None:
            raise ValueError(f"{gemm} is not an input by a weight")
        probe = self._probe(candidate)
        wants = self._wanted(x.x.requires_grad or self._origins.is_inside(x.x), parameter.requires_grad)
        call = probe.take_fprop(gemm, x.x, weight, wants)
        self._counter.assign(candidate.fqn)
        if call is not None:
            self._waiting.append(
                _Waiting(gemm.result if gemm.result._base is None else gemm.result._base, partial(probe.wait, call))
            )

    def _take_plain(self, gemm: SeenGemm) -> None:
        """Record what FP8 would do to a GEMM of a tensor by a matrix."""
        found = self._matrix(parameter_behind(gemm.second.values).x)
        if found is None or found.reason is not None or gemm.first.values.dim() != 2 or self._found(Origin(gemm.first.values)):
            return
        if _obstacle() is not None:
            return
        self._has_found = True
        wants = self._wanted(gemm.first.values.requires_grad, gemm.second.values.requires_grad)
        attach = self._probe(found).take_trial(gemm, wants)
        if attach is not None:
            self._waiting.append(_Waiting(gemm.result, attach))

    def _wanted(self, of_input: bool, of_weight: bool) -> tuple[bool, bool]:
        """Return which gradients are waited for: none where inference is recorded."""
        is_training = not self._observer.settings.inference
        return is_training and of_input, is_training and of_weight

    def _probe(self, candidate: Candidate) -> MatrixProbe:
        probe = self._probes.get(candidate.fqn)
        if probe is None:
            matrix = candidate.module
            if not isinstance(matrix, Matrix):  # a Linear's weight, which a function multiplies by
                shape = matrix._parameters["weight"]
                assert shape is not None
                matrix = Matrix(matrix, ["weight"], (shape.shape[0], shape.shape[1]))
                candidate.module, candidate.adapter, candidate.not_run = matrix, MATRICES, None
            probe = self._probes[candidate.fqn] = MatrixProbe(self._observer, candidate.fqn, matrix)
        return probe

    def _matrix(self, x: Tensor) -> Candidate | None:
        for c in self._matrices:
            if isinstance(c.module, Matrix) and _held(c.module) is x:
                return c
        return None

    def _of_shape(self, gemm: SeenGemm) -> tuple[Candidate, Tensor] | None:
        """Return the only matrix of the running module with the shape of the second operand, whose codes were cast elsewhere."""
        k, n = gemm.second.values.shape
        running = self._counter.running_module()
        mine = [c for c in self._matrices if isinstance(c.module, Matrix) and c.module.owner is running]
        found = [(c, p) for c in mine if (p := _held(c.module)) is not None and p.shape in ((n, k), (k, n))]
        return found[0] if len(found) == 1 else None

    def _found(self, origin: Origin | None) -> tuple[Candidate, Tensor] | None:
        """Return the candidate of a tensor that was cast and its parameter; None where it is no weight."""
        if origin is None or type(origin.x) not in _PLAIN or origin.x.dim() != 2:
            return None
        leaf = parameter_behind(origin.x)
        for c in (*self._matrices, *self._linears):
            if (parameter := _held(c.module)) is leaf.x:
                return c, leaf.x
            if (
                parameter is not None
                and not isinstance(leaf.x, nn.Parameter)
                and (start := _start(leaf.x, parameter)) is not None
            ):
                if leaf.x.numel() == parameter.numel():
                    return c, parameter
                return self._piece(c, f"{c.fqn}.{start}", ["weight"] if c in self._linears else None), parameter
        return self._joined(origin.x)

    def _joined(self, x: Tensor) -> tuple[Candidate, Tensor] | None:
        """Return the candidate of several matrices of one module that ``torch.cat`` joined; None where they are none."""
        node = joined_at(x)
        if node is None:
            return None
        leaves = [leaf_of(following) for following, _ in node.next_functions]
        parts = [c for leaf in leaves if leaf is not None and (c := self._matrix(leaf)) is not None]
        matrices = [c.module for c in parts if isinstance(c.module, Matrix)]
        if len(matrices) < len(leaves) or not matrices or len({id(matrix.owner) for matrix in matrices}) > 1:
            return None
        names = [name for matrix in matrices for name in matrix.weight_names]
        before = parts[0].fqn.rpartition(".")[0]
        reason = next((c.reason for c in parts if c.reason is not None), None)
        joined = self._piece(parts[0], ".".join(filter(None, [before, "+".join(names)])), names, reason)
        assert leaves[0] is not None
        return joined, leaves[0]

    def _piece(self, whole: Candidate, fqn: str, names: Sequence[str] | None, reason: str | None = None) -> Candidate:
        """Return the candidate of a slice of a matrix, named by its first row or column, or of several together."""
        if fqn not in self._pieces:
            owner = whole.module.owner if isinstance(whole.module, Matrix) else whole.module
            given = names or (whole.module.weight_names if isinstance(whole.module, Matrix) else ["weight"])
            self._pieces[fqn] = Candidate(fqn, Matrix(owner, given, (0, 0)), MATRICES, reason or whole.reason)
        return self._pieces[fqn]

    def news(self) -> list[Candidate]:
        """Return the candidates that coverage is to list from now on."""
        found = []
        for c in (*self._matrices, *self._pieces.values()):
            if c.fqn not in self._listed and (_is_live(c) or c.fqn in self._excluded):
                c.is_known_to_run = True
                c.ran_fp8 = c.fqn in self._excluded
                self._listed.add(c.fqn)
                found.append(c)
        return found


def _is_live(candidate: Candidate) -> bool:
    """Return whether something was recorded of a matrix."""
    return candidate.module in _LIVE or candidate.module in WHAT_IF_MODULES


def _owner(candidate: Candidate) -> int:
    """Return the id of the module that holds a matrix."""
    return id(candidate.module.owner if isinstance(candidate.module, Matrix) else candidate.module)


def _held(module: nn.Module) -> Tensor | None:
    """Return a matrix as its module holds it now: FSDP2 has another tensor there while the module runs."""
    owner, names = (module.owner, module.weight_names) if isinstance(module, Matrix) else (module, ("weight",))
    found = owner._parameters.get(names[0]) if len(names) == 1 else None
    return found if type(found) in _PLAIN else None


def _start(x: Tensor, whole: Tensor) -> int | None:
    """Return the first row or column of a view of whole rows or whole columns of a matrix; None for anything else."""
    if x.dtype != whole.dtype or x.device != whole.device or not whole.is_contiguous() or not whole.numel():
        return None
    offset = x.data_ptr() - whole.data_ptr()
    if not x.data_ptr() or not 0 <= offset < whole.numel() * whole.element_size():
        return None
    if x.stride() != whole.stride():
        x = x.t()
    row, column = divmod(offset // whole.element_size(), whole.shape[1])
    if x.stride() != whole.stride() or (row and column):
        return None
    if x.shape[1] == whole.shape[1] and not column:
        return row
    return column if x.shape[0] == whole.shape[0] and not row else None


def _obstacle() -> str | None:
    """Return why the GEMM that runs now is not recorded whatever it multiplies by; None where nothing is in the way."""
    dynamo = None if runs_eagerly() else getattr(sys.modules.get("torch._dynamo.eval_frame"), "__file__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FORWARD:
            return "it runs under reentrant activation checkpointing, whose first pass has no graph"
        if frame.f_code.co_filename == dynamo and frame.f_code.co_name == "compile_wrapper":
            return "it runs in code under torch.compile, which is not recorded"
        frame = frame.f_back
    return None


def _is_recomputed() -> bool:
    """Return whether activation checkpointing runs a forward pass inside the node of a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _BACKWARD:
        if frame.f_code is _CALL or (frame.f_code.co_filename == _CHECKPOINT and frame.f_code.co_name == "unpack_hook"):
            return True
        frame = frame.f_back
    return False

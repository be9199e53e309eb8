"""The GEMMs of an Fp8Linear as ops of torch.library, for graphs of torch.compile.

    delayed_scale_inv   an operand and the state of its amax history, which it writes to -> scale_inv of this call
    linear_quantize     input[M, K] -> its FP8 data for fprop and for wgrad
    linear              input and its FP8 data, weight[N, K] -> output[M, N], with a gradient
    linear_fprop        the same without one, which compiled code calls in its place
    linear_backward     grad_output[M, N], weight, the FP8 data for wgrad -> grad_input[M, K], grad_weight[N, K]

The last four are pure functions of tensors and of a plan, a string without a module's name: equal blocks share one graph, and
Linears that read one input (q, k, v) share one ``linear_quantize`` by ordinary common-subexpression elimination. They run the
kernels that eager code runs, so equal operands give equal codes and results. The input in high precision is an argument of
``linear_fprop``, which carries the gradient and can be compared with its FP8 data while the op runs: recording needs no other
graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels.amax_history import AmaxHistory, Use
from fp8debug.kernels.backend import gpu, why_no_kernels
from fp8debug.kernels.dispatch import CastWithSlots, Operand, finite_amax, gemm, quantize, quantize_pair, quantizes_on_gpu
from fp8debug.kernels.torch_state import untraced
from fp8debug.recipes import HIGH_PRECISION, Cast
from fp8debug.types import CONTRACTS_ROWS, OPERAND_SITES, OPERANDS, Gemm, Quantized, TensorRole

Run = TypeVar("Run", bound=Callable[..., Any])

_LIBRARY: Any = torch.library.Library("fp8debug", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
#: An operand of a GEMM by name.
Key = tuple[Gemm, TensorRole]
_X_FPROP, _W_FPROP = (Gemm.FPROP, TensorRole.INPUT), (Gemm.FPROP, TensorRole.WEIGHT)
_G_DGRAD, _W_DGRAD = (Gemm.DGRAD, TensorRole.GRAD_OUTPUT), (Gemm.DGRAD, TensorRole.WEIGHT)
_FORWARD = "forward"
_G_WGRAD, _X_WGRAD = (Gemm.WGRAD, TensorRole.GRAD_OUTPUT), (Gemm.WGRAD, TensorRole.INPUT)
_BACKWARD = frozenset((Gemm.DGRAD, Gemm.WGRAD))


class LinearPlan(NamedTuple):
    """Plan by which an Fp8Linear runs.

    Attributes:
        casts: of the six operands.
        fast_accum: GEMMs that sum in the tensor core's short accumulator.
        scaled: the casts of both operands of each GEMM that promotes its sums, of operands whose scales are their own.
    """

    casts: dict[Key, Cast | None]
    fast_accum: frozenset[Gemm]
    scaled: dict[Gemm, tuple[Cast, Cast]]


class OpRecorder(Protocol):
    """Records the ops of one Linear (``adapters/interception/linear_ops.py``)."""

    def quantize(self, key: Key, x: Tensor, cast: Cast, scale_inv: Tensor | None) -> Quantized | None:
        """Quantize an operand and keep its statistics; None where the op is to do it."""
        ...

    def fprop(self, x: Tensor, weight: Tensor, a: Operand, b: Operand, x_wgrad: Operand | None, output: Tensor) -> None:
        """Record fprop and the operand of wgrad that the forward pass quantizes."""
        ...

    def backward(
        self,
        grad_output: Tensor,
        weight: Tensor,
        dgrad: tuple[Operand, Operand, Tensor] | None,
        wgrad: tuple[Operand, Operand, Tensor] | None,
    ) -> None:
        """Record dgrad and wgrad."""
        ...


class OpObserver(Protocol):
    """Finds the recorder of an op by the weight that it got."""

    def begin_forward(self, x: Tensor, weight: Tensor, *, trains: bool) -> OpRecorder | None:
        """Return what records a forward op; None where nothing is recorded of it."""
        ...

    def begin_backward(self, grad_output: Tensor, weight: Tensor) -> OpRecorder | None:
        """Return what records a backward op; None where nothing is recorded of it."""
        ...


class ObservedOps:
    """Observer of the ops of Fp8Linears, inactive in the rest of a step without anything to record.

    Attributes:
        active: the active observer; None if there is none. Ops run in several threads, so each reads it once.
    """

    def __init__(self) -> None:
        self.active: OpObserver | None = None
        self._observer: OpObserver | None = None

    def set(self, observer: OpObserver | None) -> None:
        """Make an observer the active one; None removes it."""
        self._observer = self.active = observer

    def pause(self) -> None:
        """Deactivate the observer until :meth:`resume`."""
        self.active = None

    def resume(self) -> None:
        """Activate it again: a step ended, a recipe was set, or FLOPs are counted."""
        self.active = self._observer


OBSERVED = ObservedOps()


@lru_cache(maxsize=256)
def parse_plan(plan: str) -> LinearPlan:
    """Return the plan that ``Recipe.plan`` describes."""
    casts, _, fast = plan.partition(";")
    values = [None if name == HIGH_PRECISION else Cast.parse(name) for name in casts.split("|")]
    by_site = dict(zip(OPERAND_SITES, values, strict=True))
    fast_accum = frozenset(Gemm(name) for name in fast.split(",") if name)
    scaled = {}
    for which in set(Gemm) - fast_accum:
        first, second = (by_site[which, role] for role in OPERANDS[which])
        if first is not None and second is not None and first.scaling == second.scaling == "current":
            scaled[which] = first, second
    return LinearPlan(by_site, fast_accum, scaled)


def linear(x: Tensor, weight: Tensor, plan: str, *, trains: bool, learns: bool, memories: Sequence[Tensor | None] = ()) -> Tensor:
    """Return input ``[M, K]`` times weight ``[N, K]`` in FP8, as ops that torch.compile puts into its graph.

    Args:
        x: bf16, fp16 or fp32 input.
        weight: in high precision.
        plan: ``Recipe.plan``.
        trains: whether a backward pass may follow.
        learns: whether it computes the gradient of the weight.
        memories: states of the amax histories of its six operands, None for those whose cast is not delayed; empty where none is.

    Returns:
        output ``[M, N]`` in x's dtype.
    """
    ops = torch.ops.fp8debug
    if not memories:
        made = ops.linear_quantize(x.detach(), plan, learns)
        output: Tensor = ops.linear(x, weight, *made, plan, trains, learns)
        return output
    use = _FORWARD if trains else "evaluate"
    x_memory, w_memory, *of_gradients, x_wgrad_memory = memories
    x_scale = _next_scale(x.detach(), x_memory, plan, 0, use)
    w_scale = _next_scale(weight.detach(), w_memory, plan, 1, use)
    x_wgrad_scale = _next_scale(x.detach(), x_wgrad_memory, plan, 5, use) if learns else None
    made = ops.linear_quantize(x.detach(), plan, learns, x_scale, x_wgrad_scale)
    output = ops.linear(x, weight, *made, plan, trains, learns, w_scale, *of_gradients)
    return output


def _next_scale(
    x: Tensor, memory: Tensor | None, plan: str, operand: int, use: str, after: Tensor | None = None
) -> Tensor | None:
    """Return the scale_inv of an operand, by its number in ``OPERAND_SITES``; None where its cast is not delayed."""
    if memory is None:
        return None
    scale_inv: Tensor = torch.ops.fp8debug.delayed_scale_inv(x, memory, plan, operand, use, after)
    return scale_inv


def _pure_op(name: str) -> Callable[[Run], Run]:
    """Make an op of a function that writes to no argument and returns none.

    ``torch.library.custom_op`` checks that at every call, which takes a host as long as it takes to start a kernel.
    """

    def register(run: Run) -> Run:
        schema = torch.library.infer_schema(run, mutates_args=())
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, untraced(run), "CompositeExplicitAutograd")
        return run

    return register


def _fake_of(name: str) -> Callable[[Run], Run]:
    registered: Callable[[Run], Run] = torch.library.register_fake(f"fp8debug::{name}", lib=_LIBRARY)
    return registered


@torch.library.custom_op("fp8debug::delayed_scale_inv", mutates_args=("memory",))
def _delayed_scale_inv(x: Tensor, memory: Tensor, plan: str, operand: int, use: str, after: Tensor | None) -> Tensor:
    """Return an operand's scale_inv from its amax history, FP32 ``[]``; the history has this call's amax from then on.

    Args:
        x: the operand.
        memory: state of ``AmaxHistory``.
        plan: ``Recipe.plan``.
        operand: its number in ``OPERAND_SITES``.
        use: ``evaluate``, ``forward`` or ``backward``: one of a forward pass is computed again where a backward pass runs it.
        after: not read; keeps a compiler from moving the call of a weight's history from the backward pass to the forward pass.
    """
    cast = parse_plan(plan).casts[OPERAND_SITES[operand]]
    assert cast is not None
    how: Use = "evaluate" if use == "evaluate" else "train"
    if use == _FORWARD and torch._C._current_graph_task_id() != -1:
        how = "recompute"
    return AmaxHistory(cast, memory.device, memory).next_scale_inv(finite_amax(x), how)


@_delayed_scale_inv.register_fake
def _(x: Tensor, memory: Tensor, plan: str, operand: int, use: str, after: Tensor | None) -> Tensor:
    return memory.new_empty(())


def _is_shared(plan: LinearPlan, x: Tensor) -> bool:
    """Return whether fprop and wgrad read the same FP8 data of the input; a GPU's GEMMs read two layouts."""
    cast = plan.casts[_X_FPROP]
    is_delayed = cast is not None and cast.scaling == "delayed"  # by a history of each operand's own
    return cast == plan.casts[_X_WGRAD] and not is_delayed and not x.is_cuda


@_pure_op("linear_quantize")
def _quantize(
    x: Tensor, plan: str, learns: bool, given: Tensor | None = None, given_wgrad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize an input for fprop and, where the weight learns, for wgrad: data, scale_inv of each, empty where there is none.

    ``given`` and ``given_wgrad`` are the scale_inv of delayed casts.
    """
    casts = parse_plan(plan).casts
    across, down = casts[_X_FPROP], casts[_X_WGRAD] if learns else None
    with _without_autocast(x):
        pair = _pair(x, across, down)
        if pair is not None:
            return *pair[0][0], *pair[1][0]  # by a kernel, into what :func:`_new` returns
        first = _nothing(x) if across is None else quantize(x, across, given)
        shared = _is_shared(parse_plan(plan), x)
        second = _nothing(x) if down is None or shared else quantize(x, down, given_wgrad, contracts_rows=True)
    return *_laid_out(first, x, across, False, given), *_laid_out(second, x, down, True, given_wgrad)


@_fake_of("linear_quantize")
def _(
    x: Tensor, plan: str, learns: bool, given: Tensor | None = None, given_wgrad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parsed = parse_plan(plan)
    across, down = parsed.casts[_X_FPROP], parsed.casts[_X_WGRAD] if learns else None
    first = _nothing(x) if across is None else _new(x, across, given, False)
    second = _nothing(x) if down is None or _is_shared(parsed, x) else _new(x, down, given_wgrad, True)
    return *first, *second


@_pure_op("linear_fprop")
def _fprop(
    x: Tensor,
    weight: Tensor,
    data: Tensor,
    scale_inv: Tensor,
    data_wgrad: Tensor,
    scale_inv_wgrad: Tensor,
    plan: str,
    trains: bool,
    learns: bool,
    w_given: Tensor | None = None,
    g_memory: Tensor | None = None,
    w_dgrad_memory: Tensor | None = None,
    g_wgrad_memory: Tensor | None = None,
) -> Tensor:
    """Run fprop: output ``[M, N]``.

    ``w_given`` is the weight's scale_inv under a delayed cast. The states of the histories of dgrad's operands and of wgrad's
    grad_output wait for the backward pass.
    """
    parsed = parse_plan(plan)
    observer = OBSERVED.active
    recorder = None if observer is None else observer.begin_forward(x, weight, trains=trains)
    if recorder is None and Gemm.FPROP in parsed.scaled and _has_kernels(weight):
        q = Quantized(data, scale_inv)
        planned = gpu().fprop_plan_of(plan, parsed.scaled[Gemm.FPROP], q, weight, x.dtype)
        if planned is not None:
            return planned(q, weight)
    x_fprop = _operand(x, Quantized(data, scale_inv), parsed.casts[_X_FPROP])
    with _without_autocast(x):
        w_fprop = _quantized(recorder, _W_FPROP, weight, parsed, w_given)
        output = _product(Gemm.FPROP, x_fprop, w_fprop, x.dtype, parsed)
        if recorder is not None:
            x_wgrad = _saved_input(x, x_fprop, data_wgrad, scale_inv_wgrad, parsed) if learns else None
            recorder.fprop(x, weight, x_fprop, w_fprop, x_wgrad, output)
    return output


@_fake_of("linear_fprop")
def _(
    x: Tensor, weight: Tensor, data: Tensor, scale_inv: Tensor, data_wgrad: Tensor, scale_inv_wgrad: Tensor, plan: str,
    trains: bool, learns: bool, w_given: Tensor | None = None, g_memory: Tensor | None = None,
    w_dgrad_memory: Tensor | None = None, g_wgrad_memory: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if x.shape[1] != weight.shape[1]:
        raise UsageError(f"expected input[..., {weight.shape[1]}], got {list(x.shape)}")
    return x.new_empty(x.shape[0], weight.shape[0])


@_pure_op("linear_backward")
def _backward(
    grad_output: Tensor,
    weight: Tensor,
    data_wgrad: Tensor,
    scale_inv_wgrad: Tensor,
    plan: str,
    dtype: torch.dtype,
    wants_input: bool,
    wants_weight: bool,
    g_given: Tensor | None = None,
    w_given: Tensor | None = None,
    g_wgrad_given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run dgrad and wgrad; empty tensors for what is not wanted. ``data_wgrad`` is the input itself where it is not quantized.

    ``g_given``, ``w_given`` and ``g_wgrad_given`` are the scale_inv of delayed casts.
    """
    parsed = parse_plan(plan)
    observer = OBSERVED.active
    recorder = None if observer is None else observer.begin_backward(grad_output, weight)
    if recorder is None and wants_input and wants_weight and parsed.scaled.keys() >= _BACKWARD and _has_kernels(weight):
        q, casts = Quantized(data_wgrad, scale_inv_wgrad), (parsed.scaled[Gemm.DGRAD], parsed.scaled[Gemm.WGRAD])
        planned = gpu().backward_plan_of(plan, casts, grad_output, weight, q, dtype)
        if planned is not None:
            return planned(grad_output, weight, q)
    dgrad: tuple[Operand, Operand, Tensor] | None = None
    wgrad: tuple[Operand, Operand, Tensor] | None = None
    with _without_autocast(grad_output):
        given = g_given, g_wgrad_given
        g_dgrad, g_wgrad = _gradients(recorder, grad_output, parsed, wants_input, wants_weight, given)
        if g_dgrad is not None:
            w_dgrad = _quantized(recorder, _W_DGRAD, weight, parsed, w_given)
            dgrad = g_dgrad, w_dgrad, _product(Gemm.DGRAD, g_dgrad, w_dgrad, dtype, parsed)
        if g_wgrad is not None:
            cast = parsed.casts[_X_WGRAD]
            x_wgrad: Operand = data_wgrad if cast is None else (Quantized(data_wgrad, scale_inv_wgrad), cast)
            wgrad = g_wgrad, x_wgrad, _product(Gemm.WGRAD, g_wgrad, x_wgrad, weight.dtype, parsed)
        if recorder is not None:
            recorder.backward(grad_output, weight, dgrad, wgrad)
    nothing = grad_output.new_empty(0)
    return nothing if dgrad is None else dgrad[2], nothing.clone() if wgrad is None else wgrad[2]


@_fake_of("linear_backward")
def _(
    grad_output: Tensor, weight: Tensor, data_wgrad: Tensor, scale_inv_wgrad: Tensor, plan: str, dtype: torch.dtype,
    wants_input: bool, wants_weight: bool, g_given: Tensor | None = None, w_given: Tensor | None = None,
    g_wgrad_given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, columns = grad_output.shape[0], weight.shape[1]
    grad_input = grad_output.new_empty(rows, columns, dtype=dtype) if wants_input else grad_output.new_empty(0)
    grad_weight = weight.new_empty(weight.shape) if wants_weight else grad_output.new_empty(0)
    return grad_input, grad_weight


class _Linear(torch.autograd.Function):
    """The op ``linear``: a class of its own, as ops with a gradient by ``torch.library`` ask for it in Python at every call."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        """Call the op without a gradient."""
        output: Tensor = torch.ops.fp8debug.linear_fprop(*inputs)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the backward pass reads."""
        x, weight, data, scale_inv, data_wgrad, scale_inv_wgrad, plan, _, learns, *memories = inputs
        parsed = parse_plan(plan)
        if learns and parsed.casts[_X_WGRAD] is None:
            data_wgrad = x
        elif learns and _is_shared(parsed, x):
            data_wgrad, scale_inv_wgrad = data, scale_inv
        ctx.save_for_backward(weight, data_wgrad, scale_inv_wgrad)
        ctx.plan, ctx.dtype, ctx.num_inputs = plan, x.dtype, len(inputs)
        ctx.memories = memories[
            1:
        ]  # not by save_for_backward: other calls of the step may write to them before the backward pass
        for memory in ctx.memories:
            if memory is not None:
                _save_unchecked(memory)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and weight."""
        weight, data_wgrad, scale_inv_wgrad = ctx.saved_tensors
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        g_memory, w_memory, g_wgrad_memory = ctx.memories
        given = (
            _next_scale(grad_output, g_memory, ctx.plan, 2, "backward") if wants_input else None,
            _next_scale(weight.detach(), w_memory, ctx.plan, 3, "backward", grad_output) if wants_input else None,
            _next_scale(grad_output, g_wgrad_memory, ctx.plan, 4, "backward") if wants_weight else None,
        )
        grads = torch.ops.fp8debug.linear_backward(
            grad_output, weight, data_wgrad, scale_inv_wgrad, ctx.plan, ctx.dtype, wants_input, wants_weight, *given
        )
        return grads[0] if wants_input else None, grads[1] if wants_weight else None, *[None] * (ctx.num_inputs - 2)


_NUM_INPUTS = len(inspect.signature(_fprop).parameters)


def _with_gradient(*inputs: Any) -> Tensor:
    output: Tensor = _Linear.apply(*inputs, *[None] * (_NUM_INPUTS - len(inputs)))  # type: ignore[no-untyped-call]  # torch's
    return output


_LIBRARY.define("linear" + torch.library.infer_schema(_fprop, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.impl("linear", lambda *inputs: torch.ops.fp8debug.linear_fprop(*inputs), "CompositeExplicitAutograd")
_LIBRARY.impl("linear", _with_gradient, "Autograd")


def _save_unchecked(x: Tensor) -> None:
    """Have AOTAutograd, where it traces, save a tensor for the backward pass whatever is written to it before, if it can."""
    try:
        from torch.fx.experimental.proxy_tensor import _get_proxies
    except ImportError:  # before torch 2.10
        return
    for proxy in _get_proxies(x):
        proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and why_no_kernels() is None


def _nothing(x: Tensor) -> Quantized:
    return Quantized(x.new_empty(0), x.new_empty(0))


def _operand(x: Tensor, q: Quantized, cast: Cast | None) -> Operand:
    return x if cast is None else (q, cast)


def _saved_input(x: Tensor, x_fprop: Operand, data: Tensor, scale_inv: Tensor, plan: LinearPlan) -> Operand:
    if plan.casts[_X_WGRAD] is not None and _is_shared(plan, x):
        return x_fprop
    return _operand(x, Quantized(data, scale_inv), plan.casts[_X_WGRAD])


def _pair(x: Tensor, across: Cast | None, down: Cast | None) -> tuple[CastWithSlots, CastWithSlots] | None:
    """Return x quantized both ways from one read; None where no kernel can, or a scale comes from a history."""
    if across is None or down is None or "delayed" in (across.scaling, down.scaling):
        return None
    return quantize_pair(x, across, down)


def _quantized(recorder: OpRecorder | None, key: Key, x: Tensor, plan: LinearPlan, given: Tensor | None = None) -> Operand:
    cast = plan.casts[key]
    if cast is None:
        return x
    q = recorder.quantize(key, x, cast, given) if recorder is not None else None
    return q or quantize(x, cast, given, contracts_rows=key in CONTRACTS_ROWS), cast


def _gradients(
    recorder: OpRecorder | None,
    grad_output: Tensor,
    plan: LinearPlan,
    wants_input: bool,
    wants_weight: bool,
    given: tuple[Tensor | None, Tensor | None],
) -> tuple[Operand | None, Operand | None]:
    """Return grad_output as dgrad and as wgrad read it, from one read where a kernel can."""
    across, down = plan.casts[_G_DGRAD], plan.casts[_G_WGRAD]
    if wants_input and wants_weight and recorder is None and across is not None and down is not None:
        pair = _pair(grad_output, across, down)
        if pair is not None:
            return (pair[0][0], across), (pair[1][0], down)
    first = _quantized(recorder, _G_DGRAD, grad_output, plan, given[0]) if wants_input else None
    if first is not None and wants_weight and across == down and given[1] is None and not grad_output.is_cuda:
        return first, first
    return first, _quantized(recorder, _G_WGRAD, grad_output, plan, given[1]) if wants_weight else None


def _product(which: Gemm, first: Operand, second: Operand, dtype: torch.dtype, plan: LinearPlan) -> Tensor:
    product = gemm(which, first, second, dtype=dtype, fast_accum=which in plan.fast_accum)
    return product if product.is_contiguous() else product.contiguous()


def _new(x: Tensor, cast: Cast, given: Tensor | None, contracts_rows: bool) -> Quantized:
    """Return memory for a quantized tensor, laid out as ``dispatch.quantize`` lays it out on the device."""
    return _empty(x, cast, contracts_rows, quantizes_on_gpu(x, cast, given))


def _empty(x: Tensor, cast: Cast, contracts_rows: bool, is_of_kernel: bool) -> Quantized:
    if is_of_kernel:
        return Quantized(*gpu().new_outputs(x, cast, "columns" if contracts_rows else "rows"))
    rows, columns = x.shape
    block = block_shape(cast.granularity, rows, columns)
    grid = -(-rows // block[0]), -(-columns // block[1])
    data = x.new_empty(x.shape, dtype=getattr(torch, FORMATS[cast.format].data_dtype))
    return Quantized(data, x.new_empty(grid, dtype=torch.float32))


def _laid_out(q: Quantized, x: Tensor, cast: Cast | None, contracts_rows: bool, given: Tensor | None) -> Quantized:
    """Return a quantized tensor in the strides of :func:`_new`, which compiled code was promised; a copy where it has others.

    No op returns its argument: a ``given`` scale_inv is copied.
    """
    if given is not None:
        q = Quantized(q.data, q.scale_inv.clone())
    if cast is None or not q.data.numel():
        return q
    strides = _strides(tuple(x.shape), quantizes_on_gpu(x, cast, given), cast, contracts_rows)
    return Quantized(*(_with_strides(t, s) for t, s in zip(q, strides, strict=True)))


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, int], is_of_kernel: bool, cast: Cast, contracts_rows: bool) -> tuple[tuple[int, ...], ...]:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return tuple(t.stride() for t in _empty(x, cast, contracts_rows, is_of_kernel))


def _with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    if t.stride() == strides or t.numel() < 2:
        return t if t.stride() == strides else t.as_strided(t.shape, strides)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

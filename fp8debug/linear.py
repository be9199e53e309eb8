"""A Linear that trains in FP8: quantize six operands, multiply three times. Read from top to bottom, it is the subject.

    fprop   output[M, N]      = input[M, K]         @ weight[N, K].T
    dgrad   grad_input[M, K]  = grad_output[M, N]   @ weight[N, K]
    wgrad   grad_weight[N, K] = grad_output[M, N].T @ input[M, K]

Every operand is quantized for the GEMM that reads it, because its blocks run along the dimension which that GEMM contracts:
the same input has other numbers in fprop (1x128, along K) than in wgrad (128x1, along M). The input of wgrad is quantized in
the forward pass, so that only FP8 data wait for the backward. Linears that read one input in turn quantize it once (``reuse``),
and what two GEMMs read is quantized for both from one read where a kernel can (``kernels.pairs``).
The bias is added, and its gradient summed, in high precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter

from fp8debug.errors import NoMatchError, UsageError
from fp8debug.kernels import linear_ops
from fp8debug.kernels.amax_history import AmaxHistory, Use
from fp8debug.kernels.cast_cache import CastCache, cached_casts, clear
from fp8debug.kernels.dispatch import Operand, finite_amax, gemm, has_gemm_layout, quantize, quantize_pair
from fp8debug.kernels.torch_state import hidden_from_modes, is_batched, is_transformed
from fp8debug.observer.probe import Probe, Product
from fp8debug.observer.rechecks import SavedForBackward
from fp8debug.observer.sharding import ShardLayout, is_sharded, split
from fp8debug.recipes import Cast, Recipe, get_recipe
from fp8debug.types import CONTRACTS_ROWS, OPERAND_SITES, Gemm, Quantized, TensorRole, match_fqn

#: Replaces how one operand is quantized: (gemm, tensor, x, cast, the ordinary way) -> operand. Faults are made of these.
Distortion = Callable[[Gemm, TensorRole, Tensor, "Cast | None", Callable[[Tensor, "Cast | None"], Operand]], Operand]


#: Replaces how one GEMM sums: (gemm, first, second, dtype, the ordinary way) -> result. For the faults of a GEMM.
Summation = Callable[[Gemm, Operand, Operand, torch.dtype, Callable[[], Tensor]], Tensor]


_AS_IT_IS = nullcontext()
#: All that are alive.
_LINEARS: WeakSet[Fp8Linear] = WeakSet()
_HIGH_PRECISION_PLAN = get_recipe("bf16").plan


class _Fp8Matmul(torch.autograd.Function):
    """input[M, K] @ weight[N, K].T and its two gradients, each operand cast by the layer's recipe."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Fp8Linear, probe: Probe | None, made: CastCache | None) -> Tensor:
        """Run fprop and quantize for the backward what is at hand now."""
        made = {} if made is None else made
        learns = ctx.needs_input_grad[1] and layer._use != "evaluate"  # without gradients the first is true as well
        x_fprop = layer.operand(Gemm.FPROP, TensorRole.INPUT, x, probe, made=made, then=Gemm.WGRAD if learns else None)
        w_fprop = layer.operand(Gemm.FPROP, TensorRole.WEIGHT, weight, probe)
        output = layer.product(Gemm.FPROP, x_fprop, w_fprop, x.dtype)

        x_wgrad = None
        if learns:
            x_wgrad = layer.operand(Gemm.WGRAD, TensorRole.INPUT, x, probe, same_as=x_fprop, made=made)
        kept = probe.fprop(x, weight, x_fprop, w_fprop, x_wgrad, output) if probe else None

        ctx.layer, ctx.probe, ctx.kept = layer, probe, kept
        ctx.w_fprop = w_fprop if isinstance(w_fprop, tuple) and has_gemm_layout(w_fprop[0], contracts_rows=True) else None
        ctx.save_for_backward(weight, *_flat(x_wgrad))
        ctx.x_cast = x_wgrad[1] if isinstance(x_wgrad, tuple) else None
        ctx.x_dtype = x.dtype
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Run dgrad, then wgrad.

        Raises:
            UsageError: the pass is to be differentiated again, or for many gradients at once. wgrad depends on an input of which
                only FP8 data are left, so a second derivative would silently lack that part.
        """
        clear()
        layer: Fp8Linear = ctx.layer
        if torch.is_grad_enabled():
            raise UsageError(layer._not_supported("a second derivative (create_graph=True)"))
        if is_batched(grad_output):
            raise UsageError(layer._not_supported("batched gradients (is_grads_batched=True, vectorize=True)"))
        probe: Probe | None = ctx.probe
        kept: SavedForBackward | None = ctx.kept
        weight, *saved = ctx.saved_tensors
        dgrad: Product | None = None
        wgrad: Product | None = None
        made: CastCache = {}
        with _without_autocast(grad_output.device.type):
            if ctx.needs_input_grad[0]:
                then = Gemm.WGRAD if ctx.needs_input_grad[1] else None
                g_dgrad = layer.operand(Gemm.DGRAD, TensorRole.GRAD_OUTPUT, grad_output, probe, made=made, then=then)
                w_dgrad = layer.operand(Gemm.DGRAD, TensorRole.WEIGHT, weight, probe, same_as=ctx.w_fprop)
                dgrad = g_dgrad, w_dgrad, layer.product(Gemm.DGRAD, g_dgrad, w_dgrad, ctx.x_dtype)
            if ctx.needs_input_grad[1]:
                x_wgrad = _unflat(saved, ctx.x_cast)
                g_wgrad = layer.operand(Gemm.WGRAD, TensorRole.GRAD_OUTPUT, grad_output, probe, made=made)
                wgrad = g_wgrad, x_wgrad, layer.product(Gemm.WGRAD, g_wgrad, x_wgrad, weight.dtype)
            if probe:
                probe.backward(grad_output, weight, dgrad, wgrad, kept)
            elif layer.probe is not None and layer.probe.searches(grad_output):
                products = {Gemm.DGRAD: dgrad, Gemm.WGRAD: wgrad}
                layer.probe.check_backward(grad_output, {g: p[2] for g, p in products.items() if p and p[2] is not None})
        ctx.kept = ctx.w_fprop = None
        return dgrad[2] if dgrad else None, wgrad[2] if wgrad else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise: there is no forward-mode derivative."""
        raise UsageError(ctx.layer._not_supported("forward-mode differentiation"))


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Switch autocast off for a kind of device, where it is on: entering its context takes longer than a launch."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


def _flat(operand: Operand | None) -> tuple[Tensor, ...]:
    if operand is None:
        return ()
    return (operand,) if isinstance(operand, Tensor) else tuple(operand[0])


def _unflat(tensors: list[Tensor], cast: Cast | None) -> Operand:
    return tensors[0] if cast is None else (Quantized(*tensors), cast)


class Fp8Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in FP8.

    Parameters, their dtype (FP32 or BF16 masters) and the state_dict are nn.Linear's; a recipe with delayed scaling adds
    its amax histories as ``_extra_state``, and loads a checkpoint that has none.

    Args:
        in_features: K.
        out_features: N.
        bias: as in nn.Linear.
        device: as in nn.Linear.
        dtype: as in nn.Linear.
        recipe: a Recipe or the name of one.

    Shapes: input ``[..., K]`` in bf16, fp16 or fp32 -> output ``[..., N]`` in the same dtype (autocast's if that is on).
    """

    #: How often ``set_recipe`` was called in this process: a watch looks for what has changed when there were more.
    num_recipes_set: ClassVar[int] = 0
    #: Called with the module and the FLOPs of its forward GEMM while a watch counts those of a model.
    counters: ClassVar[list[Callable[[Fp8Linear, int], None]]] = []

    recipe: Recipe
    probe: Probe | None  # of passes with gradients
    inference_probe: Probe | None  # of those without
    distortion: Distortion | None
    summation: Summation | None
    fqn: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "blockwise",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._begin(_recipe(recipe))

    def _begin(self, recipe: Recipe) -> None:
        self.probe = self.inference_probe = None
        self.distortion = None
        self.summation = None
        self.fqn = type(self).__name__
        self._use: Use = "train"
        self._histories: dict[tuple[Gemm, TensorRole], AmaxHistory] = {}
        self._memories: list[Tensor | None] = []  # of the histories by operand, once it is compiled
        self.recipe = recipe
        _LINEARS.add(self)

    @classmethod
    def adopt(cls, linear: nn.Linear, recipe: str | Recipe) -> Fp8Linear:
        """Turn an nn.Linear into an Fp8Linear in place: same object, parameters, hooks and references to it.

        A subclass of nn.Linear stays one of its own class: what it becomes derives from both.
        """
        kind = type(linear)
        linear.__class__ = cls if kind is nn.Linear else _combined_class(cls, kind)
        assert isinstance(linear, Fp8Linear)
        linear._begin(_recipe(recipe))
        return linear

    def set_recipe(self, recipe: str | Recipe) -> None:
        """Change the recipe from the next forward pass on; histories of casts that stay are kept."""
        recipe = _recipe(recipe)
        self._histories = {k: h for k, h in self._histories.items() if recipe.casts[k] == h.cast}
        self.recipe = recipe
        if self._memories:
            self._begin_histories()
        Fp8Linear.num_recipes_set += 1  # after it is in place: who sees the number sees the recipe
        linear_ops.OBSERVED.resume()

    def operand(
        self,
        which: Gemm,
        role: TensorRole,
        x: Tensor,
        probe: Probe | None = None,
        *,
        same_as: Operand | None = None,
        made: CastCache | None = None,
        then: Gemm | None = None,
    ) -> Operand:
        """Return a 2-D tensor as that GEMM reads it: quantized, or as it is where the recipe says BF16.

        Args:
            which: the GEMM.
            role: what x is to it.
            x: ``[rows, columns]``.
            probe: fills the cast's slots in the pass that quantizes, where a kernel can.
            same_as: x already quantized for another GEMM; returned when its cast and layout are those wanted here.
            made: x as it was quantized before, which has what is made of it here from now on.
            then: the GEMM that reads x next, for which it is quantized too where that spares a read of it; with ``made``.
        """
        key = which, role
        cast = self.recipe.casts[key]
        if self.distortion is not None:
            return self.distortion(which, role, x, cast, lambda x, cast: self._ordinary(key, x, cast, probe))
        if isinstance(same_as, tuple) and same_as[1] == cast and same_as[1].scaling != "delayed":
            if has_gemm_layout(same_as[0], key in CONTRACTS_ROWS):
                return same_as
        return self._ordinary(key, x, cast, probe, made, then)

    def product(self, which: Gemm, first: Operand, second: Operand, dtype: torch.dtype) -> Tensor:
        """Return one GEMM's result from its operands."""

        def ordinary() -> Tensor:
            return gemm(which, first, second, dtype=dtype, fast_accum=which in self.recipe.fast_accum, where=(self.fqn,))

        return ordinary() if self.summation is None else self.summation(which, first, second, dtype, ordinary)

    def _ordinary(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast | None, probe: Probe | None, made: CastCache | None = None,
        then: Gemm | None = None,
    ) -> Operand:  # fmt: skip
        if cast is None:
            return x
        scale_inv = None
        if cast.scaling == "delayed":
            made = None  # each Linear has a history of its own
            history = self.history(key, cast, x.device)
            with hidden_from_modes():  # other ops when a checkpoint runs it once more
                scale_inv = history.next_scale_inv(finite_amax(x), self._use)
        contracts_rows = key in CONTRACTS_ROWS
        place = cast, contracts_rows, x.dtype
        if made is not None and then is not None and place not in made:
            made.update(self._quantize_pair(key, x, cast, probe, then))
        before = made.get(place) if made else None
        q = (probe.quantize(key, x, cast, scale_inv, before) if probe else None) or before
        if q is None:
            q = quantize(x, cast, scale_inv, contracts_rows=contracts_rows, where=(self.fqn, *key))
        if made is not None and q is not before:
            made[place] = q
        return q, cast

    def _quantize_pair(self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, probe: Probe | None, then: Gemm) -> CastCache:
        """Return x quantized for this GEMM and for another one that contracts its rows; nothing where it takes two reads."""
        other = self.recipe.casts[then, key[1]]
        if other is None or key in CONTRACTS_ROWS or (then, key[1]) not in CONTRACTS_ROWS:
            return {}
        pair = quantize_pair(x, cast, other) if probe is None else probe.quantize_pair(key, x, cast, other)
        return {} if pair is None else {(cast, False, x.dtype): pair[0][0], (other, True, x.dtype): pair[1][0]}

    def history(self, key: tuple[Gemm, TensorRole], cast: Cast, device: torch.device) -> AmaxHistory:
        """Return the amax history of one operand, a new one where the cast changed."""
        history = self._histories.get(key)
        if history is None or history.cast != cast:
            history = self._histories[key] = AmaxHistory(cast, device)
        return history

    def _begin_histories(self) -> None:
        """Have the amax histories ready before a graph that reads them is compiled."""
        self._memories = self._states_of_histories()

    def _states_of_histories(self) -> list[Tensor | None]:
        """Return the state of each delayed cast's amax history, on the weight's device, by operand."""
        device = next(self.parameters()).device
        for key, cast in self.recipe.casts.items():
            if cast is not None and cast.scaling == "delayed":
                history = self.history(key, cast, device)
                if history.memory.device != device:
                    history.memory = torch.empty_like(history.memory, device=device).copy_(history.memory)
        histories = [self._histories.get(key) for key in OPERAND_SITES]
        return [None if history is None else history.memory for history in histories]

    def forward(self, input: Tensor) -> Tensor:
        """Return input ``[..., K]`` times weight, plus bias: ``[..., N]``.

        Under torch.compile and torch.export it is part of the graph, as ops of ``kernels/linear_ops.py``. Under a fault it runs
        outside the graph.

        Raises:
            Unsupported: torch.compile(fullgraph=True) compiles it under a fault.
            UsageError: the last dimension of input is not in_features, a transform of torch.func (grad, vmap, jvp) runs it in
                FP8, or torch.export exports it under a fault.
        """
        if not torch.compiler.is_compiling():
            return self._run(input)
        plan = self.recipe.plan
        is_delayed, is_faulty = " delayed(" in plan, self.distortion is not None or self.summation is not None
        if not torch.compiler.is_dynamo_compiling():  # torch.export, which runs this code
            if is_faulty:
                raise UsageError(self._not_supported("torch.export under a fault"))
            return self._run_in_graph(input, plan, self._states_of_histories() if is_delayed else [])
        from torch._dynamo.comptime import comptime

        if is_faulty:
            comptime(_refuse_full_graph)
            return self._outside_graph(input)
        if is_delayed:
            comptime(_begin_histories)
        return self._run_in_graph(input, plan, self._memories if is_delayed else [])

    def _run_in_graph(self, input: Tensor, plan: str, memories: list[Tensor | None]) -> Tensor:
        """Do what :meth:`_run` does, in code that torch.compile traces: it reads nothing that differs between equal modules."""
        weight, bias, kind = self.weight, self.bias, input.device.type
        if plan == _HIGH_PRECISION_PLAN or input.is_meta:
            return functional.linear(input, weight, bias)
        if is_sharded(weight):
            return self._outside_graph(input)
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        trains = torch.is_grad_enabled()
        learns = trains and weight.requires_grad
        x = input.reshape(-1, input.shape[-1])
        output = linear_ops.linear(x, weight, plan, trains=trains, learns=learns, memories=memories)
        output = output.reshape(*input.shape[:-1], weight.shape[0])
        return output if bias is None else output + bias.to(output.dtype)

    def _run(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != (self.in_features,):
            raise UsageError(
                f"expected input[..., {self.in_features}], got {str(input.dtype).removeprefix('torch.')}"
                f"{list(input.shape)} at {self.extra_repr()}"
            )
        if input.is_meta or (self.recipe.is_high_precision and self.distortion is None):
            return super().forward(input)
        if is_transformed():
            raise UsageError(self._not_supported("transforms of torch.func (grad, vmap, jvp)"))
        kind, made = input.device.type, cached_casts(input)
        weight, bias = self.weight, self.bias  # read once: a parametrization computes them anew, or moves its state, each time
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        with _without_autocast(kind):
            if is_sharded(weight):
                part = split(input, weight)
                output = part.join(self._multiply(part.x, part.weight, part.layout, None))
            else:
                output = self._multiply(input, weight, None, made)
            return output if bias is None else output + bias.to(output.dtype)

    def _not_supported(self, what: str) -> str:
        return (
            f"{self.fqn}: an FP8 Linear ({self.recipe.name}) does not support {what}; run it in high precision for that: call"
            f" set_recipe('bf16') on it, or convert the model with overrides={{'{self.fqn}': None}}"
        )

    def _multiply(self, x: Tensor, weight: Tensor, layout: ShardLayout | None, made: CastCache | None) -> Tensor:
        """Return x ``[..., K]`` times weight ``[N, K]``: all of them, or one rank's part."""
        watching = self.probe if torch.is_grad_enabled() else self.inference_probe
        probe = watching if watching is not None and watching.begin() else None
        if probe is not None:
            probe.layout = layout
        flat = x.reshape(-1, x.shape[-1])
        for count in self.counters:
            count(self, 2 * flat.numel() * weight.shape[0])
        if (use := self._use_now()) != self._use:  # to set an attribute of a module takes microseconds
            self._use = use
        try:  # a checkpoint ends its recomputation by an exception when it has what it needs
            output: Tensor = _Fp8Matmul.apply(flat, weight, self, probe, made)  # type: ignore[no-untyped-call]  # torch's
        finally:
            if use != "train":
                self._use = "train"
        if watching is not None and watching.searches(output):
            watching.check(flat, weight, output)
        return output.reshape(*x.shape[:-1], weight.shape[0])

    def _use_now(self) -> Use:
        """Return what the forward pass that begins is: one in a backward pass recomputes what a checkpoint threw away.

        Unless none came before outside of one, as under reentrant checkpoints, whose first pass has no gradients; the amax
        history knows.
        """
        if not torch.is_grad_enabled():
            return "evaluate"
        return "train" if torch._C._current_graph_task_id() == -1 else "recompute"

    _outside_graph = _disable_dynamo(_run)

    def extra_repr(self) -> str:
        """Return nn.Linear's line with the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickle or a copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        _LINEARS.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle or a copy of the module, which no watch observes."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        state["probe"] = state["inference_probe"] = None
        return state

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._histories:
            states = {f"{g}.{t}": h.state() for (g, t), h in self._histories.items()}
            destination[prefix + "_extra_state"] = states

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # a mapping is ours; another library's is left to torch, which calls it unexpected
        ours = isinstance(state_dict.get(prefix + "_extra_state"), Mapping)
        for name, state in (state_dict.pop(prefix + "_extra_state") if ours else {}).items():
            gemm_name, _, tensor_name = name.partition(".")
            key = (Gemm(gemm_name), TensorRole(tensor_name))
            cast = self.recipe.casts[key]
            if cast is not None and cast.scaling == "delayed":
                self.history(key, cast, next(self.parameters()).device).load_state(state)
        super()._load_from_state_dict(state_dict, prefix, *args)


#: Message to a user who compiles with ``fullgraph=True`` what runs outside of compiled code.
NO_FULL_GRAPH = (
    "Fp8Linear with an injected fault cannot be part of a graph that torch.compile(fullgraph=True) asks for: it runs outside of"
    " compiled code; compile with fullgraph=False, or leave the modules around it uncompiled"
)


def _begin_histories(_: Any) -> None:
    """Begin the amax histories of all Fp8Linears alive; Dynamo calls it while it traces one, and equal ones share its graph."""
    for linear in list(_LINEARS):
        if " delayed(" in linear.recipe.plan:
            linear._begin_histories()


def _refuse_full_graph(context: Any) -> None:
    """Raise one line at compile time where a graph break is an error; Dynamo calls it while it traces."""
    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    if any(getattr(t, n, False) for t in (tracer, tracer.output.root_tx) for n in ("one_graph", "error_on_graph_break")):
        from torch._dynamo.exc import Unsupported

        raise Unsupported(NO_FULL_GRAPH)


def convert(model: nn.Module, recipe: str | Recipe, overrides: Mapping[str, str | Recipe | None] | None = None) -> nn.Module:
    """Turn every nn.Linear of a model into an Fp8Linear, in place.

    A subclass of nn.Linear that keeps its forward becomes one too, and stays an instance of its class. One with a forward of its
    own is left as it is, and so is any other class with a 2-D weight (GPT-2's Conv1D); one line on stderr names those that were
    asked to run in FP8 and cannot, and says why.

    Args:
        model: any module; one that is itself an nn.Linear is converted too.
        recipe: for every Linear that no override names; or the path of a file of `fp8debug calibrate`, ending in .json, which
            has a recipe for each of its modules and leaves all others in BF16.
        overrides: FQN glob -> recipe, or None to leave the Linear in BF16. Where several globs match, the last one wins.

    Returns:
        The same model.

    Raises:
        UnknownNameError: no such recipe.
        NoMatchError: an override matches no Linear; the message has the closest names.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected an nn.Module to convert, got {type(model).__name__}")
    if not isinstance(overrides, Mapping | None) or not all(isinstance(pattern, str) for pattern in overrides or ()):
        raise UsageError(f"overrides is a dictionary from FQN globs to recipes, got {overrides!r}")
    base: str | Recipe | None = recipe
    if isinstance(recipe, str) and recipe.endswith(".json"):
        from fp8debug.store.calibration_file import load_recipes  # a file: recording alone needs nothing of the store

        base, overrides = None, {**load_recipes(recipe), **(overrides or {})}
    wanted = {pattern: None if own is None else _recipe(own) for pattern, own in {"*": base, **(overrides or {})}.items()}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    filters = [*getattr(model, "fp8debug_filters", []), *_filters(linears, overrides or ())]
    if not linears:
        raise UsageError(f"{type(model).__name__} has no nn.Linear to convert")
    recipes = {name: own for pattern, own in wanted.items() for name in match_fqn(linears, pattern)}  # the last one counts
    refused: dict[tuple[str, str], list[str]] = {}
    for name, module in linears.items():
        if (reason := _convert_linear(module, name, recipes[name])) is not None:
            refused.setdefault((type(module).__name__, reason), []).append(name)
    model.fp8debug_filters = filters  # type: ignore[assignment]  # a plain list, not a module
    if wanted["*"] is not None and not wanted["*"].is_high_precision:
        for name, module in model.named_modules():
            if (reason := _why_no_linear(module)) is not None:
                refused.setdefault((type(module).__name__, reason), []).append(name or type(module).__name__)
    _tell_refused(refused)
    return model


def _filters(linears: Collection[str], overrides: Iterable[str]) -> list[dict[str, Any]]:
    """Return what the manifest has of overrides: how many Linears each matches.

    Raises:
        NoMatchError: one matches none.
    """
    filters = []
    for pattern in overrides:
        matched = match_fqn(linears, pattern)
        if not matched:
            raise NoMatchError("override", pattern, linears)
        filters.append({"kind": "override", "pattern": pattern, "matched": len(matched)})
    return filters


def _convert_linear(module: nn.Linear, name: str, recipe: Recipe | None) -> str | None:
    """Give a Linear its recipe, None for BF16; return why one that was to run in FP8 is left as it is."""
    request = "bf16" if recipe is None or recipe.is_high_precision else "fp8"
    module.fp8debug_request = request  # type: ignore[assignment]  # nn.Module takes any attribute
    if isinstance(module, Fp8Linear):
        module.set_recipe(recipe or "bf16")
        module.fqn = name
    elif recipe is not None:
        if (reason := why_not_converted(module)) is not None:
            return reason if request == "fp8" else None
        Fp8Linear.adopt(module, recipe).fqn = name
        _run_in_hooks_of_accelerate(module)
    return None


def why_not_converted(linear: nn.Linear) -> str | None:
    """Return why ``convert`` leaves a Linear in high precision, with what to do about it; None where it converts it.

    Only a module that computes ``F.linear(input, self.weight, self.bias)`` by nn.Linear's own forward can be replaced.
    """
    kind, forward = type(linear), linear.__dict__.get("forward")
    if kind.__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention multiplies by its weight without calling it; give attention Linears of its own"
    if kind.__bases__[0].__name__ in ("FSDPModule", "ReplicateModule"):
        return "fully_shard or replicate was applied to it; call convert() before"
    if kind.forward is not nn.Linear.forward or kind.__call__ is not nn.Module.__call__:
        return (
            f"{kind.__name__} has a forward of its own, which Fp8Linear's would replace; use nn.Linear there, or leave it in high"
            " precision with overrides={FQN: None}"
        )
    weight: Any = linear._parameters.get("weight")
    if isinstance(weight, UninitializedParameter):
        return "its shape is unknown before its first call; run the model once before convert()"
    if weight is None:
        return "its weight is computed from others (a parametrization); call convert() before that is registered"
    if forward is not None and not _is_hooked_by_accelerate(linear):
        name = getattr(forward, "__qualname__", type(forward).__qualname__)
        return f"its forward was replaced on the instance (by {name}); call convert() before that"
    return None


def _why_no_linear(module: nn.Module) -> str | None:
    """Return why ``convert`` leaves a module with a 2-D weight as it is, as GPT-2's Conv1D; None for Linears and embeddings."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear | nn.Embedding) or type(module).__module__.startswith("torch.nn."):
        return None
    if weight is None or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return None
    return "convert() converts nn.Linear alone; use nn.Linear there to run it in FP8"


def _is_hooked_by_accelerate(linear: nn.Linear) -> bool:
    """Return whether accelerate (device_map, offloading) runs nn.Linear's forward from a forward of its own."""
    own = linear.__dict__.get("_old_forward")
    return hasattr(linear, "_hf_hook") and getattr(own, "__func__", None) is nn.Linear.forward


def _run_in_hooks_of_accelerate(linear: nn.Linear) -> None:
    if _is_hooked_by_accelerate(linear):
        linear._old_forward = MethodType(type(linear).forward, linear)  # type: ignore[assignment]  # which its forward calls


def _tell_refused(refused: Mapping[tuple[str, str], list[str]]) -> None:
    """Print one line for each kind of Linear that was asked to run in FP8 and cannot."""
    for (kind, reason), names in refused.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        verb = "are" if len(names) > 1 else "is"
        print(f"fp8debug: {', '.join(names[:3])}{more} ({kind}) {verb} not converted: {reason}", file=sys.stderr)


_CLASSES: dict[tuple[type[Fp8Linear], type[nn.Linear]], type[Fp8Linear]] = {}


def _combined_class(ours: type[Fp8Linear], theirs: type[nn.Linear]) -> type[Fp8Linear]:
    """Return a class with the forward of ours and everything else of theirs, which pickles and copies as they do."""

    def reduce(self: Any, protocol: Any) -> Any:
        made: Any = theirs.__reduce_ex__(self, max(int(protocol), 2))
        return (_new, (ours, theirs), *made[2:])

    if (ours, theirs) not in _CLASSES:
        body = {"__reduce_ex__": reduce, "__module__": theirs.__module__}
        _CLASSES[ours, theirs] = type(f"Fp8{theirs.__name__}", (ours, theirs), body)
    return _CLASSES[ours, theirs]


def _new(ours: type[Fp8Linear], theirs: type[nn.Linear]) -> Fp8Linear:
    """Return an empty module of such a class, to be filled by ``pickle`` or ``copy``."""
    kind = _combined_class(ours, theirs)
    return kind.__new__(kind)


def _recipe(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return get_recipe(recipe)
    raise UsageError(f"expected a Recipe or its name, got {type(recipe).__name__}")


# torch.load(weights_only=True), its default, reads a whole model that a script saved after convert().
torch.serialization.add_safe_globals([Fp8Linear, Recipe, Cast, Gemm, TensorRole, AmaxHistory])

"""Modules of any other stack in an arm of an experiment: single GEMMs of a Linear, or FP8 casts of a module of any class.

Two means, neither of which knows the stack:

- A module that holds a weight ``[N, K]`` and at most a bias is a Linear. Its own forward goes on, and does not compute what the
  arm computes in its place in high precision: for fprop ``x W^T + b`` replaces the values of its output; for dgrad its input is
  detached and ``g W`` is delivered; for wgrad its weight requires no gradient in its call, and ``g^T x`` is delivered. Its first
  training call shows whether it is one: unless it is a subclass of nn.Linear, its output has to be ``x W^T + b`` to 10 dB.
- Any other module, such as attention, an embedding or a head of its own making, runs with its casts to FP8 left out:
  ``Tensor.to()`` returns its operand as it is, and ``_scaled_mm`` multiplies what it gets. What makes FP8 by another op is
  refused; a kernel that torch does not dispatch is out of reach.

A module of Transformer Engine runs within ``autocast(enabled=False)``.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fp8debug.adapters.base import num_dims
from fp8debug.adapters.interception.listener import nodes_between
from fp8debug.adapters.interception.sublinears import SubLinear
from fp8debug.adapters.watching.coverage import Candidate, named_modules
from fp8debug.errors import NoMatchError, UsageError
from fp8debug.fallback import Fallback
from fp8debug.fallback.candidates import GEMMS
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.observer.attributes import stored
from fp8debug.observer.autograd_nodes import add_hook, add_prehook
from fp8debug.observer.sharding import layout_by_marks
from fp8debug.types import match_fqn, plain_name

#: SQNR of a module's output against ``x W^T + b``: above the first it ran in high precision (BF16 leaves 55 dB, FP8 28 dB), below
#: the second it computes something else.
HIGH_PRECISION_DB, LINEAR_DB = 45.0, 10.0
#: Autograd nodes of one call of a module that is no Linear.
_MAX_NODES = 4096

#: Ends the arm with a reason.
Refuse = Callable[[str], NoReturn]


def raise_usage_error(why: str) -> NoReturn:
    """Raise the reason.

    Raises:
        UsageError: always.
    """
    raise UsageError(why)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module holds what a Linear does and nothing else: a plain 2-D weight in high precision, maybe a bias."""
    weight = stored(module, "weight")
    names = {name for name, p in module._parameters.items() if p is not None}
    return (
        not module._modules
        and names <= {"weight", "bias"}
        and type(weight) in (Tensor, nn.Parameter)
        and weight.dim() == 2
        and weight.is_floating_point()
        and weight.element_size() > 1
    )


@dataclass(kw_only=True)
class _Replaced(ABC):
    """A module whose ``forward`` is ours.

    Attributes:
        own: the forward that it had.
        was_set: whether that stood at the object, not at its class.
    """

    module: nn.Module
    name: str
    gemms: frozenset[str]
    refuse: Refuse
    own: Callable[..., Any] = field(init=False)
    was_set: bool = field(init=False)

    def __post_init__(self) -> None:
        self.own, self.was_set = self.module.forward, "forward" in vars(self.module)
        vars(self.module)["forward"] = self.forward
        _REPLACED[self.module] = self

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as the arm wants it."""

    def restore(self) -> None:
        """Give the module its own forward back."""
        del _REPLACED[self.module]
        if self.was_set:
            vars(self.module)["forward"] = self.own
        else:
            del vars(self.module)["forward"]


_REPLACED: WeakKeyDictionary[nn.Module, _Replaced] = WeakKeyDictionary()


def restore_others(roots: Sequence[nn.Module]) -> None:
    """Give the modules of some roots their own forwards back."""
    for root in roots:
        for module in root.modules():
            if module in _REPLACED:
                _REPLACED[module].restore()


class _HighPrecisionGemms(torch.autograd.Function):
    """The output of a module's own GEMM, and the values or gradients that replace those of other GEMMs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, own: Tensor, values: Tensor | None, gemms: frozenset[str], dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemms, ctx.dtype = gemms, dtype
        return own.clone() if values is None else values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(ctx.dtype)
        needs_input, needs_weight, needs_own = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        if needs_input and "dgrad" in ctx.gemms:
            grad_x = (grad @ weight.to(ctx.dtype)).to(x.dtype)
        if needs_weight and "wgrad" in ctx.gemms:
            flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            grad_weight = (flat.t() @ rows.to(ctx.dtype)).to(weight.dtype)
        return grad_x, grad_weight, grads[0] if needs_own else None, None, None, None


@dataclass(kw_only=True)
class HighPrecisionLinear(_Replaced):
    """A Linear of another stack some of whose GEMMs run in high precision.

    Attributes:
        is_left: whether its first training call showed that it ran in high precision anyway; None before.
        bias: what its output has of a bias; its caller may add it instead.
    """

    is_left: bool | None = None
    bias: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, but for the GEMMs that leave FP8."""
        if self.is_left is True or not args or not isinstance(args[0], Tensor):
            return self.own(*args, **kwargs)
        x, weight = args[0], self.module.weight
        result = self._rest(x.detach() if "dgrad" in self.gemms else x, *args[1:], **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        with torch.no_grad():
            self.is_left = self._check(x, first)
            values = _linear(x, weight, self.bias).to(first.dtype) if "fprop" in self.gemms else None
        if self.is_left:
            return self.own(*args, **kwargs)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        output: Tensor = _HighPrecisionGemms.apply(x, weight, first, values, self.gemms, dtype)  # type: ignore[no-untyped-call]  # torch's
        return (output, *result[1:]) if isinstance(result, tuple) else output

    def _rest(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; its weight requires no gradient where wgrad is not its own."""
        weight: Any = self.module.weight
        is_trained = weight.requires_grad
        if "wgrad" not in self.gemms or not is_trained:
            return self.own(*args, **kwargs)
        weight.requires_grad_(False)
        try:
            return self.own(*args, **kwargs)
        finally:
            weight.requires_grad_(True)

    def _check(self, x: Tensor, own: Any) -> bool:
        """Check that the output is that of a whole Linear; at the first call, see if it has the bias and if it was in FP8.

        Returns:
            Whether it ran in high precision.
        """
        module, kind = self.module, type(self.module).__name__
        weight: Any = module.weight
        if (
            not isinstance(own, Tensor)
            or own.shape != (*x.shape[:-1], len(weight))
            or layout_by_marks(module, weight) is not None
        ):
            self.refuse(
                f"{self.name} is a {kind} whose output is not [..., {len(weight)}] of its input {list(x.shape)}, or a piece of a"
                " layer under tensor parallelism; an arm computes whole Linears, x W^T + b"
            )
        if self.is_left is not None:
            return self.is_left
        bias = stored(module, "bias")
        found = {id(b): _sqnr_db(own, _linear(x, weight, b)) for b in (None, bias)}
        self.bias = bias if found[id(bias)] >= found[id(None)] else None
        best = found[id(self.bias)]
        if best < LINEAR_DB and not isinstance(module, nn.Linear):
            self.refuse(
                f"{self.name} is a {kind} whose output is not x W^T + b ({best:.1f} dB), so that an arm cannot compute it in high"
                " precision; take the script's own FP8 off and give --recipe NAME"
            )
        return best > HIGH_PRECISION_DB


def _linear(x: Tensor, weight: Any, bias: Any) -> Tensor:
    """Return ``x W^T + b`` in the dtype of the input, which may be that of a GEMM before it and not the parameters'."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _sqnr_db(own: Tensor, reference: Tensor) -> float:
    """Return the SQNR of a module's output; infinite where both are equal, as two empty ones are."""
    own, reference = own.double(), reference.double()
    error = float((own - reference).square().sum())
    signal = float(reference.square().sum())
    if error == 0:
        return math.inf
    return 10 * math.log10(signal / error) if signal else -math.inf


class WithoutCasts(TorchDispatchMode):
    """Mode in which nothing is cast to FP8.

    Args:
        refuse: takes what cannot be left out.
    """

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an op, or leave a cast to FP8 out."""
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is torch.ops.aten._to_copy and kwargs.get("dtype") in FORMAT_OF:
            return func(*args, **{**kwargs, "dtype": args[0].dtype})
        if packet is torch.ops.aten._scaled_mm and max(x.element_size() for x in args[:2]) > 1:
            return _product(*args, **kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(x, Tensor) and x.dtype in FORMAT_OF for x in (result if isinstance(result, tuple) else (result,))):
            self._refuse(f"{func} makes a tensor in FP8, and an arm leaves out casts by Tensor.to() alone")
        return result


def _product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Return what ``_scaled_mm`` would of operands that were not cast: one scale for each tensor or row."""
    out = (a.float() * scale_a) @ (b.float() * scale_b)
    return (out if bias is None else out + bias).to(out_dtype or torch.bfloat16)


@dataclass(kw_only=True)
class WithoutFp8(_Replaced):
    """A module of any class whose casts to FP8 are left out: with fprop in its forward, with dgrad or wgrad in its backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and prepare its backward pass."""
        mode = WithoutCasts(lambda why: self.refuse(f"{self.name} ({type(self.module).__name__}): {why}"))
        if "fprop" in self.gemms:
            with mode:
                result = self.own(*args, **kwargs)
        else:
            result = self.own(*args, **kwargs)
        if self.gemms & {"dgrad", "wgrad"}:
            for output in result if isinstance(result, tuple) else (result,):
                if isinstance(output, Tensor) and output.grad_fn is not None:
                    for node in nodes_between(output, *args, limit=_MAX_NODES):
                        add_prehook(node, partial(_enter, mode))
                        add_hook(node, partial(_leave, mode))
        return result


def _enter(mode: WithoutCasts, grads: Any) -> None:
    mode.__enter__()  # type: ignore[no-untyped-call]  # torch's


def _leave(mode: WithoutCasts, grads: Any, others: Any) -> None:
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's


@dataclass(kw_only=True)
class WithoutAutocast(_Replaced):
    """A module of Transformer Engine, called with its FP8 switched off."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in high precision."""
        if self.gemms < set(GEMMS):
            self.refuse(f"{self.name} is a module of Transformer Engine, which leaves FP8 with all three GEMMs or none")
        with sys.modules["transformer_engine.pytorch"].autocast(enabled=False):
            return self.own(*args, **kwargs)


def may_run_fp8(candidate: Candidate) -> bool:
    """Return whether a module of another stack runs in FP8, or may: what it runs is known when it has run."""
    if candidate.adapter is None or candidate.adapter.name in ("native", "plain", "torchao"):
        return False
    return candidate.fp8 or (candidate.adapter.is_intercepted and type(candidate.module).forward is not nn.Linear.forward)


def change_others(
    roots: Sequence[nn.Module],
    candidates: Sequence[Candidate],
    compute: str,
    fallbacks: Sequence[Fallback],
    further: Sequence[str] = (),
    refuse: Refuse = raise_usage_error,
) -> list[Fallback]:
    """Give the modules of other stacks their arm, in place.

    Args:
        roots: the model, or the chunks of one.
        candidates: its Linears.
        compute: what the arm computes; ``bf16`` takes all Linears of other stacks out of FP8.
        fallbacks: its list. Globs are taken for Linears, exact names for other modules.
        further: names of modules that leave FP8 too where the arm is ``bf16``, whether they are Linears or not.
        refuse: takes the reason why a module cannot be changed, during its first training call; it does not return.

    Returns:
        The entries that name none of them.

    Raises:
        NoMatchError: ``further`` names no module.
        UsageError: an entry asks for more than BF16 for whole GEMMs; nothing is changed.
    """
    linears = {c.fqn: c for c in candidates if may_run_fp8(c)}
    known = {c.fqn for c in candidates}
    others = _other_modules(roots, known)
    for name in further:
        if name not in known and name not in others:
            raise NoMatchError("module", name, others)
    gemms: dict[str, set[str]] = {}
    if compute == "bf16":
        gemms = {name: set(GEMMS) for name in (*linears, *(name for name in further if name in others))}
    rest = []
    for entry in fallbacks:
        name = plain_name(entry.module)
        names = [name] if name in others else match_fqn(linears, name)
        if not names:
            rest.append(entry)
            continue
        _refuse_beyond_bf16(entry)
        for name in names:
            gemms.setdefault(name, set()).update(entry.gemms)
    for name, chosen in gemms.items():
        candidate = linears.get(name)
        _leave_fp8(others[name] if candidate is None else candidate.module, candidate, name, chosen, refuse)
    return rest


def _other_modules(roots: Sequence[nn.Module], known: Container[str]) -> dict[str, nn.Module]:
    """Return by name the modules that are no known Linears, and the owners of parameters, by the parameters' names too.

    A recording names a parameter that is multiplied by after its module and itself.
    """
    others = {name: module for module, name in named_modules(roots) if name and name not in known}
    for name, module in list(others.items()):
        others.update({f"{name}.{own}": module for own, p in module._parameters.items() if num_dims(p) >= 2})
    return others


def _refuse_beyond_bf16(entry: Fallback) -> None:
    """Refuse an entry that asks a module of another stack for more than BF16 for whole GEMMs."""
    if entry.cast is not None:
        asked = str(entry.cast)
    elif entry.tensor != "*":
        asked = "one operand in BF16"
    elif entry.is_scheduled:
        asked = "BF16 in some steps"
    else:
        return
    raise UsageError(
        f"{entry.module} is a module of another stack: an arm runs its GEMMs in BF16 or leaves them, and the list asks"
        f" for {asked}; give --fallbacks FILE without this entry, and make the change in the script"
    )


def _leave_fp8(module: nn.Module, candidate: Candidate | None, name: str, gemms: Iterable[str], refuse: Refuse) -> None:
    """Have a module, or the one that a Linear is a part of, run GEMMs in BF16, unless its forward is replaced already."""
    if isinstance(module, SubLinear):
        module = module.owner
    if module not in _REPLACED:
        adapter = None if candidate is None or candidate.adapter is None else candidate.adapter.name
        _kind_of(module, adapter)(module=module, name=name, gemms=frozenset(gemms), refuse=refuse)


def _kind_of(module: nn.Module, adapter: str | None) -> type[_Replaced]:
    if adapter == "transformer_engine":
        return WithoutAutocast
    if is_linear(module):
        return HighPrecisionLinear
    return WithoutFp8

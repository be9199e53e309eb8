"""Every failure mode on demand: ``inject()`` plants one in a model with Fp8Linear modules, so that rules can be seen to fire.

A fault changes how one module's operands are quantized, or what reaches the module, from a given step on; nothing else. The
numbers in brackets are those of the catalogue in docs/rules.md; each description cites where the fault was met.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from fp8debug.kernels.dispatch import AmaxHistory, Operand, finite_amax, quantize
from fp8debug.linear import Fp8Linear
from fp8debug.recipes import Cast
from fp8debug.registry import Registry
from fp8debug.types import Gemm, Quantized, TensorRole

Key = tuple[Gemm, TensorRole]
Ordinary = Callable[[Tensor, "Cast | None"], Operand]
#: (x, cast, the ordinary way, options) -> operand
Change = Callable[[Tensor, Cast, Ordinary, dict[str, Any]], Operand]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure mode that can be planted.

    Attributes:
        name: what ``inject`` calls it.
        code: the rule that finds it.
        description: one sentence with the place it was seen at.
        options: name -> default; what ``inject`` takes beside module and step.
        needs_module: False for a fault of the whole model.
    """

    name: str
    code: str
    description: str
    options: dict[str, Any] = field(default_factory=dict)
    needs_module: bool = True
    plant: Callable[[_Target], Callable[[], None]]


@dataclass
class _Target:
    """Where a fault goes: the model, the module, from which step on, with which options."""

    model: nn.Module
    module: nn.Module
    name: str
    step: int
    options: dict[str, Any]
    clock: _Clock

    @property
    def active(self) -> bool:
        return self.clock.step >= self.step

    @property
    def linear(self) -> Fp8Linear:
        """The module as Fp8Linear.

        Raises:
            UsageError: it is none.
        """
        if not isinstance(self.module, Fp8Linear) or self.module.recipe.is_high_precision:
            raise UsageError(f"{self.name} does not run in FP8 ({type(self.module).__name__}); plant this fault in one that does")
        return self.module


class _Clock:
    """Counts the optimizer steps of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.step = 0
        self._params = {id(p) for p in model.parameters()}
        self.stop = register_optimizer_step_post_hook(self._tick).remove

    def _tick(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if any(id(p) in self._params for group in optimizer.param_groups for p in group["params"]):
            self.step += 1


class Injection:
    """A planted fault; ``remove()`` takes it out again."""

    def __init__(self, fault: Fault, undo: list[Callable[[], None]]) -> None:
        self.fault = fault
        self._undo = undo

    def remove(self) -> None:
        """Restore the model; a second call does nothing."""
        while self._undo:
            self._undo.pop()()


FAULTS: Registry[Fault] = Registry("fault")


def list_faults() -> list[Fault]:
    """Return every fault that can be planted."""
    return list(FAULTS)


def inject(model: nn.Module, name: str, module: str | None = None, step: int = 0, **options: Any) -> Injection:
    """Plant a fault in a model, active from optimizer step ``step`` on.

    Args:
        model: a model with Fp8Linear modules; steps are those of any torch optimizer that holds one of its parameters.
        name: a name of :func:`list_faults`.
        module: FQN of the module; only ``data_spike`` needs none.
        step: first step at which it acts.
        options: those of the fault.

    Raises:
        UnknownNameError: no such fault or option; the message has the closest names.
        NoMatchError: no such module.
        UsageError: module is missing, or does not run in FP8.
    """
    fault = FAULTS.get(name)
    for key in options:
        if key not in fault.options:
            raise UnknownNameError(f"option of {name}", key, fault.options)
    target = model
    if fault.needs_module:
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        if module is None:
            raise UsageError(f"fault {name!r} needs module=, the FQN of a Linear such as {next(iter(linears), 'none')!r}")
        if module not in linears:
            raise NoMatchError("module", module, linears)
        target = linears[module]
    clock = _Clock(model)
    where = _Target(model, target, module or "", step, {**fault.options, **options}, clock)
    try:
        return Injection(fault, [clock.stop, fault.plant(where)])
    except BaseException:
        clock.stop()
        raise


def _distort(where: _Target, change: Change, *keys: Key, configured: bool = False) -> Callable[[], None]:
    """Replace how some operands of the target are quantized, on top of what is planted there already.

    With ``configured`` the fault is one of configuration: it ends for an operand that a fallback gives another cast.
    """
    linear = where.linear
    inner = linear.distortion
    planted = linear.recipe.casts

    def distortion(which: Gemm, role: TensorRole, x: Tensor, cast: Cast | None, ordinary: Ordinary) -> Operand:
        def below(x: Tensor, cast: Cast | None) -> Operand:
            return inner(which, role, x, cast, ordinary) if inner else ordinary(x, cast)

        cured = cast is None or (configured and cast is not planted[which, role])
        if where.active and (which, role) in keys and cast is not None and not cured:
            return change(x, cast, below, where.options)
        return below(x, cast)

    linear.distortion = distortion

    def undo() -> None:
        linear.distortion = inner

    return undo


INPUT: Key = (Gemm.FPROP, TensorRole.INPUT)
WEIGHTS: tuple[Key, ...] = ((Gemm.FPROP, TensorRole.WEIGHT), (Gemm.DGRAD, TensorRole.WEIGHT))
FORWARD: tuple[Key, ...] = (INPUT, WEIGHTS[0])


def _delayed_with(amax_factor: float) -> Callable[[_Target], Callable[[], None]]:
    """Run the input under delayed scaling whose history holds ``amax_factor`` times the amax it should."""

    def plant(where: _Target) -> Callable[[], None]:
        cast = Cast(scaling="delayed", history=int(where.options["history"]))
        frozen: list[Tensor] = []

        def change(x: Tensor, _: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
            if not frozen:
                frozen.append(finite_amax(x) * float(options["ratio"]) ** amax_factor)
            history = AmaxHistory(cast, x.device)
            history.fill(frozen[0])
            return quantize(x, cast, history.next_scale_inv(finite_amax(x))), cast

        return _distort(where, change, INPUT, configured=True)

    return plant


def _zero_tile(where: _Target) -> Callable[[], None]:
    cast = where.linear.recipe.casts[INPUT]
    rows = None if cast is None or cast.granularity == "tensorwise" else int(where.options["rows"])

    def blank(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not where.active:
            return None
        x = args[0]
        keep = torch.ones(x.shape[:-1], device=x.device, dtype=x.dtype)
        keep.view(-1)[:rows] = 0
        return (x * keep.unsqueeze(-1), *args[1:])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = _quantized(ordinary(x, cast))
        if cast.amax_eps:  # the cure: a scale of max / eps, and 0 * that is 0
            return q, cast
        data = q.data.float().masked_fill((x == 0).all(-1, keepdim=True), float("nan"))
        return Quantized(data.to(q.data.dtype), q.scale_inv), cast

    undistort = _distort(where, change, INPUT)
    hook = where.module.register_forward_pre_hook(blank)

    def undo() -> None:
        hook.remove()
        undistort()

    return undo


def _quantized(operand: Operand) -> tuple[Quantized, Cast]:
    assert isinstance(operand, tuple)
    return operand


def _scale_floor(where: _Target) -> Callable[[], None]:
    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        return ordinary(x, replace(cast, scale_rounding="pow2_floor"))

    return _distort(where, change, *FORWARD, configured=True)


def _outlier(where: _Target) -> Callable[[], None]:
    linear = where.linear
    factor = 2.0 ** float(where.options["log2_factor"])
    channels = slice(0, linear.in_features, max(1, int(where.options["spacing"])))
    pinned: list[Tensor] = []

    def scale(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not where.active:
            return None
        with torch.no_grad():
            if not pinned:
                pinned.append(linear.weight[:, channels] / factor)
            linear.weight[:, channels] = pinned[0]  # an optimizer's step would be ``factor`` times too long here
        gains = torch.ones(linear.in_features, device=args[0].device, dtype=args[0].dtype)
        gains[channels] = factor
        return (args[0] * gains, *args[1:])

    def still(grad: Tensor) -> Tensor:
        """Keep the pinned columns' gradient, ``factor`` times too large, out of the gradient norm."""
        return grad.index_fill(1, columns.to(grad.device), 0.0) if where.active else grad

    hook = linear.register_forward_pre_hook(scale)
    columns = torch.arange(linear.in_features)[channels]
    weight_hook = linear.weight.register_hook(still)  # type: ignore[no-untyped-call]  # torch's

    def undo() -> None:
        hook.remove()
        weight_hook.remove()
        if pinned:
            with torch.no_grad():
                linear.weight[:, channels] = pinned.pop() * factor

    return undo


def _unconverted(where: _Target) -> Callable[[], None]:
    linear, recipe = where.linear, where.linear.recipe
    request = getattr(linear, "fp8debug_request", None)
    linear.__class__ = nn.Linear  # type: ignore[assignment]  # what a filter that missed it would have left
    if request is not None:
        del linear.fp8debug_request

    def undo() -> None:
        Fp8Linear.adopt(linear, recipe)
        if request is not None:
            linear.fp8debug_request = request

    return undo


def _silent_bf16(where: _Target) -> Callable[[], None]:
    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        scale_inv = _quantized(ordinary(x, cast))[0].scale_inv
        return Quantized(x.bfloat16(), torch.ones_like(scale_inv)), cast

    return _distort(where, change, *where.linear.recipe.casts)


def _wrong_scale(where: _Target) -> Callable[[], None]:
    factor = float(where.options["factor"])
    role = TensorRole(where.options["tensor"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = _quantized(ordinary(x, cast))
        return Quantized(q.data, q.scale_inv * factor), cast

    return _distort(where, change, *(key for key in where.linear.recipe.casts if key[1] is role))


def _wrong_format(where: _Target) -> Callable[[], None]:
    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        return ordinary(x, replace(cast, format="e5m2"))

    return _distort(where, change, *FORWARD, configured=True)


def _data_spike(where: _Target) -> Callable[[], None]:
    length = int(where.options["length"])

    def mislabel(_: nn.Module, args: object, output: Any) -> Any:
        if not (where.step <= where.clock.step < where.step + length and torch.is_grad_enabled()):
            return None
        if not isinstance(output, Tensor) or output.dim() < 2:
            raise UsageError(f"data_spike needs a model that returns [..., classes], not {type(output).__name__}")
        return -float(where.options["factor"]) * output  # as if every label of the batch were wrong

    return where.model.register_forward_hook(mislabel).remove


for _fault in (
    Fault(
        name="stale_scale",
        code="F101",
        description="delayed scale from before a growth of the input: it saturates (arXiv 2409.12517)",
        options={"ratio": 64.0, "history": 16},
        plant=_delayed_with(-1.0),
    ),
    Fault(
        name="stale_history",
        code="F102",
        description="delayed scale from a history that holds a spike: nearly all underflows (history 1024, max)",
        options={"ratio": 2.0**18, "history": 1024},
        plant=_delayed_with(1.0),
    ),
    Fault(
        name="zero_tile",
        code="F103",
        description="padding rows of zeros under a kernel without amax eps: 0/0 gives NaN (lmdeploy #3652)",
        options={"rows": 1},
        plant=_zero_tile,
    ),
    Fault(
        name="e8m0_floor",
        code="F104",
        description="power-of-two scales rounded down: the top of each block clips (arXiv 2506.08027, ao #2035)",
        plant=_scale_floor,
    ),
    Fault(
        name="swiglu_outlier",
        code="F105",
        description="outlier channels in the input, the weight scaled inversely: the rest underflows (arXiv 2409.12517)",
        options={"log2_factor": 16.0, "spacing": 128},
        plant=_outlier,
    ),
    Fault(
        name="unconverted",
        code="F110",
        description="a Linear that a filter missed stays in BF16 and nobody says so (torchtitan #4008); acts at once",
        plant=_unconverted,
    ),
    Fault(
        name="silent_bf16",
        code="F111",
        description="the FP8 path hands BF16 data through (TransformerEngine #1422)",
        plant=_silent_bf16,
    ),
    Fault(
        name="wrong_scale",
        code="F113",
        description="scale_inv off by a factor after reload, sync or packing (TransformerEngine #123, sglang #25733)",
        options={"factor": 2.0, "tensor": "weight"},
        plant=_wrong_scale,
    ),
    Fault(
        name="wrong_format",
        code="F120",
        description="E5M2 in the forward pass where E4M3 was meant (TransformerEngine #2754)",
        plant=_wrong_format,
    ),
    Fault(
        name="data_spike",
        code="F125",
        description="a bad batch: for some steps the labels are what the model holds least likely (pytorch #150859)",
        options={"length": 1, "factor": 8.0},
        needs_module=False,
        plant=_data_spike,
    ),
):
    FAULTS.add(_fault.name, _fault)

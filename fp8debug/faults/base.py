"""Every failure mode on demand: ``inject()`` plants one in a model with Fp8Linear modules, so that rules can be seen to fire.

A fault changes how one module's operands are quantized, or what reaches the module, from a given step on; nothing else. The
numbers in brackets are those of the catalogue in docs/rules.md; each description cites where the fault was met.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from fp8debug.kernels.dispatch import Operand
from fp8debug.linear import Fp8Linear
from fp8debug.observer.attributes import COMPUTED, stored
from fp8debug.observer.optimizer_hooks import after_any_optimizer
from fp8debug.recipes import Cast
from fp8debug.registry import Registry
from fp8debug.types import OPERAND_SITES, Gemm, Quantized, TensorRole

#: What an option such as ``tensor`` may name, and options whose whole numbers begin at 0.
OPERAND_NAMES = tuple(dict.fromkeys(str(tensor) for _, tensor in OPERAND_SITES))
NUMBERED_FROM_0 = ("rank", "from_microbatch", "fill")

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
    plant: Callable[[Target], Callable[[], None]]


@dataclass
class Target:
    """Target of a fault: the model, the module, from which step on, with which options."""

    model: nn.Module
    module: nn.Module
    name: str
    step: int
    options: dict[str, Any]
    clock: Clock

    @property
    def active(self) -> bool:
        """True if the step under way is one at which the fault acts."""
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

    @property
    def weight(self) -> Tensor:
        """The module's weight.

        Raises:
            UsageError: the module does not run in FP8, or it computes its weight, so that a fault cannot be put into it.
        """
        weight = stored(self.linear, "weight")
        if not isinstance(weight, Tensor):
            raise UsageError(f"{self.name} has no weight of its own: {COMPUTED}; plant this fault in another module")
        return weight


def run_as_others(where: Target, hint: str, default: str) -> Callable[[], None]:
    """Turn a Linear in high precision into an Fp8Linear of the model's own recipe, or of the default; return how to undo it.

    Raises:
        UsageError: it runs in a low precision already; the message ends with the hint.
    """
    module = where.module
    if isinstance(module, Fp8Linear) and not module.recipe.is_high_precision:
        raise UsageError(f"{where.name} runs in {hint}")
    others = [m.recipe for m in where.model.modules() if isinstance(m, Fp8Linear) and not m.recipe.is_high_precision]
    assert isinstance(module, nn.Linear)
    kind, attributes = type(module), dict(module.__dict__)
    Fp8Linear.adopt(module, others[0] if others else default)

    def undo() -> None:
        module.__class__ = kind
        module.__dict__.clear()
        module.__dict__.update(attributes)

    return undo


class Clock:
    """Counts the optimizer steps of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.step = 0
        self._params = {id(p) for p in model.parameters()}
        self.stop = after_any_optimizer(self._tick)

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
        UsageError: module is missing, or does not run in FP8; an argument or option of another kind or out of range.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model with Fp8Linear modules, got {type(model).__name__}")
    if not isinstance(name, str) or not isinstance(module, str | None):
        raise UsageError(f"the name of a fault and the FQN of a module are strings, got {name!r} and module={module!r}")
    if not isinstance(step, int) or step < 0:
        raise UsageError(f"step is the number of the first step at which the fault acts, 0 or more, got {step!r}")
    fault = FAULTS.get(name)
    for key in options:
        if key not in fault.options:
            raise UnknownNameError(f"option of {name}", key, fault.options)
        _check_option(fault, key, options[key])
    target = model
    if fault.needs_module:
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        if module is None:
            raise UsageError(f"fault {name!r} needs module=, the FQN of a Linear such as {next(iter(linears), 'none')!r}")
        if module not in linears:
            raise NoMatchError("module", module, linears)
        target = linears[module]
    clock = Clock(model)
    where = Target(model, target, module or "", step, {**fault.options, **options}, clock)
    try:
        return Injection(fault, [clock.stop, fault.plant(where)])
    except BaseException:
        clock.stop()
        raise


def _check_option(fault: Fault, name: str, value: Any) -> None:
    """Look at an option before anything is planted: a wrong one would end the training, or plant nothing.

    Raises:
        UsageError: it is not of its default's kind.
    """
    default = fault.options[name]
    if isinstance(default, str):
        if value not in OPERAND_NAMES:
            raise UnknownNameError(f"{name} of {fault.name}", str(value), OPERAND_NAMES)
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and "log2" in name and value > 127:
        raise UsageError(f"{name} of {fault.name} is a power of two that FP32 holds, at most 127, got {value!r}")
    if isinstance(default, float):
        if not is_number or not 0 < value < math.inf:
            raise UsageError(f"{name} of {fault.name} is a positive number such as {default:g}, got {value!r}")
    else:
        least = 0 if name in NUMBERED_FROM_0 else 1
        if not is_number or not isinstance(value, int) or not least <= value < 2**31:
            raise UsageError(f"{name} of {fault.name} is a whole number of at least {least}, such as {default}, got {value!r}")


class Layer:
    """Layer that a fault puts over an Fp8Linear's ``distortion`` or ``summation``; they stack, and are removed in any order.

    Args:
        linear: the module.
        place: the attribute.
        act: what is called there, with the layer before the arguments.

    Attributes:
        inner: what was there before.
        is_in_force: until it is removed.
    """

    def __init__(self, linear: Fp8Linear, place: str, act: Callable[..., Any]) -> None:
        self.inner: Callable[..., Any] | None = getattr(linear, place)
        self.is_in_force = True
        self._linear, self._place, self._act = linear, place, act
        setattr(linear, place, self)

    def __call__(self, *args: Any) -> Any:
        """Act in the place of what was there."""
        return self._act(self, *args)

    def remove(self) -> None:
        """End it, and take away all that have ended and lie on top."""
        self.is_in_force = False
        while isinstance(top := getattr(self._linear, self._place), Layer) and not top.is_in_force:
            setattr(self._linear, self._place, top.inner)


def distort(where: Target, change: Change, *keys: Key, configured: bool = False) -> Callable[[], None]:
    """Replace how some operands of the target are quantized, on top of what is planted there already.

    With ``configured`` the fault is one of configuration: it ends for an operand that a fallback gives another cast.
    """
    planted = where.linear.recipe.casts

    def distortion(layer: Layer, which: Gemm, role: TensorRole, x: Tensor, cast: Cast | None, ordinary: Ordinary) -> Operand:
        def below(x: Tensor, cast: Cast | None) -> Operand:
            found: Operand = layer.inner(which, role, x, cast, ordinary) if layer.inner else ordinary(x, cast)
            return found

        cured = cast is None or (configured and cast is not planted[which, role])
        if layer.is_in_force and where.active and (which, role) in keys and cast is not None and not cured:
            return change(x, cast, below, where.options)
        return below(x, cast)

    return Layer(where.linear, "distortion", distortion).remove


def undo_all(*steps: Callable[[], object]) -> Callable[[], None]:
    """Return what takes back several things, in this order."""

    def undo() -> None:
        for step in steps:
            step()

    return undo


def quantized(operand: Operand) -> tuple[Quantized, Cast]:
    """Return an operand that is known to be quantized."""
    assert isinstance(operand, tuple)
    return operand


#: The operands that faults act on.
INPUT: Key = (Gemm.FPROP, TensorRole.INPUT)
WEIGHTS: tuple[Key, ...] = ((Gemm.FPROP, TensorRole.WEIGHT), (Gemm.DGRAD, TensorRole.WEIGHT))
FORWARD: tuple[Key, ...] = (INPUT, WEIGHTS[0])

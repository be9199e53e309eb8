"""Record the size of an optimizer's step: of each watched weight a sample of elements before and after it, and its state.

With w and w' a weight before and after the step, u = w' - w is the update that happened. Where the optimizer is of a kind
whose formula is known (Adam and AdamW, SGD), the intended update d is computed again from its state in FP32:

    Adam:  d = -lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)  [- lr * weight_decay * w, of AdamW]
    SGD:   d = -lr * b, with b the momentum buffer, or the gradient [+ weight_decay * w]

Rounding to the weight's own dtype loses an element's update where d is not 0 and u is. A spacing is the distance of two
neighbours of that dtype at w: an update below half of it is lost. Nothing of the training is changed: views, stacks and
reductions on the weight's device, of at most ``NUM_SAMPLED`` elements a weight, at sampled steps alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fp8debug.adapters.watching.coverage import Candidate
from fp8debug.kernels.sampling import shift_of
from fp8debug.observer.host_copy import HostCopy
from fp8debug.observer.observer import GradientSums
from fp8debug.observer.rechecks import GIVEN

#: Elements of a weight that are looked at: a share is known to 0.5 % of it, a root mean square to 1 %.
NUM_SAMPLED = 8192
#: Columns that are measured, in order.
MEASURED = (
    *("num_moved", "num_grad", "num_intended", "num_lost", "num_moment", "num_moment_zero", "num_moment_clipped"),
    *("sum_weight2", "sum_update2", "sum_intended2", "sum_intended_update", "sum_spacing_log2", "sum_grad2", "sum_moment2"),
    *("max_update", "num_steps", "num_bf16"),
)
#: Words in the names of a state that holds the weight in FP32, or what rounding it lost (Kahan's sum).
_CARRIES = ("master", "comp", "kahan", "shift", "fp32")
#: Names of second moments: of other states, one that has no negative element counts as one.
_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


@dataclass(frozen=True)
class Updates:
    """Rows of ``updates`` on their way to the host: what is known of each weight there, and its measured columns."""

    columns: Mapping[str, Any]
    values: HostCopy | Tensor  #: float64 ``[rows, len(MEASURED) + len(more)]``, NaN where nothing is known
    more: tuple[str, ...] = GIVEN  #: names of the columns after ``MEASURED``

    def is_done(self) -> bool:
        """Return whether the values have arrived."""
        return not isinstance(self.values, HostCopy) or self.values.is_done()

    def rows(self, step: int) -> dict[str, Any]:
        """Return the columns as the writer takes them; waits for values that have not arrived."""
        measured = self.arrived()
        absent = self.columns["absent"]
        made = {name: list(self.columns[name]) for name in self.columns if name != "absent"}
        for name, numbers in measured.items():
            whole = name.startswith("num_")
            made[name] = [None if name in absent or math.isnan(x) else int(x) if whole else x for x in numbers]
        return {"step": [step] * len(made["num_sampled"]), **made}

    def arrived(self) -> dict[str, list[float]]:
        """Return the measured columns; waits for values that have not arrived."""
        values = self.values.result() if isinstance(self.values, HostCopy) else self.values
        return dict(zip((*MEASURED, *self.more), values.T.tolist(), strict=True))


class SampledWeight(NamedTuple):
    """One weight of a step: its module, parameter, and how its elements are sampled."""

    module: str
    param: Tensor
    local: Tensor
    stride: int
    num: int


class _Formula(NamedTuple):
    """Update formula of a parameter group; numbers that a program keeps on its device stay there."""

    kind: str  #: adam, sgd or empty where it is not known
    lr: Any
    step: Any = None
    betas: tuple[Any, Any] = (0.0, 0.0)
    eps: Any = 0.0
    decay: Any = 0.0
    sign: float = 1.0  #: of a gradient that no state holds; -1 where the optimizer maximizes


@dataclass
class Stack:
    """Weights that are measured together: one device, dtype, number of sampled elements, formula and kinds of state."""

    weights: list[SampledWeight] = field(default_factory=list)
    before: Tensor | None = None  #: their elements before the step
    amax_before: Tensor | None = None  #: largest magnitude of each before the step, where it is recorded


def weights_of(candidates: Iterable[Candidate]) -> dict[int, str]:
    """Return the FQN of the module of each watched weight, by the id of its parameter."""
    names: dict[int, str] = {}
    for c in candidates:
        if c.reason is None and c.adapter is not None:
            named = c.module.named_parameters(recurse=False)
            own: list[Tensor] = [p for name, p in named if p.ndim >= 2 and name.startswith("weight")]
            for p in own or [p for p in (vars(c.module).get("weight"),) if isinstance(p, Tensor)]:
                names.setdefault(id(p), c.fqn)
    return names


class UpdateRecorder:
    """Measures what an optimizer step does to the weights that it holds.

    Args:
        names: of the weights, by the id of their parameters.
    """

    rows: ClassVar[type[Updates]] = Updates
    more: ClassVar[tuple[str, ...]] = GIVEN

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._begun: tuple[int, Any, int, dict[tuple[Any, ...], Stack]] | None = None
        #: Number of the step in which each optimizer stepped last.
        self._stepped: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._given: dict[int, Tensor] = {}  # by parameter: what the optimizer gets of the step's passes, as ``GIVEN``
        self._rates: dict[int, Any] = {}  # by group: learning rate when the step began

    def begin(self, optimizer: torch.optim.Optimizer, step: int, step_count: int, sums: Mapping[str, GradientSums]) -> None:
        """Keep the sampled elements of the weights as they are before an optimizer step.

        Args:
            optimizer: which is about to step.
            step: number of the step under way, which places the sample.
            step_count: of the observer; a step that another one began meanwhile is dropped.
            sums: of the gradients of the step's backward passes, by module.
        """
        self._given = {}
        follows = self._stepped.get(optimizer) in (step - 1, step)
        stacks: dict[tuple[Any, ...], Stack] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                module = self._names.get(id(p))
                local = local_values(p) if module is not None else None
                if module is None or local is None or local.layout != torch.strided or local.is_meta:
                    continue
                if not local.is_contiguous() or not local.numel():
                    continue
                count = min(NUM_SAMPLED, local.numel())
                weight = SampledWeight(module, p, local, _stride(local, count), count)
                stack = stacks.setdefault((id(group), local.device, local.dtype, count), Stack())
                stack.weights.append(weight)
                if module in sums and (given := sums[module].given(p)) is not None and not is_one_of_many():
                    if not follows:
                        given[GIVEN.index("sum_before2")] = math.nan
                    self._given[id(p)] = given
        stacks = self._chosen(stacks)
        for stack in stacks.values():
            stack.before = _stacked([_sampled(w.local, w, step) for w in stack.weights])
            stack.amax_before = self._amax(stack.weights, stack.before)
        self._begun = (step_count, optimizer, step, stacks) if stacks else None
        self._rates = {id(group): group.get("lr") for group in optimizer.param_groups}

    def note(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Note that an optimizer has stepped, in a sampled step or not."""
        self._stepped[optimizer] = step

    def end(self, optimizer: torch.optim.Optimizer, step_count: int) -> Iterator[Updates]:
        """Yield the rows of an optimizer step that was begun, their copies to the host under way."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != step_count or begun[1] is not optimizer:
            return
        groups = {id(group): group for group in optimizer.param_groups}
        for (key, *_), stack in begun[3].items():
            group, before = groups.get(key), stack.before
            if group is None or before is None:
                continue
            rates = [rate for rate in (self._rates.get(key), group.get("lr")) if isinstance(rate, int | float)]
            if len(rates) == 2:  # a hook of the program may raise it around the step
                group = {**group, "lr": max(rates)}
            kinds: dict[tuple[Any, ...], list[int]] = {}
            states: list[dict[str, Tensor]] = []
            on_device: dict[int, Tensor] = {}  # by place: the number of steps, where a program counts it there
            for place, weight in enumerate(stack.weights):
                kept = optimizer.state.get(weight.param, {})
                found = {name: local for name, x in kept.items() if (local := state_values(x, weight.local)) is not None}
                formula = _formula(optimizer, group, kept, found)
                states.append(found)
                grad = state_values(weight.param.grad, weight.local)
                carries = any(word in str(name).lower() for name in kept for word in _CARRIES)
                names = tuple((name, found[name].dtype) for name in found)
                if isinstance(formula.step, Tensor):
                    on_device[place], formula = formula.step, formula._replace(step=None)
                kinds.setdefault((formula, names, None if grad is None else grad.dtype, carries), []).append(place)
            for (formula, names, has_grad, carries), places in kinds.items():
                weights = [stack.weights[place] for place in places]
                own = before if len(places) == len(stack.weights) else _stacked([before[place] for place in places])
                if steps := [on_device[place].view(1) for place in places if place in on_device]:
                    formula = formula._replace(step=torch.stack(steps))
                state = {name: _stacked([_sampled(states[i][name], stack.weights[i], begun[2]) for i in places])
                         for name, _ in names}  # fmt: skip
                grads = None
                if has_grad is not None:
                    held = [state_values(w.param.grad, w.local) for w in weights]
                    grads = _stacked([_sampled(g, w, begun[2]) for g, w in zip(held, weights, strict=True) if g is not None])
                after = _stacked([_sampled(w.local, w, begun[2]) for w in weights])
                values, absent = _measured(own, after, grads, state, formula)
                values = torch.cat([values, self._more(stack, places, after, grads)], 1)
                yield self.rows(
                    {
                        **self._facts(weights, names),
                        "module": [w.module for w in weights],
                        "optimizer": [type(optimizer).__name__] * len(weights),
                        "dtype": [str(own.dtype).removeprefix("torch.")] * len(weights),
                        "keeps_precision": [carries] * len(weights),
                        "lr": [_number(formula.lr)] * len(weights),
                        "beta1": [_number(formula.betas[0]) if formula.kind == "adam" else None] * len(weights),
                        "beta2": [_number(formula.betas[1]) if formula.kind == "adam" else None] * len(weights),
                        "fan_in": [w.param.shape[-1] if w.param.ndim else 1 for w in weights],
                        "numel": [w.local.numel() for w in weights],
                        "num_sampled": [w.num for w in weights],
                        "absent": absent,
                    },
                    HostCopy(values) if values.is_cuda else values,
                    self.more,
                )

    def _chosen(self, stacks: dict[tuple[Any, ...], Stack]) -> dict[tuple[Any, ...], Stack]:
        """Return those of the optimizer's weights that are measured at this step."""
        return stacks

    def _amax(self, weights: Sequence[SampledWeight], sampled: Tensor) -> Tensor | None:
        """Return the largest magnitude of some weights; None where it is not recorded."""
        return None

    def _more(self, stack: Stack, places: Sequence[int], after: Tensor, grads: Tensor | None) -> Tensor:
        """Return the columns after ``MEASURED`` of the weights at some places of a stack."""
        unknown = torch.full((len(GIVEN),), math.nan, dtype=torch.float64, device=after.device)
        return torch.stack([self._given.get(id(stack.weights[place].param), unknown) for place in places])

    def _facts(self, weights: Sequence[SampledWeight], states: Sequence[tuple[str, torch.dtype]]) -> dict[str, Any]:
        """Return more columns that the host knows; of the optimizer's state names and dtypes are given."""
        return {}


def _measured(
    before: Tensor, after: Tensor, grad: Tensor | None, state: Mapping[str, Tensor], formula: _Formula
) -> tuple[Tensor, frozenset[str]]:
    """Return the columns ``MEASURED`` of some weights ``[rows, elements]``, and the names of those that cannot be known."""
    w, w1 = before.float(), after.float()
    update = w1 - w
    moved = update != 0
    g = None if grad is None else grad.float()
    values = {name: x.float() for name, x in state.items()}
    intended = _intended(w, g, values, formula)
    zero = torch.zeros(w.shape[0], dtype=torch.float64, device=w.device)
    found = {
        "num_moved": moved.sum(1),
        "sum_weight2": w.double().square().sum(1),
        "sum_update2": update.double().square().sum(1),
        "max_update": update.abs().amax(1),
    }
    if before.dtype == torch.float32:
        found["num_bf16"] = (w.bfloat16().float() == w).sum(1)
    if g is not None:
        found |= {"num_grad": (g != 0).sum(1), "sum_grad2": g.double().square().sum(1)}
    if intended is not None:
        wanted = intended != 0
        info = torch.finfo(before.dtype)
        exponent = torch.frexp(w.abs().clamp(min=info.tiny))[1] - 1
        spacing = math.log2(info.eps) + exponent  # log2 of the distance to the next value of the dtype
        distance = intended.abs().clamp(min=1e-38).log2() - spacing
        d = intended.double()
        found |= {
            "num_intended": wanted.sum(1),
            "num_lost": (wanted & ~moved).sum(1),
            "sum_intended2": d.square().sum(1),
            "sum_intended_update": (d * update.double()).sum(1),
            "sum_spacing_log2": torch.where(wanted, distance, 0).double().sum(1),
        }
    first = next((values[name] for name in ("exp_avg", "momentum_buffer") if name in values), None)
    if first is not None:
        found["sum_moment2"] = first.double().square().sum(1)
    if state:
        found["num_moment_clipped"] = torch.stack([_clipped(x) for x in state.values()]).sum(0)
        found["num_moment"] = torch.full_like(zero, len(state) * w.shape[1])
    if g is not None and values:
        found["num_moment_zero"] = torch.stack([_underflowed(name, x, g) for name, x in values.items()]).sum(0)
    if formula.step is not None:  # a number, or one for each weight on its device
        counted = formula.step
        found["num_steps"] = counted.view(-1).double() if isinstance(counted, Tensor) else torch.full_like(zero, float(counted))
    absent = frozenset(name for name in MEASURED if name not in found)
    return torch.stack([found.get(name, zero).double() for name in MEASURED], 1), absent


def _intended(w: Tensor, g: Tensor | None, state: Mapping[str, Tensor], formula: _Formula) -> Tensor | None:
    """Return the update that the formula asks for, in FP32; None where the formula is not known."""
    if formula.kind == "adam":
        beta1, beta2 = formula.betas
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        root = (second / (1 - beta2**formula.step)).sqrt() + formula.eps
        step: Tensor = -formula.lr * (state["exp_avg"] / (1 - beta1**formula.step) / root + formula.decay * w)
        return step
    if formula.kind == "sgd":
        if "momentum_buffer" in state:
            g, formula = state["momentum_buffer"], formula._replace(sign=1.0, decay=0.0)
        intended: Tensor | None = None if g is None else -formula.lr * (formula.sign * g + formula.decay * w)
        return intended
    return None


def _formula(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], kept: Mapping[str, Any], found: Mapping[str, Tensor]
) -> _Formula:
    """Return what an optimizer does with one weight, from the names that torch's optimizers give to their settings and state."""
    lr, name = group.get("lr"), type(optimizer).__name__.lower()
    sign = -1.0 if group.get("maximize") else 1.0
    decay = group.get("weight_decay") or 0.0
    if lr is None:
        return _Formula("", None)
    if {"exp_avg", "exp_avg_sq"} <= found.keys() and {"betas", "eps"} <= group.keys() and "adam" in name:
        step = kept.get("step", group.get("step"))
        if (
            step is None
            or (isinstance(step, Tensor) and step.numel() != 1)
            or any(x in name for x in ("nadam", "radam", "adamax"))
        ):
            return _Formula("", lr)
        if isinstance(step, Tensor) and step.device.type == "cpu":
            step = float(step)
        is_apart = bool(group.get("decoupled_weight_decay", "adamw" in name or getattr(optimizer, "adam_w_mode", False)))
        return _Formula("adam", lr, step, tuple(group["betas"]), group["eps"], decay if is_apart else 0.0)
    if name == "sgd" and not group.get("nesterov"):
        return _Formula("sgd", lr, decay=decay, sign=sign)
    return _Formula("", lr)


def _clipped(x: Tensor) -> Tensor:
    """Return per row how many elements of a state are not finite, or are the greatest number of its dtype."""
    most = torch.finfo(x.dtype).max
    return (~(x.float().abs() < most)).sum(1)


def _underflowed(name: str, x: Tensor, g: Tensor) -> Tensor:
    """Return per row how many second moments are 0 under a gradient that is not; 0 for a state that is no second moment."""
    is_second = torch.ones_like(x[:, 0], dtype=torch.bool) if name in _SECOND else (x >= 0).all(1) & (x > 0).any(1)
    return ((x == 0) & (g != 0)).sum(1) * is_second


def is_one_of_many() -> bool:
    """Return whether other ranks may add to the gradients of this one before an optimizer steps."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def local_values(x: Any) -> Tensor | None:
    """Return the values of a tensor that lie here, the own shard of a DTensor; None for a class of another kind."""
    local = getattr(x, "_local_tensor", x)
    found: Tensor | None = local.detach() if type(local) in (Tensor, torch.nn.Parameter) else None
    return found


def state_values(x: Any, weight: Tensor) -> Tensor | None:
    """Return what an optimizer keeps, or a gradient, if it has one number for each element of the weight, in the same order."""
    local = local_values(x)
    if local is None or local.layout != torch.strided or local.shape != weight.shape or not local.is_floating_point():
        return None
    return local if local.device == weight.device and local.is_contiguous() else None


def _stride(x: Tensor, count: int) -> int:
    """Return the distance of two sampled elements: coprime to the number of columns, so that all columns are met."""
    stride = max(1, x.numel() // count)
    while x.ndim and math.gcd(stride, x.shape[-1]) > 1:
        stride -= 1
    return stride


def _sampled(x: Tensor, weight: SampledWeight, step: int) -> Tensor:
    return x.view(-1)[shift_of(step, weight.stride) :: weight.stride][: weight.num]


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of one length as a tensor of their own; bytes of FP8, which not every device can join."""
    if rows[0].element_size() == 1:
        return torch.stack([row.view(torch.uint8) for row in rows]).view(rows[0].dtype)
    return torch.stack(list(rows))


def _number(x: Any) -> float | None:
    """Return a number of the host; None for one on a device, which would have to be waited for."""
    if isinstance(x, Tensor):
        return float(x) if x.device.type == "cpu" and x.numel() == 1 else None
    return float(x) if isinstance(x, int | float) else None

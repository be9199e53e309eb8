"""Census of the parameters and buffers that no watched GEMM multiplies by: norms, embeddings, biases, heads, routers.

At sampled steps alone each gets a row of ``parameters``: which optimizer holds it, whether it has a gradient, whether it and the
gradient are finite, and what the optimizer's step did to it, measured as for weights (``optimizer_steps``). Largest magnitudes
are of the whole tensor, everything else of at most ``NUM_SAMPLED`` elements. A parameter that no optimizer holds is looked at
when the step's first optimizer begins; one without requires_grad once. Everything stays on the device until its copy has
arrived. What a sampled step launches has a bound: ``MAX_STACKS`` stacks of an optimizer and of buffers each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from fp8debug.adapters.watching.coverage import Candidate, named_modules, role_of
from fp8debug.adapters.watching.optimizer_steps import (
    NUM_SAMPLED,
    SampledWeight,
    Stack,
    UpdateRecorder,
    Updates,
    is_one_of_many,
    local_values,
    state_values,
    weights_of,
)
from fp8debug.observer.host_copy import HostCopy
from fp8debug.types import match_fqn

#: Columns after ``MEASURED``: largest magnitudes of whole tensors, NaN or Inf where one element is; ``UNKNOWN`` of no tensor.
EXTREMES = ("amax_before", "amax", "grad_amax")
UNKNOWN = -1.0
#: Stacks of one optimizer's parameters, and of buffers, that are measured in a sampled step; the others' turn is in later ones.
MAX_STACKS = 24
#: Measured columns of a buffer.
_OF_BUFFERS = ("num_moved", "sum_weight2", "amax_before")


#: By what they are stacked by: names, buffers, and their values that lie here.
_Buffers = dict[tuple[Any, ...], list[tuple[str, Tensor, Tensor]]]


class ParameterRows(Updates):
    """Rows of ``parameters`` that an optimizer step gave."""

    def rows(self, step: int) -> dict[str, Any]:
        """Return the columns as the writer takes them; waits for values that have not arrived."""
        made = super().rows(step)
        made["parameter"] = made.pop("module")
        del made["fan_in"]
        arrived = self.arrived()
        for name in EXTREMES:
            made |= _told(name, arrived[name])
        return made


@dataclass(frozen=True)
class OtherRows:
    """Rows of ``parameters`` without an optimizer step: what the host knows of each, and some measured columns."""

    columns: Mapping[str, list[Any]]
    values: HostCopy | Tensor  #: float64 ``[rows, len(names)]``, ``UNKNOWN`` where nothing is known
    names: tuple[str, ...]
    taken: frozenset[str] = frozenset()  #: parameters that have a row of an optimizer's

    def is_done(self) -> bool:
        """Return whether the values have arrived."""
        return not isinstance(self.values, HostCopy) or self.values.is_done()

    def rows(self, step: int) -> dict[str, Any]:
        """Return the columns as the writer takes them; waits for values that have not arrived."""
        values = self.values.result() if isinstance(self.values, HostCopy) else self.values
        made: dict[str, list[Any]] = {name: list(column) for name, column in self.columns.items()}
        for name, numbers in zip(self.names, values.T.tolist(), strict=True):
            if name in EXTREMES:
                made |= _told(name, numbers)
            else:
                known = [None if x == UNKNOWN or math.isnan(x) else x for x in numbers]
                made[name] = [int(x) if x is not None and name.startswith("num_") else x for x in known]
        kept = [place for place, name in enumerate(made["parameter"]) if name not in self.taken]
        made = {name: [column[place] for place in kept] for name, column in made.items()}
        return {"step": [step] * len(kept), **made}


class ParameterCensus(UpdateRecorder):
    """Measures parameters and floating buffers of a model that are no weights of watched modules.

    Args:
        roots: the models.
        candidates: modules of the watch, whose weights are left out.
        include: globs; the name of a parameter, or the FQN of its module, has to match one.
        exclude: globs that neither may match.
    """

    rows: ClassVar[type[Updates]] = ParameterRows
    more = EXTREMES

    def __init__(
        self,
        roots: Sequence[nn.Module] = (),
        candidates: Iterable[Candidate] = (),
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
    ) -> None:
        self._own: dict[int, str] = {}
        super().__init__(self._own)
        candidates = list(candidates)
        self._modules = named_modules(roots)
        self._linears = {id(c.module) for c in candidates}
        self._watched = set(weights_of(candidates))
        self._filters = tuple(include), tuple(exclude)
        self._is_chosen: dict[str, bool] = {}
        self._refs: dict[int, ref[Tensor]] = {}
        self._roles: dict[str, str] = {}
        self._held: dict[int, ref[Tensor]] = {}  # parameters that an optimizer has stepped with
        self._frozen: dict[int, ref[Tensor]] = {}  # without requires_grad, that have their row
        self._step_count = self._refresh_count = -1
        self._turn = 0
        self._told: set[str] = set()  # names that have a row of this step
        self._others: list[OtherRows] = []
        #: By device, dtype and number of elements: buffers with their versions, and their values at the last sampled step.
        self._buffers: dict[tuple[Any, ...], tuple[tuple[int, ...], list[int], Tensor]] = {}
        self._large: dict[int, tuple[ref[Tensor], int]] = {}  # versions of buffers that are measured whole when written

    def see(self, optimizer: torch.optim.Optimizer, step: int, step_count: int) -> None:
        """Look at the parameters before an optimizer step.

        Args:
            optimizer: which is about to step.
            step: number of the step under way, which places the sample.
            step_count: of the observer.
        """
        if step_count != self._refresh_count:
            self._refresh_count = step_count
            self._refresh()
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in self._own or id(p) in self._watched for p in given):
            return  # of another model
        is_first = step_count != self._step_count
        if is_first:
            self._step_count, self._told, self._others = step_count, set(), []
            self._turn += 1
        self._held.update((id(p), ref(p)) for p in given if id(p) in self._own)
        self.begin(optimizer, step, step_count, {})
        if is_first:
            self._others = [*self._measure_others(), *self._measure_buffers()]

    def end(self, optimizer: torch.optim.Optimizer, step_count: int) -> Iterator[Updates]:
        """Yield the rows of an optimizer step that was begun, their copies to the host under way."""
        for found in super().end(optimizer, step_count):
            self._told.update(found.columns["module"])
            yield found

    def finish(self, step_count: int) -> list[OtherRows]:
        """Return the rows of parameters with which no optimizer has stepped in this step, and of buffers."""
        others, self._others = self._others, []
        if step_count != self._step_count:
            return []
        taken = frozenset(self._told)
        return [OtherRows(found.columns, found.values, found.names, taken) for found in others]

    def _refresh(self) -> None:
        """Name the parameters as the modules hold them now: sharding and new layers replace them."""
        for key in [key for key, held in self._refs.items() if held() is None]:
            for known in (self._refs, self._own, self._held, self._frozen):
                known.pop(key, None)
        for module, fqn in self._modules:
            for name, p in module._parameters.items():
                if p is None or id(p) in self._own or id(p) in self._watched:
                    continue
                local = local_values(p)
                whole = f"{fqn}.{name}".lstrip(".")
                if local is None or local.is_meta or not local.is_floating_point() or not self._chooses(fqn, whole):
                    continue
                self._own[id(p)], self._refs[id(p)] = whole, ref(p)
                linears = {id(p)} if id(module) in self._linears else set()
                self._roles[whole] = role_of(module, name, p, linears)

    def _chooses(self, fqn: str, name: str) -> bool:
        if name not in self._is_chosen:
            include, exclude = self._filters
            matches = [any(match_fqn((fqn, name), pattern) for pattern in patterns) for patterns in (include, exclude)]
            self._is_chosen[name] = matches == [True, False]
        return self._is_chosen[name]

    def _measure_others(self) -> Iterator[OtherRows]:
        """Yield rows of the parameters that no optimizer has held so far."""
        groups: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        for key, held in self._refs.items():
            p = held()
            if p is None or key in self._held or (not p.requires_grad and key in self._frozen):
                continue
            local = local_values(p)
            if local is None or not local.numel() or local.element_size() < 2:
                continue
            if not p.requires_grad:
                self._frozen[key] = held
            grad = state_values(p.grad, local)
            groups.setdefault((local.device, local.dtype, None if grad is None else grad.dtype), []).append((p, local, grad))
        for (_, _, grad_dtype), found in groups.items():
            amax = _amax_of([local for _, local, _ in found])
            grads = [grad for *_, grad in found if grad is not None]
            grad_amax = torch.full_like(amax, UNKNOWN) if grad_dtype is None else _amax_of(grads)
            params = [p for p, *_ in found]
            columns: dict[str, list[Any]] = {
                "parameter": [self._own[id(p)] for p in params],
                "role": [self._roles[self._own[id(p)]] for p in params],
                "dtype": [_name(p.dtype) for p in params],
                "shape": [_shape(p) for p in params],
                "requires_grad": [p.requires_grad for p in params],
                "has_grad": [p.grad is not None for p in params],
                "numel": [local.numel() for _, local, _ in found],
            }
            values = torch.stack([amax, grad_amax], 1)
            yield OtherRows(columns, _to_host(values), ("amax_before", "grad_amax"))

    def _measure_buffers(self) -> Iterator[OtherRows]:
        """Yield rows of floating buffers: those of few elements at each sampled step, others once and when they were written."""
        small, large = self._find_buffers()
        for found in large.values():
            amax = _amax_of([local for *_, local in found])
            yield OtherRows(_columns_of(found), _to_host(amax[:, None]), ("amax_before",))
        kept = {}
        for key, found in _in_turn(small, self._turn).items():
            stack = torch.stack([local.reshape(-1) for *_, local in found])
            ids, versions = tuple(id(buffer) for _, buffer, _ in found), [buffer._version for _, buffer, _ in found]
            before = self._buffers.get(key)
            moved = torch.full((len(found),), UNKNOWN, dtype=torch.float64, device=stack.device)
            num_writes: list[int | None] = [None] * len(found)
            if before is not None and before[0] == ids:
                moved = (stack != before[2]).sum(1).double()
                if not is_one_of_many():  # else a copy from rank 0 is a write
                    num_writes = [max(0, new - old) for new, old in zip(versions, before[1], strict=True)]
            kept[key] = ids, versions, stack
            wide = stack.double()
            values = torch.stack([moved, wide.square().sum(1), wide.abs().amax(1)], 1)
            yield OtherRows({**_columns_of(found), "num_writes": num_writes}, _to_host(values), _OF_BUFFERS)
        self._buffers = kept

    def _find_buffers(self) -> tuple[_Buffers, _Buffers]:
        """Return the floating buffers of few elements, by device, dtype and size, and larger ones that were written."""
        small: _Buffers = {}
        large: _Buffers = {}
        seen: set[int] = set()
        for module, fqn in self._modules:
            for name, buffer in module._buffers.items():
                local = None if buffer is None else local_values(buffer)
                if local is None or buffer is None or id(buffer) in seen or not _is_readable(local):
                    continue
                seen.add(id(buffer))
                whole = f"{fqn}.{name}".lstrip(".")
                if not self._chooses(fqn, whole):
                    continue
                if local.numel() <= NUM_SAMPLED:
                    small.setdefault((local.device, local.dtype, local.numel()), []).append((whole, buffer, local))
                elif not self._has_measured(buffer):
                    self._large[id(buffer)] = ref(buffer), buffer._version
                    large.setdefault((local.device, local.dtype), []).append((whole, buffer, local))
        self._large = {key: known for key, known in self._large.items() if key in seen}
        return small, large

    def _has_measured(self, buffer: Tensor) -> bool:
        """Return whether a large buffer was measured since it was last written."""
        known = self._large.get(id(buffer))
        return known is not None and known[0]() is buffer and known[1] == buffer._version

    def _chosen(self, stacks: dict[tuple[Any, ...], Stack]) -> dict[tuple[Any, ...], Stack]:
        return _in_turn(stacks, self._turn)

    def _amax(self, weights: Sequence[SampledWeight], sampled: Tensor) -> Tensor | None:
        if weights[0].num == weights[0].local.numel():
            return sampled.float().abs().amax(1).double()
        return _amax_of([w.local for w in weights])

    def _more(self, stack: Stack, places: Sequence[int], after: Tensor, grads: Tensor | None) -> Tensor:
        weights = [stack.weights[place] for place in places]
        unknown = torch.full((len(places),), UNKNOWN, dtype=torch.float64, device=after.device)
        before, now = stack.amax_before, self._amax(weights, after)
        if before is not None and len(places) < len(stack.weights):
            before = torch.stack([before[place] for place in places])
        of_grad = None
        if grads is not None:
            held = [grad for w in weights if (grad := state_values(w.param.grad, w.local)) is not None]
            is_whole = weights[0].num == weights[0].local.numel()
            of_grad = grads.float().abs().amax(1).double() if is_whole else _amax_of(held)
        return torch.stack([unknown if x is None else x for x in (before, now, of_grad)], 1)

    def _facts(self, weights: Sequence[SampledWeight], states: Sequence[tuple[str, torch.dtype]]) -> dict[str, Any]:
        state = _name(states[0][1]) if states else None
        return {
            "role": [self._roles[w.module] for w in weights],
            "shape": [_shape(w.param) for w in weights],
            "state_dtype": [state] * len(weights),
            "requires_grad": [w.param.requires_grad for w in weights],
            "has_grad": [w.param.grad is not None for w in weights],
        }


def _told(name: str, numbers: Sequence[float]) -> dict[str, list[Any]]:
    """Return the largest magnitudes under a name, and under another what is not finite."""
    other = name.replace("amax", "nonfinite")
    finite = [x if x != UNKNOWN and math.isfinite(x) else None for x in numbers]
    return {name: finite, other: ["nan" if math.isnan(x) else "inf" if math.isinf(x) else None for x in numbers]}


def _amax_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of each of some tensors of one dtype, NaN where one element is: a read of each."""
    if tensors[0].element_size() < 2:  # which not every device can take the norm of
        return torch.full((len(tensors),), UNKNOWN, dtype=torch.float64, device=tensors[0].device)
    return torch.stack(list(torch._foreach_norm(list(tensors), math.inf))).double()


def _in_turn(found: Mapping[tuple[Any, ...], Any], turn: int) -> dict[tuple[Any, ...], Any]:
    """Return at most ``MAX_STACKS`` of some stacks, others at each turn."""
    items = list(found.items())
    if len(items) > MAX_STACKS:
        first = turn * MAX_STACKS % len(items)
        items = [*items[first:], *items[:first]][:MAX_STACKS]
    return dict(items)


def _is_readable(x: Tensor) -> bool:
    is_plain = x.layout == torch.strided and not x.is_meta and not x.is_inference()
    return is_plain and x.is_floating_point() and x.element_size() > 1 and x.numel() > 0


def _columns_of(found: Sequence[tuple[str, Tensor, Tensor]]) -> dict[str, list[Any]]:
    return {
        "parameter": [name for name, *_ in found],
        "role": ["buffer"] * len(found),
        "dtype": [_name(local.dtype) for *_, local in found],
        "shape": [_shape(buffer) for _, buffer, _ in found],
        "numel": [local.numel() for *_, local in found],
        "num_sampled": [local.numel() if local.numel() <= NUM_SAMPLED else None for *_, local in found],
    }


def _to_host(values: Tensor) -> HostCopy | Tensor:
    return HostCopy(values) if values.is_cuda else values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))

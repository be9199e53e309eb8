"""Training's forward beside inference's, for ``Watch.compare_inference``: how far the logits of one batch lie apart, and which
module parts first.

Sampled rows of each module's input and output are kept in both passes. A module's own difference, given the input that it got, is

    weight     |W_inference - W_training|^2 / |W_training|^2
    bias       |b_inference - b_training|^2 over the mean |Y_training|^2 of a row; a bias that is not there is 0
    training   |Y - (X @ W.T + b)|^2 / |Y|^2 of training's rows: the error of its casts and its GEMM
    inference  the same of inference's rows
    moved      share of sampled elements of inference's weight that changed since the comparison before, of those of training's
    toward     cosine of that change with the way from inference's weight then to training's weight now

Modules of the two passes belong together by their names below the first module that each pass calls.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from fp8debug.adapters.watching.compiled import is_compile_in_use
from fp8debug.errors import UsageError
from fp8debug.interruptions import is_ours
from fp8debug.linear import Fp8Linear
from fp8debug.observer.attributes import stored
from fp8debug.recipes import get_recipe
from fp8debug.types import plain_name

#: Rows of each module's input and output that are compared.
MAX_ROWS = 128
#: What is known of one module, in the order of the numbers of ``BatchComparison.values``; ``rows`` is 1 where both saw as many.
MEASURES = (
    *("weight", "weight_gain", "bias", "bias_gain", "training", "training_gain", "inference", "inference_gain", "input", "rows"),
    *("moved", "toward"),
)
#: Elements of each weight that are kept from one comparison to the next.
NUM_KEPT = 1024


@dataclass(frozen=True)
class BatchComparison:
    """Both passes of one batch.

    Attributes:
        columns: the columns ``inference_*`` of the steps table as scalar tensors.
        modules: FQN of the compared modules in execution order; empty where the passes were not seen by module.
        values: FP32 ``[modules, len(MEASURES)]``, NaN where something was not measured; None without modules.
        problem: why the modules could not be compared, where that failed.
        weights: by module, sampled elements of training's and of inference's weight, FP32 ``[2, elements]``.
    """

    columns: dict[str, Tensor]
    modules: list[str] = field(default_factory=list)
    values: Tensor | None = None
    problem: str | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Seen:
    """One module's first call in a pass: sampled rows of its input and output."""

    module: nn.Module
    x: Tensor | None
    y: Tensor
    num_rows: int


class _Pass:
    """The modules that one forward pass calls, in order; no hook is left on them.

    A path of inference may call parts of its model before the whole (to calibrate a scale), or another model: what counts is the
    outermost module with the most calls, and in it what it called itself.
    """

    def __init__(self) -> None:
        self._roots: list[nn.Module] = []  # outermost modules that were called, in order
        self._inside: set[int] = set()  # ids of their modules
        self.calls: dict[int, _Seen] = {}
        self._hooked: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._thread = threading.get_ident()

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Note the modules that are called; nothing where code was compiled, whose guards a hook would invalidate."""
        if is_compile_in_use():
            yield
            return
        handle = register_module_forward_pre_hook(self._begin)
        try:
            yield
        finally:
            handle.remove()
            for one in self._handles:
                one.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if id(module) not in self._inside:
            self._begin_outermost(module)
        if id(module) not in self._hooked:
            self._hooked.add(id(module))
            if any(True for _ in module.parameters(recurse=False)):
                # the last of its hooks: those of others may replace the output
                self._handles.append(module.register_forward_hook(self._end))

    def _begin_outermost(self, module: nn.Module) -> None:
        """Note a module that none of the outermost ones holds; parts of it that were called before it are forgotten."""
        inside = {id(one) for one in module.modules()}
        self._roots = [*(root for root in self._roots if id(root) not in inside), module]
        self._inside |= inside
        self.calls = {key: seen for key, seen in self.calls.items() if key not in inside}

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if id(module) in self.calls or type(output) is not Tensor or output.dim() < 2 or not output.is_floating_point():
            return
        x = next((a for a in args if type(a) in (Tensor, nn.Parameter) and a.is_floating_point() and a.dim() > 1), None)
        self.calls[id(module)] = _Seen(module, None if x is None else _rows(x), _rows(output), output.numel() // output.shape[-1])

    def by_name(self) -> dict[str, _Seen]:
        """Return the calls by FQN below the outermost module with the most of them, in execution order."""
        found: dict[str, _Seen] = {}
        for root in self._roots:
            names = {id(module): plain_name(name) for name, module in root.named_modules(remove_duplicate=False)}
            called = {names[key]: seen for key, seen in self.calls.items() if key in names}
            found = called if len(called) > len(found) else found
        return found


def as_called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward, given one batch as trainers have it: a mapping of its keywords is one argument."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
        return args, kwargs
    parameters = list(inspect.signature(model.forward).parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    return ((), dict(args[0])) if takes_any or names.issuperset(args[0]) else (args, kwargs)


def compare_paths(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inference: Callable[..., Any] | None = None,
    before: Mapping[str, Tensor] = MappingProxyType({}),
) -> BatchComparison:
    """Return how training's and inference's logits of a batch lie apart, and the modules', without synchronizing.

    Both passes run in evaluation mode without gradients: no amax history, buffer or random number of training moves.

    Args:
        model: what is trained.
        args: what its forward takes.
        kwargs: the same.
        inference: the other path, called with the same; the model with its FP8 Linears in high precision by default.
        before: ``weights`` of the comparison before.

    Raises:
        UsageError: the model has no Fp8Linear, or its output is no logits ``[..., classes]``.
    """
    linears = [m for m in model.modules() if isinstance(m, Fp8Linear) and not m.recipe.is_high_precision]
    if not linears and inference is None:
        raise UsageError(f"{type(model).__name__} has no Fp8Linear to run in high precision; give inference=, the other path")
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    training = {module: module.training for module in model.modules()}
    first, second = _Pass(), _Pass()
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            with first.seen():
                trained = _logits(model(*args, **kwargs))
            with second.seen():
                if inference is not None:
                    inferred = _logits(inference(*args, **kwargs))
                else:
                    with _high_precision(linears):
                        inferred = _logits(model(*args, **kwargs))
            columns = _difference(trained, inferred)
            try:
                names, values, weights = _compare_modules(first, second, before)
                return BatchComparison(columns, names, values, weights=weights)
            except Exception as error:
                if not is_ours(error):
                    raise
                return BatchComparison(columns, problem=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200])
    finally:
        for module, was in training.items():
            module.training = was


def _compare_modules(
    first: _Pass, second: _Pass, before: Mapping[str, Tensor]
) -> tuple[list[str], Tensor | None, dict[str, Tensor]]:
    """Return the modules that both passes called, ``MEASURES`` of each, and sampled elements of their weights."""
    ours, theirs = first.by_name(), second.by_name()
    names = [name for name in ours if name in theirs]
    if not names:
        return [], None, {}
    device = ours[names[0]].y.device
    pairs = {name: _weights(ours[name], theirs[name]) for name in names}
    alike = {name: (w, v) for name, (w, v) in pairs.items() if w is not None and v is not None and w.shape == v.shape}
    kept = {name: torch.stack([_kept(w), _kept(v)]) for name, (w, v) in alike.items()}
    rows = [_measures(ours[name], theirs[name], *pairs[name], _moved(before.get(name), kept.get(name))) for name in names]
    return names, torch.stack([row.to(device, non_blocking=True) for row in rows]), kept


def _weights(ours: _Seen, theirs: _Seen) -> tuple[Tensor | None, Tensor | None]:
    """Return the weights of both paths in FP32, on training's device."""
    w, v = _weight(ours.module), _weight(theirs.module)
    return w, v if w is None or v is None else v.to(w.device)


def _kept(x: Tensor) -> Tensor:
    """Return a copy of sampled elements of a weight ``[at most NUM_KEPT]``."""
    flat = x.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // NUM_KEPT))].clone()


def _moved(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """Return ``moved`` and ``toward`` of a weight, FP32 ``[2]``; None at the first comparison."""
    if before is None or now is None or before.shape != now.shape:
        return None
    (w0, v0), (w, v) = before.to(now.device), now
    change, way, is_trained = v - v0, w - v0, w != w0
    share = ((change != 0) & is_trained).sum() / is_trained.sum()
    return torch.stack([share, (change * way).sum() / (change.square().sum() * way.square().sum()).sqrt()])


def _measures(ours: _Seen, theirs: _Seen, w: Tensor | None, v: Tensor | None, moved: Tensor | None) -> Tensor:
    """Return ``MEASURES`` of one module.

    Args:
        ours: of training.
        theirs: of inference.
        w: training's weight.
        v: inference's.
        moved: see :func:`_moved`.
    """
    nothing = ours.y.new_full((2,), float("nan"), dtype=torch.float32)
    weight = _error(w, v) if w is not None and v is not None and w.shape == v.shape else nothing
    own = [_bias_error(ours, theirs)]
    for seen, matrix in ((ours, w), (theirs, w if v is None else v)):
        is_linear = matrix is not None and matrix.dim() == 2 and seen.x is not None
        fits = is_linear and (seen.y.shape[-1], seen.x.shape[-1]) == tuple(matrix.shape)  # type: ignore[union-attr]  # is_linear
        if not fits or seen.x is None or matrix is None or seen.x.shape[0] != seen.y.shape[0]:
            own.append(nothing)
            continue
        own.append(_error(functional.linear(seen.x.float(), matrix.to(seen.x.device), _bias(seen)), seen.y.float()))
    same = ours.num_rows == theirs.num_rows
    given = nothing
    if same and ours.x is not None and theirs.x is not None and ours.x.shape == theirs.x.shape:
        given = _error(ours.x.float(), theirs.x.float().to(ours.x.device))
    rows = nothing.new_tensor([float(same)])
    rest = (*own, given[:1], rows, nothing if moved is None else moved)
    return torch.cat([weight, *(one.to(weight.device) for one in rest)])


def _bias(seen: _Seen) -> Tensor | None:
    """Return the bias that a module adds to its output, FP32; None without one."""
    bias = stored(seen.module, "bias")
    if type(bias) not in (Tensor, nn.Parameter) or bias.shape != seen.y.shape[-1:]:
        return None
    found: Tensor = bias.detach().float()
    return found


def _bias_error(ours: _Seen, theirs: _Seen) -> Tensor:
    """Return the difference of two biases over the size of a row of the output, and their gain, FP32 ``[2]``."""
    first, second = _bias(ours), _bias(theirs)
    if first is None and second is None:
        return ours.y.new_zeros(2, dtype=torch.float32)
    first = torch.zeros_like(second) if first is None and second is not None else first
    assert first is not None
    second = torch.zeros_like(first) if second is None else second.to(first.device)
    size = ours.y.float().square().sum(-1).mean().to(first.device)
    return torch.stack([(second - first).square().sum() / size, (first * second).sum() / first.square().sum()])


def _error(x: Tensor, y: Tensor) -> Tensor:
    """Return nmse and gain of y against x, FP32 ``[2]``."""
    x, y = x.float(), y.float()
    size = x.square().sum()
    return torch.stack([(y - x).square().sum() / size, (x * y).sum() / size])


def _weight(module: nn.Module) -> Tensor | None:
    """Return a module's weight in FP32; None for one that is computed at each access, or has no values of its own."""
    weight = stored(module, "weight")
    is_plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.element_size() > 1
    return weight.detach().float() if is_plain and weight is not None else None


def _rows(x: Tensor) -> Tensor:
    """Return a copy of sampled rows ``[at most MAX_ROWS, features]``."""
    flat = x.detach().reshape(-1, x.shape[-1])
    return flat[:: max(1, -(-flat.shape[0] // MAX_ROWS))].clone()


def round_to(number: float) -> float | None:
    """Return a number with six digits for JSON; None for one that is not finite."""
    return float(f"{number:.6g}") if isfinite(number) else None


@contextmanager
def _high_precision(linears: list[Fp8Linear]) -> Iterator[None]:
    """Run these Linears in high precision; recipes, histories and planted faults are there again afterwards."""
    before = [(linear, linear.recipe, linear.distortion) for linear in linears]
    try:
        for linear in linears:
            linear.recipe, linear.distortion = get_recipe("bf16"), None
        yield
    finally:
        for linear, recipe, distortion in before:
            linear.recipe, linear.distortion = recipe, distortion


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[-1] < 2 or not logits.numel():
        raise UsageError(f"expected logits [..., classes] (or an output with .logits), got {type(logits).__name__}")
    return logits.float().reshape(-1, logits.shape[-1])


def _difference(trained: Tensor, inferred: Tensor) -> dict[str, Tensor]:
    if trained.shape != inferred.shape:
        raise UsageError(f"the two paths' logits have shapes {list(trained.shape)} and {list(inferred.shape)}")
    p, q = trained.log_softmax(-1), inferred.log_softmax(-1)
    centered = trained - trained.mean(-1, keepdim=True)
    apart = (inferred - inferred.mean(-1, keepdim=True)) - centered
    return {
        "inference_kl": (p.exp() * (p - q)).sum(-1).mean(),
        "inference_nmse": apart.square().sum() / centered.square().sum(),
        "inference_flip_rate": (trained.argmax(-1) != inferred.argmax(-1)).float().mean(),
    }

"""Differences of one module between two paths, on the rows of the same tokens.

Legend: X input, Y output, W weight, b bias; t training, r rollout; |.|^2 sums over sampled rows.

    input   |X_r - X_t|^2 / |X_t|^2          output  |Y_r - Y_t|^2 / |Y_t|^2
    weight  |W_r - W_t|^2 / |W_t|^2          refit   the same with the best factor for each block of W_r
    error   |Y - (X @ W.T + b)|^2 / |X @ W.T + b|^2 of each path by its own weight: what its casts and its GEMM make

For a norm the product is its formula, with the epsilon of the training where it was recorded.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8debug.parity.activations import function_of
from fp8debug.parity.dump import PathDump, sampled
from fp8debug.parity.names import ModuleOutput

Array = np.ndarray[Any, Any]

#: Tokens, at least, that tell an expert that all of them get from one that a few happen to get.
MIN_TOKENS_OF_SHARED = 16
#: Rows of each module that are compared, and elements of a weight that are held at once.
MAX_ROWS, MAX_ELEMENTS = 256, 1 << 24
#: Rows and columns of the blocks that scales of weights have.
BLOCK = 128
#: Largest relative error of rounding to E5M2, 1/9, with room for a scale's own rounding.
ROUNDING = 0.13
#: Distinct magnitudes that E4M3 has at most, zero among them.
MAX_CODES = 127
_IN_EXPERTS = re.compile(r"(?:^|\.)experts?\w*\.")
_OF_ONE = re.compile(r"(?:^|\.)\w*experts?\w*\.(?:\w+\.)?\d+(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """One module in both paths; None where something was not recorded.

    Attributes:
        module: name in the training.
        theirs: name in the rollout.
        kind: class in the training.
        num_rows: rows of each.
        input: difference of the inputs.
        input_gain: sum(X_t X_r) / |X_t|^2.
        input_far: by path, share of the elements of its input that no cast of the other path's makes.
        input_rounding: by path, difference of the elements that are not clipped in it.
        output: difference of the outputs.
        output_gain: sum(Y_t Y_r) / |Y_t|^2.
        output_rms: root of the mean square of the outputs, the larger of both.
        output_varies: whether training's output has rows that differ.
        weight: difference of the weights.
        weight_gain: sum(W_t W_r) / |W_t|^2.
        weight_refit: what is left of ``weight`` with the best factor for each block.
        weight_far: share of the elements that differ by more than rounding to FP8 makes.
        weight_may_be_cast: whether its values may be FP8's: a vector of which one path has few distinct ones, or a matrix.
        weight_rows: first row and number of rows of the weight that is compared, by path.
        weight_is_fp8: whether each path stores it quantized.
        bias: difference of the biases over the mean square of an output.
        has_bias: whether each path has a bias.
        error: of each path.
        gain: of each path, sum(product Y) / |product|^2.
        eps: of a norm, by path.
        flips: share of the tokens that are routed otherwise.
        num_chosen: experts of each token, by path.
        same_tokens: whether both paths read the same tokens, so that numbers of rows of experts compare.
        adapter: whether each path adds an adapter's product to the module's own.
        bad: paths ("training", "rollout") whose output has NaN or Inf.
        function: name of the activation function that each path computes.
        skipped: (path, layer) of the layers that one path alone runs since the module before.
    """

    module: str
    theirs: str
    kind: str = ""
    num_rows: tuple[int, int] = (0, 0)
    input: float | None = None
    input_gain: float | None = None
    input_far: tuple[float, float] | None = None
    input_rounding: tuple[float, float] | None = None
    output: float | None = None
    output_gain: float | None = None
    output_rms: float | None = None
    output_varies: bool = False
    weight: float | None = None
    weight_gain: float | None = None
    weight_refit: float | None = None
    weight_far: float | None = None
    weight_may_be_cast: bool = True
    weight_rows: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    weight_is_fp8: tuple[bool, bool] = (False, False)
    bias: float | None = None
    has_bias: tuple[bool, bool] = (False, False)
    error: tuple[float | None, float | None] = (None, None)
    gain: tuple[float | None, float | None] = (None, None)
    eps: tuple[float | None, float | None] = (None, None)
    flips: float | None = None
    num_chosen: tuple[int, int] | None = None
    same_tokens: bool = True
    adapter: tuple[bool, bool] = (False, False)
    bad: tuple[str, ...] = ()
    function: tuple[str | None, str | None] = (None, None)
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass
class _PathTensors:
    """One path's tensors of a module."""

    x: Array | None
    y: Array | None
    bias: Array | None
    eps: float | None
    product: Array | None = None


def measure_module(
    ours: PathDump,
    theirs: PathDump,
    name: str,
    first: ModuleOutput,
    second: ModuleOutput,
    rows: tuple[Array, Array] | None,
    *,
    same_tokens: bool = True,
) -> Measures:
    """Return the differences of a module.

    Args:
        ours: the training.
        theirs: the rollout.
        name: of the module.
        first: where ours has it.
        second: where theirs has it.
        rows: of the same tokens of both; None where rows correspond as they are.
        same_tokens: whether neither path read tokens, padding among them, that the other did not.

    Raises:
        OSError: a tensor cannot be read.
    """
    modules = ours.modules[first.module], theirs.modules[second.module]
    counts = (
        modules[0].num_rows("output") or modules[0].num_rows("input"),
        modules[1].num_rows("output") or modules[1].num_rows("input"),
    )
    if rows is not None and is_of_expert(name):
        is_alike = same_tokens and np.array_equal(*rows)  # an expert's rows have an order of their own
        picked = _picked(counts, None, (0, 0), same_tokens) if is_alike else None
    else:
        picked = _picked(counts, rows, (ours.num_tokens, theirs.num_tokens), same_tokens)
    slices = _slice(ours, theirs, first, second, True), _slice(theirs, ours, second, first, False)
    sides = [_side(dump, piece, part, None if picked is None else picked[i], len(slices) and counts[i])
             for i, (dump, piece, part) in enumerate(zip((ours, theirs), (first, second), slices, strict=True))]  # fmt: skip
    called = tuple(
        count if module.tensors else counts[1 - i] for i, (module, count) in enumerate(zip(modules, counts, strict=True))
    )
    found: dict[str, Any] = {"num_rows": called, "same_tokens": same_tokens, "kind": modules[0].kind or modules[1].kind}
    found["bad"] = _bad(sides)
    if picked is not None:
        found["input"], found["output"] = _nmse_if_alike(sides[0].x, sides[1].x), _nmse_if_alike(sides[0].y, sides[1].y)
        found["output_gain"] = _gain(sides[0].y, sides[1].y)
        found["output_rms"] = max((_rms(side.y) for side in sides if side.y is not None), default=None)
        found["output_varies"] = sides[0].y is not None and bool((sides[0].y != sides[0].y[:1]).any())
        if found["input"] and sides[0].x is not None and sides[1].x is not None:
            found |= _casts(sides[0].x, sides[1].x)
        if all("indices" in m.tensors for m in modules):
            chosen = _without_shared([m.rows("indices", picked[i]) for i, m in enumerate(modules)])
            found["num_chosen"] = chosen[0].shape[-1], chosen[1].shape[-1]
            if chosen[0].shape[:-1] == chosen[1].shape[:-1]:
                found["flips"] = float(np.mean([set(a) != set(b) for a, b in zip(*(c.tolist() for c in chosen), strict=True)]))
    with ExitStack() as stack:
        weights = ours.weight(first.module, stack), theirs.weight(second.module, stack)
        found["weight_is_fp8"] = tuple(w is not None and w[2] for w in weights)
        found |= _weights(weights, slices, sides)
    found["adapter"] = ours.has_adapter(first.module), theirs.has_adapter(second.module)
    if weights[0] is None and weights[1] is None:
        kinds = (one.kind or found["kind"] for one in modules)
        found["function"] = tuple(function_of(kind, side.x, side.y) for kind, side in zip(kinds, sides, strict=True))
    found["eps"] = sides[0].eps, sides[1].eps
    if sides[0].bias is not None or sides[1].bias is not None:
        found["bias"], found["has_bias"] = _bias(sides), (sides[0].bias is not None, sides[1].bias is not None)
    if "norm" in found["kind"].lower() or (weights[0] is not None and 1 in weights[0][1]):
        _norms(ours, theirs, first, second, sides, found["kind"])
    errors, gains = [], []
    for side in sides:
        e, g = _error(side)
        errors.append(e)
        gains.append(g)
    found["error"], found["gain"] = tuple(errors), tuple(gains)
    return Measures(module=name, theirs=second.module, **found)


def _without_shared(chosen: list[Array]) -> list[Array]:
    """Return the experts of each token in both paths, less shared ones that one path alone counts among them.

    Engines that compute shared experts with the routed ones give them the numbers behind, in every token's row.
    """
    narrow, wide = sorted(chosen, key=lambda indices: indices.shape[-1])
    number = wide.shape[-1] - narrow.shape[-1]
    if not number or min(len(narrow), len(wide)) < MIN_TOKENS_OF_SHARED or not narrow.size:
        return chosen
    ordered = np.sort(wide, axis=-1)
    shared, routed = ordered[:, -number:], ordered[:, :-number]
    is_shared = (shared == shared[:1]).all() and shared[0, 0] > max(routed.max(), narrow.max())
    return [routed if indices is wide else indices for indices in chosen] if is_shared else chosen


def is_of_one_expert(name: str) -> bool:
    """Return whether a module is part of a numbered expert, and gets the rows of that one alone."""
    return _OF_ONE.search(name) is not None


def is_of_expert(name: str) -> bool:
    """Return whether a module lies in experts, one of them or all, and gets the rows that are routed to it."""
    return _IN_EXPERTS.search(name) is not None


def _bad(sides: list[_PathTensors]) -> tuple[str, ...]:
    """Return the paths whose output has NaN or Inf; none where both have the same infinities, as masks do."""
    outputs = [side.y for side in sides]
    found = tuple(
        path
        for path, y in zip(("training", "rollout"), outputs, strict=True)
        if y is not None and y.size and not np.isfinite(y).all()
    )
    a, b = outputs
    if len(found) < 2 or a is None or b is None or np.isnan(a).any() or np.isnan(b).any():
        return found
    return () if np.array_equal(np.isinf(a), np.isinf(b)) else found


def _picked(
    counts: tuple[int, int], rows: tuple[Array, Array] | None, tokens: tuple[int, int], same_tokens: bool
) -> tuple[Array, Array] | None:
    """Return the sampled rows of both; None where rows do not correspond.

    A module with several rows for each token, as a norm of each head has, has them beside one another. One that has no row for
    each, as a position embedding of all sequences, has the same rows where the tokens are the same.
    """
    if rows is not None:
        each = {count // number if count % number == 0 else 0 for count, number in zip(counts, tokens, strict=True) if number}
        if len(each) == 1 and (number := each.pop()) > 1:
            every = [(side[:, None] * number + np.arange(number)).ravel() for side in rows]
            places = sampled(every[0], MAX_ROWS)
            return every[0][places], every[1][places]
        if counts[0] > rows[0].max() and counts[1] > rows[1].max():
            places = sampled(rows[0], MAX_ROWS)
            return rows[0][places], rows[1][places]
        if not (same_tokens and np.array_equal(*rows)):
            return None
    if counts[0] != counts[1] or not counts[0]:
        return None
    places = sampled(np.arange(counts[0]), MAX_ROWS)
    return places, places


def _slice(dump: PathDump, other: PathDump, piece: ModuleOutput, opposite: ModuleOutput, ours: bool) -> slice:
    """Return the outputs of a module that belong to a part of it."""
    if piece.place is None:
        return slice(None)
    sizes = [other.modules[name].num_outputs for name in piece.of]
    start = sum(sizes[: piece.place])
    return slice(start, start + sizes[piece.place])


def _side(dump: PathDump, piece: ModuleOutput, part: slice, rows: Array | None, count: int) -> _PathTensors:
    module = dump.modules[piece.module]
    rows = sampled(np.arange(count), MAX_ROWS) if rows is None else rows
    x = module.rows("input", rows) if module.num_columns("input") and module.num_rows("input") > rows.max(initial=0) else None
    y = module.rows("output", rows)[:, part] if module.num_columns("output") else None
    bias, eps = dump.vector(piece.module, "bias"), dump.vector(piece.module, "eps")
    return _PathTensors(x, y, None if bias is None else bias[part], None if eps is None else float(eps[0]))


def _weights(
    weights: tuple[Any, Any], slices: tuple[slice, slice], sides: list[_PathTensors]
) -> dict[str, Any]:  # fmt: skip
    """Return the differences of two weights, and leave each side's product X @ W.T in it."""
    starts: list[int] = []
    numbers: list[tuple[int, int] | None] = []
    for weight, part, side in zip(weights, slices, sides, strict=True):
        if weight is None:
            starts.append(0)
            numbers.append(None)
            continue
        start, stop, _ = part.indices(weight[1][0])
        starts.append(start)
        numbers.append((stop - start, weight[1][1]))
        fits = side.x is not None and side.y is not None and side.x.shape[1] == weight[1][1] and side.y.shape[1] == stop - start
        if fits and weight[1][0] > 1:
            side.product = np.empty_like(side.y, np.float64)
    both = numbers[0] is not None and numbers[0] == numbers[1]
    size = np.zeros(3)  # |W_t|^2, sum(W_t W_r), |W_r - W_t|^2
    refit = far = 0.0
    may_be_cast = True
    num_rows = max((n[0] for n in numbers if n), default=0)
    columns = max((n[1] for n in numbers if n), default=1)
    step = max(BLOCK, MAX_ELEMENTS // max(1, columns) // BLOCK * BLOCK)
    for first in range(0, num_rows, step):
        bands: list[Array | None] = []
        for weight, start, number, side in zip(weights, starts, numbers, sides, strict=True):
            if number is None or first >= number[0]:
                bands.append(None)
                continue
            last = min(first + step, number[0])
            band = weight[0].read(start + first, start + last)
            bands.append(band)
            if side.product is not None and side.x is not None:
                with np.errstate(all="ignore"):
                    side.product[:, first:last] = side.x @ band.T
        if both and bands[0] is not None and bands[1] is not None:
            a, b = bands[0].astype(np.float64), bands[1].astype(np.float64)
            with np.errstate(all="ignore"):
                size += (a * a).sum(), (a * b).sum(), ((b - a) ** 2).sum()
                refit += _refit(a, b)
                may_be_cast &= num_rows > 1 or _has_codes(a, b)
                far += float((np.abs(b - a) > ROUNDING * np.abs(a) + np.abs(a).max() * 2.0**-10).sum())
    if not both or not size[0] > 0:
        return {}
    assert numbers[0] is not None
    return {
        "weight": float(size[2] / size[0]),
        "weight_gain": float(size[1] / size[0]),
        "weight_refit": float(refit / size[0]),
        "weight_far": far / max(1, numbers[0][0] * numbers[0][1]),
        "weight_may_be_cast": may_be_cast,
        "weight_rows": tuple((start, number[0] if number else 0) for start, number in zip(starts, numbers, strict=True)),
    }


def _has_codes(a: Array, b: Array) -> bool:
    """Return whether one of two vectors has few distinct values, as a cast leaves, and the other more than twice as many."""
    few, many = sorted(np.unique(np.abs(x)).size for x in (a, b))
    return few <= MAX_CODES and 2 * few < many


def _refit(a: Array, b: Array) -> float:
    """Return |a|^2 less what the best factor for each block of b explains of it."""
    rows, columns = np.arange(0, a.shape[0], BLOCK), np.arange(0, a.shape[1], BLOCK)

    def sums(x: Array) -> Array:
        return np.asarray(np.add.reduceat(np.add.reduceat(x, rows, 0), columns, 1))

    x2, xy, y2 = sums(a * a), sums(a * b), sums(b * b)
    return float(np.where(y2 > 0, x2 - xy * xy / np.where(y2 > 0, y2, 1), x2).clip(min=0).sum())


def _norms(
    ours: PathDump, theirs: PathDump, first: ModuleOutput, second: ModuleOutput, sides: list[_PathTensors], kind: str
) -> None:
    """Leave in each side what a norm's formula gives, by the variant that fits training, and its epsilon."""
    gains = ours.vector(first.module, "weight"), theirs.vector(second.module, "weight")
    if sides[0].x is None or sides[0].y is None or gains[0] is None or sides[0].x.shape != sides[0].y.shape:
        return
    if gains[0].shape[0] != sides[0].x.shape[1]:
        return
    eps = sides[0].eps if sides[0].eps is not None else 1e-6
    best, variant = np.inf, (False, 0.0)
    for centered in (False, True):
        for shift in (0.0, 1.0):
            y = _normed(sides[0], gains[0], eps, centered, shift)
            if (e := nmse(y, sides[0].y)) is not None and e < best:
                best, variant = e, (centered, shift)
    if best > 0.01:
        return
    for side, gain in zip(sides, gains, strict=True):
        if side.x is not None and side.y is not None and gain is not None and gain.shape[0] == side.x.shape[1]:
            side.product = _normed(side, gain, eps, *variant)
            side.bias = None


def _normed(side: _PathTensors, gain: Array, eps: float, centered: bool, shift: float) -> Array:
    assert side.x is not None
    x = side.x.astype(np.float64)
    x = x - x.mean(1, keepdims=True) if centered else x
    with np.errstate(all="ignore"):
        y = x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * (gain + shift)
    return np.asarray(y if side.bias is None else y + side.bias)


def _bias(sides: list[_PathTensors]) -> float | None:
    """Return the difference of two biases over the mean square of a row of the output; a missing one is zero."""
    y = sides[0].y
    biases = [side.bias for side in sides]
    first = biases[0] if biases[0] is not None else np.zeros_like(biases[1])
    second = biases[1] if biases[1] is not None else np.zeros_like(first)
    if y is None or first.shape != second.shape or not y.size:
        return None
    size = float((y.astype(np.float64) ** 2).sum(1).mean())
    return float(((second - first) ** 2).sum() / size) if size else None


def _error(side: _PathTensors) -> tuple[float | None, float | None]:
    if side.product is None or side.y is None:
        return None, None
    product = side.product if side.bias is None or side.bias.shape[0] != side.product.shape[1] else side.product + side.bias
    size = float((product * product).sum())
    if not size > 0 or not np.isfinite(size):
        return None, None
    return nmse(product, side.y), float((product * side.y).sum() / size)


def _nmse_if_alike(a: Array | None, b: Array | None) -> float | None:
    return nmse(a, b) if a is not None and b is not None and a.shape == b.shape and a.size else None


def _gain(a: Array | None, b: Array | None) -> float | None:
    """Return sum(a b) / |a|^2; None where it is no number."""
    if a is None or b is None or a.shape != b.shape or not a.size:
        return None
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        size, both = float((a * a).sum()), float((a * b).sum())
    return both / size if size > 0 and np.isfinite(size) and np.isfinite(both) else None


def _rms(a: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(np.square(a, dtype=np.float64)))) if a.size else 0.0


def _casts(a: Array, b: Array) -> dict[str, Any]:
    """Return what tells whether one of two inputs is a cast of the other."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    far, rounding = zip(_as_cast(b, a), _as_cast(a, b), strict=True)
    return {"input_gain": _gain(a, b), "input_far": far, "input_rounding": rounding}


def _as_cast(a: Array, b: Array) -> tuple[float, float]:
    """Return the share of the elements of b that no cast of a's makes, and the difference of those that are not clipped.

    A cast leaves an element within rounding of what it was, zero if it was below the smallest, or at the largest.
    """
    sizes = np.abs(b)
    largest = float(sizes.max(initial=0.0))
    smallest = np.where(sizes > 0, sizes, np.inf).min(1, keepdims=True)  # of each row: a step of the subnormals, at least
    smallest = np.where(np.isfinite(smallest), smallest, 0.0)
    error = np.abs(b - a)
    is_clipped = (sizes >= largest * (1 - 2.0**-7)) & (np.abs(a) > sizes) & (a * b > 0)
    is_rounded = (error <= ROUNDING * np.abs(a)) | (error <= 0.51 * smallest) | ((b == 0) & (np.abs(a) <= smallest))
    return float((~(is_clipped | is_rounded)).mean()), nmse(a[~is_clipped], b[~is_clipped]) or 0.0


def nmse(a: Array, b: Array) -> float | None:
    """Return the squared relative difference |b - a|^2 / |a|^2; None where it is no number."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        size, error = float((a * a).sum()), float(((b - a) ** 2).sum())
    if not np.isfinite(size) or not np.isfinite(error):
        return None
    return error / size if size else (0.0 if error == 0 else None)

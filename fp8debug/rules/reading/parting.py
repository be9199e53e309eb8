"""The module at which training's and inference's forward passes part, and why, from the events of ``Watch.compare_inference``.

A module's own difference is what it adds given the input that it got: its weights differ, or one pass computes something else
than X @ W.T of its own weight. Cast noise of FP8 (about 0.0015 for a GEMM of two E4M3 operands, 28.5 dB) is in every module of
training; what lies above that of the others is a module's own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.reading.traces import percent

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class PartingLimits:
    """Thresholds of F122 for where two passes part; its manual page says where each comes from.

    Attributes:
        own_share: share of the largest own difference that a module has at least.
        max_alike: share of the modules; where more have that much, none stands out.
        max_gain: distance of a factor from 1 beyond which a weight or result differs by a scale.
        max_shape: share of such a difference that is left without its factor.
        max_factor_error: relative difference of the factors of two weights that one fault scales.
        min_fp8_error: squared relative difference that rounding to FP8 makes, at least.
        max_fp8_error: the same, at most.
        max_rounded_gain: distance of a weight's factor from 1 that rounding to FP8 makes.
        min_excess: times a module's error in the other pass from which on it is the module's own.
        max_exact_error: squared relative error of a weight or result that is the same in high precision.
        min_low_error: squared relative error of a result from which on its module runs in FP8.
        min_bf16_error: squared relative difference that rounding to BF16 makes, at least.
        max_bf16_error: the same, at most.
        min_followed: share of a weight's elements that moved between two comparisons, from which on it may follow training's.
        min_toward: cosine of their way with that to training's weight, from which on it does.
        max_standing: the same share, up to which it stands.
        min_other_cast: relative difference of a module's errors in both passes, from which on its casts are others.
    """

    own_share: float = 0.5
    max_alike: float = 0.5
    max_gain: float = 0.05
    max_shape: float = 0.1
    max_factor_error: float = 0.1
    min_fp8_error: float = 0.00025
    max_fp8_error: float = 0.004
    max_rounded_gain: float = 0.01
    min_excess: float = 2.0
    max_exact_error: float = 1e-5
    min_low_error: float = 1e-4
    min_bf16_error: float = 1.4e-6
    max_bf16_error: float = 5.5e-6
    min_followed: float = 0.5
    min_toward: float = 0.1
    max_standing: float = 0.5
    min_other_cast: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Parting:
    """First difference of two passes.

    Attributes:
        module: FQN; None where no module stands out.
        tensor: ``weight``, ``input`` (of a cast) or ``output`` (of a GEMM); None without a module.
        why: the cause in words, with its number.
        cure: what to do; None for the rule's own.
        place: among the compared modules, in execution order.
        follows: the weights of inference are others, and move with training's: their average, or those of an earlier step.
        is_behind: all modules compute the same from the same inputs, so that what differs lies behind them.
    """

    module: str | None
    tensor: str | None
    why: str
    cure: str | None = None
    place: int = 0
    follows: bool = False
    is_behind: bool = False


def parting(run: Run, steps: Collection[int], limits: PartingLimits) -> Parting | None:
    """Return where the passes part at the first of these steps that was compared by module; None where none was.

    Args:
        run: a run.
        steps: at which the logits differ.
        limits: thresholds.
    """
    query = "SELECT step, message FROM events WHERE kind = 'inference' AND step IS NOT NULL ORDER BY step"
    told = [(row["step"], measured) for row in run.sql(query).to_pylist() if (measured := _modules(row["message"]))]
    modules = next((measured for step, measured in told if step in steps), None)
    if modules is None:
        return None
    names = list(modules)
    own = {name: max(_own(m, limits).values()) for name, m in modules.items()}
    largest = max(own.values())
    routed = next((name for name in names if modules[name]["rows"] == 0), None)
    if routed and all(
        own[name] < max(limits.max_exact_error, limits.own_share * largest) for name in names[: names.index(routed)]
    ):
        why = "it sees another number of rows in inference: tokens are routed or packed otherwise before it"
        cure = "compare the router's logits and top-k of both paths; replay training's routing, or run the router alike in both"
        return Parting(module=routed, tensor="input", why=why, cure=cure, place=names.index(routed))
    if largest <= limits.max_exact_error:
        return _between(modules, limits)
    chosen = [name for name in names if own[name] >= limits.own_share * largest]
    name, others = chosen[0], chosen[1:]
    part = _part(modules[name], limits)
    known = [name for name in names if modules[name][part] is not None]
    same = [other for other in others if _part(modules[other], limits) == part]
    if part == "weight" and _is_scale(modules[name], part, limits):
        same = [
            other
            for other in same
            if abs((modules[other]["weight_gain"] or 0) / (modules[name]["weight_gain"] or 1) - 1) < limits.max_factor_error
        ]
    elif part == "weight":  # weights that move little are stale too where nothing was synchronized
        same = [other for other in known if other != name and own[other] > limits.max_exact_error]
    if part in ("training", "inference") and len(same) + 1 > max(1.0, limits.max_alike * len(known)):
        why = f"{len(same) + 1} of {len(known)} modules differ alike, as by the rounding of a cast; no module stands out"
        return Parting(module=None, tensor=None, why=why)
    if (
        part == "weight"
        and not _is_scale(modules[name], part, limits)
        and len(same) + 1 > max(1.0, limits.max_alike * len(known))
    ):
        return _other_weights(
            f"the weights of {len(same) + 1} of {len(known)} modules differ, first {name}", [found for _, found in told], limits
        )
    found = _explained(name, names.index(name), modules[name], limits, part)
    more = f"; so {'is that' if len(same) == 1 else 'are those'} of {len(same)} more" if same else ""
    return replace(found, why=found.why + more)


def _other_weights(what: str, compared: Sequence[Mapping[str, Mapping[str, float | None]]], limits: PartingLimits) -> Parting:
    """Return why the weights of most modules differ: by what they do from one comparison to the next, where it is known."""
    others = [m for modules in compared for m in modules.values() if (m["weight"] or 0.0) > limits.max_exact_error]
    shares = [share for m in others if (share := m.get("moved")) is not None]
    ways = [way for m in others if (way := m.get("toward")) is not None]
    if ways and min(shares) >= limits.min_followed and median(ways) >= limits.min_toward:
        why = (
            f"{what}, and move with training's from one comparison to the next: inference has their average, or those of an"
            " earlier step"
        )
        cure = "none if it is meant; else synchronize the weights before inference, or load this step's"
        return Parting(module=None, tensor=None, why=why, cure=cure, follows=True)
    if shares and median(shares) <= limits.max_standing:
        why = f"{what}: they stand, as {percent(1 - median(shares))} of their elements did not move between two comparisons"
        cure = (
            "synchronize the weights before inference, or load this step's; keep a moving average of the weights in FP32, as what"
            " a step adds to one in BF16 rounds away"
        )
        return Parting(module=None, tensor=None, why=why, cure=cure)
    cure = (
        "synchronize the weights before inference, or load this step's; where inference has a moving average of the weights,"
        " which differs from them, check that it moves: in BF16 what a step adds to it rounds away, in FP32 it does not"
    )
    return Parting(module=None, tensor=None, why=f"{what}: they were not synchronized", cure=cure)


def quiet_differences(run: Run, min_share: float, limits: PartingLimits) -> Iterator[tuple[str, Parting]]:
    """Yield how weights and casts of the two paths differ, by the name of the finding, where this need not move the logits.

    ``other-precision``: one path runs a module in FP8 and the other does not, where both run other modules in FP8 (a path
    that has no FP8 at all is another recipe, not another list of modules). ``rounded-before-cast``: weights are in inference
    what BF16 makes of training's, where both paths cast them to FP8. ``other-cast``: from the same input and weight, and in FP8
    in both, a module gives another result. ``other-weight``: a few weights are not training's.
    ``other-input``: what lies before a module differs, where all modules compute the same.

    Args:
        run: a run.
        min_share: share of the comparisons that show it.
        limits: thresholds.
    """
    query = "SELECT message FROM events WHERE kind = 'inference' AND step IS NOT NULL ORDER BY step"
    compared = [modules for modules in (_modules(row["message"]) for row in run.sql(query).to_pylist()) if modules]
    looks = (("other-precision", _other_precision), ("rounded-before-cast", _rounded), ("other-cast", _other_cast),
             ("other-weight", _other_weight), ("other-input", _other_input))  # fmt: skip
    for name, look in looks:
        found = [part for modules in compared if (part := look(modules, limits)) is not None]
        if found and len(found) >= min_share * len(compared):
            yield name, found[0]


def _other_input(modules: dict[str, dict[str, float | None]], limits: PartingLimits) -> Parting | None:
    """Return the first Linear behind an input that differs by more than a cast to FP8 makes, where earlier ones are the same."""
    if any(value > limits.max_exact_error for m in modules.values() for value in _own(m, limits).values()):
        return None
    differs = next((m for m in modules.values() if (m.get("input") or 0.0) > limits.max_exact_error or m["rows"] == 0), None)
    if differs is None or differs["rows"] == 0 or (differs["input"] or 0.0) <= limits.max_fp8_error:
        return None
    found = _between(modules, limits)
    return found if found.place else None


def _between(modules: Mapping[str, Mapping[str, float | None]], limits: PartingLimits) -> Parting:
    """Return where passes part whose modules all compute the same: at the first Linear behind the first other input."""
    names = list(modules)
    why = f"{len(names)} modules compute the same in both"
    place = next((i for i, name in enumerate(names) if (modules[name].get("input") or 0.0) > limits.max_exact_error), None)
    what = "between the modules" if place is None else "before all of them"
    if place:
        what = f"between {names[place - 1]} and {names[place]}"
    cure = (
        f"compare what both paths compute {what}: attention, keys and values that are kept in FP8, masks, positions, weights of"
        " experts' results, noise levels or other conditions, and the batch"
    )
    if place is None:
        why += ": what differs lies between them (attention, sampling, batch)"
        return Parting(module=None, tensor=None, why=why, cure=cure, is_behind=True)
    at = next((i for i, name in enumerate(names) if i >= place and modules[name]["training"] is not None), place)
    differs = modules[names[at]]["input"] or 0.0
    why += (
        f", and it is the first whose input differs (by {differs:.2g} of its square): what differs lies {what}, and is no Linear"
        " (attention, a norm, positions)"
    )
    return Parting(module=names[at], tensor="input", why=why, cure=cure, place=at)


def _precisions(modules: Mapping[str, Mapping[str, float | None]], limits: PartingLimits) -> dict[str, tuple[bool, bool]] | None:
    """Return which modules run in FP8 in training and in inference; None where one of them is neither in FP8 nor exact."""
    least = limits.min_low_error
    errors = {name: (m["training"], m["inference"]) for name, m in modules.items()}
    known = {name: (a, b) for name, (a, b) in errors.items() if a is not None and b is not None}
    if any(limits.max_exact_error < error < least for pair in known.values() for error in pair):
        return None
    return {name: (a >= least, b >= least) for name, (a, b) in known.items()}


def _other_precision(modules: dict[str, dict[str, float | None]], limits: PartingLimits) -> Parting | None:
    precisions = _precisions(modules, limits)
    if precisions is None or (True, True) not in precisions.values():
        return None
    parts = {name: pair for name, pair in precisions.items() if pair[0] != pair[1]}
    if not parts:
        return None
    name, (in_training, _) = next(iter(parts.items()))
    same = [other for other, pair in parts.items() if pair[0] == in_training]
    low, high = ("training", "inference") if in_training else ("inference", "training")
    more = f" and {len(same) - 1} more" if len(same) > 1 else ""
    error = modules[name][low] or 0.0
    why = (
        f"{high} runs {name}{more} in high precision, where {low} runs {'them' if more else 'it'} in FP8 (an error of"
        f" {error:.2g} of the output's square), and both run other modules in FP8"
    )
    cure = (
        "compare the modules that each path leaves out of FP8 by their full names (a list that matches a part of a name, as"
        " mlp.gate in mlp.gate_up_proj, takes others with it), and run each module alike in both"
    )
    return Parting(module=name, tensor="output", why=why, cure=cure, place=list(modules).index(name))


def _rounded(modules: dict[str, dict[str, float | None]], limits: PartingLimits) -> Parting | None:
    cast = [name for name, pair in (_precisions(modules, limits) or {}).items() if pair == (True, True)]
    rounded = [n for n in cast if limits.min_bf16_error <= (modules[n]["weight"] or 0.0) <= limits.max_bf16_error]
    if not rounded or len(rounded) < len(cast):
        return None
    name = rounded[0]
    why = (
        f"the weights of {len(rounded)} modules, first {name}, are in inference what BF16 makes of training's (a difference"
        f" of {modules[name]['weight']:.2g} of their square), and both cast them to FP8: near a tie the codes differ"
    )
    cure = (
        "cast the same values in both paths: round the FP32 masters to BF16 before training's cast, as the export does, or export"
        " the codes and scales that training has"
    )
    return Parting(module=name, tensor="weight", why=why, cure=cure, place=list(modules).index(name))


def _other_cast(modules: dict[str, dict[str, float | None]], limits: PartingLimits) -> Parting | None:
    """Return the first module in FP8 of both paths whose result is another one though its input and weight are the same.

    What the next input differs by tells that the results do; the errors alone may be alike.
    """
    names = list(modules)
    place = next((i for i, name in enumerate(names) if (modules[name].get("input") or 0.0) > limits.max_exact_error), None)
    if not place or any((m["weight"] or 0.0) > limits.max_exact_error or m["rows"] == 0 for m in modules.values()):
        return None
    differs = modules[names[place]]["input"] or 0.0
    precisions = _precisions({name: modules[name] for name in names[:place]}, limits) or {}
    other = [name for name, pair in precisions.items() if pair == (True, True) and _has_other_error(modules[name], limits)]
    if not other or not limits.min_low_error <= differs <= limits.max_fp8_error:
        return None
    name, m = other[0], modules[other[0]]
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    why = (
        f"both paths run {name}{more} in FP8, from the same input and weight, and results differ: an error of"
        f" {m['training']:.3g} of the output's square in training and of {m['inference']:.3g} in inference, and the input of"
        f" {names[place]} differs by {differs:.2g} of its square: their casts are others"
    )
    cure = (
        "compare the recipes of both paths (granularity, format, rounding of scales to powers of two, which a path may take from"
        " its device), and cast alike in both where the engine allows it; none if the difference of the logits is tolerable"
    )
    return Parting(module=name, tensor="output", why=why, cure=cure, place=names.index(name))


def _has_other_error(m: Mapping[str, float | None], limits: PartingLimits) -> bool:
    """Return whether a module's errors in the two passes are those of two casts."""
    training, inference = m["training"] or 0.0, m["inference"] or 0.0
    return abs(training - inference) > limits.min_other_cast * max(training, inference)


def _other_weight(modules: dict[str, dict[str, float | None]], limits: PartingLimits) -> Parting | None:
    """Return the first of a few modules whose weight is another one than training's, beyond what a cast to FP8 or BF16 makes.

    Where all weights differ, inference has those of an earlier step or their average, as it may be meant.
    """
    known = [name for name, m in modules.items() if m["weight"] is not None]
    other = [name for name in known if not _is_same_weight(modules[name], limits)]
    if not other or len(other) > limits.max_alike * len(known):
        return None
    place = list(modules).index(other[0])
    found = _explained(other[0], place, modules[other[0]], limits, "weight")
    more = f"; so {'is that' if len(other) == 2 else 'are those'} of {len(other) - 1} more" if len(other) > 1 else ""
    return replace(found, why=f"{found.why}{more}, and {len(known) - len(other)} other modules have training's")


def _is_same_weight(m: Mapping[str, float | None], limits: PartingLimits) -> bool:
    """Return whether a weight is training's, or what a cast makes of it."""
    return (m["weight"] or 0.0) <= limits.max_exact_error or _is_fp8_of(m, limits)


def _is_fp8_of(m: Mapping[str, float | None], limits: PartingLimits) -> bool:
    """Return whether a weight differs as by rounding it to FP8; embeddings and norms have no GEMM that it would be cast for."""
    value, gain = m["weight"] or 0.0, m["weight_gain"]
    is_near = gain is not None and abs(gain - 1) < limits.max_rounded_gain and m["training"] is not None
    return is_near and limits.min_fp8_error <= value <= limits.max_fp8_error


def _modules(message: str) -> dict[str, dict[str, float | None]] | None:
    """Return the measures by module of an event's text; None for one that is no such text."""
    try:
        told = json.loads(message)
        measures, rows = told["measures"], told["modules"]
        found = {str(name): dict(zip(map(str, measures), map(_number, row), strict=True)) for name, row in rows.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    wanted = [f"{part}{gain}" for part in ("weight", "bias", "training", "inference") for gain in ("", "_gain")] + ["rows"]
    return found if all(name in m for m in found.values() for name in wanted) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _own(measures: Mapping[str, float | None], limits: PartingLimits) -> dict[str, float]:
    """Return the parts of a module's own difference; what both passes do to their rows alike is none."""
    training, inference = measures["training"] or 0.0, measures["inference"] or 0.0
    return {
        "weight": measures["weight"] or 0.0,
        "bias": measures["bias"] or 0.0,
        "training": training - inference if training > limits.min_excess * inference else 0.0,
        "inference": inference - training if inference > limits.min_excess * training else 0.0,
    }


def _part(measures: Mapping[str, float | None], limits: PartingLimits) -> str:
    """Return the largest part of a module's own difference."""
    own = _own(measures, limits)
    return max(own, key=lambda name: own[name])


def _is_scale(measures: Mapping[str, float | None], part: str, limits: PartingLimits) -> bool:
    """Return whether a part is one factor."""
    value, gain = measures[part] or 0.0, measures[f"{part}_gain"]
    return gain is not None and abs(gain - 1) > limits.max_gain and value - (gain - 1) ** 2 < limits.max_shape * value


def _explained(name: str, place: int, m: Mapping[str, float | None], limits: PartingLimits, part: str) -> Parting:
    """Return the cause of one part of a module's own difference."""
    value, gain, is_scale = m[part] or 0.0, m[f"{part}_gain"], _is_scale(m, part, limits)
    if part == "bias":
        what = "is left out" if gain == 0 else "is not training's"
        why = f"its bias {what} in inference: a difference of {value:.2g} of its output's square"
        return Parting(module=name, tensor="output", why=why, cure="add or load this module's bias in inference", place=place)
    if part == "weight":
        if is_scale:
            why = f"its weight is {gain:.4g} times training's in inference"
            cure = "a scale is applied twice, left out or inverted: compare this weight's scale in both paths"
        elif _is_fp8_of(m, limits):
            why = f"its weight differs from training's by {value:.2g} of its square, as much as rounding it to FP8 makes"
            cure = "serve this module in the precision that training has for it, or train it in that of inference"
        else:
            why = f"its weight is not training's: it differs by {value:.2g} of its square"
            cure = "synchronize or load this module's weight again: a copy of another step, cached or never updated"
        return Parting(module=name, tensor="weight", why=why, cure=cure, place=place)
    where = "training" if part == "training" else "inference"
    if is_scale:
        why = f"its output in {where} is {gain:.4g} times input by weight"
        cure = "compare the scales of input and weight of this module in both paths"
        return Parting(module=name, tensor="output", why=why, cure=cure, place=place)
    why = f"weights are the same, and its output in {where} differs from input by weight by {value:.2g} of its square"
    if where == "training":
        cure = (
            "look at this module's casts in training (fp8debug show --module); BF16 for it in training, or its cast in inference"
        )
    else:
        cure = "look at this module's casts, scales and kernel in the inference path"
    return Parting(module=name, tensor="input" if where == "training" else "output", why=why, cure=cure, place=place)

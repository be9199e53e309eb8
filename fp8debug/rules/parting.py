"""The module at which training's and inference's forward passes part, and why, from the events of ``Watch.compare_inference``.

A module's own difference is what it adds given the input that it got: its weights differ, or one pass computes something else
than X @ W.T of its own weight. Cast noise of FP8 (about 0.0015 for a GEMM of two E4M3 operands, 28.5 dB) is in every module of
training; what lies above that of the others is a module's own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8debug.store.run import Run

#: A factor of a weight or result beyond this is a scale (numerics.md, 4: act), where no more than SHAPE is left without it.
MAX_GAIN, SHAPE = 0.05, 0.1
#: Squared relative difference of a tensor and its rounding to E4M3 or E5M2 in blocks: 33 to 24 dB.
ROUNDING = 0.0005, 0.004
#: Below it two weights are the same but for BF16's rounding (55.6 dB).
SAME = 1e-5


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where two passes part.

    Attributes:
        module: FQN; None where no module stands out.
        tensor: ``weight``, ``input`` (of a cast) or ``output`` (of a GEMM); None without a module.
        why: the cause in words, with its number.
        cure: what to do; None for the rule's own.
        place: among the compared modules, in execution order.
    """

    module: str | None
    tensor: str | None
    why: str
    cure: str | None = None
    place: int = 0


def parting(run: Run, steps: Collection[int], own_share: float, max_alike: float) -> Parting | None:
    """Return where the passes part at the first of these steps that was compared by module; None where none was.

    Args:
        run: a run.
        steps: at which the logits differ.
        own_share: share of the largest own difference that a module has at least.
        max_alike: share of the modules; where more have that much, none stands out.
    """
    query = "SELECT step, message FROM events WHERE kind = 'inference' AND step IS NOT NULL ORDER BY step"
    told = (row["message"] for row in run.sql(query).to_pylist() if row["step"] in steps)
    modules = next((found for found in map(_modules, told) if found), None)
    if modules is None:
        return None
    routed = next((name for name, m in modules.items() if m["rows"] == 0), None)
    own = {name: _own(m) for name, m in modules.items()}
    before = list(modules)[: list(modules).index(routed)] if routed else list(modules)
    largest = max(own.values())
    if routed and max((own[name] for name in before), default=0.0) < own_share * largest:
        why = "it sees another number of rows in inference, so that tokens are routed or packed otherwise before it"
        cure = "compare the router's logits and top-k of both paths; run the router in the same precision in both"
        return Parting(module=routed, tensor="input", why=why, cure=cure, place=before.index(before[-1]) + 1 if before else 0)
    if largest <= SAME:
        why = f"{len(modules)} modules compute the same in both: what differs lies between them (attention, sampling, batch)"
        return Parting(module=None, tensor=None, why=why, cure="compare attention, masks, positions and the batch of both paths")
    chosen = [name for name, value in own.items() if value >= own_share * largest]
    if len(chosen) > max(1.0, max_alike * len(own)):
        return _alike(modules, chosen)
    name = chosen[0]
    return _explained(name, list(modules).index(name), modules[name])


def _modules(message: str) -> dict[str, dict[str, float | None]] | None:
    """Return the measures by module of an event's text; None for one that is no such text."""
    try:
        told = json.loads(message)
        measures, rows = told["measures"], told["modules"]
        found = {str(name): dict(zip(map(str, measures), map(_number, row), strict=True)) for name, row in rows.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    wanted = ("weight", "weight_gain", "training", "training_gain", "inference", "inference_gain", "rows")
    return found if all(name in m for m in found.values() for name in wanted) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _own(measures: Mapping[str, float | None]) -> float:
    return max(measures[name] or 0.0 for name in ("weight", "training", "inference"))


def _alike(modules: Mapping[str, Mapping[str, float | None]], chosen: Collection[str]) -> Parting:
    """Return the words for a difference that many modules have."""
    stale = [name for name in chosen if (modules[name]["weight"] or 0.0) > ROUNDING[1]]
    if 2 * len(stale) > len(chosen):
        why = f"the weights of {len(stale)} of {len(modules)} modules differ, first {stale[0]}: they were not synchronized"
        return Parting(module=None, tensor=None, why=why, cure="synchronize the weights before inference, or load this step's")
    why = f"{len(chosen)} of {len(modules)} modules differ alike, as by the rounding of a cast; no module stands out"
    return Parting(module=None, tensor=None, why=why)


def _explained(name: str, place: int, m: Mapping[str, float | None]) -> Parting:
    """Return the cause of one module's own difference: the largest of its three parts."""
    part = max(("weight", "training", "inference"), key=lambda key: m[key] or 0.0)
    value, gain = m[part] or 0.0, m[f"{part}_gain"]
    is_scale = gain is not None and abs(gain - 1) > MAX_GAIN and value - (gain - 1) ** 2 < SHAPE * value
    if part == "weight":
        if is_scale:
            why = f"its weight is {gain:.4g} times training's in inference"
            cure = "a scale is applied twice, left out or inverted: compare this weight's scale in both paths"
        elif ROUNDING[0] / 2 <= value <= ROUNDING[1] and gain is not None and abs(gain - 1) < 0.01:
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

"""Names in checkpoints: scales of activations and of weights, and the role that layers share."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import permutations

#: Last parts of names of scales that belong to activations, caches and outputs.
ACTIVATION_SCALES = frozenset(
    (
        *("input_scale", "input_scale_inv", "input_global_scale", "activation_scale", "act_scale", "scale_input", "output_scale"),
        *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "attn_scale_inv"),
    )
)
#: Last part of a joined module -> the parts that it joins, in the order of their outputs: as engines and checkpoints name them.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "qkv": ("q", "k", "v"),
    "Wqkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up": ("gate", "up"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
#: Endings of names of weight scales, the longest first.
_WEIGHT_SCALE = re.compile(r"(?P<stem>.+?)(?:_scale_inv|_global_scale|_scale_2|_scales|_scale)")
SCALE_ENDINGS = ("_scale_inv", "_scale", "_scales", "._scale_inv", "._rowwise_scale_inv")
#: ComfyUI's name of the scale of ``MODULE.weight``.
COMFY_SCALE = "scale_weight"
#: Names of FP8 tensors that only tell the kind of a file.
MARKERS = frozenset(("scaled_fp8",))
_DIGITS = re.compile(r"\d+")
#: A tensor of all experts' weights [experts, outputs, inputs].
_OF_EXPERTS = re.compile(r"(?P<above>(?:.*\.)?experts)\.(?P<base>w1|w2|w3|w13|(?:gate|up|down|gate_up)_proj)(?:[._]weight)?")
#: Experts of one tensor, at most; a tensor of more matrices holds something else.
MAX_EXPERTS = 4096
#: An expert's Linears by the names that other stacks give them.
_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
#: Beginnings of names by which stacks differ, and names of which they are told by.
SHIFTED = 1000
_BEGINNINGS = ("", "model.", "language_model.", "model.language_model.", "transformer.", "policy.", "actor.")


def is_scale(name: str) -> bool:
    """Return whether a name is that of an activation's scale."""
    return name.rpartition(".")[2] in ACTIVATION_SCALES


def scaled_by(name: str) -> str | None:
    """Return the weight whose scale a name would be; None for other names."""
    above, _, last = name.rpartition(".")
    if last == COMFY_SCALE:
        return f"{above}.weight"
    found = _WEIGHT_SCALE.fullmatch(name)
    return found["stem"] if found else None


def may_have_scale(weight: str, names: Collection[str]) -> bool:
    """Return whether a scale of a weight is among names."""
    return any(weight + ending in names for ending in SCALE_ENDINGS) or comfy_scale(weight) in names


def comfy_scale(weight: str) -> str:
    """Return the name that ComfyUI gives to the scale of a weight."""
    return f"{weight.rpartition('.')[0]}.{COMFY_SCALE}" if weight.endswith(".weight") else ""


def role_of(name: str) -> str:
    """Return a name with its numbers replaced: equal for the same weight of all layers and experts."""
    return _DIGITS.sub("*", name)


def parts_of(name: str, batch: int = 1) -> Iterator[tuple[str, ...]]:
    """Yield the names of the tensors that one joins, in the order of its rows; more than one way where stacks differ.

    Args:
        name: of the joined tensor.
        batch: its matrices: experts.
    """
    if batch > MAX_EXPERTS:
        return
    if batch > 1:
        match = _OF_EXPERTS.fullmatch(name)
        if match:
            bases = FUSED.get(match["base"], (match["base"],))
            for linears in (bases, tuple(_EXPERT_NAMES[base] for base in bases)):
                yield tuple(f"{match['above']}.{number}.{linear}.weight" for number in range(batch) for linear in linears)
        return
    module, _, last = name.rpartition(".")
    above, dot, part = module.rpartition(".")
    if part in FUSED:
        yield tuple(f"{above}{dot}{one}.{last}" for one in FUSED[part])


def shift(ours: Iterable[str], theirs: Collection[str]) -> tuple[str, str] | None:
    """Return what to take from the beginning of their names and what to put there; None where nothing is gained."""
    some = list(ours)
    some = some[:: max(1, len(some) // SHIFTED)]
    best, most = None, sum(name in theirs for name in some)
    for take, give in permutations(_BEGINNINGS, 2):
        if (number := sum(name.startswith(give) and take + name[len(give) :] in theirs for name in some)) > most:
            best, most = (take, give), number
    return best

"""Names in checkpoints: scales of activations and of weights, and the role that layers share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

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

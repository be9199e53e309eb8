"""Shares: a budget as people write it, and what part of a model's FP8 FLOPs each module has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fp8debug.errors import UsageError


def parse_share(text: str | float, what: str = "") -> float:
    """Return a share given as ``10%``, ``0.1`` or a number.

    Args:
        text: the share.
        what: it is a share of, for the message.

    Raises:
        UsageError: it is neither, or not between 0 and 1.
    """
    try:
        words = text.strip() if isinstance(text, str) else text
        share = float(words.removesuffix("%")) / 100 if isinstance(words, str) and words.endswith("%") else float(words)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1 or isinstance(text, bool):
        raise UsageError(f"{what or 'expected'} {'is ' if what else ''}a share such as 10% or 0.1, got {text!r}")
    return share


def flop_shares(modules: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return by FQN a module's share of all FLOPs in FP8, from the manifest's entries; each of its GEMMs has a third."""
    flops = {
        str(m["fqn"]): m["in_features"] * m["out_features"]
        for m in modules
        if m.get("fp8") and m.get("in_features") and m.get("out_features")
    }
    total = sum(flops.values())
    return {fqn: one / total for fqn, one in flops.items()}

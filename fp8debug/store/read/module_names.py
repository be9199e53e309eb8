"""Names of modules folded over the numbers in them: ``blocks.{0..15}.attn.q_proj`` for sixteen equal layers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def folded(names: Sequence[str], alike: Sequence[Hashable] | None = None) -> list[tuple[str, list[int]]]:
    """Return (pattern, places) of names that differ in numbers alone, in the order of their first place.

    A number is a whole part of a name. Of several numbers the right-most are folded first; those left of them follow where all
    that is right of them is the same: ``layers.{0..3}.experts.{0..7}.w1``.

    Args:
        names: of modules.
        alike: what names must share to be folded, one value for each; None folds any.
    """
    keys = alike if alike is not None else [None] * len(names)
    groups: list[tuple[tuple[str, ...], Hashable, list[int]]] = [
        (tuple(name.split(".")), key, [place]) for place, (name, key) in enumerate(zip(names, keys, strict=True))
    ]
    for at in reversed(range(max((len(parts) for parts, _, _ in groups), default=0))):
        merged: dict[Hashable, list[tuple[tuple[str, ...], Hashable, list[int]]]] = {}
        for group in groups:
            parts, key, _ = group
            name = (parts[:at], parts[at + 1 :]) if _is_number(parts, at) else parts
            merged.setdefault((_is_number(parts, at), name, key), []).append(group)
        groups = [_joined(found, at) for found in merged.values()]
    groups.sort(key=lambda group: group[2][0])
    return [(".".join(parts), places) for parts, _, places in groups]


def folded_words(names: Sequence[str]) -> str:
    """Return names folded over their numbers, in one line; a pattern of several names with how many it stands for."""
    return ", ".join(pattern if len(places) == 1 else f"{pattern} ({len(places)})" for pattern, places in folded(names))


def _joined(found: Sequence[tuple[tuple[str, ...], Hashable, list[int]]], at: int) -> tuple[tuple[str, ...], Hashable, list[int]]:
    parts, key, _ = found[0]
    numbers = sorted({int(group[0][at]) for group in found}) if _is_number(parts, at) else []
    if len(numbers) > 1:
        parts = (*parts[:at], "{" + spans(numbers) + "}", *parts[at + 1 :])
    return parts, key, sorted(place for group in found for place in group[2])


def _is_number(parts: Sequence[str], at: int) -> bool:
    return len(parts) > at and parts[at].isdecimal()


def spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers in ranges: ``0..3,7``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in ranges)

"""Folded names of modules."""

from __future__ import annotations

import random

import pytest

from fp8debug.store.read.module_names import folded, folded_words, spans


def unfolded(pattern: str) -> set[str]:
    """Return the names that a pattern stands for, by its definition."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return {pattern}
    inner, _, tail = rest.partition("}")
    numbers: list[int] = []
    for part in inner.split(","):
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    return {f"{head}{number}{name}" for number in numbers for name in unfolded(tail)}


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["blocks.0.q", "blocks.0.k", "blocks.1.q", "blocks.1.k"], ["blocks.{0,1}.q", "blocks.{0,1}.k"]),
        ([f"layers.{i}.experts.{j}.w1" for i in range(3) for j in range(8)], ["layers.{0..2}.experts.{0..7}.w1"]),
        (["h.0.a", "h.2.a", "h.3.a", "h.4.a", "h.9.a", "head"], ["h.{0,2..4,9}.a", "head"]),
        (["a.0.b", "a.1.c"], ["a.0.b", "a.1.c"]),
        (["0.a", "1.a", "10.a"], ["{0,1,10}.a"]),
        (["x", "x"], ["x"]),
        ([], []),
    ],
)
def test_names_that_differ_in_numbers_are_one(names: list[str], patterns: list[str]) -> None:
    assert [pattern for pattern, _ in folded(names)] == patterns


def test_only_what_is_alike_is_folded() -> None:
    names = [f"blocks.{i}.q" for i in range(6)]
    found = folded(names, ["fp8", "fp8", "bf16", "fp8", "fp8", "bf16"])
    assert found == [("blocks.{0,1,3,4}.q", [0, 1, 3, 4]), ("blocks.{2,5}.q", [2, 5])]


def test_patterns_stand_for_exactly_their_names() -> None:
    generator = random.Random(0)
    for _ in range(300):
        every = [f"m.{i}.x.{j}.{k}" for i in range(4) for j in range(3) for k in "ab"] + ["m.0", "m.x", "n.1.0"]
        names = generator.sample(every, generator.randrange(1, len(every)))
        alike = [generator.random() < 0.7 for _ in names]
        found = folded(names, alike)
        assert sorted(place for _, places in found for place in places) == list(range(len(names)))
        for pattern, places in found:
            assert unfolded(pattern) == {names[place] for place in places} and len({alike[place] for place in places}) == 1


def test_ranges() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0..2,5,7,8"


def test_names_in_one_line() -> None:
    assert folded_words([f"blocks.{i}.up" for i in range(24)] + ["head"]) == "blocks.{0..23}.up (24), head"

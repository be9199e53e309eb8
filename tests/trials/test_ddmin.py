"""Delta debugging: it finds the set, whatever it is, and costs what the plan says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8debug.trials.bisect import plan_of, ranked
from fp8debug.trials.ddmin import count_tests, minimize


@given(st.integers(1, 40), st.data())
def test_it_finds_the_culprits_of_a_monotonic_test(num_items: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, num_items - 1), min_size=1, max_size=4))
    asked: list[tuple[int, ...]] = []
    kept: list[list[int]] = []

    def test(subset: list[int]) -> bool:
        asked.append(tuple(subset))
        return culprits <= set(subset)

    assert set(minimize(range(num_items), test, kept.append)) == culprits
    assert len(set(asked)) == len(asked), "a set was tested twice"
    assert all(culprits <= set(found) for found in kept)
    sizes = [len(found) for found in kept]
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(2, 12), st.integers(0, 2**12 - 1))
def test_no_item_of_the_answer_can_go_alone_even_if_the_test_is_not_monotonic(num_items: int, seed: int) -> None:
    def test(subset: list[int]) -> bool:
        return len(subset) == num_items or (hash((tuple(subset), seed)) % 3 == 0 and len(subset) > 0)

    found = minimize(range(num_items), test)
    assert len(found) == 1 or not any(test([x for x in found if x != y]) for y in found)


def test_the_first_item_is_found_in_log_n_tests() -> None:
    assert [count_tests(n, [0]) for n in (1, 2, 8, 64)] == [0, 1, 3, 6]
    assert count_tests(64, [63]) == 12


def test_the_plan_grows_with_the_logarithm() -> None:
    small, large = plan_of(8, 64, 1.0), plan_of(256, 64, 1.0)
    assert (small.for_one, large.for_one) == (9, 17)
    assert small.for_two > small.for_one and plan_of(1, 64, 1.0).for_one == 5


@pytest.mark.parametrize(
    ("suspects", "damage", "order"),
    [([], {}, "abcd"), (["c"], {}, "cabd"), (["d", "b"], {"c": 1.0}, "dbca"), ([], {"b": 1.0, "d": 2.0}, "dbac")],
)
def test_suspects_come_first_then_damage(suspects: list[str], damage: dict[str, float], order: str) -> None:
    assert ranked("abcd", suspects, damage) == list(order)

"""AmaxHistory against a plain-Python model of delayed scaling, written from docs/numerics.md and Transformer Engine's rules."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8debug.errors import UsageError
from fp8debug.kernels.amax_history import AmaxHistory, Use
from fp8debug.kernels.dispatch import finite_amax
from fp8debug.recipes import Cast

CPU = torch.device("cpu")
MAX = {"e4m3fn": 448.0, "e5m2": 57344.0}


class Model:
    """The scale of a call from the last ``history`` amaxes before it; 0 or a nonfinite amax keeps the old scale."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.seen: deque[float] = deque(maxlen=cast.history)
        self.scale_inv = 1.0

    def next_scale_inv(self, amax: float) -> float:
        seen = self.seen or [amax]
        known = seen[-1] if self.cast.algo == "most_recent" else max(seen)
        if known > 0 and math.isfinite(known):
            self.scale_inv = self.of(known)
        self.seen.append(amax)
        return self.scale_inv

    def of(self, amax: float) -> float:
        a = max(np.float32(amax), np.float32(self.cast.amax_eps))
        with np.errstate(over="ignore"):
            scale = min(np.float32(MAX[self.cast.format]) / a, np.finfo(np.float32).max)
        if self.cast.scale_rounding == "pow2_ceil":
            scale = np.float32(2.0 ** (math.frexp(float(scale))[1] - 1))
        scale = np.float32(scale * np.float32(2.0**-self.cast.margin))
        return float(np.float32(1) / scale)


def _calls(history: AmaxHistory, amaxes: list[float]) -> list[float]:
    return [float(history.next_scale_inv(torch.tensor(a))) for a in amaxes]


CASTS = st.builds(
    Cast,
    format=st.sampled_from(["e4m3fn", "e5m2"]),
    scaling=st.just("delayed"),
    history=st.integers(1, 5),
    algo=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(-2, 3),
    amax_eps=st.sampled_from([0.0, 1e-12, 0.5]),
    scale_rounding=st.sampled_from(["none", "pow2_ceil"]),
)
AMAXES = st.one_of(st.just(0.0), st.floats(2.0**-33, 2.0**33, width=32), st.sampled_from([1.0, 2.0, 448.0]))


@settings(deadline=None, max_examples=150)
@given(CASTS, st.lists(AMAXES, min_size=1, max_size=14))
def test_equals_the_model(cast: Cast, amaxes: list[float]) -> None:
    model = Model(cast)
    assert _calls(AmaxHistory(cast, CPU), amaxes) == [model.next_scale_inv(a) for a in amaxes]


@settings(deadline=None, max_examples=60)
@given(CASTS, st.lists(AMAXES, min_size=1, max_size=14), st.data())
def test_a_checkpoint_at_any_call_changes_nothing(cast: Cast, amaxes: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(amaxes)))
    straight = _calls(AmaxHistory(cast, CPU), amaxes)
    before, after = AmaxHistory(cast, CPU), AmaxHistory(cast, CPU)
    first = _calls(before, amaxes[:at])
    after.load_state(before.state())
    assert first + _calls(after, amaxes[at:]) == straight


def _amax_of(scale_inv: float) -> float:
    return scale_inv * 448


def test_the_scale_comes_from_before_the_call() -> None:
    history = AmaxHistory(Cast(scaling="delayed", history=2), CPU)
    found = [_amax_of(s) for s in _calls(history, [1.0, 100.0, 1.0, 1.0, 1.0])]
    assert found == pytest.approx([1.0, 1.0, 100.0, 100.0, 1.0])


def test_a_spike_stays_for_as_long_as_the_history_is() -> None:
    history = AmaxHistory(Cast(scaling="delayed", history=16), CPU)
    found = [_amax_of(s) for s in _calls(history, [1.0, 1000.0, *[1.0] * 30])]
    assert found == pytest.approx([1.0, 1.0, *[1000.0] * 16, *[1.0] * 14])


def test_most_recent_forgets_at_once() -> None:
    history = AmaxHistory(Cast(scaling="delayed", algo="most_recent"), CPU)
    assert [_amax_of(s) for s in _calls(history, [1.0, 8.0, 2.0, 2.0])] == pytest.approx([1.0, 1.0, 8.0, 2.0])


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_zero_and_nonfinite_amaxes_keep_the_scale(algo: str) -> None:
    for bad in (0.0, float("nan"), float("inf")):
        history = AmaxHistory(Cast(scaling="delayed", history=1, algo=algo), CPU)
        found = [_amax_of(s) for s in _calls(history, [4.0, bad, bad, 2.0, 2.0])]
        assert found == pytest.approx([4.0, 4.0, 4.0, 4.0, 2.0])


def test_a_history_of_zeros_only_has_scale_one() -> None:
    assert _calls(AmaxHistory(Cast(scaling="delayed"), CPU), [0.0, 0.0, 5.0]) == [1.0, 1.0, 1.0]


def test_what_is_returned_is_not_changed_by_later_calls() -> None:
    history = AmaxHistory(Cast(scaling="delayed", history=1), CPU)
    first = history.next_scale_inv(torch.tensor(1.0))
    history.next_scale_inv(torch.tensor(2.0))
    history.next_scale_inv(torch.tensor(3.0))
    assert float(first) == float(np.float32(1) / np.float32(448))


def test_fill_stands_for_every_earlier_call() -> None:
    history = AmaxHistory(Cast(scaling="delayed", history=3), CPU)
    history.fill(torch.tensor(7.0))
    assert [_amax_of(s) for s in _calls(history, [1.0] * 5)] == pytest.approx([7.0, 7.0, 7.0, 1.0, 1.0])


@pytest.mark.parametrize("calls", [2, 3, 5, 6, 7, 20])
def test_state_holds_any_number_of_calls(calls: int) -> None:
    """Modulo the length of the ring: beyond 2^24 calls a position would be lost in FP32."""
    cast = Cast(scaling="delayed", history=3)
    history = AmaxHistory(cast, CPU)
    _calls(history, [float(i + 1) for i in range(calls)])
    assert int(history.memory[1]) == (calls if calls < 3 else 3 + calls % 3)
    again = AmaxHistory(cast, CPU)
    again.load_state(history.state())
    amaxes = [1.0, 2.0, 3.0, 1.0, 1.0, 1.0]
    assert _calls(again, amaxes) == _calls(history, amaxes)


@settings(deadline=None, max_examples=60)
@given(CASTS, st.lists(st.tuples(AMAXES, st.sampled_from(["train", "evaluate"])), min_size=1, max_size=40), st.data())
def test_a_recomputation_takes_the_scale_of_its_call(cast: Cast, calls: list[tuple[float, Use]], data: st.DataObject) -> None:
    history, recent = AmaxHistory(cast, CPU), deque[tuple[float, float]](maxlen=16)
    for amax, use in calls:
        scale_inv = float(history.next_scale_inv(torch.tensor(amax), use))
        if use == "train":
            recent.append((amax, scale_inv))
    amax = data.draw(st.sampled_from([amax for amax, _ in calls] + [12345.0]))
    before = history.memory.clone()
    found = float(history.next_scale_inv(torch.tensor(amax), "recompute"))
    if recent:
        assert found == next((scale for known, scale in reversed(recent) if known == amax), recent[-1][1])
        assert torch.equal(history.memory, before)
    else:
        assert int(history.memory[1]) == 1


def test_a_pass_that_is_first_seen_in_a_backward_pass_is_an_ordinary_one() -> None:
    """A reentrant checkpoint runs it without gradients before, which leaves no trace."""
    cast, amaxes = Cast(scaling="delayed", history=3), [1.0, 5.0, 2.0, 2.0, 7.0]
    inside, outside = AmaxHistory(cast, CPU), AmaxHistory(cast, CPU)
    assert [float(inside.next_scale_inv(torch.tensor(a), "recompute")) for a in amaxes] == _calls(outside, amaxes)


def test_state_of_another_length_is_refused() -> None:
    state = AmaxHistory(Cast(scaling="delayed", history=3), CPU).state()
    assert state.shape == (5,) and state.dtype == torch.float32
    with pytest.raises(UsageError) as error:
        AmaxHistory(Cast(scaling="delayed", history=8), CPU).load_state(state)
    expected = "expected the state of a history of 8 amaxes, got float32[5]; load it under Cast(history=3)"
    assert str(error.value) == expected


def test_finite_amax() -> None:
    nan, inf = float("nan"), float("inf")
    assert float(finite_amax(torch.tensor([1.0, -3.0, nan, -inf]))) == 3.0
    assert float(finite_amax(torch.tensor([nan, inf]))) == 0.0
    empty = finite_amax(torch.zeros(0, 4, dtype=torch.bfloat16))
    assert float(empty) == 0.0 and empty.dtype == torch.float32 and empty.shape == ()
    assert not finite_amax(torch.ones(2, requires_grad=True)).requires_grad

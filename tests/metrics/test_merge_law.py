"""One law for every metric: merge(partial(a), partial(b)) == partial(cat(a, b)), where the cut runs between blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8debug.formats import GRANULARITIES
from fp8debug.kernels.dispatch import operand_pair, quantize, statistics
from fp8debug.kernels.slot_rows import by_name
from fp8debug.metrics import METRICS, Pair, Slot, Source, slots
from fp8debug.observer.table import Table, layout
from fp8debug.recipes import Cast
from tests.slots import slots_of

#: Granularities whose blocks end at multiples of their rows; a cut anywhere else would cut a block.
ROWS_OF_A_BLOCK = {name: block[0] for name, block in GRANULARITIES.items() if block[0] is not None}

CASTS = st.builds(
    Cast,
    format=st.sampled_from(["e4m3fn", "e5m2"]),
    granularity=st.sampled_from(list(ROWS_OF_A_BLOCK)),
    scale_rounding=st.sampled_from(["none", "pow2_ceil", "pow2_floor"]),
    amax_eps=st.sampled_from([0.0, 1e-3]),
) | st.builds(
    Cast,
    granularity=st.sampled_from(list(ROWS_OF_A_BLOCK)),
    scaling=st.just("static"),
    scale_inv=st.sampled_from([1.0, 1e-3, 0.125]),
)


def _numbers(seed: int, rows: int, columns: int) -> Tensor:
    """Values of every size, with zeros, and in half of the cases NaN and Inf; some rows are zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * (4 * torch.randn(rows, 1, generator=generator)).exp()
    kind = torch.rand(rows, columns, generator=generator)
    x = x.masked_fill(kind < 0.1, 0.0)
    if seed % 2:
        x = x.masked_fill(kind > 0.99, math.nan).masked_fill((kind > 0.97) & (kind < 0.98), math.inf)
    return x * (torch.rand(rows, 1, generator=generator) > 0.2)


@st.composite
def operands(draw: st.DrawFn) -> tuple[Pair, Pair, Pair]:
    cast = draw(CASTS)
    step = ROWS_OF_A_BLOCK[cast.granularity]
    cut = step * draw(st.integers(1, 9 if step == 1 else 2))
    rows, columns = cut + draw(st.integers(1, 140)), draw(st.integers(1, 150))
    x = _numbers(draw(st.integers(0, 10**6)), rows, columns)
    a, b, both = (operand_pair(part, cast, quantize(part, cast)) for part in (x[:cut], x[cut:], x))
    return a, b, both


@st.composite
def results(draw: st.DrawFn) -> tuple[Pair, Pair, Pair]:
    """A GEMM's result has no FP8 data; fprop's output has the gradient of its rows."""
    rows, columns, seed = draw(st.integers(2, 60)), draw(st.integers(1, 60)), draw(st.integers(0, 10**6))
    cut = draw(st.integers(1, rows - 1))
    x, grad = _numbers(seed, rows, columns), _numbers(seed // 2 * 2, rows, columns)
    y = x * 1.01 + _numbers(seed // 2 * 2 + 1, rows, columns) * 0.1
    parts = (slice(0, cut), slice(cut, rows), slice(0, rows))
    a, b, both = (Pair(source=Source(x[part]), y=y[part], grad=grad[part]) for part in parts)
    return a, b, both


def _merged(slot: Slot, a: Tensor, b: Tensor) -> Tensor:
    if slot.merge == "sum":
        return a + b
    return torch.maximum(a, b) if slot.merge == "max" else torch.minimum(a, b)


def _size(slot: Slot, pair: Pair) -> float:
    """Return the sum of the magnitudes that a sum is made of: what cancels is as exact as its terms."""
    x, y = pair.x64.abs(), pair.y64.abs()
    grad = torch.zeros(1) if pair.grad is None else pair.grad.double().nan_to_num(0, 0, 0).abs()
    terms = {"sum_x": x, "sum_err": x + y, "sum_xy": x * y, "damage": ((x + y) * grad).sum(-1).square()}
    return float(terms.get(slot.name, torch.full((), 200.0 * x.numel())).sum())


def _check(name: str, merged: Mapping[str, Tensor], whole: Mapping[str, Tensor], pair: Pair) -> None:
    for slot in slots().values():
        if slot.name not in whole:
            continue
        a, b = merged[slot.name], whole[slot.name]
        assert a.dtype == b.dtype == getattr(torch, slot.kind), slot.name
        assert not b.isnan().any(), slot.name
        if slot.kind == "float64":
            assert torch.isclose(a, b, rtol=1e-12, atol=1e-12 * _size(slot, pair)).all(), f"{name} {slot.name}"
        elif slot.name == "worst_block_nmse":  # an extreme of sums
            assert torch.isclose(a, b, rtol=1e-6), f"{name} {slot.name}"
        else:
            assert torch.equal(a, b), f"{name} {slot.name}: {a} {b}"


@pytest.mark.parametrize("name", METRICS.names())
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_merge_law_of_each_metric(name: str, data: st.DataObject) -> None:
    metric = METRICS.get(name)
    a, b, both = data.draw(operands() | results() if metric.of_results else operands())
    first, second, whole = (metric.partial(pair) for pair in (a, b, both))
    known = {slot.name: slot for slot in metric.slots}
    assert set(first) == set(second) == set(whole) <= set(known)
    for slot_name, value in whole.items():
        assert value.shape == ((known[slot_name].size,) if known[slot_name].size > 1 else ()), slot_name
    _check(name, {key: _merged(known[key], first[key], second[key]) for key in whole}, whole, both)


@settings(deadline=None, max_examples=60)
@given(st.one_of(operands(), results()), st.booleans())
def test_merge_law_through_the_observers_table(pairs: tuple[Pair, Pair, Pair], with_empty: bool) -> None:
    a, b, both = pairs
    table = Table(3, torch.device("cpu"))
    table.merge([0], [by_name(statistics(a))])
    if with_empty:  # an expert without tokens adds nothing but itself
        nothing = Pair(source=Source(torch.zeros(0, 4)), y=torch.zeros(0, 4), cast=a.cast)
        table.merge([0], [by_name(statistics(nothing))])
    table.merge([0], [by_name(statistics(b))])
    table.merge([2], [by_name(statistics(both))])
    read = slots_of(table.snapshot(), [0, 1, 2])
    assert read["num_tensors"].tolist() == [2 + with_empty, 0, 1]
    rows = [{key: torch.as_tensor(values[row]) for key, values in read.items()} for row in (0, 1, 2)]
    whole = statistics(both)
    _check("table", rows[0], whole, both)
    _check("table", rows[2], whole, both)
    for slot in slots().values():
        assert (read[slot.name][1] == slot.neutral).all(), "a row that nothing was merged into is neutral"
    again = slots_of(table.snapshot(), [0])
    assert all((again[slot.name] == slot.neutral).all() for slot in slots().values()), "a snapshot empties the table"


def test_the_table_places_every_slot_once() -> None:
    places, _ = layout()
    assert set(places) == {"num_tensors", *slots()}
    taken = [(place.group, column) for place in places.values() for column in range(place.start, place.stop)]
    assert len(taken) == len(set(taken))


def test_a_table_counts_beyond_fp32() -> None:
    """2^24 + 1 is no FP32 number; counts are int64."""
    table = Table(1, torch.device("cpu"))
    table.merge([0], [{"numel": torch.tensor(2**24), "num_zero": torch.tensor(2**53)}])
    table.merge([0], [{"numel": torch.tensor(1), "num_zero": torch.tensor(1)}])
    read = slots_of(table.snapshot(), [0])
    assert read["numel"].tolist() == [2**24 + 1] and read["num_zero"].tolist() == [2**53 + 1]

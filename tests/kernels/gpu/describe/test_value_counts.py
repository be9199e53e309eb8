"""Casts worked out from counts of BF16 values equal the reference: on the GPU, and on the CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels import reference
from fp8debug.kernels.amax_history import ReferenceAmaxHistory
from fp8debug.kernels.gpu.describe import value_counts
from fp8debug.kernels.gpu.describe.value_counts import MAX_TABLES, ValueCounts, takes
from fp8debug.kernels.reference import finite_amax
from fp8debug.kernels.slot_rows import RowLayout, Slots
from fp8debug.kernels.torch_state import NotReplayableError, own_capture
from fp8debug.recipes import Cast

pytestmark = [
    pytest.mark.twins,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = DEVICE.type == "cuda"
CURRENT, E5M2 = Cast(), Cast(format="e5m2")
DELAYED = Cast(scaling="delayed", history=3)
RECENT = Cast(scaling="delayed", history=2, algo="most_recent", margin=1, format="e5m2")
ROUNDED = Cast(scale_rounding="pow2_ceil")
FLOOR = Cast(scale_rounding="pow2_floor", amax_eps=1e-3)
STATIC = Cast(scaling="static", scale_inv=0.37)


def sample(kind: str) -> torch.Tensor:
    """``[40, 66]`` in BF16 with rows of unequal size, zero rows, and what ``kind`` says."""
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(40, 66, generator=generator) * torch.logspace(-30 if kind == "wide" else -3, 2, 40)[:, None]
    x[1::7] = 0
    if kind == "nonfinite":
        x[2, 7], x[2, 8], x[2, 9] = float("nan"), float("inf"), -float("inf")
    x *= {"subnormal": 1e-37, "huge": 1e35, "zero": 0.0}.get(kind, 1.0)
    return x.bfloat16().to(DEVICE)


def assert_same(found: Slots, x: torch.Tensor, cast: Cast, scale_inv: torch.Tensor | None = None) -> None:
    x, given = x.cpu(), None if scale_inv is None else scale_inv.cpu()
    wanted = reference.statistics(reference.operand_pair(x, cast, reference.quantize(x, cast, given)))
    (layout,) = found
    assert isinstance(layout, RowLayout)
    for names, values in layout.slots(found[layout]).items():
        for name, value in zip(names, values.cpu(), strict=True):
            want = wanted[name].double()
            if values.dtype is torch.float64:  # signed sums cancel
                near = torch.isclose(value, want, rtol=1e-6, atol=1e-9 * float(wanted["sum_x2"].sqrt()))
            else:
                quotient = name in ("worst_block_nmse", "max_block_range_log2")
                near = torch.isclose(value.double(), want, rtol=1e-6 if quotient else 0.0, atol=0.0)
            assert near, (name, value.item(), want.item())


def what_if(counts: ValueCounts, x: torch.Tensor, cast: Cast, place: str) -> Slots:
    return counts.what_if(x, {"": cast}, place)[0][""]


def table_of(counts: ValueCounts, x: torch.Tensor, place: str = "here") -> int:
    return counts.what_if(x, {"": CURRENT}, place)[1].number


@pytest.mark.parametrize(
    ("kind", "casts"),
    [
        ("plain", (CURRENT, E5M2, ROUNDED)),
        ("nonfinite", (FLOOR, STATIC)),
        ("subnormal", (CURRENT,)),
        ("huge", (STATIC,)),
        ("wide", (E5M2,)),
        ("zero", (FLOOR,)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_equals_reference(kind: str, casts: tuple[Cast, ...]) -> None:
    x, counts = sample(kind), ValueCounts(DEVICE)
    assert takes(x, casts)
    found, counted = counts.what_if(x, {str(cast): cast for cast in casts}, "here")
    counts.flush()
    for cast in casts:
        assert_same(found[str(cast)], x, cast)
    pair = reference.operand_pair(x.cpu(), CURRENT, reference.quantize(x.cpu(), CURRENT))
    assert torch.equal(counted.numbers.cpu(), reference.statistics(pair)["log2_hist"])


def test_histories_are_those_of_delayed_scaling() -> None:
    counts, kinds = ValueCounts(DEVICE), ("plain", "zero", "nonfinite", "plain")[: None if ALL else 2]
    known = {cast: ReferenceAmaxHistory(cast, DEVICE) for cast in (DELAYED, RECENT)}
    for kind in kinds:
        x = sample(kind)
        found, _ = counts.what_if(x, {str(cast): cast for cast in known}, "here")
        counts.flush()
        for cast, history in known.items():
            assert_same(found[str(cast)], x, cast, history.next_scale_inv(finite_amax(x)))


def test_a_history_that_waits_comes_first() -> None:
    counts, first, second = ValueCounts(DEVICE), sample("plain"), sample("plain") * 4
    waiting = what_if(counts, first, DELAYED, "here")
    apart = what_if(counts, second, DELAYED, "there")
    later = what_if(counts, second, DELAYED, "here")
    assert_same(waiting, first, DELAYED)  # by now
    assert_same(apart, second, DELAYED)
    counts.flush()
    history = ReferenceAmaxHistory(DELAYED, DEVICE)
    history.next_scale_inv(finite_amax(first))
    assert_same(later, second, DELAYED, history.next_scale_inv(finite_amax(second)))


def test_the_same_tensor_is_counted_once() -> None:
    counts, x = ValueCounts(DEVICE), sample("plain")
    table = table_of(counts, x, "a")
    assert table_of(counts, x.view(66, 40).view(40, 66), "b") == table
    x.add_(1)
    assert table_of(counts, x, "a") == table + 1 == table_of(counts, x.detach(), "a")
    assert table_of(ValueCounts(DEVICE), x.clone(), "a") == 0 and len(counts._numels) == 2


def test_a_tensor_whose_changes_nobody_counts_is_counted_each_time() -> None:
    counts = ValueCounts(DEVICE)
    with torch.inference_mode():
        x = sample("plain").clone()
    assert counts.count_alongside(x, [CURRENT], lambda table: "read") is None
    first = what_if(counts, x, CURRENT, "a")
    assert table_of(counts, x, "a") == 1
    counts.flush()
    assert_same(first, x, CURRENT)


def test_more_tensors_than_tables() -> None:
    counts, tensors = ValueCounts(DEVICE), [sample("plain") * i for i in range(1, MAX_TABLES + 2)]
    for x in tensors:
        table_of(counts, x)
    assert len(counts._numels) == 1


def test_takes_whole_bf16_alone() -> None:
    for x in (torch.ones(4, 4, device=DEVICE), torch.ones(3, 3, device=DEVICE).bfloat16()):
        assert not takes(x, [CURRENT])
    whole = torch.ones(4, 4, device=DEVICE).bfloat16()
    assert takes(whole, [CURRENT]) and not takes(whole[:, :2], [CURRENT])
    assert not takes(whole, [Cast(granularity="rowwise")])


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_streams_that_count_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that reads what another has worked out; memory that one stream gives back is kept for the other."""
    log: list[str] = []
    first, second = Stream("first", log), Stream("second", log)
    here = [(1, first)]
    monkeypatch.setattr(value_counts, "current_stream", lambda *_: here[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: log.append("kept"))
    counts = ValueCounts(DEVICE)
    table_of(counts, sample("plain"))
    assert not log
    here[0] = (2, second)
    table_of(counts, sample("wide"))
    assert log == ["second waits for first", *["kept"] * 4]
    counts.flush()
    here[0] = (1, first)
    del log[:]
    counts.flush()
    assert log == ["first waits for second", *["kept"] * 4]


def test_amax_histories_of_a_capture_stay_where_they_are() -> None:
    counts, apart = ValueCounts(DEVICE), ValueCounts(DEVICE)
    what_if(counts, sample("plain"), DELAYED, "here")
    apart.reserve(counts)
    at, (rows, width) = apart._histories.data_ptr(), apart._histories.shape
    with own_capture(object()):
        for place in range(rows):
            apart._entry(DELAYED, place)
        assert apart.has_room_for(counts) and apart._histories.data_ptr() == at
        with pytest.raises(NotReplayableError, match="amax histories"):
            apart._entry(DELAYED, rows)
        with pytest.raises(NotReplayableError, match="amax histories"):
            apart._new_history(Cast(scaling="delayed", history=width))
    counts._new_history(Cast(scaling="delayed", history=width))
    assert not apart.has_room_for(counts), "it is longer"

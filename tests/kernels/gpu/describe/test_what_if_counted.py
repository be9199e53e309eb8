"""Tensors that are counted in the pass that describes a 1x128 cast, and what follows from the counts, equal the reference."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels import reference
from fp8debug.kernels.gpu.describe import value_counts_split
from fp8debug.kernels.gpu.describe import what_if as observe_counted
from fp8debug.kernels.gpu.describe import what_if as observe_module
from fp8debug.kernels.gpu.describe.value_counts import ValueCounts
from fp8debug.kernels.gpu.describe.what_if import observe
from fp8debug.kernels.gpu.quantize.tile_plan import fast_plan_of
from fp8debug.kernels.gpu.quantize.tiling import OPERAND, Job, Statistics
from fp8debug.kernels.gpu.scratch import flush
from fp8debug.kernels.slot_rows import ROW_WORDS
from fp8debug.recipes import Cast
from tests.kernels.gpu.describe import test_value_counts as counting
from tests.kernels.gpu.describe.test_value_counts import ALL, DEVICE
from tests.kernels.gpu.quantize.test_tile_kernel import KINDS, assert_same_slots, quantized, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILE, CURRENT, DELAYED, E5M2 = Cast(granularity="1x128"), Cast(), Cast(scaling="delayed"), Cast(format="e5m2")
STATIC = Cast(scaling="static", scale_inv=0.37, format="e5m2")
FLOOR = Cast(scale_rounding="pow2_floor", amax_eps=1e-3)
SHAPE = (256, 384)


def table_of(x: torch.Tensor) -> torch.Tensor:
    """Return how often each bit pattern is there but for zeros, in a table's order."""
    bits = x.cpu().contiguous().view(torch.int16).flatten().int() & 0xFFFF
    table = torch.bincount((bits & 0x7FFF) * 2 + (bits >> 15), minlength=65536).int()
    table[:2] = 0
    return table.to(x.device)


def same(found: Statistics, x: torch.Tensor, casts: list[Cast], scales: list[torch.Tensor | None]) -> None:
    for i, (cast, scale) in enumerate(zip(casts, scales, strict=True)):
        assert_same_slots(found.slots(i), x, cast, quantized(x, cast, scale))


@pytest.mark.twins
@pytest.mark.parametrize("kind", KINDS if ALL else ["nonfinite"])
def test_one_tensor_by_many_programs(kind: str) -> None:
    """Whose counts and 1x128 cast are there already; three casts and the histogram, and then the histogram alone."""
    x, given = sample(kind, (16, 128)), torch.tensor([0.01], device=DEVICE)
    expected = reference.statistics(reference.operand_pair(x.cpu(), TILE, quantized(x, TILE)))
    words, hist = torch.full((4, ROW_WORDS), -1, device=DEVICE), torch.full((64,), -1, device=DEVICE)
    for group in OPERAND.groups:
        group.of(words)[0] = torch.stack([expected[name] for name in group.names]).to(group.dtype)
    memory = torch.zeros(value_counts_split.TABLE_SIZE, dtype=torch.int32, device=DEVICE)
    parts = torch.empty(value_counts_split.PARTS_SIZE, dtype=torch.float64, device=DEVICE)
    kinds = (
        (value_counts_split.GIVEN.value, 0, 0),
        (value_counts_split.CURRENT.value, 1, 0),
        (value_counts_split.CURRENT.value, 0, 2),
    )
    nothing = (value_counts_split.NONE.value, 0, 0)
    for specs in (kinds, (nothing,) * 3):
        memory[: 1 << 16] = table_of(x)
        hist.fill_(-1)
        arguments = memory, words, parts, hist, x.numel(), given, given, given, 0.0, 0.0, 1e-3
        value_counts_split.split_kernel[(value_counts_split.NUM_PROGRAMS,)](*arguments, *specs, num_warps=4)
        assert not memory.any() and torch.equal(hist.cpu(), expected["log2_hist"])
    counts, sums, maxima, minima = (group.of(words[1:]) for group in OPERAND.groups)
    same(Statistics(counts, sums, maxima, minima, hist), x, [DELAYED, E5M2, FLOOR], [given, None, None])


@pytest.mark.twins
def test_a_tensor_that_was_counted_beside_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    value_counts, x = ValueCounts(DEVICE), counting.sample("plain")
    assert value_counts.count_alongside(x, [TILE], lambda table: pytest.fail("no cast of the counts is wanted")) is None

    def read(table: Any) -> str:
        value_counts._tables[0] += table_of(x)
        return "found"

    assert value_counts.count_alongside(x, [TILE, CURRENT], read) == "found"
    assert value_counts.count_alongside(x, [CURRENT], lambda table: pytest.fail("it is counted already")) is None
    monkeypatch.setattr(value_counts, "_new_counting", lambda size: pytest.fail("it is counted already"))
    found, hist = value_counts.what_if(x, {"current": CURRENT}, "here")
    value_counts.flush()
    counting.assert_same(found["current"], x, CURRENT)
    pair = reference.operand_pair(x.cpu(), CURRENT, reference.quantize(x.cpu(), CURRENT))
    assert torch.equal(hist.numbers.cpu(), reference.statistics(pair)["log2_hist"])


@pytest.mark.twins
def test_a_kernel_that_does_not_start_leaves_the_tensor_to_be_counted() -> None:
    value_counts, x = ValueCounts(DEVICE), counting.sample("plain")

    def read(table: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        value_counts.count_alongside(x, [CURRENT], read)
    found, _ = value_counts.what_if(x, {"current": CURRENT}, "here")
    value_counts.flush()
    counting.assert_same(found["current"], x, CURRENT)


def odd(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    x = sample(kind if kind in KINDS else "plain", shape)
    if kind == "sparse":
        x[torch.rand(shape, device="cuda") < 0.6] = 0
    elif kind == "wide":
        x = (torch.randn(shape, device="cuda") * torch.logspace(-30, 30, shape[0], device="cuda")[:, None]).bfloat16()
    elif kind == "patterns":
        x = torch.arange(1 << 16, device="cuda").int().short().view(torch.bfloat16).repeat(2)[: shape[0] * shape[1]].view(shape)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "sparse", "wide", "patterns"])
@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
def test_every_pattern_is_counted_in_the_same_pass(granularity: str, kind: str) -> None:
    cast = Cast(granularity=granularity)
    x = odd(kind, SHAPE)
    for out in ("rows", ""):
        plan = fast_plan_of(x, Job(cast, out, True))
        assert plan is not None and plan.counting is not None
        table = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        made, row = plan.counting(x, True, table.data_ptr())
        flush(x.device)
        assert torch.equal(table, table_of(x)) and row is not None
        slots = {name: v for names, values in OPERAND.slots(row).items() for name, v in zip(names, values, strict=True)}
        assert_same_slots(slots, x, cast, quantized(x, cast))
        if made is not None:
            alone, _ = plan(x)
            assert alone is not None and torch.equal(made[0].view(torch.uint8), alone[0].view(torch.uint8))
            assert torch.equal(made[1], alone[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "sparse", "wide"])
def test_casts_of_one_scale_and_the_histogram_from_one_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, scale = odd(kind, SHAPE), torch.tensor(0.01, device="cuda")
    taken: list[int] = []
    own = observe_counted.observe_counted

    def noted(*arguments: Any) -> Statistics:
        taken.append(1)
        return own(*arguments)

    monkeypatch.setattr(observe_module, "observe_counted", noted)
    wanted: list[tuple[list[Cast], list[torch.Tensor | None], bool]] = [
        ([TILE, DELAYED], [None, scale], True),
        ([E5M2, TILE, STATIC, FLOOR], [None] * 4, True),
        ([TILE], [None], True),
        ([CURRENT, TILE], [None] * 2, False),
    ]
    hist = reference.statistics(reference.operand_pair(x.cpu(), TILE, quantized(x, TILE)))["log2_hist"]
    for casts, scales, histogram in wanted:
        found = observe(x, casts, scales, histogram=histogram)
        same(found, x, casts, scales)
        assert torch.equal(found.log2_hist.cpu(), hist if histogram else hist[:0])
    assert len(taken) == len(wanted)


@pytest.mark.gpu
def test_the_same_bits_in_every_run_on_every_stream_and_in_graphs() -> None:
    x, scale = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16), torch.tensor(0.01, device="cuda")
    look = partial(observe, x, [TILE, DELAYED], [None, scale], histogram=True)
    first = look()
    same(first, x, [TILE, DELAYED], [None, scale])
    graphs, results = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results += [look(), look()]
    for _ in range(3):
        for graph in graphs:
            graph.replay()
        results.append(look())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graphs[0].replay()
        results += [look(), look()]
    torch.cuda.synchronize()
    for other in results:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_casts_with_other_blocks_or_without_one_go_the_general_way() -> None:
    x = sample("plain", SHAPE)
    for casts in ([CURRENT, DELAYED], [TILE, Cast(granularity="128x1")], [TILE]):
        jobs = [Job(cast, "", True) for cast in casts]
        assert observe_counted.plan_for(x, jobs, False) is None
    assert observe_counted.plan_for(x[:250], [Job(TILE, "", True), Job(CURRENT, "", True)], True) is None


def test_rows_stand_in_the_order_of_the_casts() -> None:
    words = torch.arange(4)[:, None].expand(4, ROW_WORDS)
    found = [observe_counted.in_order(words, blocks, 4)[:, 0].tolist() for blocks in range(4)]
    assert found == [[0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 0, 3], [1, 2, 3, 0]]
    assert observe_counted.in_order(words, 1, 2)[:, 0].tolist() == [1, 0]


def test_a_delayed_cast_without_its_scale_goes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its margin holds for the scale of its own amax too."""
    monkeypatch.setattr(observe_counted, "fast_plan_of", lambda x, job: SimpleNamespace(counting="plan"))
    x, scale, tile = torch.empty(64, 128), torch.ones(1), Job(TILE, "", True)
    assert observe_counted.plan_for(x, [tile, Job(DELAYED, "", True, scale)], False) is not None
    assert observe_counted.plan_for(x, [tile, Job(DELAYED, "", True)], False) is None

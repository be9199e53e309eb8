"""Two casts from one read, along rows and along columns, which runs on a GPU alone: equal to the reference, and counted too."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from fp8debug.kernels.gpu import launcher
from fp8debug.kernels.gpu.quantize import fast_plan, two_way_plan
from fp8debug.kernels.gpu.quantize.tiling import OPERAND
from fp8debug.kernels.gpu.quantize.two_way_kernel import put_at, take_at
from fp8debug.kernels.gpu.quantize.two_way_plan import TwoWayPlan, two_way_plan_of
from fp8debug.kernels.gpu.scratch import flush
from fp8debug.kernels.slot_rows import SlotRow
from fp8debug.recipes import Cast
from fp8debug.types import Quantized
from tests.kernels.gpu.describe.test_what_if_counted import odd, table_of
from tests.kernels.gpu.quantize.test_tile_kernel import KINDS, assert_same_codes, assert_same_slots, quantized, sample

ACROSS, DOWN = Cast(granularity="1x128"), Cast(granularity="128x1")
SHAPE = (256, 384)


def plan_for(x: torch.Tensor, across: Cast = ACROSS, down: Cast = DOWN, *, statistics: bool = True) -> TwoWayPlan:
    plan = two_way_plan_of(x, across, down, statistics)
    assert plan is not None
    return plan


def slots_of(row: SlotRow) -> dict[str, torch.Tensor]:
    return {name: v for names, values in OPERAND.slots(row).items() for name, v in zip(names, values, strict=True)}


def check(x: torch.Tensor, across: Cast = ACROSS, down: Cast = DOWN) -> None:
    """Without statistics, with them at once, and with them later."""
    plain, no_rows = plan_for(x, across, down, statistics=False)(x)
    later, rows = plan_for(x, across, down)(x, True)
    now, found = plan_for(x, across, down)(x)
    flush(x.device)
    assert found is not None and rows is not None and no_rows is None
    for i, cast in enumerate((across, down)):
        expected = quantized(x, cast)
        for made in (Quantized(*pair[i]) for pair in (plain, now, later)):
            assert_same_codes(made, expected, x)
            assert made.data.stride(i) == made.data.shape[1 - i] and made.data.stride(1 - i) == 1
        for slots in (slots_of(found[i]), slots_of(rows[i])):
            assert_same_slots(slots, x, cast, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "sparse", "equal", "wide", "patterns"])
def test_equals_the_reference(kind: str) -> None:
    x = odd(kind, SHAPE)
    if kind == "equal":
        x.fill_(-0.7)
    check(x)
    view = torch.zeros(SHAPE[0], 512, dtype=x.dtype, device=x.device)[:, 64 : 64 + SHAPE[1]]
    check(view.copy_(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "sparse", "wide", "patterns"])
def test_every_pattern_is_counted_in_the_same_pass(kind: str) -> None:
    x = odd(kind, SHAPE)
    plan = plan_for(x)
    assert plan.counting is not None and plan.counting.counting is None and plan_for(x, statistics=False).counting is None
    for later in (True, False):
        table = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        made, rows = plan.counting(x, later, table.data_ptr())
        flush(x.device)
        assert torch.equal(table, table_of(x)) and rows is not None
        for row, cast, (data, scale_inv) in zip(rows, (ACROSS, DOWN), made, strict=True):
            expected = quantized(x, cast)
            assert_same_codes(Quantized(data, scale_inv), expected, x)
            assert_same_slots(slots_of(row), x, cast, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("cast", ["e5m2", "e4m3fn pow2_ceil", "e4m3fn eps=0.01"])
def test_formats_roundings_and_eps(cast: str) -> None:
    number_format, *rest = cast.split()
    x = sample("outliers", SHAPE)
    down = Cast.parse(" ".join([number_format, "128x1 current", *rest]))
    check(x, Cast.parse(" ".join([number_format, "1x128 current", *rest])), down)
    if cast.endswith("eps=0.01"):
        check(x, ACROSS, down)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 128), (128, 4096), (4096, 128), (2176, 2432)], ids=str)
def test_one_tile_many_programs_and_more_tiles_than_programs(shape: tuple[int, int]) -> None:
    check(sample("plain", shape))


@pytest.mark.gpu
def test_the_same_bits_in_every_run_and_in_graphs() -> None:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def look() -> list[torch.Tensor]:
        made, rows = plan_for(x)(x)
        assert rows is not None
        slots = [value for row in rows for value in slots_of(row).values()]
        codes, scales = zip(*made, strict=True)
        return [*(part.view(torch.uint8) for part in codes), *scales, *slots]

    first = look()
    check(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = look()
    for _ in range(10):
        graph.replay()
        for other in (look(), captured):
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_it_waits_for_nothing() -> None:
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    plan_for(x)(x, True)
    plan_for(x)(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan_for(x, statistics=False)(x)
        plan_for(x)(x)
        plan_for(x)(x, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    flush(x.device)


@pytest.mark.gpu
def test_other_casts_and_tensors_have_no_plan() -> None:
    x = sample("plain", SHAPE)
    others = [
        (ACROSS, Cast(granularity="128x128")),
        (Cast(granularity="1x32"), DOWN),
        (ACROSS, Cast(granularity="128x1", scaling="static", scale_inv=1.0)),
        (ACROSS, Cast(granularity="128x1", format="e5m2")),
        (Cast(granularity="1x128", scale_rounding="pow2_ceil"), DOWN),
    ]
    for across, down in others:
        assert two_way_plan_of(x, across, down, True) is None
    for one in (x[:200], x[:, :200], x.half(), x.t().contiguous().t()):
        assert two_way_plan_of(one, ACROSS, DOWN, True) is None


def test_the_largest_tensor_has_no_more_tiles_a_program_than_its_counters_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """993 tiles for each of 132 programs; 32 zeros of each are counted in 15 bits."""
    programs: list[Any] = []
    monkeypatch.setattr(fast_plan, "is_hopper", lambda device: True)
    monkeypatch.setattr(two_way_plan, "can_share", lambda: True)
    monkeypatch.setattr(two_way_plan, "TwoWayPlan", lambda *arguments: programs.append(arguments[-1]))
    x = torch.empty(1 << 15, (1 << 16) - 128, dtype=torch.bfloat16, device="meta")
    for sms, statistics, taken in ((132, True, True), (114, True, False), (114, False, True)):
        monkeypatch.setattr(two_way_plan, "num_sms", lambda device, sms=sms: sms)
        programs.clear()
        two_way_plan._two_way_plan(x, ACROSS, DOWN, statistics)
        assert len(programs) == taken
        if statistics and taken:
            assert 32 * -(-x.numel() // (128 * 128 * programs[-1])) <= 0x7FFF


def test_without_a_way_to_more_shared_memory_it_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(fast_plan, "is_hopper", lambda device: True)
    monkeypatch.setattr(two_way_plan, "num_sms", lambda device: 132)
    monkeypatch.setattr(two_way_plan, "TwoWayPlan", lambda *_: "taken")
    for can in (True, False):
        monkeypatch.setattr(two_way_plan, "can_share", lambda can=can: can)
        assert (two_way_plan._two_way_plan(x, ACROSS, DOWN, False) is not None) is can


def test_more_shared_memory_is_asked_of_releases_and_drivers_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    for release, driver, can in (("3.6.0", object, True), ("4.0.0", object, False), ("3.6.0", nowhere, False)):
        monkeypatch.setattr(triton, "__version__", release)
        monkeypatch.setattr(launcher, "_driver", driver)
        launcher.can_share.cache_clear()
        assert launcher.can_share() is can
    launcher.can_share.cache_clear()


def exchanged() -> tuple[list[list[tuple[int, int]]], list[list[int]]]:
    """Return each of 512 threads' elements of a tile, as (row, column), and the addresses of accesses that happen at once."""
    memory: dict[int, tuple[int, int]] = {}
    accesses: list[list[int]] = []
    for warp, h, matrix in product(range(16), range(4), range(4)):
        accesses.append([put_at.fn(8 * warp, 8 * matrix + j) + 8192 * h for j in range(8)])
        for j, i in product(range(8), range(8)):
            memory[accesses[-1][j] + 2 * i] = (8 * warp + i, 32 * h + 8 * (j // 2) + 2 * matrix + j % 2)
    taken: list[list[tuple[int, int]]] = []
    for column, lane in product(range(128), range(4)):
        first = take_at.fn(column, lane)
        at = [(first ^ 64 * (h % 2)) + 128 * (h // 2) for h in range(4)]
        taken.append([memory[a + 2 * i] for a in at for i in range(8)])
        if column % 2 == lane == 0:
            accesses += [[], [], [], []]
        for h in range(4):
            accesses[h - 4].append(at[h])
    return taken, accesses


def test_threads_get_the_elements_of_a_column_and_no_access_meets_in_a_bank() -> None:
    taken, accesses = exchanged()
    for (column, lane), got in zip(product(range(128), range(4)), taken, strict=True):
        assert got == [(32 * h + 8 * lane + i, column) for h in range(4) for i in range(8)]
    for rows in accesses:
        assert len({at // 16 % 8 for at in rows}) == 8

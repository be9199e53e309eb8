"""The fast kernel, which runs on a GPU alone: equal to the reference, as is the kernel that takes its place elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels.gpu.describe.what_if import observe
from fp8debug.kernels.gpu.launcher import PlanCache
from fp8debug.kernels.gpu.quantize import fast_plan, tile_plan, tiling
from fp8debug.kernels.gpu.quantize.quantize import quantize
from fp8debug.kernels.gpu.quantize.statistics import FINISHED, reduce_kernel
from fp8debug.kernels.gpu.quantize.tiling import OPERAND, Job
from fp8debug.kernels.gpu.scratch import pool
from fp8debug.kernels.slot_rows import ROW_WORDS
from fp8debug.recipes import Cast
from tests.kernels.gpu.quantize.test_tile_kernel import (
    DEVICE,
    KINDS,
    assert_same_codes,
    assert_same_slots,
    check,
    quantized,
    sample,
)

LAYOUTS = [("1x128", "rows"), ("128x1", "columns"), ("128x128", "rows"), ("128x128", "columns")]
SHAPE = (256, 384)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "sparse", "equal"])
@pytest.mark.parametrize(("granularity", "layout"), LAYOUTS)
def test_equals_the_reference_and_the_general_kernel(
    granularity: str, layout: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = sample(kind, SHAPE)
    if kind == "sparse":
        x[torch.rand(SHAPE, device="cuda") < 0.3] = 0
    elif kind == "equal":
        x.fill_(0.7)
    cast = Cast(granularity=granularity)
    assert fast_plan.fast_plan(x, Job(cast, layout, True)) is not None
    check(x, cast, layout=layout)
    assert_same_slots(observe(x, [cast]).slots(), x, cast, quantized(x, cast))
    monkeypatch.setattr(tile_plan, "_fast", lambda *_: None)
    monkeypatch.setattr(tile_plan, "_PLANS", PlanCache())
    check(x, cast, layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("cast", ["e5m2 1x128 current", "e4m3fn 1x128 current pow2_ceil", "e4m3fn 1x128 current eps=0.01"])
def test_formats_roundings_and_eps(cast: str) -> None:
    check(sample("outliers", SHAPE), Cast.parse(cast))


@pytest.mark.gpu
def test_every_amax_of_the_fast_range() -> None:
    patterns = torch.arange(0x2500, 0x5D00, dtype=torch.int32).short().view(torch.bfloat16)
    x = torch.cat([patterns[:, None].expand(-1, 128), patterns[:, None].expand(-1, 128) * 0.75], 1).contiguous().cuda()
    check(x, Cast(granularity="1x128"))


@pytest.mark.gpu
@pytest.mark.parametrize(("granularity", "layout"), LAYOUTS)
def test_statistics_that_wait(granularity: str, layout: str) -> None:
    cast, plans = Cast(granularity=granularity), []
    for kind in ("plain", "nonfinite", "zero"):
        x = sample(kind, SHAPE)
        plan = fast_plan.fast_plan(x, Job(cast, layout, True))
        assert plan is not None
        plans.append((x, *plan(x, deferred=True)))
    pool(x.device).flush()
    for x, made, row in plans:
        assert made is not None and row is not None
        assert_same_codes(type(quantized(x, cast))(*made), quantized(x, cast), x)
        slots = {name: v for names, values in OPERAND.slots(row).items() for name, v in zip(names, values, strict=True)}
        assert_same_slots(slots, x, cast, quantized(x, cast))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["1x128", "128x128"])
def test_many_programs_and_the_same_bits_in_every_run(granularity: str) -> None:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    cast = Cast(granularity=granularity)
    runs = [quantize(x, cast, statistics=True)[1] for _ in range(20)]
    assert runs[0] is not None
    for other in runs[1:]:
        assert other is not None and all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert_same_slots(runs[0].slots(), x, cast, quantized(x, cast))


@pytest.mark.parametrize(("granularity", "layout"), LAYOUTS)
def test_no_more_tiles_a_program_than_its_counters_hold(granularity: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that is taken gives each program of 132 multiprocessors 993 tiles; 32 zeros of each are counted."""
    programs: list[Any] = []
    monkeypatch.setattr(fast_plan, "is_hopper", lambda device: True)
    monkeypatch.setattr(fast_plan, "FastPlan", lambda *arguments: programs.append(arguments[-1]))
    x = torch.empty(1 << 15, (1 << 16) - 128, dtype=torch.bfloat16, device="meta")
    for sms, statistics, taken in ((132, True, True), (114, True, False), (114, False, True)):
        monkeypatch.setattr(fast_plan, "num_sms", lambda device, sms=sms: sms)
        job = Job(Cast(granularity=granularity), layout, statistics)
        programs.clear()
        fast_plan.fast_plan(x, job)
        assert len(programs) == taken
        if statistics and taken:
            tiles = x.numel() // (128 * (128 if granularity == "128x128" else 32))
            assert 32 * -(-tiles // programs[-1]) <= 0x7FFF


@pytest.mark.twins
def test_finished_parts_are_summed_and_compared() -> None:
    parts = torch.randint(1, 100, (21, 32), device=DEVICE).double()
    parts[:, 25], parts[3, 25] = 4.0, 8.0  # amax / amin
    slots = parts[:, :28]
    row, nothing = torch.zeros(ROW_WORDS, dtype=torch.int64, device=DEVICE), torch.ones(1, device=DEVICE)
    into = [group.of(row) for group in OPERAND.groups]
    numbers = [1, 1, 1, FINISHED.value, 1, 1, 0.0, 0.0, 0.0, 448.0, 448.0, 448.0, 0, 0, 0, 1.0, 1.0, 1.0]
    reduce_kernel[(1,)](parts, nothing, *into, into[0], 21, 1, 99, 0, nothing, nothing, nothing, *numbers, 16, False, num_warps=8)
    counts, sums, maxima, minima = (group.of(row).double() for group in OPERAND.groups)
    num_scales = slots[:, 8:9].sum(0) - slots[:, 9:10].sum(0)
    assert torch.equal(counts, torch.cat([slots[:, :12].sum(0), num_scales])) and torch.equal(sums, slots[:, 12:20].sum(0))
    assert torch.equal(maxima[:5], slots[:, 20:25].amax(0)) and maxima[5] == 3
    assert torch.equal(minima, -slots[:, 26:].amax(0))


def test_the_driver_is_asked_once_what_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every tensor it takes the host longer than a launch does."""
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return (9, 0) if device.index == 98 else (8, 9)

    monkeypatch.setattr("fp8debug.kernels.gpu.device.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    hopper, ada = (torch.device("cuda", index) for index in (98, 99))  # which no machine has
    assert [tiling.is_hopper(device) for device in (hopper, ada)] == [True, False]
    num_asked = len(asked)
    assert [tiling.is_hopper(device) for device in (hopper, ada)] == [True, False] and len(asked) == num_asked

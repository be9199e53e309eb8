"""The fast kernel, which runs on a GPU alone: equal to the reference, and to the kernel that the interpreter runs too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels import triton_execute, triton_fast_plan
from fp8debug.kernels.observe import observe
from fp8debug.kernels.observe_pool import pool
from fp8debug.kernels.quantize import quantize
from fp8debug.kernels.triton_launch import OPERAND, Job
from fp8debug.recipes import Cast
from tests.kernels.test_triton_quantize import KINDS, assert_same_codes, assert_same_slots, check, quantized, sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PTX runs on a GPU alone")
LAYOUTS = [("1x128", "rows"), ("128x1", "columns"), ("128x128", "rows"), ("128x128", "columns")]
SHAPE = (256, 384)


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
    assert triton_fast_plan.fast_plan(x, Job(cast, layout, True)) is not None
    check(x, cast, layout=layout)
    assert_same_slots(observe(x, [cast]).slots(), x, cast, quantized(x, cast))
    monkeypatch.setattr(triton_execute, "_fast", lambda *_: None)
    monkeypatch.setattr(triton_execute, "_PLANS", {})
    check(x, cast, layout=layout)


@pytest.mark.parametrize("cast", ["e5m2 1x128 current", "e4m3fn 1x128 current pow2_ceil", "e4m3fn 1x128 current eps=0.01"])
def test_formats_roundings_and_eps(cast: str) -> None:
    check(sample("outliers", SHAPE), Cast.parse(cast))


def test_every_amax_of_the_fast_range() -> None:
    patterns = torch.arange(0x2500, 0x5D00, dtype=torch.int32).short().view(torch.bfloat16)
    x = torch.cat([patterns[:, None].expand(-1, 128), patterns[:, None].expand(-1, 128) * 0.75], 1).contiguous().cuda()
    check(x, Cast(granularity="1x128"))


@pytest.mark.parametrize(("granularity", "layout"), LAYOUTS)
def test_statistics_that_wait(granularity: str, layout: str) -> None:
    cast, plans = Cast(granularity=granularity), []
    for kind in ("plain", "nonfinite", "zero"):
        x = sample(kind, SHAPE)
        plan = triton_fast_plan.fast_plan(x, Job(cast, layout, True))
        assert plan is not None
        plans.append((x, *plan(x, later=True)))
    pool(x.device).flush()
    for x, made, row in plans:
        assert made is not None and row is not None
        assert_same_codes(type(quantized(x, cast))(*made), quantized(x, cast), x)
        slots = {name: v for names, values in OPERAND.slots(row).items() for name, v in zip(names, values, strict=True)}
        assert_same_slots(slots, x, cast, quantized(x, cast))


def test_many_programs_and_the_same_bits_in_every_run() -> None:
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    cast = Cast(granularity="1x128")
    runs = [quantize(x, cast, statistics=True)[1] for _ in range(20)]
    assert runs[0] is not None
    for other in runs[1:]:
        assert other is not None and all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert_same_slots(runs[0].slots(), x, cast, quantized(x, cast))

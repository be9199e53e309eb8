"""The Triton quantize and observe kernels equal the reference: on the GPU, and on the CPU by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels import reference
from fp8debug.kernels.gpu.describe.what_if import observe
from fp8debug.kernels.gpu.quantize.quantize import quantize
from fp8debug.kernels.gpu.quantize.tile_plan import plan_of
from fp8debug.kernels.gpu.quantize.tiling import OPERAND, Statistics
from fp8debug.metrics import slots
from fp8debug.recipes import Cast
from fp8debug.types import Quantized
from tests.kernels.twins import assert_same_spread

pytestmark = [
    pytest.mark.twins,
    # NumPy, which the interpreter runs on, warns of the NaN and overflows that the tests mean to make.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((128, 128), (96, 264), (37, 131))
BLOCKS = ("1x128", "128x1", "128x128", "1x32", "32x1", "tensorwise", "rowwise", "columnwise")
ROUNDINGS = ("none", "pow2_ceil", "pow2_floor")
#: The interpreter takes a second for what a GPU does in none: on a CPU a choice stands for all combinations.
ALL = DEVICE == "cuda"
#: A block and a ragged rest; more of them where they cost nothing.
WIDTH = 264 if ALL else 136
KINDS = ("plain", "outliers", "nonfinite", "subnormal", "huge", "zero")

#: Every kind once in blocks and the ones that steer a whole row or tensor in those.
CHOSEN = [*(("128x1", kind) for kind in KINDS), ("rowwise", "nonfinite"), ("rowwise", "zero"), ("tensorwise", "nonfinite")]

GIVEN = [(kind, scale_inv) for kind in KINDS for scale_inv in (1e-3, 0.37, 1e3, 1e-30)]


def sample(kind: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor with a zero block, rows of unequal size, and what ``kind`` says."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind)) + shape[1])
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[0])[:, None]
    x[1::7] = 0
    x[:, 5] = 0
    if kind == "outliers":
        x[::9, 3] *= 1e4
    elif kind == "nonfinite":
        x[2, 7], x[2, 8], x[2, 9] = float("nan"), float("inf"), -float("inf")
        x[-1] = float("nan")
    elif kind == "subnormal":
        x *= 1e-4 if dtype == torch.float16 else 1e-37
    elif kind == "huge":
        x *= 1e2 if dtype == torch.float16 else 1e35
    elif kind == "zero":
        x.zero_()
    return x.to(dtype).to(DEVICE)


def quantized(x: torch.Tensor, cast: Cast, scale_inv: torch.Tensor | None = None) -> Quantized:
    """The reference on the CPU: on a GPU torch divides by a number as it multiplies by its reciprocal."""
    return reference.quantize(x.cpu(), cast, None if scale_inv is None else scale_inv.cpu())


def assert_same_codes(q: Quantized, expected: Quantized, x: torch.Tensor) -> None:
    q, x = Quantized(q.data.cpu(), q.scale_inv.cpu()), x.cpu()
    assert torch.equal(q.scale_inv, expected.scale_inv)
    assert q.data.shape == expected.data.shape and q.data.dtype == expected.data.dtype
    code, wanted = q.data.view(torch.uint8), expected.data.view(torch.uint8)
    same = (code == wanted) | x.isnan()
    assert same.all(), f"{int((~same).sum())} codes differ, first at {(~same).nonzero()[0].tolist()}"
    assert (code[x.isnan()] == 0x7F).all()


def assert_same_slots(found: dict[str, torch.Tensor], x: torch.Tensor, cast: Cast, expected: Quantized) -> None:
    found = {name: value.cpu() for name, value in found.items()}
    pair = reference.operand_pair(x.cpu(), cast, expected)
    wanted = reference.statistics(pair)
    x64, err = pair.x64.abs(), pair.error64.abs()
    scale = {"sum_x": x64.sum(), "sum_err": err.sum() + 1e-6 * x64.sum()}  # signed sums cancel
    scale["scale_inv_sum_log2"] = wanted["num_blocks"].double()
    scale["scale_inv_sum2_log2"] = wanted["num_blocks"] + wanted["scale_inv_sum2_log2"]  # twice a logarithm's error, of its size
    for name, slot in slots().items():
        if name not in wanted or (name == "log2_hist" and name not in found):
            continue
        value, want = found[name].double(), wanted[name].double()
        if slot.kind == "float64" or name == "worst_block_nmse":
            size = torch.maximum(scale.get(name, want.abs()), want.abs())
            assert (value - want).abs() <= 1e-6 * size or value == want, (name, value.item(), want.item())
        elif name == "max_block_range_log2":
            assert torch.isclose(value, want, rtol=1.2e-7, atol=0), (name, value.item(), want.item())
        else:
            assert torch.equal(value, want), (name, value.tolist(), want.tolist())
    assert_same_spread(found, wanted)


def check(x: torch.Tensor, cast: Cast, scale_inv: torch.Tensor | None = None, layout: str = "rows") -> None:
    expected = quantized(x, cast, scale_inv)
    plain, nothing = quantize(x, cast, scale_inv, layout=layout)
    assert nothing is None
    assert_same_codes(plain, expected, x)
    q, found = quantize(x, cast, scale_inv, layout=layout, statistics=True)
    assert isinstance(found, Statistics)
    assert_same_codes(q, expected, x)
    assert_same_slots(found.slots(), x, cast, expected)


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [(b, s) for i, b in enumerate(BLOCKS) for j, s in enumerate(SHAPES) if ALL or s == SHAPES[-1] or (i + j) % 4 == 0],
    ids=str,
)
def test_granularities(granularity: str, shape: tuple[int, int]) -> None:
    check(sample("plain", shape), Cast(granularity=granularity))


@pytest.mark.parametrize(
    ("granularity", "kind"),
    [(b, k) for b in ("1x128", "128x1", "tensorwise", "rowwise") for k in KINDS if ALL or (b, k) in CHOSEN],
)
def test_special_values(granularity: str, kind: str) -> None:
    check(sample(kind, (40, 264)), Cast(granularity=granularity))


@pytest.mark.parametrize("kind", ["plain", "subnormal", "huge"] if ALL else ["subnormal"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("number_format", ["e4m3fn", "e5m2"])
def test_formats_and_roundings(number_format: str, rounding: str, kind: str) -> None:
    cast = Cast(format=number_format, granularity="1x128", scale_rounding=rounding, amax_eps=1e-3)
    check(sample(kind, (32, 256)), cast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["plain", "nonfinite", "subnormal"] if ALL else ["subnormal"])
def test_dtypes(dtype: torch.dtype, kind: str) -> None:
    for shape in ((32, 256), (33, 130)) if ALL else ((33, 132),):
        check(sample(kind, shape, dtype), Cast(granularity="1x128"))


@pytest.mark.parametrize(("kind", "scale_inv"), GIVEN if ALL else GIVEN[::7])
def test_given_scale(kind: str, scale_inv: float) -> None:
    x = sample(kind, (40, WIDTH))
    check(x, Cast(scaling="delayed"), torch.tensor(scale_inv, device=DEVICE))
    check(x, Cast(scaling="static", scale_inv=scale_inv, granularity="1x128"))


@pytest.mark.parametrize("granularity", ["128x1", "128x128", "tensorwise"])
@pytest.mark.parametrize("shape", [*SHAPES, (130, 200)] if ALL else [SHAPES[1], (130, 200)], ids=str)
def test_stored_transposed(granularity: str, shape: tuple[int, int]) -> None:
    x = sample("outliers", shape)
    check(x, Cast(granularity=granularity), layout="columns")
    q, _ = quantize(x, Cast(granularity=granularity), layout="columns")
    assert q.data.t().is_contiguous()


@pytest.mark.parametrize("kind", KINDS if ALL else ["nonfinite", "huge"])
def test_observe_many_casts(kind: str) -> None:
    x = sample(kind, (72 if ALL else 40, WIDTH))
    casts = [Cast(granularity="1x128"), Cast(scaling="delayed"), Cast(granularity="1x32"), Cast(granularity="128x1")]
    scales = [None, torch.tensor(0.01, device=DEVICE), None, None]
    found = observe(x, casts, scales, histogram=True)
    for i, (cast, scale) in enumerate(zip(casts, scales, strict=True)):
        assert_same_slots(found.slots(i), x, cast, quantized(x, cast, scale))


def test_strided_and_batched_input() -> None:
    x = sample("plain", (32, 256))
    cast = Cast(granularity="1x128")
    assert_same_codes(quantize(x[:, :128], cast)[0], quantized(x[:, :128], cast), x[:, :128])
    assert_same_codes(quantize(x.t(), cast)[0], quantized(x.t(), cast), x.t())
    batched = x.reshape(4, 8, 256)
    assert_same_codes(quantize(batched, cast)[0], quantized(batched, cast), batched)


def test_empty() -> None:
    x = torch.empty(0, 128, dtype=torch.bfloat16, device=DEVICE)
    q, found = quantize(x, Cast(granularity="1x128"), statistics=True)
    assert q.data.shape == (0, 128) and q.scale_inv.shape == (0, 1)
    assert found is not None and int(found.slots()["numel"]) == 0


def test_same_bits_in_every_run() -> None:
    x = sample("outliers", (256, 264) if ALL else (96, 264))
    cast = Cast(granularity="1x128")
    first, second = (quantize(x, cast, statistics=True, histogram=True)[1] for _ in range(2))
    assert first is not None and second is not None
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_fake_matches_real() -> None:
    x = sample("plain", (64, 256) if ALL else (8, 128))
    tile, down = "e4m3fn 1x128 current", "e4m3fn 128x1 current"
    operator = torch.ops.fp8debug.quantize.default
    for arguments in ((down, "columns", None, True, False), (tile, "rows", None, False, False), (tile, "rows", None, True, True)):
        torch.library.opcheck(operator, (x, *arguments), test_utils=("test_schema", "test_faketensor"))
    scale, delayed = torch.tensor(0.01, device=DEVICE), Cast(scaling="delayed")
    for casts, scales, histogram in ((tile, [None], False), (f"{tile}; {delayed}", [None, scale], True)):
        operator = torch.ops.fp8debug.observe.default
        torch.library.opcheck(operator, (x, casts, scales, histogram), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 384), (260, 300), (132, 128), (128, 260)], ids=str)
def test_scales_of_square_blocks_lie_as_the_gemm_reads_them(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Transposed where the data are, and the same values; at once and by a plan."""
    x, cast = sample("outliers", shape, dtype), Cast(granularity="128x128")
    wanted = reference.quantize(x.cpu(), cast).scale_inv
    for _ in range(2):
        for layout in ("rows", "columns"):
            scale_inv = quantize(x, cast, layout=layout)[0].scale_inv
            assert torch.equal(scale_inv.cpu(), wanted)
            assert (scale_inv.t() if layout == "columns" else scale_inv).is_contiguous()


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize(
    ("granularity", "layout"), [("1x128", "rows"), ("128x128", "rows"), ("128x128", "columns"), ("128x1", "columns")]
)
def test_tensors_like_one_before_go_the_short_way(granularity: str, layout: str, statistics: bool) -> None:
    cast = Cast(granularity=granularity)
    for kind in ("plain", "nonfinite") if ALL or statistics else ("plain",):
        x = sample(kind, (128, WIDTH))
        quantize(x, cast, layout=layout, statistics=statistics)
        plan = plan_of(x, cast, layout, statistics)
        assert plan is not None and plan_of(x, replace(cast), layout, statistics) is plan
        made, row = plan(x)
        assert made is not None and made[0].stride(0 if layout == "columns" else 1) == 1
        assert_same_codes(Quantized(*made), quantized(x, cast), x)
        assert (row is not None) == statistics
        if row is not None:
            found = {name: v for names, values in OPERAND.slots(row).items() for name, v in zip(names, values, strict=True)}
            assert_same_slots(found, x, cast, quantized(x, cast))
    assert plan_of(x, Cast(), "rows", statistics) is None and plan_of(x[:96], cast, layout, statistics) is None

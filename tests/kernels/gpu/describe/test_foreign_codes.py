"""The kernel that describes an operand beside another library's codes equals the metrics: on a GPU, and by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels import dispatch, reference
from fp8debug.kernels.gpu.describe import foreign_kernel
from fp8debug.kernels.gpu.describe.foreign_codes import describe
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.quantize.tiling import OPERAND
from fp8debug.kernels.gpu.scratch import flush
from fp8debug.metrics import Source, slots
from fp8debug.metrics.base import spread
from fp8debug.recipes import Cast
from fp8debug.types import Quantized
from tests.kernels.twins import Largest, assert_same_spread, by_kernels_with

pytestmark = [
    pytest.mark.twins,
    # NumPy, which the interpreter runs on, warns of the NaN and overflows that the tests mean to make.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = ("1x128", "128x1", "128x128", "1x32", "32x1", "tensorwise", "rowwise", "columnwise")
#: Scales: the block's own, far too large and too small ones, and such as no cast would choose beside any codes.
SCALES = ("own", "large", "small", "any")
SHAPE = (37, 131) if DEVICE == "cpu" else (1040, 1328)
#: Where every cast has whole tiles alone.
WHOLE = (128, 128) if DEVICE == "cpu" else (1024, 2048)


def sample(kind: str = "plain", shape: tuple[int, int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor with a zero row, column and block, and what ``kind`` says."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind)) + shape[1])
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[0])[:, None]
    x[1::7] = 0
    x[:, 5::9] = 0
    x[:, 128:256] = 0
    if kind == "nonfinite":
        x[2, 7], x[2, 8], x[-1, 9] = float("nan"), float("inf"), -float("inf")
        x[4] = float("nan")
    elif kind == "subnormal":
        x *= 1e-4 if dtype == torch.float16 else 1e-38
    elif kind == "huge":
        x *= 1e2 if dtype == torch.float16 else 1e35
    elif kind == "zero":
        x.zero_()
    return x.to(dtype)


def given(x: torch.Tensor, cast: Cast, scales: str = "own") -> Quantized:
    """Return a cast as a library may have made it, on the CPU."""
    q = reference.quantize(x, cast)
    if scales == "own":
        return q
    scale_inv = q.scale_inv * {"large": 2e8, "small": 2e-3, "any": 1.0}[scales]
    if scales == "any":
        odd = torch.tensor([0.0, float("inf"), 1e-44, float("nan"), 3e38, 1.0, -1.0])
        flat = scale_inv.view(-1)
        flat[::3] = odd.repeat(len(flat))[: len(flat[::3])]
        codes = torch.randint(256, x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        return Quantized(codes.view(q.data.dtype), scale_inv)
    inverse = spread(scale_inv.reciprocal(), *block_shape(cast.granularity, *x.shape), *x.shape)
    inf = x.isinf() if x.isinf().any() else None
    return Quantized(reference.round_to_format(x.float() * inverse, FORMATS[cast.format], inf), scale_inv)


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, laid out column by column."""
    return x.t().contiguous().t()


def check(x: torch.Tensor, cast: Cast, q: Quantized, layout: str = "") -> dict[str, torch.Tensor]:
    """Compare with the reference; ``layout``: which of x, d(ata) and s(cale_inv) are stored transposed."""
    pair = reference.operand_pair(x, cast, q)
    x = x.to(DEVICE)
    stored = Quantized(q.data.to(DEVICE), q.scale_inv.to(DEVICE))
    stored = Quantized(turned(stored.data) if "d" in layout else stored.data, stored.scale_inv)
    stored = Quantized(stored.data, turned(stored.scale_inv) if "s" in layout else stored.scale_inv)
    found = slots_of(describe(Source(turned(x) if "x" in layout else x), cast, stored))
    wanted = reference.statistics(pair, "log2_hist")
    assert found.keys() == wanted.keys()
    size = {"sum_x": pair.x64.abs().sum(), "sum_err": pair.error64.abs().sum(), "scale_inv_sum_log2": wanted["num_blocks"]}
    size["scale_inv_sum2_log2"] = wanted["num_blocks"] + wanted["scale_inv_sum2_log2"]
    for name, slot in {name: slot for name, slot in slots().items() if name in wanted}.items():
        value, want = found[name].double(), wanted[name].double()
        if slot.kind == "float64" or name == "worst_block_nmse":
            near = 1e-6 * torch.maximum(size.get(name, want.abs()).double(), want.abs())
            is_near = bool((value - want).abs() <= near) or torch.equal(value, want) or bool(value.isnan() and want.isnan())
            assert is_near, (name, value.item(), want.item())
        elif name == "max_block_range_log2":
            torch.testing.assert_close(value, want, rtol=1.2e-7, atol=0)
        else:
            assert torch.equal(value, want) or (value.isnan() and want.isnan()), (name, value.item(), want.item())
    assert_same_spread(found, wanted)
    return found


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether programs went over their units in FP64; nothing on a GPU, where nobody can tell."""
    taken: list[bool] = []
    exact = foreign_kernel.exact_units

    def noted(*arguments: object) -> object:
        taken.append(True)
        return exact(*arguments)

    if INTERPRETED:
        monkeypatch.setattr(foreign_kernel, "exact_units", noted)
    return taken


def slots_of(found: object) -> dict[str, torch.Tensor]:
    """A row that waits, on the CPU."""
    assert isinstance(found, dict) and list(found) == [OPERAND]
    flush(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"))
    rows = OPERAND.slots(found[OPERAND]).items()
    return {name: value for names, values in rows for name, value in zip(names, values.cpu(), strict=True)}


@pytest.mark.parametrize(
    ("granularity", "scales"),
    [(b, s) for b in BLOCKS for s in SCALES if s in ("own", "any") or b in ("1x128", "32x1", "tensorwise")],
)
def test_granularities_and_scales(granularity: str, scales: str) -> None:
    """In turn both formats, and everything stored transposed or not."""
    number = BLOCKS.index(granularity) + SCALES.index(scales)
    cast = Cast(granularity=granularity, format=("e4m3fn", "e5m2")[number % 2], amax_eps=1e-2)
    layout = ("", "d", "xd", "ds", "x")[number % 5]
    x = sample()
    found = check(x, cast, given(x, cast, scales), layout)
    if granularity not in ("tensorwise", "rowwise", "columnwise"):
        assert int(found["num_zero_blocks"]) and (granularity != "1x128" or int(found["num_eps_blocks"]))
    if scales == "large":
        assert int(found["num_underflow"]) > 100
    if scales == "small":
        assert int(found["num_saturated"]) > 100 and float(found["headroom"]) > 100
    if scales == "any" and granularity != "tensorwise":
        assert int(found["num_actual_nonfinite"]) > 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["nonfinite", "subnormal", "huge", "zero"])
def test_special_values(kind: str, dtype: torch.dtype) -> None:
    """In turn under blocks across, blocks down and one scale."""
    x = sample(kind, (17, 40), dtype)
    kinds = ["nonfinite", "subnormal", "huge", "zero"]
    granularity = ("1x128", "128x1", "tensorwise")[(kinds.index(kind) + dtype.itemsize + (dtype is torch.float16)) % 3]
    cast = Cast(granularity=granularity)
    found = check(x, cast, given(x, cast))
    assert int(found["num_nan"]) + int(found["num_inf"]) == int((~x.isfinite()).sum())


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("layout", ["", "d", "x", "xd"])
def test_whole_tiles_take_the_fast_pass(granularity: str, layout: str, again: list[bool]) -> None:
    """In turn all dtypes, formats and roundings of scales."""
    number = BLOCKS.index(granularity) + len(layout)
    number_format, rounding = (("e4m3fn", "none"), ("e5m2", "pow2_ceil"))[number % 2]
    cast = Cast(granularity=granularity, format=number_format, scale_rounding=rounding, amax_eps=1e-2)
    x = sample(shape=WHOLE, dtype=torch.float32)
    x[::2, 3:5] *= torch.tensor([3e-4, 1e-7])  # codes below the smallest normal, and none, of E4M3
    x = x.to((torch.bfloat16, torch.float16, torch.float32)[number % 3])
    found = check(x, cast, given(x, cast), layout)
    assert not again
    assert int(found["num_zero"]) > 100
    assert number_format == "e5m2" or (int(found["num_underflow"]) and int(found["num_subnormal"]))


def nan(x: torch.Tensor) -> None:
    x[2, 7] = float("nan")


def infinite(x: torch.Tensor) -> None:
    x[2, 7] = -float("inf")


def constant_and_small(x: torch.Tensor) -> None:
    x[:] = 1.1e-13


#: What the fast pass must leave to the exact one: how a tensor is changed, and the scales of ``given``.
ODD: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "nan": (nan, "own"),
    "inf": (infinite, "own"),
    "above 2^60": (lambda x: x.mul_(1e20), "own"),
    "a square below FP32's normal numbers": (lambda x: x.mul_(1e-25), "own"),
    "errors that are roundings of FP32": (constant_and_small, "own"),
    "saturated": (lambda x: x, "small"),
    "most of the energy lost": (lambda x: x, "large"),
    "codes and scales of no cast": (lambda x: x, "any"),
}


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("kind", ODD)
def test_what_the_fast_pass_leaves_to_the_exact_one(kind: str, turn: int, again: list[bool]) -> None:
    """In turn under two kinds of blocks, with two others for the next."""
    granularity = (("1x128", "tensorwise"), ("128x128", "32x1"))[list(ODD).index(kind) % 2][turn]
    change, scales = ODD[kind]
    x, cast = sample(shape=WHOLE, dtype=torch.float32), Cast(granularity=granularity)
    change(x)
    check(x, cast, given(x, cast, scales), "d" if granularity == "128x128" else "")
    assert again or not INTERPRETED


@pytest.mark.parametrize("scale_inv", [1.0, 0.0, float("inf"), float("nan")])
def test_one_element_and_a_zero_block(scale_inv: float) -> None:
    """A zero block's scale says nothing, whatever a library writes there."""
    cast = Cast(scaling="delayed")
    for value in (3.0, 0.0):
        x = torch.full((1, 1), value)
        q = Quantized(reference.quantize(x, cast).data, torch.full((1, 1), scale_inv))
        found = check(x, cast, q)
        assert int(found["num_eps_blocks"]) == 0  # which a delayed scale has none of
        if value == 0.0:
            assert float(found["headroom"]) == float("-inf") and float(found["scale_inv_sum_log2"]) == 0.0


def test_what_saturates_is_known_without_a_division() -> None:
    """Magnitudes around the limit, of scales that are no powers of two, as a division of FP32 has them."""
    generator = torch.Generator().manual_seed(0)
    for number_format in ("e4m3fn", "e5m2"):
        scale_inv = torch.cat([torch.rand(29, 1, generator=generator) + 0.5, torch.tensor([[1e-44], [3e-40], [7e35]])])
        limit = torch.tensor(FORMATS[number_format].max * (1 + 2.0**-20)) * scale_inv
        steps = torch.arange(-8, 8)
        x = (limit.view(torch.int32) + steps).view(torch.float32)
        cast = Cast(granularity="1x128", format=number_format, scaling="static", scale_inv=1.0)
        data = torch.full(x.shape, FORMATS[number_format].max).to(getattr(torch, FORMATS[number_format].torch_dtype))
        found = check(x, cast, Quantized(data, scale_inv))
        assert 0 < int(found["num_saturated"]) < x.numel()


def test_same_bits_in_every_run() -> None:
    x, cast = sample(), Cast(granularity="1x128")
    q = given(x, cast)
    first, second = (check(x, cast, q) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_no_kernel_takes() -> None:
    x = sample(shape=(4, 16)).to(DEVICE)
    q = Quantized(torch.zeros(4, 16, device=DEVICE).to(torch.float8_e4m3fn), torch.ones(4, 1, device=DEVICE))
    tile = Cast(granularity="1x128")
    assert describe(Source(x), tile, q) is not None
    for other, cast in ((x.double(), tile), (x, Cast(granularity="1x128", format="e5m2")), (x[:2], tile), (x, Cast())):
        assert describe(Source(other), cast, q) is None
    assert describe(Source(x), tile, Quantized(q.data, q.scale_inv.half())) is None
    flush(x.device if x.is_cuda else torch.device("cpu"))


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with by_kernels_with(Largest("largest_code", lambda pair: pair.data, of_results=False), dispatch, monkeypatch):
        yield


@pytest.mark.usefixtures("by_kernels")
def test_dispatch_adds_what_the_kernel_leaves_out() -> None:
    x, cast = sample(shape=(8, 40)), Cast(granularity="32x1")
    q = given(x, cast)
    q = Quantized(q.data.to(DEVICE), q.scale_inv.to(DEVICE))
    found = dispatch.describe(Source(x.to(DEVICE)), cast, q)
    largest = found["largest_code"]
    assert found.keys() == {OPERAND, "largest_code"} and isinstance(largest, torch.Tensor) and float(largest) == 448.0
    empty = Source(x[:0].to(DEVICE))
    assert dispatch.describe(empty, cast, Quantized(q.data[:0], q.scale_inv[:0])).keys() == {"num_tensors"}
    wide = Source(x.double().to(DEVICE))  # which goes by plain torch ops
    numel = dispatch.describe(wide, cast, q)["numel"]
    assert isinstance(numel, torch.Tensor) and int(numel) == x.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", BLOCKS)
def test_large_tensors(granularity: str) -> None:
    """Of the shapes of training; the reference runs there too, whose division by a number may be an ulp off."""
    x, cast = torch.randn(4096, 14336, device=DEVICE).bfloat16(), Cast(granularity=granularity)
    q = reference.quantize(x, cast)
    statistics = reference.statistics(reference.operand_pair(x, cast, q), "log2_hist")
    wanted = {name: value.cpu() for name, value in statistics.items()}
    for data in (q.data, turned(q.data)):
        found = slots_of(describe(Source(x), cast, Quantized(data, q.scale_inv)))
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            tolerance = {"float64": 1e-6, "float32": 2e-7}.get(slots()[name].kind, 0.0) if name in slots() else 0.0
            tolerance = 1e-6 if name == "worst_block_nmse" else tolerance  # a quotient of FP32 sums
            atol = 1e-9 * x.numel() if name in ("sum_x", "sum_err") else 0.0
            torch.testing.assert_close(found[name].double(), want.double(), rtol=tolerance, atol=atol, msg=name)

"""The Triton kernels of FP4, FP6, fnuz and stochastic casts equal the reference: on a GPU, and on the CPU by the interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS
from fp8debug.kernels import dispatch, reference
from fp8debug.kernels.backend import gpu
from fp8debug.kernels.gpu.low_bit.plan import quantize, supports
from fp8debug.kernels.slot_rows import RowLayout, Slots
from fp8debug.metrics import Source, slots
from fp8debug.metrics.elements import Elements
from fp8debug.metrics.error import Error
from fp8debug.metrics.magnitude import Magnitude
from fp8debug.recipes import HADAMARD_SIGNS, Cast, get_recipe
from fp8debug.types import Quantized
from tests.shortened import shortened

pytestmark = [
    pytest.mark.twins,
    # NumPy, which the interpreter runs on, warns of the NaN and overflows that the tests mean to make.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The interpreter takes half a second for what a GPU does in none: on a CPU a choice stands for all combinations.
ALL = DEVICE == "cuda"
NVFP4 = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor")
MX = Cast(format="e2m1fn", granularity="1x32", scale_format="e8m0")
BLOCKS = ("1x16", "16x1", "16x16", "1x32", "32x1", "1x128", "128x1", "128x128")
DATA_FORMATS = tuple(name for name, fmt in FORMATS.items() if not fmt.scale_only)
KINDS = ("plain", "rows", "nonfinite", "subnormal", "huge", "zero", "zero blocks", "codes")
#: Whole tiles and blocks, and neither; each is another kernel to compile.
EVEN, ODD = (64, 256), (37, 131)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEED = 2**63 + 12345


def sample(kind: str, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of a kind; ``codes``: the values of all formats and the midpoints between them."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind)) + shape[1])
    x = torch.randn(shape, generator=generator)
    if kind == "rows":
        x *= torch.exp(torch.randn(shape[0], 1, generator=generator) * 4)
    elif kind == "nonfinite":
        flat = x.view(-1)
        for value in (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38, -3e38):
            flat[torch.randint(len(flat), (max(1, len(flat) // 40),), generator=generator)] = value
    elif kind == "subnormal":
        x *= 1e-6 if dtype == torch.float16 else 1e-38
    elif kind == "huge":
        x *= 1e4 if dtype == torch.float16 else 1e37
    elif kind == "zero":
        x.zero_()
    elif kind == "zero blocks":
        x[:, :16], x[:16] = 0.0, -0.0
    elif kind == "codes":
        values: list[float] = []
        for name in DATA_FORMATS:
            fmt = FORMATS[name]
            codes = sorted({v for v in map(fmt.value, range(1 << (fmt.bits - 1))) if v <= fmt.max})
            values += codes + [(a + b) / 2 for a, b in pairwise(codes)]
        picked = torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]
        x = picked.copysign(x)
    return x.to(dtype).to(DEVICE)


def by_name(found: Slots) -> dict[str, torch.Tensor]:
    """Slots one by one, on the CPU."""
    values: dict[str, torch.Tensor] = {}
    for names, numbers in found.items():
        assert isinstance(numbers, torch.Tensor) and not isinstance(names, RowLayout)
        for i, name in enumerate((names,) if isinstance(names, str) else names):
            values[name] = (numbers if isinstance(names, str) else numbers[i]).cpu()
    return values


def assert_same_codes(q: Quantized, expected: Quantized) -> None:
    """Data and scales to the bit; of a NaN not the sign, which no GPU keeps."""
    data, wanted = q.data.cpu(), expected.data.cpu()
    assert data.shape == wanted.shape and data.dtype == wanted.dtype
    assert torch.equal(q.scale_inv.cpu(), expected.scale_inv.cpu())
    same = data.view(torch.uint8) == wanted.contiguous().view(torch.uint8)
    same |= data.float().isnan() & wanted.float().isnan()
    assert same.all(), f"{int((~same).sum())} codes differ, first at {(~same).nonzero()[0].tolist()}"


def assert_same_slots(found: Slots, x: torch.Tensor, cast: Cast, expected: Quantized) -> set[str]:
    """Counts and extremes to the bit, sums to rounding; returns what was not filled.

    The reference's sums are made where ``expected`` is: a CPU's dot product adds one term after another in a few lanes,
    and of 16 million terms its own rounding may pass the tolerance (1.03e-12 was seen, where the kernel's sum was exact).
    """
    pair = reference.operand_pair(x.to(expected.data.device), cast, expected)
    wanted, values = reference.statistics(pair, "log2_hist"), by_name(found)
    sizes = {"sum_x": pair.x64.abs().sum(), "sum_xy": wanted["sum_x2"], "sum_err": pair.x64.abs().sum()}
    sizes |= {"noise_sum": wanted["numel"].double(), "scale_inv_sum_log2": 128.0 * wanted["num_blocks"].double()}
    for name, value in values.items():
        want, kind = wanted[name].double().cpu(), slots()[name].kind if name != "num_tensors" else "int64"
        value = value.double().cpu()
        if kind == "float64":
            size = torch.maximum(torch.as_tensor(sizes.get(name, want.abs())).double().cpu(), want.abs())
            assert (value - want).abs() <= 1e-12 * size or value == want, (name, value.item(), want.item())
        elif name in ("worst_block_nmse", "max_block_range_log2"):
            assert torch.isclose(value, want, rtol=1.2e-7, atol=0), (name, value.item(), want.item())
        else:
            assert torch.equal(value, want), (name, value.item(), want.item())
    return set(wanted) - set(values)


def check(x: torch.Tensor, cast: Cast, scale_inv: torch.Tensor | None = None) -> None:
    """Compare with the reference on the CPU and, on a GPU, with its torch ops there."""
    assert supports(x, cast, scale_inv)
    given = None if scale_inv is None else scale_inv.cpu()
    # The transform's sums in FP64 may differ in the last bit between devices: what it makes is taken from this one.
    transformed = reference.as_cast_reads(Source(x), cast).value if cast.hadamard else x
    bare = replace(cast, hadamard=0, hadamard_signs=HADAMARD_SIGNS) if cast.hadamard else cast
    expected = reference.quantize(transformed.cpu(), bare, given)
    plain, nothing = quantize(x, cast, scale_inv)
    assert nothing is None
    assert_same_codes(plain, expected)
    assert_same_codes(plain, reference.quantize(x, cast, scale_inv))
    q, found = quantize(x, cast, scale_inv, statistics=True)
    assert found is not None
    assert_same_codes(q, expected)
    missing = assert_same_slots(found, transformed, bare, expected)
    of_the_tensor = {slot.name for metric in (Elements, Magnitude, Error) for slot in metric.slots}
    assert missing == (of_the_tensor if cast.hadamard else set())


def small() -> list[tuple[str, Cast]]:
    """Each granularity, format, scale and rounding, and the operands of the recipes."""
    casts = [replace(NVFP4, granularity=name) for name in BLOCKS]
    casts += [replace(MX, format=name) for name in DATA_FORMATS]
    casts += [replace(MX, scale_rounding=name) for name in ("pow2_floor", "pow2_amax_ceil", "pow2_even")]
    casts += [replace(NVFP4, tensor_scale=name) for name in ("none", "row")]
    casts += [replace(NVFP4, tensor_scale="row", granularity="16x1"), replace(NVFP4, four_over_six=True)]
    casts += [replace(NVFP4, four_over_six=True, granularity="16x16", amax_eps=1e-3)]
    casts += [replace(NVFP4, rounding="stochastic", seed=SEED), replace(NVFP4, granularity="16x1", hadamard=16)]
    casts += [replace(NVFP4, rounding="stochastic", granularity="16x1", hadamard=16, hadamard_signs=5)]
    casts += [Cast(format=name, rounding="stochastic", granularity="1x128") for name in ("e4m3fn", "e5m2", "e4m3fnuz")]
    casts += [Cast(format=name, granularity="128x128", amax_eps=1e-3) for name in ("e4m3fnuz", "e2m3fn")]
    casts += [Cast(format=name) for name in ("e4m3fnuz", "e5m2fnuz", "e3m2fn")]
    casts += [Cast(format="e2m1fn", scale_format="e4m3fn", tensor_scale="tensor"), Cast(rounding="stochastic", seed=7)]
    for recipe in ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "tensorwise_fnuz"):
        casts += [cast for cast in get_recipe(recipe).casts.values() if cast is not None]
    unique = {str(cast): cast for cast in casts}
    return list(unique.items())


@pytest.mark.parametrize("cast", shortened([cast for _, cast in small()], 2), ids=str)
def test_casts(cast: Cast) -> None:
    for kind in KINDS if ALL else ("rows", "nonfinite"):
        check(sample(kind, EVEN if ALL and hash(cast) % 2 else ODD), cast)


@pytest.mark.parametrize("shape", [EVEN, (130, 72), (16, 16), (1, 1)], ids=str)
def test_shapes(shape: tuple[int, int]) -> None:
    for kind in KINDS if ALL else ("nonfinite",):
        check(sample(kind, shape), NVFP4)
        check(sample(kind, shape), replace(MX, rounding="stochastic"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", shortened(DTYPES, 2), ids=str)
def test_kinds_and_dtypes(dtype: torch.dtype, kind: str) -> None:
    x = sample(kind, (33, 132), dtype)
    check(x, replace(NVFP4, rounding="stochastic"))
    check(x, replace(MX, format="e3m2fn"))
    check(x, Cast(format="e5m2fnuz", rounding="stochastic", seed=3))


@pytest.mark.parametrize("kind", ["plain", "nonfinite", "zero"])
def test_given_scales(kind: str) -> None:
    x = sample(kind, (37, 132))
    for scale in (1e-3, 0.37, 1e3, 1e-30):
        given = torch.tensor(scale, device=DEVICE)
        check(x, Cast(format="e4m3fnuz", scaling="delayed", margin=2), given)
        check(x, Cast(format="e2m1fn", granularity="1x16", scaling="static", scale_inv=scale, rounding="stochastic"))
    check(x, Cast(format="e4m3fnuz", scaling="delayed", margin=2))


def test_layouts_and_shapes() -> None:
    wide = sample("rows", (40, 96))
    for x in (wide.t(), wide[:, 3:50], wide[::2], wide.reshape(2, 20, 96), wide[0], wide[3, 5], wide[:, :1]):
        check(x, NVFP4)
        check(x, replace(MX, rounding="stochastic"))
    empty = wide[:0]
    q, found = quantize(empty, NVFP4, statistics=True)
    expected = reference.quantize(empty, NVFP4)
    assert q.data.shape == expected.data.shape and q.scale_inv.shape == expected.scale_inv.shape and found == {}


def test_what_the_kernels_leave_to_the_reference() -> None:
    x = sample("plain", (32, 32))
    assert not supports(x.double(), NVFP4)
    assert not supports(x, Cast(format="e4m3fnuz", granularity="rowwise"))
    assert not supports(x, replace(NVFP4, granularity="tensorwise", four_over_six=True))
    assert not supports(x, NVFP4, torch.ones(2, device=DEVICE))


def test_the_same_tensor_gives_the_same_bits_and_sums() -> None:
    x = sample("rows", (130, 260))
    cast = replace(NVFP4, rounding="stochastic", seed=1)
    (first, one), (second, two) = (quantize(x, cast, statistics=True) for _ in range(2))
    assert torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))
    assert one is not None and two is not None
    assert {name: value.item() for name, value in by_name(one).items()} == {n: v.item() for n, v in by_name(two).items()}
    other, _ = quantize(x, replace(cast, seed=2))
    assert not torch.equal(first.data.view(torch.uint8), other.data.view(torch.uint8))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dispatch send tensors on a CPU to the kernels, by the interpreter."""
    if not ALL:
        monkeypatch.setattr(dispatch, "takes_kernels", lambda x: True)
        monkeypatch.setattr(dispatch, "on_device", lambda x: nullcontext())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cast", [NVFP4, replace(NVFP4, granularity="16x1", hadamard=16, rounding="stochastic")], ids=str)
def test_dispatch_sends_them_there_and_fills_what_they_leave(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample("nonfinite", (37, 132))
    calls: list[Cast] = []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(cast)
        return quantize(*args, **kwargs)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(gpu(), "quantize_low_bit", counted)
    q = dispatch.quantize(x, cast)
    observed, found = dispatch.quantize_observed(x, cast)
    (what_if,) = dispatch.observe(Source(x), [cast], [None], histogram=True)
    assert len(calls) == 3 and found is not None
    expected = reference.quantize(x, cast)
    assert_same_codes(q, expected)
    assert_same_codes(observed, expected)
    counted_exponents = what_if.pop("log2_hist")
    assert isinstance(counted_exponents, torch.Tensor)
    assert torch.equal(counted_exponents.cpu(), dispatch.histogram(Source(x)).cpu())
    for slots_of in (dispatch.describe(Source(x), cast, observed, found), what_if):
        assert not assert_same_slots(slots_of, x, cast, expected)
    assert dispatch._quantize_low_bit(x, Cast(), None, True) is None  # a plain cast
    with pytest.raises(UsageError):
        dispatch.quantize(x.int(), cast)
    with pytest.raises(UsageError, match="a tensor with one number"):
        dispatch.quantize(x, cast, torch.ones(2, device=DEVICE))


@pytest.mark.usefixtures("kernels")
def test_a_cast_that_is_tried_by_a_kernel_is_not_said_to_run_in_torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(dispatch, "_say", lambda text, where=(): said.append(text))
    x = sample("plain", (32, 64))
    if not ALL:  # on a CPU a tensor passes for one on a GPU
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr(dispatch, "_capability", lambda index: (9, 0))
    dispatch.observe(Source(x), [NVFP4, MX], [None, None])
    assert not said


@pytest.mark.gpu
def test_no_value_is_read_back_and_a_graph_can_hold_it() -> None:
    x = sample("rows", (512, 1024))
    casts = [NVFP4, replace(NVFP4, granularity="16x16"), replace(NVFP4, rounding="stochastic"), Cast(format="e4m3fnuz")]
    expected = [dispatch.quantize_observed(x, cast) for cast in casts]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        made = [dispatch.quantize_observed(x, cast) for cast in casts]
    graph.replay()
    for (q, found), (wanted, slots_of) in zip(made, expected, strict=True):
        assert_same_codes(q, wanted)
        assert found is not None and slots_of is not None
        assert {n: v.item() for n, v in by_name(found).items()} == {n: v.item() for n, v in by_name(slots_of).items()}


@pytest.mark.gpu
def test_large_tensors() -> None:
    for shape in ((4096, 4096), (8192, 2048), (2049, 4100)):
        x = sample("rows", shape)
        for cast in (NVFP4, replace(NVFP4, granularity="16x16"), replace(NVFP4, rounding="stochastic", seed=5), MX):
            q, found = quantize(x, cast, statistics=True)
            expected = reference.quantize(x, cast)
            assert_same_codes(q, expected)
            assert found is not None
            assert not assert_same_slots(found, x, cast, expected)

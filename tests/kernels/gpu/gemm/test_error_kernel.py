"""Errors of GEMM results equal the reference's: on the GPU, and on the CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.formats import block_shape
from fp8debug.kernels import gemm_error, reference
from fp8debug.kernels.dispatch import Operand, Slots
from fp8debug.kernels.gpu.gemm.error import DAMAGE, LINES, RESULT, Found, compare, damage, row_slots
from fp8debug.kernels.gpu.gemm.sampled import columns_of, dequantize_lines, products_of
from fp8debug.kernels.gpu.quantize.tiling import OPERAND
from fp8debug.kernels.gpu.scratch import flush
from fp8debug.kernels.gpu.step_end import Joiner
from fp8debug.kernels.reference import short_gemm
from fp8debug.kernels.sampling import MIN_WIDE, SHARE_BLOCK, SHARE_GROUP, Sample
from fp8debug.kernels.slot_rows import HISTOGRAM, ROW_WORDS, RowLayout
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.damage import Damage
from fp8debug.metrics.rows import Rows
from fp8debug.observer.table import Table
from fp8debug.recipes import Cast, get_recipe
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized, TensorRole
from tests.kernels.twins import Largest, by_kernels_with

pytestmark = [
    pytest.mark.twins,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, N, K = 37, 50, 133
Operands = tuple[tuple[Quantized, Cast], tuple[Quantized, Cast]]


def tensors(which: Gemm, uniform: bool = False) -> list[torch.Tensor]:
    """The two operands in BF16, for M tokens, N out_features and K in_features."""
    generator = torch.Generator().manual_seed(M)
    shapes = {TensorRole.INPUT: (M, K), TensorRole.WEIGHT: (N, K), TensorRole.GRAD_OUTPUT: (M, N)}
    make = torch.rand if uniform else torch.randn
    return [make(shapes[role], generator=generator).bfloat16().to(DEVICE) for role in OPERANDS[which]]


def operands(which: Gemm, recipe: str, uniform: bool = False) -> Operands:
    """The same, quantized, and stored as the GEMM reads them on a GPU."""
    found = []
    for role, x in zip(OPERANDS[which], tensors(which, uniform), strict=True):
        cast = get_recipe(recipe).casts[which, role]
        assert cast is not None
        data, scale_inv = reference.quantize(x, cast)
        if (which, role) in CONTRACTS_ROWS:
            data = data.view(torch.uint8).t().contiguous().view(data.dtype).t()
        found.append((Quantized(data, scale_inv), cast))
    return found[0], found[1]


def index_of(which: Gemm) -> torch.Tensor:
    return torch.tensor([3, 0, 31, 36], device=DEVICE) + (K - M if which is Gemm.WGRAD else 0)


def sqnr_db(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = (actual.double() - expected.double()).square().sum() / expected.double().square().sum()
    return float(-10 * error.clamp(min=1e-30).log10())


def in_fp64(which: Gemm, pair: Operands) -> torch.Tensor:
    """The GEMM of the dequantized operands, on the sample."""
    whole = reference.gemm(which, *(reference.dequantize(*o) for o in pair), accumulate=torch.float64)
    return whole[:, index_of(which)] if which is Gemm.WGRAD else whole[index_of(which)]


def sampled_high(which: Gemm, sample: Sample, uniform: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = tensors(which, uniform)
    return first, second[:, sample.lines] if which is Gemm.WGRAD else second


def products(
    which: Gemm, high: tuple[torch.Tensor, torch.Tensor], pair: tuple[Operand, Operand], sample: Sample
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The shadow and the exact GEMM of a sample, rows by columns as the result has them."""
    lines = sample.lines
    assert lines is not None
    plan = products_of(which, high, pair, sample, lines.numel())
    if plan is None:
        return None
    parts = plan(which, high, pair, sample).sum(0)
    found = parts.view(plan.shared, -1) if which is Gemm.WGRAD else parts.view(-1, plan.shared)
    shadow, exact = found.chunk(2, int(which is Gemm.WGRAD))
    return shadow, exact


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_current", "mxfp8"])
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_products_of_a_sample(which: Gemm, recipe: str) -> None:
    pair, sample = operands(which, recipe), Sample(index_of(which))
    found = products(which, sampled_high(which, sample), pair, sample)
    assert found is not None
    assert sqnr_db(found[1], in_fp64(which, pair)) > 130
    assert sqnr_db(found[0], gemm_error.shadow_product(which, *cut(which, sample))) > 52  # which is rounded to BF16


def cut(which: Gemm, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = sampled_high(which, sample)
    return (first, second) if which is Gemm.WGRAD else (first[sample.lines], second)


def test_products_of_a_bf16_operand_and_of_other_dtypes() -> None:
    sample = Sample(index_of(Gemm.FPROP))
    quantized, second = operands(Gemm.FPROP, "blockwise")[0], tensors(Gemm.FPROP)[1]
    high = tensors(Gemm.FPROP)[0].float() * 1.001, second.half()
    found = products(Gemm.FPROP, high, (quantized, second), sample)
    wanted = reference.dequantize(*quantized).double()[index_of(Gemm.FPROP)] @ second.double().t()
    assert found is not None and sqnr_db(found[1], wanted) > 130
    assert sqnr_db(found[0], gemm_error.shadow_product(Gemm.FPROP, high[0][sample.lines], high[1])) > 52


def test_other_scales_are_left_to_torch() -> None:
    (q, _), second = operands(Gemm.FPROP, "blockwise")
    other = Cast(granularity="128x1")
    first = reference.quantize(reference.dequantize(q, Cast(granularity="1x128")), other), other
    sample = Sample(index_of(Gemm.FPROP))
    assert products(Gemm.FPROP, sampled_high(Gemm.FPROP, sample), (first, second), sample) is None


def test_exact_gemm_shows_what_an_accumulator_loses() -> None:
    """docs/numerics.md, 2: BF16's rounding of a result is 55 dB, ten bits of an accumulator are far less."""
    pair, sample = operands(Gemm.FPROP, "tensorwise_current", uniform=True), Sample(index_of(Gemm.FPROP))
    found = products(Gemm.FPROP, sampled_high(Gemm.FPROP, sample, uniform=True), pair, sample)
    assert found is not None
    rounded = in_fp64(Gemm.FPROP, pair).bfloat16()
    assert 52 < sqnr_db(rounded, found[1]) < 58
    assert sqnr_db(short_gemm(Gemm.FPROP, *pair, bits=10)[sample.lines], found[1]) < 45


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("granularity", ["1x128", "128x128", "1x32", "tensorwise", "rowwise", "columnwise"])
def test_dequantize_lines(granularity: str, dim: int) -> None:
    cast = Cast(granularity=granularity, format="e5m2" if dim else "e4m3fn")
    q = reference.quantize(tensors(Gemm.FPROP)[0], cast)
    index = torch.tensor([36, 1, 5], device=DEVICE)
    block = block_shape(granularity, M, K)
    assert torch.equal(dequantize_lines(*q, block, dim, index), reference.dequantize(q, cast).index_select(dim, index))


def assert_same(found: Found, wanted: dict[str, torch.Tensor]) -> None:
    for names, values in slots_of(found).items():
        for name, value in zip(names, values, strict=True):
            want = wanted[name].double()
            tolerance = 1e-12 if values.dtype is torch.float64 else 1e-7
            assert torch.isclose(value.double(), want, rtol=tolerance, atol=1e-12), (name, value.item(), want.item())


def slots_of(found: Found) -> dict[tuple[str, ...], torch.Tensor]:
    flush(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"))
    (layout,) = found
    assert isinstance(layout, RowLayout)
    return layout.slots(found[layout])


def surprising(which: Gemm, recipe: str = "blockwise") -> tuple[tuple[torch.Tensor, ...], Operands, torch.Tensor]:
    """Operands before the cast and as read, and a result ``[40, 1100]`` with NaN, Inf, a lost row and a zero row.

    Before the cast there are a NaN and a line of zeros, which make a row of NaN and one of zeros of the shadow.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {Gemm.FPROP: ((40, 70), (1100, 70)), Gemm.DGRAD: ((40, 70), (70, 1100)), Gemm.WGRAD: ((70, 1100), (70, 40))}
    high = tuple(torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for shape in shapes[which])
    found = []
    for role, x in zip(OPERANDS[which], high, strict=True):
        cast = get_recipe(recipe).casts[which, role]
        assert cast is not None
        found.append((reference.quantize(x, cast), cast))
    pair = found[0], found[1]
    actual = reference.gemm(which, *pair).bfloat16()
    rows = actual if which is not Gemm.WGRAD else actual.t()
    rows[4, :200], rows[9, :200] = float("nan"), float("inf")
    rows[30] *= 2
    rows[1] = 0
    lines = high[0].t() if which is Gemm.WGRAD else high[0]
    lines[len(lines) - 10 if which is Gemm.WGRAD else 31, 3] = float("nan")
    lines[len(lines) - 9 if which is Gemm.WGRAD else 33] = 0
    return high, pair, actual


@pytest.mark.parametrize("shift", [None, 5])
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_compare_equals_the_metrics(which: Gemm, shift: int | None) -> None:
    """Of all rows, of some, and of a share of the wide dimension: as by torch ops of the kernel's own products."""
    high, pair, actual = surprising(which)
    turned = which is Gemm.WGRAD
    for lines in (torch.tensor([1, 4, 9, 30, 31, 33, 34], device=DEVICE), *([None] if turned and shift else [])):
        sample = Sample(lines, shift)
        cut = (high[0], high[1][:, lines]) if turned and lines is not None else (high[0], high[1])
        compared = compare(which, cut, pair, actual, sample, keep=which is Gemm.FPROP, tell=True)
        assert compared is not None
        found, error, told = compared
        assert told is not None
        own = gemm_error._paired(which, told, actual, sample, whole=not gemm_error.is_wide(which, cut, sample))
        for parts, mine, by_torch, db in zip(
            found, own, gemm_error._pairs(which, cut, pair, actual, sample), (52, 130), strict=True
        ):
            assert mine is not None and by_torch is not None
            assert torch.equal(mine.y.nan_to_num(), by_torch.y.nan_to_num())
            assert sqnr_db(*finite(mine.source.x, by_torch.source.x)) > db
            assert_same(parts, reference.statistics(mine))
        numel = (40 if lines is None else 7) * (1100 if shift is None else 1100 // 128 * 16 + 1100 % 128)
        assert int(slots_of(found[0])[RESULT.groups[0].names][0]) == numel
        if which is Gemm.FPROP:
            assert error is not None and lines is not None
            grad = torch.randn(40, 1100, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
            grad[34, 5] = float("nan")
            assert error.shape == (7, 1100)
            if shift is None:
                x, y = told[0], actual[lines].float()
                wanted = torch.where(x.isfinite() & y.isfinite(), y - x, 0.0)
                torch.testing.assert_close(error.float(), wanted, rtol=2**-7, atol=0.0)  # the interpreter cuts off to BF16
            (count,), (total,) = slots_of(damage(error, grad, lines)).values()
            product = (error.double() * grad[lines].double()).sum(1)
            assert float(total) == pytest.approx(float(product[:-1].square().sum()), rel=1e-12) and product[-1].isnan()
            shadow = gemm_error.shadow_product(which, high[0][lines], high[1]).float()
            wanted_damage = Damage().partial(Pair(source=Source(shadow), y=actual[lines].float(), grad=grad[lines].float()))
            assert int(count) == int(wanted_damage["num_damage_rows"]) == len(error)
            assert float(total) == pytest.approx(float(wanted_damage["damage"]), rel=2e-2)  # the error is kept in BF16


def finite(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors with 0 where both are not finite."""
    assert torch.equal(x.isfinite(), y.isfinite())
    return x.nan_to_num(0.0, 0.0, 0.0), y.nan_to_num(0.0, 0.0, 0.0)


def test_compare_without_an_actual_result() -> None:
    high, pair, _ = surprising(Gemm.FPROP)
    sample = Sample(torch.tensor([0, 7, 31, 33, 39], device=DEVICE))
    compared = compare(Gemm.FPROP, (high[0], high[1]), pair, None, sample, tell=True)
    assert compared is not None and compared[1] is None and compared[2] is not None
    (found,) = compared[0]
    mine, by_torch = (
        gemm_error._paired(Gemm.FPROP, compared[2], None, sample, whole=True)[0],
        gemm_error._pairs(Gemm.FPROP, (high[0], high[1]), pair, None, sample)[0],
    )
    assert_same(found, reference.statistics(mine))
    assert sqnr_db(*finite(mine.source.x, by_torch.source.x)) > 52 and sqnr_db(mine.y, by_torch.y) > 130


def test_a_share_of_a_wide_dimension() -> None:
    """Every block of 128 is in the share of every step, the ragged rest wholly, and in eight steps all of it."""
    cpu, seen = torch.device("cpu"), set()
    assert Sample(shift=3).share(MIN_WIDE - 1, cpu) == slice(None) == Sample().share(1 << 20, cpu)
    for shift in range(8):
        sample = Sample(shift=shift)
        found = sample.share(1100, cpu)
        assert isinstance(found, torch.Tensor) and len(found) == len(found.unique()) == sample.num_shared(1100)
        assert found.max() < 1100 and set(range(1024, 1100)) <= set(found.tolist())
        blocks = found[found < 1024].view(-1, SHARE_GROUP)
        assert torch.equal(blocks[:, 0] // SHARE_BLOCK, torch.arange(8)) and (blocks[:, 0] % SHARE_GROUP == 0).all()
        seen |= set(found.tolist())
    assert len(seen) == 1100


@pytest.mark.parametrize("granularity", ["128x128", "1x128", "tensorwise", "rowwise"])
def test_rows_of_an_operand(granularity: str) -> None:
    weight, cast = tensors(Gemm.FPROP)[1].clone(), Cast(granularity=granularity)
    weight[3] *= 1e-5
    weight[7, 2], weight[9] = float("nan"), 0.0
    q = reference.quantize(weight.cpu(), cast)
    data, scale_inv = q.data.to(DEVICE), q.scale_inv.to(DEVICE)
    index = torch.tensor([49, 3, 7, 9, 0], device=DEVICE)
    found = row_slots(weight, data, scale_inv, block_shape(granularity, *weight.shape), index)
    read = reference.dequantize(Quantized(data, scale_inv), cast)[index]
    assert_same(found, Rows().partial(Pair(source=Source(weight[index]), y=read)))


def test_rows_of_words_join_the_state_by_their_rules() -> None:
    """By the joining kernel as by a table's torch ops, over two joins, one row with two kinds of observations."""
    table = Table(3, torch.device("cpu"))
    columns = {name: place.start for name, place in table.layout.places.items()}
    state = {group: tensor.clone().to(DEVICE) for group, tensor in table._state.items()}
    joiner, generator = Joiner(state, columns), torch.Generator().manual_seed(0)
    for _ in range(2):
        words: list[tuple[RowLayout, int, torch.Tensor]] = []
        for layout, row in ((OPERAND, 0), (RESULT, 2), (DAMAGE, 2), (HISTOGRAM, 0), (LINES, 0)):
            value = torch.zeros(64 if layout is HISTOGRAM else ROW_WORDS, dtype=torch.int64)
            for group in layout.groups:
                numbers = torch.randint(-50, 50, (group.size * len(group.names),), generator=generator)
                group.of(value).copy_(numbers)
            words.append((layout, row, value))
            table.merge([row], [{layout: value}])
        table.join()
        on_device = [(layout, row, value.to(DEVICE)) for layout, row, value in words]
        joiner([n for layout, row, value in on_device for n in (value.data_ptr(), row, joiner.number(layout))])
    for kind, wanted in table._state.items():
        assert torch.equal(state[kind].cpu(), wanted), kind


def test_columns_of_a_sample() -> None:
    x, index = tensors(Gemm.FPROP)[0], torch.tensor([0, 132, 7, 31], device=DEVICE)
    for whole in (x, x.float(), x.t(), x.half()[:, 1:]):
        few = index[: 4 if whole.shape[1] > 132 else 1]
        assert torch.equal(columns_of(whole, few), whole[:, few])
    groups = torch.tensor([16, 17, 18, 19, 4, 5, 6, 7], device=DEVICE)
    assert torch.equal(columns_of(x[:, :132].contiguous(), groups, 4), x[:, groups])


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with by_kernels_with(Largest("largest_actual", lambda pair: pair.y, of_results=True), gemm_error, monkeypatch):
        yield


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_a_result_as_a_whole_and_a_metric_of_a_user(which: Gemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric gets the products that were worked out already."""
    monkeypatch.delattr(gemm_error, "_pairs")
    pair, sample = operands(which, "blockwise"), Sample(index_of(which), 2)
    exact = in_fp64(which, pair)
    actual = reference.gemm(which, *pair).bfloat16()
    high = sampled_high(which, sample)
    found = gemm_error.compare_result(which, high, pair, actual, sample, keep=True)
    picked = (actual[:, sample.lines] if which is Gemm.WGRAD else actual[sample.lines]).float()
    shadow = gemm_error.shadow_product(which, *cut(which, sample)).float()

    def joined(parts: Slots, name: str) -> float:
        flush(picked.device)
        if isinstance(part := parts.get(name), torch.Tensor):
            return float(part)
        (row,) = (key.slots(value) for key, value in parts.items() if isinstance(key, RowLayout))
        (value,) = (values[names.index(name)] for names, values in row.items() if name in names)
        return float(value)

    assert found.exact is not None
    for parts, expected in ((found.shadow, shadow), (found.exact, exact)):
        assert joined(parts, "numel") == picked.numel()
        assert joined(parts, "largest_actual") == float(picked.amax())
        error = float((picked.double() - expected.double()).square().sum())
        assert joined(parts, "sum_err2") == pytest.approx(error, rel=1e-4)
    tried = gemm_error.compare_result(which, high, pair, None, sample)
    assert tried.exact is None and joined(tried.shadow, "numel") == picked.numel()

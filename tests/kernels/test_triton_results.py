"""What is worked out of GEMM results equals the reference: on the GPU, and on the CPU by Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated
pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.formats import block_shape
from fp8debug.kernels import reference, results
from fp8debug.kernels.accumulator import short_gemm
from fp8debug.kernels.dispatch import Slots
from fp8debug.kernels.gemm_sampled import columns_of, dequantize_lines, exact_gemm
from fp8debug.kernels.observe_join import Joiner
from fp8debug.kernels.observe_results import DAMAGE, LINES, RESULT, Found, compare, damage, row_slots
from fp8debug.kernels.triton_common import INTERPRETED
from fp8debug.kernels.triton_launch import OPERAND
from fp8debug.kernels.words import HISTOGRAM, Layout, pool
from fp8debug.metrics import METRICS, Pair, Source
from fp8debug.metrics.base import Slot
from fp8debug.metrics.damage import Damage
from fp8debug.metrics.rows import Rows
from fp8debug.recipes import Cast, get_recipe
from fp8debug.table import Table
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized, TensorRole

pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU, and Triton was imported to compile"),
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


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_current", "mxfp8"])
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_exact_gemm_of_a_sample(which: Gemm, recipe: str) -> None:
    pair = operands(which, recipe)
    found = exact_gemm(which, *pair, index_of(which))
    assert found is not None and found.dtype is torch.float32
    assert sqnr_db(found, in_fp64(which, pair)) > 130


def test_exact_gemm_of_a_bf16_operand() -> None:
    first, second = operands(Gemm.FPROP, "blockwise")[0], tensors(Gemm.FPROP)[1]
    found = exact_gemm(Gemm.FPROP, first, second, index_of(Gemm.FPROP))
    wanted = reference.dequantize(*first).double()[index_of(Gemm.FPROP)] @ second.double().t()
    assert found is not None and sqnr_db(found, wanted) > 130


def test_exact_gemm_leaves_other_scales_to_torch() -> None:
    (q, _), second = operands(Gemm.FPROP, "blockwise")
    other = Cast(granularity="128x1")
    first = reference.quantize(reference.dequantize(q, Cast(granularity="1x128")), other), other
    assert exact_gemm(Gemm.FPROP, first, second, index_of(Gemm.FPROP)) is None
    found = results._in_chunks(Gemm.FPROP, first, second, index_of(Gemm.FPROP))
    assert sqnr_db(found, in_fp64(Gemm.FPROP, (first, second))) > 130


def test_exact_gemm_shows_what_an_accumulator_loses() -> None:
    """docs/numerics.md, 2: BF16's rounding of a result is 55 dB, ten bits of an accumulator are far less."""
    pair, index = operands(Gemm.FPROP, "tensorwise_current", uniform=True), index_of(Gemm.FPROP)
    exact = exact_gemm(Gemm.FPROP, *pair, index)
    assert exact is not None
    rounded = in_fp64(Gemm.FPROP, pair).bfloat16()
    assert 52 < sqnr_db(rounded, exact) < 58
    assert sqnr_db(short_gemm(Gemm.FPROP, *pair, bits=10)[index], exact) < 45


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
    (layout,) = found
    return layout.slots(found[layout])


def result_with_surprises() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Actual ``[40, 90]``, shadow and exact of its rows 1, 4, 9, 30: with NaN, Inf, a lost row and a zero row."""
    generator = torch.Generator().manual_seed(0)
    actual = torch.randn(40, 90, generator=generator)
    rows = actual[[1, 4, 9, 30]]
    shadow = (rows * (1 + 0.01 * torch.randn(rows.shape, generator=generator))).bfloat16()
    exact = rows * (1 + 0.001 * torch.randn(rows.shape, generator=generator))
    actual[4, 3], actual[9, 1], shadow[0, 0] = float("nan"), float("inf"), float("nan")
    actual[30] *= 2
    shadow[1] = 0
    return actual.bfloat16().to(DEVICE), shadow.to(DEVICE), exact.to(DEVICE)


def test_compare_equals_the_metrics() -> None:
    actual, shadow, exact = result_with_surprises()
    index = torch.tensor([1, 4, 9, 30], device=DEVICE)
    found, error = compare(actual, shadow, exact, index, keep=True)
    picked = actual[index].float()
    for parts, expected in zip(found, (shadow, exact), strict=True):
        assert_same(parts, reference.statistics(Pair(source=Source(expected), y=picked)))
    grad = torch.randn(40, 90).bfloat16().to(DEVICE)
    pair = Pair(source=Source(shadow), y=picked, grad=grad[index].float())
    assert error is not None
    slots = slots_of(damage(error, grad, index))
    whole = {name: value for names, values in slots.items() for name, value in zip(names, values, strict=True)}
    wanted = Damage().partial(pair)
    assert int(whole["num_damage_rows"]) == 4
    assert float(whole["damage"]) == pytest.approx(float(wanted["damage"]), rel=1e-3)  # the error is kept in BF16


def test_compare_of_columns_and_of_all() -> None:
    actual, index = tensors(Gemm.FPROP)[0], torch.tensor([0, 7, 130], device=DEVICE)
    shadow = actual[:, index].float() * 1.01
    (found,), error = compare(actual, shadow, None, index, dim=1)
    assert error is None
    assert_same(found, reference.statistics(Pair(source=Source(shadow), y=actual[:, index].float())))
    (found,), _ = compare(actual, actual.float() * 0.5, None)
    assert_same(found, reference.statistics(Pair(source=Source(actual.float() * 0.5), y=actual.float())))


def test_more_programs_than_are_joined_at_once() -> None:
    """150 rows: the last program joins the parts in three rounds, and the counters of programs are 0 again for the next."""
    actual = torch.randn(150, 20, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    shadow = actual.float() * torch.linspace(0.5, 1.5, 150, device=DEVICE)[:, None]
    for _ in range(2):
        (found,), error = compare(actual, shadow, None, keep=True)
        assert_same(found, reference.statistics(Pair(source=Source(shadow), y=actual.float())))
        assert error is not None
        grad = torch.ones(150, 20).bfloat16().to(DEVICE)
        ((count,), (total,)) = slots_of(damage(error, grad)).values()
        assert int(count) == 150
        assert float(total) == pytest.approx(float((error.double().sum(1)).square().sum()), rel=1e-12)
    assert not pool(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")).tickets.any()


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
    columns = {name: place.start for name, place in table.places.items()}
    state = {group: tensor.clone().to(DEVICE) for group, tensor in table._state.items()}
    joiner, generator = Joiner(state, columns), torch.Generator().manual_seed(0)
    for _ in range(2):
        words: list[tuple[Layout, int, torch.Tensor]] = []
        for layout, row in ((OPERAND, 0), (RESULT, 2), (DAMAGE, 2), (HISTOGRAM, 0), (LINES, 0)):
            value = torch.zeros(64 if layout is HISTOGRAM else 24, dtype=torch.int64)
            for group in layout.groups:
                numbers = torch.randint(-50, 50, (group.size * len(group.names),), generator=generator)
                group.of(value).copy_(numbers)
            words.append((layout, row, value))
            table.merge(row, {layout: value})
        table._join()
        on_device = [(layout, row, value.to(DEVICE)) for layout, row, value in words]
        joiner([(value.data_ptr(), row, joiner.number(layout)) for layout, row, value in on_device])
    for kind, wanted in table._state.items():
        assert torch.equal(state[kind].cpu(), wanted), kind


def test_columns_of_a_sample() -> None:
    x, index = tensors(Gemm.FPROP)[0], torch.tensor([0, 132, 7, 31], device=DEVICE)
    for whole in (x, x.float(), x.t(), x.half()[:, 1:]):
        few = index[: 4 if whole.shape[1] > 132 else 1]
        assert torch.equal(columns_of(whole, few), whole[:, few])


class Largest:
    """A metric that no kernel knows."""

    name = "largest"
    of_results = True
    present = "numel"
    slots = (Slot(name="largest_actual", merge="max", kind="float32", unit="x", doc="largest actual value"),)
    derived: dict[str, object] = {}  # noqa: RUF012  # read only

    def partial(self, pair: Pair) -> dict[str, torch.Tensor]:
        return {"largest_actual": pair.y.amax()}


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tensors on a CPU take the way of those on a GPU, by the interpreter, with one more metric registered."""
    if DEVICE == "cpu":
        monkeypatch.setattr(results, "takes_kernels", lambda x: True)
        monkeypatch.setattr(results, "on_device", lambda x: nullcontext())
    METRICS.add(Largest.name, Largest())  # type: ignore[arg-type]  # derived is empty
    yield
    del METRICS._items[Largest.name]


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_a_result_as_a_whole_and_a_metric_of_a_user(which: Gemm) -> None:
    first, second = tensors(which)
    pair, index = operands(which, "blockwise"), index_of(which)
    exact = in_fp64(which, pair)
    actual = reference.gemm(which, *pair).bfloat16()
    high = (first, second[:, index]) if which is Gemm.WGRAD else (first[index], second)
    found = results.compare_result(which, high, pair, actual, index, keep=True)
    picked = (actual[:, index] if which is Gemm.WGRAD else actual[index]).float()
    shadow = results.shadow_product(which, *high).float()

    def joined(parts: Slots, name: str) -> float:
        if name in parts:
            return float(parts[name])
        (row,) = (key.slots(value) for key, value in parts.items() if isinstance(key, Layout))
        (value,) = (values[names.index(name)] for names, values in row.items() if name in names)
        return float(value)

    assert found.exact is not None
    for parts, expected in ((found.shadow, shadow), (found.exact, exact)):
        assert joined(parts, "numel") == picked.numel()
        assert joined(parts, "largest_actual") == float(picked.amax())
        error = float((picked.double() - expected.double()).square().sum())
        assert joined(parts, "sum_err2") == pytest.approx(error, rel=1e-4)
    tried = results.compare_result(which, high, pair, None, index)
    assert tried.exact is None and joined(tried.shadow, "numel") == picked.numel()

"""Stochastic rounding, the Hadamard transform, scales in two levels and in powers of two, each by its own law."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS
from fp8debug.kernels.dispatch import dequantize, gemm, measure, quantize
from fp8debug.kernels.reference import hadamard, philox
from fp8debug.recipes import Cast, get_recipe, list_recipes
from fp8debug.types import OPERANDS, Gemm, TensorRole
from tests.kernels import oracle

NVFP4 = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor")
NEW_RECIPES = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "tensorwise_fnuz")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def key(*words: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(words[0]), torch.tensor(words[1])


def test_philox_gives_the_known_answers() -> None:
    """The vectors of Random123 1.14 (kat_vectors, philox4x32 10) whose upper two counter words are 0."""
    zero = philox(torch.tensor([0]), key(0, 0))
    assert [f"{word:08x}" for word in zero[0].tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    x = normal(5, 7)
    numbers = torch.from_numpy(oracle.random_numbers(x.numpy(), 2**63 + 5)).float()
    scaled = quantize(x, Cast(format="e2m1fn", scaling="static", scale_inv=1.0, rounding="stochastic", seed=2**63 + 5))
    expected = oracle.round_at_random(x.numpy(), "e2m1fn", numbers.double().numpy())
    np.testing.assert_array_equal(scaled.data.float().numpy(), expected)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.scale_only])
def test_stochastic_rounding_has_no_bias(name: str) -> None:
    for value in (0.1, 0.3, 0.77, 1.1, 2.6, 5.3):
        # The values differ in their last bits, so that each tensor draws numbers of its own.
        x = torch.full((64, 1024), value) * (1 + normal(64, 1024) * 1e-6)
        for seed in (0, 7):
            cast = Cast(format=name, scaling="static", scale_inv=1.0, rounding="stochastic", seed=seed)
            error = (quantize(x, cast).data.double() - x.double()).double()
            assert abs(float(error.mean())) < 4 * float(error.std()) / error.numel() ** 0.5 + 1e-12
            assert float(error.std()) > 0


def test_the_same_run_gives_the_same_bits_and_leaves_the_generators_alone() -> None:
    cast = replace(NVFP4, rounding="stochastic")
    x = normal(64, 256)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    first = quantize(x, cast).data.float()
    torch.manual_seed(1234)
    assert torch.equal(quantize(x, cast).data.float(), first)
    assert not torch.equal(states[0], torch.get_rng_state())  # of manual_seed, which changes nothing
    torch.set_rng_state(states[0])
    quantize(x, cast)
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])  # type: ignore[index]
    assert states[2] == random.getstate()
    assert not torch.equal(quantize(x, replace(cast, seed=1)).data.float(), first)
    changed = x.clone()
    changed[0, 0] += 1e-3
    other = quantize(changed, cast).data.float()
    assert (other != first).float().mean() > 0.1  # one element changes the numbers of all
    assert torch.equal(quantize(x.to(torch.float64), cast).data.float(), first)


def test_a_second_rounding_of_values_on_the_grid_changes_nothing() -> None:
    values = torch.tensor([[-6.0, -0.5, 0.0, 0.5, 1.5, 3.0, 4.0, 6.0]])
    cast = Cast(format="e2m1fn", scaling="static", scale_inv=1.0, rounding="stochastic")
    assert torch.equal(quantize(values, cast).data.float(), values)


@pytest.mark.parametrize(("dim", "shape"), [(1, (5, 64)), (0, (48, 3)), (1, (4, 37)), (0, (9, 4))])
def test_the_transform_is_undone_and_keeps_norms(dim: int, shape: tuple[int, int]) -> None:
    x = normal(*shape)
    y = hadamard(x, dim)
    assert torch.allclose(hadamard(y, dim, undo=True), x, atol=1e-6)
    assert torch.allclose(x.square().sum(dim), y.square().sum(dim), rtol=1e-5)
    whole = shape[dim] // 16 * 16
    rest = shape[dim] - whole
    assert torch.equal(x.narrow(dim, whole, rest), y.narrow(dim, whole, rest))
    if dim == 1:
        expected = (x[:, :whole].reshape(-1, 16).double() @ torch.from_numpy(oracle.hadamard_matrix())).reshape(shape[0], whole)
        assert torch.equal(y[:, :whole], expected.float())


def test_an_outlier_is_spread_over_its_group() -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = 16.0
    y = hadamard(x, 1)
    assert y[0, :16].abs().tolist() == [4.0] * 16 and not y[0, 16:].any()


@pytest.mark.parametrize("shape", [(64, 48, 32), (50, 24, 40)])
def test_wgrad_of_two_transformed_operands_is_wgrad(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    g, x = normal(m, n), normal(m, k, seed=1)
    casts = [get_recipe("nvfp4").casts[Gemm.WGRAD, role] for role in OPERANDS[Gemm.WGRAD]]
    assert all(cast is not None and cast.hadamard == 16 for cast in casts)
    a, b = ((quantize(t, c), c) for t, c in zip((g, x), casts, strict=True) if c is not None)
    found = gemm(Gemm.WGRAD, a, b)
    exact = dequantize(*a).double().t() @ dequantize(*b).double()
    assert torch.allclose(found.double(), exact, atol=1e-4)
    # An operand that is transformed beside one that is not has its transform undone before the product.
    mixed = gemm(Gemm.WGRAD, a, x)
    assert torch.allclose(mixed.double(), dequantize(*a).double().t() @ x.double(), atol=1e-4)
    error = (found - g.t() @ x).square().sum() / (g.t() @ x).square().sum()
    assert 0.005 < float(error) < 0.1  # FP4, and not nonsense


def test_errors_are_of_the_undone_transform_and_blocks_of_the_transformed() -> None:
    x = normal(64, 64)
    x[:, 5] = 0
    x[17, 6] = 1000.0
    cast = replace(NVFP4, granularity="16x1", hadamard=16)
    found, plain = measure(x, cast), measure(x, replace(cast, hadamard=0))
    assert found["num_zero"] == plain["num_zero"] == 64
    assert found["amax"] == 1000.0 and found["num_zero_blocks"] == plain["num_zero_blocks"] == 4
    assert found["scale_inv_max"] < plain["scale_inv_max"]  # type: ignore[operator]  # the outlier is spread
    y = dequantize(quantize(x, cast), cast)
    assert found["sum_err2"] == pytest.approx(float((y.double() - x.double()).square().sum()), rel=1e-6)


def test_a_nan_spreads_over_its_group_alone() -> None:
    x = normal(4, 64)
    x[1, 20] = float("nan")
    found = measure(x, replace(NVFP4, hadamard=16))
    assert (found["num_nan"], found["num_actual_nonfinite"]) == (1, 15)
    assert found["sqnr_db"] is not None


def test_a_block_scale_that_underflows_is_underflow() -> None:
    x = torch.ones(2, 16)
    x[1] = 2.0**-20
    found = measure(x, NVFP4)
    assert (found["num_underflow"], found["num_eps_blocks"], found["num_zero_blocks"]) == (16, 1, 0)
    assert (found["num_saturated"], found["headroom"]) == (0, 1.0)
    row = measure(x, replace(NVFP4, tensor_scale="row"))
    assert (row["num_underflow"], row["sqnr_db"]) == (0, float("inf"))


def test_four_over_six_is_the_better_of_two() -> None:
    x = normal(64, 256)
    both = replace(NVFP4, four_over_six=True)
    y, six = (dequantize(quantize(x, c), c) for c in (both, NVFP4))
    assert float((y - x).abs().sum()) < float((six - x).abs().sum())
    four = torch.tensor([[4.0, 3.0, 2.0, 1.0] * 4, [6.0, 4.0, 3.0, 0.5] * 4])
    assert torch.equal(dequantize(quantize(four, both), both), four)


@pytest.mark.parametrize(
    ("mode", "rounding"), [("FLOOR", "pow2_floor"), ("RCEIL", "pow2_ceil"), ("CEIL", "pow2_amax_ceil"), ("EVEN", "pow2_even")]
)
@pytest.mark.parametrize("number_format", ["e4m3fn", "e5m2", "e2m1fn"])
def test_scale_modes_are_those_of_torchao(mode: str, rounding: str, number_format: str) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    modes = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
    borders = torch.tensor([1.0, 1.75, 1.9375, 1.96875, 1.999, 1.5, 448.0, 464.0, 6.0, 7.0, 7.5, 57344.0])
    x = torch.cat([normal(64, 32), borders[:, None] * torch.linspace(-1, 1, 32)])
    scale, _ = mx.to_mx(x, getattr(torch, FORMATS[number_format].torch_dtype), 32, modes[mode])
    q = quantize(x, Cast(format=number_format, granularity="1x32", scale_format="e8m0", scale_rounding=rounding))
    assert torch.equal(q.scale_inv.reshape(-1).log2(), scale.view(torch.uint8).float().reshape(-1) - 127)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scale_format": "e4m3fn", "scale_rounding": "pow2_ceil"}, "is rounded to nearest, not 'pow2_ceil'"),
        ({"scale_format": "e8m0", "scaling": "static", "scale_inv": 1.0}, "needs scaling 'current', got 'static'"),
        ({"tensor_scale": "tensor"}, "tensor_scale needs a scale_format with a mantissa, such as 'e4m3fn', got 'fp32'"),
        ({"four_over_six": True}, "four_over_six needs a scale_format with a mantissa"),
        ({"four_over_six": "yes"}, "four_over_six must be True or False, got 'yes'"),
        ({"scale_format": "e4m3fn", "four_over_six": True}, "that has two thirds of its largest value, got 'e4m3fn'"),
        ({"scale_format": "e4m3fn", "tensor_scale": "row", "granularity": "16x16"}, "such as '1x16', got '16x16'"),
        ({"hadamard": 16}, "hadamard needs blocks of one row or column, such as '1x16', got 'tensorwise'"),
        ({"hadamard": 8, "granularity": "1x16"}, "hadamard is 0 or 16, got 8"),
        ({"seed": 3}, "seed is for rounding='stochastic', from 0 to 2^64 - 1, got 3 with 'nearest'"),
        ({"rounding": "random"}, "unknown rounding 'random'"),
    ],
)
def test_options_that_do_not_fit_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Cast(**values)  # type: ignore[arg-type]  # that is the test
    assert message in str(error.value)


def test_e8m0_is_a_power_of_two_rounded_up() -> None:
    assert Cast(scale_format="e8m0", granularity="1x32").scale_rounding == "pow2_ceil"
    x = normal(4, 64)
    fp32, e8m0 = (Cast(granularity="1x32", scale_format=f, scale_rounding="pow2_ceil") for f in ("fp32", "e8m0"))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(quantize(x, fp32), quantize(x, e8m0), strict=True))


def test_what_the_kernels_take_is_what_it_was() -> None:
    plain = {name for name in list_recipes() if all(c is None or c.is_plain for c in get_recipe(name).casts.values())}
    assert plain == set(list_recipes()) - set(NEW_RECIPES)


def test_nvfp4_is_what_its_description_says() -> None:
    recipe = get_recipe("nvfp4")
    for (which, role), cast in recipe.casts.items():
        assert cast is not None
        assert (cast.format, cast.scale_format, cast.tensor_scale) == ("e2m1fn", "e4m3fn", "tensor")
        assert cast.granularity == ("16x16" if role is TensorRole.WEIGHT else "16x1" if which is Gemm.WGRAD else "1x16")
        assert cast.rounding == ("stochastic" if role is TensorRole.GRAD_OUTPUT else "nearest")
        assert cast.hadamard == (16 if which is Gemm.WGRAD else 0)
    weight = normal(48, 80)
    a, b = (quantize(t, recipe.casts[Gemm.FPROP, TensorRole.WEIGHT]) for t in (weight, weight.t()))  # type: ignore[arg-type]
    assert torch.equal(a.data.float(), b.data.float().t())  # fprop and dgrad share the numbers


def test_random_numbers_do_not_depend_on_a_nan_s_sign_and_payload() -> None:
    """Of which devices leave different things: one NaN would change the rounding of all other elements."""
    cast = replace(NVFP4, rounding="stochastic")
    made = []
    for bits in (0x7FC00000, 0x7FFFFFFF, -0x00400000, 0x7F800001):
        x = normal(8, 32)
        x.view(torch.int32)[3, 5] = bits
        assert x[3, 5].isnan()
        made.append(quantize(x, cast).data.float().nan_to_num(99.0))
    assert all(torch.equal(made[0], other) for other in made[1:])

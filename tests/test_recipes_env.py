"""The recipe that the environment of a Transformer Engine or LoongForge job asks for."""

from __future__ import annotations

import dataclasses

import pytest

from fp8debug.errors import UsageError
from fp8debug.recipes import Cast, Recipe, get_recipe
from fp8debug.types import Gemm, TensorRole

PREFIXES = {"FWD_INP": "input", "FWD_WEIGHT": "weight", "BWD_GRAD": "grad_output"}


def test_an_empty_environment_changes_nothing() -> None:
    assert Recipe.from_env(environ={}) == get_recipe("blockwise_pow2")
    assert Recipe.from_env("blockwise", {"PATH": "/bin", "FP8_QUANT_FWD_INP_AMAX_EPS": ""}) == get_recipe("blockwise")


@pytest.mark.parametrize(("prefix", "tensor"), PREFIXES.items())
def test_amax_eps_of_the_environment(prefix: str, tensor: str) -> None:
    base = get_recipe("blockwise_pow2")
    recipe = Recipe.from_env(environ={f"FP8_QUANT_{prefix}_AMAX_EPS": " 1e-10 "})
    assert recipe.name == "blockwise_pow2+env"
    for (gemm, role), cast in recipe.casts.items():
        old = base.casts[gemm, role]
        assert cast and old
        assert cast == (dataclasses.replace(old, amax_eps=1e-10) if role.value == tensor else old)


@pytest.mark.parametrize(("prefix", "tensor"), PREFIXES.items())
@pytest.mark.parametrize(("value", "rounding"), [("0", "none"), ("1", "pow2_ceil"), ("False", "none"), ("true", "pow2_ceil")])
def test_power2_switches_of_the_environment(prefix: str, tensor: str, value: str, rounding: str) -> None:
    for base in ("blockwise", "blockwise_pow2"):
        recipe = Recipe.from_env(base, {f"NVTE_FP8_BLOCK_SCALING_{prefix}_POWER2": value})
        for key, cast in recipe.casts.items():
            old = get_recipe(base).casts[key]
            assert cast and old
            assert cast.scale_rounding == (rounding if key[1].value == tensor else old.scale_rounding)


def test_fp32_scales_of_the_environment() -> None:
    assert Recipe.from_env(environ={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}).casts == get_recipe("blockwise").casts
    pow2 = Recipe.from_env("blockwise", {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"})
    assert pow2.casts == get_recipe("blockwise_pow2").casts
    mixed = Recipe.from_env(environ={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1", "NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2": "1"})
    found = {f"{g}.{t}": c.scale_rounding for (g, t), c in mixed.casts.items() if c}
    assert found == {site: "pow2_ceil" if "grad_output" in site else "none" for site in found}


def test_loongforge_with_everything_on_is_e8m0() -> None:
    environ = {f"FP8_QUANT_{prefix}_AMAX_EPS": "1e-12" for prefix in PREFIXES}
    environ |= {f"NVTE_FP8_BLOCK_SCALING_{prefix}_POWER2": "1" for prefix in PREFIXES}
    assert Recipe.from_env("blockwise", environ).casts == get_recipe("blockwise_e8m0").casts


def test_the_environment_keeps_bf16_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    base = get_recipe("blockwise").replace("wgrad", cast=None, name="mine")
    monkeypatch.setenv("FP8_QUANT_FWD_INP_AMAX_EPS", "0.5")
    recipe = Recipe.from_env(base)
    assert recipe.casts[Gemm.WGRAD, TensorRole.INPUT] is None
    assert recipe.casts[Gemm.FPROP, TensorRole.INPUT] == Cast(granularity="1x128", amax_eps=0.5)


@pytest.mark.parametrize("value", ["abc", "-1e-12", "nan", "inf", "1e-12,", "1e400"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_bad_eps_names_its_variable(prefix: str, value: str) -> None:
    with pytest.raises(UsageError) as error:
        Recipe.from_env(environ={f"FP8_QUANT_{prefix}_AMAX_EPS": value})
    assert str(error.value) == f"FP8_QUANT_{prefix}_AMAX_EPS must be a finite number >= 0, got {value!r}"


@pytest.mark.parametrize("value", ["yes", "2", "on", "-1", "1\n0"])
@pytest.mark.parametrize("name", ["FP32_SCALES", "FWD_INP_POWER2", "FWD_WEIGHT_POWER2", "BWD_GRAD_POWER2"])
def test_a_bad_switch_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError) as error:
        Recipe.from_env(environ={f"NVTE_FP8_BLOCK_SCALING_{name}": value})
    assert str(error.value) == f"NVTE_FP8_BLOCK_SCALING_{name} must be 0 or 1, got {value!r}"


def test_an_eps_that_fp32_cannot_hold_names_its_variable() -> None:
    with pytest.raises(UsageError, match=r"^FP8_QUANT_FWD_INP_AMAX_EPS must be a finite number >= 0, got '1e39'$"):
        Recipe.from_env(environ={"FP8_QUANT_FWD_INP_AMAX_EPS": "1e39"})

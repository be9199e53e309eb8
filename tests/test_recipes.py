"""Casts and recipes as values: what they refuse and say, their names, and the built-in ones."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.formats import GRANULARITIES, TRANSPOSED
from fp8debug.recipes import Cast, Recipe, get_recipe, list_recipes
from fp8debug.types import CONTRACTS_ROWS, OPERAND_SITES, Gemm, TensorRole

#: Scalars of NumPy, as they come out of a computed recipe.
SMALL: Any = np.float32(1e-5)
THREE: Any = np.int64(3)

FORMAT = st.sampled_from(["e4m3fn", "e5m2"])
GRANULARITY = st.sampled_from(list(GRANULARITIES))
ROUNDING = st.sampled_from(["none", "pow2_ceil", "pow2_floor"])
EPS = st.just(0.0) | st.floats(0, 1e30)
CASTS = st.one_of(
    st.builds(Cast, format=FORMAT, granularity=GRANULARITY, scale_rounding=ROUNDING, amax_eps=EPS),
    st.builds(
        Cast,
        format=FORMAT,
        scaling=st.just("delayed"),
        scale_rounding=ROUNDING,
        amax_eps=EPS,
        history=st.integers(1, 4096),
        algo=st.sampled_from(["max", "most_recent"]),
        margin=st.integers(-8, 8),
    ),
    st.builds(
        Cast,
        format=FORMAT,
        granularity=GRANULARITY,
        scaling=st.just("static"),
        scale_inv=st.floats(1e-37, 1e37),
    ),
)
RECIPES = st.builds(
    lambda name, casts: Recipe(name, dict(zip(OPERAND_SITES, casts, strict=True))),
    st.text(min_size=1),
    st.lists(st.none() | CASTS, min_size=6, max_size=6),
)


@given(CASTS)
def test_a_cast_survives_its_name_and_its_dict(cast: Cast) -> None:
    assert Cast.parse(str(cast)) == cast
    assert Cast.from_dict(json.loads(json.dumps(cast.to_dict()))) == cast
    assert hash(Cast.parse(str(cast))) == hash(cast)


@given(CASTS, CASTS)
def test_different_casts_have_different_names(a: Cast, b: Cast) -> None:
    assert (str(a) == str(b)) == (a == b)


def test_a_cast_is_found_in_another_process_too() -> None:
    """Its hash is kept with it, and those of strings differ from process to process."""
    cast = Cast(granularity="1x128", amax_eps=1e-12)
    assert hash(cast) == hash(Cast(granularity="1x128", amax_eps=1e-12))
    code = "import pickle, sys; cast = pickle.loads(sys.stdin.buffer.read()); assert type(cast)(**cast.to_dict()) in {cast}"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(cast), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@settings(deadline=None)
@given(RECIPES)
def test_a_recipe_survives_its_dict(recipe: Recipe) -> None:
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("cast", "name"),
    [
        (Cast(), "e4m3fn tensorwise current"),
        (Cast(granularity="1x128", scale_rounding="pow2_ceil", amax_eps=1e-12), "e4m3fn 1x128 current pow2_ceil eps=1e-12"),
        (Cast(scaling="delayed", history=16), "e4m3fn tensorwise delayed(16,max)"),
        (Cast(scaling="delayed", history=2, algo="most_recent", margin=2), "e4m3fn tensorwise delayed(2,most_recent,margin=2)"),
        (Cast(scaling="static", scale_inv=0.5), "e4m3fn tensorwise static(0.5)"),
        (Cast(scaling="static", scale_inv=np.float64(1), amax_eps=np.float64(0)), "e4m3fn tensorwise static(1.0)"),
        (Cast(scaling="static", scale_inv=SMALL), f"e4m3fn tensorwise static({float(SMALL)!r})"),
        (Cast(scaling="delayed", history=THREE), "e4m3fn tensorwise delayed(3,max)"),
    ],
)  # fmt: skip
def test_names_of_casts(cast: Cast, name: str) -> None:
    assert str(cast) == name
    assert Cast.parse(name) == cast
    assert json.loads(json.dumps(cast.to_dict())) == cast.to_dict()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "e4m3"}, "unknown format 'e4m3': did you mean 'e4m3fn' or 'e4m3fnuz' or 'e2m3fn'?"),
        ({"format": "E2M1FN"}, "unknown format 'E2M1FN': did you mean 'e2m1fn' or 'e2m3fn' or 'e4m3fn'?"),
        ({"format": "e8m0"}, "unknown format 'e8m0': did you mean 'e5m2'?"),
        ({"granularity": "1x12"}, "unknown granularity '1x12': did you mean '1x128' or '1x32' or '1x16'?"),
        ({"scaling": "currant"}, "unknown scaling 'currant': did you mean 'current'?"),
        ({"scale_rounding": "pow2"}, "unknown scale_rounding 'pow2': did you mean 'pow2_even' or 'pow2_ceil' or 'pow2_floor'?"),
        ({"algo": "mean"}, "unknown algo 'mean': did you mean 'max'?"),
        ({"amax_eps": -1e-12}, "amax_eps must be finite in FP32 and >= 0, got -1e-12"),
        ({"amax_eps": float("nan")}, "amax_eps must be finite in FP32 and >= 0, got nan"),
        ({"amax_eps": 1e39}, "amax_eps must be finite in FP32 and >= 0, got 1e+39"),
        ({"history": 0}, "history holds 1 to 1048576 amaxes, got 0"),
        ({"margin": 200}, "margin is a power of two between -127 and 127, got 200"),
        (
            {"scaling": "delayed", "granularity": "1x128"},
            "delayed scaling needs granularity 'tensorwise', got '1x128'",
        ),
        ({"scaling": "static"}, "static scaling needs scale_inv=, between 2^-127 and FP32's max, got None"),
        (
            {"scaling": "static", "scale_inv": 0.0},
            "static scaling needs scale_inv=, between 2^-127 and FP32's max, got 0.0",
        ),
        (
            {"scaling": "static", "scale_inv": 1e39},
            "static scaling needs scale_inv=, between 2^-127 and FP32's max, got 1e+39",
        ),
        (
            {"scaling": "static", "scale_inv": float("nan")},
            "static scaling needs scale_inv=, between 2^-127 and FP32's max, got nan",
        ),
        ({"scale_inv": 0.5}, "scale_inv is for scaling='static', not 'current'"),
    ],
)
def test_what_a_cast_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Cast(**values)
    assert str(error.value) == message
    with pytest.raises(UsageError) as error:
        Cast.from_dict(values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "values",
    [
        {"history": "many"},
        {"amax_eps": None},
        {"amax_eps": "small"},
        {"format": ["e5m2"]},
        {"format": None},
        {"margin": 0.5},
    ],
)
def test_a_cast_of_a_file_with_wrong_types(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Cast.from_dict(values)


def test_a_cast_of_a_file_with_a_wrong_key() -> None:
    with pytest.raises(UnknownNameError, match=r"^unknown cast field 'eps': did you mean 'amax_eps'"):
        Cast.from_dict({"eps": 1e-12})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is the name of no cast"),
        ("bf16", "'bf16' is the name of no cast"),
        ("e4m3fn tensorwise delayed", "'e4m3fn tensorwise delayed' is the name of no cast"),
        ("e4m3fn tensorwise delayed(x,max)", "'e4m3fn tensorwise delayed(x,max)' is the name of no cast"),
        ("e4m3fn tensorwise static()", "'e4m3fn tensorwise static()' is the name of no cast"),
        (
            "e9m9 tensorwise current",
            "'e9m9 tensorwise current' is the name of no cast: unknown format 'e9m9': ",
        ),
        (
            "e4m3fn 1x128 delayed(4,max)",
            "'e4m3fn 1x128 delayed(4,max)' is the name of no cast: delayed scaling needs granularity 'tensorwise', got '1x128'",
        ),
        ("e4m3fn 1x128 current eps=x", "'e4m3fn 1x128 current eps=x' is the name of no cast"),
        ("e4m3fn 1x128 @ e4m3fn", "'e4m3fn 1x128 @ e4m3fn' is the name of no cast: "),
    ],
)
def test_parse_refuses(name: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Cast.parse(name)
    assert str(error.value).startswith(message) if message.endswith(": ") else str(error.value) == message


def test_casts_are_values() -> None:
    cast = Cast(granularity="1x128")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cast.format = "e5m2"  # type: ignore[misc]  # that it may not is the test
    assert dataclasses.replace(cast, format="e5m2") == Cast(granularity="1x128", format="e5m2")


def test_built_in_recipes() -> None:
    assert list_recipes() == [
        *("bf16", "blockwise", "blockwise_pow2", "blockwise_e8m0", "tensorwise_current", "tensorwise_delayed"),
        *("rowwise", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "tensorwise_fnuz"),
    ]
    for name in list_recipes():
        assert get_recipe(name).name == name
        assert list(get_recipe(name).casts) == list(OPERAND_SITES)
        assert get_recipe(name).is_high_precision == (name == "bf16")


def _names(recipe: str) -> dict[str, str]:
    return {f"{g}.{t}": str(c) for (g, t), c in get_recipe(recipe).casts.items()}


def test_blockwise_is_that_of_deepseek() -> None:
    assert _names("blockwise") == {
        "fprop.input": "e4m3fn 1x128 current",
        "fprop.weight": "e4m3fn 128x128 current",
        "dgrad.grad_output": "e4m3fn 1x128 current",
        "dgrad.weight": "e4m3fn 128x128 current",
        "wgrad.grad_output": "e4m3fn 128x1 current",
        "wgrad.input": "e4m3fn 128x1 current",
    }
    assert _names("blockwise_pow2") == {k: v + " pow2_ceil" for k, v in _names("blockwise").items()}
    assert _names("blockwise_e8m0") == {k: v + " pow2_ceil eps=1e-12" for k, v in _names("blockwise").items()}


def test_tensorwise_delayed_is_hybrid() -> None:
    for site, name in _names("tensorwise_delayed").items():
        number_format = "e5m2" if "grad_output" in site else "e4m3fn"
        assert name == f"{number_format} tensorwise delayed(1024,max)"


@pytest.mark.parametrize(("recipe", "across", "down"), [("rowwise", "rowwise", "columnwise"), ("mxfp8", "1x32", "32x1")])
def test_blocks_run_along_the_contracted_dimension(recipe: str, across: str, down: str) -> None:
    granularities = {key: cast.granularity for key, cast in get_recipe(recipe).casts.items() if cast}
    assert granularities == {key: down if key in CONTRACTS_ROWS else across for key in OPERAND_SITES}


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_orientation_is_the_recipes_business(granularity: str) -> None:
    """Either spelling gives the same recipe."""
    one = get_recipe("bf16").replace(cast=Cast(granularity=granularity), name="x")
    other = get_recipe("bf16").replace(cast=Cast(granularity=TRANSPOSED[granularity]), name="x")
    assert one == other
    assert Recipe("x", one.casts) == one


def test_an_unknown_recipe() -> None:
    with pytest.raises(UnknownNameError) as error:
        get_recipe("blockwize")
    assert str(error.value).startswith("unknown recipe 'blockwize': did you mean 'blockwise'")


def _sites(recipe: Recipe, base: Recipe) -> set[str]:
    return {f"{g}.{t}" for (g, t), cast in recipe.casts.items() if cast != base.casts[g, t]}


@pytest.mark.parametrize(
    ("gemm", "tensor", "sites"),
    [
        ("dgrad", "grad_output", {"dgrad.grad_output"}),
        ("*", "grad_output", {"dgrad.grad_output", "wgrad.grad_output"}),
        ("fprop", "*", {"fprop.input", "fprop.weight"}),
        ("*", "*", {f"{g}.{t}" for g, t in OPERAND_SITES}),
        (Gemm.WGRAD, TensorRole.INPUT, {"wgrad.input"}),
    ],
)
def test_replace_changes_what_it_names(gemm: str, tensor: str, sites: set[str]) -> None:
    base = get_recipe("blockwise")
    changed = base.replace(gemm=gemm, tensor=tensor, format="e5m2")
    assert _sites(changed, base) == sites
    assert changed.name == "blockwise+"
    assert changed.replace(format="e4m3fn").name == "blockwise+"
    assert base == get_recipe("blockwise"), "the original stays"
    high = base.replace(gemm=gemm, tensor=tensor, cast=None, name="high")
    assert _sites(high, base) == sites and high.name == "high"
    assert all(cast is None for (g, t), cast in high.casts.items() if f"{g}.{t}" in sites)


def test_replace_turns_the_blocks() -> None:
    changed = get_recipe("blockwise").replace("dgrad", "*", granularity="1x32")
    assert changed.casts[Gemm.DGRAD, TensorRole.GRAD_OUTPUT] == Cast(granularity="1x32")
    assert changed.casts[Gemm.DGRAD, TensorRole.WEIGHT] == Cast(granularity="32x1")


def test_replace_of_an_operand_in_bf16_starts_from_the_default() -> None:
    changed = get_recipe("bf16").replace("fprop", "input", granularity="1x128")
    assert changed.casts[Gemm.FPROP, TensorRole.INPUT] == Cast(granularity="1x128")
    assert changed.casts[Gemm.FPROP, TensorRole.WEIGHT] is None


def test_replace_of_the_scaling_drops_a_static_scale() -> None:
    static = get_recipe("bf16").replace(cast=Cast(scaling="static", scale_inv=0.5))
    assert static.replace(scaling="current").casts[Gemm.FPROP, TensorRole.INPUT] == Cast()
    assert static.replace(scale_inv=2.0).casts[Gemm.FPROP, TensorRole.INPUT] == Cast(scaling="static", scale_inv=2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "replace() needs a field of Cast to change, or cast="),
        ({"fromat": "e5m2"}, "unknown cast field 'fromat': did you mean 'format'"),
        ({"cast": None, "format": "e5m2"}, "replace() takes cast= or fields of Cast, not both: cast, format"),
        ({"cast": "blockwise"}, "(fprop, input) of recipe 'blockwise+' needs a Cast or None, got 'blockwise'"),
        ({"gemm": "fprop", "tensor": "grad_output", "cast": None}, "no operand (fprop, grad_output); the six are "),
        ({"gemm": "forward", "cast": None}, "no operand (forward, *); the six are (fprop, input), (fprop, weight), "),
        ({"format": "e6m1"}, "unknown format 'e6m1': "),
        ({"scaling": "delayed"}, "delayed scaling needs granularity 'tensorwise', got '1x128'"),
    ],
)
def test_what_replace_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        get_recipe("blockwise").replace(**arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_recipe_needs_its_six_operands() -> None:
    casts = dict(get_recipe("bf16").casts)
    del casts[Gemm.WGRAD, TensorRole.INPUT]
    with pytest.raises(UsageError) as error:
        Recipe("mine", casts)
    message = "recipe 'mine' needs a cast or None for each of the six operands; check (wgrad, input)"
    assert str(error.value) == message
    with pytest.raises(UsageError, match=r"check \(fprop, output\)$"):
        Recipe("mine", {**get_recipe("bf16").casts, (Gemm.FPROP, TensorRole.OUTPUT): None})


def test_a_recipe_may_be_written_with_strings() -> None:
    casts: Any = {(str(g), str(t)): None for g, t in reversed(OPERAND_SITES)}
    assert Recipe("bf16", casts) == get_recipe("bf16")
    assert list(Recipe("bf16", casts).casts) == list(OPERAND_SITES)


@pytest.mark.parametrize(
    "values",
    [
        {},
        [],
        None,
        {"name": "x"},
        {"name": "x", "casts": []},
        {"name": "x", "casts": {}},
        {"name": "x", "casts": {"fprop": None}},
        {"name": "x", "casts": {"forward.input": None}},
        {"name": "x", "casts": {"fprop.input": 3}},
        {"name": "x", "casts": {"fprop.input": {"history": "many"}}},
        {"name": "x", "casts": {"fprop.input": {"colour": "red"}}},
    ],
)
def test_a_recipe_of_a_bad_file(values: Any) -> None:
    with pytest.raises(UsageError) as error:
        Recipe.from_dict(values)
    assert "\n" not in str(error.value)


def test_fast_accum_belongs_to_gemms_with_one_scale_an_operand() -> None:
    fast = get_recipe("tensorwise_current").replace(gemm="fprop", fast_accum=True, name="fast")
    assert (fast.name, fast.fast_accum) == ("fast", (Gemm.FPROP,))
    assert fast.casts == get_recipe("tensorwise_current").casts
    assert Recipe.from_dict(json.loads(json.dumps(fast.to_dict()))) == fast
    assert fast.replace(fast_accum=False).fast_accum == ()
    assert get_recipe("rowwise").replace(fast_accum=True).fast_accum == tuple(Gemm)
    both = fast.replace(gemm="dgrad", amax_eps=1e-12, fast_accum=True)
    assert both.fast_accum == (Gemm.FPROP, Gemm.DGRAD)
    assert both.casts[Gemm.DGRAD, TensorRole.WEIGHT] == Cast(amax_eps=1e-12)
    for change in ({"cast": None}, {"granularity": "1x128"}):
        assert both.replace(gemm="fprop", tensor="input", **change).fast_accum == (Gemm.DGRAD,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: get_recipe("blockwise").replace(gemm="fprop", fast_accum=True),
            "fast_accum of recipe 'blockwise+' needs one scale per row or tensor;"
            " fprop: input is e4m3fn 1x128 current and weight is e4m3fn 128x128 current",
        ),
        (lambda: get_recipe("bf16").replace(gemm="wgrad", fast_accum=True), "wgrad: grad_output is BF16 and input is BF16"),
        (lambda: Recipe("x", get_recipe("rowwise").casts, ("prop",)), "prop: there is no such GEMM"),  # type: ignore[arg-type]
    ],
)
def test_fast_accum_where_it_cannot_be_is_refused(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=re.escape(message)):
        make()

"""torchao, Accelerate, torchtitan and LoongForge: the exported file run as they run it, and by them where installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from fp8debug.exporters import EXPORTERS
from fp8debug.exporters.te_recipe import FACTORIES
from fp8debug.fallback import Fallback
from fp8debug.fallback.policy import RUNGS
from fp8debug.store.read.run import Run
from tests.exporters.consumers import EVERYTHING, GEMMS, NAMES, ODD, executed, exported, recorded

LEAVES = {"layers.1.mlp.fc2", "layers.10.mlp.fc2", "layers.1.mlp.fc1", "x.layers.1.mlp.fc1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("runs") / "run")


class Linear:
    """An nn.Linear as a filter sees it."""

    def __init__(self, in_features: int = 64, out_features: int = 64) -> None:
        self.in_features, self.out_features = in_features, out_features


@pytest.mark.parametrize(("name", "function"), [("torchao", "module_filter_fn"), ("accelerate", "module_filter_func")])
def test_a_filter_compares_whole_names(name: str, function: str, run: Run) -> None:
    keeps = executed(exported(name, run))[function]
    assert {fqn for fqn in NAMES if not keeps(Linear(), fqn)} == LEAVES | {"head"}, "the head stayed in BF16 in the run"
    assert not keeps(Linear(), "_orig_mod.layers.1._checkpoint_wrapped_module.mlp.fc2"), "a wrapped model has the same names"
    assert keeps(Linear(), "layers.11.mlp.fc2") and not keeps(Linear(60), "layers.11.mlp.fc2") and not keeps(Linear(64, 8), "a")


def test_a_filter_takes_any_name(tmp_path: Path) -> None:
    text = exported("torchao", recorded(tmp_path / "run", [*NAMES, ODD]), [Fallback(module=ODD, gemms=GEMMS, reasons=(ODD,))])
    assert executed(text)["BF16_FQNS"] == {ODD}


def test_accelerate_says_what_its_default_did(run: Run) -> None:
    notes = " ".join(EXPORTERS.get("accelerate").notes(run, EVERYTHING))
    assert "first and the last Linear" in notes and "TERecipeKwargs" in notes


def test_a_run_of_plain_linears_names_none_of_them(tmp_path: Path) -> None:
    plain = recorded(tmp_path / "run", recipe="bf16", what_if=["blockwise"])
    assert executed(exported("torchao", plain, []))["HIGH_PRECISION_FQNS"] == frozenset()


def titan_leaves(text: str, names: tuple[str, ...] = NAMES) -> set[str]:
    """Return the modules that torchtitan leaves out: one entry is a substring of the name (its module_filter_fn)."""
    return {fqn for fqn in names if any(entry in fqn for entry in executed(text)["FILTER_FQNS"])}


def test_torchtitan_is_substring_safe_or_says_so(run: Run) -> None:
    wanted = [Fallback(module="layers.10.mlp.fc2", gemms=GEMMS)]
    assert titan_leaves(exported("torchtitan", run, wanted)) == {"layers.10.mlp.fc2", "head"}
    assert EXPORTERS.get("torchtitan").notes(run, wanted) == []
    caught = [Fallback(module="layers.1.mlp.fc2", gemms=GEMMS), Fallback(module="layers.1.mlp.fc1", gemms=GEMMS)]
    (note,) = EXPORTERS.get("torchtitan").notes(run, caught)
    assert note.endswith("layers.1.mlp.fc2 also hits layers.1.mlp.fc2_b; layers.1.mlp.fc1 also hits x.layers.1.mlp.fc1")
    assert titan_leaves(exported("torchtitan", run, caught)) == {
        *("layers.1.mlp.fc2", "layers.1.mlp.fc2_b", "layers.1.mlp.fc1", "x.layers.1.mlp.fc1", "head")
    }


def test_a_layer_number_at_the_end_of_a_name_cannot_be_told_apart(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", ["layers.1", "layers.10", "layers.2"])
    (note,) = EXPORTERS.get("torchtitan").notes(run, [Fallback(module="layers.1", gemms=GEMMS)])
    assert note.endswith("the others leave FP8 too: layers.1 also hits layers.10")
    assert EXPORTERS.get("torchtitan").notes(run, [Fallback(module="layers.2", gemms=GEMMS)]) == []


def titan_converts(text: str, names: Sequence[str]) -> dict[str, set[str]]:
    """Return by list what its converter converts: any entry is a substring of the name, and without entries all are."""
    found = executed(text)
    return {
        key: {fqn for fqn in names if not entries or any(entry in fqn for entry in entries)}
        for key, entries in found.items()
        if key.endswith("_FQNS")
    }


def test_torchtitan_has_allow_lists_for_mx_and_nv(tmp_path: Path) -> None:
    names = ["layers.1.wq", "layers.1.w1", "layers.2.w1", "layers.2.wq", "layers.1.experts.w1"]
    kinds = dict.fromkeys(names, "NVFP4Linear") | {"layers.2.wq": "MXFP8Linear", "layers.1.experts.w1": "MXFP8GroupedExperts"}
    recipes: Any = {name: "mxfp8" for name, kind in kinds.items() if kind.startswith("MXFP8")}
    run = recorded(tmp_path / "run", names, recipe="nvfp4", recipes=recipes)
    for module in run.modules:
        module["kind"] = kinds[module["fqn"]]
    fallbacks = [Fallback(module="layers.1.w1", gemms=GEMMS, cast=RUNGS[32]), Fallback(module="layers.1.wq", gemms=GEMMS)]
    text = exported("torchtitan", run, fallbacks)
    linears = [name for name, kind in kinds.items() if kind.endswith("Linear")]
    assert titan_converts(text, linears) == {"NVFP4_FQNS": {"layers.2.w1"}, "MXFP8_FQNS": {"layers.1.w1", "layers.2.wq"}}
    assert "NVFP4LinearConverter.Config(fqns=NVFP4_FQNS), MXFP8LinearConverter.Config(fqns=MXFP8_FQNS)" in text
    assert EXPORTERS.get("torchtitan").notes(run, fallbacks) == []
    experts = [Fallback(module="layers.1.experts.w1", gemms=GEMMS)]
    (note,) = EXPORTERS.get("torchtitan").notes(run, experts)
    assert note.endswith("layers.1.experts.w1 (MXFP8GroupedExpertsConverter)")
    notes = EXPORTERS.get("torchtitan").notes(run, [Fallback(module="layers.2.w1", gemms=GEMMS, cast=RUNGS[128])])
    assert [n for n in notes if n.startswith("has no converter for these") and n.endswith("layers.2.w1 in blockwise")]


@pytest.mark.parametrize(("recipe", "name"), [("nvfp4", "NVFP4_FQNS"), ("mxfp8", "MXFP8_FQNS")])
def test_torchtitan_has_the_allow_list_of_an_fp8_linear_s_recipe(recipe: Any, name: str, tmp_path: Path) -> None:
    """One of another recipe has the list of what is left out."""
    names = ["layers.1.wq", "layers.2.wq"]
    run = recorded(tmp_path / recipe, names, recipe=recipe)
    for module in run.modules:
        module.update(kind="Fp8Linear", recipe=recipe)  # as ``watch`` writes it
    text = exported("torchtitan", run, [Fallback(module="layers.1.wq", gemms=GEMMS)])
    assert executed(text)[name] == ["layers.2.wq"] and "FILTER_FQNS" not in text
    other = recorded(tmp_path / "other", names, recipe="mxfp4")
    for module in other.modules:
        module.update(kind="Fp8Linear", recipe="mxfp4")
    assert "FILTER_FQNS" in exported("torchtitan", other, [])


class Hybrid(NamedTuple):
    """The two directions of a HybridQuantizer."""

    rowwise_quantizer: str
    columnwise_quantizer: str


def test_te_recipe_gives_each_gemm_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, whose modules want a GPU: stand-ins with its names, each factory returning its own."""
    factories = SimpleNamespace(**{name: lambda role, name=name: name for name in FACTORIES.values()})
    stubs: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"CustomRecipe": SimpleNamespace},
        "transformer_engine.pytorch": {"HybridQuantizer": Hybrid},
        "transformer_engine.pytorch.custom_recipes": {"quantizer_factories": factories},
    }
    for name, values in stubs.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    names = ["layers.1.mlp.fc1", "layers.1.mlp.fc2", "layers.11.mlp.fc1", "experts.gemm_0", "experts.gemm_1"]
    run = recorded(tmp_path / "run", names, recipe="nvfp4")
    fallbacks = [
        Fallback(module="layers.1.mlp.fc1", gemms=("fprop",), cast=RUNGS[32]),
        Fallback(module="layers.1.mlp.fc1", gemms=("wgrad",)),
        Fallback(module="layers.1.mlp.fc2", gemms=GEMMS, cast=RUNGS[128]),
        Fallback(module="experts.gemm_1", gemms=GEMMS),
    ]
    file = executed(exported("te-recipe", run, fallbacks))
    recipe = file["recipe"]

    def made(name: str, tensor: str) -> Any:
        return recipe.qfactory(SimpleNamespace(module_type="linear", tensor_type=tensor, name=name))

    nv, mx, high = "nvfp4_factory", "mxfp8_factory", "high_precision_factory"
    assert made("model.layers.1.mlp.fc1", "input") == Hybrid(mx, high)
    assert made("layers.1.mlp.fc1", "weight") == Hybrid(mx, nv)
    assert made("layers.1.mlp.fc1", "grad_output") == Hybrid(nv, high)
    assert made("layers.1.mlp.fc2", "input") == made("layers.1.mlp.fc2", "weight") == "float8_block_scaling_factory"
    assert made("layers.11.mlp.fc1", "input") == made("", "") == recipe.qfactory(None) == nv
    assert made("experts", "grad_output") == high
    assert EXPORTERS.get("te-recipe").notes(run, fallbacks) == []
    # The library names no module by itself, and asks with an empty name for what it has not been told.
    with pytest.raises(ValueError, match=r"has no name; call name_modules\(model\) before the first forward pass"):
        made("", "input")
    kind = type("Linear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear", "name": None})
    plain: Any = torch.nn.Linear(2, 2)
    model: Any = torch.nn.Module()
    model.module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([plain, torch.nn.Module()]), "experts": kind()})
    model.module.layers[1].mlp = kind()
    file["name_modules"](model)
    assert model.module.layers[1].mlp.name == "module.layers.1.mlp" and model.module.experts.name == "module.experts"
    assert not hasattr(plain, "name")
    del model.module["experts"]
    with pytest.raises(ValueError, match=r"no module of Transformer Engine has the name experts$"):
        file["name_modules"](model)
    both = [*fallbacks, Fallback(module="experts.gemm_0", gemms=GEMMS)]
    assert EXPORTERS.get("te-recipe").notes(run, both)[0].endswith("experts (2 experts)")


DECODER = (
    *("decoder.layers.0.self_attention.linear_qkv", "decoder.layers.1.self_attention.linear_qkv"),
    *("decoder.layers.1.mlp.experts.linear_fc1", "decoder.layers.1.mlp.shared_experts.linear_fc1", "output_layer"),
)


def test_loongforge_decides_by_kind_and_names_who_goes_along(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", DECODER)
    fallbacks = [Fallback(module=DECODER[place], gemms=GEMMS) for place in (0, 2, 4)]
    decide = executed(exported("loongforge", run, fallbacks))["selective_fp8_init_decision"]

    def keeps(ub_name: str | None, **init_kwargs: Any) -> bool:
        found: bool = decide(None, te_cls=object, ub_name=ub_name, init_kwargs=init_kwargs)
        return found

    assert not keeps("qkv") and not keeps("fc1", is_expert=True)
    assert keeps("fc1") and keeps("fc1", is_expert=False) and keeps("proj") and keeps(None)
    notes = EXPORTERS.get("loongforge").notes(run, fallbacks)
    assert notes == [
        "sees kinds of modules, not names; these leave FP8 too: decoder.layers.1.self_attention.linear_qkv",
        "cannot name these, whose last part is no linear of Megatron; they stay in FP8: output_layer",
    ]


def _model(names: tuple[str, ...]) -> Any:
    model = torch.nn.Module()
    for name in names:
        *path, last = name.split(".")
        parent = model
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(64, 64))
    return model


@pytest.mark.filterwarnings("ignore")
def test_torchao_converts_what_the_filter_keeps(run: Run) -> None:
    float8: Any = pytest.importorskip("torchao.float8")
    keep = executed(exported("torchao", run))["module_filter_fn"]
    model = float8.convert_to_float8_training(_model(NAMES), module_filter_fn=keep)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name in NAMES}
    assert {name for name, kind in kinds.items() if kind == "Linear"} == LEAVES | {"head"}
    assert {kinds[name] for name in NAMES if name not in {*LEAVES, "head"}} == {"Float8Linear"}


@pytest.mark.filterwarnings("ignore")
def test_accelerate_converts_what_the_filter_keeps(run: Run) -> None:
    ao: Any = pytest.importorskip("accelerate.utils.ao")
    pytest.importorskip("torchao.float8")
    from importlib import import_module

    function = executed(exported("accelerate", run))["module_filter_func"]
    kwargs = import_module("accelerate.utils").AORecipeKwargs(module_filter_func=function)
    model = _model(NAMES)
    ao.convert_model_to_fp8_ao(model, config=kwargs.config, module_filter_func=kwargs.module_filter_func)
    left = {name for name, module in model.named_modules() if type(module).__name__ == "Linear"}
    assert left == LEAVES | {"head"}

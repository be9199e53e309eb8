"""torchao, Accelerate, torchtitan and LoongForge: the exported file run as they run it, and by them where installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback
from fp8debug.store.read.run import Run
from tests.exporters.consumers import EVERYTHING, GEMMS, NAMES, ODD, executed, exported, recorded

LEAVES = {"layers.1.mlp.fc2", "layers.10.mlp.fc2", "layers.1.mlp.fc1", "x.layers.1.mlp.fc1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("runs") / "run")


class Linear:
    """What a filter sees of an nn.Linear."""

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
    torch = pytest.importorskip("torch")
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

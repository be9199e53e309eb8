"""te by nvidia-dlfw-inspect's own reader; megatron by the rules of its reader, and by that reader where it is installed."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import re
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback
from fp8debug.fallback.policy import RUNGS
from tests.exporters.consumers import EVERYTHING, GEMMS, NAMES, ODD, exported, recorded

yaml: Any = importlib.import_module("yaml")
inspect_config: Any = importlib.import_module("nvdlfw_inspect.config_manager")
inspect_logging: Any = importlib.import_module("nvdlfw_inspect.logging")

#: The features that Transformer Engine 2.x registers and our files use.
FEATURES = {"DisableFP8Layer": object(), "DisableFP8GEMM": object()}


@pytest.fixture
def te_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """nvidia-dlfw-inspect's own reader of a file: layer name -> what its features are told."""
    quiet = SimpleNamespace(log_message=lambda *words, **options: None)
    monkeypatch.setattr(inspect_config, "get_logger", lambda: quiet)
    manager = inspect_config.ConfigManager
    registry = {"base": SimpleNamespace(features={}), "transformer_engine": SimpleNamespace(features=FEATURES)}

    def read(text: str) -> Any:
        manager.configs = []
        manager.layer_name_to_config_cache = {}
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        manager._load_config(str(path), registry)
        return lambda name: manager.get_config_for_layer(name).get("transformer_engine")

    yield read
    manager.configs = []
    manager.layer_name_to_config_cache = {}


def test_te_hits_each_layer_once_and_no_other(te_reader: Any, tmp_path: Path) -> None:
    of = te_reader(exported("te", recorded(tmp_path / "run")))
    whole = {"DisableFP8Layer": {"enabled": True}}
    assert of("layers.1.mlp.fc2") == of("model.layers.1.mlp.fc2") == of("model.module.module.layers.1.mlp.fc2") == whole
    assert of("model.layers.10.mlp.fc2") == {"DisableFP8GEMM": {"enabled": True, "gemms": ["dgrad"]}}
    assert of("model.layers.1.mlp.fc1") == {"DisableFP8GEMM": {"enabled": True, "gemms": ["fprop"]}}
    for name in ("layers.1.mlp.fc2_b", "layers.11.mlp.fc2", "y.layers.1.mlp.fc2", "layers.1xmlp.fc2", "layers.1.mlp", "head"):
        assert of(name) is None, name


def test_te_names_of_modules_with_several_gemms(te_reader: Any, tmp_path: Path) -> None:
    names = ["layers.0.mlp", "layers.0.experts", "layers.1", "layers.1.fc1"]
    fallbacks = [Fallback(module=name, gemms=GEMMS) for name in names[:3]] + [Fallback(module=names[3], gemms=("wgrad",))]
    of = te_reader(exported("te", recorded(tmp_path / "run", names), fallbacks))
    assert of("layers.0.mlp.fc1") and of("layers.0.mlp.fc2") and of("layers.0.experts.gemm_11")
    assert "DisableFP8GEMM" in of("layers.1.fc1"), "a module of its own is not a part of another"


def test_te_takes_odd_names_and_an_empty_list(te_reader: Any, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", [*NAMES, ODD])
    of = te_reader(exported("te", run, [Fallback(module=ODD, gemms=GEMMS)]))
    assert of(ODD) and of("layers.1.mlp.fc2") is None
    assert te_reader(exported("te", run, []))("layers.1.mlp.fc2") is None


def megatron_config(text: str, path: str) -> Any:
    """Return what Megatron-LM's reader gives a module: configuration of the first enabled glob matcher that matches.

    Its rules, from megatron/core/quantization/quant_config.py (GlobMatcher: fnmatch of the module's path; a matcher without
    ``enabled: true`` is left out) and extensions/transformer_engine.py (TEQuantizationParams.parse_from_config: these two
    keys and no third; a recipe of no field forces BF16 inside an FP8 autocast), read at commit 00caa53.
    """
    document = yaml.safe_load(text)
    assert set(document) == {"configs", "matchers"}
    for config in document["configs"].values():
        assert set(config) == {"transformer_engine_config_type", "training_recipe", "evaluation_recipe"}
        assert config["transformer_engine_config_type"] == "TEQuantizationParams"
        assert config["training_recipe"] == config["evaluation_recipe"]
    assert document["configs"]["bf16"]["training_recipe"] == {}, "no FP8 recipe: high precision"
    for matcher in document["matchers"].values():
        assert matcher["type"] == "glob" and isinstance(matcher["pattern"], str) and matcher["config"] in document["configs"]
        if matcher.get("enabled", False) and fnmatch(path, matcher["pattern"]):
            return document["configs"][matcher["config"]]
    return None


def test_megatron_matches_whole_paths(tmp_path: Path) -> None:
    text = exported("megatron", recorded(tmp_path / "run"))
    for fallback in EVERYTHING:
        assert megatron_config(text, fallback.module) is not None
    for path in ("layers.1.mlp.fc2_b", "layers.11.mlp.fc2", "a.layers.1.mlp.fc2", "head"):
        assert megatron_config(text, path) is None, path
    assert megatron_config(exported("megatron", recorded(tmp_path / "other"), []), "layers.1.mlp.fc2") is None


def test_megatron_sees_names_below_its_model(tmp_path: Path) -> None:
    names = ["module.module.decoder.layers.0.mlp.linear_fc1", "1.module.decoder.layers.0.mlp.linear_fc2", "a.b[0]*?"]
    text = exported("megatron", recorded(tmp_path / "run", names), [Fallback(module=name, gemms=GEMMS) for name in names])
    assert megatron_config(text, "decoder.layers.0.mlp.linear_fc1") and megatron_config(text, "decoder.layers.0.mlp.linear_fc2")
    assert megatron_config(text, "a.b[0]*?") and megatron_config(text, "a.b0xx") is None


def test_megatron_has_a_file_for_each_pipeline_stage(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc1"], world_size=2)
    exporter = EXPORTERS.get("megatron")
    fallbacks = [Fallback(module=str(module["fqn"]), gemms=GEMMS) for module in run.modules]
    assert list(exporter.files(run, fallbacks)) == [""], "no rank says that it is one of several stages"
    for rank, manifest in run.rank_manifests.items():
        manifest["mesh"] = {"dims": ["dp", "pp", "tp"], "shape": [1, 2, 1], "coordinate": [0, int(rank), 0]}
    run.rank_manifests[1]["layers_before"] = {"decoder.layers": 1}
    files = exporter.files(run, fallbacks)
    assert list(files) == [".stage0", ".stage1"]
    assert "# for pipeline stage 1 only" in files[".stage1"]
    assert megatron_config(files[".stage0"], "decoder.layers.1.mlp.linear_fc1")
    assert megatron_config(files[".stage1"], "decoder.layers.0.mlp.linear_fc1"), "stage 1 calls layer 1 its layer 0"
    (note,) = [n for n in exporter.notes(run, fallbacks) if "several pipeline stages" in n]
    assert note.endswith("decoder.layers.0.mlp.linear_fc1; decoder.layers.1.mlp.linear_fc1")


def test_megatron_refuses_layers_of_delayed_scaling(tmp_path: Path) -> None:
    exporter = EXPORTERS.get("megatron")
    delayed = recorded(tmp_path / "delayed", recipe="tensorwise_delayed")
    assert any("--fp8-recipe delayed" in note for note in exporter.notes(delayed, EVERYTHING))
    tried = recorded(tmp_path / "run", what_if=["tensorwise_delayed"])
    assert not any("delayed" in note for note in exporter.notes(tried, EVERYTHING))


def test_megatron_reads_it_itself(tmp_path: Path) -> None:
    quant_config: Any = pytest.importorskip("megatron.core.quantization.quant_config")
    path = tmp_path / "precision.yaml"
    path.write_text(exported("megatron", recorded(tmp_path / "run")), encoding="utf-8")
    recipe = quant_config.RecipeConfig.from_yaml_file(str(path))

    def key(name: str) -> Any:
        return recipe.match_to_config_key(quant_config.MatchContext(module_path=name, layer_number=1))

    assert key("layers.1.mlp.fc2") == "bf16" and key("layers.1.mlp.fc2_b") is None


def megatron_parser() -> Any:
    """Return TEQuantizationParams of the installed megatron-core: its module wants Transformer Engine, these classes do not."""
    enums: Any = pytest.importorskip("megatron.core.enums")
    source = Path(enums.__file__).parent / "extensions" / "transformer_engine.py"
    wanted = {"TransformerEngineConfigType", "TEQuantizationRecipe", "TEQuantizationParams"}
    tree = ast.parse(source.read_text(encoding="utf-8"))
    body: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
    body += [n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_TE_CONFIG_TYPE_KEY"]
    future: list[ast.stmt] = [ast.ImportFrom(module="__future__", names=[ast.alias(name="annotations")], level=0)]
    found: dict[str, Any] = {"dataclasses": dataclasses, "enum": enum, "Enum": enum.Enum, "Optional": Optional}
    found |= {"Dict": dict, "Set": set, "Any": Any, "Fp8Recipe": enums.Fp8Recipe, "Fp4Recipe": enums.Fp4Recipe}
    module = ast.fix_missing_locations(ast.Module(body=[*future, *body], type_ignores=[]))
    exec(compile(module, str(source), "exec"), found)
    return found["TEQuantizationParams"]


def test_megatron_takes_a_layer_from_fp4_to_fp8(tmp_path: Path) -> None:
    parser, rung = megatron_parser(), RUNGS[32]
    fallbacks = [
        Fallback(module="layers.1.mlp.fc2", gemms=GEMMS, cast=rung),
        Fallback(module="layers.10.mlp.fc2", gemms=("dgrad",), cast=RUNGS[128]),
        Fallback(module="layers.1.mlp.fc1", gemms=("fprop",), cast=rung),
        Fallback(module="layers.1.mlp.fc1", gemms=("wgrad",)),
    ]
    run = recorded(tmp_path / "run", recipe="nvfp4")
    document = yaml.safe_load(exported("megatron", run, fallbacks))
    found = {
        key: parser.parse_from_config(SimpleNamespace(config=config)).training_recipe
        for key, config in document["configs"].items()
    }
    assert {key: (recipe.fp8_quantization_recipe, recipe.fp4_quantization_recipe) for key, recipe in found.items()} == {
        "bf16": (None, None),
        "mxfp8": ("mxfp8", None),
        "blockwise": ("blockwise", None),
    }
    assert [matcher["config"] for matcher in document["matchers"].values()] == ["mxfp8", "blockwise", "bf16"]
    notes = " ".join(EXPORTERS.get("megatron").notes(run, fallbacks))
    assert "cannot change a cast" not in notes and "layers.10.mlp.fc2 (dgrad)" in notes


def test_the_optional_suffix_of_te_names_is_a_suffix() -> None:
    from fp8debug.exporters.te import PARTS

    assert [name for name in ("", ".fc1", ".fc3", ".gemm_0", ".gemm_", "_b") if re.fullmatch(PARTS, name)] == [
        "",
        ".fc1",
        ".gemm_0",
    ]

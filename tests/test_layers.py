"""Imports go strictly downwards, and the reading half never imports torch."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

import fp8debug
from fp8debug.observer.probe import Probe

ROOT = Path(__file__).parents[1]
PACKAGES = {"fp8debug": "fp8debug", "fp8debug_cli": "cli", "fp8debug_dashboard": "dashboard"}

#: A module or package, and all below it, by layer: the lowest whole number above all that it imports. Within one layer
#: nothing imports anything but its own package. The top package's public names count as its imports.
LAYERS = {
    "fp8debug.errors": 0,
    "fp8debug.escaping": 0,
    "fp8debug.formats": 0,
    "fp8debug.imports": 0,
    "fp8debug.interruptions": 0,
    "fp8debug.loss_spikes": 0,
    "fp8debug.registry": 1,
    "fp8debug.types": 1,
    "fp8debug.recipes": 2,
    "fp8debug.trainers": 2,
    "fp8debug.metrics": 3,
    "fp8debug.kernels": 4,
    "fp8debug.store": 4,
    "fp8debug.observer": 5,
    "fp8debug.rules": 5,
    "fp8debug.checkpoints": 6,
    "fp8debug.fallback": 6,
    "fp8debug.linear": 6,
    "fp8debug.tools": 6,
    "fp8debug.trackers": 6,
    "fp8debug.adapters": 7,
    "fp8debug.exporters": 7,
    "fp8debug.faults": 7,
    "fp8debug.parity": 7,
    "fp8debug": 8,
    "fp8debug.reports": 8,
    "fp8debug.run": 8,
    "fp8debug.startup": 9,
    "fp8debug.trials": 9,
    "fp8debug_dashboard": 9,
    "fp8debug_cli": 10,
}

READING = (
    *("fp8debug", "fp8debug.types", "fp8debug.errors", "fp8debug.registry", "fp8debug.formats", "fp8debug.recipes"),
    *(
        "fp8debug.metrics.limits",
        "fp8debug.loss_spikes",
        "fp8debug.store.flop_shares",
        "fp8debug.store.dump_selectors",
        "fp8debug.tools.calibration",
        "fp8debug.escaping",
    ),
    *("fp8debug.metrics", "fp8debug.store", "fp8debug.rules", "fp8debug.fallback", "fp8debug.exporters", "fp8debug.reports"),
    *(
        "fp8debug.run.arms",
        "fp8debug.trials",
        "fp8debug.checkpoints",
        "fp8debug.tools.te_stats",
        "fp8debug.trackers",
        "fp8debug_cli",
        "fp8debug_dashboard",
    ),
)
RECORDING = (
    *("fp8debug.kernels", "fp8debug.observer", "fp8debug.linear", "fp8debug.faults", "fp8debug.adapters"),
    *(
        "fp8debug.adapters.watching.dumps",
        "fp8debug.tools.replay",
        "fp8debug.trainers",
        "fp8debug.run",
        "fp8debug.run.auto_watch",
    ),
    *("fp8debug.store.write", "fp8debug.store.schema"),
    "fp8debug.trackers.live",
    *("fp8debug.run.arms", "fp8debug.tools.energy", "fp8debug.tools.speed"),
    *("fp8debug.fallback.guard", "fp8debug.fallback.schedule"),
)

#: What the recording half must install without, and what starts too slowly for a command line.
READERS_ONLY = {"duckdb", "dash", "plotly", "pandas", "click", "rich"}
SLOW = {"torch", "dash", "plotly", "pandas", "dash_ag_grid", "dash_mantine_components"}
#: Imported only inside their adapter's functions, when the user's program has imported them already.
OPTIONAL = {
    *("transformer_engine", "torchao", "lightning", "pytorch_lightning", "transformers", "accelerate", "torchtitan", "megatron")
}


class Import(NamedTuple):
    """One imported name: what, on which line, and whether it happens when the module is loaded."""

    target: str
    line: int
    at_load: bool


def imports(source: str, package: str) -> Iterator[Import]:
    """Yield the imports of a module; those under ``if TYPE_CHECKING`` never happen and are left out.

    Args:
        source: the text of the module.
        package: what its relative imports are relative to.
    """

    def walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
            case ast.ImportFrom():
                base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                yield from (Import(f"{module}.{alias.name}", node.lineno, at_load) for alias in node.names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for statement in node.orelse:
                    yield from walk(statement, at_load)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, False)
            case ast.expr():
                return  # no statement is in one, and most nodes are
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, at_load)

    yield from walk(ast.parse(source), True)


class Tree:
    """The modules of the three packages and what they import.

    Args:
        sources: text by full module name; a package is ``name.__init__``.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = {name.removesuffix(".__init__"): (name.rpartition(".")[0], text) for name, text in sources.items()}

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        """The imports of each module, for the first test that asks: every worker of pytest-xdist loads this file."""
        return {name: list(imports(text, package)) for name, (package, text) in self._sources.items()}

    def module(self, target: str) -> str | None:
        """Return the module of ours that ``import target`` or ``from ... import`` of its last part loads, if any."""
        if target in self.imports:
            return target
        parent = target.rpartition(".")[0]
        return parent if parent in self.imports else None

    def loads(self, name: str) -> dict[str, str]:
        """Return all that importing ``name`` loads, modules of ours and foreign top-level packages, each with the way there."""
        found: dict[str, str] = {}
        seen: set[str] = set()

        def visit(module: str, way: str) -> None:
            if module in seen:
                return
            seen.add(module)
            parent = module.rpartition(".")[0]
            if parent:
                visit(parent, way)
            for target, line, at_load in self.imports.get(module, ()):
                if not at_load:
                    continue
                ours = self.module(target)
                here = f"{way} > {module}:{line}" if way else f"{module}:{line}"
                if ours:
                    found.setdefault(ours, here)
                    visit(ours, here)
                else:
                    found.setdefault(target.split(".")[0], here)

        visit(name, "")
        return found

    def upward(self) -> list[str]:
        """Return each import that does not go down, in words."""
        wrong = []
        for name, found in self.imports.items():
            for target, line, at_load in found:
                ours = self.module(target)
                if ours is None or target == "fp8debug.__version__" or unit(ours) == unit(name):
                    continue
                if not at_load and (name, ours) in SHOWN_FROM_BELOW:
                    continue
                if layer(ours) >= layer(name):
                    wrong.append(f"{name}:{line} (layer {layer(name)}) imports {ours} (layer {layer(ours)})")
        return wrong

    def under(self, names: tuple[str, ...]) -> list[str]:
        """Return the modules of these units."""
        return [m for m in self._sources if any(m == n or (n != "fp8debug" and m.startswith(n + ".")) for n in names)]


def unit(module: str) -> str:
    """Return the entry of LAYERS to which a module belongs."""
    parts = module.split(".")
    return parts[0] if parts[0] != "fp8debug" or len(parts) == 1 else ".".join(parts[:2])


#: Methods of a public class that show what lies above it: (importing module, imported package); in functions only.
SHOWN_FROM_BELOW = {("fp8debug.store.read.run", "fp8debug_dashboard.sharing.notebook")}


def layer(module: str) -> int:
    """Return the layer of a module; -1 for one that has none yet, which may import nothing."""
    return LAYERS.get(unit(module), -1)


def read_sources() -> dict[str, str]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *parts])] = path.read_text(encoding="utf-8")
    return found


SOURCES = read_sources()
TREE = Tree(SOURCES)


def test_every_module_has_a_layer() -> None:
    assert sorted({unit(module) for module in TREE.imports} - set(LAYERS)) == []


def test_imports_go_strictly_downwards() -> None:
    assert TREE.upward() == []


@pytest.mark.parametrize("module", TREE.under(READING))
def test_the_reading_half_never_loads_torch(module: str) -> None:
    assert "torch" not in TREE.loads(module), TREE.loads(module)["torch"]


@pytest.mark.parametrize("module", TREE.under(RECORDING))
def test_the_recording_half_needs_torch_numpy_and_pyarrow_only(module: str) -> None:
    assert {k: v for k, v in TREE.loads(module).items() if k in READERS_ONLY} == {}


def test_triton_is_loaded_by_its_own_files_only() -> None:
    """A CPU build of torch has no Triton."""
    others = [module for module in TREE.imports if not module.startswith("fp8debug.kernels.gpu")]
    assert {module: way for module in others if (way := TREE.loads(module).get("triton"))} == {}


@pytest.mark.parametrize("module", TREE.under(("fp8debug_cli",)))
def test_the_command_line_loads_nothing_slow(module: str) -> None:
    assert {k: v for k, v in TREE.loads(module).items() if k in SLOW} == {}


def test_optional_frameworks_are_imported_only_inside_functions() -> None:
    wrong = [
        f"{name}:{i.line} {i.target}"
        for name, found in TREE.imports.items()
        for i in found
        if i.target.split(".")[0] in OPTIONAL and i.at_load
    ]
    assert wrong == []


def test_only_adapters_and_the_launcher_join_recording_and_store() -> None:
    allowed = {"fp8debug.adapters", "fp8debug.trainers", "fp8debug.fallback", "fp8debug.run", "fp8debug.tools"}
    wrong = {
        name: way
        for name in TREE.under(RECORDING)
        for loaded, way in TREE.loads(name).items()
        if loaded.startswith("fp8debug.store") and unit(name) not in {*allowed, "fp8debug.store"}
    }
    assert wrong == {}


def test_every_import_of_ours_resolves() -> None:
    """An import inside a function would fail in use only."""
    names = {name.removesuffix(".__init__"): names_of(text) for name, text in SOURCES.items()}
    wrong = [
        f"{name}:{i.line} {i.target}"
        for name, found in TREE.imports.items()
        for i in found
        if i.target.split(".")[0] in PACKAGES and i.target not in TREE.imports
        if i.target.rpartition(".")[2] not in names.get(i.target.rpartition(".")[0], ())
    ]
    assert wrong == []


def names_of(source: str) -> set[str]:
    """Return every name that a module binds anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.split(".")[0])
    return found


def test_public_names_live_below_the_package_that_shows_them() -> None:
    assert [home for home in fp8debug._HOME.values() if layer(home) >= LAYERS["fp8debug"]] == []


#: Files beside the subfolders of a folder, ``__init__`` among them; rules, adapters and metrics have one for each of theirs.
LOOSE = {"fp8debug": 11, "fp8debug/adapters": 7, "fp8debug/kernels": 11, "fp8debug/store": 14, "dashboard": 2}


@pytest.mark.parametrize("folder", LOOSE)
def test_a_file_lies_in_the_folder_of_its_subject(folder: str) -> None:
    found = sorted(path.name for path in (ROOT / folder).glob("*.py"))
    assert len(found) <= LOOSE[folder], found


def classes_named_twice(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the modules of each class name that stands more than once, inside functions and with an underscore too."""
    found: dict[str, list[str]] = {}
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_file_of_tests_is_one_module() -> None:
    """Loaded under two names, its ops would be registered twice, and calls of the first read memory that is gone."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(ROOT / "tests"):
            names[file].append(name)
    assert names[__file__] == ["tests.test_layers"]
    assert not {file: found for file, found in names.items() if len(found) > 1}


def test_one_thing_has_one_name() -> None:
    assert classes_named_twice(SOURCES) == {}


def test_a_docstring_begins_with_a_noun_phrase_or_a_verb() -> None:
    wrong = []
    for module, text in SOURCES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split(" ", 1)[0]
                if first in ("What", "Which", "Who", "Whose", "How", "Where", "When", "Whether", "That"):
                    wrong.append(f"{module}: {getattr(node, 'name', 'the module')}")
    assert wrong == []


def test_few_functions_are_too_complex_for_the_linter() -> None:
    """Each with its reason on the line: McCabe's number is above 10, mostly as a kernel branches on compile-time constants."""
    found = [f"{module}: {line}" for module, text in SOURCES.items() for line in text.splitlines() if "noqa: C901" in line]
    assert len(found) < 8 and all("C901  # " in line for line in found), found


def test_a_probe_is_a_step_state_and_nothing_deeper() -> None:
    assert [one.__name__ for one in Probe.__mro__] == ["Probe", "StepState", "object"]


def test_the_currency_of_kernels_and_backends_has_types() -> None:
    assert [module for module, text in SOURCES.items() if "dict[Any" in text or 'twin("' in text] == []


# The checker itself, on made-up sources.


def test_a_class_name_that_stands_twice_is_found_inside_a_function_too() -> None:
    inside = "def make():\n    class _Plan:\n        pass\n"
    sources = {"fp8debug.a": "class _Plan:\n    pass\nclass Cast:\n    pass\n", "fp8debug.b": inside}
    assert classes_named_twice(sources) == {"_Plan": ["fp8debug.a", "fp8debug.b"]}


def test_an_upward_import_is_found_even_inside_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, level in {"formats": 1, "recipes": 2, "rules": 5, "observer": 5}.items():
        monkeypatch.setitem(LAYERS, f"fp8debug.{name}", level)
    tree = Tree(
        {
            "fp8debug.formats": "def late():\n    from fp8debug.recipes import Cast\n",
            "fp8debug.recipes": "import fp8debug.formats\nfrom fp8debug.rules import triage\n",
            "fp8debug.rules.__init__": "from fp8debug.rules import base\n",
            "fp8debug.rules.base": "from . import helper\nfrom fp8debug.observer import observer\n",
            "fp8debug.rules.helper": "",
            "fp8debug.observer": "",
        }
    )
    assert tree.upward() == [
        "fp8debug.formats:2 (layer 1) imports fp8debug.recipes (layer 2)",
        "fp8debug.recipes:2 (layer 2) imports fp8debug.rules (layer 5)",
        "fp8debug.rules.base:2 (layer 5) imports fp8debug.observer (layer 5)",
    ]


def test_torch_is_found_through_other_modules_and_parent_packages() -> None:
    tree = Tree(
        {
            "fp8debug.store.__init__": "from .run import Run\n",
            "fp8debug.store.run": "import json\nfrom ..metrics.base import slots\n",
            "fp8debug.store.schema": "",
            "fp8debug.metrics.__init__": "",
            "fp8debug.metrics.base": "try:\n    import torch.nn as nn\nexcept ImportError:\n    nn = None\n",
        }
    )
    way = tree.loads("fp8debug.store.schema")["torch"]
    assert way == "fp8debug.store:1 > fp8debug.store.run:2 > fp8debug.metrics.base:2"


def test_what_a_type_checker_or_a_function_imports_is_not_loaded() -> None:
    text = (
        "import typing\n"
        "if typing.TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
        "def f():\n    import duckdb\n"
        "class C:\n    import re\n"
    )
    assert sorted(Tree({"fp8debug.rules": text}).loads("fp8debug.rules")) == ["json", "re", "typing"]

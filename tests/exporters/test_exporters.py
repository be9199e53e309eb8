"""Laws of every exporter: nothing is dropped in silence, no name breaks a file, an empty list is a valid file."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback, load_fallbacks
from fp8debug.store.read.run import Run
from tests.exporters.consumers import EVERYTHING, GEMMS, NAMES, ODD, executed, exported, recorded

yaml: Any = importlib.import_module("yaml")

#: Exporter -> how its text is read.
READERS: dict[str, Any] = {
    ".json": json.loads,
    ".yaml": yaml.safe_load,
    ".py": ast.parse,
    ".md": str,
}
STACKS = [name for name in EXPORTERS.names() if name not in ("json", "markdown")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("runs") / "run")


def test_the_consumers_are_these() -> None:
    assert sorted(EXPORTERS.names()) == sorted(
        ["json", "te", "te-recipe", "megatron", "torchao", "torchtitan", "accelerate", "loongforge", "markdown", "vllm", "sglang"]
    )


def test_every_consumer_has_its_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/fallback.md").read_text(encoding="utf-8")
    rows = {name: [line for line in page.splitlines() if line.startswith(f"| `{name}` |")] for name in EXPORTERS.names()}
    bad = [name for name, lines in rows.items() if [line.count("|") for line in lines] != [4]]
    assert not bad, f"docs/fallback.md, Formats: one row of three cells for each of {bad}"


@pytest.mark.parametrize("name", STACKS)
def test_what_a_format_cannot_say_is_said_beside_it(name: str, run: Run) -> None:
    notes = EXPORTERS.get(name).notes(run, EVERYTHING)
    kinds = ["cannot change a cast", "cannot leave one operand alone", "has no steps"]
    kinds += [] if name in ("te", "te-recipe") else ["cannot leave single GEMMs"]
    for kind in kinds:
        (note,) = [n for n in notes if n.startswith(kind)]
        assert f"# {name} {note}\n" in exported(name, run), "and in the file"
    assert any("layers.1.mlp.fc1 wgrad input in e4m3fn tensorwise current eps=1e-12" in note for note in notes)
    assert any("x.layers.1.mlp.fc1 until step 200" in note for note in notes)


@pytest.mark.parametrize("name", STACKS)
def test_a_list_that_fits_needs_no_such_note(name: str, run: Run) -> None:
    notes = EXPORTERS.get(name).notes(run, [Fallback(module="layers.10.mlp.fc2", gemms=GEMMS)])
    assert not [n for n in notes if n.startswith(("cannot change", "cannot leave", "has no steps"))]


@pytest.mark.parametrize("name", ["json", "markdown"])
def test_our_own_formats_hold_everything(name: str, run: Run) -> None:
    assert EXPORTERS.get(name).notes(run, EVERYTHING) == []
    text = exported(name, run)
    assert all(fallback.module.split(".")[-1] in text for fallback in EVERYTHING)


@pytest.mark.parametrize("name", EXPORTERS.names())
@pytest.mark.parametrize(
    "fallbacks", [(), EVERYTHING, (Fallback(module=ODD, gemms=GEMMS, reasons=(ODD,)),)], ids=["none", "all", "odd"]
)
def test_every_file_can_be_read(name: str, fallbacks: tuple[Fallback, ...], tmp_path: Path) -> None:
    exporter = EXPORTERS.get(name)
    assert exporter.suffix in READERS, f"READERS has no way to read {exporter.suffix}, the suffix of {name}"
    odd = recorded(tmp_path / "run", [*NAMES, ODD])
    for text in exporter.files(odd, fallbacks).values():
        READERS[exporter.suffix](text)
        assert text.endswith("\n") and "\n\n\n\n" not in text


def test_a_line_break_in_a_name_does_not_leave_its_comment(run: Run) -> None:
    wicked = "layers.1\nimport os"
    for name in STACKS:
        lines = exported(name, run, [Fallback(module=wicked, gemms=("fprop",), tensor="input", reasons=(wicked,))]).splitlines()
        assert "import os" not in [line.strip(" '\"") for line in lines], f"{name} writes a name with a line break as two lines"


def test_json_keeps_the_schedule_and_old_lists_stay_schema_1(run: Run) -> None:
    document = json.loads(exported("json", run))
    assert document["schema"] == 2
    assert load_fallbacks(document) == list(EVERYTHING)
    plain = json.loads(exported("json", run, EVERYTHING[:4]))
    assert plain["schema"] == 1 and "until_step" not in plain["fallbacks"][0]


def test_markdown_is_a_table_in_which_names_are_no_markup(tmp_path: Path) -> None:
    text = exported("markdown", recorded(tmp_path / "a_run"), [Fallback(module=ODD, gemms=GEMMS, cost=0.25, damage=1.5e-9)])
    row = text.splitlines()[4]
    assert row.startswith(
        '| blocks.0.it\'s "odd" \\[a-b\\]\\* \\| \\<b\\>\\\\n \\#{x}: é | fprop dgrad wgrad | all | BF16 | always |'
    )
    assert "# Fallback candidates of a\\_run" in text and "give back 25.0% of the FP8 speed-up" in text
    assert "Apart from these, folklore (positional prior" in text
    assert "No candidates" in exported("markdown", recorded(tmp_path / "healthy"), [])


def test_a_glob_of_a_list_written_by_hand_becomes_names(run: Run) -> None:
    text = exported("torchtitan", run, [Fallback(module="layers.*", gemms=GEMMS)])
    fqns = executed(text)["FILTER_FQNS"]
    assert fqns == ["head", "layers.1.mlp.fc2", "layers.10.mlp.fc2", "layers.1.mlp.fc2_b", "layers.1.mlp.fc1"]


@pytest.mark.parametrize(("name", "argument"), [("vllm", "hf-overrides"), ("sglang", "json-model-override-args")])
def test_a_rollout_engine_ignores_the_whole_of_what_it_joins(name: str, argument: str, tmp_path: Path) -> None:
    names = [f"model.layers.{n}.self_attn.{part}_proj" for n in (0, 1) for part in "qkvo"]
    run = recorded(tmp_path / "run", names)
    exporter = EXPORTERS.get(name)
    fallbacks = [Fallback(module=names[1], gemms=GEMMS), Fallback(module=names[7], gemms=GEMMS)]
    told = json.loads(yaml.safe_load(exporter.export(run, fallbacks))[argument])["quantization_config"]
    assert sorted(told["ignored_layers"]) == sorted([*names[:3], names[7]])
    assert any("joins these" in note and names[0] in note for note in exporter.notes(run, fallbacks))

"""Registry and the error tree: order, duplicates, and a way out of every wrong name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fp8debug import errors
from fp8debug.errors import Fp8DebugError, NoMatchError, UnknownNameError, UsageError, suggest
from fp8debug.registry import Registry, register_all


def _animals() -> Registry[int]:
    registry: Registry[int] = Registry("animal")
    for i, name in enumerate(("zebra", "aardvark", "lion")):
        assert registry.add(name, i) == i
    return registry


def test_order_is_that_of_registration() -> None:
    registry = _animals()
    assert registry.names() == ["zebra", "aardvark", "lion"]
    assert list(registry) == [0, 1, 2]
    assert len(registry) == 3
    assert "lion" in registry and "tiger" not in registry and 0 not in registry
    assert registry.get("aardvark") == 1


def test_a_duplicate_is_a_bug_of_ours() -> None:
    registry = _animals()
    with pytest.raises(AssertionError, match="animal 'lion' is registered twice"):
        registry.add("lion", 9)
    assert registry.get("lion") == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lions", "unknown animal 'lions': did you mean 'lion'?"),
        ("aardwark", "unknown animal 'aardwark': did you mean 'aardvark'?"),
        ("qqqq", "unknown animal 'qqqq': known are aardvark, lion, zebra"),
        ("", "unknown animal '': known are aardvark, lion, zebra"),
    ],
)
def test_a_wrong_name(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        _animals().get(name)
    assert str(error.value) == message
    assert error.value.__suppress_context__


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(UnknownNameError, match=r"^unknown animal 'lion': there are none$"):
        Registry[int]("animal").get("lion")


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("blocks.*.mlp.gat", ["blocks.0.mlp.gate", "lm_head"], "did you mean 'blocks.0.mlp.gate'?"),
        ("head*", ["lm_head", "embed"], "did you mean 'lm_head'?"),
        ("x", [], "there are none"),
        ("x", ["b", "a", "b"], "known are a, b"),
        (
            "zz",
            [f"name{i:02}" for i in range(14)],
            "known are " + ", ".join(f"name{i:02}" for i in range(12)) + " and 2 more",
        ),
    ],
)
def test_suggest(name: str, known: list[str], expected: str) -> None:
    assert suggest(name, known) == expected


def test_no_match() -> None:
    assert str(NoMatchError("override", "lm_hea", ["lm_head"])) == "override 'lm_hea' matches nothing: did you mean 'lm_head'?"


def test_the_tree() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Fp8DebugError)]
    assert len({c.slug for c in classes}) == len(classes), "a slug leads to one cure"
    assert all(issubclass(c, ValueError) for c in (UsageError, UnknownNameError, NoMatchError, errors.AttachError))
    assert issubclass(errors.RecordError, OSError)


def test_every_file_of_an_axis_is_registered_whatever_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule F201 beside F101 and F102 would be missed by a prefix; what is no rule is left alone."""
    folder = tmp_path / "axis_of_a_test"
    folder.mkdir()
    for name in ("__init__", "f201_late", "f102_second", "f101_first", "helper", "fable"):
        (folder / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    register_all(folder.name, [str(folder)], r"f\d+_")
    loaded = [name.rpartition(".")[2] for name in sys.modules if name.startswith(f"{folder.name}.")]
    assert loaded == ["f101_first", "f102_second", "f201_late"]
    register_all(folder.name, [str(folder)])
    assert {"helper", "fable"} <= {name.rpartition(".")[2] for name in sys.modules}
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        monkeypatch.delitem(sys.modules, name)

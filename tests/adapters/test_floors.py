"""Libraries older than the oldest that is read are refused in one line, with the way out; the floors are those of pyproject."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fp8debug
from fp8debug.adapters import base
from fp8debug.adapters.base import ADAPTERS, FLOORS, require_floor
from fp8debug.errors import AttachError

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


def test_the_floors_are_those_of_pyproject() -> None:
    for distribution, floor in FLOORS.items():
        assert re.search(rf'^[a-z]+ = \["{distribution}(\[pytorch\])?>={re.escape(floor)}"\]$', PROJECT, re.MULTILINE)
    assert {name.replace("-", "_") for name in FLOORS} <= {adapter.name for adapter in ADAPTERS}


@pytest.mark.parametrize(
    ("adapter", "installed", "refused"),
    [
        ("torchao", "0.12.0", True),
        ("torchao", "0.10.0+cu126", True),
        ("torchao", "0.13.0", False),
        ("torchao", "1.0", False),
        ("transformer_engine", "2.8.0+3c4b2a1", True),
        ("transformer_engine", "2.9.0", False),
        ("transformer_engine", "2.20.2", False),
        ("native", "0.1", False),
    ],
)
def test_an_older_version_is_refused(adapter: str, installed: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    require_floor.cache_clear()
    monkeypatch.setattr(base, "version", lambda name: installed)
    if not refused:
        require_floor(adapter)
        return
    with pytest.raises(AttachError) as error:
        require_floor(adapter)
    name = adapter.replace("_", "-")
    floor = FLOORS[name]
    expected = f"{name} {installed} is older than {floor}, the oldest that fp8debug reads: pip install '{name}>={floor}'"
    assert str(error.value) == expected


def test_a_library_without_metadata_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    require_floor.cache_clear()
    monkeypatch.setattr(base, "version", nothing)
    require_floor("torchao")


def test_watch_refuses_a_module_of_an_old_library_and_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = lambda self, x: nn.Linear.forward(self, x)  # noqa: E731  # its own, as torchao's is
    kind: Any = type("Float8Linear", (nn.Linear,), {"__module__": "torchao.float8.float8_linear", "forward": forward})
    require_floor.cache_clear()
    monkeypatch.setattr(base, "version", lambda name: "0.12.0")
    with pytest.raises(AttachError, match=r"torchao 0\.12\.0 is older than 0\.13"):
        fp8debug.watch(nn.Sequential(kind(8, 8)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    require_floor.cache_clear()


def test_the_pins_of_make_test_floor() -> None:
    import runpy

    floors = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "floors.py"))["floors"]
    assert floors(["torch>=2.6", "safetensors>=0.4.5", "te[pytorch]>=2.9"]) == ["torch==2.6.*", "safetensors==0.4.5", "te==2.9.*"]
    assert floors(["tomli>=2; python_version < '3.11'"]) == []

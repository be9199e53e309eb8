"""What is packaged: every package of the tree and its data, and a development set that is pinned."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import entry_points, metadata
from pathlib import Path
from typing import Any

import pytest

import fp8debug
from scripts.audit import judge

ROOT = Path(__file__).parents[1]
FOLDERS = {"fp8debug": "fp8debug", "fp8debug_cli": "cli", "fp8debug_dashboard": "dashboard"}
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def listed(key: str) -> list[str]:
    """Return the strings of a list in pyproject.toml; Python 3.10 has no TOML reader."""
    found = re.search(rf"^{key} = \[(.*?)^\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert found, key
    return re.findall(r'^\s*"([^"]+)"', found[1], re.MULTILINE)


def test_every_package_is_listed() -> None:
    packages = [
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("__init__.py")
    ]
    assert listed("packages") == sorted(packages)


def test_every_file_that_is_no_python_is_package_data() -> None:
    others = {
        f"{folder}/{path.relative_to(ROOT / folder)}"
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    markers = {f"{folder}/py.typed" for folder in FOLDERS.values()}
    assert markers <= others
    assert {name for name in others - markers if not name.startswith("dashboard/assets/")} == set()


def test_a_bare_install_records_and_reads() -> None:
    names = [re.split(r"[><=\[ ]", requirement)[0] for requirement in listed("dependencies")]
    assert names == ["torch", "numpy", "pyarrow", "duckdb", "click", "rich", "tomli"]


def test_the_extras_and_the_command() -> None:
    installed = metadata("fp8debug")
    extras = {"dashboard", "dumps", "s3", "spark", "te", "torchao", "all", "dev", "docs"}
    optional = PYPROJECT.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    assert set(re.findall(r"^(\w+) = \[", optional, re.MULTILINE)) == extras
    assert installed["Version"] == fp8debug.__version__
    (script,) = entry_points(group="console_scripts", name="fp8debug")
    assert script.value == "fp8debug_cli.main:main"


def test_the_changelog_has_this_version() -> None:
    assert f"## {fp8debug.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_development_set_is_pinned() -> None:
    """Every requirement of the dev, dashboard and docs extras is in constraints.txt, pinned, without a local build.

    But torch, and Triton, of which every build of torch demands its own version: the Makefile names both.
    """
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pin = r"[a-z0-9-]+==[0-9][0-9.a-z]*( ; python_version .*)?"
    assert [line for line in lines if not re.fullmatch(pin, line)] == []
    pinned = {line.split("==")[0] for line in lines}
    wanted = {
        re.split(r"[><=]", r)[0].replace("moto[server]", "moto")
        for key in ("dependencies", "dashboard", "s3", "dev", "docs")
        for r in listed(key)
    }
    assert wanted - pinned == {"torch", "triton", "fp8debug[dashboard,s3]"}
    assert re.search(r"^TRITON \?= triton==[\d.]+$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("target", "extras"), [("demo", ["dashboard"]), ("test", ["dashboard", "dev"]), ("site", ["dashboard", "dev", "docs"])]
)
def test_a_target_installs_what_it_needs(target: str, extras: list[str], tmp_path: Path) -> None:
    command = ["make", "-n", target, f"VENV={tmp_path / 'none'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r"-c constraints\.txt -e '\.\[(\w+)\]'", done.stdout) == extras


def test_an_audit_that_looked_nothing_up_is_no_clean_one() -> None:
    clean: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
    sick = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
    unseen = {"name": "c", "skip_reason": "Dependency not found on PyPI"}
    assert judge({"dependencies": [clean, clean]}) == (0, ["none of 2 packages has a known vulnerability"])
    assert judge({"dependencies": [clean, sick]}) == (1, ["b 2: PYSEC-1, cured in 3"])
    assert judge({"dependencies": []})[0] == 2
    code, lines = judge({"dependencies": [unseen, unseen]})
    assert code == 2 and lines[0].startswith("not audited: none of 2 packages could be looked up; ")
    code, lines = judge({"dependencies": [sick, unseen]})
    assert code == 2 and len(lines) == 2 and lines[1].startswith("not audited: 1 of 2 packages")

"""Every ``fp8debug COMMAND --option`` that a message, a help text or a page suggests is one that the command has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fp8debug.run.__main__ import _parser
from fp8debug_cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]
#: ``fp8debug`` or ``-m fp8debug.run``, the command, and what stands behind it up to the end of the code or the line.
SUGGESTION = re.compile(r"(?:\bfp8debug ([a-z]+)|-m fp8debug\.(run))\b([^`'\"|;#\n]*)")
#: Source of a figure, which may be a script of ours with options of its own.
SOURCE = re.compile(r"\[measured:[^\]]*\]")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def texts() -> Iterator[tuple[Path, str]]:
    """Yield (file, text) of all strings of the code, of all pages, and of the examples and scripts."""
    for folder in ("fp8debug", "cli", "dashboard"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield path, "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path, node.value
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, path.read_text(encoding="utf-8").replace("\\\n", " ")


def suggestions() -> Iterator[tuple[Path, str, str]]:
    """Yield (file, command, option); where a script is named, what stands before it."""
    for path, text in texts():
        for match in SUGGESTION.finditer(text):
            command, rest = match[1] or match[2], match[3]
            rest = re.split(r"\S+\.py\b", rest)[0].replace("--seed-arg --seed", "--seed-arg")
            for option in OPTION.findall(rest):
                yield path, command, option


def options_of(command: str) -> set[str] | None:
    """Return the long options of a command and of those below it, None for a word that is none."""
    if command == "run":
        return {name for action in _parser()._actions for name in action.option_strings}
    found = cli.get_command(click.Context(cli), command)
    if found is None:
        return None
    commands = [found, *(found.commands.values() if isinstance(found, click.Group) else ())]
    return {name for c in commands for p in c.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


def test_every_suggested_option_is_one_of_the_command() -> None:
    found = list(suggestions())
    assert len({command for _, command, _ in found}) >= 8, "the pattern no longer finds what is suggested"
    wrong = []
    for path, command, option in found:
        options = options_of(command)
        if options is not None and option not in options:
            wrong.append(f"{path.relative_to(ROOT)}: fp8debug {command} {option}")
    assert not wrong


#: Options of other programs that our messages name.
FOREIGN = {"--cuda-graph-impl", "--debug-tensor-dump-output-folder", "--nproc-per-node", "--porcelain", "--untracked-files"}


def test_every_option_that_a_message_names_is_one_of_ours() -> None:
    ours = {option for command in COMMANDS for option in options_of(command) or ()}
    wrong = set()
    for path, text in texts():
        if path.suffix == ".py" and path.is_relative_to(ROOT / "fp8debug") and not {"exporters", "style.py"} & {*path.parts}:
            wrong |= {
                f"{path.relative_to(ROOT)}: {option}"
                for option in OPTION.findall(SOURCE.sub("", text))
                if option not in ours | FOREIGN
            }
    assert not wrong


@pytest.mark.parametrize("option", ["--recipe", "--every", "--out"])
def test_an_option_that_the_message_of_an_arm_names_exists_in_run(option: str) -> None:
    options = options_of("run")
    assert options is not None and option in options

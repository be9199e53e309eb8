"""No rule compares with a number of its own: what it compares with has a name, which its manual page or a comment explains."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8debug import rules

#: Identities, halves and signs, and the base of decibels.
ALLOWED = {0, 1, 2, 0.5, 10}
#: Functions that write numbers for people.
WORDS = {"percent", "times"}
#: Functions within which a number is compared with all the same.
THROUGH = {"abs", "min", "max", "float", "sqrt", "log2"}
ROOT = Path(rules.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def numbers(node: ast.AST) -> Iterator[float]:
    """Yield the literals that a comparison is made with; indices and calls of functions are left out."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield node.value
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in THROUGH:
            yield from itertools.chain.from_iterable(map(numbers, node.args))
    elif not isinstance(node, ast.Subscript | ast.Lambda | ast.JoinedStr):
        for part in ast.iter_child_nodes(node):
            yield from numbers(part)


def is_of_a_format(node: ast.Compare) -> bool:
    """Return whether a comparison is with a number of bits, or with a version of Python."""
    sides = [node.left, *node.comparators]
    return any(isinstance(side, ast.Attribute) and side.attr in ("bits", "version_info") for side in sides)


def compared(tree: ast.AST) -> Iterator[str]:
    """Yield the comparisons with a number of their own."""
    if isinstance(tree, ast.FunctionDef) and tree.name in WORDS:
        return
    if isinstance(tree, ast.Compare) and not is_of_a_format(tree) and set(numbers(tree)) - ALLOWED:
        yield f"line {tree.lineno}: {ast.unparse(tree)}"
    for part in ast.iter_child_nodes(tree):
        yield from compared(part)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_rule_compares_with_named_numbers(path: Path) -> None:
    found = list(compared(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, "a threshold is a field of the rule, or has a name and a reason"


def test_the_search_sees_numbers_within_a_comparison() -> None:
    for text in ("x > 0.97", "y < x / 1024", "abs(x - 1) < 0.03", "-0.3 < x", "1.5 * x > y", "max(x, 64) <= y"):
        assert list(compared(ast.parse(text))), text
    for text in ("x > 0", "rows[3] > y", "fmt.bits == 8", "abs(x - 1) < limit", "f(7) > x", "x = 0.97"):
        assert not list(compared(ast.parse(text))), text

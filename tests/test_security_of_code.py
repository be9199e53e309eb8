"""Claims of docs/security.md that are about the code itself: nothing in it could turn a run's data into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READING = ("fp8debug/store", "fp8debug/rules", "fp8debug/fallback", "fp8debug/exporters", "fp8debug/reports", "cli", "dashboard")
#: Modules whose import alone would let data become code.
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    return ((ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_no_pickle() -> None:
    for path, tree in sources("fp8debug", "cli", "dashboard"):
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                assert not UNSAFE_MODULES & {name.partition(".")[0] for name in names}, path
        for name, call in calls(tree):
            is_safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in call.keywords)
            assert not (name.endswith("torch.load") and not is_safe), f"{path}:{call.lineno}"
            assert name != "np.load", f"{path}:{call.lineno}"


def test_no_eval_and_no_exec_where_runs_are_read() -> None:
    for path, tree in sources(*READING):
        assert not {name for name, _ in calls(tree)} & {"eval", "exec", "compile", "__import__"}, path


def test_no_shell() -> None:
    for path, tree in sources("fp8debug", "cli", "dashboard"):
        for name, call in calls(tree):
            assert name not in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), path
            assert not any(keyword.arg == "shell" for keyword in call.keywords), f"{path}:{call.lineno}"


def test_no_yaml_is_read() -> None:
    for path, tree in sources("fp8debug", "cli", "dashboard"):
        assert not {name for name, _ in calls(tree) if name.startswith("yaml.")}, path

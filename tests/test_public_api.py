"""The public interface as a ratchet: names, parameters, laziness and the cost of starting."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import resource
import subprocess
import sys

import pytest

import fp8debug

#: Every public name; for a function or class its parameters. A change here is a change for users: CHANGELOG.md says so.
PUBLIC = {
    "Cast": "format granularity scaling scale_rounding amax_eps history algo margin scale_inv",
    "Fallback": "module gemms tensor cast reasons damage cost cheaper from_step until_step",
    "Finding": "code name severity module gemm tensor cast steps ranks value threshold unit message cure also victims",
    "Fp8DebugError": None,
    "Fp8Linear": "in_features out_features bias device dtype recipe",
    "Guard": "after budget max_saturation max_saturation_delayed warmup",
    "Quantized": "data scale_inv",
    "Recipe": "name casts",
    "Run": "path",
    "__version__": None,
    "apply": "model fallbacks start_step optimizer",
    "convert": "model recipe overrides",
    "dequantize": "q cast dtype",
    "get_recipe": "name",
    "inject": "model name module step **options",
    "list_faults": "",
    "list_recipes": "",
    "measure": "x cast amax_history",
    "quantize": "x cast scale_inv",
    "recommend": "run findings budget fill",
    "triage": "run baseline select ignore",
    "watch": "target path every shadow_rows what_if include exclude dump optimizer",
}

RUN_METHODS = {
    "table": "columns module gemm tensor steps",
    "sql": "query",
}


def parameters(thing: object) -> list[str]:
    signature = inspect.signature(thing)  # type: ignore[arg-type]  # callables only
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return [stars.get(p.kind.name, "") + p.name for p in signature.parameters.values() if p.name != "self"]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_all_is_sorted_and_complete() -> None:
    assert fp8debug.__all__ == sorted(PUBLIC)
    assert set(fp8debug.__all__) <= set(dir(fp8debug))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_object_is_there_documented_and_takes_its_parameters(name: str) -> None:
    thing = getattr(fp8debug, name)
    if name.startswith("__"):
        return
    assert inspect.getdoc(thing)
    expected = PUBLIC[name]
    if expected is not None:
        assert parameters(thing)[: len(expected.split())] == expected.split()


@pytest.mark.parametrize("name", sorted(RUN_METHODS))
def test_a_run_takes_its_parameters(name: str) -> None:
    expected = RUN_METHODS[name].split()
    assert parameters(getattr(fp8debug.Run, name))[: len(expected)] == expected


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'fp8debug' has no attribute 'wach'$"):
        _ = fp8debug.wach  # type: ignore[attr-defined]  # the point of the test


def test_no_function_is_named_like_a_module() -> None:
    """Importing fp8debug.x.y sets the attribute y of fp8debug.x, which would replace a function of that name."""
    packages = [fp8debug.__name__, *(m.name for m in pkgutil.walk_packages(fp8debug.__path__, "fp8debug.") if m.ispkg)]
    for package in packages:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            if callable(getattr(module, name)):
                assert importlib.util.find_spec(f"{package}.{name}") is None, f"{package}.{name} is a module too"


HEAVY = ("torch", "numpy", "pyarrow", "duckdb", "pandas", "dash", "plotly", "click", "rich")


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import fp8debug", ()),
        ("import fp8debug; fp8debug.get_recipe('blockwise'), fp8debug.Cast()", ()),
        ("from fp8debug import Run, triage, recommend, apply, Finding, Fallback", ("numpy", "pyarrow", "duckdb")),
        ("import fp8debug_cli.main", ("click", "rich")),
        ("from fp8debug import watch, convert, inject, list_faults, measure", ("torch", "numpy", "pyarrow")),
    ],
)
def test_a_name_loads_only_what_its_half_needs(code: str, allowed: tuple[str, ...]) -> None:
    loaded = run_python(f"import sys; {code}; print(*(m for m in {HEAVY!r} if m in sys.modules))").split()
    assert sorted(set(loaded) - set(allowed)) == []


def test_the_reading_half_works_where_torch_is_missing() -> None:
    block = "import sys; sys.modules['torch'] = None; "
    code = "from fp8debug import Run, triage, recommend, apply, Recipe; import fp8debug_cli.main, fp8debug_dashboard"
    assert run_python(block + code + "; print('fine')") == "fine\n"


def test_a_torch_name_without_torch_says_so() -> None:
    block = "import sys; sys.modules['torch'] = None; import fp8debug\n"
    assert "torch" in run_python(block + "try: fp8debug.quantize\nexcept ImportError as error: print(error)")


def cpu_seconds(command: list[str]) -> float:
    """Return the least user and system time of several runs; a busy machine only adds to it."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)

    return min(once() for _ in range(7))


def test_help_costs_under_three_tenths_of_a_second() -> None:
    python = cpu_seconds([sys.executable, "-c", "pass"])
    tool = cpu_seconds([sys.executable, "-c", "from fp8debug_cli.main import main; main(['--help'])"])
    assert tool - python < 0.3

"""A numerics debugger for FP8 training: record every cast, name the sick layer, say what to run in a higher precision.

Every public name is loaded on first use, so that reading a run needs no torch and recording one needs no DuckDB.
"""

__version__ = "0.1.0"

__all__ = [
    "Cast",
    "Fallback",
    "Finding",
    "Fp8DebugError",
    "Fp8Linear",
    "Guard",
    "Quantized",
    "Recipe",
    "Run",
    "__version__",
    "apply",
    "convert",
    "dequantize",
    "get_recipe",
    "inject",
    "list_faults",
    "list_recipes",
    "measure",
    "quantize",
    "recommend",
    "triage",
    "watch",
]

#: Where each public name lives; no function is called like a module, or importing one would hide the other.
_HOME = {
    "Cast": "fp8debug.recipes",
    "Fallback": "fp8debug.fallback",
    "Finding": "fp8debug.rules.base",
    "Fp8DebugError": "fp8debug.errors",
    "Fp8Linear": "fp8debug.linear",
    "Guard": "fp8debug.fallback.guard",
    "Quantized": "fp8debug.types",
    "Recipe": "fp8debug.recipes",
    "Run": "fp8debug.store.read.run",
    "apply": "fp8debug.fallback",
    "convert": "fp8debug.linear",
    "dequantize": "fp8debug.kernels.reference",
    "get_recipe": "fp8debug.recipes",
    "inject": "fp8debug.faults",
    "list_faults": "fp8debug.faults",
    "list_recipes": "fp8debug.recipes",
    "measure": "fp8debug.kernels.reference",
    "quantize": "fp8debug.kernels.dispatch",
    "recommend": "fp8debug.fallback",
    "triage": "fp8debug.rules",
    "watch": "fp8debug.adapters",
}

TYPE_CHECKING = False  # typing.TYPE_CHECKING would import typing, which costs more than the rest of this file
if TYPE_CHECKING:
    from fp8debug.adapters import watch
    from fp8debug.errors import Fp8DebugError
    from fp8debug.fallback import Fallback, apply, recommend
    from fp8debug.fallback.guard import Guard
    from fp8debug.faults import inject, list_faults
    from fp8debug.kernels.dispatch import quantize
    from fp8debug.kernels.reference import dequantize, measure
    from fp8debug.linear import Fp8Linear, convert
    from fp8debug.recipes import Cast, Recipe, get_recipe, list_recipes
    from fp8debug.rules import triage
    from fp8debug.rules.base import Finding
    from fp8debug.store.read.run import Run
    from fp8debug.types import Quantized
else:

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'fp8debug' has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

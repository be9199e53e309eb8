"""torchao: a Python file with the filter function of ``convert_to_float8_training``, and its list of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS, Exporter, comments, header, in_bf16, limits, not_in_fp8, reasons
from fp8debug.types import WRAPPERS, plain_name

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

USAGE = """#
#     from torchao.float8 import convert_to_float8_training
#     convert_to_float8_training(model, module_filter_fn=module_filter_fn, config=...)
#
# A filter of your own goes inside: lambda module, fqn: mine(module, fqn) and module_filter_fn(module, fqn).
"""


class TorchaoExporter(Exporter):
    """A function of (module, FQN) that is True for what becomes a Float8Linear; names are compared whole."""

    name = "torchao"
    suffix = ".py"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        return limits(run, fallbacks, per_gemm=False)

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the Python file; it imports nothing."""
        notes = header(run, self.name, self.notes(run, fallbacks))
        return comments(notes) + USAGE + filter_function(run, fallbacks, "module_filter_fn")


def filter_function(run: Run, fallbacks: Sequence[Fallback], name: str) -> str:
    """Return Python text: the sets of names and the filter function over them.

    Args:
        run: the run.
        fallbacks: the list.
        name: of the function.
    """
    why = reasons(fallbacks)
    chosen = {plain_name(module): why.get(module, "") for module in in_bf16(run, fallbacks)}
    recorded = {plain_name(module): "" for module in not_in_fp8(run)}
    return f'''
#: What should leave FP8.
BF16_FQNS = {_names(chosen)}

#: What the recorded run had left in high precision.
HIGH_PRECISION_FQNS = {_names({fqn: "" for fqn in recorded if fqn not in chosen})}


def {name}(module, fqn):
    """Tell whether an nn.Linear becomes a Float8Linear."""
    fqn = ".".join(part for part in fqn.split(".") if part not in {WRAPPERS!r})
    if fqn in BF16_FQNS or fqn in HIGH_PRECISION_FQNS:
        return False
    # FP8 GEMMs need dimensions that 16 divides.
    return module.in_features % 16 == 0 and module.out_features % 16 == 0
'''


def _names(names: dict[str, str]) -> str:
    """Return a frozenset as Python text, one name a line with its reason."""
    if not names:
        return "frozenset()"
    lines = [f"    {fqn!a},{comments([why], '  # ').rstrip() if why else ''}" for fqn, why in names.items()]
    return "frozenset((\n" + "\n".join(lines) + "\n))"


EXPORTERS.add(TorchaoExporter.name, TorchaoExporter())

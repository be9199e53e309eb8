"""torchtitan: the ``filter_fqns`` of ``Float8LinearConverter.Config``, in a Python file.

torchtitan leaves a Linear out of FP8 when one entry is a *substring* of its name: ``layers.1`` also hits ``layers.10``. The whole
name is the longest, and so the most exact, entry there is; where it is a part of another module's name, no entry exists that
hits the one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import (
    EXPORTERS,
    Exporter,
    comments,
    header,
    in_bf16,
    limits,
    not_in_fp8,
    reasons,
    several,
)
from fp8debug.types import plain_name

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

USAGE = """#
#     Float8LinearConverter.Config(recipe_name=..., filter_fqns=FILTER_FQNS)
#
# Versions configured by TOML or flags take the same list as quantize.linear.float8.filter_fqns.
"""


class TorchtitanExporter(Exporter):
    """A list of whole names: those that should leave FP8, and those that the recorded run had left out."""

    name = "torchtitan"
    suffix = ".py"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        notes = limits(run, fallbacks, per_gemm=False)
        also = [f"{name} also hits {', '.join(hit)}" for name, hit in self._collisions(run, fallbacks).items()]
        if also:
            notes.append(f"matches substrings, and no entry tells these apart, so the others leave FP8 too: {several(also)}")
        return notes

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the Python file."""
        why = reasons(fallbacks)
        chosen = {plain_name(module): why.get(module, "") for module in in_bf16(run, fallbacks)}
        recorded = {plain_name(m): "left in high precision by the recorded run" for m in not_in_fp8(run)}
        entries = {**recorded, **chosen}
        lines = [f"    {fqn!a},{comments([about], '  # ') if about else chr(10)}" for fqn, about in entries.items()]
        notes = header(run, self.name, self.notes(run, fallbacks))
        return comments(notes) + USAGE + "FILTER_FQNS = [\n" + "".join(lines) + "]\n"

    def _collisions(self, run: Run, fallbacks: Sequence[Fallback]) -> dict[str, list[str]]:
        """Return by entry the FP8 modules that it matches although they were not requested."""
        chosen = [plain_name(module) for module in in_bf16(run, fallbacks)]
        recorded = [plain_name(module) for module in not_in_fp8(run)]
        others = [n for m in run.modules if (n := plain_name(str(m["fqn"]))) not in {*chosen, *recorded}]
        found = {entry: [name for name in others if entry in name] for entry in [*recorded, *chosen]}
        return {entry: hit for entry, hit in found.items() if hit}


EXPORTERS.add(TorchtitanExporter.name, TorchtitanExporter())

"""Hugging Face Accelerate with torchao: the ``module_filter_func`` of ``AORecipeKwargs``, in a Python file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS, Exporter, comments, header, limits
from fp8debug.exporters.torchao import filter_function

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

USAGE = """#
#     from accelerate import Accelerator
#     from accelerate.utils import AORecipeKwargs
#     Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(module_filter_func=module_filter_func)])
#
"""


class AccelerateExporter(Exporter):
    """The filter of the torchao exporter under the name that Accelerate gives it."""

    name = "accelerate"
    suffix = ".py"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        return [
            *limits(run, fallbacks, per_gemm=False),
            "leaves the first and the last Linear out of FP8 only while no filter is given; this one replaces that, and"
            " keeps out what the recorded run kept out",
            "takes a filter with torchao only; its Transformer Engine backend (TERecipeKwargs) has none: use --to te there",
        ]

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the Python file; it imports nothing."""
        notes = header(run, self.name, self.notes(run, fallbacks))
        return comments(notes) + USAGE + filter_function(run, fallbacks, "module_filter_func")


EXPORTERS.add(AccelerateExporter.name, AccelerateExporter())

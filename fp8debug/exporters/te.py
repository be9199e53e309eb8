"""Transformer Engine: a configuration file of nvidia-dlfw-inspect whose features leave layers or GEMMs in high precision.

Read with ``nvdlfw_inspect.api.initialize(config_file=..., feature_dirs=[<transformer_engine>/debug/features])``. The features
``DisableFP8Layer`` and ``DisableFP8GEMM`` are known to every Transformer Engine with debug tools; since 2.13 they are kept as
names of ``DisableQuantizationLayer`` and ``DisableQuantizationGEMM``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS, Exporter, comments, header, in_bf16, limits, yaml_string
from fp8debug.fallback.candidates import GEMMS

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

#: In front of a model's own names: ``infer_and_assign_layer_names`` begins with ``model``; wrappers add ``module``.
PREFIX = r"(?:model\.)?(?:module\.)*"
#: Behind the name of a module with several GEMM layers: LayerNormMLP and GroupedLinear.
PARTS = r"(?:\.(?:fc[12]|gemm_\d+))?"


class TransformerEngineExporter(Exporter):
    """One section for the modules that leave FP8 as a whole, and one for each set of GEMMs that does."""

    name = "te"
    suffix = ".yaml"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        notes = limits(run, fallbacks, per_gemm=True)
        if not in_bf16(run, fallbacks):
            return notes
        notes.append(
            "matches Transformer Engine's module.name, so call nvdlfw_inspect.api.infer_and_assign_layer_names(model) first;"
            " in Megatron these names count layers from 1 and over all pipeline stages; and the debug path, which is slower,"
            " stays on"
        )
        return notes

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the YAML document. A layer that two sections match is an error to nvdlfw_inspect, so each is in one."""
        names = [str(module["fqn"]) for module in run.modules]
        groups: dict[tuple[str, ...], list[str]] = {}
        for module, gemms in in_bf16(run, fallbacks).items():
            groups.setdefault(gemms, []).append(module)
        lines = [comments(header(run, self.name, self.notes(run, fallbacks)))]
        for gemms, modules in groups.items():
            is_whole = gemms == GEMMS
            pattern = f"^{PREFIX}(?:{'|'.join(_pattern(module, names) for module in modules)})$"
            lines.append(f"fp8debug_{'layers' if is_whole else '_'.join(gemms)}:\n")
            lines.append("  enabled: True\n  layers:\n")
            lines.append(f"    layer_name_regex_pattern: {yaml_string(pattern)}\n")
            lines.append("  transformer_engine:\n")
            lines.append(f"    {'DisableFP8Layer' if is_whole else 'DisableFP8GEMM'}:\n      enabled: True\n")
            lines.append("" if is_whole else f"      gemms: [{', '.join(gemms)}]\n")
        if not groups:  # nvdlfw_inspect wants one section that is enabled; this one matches no name
            lines.append("fp8debug_nothing:\n  enabled: True\n  layers: {layer_name_regex_pattern: '(?!)'}\n")
        return "".join(lines)


def _pattern(module: str, names: Sequence[str]) -> str:
    """Return a regular expression for one module, and for its parts unless these have names of their own."""
    has_children = any(name.startswith(module + ".") for name in names)
    return re.escape(module) + ("" if has_children else PARTS)


EXPORTERS.add(TransformerEngineExporter.name, TransformerEngineExporter())

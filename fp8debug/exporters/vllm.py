"""Rollout engines, vLLM and SGLang: the ``ignored_layers`` of their FP8 configuration, beside the trainer's own list.

Both read ``quantization_config`` of a model's config.json, which an argument may override, and arguments from a YAML file.
They join q, k and v, and gate and up, into one GEMM, which can only be ignored as a whole: where one part is named, so are the
others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from fp8debug.exporters.base import EXPORTERS, Exporter, comments, header, in_bf16, limits, not_in_fp8, several
from fp8debug.types import plain_name

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

#: Last parts of names that an engine joins.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3"))


class VllmExporter(Exporter):
    """``vllm serve MODEL --config FILE``."""

    name = "vllm"
    suffix = ".yaml"
    argument: ClassVar[str] = "hf-overrides"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        notes = limits(run, fallbacks, per_gemm=False)
        if added := self._added(run, fallbacks):
            notes.append(f"joins these with modules of the list, so they leave FP8 too: {several(added)}")
        return notes

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the YAML file of the engine's arguments."""
        names = [*self._named(run, fallbacks), *self._added(run, fallbacks)]
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": names}
        told = json.dumps({"quantization_config": config})
        notes = comments(header(run, self.name, self.notes(run, fallbacks)))
        return f"{notes}quantization: fp8\n{self.argument}: {json.dumps(told)}\n"

    @staticmethod
    def _named(run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        return list(dict.fromkeys(plain_name(name) for name in [*not_in_fp8(run), *in_bf16(run, fallbacks)]))

    def _added(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return the modules that a joined GEMM takes out of FP8 besides those that are named."""
        named = self._named(run, fallbacks)
        known = {plain_name(str(module["fqn"])) for module in run.modules}
        added: dict[str, None] = {}
        for name in named:
            above, dot, last = name.rpartition(".")
            for group in JOINED:
                if last in group:
                    added.update((f"{above}{dot}{part}", None) for part in group if f"{above}{dot}{part}" in known)
        return [name for name in added if name not in named]


class SglangExporter(VllmExporter):
    """The same for SGLang: ``python -m sglang.launch_server --config FILE``."""

    name = "sglang"
    argument = "json-model-override-args"


EXPORTERS.add(VllmExporter.name, VllmExporter())
EXPORTERS.add(SglangExporter.name, SglangExporter())

"""LoongForge: a callback for its adaptive FP8, which decides by the kind of a module and not by its name.

``selective_fp8_init_decision(config, *, te_cls, ub_name, init_kwargs) -> bool`` is asked once for each Transformer Engine
module while the model is built; True keeps FP8. ``ub_name`` is Megatron's ``tp_comm_buffer_name`` (qkv, proj, fc1, fc2, ...),
the same in every layer, so a whole kind leaves FP8 where one layer should.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS, Exporter, comments, header, in_bf16, limits, several

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

#: Last part of a Megatron module's path -> its ``tp_comm_buffer_name``.
UB_NAMES = {
    "linear_qkv": "qkv",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "linear_q_down_proj": "q_down_proj",
    "linear_kv_down_proj": "kv_down_proj",
    "linear_q_up_proj": "q_up_proj",
    "linear_kv_up_proj": "kv_up_proj",
}

USAGE = """#
# Needs selective_fp8: true in the model's configuration. Register it after the arguments are parsed (parse_args_from_config
# registers LoongForge's own) and before the model is built:
#
#     from megatron.core.fp8_utils import register_selective_fp8_init_decision
#     register_selective_fp8_init_decision(selective_fp8_init_decision)
#
# Keep the flags and amax eps of the job (--fp8-format, --fp8-recipe, FP8_QUANT_*_AMAX_EPS) as they are.
"""

FUNCTION = '''

def selective_fp8_init_decision(config, *, te_cls, ub_name, init_kwargs):
    """Tell whether a Transformer Engine module keeps FP8."""
    return (ub_name, bool(init_kwargs.get("is_expert", False))) not in BF16_KINDS
'''

#: A kind: ``tp_comm_buffer_name``, and whether it belongs to routed experts.
Kind = tuple[str, bool]


class LoongForgeExporter(Exporter):
    """The kinds of the modules that should leave FP8, and the function that looks them up."""

    name = "loongforge"
    suffix = ".py"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        notes = limits(run, fallbacks, per_gemm=False)
        modules = list(in_bf16(run, fallbacks))
        kinds = {kind_of(module) for module in modules}
        fp8 = [str(module["fqn"]) for module in run.modules if module.get("fp8")]
        also = [fqn for fqn in fp8 if fqn not in modules and kind_of(fqn) in kinds - {None}]
        if also:
            notes.append(f"sees kinds of modules, not names; these leave FP8 too: {several(also)}")
        unknown = [module for module in modules if kind_of(module) is None]
        if unknown:
            notes.append(f"cannot name these, whose last part is no linear of Megatron; they stay in FP8: {several(unknown)}")
        return notes

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the Python file; it imports nothing."""
        kinds = dict.fromkeys(kind for module in in_bf16(run, fallbacks) if (kind := kind_of(module)) is not None)
        notes = header(run, self.name, self.notes(run, fallbacks))
        about = "\n#: (tp_comm_buffer_name, whether of routed experts) that run in BF16.\n"
        names = "".join(f"    {kind!r},\n" for kind in kinds)
        return comments(notes) + USAGE + about + f"BF16_KINDS = frozenset((\n{names}))\n" + FUNCTION


def kind_of(fqn: str) -> Kind | None:
    """Return the kind of a module by its path; None for one that is no linear of Megatron's."""
    *path, last = fqn.split(".")
    ub_name = UB_NAMES.get(last)
    return None if ub_name is None else (ub_name, "experts" in path)


EXPORTERS.add(LoongForgeExporter.name, LoongForgeExporter())

"""Transformer Engine: a Python file with a ``CustomRecipe``, whose factory makes the quantizer of each tensor and direction.

No debug tools run for it: the library asks ``qfactory(role)`` once for each slot. A tensor's row-wise data are read by one GEMM
and its column-wise data by another (input: fprop and wgrad; weight: fprop and dgrad; grad_output: dgrad and wgrad), so a
``HybridQuantizer`` gives each GEMM its precision, and an ``IdentityQuantizer`` is high precision. A role's name is
``module.name``, with ``.fc1`` and ``.fc2`` of a LayerNormMLP; the experts of a GroupedLinear have one (Transformer Engine 2.20).
The library leaves it empty where the program gave none, so the file brings ``name_modules``, and its factory refuses a Linear
without a name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS, Exporter, comments, header, limits, precisions, several
from fp8debug.fallback.candidates import GEMMS
from fp8debug.fallback.measured import running_casts
from fp8debug.formats import FORMATS, GRANULARITIES
from fp8debug.types import WRAPPERS, plain_name

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.recipes import Cast
    from fp8debug.store.read.run import Run

#: By precision the factory of ``custom_recipes.quantizer_factories``.
FACTORIES = {
    "bf16": "high_precision_factory",
    "nvfp4": "nvfp4_factory",
    "mxfp8": "mxfp8_factory",
    "blockwise": "float8_block_scaling_factory",
    "tensorwise": "current_scaling_factory",
    "delayed": "delayed_scaling_factory",
}
TEXT = '''
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch import HybridQuantizer
from transformer_engine.pytorch.custom_recipes import quantizer_factories

#: Precision of the job, and by the name of a module the precision of its GEMMs that leave it.
BASE = {base!r}
GEMMS = {{
{entries}}}
FACTORIES = {{
{factories}}}
#: Levels of a module's name that wrappers add.
WRAPPERS = {wrappers}
#: GEMMs that read a tensor row-wise and column-wise.
READERS = {{"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}}


def name_modules(model):
    """Name the modules of Transformer Engine by their place in the model; call it before the first forward pass."""
    names = []
    for fqn, module in model.named_modules():
        if type(module).__module__.startswith("transformer_engine.") and hasattr(module, "name"):
            module.name = ".".join(part for part in fqn.split(".") if part not in WRAPPERS)
            names += [module.name, module.name + ".fc1", module.name + ".fc2"]
    lost = [module for module in GEMMS if not any(is_named(name, module) for name in names)]
    if lost:
        raise ValueError("no module of Transformer Engine has the name " + " or ".join(lost))


def is_named(name, module):
    """Return whether a role's name is that of a module of the table; what stands before it does not count."""
    return name == module or name.endswith("." + module)


def precision(name, gemm):
    """Return the precision of a GEMM of the module of that name."""
    for module, gemms in GEMMS.items():
        if is_named(name, module):
            return gemms.get(gemm, BASE)
    return BASE


def qfactory(role):
    """Return the quantizer of a tensor: one for both directions, or one for each GEMM that reads it."""
    readers = READERS.get(getattr(role, "tensor_type", ""))
    if readers is None:
        return FACTORIES[BASE](role)
    if GEMMS and not role.name:
        raise ValueError("a module of Transformer Engine has no name; call name_modules(model) before the first forward pass")
    row, column = (precision(role.name, gemm) for gemm in readers)
    if row == column:
        return FACTORIES[row](role)
    return HybridQuantizer(rowwise_quantizer=FACTORIES[row](role), columnwise_quantizer=FACTORIES[column](role))


recipe = CustomRecipe(qfactory=qfactory)
'''


class TransformerEngineRecipe(Exporter):
    """A table of modules and GEMMs, and the factory that reads it."""

    name = "te-recipe"
    suffix = ".py"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        notes = limits(run, fallbacks, per_gemm=True, has_precisions=True)
        experts = Counter(_role_name(module) for module in precisions(run, fallbacks))
        joined = [f"{name} ({count} experts)" for name, count in experts.items() if count > 1]
        if joined:
            notes.append(f"has one role for all experts of a GroupedLinear, so all of them change together: {several(joined)}")
        if _base(run) == "delayed":
            notes.append("cannot mix delayed scaling with another precision in one tensor; such a GEMM takes its operands whole")
        return notes

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the Python file."""
        table: dict[str, dict[str, str]] = {}
        for module, gemms in precisions(run, fallbacks).items():
            table.setdefault(_role_name(module), {}).update({gemm: gemms[gemm] for gemm in GEMMS if gemm in gemms})
        base = _base(run)
        used = {base, *(precision for gemms in table.values() for precision in gemms.values())}
        entries = "".join(f"    {name!a}: {gemms!r},\n" for name, gemms in table.items())
        factories = "".join(f"    {key!r}: quantizer_factories.{FACTORIES[key]},\n" for key in FACTORIES if key in used)
        notes = header(run, self.name, self.notes(run, fallbacks))
        usage = ["name_modules(model)", "with transformer_engine.pytorch.autocast(enabled=True, recipe=recipe): ..."]
        return comments([*notes, *usage]) + TEXT.format(
            base=base, entries=entries, factories=factories, wrappers=sorted(WRAPPERS)
        )


def _role_name(module: str) -> str:
    """Return the name that a role has: without wrappers and the number of an expert."""
    return plain_name(re.sub(r"\.gemm_\d+$", "", module))


def _base(run: Run) -> str:
    """Return the precision that most operands of the run have, as a key of FACTORIES."""
    found = Counter(_precision(cast) for cast in running_casts(run).values())
    return found.most_common(1)[0][0] if found else "bf16"


def _precision(cast: Cast) -> str:
    sizes = set(GRANULARITIES[cast.granularity])
    if FORMATS[cast.format].bits == 4 and 16 in sizes:
        return "nvfp4"
    if cast.scaling == "delayed":
        return "delayed"
    return "mxfp8" if 32 in sizes else "blockwise" if 128 in sizes else "tensorwise"


EXPORTERS.add(TransformerEngineRecipe.name, TransformerEngineRecipe())

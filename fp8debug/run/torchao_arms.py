"""torchao's Float8Linear in an arm of an experiment: out of FP8, GEMM by GEMM or as a whole, or with emulated GEMMs.

torchao is configured per module, so an arm changes the modules that the script's own filter has made. A whole module becomes
the nn.Linear that it was made of: what ``module_filter_fn`` of ``fp8debug fallback --to torchao`` would have left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fp8debug.adapters.torchao import FIELDS
from fp8debug.errors import UsageError
from fp8debug.fallback import Fallback
from fp8debug.fallback.candidates import GEMMS
from fp8debug.types import plain_name


def change_modules(modules: Mapping[str, nn.Module], compute: str, fallbacks: Sequence[Fallback]) -> list[Fallback]:
    """Give the Float8Linear modules of a model their arm, in place.

    Args:
        modules: by FQN.
        compute: what the arm computes.
        fallbacks: its list; globs are taken.

    Returns:
        the entries that name none of them.

    Raises:
        UsageError: an entry asks for more than BF16 for whole GEMMs; nothing is changed.
    """
    gemms = {name: set(GEMMS) if compute == "bf16" else set[str]() for name in modules}
    rest = []
    for entry in fallbacks:
        pattern = plain_name(entry.module)
        exact = [name for name in modules if plain_name(name) == pattern]
        matched = exact or [name for name in modules if fnmatchcase(plain_name(name), pattern)]
        if not matched:
            rest.append(entry)
        elif entry.cast is not None or entry.tensor != "*" or entry.is_scheduled:
            asked = f"{entry.cast}" if entry.cast else "one operand in BF16" if entry.tensor != "*" else "BF16 in some steps"
            raise UsageError(
                f"{entry.module} is a Float8Linear of torchao: an arm runs its GEMMs in BF16 or leaves them, and the list"
                f" asks for {asked}; give --fallbacks FILE without this entry, and make the change in torchao's config"
            )
        for name in matched:
            gemms[name].update(entry.gemms)
    for name, chosen in gemms.items():
        if chosen:
            leave_fp8(name, modules[name], chosen)
        elif compute == "fp8_tensors":
            emulate_gemms(modules[name])
    return rest


def leave_fp8(name: str, module: Any, gemms: Collection[str]) -> None:
    """Run GEMMs of a Float8Linear in high precision from now on.

    Args:
        name: of the module, for the message.
        module: the Float8Linear.
        gemms: of ``fprop``, ``dgrad``, ``wgrad``; all three make it an nn.Linear.

    Raises:
        UsageError: its weights travel in FP8 under FSDP, which no arm can undo.
    """
    if module.config.enable_fsdp_float8_all_gather:
        raise UsageError(f"{name} gathers its weight in FP8; train the arms without enable_fsdp_float8_all_gather")
    if set(gemms) >= set(GEMMS):
        module.__class__ = nn.Linear
        return
    fields = {field: getattr(module.config, field) for (gemm, _), field in FIELDS.items() if gemm.value in gemms}
    disabled = type(module.config.cast_config_input.scaling_type).DISABLED
    module.config = replace(module.config, **{field: replace(cast, scaling_type=disabled) for field, cast in fields.items()})


def emulate_gemms(module: Any) -> None:
    """Let the GEMMs of a Float8Linear multiply what quantization left of their operands, in the operands' own dtype."""
    module.config = replace(module.config, emulate=True)
    module.linear_mm_config = type(module.linear_mm_config)(*(gemm._replace(emulate=True) for gemm in module.linear_mm_config))

"""What multiplies and is not watched, with the reason, so that coverage can say so: no module of it has statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fp8debug.adapters.base import ADAPTERS, num_dims
from fp8debug.adapters.parts import stacks_of
from fp8debug.adapters.stages import layers_before, name_in_model

#: By the top-level package that a module's class comes from: no adapter reads these.
_LIBRARIES = {"transformer_engine": "Transformer Engine", "bitsandbytes": "bitsandbytes", "deep_gemm": "DeepGEMM"}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def modules_outside(roots: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return FQN, kind and reason of each module that has GEMMs and that no adapter takes; Linears among them are not listed."""
    found = []
    for number, root in enumerate(roots):
        before = layers_before(root)
        for name, module in root.named_modules():
            reason = None if any(a.matches(module) for a in ADAPTERS) else _reason(module)
            if reason is not None:
                whole = name_in_model(name, before)
                fqn = ".".join(([str(number)] if len(roots) > 1 else []) + ([whole] if name else []))
                found.append({"fqn": fqn or type(module).__name__, "kind": type(module).__name__, "reason": reason})
    return found


def _reason(module: nn.Module) -> str | None:
    library = type(module).__module__.split(".")[0]
    parameters = list(module.parameters(recurse=False))
    if library in _LIBRARIES and any(num_dims(p) >= 2 for p in parameters):
        return f"a module of {_LIBRARIES[library]}, of a kind that no adapter reads"
    if isinstance(module, _CONVOLUTIONS):
        return "a convolution: only Linears are watched"
    if isinstance(module, nn.MultiheadAttention):
        return "attention and its fused projections: only Linears are watched"
    wrapped = next((type(p).__name__ for p in parameters if type(p).__module__.startswith("torchao.")), None)
    if wrapped is not None:
        return f"its parameters are {wrapped}: what torchao multiplies by them is not read"
    if stacks_of(module) and not isinstance(module, nn.Linear):
        return "weights of several experts in one tensor: grouped GEMMs are not read"
    return None

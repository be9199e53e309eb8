"""F208: a module lacks the activation scale that its equals have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import ACTIVATION_SCALES, role_of
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class MissingActivationScale(FileRule):
    """A module has no static scale for its input, or for the KV cache, and the same module of other layers has one.

    What it detects
        Quantized weights without an input scale, and attention without a scale of keys or values, where more of the modules of
        one role have it than lack it. Only modules of the same quantized weights, in one format and granularity, are compared:
        layers without keys of their own, or under another scheme, need no such scale. Where one shard alone was given nothing
        is reported.

    Why it matters
        Engines take 1 for a static scale that is missing. The input is then cast far off its range: it clips, or underflows.

    Example
        model.layers.1.mlp.up_proj.weight: no input_scale, which 27 of 28 modules of this role have.

    Cure
        Export the scale, or calibrate this module too: experts that got no token in calibration have none.

    Thresholds
        - None: the majority of a role decides. What a static scale far from the tensor's amax costs: numerics.md, 5.
    """

    code = "F208"
    name = "missing-activation-scale"
    cure = "export the scale, or calibrate this module too; an engine takes 1 in place of it"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights whose module lacks a scale that most of its role have."""
        if judged.checkpoint.is_part:
            return
        names = {*judged.checkpoint.tensors, *judged.checkpoint.elsewhere}
        have = {
            last: {above for above, _, one in (n.rpartition(".") for n in names) if one == last} for last in ACTIVATION_SCALES
        }
        places: dict[str, int] = {}
        parts: dict[str, set[tuple[str, str, str]]] = {}
        for place, (weight, _) in enumerate(judged.weights):
            module = weight.name.rpartition(".")[0]
            for one in filter(None, (module, module.rpartition(".")[0])):  # of attention, of which keys and values are parts
                places.setdefault(one, place)
                parts.setdefault(one, set()).add((weight.name.removeprefix(one), weight.format, weight.granularity))
        alike: dict[tuple[str, frozenset[tuple[str, str, str]]], list[str]] = {}
        for module, held in parts.items():
            alike.setdefault((role_of(module), frozenset(held)), []).append(module)
        for last in sorted(last for last, modules in have.items() if modules):
            for modules in alike.values():
                lacking = [module for module in modules if module not in have[last]]
                if 2 * len(lacking) >= len(modules):
                    continue
                for module in lacking:
                    text = f"no {last}, which {len(modules) - len(lacking)} of {len(modules)} modules of this role have"
                    yield self.of_weight(judged.weights[places[module]].weight, Severity.ERROR, text)


CHECKS.add(MissingActivationScale.code, MissingActivationScale())

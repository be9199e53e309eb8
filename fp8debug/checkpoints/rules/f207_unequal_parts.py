"""F207: parts that engines join have other tensor scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import FUSED
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class UnequalParts(FileRule):
    """Weights that engines join into one have different tensor scales.

    What it detects
        NVFP4 weights of q, k and v, or of gate and up, of one module or expert, whose second-level scales differ by more than
        max_difference.

    Why it matters
        An engine that joins them keeps one scale for the joined weight. The other part is then off by the ratio of the two,
        unless the engine rescales its block scales; vLLM warns once and goes on.

    Example
        model.layers.0.mlp.experts.3.up_proj.weight: its tensor scale is 1.5 times that of gate_proj.

    Cure
        Quantize the parts under the larger of their amaxes (llm-compressor and Model Optimizer do that where they know the
        parts), or serve with an engine that rescales.

    Thresholds
        - max_difference 0.01: of the ratio from 1; numerics.md, 4 (warn at 1 %). Seen in vllm #54974.
    """

    code = "F207"
    name = "unequal-parts"
    only_unexplained = True
    cure = "quantize the parts under the larger of their amaxes, or serve with an engine that rescales the block scales"

    max_difference: float = 0.01

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the parts whose scale is not that of the first part."""
        known = {
            weight.name: (weight, facts.tensor_scale)
            for weight, facts in judged.weights
            if weight.layout == "nvfp4" and facts.tensor_scale
        }
        others = {parts[0]: parts[1:] for parts in FUSED.values()}
        for name, (_, first) in known.items():
            module, _, last = name.rpartition(".")
            above, dot, part = module.rpartition(".")
            for other in others.get(part, ()):
                weight, scale = known.get(f"{above}{dot}{other}.{last}", (None, None))
                if weight is None or not first or not scale or abs(scale / first - 1) <= self.max_difference:
                    continue
                ratio = scale / first
                text = f"its tensor scale is {ratio:.3g} times that of {part}: an engine that joins the two keeps one of them"
                yield self.of_weight(weight, Severity.WARNING, text, value=ratio, threshold=1 + self.max_difference)


CHECKS.add(UnequalParts.code, UnequalParts())

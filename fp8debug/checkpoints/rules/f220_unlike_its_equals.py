"""F220: one layer unlike the same layer elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

from fp8debug.checkpoints.layouts import Weight
from fp8debug.checkpoints.names import role_of
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, excluded
from fp8debug.checkpoints.scan import WeightFacts
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class UnlikeItsEquals(FileRule):
    """A weight is stored otherwise, or is of another size, than the same weight of the other layers.

    What it detects
        Weights whose names differ in numbers alone are equals. Among them, one whose dequantized rms is far from the
        others' median; and, as information, one that has another format, block or scale type than the rest, or that is in
        high precision though no list of the configuration excludes it.

    Why it matters
        A scale that is off by a constant cannot be seen in one weight alone. Layers of one role have similar weights.

    Example
        model.layers.3.mlp.up_proj.weight: rms 5.1, the other 31 have 0.02.

    Cure
        Compare this weight with the original: fp8debug check CHECKPOINT --against ORIGINAL.

    Thresholds
        - min_equals 4: equals that a weight is compared with. No published basis.
        - min_log2 3: binades from the median rms. No published basis, and set on synthetic weights; seen in mcore-bridge #183.
        - min_deviations 8: times the median deviation of the others. No published basis.
    """

    code = "F220"
    name = "unlike-its-equals"
    cure = "compare this weight with the original: fp8debug check CHECKPOINT --against ORIGINAL"
    only_unexplained = True

    min_equals: int = 4
    min_log2: float = 3.0
    min_deviations: float = 8.0

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that differ."""
        roles: dict[str, list[tuple[Weight, WeightFacts]]] = {}
        for weight, facts in judged.weights:
            if weight.scale is not None and facts.problem is None:
                roles.setdefault(role_of(weight.name), []).append((weight, facts))
        for equals in roles.values():
            yield from self._sizes(equals)
            yield from self._kinds(equals)
        yield from self._unquantized(judged, roles)

    def _sizes(self, equals: Sequence[tuple[Weight, WeightFacts]]) -> Iterable[TensorFinding]:
        known = [(weight, log2(facts.rms)) for weight, facts in equals if facts.rms]
        if len(known) <= self.min_equals:
            return
        middle = median(size for _, size in known)
        deviation = median(abs(size - middle) for _, size in known)
        limit = max(self.min_log2, self.min_deviations * deviation)
        for weight, size in known:
            if abs(size - middle) > limit:
                text = f"the weight has an rms of {2**size:.3g}; its {len(known) - 1} equals in other layers have {2**middle:.3g}"
                yield self.of_weight(weight, Severity.WARNING, text, value=size - middle, threshold=limit, unit="log2")

    def _kinds(self, equals: Sequence[tuple[Weight, WeightFacts]]) -> Iterable[TensorFinding]:
        kinds = Counter(_kind(weight) for weight, _ in equals)
        usual, number = kinds.most_common(1)[0]
        if number < self.min_equals or len(kinds) == 1 or number < 0.75 * len(equals):
            return
        for weight, _ in equals:
            if _kind(weight) != usual:
                text = f"the weight is {_kind(weight)}; {number} equals in other layers are {usual}"
                yield self.of_weight(weight, Severity.INFO, text)

    def _unquantized(self, judged: Judged, roles: Mapping[str, Sequence[object]]) -> Iterable[TensorFinding]:
        has_list = bool(excluded(judged.checkpoint))
        for tensor, _ in judged.plains:
            equals = roles.get(role_of(tensor.name), ())
            if len(equals) >= self.min_equals and not has_list:
                text = f"the weight is {tensor.dtype}; {len(equals)} equals in other layers are quantized"
                yield self.of_tensor(tensor, Severity.INFO, text)


def _kind(weight: Weight) -> str:
    block = weight.granularity
    return f"{weight.format} {block} with {weight.scale.dtype if weight.scale is not None else 'no'} scales"


CHECKS.add(UnlikeItsEquals.code, UnlikeItsEquals())

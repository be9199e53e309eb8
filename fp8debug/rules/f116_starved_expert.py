"""F116: an expert that had tokens gets none any more: what is not there has no rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.groups import Group, Inputs, fprop_inputs, is_routed, numbered

if TYPE_CHECKING:
    from fp8debug.store.run import Run


@dataclass(frozen=True)
class StarvedExpert(Rule):
    """An expert that had its share of the tokens gets none from one sampled step to the next.

    What it detects
        One of a numbered list of equal modules that share their tokens (experts, by structure) which had a fair share of
        them and then has none at every sampled step to the end. Its statistics are "no data" from there, never 0 or
        100 %. Experts that are empty now and then, that fade out, or that never had tokens are healthy or a matter of the
        router's balance, and not reported (coverage lists a module that was never called).

    Why it matters
        Nothing of that expert is trained, its delayed scales stand still, and a kernel that divides by the amax of
        nothing makes NaN. It is an info: the numerics of the others are sound.

    Example
        layers.2.moe.experts.5.up had 131 tokens a step and none at 12 sampled steps from step 240 on; 7 others share them.

    Cure
        Look at the router's balance (its loss or bias) and at the tokens dropped before the expert; no cast helps.

    Thresholds
        - min_steps 3: sampled steps without tokens, to the end of the run. No published basis.
        - min_share 0.25: its median share before, in fair shares (all tokens over the number of experts). No published
          basis: a collapsing router starves an expert gradually.
        - Seen in TransformerEngine #648, torchtitan #1166.
    """

    code = "F116"
    name = "starved-expert"
    columns = ("numel",)
    cure = "look at the router's balance and at tokens dropped before the expert; no cast helps"
    is_harmful = False

    min_steps: int = 3
    min_share: float = 0.25

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the experts that lost their tokens."""
        inputs = fprop_inputs(run)
        for group in numbered(run):
            if is_routed(group, inputs):
                yield from self._starved(run, group, inputs)

    def _starved(self, run: Run, group: Group, inputs: Inputs) -> Iterable[Finding]:
        steps = sorted(step for step, values in inputs.items() if any(m in values for m in group.members.values()))
        for fqn in group.members.values():
            rows = {step: int(inputs[step][fqn]["rows"]) if fqn in inputs[step] else 0 for step in steps}
            empty = []
            for step in reversed(steps):
                if rows[step]:
                    break
                empty.append(step)
            before = steps[: len(steps) - len(empty)]
            if len(empty) < self.min_steps or len(before) < self.min_steps:
                continue
            shares = [rows[step] * len(group.members) / self._all(group, inputs, step) for step in before[-self.min_steps :]]
            if min(shares) >= self.min_share:
                usual = round(median(rows[step] for step in before))
                message = (
                    f"had {usual} tokens a step and none at {len(empty)} sampled steps from step {empty[-1]} on;"
                    f" {len(group.members) - 1} others share them, and its rates are no data"
                )
                place = min(inputs[step][fqn]["call_index"] for step in before if fqn in inputs[step])
                yield Finding(
                    code=self.code, name=self.name, severity=Severity.INFO, module=fqn, gemm="fprop", tensor="input",
                    steps=(empty[-1], empty[0]), ranks=tuple(run.ranks), value=0.0, threshold=self.min_share, message=message,
                    cure=self.cure, call_index=place,
                )  # fmt: skip

    def _all(self, group: Group, inputs: Inputs, step: int) -> int:
        return sum(int(inputs[step][m]["rows"]) for m in group.members.values() if m in inputs[step]) or 1


RULES.add(StarvedExpert.code, StarvedExpert())

"""F116: an expert that had tokens gets none any more: what is not there has no rate."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.model_structure import fprop_inputs, is_routed, linears, numbered

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class StarvedExpert(Rule):
    """An expert that had its share of the tokens gets none from one sampled step to the next.

    What it detects
        One of a numbered list of equal modules that share their tokens (experts, by structure), or of the experts in one
        tensor, which had a fair share of them and then has none at every sampled step to the end. Its statistics are "no
        data" from there, never 0 or 100 %. Experts that are empty now and then, that fade out, or that never had tokens are
        healthy or a matter of the router's balance, and not reported (coverage lists a module that was never called).

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
                names = list(group.members.values())
                seen = {step: values for step, values in inputs.items() if any(name in values for name in names)}
                rows = {step: [int(values[m]["rows"]) if m in values else 0 for m in names] for step, values in seen.items()}
                for expert, steps, text in self._starved(rows):
                    place = min(values[names[expert]]["call_index"] for values in seen.values() if names[expert] in values)
                    yield self._finding(run, names[expert], steps, text, place)
        places = {module["fqn"]: module["call_index"] or 0 for module in linears(run)}
        for module, rows in tokens_in_one_tensor(run).items():
            for expert, steps, text in self._starved(rows):
                yield self._finding(run, module, steps, f"expert {expert} of it {text}", places.get(module, 0))

    def _starved(self, rows: Mapping[int, Sequence[int]]) -> Iterable[tuple[int, tuple[int, int], str]]:
        """Return (expert, first and last step without tokens, text) from the tokens of each expert by step."""
        steps = sorted(rows)
        for expert in range(min(map(len, rows.values()), default=0)):
            with_tokens = [place for place, step in enumerate(steps) if rows[step][expert]]
            before = steps[: with_tokens[-1] + 1] if with_tokens else []
            empty = steps[len(before) :]
            if len(empty) < self.min_steps or len(before) < self.min_steps:
                continue
            shares = [rows[step][expert] * len(rows[step]) / (sum(rows[step]) or 1) for step in before[-self.min_steps :]]
            if min(shares) >= self.min_share:
                usual = round(median(rows[step][expert] for step in before))
                yield expert, (empty[0], empty[-1]), (
                    f"had {usual} tokens a step and none at {len(empty)} sampled steps from step {empty[0]} on;"
                    f" {len(rows[steps[0]]) - 1} others share them, and its rates are no data"
                )  # fmt: skip

    def _finding(self, run: Run, fqn: str, steps: tuple[int, int], message: str, place: int) -> Finding:
        return Finding(
            code=self.code, name=self.name, severity=Severity.INFO, module=fqn, gemm="fprop", tensor="input", steps=steps,
            ranks=tuple(run.ranks), value=0.0, threshold=self.min_share, message=message, cure=self.cure, call_index=place,
        )  # fmt: skip


def tokens_in_one_tensor(run: Run) -> dict[str, dict[int, list[int]]]:
    """Return the tokens of each expert by module and step where one tensor holds them all; of all ranks together."""
    query = "SELECT rank, step, module, message FROM events WHERE kind = 'tokens' AND step IS NOT NULL AND module IS NOT NULL"
    last = {(row["module"], row["step"], row["rank"]): row["message"] for row in run.sql(query).to_pylist()}
    found: dict[str, dict[int, list[int]]] = {}
    for (module, step, _), message in last.items():
        try:
            counts = json.loads(message)
        except ValueError:
            continue
        if isinstance(counts, list) and counts and all(type(count) is int for count in counts):
            steps = found.setdefault(module, {})
            steps[step] = [a + b for a, b in zip(counts, steps.get(step, [0] * len(counts)), strict=False)]
    return found


RULES.add(StarvedExpert.code, StarvedExpert())

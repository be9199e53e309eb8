"""F109: the Linear that chooses among experts runs in FP8, where FP8 was not requested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.model_structure import Group, Inputs, fprop_inputs, is_routed, linears, numbered, router_outputs
from fp8debug.rules.reading.traces import percent

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class RouterInFp8(Rule):
    """A router runs in FP8: the rounding of its scores sends tokens to other experts.

    What it detects
        A Linear in FP8 with as many outputs as there are experts beside it, or as the next multiple of 16, which FP8 GEMMs ask
        for. Experts are found by structure and by their
        tokens, never by name: a numbered list of equal modules that is called after it, belongs to the same block, and
        shares its tokens among its members, or reads the very same input; or 3-D weights with one matrix for each
        output, which the recorder notes in the manifest. A gate of SwiGLU has as many outputs as its hidden width, and is none.
        It is a warning where FP8 was not requested here, or the same Linear of another layer stays out of it; where a request for
        the whole model took the router along it is an info; a router that an override put in FP8 by name is none.

    Why it matters
        A choice is not a sum: errors do not average out. At 28 dB a few percent of the tokens change experts, training
        learns to live with that, and inference in another precision routes them otherwise. A router is far below 1 % of
        the FLOPs, so that FP8 gains nothing; DeepSeek-V3 keeps gating in high precision.

    Example
        layers.3.moe.router chooses among 64 experts and runs in FP8: 4.2 % of the sampled tokens change one of their 2.

    Cure
        overrides={FQN: None}; a filter entry for the router in torchao's module_filter_fn or torchtitan's filter_fqns.

    Thresholds
        - max_routers 0: routers in FP8; numerics.md, 6 (production recipes keep gating in high precision).
        - max_experts 512: outputs beyond which a Linear is taken for no router; numerics.md, 3 (num_choice_rows).
        - same_input 0.001: relative difference of sum_x2 below which two modules read one tensor. No published basis: a
          sum of squares in FP64 repeats to 1e-12, a norm between them changes it by more.
        - Seen in vllm #23031, maxtext #5293.
    """

    code = "F109"
    name = "router-in-fp8"
    columns = ("numel",)
    cure = "keep the router in high precision: overrides={FQN: None}, or a filter entry for it"

    max_routers: int = 0
    max_experts: int = 512
    same_input: float = 1e-3

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the routers in FP8."""
        filters = run.manifest.get("filters")
        named = {entry.get("pattern") for entry in (filters if isinstance(filters, list) else ()) if isinstance(entry, dict)}
        modules = {module["fqn"]: module for module in linears(run)}
        inputs = fprop_inputs(run)
        routers = dict(self._routers(run, inputs))
        twins = [set(g.members.values()) for g in numbered(run)]
        for fqn, num_experts in routers.items():
            asked = modules[fqn]["requested"]
            if fqn in named and asked == "fp8":
                continue
            spared = any(modules[twin]["fp8"] is False for group in twins if fqn in group for twin in group)
            if asked != "fp8":
                severity, why = Severity.WARNING, ", and FP8 was not requested for it"
            elif spared:
                severity, why = Severity.WARNING, ", while its like in other layers does not"
            else:
                severity, why = Severity.INFO, ", as the whole model does"
            yield self._finding(run, fqn, num_experts, severity, why, inputs)

    def _routers(self, run: Run, inputs: Inputs) -> Iterator[tuple[str, int]]:
        called = {fqn for values in inputs.values() for fqn in values}
        groups = [g for g in numbered(run) if len(g.members) <= self.max_experts and called & set(g.members.values())]
        selects = {module["fqn"]: module.get("selects") for module in run.modules}
        for module in linears(run):
            fqn, num = module["fqn"], module["out_features"]
            if fqn in called and num and 2 <= num <= self.max_experts:
                led = [g for g in groups if num in router_outputs(g) and self._leads(fqn, g, inputs)]
                if selects[fqn] == num or led:
                    own = max(led, key=lambda g: (len(g.members) == num, len(g.holder)), default=None)  # not a list of layers
                    yield fqn, len(own.members) if own else num

    def _leads(self, fqn: str, group: Group, inputs: Inputs) -> bool:
        """Return whether a module of one block with a group is called before it and reads what its members share."""
        if fqn in group.members.values() or not fqn.startswith(group.holder + "." if group.holder else ""):
            return False
        steps = [values for values in inputs.values() if fqn in values and any(m in values for m in group.members.values())]
        return bool(steps) and 2 * sum(self._shares(values, fqn, group) for values in steps) > len(steps)

    def _shares(self, values: Mapping[str, Mapping[str, Any]], fqn: str, group: Group) -> bool:
        own, members = values[fqn], [values[m] for m in group.members.values() if m in values]
        if min(m["call_index"] for m in members) < own["call_index"] or max(m["rows"] for m in members) > own["rows"]:
            return False
        if all(m["rows"] == own["rows"] for m in members):
            return all(abs(m["sum_x2"] - own["sum_x2"]) <= self.same_input * own["sum_x2"] for m in members)
        return is_routed(group, {0: values})

    def _finding(self, run: Run, fqn: str, num: int, severity: Severity, why: str, inputs: Inputs) -> Finding:
        query = (
            "SELECT step, call_index, top1_flip_rate, top2_flip_rate FROM sites WHERE module = ? AND actual"
            " AND tensor = 'output' AND reference = 'shadow' ORDER BY step"
        )
        rows = run.sql(query, [fqn]).to_pylist()
        rates = [row["top1_flip_rate"] for row in rows if row["top1_flip_rate"] is not None]
        rate = median(rates) if rates else None
        flips = f": {percent(rate)} of the sampled tokens change their first choice" if rate is not None else ""
        steps = [step for step, values in inputs.items() if fqn in values]
        return Finding(
            code=self.code,
            name=self.name,
            severity=severity,
            module=fqn,
            gemm="fprop",
            tensor="output",
            steps=(steps[0], steps[-1]),
            ranks=tuple(run.ranks),
            value=rate,
            threshold=float(self.max_routers),
            message=f"it chooses among {num} experts and runs in FP8{why}{flips}",
            cure=self.cure,
            call_index=min(inputs[step][fqn]["call_index"] for step in steps),
        )


RULES.add(RouterInFp8.code, RouterInFp8())

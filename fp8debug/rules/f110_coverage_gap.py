"""F110: a Linear is not where it was asked to be: out of FP8 or in FP8 unasked, or a filter matched nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity

if TYPE_CHECKING:
    from fp8debug.store.run import Run


@dataclass(frozen=True)
class CoverageGap(Rule):
    """A Linear runs in FP8 or out of it although nobody asked for that, or a filter matches nothing.

    What it detects
        A module that should run in FP8 and does not; a plain nn.Linear among converted ones that no override named; one
        that runs in FP8 against an override, or unasked where the others were asked for (a head or a tied embedding that
        a filter let through); an override, include or exclude pattern that matched no module. None of these: a module
        that an override left in BF16; a subclass of nn.Linear, whose forward may be another, unless an override names it;
        a head in FP8 that was asked for with all the others, which `fp8debug coverage` shows.

    Why it matters
        A filter with a typo is silent: the run is slower than planned, its memory larger, and a comparison of recipes
        compares something else than its title says; a head in FP8 rounds the logits. No cast is at fault, so it is a warning.

    Example
        blocks.5.mlp.up is a plain nn.Linear among 41 modules in FP8, and no override named it.

    Cure
        Convert it, or say that BF16 is meant: overrides={'blocks.5.mlp.up': None}. Correct the pattern.

    Thresholds
        - max_gaps 0: uncovered modules or empty patterns. Seen in torchtitan #4008.
    """

    code = "F110"
    name = "coverage-gap"
    cure = "convert the module, or say that BF16 is meant with overrides={FQN: None}; correct a pattern that matches none"
    needs_fp8 = False
    is_harmful = False

    max_gaps: int = 0

    def needs(self, run: Run) -> str | None:
        """Ask for the manifest's module list."""
        listed = any(module.get("fp8") is not None for module in run.modules)
        return None if listed else "the manifest does not say which modules run in FP8"

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per module or pattern."""
        converted = [module for module in run.modules if module.get("fp8")]
        filters = run.manifest.get("filters")
        entries = [entry for entry in filters if isinstance(entry, dict)] if isinstance(filters, list) else []
        named = {entry.get("pattern") for entry in entries}
        used = {str(gemm["weight"]).rpartition(".")[0] for gemm in run.gemms if gemm.get("weight")}
        were_asked = any(module.get("requested") == "fp8" for module in converted)
        for module in run.modules:
            asked, reason = module.get("requested"), module.get("reason")
            if module.get("fp8") and asked == "bf16":
                yield self._finding(run, "it runs in FP8 although an override asked for high precision", module)
            elif module.get("fp8") and asked is None and were_asked:
                yield self._finding(run, "it runs in FP8, and nobody asked for that here", module)
            if module.get("fp8") is not False or asked == "bf16":
                continue
            if module.get("called") is False and module["fqn"] not in used:
                continue  # it computes nothing, as an expert without tokens or a pooler that nobody reads
            because = f": {reason}" if reason else ""
            is_other = module.get("observed") is False and module.get("kind") not in ("Linear", "Fp8Linear")
            if asked == "fp8" and (not is_other or module["fqn"] in named):
                yield self._finding(run, f"FP8 was asked for, but the module runs in high precision{because}", module)
            elif converted and module.get("kind") == "Linear":
                among = f"{len(converted)} module{'s' if len(converted) > 1 else ''} in FP8"
                yield self._finding(run, f"a plain nn.Linear among {among}, and no override named it", module)
        for entry in entries:
            if entry.get("matched") == 0:
                yield self._finding(run, f"the {entry.get('kind')} pattern {entry.get('pattern')!r} matches no module")

    def _finding(self, run: Run, message: str, module: Mapping[str, Any] | None = None) -> Finding:
        return Finding(
            code=self.code,
            name=self.name,
            severity=Severity.WARNING,
            module=module["fqn"] if module else None,
            steps=run.steps_range,
            ranks=tuple(run.ranks),
            value=1.0,
            threshold=float(self.max_gaps),
            message=message,
            cure=self.cure,
            call_index=(module.get("call_index") if module else None) or 0,
        )

    def stands(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand unless every module is a router in FP8, which F109 names."""
        routers = {name for f in others if f.code == "F109" for name in (f.module, *f.also)}
        return finding.module is None or not {finding.module, *finding.also} <= routers


RULES.add(CoverageGap.code, CoverageGap())

"""F110: a Linear is not where it was asked to be: out of FP8 or in FP8 unasked, or a filter matched nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.formats import FORMATS
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.model_structure import Group, numbered
from fp8debug.types import match_fqn

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class CoverageGap(Rule):
    """A Linear runs in FP8, or in high precision, against what was requested, or a filter matches nothing.

    What it detects
        A module that should run in FP8 and does not; a plain nn.Linear whose siblings run in FP8, or one of the class that runs
        in FP8 in its siblings (whose recorded pass was in high precision: a recomputation outside the autocast); one in FP8
        against an override (as a last layer of an NVFP4 recipe, which stays in BF16), or unasked where the others were asked
        for (a head or a tied embedding that a filter let through); an override, include or exclude pattern that matched no
        module. Siblings are Linears of one shape whose
        names differ in one number: one role in many blocks. Not reported, and shown by `fp8debug coverage` alone: a plain
        nn.Linear without a sibling in FP8, and the first or last blocks left out as a whole, which are the choice of a filter
        (a head, a router, the adapters of LoRA or the Linears under them); a module that an override left in BF16; one that
        include or exclude kept out of the watch; a subclass of nn.Linear of which none runs in FP8, whose forward may be
        another, unless an override names it; a head in FP8 that was asked for with all the others.

    Why it matters
        A filter with a typo is silent: the run is slower than planned, its memory larger, and a comparison of recipes
        compares something else than its title says; a head in FP8 rounds the logits. No cast is at fault, so it is a warning.

    Example
        blocks.5.mlp.up is a plain nn.Linear in high precision, and 11 of its 11 siblings run in FP8.

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
        unwatched, groups = _unwatched(run), numbered(run)
        for module in run.modules:
            if module["fqn"] in unwatched:
                continue
            if module.get("fp8"):
                yield from self._unasked(run, module, were_asked)
            if module.get("fp8") is not False or module.get("requested") == "bf16":
                continue
            if module.get("called") is False and module["fqn"] not in used:
                continue  # it computes nothing, as an expert without tokens or a pooler that nobody reads
            is_other = module.get("observed") is False and module.get("kind") not in ("Linear", "Fp8Linear")
            if module.get("requested") == "fp8" and (not is_other or module["fqn"] in named):
                because = f": {module['reason']}" if module.get("reason") else ""
                yield self._finding(run, f"FP8 was requested, but the module runs in high precision{because}", module)
            elif converted and module.get("kind") in ("Linear", *{m.get("kind") for m in converted}):
                yield from self._beside(run, module, groups)
        for entry in entries:
            if entry.get("matched") == 0:
                yield self._finding(run, f"the {entry.get('kind')} pattern {entry.get('pattern')!r} matches no module")

    def _unasked(self, run: Run, module: Mapping[str, Any], were_asked: bool) -> Iterable[Finding]:
        """Yield the finding of a module in FP8 that was to run in high precision, or was not named where others were."""
        asked = module.get("requested")
        if asked == "bf16":
            yield self._finding(run, f"it runs in {_precision(module)} although an override requests high precision", module)
        elif asked is None and were_asked:
            yield self._finding(run, f"it runs in {_precision(module)}, which was not requested here", module)

    def _beside(self, run: Run, module: Mapping[str, Any], groups: Sequence[Group]) -> Iterable[Finding]:
        """Return the finding of a plain nn.Linear, or of a class that runs in FP8 elsewhere, whose siblings run in FP8."""
        what = "a plain nn.Linear" if module.get("kind") == "Linear" else f"a {module.get('kind')}"
        precision = {m["fqn"]: bool(m.get("fp8")) for m in run.modules}
        for group in groups:
            if module["fqn"] in group.members.values():
                siblings = [precision[fqn] for fqn in group.members.values() if fqn != module["fqn"]]
                differs = sum(siblings) >= max(1, len(siblings) - sum(siblings))
                if differs and not _is_edge_left_out(group, module["fqn"], precision):
                    among = f"{sum(siblings)} of its {len(siblings)} sibling{'s' if len(siblings) > 1 else ''} run in FP8"
                    return [self._finding(run, f"{what} in high precision, and {among}", module)]
        return []

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

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand unless every module is a router in FP8, which F109 names."""
        routers = {name for f in others if f.code == "F109" for name in (f.module, *f.also)}
        return finding.module is None or not {finding.module, *finding.also} <= routers


def _precision(module: Mapping[str, Any]) -> str:
    """Return ``FP8``, ``FP4`` or what else a module's casts are in, by the widest of them."""
    casts = module.get("casts")
    formats = [cast.get("format") for cast in casts.values() if isinstance(cast, dict)] if isinstance(casts, dict) else []
    return f"FP{max((FORMATS[name].bits for name in formats if name in FORMATS), default=8)}"


def _unwatched(run: Run) -> set[str]:
    """Return the modules that include or exclude kept out of the watch."""
    names = [module["fqn"] for module in run.modules]
    include, exclude = (_patterns(run, key) for key in ("include", "exclude"))
    kept = {name for pattern in include for name in match_fqn(names, pattern)} if include else set(names)
    return (set(names) - kept) | {name for pattern in exclude for name in match_fqn(names, pattern)}


def _patterns(run: Run, key: str) -> list[str]:
    found = run.manifest.get(key)
    return [pattern for pattern in found if isinstance(pattern, str)] if isinstance(found, list) else []


def _is_edge_left_out(group: Group, fqn: str, precision: Mapping[str, bool]) -> bool:
    """Return whether a module's whole block is in high precision, as all are from there to one end of the numbered list."""
    blocks = [f"{group.prefix}.{number}.".lstrip(".") for number in group.members]
    place = list(group.members.values()).index(fqn)
    in_fp8 = [any(is_fp8 for name, is_fp8 in precision.items() if f"{name}.".startswith(block)) for block in blocks]
    return not any(in_fp8[: place + 1]) or not any(in_fp8[place:])


RULES.add(CoverageGap.code, CoverageGap())

"""torchtitan: ``filter_fqns`` and ``fqns`` of its quantization converters, in a Python file.

torchtitan 0.3 has five converters. ``Float8LinearConverter`` leaves a Linear out when one entry of ``filter_fqns`` is a
*substring* of its name: ``layers.1`` also hits ``layers.10``. ``MXFP8LinearConverter`` and ``NVFP4LinearConverter`` convert
a Linear when one entry of ``fqns`` is; without entries they convert all. A run of Fp8Linears gets the lists of its recipe.
The two converters of experts have no list. The whole name is the longest, and so the most exact, entry there is; where it
is a part of another module's name, no entry exists that hits the one alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8debug.exporters.base import (
    EXPORTERS,
    Exporter,
    comments,
    header,
    in_bf16,
    limits,
    not_in_fp8,
    reasons,
    several,
    whole_modules,
)
from fp8debug.types import plain_name

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

USAGE = """#
#     Float8LinearConverter.Config(recipe_name=..., filter_fqns=FILTER_FQNS)
#
# Versions configured by TOML or flags take the same list as quantize.linear.float8.filter_fqns.
"""
ALLOW_USAGE = """#
#     {converters}
#
# A list without entries converts every Linear: leave such a converter out.
"""
#: Allow-lists by the precision of the modules: name of the list, converter, class that it makes of a Linear.
ALLOWED = {
    "nvfp4": ("NVFP4_FQNS", "NVFP4LinearConverter", "NVFP4Linear"),
    "mxfp8": ("MXFP8_FQNS", "MXFP8LinearConverter", "MXFP8Linear"),
}
#: Converters of experts by how the classes that they make begin.
EXPERTS = {"MXFP8": "MXFP8GroupedExpertsConverter", "Float8": "Float8GroupedExpertsConverter"}


class TorchtitanExporter(Exporter):
    """Lists of whole names: those that should leave FP8, and those that the recorded run had left out; or those that stay."""

    name = "torchtitan"
    suffix = ".py"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        lists = self._allowed(run, fallbacks)
        notes = limits(run, fallbacks, per_gemm=False, has_precisions=bool(lists))
        changed, of_experts = whole_modules(run, fallbacks), _experts(run)
        experts = [f"{module} ({of_experts[module]})" for module in changed if module in of_experts]
        if experts:
            notes.append(f"has no list for experts; leave their converter out, or keep all of them: {several(experts)}")
        if lists:
            others = [f"{module} in {to}" for module, to in changed.items() if to not in ("bf16", "mxfp8")]
            if others:
                notes.append(f"has no converter for these beside the one that runs: {several(others)}")
            hits = self._allowed_too(run, lists)
        else:
            hits = [f"{name} also hits {', '.join(hit)}" for name, hit in self._collisions(run, fallbacks).items()]
        if hits:
            verb = "change" if lists else "leave FP8"
            notes.append(f"matches substrings, and no entry tells these apart, so the others {verb} too: {several(hits)}")
        return notes

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the Python file."""
        notes = comments(header(run, self.name, self.notes(run, fallbacks)))
        lists = self._allowed(run, fallbacks)
        if lists:
            used = [(name, converter) for name, converter, _ in ALLOWED.values() if lists[name]]
            text = ", ".join(f"{converter}.Config(fqns={name})" for name, converter in used) or "no converter of Linears"
            entries = {name: "".join(f"    {fqn!a},\n" for fqn in fqns) for name, fqns in lists.items()}
            body = "".join(f"{name} = [\n{entries[name]}]\n" for name in lists)
            return notes + ALLOW_USAGE.format(converters=text) + body
        why = reasons(fallbacks)
        chosen = {plain_name(module): why.get(module, "") for module in in_bf16(run, fallbacks)}
        recorded = {plain_name(m): "left in high precision by the recorded run" for m in not_in_fp8(run)}
        entries_of = {**recorded, **chosen}
        lines = [f"    {fqn!a},{comments([about], '  # ') if about else chr(10)}" for fqn, about in entries_of.items()]
        return notes + USAGE + "FILTER_FQNS = [\n" + "".join(lines) + "]\n"

    def _allowed(self, run: Run, fallbacks: Sequence[Fallback]) -> dict[str, list[str]]:
        """Return the allow-lists of a run that has MXFP8 or NVFP4 Linears; nothing for one of FP8."""
        precisions = {str(m["fqn"]): _precision(m) for m in run.modules if m.get("fp8")}
        if not any(precisions.values()):
            return {}
        changed = whole_modules(run, fallbacks)
        found: dict[str, list[str]] = {name: [] for name, _, _ in ALLOWED.values()}
        for fqn, own in precisions.items():
            precision = changed.get(fqn, own)
            if own and precision in ALLOWED:
                found[ALLOWED[precision][0]].append(plain_name(fqn))
        return found

    def _allowed_too(self, run: Run, lists: dict[str, list[str]]) -> list[str]:
        """Return what an allow-list converts beside its own entries."""
        names = [plain_name(str(m["fqn"])) for m in run.modules if m["fqn"] not in _experts(run)]
        found = []
        for fqns in lists.values():
            others = {entry: [name for name in names if entry in name and name not in fqns] for entry in fqns}
            found += [f"{entry} also hits {', '.join(hit)}" for entry, hit in others.items() if hit]
        return found

    def _collisions(self, run: Run, fallbacks: Sequence[Fallback]) -> dict[str, list[str]]:
        """Return by entry the FP8 modules that it matches although they were not requested."""
        chosen = [plain_name(module) for module in in_bf16(run, fallbacks)]
        recorded = [plain_name(module) for module in not_in_fp8(run)]
        others = [n for m in run.modules if (n := plain_name(str(m["fqn"]))) not in {*chosen, *recorded}]
        found = {entry: [name for name in others if entry in name] for entry in [*recorded, *chosen]}
        return {entry: hit for entry, hit in found.items() if hit}


def _precision(module: Mapping[str, Any]) -> str | None:
    """Return the precision of a module that a converter with an allow-list makes, or an Fp8Linear of its recipe."""
    kind, recipe = str(module.get("kind")), module.get("recipe")
    by_class = next((precision for precision, (*_, made) in ALLOWED.items() if made == kind), None)
    return by_class or (recipe if kind == "Fp8Linear" and recipe in ALLOWED else None)


def _experts(run: Run) -> dict[str, str]:
    """Return the converter of each weight of experts that runs in low precision, by its name."""
    found = {}
    for module in run.modules:
        kind = str(module.get("kind"))
        if module.get("fp8") and "Experts" in kind:
            found[str(module["fqn"])] = next((c for start, c in EXPERTS.items() if kind.startswith(start)), EXPERTS["Float8"])
    return found


EXPORTERS.add(TorchtitanExporter.name, TorchtitanExporter())

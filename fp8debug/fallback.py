"""The only policy: from findings and damage to a list of candidates that should leave their cast, and its application.

Hard faults come first and always, each with the cheapest cure that its rule knows: another cast costs no speed, BF16
for one GEMM costs that GEMM's share of the FLOPs. Then, within the budget, what the recorded damage asks for. The list
names candidates; only a run with it applied proves them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8debug.errors import Fp8DebugError, NoMatchError, UsageError
from fp8debug.formats import TRANSPOSED
from fp8debug.recipes import Cast
from fp8debug.rules import RULES, Finding, Severity
from fp8debug.rules.evidence import RUNNING
from fp8debug.store.run import Run
from fp8debug.types import OPERAND_SITES, Gemm

if TYPE_CHECKING:
    from torch import nn

GEMMS = tuple(gemm.value for gemm in Gemm)
TENSORS = ("*", *dict.fromkeys(tensor.value for _, tensor in OPERAND_SITES))

#: fprop output against the shadow, in dB, below which a layer's error is outside the healthy envelope (numerics.md, 4).
MATERIAL_SQNR_DB = 25.0
#: Sampled steps that must show it (numerics.md, 4), and the share of all damage that a candidate must have (no
#: published basis: a layer that does a hundredth of the damage is not the one to pay for).
MATERIAL_STEPS, MATERIAL_SHARE = 3, 0.01


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """One candidate: what of a module should run in another cast, or in BF16, and why.

    Attributes:
        module: FQN.
        gemms: of ``fprop``, ``dgrad``, ``wgrad``.
        tensor: the operand whose cast changes; ``*`` for both.
        cast: what it should run in; None is BF16.
        reasons: codes of the findings that ask for it; ``damage`` where the recorded damage does.
        damage: mean damage of a sampled row of the module's output, in loss^2; None when it was not recorded.
        cost: share of the FP8 speed-up given back: the GEMMs' share of all FP8 FLOPs; 0 for another cast.
        cheaper: what could be tried before it; None when this is the cheapest cure known.
    """

    module: str
    gemms: tuple[str, ...]
    tensor: str = "*"
    cast: Cast | None = None
    reasons: tuple[str, ...] = ()
    damage: float | None = None
    cost: float = 0.0
    cheaper: str | None = None

    def __post_init__(self) -> None:
        if not self.gemms or not set(self.gemms) <= set(GEMMS) or self.tensor not in TENSORS:
            raise UsageError(
                f"a fallback needs gemms of {', '.join(GEMMS)} and a tensor of {', '.join(TENSORS)};"
                f" {self.module!r} has {list(self.gemms)} and {self.tensor!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, the cast by its name (null is BF16)."""
        return {
            "module": self.module,
            "gemms": list(self.gemms),
            "tensor": self.tensor,
            "cast": None if self.cast is None else str(self.cast),
            "reasons": list(self.reasons),
            "damage": self.damage,
            "cost": self.cost,
            "cheaper": self.cheaper,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fallback:
        """Build a fallback from :meth:`to_dict`; only ``module`` is required, unknown keys are ignored.

        Raises:
            UsageError: not a fallback.
        """
        try:
            cast = values.get("cast")
            return cls(
                module=str(values["module"]),
                gemms=tuple(values.get("gemms") or GEMMS),
                tensor=str(values.get("tensor", "*")),
                cast=cast if cast is None else Cast.parse(cast) if isinstance(cast, str) else Cast.from_dict(cast),
                reasons=tuple(values.get("reasons", ())),
                damage=values.get("damage"),
                cost=float(values.get("cost", 0.0)),
                cheaper=values.get("cheaper"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not a fallback: {error!r} in {str(values)[:80]}") from None


def recommend(run: Run | str | Path, findings: Iterable[Finding], budget: float = 0.10) -> list[Fallback]:
    """Return the candidates, hard faults first.

    A finding whose rule knows a cast that cures it gives that cast, for every GEMM in which the module runs the same
    tensor under the same one. Otherwise an error gives BF16 for the GEMMs that show it, whatever the budget; a warning
    gives it within the budget.

    Damage (numerics.md, 6) ranks layers but says nothing by itself: every layer of a healthy FP8 run has some, and no
    threshold on it has a published basis. So it counts only where the layer's output error lies outside the healthy
    envelope: fprop output against the shadow below 25 dB in the median of at least three sampled steps. An error inside
    the envelope is the price of FP8 that all layers pay. Those layers go to BF16 in fprop by damage per cost, while
    the budget lasts. A healthy run therefore gives an empty list.

    Args:
        run: the run that was judged, or its folder.
        findings: what triage found.
        budget: share of the FP8 speed-up that may be given back, hard faults included; 0 to 1.

    Raises:
        UsageError: budget is no share.
    """
    if not 0 <= budget <= 1:
        raise UsageError(f"budget is a share of the FP8 speed-up from 0 to 1, got {budget}")
    run = run if isinstance(run, Run) else Run(run)
    return _Plan(run).fill(list(findings), budget)


class _Plan:
    """Cast changes and BF16 GEMMs collected from findings, before they become entries."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.casts: dict[tuple[str, str, str], tuple[Cast, list[str]]] = {}
        self.bf16: dict[tuple[str, str], list[Finding]] = {}
        self.running = _running_casts(run)
        self.gemm_share = _gemm_shares(run)
        self.outputs = _outputs(run)

    def fill(self, findings: Sequence[Finding], budget: float) -> list[Fallback]:
        sites = [site for finding in findings for site in finding.sites if _has_cure(site)]
        later = [site for site in sites if not self._change_cast(site) and not self._leave_fp8(site)]
        entries = self._entries(dict.fromkeys(site.module for site in sites if site.module))
        spent = sum(entry.cost for entry in entries)
        asked: dict[tuple[str, str], list[Finding]] = {}
        for site in later:
            asked.setdefault((str(site.module), str(site.gemm)), []).append(site)
        optional = [self._bf16_entry(module, (gemm,), reasons) for (module, gemm), reasons in asked.items()]
        taken = {entry.module for entry in [*entries, *optional]}
        optional += [e for e in self._damaged() if e.module not in taken]
        for entry in optional:
            if spent + entry.cost <= budget + 1e-12:
                spent += entry.cost
                entries.append(entry)
        return entries

    def _change_cast(self, site: Finding) -> bool:
        """Collect the changed cast for the site and its twins in other GEMMs; False when no cast cures it."""
        assert site.module and site.gemm and site.tensor
        changes = RULES.get(site.code).changes
        running = _parsed(site.cast)
        if running is None or _changed(running, changes) == running:
            return False
        for gemm in GEMMS:
            twin = self.running.get((site.module, gemm, site.tensor))
            if gemm != site.gemm and (twin is None or not _same(twin, running)):
                continue
            key = (site.module, gemm, site.tensor)
            cast, reasons = self.casts.get(key, (running, []))
            self.casts[key] = (_changed(cast, changes), list(dict.fromkeys([*reasons, site.code])))
        return True

    def _leave_fp8(self, site: Finding) -> bool:
        """Collect BF16 for the GEMM of an error; False for a warning, which has to fit the budget."""
        if site.severity < Severity.ERROR:
            return False
        self.bf16.setdefault((str(site.module), str(site.gemm)), []).append(site)
        return True

    def _entries(self, modules: Iterable[str]) -> list[Fallback]:
        entries = []
        for module in modules:
            gemms = tuple(g for g in GEMMS if (module, g) in self.bf16)
            if gemms:
                entries.append(self._bf16_entry(module, gemms, [s for g in gemms for s in self.bf16[module, g]]))
            grouped: dict[tuple[str, Cast, tuple[str, ...]], list[str]] = {}
            for (name, gemm, tensor), (cast, reasons) in self.casts.items():
                if name == module and gemm not in gemms:
                    grouped.setdefault((tensor, cast, tuple(reasons)), []).append(gemm)
            damage = self.outputs.get(module, {}).get("damage_per_row")
            entries += [
                Fallback(module=module, gemms=tuple(g), tensor=tensor, cast=cast, reasons=reasons, damage=damage)
                for (tensor, cast, reasons), g in grouped.items()
            ]
        return entries

    def _bf16_entry(self, module: str, gemms: tuple[str, ...], sites: Sequence[Finding]) -> Fallback:
        cheaper = dict.fromkeys(site.cure.split("; else BF16")[0] for site in sites)
        return Fallback(
            module=module,
            gemms=gemms,
            reasons=tuple(dict.fromkeys(site.code for site in sites)) or ("damage",),
            damage=self.outputs.get(module, {}).get("damage_per_row"),
            cost=len(gemms) * self.gemm_share.get(module, 0.0),
            cheaper="; ".join(cheaper) or None,
        )

    def _damaged(self) -> list[Fallback]:
        total = sum(row["damage"] for row in self.outputs.values())
        entries = [
            self._bf16_entry(module, ("fprop",), ())
            for module, row in self.outputs.items()
            if row["num_steps"] >= MATERIAL_STEPS
            and row["sqnr_db"] < MATERIAL_SQNR_DB
            and row["damage"] >= MATERIAL_SHARE * total > 0
        ]
        return sorted(entries, key=lambda e: -(e.damage or 0.0) / max(e.cost, 1e-9))


def parse_share(text: str) -> float:
    """Return a share written as ``10%`` or ``0.1``.

    Raises:
        UsageError: it is neither, or not between 0 and 1.
    """
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"expected a share such as 10% or 0.1, got {text!r}")
    return share


def positional_prior(run: Run) -> list[str]:
    """Return the first and the last module in FP8 by execution: folklore (DeepSeek-V3, Nemotron-H), not evidence."""
    names = [module["fqn"] for module in run.modules if module.get("fp8")]
    return list(dict.fromkeys([*names[:1], *names[-1:]]))


def load_fallbacks(source: str | Path | Mapping[str, Any]) -> list[Fallback]:
    """Return the fallbacks of a JSON file, JSON text or parsed document, as the ``json`` exporter writes it.

    Raises:
        UsageError: it cannot be read, or is not a fallback list.
    """
    document: Any = source
    if not isinstance(source, Mapping):
        is_text = isinstance(source, str) and source.lstrip().startswith(("{", "["))
        try:
            document = json.loads(str(source) if is_text else Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read fallbacks from {str(source)[:80]!r}: {error}") from None
    entries = document.get("fallbacks") if isinstance(document, Mapping) else document
    if isinstance(document, Mapping) and document.get("schema", 1) != 1:
        raise UsageError(f"fallback list of schema {document['schema']}; this version reads schema 1, so upgrade fp8debug")
    if not isinstance(entries, list):
        raise UsageError("expected a fallback list: a JSON object with 'fallbacks', as fp8debug fallback --to json writes")
    return [Fallback.from_dict(entry) for entry in entries]


def apply(model: nn.Module, fallbacks: Iterable[Fallback] | str | Path | Mapping[str, Any]) -> nn.Module:
    """Give the modules of a list the casts that it names, in place; nothing changes when any entry is wrong.

    Args:
        model: a model with Fp8Linear modules.
        fallbacks: what ``recommend`` returned, or a JSON file, text or document of it.

    Returns:
        The same model.

    Raises:
        NoMatchError: the model has no such module; the message has the closest names.
        UsageError: a module is not an Fp8Linear, or the list cannot be read.
    """
    loaded = load_fallbacks(fallbacks) if isinstance(fallbacks, str | Path | Mapping) else list(fallbacks)
    modules = dict(model.named_modules())
    recipes: dict[str, Any] = {}
    for fallback in loaded:
        module: Any = modules.get(fallback.module)
        if module is None:
            known = [name for name, m in modules.items() if hasattr(m, "set_recipe")]
            raise NoMatchError("fallback module", fallback.module, known)
        if not hasattr(module, "set_recipe"):
            kind = type(module).__name__
            raise UsageError(f"{fallback.module} is a {kind}, not an Fp8Linear; convert() the model first")
        recipe = recipes.get(fallback.module, module.recipe)
        for gemm in fallback.gemms:
            recipe = recipe.replace(gemm=gemm, tensor=fallback.tensor, cast=fallback.cast)
        recipes[fallback.module] = recipe
    for name, recipe in recipes.items():
        modules[name].set_recipe(recipe)
    return model


def _has_cure(site: Finding) -> bool:
    """Tell whether a finding is about the cast of an operand that harms the run."""
    is_site = bool(site.module and site.gemm and site.tensor) and site.code in RULES
    return is_site and RULES.get(site.code).is_harmful and site.severity > Severity.INFO


def _parsed(name: str | None) -> Cast | None:
    try:
        return Cast.parse(name) if name else None
    except Fp8DebugError:
        return None


def _changed(cast: Cast, changes: Mapping[str, Any]) -> Cast:
    values = {**cast.to_dict(), **changes}
    return Cast.from_dict(values if values["scaling"] == "static" else {**values, "scale_inv": None})


def _same(a: Cast, b: Cast) -> bool:
    """Tell whether two casts are one but for the direction in which their GEMMs contract."""
    return b in (a, replace(a, granularity=TRANSPOSED[a.granularity]))


def _running_casts(run: Run) -> dict[tuple[str, str, str], Cast]:
    query = f"SELECT DISTINCT module, gemm, tensor, cast_name FROM sites WHERE {RUNNING} ORDER BY cast_name"
    found = {(r["module"], r["gemm"], r["tensor"]): _parsed(r["cast_name"]) for r in run.sql(query).to_pylist()}
    return {key: cast for key, cast in found.items() if cast is not None}


def _gemm_shares(run: Run) -> dict[str, float]:
    """Return by module the share of one of its GEMMs in all FLOPs that run in FP8."""
    flops = {m["fqn"]: 2 * m["in_features"] * m["out_features"] for m in run.modules if m.get("fp8")}
    total = 3 * sum(flops.values())
    return {fqn: one / total for fqn, one in flops.items()} if total else {}


def _outputs(run: Run) -> dict[str, dict[str, Any]]:
    """Return by module what its fprop output shows: sampled steps, median SQNR, damage in all and per row."""
    query = (
        "SELECT module, count(*) AS num_steps, percentile_cont(0.5) WITHIN GROUP (ORDER BY sqnr_db) AS sqnr_db,"
        " sum(damage) AS damage, sum(damage) / sum(num_damage_rows) AS damage_per_row FROM sites WHERE actual"
        " AND reference = 'shadow' AND tensor = 'output' AND num_damage_rows > 0 AND sqnr_db IS NOT NULL"
        " AND isfinite(damage) GROUP BY module ORDER BY module"
    )
    return {row["module"]: row for row in run.sql(query).to_pylist()}

"""The only policy: from findings and measured errors to a list of candidates that should leave their cast.

Hard faults come first and always, each with the cheapest cure that its rule knows: another cast costs no speed, BF16
for one GEMM costs its share of the speed-up that `fp8debug speed` measured, or else of the FLOPs. A GEMM of less than 8 bits
climbs one rung, to FP8, and leaves FP8 only when a run with that shows it still. Then, within the
budget, what the recorded errors ask for. The list names candidates; only a run with it applied proves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from fp8debug.errors import UsageError
from fp8debug.fallback.candidates import GEMMS, Fallback
from fp8debug.fallback.measured import ResultError, changed, gemm_shares, is_same, parsed, result_errors, running_casts
from fp8debug.formats import FORMATS, GRANULARITIES
from fp8debug.recipes import Cast, get_recipe
from fp8debug.rules import RULES, Finding, Severity
from fp8debug.rules.base import asks_for_cast
from fp8debug.store.read.run import Run
from fp8debug.store.speed_file import measured_costs
from fp8debug.types import OPERANDS, Gemm, TensorRole, parse_share

#: How far above what healthy operands give an error may lie before it counts. Rounding errors of tokens that are nearly equal
#: repeat, and add up instead of averaging out: 3.6 dB in a head at a plateau [measured]. No published basis.
EXPLAINED_DB = 6.0
#: Sampled steps that must show it (numerics.md, 4), and the share of all damage that a candidate must have (no
#: published basis: a layer that does a hundredth of the damage is not the one to pay for).
MATERIAL_STEPS, MATERIAL_SHARE = 3, 0.01
#: The rung above FP4 and FP6: MXFP8, whose units lie beside theirs (Blackwell), or tiles of 128 where the run has such FP8.
RUNGS = {
    size: cast
    for size, name in ((32, "mxfp8"), (128, "blockwise_pow2"))
    if (cast := get_recipe(name).casts[Gemm.FPROP, TensorRole.INPUT]) is not None
}
#: What of FP4's gain over BF16 a GEMM in FP8 gives back: at the units' peak rates FP4 takes a quarter of BF16's time and FP8
#: half, (1/2 - 1/4) / (1 - 1/4).
RUNG_COST = 1 / 3


def recommend(
    run: Run | str | Path, findings: Iterable[Finding], budget: float | str = 0.10, *, fill: bool = False
) -> list[Fallback]:
    """Return the candidates, hard faults first.

    A finding whose rule knows a cast that cures it gives that cast, for every GEMM in which the module runs the same
    tensor under the same one. Otherwise an error gives BF16 for the GEMMs that show it, whatever the budget; a warning
    gives it within the budget. A GEMM whose operands have less than 8 bits goes to FP8 and not to BF16, for a third of the cost.

    Then measured errors, while the budget lasts. Damage (numerics.md, 6) ranks layers but says nothing by itself: every
    layer of a healthy FP8 run has some, and no threshold on it has a published basis. So a GEMM counts only where the
    error of its result lies outside the healthy envelope: SQNR against the shadow 3.5 dB below what its operands' formats
    give, in the median of at least three sampled steps. A result of low SQNR whose error is what healthy operands give
    does not count either: its products cancel, as gradients do at a plateau. An error inside the envelope is the price of
    FP8 that all layers pay. fprop comes first: the choice of most damage that fits. Then dgrad, whose errors reach every
    earlier layer, and last wgrad, which is a leaf, by error energy. A healthy run therefore gives an empty list.

    Args:
        run: the run that was judged, or its folder.
        findings: what triage found.
        budget: share of the FP8 speed-up that may be given back, hard faults included: ``0.1`` or ``"10%"``.
        fill: spend the budget on fprop inside the envelope too, by damage; for a run whose loss is off although its
            statistics are healthy. Prove such a list.

    Raises:
        UsageError: budget is no share, or findings are none.
    """
    share = parse_share(budget)
    if not isinstance(fill, bool):
        raise UsageError(f"fill is True or False, got {fill!r}")
    findings = [findings] if isinstance(findings, Finding) else findings
    found = list(findings) if isinstance(findings, Iterable) else [findings]
    if not all(isinstance(finding, Finding) for finding in found):
        raise UsageError(f"findings are what fp8debug.triage(run) returns, got {type(findings).__name__}; [] stands for none")
    run = run if isinstance(run, Run) else Run(run)
    return solver(run, found)(share, fill=fill)


def solver(run: Run, findings: Iterable[Finding]) -> Callable[..., list[Fallback]]:
    """Return ``recommend`` of one run as a function of ``budget`` and ``fill``: the run is asked once for all budgets."""
    plan, found = _CollectedChanges(run), list(findings)

    def solve(budget: float | str = 0.10, *, fill: bool = False) -> list[Fallback]:
        return plan.fill(found, parse_share(budget), everything=fill)

    return solve


class _CollectedChanges:
    """Cast changes and BF16 GEMMs collected from findings, before they become entries."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.casts: dict[tuple[str, str, str], tuple[Cast, list[str]]] = {}
        self.bf16: dict[tuple[str, str], list[Finding]] = {}
        self.running = running_casts(run)
        flops = {fqn: dict.fromkeys(GEMMS, share) for fqn, share in gemm_shares(run).items()}
        self.cost = measured_costs(run) or flops
        self.errors = result_errors(run)
        fp8 = [cast for cast in self.running.values() if FORMATS[cast.format].bits == 8]
        blocks = {size for cast in fp8 for size in GRANULARITIES[cast.granularity]}
        self._above_fp4 = RUNGS[128 if 128 in blocks else 32]

    def _rung(self, module: str, gemm: str) -> Cast | None:
        """Return the next cast of a GEMM's operands on the ladder from FP4 to FP8 to BF16; None is BF16."""
        casts = [self.running.get((module, gemm, tensor.value)) for tensor in OPERANDS[Gemm(gemm)]]
        is_below_fp8 = any(cast is not None and FORMATS[cast.format].bits < 8 for cast in casts)
        return self._above_fp4 if is_below_fp8 else None

    def fill(self, findings: Sequence[Finding], budget: float, *, everything: bool) -> list[Fallback]:
        self.casts.clear()
        self.bf16.clear()
        sites = [site for finding in findings for site in finding.sites if asks_for_cast(site)]
        later = [site for site in sites if not self._change_cast(site) and not self._leave_fp8(site)]
        entries = self._entries(dict.fromkeys(site.module for site in sites if site.module))
        spent = sum(entry.cost for entry in entries)
        asked: dict[tuple[str, str], list[Finding]] = {}
        for site in later:
            asked.setdefault((str(site.module), str(site.gemm)), []).append(site)
        optional = [self._bf16_entry(module, (gemm,), tuple(_codes(sites)), sites) for (module, gemm), sites in asked.items()]
        taken = [*entries, *optional]
        for group in [[(1.0, entry)] for entry in optional] + self._by_error(taken, everything=everything):
            chosen = best_within(group, budget - spent)
            spent += sum(entry.cost for entry in chosen)
            entries += chosen
        return entries

    def _change_cast(self, site: Finding) -> bool:
        """Collect the changed cast for the site and its twins in other GEMMs; False when no cast cures it."""
        assert site.module and site.gemm and site.tensor
        changes = RULES.get(site.code).changes
        running = parsed(site.cast)
        if running is None or changed(running, changes) == running:
            return False
        if not RULES.get(site.code).is_cured_by_cast(site, self.run):
            return False
        for gemm in GEMMS:
            twin = self.running.get((site.module, gemm, site.tensor))
            if gemm != site.gemm and (twin is None or not is_same(twin, running)):
                continue
            key = (site.module, gemm, site.tensor)
            cast, reasons = self.casts.get(key, (running, []))
            self.casts[key] = (changed(cast, changes), list(dict.fromkeys([*reasons, site.code])))
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
            for rung in dict.fromkeys(self._rung(module, gemm) for gemm in gemms):
                part = tuple(gemm for gemm in gemms if self._rung(module, gemm) == rung)
                sites = [site for gemm in part for site in self.bf16[module, gemm]]
                entries.append(self._bf16_entry(module, part, tuple(_codes(sites)), sites))
            grouped: dict[tuple[str, Cast, tuple[str, ...]], list[str]] = {}
            for (name, gemm, tensor), (cast, reasons) in self.casts.items():
                if name == module and gemm not in gemms:
                    grouped.setdefault((tensor, cast, tuple(reasons)), []).append(gemm)
            damage = self._damage(module)
            entries += [
                Fallback(module=module, gemms=tuple(g), tensor=tensor, cast=cast, reasons=reasons, damage=damage)
                for (tensor, cast, reasons), g in grouped.items()
            ]
        return entries

    def _bf16_entry(
        self, module: str, gemms: tuple[str, ...], reasons: tuple[str, ...], sites: Sequence[Finding] = ()
    ) -> Fallback:
        """Return the entry that takes GEMMs of one rung to the next."""
        cheaper = dict.fromkeys(site.cure.split("; else BF16")[0] for site in sites)
        rung = self._rung(module, gemms[0])
        return Fallback(
            module=module,
            gemms=gemms,
            cast=rung,
            reasons=reasons,
            damage=self._damage(module),
            cost=sum(self.cost.get(module, {}).get(gemm, 0.0) for gemm in gemms) * (1.0 if rung is None else RUNG_COST),
            cheaper="; ".join(cheaper) or None,
        )

    def _damage(self, module: str) -> float | None:
        found = self.errors.get((module, Gemm.FPROP.value))
        return found.damage_per_row if found else None

    def _by_error(self, taken: Sequence[Fallback], *, everything: bool) -> list[list[tuple[float, Fallback]]]:
        """Return the GEMMs whose error is material, or every fprop, with what each is worth: fprop, then dgrad, then wgrad."""
        total = sum(error.damage or 0.0 for error in self.errors.values())
        groups: dict[str, list[tuple[float, Fallback]]] = {gemm: [] for gemm in GEMMS}
        modules, in_bf16 = {f.module for f in taken}, {f.module for f in taken if f.cast is None or f.tensor == "*"}
        for (module, gemm), error in self.errors.items():
            is_fprop = gemm == Gemm.FPROP.value
            wanted = _is_material(gemm, error, total) or (everything and is_fprop)
            is_cured = module in modules and module not in in_bf16
            if wanted and module in self.cost and (module not in modules or (everything and is_cured)):
                entry = self._bf16_entry(module, (gemm,), ("damage" if is_fprop else "error",))
                worth = (error.damage_per_row or 0.0) if is_fprop else 10 ** (-error.sqnr_db / 10)
                if is_cured:  # by another cast: what is left is the error of the formats, and damage goes with its energy
                    worth *= min(1.0, 10 ** ((error.sqnr_db - error.expected_db) / 10))
                groups[gemm].append((worth, entry))
        return list(groups.values())


def best_within(group: Sequence[tuple[float, Fallback]], budget: float) -> list[Fallback]:
    """Return the entries of most worth in all whose costs fit the budget, by falling worth per cost.

    Args:
        group: (worth, entry).
        budget: share.
    """
    ordered = sorted(group, key=lambda w: -w[0] / max(w[1].cost, 1e-9))
    ordered = [(worth, entry) for worth, entry in ordered if entry.cost <= budget + 1e-12]
    chosen = [entry for _, entry in ordered]
    for rounded in (math.floor, math.ceil):  # down: the best there is, if it fits; up: it fits, and is the best but for rounding
        if sum(entry.cost for entry in chosen) <= budget + 1e-12:
            break
        weights = [max(0, rounded(entry.cost / budget * KNAPSACK)) for _, entry in ordered]
        chosen = [ordered[place][1] for place in _knapsack(weights, [worth for worth, _ in ordered])]
    return chosen


#: Parts into which a budget is cut to choose what fits it.
KNAPSACK = 10_000


def _knapsack(weights: Sequence[int], worths: Sequence[float]) -> list[int]:
    """Return the places whose weights add up to KNAPSACK at most and whose worths to the most (dynamic programme)."""
    best = np.zeros(KNAPSACK + 1)  # by weight spent
    taken = np.zeros((len(weights), KNAPSACK + 1), dtype=bool)
    for place, (weight, worth) in enumerate(zip(weights, worths, strict=True)):
        with_it = np.full(KNAPSACK + 1, -1.0)
        with_it[weight:] = best[: KNAPSACK + 1 - weight] + worth
        taken[place] = with_it > best
        best = np.maximum(best, with_it)
    chosen, left = [], KNAPSACK
    for place in reversed(range(len(weights))):
        if taken[place, left]:
            chosen.append(place)
            left -= weights[place]
    return chosen[::-1]


def _is_material(gemm: str, error: ResultError, total_damage: float) -> bool:
    is_large = error.num_steps >= MATERIAL_STEPS and error.is_low
    # Healthy operands whose products cancel: the error is no larger than that of a sum that does not, and their FP8 is no cause.
    if error.explained is not None and abs(10 * math.log10(max(error.explained, 1e-30))) <= EXPLAINED_DB:
        return False
    if gemm == Gemm.FPROP.value:
        return is_large and (error.damage or 0.0) >= MATERIAL_SHARE * total_damage > 0
    return is_large


def _codes(sites: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(site.code for site in sites))


def positional_prior(run: Run) -> list[str]:
    """Return the first and the last module in FP8 by execution: folklore (DeepSeek-V3, Nemotron-H), not evidence.

    Of a run without any, the first and the last on which FP8 was tried.
    """
    names = [m["fqn"] for m in run.modules if m.get("fp8")] or [m["fqn"] for m in run.modules if m.get("observed")]
    return list(dict.fromkeys([*names[:1], *names[-1:]]))


def without_candidates(findings: Iterable[Finding]) -> str:
    """Return why there is no candidate, in a sentence without its full stop."""
    errors = list(dict.fromkeys(f.code for f in findings if f.severity is Severity.ERROR))
    if errors:
        return f"another cast or BF16 is no cure for {', '.join(errors)}"
    return "nothing found that another cast or BF16 would cure"

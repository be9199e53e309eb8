"""``fp8debug bisect``: the smallest set of (module, gemm) that must leave FP8 for the gap to BF16 to close, by delta debugging.

It asks the loss alone, so it finds what no recorded statistic shows. First the modules, all three GEMMs of each together,
then the GEMMs of the modules that are left. What triage and the recorded damage suspect is tried first. A test is a training;
where its share of the gap is near the threshold it is repeated with other seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8debug.errors import UsageError
from fp8debug.fallback.candidates import GEMMS, Fallback
from fp8debug.run.arms import Arm
from fp8debug.store.flop_shares import flop_shares
from fp8debug.store.read.run import Run
from fp8debug.trials.ddmin import count_tests, minimize
from fp8debug.trials.gap import CLOSED, MIN_GAP, Assessment, assess, sentence
from fp8debug.trials.ledger import Trials, write_json

#: 1: first version (fp8debug 0.1). The document is a fallback list too: ``fp8debug.apply`` reads it.
SCHEMA = 1

ASSUMPTION = (
    "1-minimal: no unit of it can go back to FP8 alone. It is the smallest set only if taking more units out of FP8"
    " never reopens the gap"
)

#: (module, gemm)
Unit = tuple[str, str]


class BudgetSpentError(Exception):
    """``max_runs`` trainings are done; never leaves this module."""


class NoGapError(Exception):
    """With another seed BF16 diverges too; never leaves this module."""

    def __init__(self, found: Assessment) -> None:
        super().__init__(found.verdict)
        self.found = found


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Cost of a search.

    Attributes:
        num_modules: modules in FP8.
        for_one: trainings, on average, if one GEMM of one module is at fault.
        for_two: if two GEMMs of two modules are.
        max_runs: after which it stops.
        seconds_each: that a training took so far.
    """

    num_modules: int
    for_one: int
    for_two: int
    max_runs: int
    seconds_each: float


@dataclass(kw_only=True)
class _Search:
    """The state of a search: what was asked, what was answered, the best set so far."""

    trials: Trials
    recipe: str | None
    further: tuple[str, ...]
    repeats: int
    last: int | None
    min_gap: float
    closed: float
    max_runs: int
    report: Callable[[int, int, str], None]
    save: Callable[[_Search], object]
    expected: int = 2
    seconds: float = 0.0
    curves: dict[str, dict[int, Sequence[float]]] = field(default_factory=dict)
    tests: list[dict[str, Any]] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)

    def train(self, arm: Arm, repeat: int, what: str) -> None:
        if repeat in self.curves.get(arm.name, {}):
            return
        if self.num_trained >= self.max_runs:
            raise BudgetSpentError
        if not self.trials.known(arm, repeat):
            self.report(self.num_trained, max(self.expected, self.num_trained + 1), f"{what}, repeat {repeat + 1}")
        trial = self.trials.run(arm, repeat)
        self.seconds += trial.seconds
        if trial.problem:
            raise UsageError(f"arm {arm.name}: {trial.problem} (its folder is {self.trials.folder}/{arm.name}-{repeat})")
        self.curves.setdefault(arm.name, {})[repeat] = trial.losses

    @property
    def num_trained(self) -> int:
        return sum(map(len, self.curves.values()))

    def baseline(self, repeat: int) -> None:
        self.train(Arm(name="bf16", compute="bf16", recipe=self.recipe, further=self.further), repeat, "BF16")
        self.train(Arm(name="fp8", recipe=self.recipe), repeat, "FP8")

    def assess(self, *names: str) -> Assessment:
        curves = {name: self.curves[name] for name in ("bf16", "fp8", *names)}
        return assess(curves, self.last, min_gap=self.min_gap, closed=self.closed)

    def measure_gap(self) -> Assessment:
        """Train BF16 and FP8 with every seed, for one alone may show a gap that is none; a divergence is clear at once."""
        for repeat in range(self.repeats):
            self.baseline(repeat)
            if self.assess().verdict == "diverged":
                break
        return self.assess()

    def closes(self, units: Sequence[Unit], *, all_repeats: bool = False) -> bool:
        """Train with these units in BF16; repeat while the share of the gap may lie on either side of the threshold."""
        arm = Arm(name=_name(units), fallbacks=tuple(f.to_dict() for f in fallbacks_of(units)), recipe=self.recipe)
        names = list(dict.fromkeys(module for module, _ in units))
        gemms = " ".join(gemm for _, gemm in units)
        what = f"{gemms} of {names[0]}" if len(names) == 1 else f"{len(names)} modules"
        for repeat in range(self.repeats):
            self.baseline(repeat)
            self.train(arm, repeat, f"BF16 in {what}")
            found = self.assess(arm.name)
            if found.verdict not in ("gap", "diverged"):
                raise NoGapError(found)
            gap = found.arms[arm.name]
            band = gap.share
            is_clear = band is None or not band.low <= self.closed <= band.high
            if is_clear and not all_repeats:
                break
        share = band.to_dict() if band else None
        answer = {"modules": names, "num_units": len(units), "repeats": repeat + 1, "share": share, "closed": gap.closed}
        self.tests.append(answer)
        self.save(self)
        return gap.closed == "yes"


def bisect_run(
    trials: Trials,
    *,
    recipe: str | None = None,
    further: Sequence[str] = (),
    suspects: Sequence[str] = (),
    damage: Mapping[str, float] | None = None,
    repeats: int = 3,
    last: int | None = None,
    min_gap: float = MIN_GAP,
    closed: float = CLOSED,
    max_runs: int = 64,
    run_name: str,
    save_as: Path,
    confirm: Callable[[SearchPlan], None] = lambda plan: None,
    report: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Search, and return the document that is also saved after every test.

    Args:
        trials: where trainings are done and remembered; a search that was killed goes on from there.
        recipe: what a model without FP8 modules is converted to.
        further: modules in FP8 that a training without statistics does not show: Linears of other stacks, and what is none, such
            as attention or an embedding.
        suspects: modules that triage named, tried together before all others.
        damage: recorded damage by module; the modules are tried in its order.
        repeats: seeds at most for one test.
        last: steps at the end of the window to compare.
        min_gap: share of the BF16 loss below which there is nothing to close.
        closed: share of the gap from which it counts as closed.
        max_runs: trainings at most, those of an earlier call with it.
        run_name: name of the run that gave the hints.
        save_as: file of the document.
        confirm: called with the plan before the search, when BF16 and FP8 have been trained; it raises to stop.
        report: shows progress.

    Raises:
        UsageError: a training failed, or an argument is out of range.
    """
    if repeats < 1 or max_runs < 2:
        raise UsageError(f"repeats must be at least 1 and max_runs at least 2, got {repeats} and {max_runs}")
    modules: list[dict[str, Any]] = []

    def save(search: _Search, verdict: str = "incomplete", statements: Sequence[str] = (), share: Any = None) -> dict[str, Any]:
        document = {
            "schema": SCHEMA,
            "run": run_name,
            "complete": verdict != "incomplete",
            "verdict": verdict,
            "statements": list(statements),
            "script": str(trials.script.path),
            "arguments": list(trials.script.args),
            "steps": trials.script.steps,
            "share": share,
            "units": [{"module": module, "gemm": gemm} for module, gemm in search.units],
            "fallbacks": [fallback.to_dict() for fallback in fallbacks_of(search.units, modules)],
            "assumption": ASSUMPTION,
            "num_modules": len(modules),
            "runs": search.num_trained,
            "seconds": round(search.seconds, 3),
            "tests": search.tests,
        }
        write_json(save_as, document)
        return document

    search = _Search(
        trials=trials,
        recipe=recipe,
        further=tuple(further),
        repeats=repeats,
        last=last,
        min_gap=min_gap,
        closed=closed,
        max_runs=max_runs,
        report=report,
        save=save,
    )
    statements: list[str] = []
    verdict, share = "not_minimal", None
    try:
        found = search.measure_gap()
        statements.append(sentence(found))
        if found.verdict not in ("gap", "diverged"):
            return save(search, found.verdict, statements)
        modules += [m for m in Run(trials.folder / "fp8-0").modules if m.get("fp8")]
        modules += [{"fqn": name} for name in further if name not in {m["fqn"] for m in modules}]
        names = ranked([m["fqn"] for m in modules], suspects, damage or {})
        search.units = _all_gemms(names)
        plan = plan_of(len(names), max_runs, search.seconds / search.num_trained, search.num_trained)
        search.expected = min(plan.for_one, max_runs)
        confirm(plan)
        share = _reduce(search, names, [name for name in names if name in suspects])
        verdict = "found"
    except NoGapError as error:
        search.units = []
        return save(search, error.found.verdict, [sentence(error.found)])
    except BudgetSpentError:
        statements.append(
            f"stopped after {max_runs} trainings: the set is not minimal; --max-runs {2 * max_runs} goes on from here"
        )
    if search.units:
        units = ", ".join(f"{module} {gemm}" for module, gemm in search.units[:6])
        more = f" and {len(search.units) - 6} more" if len(search.units) > 6 else ""
        statements.append(f"the gap closes with {units}{more} in BF16")
    return save(search, verdict, statements, share)


def _reduce(search: _Search, names: list[str], suspects: list[str]) -> dict[str, float | None] | None:
    """Shrink ``search.units`` and return the share that the smallest set closes over all repeats."""

    def keep_modules(found: list[str]) -> None:
        search.units = _all_gemms(found)

    def keep_units(found: list[Unit]) -> None:
        search.units = found

    if 0 < len(suspects) < len(names) and search.closes(_all_gemms(suspects)):
        names = suspects
        keep_modules(names)
    names = minimize(names, lambda subset: search.closes(_all_gemms(subset)), keep_modules)
    units = minimize(_all_gemms(names), search.closes, keep_units)
    search.closes(units, all_repeats=True)
    share: dict[str, float | None] | None = search.tests[-1]["share"]
    return share


def plan_of(num_modules: int, max_runs: int, seconds_each: float, num_trained: int = 2) -> SearchPlan:
    """Return the cost of a search, by trying it on made-up culprits: every single one, and pairs spread over the modules."""
    singles = [count_tests(num_modules, [i]) for i in range(num_modules)]
    step = max(1, num_modules // 8)
    spread = range(0, num_modules, step)
    pairs = [count_tests(num_modules, [i, j]) for i in spread for j in spread if i < j] or singles
    gemms = round(sum(count_tests(len(GEMMS), [i]) for i in range(len(GEMMS))) / len(GEMMS))
    both = round(sum(count_tests(2 * len(GEMMS), [i, 3 + i]) for i in range(len(GEMMS))) / len(GEMMS))
    return SearchPlan(
        num_modules=num_modules,
        for_one=num_trained + round(sum(singles) / len(singles)) + gemms,
        for_two=num_trained + round(sum(pairs) / len(pairs)) + both,
        max_runs=max_runs,
        seconds_each=seconds_each,
    )


def ranked(names: Sequence[str], suspects: Sequence[str], damage: Mapping[str, float]) -> list[str]:
    """Return modules in the order in which they are tried: suspects, then by damage, then as they run."""
    order = {name: place for place, name in enumerate(suspects)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), -damage.get(name, 0.0)))


def fallbacks_of(units: Sequence[Unit], modules: Sequence[Mapping[str, Any]] = ()) -> list[Fallback]:
    """Return the fallback list of some units, with their share of the FP8 FLOPs where the modules' shapes are known."""
    shares = flop_shares(modules)
    names = dict.fromkeys(module for module, _ in units)
    gemms = {name: tuple(g for g in GEMMS if (name, g) in units) for name in names}
    return [
        Fallback(
            module=name,
            gemms=gemms[name],
            reasons=("bisect",),
            cost=len(gemms[name]) / len(GEMMS) * shares.get(name, 0.0),
        )
        for name in names
    ]


def _all_gemms(names: Sequence[str]) -> list[Unit]:
    return [(name, gemm) for name in names for gemm in GEMMS]


def _name(units: Sequence[Unit]) -> str:
    text = "\n".join(f"{module} {gemm}" for module, gemm in sorted(units))
    return f"units-{len(units)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

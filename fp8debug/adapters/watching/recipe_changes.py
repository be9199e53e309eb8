"""Recipe changes during training: each becomes an event, and a guard makes some itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fp8debug.adapters.watching.coverage import Candidate, common_recipe, parameter_counts
from fp8debug.adapters.watching.resumption import Resumption
from fp8debug.errors import UsageError
from fp8debug.fallback.guard import Evidence, Guard, Verdict
from fp8debug.interruptions import is_ours
from fp8debug.linear import Fp8Linear
from fp8debug.recipes import Recipe
from fp8debug.store.flop_shares import flop_shares
from fp8debug.store.write.writer import RunWriter
from fp8debug.types import OPERAND_SITES, Gemm

#: Modules of a large model that are looked at in one step where nothing says that any has changed: recipes of Fp8Linears, and
#: at sampled steps what other backends run, of whose casts a recipe is made first.
LOOKED_AT, READ_AT_ONCE = 32, 8
#: Steps between two writings of the manifest because of what was set: describing 560 modules takes 15 ms.
STEPS_PER_MANIFEST = 10


def check_guard(guard: Guard | None, candidates: Sequence[Candidate]) -> None:
    """Look at ``watch(guard=...)`` before anything is written.

    Raises:
        UsageError: it is no guard, or there is no Fp8Linear that it could change.
    """
    if guard is not None and not isinstance(guard, Guard):
        raise UsageError(f"guard must be a fp8debug.Guard, got {type(guard).__name__}")
    if guard is not None and not _guarded_shares(candidates):
        raise UsageError("guard= needs Fp8Linear modules that run in FP8; convert() the model first")


def _guarded_shares(candidates: Sequence[Candidate]) -> dict[str, float]:
    is_ours = [isinstance(c.module, Fp8Linear) and c.reason is None for c in candidates]
    return flop_shares(c.describe(i) for i, c in enumerate(candidates) if is_ours[i])


class RecipeChanges:
    """The recipes of a model's modules from step to step; an error in here ends the recording and not the training.

    What is set at an Fp8Linear (``set_recipe``, a schedule, a guard) is an event, and in the manifest, of the step in which it
    first holds. Steps without a change cost the same however many modules there are: all are looked at if any recipe was set in
    this process since the last time, and ``LOOKED_AT`` in turn otherwise, for one that was assigned to the attribute. What is
    set after ``Watch.step()`` so that no module runs in FP8 any more is dated a step late. Where recipes move all the time the
    manifest is written every ``STEPS_PER_MANIFEST`` steps, and at the end.

    What other backends run is read at sampled steps (``refresh_backends``): of all modules until nothing has changed twice,
    then of ``READ_AT_ONCE`` in turn, so that one that changes alone in a large model reaches the manifest some sampled steps
    later.

    Args:
        candidates: the modules of the watch.
        writer: where events go.
        first_step: of the watch.
        guard: what may change recipes by itself; None for nothing.
        resumption: compares what backends run with an earlier part of the run.
        roots: the models, whose parameters are counted.
    """

    def __init__(self, candidates: Sequence[Candidate], writer: RunWriter, first_step: int, guard: Guard | None,
                 resumption: Resumption | None = None, roots: Sequence[nn.Module] = ()) -> None:  # fmt: skip
        self._writer = writer
        self._roots = roots
        self._resumption = resumption
        self._candidates = list(candidates)
        self._state = [c.state for c in candidates]
        self._next_look = self._num_unchanged = 0
        self._ours = [c for c in candidates if isinstance(c.module, Fp8Linear)]
        self._modules: list[Any] = [c.module for c in self._ours]
        self._known: list[Recipe] = [module.recipe for module in self._modules]
        self._in_force = [c.recipe() for c in self._ours]
        self._num_set = Fp8Linear.num_recipes_set
        self._next = self._next_update = 0
        self._is_stale = False
        self._verdicts: list[Verdict] = []
        self._evidence: Evidence | None = None
        if guard is not None:
            self._evidence = Evidence(guard, _guarded_shares(candidates), first_step)
        for c in self._ours:
            module: Any = c.module
            later = getattr(module, "fp8debug_later", None)
            if later is not None and later is not module.recipe:
                writer.event(first_step, "recipe", c.fqn, f"begins by a schedule with {difference(later, module.recipe)}")

    @property
    def has_guard(self) -> bool:
        """True if something in here may change a recipe by itself."""
        return self._evidence is not None

    def judge_step(self, step: int, columns: Mapping[str, Any]) -> None:
        """Show the guard the rows of a sampled step."""
        if self._evidence is not None:
            try:
                self._verdicts += self._evidence.see(step, columns)
            except Exception as error:
                if not is_ours(error):
                    raise
                self._evidence = None
                self._say(step, None, f"the guard stopped: {type(error).__name__}: {error}"[:300])

    def apply_pending(self, step: int) -> None:
        """Between two steps: do what the guard decided, and record every recipe that is another one from ``step`` on."""
        for verdict in self._verdicts:
            self._apply_verdict(step, verdict)
        self._verdicts.clear()
        if self._num_set == Fp8Linear.num_recipes_set:
            start, stop = self._next, self._next + LOOKED_AT
            self._next = stop if stop < len(self._modules) else 0
            self._compare(step, start, min(stop, len(self._modules)))
        else:
            self.record_changes(step)

    def record_changes(self, step: int) -> None:
        """Record every recipe that is another one from ``step`` on, if any was set; at each forward pass, so that it is cheap."""
        if self._num_set != Fp8Linear.num_recipes_set:
            self._num_set = Fp8Linear.num_recipes_set
            self._compare(step, 0, len(self._modules))

    def _compare(self, step: int, start: int, stop: int) -> None:
        modules, known = self._modules, self._known
        for i in range(start, stop):
            recipe = modules[i].recipe
            if recipe is not known[i]:
                before, known[i] = known[i], recipe
                if recipe.casts != before.casts:
                    self._writer.event(step, "recipe", self._ours[i].fqn, difference(before, recipe))
                if (in_force := self._ours[i].recipe()) != self._in_force[i]:  # a schedule's BF16 steps do not count
                    self._in_force[i], self._is_stale = in_force, True
        if self._is_stale and step >= self._next_update:
            self._next_update = step + STEPS_PER_MANIFEST
            self._update_manifest()

    def flush(self) -> None:
        """At the end: write what the manifest does not have yet."""
        if self._is_stale:
            self._update_manifest()

    def refresh_backends(self) -> list[Candidate]:
        """At a sampled step: see which modules of any backend run in FP8 now; return those that were looked at."""
        candidates, start, count = self._candidates, self._next_look, READ_AT_ONCE
        if self._num_unchanged < 2:
            start, count = 0, len(candidates)
        looked = candidates[start : start + count]
        self._next_look = start + count if start + count < len(candidates) else 0
        if [c.state for c in looked] == self._state[start : start + count]:
            self._num_unchanged += 1
        else:  # an FP8 GEMM for the first time, or a lazy module that has a shape now
            self._num_unchanged = 0
            self._update_manifest()
        return looked

    def add(self, candidate: Candidate) -> None:
        """Add a module that was found while the model ran."""
        self._candidates.append(candidate)
        self._state.append(candidate.state)

    def write(self) -> None:
        """Write the manifest's modules as they are now; at the first sampled step of a resumed run also compare them."""
        modules = self._update_manifest()
        if self._resumption is not None:
            self._resumption.compare({"modules": modules})
            self._resumption = None

    def _update_manifest(self) -> list[dict[str, Any]]:
        self._is_stale = False
        self._state = [c.state for c in self._candidates]
        modules = [c.describe(i) for i, c in enumerate(self._candidates)]
        parameters = parameter_counts(self._roots, self._candidates, modules)
        self._writer.update_manifest({"modules": modules, "parameters": parameters, "recipe": common_recipe(self._candidates)})
        return modules

    def _apply_verdict(self, step: int, verdict: Verdict) -> None:
        module: Any = next(c.module for c in self._ours if c.fqn == verdict.module)
        assert self._evidence is not None
        budget, spent = float(self._evidence.guard.budget), self._evidence.spent
        if not verdict.is_within_budget:
            cost = f"its {verdict.share:.1%} of the FP8 FLOPs do not fit the budget of {budget:.1%}, {spent:.1%} spent"
            self._say(step, verdict.module, f"guard: stays in FP8 in spite of {verdict.reason}: {cost}")
            return
        module.fp8debug_guarded = True
        module.set_recipe(module.recipe.replace(cast=None))
        cost = f"{verdict.share:.1%} of the FP8 FLOPs, {spent:.1%} of at most {budget:.1%} spent"
        self._say(step, verdict.module, f"guard: BF16 from step {step} on because of {verdict.reason}; {cost}")

    def _say(self, step: int, module: str | None, text: str) -> None:
        print(f"fp8debug: {module or 'run'}: {text}", file=sys.stderr)
        self._writer.event(step, "recipe", module, text)


def difference(before: Recipe, after: Recipe) -> str:
    """Return what differs in words: ``bf16 instead of blockwise``, ``fprop input: bf16 instead of e4m3fn 1x128 current``."""
    if before.is_high_precision or after.is_high_precision:
        names = ["bf16" if recipe.is_high_precision else recipe.name for recipe in (after, before)]
        return " instead of ".join(names)
    parts: dict[str, list[str]] = {}
    for gemm in Gemm:
        for key in OPERAND_SITES:
            was, now = before.casts[key], after.casts[key]
            if key[0] is gemm and was != now:
                parts.setdefault(f"{now or 'bf16'} instead of {was or 'bf16'}", []).append(f"{gemm} {key[1]}")
    return "; ".join(f"{', '.join(sites)}: {change}" for change, sites in parts.items()) or "no cast changed"

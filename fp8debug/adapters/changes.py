"""What changes a watched model while it trains: every recipe that moves becomes an event, and a guard moves some itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fp8debug.adapters.targets import Candidate
from fp8debug.errors import UsageError
from fp8debug.guard import Evidence, Guard, Verdict
from fp8debug.recipes import Recipe
from fp8debug.shares import flop_shares
from fp8debug.store.writer import RunWriter
from fp8debug.types import OPERAND_SITES, Gemm


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
    is_ours = [hasattr(c.module, "set_recipe") and c.reason is None for c in candidates]
    return flop_shares(c.describe(i) for i, c in enumerate(candidates) if is_ours[i])


class RecipeChanges:
    """The recipes of a model's modules from step to step; an error in here ends it and not the training.

    Args:
        candidates: the modules of the watch.
        writer: where events go.
        first_step: of the watch.
        guard: what may change recipes by itself; None for nothing.
    """

    def __init__(self, candidates: Sequence[Candidate], writer: RunWriter, first_step: int, guard: Guard | None) -> None:
        self._writer = writer
        self._modules: dict[str, Any] = {c.fqn: c.module for c in candidates if hasattr(c.module, "set_recipe")}
        self._known: dict[str, Recipe] = {fqn: module.recipe for fqn, module in self._modules.items()}
        self._verdicts: list[Verdict] = []
        self._evidence: Evidence | None = None
        if guard is not None:
            self._evidence = Evidence(guard, _guarded_shares(candidates), first_step)
        for fqn, module in self._modules.items():
            later = getattr(module, "fp8debug_later", None)
            if later is not None and later is not module.recipe:
                writer.event(first_step, "recipe", fqn, f"begins by a schedule with {difference(later, module.recipe)}")

    @property
    def has_guard(self) -> bool:
        """Whether something in here may change a recipe by itself."""
        return self._evidence is not None

    def see(self, step: int, columns: Mapping[str, Any]) -> None:
        """Show the guard the rows of a sampled step."""
        if self._evidence is not None:
            try:
                self._verdicts += self._evidence.see(step, columns)
            except Exception as error:  # whatever it is, the user's step goes on
                self._evidence = None
                self._say(step, None, f"the guard stopped: {type(error).__name__}: {error}"[:300])

    def settle(self, step: int) -> None:
        """Between two steps: do what the guard decided, and record every recipe that is another one from ``step`` on."""
        for verdict in self._verdicts:
            self._obey(step, verdict)
        self._verdicts.clear()
        for fqn, module in self._modules.items():
            known = self._known[fqn]
            if module.recipe is not known:
                self._known[fqn] = module.recipe
                if module.recipe.casts != known.casts:
                    self._writer.event(step, "recipe", fqn, difference(known, module.recipe))

    def _obey(self, step: int, verdict: Verdict) -> None:
        module = self._modules[verdict.module]
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

"""BF16 until a step, or from a step on: recipes of Fp8Linear modules that change while training runs.

A :class:`Schedule` counts optimizer steps and, between two of them, gives each of its modules the recipe that holds at the
next. A step sees one recipe from its first forward to its last backward pass. What an amax history knew of a delayed cast
is dropped when that cast stops running; when it runs again it starts from the first tensor that it sees, as at the
beginning of training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8debug.errors import UsageError
from fp8debug.recipes import Cast, Recipe

if TYPE_CHECKING:
    import torch
    from torch import nn


class Span(NamedTuple):
    """One change of a module's recipe, and the steps in which it holds."""

    gemms: tuple[str, ...]
    tensor: str
    cast: Cast | None
    from_step: int | None = None
    until_step: int | None = None

    @property
    def is_bounded(self) -> bool:
        """True if it holds in some steps only."""
        return self.from_step is not None or self.until_step is not None

    def holds(self, step: int) -> bool:
        """Return whether it holds at a step."""
        return (self.from_step or 0) <= step and (self.until_step is None or step < self.until_step)

    def change(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the change in it."""
        for gemm in self.gemms:
            recipe = recipe.replace(gemm=gemm, tensor=self.tensor, cast=self.cast)
        return recipe


class Schedule:
    """The changes of a model's modules by step; made by :func:`fp8debug.apply`, kept at ``model.fp8debug_schedule``.

    Steps are those of the optimizer, or, once :meth:`set_step` was called, what the training loop says. A copy or pickle of
    the model has the recipes of that moment and switches no more; a ``state_dict`` holds nothing of a schedule, so a job
    that resumes applies the list again, with ``start_step``.

    Args:
        model: the model.
        spans: the changes by FQN, in order; the modules' recipes now are those that hold outside every span.
        step: number of the next optimizer step.
        optimizer: counted; without it any torch optimizer that holds a parameter of the model.

    Attributes:
        modules: FQNs of the modules that change.
        step: number of the step under way.
    """

    def __init__(
        self,
        model: nn.Module,
        spans: Mapping[str, Sequence[Span]],
        step: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        from fp8debug.observer.optimizer_hooks import after_any_optimizer

        self.modules = tuple(spans)
        self.step = step
        self._is_explicit = False
        self._model = weakref.ref(model)
        self._spans = {name: tuple(found) for name, found in spans.items()}
        self._base: dict[str, Recipe] = {name: _linear(model, name).recipe for name in spans}
        for name, recipe in self._base.items():
            _linear(model, name).fp8debug_later = recipe
        tick = _weak(self)
        self._counted: dict[int, bool] = {} if optimizer is None else {id(optimizer): True}
        self._stop: Callable[[], None] = (
            after_any_optimizer(tick) if optimizer is None else optimizer.register_step_post_hook(tick).remove
        )
        weakref.finalize(self, self._stop)
        model.fp8debug_schedule = self  # type: ignore[assignment]  # nn.Module takes any attribute
        self._switch()

    def set_step(self, step: int) -> None:
        """Say which step is under way; from now on the loop counts, not the optimizer.

        Raises:
            UsageError: step is no number of a step.
        """
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"step is the number of the step under way, 0 or more; got {step!r}")
        self._is_explicit = True
        self.step = step
        self._switch()

    def remove(self) -> None:
        """End the schedule: every module gets the recipe that holds outside its spans."""
        self._stop()
        model = self._model()
        if model is not None and getattr(model, "fp8debug_schedule", None) is self:
            del model.fp8debug_schedule
            for name, recipe in self._base.items():
                module = _linear(model, name)
                del module.fp8debug_later
                if module.recipe != recipe:
                    module.set_recipe(recipe)

    def recipe_at(self, module: str, step: int) -> Recipe:
        """Return the recipe of one of its modules at a step."""
        recipe = self._base[module]
        for span in self._spans[module]:
            if span.holds(step):
                recipe = span.change(recipe)
        return recipe

    def _tick(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if model is None or self._is_explicit:
            return
        if id(optimizer) not in self._counted:
            known = {id(p) for p in model.parameters()}
            found = any(id(p) in known for group in optimizer.param_groups for p in group["params"])
            self._counted[id(optimizer)] = found
        if self._counted[id(optimizer)]:
            self.step += 1
            self._switch()

    def _switch(self) -> None:
        model = self._model()
        if model is None:
            return
        for name in self.modules:
            module = _linear(model, name)
            wanted = self.recipe_at(name, self.step)
            if getattr(module, "fp8debug_guarded", False):  # a guard of fp8debug.watch has the last word
                continue
            if module.recipe.casts != wanted.casts:
                module.set_recipe(wanted)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a model does not switch."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A pickle of a model does not switch."""
        return (_none, ())


def _weak(schedule: Schedule) -> Callable[[Any, object, object], None]:
    """Return a hook that does not keep the schedule, and by it the model, alive."""
    from fp8debug.kernels.torch_state import outside_of_graphs

    reference = weakref.ref(schedule)

    @outside_of_graphs
    def hook(optimizer: Any, args: object, kwargs: object) -> None:
        alive = reference()
        if alive is not None:
            alive._tick(optimizer)

    return hook


def _linear(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def _none() -> None:
    return None

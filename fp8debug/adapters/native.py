"""The adapter of our own Fp8Linear, which calls its Probe itself; in a model that is all BF16 it is tried like an nn.Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fp8debug.adapters.base import ADAPTERS
from fp8debug.adapters.interception.linear_ops import LINEAR_OPS
from fp8debug.adapters.plain import WhatIfProbe
from fp8debug.errors import AttachError
from fp8debug.linear import Fp8Linear
from fp8debug.observer.observer import Observer
from fp8debug.observer.probe import Probe
from fp8debug.recipes import Recipe


class TrialInBf16(WhatIfProbe):
    """Record the effect that FP8 would have on an Fp8Linear that runs in BF16."""

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Leave it to the module's own probe from the moment it runs in FP8."""
        assert isinstance(module, Fp8Linear)
        if module.recipe.is_high_precision:
            super().after_call(module, args, kwargs, output)


class Native:
    """Fp8Linear modules."""

    name = "native"
    kind = "Fp8Linear"
    fp8 = True
    is_intercepted = False

    def matches(self, module: nn.Module) -> bool:
        """Return whether it is an Fp8Linear."""
        return isinstance(module, Fp8Linear)

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return its recipe, or the one that a schedule has for it outside its BF16 steps; None when it is never in FP8."""
        assert isinstance(module, Fp8Linear)
        recipe = getattr(module, "fp8debug_later", module.recipe) if module.recipe.is_high_precision else module.recipe
        return None if recipe.is_high_precision else recipe

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Give the module a probe, and a trial where no module of the model is in FP8."""
        assert isinstance(module, Fp8Linear)
        of_inference = observer.settings.inference
        if (module.inference_probe if of_inference else module.probe) is not None:
            raise AttachError(f"{name} is watched already; close the first watch before attaching another")
        probe = Probe(observer, name)
        if of_inference:
            module.inference_probe = probe
        else:
            module.probe = probe
        end_ops = LINEAR_OPS.add(module, probe)
        stop_trying = None
        if self.recipe(module) is None:
            stop_trying = TrialInBf16(observer, name, actual=False).follow(module)

        def detach() -> None:
            if of_inference:
                module.inference_probe = None
            else:
                module.probe = None
            end_ops()
            if stop_trying is not None:
                stop_trying()

        return detach


ADAPTERS.add(Native.name, Native())

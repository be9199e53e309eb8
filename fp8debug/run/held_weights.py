"""Inference of trained weights in an arm: from a step on the weights stay as they are, and passes may change their precision.

The script goes on unchanged, its optimizer too: what a step writes into the parameters is taken back before the next forward
pass. So every arm that was trained alike has the same weights there, and the same batches to be judged by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from fp8debug.adapters.watching.coverage import candidates_of
from fp8debug.linear import Fp8Linear
from fp8debug.run.arms import Arm, apply_arm, convert_plain
from fp8debug.run.other_stacks import raise_usage_error, restore_others


class HeldWeights:
    """Holds the weights of a model and gives it the precision of an arm's inference.

    Args:
        arm: says which precision.
        roots: the model, or the chunks of one, as the script made it: before the arm is applied.
        refuse: takes the reason where a module of another stack cannot be changed; it does not return.
    """

    def __init__(self, arm: Arm, roots: Sequence[nn.Module], refuse: Callable[[str], NoReturn] = raise_usage_error) -> None:
        self._arm, self._roots, self._refuse = arm, roots, refuse
        modules = [candidate.module for candidate in candidates_of(roots)]
        self._recipes = [(module, module.recipe) for module in modules if isinstance(module, Fp8Linear)]
        self._torchao = [(module, type(module)) for module in modules if type(module).__name__ == "Float8Linear"]
        self._saved: list[tuple[nn.Parameter, Tensor]] | None = None

    @torch.no_grad()
    def hold(self) -> None:
        """Save the weights and change the precision at the first call, restore the weights at each later one.

        It is called before the forward pass of a step.

        Raises:
            UsageError: the model cannot be converted.
        """
        if self._saved is not None:
            for parameter, saved in self._saved:
                parameter.copy_(saved)
            return
        self._saved = [(p, p.detach().clone()) for root in self._roots for p in root.parameters()]
        if self._arm.inference == "bf16":
            bf16 = Arm(name=self._arm.name, compute="bf16", recipe=self._arm.recipe, further=self._arm.further)
            apply_arm(bf16, self._roots, refuse=self._refuse)
        elif self._arm.inference == "fp8":
            for layer, recipe in self._recipes:
                layer.set_recipe(recipe)
            for module, kind in self._torchao:
                module.__class__ = kind
            restore_others(self._roots)
            convert_plain(Arm(name=self._arm.name, recipe=self._arm.recipe), self._roots)

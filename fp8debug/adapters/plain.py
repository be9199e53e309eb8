"""The adapter of plain nn.Linear in BF16 or FP32: what would FP8 do to this run?

The module's own arithmetic is not touched. An observer of its calls sees the input and a hook on its autograd node grad_output;
the three GEMMs are tried on sampled rows under a recipe; every row is recorded with ``actual = false``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from fp8debug.adapters.base import ADAPTERS, class_of
from fp8debug.adapters.interception.calls import observe_calls
from fp8debug.kernels.dispatch import Operand, quantize
from fp8debug.kernels.torch_state import is_batched
from fp8debug.metrics import Source
from fp8debug.observer.attributes import COMPUTED, stored
from fp8debug.observer.autograd_nodes import add_prehook
from fp8debug.observer.isolation import isolated
from fp8debug.observer.observer import Observer
from fp8debug.observer.probe import Probe, Product
from fp8debug.observer.rechecks import SavedForBackward
from fp8debug.observer.sharding import fits, is_sharded, layout_by_marks, layout_of, local_of
from fp8debug.recipes import Recipe
from fp8debug.types import Gemm, TensorRole


class WhatIfProbe(Probe):
    """A probe that also does the quantizing, under the recipe of the observer's settings."""

    def follow(self, module: nn.Linear) -> Callable[[], None]:
        """Observe a module's calls; return what ends it."""
        self.layout = layout_by_marks(module, stored(module, "weight"))
        return observe_calls(module, self)

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing: all that is recorded is known afterwards."""

    def after_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record fprop and wait for the gradient; the output itself is left alone."""
        if output is not None and self.begin():
            self._try_fprop(module, args[0] if args else kwargs["input"], output)

    @isolated
    def _try_fprop(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        is_training, weight = not self.observer.settings.inference, stored(module, "weight")
        wants_dgrad = is_training and x.requires_grad
        if weight is None:
            self.give_up(COMPUTED)
            return
        wants_wgrad = is_training and weight.requires_grad
        if is_sharded(weight):
            if not fits(x, weight):
                self.give_up(
                    "its input is redistributed among the ranks inside torch's Linear; parallelize_module lays it out before"
                )
                return
            self.layout = layout_of(weight.device_mesh, x.placements, weight.placements)  # type: ignore[attr-defined]  # a DTensor
            weight = local_of(weight)
        x = local_of(x)
        self._try_gemm(x.reshape(-1, x.shape[-1]), weight, output.grad_fn, wants_dgrad, wants_wgrad)

    @isolated
    def try_gemm(self, x: Tensor, weight: Tensor, node: Any, wants_dgrad: bool, wants_wgrad: bool) -> None:
        """Record what FP8 would do to a GEMM that ran in high precision, and wait for its gradient.

        Args:
            x: input ``[M, K]`` as the GEMM read it.
            weight: ``[N, K]`` as the GEMM read it.
            node: autograd node whose only output is the GEMM's result, a view of it, or its sum with a bias; None without one.
            wants_dgrad: whether the input's gradient is wanted.
            wants_wgrad: whether the weight's is.
        """
        self._try_gemm(x, weight, node, wants_dgrad, wants_wgrad)

    @isolated
    def try_forward(self, x: Tensor, weight: Tensor, wants_dgrad: bool, wants_wgrad: bool) -> Callable[[Any], None]:
        """Record fprop as :meth:`try_gemm` does, and return what waits for the gradient of a node that is not known yet."""
        hook = self._try_fprop_alone(x, weight, wants_dgrad, wants_wgrad)

        def attach(node: Any) -> None:
            add_prehook(node, hook)

        return attach

    def _try_gemm(self, x: Tensor, weight: Tensor, node: Any, wants_dgrad: bool, wants_wgrad: bool) -> None:
        hook = self._try_fprop_alone(x, weight, wants_dgrad, wants_wgrad)
        if node is not None:
            # before the node, so that it comes after the hooks of the output: FSDP2 fetches the weight in one of these
            add_prehook(node, hook)

    def _try_fprop_alone(
        self, x: Tensor, weight: Tensor, wants_dgrad: bool, wants_wgrad: bool
    ) -> Callable[[tuple[Tensor, ...]], None]:
        """Record fprop, and return what records the backward pass when it is given grad_output."""
        a = self._what_if_operand(Gemm.FPROP, TensorRole.INPUT, x)
        b = self._what_if_operand(Gemm.FPROP, TensorRole.WEIGHT, weight)
        x_wgrad = self._what_if_operand(Gemm.WGRAD, TensorRole.INPUT, x) if wants_wgrad else None
        kept = self.fprop(x, weight, a, b, x_wgrad, None)
        return partial(self._try_backward, weight, x_wgrad, kept, wants_dgrad)

    @isolated
    def _try_backward(
        self, weight: Tensor, x_wgrad: Operand | None, kept: SavedForBackward | None, wants_dgrad: bool, grads: tuple[Tensor, ...]
    ) -> None:
        (grad_output,) = grads
        if is_batched(grad_output):
            self.give_up("its backward pass runs for many gradients at once (is_grads_batched=True, vectorize=True)")
            return
        if weight.numel() and not weight.untyped_storage().nbytes():
            self.give_up("its weight was taken away before its backward pass")
            return
        if is_sharded(grad_output) and any(p.is_partial() for p in grad_output.placements):  # type: ignore[attr-defined]  # as above
            self.give_up("its gradient is in parts that are yet to be summed over the ranks")
            return
        grad_output = local_of(grad_output)
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        dgrad: Product | None = None
        wgrad: Product | None = None
        if wants_dgrad:
            a = self._what_if_operand(Gemm.DGRAD, TensorRole.GRAD_OUTPUT, grad_output)
            dgrad = a, self._what_if_operand(Gemm.DGRAD, TensorRole.WEIGHT, weight), None
        if x_wgrad is not None:
            wgrad = self._what_if_operand(Gemm.WGRAD, TensorRole.GRAD_OUTPUT, grad_output), x_wgrad, None
        self.backward(grad_output, weight, dgrad, wgrad, kept)

    def _what_if_operand(self, which: Gemm, role: TensorRole, x: Tensor) -> Operand:
        cast = self.observer.settings.plain_recipe.casts[which, role]
        if cast is None:
            return x
        return quantize(x, cast, self.scale_inv(role, cast, Source(x))), cast


class Plain:
    """Modules that run nn.Linear's own forward on a weight of their own: nn.Linear, and subclasses that inherit it."""

    name = "plain"
    kind = ""  # the class's name
    fp8 = False
    is_intercepted = False

    def matches(self, module: nn.Module) -> bool:
        """Return whether ``F.linear(input, module.weight, module.bias)`` is what it computes."""
        kind = class_of(module)
        inherits = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward and "forward" not in module.__dict__
        return inherits and "weight" in module._parameters and kind.__name__ != "NonDynamicallyQuantizableLinear"

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return None: nothing is cast."""
        return None

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Observe the module's calls."""
        assert isinstance(module, nn.Linear)
        return WhatIfProbe(observer, name, actual=False).follow(module)


ADAPTERS.add(Plain.name, Plain())

"""The probe of one Linear of Transformer Engine: it takes its operands from GEMMs that were observed, and records them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8debug.adapters.interception.listener import GemmOperand
from fp8debug.adapters.interception.sublinears import CASTS, FAST, SubLinear, SubLinearProbe
from fp8debug.adapters.transformer_engine.gemms import SeenTeGemm
from fp8debug.adapters.transformer_engine.scale_state import recipe_of_scales
from fp8debug.adapters.transformer_engine.tensors import cast_of_storage, is_quantized, side_of_storage, unwrapped
from fp8debug.kernels.dispatch import Operand
from fp8debug.observer.attributes import stored
from fp8debug.observer.isolation import isolated
from fp8debug.observer.master_weights import follow_optimizers, master_weight
from fp8debug.observer.observer import Observer
from fp8debug.observer.probe import Product
from fp8debug.observer.rechecks import SavedForBackward
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized, TensorRole, not_observed, not_observed_code


def recipe_in_force(module: Any) -> Any:
    """Return the library's recipe object that a module ran under last; None before it ran."""
    return getattr(module, "fp8_meta", {}).get("recipe")


@dataclass
class SavedLinear:
    """Tensors that the backward pass of one Linear needs, and its observations."""

    weight: Tensor
    kept: SavedForBackward | None
    x: Callable[[], Tensor | None] | None  # finds the input, where wgrad's cast of it comes later
    products: dict[Gemm, Product] = field(default_factory=dict)
    grad_output: Tensor | None = None


class LinearInputs(Protocol):
    """A call of the module: what its Linears read before the cast."""

    lines: dict[int, SavedLinear]

    def input_of(self, number: int, storage: Any, place: int, splits: list[int] | None) -> Tensor | None:
        """Return an input."""

    def find_input(self, number: int) -> Callable[[], Tensor | None]:
        """Return what finds an input later, as long as the module itself keeps it."""

    def gradient_of(self, number: int, place: int, splits: list[int] | None) -> Tensor | None:
        """Return a grad_output."""


class TeProbe(SubLinearProbe):
    """Of one Linear."""

    def __init__(self, observer: Observer, module: str, sublinear: SubLinear) -> None:
        super().__init__(observer, module, sublinear)
        self._has_reference = True  # of its weight: another than its own values
        follow_optimizers()

    @isolated
    def take_fprop(self, call: LinearInputs, gemm: SeenTeGemm, place: int) -> None:
        """Record fprop; nothing is kept of a Linear in high precision."""
        a, b = unwrapped(gemm.first[place], False), unwrapped(gemm.second[place], False)
        is_low = is_quantized(a) or is_quantized(b)
        if not is_low and not any(is_quantized(unwrapped(operand[place], True)) for operand in (gemm.first, gemm.second)):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel():
                self._tell_flops(False, 2 * (a.numel() // a.shape[-1]) * b.numel())
            return
        if gemm.odd:
            self.give_up(gemm.odd)
            return
        x = call.input_of(self.sublinear.index, gemm.first[place], place, gemm.splits)
        weight = self._current_weight()
        first, second = side_of_storage(a, False), side_of_storage(b, False)
        if x is None or first is None or second is None:
            self.give_up("its input in high precision is not to be had")
            return
        x = self._plain(x, "input")
        self._tell_flops(is_low, 2 * x.shape[0] * weight.numel())
        if first.values.shape != x.shape or second.values.shape != weight.shape:
            shapes = f"{list(first.values.shape)} by {list(second.values.shape)}"
            self.give_up(f"its GEMM of {shapes} is not input {list(x.shape)} by weight {list(weight.shape)} (gathered?)")
            return
        result, bias = self._given(gemm, place), None if gemm.bias is None else gemm.bias[place]
        later = None
        if self._trains():
            later = self._operand_of(Gemm.WGRAD, TensorRole.INPUT, gemm.first[place])
        operands = self._operands(gemm, place, weight, (first, second))
        if operands is not None:
            kept = self.fprop(x, weight, *operands, later, result, bias)
            find = call.find_input(self.sublinear.index) if later is None and self._trains() else None
            call.lines[self.sublinear.index] = SavedLinear(weight, kept, find)

    def _tell_flops(self, is_fp8: bool, flops: int) -> None:
        """Report the FLOPs of fprop, for coverage's share of all GEMMs."""
        if self.observer.on_product is not None:
            precision = "fp8" if is_fp8 else "high precision"
            self.observer.on_product(self.module, self.sublinear.fp8debug_kind, is_fp8, precision, flops)

    @isolated
    def take_backward(self, call: LinearInputs, gemm: SeenTeGemm, place: int) -> None:
        """Keep the operands and the result of dgrad or wgrad until the module's backward pass is over."""
        line = call.lines.get(self.sublinear.index)
        if line is None:
            return
        grad = call.gradient_of(self.sublinear.index, place, gemm.splits)
        if gemm.odd or grad is None:
            self.report_once(f"not recorded in full: {gemm.odd or 'its gradient in high precision is not to be had'}")
            return
        line.grad_output = grad = self._plain(grad, "grad_output")
        operands = self._operands(gemm, place, line.weight)
        if operands is None:
            return
        rows = operands[0] if isinstance(operands[0], Tensor) else operands[0][0].data
        if rows.shape != grad.shape:
            self.report_once(
                f"not recorded in full: {gemm.which} reads {list(rows.shape)} of a gradient {list(grad.shape)} (gathered?)"
            )
            return
        result = self._given(gemm, place)
        if result is not None and gemm.which is Gemm.DGRAD and getattr(self.sublinear.owner, "tp_size", 1) > 1:
            result = result.clone()  # the module sums it over the ranks in place
        line.products[gemm.which] = (*operands, result)
        if gemm.which is Gemm.WGRAD and line.x is not None:
            self._take_input(line, line.x(), operands[1])

    def _take_input(self, line: SavedLinear, x: Tensor | None, operand: Operand) -> None:
        """Record wgrad's cast of the input, which the module made in its backward pass, while the input is still there."""
        if x is None or line.kept is None:
            self.report_once("not recorded in full: wgrad's cast of the input comes later, when it is gone in high precision")
            return
        source = line.kept.source(x.detach().reshape(-1, x.shape[-1]))
        self._operand(Gemm.WGRAD, TensorRole.INPUT, source, operand, line.kept.what_if)

    @isolated
    def finish(self, line: SavedLinear) -> None:
        """Record a backward pass."""
        dgrad, wgrad = line.products.get(Gemm.DGRAD), line.products.get(Gemm.WGRAD)
        if line.grad_output is None or (dgrad is None and wgrad is None):
            text = "not recorded in full: no GEMM in FP8 was observed in its backward pass"
            self.report_once(text, not_observed_code(Gemm.DGRAD, Gemm.WGRAD, in_fp8=True))
            return
        if wgrad is None and self._trains():
            text = f"not recorded in full: {not_observed(Gemm.WGRAD)} in its backward pass (delay_wgrad_compute?)"
            self.report_once(text, not_observed_code(Gemm.WGRAD))
        self.backward(line.grad_output, line.weight, dgrad, wgrad, line.kept)

    def _trains(self) -> bool:
        return any(getattr(self.sublinear.owner, name).requires_grad for name in self.sublinear.weight_names)

    def _current_weight(self) -> Tensor:
        """Return the weight in high precision: itself, or what parameters in FP8 or FP4 were quantized from, or their values."""
        held = [stored(self.sublinear.owner, name) for name in self.sublinear.weight_names]
        self._has_reference = not any(map(is_quantized, held))
        if not self._has_reference:
            masters = [found for parameter in held if (found := master_weight(parameter)) is not None]
            if len(masters) == len(held):
                self._has_reference = True
                return torch.cat([master.reshape(-1, master.shape[-1]) for master in masters])
        return self._plain(self.sublinear.current_weight(), "weight")

    def _plain(self, x: Tensor, what: str) -> Tensor:
        """Return a tensor in high precision; one that exists in FP8 alone stands for itself, and has no cast."""
        if not is_quantized(x):
            return x
        self.report_once(f"not recorded in full: its {what} is there in FP8 only, and its cast has no row")
        plain: Tensor = x.dequantize()
        return plain.reshape(-1, plain.shape[-1])

    def _given(self, gemm: SeenTeGemm, place: int) -> Tensor | None:
        """Return what a GEMM gave; None where that is not to be seen, and the exact GEMM of its operands stands for it."""
        result = gemm.results[place]
        if isinstance(result, Tensor) and not is_quantized(result) and result.element_size() > 1:
            result = result.detach()  # another tensor on the same memory, should the library empty its own
            return result if result.dim() == 2 else result.reshape(-1, result.shape[-1])
        why = "is added to what was there" if result is None else "leaves the GEMM in FP8"
        self.report_once(f"recorded, but {gemm.which}'s result {why}: the exact GEMM of its operands stands for it")
        return None

    def _operands(
        self, gemm: SeenTeGemm, place: int, weight: Tensor, sides: tuple[GemmOperand | None, GemmOperand | None] = (None, None)
    ) -> tuple[Operand, Operand] | None:
        """Return both operands of a GEMM; a weight that exists in FP8 alone counts as what it is in high precision.

        Args:
            gemm: what was observed.
            place: which of its GEMMs.
            weight: in high precision.
            sides: of both operands, where they are known.
        """
        found = []
        for role, storage, side in zip(OPERANDS[gemm.which], (gemm.first[place], gemm.second[place]), sides, strict=True):
            operand = self._operand_of(gemm.which, role, storage, side)
            if operand is None:
                self.report_once(f"not recorded in full: {gemm.which} reads its {role} in a direction that is not there")
                return None
            if role is TensorRole.WEIGHT and not self._has_reference:
                operand = weight
            found.append(operand)
        if gemm.is_fast and all(isinstance(o, tuple) and o[1].granularity == "tensorwise" for o in found):
            FAST.setdefault(self.sublinear, set()).add(gemm.which)
        return found[0], found[1]

    def _operand_of(self, which: Gemm, role: TensorRole, storage: Any, side: GemmOperand | None = None) -> Operand | None:
        columnwise = (which, role) in CONTRACTS_ROWS
        side = side_of_storage(storage, columnwise) if side is None else side
        if side is None or side.scale_inv is None:
            return None if side is None else side.values
        recipe = recipe_of_scales(self.sublinear.owner, "bwd" if role is TensorRole.GRAD_OUTPUT else "fwd")
        cast = side.cast or cast_of_storage(storage, columnwise, side.granularity, recipe)
        CASTS.setdefault(self.sublinear, {})[which, role] = cast
        return Quantized(side.values, side.scale_inv.to(torch.float32, copy=True)), cast

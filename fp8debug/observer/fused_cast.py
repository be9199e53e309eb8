"""Operands that are quantized while they are recorded: one pass quantizes them and fills the slots of their casts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp8debug.kernels.dispatch import CastWithSlots, Slots, quantize, quantize_observed, quantize_pair, takes_kernels
from fp8debug.kernels.torch_state import foreign_mode_active
from fp8debug.observer.isolation import StepState, isolated
from fp8debug.observer.observer import Observer, RowKey
from fp8debug.recipes import Cast
from fp8debug.types import CONTRACTS_ROWS, Gemm, Quantized, Reference, TensorRole


class RecordedCasts(NamedTuple):
    """Casts of an operand that are recorded, and their rows.

    Attributes:
        cast: the running one; None where it is read in high precision.
        what_if: by name the other casts that are recorded beside it.
        keys: the rows of all these.
    """

    cast: Cast | None
    what_if: dict[str, Cast]
    keys: tuple[RowKey, ...]


class CastRecorder(StepState):
    """Quantize the operands of a module, and record their casts in the same pass.

    Args:
        observer: where they are recorded.
        module: FQN.
        actual: False for a module that does not run in FP8 and is only tried under a recipe.
    """

    def __init__(self, observer: Observer, module: str, actual: bool) -> None:
        super().__init__(observer, module)
        self.actual = actual
        self._sites: dict[tuple[Gemm, TensorRole], RecordedCasts] = {}
        self._weights_seen = set[Gemm]()
        self._fused_slots: dict[int, tuple[Quantized, Slots]] = {}

    def quantize(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, scale_inv: Tensor | None, made: Quantized | None = None
    ) -> Quantized | None:
        """Quantize an operand, and keep the slots that the same pass filled until its GEMM is recorded.

        Slots belong to the very Quantized they were worked out with: one that a fault made is described on its own. ``made`` is
        the same as another module made it, returned where nothing is left to be found out about it.

        Returns:
            None where nothing is to be recorded of it, where a mode is to see the ops of an ordinary pass, or where an error
            of ours kept it from being quantized here.
        """
        if foreign_mode_active():
            return None
        if made is not None and id(made) in self._fused_slots:  # with another operand
            return made
        return self._quantize(key, x, cast, scale_inv, made)

    @isolated
    def _quantize(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, scale_inv: Tensor | None, made: Quantized | None
    ) -> Quantized | None:
        which, role = key
        self.observer.flush_if_full(x.device)
        if role is TensorRole.WEIGHT and which in self._weights_seen:
            return None
        rows, where = key in CONTRACTS_ROWS, (self.module, *key)
        shared = scale_inv is None and role is not TensorRole.GRAD_OUTPUT  # which no other cast of this kind reads
        is_fused = takes_kernels(x)
        place = self.observer.cache_key(x, cast) if shared and is_fused else None
        found: Slots | None
        if place is not None and place in self.observer.tensor_cache:
            q, found = made or quantize(x, cast, contracts_rows=rows, where=where), self.observer.tensor_cache[place]
        elif made is not None and not is_fused:
            q, found = made, None
        else:
            what_if = self._site(which, role, cast).what_if.values() if is_fused else ()
            value_counts = self.observer.table(x.device).value_counts if what_if else None
            q, found = quantize_observed(
                x, cast, scale_inv, contracts_rows=rows, where=where, deferred=True, value_counts=value_counts, casts=what_if
            )  # fmt: skip
            if place is not None:
                self.observer.tensor_cache[place] = found
        if found is not None:
            self._fused_slots[id(q)] = q, found
        return q

    def quantize_pair(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, other: Cast
    ) -> tuple[CastWithSlots, CastWithSlots] | None:
        """Quantize an operand for its GEMM and for one that contracts its rows, as :meth:`quantize` does one after the other.

        Returns:
            None where that is what is to be done: no kernel makes both at once, or one of them is known by now.
        """
        return None if foreign_mode_active() or not takes_kernels(x) else self._quantize_pair(key, x, cast, other)

    @isolated
    def _quantize_pair(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, other: Cast
    ) -> tuple[CastWithSlots, CastWithSlots] | None:
        known = self.observer.tensor_cache
        place = None if key[1] is TensorRole.GRAD_OUTPUT else self.observer.cache_key(x, cast)
        places = () if place is None else (place, (*place[:-1], other))
        told = [place in known for place in places] or [False, False]
        if told[0] != told[1]:
            return None
        self.observer.flush_if_full(x.device)
        what_if = () if told[0] else self._site(*key, cast).what_if.values()
        value_counts = self.observer.table(x.device).value_counts if what_if else None
        pair = quantize_pair(x, cast, other, observed=not told[0], value_counts=value_counts, casts=what_if)
        if pair is None:
            return None
        if not told[0]:
            known.update(zip(places, (pair[0][1], pair[1][1]), strict=False))
        for i, (q, found) in enumerate(pair):
            slots = known[places[i]] if told[0] else found
            if slots is not None:
                self._fused_slots[id(q)] = q, slots
        return pair

    def _site(self, which: Gemm, role: TensorRole, cast: Cast | None) -> RecordedCasts:
        """Return what is recorded of an operand whose running cast is this one."""
        site = self._sites.get((which, role))
        if site is None or site.cast is not cast:
            casts = {str(c): c for recipe in self.observer.settings.what_if if (c := recipe.casts[which, role]) is not None}
            names = () if cast is None else (str(cast),)
            what_if = {name: c for name, c in casts.items() if name not in names}
            keys = *((name, self.actual) for name in names), *((name, False) for name in what_if)
            rows = tuple(RowKey(which, role, name, Reference.OPERAND, actual) for name, actual in keys)
            site = self._sites[which, role] = RecordedCasts(cast, what_if, rows)
        return site

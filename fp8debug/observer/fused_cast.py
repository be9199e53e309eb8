"""Operands that are quantized while they are recorded: one pass quantizes them and fills the slots of their casts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp8debug.kernels.dispatch import CastWithSlots, Slots, quantize, quantize_observed, quantize_pair, takes_kernels
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


class CastRecorder:
    """Quantize the operands of a module, and keep what the same pass found out about their casts until the GEMM is recorded.

    It is called inside the methods of a Probe that are isolated from the training step.

    Args:
        observer: where they are recorded.
        module: FQN.
        actual: False for a module that does not run in FP8 and is only tried under a recipe.
    """

    def __init__(self, observer: Observer, module: str, actual: bool) -> None:
        self._observer, self._module, self._actual = observer, module, actual
        self._sites: dict[tuple[Gemm, TensorRole], RecordedCasts] = {}
        self._slots: dict[int, tuple[Quantized, Slots]] = {}

    def clear(self) -> None:
        """Forget the slots of operands whose GEMM has been recorded, or will not be."""
        self._slots.clear()

    def knows(self, q: Quantized) -> bool:
        """Return whether the pass that made these codes filled the slots of their cast."""
        return id(q) in self._slots

    def slots_of(self, q: Quantized) -> Slots | None:
        """Return the slots that were filled in the pass that made these codes; None for codes that were made elsewhere.

        Slots belong to the very Quantized they were worked out with: one that a fault made is described on its own.
        """
        kept = self._slots.get(id(q))
        return None if kept is None else kept[1]

    def quantize(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, scale_inv: Tensor | None, made: Quantized | None = None
    ) -> Quantized:
        """Quantize an operand, and keep the slots that the same pass filled.

        ``made`` is the same as another module made it, returned where nothing is left to be found out about it.
        """
        which, role = key
        rows, where = key in CONTRACTS_ROWS, (self._module, *key)
        shared = scale_inv is None and role is not TensorRole.GRAD_OUTPUT  # which no other cast of this kind reads
        is_fused = takes_kernels(x)
        place = self._observer.cache_key(x, cast) if shared and is_fused else None
        found: Slots | None
        if place is not None and place in self._observer.tensor_cache:
            q, found = made or quantize(x, cast, contracts_rows=rows, where=where), self._observer.tensor_cache[place]
        elif made is not None and not is_fused:
            q, found = made, None
        else:
            what_if = self.site(which, role, cast).what_if.values() if is_fused else ()
            value_counts = self._observer.table(x.device).value_counts if what_if else None
            q, found = quantize_observed(
                x, cast, scale_inv, contracts_rows=rows, where=where, deferred=True, value_counts=value_counts, casts=what_if
            )  # fmt: skip
            if place is not None:
                self._observer.tensor_cache[place] = found
        if found is not None:
            self._slots[id(q)] = q, found
        return q

    def makes_pairs(self, x: Tensor) -> bool:
        """Return whether kernels, which alone make two casts at once, take a tensor."""
        return takes_kernels(x)

    def quantize_pair(
        self, key: tuple[Gemm, TensorRole], x: Tensor, cast: Cast, other: Cast
    ) -> tuple[CastWithSlots, CastWithSlots] | None:
        """Quantize an operand for its GEMM and for one that contracts its rows, as :meth:`quantize` does one after the other.

        Returns:
            None where that is what is to be done: no kernel makes both at once, or one of them is known by now.
        """
        known = self._observer.tensor_cache
        place = None if key[1] is TensorRole.GRAD_OUTPUT else self._observer.cache_key(x, cast)
        places = () if place is None else (place, (*place[:-1], other))
        told = [place in known for place in places] or [False, False]
        if told[0] != told[1]:
            return None
        self._observer.flush_if_full(x.device)
        what_if = () if told[0] else self.site(*key, cast).what_if.values()
        value_counts = self._observer.table(x.device).value_counts if what_if else None
        pair = quantize_pair(x, cast, other, observed=not told[0], value_counts=value_counts, casts=what_if)
        if pair is None:
            return None
        if not told[0]:
            known.update(zip(places, (pair[0][1], pair[1][1]), strict=False))
        for i, (q, found) in enumerate(pair):
            slots = known[places[i]] if told[0] else found
            if slots is not None:
                self._slots[id(q)] = q, slots
        return pair

    def site(self, which: Gemm, role: TensorRole, cast: Cast | None) -> RecordedCasts:
        """Return what is recorded of an operand whose running cast is this one."""
        site = self._sites.get((which, role))
        if site is None or site.cast is not cast:
            casts = {str(c): c for recipe in self._observer.settings.what_if if (c := recipe.casts[which, role]) is not None}
            names = () if cast is None else (str(cast),)
            what_if = {name: c for name, c in casts.items() if name not in names}
            keys = *((name, self._actual) for name in names), *((name, False) for name in what_if)
            rows = tuple(RowKey(which, role, name, Reference.OPERAND, actual) for name, actual in keys)
            site = self._sites[which, role] = RecordedCasts(cast, what_if, rows)
        return site

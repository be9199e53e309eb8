"""The amax history of delayed scaling as one tensor on the operand's device: a ring of amaxes and the scale that they give.

    state   FP32 [36 + history]: scale_inv | number of calls | amaxes by ring position | whether a training call came outside of a
            backward pass | number of recent calls | their amaxes [16] | their scale_inv [16]

Nothing of it is on the host, so that a graph of torch.compile can hold it as an input that it writes to. Both numbers are kept
modulo the length of their ring (plus one length once it is full), which FP32 holds exactly.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.kernels.backend import gpu
from fp8debug.kernels.dispatch import on_device, takes_kernels
from fp8debug.kernels.reference import scale_of
from fp8debug.recipes import Cast

#: What a call is: an ordinary one; of an evaluation, which leaves no trace; or of a forward pass that is computed again.
Use = Literal["train", "evaluate", "recompute"]
#: Calls whose scales are kept for a recomputation: microbatches that a pipeline has in flight.
MAX_RECENT = 16
#: Elements of a state beside the ring of amaxes.
_BEFORE, _AFTER = 2, 2 + 2 * MAX_RECENT


class ReferenceAmaxHistory:
    """Delayed scaling as Transformer Engine does it: the scale of a call comes from the amaxes of earlier calls.

    With an empty history the tensor's own amax is used once (Transformer Engine starts from scale 1, which underflows).
    Where the history gives 0 or a nonfinite amax the old scale stays.

    Args:
        cast: a delayed cast; its ``history``, ``algo`` and ``margin`` hold.
        device: where the state lives.
        memory: a state to go on with, which is written to; by default a new one.
    """

    def __init__(self, cast: Cast, device: torch.device, memory: Tensor | None = None) -> None:
        self.cast = cast
        if memory is None:
            with torch.inference_mode(False):  # later calls write to it
                memory = torch.zeros(_BEFORE + cast.history + _AFTER, dtype=torch.float32, device=device)
                memory[:1] = 1.0
        self.memory = memory

    def next_scale_inv(self, amax: Tensor, use: Use = "train") -> Tensor:
        """Return the FP32 ``[]`` scale_inv for this call; no synchronization.

        Args:
            amax: FP32 ``[]``, of this call's tensor.
            use: an evaluation leaves no trace; a recomputation takes the scale of the last call with that amax, else of the last
                call (both as in Transformer Engine, where forgetting the latter was #1190). Where no call outside of a backward
                pass came before, as under reentrant checkpoints, a recomputation is an ordinary call.
        """
        length, (scale_before, calls), ring = self.cast.history, self.memory[:2], self.memory[_BEFORE:-_AFTER]
        place = calls.long() % length
        if self.cast.algo == "most_recent":
            known = ring.gather(0, ((place - 1) % length).reshape(1)).reshape(())
        else:
            known = ring.amax()
        known = torch.where(calls > 0, known, amax.to(known.device))
        usable = (known > 0) & known.isfinite()
        scale_inv = torch.where(usable, scale_of(known, self.cast)[1], scale_before)
        if use == "evaluate":
            return scale_inv
        seen, recent = self.memory[-_AFTER : 2 - _AFTER]
        is_again = (seen > 0) & (recent > 0) if use == "recompute" else None
        after = self.memory if is_again is None else self.memory.clone()
        found = scale_inv if is_again is None else torch.where(is_again, self._scale_inv_of(amax), scale_inv)
        slot = recent.long() % MAX_RECENT + length + _BEFORE + 2
        for at, value in ((place + _BEFORE, amax), (slot, amax), (slot + MAX_RECENT, scale_inv)):
            after.index_copy_(0, at.reshape(1), value.to(after).reshape(1))
        head = torch.stack([scale_inv, _counted(calls, length)])
        tail = torch.stack([torch.ones_like(seen) if is_again is None else seen, _counted(recent, MAX_RECENT)])
        after[:2], after[-_AFTER : 2 - _AFTER] = head, tail
        if is_again is not None:
            self.memory.copy_(torch.where(is_again, self.memory, after))
        return found

    def _scale_inv_of(self, amax: Tensor) -> Tensor:
        """Return the scale_inv of the last call with that amax, which recomputation meets again; else the last one."""
        recent, (amaxes, scales) = self.memory[1 - _AFTER], self.memory[-2 * MAX_RECENT :].reshape(2, MAX_RECENT)
        age = (recent.long() - 1 - torch.arange(MAX_RECENT, dtype=torch.int64, device=recent.device)) % MAX_RECENT
        best = torch.where((amaxes == amax.to(amaxes)) & (age < recent), age, MAX_RECENT).amin()
        place = (age == torch.where(best < MAX_RECENT, best, 0)).long().argmax(0, keepdim=True)
        scale_inv: Tensor = scales.gather(0, place).reshape(())
        return scale_inv

    def fill(self, amax: Tensor) -> None:
        """Overwrite the whole ring with one amax, as if every earlier call had had it."""
        self.memory[_BEFORE:-_AFTER].fill_(amax)
        self.memory[1:2].clamp_(min=1)
        self._forget_recent()

    def state(self) -> Tensor:
        """Return FP32 ``[2 + history]``: scale_inv, number of calls, amaxes by ring position; for checkpoints."""
        return self.memory[:-_AFTER].clone()

    def load_state(self, state: Tensor) -> None:
        """Restore :meth:`state`.

        Raises:
            UsageError: the state was saved with another history length.
        """
        if state.shape != (_BEFORE + self.cast.history,):
            raise UsageError(
                f"expected the state of a history of {self.cast.history} amaxes, got float32{list(state.shape)};"
                f" load it under Cast(history={state.numel() - 2})"
            )
        self.memory[:-_AFTER].copy_(state)
        self._forget_recent()

    def _forget_recent(self) -> None:
        self.memory[1 - _AFTER :].zero_()


class AmaxHistory(ReferenceAmaxHistory):
    """``ReferenceAmaxHistory``, on a GPU by one kernel a call and to the same last bit."""

    def next_scale_inv(self, amax: Tensor, use: Use = "train") -> Tensor:
        """Return the FP32 ``[]`` scale_inv for this call; no synchronization. See :class:`ReferenceAmaxHistory`."""
        if not self.cast.is_plain or not takes_kernels(amax) or self.memory.device != amax.device:
            return super().next_scale_inv(amax, use)
        with on_device(amax):
            return gpu().next_scale_inv(self.cast, amax, self.memory, use, MAX_RECENT)


def _counted(number: Tensor, length: int) -> Tensor:
    """Return a number of calls after one more, modulo ``length`` (plus one ``length``) once the ring is full."""
    after = number + 1
    return torch.where(after < 2 * length, after, float(length))

"""The amax history of delayed scaling, on the tensor's device: a ring of amaxes and the scale that they give."""

from __future__ import annotations

from collections import deque
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


class ReferenceAmaxHistory:
    """Delayed scaling as Transformer Engine does it: the scale of a call comes from the amaxes of earlier calls.

    With an empty history the tensor's own amax is used once (Transformer Engine starts from scale 1, which underflows).
    Where the history gives 0 or a nonfinite amax the old scale stays.

    Args:
        cast: a delayed cast; its ``history``, ``algo`` and ``margin`` hold.
        device: where the ring lives.
    """

    def __init__(self, cast: Cast, device: torch.device) -> None:
        self.cast = cast
        self.num_calls = 0
        self._amaxes = torch.zeros(cast.history, dtype=torch.float32, device=device)
        self._scale_inv = torch.ones((), dtype=torch.float32, device=device)
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=MAX_RECENT)

    def next_scale_inv(self, amax: Tensor, use: Use = "train") -> Tensor:
        """Return the FP32 ``[]`` scale_inv for this call; no synchronization.

        Args:
            amax: FP32 ``[]``, of this call's tensor.
            use: an evaluation leaves no trace; a recomputation takes the scale of the call with that amax (both as in
                Transformer Engine, where forgetting the latter was #1190).

        Raises:
            UsageError: a CUDA graph is being captured: its replays would write to one place of the ring for ever.
        """
        if use == "recompute" and self._recent:
            return self._scale_inv_of(amax)
        if use != "evaluate" and amax.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"no CUDA graph can hold the cast '{self.cast}': its history advances on the host; use current scaling in"
                " captured steps"
            )
        scale_inv = self._of_earlier(amax, use != "evaluate")
        if use != "evaluate":
            self._scale_inv = scale_inv
            self._recent.append((amax, scale_inv))
            self.num_calls += 1
        return scale_inv

    def _of_earlier(self, amax: Tensor, put: bool) -> Tensor:
        """Return the scale_inv that the ring gives, and ``put`` the call's amax into it."""
        if self.num_calls == 0:
            known = amax
        elif self.cast.algo == "most_recent":
            known = self._amaxes[(self.num_calls - 1) % self.cast.history]
        else:
            known = self._amaxes.amax()
        usable = (known > 0) & known.isfinite()
        scale_inv = torch.where(usable, scale_of(known, self.cast)[1], self._scale_inv)
        if put:
            self._amaxes[self.num_calls % self.cast.history] = amax
        return scale_inv

    def _scale_inv_of(self, amax: Tensor) -> Tensor:
        """Return the scale_inv of the last call with that amax, which recomputation meets again; else the last one."""
        amaxes, scales = (torch.stack(list(values)) for values in zip(*self._recent, strict=True))
        place = torch.where(amaxes == amax, torch.arange(1, len(amaxes) + 1, dtype=torch.int64, device=amax.device), 0)
        place[-1] += (place.amax() == 0).long()
        return scales.gather(0, place.argmax(0, keepdim=True)).reshape(())

    def fill(self, amax: Tensor) -> None:
        """Overwrite the whole ring with one amax, as if every earlier call had had it."""
        self._amaxes.fill_(amax)
        self._recent.clear()
        self.num_calls = max(self.num_calls, 1)

    def state(self) -> Tensor:
        """Return FP32 ``[2 + history]``: scale_inv, number of calls, amaxes by ring position; for checkpoints.

        Once the ring is full the number is stored modulo its length (plus one length), which FP32 holds exactly.
        """
        length = self.cast.history
        calls = self.num_calls if self.num_calls < length else length + self.num_calls % length
        head = torch.stack([self._scale_inv, self._scale_inv.new_full((), calls)])
        return torch.cat([head, self._amaxes])

    def load_state(self, state: Tensor) -> None:
        """Restore :meth:`state`.

        Raises:
            UsageError: the state was saved with another history length.
        """
        if state.shape != (2 + self.cast.history,):
            raise UsageError(
                f"expected the state of a history of {self.cast.history} amaxes, got float32{list(state.shape)};"
                f" load it under Cast(history={state.numel() - 2})"
            )
        state = state.to(self._amaxes)
        self._scale_inv = state[0].clone()
        self._recent.clear()
        self.num_calls = int(state[1])
        self._amaxes.copy_(state[2:])


class AmaxHistory(ReferenceAmaxHistory):
    """``ReferenceAmaxHistory``, on a GPU by one kernel a call and to the same last bit."""

    def _of_earlier(self, amax: Tensor, put: bool) -> Tensor:
        if not self.cast.is_plain or not takes_kernels(amax) or self._amaxes.device != amax.device:
            return super()._of_earlier(amax, put)
        with on_device(amax):
            return gpu().next_scale_inv(self.cast, amax, self._amaxes, self._scale_inv, self.num_calls, put=put)

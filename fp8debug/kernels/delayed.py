"""Delayed scaling: the amax history, on a GPU by one kernel a call."""

from __future__ import annotations

from torch import Tensor

from fp8debug.kernels import history
from fp8debug.kernels.dispatch import on_device, takes_kernels, twin


class AmaxHistory(history.AmaxHistory):
    """``history.AmaxHistory``, to the same last bit."""

    def _of_earlier(self, amax: Tensor, put: bool) -> Tensor:
        if not takes_kernels(amax) or self._amaxes.device != amax.device:
            return super()._of_earlier(amax, put)
        with on_device(amax):
            found: Tensor = twin("triton_history").next_scale_inv(
                self.cast, amax, self._amaxes, self._scale_inv, self.num_calls, put=put
            )
            return found

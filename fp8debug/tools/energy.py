"""The energy that a GPU's board has used, by the driver's own library; no package is needed for it."""

from __future__ import annotations

import ctypes

import torch

_LIBRARY = "libnvidia-ml.so.1"


class EnergyMeter:
    """A counter of millijoules since the driver was loaded.

    Args:
        library: NVML, initialized.
        handle: the GPU.
    """

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def open(cls, index: int) -> EnergyMeter | None:
        """Return the meter of a GPU by torch's number for it; None where the driver has none."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
        found = library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0
        meter = cls(library, handle)
        return meter if found and meter._read() is not None else None

    def _read(self) -> int | None:
        value = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value))
        return None if failed else value.value

    def millijoules(self) -> int:
        """Return the counter."""
        return self._read() or 0

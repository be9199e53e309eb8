"""The Triton backend has all that the rest of the package may ask of one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels.backend import Backend, gpu
from fp8debug.kernels.gpu import backend


def test_it_has_every_member_of_the_interface_and_no_other() -> None:
    assert gpu() is backend
    assert sorted(backend.__all__) == sorted(name for name in vars(Backend) if not name.startswith("_"))
    assert [name for name in backend.__all__ if not hasattr(backend, name)] == []

"""FP8 matrix products of this torch on a CPU: skip marks for the tests of programs that do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


def _has_scaled_mm() -> bool:
    codes, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16)
    except (NotImplementedError, RuntimeError):
        return False
    return True


_IS_THERE, _REASON = _has_scaled_mm(), f"torch {torch.__version__} has no _scaled_mm on a CPU"
NEEDS_SCALED_MM = pytest.mark.skipif(not _IS_THERE, reason=_REASON)


@contextmanager
def skipped_without_scaled_mm() -> Iterator[None]:
    """Skip the test where one of many programs that it runs multiplies so, and torch does not (2.6)."""
    try:
        yield
    except NotImplementedError as error:
        if _IS_THERE or "_scaled_mm" not in str(error):
            raise
        pytest.skip(_REASON)

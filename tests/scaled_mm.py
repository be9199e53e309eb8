"""Whether this torch multiplies FP8 matrices on a CPU, for the tests of programs that do."""

from __future__ import annotations

import pytest
import torch


def _has_scaled_mm() -> bool:
    codes, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16)
    except (NotImplementedError, RuntimeError):
        return False
    return True


NEEDS_SCALED_MM = pytest.mark.skipif(not _has_scaled_mm(), reason=f"torch {torch.__version__} has no _scaled_mm on a CPU")

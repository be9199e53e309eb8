"""Where tests can run the kernels: on a GPU, or on the CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from fp8debug.kernels.triton_common import INTERPRETED

#: Of a test that runs kernels.
NEEDS_TWINS = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="no GPU, and Triton was imported to compile"
)

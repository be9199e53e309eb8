"""Without a GPU the kernels run in Triton's interpreter, which asks for that when a kernel is decorated."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

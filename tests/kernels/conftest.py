"""Without a GPU the kernels run in Triton's interpreter, which asks for that when a kernel is decorated."""

from __future__ import annotations

import os

import torch

from fp8debug.kernels.backend import why_no_kernels

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Modules of kernels do not import where Triton is older than what they need.
collect_ignore_glob = [] if why_no_kernels() is None else ["gpu/*"]

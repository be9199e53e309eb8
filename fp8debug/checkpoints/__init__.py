"""Checkpoints of quantized weights, read without torch: layouts, facts, and rules that judge them."""

from fp8debug.checkpoints.check import check_checkpoint
from fp8debug.checkpoints.files import open_checkpoint
from fp8debug.checkpoints.layouts import LAYOUTS, Layout, Weight
from fp8debug.checkpoints.report import CheckReport
from fp8debug.checkpoints.rules import CHECKS, FileRule, TensorFinding

__all__ = [
    "CHECKS",
    "LAYOUTS",
    "CheckReport",
    "FileRule",
    "Layout",
    "TensorFinding",
    "Weight",
    "check_checkpoint",
    "open_checkpoint",
]

"""Rules over checkpoints: importing the package registers them, every file ``f2NN_*`` one."""

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.registry import register_all

register_all(__name__, __path__, r"f\d+_")

__all__ = ["CHECKS", "FileRule", "Judged", "TensorFinding"]

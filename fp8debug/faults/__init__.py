"""Every failure mode on demand: importing the package registers them, each file beside ``base`` some; ``inject`` plants one."""

from fp8debug.faults.base import FAULTS, Fault, Injection, inject, list_faults
from fp8debug.registry import register_all

register_all(__name__, __path__)

__all__ = ["FAULTS", "Fault", "Injection", "inject", "list_faults"]

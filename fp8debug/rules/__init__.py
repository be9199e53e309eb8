"""Rules over a recorded run: importing the package registers them, every file ``fNNN_*`` one; ``triage()`` asks them all."""

from fp8debug.registry import register_all
from fp8debug.rules.base import RULES, SECTIONS, Finding, Rule, Severity
from fp8debug.rules.engine.findings import Findings
from fp8debug.rules.engine.triage import triage

register_all(__name__, __path__, r"f\d+_")

__all__ = ["RULES", "SECTIONS", "Finding", "Findings", "Rule", "Severity", "triage"]

"""Rules over a recorded run, one file each: importing the package registers them; ``triage()`` asks them all."""

from fp8debug.rules import (
    f101_stale_scale,
    f102_stale_history,
    f103_zero_tile,
    f104_scale_rounded_down,
    f105_outlier_underflow,
    f110_coverage_gap,
    f111_fp8_not_on,
    f113_wrong_scale,
    f120_wrong_format,
    f125_loss_spike,
)
from fp8debug.rules.base import RULES, SECTIONS, Finding, Rule, Severity
from fp8debug.rules.diagnosis import triage
from fp8debug.rules.findings import Findings

__all__ = [
    "RULES",
    "SECTIONS",
    "Finding",
    "Findings",
    "Rule",
    "Severity",
    "f101_stale_scale",
    "f102_stale_history",
    "f103_zero_tile",
    "f104_scale_rounded_down",
    "f105_outlier_underflow",
    "f110_coverage_gap",
    "f111_fp8_not_on",
    "f113_wrong_scale",
    "f120_wrong_format",
    "f125_loss_spike",
    "triage",
]

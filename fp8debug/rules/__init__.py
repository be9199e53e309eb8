"""Rules over a recorded run: importing the package registers them, every file ``fNNN_*`` one; ``triage()`` asks them all."""

from importlib import import_module
from pkgutil import iter_modules

from fp8debug.rules.base import RULES, SECTIONS, Finding, Rule, Severity
from fp8debug.rules.engine.findings import Findings
from fp8debug.rules.engine.triage import triage

for _file in sorted(found.name for found in iter_modules(__path__) if found.name.startswith("f1")):
    import_module(f"{__name__}.{_file}")

__all__ = ["RULES", "SECTIONS", "Finding", "Findings", "Rule", "Severity", "triage"]

"""Findings as SARIF 2.1.0, the exchange format of static analysis results.

A finding is about a module of a model, not about a line of a file: its place is a logical location (kind ``module``, the
fully qualified name), and its file is the run's ``manifest.json``, which lists the modules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from fp8debug import __version__
from fp8debug.rules import RULES, Finding, Findings, Severity
from fp8debug.rules.base import Documented
from fp8debug.rules.reading.lost import Lost

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
#: The base against which the run's files are named; SARIF lets a reader say where it lies.
BASE = "RUN"


def to_sarif(findings: Findings) -> str:
    """Return the log file of one run."""
    asked = [rule for rule in RULES if rule.code in findings.thresholds or rule.code in {f.code for f in findings}]
    places = {rule.code: place for place, rule in enumerate(asked)}
    run = {
        "tool": {"driver": {"name": "fp8debug", "version": __version__, "rules": [describe(rule) for rule in asked]}},
        "automationDetails": {"id": f"fp8debug/{findings.run}"},
        "originalUriBaseIds": {BASE: {"description": {"text": f"The folder of the run {findings.run}."}}},
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    *({"level": "warning", "message": {"text": str(Lost(**entry))}} for entry in findings.lost),
                    *(
                        {"level": "note", "message": {"text": f"skipped {code}: {reason}"}, "associatedRule": {"id": code}}
                        for code, reason in findings.skipped
                    ),
                ],
            }
        ],
        "results": [_result(finding, places[finding.code]) for finding in findings],
        "columnKind": "unicodeCodePoints",
        "properties": {
            "verdict": findings.verdict,
            "steps": list(findings.steps),
            "classification": dict(findings.classification or {}),
            "thresholds": findings.to_dict()["thresholds"],
        },
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def describe(rule: Documented) -> dict[str, Any]:
    """Return a rule as SARIF lists it."""
    manual = rule.manual()
    markdown = "\n\n".join(f"**{heading}.** {text}" for heading, text in manual.items())
    return {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": _flat(manual["What it detects"])},
        "help": {"text": _flat(f"Cure: {manual['Cure']}"), "markdown": markdown},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"name": rule.name},
    }


def _result(finding: Finding, place: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": place,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.message}. Cure: {finding.cure}."},
        "locations": [_location([finding.module] if finding.module else [])],
        "partialFingerprints": {"fp8debugSite/v1": _fingerprint(finding)},
        "properties": finding.to_dict(),
    }
    others = [*finding.also, *finding.victims]
    if others:
        words = ["same cause"] * len(finding.also) + ["victim"] * len(finding.victims)
        result["relatedLocations"] = [
            {"id": number, "message": {"text": word}, **_location([name])}
            for number, (name, word) in enumerate(zip(others, words, strict=True))
        ]
    return result


def _location(modules: Sequence[str]) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": "manifest.json", "uriBaseId": BASE}}}
    if modules:
        location["logicalLocations"] = [
            {"name": name.rpartition(".")[2], "fullyQualifiedName": name, "kind": "module"} for name in modules
        ]
    return location


def _fingerprint(finding: Finding) -> str:
    """Return what stays equal from run to run: the fault and its site, not the steps or numbers."""
    site = (finding.code, finding.name, finding.module, finding.gemm, finding.tensor)
    return hashlib.sha256(json.dumps(site).encode()).hexdigest()


def _flat(text: str) -> str:
    return " ".join(text.split())

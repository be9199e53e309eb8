"""The comparison of two paths that the parity page shows: the report in the run's folder, or this run beside another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8debug.errors import Fp8DebugError, RunError
from fp8debug.store.file_checks import read_json

#: File in a run's folder: ``fp8debug parity TRAIN ROLLOUT --format json -o RUN/parity.json``.
FILE = "parity.json"
_NUMBERS = ("input_nmse", "output_nmse", "weight_nmse", "error_train", "error_rollout", "routing_flip_rate")


def has_report(run: Path) -> bool:
    """Return whether a run's folder holds a report."""
    return (run / FILE).is_file()


def read_report(run: Path) -> dict[str, Any]:
    """Return the report in a run's folder: what of it has the types of the format.

    Raises:
        RunError: it is no report.
    """
    try:
        told = read_json(run / FILE, run)
    except (OSError, ValueError, Fp8DebugError) as error:
        raise RunError(f"{FILE} cannot be read: {(str(error).splitlines() or [''])[0]}") from None
    if not isinstance(told, Mapping) or not isinstance(told.get("modules"), list) or not isinstance(told.get("findings"), list):
        raise RunError(f"{FILE} is no report of fp8debug parity --format json")
    unmatched = told.get("unmatched")
    return {
        "train": str(told.get("train")),
        "rollout": str(told.get("rollout")),
        "verdict": str(told.get("verdict")),
        "metrics": {str(k): _number(v) for k, v in told.get("metrics", {}).items()}
        if isinstance(told.get("metrics"), dict)
        else {},
        "findings": [_finding(one) for one in told["findings"] if isinstance(one, Mapping)],
        "modules": [_module(one) for one in told["modules"] if isinstance(one, Mapping)],
        "unmatched": [
            {"module": str(one.get("module") or ""), "path": str(one.get("path") or "")}
            for one in (unmatched if isinstance(unmatched, list) else ())
            if isinstance(one, Mapping)
        ],
        "problems": [str(one) for one in problems] if isinstance(problems := told.get("problems"), list) else [],
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _finding(one: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: str(one.get(key) or "") for key in ("code", "severity", "module", "message", "cure")}
    found["severity"] = found["severity"] if found["severity"] in ("error", "warning", "info") else "info"
    return found


def _module(one: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: str(one.get(key) or "") for key in ("module", "rollout_module", "kind")}
    return found | {key: _number(one.get(key)) for key in _NUMBERS}

"""Files of ``fp8debug verify`` and ``bisect`` in a run's folder; a missing file is None, a damaged one says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8debug.errors import RunError

SCHEMA = 1
#: A document of some arms and their losses; more is none of ours.
MAX_BYTES = 64 << 20


def read_trial(folder: Path, name: str) -> dict[str, Any] | None:
    """Return ``verify.json`` or ``bisect.json``, None where nobody ran the command.

    Raises:
        RunError: the file is damaged or of a newer version.
    """
    path = folder / name
    command = f"fp8debug {path.stem}"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too large")
        found = json.loads(path.read_text(encoding="utf-8"))
        newer = found["schema"] > SCHEMA
        statements = [str(line) for line in found["statements"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({type(error).__name__}); run {command} again") from None
    if newer:
        raise RunError(f"{path} has version {found['schema']}, newer than {SCHEMA}; install a newer fp8debug")
    return {**found, "statements": statements}

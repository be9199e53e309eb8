"""Known vulnerabilities of the pinned development set, by pip-audit: ``python scripts/audit.py PIP_AUDIT``; see ``make audit``.

A package that could not be looked up is no package without vulnerabilities: it fails the audit. pip-audit alone says "no known
vulnerabilities found" where its index holds no such data for any of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PINS = Path(__file__).parents[1] / "constraints.txt"


def judge(document: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code and the lines for a report of pip-audit: 0 a clean one, 1 one with findings, 2 an incomplete one."""
    packages = document["dependencies"]
    unseen = [package for package in packages if "vulns" not in package]
    lines = [
        f"{package['name']} {package['version']}: {found['id']}, cured in {', '.join(found['fix_versions']) or 'no version yet'}"
        for package in packages
        for found in package.get("vulns", ())
    ]
    if not packages:
        return 2, ["not audited: pip-audit's report names no package"]
    if unseen:
        number = "none" if len(unseen) == len(packages) else f"{len(packages) - len(unseen)}"
        first = unseen[0].get("skip_reason", unseen[0]["name"])
        where = "; the index that pip asks may serve no vulnerability data"
        lines.append(f"not audited: {number} of {len(packages)} packages could be looked up{where} ({first})")
        return 2, lines
    return (1 if lines else 0), lines or [f"none of {len(packages)} packages has a known vulnerability"]


def main() -> int:
    """Ask pip-audit, print what it found, and return the exit code."""
    command = [sys.argv[1], "-r", str(PINS), "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        code, lines = judge(json.loads(done.stdout))
    except ValueError:  # it ended before it had a report: no network
        said = [line for line in done.stderr.splitlines() if line.strip()]
        code, lines = 2, [f"not audited: {said[-1][:300] if said else f'pip-audit ended with {done.returncode}'}"]
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Print the oldest versions that pyproject.toml allows, as requirements for pip, for ``make test-floor``.

With ``--tools`` only what the tests need beside the package, for ``make test-newest``: pip tries old versions of all developer's
packages for half an hour where two of them exclude each other's newest.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: What the selected tests need beside the package, at any version.
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ml-dtypes")
ROOT = Path(__file__).parents[1]


def floors(requirements: list[str]) -> list[str]:
    """Return requirements without a marker with their lower bound pinned: ``numpy>=1.26`` is ``numpy==1.26.*``."""
    pinned = []
    for requirement in requirements:
        found = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
        if found is not None:
            name, version = found.groups()
            pinned.append(f"{name}=={version}" + (".*" if version.count(".") < 2 else ""))
    return pinned


if __name__ == "__main__":
    if sys.argv[1:] == ["--tools"]:
        print(*TOOLS)
        sys.exit()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(*floors([*project["dependencies"], *project["optional-dependencies"]["dumps"]]), *TOOLS)

"""A kernel's machine code, as the programs of Triton's wheel show it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton


def tool(name: str, *options: str, cubin: bytes) -> str:
    """Return what a program of Triton's wheel says of machine code."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], check=True, capture_output=True, text=True).stdout


def resources(cubin: bytes) -> dict[str, Any]:
    """Return registers of a thread, bytes of its stack, where spilled ones lie, of shared memory, and of each loop that reads.

    ``saved``: how often a register for diverging threads is moved.
    """
    said = tool("cuobjdump", "--dump-resource-usage", cubin=cubin).split("Function", 1)[1].split()
    usage = dict(part.split(":") for part in said if part.count(":") == 1 and part[-1].isdigit())
    found = {"registers": int(usage["REG"]), "stack": int(usage["STACK"]), "static": int(usage["SHARED"])}
    text = tool("nvdisasm", "-c", cubin=cubin)
    return {**found, "saved": text.count("BMOV"), "loops": loops(text)}


def loops(text: str) -> list[dict[str, int]]:
    """Return of each loop that reads device memory, in order: its instructions, and those that touch spilled registers."""
    labels: dict[str, int] = {}
    code: list[str] = []
    found = []
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line.strip()):
            labels[label[1]] = len(code)
        elif part := re.search(r"/\*[0-9a-f]{4,}\*/\s+(\S.*)", line):
            code.append(part[1])
            start = labels.get((re.findall(r"BRA.*`\((\.L\w+)\)", part[1]) or [""])[0])
            if start is not None and any("LDG" in one for one in code[start:]):
                found.append({"length": len(code) - start, "local": sum("LDL" in one or "STL" in one for one in code[start:])})
    return found

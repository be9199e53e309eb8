"""Skips what the machine cannot run, each time with its reason, and points Playwright at an installed Chromium."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interpreter import keep_types_once, patch_language_once

# Before torch is imported, and for child processes: on small tensors, two threads that wait for each other on a busy
# machine take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tables to a pipe have lines without end, unless a shell tells the width of its terminal.
os.environ.pop("COLUMNS", None)
# Before triton is imported, which torchao does: without a GPU the kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

#: Where tests in a browser are.
PAGES = Path(__file__).parent / "dashboard"
#: Where times are asserted.
TIMED = Path(__file__).parent / "tools" / "test_speed.py"
#: The browser of the system; CHROMIUM names another one.
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Let no test find what an earlier one compiled: a program has one process."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        utils.counters.clear()


def pytest_collection_finish() -> None:
    patch_language_once()
    keep_types_once()
    gc.collect()
    # What was imported is half a million objects, which each collection of a test would look through, again and again.
    gc.freeze()
    gc.set_threshold(700, 10, 50)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what stays frozen is not freed at exit, which nanobind's modules report as leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing: dict[str, str] = {}
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        missing["gpu"] = "no CUDA device"
    if any(item.get_closest_marker("twins") for item in items) and not _has_twins():
        missing["twins"] = "no CUDA device, and Triton was imported to compile"
    if CHROMIUM is None:
        missing["browser"] = "no Chromium found; install chromium or set CHROMIUM"
    for item in items:
        for marker, places in (("browser", (PAGES,)), ("alone", (PAGES, TIMED))):
            if item.get_closest_marker(marker) and not {*places} & {item.path, *item.path.parents}:
                raise pytest.UsageError(
                    f"{item.nodeid}: make test looks for tests marked {marker} in {', '.join(map(str, places))}"
                )
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_twins() -> bool:
    from fp8debug.kernels.gpu.device import INTERPRETED

    return INTERPRETED or _has_gpu()


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    """Start the system's Chromium; without a sandbox where the tests run as root."""
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    return {**browser_type_launch_args, "executable_path": CHROMIUM, "args": [*sandbox, "--disable-gpu"]}

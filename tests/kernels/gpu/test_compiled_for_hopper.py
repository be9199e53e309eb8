"""Every kernel becomes machine code of Hopper by its launcher's own choices, on any machine; ``hopper.py --all`` has the rest.

What differs between releases of Triton, and was compared by hand: 3.6, of torch 2.11, and 3.7, of torch 2.13, make the same
launches out of the same calls, and both compile all of them; 3.7 hands ``--regAllocOptLevel=2`` to ptxas, so that registers and
spills differ a little; the launcher in C, which ``launcher`` calls past its wrapper, takes arguments of another order in 3.7.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from fp8debug.kernels.gpu import launcher as triton_run
from fp8debug.kernels.gpu import ptx_exchange as exchange

ROOT = Path(__file__).resolve().parents[3]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NEEDS_TOOLS = pytest.mark.skipif(
    not all((TOOLS / name).exists() for name in ("ptxas", "cuobjdump", "nvdisasm")), reason="this wheel of Triton has no ptxas"
)
#: Of a multiprocessor and of a program, on Hopper.
REGISTERS, SHARED, TOGETHER = 65536, 227 << 10, 48 << 10
#: Whose safe pass, which runs rarely, or whose end of a block has more than there are registers; and of the fast kernel's loop,
#: how often, at most.
SPILLING, RELOADS = ("fast_kernel", "two_way_kernel", "tile_kernel", "foreign_cast_kernel", "low_bit_kernel"), 2
#: Kernels that are started more than once.
AGAIN = ("fast_kernel", "two_way_kernel", "foreign_cast_kernel", "sample_kernel", "join_kernel", "state_kernel", "number_kernel")


@cache
def kernels(*options: str) -> list[dict[str, Any]]:
    """Return the report of ``hopper.py`` on each kernel; in a process of its own, where nothing is interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/kernels/hopper.py"), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stderr[-3000:], [kernel for kernel in found if "error" in kernel])
    return found


def written() -> set[str]:
    """The kernels of the package, by its text."""
    files = (ROOT / "fp8debug/kernels/gpu").rglob("*.py")
    lines = (line for file in files for line in file.read_text().splitlines())
    return {line.removeprefix("def ").split("(")[0] for line in lines if line.startswith("def ") and "_kernel(" in line}


@NEEDS_TOOLS
def test_every_kernel_is_compiled(record_property: Any) -> None:
    found = kernels()
    assert {kernel["kernel"] for kernel in found} == written() and len(written()) > 15
    for kernel in found:
        record_property(kernel["kernel"], {name: kernel[name] for name in ("registers", "stack", "static", "shared")})
        assert kernel["registers"] * 32 * kernel["num_warps"] <= REGISTERS, kernel
        shared = max(kernel["shared"], kernel["asked"])
        assert kernel["static"] + shared <= SHARED, kernel
        # More together needs the driver's leave, which Triton asks for what it shares itself, and ``launcher.share``.
        assert kernel["asked"] or shared > TOGETHER or kernel["static"] + shared <= TOGETHER + 1024, kernel
        assert kernel["asked"] == (exchange.SHARED if kernel["kernel"] == "two_way_kernel" else 0), kernel
        assert kernel["asked"] == 0 or kernel["shared"] <= exchange.TILE_AT, kernel
        assert kernel["saved"] == 0, kernel  # see two_way_kernel
        assert kernel["stack"] == 0 or kernel["kernel"] in SPILLING, kernel
        if kernel["kernel"] == "foreign_cast_kernel":
            assert kernel["loops"][0]["local"] == 0, kernel
        if kernel["kernel"] in ("fast_kernel", "two_way_kernel"):
            assert kernel["loops"][0]["local"] <= RELOADS, kernel
        assert kernel["scratch"] == [0, 0], kernel  # else launcher may not start it directly


@pytest.mark.long
@NEEDS_TOOLS
def test_gpus_before_hopper_are_asked_for_nothing_that_they_lack() -> None:
    """Such as two halves of a word at once: what an Ada starts is compiled for it, the general kernels in place of fast ones."""
    found = kernels("--ada")
    names = {kernel["kernel"] for kernel in found}
    assert names >= {"tile_kernel", "foreign_cast_kernel", "gemm_kernel", "sample_kernel", "join_kernel"}
    assert not names & {"fast_kernel", "two_way_kernel", "count_kernel"}


@pytest.mark.parametrize("release", ["3.6.0", "4.0.0"])
def test_launches_after_the_first_fit_what_was_compiled(release: str) -> None:
    """As 3.6 is started, and through Triton's public way; the test above is of the release that is installed."""
    found = kernels("--list", "--release", release)
    known = release.rpartition(".")[0] in triton_run._KNOWN
    assert {kernel["kernel"] for kernel in found} == written() - (set() if known else {"two_way_kernel"})
    assert all(kernel["launches"] > 1 for kernel in found if kernel["kernel"] in AGAIN)


def test_the_launcher_of_this_release_takes_what_it_is_given() -> None:
    launcher = import_module("triton.backends.nvidia.driver").CudaLauncher
    release = triton.__version__.rpartition(".")[0]
    names = list(inspect.signature(launcher.__call__).parameters)
    first = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    metadata = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
    if release in triton_run._KNOWN:
        assert names in ([*first, "args"], [*first, *metadata, "args"])
    text = "".join(inspect.getsource(launcher.__call__).split())
    own = "self.launch_cooperative_grid,self.launch_pdl,global_scratch,profile_scratch,*args)"
    assert (f"self.launch(gridX,gridY,gridZ,stream,function,{own}" in text) == (release in triton_run._DIRECT)

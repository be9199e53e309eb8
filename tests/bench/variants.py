"""How does triage do on variations of known faults? ``python tests/bench/variants.py [--set 2] [--only GLOB] [--verbose]``

Each of ``tests/bench/relatives`` is a known fault in another layer, GEMM, granularity, format, optimizer or step. One line for
each says how the tool did when it first met it, how it does now, and the seconds of CPU time. It asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import fp8debug
from tests.bench.relatives import VARIANTS, Variant
from tests.bench.relatives.stack import NOW
from tests.bench.situations import outcome, print_counts, print_diagnosis
from tests.bench.turns import add_option, take_turns


def judged(one: Variant, *, verbose: bool = False) -> str:
    """Record a variation and return how triage did."""
    NOW.update(step=0, micro=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.redirect_stderr(io.StringIO()):
            one.record(folder)
        if one.judge is not None:
            return one.judge(folder)
        found = fp8debug.triage(folder / "sick")
        clean = fp8debug.triage(folder / "clean") if (folder / "clean").exists() else []
    assert found.classification is not None
    if verbose:
        print_diagnosis(found, found.classification, clean)
    return outcome(found, found.classification, clean, one.expected)


def main() -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="glob over KIND_NAME, such as 05_*")
    parser.add_argument("--set", type=int, default=0, help="variations that the tool met together: 1 to 4; 0 for all")
    parser.add_argument("--verbose", action="store_true", help="print what triage said")
    add_option(parser)
    options = parser.parse_args()
    take_turns(options.turns)
    torch.set_num_threads(1)
    results = []
    for one in VARIANTS:
        if fnmatch(f"{one.kind}_{one.name}", options.only) and options.set in (0, one.met):
            begun = time.process_time()
            now = judged(one, verbose=options.verbose)
            results.append((one.first, now))
            print(f"{one.kind:6} {one.name:40} first {one.first:12} now {now:12} {time.process_time() - begun:.1f} s", flush=True)
    print_counts(results)


if __name__ == "__main__":
    main()

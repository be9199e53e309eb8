"""How does triage do on public bug reports? ``python tests/bench/reality.py [--only GLOB] [--round N] [--turns N]``

Rebuilds the situations of ``tests/bench/situations``, each from a public report. One line for each says how the tool did when it
first met it, and how it does now. It asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.bench.situations import SITUATIONS, Situation, outcome, print_counts, print_diagnosis
from tests.bench.situations.stack import diagnosis
from tests.bench.turns import add_option, take_turns


def judged(one: Situation, *, verbose: bool = False) -> str:
    """Rebuild a situation and return how triage did."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            one.record(Path(folder))
        found = diagnosis(Path(folder) / "sick")
        clean = diagnosis(Path(folder) / "clean") if (Path(folder) / "clean").exists() else []
        assert found.classification is not None
        if verbose:
            print_diagnosis(found, found.classification, clean)
        return outcome(found, found.classification, clean, one.expected)


def table(results: Iterable[tuple[Situation, str]]) -> str:
    """Return the table of docs/triage.md."""
    lines = ["| report | situation | round | first | now |", "| --- | --- | ---: | --- | --- |"]
    for one, now in results:
        lines.append(f"| {one.reference} | {one.name.replace('_', ' ')} | {one.round} | {one.first} | {now} |")
    return "\n".join(lines)


def main() -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="glob over the situations' names")
    parser.add_argument("--round", type=int, help="only the reports of that round, 1 the oldest")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/triage.md")
    parser.add_argument("--verbose", action="store_true", help="print what triage said")
    add_option(parser)
    options = parser.parse_args()
    take_turns(options.turns)
    torch.set_num_threads(1)
    results = []
    for one in SITUATIONS:
        if fnmatch(one.name, options.only) and options.round in (None, one.round):
            now = judged(one, verbose=options.verbose)
            results.append((one, now))
            if not options.markdown:
                print(f"{one.name:26} {one.reference:42} first {one.first:12} now {now}", flush=True)
    if options.markdown:
        print(table(results))
    print_counts([(one.first, now) for one, now in results])


if __name__ == "__main__":
    main()

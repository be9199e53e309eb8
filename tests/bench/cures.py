"""Do the cures help? ``python tests/bench/cures.py [--only GLOB...] [--markdown]`` applies each rule's cure to its fault.

For each trial of ``tests/bench/remedies``: the fault planted in a small model that trains, the finding's cure applied to it,
and the same training without the fault (for a situation that stays, such as an outlier: the same in BF16). One line for each
has the loss and the noise of the finding's site in the three runs, and whether both are back and no finding is left. Cures
that no program can apply are listed with the reason. It asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.bench.remedies.bench import Outcome, Trial, tried
from tests.bench.remedies.trials import BY_HAND, TRIALS


def _number(value: float | None, width: int = 0, digits: int = 1) -> str:
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def line(trial: Trial, outcome: Outcome) -> str:
    """Return a trial in one line."""
    losses = "  ".join(f"{loss:8.4f}" for loss in outcome.losses)
    noise = " ".join(_number(db, 6) for db in outcome.sqnr_db)
    verdict = "helps" if outcome.helps else "not found" if not outcome.found else "does not help"
    return f"{trial.code} {trial.name:45} {losses}  {noise}  {verdict} {'; '.join(outcome.left)}".rstrip()


def row(trial: Trial, outcome: Outcome) -> str:
    """Return a trial as a row of the documentation's table."""
    losses = " / ".join(_number(loss, digits=3) for loss in outcome.losses)
    noise = " / ".join(_number(db) for db in outcome.sqnr_db)
    fault = trial.fault or trial.made
    return f"| {trial.code} | {fault} | {trial.cure} | {losses} | {noise} | {'yes' if outcome.helps else 'no'} |"


def main() -> None:
    """Print a line for each trial, then what is done by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=["*"], nargs="+", metavar="GLOB", help="globs over FAULT/CURE")
    parser.add_argument("--markdown", action="store_true", help="print the rows of the table in docs/triage.md")
    parser.add_argument("--verbose", action="store_true", help="print the cure that the finding proposes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    if not options.markdown:
        print(f"{'code fault/cure':50} loss without, with, cured          SQNR, dB: the same")
    for trial in TRIALS:
        if not any(fnmatch(trial.name, glob) for glob in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            outcome = tried(trial, Path(folder))
        outcomes.append(outcome)
        print(row(trial, outcome) if options.markdown else line(trial, outcome), flush=True)
        if options.verbose:
            print(f"     proposed: {outcome.proposed}")
    for code, reason in BY_HAND.items():
        print(f"| {code} | | by hand: {reason} | | | |" if options.markdown else f"{code} by hand: {reason}")
    print(f"{sum(o.helps for o in outcomes)} of {len(outcomes)} cures help", file=sys.stderr)


if __name__ == "__main__":
    main()

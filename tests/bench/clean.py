"""Does triage stay silent on correct programs? ``python tests/bench/clean.py [--low-bit] [--only GLOB] [--out FILE]``

Trains 120 clean runs, twelve architectures in ten FP8 stacks, six of them for 2,000 steps (``tests/bench/clean_programs``), and
prints one line for each with its findings and with the largest update of a weight over the weight's size, from which F127's
threshold comes. ``--out`` keeps the results as JSON lines: a second call runs what is missing. It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import fp8debug
from fp8debug.rules import RULES
from fp8debug.rules.base import Severity
from fp8debug.rules.reading.optimizer_steps import update_ratio
from tests.bench.clean_programs.training import described, keys, losses_of, low_bit_keys
from tests.bench.turns import add_option, take_turns

#: Class and cause of a run in which nothing happened.
QUIET = ("healthy", "findings", "not-judged")


def trained(key: str, path: Path, *, is_long: bool) -> list[float]:
    """Train one run unless the folder has it; return its losses."""
    if not (path / "done").exists():
        losses = list(losses_of(key, path, is_long=is_long))
        (path / "done").write_text(json.dumps(losses), encoding="utf-8")
    found: list[float] = json.loads((path / "done").read_text(encoding="utf-8"))
    return found


def judged(key: str, folder: Path, *, is_long: bool) -> dict[str, Any]:
    """Train and judge one run."""
    started = time.perf_counter()
    path = folder / key.replace("/", "-")
    losses = trained(key, path, is_long=is_long)
    run = fp8debug.Run(path)
    found = fp8debug.triage(run)
    assert found.classification is not None
    usual, query = RULES.get("F127").thresholds["ordinary_rms"], "SELECT * FROM updates WHERE num_sampled > 0"
    alarms = [f for f in found if f.severity > Severity.INFO]
    return {
        "key": key,
        "steps": len(losses),
        "losses": [losses[0], sum(losses[-10:]) / len(losses[-10:])],
        "class": f"{found.classification['class']}/{found.classification['cause']}",
        "what": found.classification["what"],
        "alarms": [[f.code, f.name, str(f.severity), f.module, f.gemm, f.tensor, list(f.steps), f.message] for f in alarms],
        "information": [f"{f.code} {f.name} {f.module}" for f in found if f.severity is Severity.INFO],
        "update_ratio": max((update_ratio(row, usual) for row in run.sql(query).to_pylist()), default=None),
        "seconds": round(time.perf_counter() - started, 1),
        "training": described(key, is_long=is_long),
    }


def line(result: dict[str, Any]) -> str:
    """Return a run in one line."""
    first, last = result["losses"]
    alarms = " ".join(f"{code}:{severity}:{module}" for code, _, severity, module, *_ in result["alarms"]) or "-"
    ratio = "     -" if result["update_ratio"] is None else f"{result['update_ratio']:6.3f}"
    training = result["training"]
    return (
        f"{result['key']:34} {result['steps']:5} {first:6.3f} -> {last:6.3f} {training['optimizer']:9} {training['precision']:8}"
        f" {ratio} {result['class']:22} {alarms} {','.join(sorted({i[:4] for i in result['information']}))}"
    )


def main() -> None:
    """Print a line for each run, then the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="glob over the keys, ARCHITECTURE/STACK")
    parser.add_argument("--low-bit", action="store_true", help="60 runs in nvfp4, mxfp4, mxfp6, mxfp8 and fnuz instead")
    parser.add_argument("--out", type=Path, help="JSON lines; runs that are in it are not run again")
    parser.add_argument("--runs", type=Path, help="keep the runs there; what is there is judged again, not trained again")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="NUM", help="leave out the first NUM runs of the order, which is fixed"
    )
    parser.add_argument("--short", action="store_true", help="leave out the runs of 2,000 steps")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="SECONDS", help="begin no further run after that")
    parser.add_argument("--verbose", action="store_true", help="print the messages of what was found")
    add_option(parser)
    options = parser.parse_args()
    take_turns(options.turns)
    torch.set_num_threads(1)
    known: dict[str, dict[str, Any]] = {}
    if options.out and options.out.exists():
        known = {r["key"]: r for r in map(json.loads, options.out.read_text(encoding="utf-8").splitlines())}
    chosen = {
        key: is_long for key, is_long in (low_bit_keys() if options.low_bit else keys()).items() if fnmatch(key, options.only)
    }
    started, results = time.perf_counter(), []
    order = sorted(chosen)
    Random(0).shuffle(order)  # so that a part of them says something of the whole
    for key in order[options.skip :]:
        is_long = chosen[key]
        if is_long and options.short:
            continue
        result = known.get(key)
        if result is None:
            if time.perf_counter() - started > options.stop_after:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                result = judged(key, options.runs or Path(scratch), is_long=is_long)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
        results.append(result)
        print(line(result), flush=True)
        for alarm in result["alarms"] if options.verbose else ():
            print(f"    {alarm[0]} {alarm[1]} {alarm[3]} {alarm[4]} {alarm[5]} steps {alarm[6]}: {alarm[7]}")
        if options.verbose and result["class"].partition("/")[2] not in QUIET:
            print(f"    {result['what']}")
    for axis, place in (("architecture", 0), ("stack", 1)):
        runs, wrong = Counter(r["key"].split("/")[place] for r in results), Counter[str]()
        wrong.update(r["key"].split("/")[place] for r in results if r["alarms"])
        print(f"\n{axis:20} runs  false alarms")
        for name, num in runs.items():
            print(f"{name:20} {num:4}  {wrong[name]}")
    ratios = sorted(r["update_ratio"] for r in results if r["update_ratio"] is not None)
    unquiet = sum(r["class"].partition("/")[2] not in QUIET for r in results)
    alarms = sum(bool(r["alarms"]) for r in results)
    print(f"\n{len(results)} runs: {alarms} with a warning or an error, {unquiet} not called fine")
    if ratios:
        print(f"updates over weights: median {ratios[len(ratios) // 2]:.3g}, largest {ratios[-1]:.3g} of {len(ratios)} runs")


if __name__ == "__main__":
    main()

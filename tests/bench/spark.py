"""Triage on Spark against triage on DuckDB, for the fault of every rule: ``python tests/bench/spark.py [--master local[2]]``.

Writes a run with each planted fault, judges it by both engines, and says where a verdict differs in anything; exits with 1 then.
About ten seconds a run on two cores once Spark is warm; ``--codes F10 F125`` takes those that begin so. With ``--far`` the driver
fetches no table, so that every query is Spark's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8debug.rules import triage
from fp8debug.store import spark
from tests.rules import sick_runs, sick_sites, sick_wholeruns
from tests.synthetic import Plan, write

FIRES = {**sick_runs.FIRES, **sick_sites.FIRES, **sick_wholeruns.FIRES}


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Return where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for at, pair in pairs for text in differences(*pair, f"{place}[{at}]")]
    return [] if one == other else [f"{place.lstrip('.')}: {one!r} and {other!r}"]


def main() -> int:
    """Compare, print a line a fault, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--codes", nargs="+", default=[""], help="beginnings of rules' codes")
    parser.add_argument("--far", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    session = spark.start(options.master)
    if options.far:
        spark.MAX_FETCHED = 0
    print(f"Spark {session.version} on {options.master}, started in {time.monotonic() - began:.0f} s, {os.cpu_count()} cores")
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        for code in sorted(code for code in FIRES if code.startswith(tuple(options.codes))):
            path = Path(folder) / code
            write(path, Plan(**FIRES[code]))
            wanted = triage(path).to_dict()
            began = time.monotonic()
            found = triage(spark.SparkRun(path, session)).to_dict()
            wrong = differences(found, wanted)
            num_different += bool(wrong)
            codes = " ".join(finding["code"] for finding in wanted["findings"])
            print(f"{code}: {time.monotonic() - began:5.1f} s, {codes}, {'DIFFERS' if wrong else 'equal'}", flush=True)
            for text in wrong:
                print(f"  {text}", flush=True)
    session.stop()
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())

"""What triage costs as logs grow: ``python tests/bench/scale.py [--rows 1e7 5e7 1e8] [--ranks 1 8] [--repeats 5] [--queries]``.

Writes runs of a 32-layer Llama with three planted faults (scale_logs.py), asks for a verdict and for a plain group-by over the
same files, each in a process of its own, and prints time, CPU time and peak memory of both; it says whether every planted fault
was found, and asserts no times. The group-by is what DuckDB alone does with the columns that triage reads: one row per site, each
slot joined by its own merge rule. ``--spark MASTER`` adds triage by Spark. A run is deleted before the next is written; 100
million rows take 9 GB on disk.

``--queries`` prints instead how one query of a site's rows grows with ranks, steps and modules.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.scale_logs import PLANTED, Size, size_of, write_run

#: One site's history, as a page of the dashboard asks for it.
QUERY = "SELECT step, amax, sqnr_db, underflow_nonzero_rate FROM sites WHERE module = ? AND gemm = 'fprop' AND tensor = 'input'"


def judge(path: Path) -> dict[str, Any]:
    """Return which planted faults triage finds."""
    from fp8debug.rules import triage

    found = triage(path)
    places = {(finding.code, finding.module) for finding in found}
    return {"found": sum((fault.code, fault.module) in places for fault in PLANTED), "findings": len(found)}


def judge_on_spark(path: Path, master: str) -> dict[str, Any]:
    """Return the same by Spark; the time is without the start of its session."""
    from fp8debug.rules import triage
    from fp8debug.store.spark import SparkRun, start

    session = start(master)
    began = time.monotonic()
    found = triage(SparkRun(path, session))
    places = {(finding.code, finding.module) for finding in found}
    seconds = time.monotonic() - began
    session.stop()
    return {"found": sum((fault.code, fault.module) in places for fault in PLANTED), "spark_seconds": seconds}


def group(path: Path) -> dict[str, Any]:
    """Join every slot but the histogram by site, over all steps and ranks."""
    import duckdb

    from fp8debug.store.schema import columns_of

    slots = [column for column in columns_of("stats") if column.merge in ("sum", "max", "min") and "list" not in column.type]
    keys = "module, gemm, tensor, cast_name, reference, actual"
    text = f"SELECT {keys}, {', '.join(f'{slot.merge}({slot.name})' for slot in slots)}"
    parts = f"{path}/rank=*/stats/part-*.parquet"
    rows = duckdb.execute(f"{text} FROM read_parquet(?, hive_partitioning = false) GROUP BY {keys}", [parts]).fetchall()
    return {"sites": len(rows)}


def ask(path: Path) -> dict[str, Any]:
    """Return what one query takes once a run is open."""
    from fp8debug.store.read.run import Run

    run = Run(path)
    module = run.modules[0]["fqn"]
    times = []
    for _ in range(9):
        began = time.monotonic()
        rows = run.sql(QUERY, [module]).num_rows
        times.append(time.monotonic() - began)
    return {"query_seconds": min(times), "answer": rows}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"triage": judge, "group": group, "ask": ask, "spark": judge_on_spark}


def measured(task: str, path: Path, *options: str) -> dict[str, Any]:
    """Do a task in a process of its own; return what it says, its time, CPU time and peak memory."""
    command = [sys.executable, __file__, "--task", task, "--folder", str(path), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak_bytes() -> int:
    """Return the most memory that this process held; ``ru_maxrss`` would count what its parent held when it was started."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise RuntimeError("this Linux does not tell the peak of a process's memory")
    return 1024 * int(found[1])


def do(task: str, path: Path, options: Sequence[str]) -> None:
    """Do a task here and print the figures as JSON."""
    began = time.monotonic()
    result = TASKS[task](path, *options)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "seconds": time.monotonic() - began,
        "cpu_seconds": spent.ru_utime + spent.ru_stime,
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps({**result, **figures}))


def written(folder: Path, size: Size) -> tuple[float, int]:
    """Write a run; return the seconds and the bytes that it took."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    write_run(folder, size)
    return time.monotonic() - began, sum(file.stat().st_size for file in folder.rglob("*.parquet"))


def medians(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure."""
    return {name: statistics.median(figures[name] for figures in found) for name in found[0]}


def print_growth(folder: Path, rows: Sequence[float], ranks: Sequence[int], repeats: int, spark: str | None) -> None:
    """Print one line a run."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| rows | ranks | steps | bytes/row | triage s | CPU s | GB | group-by s | CPU s | ratio | rows/s/core | found |")
    print("| --- " * 12 + "|")
    for num_ranks in ranks:
        for num_rows in rows:
            size = size_of(num_rows, num_ranks)
            seconds, num_bytes = written(folder, size)
            print(f"written in {seconds:.0f} s", file=sys.stderr)
            measured("group", folder)  # the files come from memory in both
            pairs = [(measured("group", folder), measured("triage", folder)) for _ in range(repeats)]
            plain, verdict = (medians([pair[place] for pair in pairs]) for place in (0, 1))
            cells = [
                f"{size.rows / 1e6:.1f} M", num_ranks, size.steps, f"{num_bytes / size.rows:.0f}",
                f"{verdict['seconds']:.1f}", f"{verdict['cpu_seconds']:.1f}", f"{verdict['peak_bytes'] / 1e9:.2f}",
                f"{plain['seconds']:.1f}", f"{plain['cpu_seconds']:.1f}",
                f"{verdict['seconds'] / plain['seconds']:.2f}", f"{size.rows / verdict['cpu_seconds']:.3g}",
                f"{verdict['found']} of {len(PLANTED)}",
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            if spark:
                found = measured("spark", folder, spark)
                print(f"Spark on {spark}: {found['spark_seconds']:.1f} s, found {found['found']} of {len(PLANTED)}", flush=True)


def print_queries(folder: Path) -> None:
    """Print what one query takes as one of ranks, steps and layers doubles and doubles again."""
    base = vars(Size(steps=80, ranks=4, layers=8))
    print("| ranks | steps | modules | rows | query ms | answer |")
    print("| --- " * 6 + "|")
    larger = ({**base, what: base[what] * factor} for what in ("ranks", "steps", "layers") for factor in (2, 4, 8))
    for size in (Size(**values) for values in (base, *larger)):
        written(folder, size)
        found = measured("ask", folder)
        cells = [size.ranks, size.steps, 7 * size.layers, size.rows, f"{1e3 * found['query_seconds']:.0f}", found["answer"]]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, nargs="+", default=[1e7, 5e7])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--repeats", type=int, default=1, help="of both, in turns; their medians are printed")
    parser.add_argument("--spark", metavar="MASTER")
    parser.add_argument("--queries", action="store_true")
    parser.add_argument("--folder", type=Path, help="where a temporary folder is made for them")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        do(args.task, args.folder, args.options)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.queries:
            print_queries(Path(folder) / "run")
        else:
            print_growth(Path(folder) / "run", args.rows, args.ranks, args.repeats, args.spark)


if __name__ == "__main__":
    main()

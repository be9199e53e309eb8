"""Prints the CPU time of the server for each page of a large log: ``python tests/bench/dashboard_questions.py [--rows N]``.

No browser and no waiting: CPU time, all threads together, hardly depends on who else uses the machine. Each page is laid out
from the files alone, as right after the start, and with the table in memory, every time with another module or metric. Divide by
the cores that are free for the time a reader waits; what the browser takes to draw comes on top.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: the other tests are a package

from fp8debug.fallback import recommend
from fp8debug_dashboard.data import metric_cache
from fp8debug_dashboard.data.metric_cache import METRICS
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.screens import PAGES
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.bench.dashboard import make_log


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU milliseconds of a call."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def lay_out(opened: RunView, repeats: int) -> None:
    """Print the CPU time of each page's layout: the first, and the median of the others."""
    names = [str(module["fqn"]) for module in opened.run.modules]
    for page in ("overview", "heatmap", "module"):
        times = []
        for i in range(repeats):
            params = {"metric": METRICS[i % len(METRICS)]} if page == "heatmap" else {"module": names[7 * i % len(names)]}
            view = View(page, None, {} if page == "overview" else params)
            times.append(cpu_ms(partial(PAGES[page].layout, view, opened)))
        later = f"then median {statistics.median(times[1:]):.0f} ms of {repeats - 1}"
        print(f"  {page}: first {times[0]:.0f} ms, {later}", flush=True)


def measure(run: Path, repeats: int) -> None:
    """Print all figures of a run."""
    opened: list[RunView] = []
    print(f"opening the run: {cpu_ms(lambda: opened.append(ServedFolder(run).open(None))):.0f} ms")
    first = opened[0]
    print(f"{first.run.num_rows:,} rows; pages from the files:")
    lay_out(first, repeats)
    print(f"  health of the overview: {cpu_ms(first.heat):.0f} ms")
    print(f"  fallback list: {cpu_ms(partial(recommend, first.run, [])):.0f} ms", flush=True)
    again = ServedFolder(run).open(None)

    def build() -> None:
        again.metric_cache = metric_cache.build(run)

    print(f"table in memory: {cpu_ms(build):.0f} ms; pages with it:")
    lay_out(again, repeats)
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


def main() -> None:
    """Make the log unless it is there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=len(METRICS))
    parser.add_argument("--keep", type=Path, help="folder of the log, made when it is not there; else it is deleted at the end")
    options = parser.parse_args()
    run = options.keep or Path(tempfile.mkdtemp()) / "large"
    try:
        if not run.exists():
            make_log(run, options.rows)
        measure(run, options.repeats)
    finally:
        if options.keep is None:
            shutil.rmtree(run.parent)


if __name__ == "__main__":
    main()

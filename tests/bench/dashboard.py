"""Prints what the dashboard takes in a real browser on a large log: ``python tests/bench/dashboard.py [--rows N] [--keep DIR]``.

A log in our schema is made from one sampled step of 500 modules (two what-if recipes), repeated with other steps and with noise
on every real number, so that the columns do not compress better than measured ones. Then a server is started as a process of
its own, and Chromium opens it. Printed are: from the start of the server to the first paint, less what importing dash takes; the
answers of the server to the callbacks of every page, median and 95th percentile; from a click in a heatmap of 500 modules to the
painted module page; and the memory of the server.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import Page, Request, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: the other tests are a package

from fp8debug.store.stream import write_part
from tests.conftest import CHROMIUM
from tests.dashboard import samples
from tests.dashboard.serving import browser_args
from tests.synthetic import Plan, write

NUM_MODULES, ROWS_PER_PART = 500, 256 * 1024


def make_log(path: Path, num_rows: int) -> int:
    """Write a run of about that many rows; return how many there are."""
    modules = samples.gpt_modules(NUM_MODULES // 5)
    write(path, Plan(num_steps=1, every=1, modules=modules, recipe="tensorwise_delayed", what_if=("blockwise",)))
    folder = next(path.glob("rank=*/stats"))
    first = next(folder.glob("part-*.parquet"))
    step = pq.read_table(first)
    num_steps = max(1, num_rows // step.num_rows)
    noise = np.random.default_rng(0)
    waiting: list[pa.Table] = []
    number = 0
    first.unlink()
    for at in range(num_steps):
        waiting.append(_step(step, 10 * at, noise))
        if sum(table.num_rows for table in waiting) >= ROWS_PER_PART or at == num_steps - 1:
            write_part(pa.concat_tables(waiting), folder / f"part-{number:05d}.parquet")
            waiting, number = [], number + 1
    losses = next(path.glob("rank=*/steps/part-*.parquet"))
    row = pq.read_table(losses)
    curve = [2 + 3 * np.exp(-at / 200) for at in range(num_steps)]
    table = pa.concat_tables([row] * num_steps)
    for name, values in (("step", range(0, 10 * num_steps, 10)), ("loss", curve)):
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        table = table.set_column(place, field, pa.array(values).cast(field.type))
    write_part(table, losses)
    return int(num_steps * step.num_rows)


def _step(table: pa.Table, step: int, noise: np.random.Generator) -> pa.Table:
    """Return a step's rows at another step, each real number within 1 % of what it was."""
    columns = []
    for field in table.schema:
        column = table.column(field.name)
        if field.name == "step":
            column = pa.array(np.full(table.num_rows, step)).cast(field.type)
        elif pa.types.is_floating(field.type) and not field.name.startswith("num_"):
            values = column.to_numpy(zero_copy_only=False)
            scaled = values * (1 + 0.01 * noise.uniform(-1, 1, len(values)))
            column = pa.array(scaled, type=field.type, from_pandas=True)
        columns.append(column)
    changed = pa.table(columns, schema=table.schema)
    return changed


def import_seconds() -> float:
    """Return what importing dash takes in a fresh process, the median of three."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import dash"], check=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def start(run: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the server; return it and its address."""
    command = [sys.executable, "-m", "fp8debug_cli.main", "dashboard", str(run), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"http://\S+", line)
        if found:
            return process, found[0]
    raise SystemExit("the server did not start")


def memory_mib(pid: int) -> float:
    """Return the peak resident memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", text)
    return int(found[1]) / 1024 if found else float("nan")


def painted(page: Page, selector: str) -> None:
    """Wait until something is drawn, and the frame after it has been shown."""
    page.locator(selector).first.wait_for(state="attached", timeout=120_000)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


class Answers:
    """Times the server's answers to callbacks, all but those that wait for triage on purpose."""

    def __init__(self, page: Page) -> None:
        self.times: list[float] = []
        page.on("requestfinished", self._end)

    def _end(self, request: Request) -> None:
        if "_dash-update-component" in request.url and not (request.post_data or "").startswith('{"output":"settled.data"'):
            timing = request.timing
            self.times.append(timing["responseStart"] - timing["requestStart"])

    def line(self) -> str:
        """Return median and 95th percentile."""
        times = sorted(self.times)
        if not times:
            return "no answers"
        return f"{len(times)} answers, median {statistics.median(times):.0f} ms, p95 {times[int(0.95 * (len(times) - 1))]:.0f} ms"


def measure(run: Path, repeats: int) -> None:
    """Print all figures of a run."""
    dash_s = import_seconds()
    names = [name for name, _, _ in samples.gpt_modules(NUM_MODULES // 5)]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=browser_args())
        begin = time.perf_counter()
        process, address = start(run)
        served = time.perf_counter() - begin
        try:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(address, wait_until="commit")
            painted(page, "#loss .scatterlayer .trace")
            first = time.perf_counter() - begin
            print(
                f"start to first paint {first:.2f} s, {served:.2f} s of it until it serves; importing dash takes {dash_s:.2f} s"
            )
            page.locator(".pulse").first.wait_for(state="detached", timeout=600_000)
            print(f"findings known after {time.perf_counter() - begin:.1f} s; memory {memory_mib(process.pid):.0f} MiB at most")
            answers = Answers(page)
            clicks = []
            for i in range(repeats):
                page.goto(f"{address}heatmap?metric={'sqnr_db' if i % 2 else 'gain'}")
                painted(page, "#heat .hm image")
                box = page.locator("#heat .nsewdrag").bounding_box()
                assert box is not None
                page.mouse.move(box["x"] + box["width"] * (0.2 + 0.6 * i / repeats), box["y"] + box["height"] * 0.4)
                page.locator("#heat .hoverlayer .hovertext").wait_for()
                since = time.perf_counter()
                page.mouse.down()
                page.mouse.up()
                painted(page, "#nine .scatterlayer .trace")
                clicks.append(1000 * (time.perf_counter() - since))
            told = f"median {statistics.median(clicks):.0f} ms, worst {max(clicks):.0f} ms of {repeats}"
            print(f"from a click in the heatmap to the painted module page: {told}")
            print(f"heatmap and module: {answers.line()}")
            for name in ("overview", "findings", "fallback", "module"):
                own = Answers(page)
                for i in range(repeats):
                    page.goto(
                        f"{address}{'' if name == 'overview' else name}" + (f"?module={names[7 * i]}" if name == "module" else "")
                    )
                    page.locator(".page").wait_for(timeout=120_000)
                    page.wait_for_load_state("networkidle")
                print(f"{name}: {own.line()}")
            own = Answers(page)
            for i in range(repeats):
                page.goto(f"{address}module?module={names[3]}&site=fprop.weight" if i == 0 else page.url)
                page.locator(".page").wait_for(timeout=120_000)
                page.get_by_text(("dgrad weight", "wgrad input")[i % 2], exact=True).click()
                page.wait_for_load_state("networkidle")
            print(f"module, another site: {own.line()}")
            print(f"memory {memory_mib(process.pid):.0f} MiB at most")
        finally:
            process.terminate()
            process.wait()
            browser.close()


def main() -> None:
    """Make the log unless it is there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="folder of the log, made when it is not there; else it is deleted at the end")
    options = parser.parse_args()
    run = options.keep or Path(tempfile.mkdtemp()) / "large"
    try:
        if not run.exists():
            begin = time.perf_counter()
            num_rows = make_log(run, options.rows)
            size = sum(file.stat().st_size for file in run.rglob("*.parquet"))
            print(
                f"{num_rows:,} rows of {NUM_MODULES} modules, {size / 2**30:.2f} GiB, made in {time.perf_counter() - begin:.0f} s"
            )
        measure(run, options.repeats)
    finally:
        if options.keep is None:
            shutil.rmtree(run.parent)


if __name__ == "__main__":
    main()

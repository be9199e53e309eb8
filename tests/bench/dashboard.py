"""Prints what the dashboard takes in a real browser on a large log: ``python tests/bench/dashboard.py [--rows N] [--keep DIR]``.

A log in our schema is made from one sampled step of 500 modules (two what-if recipes), repeated with other steps and with noise
on every real number, so that the columns do not compress better than measured ones. Then a server is started as a process of
its own, and Chromium opens it. Printed are: from the start of the server to the first paint, less what importing dash takes,
and the CPU time of server and page until then, which others on the machine change little; from a click right after that to the
first heatmap, when nothing is in memory, and the CPU time of both for it; the answers of the server to the callbacks of every
page, median and 95th percentile; from a click that asks for a heatmap of the 500 modules, another metric or site each time, to
its paint; from a click in it to the painted module page; and the memory of the server. Each stands beside its limit, as a ratio
to it, and beside how much longer a fixed piece of work took then than its own CPU time: 1.0 on a machine that has nothing else
to do. What waits, waits no longer than ``PATIENCE_S``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import CDPSession, Page, Request, TimeoutError, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: the other tests are a package

from fp8debug.store.stream import write_part
from fp8debug_dashboard.pages.heatmap import READING
from tests.conftest import CHROMIUM
from tests.dashboard import samples
from tests.dashboard.serving import browser_args
from tests.synthetic import Plan, write

NUM_MODULES, ROWS_PER_PART = 500, 256 * 1024
#: The longest wait for anything but the findings, in seconds.
PATIENCE_S = 180
#: What the dashboard is to reach: seconds from start to first paint beyond importing dash, 95th percentile of the callbacks and
#: click to painted heatmap in milliseconds, memory in MiB. From 50 million rows on the second line holds.
LIMITS = {"paint": 2.0, "callbacks": 300.0, "heatmap": 600.0, "memory": 1536.0}
LARGE_ROWS, LARGE_LIMITS = 50_000_000, {"callbacks": 1500.0, "memory": 3072.0}
#: What the heatmap shows in turn, at these sites.
HEATMAPS = ("sqnr_db", "gain", "underflow_rate", "cosine", "headroom", "amax")
SITES = ("operands", "fprop.input", "wgrad.grad_output", "dgrad.weight")
#: Python writes no bytecode where this is set, which no user's installation does.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


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
        subprocess.run([sys.executable, "-c", "import dash"], check=True, env=ENVIRONMENT)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def busy() -> float:
    """Return how much longer a fixed piece of work takes than its CPU time: what others on this machine cost us now."""
    wall, used = time.perf_counter(), time.process_time()
    for _ in range(20):
        np.sort(np.random.default_rng(0).random(400_000))
    return (time.perf_counter() - wall) / (time.process_time() - used)


def start(run: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the server; return it and its address."""
    command = [sys.executable, "-m", "fp8debug_cli.main", "dashboard", str(run), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
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


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def painted(page: Page, selector: str) -> None:
    """Wait until something is drawn, and the frame after it has been shown; the page looks at each frame.

    A locator looks after 20, 50, 100 and 100 ms, then every half second: what is measured would be longer by half of that.
    """
    page.wait_for_function("selector => document.querySelector(selector)", arg=selector)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


#: Tells whether the heatmap on screen is another one than that of an address.
_OTHER_IMAGE = (
    "shown => { const image = document.querySelector('#heat .hm image'); return image && image.href.baseVal !== shown; }"
)


class Answers:
    """Times the server's answers to callbacks, all but those that wait for something on purpose."""

    def __init__(self, page: Page) -> None:
        self.times: list[float] = []
        page.on("requestfinished", self._end)

    def _end(self, request: Request) -> None:
        is_page = request.url.endswith("/_dash-layout")  # which brings the page that an address asks for
        if is_page or ("_dash-update-component" in request.url and not _waits(request.post_data or "{}")):
            timing = request.timing
            self.times.append(timing["responseStart"] - timing["requestStart"])

    def line(self) -> str:
        """Return median and 95th percentile."""
        times = self.times
        if not times:
            return "no answers"
        return f"{len(times)} answers, median {statistics.median(times):.0f} ms, p95 {p95(times):.0f} ms"


def _waits(body: str) -> bool:
    """Tell whether a request is the one that is answered when the page has settled."""
    return [one.get("id") for one in json.loads(body).get("inputs", ()) if isinstance(one, dict)] == ["seen", "stamp"]


def p95(times: list[float]) -> float:
    """Return the 95th percentile."""
    return sorted(times)[int(0.95 * (len(times) - 1))]


def told(what: str, value: float, unit: str, limit: float | None) -> None:
    """Print a figure beside its limit and the load of the machine."""
    beside = f", {value / limit:.2f} of the limit of {limit:g} {unit}" if limit else ""
    print(f"{what}: {value:.4g} {unit}{beside} (work took {busy():.1f} times its CPU time)", flush=True)


class Bench:
    """One server, one browser, one page.

    Args:
        page: of the browser.
        process: the server.
        address: of the server.
        repeats: how often each thing is measured.
        names: modules of the run.
    """

    def __init__(self, page: Page, process: subprocess.Popen[str], address: str, repeats: int, names: list[str]) -> None:
        self.page, self.process, self.address, self.repeats = page, process, address, repeats
        self.names = names

    def heatmaps(self) -> list[float]:
        """Return the milliseconds from clicks that ask for a heatmap to its paint: first on the page, then on other metrics."""
        page, times = self.page, []
        link = page.get_by_role("link", name="Heatmap", exact=True)
        link.click(trial=True)
        since = time.perf_counter()
        link.click()
        painted(page, "#heat .hm image")
        times.append(1000 * (time.perf_counter() - since))
        for i in range(1, self.repeats):
            turn, at = divmod(i, len(HEATMAPS))
            if at == 0:  # all metrics were asked for: at the next site they are new
                page.goto(f"{self.address}heatmap?site={SITES[turn % len(SITES)]}&metric={HEATMAPS[-1]}")
                painted(page, "#heat .hm image")
            page.get_by_label("metric").first.click()
            option = page.get_by_role("option", name=re.compile(rf"\b{HEATMAPS[at]}\)?$"))
            option.wait_for()
            shown = page.locator("#heat .hm image").get_attribute("href")
            since = time.perf_counter()
            option.click()
            page.wait_for_function(_OTHER_IMAGE, arg=shown)
            painted(page, "#heat .hm image")
            times.append(1000 * (time.perf_counter() - since))
        return times

    def clicks(self) -> list[float]:
        """Return the milliseconds from clicks on a module in the heatmap to its painted page; a fold would open."""
        page, times = self.page, []
        for i in range(self.repeats):
            page.goto(f"{self.address}heatmap?fold=modules&metric={'sqnr_db' if i % 2 else 'gain'}")
            painted(page, "#heat .hm image")
            box = page.locator("#heat .nsewdrag").bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + box["width"] * (0.2 + 0.6 * i / self.repeats), box["y"] + box["height"] * 0.4)
            page.locator("#heat .hoverlayer .hovertext").first.wait_for(state="attached")
            since = time.perf_counter()
            page.mouse.down()
            page.mouse.up()
            painted(page, "#nine .scatterlayer .trace")
            times.append(1000 * (time.perf_counter() - since))
        return times

    def visits(self, name: str) -> None:
        """Open a page again and again, the module page with another module each time."""
        for i in range(self.repeats):
            which = f"?module={self.names[7 * i % len(self.names)]}" if name == "module" else ""
            self.page.goto(f"{self.address}{'' if name == 'overview' else name}{which}")
            self.page.locator(".page").wait_for()
            self.page.wait_for_load_state("networkidle")

    def sites(self) -> None:
        """Choose another site of one module again and again."""
        self.page.goto(f"{self.address}module?module={self.names[3]}&site=fprop.weight")
        for i in range(self.repeats):
            site = ("dgrad weight", "wgrad input")[i % 2]
            self.page.get_by_text(site, exact=True).click()
            self.page.locator("#casts h3").get_by_text(site).wait_for()


class Start(NamedTuple):
    """A server that was started; seconds until it served, until its first page was painted, and of CPU time until then."""

    process: subprocess.Popen[str]
    address: str
    served: float
    painted: float
    server_cpu: float
    page_cpu: float


def first_paint(page: Page, run: Path) -> Start:
    """Start a server and open its first page."""
    metrics = page.context.new_cdp_session(page)
    metrics.send("Performance.enable", {"timeDomain": "threadTicks"})
    begin = time.perf_counter()
    process, address = start(run)
    served = time.perf_counter() - begin
    try:
        page.goto(address, wait_until="commit")
        painted(page, "#loss .scatterlayer .trace")
        seconds, used = time.perf_counter() - begin, cpu_seconds(process.pid)
        page_used = _task_seconds(metrics)
    except BaseException:
        process.terminate()
        raise
    return Start(process, address, served, seconds, used, page_used)


class FirstHeatmap(NamedTuple):
    """Milliseconds from a click on the page that has just been painted to a heatmap; seconds of CPU time meanwhile."""

    ms: float
    server_cpu: float
    page_cpu: float


def first_heatmap(page: Page, server: int) -> FirstHeatmap:
    """Click on Heatmap on the page that has just been painted, and wait for it.

    Args:
        page: of the browser.
        server: process id.
    """
    metrics = page.context.new_cdp_session(page)
    metrics.send("Performance.enable", {"timeDomain": "threadTicks"})
    before, used, since = _task_seconds(metrics), cpu_seconds(server), time.perf_counter()
    page.get_by_role("link", name="Heatmap", exact=True).click()
    painted(page, "#heat .hm image")
    ms = 1000 * (time.perf_counter() - since)
    return FirstHeatmap(ms, cpu_seconds(server) - used, _task_seconds(metrics) - before)


def _task_seconds(metrics: CDPSession) -> float:
    """Return the CPU time of a page's thread."""
    values = {one["name"]: float(one["value"]) for one in metrics.send("Performance.getMetrics")["metrics"]}
    return values["TaskDuration"]


def measure(run: Path, num_rows: int, repeats: int, wait_s: int, starts: int) -> None:
    """Print all figures of a run; what follows the first paint waits some seconds for the findings."""
    limits = LARGE_LIMITS if num_rows >= LARGE_ROWS else LIMITS
    dash_s = import_seconds()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=browser_args())
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(1000 * PATIENCE_S)
        begun: list[Start] = []
        early: list[FirstHeatmap] = []
        for _ in range(starts - 1):
            other = browser.new_context().new_page()
            other.set_default_timeout(1000 * PATIENCE_S)
            begun.append(first_paint(other, run))
            early.append(first_heatmap(other, begun[-1].process.pid))
            begun[-1].process.terminate()
            begun[-1].process.wait()
            other.context.close()
        begun.append(first_paint(page, run))
        process, address, served, first = begun[-1][:4]
        begin = time.perf_counter() - first
        try:
            paint = statistics.median(one.painted for one in begun)
            told("start to first paint, less importing dash, median", paint - dash_s, "s", limits.get("paint"))
            every = ", ".join(f"{one.painted:.2f}" for one in begun)
            print(f"  {every} s in all, {served:.2f} s of the last until it serves; importing dash takes {dash_s:.2f} s")
            cpu = [statistics.median(of) for of in ([one.server_cpu for one in begun], [one.page_cpu for one in begun])]
            print(f"  CPU time until then, medians: server {cpu[0]:.2f} s, the page's thread {cpu[1]:.2f} s")
            if early:
                ms, *cpu = (statistics.median(of) for of in zip(*early, strict=True))
                told("click right then to the first heatmap, median", ms, "ms", limits.get("heatmap"))
                print(f"  {', '.join(f'{one.ms:.0f}' for one in early)} ms in all")
                print(f"  CPU time meanwhile, medians: server {cpu[0]:.2f} s, the page's thread {cpu[1]:.2f} s")
            _wait_for_findings(page, begin, wait_s)
            _wait_for_table(page, address, begin, wait_s)
            names = [str(module["fqn"]) for module in json.loads((run / "manifest.json").read_text())["modules"]]
            bench = Bench(page, process, address, repeats, names)
            page.goto(address)
            page.wait_for_load_state("networkidle")
            answers, used = Answers(page), cpu_seconds(process.pid)
            maps = bench.heatmaps()
            told("click to painted heatmap, median", statistics.median(maps), "ms", limits.get("heatmap"))
            print(f"  first {maps[0]:.0f} ms, worst {max(maps):.0f} ms of {repeats}; {answers.line()}")
            own = Answers(page)
            clicks = bench.clicks()
            told("click in the heatmap to painted module page, median", statistics.median(clicks), "ms", None)
            print(f"  worst {max(clicks):.0f} ms of {repeats}; heatmap and module: {own.line()}")
            for name in ("overview", "findings", "fallback", "module"):
                own = Answers(page)
                bench.visits(name)
                print(f"  {name}: {own.line()}", flush=True)
            own = Answers(page)
            bench.sites()
            print(f"  module, another site: {own.line()}")
            told("callbacks of all pages, p95", p95(answers.times), "ms", limits.get("callbacks"))
            used = cpu_seconds(process.pid) - used
            print(f"  {answers.line()}; {1000 * used / len(answers.times):.0f} ms of the server's CPU time an answer")
            told("memory of the server at most", memory_mib(process.pid), "MiB", limits.get("memory"))
        finally:
            process.terminate()
            process.wait()
            browser.close()


def _wait_for_findings(page: Page, begin: float, wait_s: int) -> None:
    try:
        page.locator(".pulse").first.wait_for(state="detached", timeout=1000 * wait_s)
    except TimeoutError:
        print(f"  findings are not known after {wait_s} s: what follows is measured while the rules are looking")
    else:
        print(f"  findings known after {time.perf_counter() - begin:.1f} s (triage has a process of its own)", flush=True)


def _wait_for_table(page: Page, address: str, begin: float, wait_s: int) -> None:
    """Wait until the main metrics are in memory; until then pages are read from the files."""
    while time.perf_counter() - begin < wait_s:
        page.goto(f"{address}heatmap")
        painted(page, "#heat .hm image")
        if READING.strip() not in page.locator("#heat-about").inner_text():
            print(f"  main metrics in memory after {time.perf_counter() - begin:.1f} s", flush=True)
            return
        time.sleep(1)
    print(f"  main metrics are not in memory after {wait_s} s: what follows is read from the files")


def main() -> None:
    """Make the log unless it is there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--starts", type=int, default=5, help="how often the server is started for the first paint")
    parser.add_argument("--wait", type=int, default=900, help="the longest wait for the findings, in seconds")
    parser.add_argument("--keep", type=Path, help="folder of the log, made when it is not there; else it is deleted at the end")
    options = parser.parse_args()
    run = options.keep or Path(tempfile.mkdtemp()) / "large"
    try:
        if not run.exists():
            begin = time.perf_counter()
            made = make_log(run, options.rows)
            size = sum(file.stat().st_size for file in run.rglob("*.parquet"))
            print(f"{made:,} rows of {NUM_MODULES} modules, {size / 2**30:.2f} GiB, made in {time.perf_counter() - begin:.0f} s")
        rows = sum(pq.read_metadata(part).num_rows for part in run.glob("rank=*/stats/part-*"))
        measure(run, rows, options.repeats, options.wait, options.starts)
    finally:
        if options.keep is None:
            shutil.rmtree(run.parent)


if __name__ == "__main__":
    main()

"""What watching costs, on a GPU: ``python tests/bench/overhead.py [--peer te] [--layers 8 32 80] [--tokens 2048 8192]``.

The same of every backend: ``python tests/bench/overhead.py --backends [native torchao scaled_mm te] [--every 10 1]``.

Llama-like layers (``step.py``) in BF16 with SGD, 1x128 and 128x128 blocks; asserts no times. A time is the median over blocks of
steps of a block's wall-clock time over its steps, the device idle before and after; a block of a model that is watched every
N-th step has N steps, one of them sampled. The first steps of every case, which compile, and a first block are not counted.

``--backends`` runs two of these layers in eager with Fp8Linear, torchao's Float8Linear, a Linear over ``torch._scaled_mm`` and
``--peer te``, all that are installed unless some are named; each case in a process of its own, so that its memory is its own.

``--peer te`` runs the same layers with Transformer Engine's Linear and its debug tools, and then with a watch instead of these,
one process a case, as they want it.

``--turns`` compares each watched model with an unwatched one beside it, twenty steps of each in turn, so that a clock that drifts
does not come into a difference of tenths of a percent; of a block's ratios the smallest and the largest are told too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from tests.bench.backends import RECIPES, convert_layers, layers, missing
from tests.bench.stall import Clock

NOT_SAMPLING = 10**9
#: Steps of a model before it is the other one's turn; of a block that is long enough for what is slow once not to matter.
TURN, LONG_BLOCK = 20, 50
#: The peer's statistics that come nearest to ours, on its three tensors of every Linear.
FP8_STATS = ["underflows%", "scale_inv_min", "scale_inv_max", "mse"]
TENSOR_STATS = ["min", "max", "mean", "std", "l1_norm", "cur_amax"]


class Case(NamedTuple):
    """A model, its recipe (``bf16`` or ``backend:recipe``), and every how many steps it is sampled; None is unwatched.

    ``by_peer`` is sampled by Transformer Engine's debug tools and not by a watch.
    """

    layers: int
    width: int
    tokens: int
    recipe: str
    every: int | None = None
    by_peer: bool = False

    @property
    def hidden(self) -> int:
        return self.width * 7 // 2

    @property
    def gigabytes(self) -> float:
        """An estimate: weights and gradients in BF16, and what the backward pass keeps of each layer."""
        parameters = self.layers * (4 * self.width**2 + 3 * self.width * self.hidden)
        kept = self.layers * self.tokens * (12 * self.width + 6 * self.hidden) * 2
        return (4 * parameters + kept) / 1e9


class Found(NamedTuple):
    """Milliseconds a step, peak GiB, and for a watched model the longest ``Watch.step``, less collections by Python, in ms."""

    ms: float
    peak_gib: float
    sampled_call_ms: float = 0.0
    other_call_ms: float = 0.0
    rows: int = 0


class Job:
    """A model in training."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.model = layers(case.layers, case.width, case.hidden, device)
        self.x = torch.randn(4, case.tokens // 4, case.width, dtype=torch.bfloat16, device=device)
        self.around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.after: Callable[[torch.Tensor], None] = lambda loss: None
        if case.recipe != "bf16":
            self.around = convert_layers(self.model, case.recipe)
        if case.by_peer:
            import nvdlfw_inspect.api as debug

            self.after = lambda loss: debug.step()
        # fused on a CPU, torch 2.13 leaves weights in BF16 as they are
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, fused=device == "cuda")

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.around():
            loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.after(loss)

    def milliseconds(self, steps: int, blocks: int) -> float:
        return block_median(self.step, steps, blocks)

    def settled(self, steps: int, blocks: int) -> float:
        """The same after a block that is not counted, unless it is a long one."""
        if steps >= LONG_BLOCK:
            return self.milliseconds(steps, min(blocks, 2))
        self.milliseconds(steps, 1)
        return self.milliseconds(steps, blocks)


def block_median(step: Callable[[], None], steps: int, blocks: int) -> float:
    """Return the median over blocks of a block's wall-clock time over its steps, ms, the device idle before and after."""
    times = []
    for _ in range(blocks):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    return median(times)


def measure(case: Case, blocks: int) -> Found:
    """Run one case in this process."""
    gc.collect()
    torch.cuda.empty_cache()
    job = Job(case)
    torch.cuda.reset_peak_memory_stats()
    if case.every is None or case.by_peer:
        for _ in range(1 if case.every else 3):
            job.step()
        steps = 5 if case.every in (None, 1) else case.every
        found = job.settled(steps, blocks)
        return Found(found, torch.cuda.max_memory_allocated() / 2**30)
    with tempfile.TemporaryDirectory() as folder:
        with watching(case, job, Path(folder, "run")) as calls:
            steps = 5 if case.every in (1, NOT_SAMPLING) else case.every
            ms = job.settled(steps, blocks)
        rows = num_rows(Path(folder, "run"))
    if not rows:
        raise RuntimeError(f"{case}: nothing was recorded")
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Found(ms, peak, max(calls[True], default=0.0), max(calls[False], default=0.0), rows)


@contextlib.contextmanager
def watching(case: Case, job: Job, run: Path) -> Iterator[dict[bool, list[float]]]:
    """Watch a job, warm; yield what ``Watch.step`` takes at sampled and other steps, ms, which grows as the job goes on."""
    calls: dict[bool, list[float]] = {True: [], False: []}
    clock = Clock()
    with clock.collecting(), fp8debug.watch(job.model, run, every=case.every or 1) as watch:

        def after(loss: torch.Tensor) -> None:
            sampled = watch.current_step % int(case.every or 1) == 0
            step(loss=loss)
            seconds, collected = clock.spans["step"][-1]
            calls[sampled].append((seconds - collected) * 1e3)

        step = clock.timed("step", watch.step)
        job.after = after
        for _ in range(2 if case.every == 1 else 1):  # step 0 is sampled: it compiles
            job.step()
        for times in calls.values():
            times.clear()
        yield calls


def in_turns(case: Case, blocks: int) -> list[float]:
    """Return, for each block of steps, the ratio of what a watched model and an unwatched one beside it take."""
    gc.collect()
    torch.cuda.empty_cache()
    plain, watched = Job(case._replace(every=None)), Job(case)
    turns = 1 if case.every == NOT_SAMPLING else max(1, int(case.every or 1) // TURN)
    ratios = []
    with tempfile.TemporaryDirectory() as folder, watching(case, watched, Path(folder, "run")):
        for job in (plain, watched):
            job.milliseconds(TURN, 1)
        for _ in range(blocks):
            times = [(plain.milliseconds(TURN, 1), watched.milliseconds(TURN, 1)) for _ in range(turns)]
            ratios.append(sum(of[1] for of in times) / sum(of[0] for of in times))
    return sorted(ratios)


def num_rows(run: Path) -> int:
    """Return the rows of a sampled step."""
    import pyarrow.parquet as pq

    steps = [
        step for part in run.glob("rank=*/stats/*.parquet") for step in pq.read_table(part, columns=["step"])["step"].to_pylist()
    ]
    return len(steps) // max(1, len(set(steps)))


def show(name: str, found: Found, plain: Found | None = None, bf16: Found | None = None) -> None:
    """Print a row."""
    words = f"{name:44} {found.ms:9.2f} ms {found.peak_gib:7.2f} GiB"
    if bf16 is not None:
        words += f"  {bf16.ms / found.ms:5.2f} x BF16's speed"
    if plain is not None:
        words += f"  {100 * (found.ms / plain.ms - 1):+8.2f} % {100 * (found.peak_gib / plain.peak_gib - 1):+6.2f} % memory"
    if found.rows:
        words += f"  step(): {found.sampled_call_ms:.2f} ms sampled, {found.other_call_ms:.2f} ms else; {found.rows} rows"
    print(words, flush=True)


def fitting(case: Case) -> Case:
    """Return the case, its width halved until it fits the GPU's memory."""
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    while case.gigabytes > 0.8 * total:
        case = case._replace(width=case.width // 2)
    return case


def name_of(every: int) -> str:
    """Return how a row is called."""
    return "attached, not sampling" if every == NOT_SAMPLING else f"watched, every {every}"


def fitted(case: Case) -> Case:
    """Print what a model is, and return the one of it that fits."""
    fits = fitting(case)
    note = f", width {fits.width} because {case.gigabytes:.0f} GB at {case.width} do not fit" if fits != case else ""
    recipe = fits.recipe.partition(":")[2]
    print(f"\n{fits.layers} layers, width {fits.width}, SwiGLU {fits.hidden}, {fits.tokens} tokens, {recipe}{note}")
    return fits


def differences(case: Case, blocks: int, everies: list[int]) -> None:
    """Print what watching adds to one model, in turns with one that is not watched."""
    fits = fitted(case)
    for every in everies:
        found = [100 * (ratio - 1) for ratio in in_turns(fits._replace(every=every), blocks)]
        print(f"{name_of(every):44} {found[len(found) // 2]:+8.2f} %  ({found[0]:+.2f} to {found[-1]:+.2f})", flush=True)


def ours(case: Case, blocks: int, everies: list[int], *, with_bf16: bool) -> None:
    """Print the rows of one model."""
    fits = fitted(case)
    bf16 = measure(fits._replace(recipe="bf16"), blocks) if with_bf16 else None
    if bf16:
        show("BF16", bf16)
    plain = measure(fits, blocks)
    show("FP8, unwatched", plain, bf16=bf16)
    for every in everies:
        show(name_of(every), measure(fits._replace(every=every), blocks), plain)


def peer(case: Case, blocks: int, everies: list[int]) -> None:
    """Print the same rows of Transformer Engine, by a watch and by its own debug tools, which take longer."""
    recipe = RECIPES["te"][0]
    fp8 = case._replace(recipe=f"te:{recipe}")
    print(f"\nTransformer Engine, the same layers with its Linear, {recipe}")
    show("BF16", bf16 := in_process(case._replace(recipe="te:bf16"), blocks))
    show("FP8, unwatched", plain := in_process(fp8, blocks), bf16=bf16)
    for every in everies:
        show(f"watched, every {every}", in_process(fp8._replace(every=every), blocks), plain)
    print("the same layers under LogFp8TensorStats and LogTensorStats", flush=True)
    for every in everies:
        show(f"watched, every {every}", in_process(fp8._replace(every=every, by_peer=True), blocks), plain)


def compare(case: Case, backends: list[str], blocks: int, everies: list[int]) -> None:
    """Print the rows of every backend on the same layers; one that fails does not keep the others from theirs."""
    print(f"\n{case.layers} layers, width {case.width}, SwiGLU {case.hidden}, {case.tokens} tokens, eager, one process a case")
    failed = []
    show("BF16, nn.Linear", bf16 := in_process(case, blocks))
    for backend in backends:
        try:
            if backend == "te":
                peer(case, blocks, everies)
                continue
            for recipe in RECIPES[backend]:
                fp8 = case._replace(recipe=f"{backend}:{recipe}")
                print(f"\n{backend}, {recipe}", flush=True)
                show("FP8, unwatched", plain := in_process(fp8, blocks), bf16=bf16)
                for every in everies:
                    show(f"watched, every {every}", in_process(fp8._replace(every=every), blocks), plain)
        except RuntimeError as error:
            print(error)
            failed.append(backend)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def in_process(case: Case, blocks: int) -> Found:
    """Run a case in a new process, and pass on what fp8debug says there.

    Raises:
        RuntimeError: it failed; the end of what it said.
    """
    command = [sys.executable, __file__, "--case", json.dumps(case), "--blocks", str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-3000:]}")
    for line in done.stderr.splitlines():
        if line.startswith("fp8debug: "):
            print(line, file=sys.stderr, flush=True)
    return Found(*json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def te_debug(every: int) -> Iterator[None]:
    """Switch the peer's debug tools on; before its first module is made."""
    import nvdlfw_inspect.api as debug
    import transformer_engine

    def feature(stats: list[str]) -> dict[str, Any]:
        tensors = [{"tensor": t, "stats": stats, "freq": every} for t in ("activation", "weight", "gradient")]
        return {"enabled": True, "tensors_struct": tensors}

    features = {"LogFp8TensorStats": feature(FP8_STATS), "LogTensorStats": feature(TENSOR_STATS)}
    config = {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": features}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        where = str(Path(transformer_engine.__file__).parent / "debug" / "features")
        debug.initialize(config_file=f"{folder}/config.yaml", feature_dirs=[where], log_dir=folder)
        yield
        debug.end_debug()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", help="8; with --backends 2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--recipe", default="blockwise", help="of Fp8Linear, without --backends")
    parser.add_argument("--every", type=int, nargs="+", help=f"{NOT_SAMPLING} 100 10 1; with --backends 10 1")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--backends", nargs="*", choices=list(RECIPES), help="all that are installed unless some are named")
    parser.add_argument("--peer", choices=["te"])
    parser.add_argument("--turns", action="store_true", help="only of Fp8Linear: watched and unwatched, turn by turn")
    parser.add_argument("--only-peer", action="store_true", help="with --peer, leave ours out")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = Case(*json.loads(options.case))
        with te_debug(case.every) if case.every and case.by_peer else contextlib.nullcontext():
            print(json.dumps(measure(case, options.blocks)))
        return
    asked = options.backends or ([options.peer] if options.peer else [])
    if lacks := missing(asked):
        sys.exit(lacks)
    if not torch.cuda.is_available():
        sys.exit("this bench times a GPU, and torch finds none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; medians of {options.blocks} blocks, SGD")
    everies = options.every or ([10, 1] if options.backends is not None else [NOT_SAMPLING, 100, 10, 1])
    nums = options.layers or ([2] if options.backends is not None else [8])
    first = fitting(Case(nums[0], options.width, options.tokens[0], "bf16"))
    if options.backends is not None:
        for left_out in (name for name in RECIPES if not asked and missing([name])):
            print(f"left out: {missing([left_out])}")
        compare(first, asked or [name for name in RECIPES if not missing([name])], options.blocks, everies)
        return
    with_bf16 = True
    for tokens in () if options.only_peer else options.tokens:
        for num in nums:
            case = Case(num, options.width, tokens, f"native:{options.recipe}")
            if options.turns:
                differences(case, options.blocks, everies)
                continue
            ours(case, options.blocks, everies, with_bf16=with_bf16)
            with_bf16 = False
    if options.peer:
        peer(first, options.blocks, [e for e in everies if e != NOT_SAMPLING])


if __name__ == "__main__":
    main()

"""Is triage right? ``python tests/bench/diagnosis.py [--jobs 16] [--out FILE]`` trains labelled runs, prints how it did.

Three kinds of models (decoder, mixture of experts, encoder with biases) x widths x every fault of ``list_faults`` x recipes x
seeds, and clean runs. How a run is trained (microbatches, recomputation, clipping, warm-up, dtype, sampling, the step of the
fault) and which module bears the fault is drawn from the case's own key. ``--held-out`` takes seeds and widths that no rule
was looked at with. Results go to a JSON-lines file as they come; a second call does what is missing. It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import fp8debug
from fp8debug.errors import UsageError
from tests.bench.diagnosis_models import Case, build, plan, train

KINDS = ("gpt", "moe", "encoder")
WIDTHS, HELD_OUT_WIDTHS = (64, 128, 192), (96, 160, 256)
RECIPES = ("blockwise", "blockwise_pow2", "tensorwise_current", "tensorwise_delayed", "rowwise")
#: Recipes of the faults of ``fp8debug/faults/low_bit.py``, and further ones of clean runs.
LOW_BIT = ("mxfp8", "nvfp4", "mxfp4", "mxfp6_e2m3", "tensorwise_fnuz")
#: Faults that ask for a recipe or a kind of model: what else they are planted in is not what they are.
ONLY_RECIPES = {
    "e8m0_floor": ("blockwise", "blockwise_pow2", "rowwise"),  # one scale a tensor clips one time in five; a margin hides it
    "scale_grid": ("blockwise", "blockwise_pow2"),  # the others have one scale a tensor or row
    "double_quantization": ("blockwise", "rowwise"),  # harmless with power-of-two scales, no difference tensorwise
    "recompute_scale": ("blockwise", "blockwise_pow2"),
    "unwritten_padding": ("blockwise", "blockwise_pow2", "rowwise"),  # the others have no scale of padding alone
    **dict.fromkeys(
        ("stochastic_zeros", "stochastic_nearest", "stochastic_biased", "stochastic_repeats", "fp4_not_on"), ("nvfp4", "mxfp4")
    ),
    **dict.fromkeys(("hadamard_signs", "stale_tensor_scale", "block_scale_range", "last_layers_in_fp4"), ("nvfp4",)),
    "swizzled_scales": ("nvfp4", "mxfp8", "mxfp4"),
    "max_240_as_448": ("tensorwise_fnuz", "tensorwise_current", "rowwise"),
    "uneven_tokens": ("blockwise", "blockwise_pow2", "rowwise", "tensorwise_current"),  # E5M2 gradients hold 2^-24
}
ONLY_KINDS = {"router_in_fp8": ("moe",), "starved_expert": ("moe",), "depth_outliers": ("gpt", "encoder")}
LOW_BIT_FAULTS = {
    *("stochastic_zeros", "stochastic_nearest", "stochastic_biased", "stochastic_repeats", "hadamard_signs", "fp4_not_on"),
    *("stale_tensor_scale", "block_scale_range", "swizzled_scales", "last_layers_in_fp4", "max_240_as_448"),
}
#: Faults that act from the first step, whatever step they are planted at.
AT_ONCE = ("last_layers_in_fp4", "unconverted", "router_in_fp8", "unasked_fp8", "lr_too_high", "clipped_while_scaled")
RANKED = ("rank_scale",)
#: Faults planted in a module whose rule compares whole models.
NO_LAYER = ("stale_inference",)


def cases(held_out: bool) -> list[Case]:
    """Return the cases: each fault at every kind of model and width, recipes and seeds taken in turn; a fifth are clean."""
    first, widths = (100, HELD_OUT_WIDTHS) if held_out else (0, WIDTHS)
    found: list[Case] = []
    for number, fault in enumerate(fp8debug.list_faults()):
        recipes = ONLY_RECIPES.get(fault.name, RECIPES)
        kinds = ONLY_KINDS.get(fault.name, KINDS)
        turn = number
        for kind, width, seed in product(kinds, widths, range(first, first + 4 - len(kinds))):
            turn += 1
            recipe, place = recipes[turn % len(recipes)], (turn * 0.618) % 1
            found.append(Case(kind=kind, width=width, recipe=recipe, seed=seed, fault=fault.name, place=place))
    again = [case for case in found if case.fault not in RANKED and case.kind != "moe"][::2]
    found += [replace(c, seed=c.seed + 50, place=1 - c.place) for c in again]
    for kind, width, (turn, recipe) in product(KINDS, widths, enumerate((*RECIPES, *LOW_BIT, "blockwise_e8m0"))):
        found.append(Case(kind=kind, width=width, recipe=recipe, seed=first + turn))
    random.Random(0).shuffle(found)  # so that a part of them says something of the whole
    return found


def run(case: Case, kept: Path | None = None) -> dict[str, Any]:
    """Train and judge one case; return the label, the findings and how they compare.

    Args:
        case: the case.
        kept: folder of runs; one that is there already is judged again, not trained again.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        path = (kept or Path(scratch)) / case.key.replace("/", "-")
        try:
            if (path / "done").exists():
                module = (path / "done").read_text(encoding="utf-8") or None
            else:
                shutil.rmtree(path, ignore_errors=True)
                module = _ranked(case, path) if case.fault in RANKED else train(case, path)
                (path / "done").write_text(module or "", encoding="utf-8")
            trained = time.perf_counter()
            opened = fp8debug.Run(path)
            found = [{**f.to_dict(), "cure": None} for f in fp8debug.triage(opened)]
            steps = opened.sql("SELECT DISTINCT step FROM steps WHERE sampled ORDER BY step").to_pylist()
        except UsageError as error:
            return {"key": case.key, **asdict(case), "not_applicable": str(error)}
        except Exception as error:  # of one run; the others go on, and the report has it
            return {"key": case.key, **asdict(case), "failed": f"{type(error).__name__}: {error}"}
    sampled = [row["step"] for row in steps]
    chosen = plan(case)
    start = 0 if case.fault in AT_ONCE else chosen.at
    label = next((f.code for f in fp8debug.list_faults() if f.name == case.fault), None)
    if case.fault in NO_LAYER:
        module = None
    return {
        "key": case.key,
        **asdict(case),
        "plan": {k: str(v) for k, v in asdict(chosen).items()},
        "code": label,
        "module": module,
        "step": start,
        "sampled": sampled,
        "findings": found,
        "train_s": round(trained - started, 2),
        "triage_s": round(time.perf_counter() - trained, 2),
    }


def _ranked(case: Case, path: Path) -> str | None:
    """Train the case on two ranks that share gradients, each in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank-of", json.dumps(asdict(case)), "--path", str(path)]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE) for rank in range(2)]
    errors = [rank.communicate(timeout=600)[1].decode() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{case.key}: {errors[0][-300:]} {errors[1][-300:]}")
    return build(case)[1]


def _one_rank(case: Case, path: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    train(case, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """Return whether the first finding names the layer and the cause, and how many sampled steps late it is."""
    findings = result["findings"]
    if result["code"] is None:
        return {"alarms": [(f["code"], f["severity"], f["module"]) for f in findings]}
    first = findings[0] if findings else None
    cause = bool(first and first["code"] == result["code"])
    layer = None if result["module"] is None else bool(first and first["module"] in _culprits(result))
    delay = None
    if first and cause:
        delay = sum(result["step"] <= step < first["steps"][0] for step in result["sampled"])
    others = [f["code"] for f in findings[1:]]
    return {"cause": cause, "layer": layer, "delay": delay, "found": first and (first["code"], first["module"]), "others": others}


def _culprits(result: dict[str, Any]) -> set[str | None]:
    """Return the modules that are right answers: the one that bears the fault, or those that share its fate."""
    module = result["module"]
    parts = module.split(".")
    if result["fault"] == "starved_expert":
        return {".".join([*parts[:-1], name]) for name in ("left", "right", "back")}
    if result["fault"] == "depth_outliers":
        return {".".join(["layers", str(depth), *parts[2:]]) for depth in range(5)}
    return {module}


def report(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    usable = [r for r in results if "code" in r]
    sick = [(r, judged(r)) for r in usable if r["code"] is not None]
    clean = [(r, judged(r)) for r in usable if r["code"] is None]
    names = dict.fromkeys(r["fault"] for r, _ in sick)
    yield f"{'fault':22} {'code':5} {'runs':>4} {'cause':>6} {'layer':>6} {'delay':>5}  what else came first"
    for name in names:
        own = [(r, j) for r, j in sick if r["fault"] == name]
        wrong = Counter(str(j["found"] and j["found"][0]) for _, j in own if not j["cause"])
        delays = [j["delay"] for _, j in own if j["delay"] is not None]
        layers = [j["layer"] for _, j in own if j["layer"] is not None]
        layer = f"{sum(layers):>3}/{len(layers)}" if layers else "-"
        delay = f"{median(delays):g}" if delays else "-"
        text = ", ".join(f"{code} {count}" for code, count in wrong.items())
        yield f"{name:22} {own[0][0]['code']:5} {len(own):4} {sum(j['cause'] for _, j in own):6} {layer:>6} {delay:>5}  {text}"
    for r, j in sick:
        if not j["cause"] or j["layer"] is False:
            yield f"  wrong: {r['key']} at {r['module']} step {r['step']}: {j['found']} then {j['others']}"
    for r, j in clean:
        if j["alarms"]:
            yield f"  false alarm: {r['key']}: {j['alarms']}"
    for r in results:
        if "code" not in r:
            yield f"  not run: {r['key']}: {r.get('not_applicable') or r['failed']}"
    layers = [j["layer"] for _, j in sick if j["layer"] is not None]
    delays = [j["delay"] for _, j in sick if j["delay"] is not None]
    more = sum(bool(j["others"]) for _, j in sick)
    if sick:
        causes = [j["cause"] for _, j in sick]
        yield f"labelled runs {len(sick)}: cause {_share(causes)}, layer {_share(layers)},"
        yield f"  delay median {median(delays):g}, largest {max(delays)} sampled steps; {more} runs have further findings"
    alarms = [bool(j["alarms"]) for _, j in clean]
    grave = sum(any(severity != "info" for _, severity, _ in j["alarms"]) for _, j in clean)
    yield f"clean runs {len(clean)}: with any finding {sum(alarms)}, with a warning or an error {grave}"


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values)}/{len(values)} = {sum(values) / max(1, len(values)):.1%}"


def main() -> None:
    """Run what is missing and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--out", type=Path, help="JSON lines; cases that are in it already are not run again")
    parser.add_argument("--runs", type=Path, help="keep the runs there; what is there is judged again, not trained again")
    parser.add_argument("--only", default="", help="cases whose key contains this, such as zero_tile/gpt or clean/")
    parser.add_argument("--low-bit", action="store_true", help="faults and clean runs of FP4 and of block formats alone")
    parser.add_argument("--held-out", action="store_true", help="other widths and seeds")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="SECONDS", help="begin no further case after that")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return _one_rank(Case(**json.loads(options.rank_of)), options.path)
    results: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        results = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    done = {r["key"] for r in results}
    todo = [c for c in cases(options.held_out) if options.only in c.key and c.key not in done]
    if options.low_bit:
        todo = [c for c in todo if c.fault in LOW_BIT_FAULTS or (c.fault is None and c.recipe in LOW_BIT)]
    started = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run, case, options.runs) for case in todo}
        for future in as_completed(waiting):
            if future.cancelled():
                continue
            results.append(future.result())
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(results[-1]) + "\n")
            print(f"\r{len(results)} of {len(todo) + len(done)}", end="", file=sys.stderr, flush=True)
            if time.perf_counter() - started > options.stop_after:
                for other in waiting:
                    other.cancel()
    print(file=sys.stderr)
    print("\n".join(report(results)))
    return None


if __name__ == "__main__":
    main()

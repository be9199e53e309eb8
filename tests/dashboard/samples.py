"""Runs for the dashboard's tests and screenshots: a small GPT under delayed scaling whose scale goes stale, and healthy ones."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from fp8debug.store.dump_files import KIND, file_name, rank_folder
from tests.synthetic import Override, Plan, Slots, write

SICK = "blocks.3.mlp.gate"
SICK_STEP = 240
NUM_STEPS, EVERY = 600, 5
SKIPPED = "lm_head"
#: An address of each page, for runs that the tests serve.
PAGES = {
    "runs": "/",
    "overview": "/?run=sick",
    "heatmap": "/heatmap?run=sick",
    "model": "/model?run=sick",
    "module": f"/module?run=sick&module={SICK}&step=300",
    "ranks": "/ranks?run=ranks",
    "findings": "/findings?run=sick",
    "fallback": "/fallback?run=sick",
    "compare": "/compare?run=sick&with=healthy",
    "parity": "/parity?run=sick&with=healthy",
}


def gpt_modules(num_blocks: int = 6, width: int = 384) -> list[tuple[str, int, int]]:
    """Return the Linears of a small GPT with SwiGLU in execution order."""
    modules: list[tuple[str, int, int]] = []
    for i in range(num_blocks):
        modules += [
            (f"blocks.{i}.attn.qkv", width, 3 * width),
            (f"blocks.{i}.attn.proj", width, width),
            (f"blocks.{i}.mlp.gate", width, 4 * width),
            (f"blocks.{i}.mlp.up", width, 4 * width),
            (f"blocks.{i}.mlp.down", 4 * width, width),
        ]
    return modules


def _drift(row: Slots) -> float:
    """Return how many powers of two amax has outgrown the stale scale: slow growth, then a plateau."""
    noise = random.Random(f"drift {row['step']} {row['tensor']}")
    return min(3.2, (int(row["step"]) - SICK_STEP) / 28) + noise.uniform(0, 0.25)


def _stale(row: Slots) -> Slots:
    growth = max(0.05, _drift(row))
    lost = min(0.35, 0.004 * 2 ** (1.7 * growth))
    return {"growth": growth, "lost": lost, "gain": 1 - 0.6 * lost, "sqnr_db": max(4.0, 27 - 7.5 * growth)}


def stale_scale(module: str = SICK, step: int = SICK_STEP) -> list[Override]:
    """Return overrides that make a module's input outgrow its delayed scale, with the loss of precision downstream of it."""
    sick: dict[str, Any] = {
        "num_saturated": lambda row: round(row["numel"] * _stale(row)["lost"]),
        "headroom": lambda row: 2 ** _stale(row)["growth"],
        "amax": lambda row: row["amax"] * 2 ** _stale(row)["growth"],
        "sqnr_db": lambda row: _stale(row)["sqnr_db"],
        "gain": lambda row: _stale(row)["gain"],
    }
    result = {"sqnr_db": lambda row: _stale(row)["sqnr_db"] - 1, "gain": lambda row: _stale(row)["gain"]}
    steps = (step, None)
    grown = {
        "amax": lambda row: row["amax"] * 2 ** _stale(row)["growth"],
        "scale_inv_min": lambda row: row["scale_inv_min"] * 2 ** _stale(row)["growth"],
        "scale_inv_max": lambda row: row["scale_inv_max"] * 2 ** _stale(row)["growth"],
        "scale_inv_sum_log2": lambda row: row["scale_inv_sum_log2"] + row["num_blocks"] * _stale(row)["growth"],
    }
    return [
        Override(module=module, gemm="fprop", tensor="input", slots=sick, steps=steps),
        Override(module=module, gemm="wgrad", tensor="input", slots=sick, steps=steps),
        Override(module=module, gemm="fprop", tensor="input", actual=False, slots=grown, steps=steps),
        Override(module=module, gemm="wgrad", tensor="input", actual=False, slots=grown, steps=steps),
        Override(module=module, gemm="fprop", tensor="output", reference="shadow", slots=result, steps=steps),
        Override(module=module, gemm="wgrad", tensor="grad_weight", reference="shadow", slots=result, steps=steps),
    ]


def losses(num_steps: int, sick_from: int | None = None) -> dict[int, dict[str, float]]:
    """Return what a step is given: a loss that falls, and rises slowly after a layer fell ill; a loss scale that doubles."""
    rows = {}
    for step in range(num_steps):
        noise = random.Random(f"loss {step}")
        ill = 0.0 if sick_from is None else max(0.0, 1 - math.exp(-(step - sick_from - 20) / 120))
        loss = (1.35 + 4.2 * math.exp(-step / 70)) * (1 + 0.012 * noise.gauss(0, 1)) + 0.75 * ill
        norm = (0.8 + 2.0 * math.exp(-step / 40)) * (1 + 0.08 * noise.gauss(0, 1)) * (1 + 1.6 * ill)
        scale = 2.0 ** (16 + step // 150)
        rows[step] = {"loss": loss, "grad_norm": norm, "lr": 3e-4 * min(1.0, step / 50 + 0.02), "loss_scale": scale}
    return rows


def write_sick(path: Path, num_steps: int = NUM_STEPS, every: int = EVERY) -> Path:
    """Write a run of tensorwise delayed scaling with one stale scale, a blockwise what-if, and an lm_head left in BF16."""
    plan = Plan(
        num_steps=num_steps,
        every=every,
        modules=gpt_modules(),
        recipe="tensorwise_delayed",
        what_if=("tensorwise_current", "blockwise"),
        overrides=stale_scale(),
        steps=losses(num_steps, SICK_STEP),
        module_entries={
            SKIPPED: {
                "in_features": 384,
                "out_features": 256,
                "kind": "Linear",
                "fp8": False,
                "observed": False,
                "casts": None,
                "requested": "bf16",
                "reason": "an override left it in BF16",
            }
        },
        manifest={"filters": [{"kind": "override", "pattern": "lm_head", "matched": 1}]},
    )
    write(path, plan)
    return path


def write_healthy(path: Path, num_steps: int = 120, **plan: Any) -> Path:
    """Write a healthy blockwise run."""
    given: dict[str, Any] = {"num_steps": num_steps, "modules": gpt_modules(2), "steps": losses(num_steps), **plan}
    write(path, Plan(**given))
    return path


SICK_RANK = 2


def write_ranks(path: Path, num_steps: int = 120) -> Path:
    """Write a run of four ranks of which one, from half of the run on, has twice the scale at one site."""
    doubled = {
        "scale_inv_min": lambda row: 2 * row["scale_inv_min"],
        "scale_inv_max": lambda row: 2 * row["scale_inv_max"],
        "scale_inv_sum_log2": lambda row: row["scale_inv_sum_log2"] + row["num_blocks"],
    }
    apart = Override(module="blocks.1.mlp.up", gemm="fprop", tensor="input", slots=doubled, steps=(60, None), ranks=(SICK_RANK,))
    plan = Plan(num_steps=num_steps, every=10, modules=gpt_modules(2), steps=losses(num_steps), world_size=4, overrides=[apart])
    write(path, plan)
    return path


#: Columns that version 1 of the schema did not have.
NEWER = (
    *("shard", "num_choice_rows", "num_top1_flips", "num_top2_flips", "num_grad_sums", "grad_first_nmse", "num_grad"),
    *("num_grad_bf16", "grad_sum_x2", "grad_sum_xy", "grad_sum_err2", "num_noise", "noise_sum", "noise_sum2", "noise_variance"),
    *("noise_repeat", "noise_repeat_variance", "num_reread", "reread_sum_x2", "reread_sum_err2", "num_reread_blocks"),
    *("reread_scale_inv_sum_log2", "num_rows", "num_bad_rows", "num_good_rows", "num_nonfinite_rows", "worst_row_nmse"),
    *("num_scales", "scale_inv_sum2_log2", "inference_kl", "inference_nmse", "inference_flip_rate", "nonfinite_module"),
    *("nonfinite_origin", "nonfinite_gemm", "code"),
)


def write_old(path: Path) -> Path:
    """Write a healthy run as version 1 of the schema would have it: fewer columns and tables, and a manifest that says so."""
    write_healthy(path, num_steps=40)
    for updates in path.glob("rank=*/updates"):
        shutil.rmtree(updates)
    for part in path.glob("rank=*/*/part-*.parquet"):
        table = pq.read_table(part)
        pq.write_table(table.select([name for name in table.column_names if name not in NEWER]), part)
    for file in (path / "manifest.json", *path.glob("rank=*/manifest.json")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 1}))
    return path


NAN_MODULE, NAN_STEP = "blocks.1.mlp.up", 60
#: Slots of a tensor without any finite element, as the recorder writes them.
LOST: dict[str, Any] = {
    **dict.fromkeys(("sum_x", "sum_x2", "sum_y2", "sum_xy", "sum_err", "sum_err2", "max_abs_err", "amax"), 0.0),
    **dict.fromkeys(("num_zero", "num_underflow", "num_subnormal", "num_saturated"), 0),
    **dict.fromkeys(("amin", "log2_hist", "headroom", "scale_inv_min", "scale_inv_max", "scale_inv_sum_log2")),
    "num_nan": lambda row: row["numel"],
}


def write_nan(path: Path, num_steps: int = 120, state: str = "num_nan", **plan: Any) -> Path:
    """Write a run whose loss is NaN from one step on, as one weight holds a NaN then, and all that comes after it is NaN.

    Args:
        path: folder.
        num_steps: of the run.
        state: what the weight holds: ``num_nan`` or ``num_inf``.
        plan: other fields of the plan.
    """
    modules, first = gpt_modules(2), NAN_STEP
    later = [name for name, _, _ in modules]
    later = later[later.index(NAN_MODULE) :]
    overrides = [Override(module=NAN_MODULE, tensor="weight", actual=None, slots={state: 1}, steps=(first, first + 1))]
    for name in later:
        overrides.append(Override(module=name, actual=None, slots=LOST, steps=(first + 1, None)))
    steps = {step: {**row, **({"loss": math.nan} if step >= first else {})} for step, row in losses(num_steps).items()}
    write(path, Plan(**{"num_steps": num_steps, "every": 10, "modules": modules, "steps": steps, "overrides": overrides, **plan}))
    return path


def write_dump(path: Path, module: str = SICK, step: int = 300) -> Path:
    """Write a dump of a module's input into a run: 4 x 6 tiles of 1 x 128, of which one row lost its small values."""
    rows, columns, tile = 256, 768, (64, 128)
    grid = rows // tile[0], columns // tile[1]
    energy = np.full(grid, 100.0)
    error = energy * 10 ** (-31 / 10)
    error[1] = energy[1] * 10 ** (-12 / 10)
    tensors: dict[str, tuple[str, np.ndarray[Any, Any]]] = {
        "reference": ("BF16", np.zeros((rows, columns), np.uint16)),
        "data": ("F8_E4M3", np.zeros((rows, columns), np.uint8)),
        "scale_inv": ("F32", np.ones(grid, np.float32)),
        "block_sum_err2": ("F64", error),
        "block_sum_x2": ("F64", energy),
        "block_num_nonfinite": ("I32", np.zeros(grid, np.int32)),
    }
    about = {"kind": KIND, "module": module, "gemm": "fprop", "tensor": "input", "cast": "e4m3fn tensorwise delayed(1024,max)"}
    about |= {"actual": "true", "step": str(step), "rank": "0", "call": "0", "reason": "on-finding"}
    about |= {"shape": f"{rows},{columns}", "tile": f"{tile[0]},{tile[1]}"}
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    folder = rank_folder(path, step, 0)
    folder.mkdir(parents=True)
    file = folder / file_name(module, "fprop", "input")
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for _, values in tensors.values()))
    return file


def write_verify(path: Path) -> Path:
    """Write what ``fp8debug verify`` would: FP8 above BF16, and candidates that close the gap."""
    steps = range(40)
    bf16 = [2 + 3 * math.exp(-s / 12) for s in steps]
    arms = []
    for name, gap in (("bf16", 0.0), ("fp8", 0.3), ("candidates", 0.02)):
        own = [loss + gap * (1 - math.exp(-s / 8)) for s, loss in zip(steps, bf16, strict=True)]
        share = None if name != "candidates" else {"value": 0.93, "low": 0.88, "high": 0.98}
        above = None if name == "bf16" else {"value": gap, "low": 0.9 * gap, "high": 1.1 * gap}
        arms.append({"name": name, "about": f"the {name} arm", "loss": own[-1], "above_bf16": above, "share": share})
        arms[-1] |= {"closed": "yes" if share else None, "first_step": 0, "losses": [own, [loss + 0.01 for loss in own]]}
    statements = ["FP8 trains +13 % above BF16: 0.3 [0.27, 0.33]", "the candidates close 93 % of the gap"]
    document = {"schema": 1, "run": path.name, "complete": True, "verdict": "closed", "statements": statements, "arms": arms}
    (path / "verify.json").write_text(json.dumps(document))
    return path / "verify.json"


#: Module names that are markup in HTML, in plotly's labels and in hover templates.
HOSTILE_MODULES: list[tuple[str, int, int]] = [
    ("<img src=x onerror=alert(1)>", 256, 256),
    ("<a href='//x.y/'>z</a>", 256, 256),
    ("a&b %{x} `c` *d* ?e=f#g/../h", 256, 256),
]

"""Hand-made runs without torch: a healthy blockwise E4M3 GPT by default, with slots to override to make it sick.

The healthy values are the middle of the envelope of numerics.md, section 4: operands 31.7 dB, cosine 0.99966, underflow
2e-4, results 28.6 dB against the shadow and 55 dB against the exact GEMM, nothing clipped, loss falling smoothly with
noise.

    run = build(tmp_path / "run", overrides=[Override(module="blocks.1.mlp.up", gemm="fprop", tensor="input",
                                                      steps=(60, None), slots={"num_saturated": 4000})])
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from fp8debug.fallback.measured import expected_sqnr_db
from fp8debug.formats import FORMATS
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.recipes import Cast, Recipe, get_recipe
from fp8debug.store.read.run import Run
from fp8debug.store.write.writer import RunWriter
from fp8debug.types import OPERAND_SITES, OPERANDS, RESULTS

#: (FQN, in_features, out_features) in execution order.
MODULES: tuple[tuple[str, int, int], ...] = (
    ("blocks.0.attn.qkv", 256, 768),
    ("blocks.0.attn.out", 256, 256),
    ("blocks.0.mlp.up", 256, 1024),
    ("blocks.0.mlp.down", 1024, 256),
    ("blocks.1.mlp.up", 256, 1024),
    ("blocks.1.mlp.down", 1024, 256),
)
TOKENS = 1024
SHADOW_ROWS = 256

OPERAND_SQNR_DB = 31.7
SHADOW_SQNR_DB, EXACT_SQNR_DB = 28.6, 55.0
UNDERFLOW_RATE, SUBNORMAL_RATE, ZERO_RATE = 2e-4, 4e-3, 1e-5

_AMAX = {"input": 6.0, "weight": 0.1, "grad_output": 3e-4, "output": 8.0, "grad_input": 4e-4, "grad_weight": 2e-3}
_RMS_OF_AMAX = 0.2

Slots = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Override:
    """Slots to replace in the rows that match.

    Attributes:
        slots: new values by column; a callable gets the healthy row and returns the value. ``sqnr_db`` and ``gain`` may
            stand here too: they set the sums of squares that give them.
        module: glob over module names.
        gemm: only this GEMM.
        tensor: only this tensor.
        reference: only this reference.
        actual: True for running casts, False for what-ifs, None for both.
        cast_name: only rows of this cast.
        steps: ``(first, end)``, end exclusive; None where it is open.
        ranks: only these ranks.
    """

    slots: Mapping[str, Any | Callable[[Slots], Any]]
    module: str = "*"
    gemm: str | None = None
    tensor: str | None = None
    reference: str | None = None
    actual: bool | None = True
    cast_name: str | None = None
    steps: tuple[int | None, int | None] = (None, None)
    ranks: tuple[int, ...] | None = None

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Tell whether a row of stats is meant."""
        wanted = {"gemm": self.gemm, "tensor": self.tensor, "reference": self.reference, "cast_name": self.cast_name}
        first, end = self.steps
        return (
            fnmatchcase(row["module"], self.module)
            and all(value is None or row[name] == value for name, value in wanted.items())
            and (self.actual is None or row["actual"] == self.actual)
            and (first is None or row["step"] >= first)
            and (end is None or row["step"] < end)
            and (self.ranks is None or row["rank"] in self.ranks)
        )


#: Parameters of the model that are no watched weights, the last a buffer.
PARAMETERS = ("embed.weight", *(f"blocks.{k}.mlp.norm.weight" for k in range(4)), "blocks.0.mlp.up.bias", "blocks.0.load_buffer")


@dataclass(kw_only=True)
class Plan:
    """Plan of what :func:`write` records; every field has a healthy default.

    Attributes:
        num_steps: training steps, each with a row in ``steps``.
        every: one step in so many is sampled.
        modules: (FQN, in_features, out_features) in execution order.
        recipe: the running recipe.
        recipes: another recipe for single modules by FQN; None leaves the module in BF16.
        what_if: names of recipes whose casts are recorded beside the running ones.
        world_size: number of ranks; inputs differ between them, weights are replicated.
        overrides: slots to replace, applied in order.
        steps: columns of the ``steps`` table to replace, by step.
        rank_steps: columns of the ``steps`` table to replace on one rank, by rank and step.
        events: (step, kind, module, message) of rank 0, and a code where it has one.
        updates: columns of ``updates`` to replace in a healthy row, by sampled step and module, which has no row where these are
            None; None for no rows at all.
        parameters: columns of ``parameters`` to replace in a healthy row, by sampled step and parameter (``PARAMETERS``); None
            for no rows at all.
        manifest: top-level keys of the manifest to replace.
        module_entries: keys of a module's entry in the manifest to replace, by FQN (adds the module when it is new).
        with_results: also rows of results.
        seed: of the noise.
    """

    num_steps: int = 100
    every: int = 10
    modules: Sequence[tuple[str, int, int]] = MODULES
    recipe: str | Recipe = "blockwise"
    recipes: Mapping[str, str | Recipe | None] = field(default_factory=dict)
    what_if: Sequence[str] = ()
    world_size: int = 1
    overrides: Sequence[Override] = ()
    steps: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    rank_steps: Mapping[int, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    events: Iterable[tuple[Any, ...]] = ()
    updates: Callable[[int, str], Mapping[str, Any] | None] | None = None
    parameters: Callable[[int, str], Mapping[str, Any]] | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    module_entries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    with_results: bool = True
    seed: int = 0

    def recipe_of(self, module: str) -> Recipe:
        """Return the recipe that a module runs in."""
        found = self.recipes.get(module, self.recipe)
        return get_recipe(found or "bf16") if found is None or isinstance(found, str) else found


def build(path: Path, **plan: Any) -> Run:
    """Write a run of ``Plan(**plan)`` and open it."""
    write(path, Plan(**plan))
    return Run(path)


def write(path: Path, plan: Plan) -> None:
    """Write the run through RunWriter, one writer per rank."""
    sampled = range(0, plan.num_steps, plan.every)
    for rank in range(plan.world_size):
        manifest = manifest_of(plan)
        writer = RunWriter(path, rank=rank, world_size=plan.world_size, manifest=manifest, rank_manifest={"device": "cpu"})
        for step in range(plan.num_steps):
            if step in sampled:
                rows = stats_rows(plan, step, rank)
                names = {name for row in rows for name in row}
                writer.stats({name: [row.get(name) for row in rows] for name in names})
                writer.flush()
                if plan.updates is not None:
                    changes = {name: plan.updates(step, name) for name, *_ in plan.modules}
                    given = [(name, k, own) for name, k, _ in plan.modules if (own := changes[name]) is not None]
                    made = [updates_row(step, name, k, own) for name, k, own in given]
                    if made:
                        writer.updates({name: [row.get(name) for row in made] for name in made[0]})
                if plan.parameters is not None:
                    told = [parameters_row(step, name, plan.parameters(step, name)) for name in PARAMETERS]
                    writer.parameters({name: [row.get(name) for row in told] for name in told[0]})
            own = plan.rank_steps.get(rank, {}).get(step, {})
            writer.steps({**steps_row(plan, step, is_sampled=step in sampled), **own})
        if rank == 0:
            for event in plan.events:
                writer.event(*event)
        writer.close()
        assert writer.stopped is None and not writer.num_dropped, writer.stopped


def manifest_of(plan: Plan) -> dict[str, Any]:
    """Return the manifest that watch() would give to the writer."""
    entries = {name: _module_entry(plan, name, k, n, i) for i, (name, k, n) in enumerate(plan.modules)}
    for name, changes in plan.module_entries.items():
        index = len(entries)
        entry = entries.setdefault(name, {**_module_entry(plan, name, 256, 256, index), "observed": False})
        entry.update(changes)
    recipe = get_recipe(plan.recipe) if isinstance(plan.recipe, str) else plan.recipe
    return {
        "fp8debug_version": "0.1.0",
        "every": plan.every,
        "shadow_rows": SHADOW_ROWS,
        "what_if": list(plan.what_if),
        "include": ["*"],
        "exclude": [],
        "recipe": recipe.to_dict(),
        "modules": list(entries.values()),
        "filters": [],
        "environment": {"torch": "none", "python": "3", "device": "cpu"},
        "git": None,
        "argv": ["train.py"],
        **plan.manifest,
    }


def _module_entry(plan: Plan, name: str, in_features: int, out_features: int, index: int) -> dict[str, Any]:
    recipe = plan.recipe_of(name)
    runs_fp8 = not recipe.is_high_precision
    casts = {f"{g}.{t}": cast.to_dict() if cast else None for (g, t), cast in recipe.casts.items()}
    return {
        "fqn": name,
        "kind": "Fp8Linear" if runs_fp8 else "Linear",
        "in_features": in_features,
        "out_features": out_features,
        "bias": False,
        "index": index,
        "fp8": runs_fp8,
        "observed": True,
        "casts": casts if runs_fp8 else None,
        "reason": None if runs_fp8 else "not converted",
        "requested": "fp8" if runs_fp8 else "bf16",
        "shared_with": None,
        "params": in_features * out_features,
    }


def steps_row(plan: Plan, step: int, *, is_sampled: bool) -> dict[str, Any]:
    """Return one row of ``steps``: a loss that falls from 5.5 towards 2 with 1 % noise."""
    noise = random.Random(f"{plan.seed} {step}")
    row = {
        "step": step,
        "loss": (2.0 + 3.5 * math.exp(-step / 60)) * (1 + 0.01 * noise.gauss(0, 1)),
        "grad_norm": 1.0 + 0.05 * noise.gauss(0, 1),
        "lr": 3e-4,
        "loss_scale": None,
        "tokens": TOKENS,
        "seconds": 0.1,
        "sampled": is_sampled,
    }
    return {**row, **plan.steps.get(step, {})}


def updates_row(step: int, module: str, fan_in: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of ``updates``: AdamW moves FP32 weights of RMS 0.02 by the learning rate 3e-4."""
    num, lr = 8192, 3e-4
    row = {
        "step": step, "module": module, "optimizer": "AdamW", "dtype": "float32", "keeps_precision": False, "lr": lr,
        "beta1": 0.9, "beta2": 0.999, "num_steps": step + 1,
        "fan_in": fan_in, "numel": 65536, "num_sampled": num, "num_moved": num, "num_grad": num,
        "num_intended": num, "num_lost": 0, "num_bf16": 0, "num_moment": 2 * num, "num_moment_zero": 0, "num_moment_clipped": 0,
        "sum_weight2": num * 0.02**2, "sum_update2": num * lr**2, "sum_intended2": num * lr**2,
        "sum_intended_update": num * lr**2, "sum_spacing_log2": 15.0 * num, "sum_grad2": num * 1e-8,
        "sum_moment2": num * 1e-9, "max_update": 3 * lr,
    }  # fmt: skip
    return {**row, **changes}


def parameters_row(step: int, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of ``parameters``: AdamW moves FP32 parameters of 1 by the learning rate 3e-4; a buffer stands."""
    num, lr = 64, 3e-4
    row = updates_row(step, name, num, {"numel": num, "num_sampled": num, "sum_weight2": float(num), "parameter": name})
    sums = {"num_moved": 1, "num_grad": 1, "num_intended": 1, "num_moment": 2, "sum_update2": lr**2, "sum_intended2": lr**2,
            "sum_intended_update": lr**2, "sum_spacing_log2": 10.0, "sum_grad2": 1e-8, "sum_moment2": 1e-9}  # fmt: skip
    row |= {column: value * num for column, value in sums.items()}
    role = next((role for role in ("norm", "embed", "bias") if role in name), "other").replace("embed", "embedding")
    row |= {"role": role, "shape": "[64]", "state_dtype": "float32", "requires_grad": True, "has_grad": True, "num_writes": None}
    row |= {"amax_before": 1 + lr * step, "amax": 1 + lr * (step + 1), "grad_amax": 1e-3}
    row |= dict.fromkeys(("nonfinite_before", "nonfinite", "grad_nonfinite"))
    del row["module"], row["fan_in"]
    if name.endswith("buffer"):
        kept = ("step", "parameter", "numel", "num_sampled", "shape", "sum_weight2")
        row |= dict.fromkeys(column for column in row if column not in kept)
        row |= {"role": "buffer", "dtype": "bfloat16", "num_moved": num, "num_writes": 10, "amax_before": 1.0}
    return {**row, **changes}


def stats_rows(plan: Plan, step: int, rank: int = 0) -> list[Slots]:
    """Return the rows of ``stats`` of one sampled step of one rank."""
    rows: list[Slots] = []
    what_ifs = [get_recipe(name) for name in plan.what_if]
    for call_index, (module, in_features, out_features) in enumerate(plan.modules):
        recipe = plan.recipe_of(module)
        for gemm, tensor in OPERAND_SITES:
            shape = {"input": (TOKENS, in_features), "weight": (out_features, in_features)}.get(
                tensor.value, (TOKENS, out_features)
            )
            common = _row(step, rank, module, str(gemm), str(tensor), call_index)
            running = recipe.casts[gemm, tensor]
            casts = [running, *(other.casts[gemm, tensor] for other in what_ifs)]
            distinct = {str(cast): cast for cast in casts if cast is not None}
            for place, (name, cast) in enumerate(distinct.items()):
                noise = random.Random(f"{plan.seed} {step} {rank if tensor != 'weight' else 0} {module} {gemm} {tensor} {name}")
                row = {**common, "cast_name": name, "reference": "operand", "actual": cast == running}
                row |= operand_slots(cast, tensor.value, shape, noise, with_histogram=place == 0)
                rows.append({**row, **(second_look(row, str(gemm), str(tensor)) if cast == running else {})})
        for gemm, tensor in RESULTS.items() if plan.with_results and not recipe.is_high_precision else ():
            first, second = (recipe.casts[gemm, operand] for operand in OPERANDS[gemm])
            num_columns = in_features if tensor == "grad_input" else out_features
            numel = SHADOW_ROWS * (out_features if tensor == "grad_weight" else num_columns)
            for reference, sqnr_db in (("shadow", SHADOW_SQNR_DB), ("exact", EXACT_SQNR_DB)):
                noise = random.Random(f"{plan.seed} {step} {rank} {module} {gemm} {tensor} {reference}")
                row = _row(step, rank, module, str(gemm), str(tensor), call_index)
                row |= {"cast_name": f"{first or 'bf16'} @ {second or 'bf16'}", "reference": reference, "actual": True}
                if reference == "shadow" and any(cast is not None and FORMATS[cast.format].bits < 8 for cast in (first, second)):
                    sqnr_db = expected_sqnr_db(row["cast_name"])
                row |= result_slots(tensor.value, numel, sqnr_db + noise.uniform(-0.15, 0.15), noise)
                row |= second_look(row, str(gemm), str(tensor), reference)
                if (tensor, reference) == ("output", "shadow"):
                    row |= {"damage": 1e-9 * noise.uniform(0.8, 1.2) * in_features, "num_damage_rows": SHADOW_ROWS}
                rows.append(row)
    for row in rows:
        for override in plan.overrides:
            if override.matches(row):
                apply_slots(row, override.slots)
    return rows


def _row(step: int, rank: int, module: str, gemm: str, tensor: str, call_index: int) -> Slots:
    where = {"step": step, "rank": rank, "module": module, "gemm": gemm, "tensor": tensor, "call_index": call_index}
    return {**where, "replicated": tensor == "weight", "num_tensors": 1}


def result_slots(tensor: str, numel: int, sqnr_db: float, noise: random.Random) -> Slots:
    """Return the slots that a result has: counts, magnitudes and error sums."""
    amax = _AMAX[tensor] * (1 + 0.02 * noise.uniform(-1, 1))
    row = {
        "numel": numel,
        "num_zero": round(numel * ZERO_RATE),
        "num_nan": 0,
        "num_inf": 0,
        "num_actual_nonfinite": 0,
        "amax": amax,
        "amin": amax * 2.0**-24,
        "sum_x": 0.001 * numel * amax,
        "sum_x2": numel * (_RMS_OF_AMAX * amax) ** 2,
        "sum_err": 0.0,
        "max_abs_err": amax * 0.03,
    }
    _set_error(row, sqnr_db=sqnr_db, gain=1.0)
    return row


def second_look(row: Slots, gemm: str, tensor: str, reference: str = "operand") -> Slots:
    """Return the slots of single rows, of second reads and of sums over microbatches, of a run that has all of them."""
    found: Slots = {}
    if reference != "operand" or (gemm, tensor) == ("fprop", "weight"):
        nmse = row["sum_err2"] / row["sum_x2"]
        found |= {"num_rows": SHADOW_ROWS, "num_bad_rows": 0, "num_good_rows": SHADOW_ROWS, "num_nonfinite_rows": 0}
        found |= {"worst_row_nmse": 1.5 * nmse}
    if tensor == "weight" or (gemm, tensor) == ("wgrad", "input"):
        found |= {"num_reread": row["numel"], "reread_sum_x2": row["sum_x2"], "reread_sum_err2": row["sum_err2"]}
        found |= {"num_reread_blocks": row["num_blocks"], "reread_scale_inv_sum_log2": row["scale_inv_sum_log2"]}
    if tensor == "grad_weight" and reference == "shadow":
        found |= {"num_grad_sums": 2, "grad_first_nmse": 0.0, "num_grad": row["numel"], "num_grad_bf16": row["numel"] // 65536}
        found |= {"grad_sum_x2": row["sum_x2"], "grad_sum_xy": row["sum_x2"], "grad_sum_err2": 1e-14 * row["sum_x2"]}
    return found


def operand_slots(cast: Cast, tensor: str, shape: tuple[int, int], noise: random.Random, *, with_histogram: bool = True) -> Slots:
    """Return every slot of a healthy operand under a cast."""
    rows, columns = shape
    numel = rows * columns
    fmt, is_low = FORMATS[cast.format], FORMATS[cast.format].bits < 8
    fmt_max = fmt.max
    healthy_db = cast.gaussian.sqnr_db if is_low else OPERAND_SQNR_DB - (6.1 if fmt.mantissa_bits == 2 else 0.0)
    sqnr_db = healthy_db + noise.uniform(-0.1, 0.1)
    slots = result_slots(tensor, numel, sqnr_db, noise)
    tile = {"tensorwise": numel, "rowwise": columns, "columnwise": rows, "128x128": 128 * 128}.get(cast.granularity, 128)
    small = {"1x32": 32, "32x1": 32, "1x16": 16, "16x1": 16, "16x16": 256}
    num_blocks = max(1, numel // small.get(cast.granularity, tile))
    scale_inv = slots["amax"] / fmt_max
    spread = 1.0 if num_blocks == 1 else 0.25
    slots |= {
        "num_underflow": round(numel * (cast.gaussian.underflow_rate if is_low else UNDERFLOW_RATE)),
        "num_subnormal": round(numel * SUBNORMAL_RATE),
        "num_saturated": round(numel * cast.gaussian.saturation_rate) if cast.scale_format == "e4m3fn" else 0,
        "scale_inv_min": scale_inv * spread,
        "scale_inv_max": scale_inv,
        "scale_inv_sum_log2": num_blocks * math.log2(scale_inv * spread**0.5),
        "num_blocks": num_blocks,
        "num_zero_blocks": 0,
        "num_eps_blocks": 0,
        "headroom": 0.98 if cast.scaling != "current" else 17 / 16 if cast.scale_format == "e4m3fn" else 1.0,
        "worst_block_nmse": 10 ** (-30.5 / 10),
        "max_block_range_log2": 14.0,
        "log2_hist": histogram(numel - slots["num_zero"], slots["amax"]) if with_histogram else None,
    }
    if cast.rounding == "stochastic":
        slots |= {"num_noise": numel, "noise_sum": 0.0, "noise_sum2": numel / 6, "noise_variance": numel / 6}
        slots |= {"noise_repeat": 0.0, "noise_repeat_variance": 64 * 64 / 36}
    return slots


def histogram(count: int, amax: float) -> list[int]:
    """Return a log2 histogram of ``count`` elements that halves with each binade below its second highest."""
    top = math.floor(math.log2(amax)) - FIRST_LOG2
    weights, total = _weights(top)
    bins = [int(count * w / total) for w in weights]
    bins[top - 1] += count - sum(bins)
    return bins


@cache
def _weights(top: int) -> tuple[list[float], float]:
    """Return the weights of a histogram's bins up to its highest, and their sum."""
    weights = [0.0] * NUM_BINS
    for i in range(top + 1):
        weights[i] = 0.05 if i == top else 2.0 ** (i - top + 1)
    return weights, sum(weights)


def with_underflow(row: Slots) -> list[int]:
    """Return a row's histogram with as many elements as underflow below what its largest scale holds, taken from all bins."""
    bins: list[int] = list(row["log2_hist"])
    limit = FORMATS[row["cast_name"].partition(" ")[0]].min_subnormal / 2 * row["scale_inv_max"]
    low = max(0, math.floor(math.log2(limit)) - FIRST_LOG2)
    below, above = sum(bins[: low + 1]), sum(bins[low + 1 :])
    missing = min(row["num_underflow"] - below, above)
    if missing > 0:
        bins[low + 1 :] = [count - math.ceil(count * missing / above) for count in bins[low + 1 :]]
        bins[low] += below + above - sum(bins)
    return bins


def apply_slots(row: Slots, slots: Mapping[str, Any | Callable[[Slots], Any]]) -> None:
    """Replace slots of a row in place; ``sqnr_db`` and ``gain`` set the sums that give them.

    ``num_underflow`` moves elements of the histogram below half the smallest value that the largest scale has.
    """
    values = {name: value(row) if callable(value) else value for name, value in slots.items()}
    targets = {name: values.pop(name) for name in ("sqnr_db", "gain") if name in values}
    row.update(values)
    if "num_underflow" in values and "log2_hist" not in values and row.get("log2_hist") and row.get("scale_inv_max"):
        row["log2_hist"] = with_underflow(row)
    if targets:
        before = -10 * math.log10(row["sum_err2"] / row["sum_x2"])
        _set_error(row, sqnr_db=targets.get("sqnr_db", before), gain=targets.get("gain", 1.0))


def _set_error(row: Slots, *, sqnr_db: float, gain: float) -> None:
    """Set sum_err2, sum_xy and sum_y2 such that SQNR and gain come out: y = gain x + noise orthogonal to x.

    The error has the energy (gain - 1)^2 of bias at least; a wanted SQNR above that is lowered to it.
    """
    x2 = row["sum_x2"]
    bias = (gain - 1) ** 2
    noise = max(10 ** (-sqnr_db / 10) - bias, 0.0)
    row["sum_err2"] = (noise + bias) * x2
    row["sum_xy"] = gain * x2
    row["sum_y2"] = (gain**2 + noise) * x2

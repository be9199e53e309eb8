"""Transformer Engine's statistics logs (nvdlfw_inspect: LogTensorStats, LogFp8TensorStats) as a run.

A line is ``TIME - INFO - LAYER_TENSOR_STAT  iteration=000100  value=97.0000``. TENSOR is activation, weight, gradient, output,
wgrad or dgrad. STAT may begin with the recipe that it was computed for and end with ``_columnwise``, the copy that the other GEMM
reads.

The log holds shares, and a run holds counts: they become counts of ``NOMINAL`` elements, which gives back the same shares.
What the log does not hold stays null, so that rules which need it say so. Values are logged with four decimals: a zero of an
amax, scale or error means "below 0.00005" and is left out. A layer without a statistic of a cast counts as one in high
precision. A statistic that is NaN or Inf tells that one element at least is, of the tensor or, where the tensor is finite, of
its cast.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fp8debug.errors import RunError, UsageError
from fp8debug.formats import FORMATS
from fp8debug.recipes import Recipe, get_recipe
from fp8debug.store.locations import place_of
from fp8debug.store.write.writer import RunWriter
from fp8debug.types import OPERANDS, RESULTS, Gemm, TensorRole

#: Elements that a tensor of a log counts as.
NOMINAL = 1_000_000
FOLDER = "nvdlfw_inspect_statistics_logs"
#: The recipe in force, by what Transformer Engine puts before a statistic's name.
RECIPES = {
    "fp8_delayed_scaling": "tensorwise_delayed",
    "fp8_current_scaling": "tensorwise_current",
    "fp8_block_scaling": "blockwise_pow2",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
#: In force where the log does not say: Transformer Engine's own default.
DEFAULT = "fp8_delayed_scaling"
_LINE = re.compile(r"(?:.{0,64}? - [A-Z]+ - )?(?P<name>\S{3,1024})\s+iteration=(?P<step>\d{1,18})\s+value=(?P<value>\S{1,64})\s*")
_NAME = re.compile(
    r"(?P<module>.+)_(?P<tensor>activation|gradient|weight|output|wgrad|dgrad)_(?P<stat>[a-z0-9_]+%?)(?P<columnwise>_columnwise)?"
)
_RANK = re.compile(r"globalrank-(\d{1,6})\.log$")
#: The operand that a tensor is, row-wise and column-wise, or the one result.
_SITES: Mapping[str, tuple[tuple[Gemm, TensorRole], ...]] = {
    "activation": ((Gemm.FPROP, TensorRole.INPUT), (Gemm.WGRAD, TensorRole.INPUT)),
    "weight": ((Gemm.FPROP, TensorRole.WEIGHT), (Gemm.DGRAD, TensorRole.WEIGHT)),
    "gradient": ((Gemm.DGRAD, TensorRole.GRAD_OUTPUT), (Gemm.WGRAD, TensorRole.GRAD_OUTPUT)),
    "output": ((Gemm.FPROP, TensorRole.OUTPUT),),
    "dgrad": ((Gemm.DGRAD, TensorRole.GRAD_INPUT),),
    "wgrad": ((Gemm.WGRAD, TensorRole.GRAD_WEIGHT),),
}
_USED = frozenset(
    (
        *("underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max", "amax", "cur_amax", "min", "max", "mean", "std"),
        *("variance", "numel", "l1_norm", "l2_norm", "l2_norm_square", "dynamic_range"),
    )
)
Site = tuple[str, Gemm, TensorRole, str]


@dataclass(kw_only=True)
class StatsLog:
    """One rank's log.

    Attributes:
        rank: global rank, from the file's name.
        values: by step and site (module, GEMM, operand, recipe or ""): statistic -> value.
        modules: in order of first appearance.
        unused: what the log holds and no row does: tensor and statistic -> lines.
        num_damaged: lines of a statistic that are cut off or hold no number.
    """

    rank: int
    values: dict[int, dict[Site, dict[str, float]]] = field(default_factory=dict)
    modules: dict[str, None] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)
    num_damaged: int = 0


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A run that was made of a log.

    Attributes:
        path: its folder.
        num_modules: layers in it.
        num_steps: steps in it.
        num_ranks: ranks in it.
        recipe: name of the recipe in force.
        is_assumed: whether the log does not say so.
        unused: statistics that no row holds.
        num_damaged: lines of a statistic that are cut off or hold no number.
    """

    path: Path
    num_modules: int
    num_steps: int
    num_ranks: int
    recipe: str
    is_assumed: bool
    unused: tuple[str, ...]
    num_damaged: int


def find_logs(path: str | Path) -> list[Path]:
    """Return the statistics logs at a path: a file, or all below a folder; none where there are none."""
    place = place_of(path)
    if place.is_file():
        return [place]
    if not place.is_dir():
        return []
    below = sorted(place.glob(f"{FOLDER}/*.log")) or sorted(place.rglob("*_globalrank-*.log"))
    named = [file for file in below if file.parent.name == FOLDER]
    return named or [file for file in below if file.parent.name != "nvdlfw_inspect_logs"]


def import_te_stats(logs: str | Path, run: str | Path, *, recipe: str | None = None) -> Imported:
    """Write a run of Transformer Engine's statistics logs.

    Args:
        logs: a log, or a folder that holds those of all ranks.
        run: the run's folder, which must not hold one.
        recipe: name of the recipe that the job ran; by default what the log says, else delayed scaling.

    Raises:
        RunError: no log there, or none with a statistic of an operand.
        UnknownNameError: no such recipe.
        RecordError: the folder cannot be written.
    """
    files = find_logs(logs)
    if not files:
        raise RunError(f"{logs} holds no statistics log; expected a folder with {FOLDER}/*_globalrank-*.log, or one such file")
    wanted = None if recipe is None else get_recipe(recipe)
    parsed = [read_log(file) for file in files]
    ranks = [log.rank for log in parsed]
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"{logs} holds several logs of rank {Counter(ranks).most_common(1)[0][0]}; give the folder of one job")
    if not any(log.values for log in parsed):
        raise RunError(
            f"{logs} has no statistic of an activation, weight, gradient or result; a line ends in iteration=N value=X"
        )
    prefix, is_assumed = _in_force(parsed)
    running = wanted or get_recipe(RECIPES[prefix])
    keys = {prefix} if wanted is None else {key for key, name in RECIPES.items() if name == wanted.name}
    modules = list(dict.fromkeys(module for log in parsed for module in log.modules))
    steps = sorted({step for log in parsed for step in log.values})
    in_fp8 = {
        site[0]
        for log in parsed
        for sites in log.values.values()
        for site, values in sites.items()
        if (not site[3] or site[3] in keys) and _OF_CAST & values.keys()
    }
    for log in parsed:
        _write(log, Path(run), running, keys, modules, in_fp8, steps, files, ranks)
    unused = sum((log.unused for log in parsed), Counter[str]())
    return Imported(
        path=Path(run),
        num_modules=len(modules),
        num_steps=len(steps),
        num_ranks=len(ranks),
        recipe=running.name,
        is_assumed=is_assumed and wanted is None,
        unused=tuple(sorted(unused)),
        num_damaged=sum(log.num_damaged for log in parsed),
    )


def read_log(path: Path) -> StatsLog:
    """Return what a log holds; other lines than those of statistics are passed over.

    Raises:
        RunError: it cannot be read.
    """
    named = _RANK.search(path.name)
    log = StatsLog(rank=int(named[1]) if named else 0)
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                _take(log, line)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None
    return log


def _lines(file: Any) -> Iterator[str]:
    """Yield the lines of a file, cut where one is longer than any of a log."""
    while line := file.readline(1 << 14):
        yield line.decode("utf-8", "replace")


def _take(log: StatsLog, line: str) -> None:
    found = _LINE.fullmatch(line.rstrip("\n"))
    name = _NAME.fullmatch(found["name"]) if found else None
    if found is None or name is None:
        log.num_damaged += found is None and "iteration=" in line
        return
    text = name["stat"]
    is_columnwise = text.endswith("_columnwise") or name["columnwise"] is not None
    text = text.removesuffix("_columnwise")
    prefix = next((one for one in RECIPES if text.startswith(f"{one}_")), "")
    stat = text.removeprefix(f"{prefix}_") if prefix else text
    sites = _SITES[name["tensor"]]
    is_unread = (is_columnwise and len(sites) == 1) or (stat in _OF_CAST and sites[0][1] in RESULTS.values())
    if is_unread or stat not in _USED:
        log.unused[f"{name['tensor']} {stat}"] += 1
        return
    try:
        value = float(found["value"])
    except ValueError:
        log.num_damaged += 1
        return
    log.modules[name["module"]] = None
    gemm, tensor = sites[is_columnwise]
    site: Site = (name["module"], gemm, tensor, prefix)
    log.values.setdefault(int(found["step"]), {}).setdefault(site, {})[stat] = value


def _in_force(logs: Sequence[StatsLog]) -> tuple[str, bool]:
    """Return the recipe that the logs tell, and whether it is assumed.

    Transformer Engine logs overflows and delayed scaling where delayed scaling runs, NVFP4 where NVFP4 does, and what has no
    recipe's name of the one that runs. A statistic that has one value without and another with a name is of two recipes.
    Column-wise ones are of blocks.
    """
    sites = [(site, values) for log in logs for step in log.values.values() for site, values in step.items()]
    named = {site[3] for site, _ in sites} - {""}
    nameless = {place for place, (site, values) in enumerate(sites) if not site[3] and _OF_CAST & values.keys()}
    for only, is_told in (("nvfp4", False), (DEFAULT, any("overflows%" in sites[place][1] for place in nameless))):
        if only in named or is_told:
            return only, False
    if not nameless:
        return (next(iter(named)), False) if len(named) == 1 else (DEFAULT, True)
    left = named - _others(logs)
    if len(left) == 1:
        return next(iter(left)), True
    is_of_blocks = any(
        sites[place][0][1:3] in [columnwise for _, *others in _SITES.values() for columnwise in others] for place in nameless
    )
    return "fp8_block_scaling" if is_of_blocks else DEFAULT, True


def _others(logs: Iterable[StatsLog]) -> set[str]:
    """Return the recipes that do not run: theirs is another value than that of the same statistic without a name."""
    found = set()
    for sites in (step for log in logs for step in log.values.values()):
        for site, values in sites.items():
            running = sites.get((*site[:3], ""), {})
            if site[3] and any(values[stat] != running[stat] for stat in _OF_CAST & values.keys() & running.keys()):
                found.add(site[3])
    return found


def _write(
    log: StatsLog,
    path: Path,
    recipe: Recipe,
    keys: set[str],
    modules: list[str],
    in_fp8: set[str],
    steps: list[int],
    files: list[Path],
    ranks: list[int],
) -> None:
    casts = {f"{gemm}.{tensor}": cast.to_dict() if cast else None for (gemm, tensor), cast in recipe.casts.items()}
    entries = [
        {"fqn": module, "kind": "TransformerEngine", "index": place, "observed": True, **_module(module in in_fp8, casts)}
        for place, module in enumerate(modules)
    ]
    manifest = {
        "recipe": recipe.to_dict(),
        "modules": entries,
        "environment": {"source": "Transformer Engine statistics log"},
        "imported_from": [file.name for file in files],
        "nominal_numel": NOMINAL,
        "every": _every(steps),
    }
    writer = RunWriter(path, rank=log.rank, world_size=max(ranks) + 1, manifest=manifest, rank_manifest={"imported": True})
    index = {module: (place, module in in_fp8) for place, module in enumerate(modules)}
    try:
        for step in sorted(log.values):
            rows = [
                row for site, values in _merged(log.values[step], keys) if (row := _row(step, site, values, recipe, keys, index))
            ]
            names = {name for row in rows for name in row}
            if rows:
                writer.stats({name: [row.get(name) for row in rows] for name in names})
            writer.steps({"step": step, "sampled": bool(rows)})
            writer.flush()
    finally:
        writer.close()
    if writer.stopped is not None:
        raise RunError(f"{path} could not be written: {writer.stopped}")


def _module(is_fp8: bool, casts: Mapping[str, Any]) -> dict[str, Any]:
    if is_fp8:
        return {"fp8": True, "casts": casts, "requested": "fp8"}
    return {"fp8": False, "casts": None, "reason": "the log has no statistic of an FP8 cast of it"}


def _every(steps: list[int]) -> int:
    return max(1, min((b - a for a, b in pairwise(steps)), default=1))


def _merged(sites: Mapping[Site, dict[str, float]], keys: set[str]) -> Iterator[tuple[Site, dict[str, float]]]:
    """Yield each tensor under each cast; statistics of the tensor before its cast belong to all of them."""
    plain = {site[:3]: values for site, values in sites.items() if not site[3]}
    named = {site[:3] for site in sites if site[3] in keys}
    for site, values in sites.items():
        if site[3]:
            before = {name: value for name, value in plain.get(site[:3], {}).items() if name not in _OF_CAST or site[3] in keys}
            yield site, {**before, **values}
        elif site[:3] not in named:
            yield site, values


#: Statistics of the tensor before its cast that are NaN or Inf where an element is.
_EXTREMES = ("amax", "cur_amax", "min", "max", "dynamic_range")
_SUMS = ("l1_norm", "mean", "std", "variance", "l2_norm", "l2_norm_square")
#: Statistics that describe a cast and not the tensor before it.
_OF_CAST = frozenset(("underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max"))


def _row(
    step: int, site: Site, values: Mapping[str, float], recipe: Recipe, keys: set[str], index: Mapping[str, tuple[int, bool]]
) -> dict[str, Any] | None:
    """Return the row of one operand under one cast, or of one result; None for a cast that the recipe does not have."""
    module, gemm, tensor, prefix = site
    actual = not prefix or prefix in keys
    if tensor is RESULTS[gemm]:
        return _result_row(step, site, values, recipe, index)
    cast = (recipe if actual else get_recipe(RECIPES[prefix])).casts[gemm, tensor]
    if cast is None:
        return None
    place, is_fp8 = index[module]
    row: dict[str, Any] = {
        **{
            "step": step,
            "module": module,
            "gemm": str(gemm),
            "tensor": str(tensor),
            "cast_name": str(cast) if is_fp8 or not actual else "bf16",
        },
        **{"reference": "operand", "actual": actual, "call_index": place, "numel": NOMINAL},
        **{"replicated": tensor is TensorRole.WEIGHT, "num_tensors": 1},
    }
    for stat, slot in (("underflows%", "num_underflow"), ("overflows%", "num_saturated")):
        if math.isfinite(values.get(stat, math.nan)):
            row[slot] = round(min(max(values[stat], 0.0), 100.0) / 100 * NOMINAL)
    row["amax"] = amax = _amax(values)
    if amax is not None and math.isfinite(values.get("dynamic_range", math.nan)):
        row["amin"] = amax * 2.0 ** -min(max(values["dynamic_range"], 0.0), 300.0)
    row |= _nonfinite(values, cast.granularity == "tensorwise")
    power = _mean_square(values)
    if power is not None:
        row["sum_x2"] = power * NOMINAL
    error = _positive(values, "mse")
    if error is not None:
        row["sum_err2"] = error * NOMINAL
    low, high = _positive(values, "scale_inv_min"), _positive(values, "scale_inv_max")
    row["scale_inv_min"], row["scale_inv_max"] = low, high
    if amax is not None and low is not None and low == high and cast.granularity == "tensorwise":
        row["headroom"] = amax / low / FORMATS[cast.format].max
    return row


def _result_row(
    step: int, site: Site, values: Mapping[str, float], recipe: Recipe, index: Mapping[str, tuple[int, bool]]
) -> dict[str, Any]:
    """Return the row of a GEMM's result, which was compared with nothing."""
    module, gemm, tensor, _ = site
    place, is_fp8 = index[module]
    casts = [recipe.casts[gemm, operand] if is_fp8 else None for operand in OPERANDS[gemm]]
    power = _mean_square(values)
    return {
        **{"step": step, "module": module, "gemm": str(gemm), "tensor": str(tensor), "reference": "shadow", "actual": True},
        **{"cast_name": " @ ".join("bf16" if cast is None else str(cast) for cast in casts), "call_index": place},
        **{"numel": NOMINAL, "replicated": False, "num_tensors": 1, "amax": _amax(values), **_nonfinite(values, False)},
        "sum_y2": None if power is None else power * NOMINAL,
    }


def _nonfinite(values: Mapping[str, float], has_one_scale: bool) -> dict[str, int]:
    """Return the counts of what is NaN and Inf, one for "some", as far as the statistics tell."""
    exact, sums = ([values[stat] for stat in stats if stat in values] for stats in (_EXTREMES, _SUMS))
    counts: dict[str, int] = {}
    if exact or sums:
        # A sum may overflow; the maximum over ranks may pass over a NaN.
        counts = {"num_nan": int(any(map(math.isnan, exact + sums))), "num_inf": int(any(map(math.isinf, exact or sums)))}
    if sum(counts.values()):
        return counts
    scales = [values[stat] for stat in ("scale_inv_min", "scale_inv_max") if stat in values]
    if not all(map(math.isfinite, scales)):
        return {**counts, "num_actual_nonfinite": NOMINAL if has_one_scale else 1}
    return {**counts, "num_actual_nonfinite": int(not math.isfinite(values["mse"]))} if "mse" in values else counts


def _amax(values: Mapping[str, float]) -> float | None:
    """Return the amax from what the log holds of a tensor; None where it is below the four decimals."""
    amax = _positive(values, "amax") or _positive(values, "cur_amax")
    if amax is None and {"min", "max"} <= values.keys():
        return _positive({"amax": max(abs(values["min"]), abs(values["max"]))}, "amax")
    return amax


def _positive(values: Mapping[str, float], stat: str) -> float | None:
    value = values.get(stat)
    return value if value is not None and 0 < value < math.inf else None


def _mean_square(values: Mapping[str, float]) -> float | None:
    """Return the mean of the squares from what the log holds of a tensor."""
    numel = _positive(values, "numel")
    for stat, power in (("l2_norm_square", 1), ("l2_norm", 2)):
        total = _positive(values, stat)
        if numel is not None and total is not None:
            return float(total**power / numel)
    variance = _positive(values, "variance") or (values["std"] ** 2 if _positive(values, "std") else None)
    return None if variance is None or not math.isfinite(values.get("mean", math.nan)) else variance + values["mean"] ** 2

"""Two recorded runs as paths: their statistics of the same tokens, module by module, where no activation was kept.

Sums over the same tensor are the same in both, whatever the casts. The size of a difference is known, not its direction: a scale,
another cast and a changed weight are told, and what leaves every sum as it is is not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8debug.errors import RunError
from fp8debug.parity.dump import is_attention
from fp8debug.parity.measures import Measures, is_of_expert
from fp8debug.parity.names import Names, is_of_adapter, matched
from fp8debug.parity.rules import PATHS, PathFinding, not_finite
from fp8debug.store.read.run import Run

#: Relative difference of two sizes from which on they are not of one tensor: BF16's rounding moves a sum by less.
MAX_SAME = 2e-4
#: The same of what attention hands on, and of a result where its input's size is not the same to the digit: two attention
#: kernels in BF16 move them by 2.0e-4 and 2.9e-4 (measured).
MAX_NOISE = 1e-3
#: Growth of a difference of sizes from one module to the next: sums of noise go up and down.
MAX_GROWTH = 10.0
#: Relative difference of two factors, of the largest value and of the sum, that are one scale.
ONE_SCALE = 0.01
#: Relative difference of two sums of the same numbers, in another order.
SAME_SUM = 1e-9
_COLUMNS = (
    "module, tensor, reference, cast_name, actual, call_index, numel, amax, sum_x2, sum_y2,"
    " num_nan + num_inf + num_actual_nonfinite AS num_nonfinite"
)
_LATER_NONFINITE = (
    "SELECT step, module, tensor FROM sites WHERE gemm = 'fprop' AND (actual OR reference = 'operand')"
    " AND coalesce(num_nan + num_inf, 0) + CASE WHEN actual THEN coalesce(num_actual_nonfinite, 0) ELSE 0 END > 0"
    " AND step > ? ORDER BY step, call_index LIMIT 1"
)
#: Rows of a module by tensor.
Site = dict[str, dict[str, Any]]


def is_run(path: str | Path) -> bool:
    """Return whether a folder is a recorded run."""
    return (Path(path) / "manifest.json").is_file()


def measure_runs(
    train: str | Path, rollout: str | Path, names: Names
) -> tuple[list[Measures], list[PathFinding], list[tuple[str, str]]]:
    """Return the measures and findings of the first sampled step of two runs, and the modules of one alone.

    Args:
        train: the run of the training, or of its forward passes.
        rollout: the run of the rollout, as ``watch(inference=True)`` records it.
        names: table of names.

    Raises:
        RunError: a run cannot be read, or they have no module or not as many tokens in common.
    """
    ours, theirs = _sites(train), _sites(rollout)
    pairs, mine, others = matched(list(ours), list(theirs), names)
    whole = [(name, a.module, b.module) for name, a, b in pairs if a.place is None and b.place is None]
    if not whole:
        raise RunError(f"no module of {train} is one of {rollout}; map their names with --names TABLE")
    measures: list[Measures] = []
    findings: list[PathFinding] = []
    is_same = not any(is_of_adapter(name) for name in others)
    before = 0.0  # largest difference of a size so far
    known = tuple({names.bare(m["fqn"]) for m in Run(path).modules} for path in (train, rollout))
    common = {first: (name, second) for name, first, second in whole}
    for first, a in ours.items():
        if first not in common:
            if first in mine and names.bare(first) in known[1]:
                measures.append(Measures(module=first, theirs=first))
                findings.append(_alone(first, "training"))
                is_same = False
            is_same &= not is_of_adapter(first)  # what comes behind it rounds other sums
            continue
        name, second = common[first]
        b = theirs[second]
        is_of_same = _has_as_many(name, a, b, (train, rollout) if is_same else None)
        given, made = _rms_difference(a, b, "input", "sum_x2"), _rms_difference(a, b, "output", "sum_y2")
        weight = _rms_difference(a, b, "weight", "sum_x2")
        bad = tuple(path for path, site in (("training", a), ("rollout", b)) if _has_nonfinite(site))
        one = Measures(
            module=name, theirs=second, kind="", input=_square(given), output=_square(made), weight=_square(weight), bad=bad
        )
        measures.append(one)
        found = None if not bad or any(m.bad for m in measures[:-1]) else not_finite(name, second, bad)
        found = found or _weight(one, a, b, weight) or _casts(one, a, b)
        if found is None and is_same and is_of_same:
            parent = name.rpartition(".")[0]
            is_behind = is_attention(parent) and any(m.module.rpartition(".")[0] == parent for m in measures[:-1])
            found = judge_size(one, given, made, before, is_behind)
        if found is not None:
            findings.append(found)
        is_same &= found is None
        if is_of_same:
            before = max(before, given or 0.0, made or 0.0)
    left = [(name, "training") for name in mine] + [(name, "rollout") for name in others]
    for name, path in left:
        if path == "rollout" and names.bare(name) in known[0]:
            measures.append(Measures(module=name, theirs=name))
            findings.append(_alone(name, path))
    return measures, findings, left


def notes_of_runs(train: str | Path, rollout: str | Path) -> list[str]:
    """Return what the comparison of two runs leaves out, a line each: all steps but one, and NaN or Inf in their forward passes.

    Args:
        train: the run of the training.
        rollout: the run of the rollout.
    """
    runs = [Run(path) for path in (train, rollout)]
    first, second = (run.sampled_steps[0] for run in runs)
    which = f"step {first:,}" if first == second else f"steps {first:,} and {second:,}"
    notes = [
        f"of two runs only the first sampled step of each ({which}) is compared, by the sizes of forward operands;"
        " fp8debug diff compares all"
    ]
    for name, run, step in zip(("training", "rollout"), runs, (first, second), strict=True):
        for row in run.sql(_LATER_NONFINITE, [step]).to_pylist():
            where = f"{row['module']} fprop.{row['tensor']} at step {row['step']:,}"
            notes.append(f"the {name} has NaN or Inf later, first in {where}: this comparison did not look there")
    return notes


def _has_as_many(name: str, a: Site, b: Site, paths: tuple[str | Path, str | Path] | None) -> bool:
    """Return whether a module got as many numbers in both runs; experts get as many tokens as noise sends them.

    Args:
        name: of the module.
        a: its rows in the training.
        b: the same in the rollout.
        paths: of both runs, where a difference is a mistake.

    Raises:
        RunError: it did not, and is no expert.
    """
    counts = _of(a, "input", "numel"), _of(b, "input", "numel")
    if counts[0] != counts[1] and paths is not None and not is_of_expert(name):
        many = f"{counts[0]:,.0f} numbers in {paths[0]} and {counts[1]:,.0f} in {paths[1]}"
        raise RunError(f"{name} got {many}: record both on the same tokens")
    return counts[0] == counts[1]


def judge_size(one: Measures, given: float | None, made: float | None, before: float, is_behind: bool) -> PathFinding | None:
    """Return the finding of a module whose input or output has another size, by more than what is before it makes.

    Args:
        one: the module.
        given: difference of its input's size.
        made: of its output's.
        before: the largest one of a module before it.
        is_behind: whether attention lies between the modules before it and its input.
    """
    limit = max(MAX_NOISE if is_behind else MAX_SAME, MAX_GROWTH * before)
    if given is not None and given > limit:
        same = "no module before it differs" if before <= MAX_SAME else f"modules before it differ by {before:.2g} at most"
        text = f"{one.module}: its input has another size in the rollout, by {given:.2g}, and {same}"
        return replace(_found("F306", text, one, given, "input"), threshold=limit)
    noise = max(before, given or 0.0)
    limit = MAX_SAME if noise <= SAME_SUM else max(MAX_NOISE, MAX_GROWTH * noise)
    if made is not None and made > limit:
        same = "input, weight and casts are the same"
        if given is None:
            same = "weight and casts are the same, the input's size was not recorded"
        elif given > MAX_SAME:
            same = f"weight and casts are the same, the input's size differs by {given:.2g}"
        text = f"{one.module}: {same}, and the output's size differs by {made:.2g}"
        return replace(_found("F306", text, one, made, "output"), threshold=limit)
    return None


def _sites(path: str | Path) -> dict[str, Site]:
    """Return the rows of fprop at the first sampled step by module, in execution order, and tensor."""
    run = Run(path)
    steps = run.sampled_steps
    if not steps:
        raise RunError(f"{path} has no sampled step")
    query = f"SELECT {_COLUMNS} FROM sites WHERE gemm = 'fprop' AND reference <> 'exact' AND step = ? ORDER BY call_index, actual"
    found: dict[str, Site] = {}
    for row in run.sql(query, [steps[0]]).to_pylist():
        found.setdefault(row["module"], {})[row["tensor"]] = row  # what runs comes last
    return found


def _of(site: Site, tensor: str, column: str) -> float | None:
    value = site.get(tensor, {}).get(column)
    return None if value is None else float(value)


def _ratio(a: Site, b: Site, tensor: str, column: str) -> float | None:
    first, second = _of(a, tensor, column), _of(b, tensor, column)
    if first is None or second is None or first <= 0 or second <= 0:
        return None
    return second / first


def _has_nonfinite(site: Site) -> bool:
    """Return whether a module's result has NaN or Inf, or its input, which a sample of the result's rows may miss."""
    return any((_of(site, tensor, "num_nonfinite") or 0) > 0 for tensor in ("input", "output"))


def _rms_difference(a: Site, b: Site, tensor: str, column: str) -> float | None:
    """Return the relative difference of a tensor's root mean square."""
    ratio = _ratio(a, b, tensor, column)
    return None if ratio is None else abs(float(ratio**0.5) - 1)


def _square(value: float | None) -> float | None:
    return None if value is None else value * value


def _weight(one: Measures, a: Site, b: Site, difference: float | None) -> PathFinding | None:
    largest, size = _ratio(a, b, "weight", "amax"), _ratio(a, b, "weight", "sum_x2")
    if difference is None or largest is None or size is None or (difference <= MAX_SAME and abs(largest - 1) <= 1e-2):
        return None
    gain = size**0.5
    if abs(gain - 1) > 0.05 and abs(largest / gain - 1) < ONE_SCALE:
        return _found("F302", f"{one.module}: the rollout's weight is {gain:.4g} times training's", one, gain, "weight")
    sizes = f"its root mean square is {_against(gain)}, its largest magnitude {_against(largest)}"
    text = f"{one.module}: the rollout's weight is another: {sizes}"
    return _found("F301", text, one, difference, "weight")


def _against(ratio: float) -> str:
    """Return in words how a size of the rollout's compares with training's."""
    if ratio == 1:
        return "the same"
    if not 0.5 < ratio < 2:
        return f"{ratio:.3g} times training's"
    return f"{abs(ratio - 1) * 100:.2g} % {'larger' if ratio > 1 else 'smaller'} than training's"


def _casts(one: Measures, a: Site, b: Site) -> PathFinding | None:
    for tensor in ("weight", "input"):
        first, second = a.get(tensor), b.get(tensor)
        if first is None or second is None:
            continue
        if bool(first["actual"]) != bool(second["actual"]):
            where = "training" if first["actual"] else "rollout"
            text = f"{one.module}: it runs in FP8 in the {where} alone"
            return _found("F307", text, one, None, tensor)
        if first["actual"] and first["cast_name"] != second["cast_name"]:
            casts = f"{first['cast_name']} in training and as {second['cast_name']} in the rollout"
            text = f"{one.module}: its {tensor} is cast as {casts}"
            return _found("F303" if tensor == "weight" else "F304", text, one, None, tensor)
    return None


def _alone(name: str, path: str) -> PathFinding:
    text = f"{name}: it runs in FP8 in the {path} alone; in the other path it is in high precision, or was not recorded"
    return _found("F307", text, Measures(module=name, theirs=name), None, "input")


def _found(code: str, text: str, one: Measures, value: float | None, tensor: str) -> PathFinding:
    finding = PATHS.get(code).found(text, module=one.module, theirs=one.theirs, tensor=tensor, value=value)
    return replace(finding, threshold=MAX_SAME)

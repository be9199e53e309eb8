"""``fp8debug verify``: does the fallback list buy what it promises? The same window of training under several arms.

Arms: ``bf16`` and ``fp8`` (as the script has it) span the gap; ``candidates`` is FP8 with the fallback list; ``fp8_tensors``
quantizes every operand and runs the GEMMs in BF16, which tells quantization from GEMM; ``prior`` leaves the first and
the last FP8 module in BF16, what many recipes do unseen. With held steps two more arms say what the trained weights lose
where inference runs in the other precision: ``fp8_inference`` is trained as ``bf16``, ``bf16_inference`` as ``fp8``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8debug.errors import UsageError
from fp8debug.fallback.candidates import GEMMS
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.losses import departures
from fp8debug.run.arms import Arm
from fp8debug.trials.gap import (
    CLOSED,
    MIN_GAP,
    MIN_REPEATS,
    NUM_BLOCKS,
    ArmGap,
    Assessment,
    Band,
    assess,
    interval,
    mean_band,
    sentence,
)
from fp8debug.trials.ledger import Trial, Trials, write_json

#: 1: first version (fp8debug 0.1).
SCHEMA = 1

#: Arm -> what it is.
ARMS = {
    "bf16": "the yardstick: nothing in FP8",
    "fp8": "the script as it is",
    "candidates": "FP8 with the fallback list",
    "fp8_tensors": "FP8 tensors, BF16 GEMMs",
    "prior": "first and last FP8 module in BF16",
}

#: Arm -> what it is; only with held steps.
INFERENCE_ARMS = {
    "fp8_inference": "trained in BF16, inference in FP8",
    "bf16_inference": "trained in FP8, inference in BF16",
}
#: Arm of inference in another precision -> the arm with the same weights, and the names of the two precisions.
_SAME_WEIGHTS = {"fp8_inference": ("bf16", "BF16", "FP8"), "bf16_inference": ("fp8", "FP8", "BF16")}

#: Shows progress: trainings done, of how many, what runs now.
Report = Callable[[int, int, str], None]


def arms_of(
    names: Sequence[str],
    candidates: Sequence[Mapping[str, Any]],
    prior: Sequence[str],
    recipe: str | None,
    held: int = 0,
    further: Sequence[str] = (),
) -> list[Arm]:
    """Return the arms of these names; those that would only repeat another are left out.

    Args:
        names: of ``ARMS``; ``bf16`` and ``fp8`` are always there.
        candidates: the fallback list; without any entry there is no such arm.
        prior: modules that the positional prior leaves in BF16.
        recipe: what a model without FP8 modules is converted to.
        held: steps after the window in which the weights are held; with them the arms of inference are there too.
        further: modules that leave FP8 too where an arm runs in BF16: Linears of other stacks, and what is none.
    """
    more = tuple(further)
    made = {
        "bf16": Arm(name="bf16", compute="bf16", recipe=recipe, held=held, further=more),
        "fp8": Arm(name="fp8", recipe=recipe, held=held),
        "fp8_tensors": Arm(name="fp8_tensors", compute="fp8_tensors", recipe=recipe),
    }
    if candidates:
        made["candidates"] = Arm(name="candidates", fallbacks=tuple(candidates), recipe=recipe)
    if prior:
        entries = tuple({"module": name, "gemms": list(GEMMS), "tensor": "*", "cast": None} for name in prior)
        made["prior"] = Arm(name="prior", fallbacks=entries, recipe=recipe)
    arms = [made[name] for name in ARMS if name in made and name in {"bf16", "fp8", *names}]
    if held:
        arms.append(Arm(name="fp8_inference", compute="bf16", recipe=recipe, held=held, inference="fp8", further=more))
        arms.append(Arm(name="bf16_inference", recipe=recipe, held=held, inference="bf16", further=more))
    return arms


def verify_run(
    trials: Trials,
    arms: Sequence[Arm],
    *,
    repeats: int = 3,
    last: int | None = None,
    min_gap: float = MIN_GAP,
    closed: float = CLOSED,
    run_name: str,
    save_as: Path,
    report: Report = lambda done, total, what: None,
) -> dict[str, Any]:
    """Train every arm at every repeat, and return the document that is also saved after each training.

    An arm that fails is not repeated; the others go on.

    Raises:
        UsageError: repeats is below 1.
    """
    if repeats < 1:
        raise UsageError(f"repeats must be at least 1, got {repeats}")
    done: list[Trial] = []
    failed: set[str] = set()
    plan = [(repeat, arm) for repeat in range(repeats) for arm in arms]

    def written(*, complete: bool) -> dict[str, Any]:
        found = assess(_curves(done), last, min_gap=min_gap, closed=closed)
        document = _document(trials, arms, done, found, run_name=run_name, repeats=repeats, complete=complete, min_gap=min_gap)
        write_json(save_as, document)
        return document

    written(complete=False)
    for number, (repeat, arm) in enumerate(plan):
        if arm.name in failed:
            continue
        if not trials.known(arm, repeat):
            report(number, len(plan), f"{arm.name}, repeat {repeat + 1} of {repeats}")
        trial = trials.run(arm, repeat)
        done.append(trial)
        if trial.problem:
            failed.add(arm.name)
        written(complete=number == len(plan) - 1)
    return written(complete=True)


def _courses(done: Sequence[Trial]) -> list[str]:
    """Return one clause where a loss of FP8 leaves its course (spikes, rises for good, NaN): whether one of BF16 does too."""
    steps: dict[str, list[int | None]] = {"bf16": [], "fp8": []}
    for trial in done:
        if trial.problem is None and trial.arm in steps:
            numbers = range(trial.first_step, trial.first_step + len(trial.losses))
            steps[trial.arm].append(next(iter(departures(numbers, trial.losses, CourseLimits())), None))
    left = {arm: [step for step in found if step is not None] for arm, found in steps.items()}
    if not left["fp8"] or not steps["bf16"]:
        return []
    counts = {arm: f"{len(left[arm])} of {len(found)} repeats" for arm, found in steps.items()}
    what = f"the loss of FP8 leaves its course in {counts['fp8']}, first at step {min(left['fp8'])}"
    if left["bf16"]:
        return [f"{what}; that of BF16 in {counts['bf16']}, first at step {min(left['bf16'])}: it would have left it without FP8"]
    return [f"{what}; that of BF16 in none of {len(steps['bf16'])}: FP8's doing"]


def _curves(trials: Sequence[Trial]) -> dict[str, dict[int, Sequence[float]]]:
    curves: dict[str, dict[int, Sequence[float]]] = {}
    for trial in trials:
        if trial.problem is None and trial.arm not in INFERENCE_ARMS:
            curves.setdefault(trial.arm, {})[trial.repeat] = trial.losses
    return curves


def _document(
    trials: Trials,
    arms: Sequence[Arm],
    done: Sequence[Trial],
    found: Assessment,
    *,
    run_name: str,
    repeats: int,
    complete: bool,
    min_gap: float,
) -> dict[str, Any]:
    script = trials.script
    trained = [arm for arm in arms if arm.name not in INFERENCE_ARMS]
    inference = inference_gaps(done, min_gap=min_gap)
    return {
        "schema": SCHEMA,
        "run": run_name,
        "complete": complete,
        "verdict": verdict_of(found, {arm.name for arm in arms}, {t.arm for t in done if t.problem}, complete=complete),
        "statements": statements(found, done, script.steps) + [e["statement"] for e in inference if e["statement"]],
        "script": str(script.path),
        "arguments": list(script.args),
        "steps": script.steps,
        "num_steps": found.num_steps,
        "num_last": found.num_last,
        "repeats": repeats,
        "gap": found.gap.to_dict() if found.gap else None,
        "inference": inference,
        "arms": [_arm_entry(arm, found.arms.get(arm.name), [t for t in done if t.arm == arm.name]) for arm in trained],
        "seconds": round(sum(trial.seconds for trial in done), 3),
    }


def _arm_entry(arm: Arm, gap: ArmGap | None, done: Sequence[Trial]) -> dict[str, Any]:
    def band(value: Band | None) -> dict[str, float | None] | None:
        return value.to_dict() if value else None

    return {
        "name": arm.name,
        "about": ARMS.get(arm.name),
        "fallbacks": [dict(entry) for entry in arm.fallbacks],
        "num_repeats": gap.num_repeats if gap else 0,
        "num_diverged": gap.num_diverged if gap else 0,
        "loss": gap.loss if gap else None,
        "above_bf16": band(gap.above_bf16) if gap else None,
        "share": band(gap.share) if gap else None,
        "closed": gap.closed if gap else None,
        "problem": next((trial.problem for trial in done if trial.problem), None),
        "stderr": next((trial.stderr for trial in done if trial.problem), ""),
        "first_step": done[0].first_step if done else None,
        "losses": [[loss if math.isfinite(loss) else None for loss in trial.losses] for trial in done],
    }


def inference_gaps(done: Sequence[Trial], *, min_gap: float = MIN_GAP) -> list[dict[str, Any]]:
    """Compare inference in BF16 and FP8 of the same trained weights, on the same batches.

    The difference is taken batch by batch within a repeat; bands are those of :mod:`fp8debug.trials.gap`.

    Args:
        done: trainings, of which those of :data:`INFERENCE_ARMS` and of their weights' own arms count.
        min_gap: share of the loss of the weights' own inference below which a difference is nothing.

    Returns:
        An entry for each arm of inference that was trained: ``arm``, ``weights`` and ``inference`` (precisions), ``loss`` and
        ``own_loss`` (means over batches and repeats; None where they are not finite), ``above`` (band of their difference),
        ``counts`` (whether it is more than noise and more than ``min_gap``), ``statement``, ``problem`` and ``stderr``.
    """
    found = []
    for name, (own_name, weights, other) in _SAME_WEIGHTS.items():
        changed = {trial.repeat: trial for trial in done if trial.arm == name}
        if not changed:
            continue
        own = {trial.repeat: trial for trial in done if trial.arm == own_name and trial.problem is None}
        failed = next((trial for trial in changed.values() if trial.problem), None)
        pairs = [(t.held_losses, own[r].held_losses) for r, t in changed.items() if r in own and t.problem is None]
        judged = _judge_inference(pairs, f"{other} inference of the weights that {weights} trained", weights, min_gap)
        problem = {"problem": failed.problem if failed else None, "stderr": failed.stderr if failed else ""}
        found.append({"arm": name, "weights": weights, "inference": other, **judged, **problem})
    return found


def _judge_inference(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], subject: str, weights: str, min_gap: float
) -> dict[str, Any]:
    entry: dict[str, Any] = {"loss": None, "own_loss": None, "above": None, "counts": None, "statement": None}
    arrays = [np.array(list(zip(*pair, strict=False))).T for pair in pairs]  # a batch that one of them lacks is no pair
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return entry
    loss, own_loss = (float(value) for value in np.concatenate(arrays, axis=1).mean(axis=1))
    entry |= {"loss": loss if math.isfinite(loss) else None, "own_loss": own_loss if math.isfinite(own_loss) else None}
    if not math.isfinite(own_loss):
        return {
            **entry,
            "statement": f"{subject} cannot be judged: their own inference, in {weights}, has a loss that is not finite",
        }
    if not math.isfinite(loss):
        return {
            **entry,
            "counts": True,
            "statement": f"{subject} has a loss that is not finite, and inference in {weights} has none",
        }
    parts = 1 if len(arrays) >= MIN_REPEATS else NUM_BLOCKS
    blocks = [block for array in arrays for block in np.array_split(array[0] - array[1], min(parts, array.shape[1]))]
    above = mean_band(np.array([block.mean() for block in blocks]))
    counts = not above.low <= 0 <= above.high and abs(above.value) >= min_gap * abs(own_loss)
    size = f"{above.value:+.4g} {interval(above)}, {above.value / max(abs(own_loss), 1e-30):+.2%}"
    statement = f"{subject} changes their loss by {size}" + ("" if counts else ": no difference that counts")
    return {**entry, "above": above.to_dict(), "counts": counts, "statement": statement}


def verdict_of(found: Assessment, arms: set[str], failed: set[str], *, complete: bool) -> str:
    """Return ``closed``, ``partly``, ``not_closed``, ``nothing_to_close``, ``no_candidates``, ``bf16_diverged``, ``failed``
    or ``incomplete``."""
    if not complete:
        return "incomplete"
    if failed & {"bf16", "fp8", "candidates"} or found.verdict == "incomplete":
        return "failed"
    if found.verdict in ("nothing_to_close", "bf16_diverged"):
        return found.verdict
    if "candidates" not in arms:
        return "no_candidates"
    return {"yes": "closed", "partly": "partly", "no": "not_closed"}[str(found.arms["candidates"].closed)]


def statements(found: Assessment, done: Sequence[Trial], steps: int) -> list[str]:
    """Return what there is to say, the gap first."""
    said = [sentence(found), *_courses(done)]
    candidates, tensors = found.arms.get("candidates"), found.arms.get("fp8_tensors")
    if candidates and candidates.closed:
        said.append({"yes": "the candidates close it", "partly": "the candidates close a part of it"}.get(
            candidates.closed, "the candidates do not close it"))  # fmt: skip
    if tensors and tensors.closed:
        said.append(
            {
                "yes": "FP8 tensors in BF16 GEMMs close it: the arithmetic of the FP8 GEMM makes the gap",
                "partly": "FP8 tensors in BF16 GEMMs close a part of it: quantization and the GEMM's arithmetic both count",
                "no": "FP8 tensors in BF16 GEMMs do not close it: the operands make the gap, not the GEMM's arithmetic",
            }[tensors.closed]
        )
    repeats = found.arms["fp8"].num_repeats if "fp8" in found.arms else 0
    if 0 < repeats < MIN_REPEATS:
        said.append(f"fewer than {MIN_REPEATS} repeats: the band is that of the steps, and another seed may differ by more")
    if 0 < found.num_steps < steps:
        said.append(f"the script ended after {found.num_steps} of the {steps} steps asked for")
    return said

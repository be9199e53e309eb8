"""``fp8debug verify``: does the fallback list buy what it promises? The same window of training under several arms.

Arms: ``bf16`` and ``fp8`` (as the script has it) span the gap; ``candidates`` is FP8 with the fallback list; ``fp8_tensors``
quantizes every operand and runs the GEMMs in BF16, which tells quantization from GEMM; ``prior`` leaves the first and
the last FP8 module in BF16, what many recipes do unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8debug.errors import UsageError
from fp8debug.fallback.candidates import GEMMS
from fp8debug.run.arms import Arm
from fp8debug.trials.gap import CLOSED, MIN_GAP, MIN_REPEATS, ArmGap, Assessment, Band, assess, sentence
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

#: Shows progress: trainings done, of how many, what runs now.
Report = Callable[[int, int, str], None]


def arms_of(names: Sequence[str], candidates: Sequence[Mapping[str, Any]], prior: Sequence[str], recipe: str | None) -> list[Arm]:
    """Return the arms of these names; those that would only repeat another are left out.

    Args:
        names: of ``ARMS``; ``bf16`` and ``fp8`` are always there.
        candidates: the fallback list; without any entry there is no such arm.
        prior: modules that the positional prior leaves in BF16.
        recipe: what a model without FP8 modules is converted to.
    """
    made = {
        "bf16": Arm(name="bf16", compute="bf16", recipe=recipe),
        "fp8": Arm(name="fp8", recipe=recipe),
        "fp8_tensors": Arm(name="fp8_tensors", compute="fp8_tensors", recipe=recipe),
    }
    if candidates:
        made["candidates"] = Arm(name="candidates", fallbacks=tuple(candidates), recipe=recipe)
    if prior:
        entries = tuple({"module": name, "gemms": list(GEMMS), "tensor": "*", "cast": None} for name in prior)
        made["prior"] = Arm(name="prior", fallbacks=entries, recipe=recipe)
    return [made[name] for name in ARMS if name in made and name in {"bf16", "fp8", *names}]


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
        document = _document(trials, arms, done, found, run_name=run_name, repeats=repeats, complete=complete)
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


def _curves(trials: Sequence[Trial]) -> dict[str, dict[int, Sequence[float]]]:
    curves: dict[str, dict[int, Sequence[float]]] = {}
    for trial in trials:
        if trial.problem is None:
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
) -> dict[str, Any]:
    script = trials.script
    return {
        "schema": SCHEMA,
        "run": run_name,
        "complete": complete,
        "verdict": verdict_of(found, {arm.name for arm in arms}, {t.arm for t in done if t.problem}, complete=complete),
        "statements": statements(found, done, script.steps),
        "script": str(script.path),
        "arguments": list(script.args),
        "steps": script.steps,
        "num_steps": found.num_steps,
        "num_last": found.num_last,
        "repeats": repeats,
        "gap": found.gap.to_dict() if found.gap else None,
        "arms": [_arm_entry(arm, found.arms.get(arm.name), [t for t in done if t.arm == arm.name]) for arm in arms],
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
    said = [sentence(found)]
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

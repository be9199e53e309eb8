"""F144: a run was resumed with other FP8 settings than those it was recorded with before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.store.configuration import Difference, differences
from fp8debug.store.read.resumed import JoinedRun

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_EARLIER = "the earlier part of the run"


@dataclass(frozen=True)
class ResumedWithOtherSettings(Rule):
    """A resumed run has other FP8 settings than before the resume, or than its checkpoint states.

    What it detects
        Settings in force that differ between the parts of a resumed run: format, granularity, scaling, scale rounding, amax
        eps, amax history of each operand; modules that go into or out of FP8; backend; dtype of the weights; fast
        accumulation; environment variables that FP8 libraries read. They are compared when watch() begins, again once the
        first sampled step shows what a backend runs, and between the folders of `fp8debug triage PART1 PART2`. With
        watch(checkpoint=FOLDER) also with the manifest.json of a run or the quantization_config that the folder holds.
        Versions, the device and BF16 on request are information.

    Why it matters
        Weights and optimizer state are those of the earlier numerics. A reload with another eps, rounding or granularity
        gives other operands from the first step on; the loss may jump, or drift far later, and no single cast is wrong.

    Example
        Resumed at step 2000 with other settings than the earlier part of the run: scale_rounding: none -> pow2_ceil (24
        modules, first layers.0.mlp.up); amax_eps: 0.0 -> 1e-06 (24 modules, first layers.0.mlp.up).

    Cure
        Resume with the flags and the environment of the earlier part. Where the change is meant, begin a new run folder, or
        ignore F144 for this run.

    Thresholds
        - None: a setting differs or it does not. LoongForge's guide asks for the same flags and eps on reload; numerics.md,
          5, mode 13. TransformerEngine #123 and #982 are reloads whose scales differed.
    """

    code = "F144"
    name = "resumed-with-other-settings"
    cure = "resume with the flags and environment of the earlier part; where the change is meant, record into a new folder"
    needs_fp8 = False
    is_harmful = False

    def needs(self, run: Run) -> str | None:
        """Ask for a resumed run."""
        is_compared = isinstance(run, JoinedRun) or run.manifest.get("resumed") is not None
        return None if is_compared else "the run was not resumed"

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding for each resume, and one more for what is information."""
        for (step, against), found in _resumptions(run).items():
            for is_notable in (True, False):
                own = [one for one in found if one.is_notable is is_notable]
                if own:
                    yield self._finding(run, step, against, own, Severity.WARNING if is_notable else Severity.INFO)

    def _finding(self, run: Run, step: int, against: str, found: list[Difference], severity: Severity) -> Finding:
        message = f"resumed at step {step} with other settings than {against}: {'; '.join(map(str, found))}"
        return Finding(code=self.code, name=self.name, severity=severity, steps=(step, max(step, run.steps_range[1])),
                       ranks=tuple(run.ranks), message=message, cure=self.cure)  # fmt: skip


def _resumptions(run: Run) -> dict[tuple[int, str], list[Difference]]:
    """Return the differences by step of the resume and what they were compared with."""
    found: dict[tuple[int, str], list[Difference]] = {}
    manifests = run.manifests if isinstance(run, JoinedRun) else [run.manifest]
    for manifest in manifests:
        for entry in manifest.get("resumed") or ():
            found.setdefault((entry.get("step") or 0, entry.get("against") or _EARLIER), []).append(Difference.from_dict(entry))
    if isinstance(run, JoinedRun):
        for step, (before, now) in zip(run.starts[1:], pairwise(run.manifests), strict=True):
            found.setdefault((step, _EARLIER), []).extend(differences(before, now))
    return {place: own for place, own in sorted(found.items()) if own}


RULES.add(ResumedWithOtherSettings.code, ResumedWithOtherSettings())

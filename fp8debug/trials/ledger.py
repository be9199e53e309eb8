"""The ledger of an experiment: each finished training is written down at once, so that a killed experiment goes on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8debug.errors import RunError, UsageError
from fp8debug.run.arms import REFUSED, Arm
from fp8debug.store.file_checks import read_json
from fp8debug.store.read.run import Run
from fp8debug.trials.script import Ending, Script

#: 1: first version (fp8debug 0.1).
SCHEMA = 1

#: Marks the folder of a training: no other folder is ever deleted.
MARK = ".fp8debug-training"

#: Trains an arm at a repeat into a folder.
Trainer = Callable[[Arm, int, Path], Ending]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of one arm.

    Attributes:
        arm: name of the arm.
        repeat: number of its seed.
        losses: of its steps, those without one left out.
        first_step: number of the first.
        seconds: that the process ran.
        problem: why it cannot be used, in one line; None when it can.
        stderr: last lines of its stderr, for a problem.
        reused: it was done before this call.
        held_losses: of the steps after the window, in which the weights were held.
    """

    arm: str
    repeat: int
    losses: tuple[float, ...] = ()
    first_step: int = 0
    seconds: float = 0.0
    problem: str | None = None
    stderr: str = ""
    reused: bool = False
    held_losses: tuple[float, ...] = ()

    @property
    def diverged(self) -> bool:
        """True if some loss was NaN or infinite."""
        return not all(map(math.isfinite, self.losses))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; a loss that is not finite is the text ``nan``, ``inf`` or ``-inf``."""
        return {
            "arm": self.arm,
            "repeat": self.repeat,
            "losses": _finite_or_text(self.losses),
            "first_step": self.first_step,
            "seconds": round(self.seconds, 3),
            "problem": self.problem,
            "stderr": self.stderr,
            **({"held_losses": _finite_or_text(self.held_losses)} if self.held_losses else {}),
        }


class Trials:
    """The trainings of one script in one folder: run once, remembered by arm and repeat.

    Args:
        folder: where the runs and the ledger ``trials.json`` lie; it is made when it is not there.
        script: what is trained.
        fresh: forget what the folder holds.
        train: trains an arm; the script's own process by default.

    Attributes:
        seconds: what the trainings done in this process took.

    Raises:
        UsageError: the folder holds trainings of another script or other arguments, or another process works in it.
    """

    def __init__(self, folder: Path, script: Script, *, fresh: bool = False, train: Trainer | None = None) -> None:
        self.folder, self.script = folder, script
        self.seconds = 0.0
        self._train = train or script.train
        self._known: dict[str, Trial] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not fresh:
                self._load()
        except OSError:
            self.close()
            raise UsageError(f"another fp8debug trains in {folder}; wait for it or choose another --out") from None
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Let another process work in the folder."""
        os.close(self._lock)

    def _load(self) -> None:
        path = self.folder / "trials.json"
        if not path.exists():
            return
        way_out = "choose another --out, or start over with --fresh"
        try:
            document = read_json(path, self.folder)
            version, identity, trials = document["schema"], dict(document["identity"]), document["trials"]
            rows = trials.items() if version == SCHEMA else ()
            known = {name: Trial(**{**values, **_losses(values), "reused": True}) for name, values in rows}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} cannot be read ({error!r}); {way_out}") from None
        if version != SCHEMA:
            raise UsageError(f"{path} has schema {version}, this fp8debug reads {SCHEMA}; {way_out}")
        ours = self.script.identity()
        changed = [key for key in ours if identity.get(key) != ours[key]]
        if changed:
            key = changed[0]
            detail = "" if key == "content" else f" ({identity.get(key)!r}, now {ours[key]!r})"
            what = "the script's content differs" if key == "content" else f"{key} differ" + ("" if key.endswith("s") else "s")
            raise UsageError(f"{self.folder} holds trainings of another experiment: {what}{detail}; {way_out}")
        self._known |= known

    def known(self, arm: Arm, repeat: int) -> bool:
        """Return whether a training was done already, so that :meth:`run` costs nothing."""
        trial = self._known.get(self._key(arm, repeat))
        return trial is not None and trial.problem is None

    def run(self, arm: Arm, repeat: int) -> Trial:
        """Return one training, done now or before; one that failed before is tried again."""
        key = self._key(arm, repeat)
        if self.known(arm, repeat):
            return self._known[key]
        out = self.folder / f"{arm.name}-{repeat}"
        if out.exists() and not (out / MARK).exists():
            raise UsageError(f"{out} is there already and no training of ours; choose another --out")
        _renew(out)
        ending = self._train(arm, repeat, out)
        trial = self._known[key] = read_trial(arm, repeat, out, ending, self.script)
        self.seconds += ending.seconds
        trials = {name: known.to_dict() for name, known in self._known.items()}
        write_json(self.folder / "trials.json", {"schema": SCHEMA, "identity": self.script.identity(), "trials": trials})
        return trial

    @staticmethod
    def _key(arm: Arm, repeat: int) -> str:
        text = json.dumps(arm.to_dict(), sort_keys=True)
        return f"{arm.name}-{repeat}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _renew(out: Path) -> None:
    """Make the marked, empty folder of a training; a process killed at any point leaves none that has no mark."""
    aside = out.with_name(f".{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if out.exists():
        out.rename(aside)
        shutil.rmtree(aside)
    aside.mkdir()
    (aside / MARK).touch()
    aside.rename(out)


def _finite_or_text(losses: Sequence[float]) -> list[float | str]:
    return [loss if math.isfinite(loss) else str(loss) for loss in losses]


def _losses(values: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {key: tuple(map(float, values.get(key, ()))) for key in ("losses", "held_losses")}


def read_trial(arm: Arm, repeat: int, out: Path, ending: Ending, script: Script) -> Trial:
    """Return what a training left in its folder, with the reason when it is of no use."""
    steps: list[int] = []
    losses: list[float] = []
    held: list[float] = []
    problem = None
    try:
        rows = Run(out).sql("SELECT step, loss FROM steps ORDER BY step").to_pylist()
        steps = [row["step"] for row in rows if row["loss"] is not None]
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        window = sum(step < steps[0] + script.steps for step in steps) if arm.held else script.steps
        held, losses, steps = losses[window : window + arm.held] if arm.held else [], losses[:window], steps[:window]
        if not losses:
            problem = "no loss was recorded: the script calls neither loss.backward() on a scalar nor watch.step(loss=...)"
    except RunError as error:
        problem = "the script trained no model with a Linear: no forward ran with gradients on"
        if (out / "manifest.json").exists():
            problem = f"no step of it can be read: {error}"
    if arm.held and losses and not held:
        problem = f"the script ended after {len(losses)} steps, before any with held weights; lower --steps or let it run longer"
    if ending.timed_out:
        problem = f"stopped after {ending.seconds:.0f} s by --timeout, {len(losses)} of {script.steps} steps done"
    elif refused := next((line for line in ending.stderr.splitlines() if line.startswith(REFUSED)), ""):
        problem = refused.removeprefix(REFUSED)
    elif ending.returncode and all(map(math.isfinite, losses)):
        last = ending.stderr.splitlines()[-1] if ending.stderr else "nothing on stderr"
        problem = f"the script failed with exit code {ending.returncode}: {last}"
    elif problem is None and not (out / "arm.json").exists():
        problem = "the script trained nothing under this arm: no forward ran with gradients on"
    return Trial(
        arm=arm.name,
        repeat=repeat,
        losses=tuple(losses),
        held_losses=tuple(held),
        first_step=steps[0] if steps else 0,
        seconds=ending.seconds,
        problem=problem,
        stderr=ending.stderr if problem else "",
    )


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document whole or not at all."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)

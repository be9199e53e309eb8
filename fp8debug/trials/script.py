"""One training of the user's script: the command, the process, and how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp8debug.errors import UsageError
from fp8debug.run.arms import Arm, end_with_parent

#: How long a process that is told to end may take before it is killed.
GRACE_S = 5.0
#: Last lines of stderr that a failed training shows.
TAIL_LINES = 12


class Ending(NamedTuple):
    """End of a training process: exit code, seconds it ran, whether its time was up, the last lines of its stderr."""

    returncode: int
    seconds: float
    timed_out: bool
    stderr: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """The user's training script, and how to start it.

    Attributes:
        path: the Python file.
        args: its own arguments.
        steps: it ends after so many optimizer steps.
        recipe: what a model without FP8 modules is converted to in the FP8 arms.
        launcher: words in place of the Python interpreter, such as ``torchrun --nproc-per-node 2``.
        seed_arg: argument of the script that seeds it, varied for repeats; None shifts the seeds that the script sets.
        every: statistics are recorded every so many steps; None records the losses alone.
        timeout_s: seconds a training may take.

    Raises:
        UsageError: there is no such file, or a number is out of range.
    """

    path: Path
    args: tuple[str, ...] = ()
    steps: int
    recipe: str | None = None
    launcher: tuple[str, ...] = ()
    seed_arg: str | None = None
    every: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise UsageError(f"no script {self.path}; expected the path of a Python file")
        if self.steps < 1 or (self.every is not None and self.every < 1):
            raise UsageError(f"steps and every must be at least 1, got steps={self.steps}, every={self.every}")
        if self.timeout_s is not None and not 0 < self.timeout_s < 1e9:
            raise UsageError(f"the timeout is a number of seconds above 0, got {self.timeout_s}")

    def identity(self) -> dict[str, Any]:
        """Return what two trainings must share to be compared."""
        return {
            "script": str(self.path.resolve()),
            "content": hashlib.sha256(self.path.read_bytes()).hexdigest(),
            "arguments": list(self.args),
            "folder": str(Path.cwd()),
            "steps": self.steps,
            "recipe": self.recipe,
            "launcher": list(self.launcher),
            "seed argument": self.seed_arg,
        }

    def command(self, spec: Path, out: Path, repeat: int) -> list[str]:
        """Return the command that trains one arm, whose JSON file is ``spec``, into ``out``."""
        words = ["-m", "fp8debug.run", "--out", str(out), "--arm", str(spec), "--steps", str(self.steps), "--child"]
        if self.every is not None:
            words += ["--every", str(self.every)]
        args = list(self.args)
        if self.seed_arg is None:
            words += ["--seed-offset", str(repeat)]
        elif repeat:
            args = with_seed(args, self.seed_arg, repeat)
        return [*(self.launcher or (sys.executable,)), *words, str(self.path), *args]

    def train(self, arm: Arm, repeat: int, out: Path) -> Ending:
        """Run one training; stdout and stderr go to files in ``out``, no process is left behind."""
        spec = out / "spec.json"
        spec.write_text(json.dumps(arm.to_dict()), encoding="utf-8")
        environment = {**os.environ, "FP8DEBUG_ARM": arm.name, "FP8DEBUG_SEED_OFFSET": str(repeat)}
        began = time.monotonic()
        with (out / "stdout.txt").open("wb") as stdout, (out / "stderr.txt").open("wb") as stderr:
            try:
                process = subprocess.Popen(
                    self.command(spec, out, repeat),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise UsageError(
                    f"cannot start {self.launcher[0] if self.launcher else sys.executable}: {error.strerror}"
                ) from None
            timed_out = False
            try:
                process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                stop(process)
        seconds = time.monotonic() - began
        return Ending(process.returncode, seconds, timed_out, tail(out / "stderr.txt"))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started (its process group), and wait for it."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            _signal_group(process.pid, number)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
    _signal_group(process.pid, signal.SIGKILL)  # workers that outlived it


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass  # nobody is left in it


def tail(path: Path) -> str:
    """Return the last lines of a file, without progress bars that overwrite themselves."""
    text = path.read_bytes()[-20_000:].decode("utf-8", errors="replace")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-TAIL_LINES:])


def with_seed(args: list[str], name: str, offset: int) -> list[str]:
    """Return arguments whose seed ``name`` is raised by an offset; added where they have none.

    Raises:
        UsageError: its value is no whole number.
    """
    for place, word in enumerate(args):
        key, equals, value = word.partition("=")
        if key != name:
            continue
        at = place if equals else place + 1
        text = value if equals else (args[at] if at < len(args) else "")
        try:
            seed = int(text) + offset
        except ValueError:
            raise UsageError(f"{name} is to be varied, but its value {text!r} is no whole number") from None
        return [*args[:at], f"{name}={seed}" if equals else str(seed), *args[at + 1 :]]
    return [*args, name, str(offset)]

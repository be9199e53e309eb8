"""``python -m fp8debug.run [--out DIR] [--every N] train.py ARGS``: record an unmodified training script.

The script runs as ``__main__``. The model is taken to be the outermost module with a Linear whose forward runs with gradients
on, the loss the scalar on which ``backward()`` is called (the mean where a step has several), and a step ends with
``optimizer.step()``. A script that calls ``fp8debug.watch()`` itself is left to it.

With ``--arm`` the same script is one training of an experiment: see ``arms`` and ``fp8debug verify``.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fp8debug import adapters
from fp8debug.adapters import attach
from fp8debug.adapters.environment import rank_and_world
from fp8debug.adapters.quiet import check_ranks
from fp8debug.adapters.targets import roots_of
from fp8debug.arms import REFUSED, Arm, apply_arm, convert_plain, end_with_parent
from fp8debug.errors import Fp8DebugError, RecordError, UsageError
from fp8debug.guard import Guard
from fp8debug.meter import LossMeter
from fp8debug.recipes import get_recipe
from fp8debug.selectors import Selector
from fp8debug.store.places import refuse_to_write
from fp8debug.store.volume import parse_size
from fp8debug.trainers import loop_of

#: In an arm the loss is what counts: no statistics, unless ``--every`` asks for them.
_NEVER = 2**62
#: Options that go to :func:`fp8debug.watch` as they are; an arm takes none of them.
_WATCH_OPTIONS = (
    "dump",
    "include",
    "exclude",
    "what_if",
    "plain_recipe",
    "shadow_rows",
    "resume_from",
    "compiled",
    "budget",
    "total_steps",
)


class AutoWatch:
    """Waits for a script's model, then watches it.

    Args:
        out: the run directory.
        options: keyword arguments of :func:`fp8debug.watch`.
    """

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.watch: attach.Watch | None = None
        self.found = False
        self._out = out
        self._options = options
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Listen for the first training forward, for the loss, and for a script that attaches itself."""
        self._undo.append(register_module_forward_pre_hook(self._before_forward).remove)
        self._undo.append(LossMeter(lambda: self.watch).start())
        attach.on_watch.append(self.stop)

    def stop(self) -> None:
        """Stop listening, for the script attaches itself or has ended; a watch goes on."""
        self.found = True
        while self._undo:
            self._undo.pop()()
        if self.stop in attach.on_watch:
            attach.on_watch.remove(self.stop)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if not _trains(module):
            return
        self.found = True
        self._undo.pop(0)()
        attach.on_watch.remove(self.stop)
        try:
            self.watch = attach.watch(module, self._out, **self._options)
            if rank_and_world()[0] == 0:
                print(f"fp8debug: recording {type(module).__name__} into {self._out}", file=sys.stderr)
        except Fp8DebugError as error:
            print(f"fp8debug: not recorded: {error}", file=sys.stderr)


class ArmWatch(AutoWatch):
    """Records one arm: gives the model its arm at the first training forward, and ends the script after some steps.

    What the script itself hands to ``fp8debug.watch`` is recorded into the arm's folder instead of the script's.

    Args:
        out: the run directory.
        options: keyword arguments of :func:`fp8debug.watch` that override the script's.
        arm: what to change.
        steps: the script ends before the step after so many; None lets it run to its end.
    """

    def __init__(self, out: Path, options: dict[str, Any], arm: Arm, steps: int | None) -> None:
        super().__init__(out, options)
        self._arm, self._steps = arm, steps
        self._root: nn.Module | None = None  # the module whose forward begins a step
        self._targets: list[nn.Module] = []
        self._first = self._num_watches = 0
        self._own_watch = attach.watch

    def start(self) -> None:
        """Listen, and stand in for ``fp8debug.watch``."""
        self._undo.append(register_module_forward_pre_hook(self._before_forward).remove)
        self._undo.append(LossMeter(lambda: self.watch).start())
        for place in (attach, adapters, sys.modules["fp8debug"]):
            vars(place)["watch"] = self._redirected
            self._undo.append(partial(vars(place).__setitem__, "watch", self._own_watch))

    def _redirected(self, target: object, path: str | Path, **options: Any) -> Any:
        if loop_of(target) is not None:  # a trainer: its model comes here when it is ready
            return self._own_watch(target, self._out, **options)
        out = self._out if self._num_watches == 0 else self._out / f"watch-{self._num_watches}"
        self._num_watches += 1
        roots = roots_of(target)
        if not self._targets:
            self._targets = roots
            convert_plain(self._arm, roots)
        watch = self._begin_watch(target, out, options)
        if self.watch is None:
            self.watch, self._first = watch, watch.current_step
        return watch

    def _begin_watch(self, target: object, out: Path, options: dict[str, Any]) -> attach.Watch:
        watch = self._own_watch(target, out, **{**options, **self._options})
        if self._options["every"] == _NEVER:
            watch.skip_statistics()  # not at step 0 either
        return watch

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if self._root is not None:
            if module is self._root and torch.is_grad_enabled():
                self._begin_step()
        elif _trains(module):
            self._root, self.found = module, True
            try:
                self._begin(module)
            except Fp8DebugError as error:
                print(f"{REFUSED}{error}", file=sys.stderr)
                raise SystemExit(2) from None  # another arm than the one asked for must not go on

    def _begin(self, module: nn.Module) -> None:
        roots = self._targets or roots_of(module)
        applied = apply_arm(self._arm, roots, self._first)
        if self.watch is None:
            self._num_watches += 1
            self.watch = self._begin_watch(module, self._out, {})
            self._first = self.watch.current_step
        if rank_and_world()[0] == 0:
            (self._out / "arm.json").write_text(json.dumps({**self._arm.to_dict(), "applied": applied}), encoding="utf-8")

    def _begin_step(self) -> None:
        assert self.watch is not None
        self.watch.begin_step()
        if self._steps is not None and self.watch.current_step - self._first >= self._steps:
            raise SystemExit(0)


def _trains(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(isinstance(m, nn.Linear) for m in module.modules())


def shift_seeds(offset: int) -> None:
    """Seed torch, NumPy and ``random`` alike in every arm, and add an offset to the seeds that the script sets.

    A ``torch.Generator`` that the script makes and seeds is out of reach: its data stay the same.
    """
    own_torch, own_random, own_numpy = torch.manual_seed, random.seed, np.random.seed
    own_torch(offset)
    own_random(offset)
    own_numpy(offset)
    if not offset:
        return

    def shifted(seed: Any) -> Any:
        return seed + offset if isinstance(seed, int) else seed

    def manual_seed(seed: int) -> torch.Generator:
        return own_torch(shifted(seed))

    torch.manual_seed = torch.random.manual_seed = manual_seed
    random.seed = lambda a=None, version=2: own_random(shifted(a), version)
    np.random.seed = lambda seed=None: own_numpy(shifted(seed))


def main(argv: list[str] | None = None) -> int:
    """Run a script under the recorder; return its exit code.

    Raises:
        SystemExit: as the script does.
    """
    options = _parser().parse_args(argv)
    out = options.out or Path("runs") / options.script.stem
    try:
        refuse_to_write(out)
        if not options.script.is_file():
            raise UsageError(f"no script {options.script}; expected the path of a Python file")
        for name in ("every", "steps", "shadow_rows", "total_steps"):
            if (value := getattr(options, name)) is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if (options.resume_from or 0) < 0:
            raise UsageError(f"--resume-from is the number of the first step, 0 or more, got {options.resume_from}")
        recording = _recording(options)
        arm = Arm.read(options.arm) if options.arm else None
        if options.steps is not None and arm is None:
            raise UsageError("--steps needs --arm; `--arm fp8` is the script as it is")
        if _holds_run(out) and not options.child and options.resume_from is None:
            raise UsageError(f"{out} already holds a run; choose another --out or delete it, or go on with --resume-from STEP")
    except (UsageError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.child:
        end_with_parent()
    auto = AutoWatch(out, {"every": options.every or 10, **recording})
    if arm is not None:
        # absolute, because the script may change its directory
        # and arms differ by nothing but what they are: a guard of the script would change some of them
        overriding = {"every": options.every or _NEVER, "what_if": (), "dump": (), "guard": None}
        auto = ArmWatch(out.absolute(), overriding, arm, options.steps)
        shift_seeds(options.seed_offset)
    auto.start()
    sys.argv = [str(options.script), *options.args]
    sys.path.insert(0, str(options.script.resolve().parent))
    try:
        runpy.run_path(str(options.script), run_name="__main__")
    finally:
        found = auto.found
        auto.stop()
        if auto.watch is not None:
            auto.watch.close()
        elif not found:
            print("fp8debug: nothing recorded: no module with a Linear ran forward with gradients on", file=sys.stderr)
    return 0


def _holds_run(out: Path) -> bool:
    """Return whether this rank's part of a run is there: another rank of the job may have begun already."""
    rank, _ = rank_and_world()
    return (out / "manifest.json" if rank == 0 else out / f"rank={rank:05d}").exists()


def _recording(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`fp8debug.watch` that the command line gives.

    Raises:
        UsageError: a dump, a recipe or the guard cannot be used; seen now, not when the model is ready.
    """
    found: dict[str, Any] = {}
    for name in _WATCH_OPTIONS:
        value = getattr(options, name)
        if value not in (None, []):
            found[name] = tuple(value) if isinstance(value, list) else value
    for text in options.dump:
        Selector.parse(text)
    for recipe in [*options.what_if, *([options.plain_recipe] if options.plain_recipe else [])]:
        get_recipe(recipe)
    if options.budget is not None:
        parse_size(options.budget)
    if options.ranks is not None:
        check_ranks(found.setdefault("ranks", _ranks(options.ranks)))
    if options.guard is not None:
        found["guard"] = Guard(after=options.guard)
    if found and options.arm:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in found)
        raise UsageError(f"{given} and --arm do not go together: an arm records its loss, and statistics only with --every")
    return found


def _ranks(text: str) -> list[int] | str:
    words = text.split(",")
    return [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8debug run",
        usage="fp8debug run [--out DIR] [--every N] [OPTIONS] train.py ARGS...",
        description="Run a training script unchanged and record the numerics of its FP8 GEMMs.",
        epilog="Several processes: torchrun ... -m fp8debug.run train.py ARGS. What follows the script's name is the script's.",
    )
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, help="run directory (default: runs/SCRIPT)")
    add("--every", metavar="N", type=int, help="record every that many steps (default: 10; with --arm: only the loss)")
    add(
        "--dump",
        metavar="SITES",
        action="append",
        default=[],
        help="write operands whole: 'blocks.*.down:fprop@100:200', on-finding",
    )
    add("--include", metavar="GLOB", action="append", default=[], help="modules to record (default: all); repeat it")
    add("--exclude", metavar="GLOB", action="append", default=[], help="modules not to record; repeat it")
    add("--what-if", metavar="RECIPE", action="append", default=[], help="also try this recipe on the same tensors; repeat it")
    add("--plain-recipe", metavar="RECIPE", help="recipe to try on a model that has no FP8 (default: blockwise)")
    add("--shadow-rows", metavar="N", type=int, help="rows of the GEMMs that results are compared with (default: 256)")
    add("--compiled", choices=("eager",), help="run sampled steps without torch.compile, whose code is not recorded")
    add("--resume-from", metavar="STEP", type=int, help="number of the first step, to go on in a folder that holds a run")
    add("--budget", metavar="SIZE", help="disk space for the statistics of all ranks, e.g. 50GB; --every grows as it takes")
    add("--total-steps", metavar="N", type=int, help="steps of the whole run, for that plan (default: a million)")
    add("--ranks", metavar="R,R", help="global ranks that record, or all (default: all of up to 16, else one replica)")
    add("--guard", metavar="M", type=int, help="put a module into BF16 after M sampled steps of hard evidence: changes the run")
    add("--arm", help="train another arm of the script: bf16, fp8, fp8_tensors (FP8 tensors, BF16 GEMMs), or an arm's JSON file")
    add("--steps", metavar="N", type=int, help="with --arm: end the script after N optimizer steps")
    add("--seed-offset", metavar="K", type=int, default=0, help="with --arm: added to the seeds that the script sets")
    add("--child", action="store_true", help=argparse.SUPPRESS)  # started by verify or bisect: ends when they do
    add("script", type=Path, help="the training script")
    add("args", nargs=argparse.REMAINDER, help="the script's own arguments").required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())

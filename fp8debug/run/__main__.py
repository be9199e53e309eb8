"""``python -m fp8debug.run [--out DIR] [--every N] train.py ARGS``: record an unmodified training script.

The script, ``-m package.module`` or a folder or archive with a ``__main__.py`` runs as by ``python``, in a ``__main__`` of its
own with its own ``sys.argv`` and ``sys.path``, and torch is not imported before the script imports it. The models are those
whose forward runs with gradients (see ``run.auto_watch``), the loss the scalar on which ``backward()`` is called (the mean where
a step
has several), and a step ends with ``optimizer.step()`` or with a change of the weights. A script that calls
``fp8debug.watch()`` itself is left to it.

With ``--arm`` the same script is one training of an experiment: see ``arms`` and ``fp8debug verify``.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import io
import os
import pkgutil
import runpy
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8debug.errors import RecordError, UsageError
from fp8debug.imports import after_import
from fp8debug.run.arms import NEVER, Arm, end_with_parent
from fp8debug.store.locations import refuse_to_write

if TYPE_CHECKING:
    from fp8debug.run.auto_watch import AutoWatch

#: Options that go to :func:`fp8debug.watch` as they are; an arm takes none of them.
_WATCH_OPTIONS = (
    "dump",
    "include",
    "exclude",
    "what_if",
    "plain_recipe",
    "shadow_rows",
    "resume_from",
    "checkpoint",
    "compiled",
    "turns",
    "inference",
    "budget",
    "total_steps",
)


def main(argv: list[str] | None = None) -> int:
    """Run a script under the recorder; return its exit code.

    Raises:
        SystemExit: as the script does.
    """
    options = _parse(sys.argv[1:] if argv is None else argv)
    try:
        program = Program.of(options)
        out = options.out or Path("runs") / program.name
        refuse_to_write(out)
        _check_numbers(options)
        recording = _recording(options, out.name)
        arm = _arm(options)
        if _holds_run(out) and not options.child and options.resume_from is None:
            raise UsageError(f"{out} already holds a run; choose another --out or delete it, or go on with --resume-from STEP")
    except (UsageError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.child:
        end_with_parent()
    out = out.absolute()  # the script may change its directory
    if arm is None:
        return _record(program, out, {"every": options.every or 10, **recording})
    # arms differ by nothing but what they are: a guard of the script would change some of them
    overriding = {"every": options.every or NEVER, "what_if": (), "dump": (), "guard": None}
    return _train_arm(program, out, overriding, arm, options)


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("every", "steps", "shadow_rows", "total_steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if (options.resume_from or 0) < 0:
        raise UsageError(f"--resume-from is the number of the first step, 0 or more, got {options.resume_from}")


def _arm(options: argparse.Namespace) -> Arm | None:
    """Return the arm of an experiment that the program is to train as; None where it is only recorded."""
    arm = Arm.read(options.arm) if options.arm else None
    if options.steps is not None and arm is None:
        raise UsageError("--steps needs --arm; `--arm fp8` is the script as it is")
    if options.recipe is None:
        return arm
    if arm is None:
        raise UsageError("--recipe needs --arm; to try a recipe on a model without FP8, give --plain-recipe")
    return replace(arm, recipe=_known_recipe(options.recipe))


class Program:
    """The user's program: a script, a module, or a folder or archive with a ``__main__.py``.

    Args:
        target: the path as it was given, or the name of the module.
        args: the program's own arguments.
        kind: ``script``, ``module`` or ``folder``.

    Attributes:
        name: name of the default run directory.

    Raises:
        UsageError: there is no such program.
    """

    def __init__(self, target: str, args: list[str], kind: str) -> None:
        self._target, self._args, self._kind = target, args, kind
        self.name = target.rpartition(".")[2] if kind == "module" else Path(target).resolve().stem
        if kind == "module":
            top = target.partition(".")[0]
            if not top or find_spec(top) is None:
                raise UsageError(f"no module {target}; expected a name that `python -m` runs from this folder")
        elif kind == "script" and not Path(target).is_file():
            raise UsageError(f"no script {target}; expected the path of a Python file")
        elif kind == "folder" and not _has_main(target):
            raise UsageError(f"{target} has no __main__.py; give the path of a Python file in it")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Program:
        """Return the program that a command line names."""
        target, args = options.script, options.args
        if options.module:
            return cls(target, args, "module")
        is_folder = Path(target).is_dir() or zipfile.is_zipfile(target)
        return cls(target, args, "folder" if is_folder else "script")

    def run(self) -> None:
        """Run it as ``python`` does, in a new ``__main__``.

        Raises:
            BaseException: as the program does.
        """
        main = types.ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        if sys.version_info < (3, 14):
            vars(main)["__annotations__"] = {}
        sys.modules["__main__"] = main
        is_safe = getattr(sys.flags, "safe_path", False)
        if self._kind == "module":
            if not is_safe:
                sys.path.insert(0, str(Path.cwd()))
            sys.argv = ["-m", *self._args]
            runpy._run_module_as_main(self._target)  # type: ignore[attr-defined]  # which is `python -m`
            return
        sys.argv = [self._target, *self._args]
        path = os.path.abspath(self._target)  # noqa: PTH100  # as python does: links in it stay
        if self._kind == "folder":
            sys.path.insert(0, path)
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as above
            return
        if not is_safe:
            sys.path.insert(0, str(Path(path).resolve().parent))
        with io.open_code(path) as file:
            compiled = pkgutil.read_code(file)
        loader = SourceFileLoader if compiled is None else SourcelessFileLoader
        vars(main).update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
        exec(compiled or compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def _has_main(folder: str) -> bool:
    if Path(folder).is_dir():
        return any((Path(folder) / f"__main__.py{end}").is_file() for end in ("", "c"))
    with zipfile.ZipFile(folder) as archive:
        return not {"__main__.py", "__main__.pyc"}.isdisjoint(archive.namelist())


def _record(program: Program, out: Path, options: dict[str, Any]) -> int:
    """Run a program, and record the models that it trains from the import of torch on."""
    found: list[AutoWatch] = []

    def begin() -> None:
        try:
            from fp8debug.run.auto_watch import AutoWatch

            auto = AutoWatch(out, options)
            auto.start()
            found.append(auto)
        except Exception as error:  # an error of fp8debug's; the user's program goes on
            from fp8debug.interruptions import is_ours

            if not is_ours(error):
                raise
            print(f"fp8debug: not recorded: {type(error).__name__}: {error}", file=sys.stderr)

    end = after_import("torch", begin)

    def close(error: BaseException | None = None) -> None:
        end()
        if found:
            found.pop().close(error)
        elif "torch" not in sys.modules:
            print("fp8debug: nothing recorded: the program did not import torch", file=sys.stderr)

    return _run_and_close(program, close)


def _train_arm(program: Program, out: Path, overriding: dict[str, Any], arm: Arm, options: argparse.Namespace) -> int:
    """Run a program as one training of an experiment."""
    from fp8debug.run.auto_watch import ArmWatch, shift_seeds

    watch = ArmWatch(out, overriding, arm, options.steps)
    shift_seeds(options.seed_offset)
    watch.start()
    return _run_and_close(program, watch.close)


def _run_and_close(program: Program, close: Callable[[BaseException | None], None]) -> int:
    """Run a program, and end the recording with it: at exit where it leaves threads, which may train."""
    is_process = __name__ == "__main__"
    before = sys.modules["__main__"]
    if is_process and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the current directory, which is there for `python -m`
    ended_by: BaseException | None = None
    try:
        program.run()
    except BaseException as error:
        ended_by = error
        if is_process and isinstance(error, Exception | KeyboardInterrupt):
            sys.excepthook = _without_our_frames(sys.excepthook)
        raise
    finally:
        if is_process and any(not t.daemon and t is not threading.current_thread() for t in threading.enumerate()):
            atexit.register(close, ended_by)
        else:
            close(ended_by)
        if not is_process:
            sys.modules["__main__"] = before
    return 0


def _without_our_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return an excepthook that is shown a program's traceback as it is without us."""
    ours = {str(folder) for folder in Path(__file__).parents[:2]}

    def trimmed(trace: types.TracebackType | None) -> types.TracebackType | None:
        frames = []
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        files = [frame.tb_frame.f_code.co_filename for frame in frames]
        first = max((place for place, file in enumerate(files) if file == __file__), default=-1) + 1
        kept = None
        for frame, file in reversed(list(zip(frames, files, strict=True))[first:]):
            if os.path.dirname(file) not in ours:  # noqa: PTH120  # of every frame
                kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        return kept

    def shown(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> Any:
        trace = trimmed(trace)
        return hook(kind, error.with_traceback(trace), trace)

    return shown


def _known_recipe(name: str) -> str:
    """Return the name of a recipe.

    Raises:
        UsageError: there is no such recipe.
    """
    from fp8debug.recipes import get_recipe

    get_recipe(name)
    return name


def _holds_run(out: Path) -> bool:
    """Return whether this rank's part of a run is there: another rank of the job may have begun already."""
    rank = int(text) if (text := os.environ.get("RANK", "0")).isdecimal() else 0
    return (out / "manifest.json" if rank == 0 else out / f"rank={rank:05d}").exists()


def _recording(options: argparse.Namespace, run: str) -> dict[str, Any]:
    """Return the arguments of :func:`fp8debug.watch` that the command line gives.

    Args:
        options: of the command line.
        run: name of the run.

    Raises:
        UsageError: a dump, a recipe, the checkpoint or the guard cannot be used; seen now, not when the model is ready.
    """
    from fp8debug.fallback.guard import Guard
    from fp8debug.store.configuration import settings_of_checkpoint

    given = {name: getattr(options, name) for name in _WATCH_OPTIONS}
    found = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v not in (None, [])}
    settings_of_checkpoint(options.checkpoint)
    _check_texts(options)
    if options.ranks is not None:
        from fp8debug.adapters.watching.recording_ranks import check_ranks

        check_ranks(found.setdefault("ranks", _ranks(options.ranks)))
    if options.guard is not None:
        found["guard"] = Guard(after=options.guard)
    found.update(_live(options, run))
    if found and options.arm:
        names = ", ".join("--alert" if name == "on_finding" else f"--{name.replace('_', '-')}" for name in found)
        raise UsageError(f"{names} and --arm do not go together: an arm records its loss, and statistics only with --every")
    return found


def _check_texts(options: argparse.Namespace) -> None:
    """Read dump selectors, recipes and the budget, which the watch reads again when the model is ready."""
    from fp8debug.recipes import get_recipe
    from fp8debug.store.dump_selectors import Selector
    from fp8debug.store.volume import parse_size

    for text in options.dump:
        Selector.parse(text)
    for recipe in [*options.what_if, *([options.plain_recipe] if options.plain_recipe else [])]:
        get_recipe(recipe)
    if options.budget is not None:
        parse_size(options.budget)


def _live(options: argparse.Namespace, run: str) -> dict[str, Any]:
    """Return the arguments of :func:`fp8debug.watch` for trackers and alerts."""
    found: dict[str, Any] = {}
    if options.to:
        found["to"] = tuple(name for word in options.to for name in word.split(","))
    if options.alert is not None:
        from fp8debug.trackers.alerts import AlertSender

        found["on_finding"] = AlertSender(options.alert, run)
    if options.to or options.alert is not None:
        from fp8debug.trackers.live import check_live

        check_live(found.get("to"), found.get("on_finding"), ("--to", "--alert"))
    return found


def _ranks(text: str) -> list[int] | str:
    words = text.split(",")
    return [int(word) for word in words] if all(word.strip().isdecimal() for word in words) else text


def _parse(words: list[str]) -> argparse.Namespace:
    """Return the options; ``module`` says whether ``script`` is the name of a module, given by ``-m``."""
    parser = _parser()
    place = _place_of_program(words, parser)
    is_module = place < len(words) and words[place].startswith("-m")
    if is_module:
        name = [words[place][2:]] if len(words[place]) > 2 else []
        if not (name or words[place + 1 :]):
            parser.error("-m needs the name of a module")
        words = [*words[:place], *name, *words[place + 1 :]]
    options = parser.parse_args(words)
    options.module = is_module
    return options


def _place_of_program(words: list[str], parser: argparse.ArgumentParser) -> int:
    """Return the place of the script, or of the ``-m`` before a module, behind our own options."""
    place = 0
    while place < len(words):
        word = words[place]
        if not word.startswith("-") or (word.startswith("-m") and not word.startswith("--")):
            break
        takes_value = [a.nargs != 0 for a in parser._actions if any(name.startswith(word) for name in a.option_strings)]
        place += 2 if takes_value[:1] == [True] else 1
    return place


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8debug run",
        usage="fp8debug run [--out DIR] [--every N] [OPTIONS] (train.py | -m package.module) ARGS...",
        description="Run a training script unchanged and record the numerics of its FP8 GEMMs.",
        epilog="Several processes: torchrun ... -m fp8debug.run train.py ARGS. What follows the script's name is the script's.",
    )
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, help="run directory (default: runs/SCRIPT); further models in folders below it")
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
    add(
        "--compiled",
        choices=("auto", "repeat", "as_is", "eager"),
        help="repeat sampled calls of compiled modules to record them, or run sampled steps without compiling (default: auto)",
    )
    add("--turns", metavar="N", type=int, help="record each module in one of N sampled steps")
    add("--inference", action="store_true", default=None, help="record passes without gradients: rollouts, generation")
    add("--resume-from", metavar="STEP", type=int, help="number of the first step, to go on in a folder that holds a run")
    add(
        "--checkpoint", metavar="DIR", help="folder that training goes on from: its FP8 settings are compared with those in force"
    )
    add("--budget", metavar="SIZE", help="disk space for the statistics of all ranks, e.g. 50GB; --every grows as it takes")
    add("--total-steps", metavar="N", type=int, help="steps of the whole run, for that plan (default: a million)")
    add("--ranks", metavar="R,R", help="global ranks that record, or all (default: all of up to 16, else one replica)")
    add(
        "--to",
        metavar="TRACKER",
        action="append",
        default=[],
        help="wandb, tensorboard, mlflow, trackio: the run that is open there",
    )
    add("--alert", metavar="URL|COMMAND", help="post each new error there, or start a program with it, while training runs")
    add("--guard", metavar="M", type=int, help="put a module into BF16 after M sampled steps of hard evidence: changes the run")
    add("--arm", help="train another arm of the script: bf16, fp8, fp8_tensors (FP8 tensors, BF16 GEMMs), or an arm's JSON file")
    add("--recipe", metavar="RECIPE", help="with --arm: what a model without FP8 modules is converted to")
    add("--steps", metavar="N", type=int, help="with --arm: end the script after N optimizer steps")
    add("--seed-offset", metavar="K", type=int, default=0, help="with --arm: added to the seeds that the script sets")
    add("--child", action="store_true", help=argparse.SUPPRESS)  # started by verify or bisect: ends when they do
    add("script", help="the training script, a folder or archive with a __main__.py, or -m and the name of a module")
    add("args", nargs=argparse.REMAINDER, help="the script's own arguments").required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())

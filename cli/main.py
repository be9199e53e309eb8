"""The entry point: commands are loaded when they are called, and a user's mistake is one line and an exit code.

Exit codes: 0 fine; 1 findings at or above --fail-on; 2 usage; 3 the run is unreadable or empty; 130 interrupted.
"""

from __future__ import annotations

import importlib
import keyword
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click

from fp8debug.errors import Fp8DebugError, RunError, suggest

from .output import echo

#: Command -> what it does. Its module in this package has its name (``import_`` for ``import``) and a command called ``command``.
COMMANDS = {
    "run": "Train: run an unmodified script and record it.",
    "triage": "Name the sick layer and the cause.",
    "diff": "Compare two runs: configuration, loss, and the first site that parts.",
    "show": "Print recorded statistics.",
    "measure": "Replay any cast on a dump.",
    "check": "Say whether a quantized checkpoint is sound, and which tensor is not.",
    "parity": "Name the module at which training and rollout part, and why.",
    "calibrate": "Turn a recorded window into static scales.",
    "coverage": "Say which modules run in FP8, under which casts, and why not.",
    "speed": "Time every layer's GEMMs in BF16 and in FP8 on this GPU.",
    "fallback": "List what to run in another cast or in BF16.",
    "export": "Put a run into W&B, TensorBoard, MLflow or Trackio.",
    "verify": "Re-run a window with the candidates and say what they buy.",
    "bisect": "Find by the loss alone what must leave FP8.",
    "import": "Turn another tool's statistics into a run.",
    "report": "Write a run as one page of HTML to send around.",
    "explain": "Print a rule's manual page.",
    "plan": "Say what a run will write, and keep it within a budget.",
    "compact": "Thin a run's statistics without changing a verdict.",
    "dashboard": "Show a run, or a folder of runs, in the browser.",
}

EXIT_USAGE, EXIT_RUN, EXIT_INTERRUPTED = 2, 3, 130


class LazyGroup(click.Group):
    """A group whose commands are imported by name, so that --help and a typo cost nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = f".{cmd_name}{'_' if keyword.iskeyword(cmd_name) else ''}"
        command = importlib.import_module(module, __package__).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one was meant."""
        name = str(args[0]) if args else ""
        if args and name not in COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"unknown command {name!r}: {suggest(name, COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="fp8debug", prog_name="fp8debug")
def cli() -> None:
    """A numerics debugger for FP8 training: record every cast, name the sick layer, say what to run in BF16.

    Data go to stdout, progress and warnings to stderr. Exit codes: 0 fine, 1 findings at or above --fail-on, 2 usage, 3
    the run is unreadable or empty.
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit."""
    # A stream that was closed before we began is None; what would go there goes nowhere.
    sys.stdout, sys.stderr = (stream or Path(os.devnull).open("w") for stream in (sys.stdout, sys.stderr))
    sys.exit(status(sys.argv[1:] if args is None else args))


def _without_reader() -> int:
    """Return the status where the reader of our output (head, less) has gone: nothing is left to say, not even by a flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def next_step(here: Path) -> str:
    """Return what to do next in a folder: judge the newest run in it, or up to two folders below, or record the first."""
    found: list[tuple[float, Path]] = []
    for pattern in ("manifest.json", "*/manifest.json", "*/*/manifest.json", "*/*/*/manifest.json"):
        with suppress(OSError):
            found += [(path.stat().st_mtime, path.parent) for path in here.glob(pattern) if any(path.parent.glob("rank=*"))]
    if found:
        run = shlex.quote(str(max(found)[1]))
        return f"Next: fp8debug triage {run} judges the newest run here, fp8debug dashboard {run} shows it."
    return (
        "Next: fp8debug run train.py ARGS records your script as it is (or call fp8debug.watch(model, 'run') in it);"
        " then fp8debug triage runs/train."
    )


def status(args: list[str]) -> int:
    """Run the command line; return its exit code."""
    stdout = sys.stdout
    try:
        plain: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") else {}
        code = cli.main(args, prog_name="fp8debug", standalone_mode=False, **plain)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        return _help(error)
    except BrokenPipeError:
        return _without_reader()
    except SystemExit:
        if sys.stdout is stdout:  # a script's own
            raise
        return _without_reader()  # click was printing itself, --help say: it puts another stream in place, and exits with 1
    except (Exception, KeyboardInterrupt) as error:
        failure = next(failure for failure in _FAILURES if isinstance(error, failure.kinds))
        if failure.kinds is Exception and os.environ.get("FP8DEBUG_TRACEBACK"):
            raise
        return _fail(failure.message(error), failure.code)


class _Failure(NamedTuple):
    """Message and exit code of exceptions that end a command."""

    kinds: type[BaseException] | tuple[type[BaseException], ...]
    message: Callable[[Any], str]
    code: int


def _of_system(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{':' + where if where else ''}"


def _unforeseen(error: Exception) -> str:
    said = (str(error) or "no word more").splitlines()[0][:200]
    fault = "a fault of fp8debug, or files that are damaged in a way that it does not know"
    return f"{type(error).__name__}: {said}: {fault}; FP8DEBUG_TRACEBACK=1 shows where"


#: The first whose kind an exception is of counts.
_FAILURES = (
    _Failure(RunError, str, EXIT_RUN),
    _Failure(Fp8DebugError, str, EXIT_USAGE),
    _Failure(click.ClickException, lambda error: error.format_message(), EXIT_USAGE),
    _Failure((click.Abort, KeyboardInterrupt), lambda _: "interrupted", EXIT_INTERRUPTED),
    _Failure(OSError, _of_system, EXIT_USAGE),
    _Failure(Exception, _unforeseen, EXIT_RUN),
)


def _help(error: click.exceptions.NoArgsIsHelpError) -> int:
    """Print the help that a command without arguments gets, and what to do next where it is the first of all."""
    click.echo(error.format_message(), err=True)
    if error.ctx is not None and error.ctx.parent is None:
        echo(f"\n{next_step(Path())}", err=True)
    return EXIT_USAGE


def _fail(message: str, code: int) -> int:
    echo(f"error: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    main()

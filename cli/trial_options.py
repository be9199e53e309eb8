"""Options that ``verify`` and ``bisect`` share: those of a training script, and what RUN says where they are left open."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fp8debug.errors import UsageError
from fp8debug.recipes import get_recipe
from fp8debug.run.arms import KNOWN_KINDS
from fp8debug.store.read.run import Run
from fp8debug.trials import Script
from fp8debug.trials.gap import CLOSED, MIN_GAP
from fp8debug.types import parse_share

F = TypeVar("F", bound=Callable[..., Any])

#: Steps of a window when nobody says how many: those of the recorded run, at most these.
DEFAULT_STEPS = 200


class ScriptCommand(click.Command):
    """A command whose words after ``--script FILE`` are the script's; up to a ``--``, if there is one, still the command's."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the pieces of the usage line."""
        return ["[OPTIONS]", "RUN", "--script FILE", "[SCRIPT'S ARGS]..."]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the script's words off before the options are read."""
        own, rest = args, list[str]()
        for place, word in enumerate(args):
            if word == "--script" or word.startswith("--script="):
                end = place + (1 if "=" in word else 2)
                own, rest = args[:end], args[end:]
                if "--" in rest:
                    cut = rest.index("--")
                    own, rest = own + rest[:cut], rest[cut + 1 :]
                break
        ctx.meta["script_args"] = tuple(rest)
        return super().parse_args(ctx, own)


def script_options(function: F) -> F:
    """Add the options that say what is trained, how often, and what counts."""
    for option in reversed(
        (
            click.argument("run"),
            click.option("--script", required=True, metavar="FILE", help="Training script; its own arguments follow."),
            click.option("--steps", type=int, help=f"End each training after so many steps [RUN's, at most {DEFAULT_STEPS}]."),
            click.option("--last", type=int, help="Compare the mean loss of so many last steps [a quarter, at least 8]."),
            click.option("--seed-arg", metavar="NAME", help="The script's seed argument, e.g. --seed [its seeds are shifted]."),
            click.option("--recipe", help="Recipe of the FP8 arms if the script's model is plain [the one RUN tried]."),
            click.option(
                "--also",
                multiple=True,
                metavar="FQN",
                help="A module that is no Linear and runs in FP8: attention, an embedding, a head; repeat it.",
            ),
            click.option("--launcher", metavar="WORDS", help="In place of python: 'torchrun --nproc-per-node 2'."),
            click.option("--timeout", type=float, metavar="S", help="Seconds that one training may take."),
            click.option("--min-gap", default=f"{MIN_GAP:.2%}", show_default=True, help="Less, of BF16's loss, is no gap."),
            click.option("--closed", default=f"{CLOSED:.0%}", show_default=True, help="Share of the gap that counts as closed."),
            click.option("--out", metavar="DIR", help="Folder for the trainings."),
            click.option("--fresh", is_flag=True, help="Forget the trainings that the folder holds."),
        )
    ):
        function = option(function)
    return function


def make_script(run: Run, options: dict[str, Any]) -> Script:
    """Return the script with what the options leave open taken from the run."""
    recipe = options["recipe"]
    in_fp8 = [module for module in run.modules if module.get("fp8")]
    if recipe is None and not in_fp8:
        recipe = str(run.manifest.get("plain_recipe") or "blockwise")
    elif recipe is not None:
        get_recipe(recipe)
    steps = options["steps"]
    if steps is None:
        first, last = run.steps_range
        steps = max(1, min(last - first + 1 - options.get("held", 0), DEFAULT_STEPS))  # the script may end where RUN did
    if options["last"] is not None and not 1 <= options["last"] <= steps:
        raise UsageError(f"--last must be between 1 and the {steps} steps of the window, got {options['last']}")
    return Script(
        path=Path(options["script"]),
        args=click.get_current_context().meta["script_args"],
        steps=steps,
        recipe=recipe,
        launcher=_words(options["launcher"]),
        seed_arg=options["seed_arg"],
        every=options.get("every"),
        timeout_s=options["timeout"],
    )


def modules_of_other_stacks(run: Run, recipe: str | None) -> list[str]:
    """Return the modules of other stacks that a run recorded in FP8, which only their GEMMs show.

    Args:
        run: the run.
        recipe: what the script's plain model is converted to; then there are none.
    """
    if recipe is not None:
        return []
    return [str(module["fqn"]) for module in run.modules if module.get("fp8") and module.get("kind") not in KNOWN_KINDS]


def _words(launcher: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(launcher or ""))
    except ValueError as error:
        raise UsageError(f"--launcher {launcher!r} cannot be split into words: {error}") from None


def shares(options: dict[str, Any]) -> dict[str, float]:
    """Return the thresholds."""
    return {"min_gap": parse_share(options["min_gap"]), "closed": parse_share(options["closed"])}

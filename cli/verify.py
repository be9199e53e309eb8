"""``fp8debug verify RUN --script train.py ARGS``: re-run a window with the candidates, and say what they buy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fp8debug.errors import UnknownNameError
from fp8debug.fallback import load_fallbacks, positional_prior, recommend
from fp8debug.rules import triage
from fp8debug.trials import Trials, arms_of, verify_run
from fp8debug.trials.verify import ARMS
from fp8debug.types import parse_share

from .console import open_run, print_table, warn, wide_option
from .output import echo, write
from .trial_options import ScriptCommand, make_script, modules_of_other_stacks, script_options, shares
from .trial_progress import Trainings, announce

HEADER = ["arm", "what", "loss", "above BF16", "share closed", "closed", "trainings"]
INFERENCE_HEADER = ["weights of", "inference in", "loss", "own loss", "difference", "counts"]
#: Verdicts with which a script of the user's may go on.
FINE = ("closed", "nothing_to_close")


@click.command("verify", cls=ScriptCommand)
@script_options
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds; they give the noise band.")
@click.option("--fallbacks", metavar="FILE", help="Fallback list to try [what `fp8debug fallback RUN` recommends].")
@click.option("--budget", default="10%", show_default=True, help="Of that recommendation.")
@click.option("--arms", metavar="NAMES", default=",".join(ARMS), show_default=True, help="Comma-separated; bf16 and fp8 always.")
@click.option(
    "--inference",
    "held",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="After the window hold the trained weights for N steps and compare BF16 with FP8 inference.",
)
@click.option("--every", type=int, help="Record statistics every so many steps too [losses alone].")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@wide_option
def command(**options: Any) -> int:
    """Train a window of the unmodified script under several arms, same data and seeds, and say what share of the gap
    between BF16 and FP8 the candidates close.

    Words after `--script FILE` are the script's, a checkpoint to start from among them; options of this command come
    before it, or between FILE and a `--`. Each training runs the script as it is: leave out arguments that write files.
    Results are in RUN/verify.json, the trainings in RUN/verify (or in DIR of --out). A second call reuses trainings of
    the same script, arguments and steps. Exit code 0: the candidates close the gap, or there is none; 1 otherwise.
    """
    run = open_run(options["run"])
    script, limits = make_script(run, options), shares(options)
    names = [name.strip() for name in options["arms"].split(",") if name.strip()]
    for name in names:
        if name not in ARMS:
            raise UnknownNameError("arm", name, ARMS)
    if options["fallbacks"] or "candidates" not in names:
        candidates = load_fallbacks(options["fallbacks"]) if options["fallbacks"] else []
    else:
        candidates = recommend(run, triage(run), parse_share(options["budget"]))
        if not candidates:
            warn("no candidates: the recorded statistics ask for none; `fp8debug bisect` searches by the loss alone")
    others = modules_of_other_stacks(run, script.recipe)
    if "fp8_tensors" in names and others:
        warn(
            f"no arm fp8_tensors: {others[0]} is of another stack, whose operands cannot stay in FP8 while its GEMMs run in BF16"
        )
        names.remove("fp8_tensors")
    entries = [entry.to_dict() for entry in candidates]
    arms = arms_of(names, entries, positional_prior(run), script.recipe, options["held"], [*others, *options["also"]])
    folder = Path(options["out"]) if options["out"] else run.path / "verify"
    trials = Trials(folder, script, fresh=options["fresh"])
    number = len(arms) * options["repeats"]
    done = sum(trials.known(arm, repeat) for arm in arms for repeat in range(options["repeats"]))
    seeds = "one seed" if options["repeats"] == 1 else f"{options['repeats']} seeds"
    what = f"{len(arms)} arms ({', '.join(arm.name for arm in arms)}) with {seeds}: {number} trainings"
    announce(run, script, folder, what + (f", {done} of them done before," if done else ""), number - done)
    save_as = folder / "verify.json" if options["out"] else run.path / "verify.json"
    with Trainings() as report:
        found = verify_run(
            trials,
            arms,
            repeats=options["repeats"],
            last=options["last"],
            run_name=run.name,
            save_as=save_as,
            report=report,
            **limits,
        )
    for arm in [{**entry, "name": entry["arm"]} for entry in found["inference"]] + found["arms"]:
        if arm["problem"]:
            warn(f"arm {arm['name']}: {arm['problem']}")
            echo("".join(f"    {line}\n" for line in arm["stderr"].splitlines()), nl=False, err=True)
    if options["form"] == "json":
        write(json.dumps(found, indent=2))
    else:
        _print(found)
    echo(f"Wrote {save_as}", err=True)
    return 0 if found["verdict"] in FINE else 1


def _print(found: dict[str, Any]) -> None:
    for statement in found["statements"]:
        echo(statement)
    echo()
    print_table(HEADER, [_row(arm) for arm in found["arms"]], wrap=["arm", "what"], drop=["what", "trainings", "loss"])
    echo(f"\nmean loss of the last {found['num_last']} of {found['num_steps']} steps; 95 % intervals in brackets")
    if found["inference"]:
        echo()
        rows = [_inference_row(entry) for entry in found["inference"]]
        print_table(INFERENCE_HEADER, rows, wrap=["weights of"], drop=["own loss"])


def _row(arm: dict[str, Any]) -> list[object]:
    trained = f"{arm['num_repeats']}" + (f", {arm['num_diverged']} diverged" if arm["num_diverged"] else "")
    if arm["problem"]:
        trained = "failed"
    above = None if arm["name"] == "bf16" else band(arm["above_bf16"])
    share = None if arm["name"] in ("bf16", "fp8") else band(arm["share"])
    closed = None if arm["name"] in ("bf16", "fp8") else arm["closed"]
    return [arm["name"], arm["about"], arm["loss"], above, share, closed, trained]


def _inference_row(entry: dict[str, Any]) -> list[object]:
    counts = {True: "yes", False: "no"}.get(entry["counts"])
    return [entry["weights"], entry["inference"], entry["loss"], entry["own_loss"], band(entry["above"]), counts]


def band(found: dict[str, float | None] | None) -> str | None:
    """Write a value and its interval for people."""
    if found is None or found["value"] is None:
        return None
    low, high = found["low"], found["high"]
    return f"{found['value']:.3g}" + (f" [{low:.3g}, {high:.3g}]" if low is not None else "")

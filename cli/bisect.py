"""``fp8debug bisect RUN --script train.py ARGS``: the smallest set of (module, gemm) that must leave FP8."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from fp8debug.errors import UsageError
from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import load_fallbacks
from fp8debug.trials import Trials, bisect_run
from fp8debug.trials.bisect import SearchPlan
from fp8debug.trials.hints import hints

from .console import open_run, print_table, wide_option, write_file
from .output import echo, write
from .trial_options import ScriptCommand, make_script, modules_of_other_stacks, script_options, shares
from .trial_progress import Trainings, announce, lasting
from .verify import band


@click.command("bisect", cls=ScriptCommand)
@script_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Seeds at most for one test: more near the threshold.",
)
@click.option("--max-runs", type=click.IntRange(min=2), default=64, show_default=True, help="Trainings at most.")
@click.option("--yes", is_flag=True, help="Do not ask before the search.")
@click.option("-o", "--output", metavar="FILE", help="Write the fallback list there too.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@wide_option
def command(**options: Any) -> int:
    """Find the smallest set of (module, gemm) that must leave FP8 for the gap to BF16 to close, by delta debugging.

    BF16 and FP8 are trained first; then the plan and its cost are shown. RUN gives the order: what triage names, then by
    recorded damage. It needs no statistics to show the fault. It assumes that taking more out of FP8 never reopens the gap.

    Words after `--script FILE` are the script's; options of this command come before it, or between FILE and a `--`. Kill it at
    any time: the same command goes on. Results are in RUN/bisect.json, which is a fallback list too (fp8debug.apply), the
    trainings in RUN/bisect (or in DIR of --out). Exit code 0: a set was found, or there is no gap; 1 otherwise.
    """
    run = open_run(options["run"])
    script, limits = make_script(run, options), shares(options)
    folder = Path(options["out"]) if options["out"] else run.path / "bisect"
    trials = Trials(folder, script, fresh=options["fresh"])
    number = options["max_runs"]
    announce(run, script, folder, f"BF16 and FP8, then a search: at most {number} trainings", number)
    save_as = folder / "bisect.json" if options["out"] else run.path / "bisect.json"
    suspects, damage = hints(run)
    if not options["yes"] and not sys.stdin.isatty():
        raise UsageError("bisect asks before it starts, and stdin is no terminal; say --yes")

    def confirm(plan: SearchPlan) -> None:
        each = plan.seconds_each
        echo(
            f"{plan.num_modules} modules in FP8: about {plan.for_one} trainings ({lasting(plan.for_one * each)}) if one GEMM is"
            f" at fault, {plan.for_two} ({lasting(plan.for_two * each)}) if two are, {plan.max_runs} at most; {each:.1f} s each",
            err=True,
        )
        if not options["yes"]:
            report.ask("Search?")

    with Trainings() as report:
        found = bisect_run(
            trials,
            recipe=script.recipe,
            further=[*modules_of_other_stacks(run, script.recipe), *options["also"]],
            suspects=suspects,
            damage=damage,
            repeats=options["repeats"],
            last=options["last"],
            max_runs=options["max_runs"],
            run_name=run.name,
            save_as=save_as,
            confirm=confirm,
            report=report,
            **limits,
        )
    if options["form"] == "json":
        write(json.dumps(found, indent=2))
    else:
        _print(found)
    echo(f"Wrote {save_as}", err=True)
    if options["output"]:
        write_file(options["output"], EXPORTERS.get("json").export(run, load_fallbacks(found)))
    return 0 if found["verdict"] in ("found", "nothing_to_close") else 1


def _print(found: dict[str, Any]) -> None:
    for statement in found["statements"]:
        echo(statement)
    if found["fallbacks"]:
        echo()
        rows = [[entry["module"], " ".join(entry["gemms"]), f"{entry['cost']:.1%}"] for entry in found["fallbacks"]]
        print_table(["module", "gemms in BF16", "costs"], rows, wrap=["module"])
        share = f"share of the gap closed {band(found['share'])}; " if found["share"] else ""
        echo(f"\n{share}{found['runs']} trainings, {lasting(found['seconds'])}\n{found['assumption']}")

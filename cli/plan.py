"""``fp8debug plan``: how much a run will write, and how often to sample such that it stays within a budget."""

from __future__ import annotations

import click

from fp8debug.errors import UsageError
from fp8debug.recipes import get_recipe
from fp8debug.store.volume import DEFAULT_STEPS, plan_volume, rows_of_module

from .output import echo


@click.command("plan")
@click.argument("modules", type=int)
@click.option("--ranks", type=int, default=1, show_default=True, help="Ranks that would record.")
@click.option("--steps", type=int, default=DEFAULT_STEPS, show_default=True, help="Steps of the whole run.")
@click.option("--every", type=int, default=10, show_default=True, help="Desired sampling interval; --budget may raise it.")
@click.option("--budget", metavar="SIZE", help="For all ranks together, e.g. 50GB.")
@click.option("--recipe", default="blockwise", show_default=True, help="The running recipe.")
@click.option(
    "--what-if", metavar="A,B", default="tensorwise_delayed,tensorwise_current", show_default=True, help="Recipes beside it."
)
def command(modules: int, ranks: int, steps: int, every: int, budget: str | None, recipe: str, what_if: str) -> None:
    """Say what MODULES Linears on each rank will write: rows and bytes of a sampled step, of a rank, and of the run.

    With --budget, `every` is chosen such that the run stays within it, and where that is not enough the number of ranks.
    """
    if modules < 1:
        raise UsageError(f"MODULES is the number of Linears on a rank, at least 1, got {modules}")
    tried = [get_recipe(name.strip()) for name in what_if.split(",") if name.strip()]
    rows = modules * rows_of_module(get_recipe(recipe), tried)
    volume = plan_volume(rows, every=every, ranks=ranks, steps=steps, budget=budget)
    echo(str(volume))
    if volume.ranks < ranks:
        echo(f"let {volume.ranks} of {ranks} ranks record", err=True)

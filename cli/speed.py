"""``fp8debug speed RUN``: what each Linear's GEMMs take in BF16 and in FP8 on this GPU, and whether FP8 is worth it there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from fp8debug.recipes import get_recipe
from fp8debug.store.locations import place_of
from fp8debug.store.speed_file import GEMMS, SPEED_VERSION, load_shapes, shapes_of, write_speed

from .console import cell, open_run, print_table, progress, warn, wide_option, write_file
from .output import echo, write

HEADER = [
    "shape",
    "gemm",
    "bf16 us",
    "quantize us",
    "GEMM us",
    "fp8 us",
    "gain us",
    "speed-up",
    "statistics us",
    "bf16 mJ",
    "fp8 mJ",
]
#: Interquartile range over median from which a time is called noisy.
NOISY = 0.05


@click.command("speed")
@click.argument("run", required=False)
@click.option("--shapes", metavar="FILE", help="Measure the shapes of a JSON file in place of a run's.")
@click.option("--tokens", type=click.IntRange(1), metavar="M", help="Rows of a call; by default those that were recorded.")
@click.option("--recipe", metavar="NAME", help="Measure this recipe in place of the modules' own.")
@click.option("--energy/--no-energy", default=True, show_default=True, help="Read the board's energy, 2.4 s a shape.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--plot", metavar="FILE", help="Draw the times as .svg, or as .html with plotly.")
@wide_option
def command(
    run: str | None, shapes: str | None, tokens: int | None, recipe: str | None, energy: bool, form: str, plot: str | None
) -> None:
    """Time the three GEMMs of every distinct Linear shape of RUN, in BF16 and in FP8, on this GPU.

    The times are saved in the run's folder as speed.json; `fp8debug fallback` then counts measured time, not FLOPs.
    """
    if (run is None) == (shapes is None):
        raise click.UsageError("give either a run or --shapes FILE")
    if recipe and get_recipe(recipe).is_high_precision:
        raise click.UsageError(f"recipe {recipe!r} quantizes nothing; BF16 is measured beside every recipe")
    if plot and Path(plot).suffix not in (".svg", ".html"):
        raise click.UsageError(f"--plot writes .svg or .html, not {Path(plot).name!r}")
    opened = open_run(run) if run else None
    if opened is not None:
        wanted = shapes_of(opened, tokens=tokens, recipe=recipe)
    else:
        wanted = load_shapes(place_of(str(shapes)), tokens=tokens, recipe=recipe)
    try:
        from fp8debug.tools.speed import measure_shapes  # the recording half, for this command alone
    except ImportError as error:
        raise click.UsageError(f"speed runs GEMMs and needs torch: {error}") from None
    with progress("timing") as report:
        document = {"schema": SPEED_VERSION, **measure_shapes(wanted, energy=energy, progress=report)}
    if form == "json":
        write(json.dumps(document, indent=2))
    else:
        _print(document)
    if opened is not None:
        try:
            echo(f"Wrote {write_speed(opened.path, document)}", err=True)
        except OSError as error:
            warn(f"not saved with the run: {error.strerror}: {opened.path}")
    if plot:
        from .speed_plot import to_html, to_svg

        write_file(plot, to_svg(document) if plot.endswith(".svg") else to_html(document))


def label(shape: Mapping[str, Any]) -> str:
    """Return ``blocks.0.mlp.up and 7 more, 8192 x 4096 x 14336``: modules, tokens x in_features x out_features."""
    names = shape["modules"]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}, {shape['tokens']} x {shape['in_features']} x {shape['out_features']}"


def _print(document: Mapping[str, Any]) -> None:
    echo(f"{document['device']}, torch {document['versions']['torch']}; shapes are tokens x in_features x out_features\n")
    rows = [row for shape in document["shapes"] for row in _rows(shape)]
    print_table(HEADER, rows, wrap=["shape"])
    saved = total = 0.0
    for shape in document["shapes"]:
        bf16, fp8 = (len(shape["modules"]) * sum(shape["gemms"][g][key] for g in GEMMS) for key in ("bf16_us", "fp8_us"))
        saved, total = saved + bf16 - fp8, total + bf16
    echo(f"\nall GEMMs of a step, each module once: {total / 1e3:.4g} ms in BF16, {(total - saved) / 1e3:.4g} ms in FP8")
    losing = [label(shape) for shape in document["shapes"] if sum(_gain(shape["gemms"][g]) for g in GEMMS) < 0]
    if losing:
        echo("FP8 loses at: " + "; ".join(losing))
    if not document["energy"]:
        echo("energy: not reported by the driver, or not asked for", err=True)
    noisy = max(shape["gemms"][g]["spread"] for shape in document["shapes"] for g in GEMMS)
    if noisy > NOISY:
        warn(f"the replays of one time spread by {noisy:.0%} (interquartile range): is something else running on this GPU?")


def _gain(gemm: Mapping[str, float]) -> float:
    return gemm["bf16_us"] - gemm["fp8_us"]


def _rows(shape: Mapping[str, Any]) -> Iterator[list[object]]:
    recipe = shape["recipe"]["name"]
    name = label(shape) + (f" ({recipe})" if recipe else "")
    for gemm in GEMMS:
        yield _row(name, gemm, shape["gemms"][gemm])
        name = ""
    keys = shape["gemms"][GEMMS[0]]
    whole = {key: None if keys[key] is None else sum(shape["gemms"][g][key] for g in GEMMS) for key in keys}
    yield _row("", "all", whole)


def _row(name: str, gemm: str, of: Mapping[str, Any]) -> list[object]:
    times = [f"{of[key]:.1f}" for key in ("bf16_us", "quantize_us", "gemm_us", "fp8_us")]
    gained = f"{_gain(of):+.1f}", f"{of['bf16_us'] / of['fp8_us']:.2f}"
    return [name, gemm, *times, *gained, f"{of['statistics_us']:.1f}", cell(of["bf16_mj"]), cell(of["fp8_mj"])]

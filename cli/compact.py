"""``fp8debug compact RUN``: thin a run's statistics without changing what triage says of it."""

from __future__ import annotations

import re

import click

from fp8debug.errors import UsageError
from fp8debug.rules.engine.config import load_settings
from fp8debug.store.volume import in_words
from fp8debug.tools.compaction import Compaction, Keep, compact_run

from .output import echo

_KEEP = re.compile(r"(every|around|before)\s*=\s*(\d+)")


@click.command("compact")
@click.argument("run")
@click.option(
    "--keep",
    metavar="WHAT",
    multiple=True,
    help="every=K: one sampled step in K (10); around=N: sampled steps beside each that a finding names (5);"
    " before=STEP: all from there on. Repeat it, or join by commas.",
)
@click.option("--baseline", "baselines", metavar="RUN", multiple=True, help="The comparison with this run stays the same, too.")
@click.option("--config", metavar="FILE", help="TOML file with thresholds, as for triage.")
@click.option("-n", "--dry-run", is_flag=True, help="Judge the thinned copy, say what would go, and change nothing.")
def command(run: str, keep: tuple[str, ...], baselines: tuple[str, ...], config: str | None, dry_run: bool) -> None:
    """Thin the statistics of RUN, a run that has ended: what triage says of it stays the same.

    Kept whole are every K-th sampled step, both ends of the run, the steps around each that a finding or an event names, and the
    modules that a finding names. Loss, events and dumps are not touched. The thinned copy is judged before it takes the
    original's place; where anything differs, half the K is tried.
    """
    thresholds = load_settings(config).thresholds
    found = compact_run(run, _keep(keep), dry_run=dry_run, baselines=baselines, thresholds=thresholds)
    echo(_in_words(run, found, dry_run=dry_run))


def _keep(texts: tuple[str, ...]) -> Keep:
    values: dict[str, int] = {}
    for text in (part.strip() for joined in texts for part in joined.split(",")):
        matched = _KEEP.fullmatch(text)
        if matched is None:
            raise UsageError(f"--keep takes every=K, around=N or before=STEP, got {text!r}")
        values[matched[1]] = int(matched[2])
    return Keep(**values)


def _in_words(run: str, found: Compaction, *, dry_run: bool) -> str:
    if found.every == 1:
        return f"{run}: nothing was thinned: nothing can go without changing what triage says ({found.verdict})"
    (steps, kept), (rows, left), (size, after) = found.num_steps, found.num_rows, found.num_bytes
    went = "would stay" if dry_run else "stay"
    return (
        f"{run}: {kept} of {steps} sampled steps {went} whole (every={found.every}), {left} of {rows} rows,"
        f" {in_words(after)} of {in_words(size)}; triage says the same: {found.verdict}"
    )

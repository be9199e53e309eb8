"""``fp8debug run train.py``: hand over to ``python -m fp8debug.run``, the recording half, by name."""

from __future__ import annotations

import os
import sys

import click


@click.command("run", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run a script unchanged and record it: fp8debug run [--out DIR] [--every N] train.py ARGS."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Replacing this process keeps signals, the exit code and the terminal with the training script.
    os.execv(sys.executable, [sys.executable, "-m", "fp8debug.run", *arguments])

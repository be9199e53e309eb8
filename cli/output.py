"""Output of commands for people, escaped: a name from a run neither moves the cursor nor gives a CI runner commands."""

from __future__ import annotations

import click

from fp8debug.escaping import plain


class MultilineCell(str):
    """A cell of several lines: its breaks are ours, what stands between them went through :func:`fp8debug.escaping.one_line`."""


def echo(message: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text for people."""
    click.echo(plain(message), err=err, nl=nl)

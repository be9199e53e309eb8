"""``fp8debug dashboard RUN_OR_FOLDER``: the pages in a browser."""

from __future__ import annotations

import click

from fp8debug.errors import UsageError

#: Shorter ones can be tried out.
MIN_TOKEN = 16


@click.command("dashboard")
@click.argument("path", metavar="RUN_OR_FOLDER")
@click.option("--host", default="127.0.0.1", show_default=True, help="Any but a loopback address demands a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8050, show_default=True, help="0 takes a free one.")
@click.option(
    "--token",
    envvar="FP8DEBUG_TOKEN",
    metavar="WORD",
    help="What a browser must show; better in FP8DEBUG_TOKEN than in a list of processes. Generated where one is needed.",
)
def command(path: str, host: str, port: int, token: str | None) -> None:
    """Show a run, or every run of a folder, in the browser, until interrupted."""
    if token is not None and len(token) < MIN_TOKEN:
        raise UsageError(f"the token has {len(token)} characters; it needs {MIN_TOKEN} or more, or leave it out to get one")
    try:
        from fp8debug_dashboard import serve

        serve(path, host, port, token)
    except ModuleNotFoundError as error:
        raise UsageError(f"the dashboard needs {error.name}, which is not installed: pip install 'fp8debug[dashboard]'") from None

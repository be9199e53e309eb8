"""Starts the dashboard: listens, imports what serves the pages, then reads what the first of them shows."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fp8debug.errors import UsageError

from .source import ServedFolder

if TYPE_CHECKING:
    import flask

#: What it needs that reading a run does not; looked for before the address is printed, imported after.
_PACKAGES = ("flask", "dash", "dash_ag_grid", "dash_mantine_components", "plotly")


def serve(path: str | Path, host: str = "127.0.0.1", port: int = 8050, token: str | None = None) -> None:
    """Serve a run or a folder of runs until interrupted.

    Args:
        path: a run, a folder of runs, or an empty folder, in which the first run is waited for; it is only read.
        host: address to bind to. Any but a loopback address demands a token.
        port: port to bind to; 0 takes a free one.
        token: what a browser must show; generated for a non-loopback address when it is not given.

    Raises:
        RunError: the path is none of them.
        UsageError: nobody can listen at that address.
        ModuleNotFoundError: a package that it needs is not installed.
    """
    source = ServedFolder(path)
    if source.is_folder and not source.names():
        print(f"fp8debug: no run in {path} yet: the page shows the first one when it comes", file=sys.stderr, flush=True)
    check_address(host, port)
    _check_packages()
    collector = _Collector()
    from .early_shell import Front
    from .server import listen

    front = Front()
    server, token = listen(front, host, port, token)
    failures: list[Exception] = []

    def make() -> None:
        try:
            front.become(lambda: _made(source, token))
        except Exception as error:
            failures.append(error)
        else:
            _come_ahead(source)
        finally:
            collector.resume()
        if failures:
            server.shutdown()
        else:
            _go_ahead(source)

    try:
        # One after the other: the browser waits for the app first, and loads its scripts while the run is read.
        threading.Thread(target=make, daemon=True).start()
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        collector.end()
    if failures:
        raise failures[0]


def _check_packages() -> None:
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


class _Collector:
    """Python's garbage collector, off while packages are imported.

    Nothing that is imported is garbage, and to look for some takes a tenth of the time.
    """

    def __init__(self) -> None:
        self._was_on, self._has_ended = gc.isenabled(), threading.Event()
        gc.disable()

    def resume(self) -> None:
        """Collect from now on as before."""
        if not self._has_ended.is_set():
            gc.freeze()  # or all that was imported is looked through once more
        if self._was_on:
            gc.enable()

    def end(self) -> None:
        """Leave nothing frozen, which counts as leaked at the end of the process."""
        self._has_ended.set()
        gc.unfreeze()


def _made(source: ServedFolder, token: str | None) -> flask.Flask:
    from .app import make_app
    from .server import guard

    app = make_app(source)
    guard(app, token)
    server: flask.Flask = app.server
    return server


def _come_ahead(source: ServedFolder) -> None:
    from .screens import come_ahead

    come_ahead(source)


def _go_ahead(source: ServedFolder) -> None:
    from .screens import go_ahead

    go_ahead(source)


def check_address(host: str, port: int) -> None:
    """Look whether a server may listen there: werkzeug ends the process where it may not.

    Raises:
        UsageError: no such host, not one of this machine, no such port, or it is taken.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"cannot listen on {host}, port {port}: ports are 0 to 65535; choose another --port")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, UnicodeError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while ")[0]  # the address again
        raise UsageError(f"cannot listen on {host}, port {port}: {why}; choose another --host or --port") from None

"""A server of the dashboard for tests and screenshots, and how Chromium is started to look at it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from werkzeug.serving import make_server

from fp8debug_dashboard import make_app
from fp8debug_dashboard.web.server import SilentHandler, guard

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication


def browser_args() -> list[str]:
    """Return Chromium's flags: a container has a small /dev/shm, no GPU, and no proxy that could reach our server."""
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    return [*sandbox, "--disable-dev-shm-usage", "--enable-unsafe-swiftshader", "--no-proxy-server"]


@contextmanager
def served(path: Path, token: str | None = None) -> Iterator[str]:
    """Serve a run or a folder on a free port; yields the address."""
    app = make_app(path)
    guard(app, token)
    with listening(app.server) as address:
        yield address


@contextmanager
def listening(app: WSGIApplication) -> Iterator[str]:
    """Have an application answer on a free port; yields the address."""
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=SilentHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

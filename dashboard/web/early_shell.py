"""Stands before the app while that is being made: importing Dash takes half a second, in which the browser has nothing to do.

The head of a page goes out at once, and with it the name of plotly.js, the largest script: the browser compiles it meanwhile. The
rest of the page follows when the app is there. Whoever asks for anything else waits for the app. From then on the app answers
itself, and nothing stands before it.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import flask
from werkzeug.test import run_wsgi_app

from ..pages.contents import CONTENTS
from .plot_library import PATH, library_script

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

#: Key of the app's configuration: what returns the texts of the inline scripts of its pages.
SCRIPTS = "FP8DEBUG_SCRIPTS"
#: How a page begins: the template of the app goes on after its own "<head>". assets/fp8debug.js takes over what comes.
HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<script nonce="{{nonce}}">window.earlyPlots = new Promise((resolve, reject) => {{
  const script = document.createElement("script");
  script.src = "{PATH}";
  script.onload = () => resolve(window.Plotly);
  script.onerror = () => reject(new Error("{PATH} did not load"));
  document.head.appendChild(script);
}});
window.earlyPlots.catch(() => null);</script>
"""
PAGES = ("", *CONTENTS)


class Front:
    """A WSGI application that becomes another one.

    Attributes:
        server: what answers first; who may see nothing of the app may see nothing of it either.
    """

    def __init__(self) -> None:
        self.server = flask.Flask(__name__, static_folder=None)
        self.server.add_url_rule(PATH, "library", library_script)
        for page in PAGES:
            self.server.add_url_rule(f"/{page}", "page", self._page)
        self._app: flask.Flask | None = None
        self._is_made = threading.Event()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        is_early = environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"] in (PATH, *(f"/{page}" for page in PAGES))
        if is_early and not self._is_made.is_set():
            return self.server(environ, start_response)
        return self._made()(environ, start_response)

    def become(self, make: Callable[[], flask.Flask]) -> None:
        """Make the app, and leave everything to it; where that fails, all that wait get an error."""
        try:
            self._app = make()
        finally:
            self._is_made.set()

    def _made(self) -> flask.Flask:
        self._is_made.wait()
        if self._app is None:
            raise RuntimeError("the app could not be made")
        return self._app

    def _page(self) -> flask.Response:
        flask.g.nonce = nonce = secrets.token_urlsafe(18)
        return flask.Response(self._parts(flask.request.environ.copy(), nonce), mimetype="text/html")

    def _parts(self, environ: dict[str, Any], nonce: str) -> Iterator[bytes]:
        yield HEAD.replace("{nonce}", nonce).encode()
        app = self._made()
        chunks, _, _ = run_wsgi_app(app, environ, buffered=True)
        body = b"".join(chunks).decode()
        yield with_nonce(body.partition("<head>")[2] or body, inline_scripts(app), nonce).encode()


def inline_scripts(app: flask.Flask) -> list[str]:
    """Return the texts of the scripts that stand in the pages of an app themselves; none before there is an app."""
    listing: Callable[[], list[str]] = app.config.get(SCRIPTS, list)
    return listing()


def with_nonce(page: str, scripts: Iterable[str], nonce: str) -> str:
    """Return a page in which these inline scripts, and no others, show the nonce that lets them run.

    The headers of a page are sent before it is known which scripts follow, so these can't be named by their hashes.
    """
    for script in scripts:
        opening = re.compile(rf"<script(?=[^>]*>{re.escape(script)}</script>)")
        page = opening.sub(f'<script nonce="{nonce}"', page)
    return page

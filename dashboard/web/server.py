"""Serves the app: to this machine without a token, to any other address only with one."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import secrets
import sys
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import urlencode

import flask
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from .early_shell import Front, inline_scripts
from .urls import parse, query

#: What a page may load and where it may send: this server alone. ``{}`` are the inline scripts that may run, by hash or nonce; no
#: text becomes code (no 'unsafe-eval'). Mantine and plotly.js write style elements, whose text is not known beforehand.
POLICY = (
    "default-src 'self'; script-src 'self'{}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
    " font-src 'self' data:; connect-src 'self'; worker-src 'none'; object-src 'none'; frame-src 'none';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: What a page may not use of the browser: nothing of the dashboard needs a camera, a place or a payment.
PERMISSIONS = "camera=(), microphone=(), geolocation=(), payment=(), usb=()"

#: By these Dash lets a page look up and end processes on the server ("background callbacks"); we have none, and answer to none.
JOB_WORDS = ("job", "cancelJob", "cacheKey", "oldJob")


class SilentHandler(WSGIRequestHandler):
    """Logs errors only."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: a page asks every few seconds."""


class HasServer(Protocol):
    """An app of Dash, or what stands before it."""

    server: flask.Flask


def listen(front: Front, host: str, port: int, token: str | None) -> tuple[BaseWSGIServer, str | None]:
    """Make a server that listens, and print its address; return it, and the token that it wants.

    Args:
        front: what answers.
        host: address to bind to. Any but a loopback address demands a token.
        port: port to bind to; 0 takes a free one.
        token: what a browser must show; generated for a non-loopback address when it is not given.
    """
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    guard(front, token)
    server = make_server(host, port, front, threaded=True, request_handler=SilentHandler)
    shown = f"[{host}]" if ":" in host else host
    suffix = f"/?{urlencode({'token': token})}" if token else "/"
    print(f"fp8debug dashboard on http://{shown}:{server.server_port}{suffix} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    return server, token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def source_of(script: str) -> str:
    """Return how a Content-Security-Policy names an inline script by its text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def policy(sources: Iterable[str]) -> str:
    """Return the Content-Security-Policy of a page with these sources of inline scripts."""
    return POLICY.format("".join(f" {source}" for source in dict.fromkeys(sources)))


def guard(app: HasServer, token: str | None) -> None:
    """Refuse who does not show the token, and set the headers that keep a page from reaching anywhere else.

    Without a token only requests that name a loopback host are answered: a web page that points its own name at 127.0.0.1
    (DNS rebinding) gets nothing.
    """
    server: flask.Flask = app.server

    @server.before_request
    def check() -> flask.Response | None:
        if any(flask.request.args.get(word) is not None for word in JOB_WORDS):
            return flask.Response("This dashboard has no background jobs.\n", 400, mimetype="text/plain")
        if flask.request.method == "POST" and flask.request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return _refusal("A page of another site asked: only the dashboard's own pages may.")
        if token is None:
            name = flask.request.host.rsplit(":", 1)[0].strip("[]")
            return None if is_loopback(name) else _refusal("This server answers to localhost only; start it with a token.")
        cookie = f"fp8debug-{flask.request.environ.get('SERVER_PORT', '')}"
        shown = flask.request.args.get("token")
        if shown is not None and _same(shown, token):
            return _admit(cookie, token)
        if _same(flask.request.cookies.get(cookie, ""), token):
            return None
        return _refusal("This dashboard wants its token: open the address that it printed, with ?token=... at the end.")

    @server.after_request
    def headers(response: flask.Response) -> flask.Response:
        nonce = flask.g.get("nonce")  # of the front page, whose rest is not known yet
        sources = map(source_of, inline_scripts(server)) if nonce is None else [f"'nonce-{nonce}'"]
        response.headers["Content-Security-Policy"] = policy(sources)
        response.headers["Permissions-Policy"] = PERMISSIONS
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"  # the layout is that of the page that asks for it
        if flask.request.path == "/_dash-layout":
            response.headers["Cache-Control"] = "no-store"
            response.vary.add("Referer")
        return response


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(), token.encode())


def _admit(cookie: str, token: str) -> flask.Response:
    """Answer with the cookie and the same address without the token, so that it stays out of history and bookmarks."""
    view = parse(flask.request.path, flask.request.query_string.decode())
    params = {key: value for key, value in view.params.items() if key != "token"}
    response = flask.make_response("", 303)
    response.headers["Location"] = "/" + flask.request.path.lstrip("/\\") + query(view.run, params)
    response.set_cookie(cookie, token, httponly=True, samesite="Lax", secure=flask.request.is_secure, path="/")
    return response


def _refusal(reason: str) -> flask.Response:
    return flask.Response(reason + "\n", 403, mimetype="text/plain")

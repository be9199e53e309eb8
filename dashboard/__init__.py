"""The dashboard: ``serve(path)`` shows a run, or a folder of runs, in a browser."""

from .app import make_app
from .server import serve

__all__ = ["make_app", "serve"]

"""The whole view is one short URL: the page is the path, everything else the query; what is default is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode


@dataclass(frozen=True)
class View:
    """Content of a URL.

    Attributes:
        page: ``overview``, ``heatmap``, ``module``, ``fallback`` or ``runs``.
        run: name of the run inside the folder that is served; None when one run is served.
        params: the page's own settings; unknown ones are ignored by the page.
    """

    page: str
    run: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str, default: str = "") -> str:
        """Return a setting of the page."""
        return self.params.get(key, default)

    def get_int(self, key: str) -> int | None:
        """Return a whole number, or None where there is none: a URL can hold anything."""
        try:
            return int(self.params[key])
        except (KeyError, ValueError):
            return None

    @property
    def place(self) -> tuple[str, str | None, str | None]:
        """Settings that decide the layout of a page; the other settings only decide what its figures show."""
        return self.page, self.run, self.params.get("module")


def parse(pathname: str | None, search: str | None) -> View:
    """Return the view of a path and a query; ``/`` is the overview, or the list of runs where no run is named."""
    params = dict(parse_qsl((search or "").lstrip("?")))
    run = params.pop("run", None)
    return View((pathname or "/").strip("/") or "overview", run, params)


def query(run: str | None, params: Mapping[str, object]) -> str:
    """Return the ``?...`` of a URL, empty when there is nothing to say."""
    pairs = {"run": run, **params}
    text = urlencode({key: str(value) for key, value in pairs.items() if value not in (None, "")})
    return f"?{text}" if text else ""


def href(page: str, run: str | None = None, **params: object) -> str:
    """Return the URL of a page; names are percent-encoded, so no name can leave the server or the page."""
    return ("/" if page == "overview" else f"/{page}") + query(run, params)

"""AG Grid's script, left out of what every page loads first: it comes with the first table, when the plots have been painted.

To set it up and to make one empty table takes the browser as long as a plot, and tables stand below the plots.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import dash
from dash.fingerprint import build_fingerprint

_PACKAGE, _SCRIPT = "dash_ag_grid", "dash_ag_grid.min.js"
#: The part of dcc that draws plots; dcc asks for it when it meets one.
_GRAPH = "/_dash-component-suites/dash/dcc/async-graph.js"


def leave_out_grid(app: dash.Dash) -> None:
    """Take the script out of the list of this process, and tell the pages where it is."""
    package = import_module(_PACKAGE)
    for script in package._js_dist:
        if script["relative_package_path"] == _SCRIPT:
            script["async"] = "lazy"
    changed = int((Path(str(package.__file__)).parent / _SCRIPT).stat().st_mtime)
    name = build_fingerprint(_SCRIPT, package.__version__, changed)  # type: ignore[no-untyped-call]  # untyped in dash
    address = f"/_dash-component-suites/{_PACKAGE}/{name}"
    told = f'<meta name="grid-library" content="{address}"><meta name="graph-library" content="{_GRAPH}">'
    app.index_string = app.index_string.replace("{%metas%}", told + "{%metas%}")

"""The pages of a run by name, and what of each changes: what the app must know before it has imported any of them.

A page's own module imports numpy, pyarrow and DuckDB; the browser loads its scripts meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """Entry of a page, known before its module is imported.

    Attributes:
        title: what the navigation says.
        outputs: (component id, property) of what changes.
    """

    title: str
    outputs: tuple[tuple[str | dict[str, str], str], ...]


#: In the order of the navigation; a name is the path of the page's URL and the name of its module.
CONTENTS: dict[str, Entry] = {
    "overview": Entry(
        "Overview",
        (
            ("verdict", "children"),
            ("classification", "children"),
            ("todo", "children"),
            ("worst", "children"),
            ("loss", "figure"),
            ("findings", "rowData"),
            ("coverage", "children"),
            ("timeline", "children"),
        ),
    ),
    "heatmap": Entry("Heatmap", (("heat-about", "children"), ("heat", "figure"))),
    "model": Entry("Model", (("model-about", "children"), ("model-tree", "children"))),
    "module": Entry(
        "Module",
        (
            ("module-head", "children"),
            ("module-about", "children"),
            ("nine", "figure"),
            ("casts", "children"),
            ("scales", "figure"),
            ("hist", "figure"),
            ("history", "figure"),
            ("split", "figure"),
            ("dumped", "children"),
            ({"control": "step", "default": ""}, "data"),
        ),
    ),
    "ranks": Entry(
        "Ranks",
        (
            ("rank-list", "children"),
            ("ranks-about", "children"),
            ("rank-sites", "rowData"),
            ("rank-heat", "figure"),
            ("rank-lines", "figure"),
        ),
    ),
    "findings": Entry(
        "Findings",
        (
            ("findings-about", "children"),
            ("all-findings", "rowData"),
            ("finding-head", "children"),
            ("evidence", "figure"),
            ("finding-manual", "children"),
        ),
    ),
    "fallback": Entry(
        "Fallback",
        (
            ("candidates", "rowData"),
            ("exported", "children"),
            ("fallback-about", "children"),
            ("fallback-notes", "children"),
            ("pareto", "figure"),
            ("fallback-proof", "children"),
        ),
    ),
    "compare": Entry(
        "Compare",
        (
            ("compare-about", "children"),
            ("compare-loss", "figure"),
            ("compare-settings", "children"),
            ("compare-sites", "rowData"),
            ("compare-site", "figure"),
        ),
    ),
    "parity": Entry("Parity", (("parity-about", "children"), ("parity-paths", "figure"), ("parity-modules", "rowData"))),
}

"""For people: the list as a Markdown page for a ticket or a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS, Exporter, one_line
from fp8debug.exporters.json import FOLKLORE
from fp8debug.fallback import positional_prior

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

HEADER = ("module", "gemms", "operand", "run in", "when", "why", "costs", "damage", "try before")


class MarkdownExporter(Exporter):
    """A table of the candidates, their cost in all, and the positional prior apart."""

    name = "markdown"
    suffix = ".md"

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the page."""
        lines = [f"# Fallback candidates of {_text(run.name)}", ""]
        if fallbacks:
            rows = [HEADER, tuple("---" for _ in HEADER), *(_row(fallback) for fallback in fallbacks)]
            lines += ["| " + " | ".join(row) + " |" for row in rows]
            cost = sum(fallback.cost for fallback in fallbacks)
            lines += ["", f"Together they give back {cost:.1%} of the FP8 speed-up. They are candidates: a run with them proves"]
            lines += ["them. `fp8debug.apply(model, FILE)` applies the same list written by `fp8debug fallback RUN --to json`."]
        else:
            lines.append("No candidates: nothing found that another cast or BF16 would cure.")
        prior = positional_prior(run)
        if prior:
            lines += ["", f"Apart from these, folklore ({FOLKLORE}): {', '.join(_text(name) for name in prior)}."]
        return "\n".join(lines) + "\n"


def _row(fallback: Fallback) -> tuple[str, ...]:
    return (
        _text(fallback.module),
        " ".join(fallback.gemms),
        "all" if fallback.tensor == "*" else fallback.tensor,
        "BF16" if fallback.cast is None else str(fallback.cast),
        fallback.span(),
        _text(" ".join(fallback.reasons)),
        f"{fallback.cost:.1%}",
        "-" if fallback.damage is None else f"{fallback.damage:.3g}",
        _text(fallback.cheaper or "-"),
    )


def _text(text: str) -> str:
    """Return text as itself in a table's cell: nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", one_line(text))


EXPORTERS.add(MarkdownExporter.name, MarkdownExporter())

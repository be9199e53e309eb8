"""A figure or table of a run, as HTML for a notebook and as an Arrow table for every data frame library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pyarrow as pa

from fp8debug.escaping import one_line
from fp8debug.reports.page import document
from fp8debug.reports.style import SCOPED_CSS

#: Rows of a table in a notebook, and columns that its text names; all are in ``table``.
MAX_ROWS, MAX_NAMES = 60, 8


@dataclass(frozen=True, kw_only=True)
class HtmlFigure:
    """A figure and its values.

    ``pandas.DataFrame.from_arrow``, ``polars.DataFrame``, ``pyarrow.table`` and DuckDB take it as it is, by the Arrow PyCapsule
    interface; ``pandas.api.interchange.from_dataframe`` by the dataframe interchange protocol.

    Attributes:
        title: of the figure, plain text.
        html: what is shown: elements without scripts, nothing in them from outside.
        table: its values, one row per cell, point or finding; no column is nested.
    """

    title: str
    html: str
    table: pa.Table

    def _repr_html_(self) -> str:
        return fragment(self.html)

    def __repr__(self) -> str:
        names = self.table.column_names
        more = f" and {len(names) - MAX_NAMES} more columns" if len(names) > MAX_NAMES else ""
        return f"{one_line(self.title)}: {self.table.num_rows} rows of {', '.join(names[:MAX_NAMES])}{more}"

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __arrow_c_schema__(self) -> object:
        return self.table.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)

    def __dataframe__(self, nan_as_null: bool = False, allow_copy: bool = True) -> Any:
        return self.table.__dataframe__(nan_as_null, allow_copy)

    def to_html(self) -> str:
        """Return the figure as a page of its own, to save or to send."""
        return document(self.title, [f"<h1>{escape(self.title)}</h1><section class='panel'>{self.html}</section>"])


def fragment(html: str) -> str:
    """Return elements with their style sheet, which changes nothing else in a notebook."""
    return f"<div class='fp8debug'><style>{SCOPED_CSS}</style>{html}</div>"


def table_figure(title: str, table: pa.Table, columns: Sequence[str] | None = None) -> HtmlFigure:
    """Return a table as a figure.

    Args:
        title: above it.
        table: its values.
        columns: those that are shown; all by default.
    """
    shown = table.select(list(columns) if columns is not None else table.column_names)
    is_number = [pa.types.is_floating(kind) or pa.types.is_integer(kind) for kind in shown.schema.types]
    kinds = [" class='num'" if right else "" for right in is_number]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(shown.column_names, kinds, strict=True))
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{_cell(value)}</td>' for value, kind in zip(row.values(), kinds, strict=True))}</tr>"
        for row in shown.slice(0, MAX_ROWS).to_pylist()
    )
    more = f"<p class='muted'>and {len(table) - MAX_ROWS} more rows in the table</p>" if len(table) > MAX_ROWS else ""
    body = f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}"
    return HtmlFigure(title=title, html=f"<h3>{escape(title)}</h3>{body if len(table) else '<p>None.</p>'}", table=table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return escape(f"{value:.4g}" if isinstance(value, float) else one_line(str(value)))

"""The few building blocks all pages share. Everything that comes from a run is passed as text, which React escapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dash_ag_grid as dag  # type: ignore[import-untyped]  # ships no types
from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import UsageError

from .data.healthy_ranges import envelope
from .figures.plot import Figure
from .figures.theme import GRID_NUMBER, ICONS, NO_DATA, NUMBER_LENGTH, WORDS
from .web.mantine import COMBO_BOX, dmc

Child = Component | str | None
_DECORATION: dict[str, Any] = {"aria-hidden": "true"}

#: Of a grid, in pixels of a window that is not scaled: a row, its head, its body without rows (style.css has them, in rem), what
#: several pages add.
ROW_HEIGHT, HEADER_HEIGHT, MIN_BODY_HEIGHT, PAGES_HEIGHT = 28, 30, 30, 32
#: Rows of one page of a grid.
PAGE_ROWS = 20
#: Least width of a column of sites, in pixels: that of "dgrad grad_output", of which nothing is cut.
SITE_WIDTH = 124

#: Options of every plot. plotly's buttons that upload a plot to a cloud, and its link to its makers, are off; a button without a
#: server to send to could send nowhere. fp8debug.js sets the same for any plot that comes without options.
GRAPH_CONFIG: Any = {
    "displaylogo": False,
    "showSendToCloud": False,
    "showEditInChartStudio": False,
    "showLink": False,
    "showTips": False,  # "Double-click to zoom back out" lies over the corner of the page; the plot has a button for it
    "sendData": False,
    "plotlyServerURL": "",
    "topojsonURL": "",
    "modeBarButtonsToRemove": [
        *("sendChartToCloud", "sendDataToCloud", "editInChartStudio"),
        *("select2d", "lasso2d", "autoScale2d"),
        "toImage",  # "PNG" stands under every plot
    ],
}


def badge(level: str, text: str = "") -> Component:
    """Return a severity or verdict as icon and word, never as colour alone."""
    words = [html.Span(ICONS[level], className="icon", **_DECORATION), html.Span(text or WORDS[level])]
    return html.Span(words, className=f"badge badge-{level}")


def card(title: str, *children: Child, note: Child = None, id: str | None = None) -> Component:
    """Return a titled box; ``note`` stands small beside the title."""
    head = [html.H2(title), html.Div(note, className="note")] if note is not None else [html.H2(title)]
    body = [child for child in children if child is not None]
    named: dict[str, Any] = {"id": id} if id else {}
    return html.Section([html.Header(head), *body], className="card", **named)


def graph(id: str, figure: Figure) -> Component:
    """Return a plot, with a button that saves it; it keeps its zoom when its data change."""
    place = {"--height": rem(figure.layout["height"])}
    plot = dcc.Graph(id=id, figure=figure.packed(), config=GRAPH_CONFIG, className="plot")
    saves = [_save(kind.upper(), f"save the plot {id} as {kind.upper()}", {f"data-{kind}": id}) for kind in ("svg", "png")]
    inside = [plot, html.Div(saves, className="saves")]
    return html.Div(inside, className="saved saved-plot", style=place)  # the plot itself is not there before its script is


def _save(text: str, label: str, what: dict[str, str]) -> Component:
    attributes: dict[str, Any] = {**what, "aria-label": label}
    return html.Button(text, className="save", title=label, **attributes)


def rem(pixels: int) -> str:
    """Return a length in CSS that grows with the root's font size, of which a window that is not scaled has 16 px."""
    return f"{pixels / 16:g}rem"


def poster(text: Child, *more: Child) -> Component:
    """Return what stands where something will be that takes a moment."""
    return html.P([html.Span(className="pulse"), text, *more], className="hint poster", role="status")


def facts(pairs: Sequence[tuple[str, Child]]) -> Component:
    """Return a line of label and value pairs."""
    return html.Dl([html.Div([html.Dt(label), html.Dd(value)]) for label, value in pairs], className="facts")


def note(text: Child, *more: Child, kind: str = "plain") -> Component:
    """Return a paragraph that says what is missing or went wrong, and what to run."""
    return html.P([text, *more], className=f"hint hint-{kind}")


def code(text: str) -> Component:
    """Return a command or name in monospace."""
    return html.Code(text)


def table(
    head: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    numeric: Sequence[int] = (),
    name: str = "table",
    total: int = 0,
    rest: str = "",
    about: Sequence[str] = (),
) -> Component:
    """Return a small plain table.

    Args:
        head: of its columns.
        rows: its cells.
        numeric: columns that are aligned right.
        name: of its CSV file.
        total: rows that there are, where not all of them are shown.
        rest: where to find the others.
        about: what the file is of beside the run, for its name: module, site, step.
    """

    def cells(tag: Callable[..., Component], row: Sequence[Child]) -> list[Component]:
        return [tag(cell, className="num" if i in numeric else None) for i, cell in enumerate(row)]

    body = [html.Tr(cells(html.Td, row)) for row in rows]
    shown = html.Div(html.Table([html.Thead(html.Tr(cells(html.Th, head))), html.Tbody(body)]), className="table", tabIndex=0)
    if total > len(rows):
        shown = html.Div([shown, note(f"{len(rows):,} of {total:,} rows; {rest}.")])
    return html.Div(
        [shown, _save("CSV", f"save the table {name} as CSV", {"data-csv": name, "data-about": " ".join(about)})],
        className="saved",
    )


def grid(
    id: str,
    columns: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    none: str,
    csv: bool = True,
    search: str = "",
) -> Component:
    """Return an AG Grid that filters and sorts; cells are text, links come from the ``Link`` renderer in assets.

    Args:
        id: component id.
        columns: AG Grid's column definitions; widths are shares of the grid's.
        rows: one mapping per row.
        none: what it says without rows.
        csv: it has a button that saves it.
        search: only rows that hold these words are shown.
    """
    component: Component = dag.AgGrid(
        id=id,
        # Not fitted by a callback: that leaves two pixels to scroll, and the bar lies over the last row.
        columnDefs=column_definitions(columns),
        rowData=list(rows),
        defaultColDef={"sortable": True, "resizable": True, "filter": True, "minWidth": 64},
        dashGridOptions={
            "domLayout": "autoHeight",
            "localeText": {"noRowsToShow": none},
            "quickFilterText": search,
            "animateRows": False,
            "popupParent": {"function": "pageBody()"},  # in a low grid a filter's box has no room
            "tooltipShowDelay": 300,
            "enableCellTextSelection": True,
            "ensureDomOrder": True,
            "suppressCellFocus": False,
            "loadThemeGoogleFonts": False,
            "pagination": True,  # style.css hides its bar where there is one page
            "paginationPageSize": PAGE_ROWS,
        },
        getRowId="params.data.id",
        csvExportParams={"fileName": f"{id}.csv"},
        style={"height": None, "width": "100%"},
        dangerously_allow_code=False,
    )
    save = [_save("CSV", f"save the table {id} as CSV", {"data-csv-grid": id})] if csv else []
    return html.Div([component, *save], className="saved saved-grid", style={"--height": rem(height_of(len(rows)))})


def column_definitions(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return columns as AG Grid takes them: their widths are shares, and no column is narrower than its words and numbers.

    Raises:
        UsageError: a column without a width.
    """
    without = next((column for column in columns if "width" not in column), None)
    if without is not None:
        name = without.get("field") or without.get("headerName") or "one"
        raise UsageError(f"column {name!r} of a grid has no width: give it one, in pixels of a grid of 1,000, as its share")
    return [{"minWidth": _least(column), **column, "flex": column["width"]} for column in columns]


def _least(column: Mapping[str, Any]) -> int:
    """Return the smallest width of a grid's column in pixels: below it words would be cut, and the grid scrolls instead."""
    longest = max(len(column["headerName"]), NUMBER_LENGTH if column.get("valueFormatter") == GRID_NUMBER else 0)
    return max(64, round(0.62 * float(column["width"])), 7 * longest + 28)


def height_of(num_rows: int) -> int:
    """Return the height of a grid with so many rows in pixels: what it is given before it is drawn."""
    shown = max(MIN_BODY_HEIGHT, min(num_rows, PAGE_ROWS) * ROW_HEIGHT)
    return HEADER_HEIGHT + shown + 3 + (PAGES_HEIGHT if num_rows > PAGE_ROWS else 0)


def control(name: str, default: str, value: str, options: Sequence[Any], label: str, width: int = 180) -> Component:
    """Return a choice that lives in the URL: its id carries the default, which the URL leaves out."""
    component: Component = dmc.Select(
        id={"control": name, "default": default},
        value=value,
        data=list(options),
        label=label,
        searchable=len(options) > 8,
        allowDeselect=False,
        size="xs",
        w=width,
        comboboxProps={**COMBO_BOX, "width": max(width, 260), "position": "bottom-start"},  # of 400 steps it is seen
        withScrollArea=False,
        className="control",
    )
    return component


#: Between several values of one setting in the URL; fp8debug.js has the same.
SEPARATOR = "~"


def text_control(name: str, value: str, label: str, placeholder: str, width: int = 180) -> Component:
    """Return a line of text that lives in the URL, written there when typing pauses."""
    component: Component = dmc.TextInput(
        id={"control": name, "default": ""},
        value=value,
        label=label,
        placeholder=placeholder,
        debounce=350,
        size="xs",
        w=width,
        className="control",
    )
    return component


def multi_control(name: str, value: str, options: Sequence[Any], label: str, placeholder: str) -> Component:
    """Return a choice of several, which lives in the URL with ``SEPARATOR`` between them."""
    component: Component = dmc.MultiSelect(
        id={"control": name, "default": ""},
        value=[one for one in value.split(SEPARATOR) if one],
        data=list(options),
        label=label,
        placeholder=placeholder,
        searchable=True,
        clearable=True,
        hidePickedOptions=True,
        size="xs",
        comboboxProps=COMBO_BOX,
        maxDropdownHeight=420,
        className="control multi",
    )
    return component


def segments(name: str, default: str, value: str, options: Sequence[Any], label: str) -> Component:
    """Return a choice of few, all of them visible."""
    return html.Div(
        [
            html.Label(label, className="control-label"),
            dmc.SegmentedControl(
                id={"control": name, "default": default}, value=value, data=list(options), size="xs", className="control"
            ),
        ]
    )


def slider(name: str, default: int, value: int, label: str, marks: Sequence[int]) -> Component:
    """Return a share in percent that lives in the URL."""
    return html.Div(
        [
            html.Label(label, className="control-label"),
            dmc.Slider(
                id={"control": name, "default": str(default)},
                value=value,
                min=0,
                max=100,
                step=1,
                marks=[{"value": mark, "label": f"{mark}%"} for mark in marks],
                size="sm",
                w=420,
                mb=16,
                updatemode="drag",  # it is answered while it moves; fp8debug.js sees to it that not every value is asked for
                thumbLabel=label,
            ),
        ]
    )


def number(value: object, digits: int = 4) -> str:
    """Return a number for people: four significant digits, never 0.0000; an en dash for no data."""
    if value is None:
        return NO_DATA
    if isinstance(value, (int, float)):
        if value != value:
            return "NaN"
        if abs(value) == float("inf"):
            return "Inf" if value > 0 else "-Inf"
        return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"
    return str(value)


def percent(value: float | None) -> str:
    """Return a share in percent."""
    if value is None or value == 0:
        return NO_DATA if value is None else "0%"
    if value != value:
        return "NaN"
    return f"{value:.1%}" if value >= 0.001 else f"{value * 100:.2g}%"


def not_finite(text: str, title: str) -> Component:
    """Return "NaN" or "Inf" in a table, in the colour of an error and with what it rests on."""
    return html.Span([badge("error", text)], title=title)


def graded(metric: str, value: float | None, kind: int) -> Child:
    """Return a value of a column, with an icon where it lies outside its healthy range; rates are in percent."""
    text = percent(value) if metric.endswith("_rate") else number(value, 6 if metric in ("cosine", "gain") else 4)
    found = envelope(metric, kind)
    if value is None or value != value or found is None:
        return text
    severity = found.at_value(value)
    grade = "error" if severity >= 2 else "warning" if severity >= 1 else None
    return text if grade is None else html.Span([badge(grade, text)], title=f"{WORDS[grade]}: outside the healthy range")

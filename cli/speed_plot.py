"""The plot of ``fp8debug speed``: for every GEMM a bar for BF16 and one for FP8, quantization and GEMM stacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

from fp8debug.errors import UsageError
from fp8debug.store.speed_file import GEMMS

from .speed import label

#: Colours that remain apart in grey and to the colour-blind (Okabe and Ito).
BF16, QUANTIZE, PRODUCT = "#999999", "#E69F00", "#0072B2"
TITLE = "Time of a GEMM in BF16 and in FP8, us"
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 420, 560, 12, 14, 56


class ShapePair(NamedTuple):
    """One GEMM of a shape."""

    name: str
    bf16_us: float
    quantize_us: float
    gemm_us: float


def pairs(document: Mapping[str, Any]) -> Iterator[ShapePair]:
    """Return the GEMMs of a document, in its order."""
    for shape in document["shapes"]:
        for gemm in GEMMS:
            of = shape["gemms"][gemm]
            yield ShapePair(f"{label(shape)} {gemm}", of["bf16_us"], of["quantize_us"], of["gemm_us"])


def to_svg(document: Mapping[str, Any]) -> str:
    """Return the plot as SVG."""
    found = list(pairs(document))
    largest = max(max(p.bf16_us, p.quantize_us + p.gemm_us) for p in found)
    height = _TOP + len(found) * (2 * _BAR + _GAP) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 80}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="20" font-size="14">{TITLE}, {escape(document["device"])}'
        "</text>",
    ]
    for place, (colour, text) in enumerate(((BF16, "BF16"), (QUANTIZE, "FP8: quantize"), (PRODUCT, "FP8: GEMM"))):
        x = _LEFT + 130 * place
        lines.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="42">{text}</text>')
    for place, pair in enumerate(found):
        y = _TOP + place * (2 * _BAR + _GAP)
        scale = _WIDTH / largest
        end = (pair.quantize_us + pair.gemm_us) * scale
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + _BAR + 4}" text-anchor="end">{escape(pair.name)}</text>',
            _bar(0, y, pair.bf16_us * scale, BF16),
            _bar(0, y + _BAR, pair.quantize_us * scale, QUANTIZE),
            _bar(pair.quantize_us * scale, y + _BAR, pair.gemm_us * scale, PRODUCT),
            f'<text x="{_LEFT + pair.bf16_us * scale + 4:.1f}" y="{y + 10}">{pair.bf16_us:.1f}</text>',
            f'<text x="{_LEFT + end + 4:.1f}" y="{y + _BAR + 10}">{pair.quantize_us + pair.gemm_us:.1f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{_LEFT + x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR - 1}" fill="{colour}"/>'


def to_html(document: Mapping[str, Any]) -> str:
    """Return the plot as a page that needs no network.

    Raises:
        UsageError: plotly is not installed.
    """
    try:
        from plotly import graph_objects  # type: ignore[import-untyped]  # plotly ships no types
    except ImportError:
        raise UsageError("an .html plot needs plotly: pip install 'fp8debug[dashboard]'; an .svg needs nothing") from None
    found = list(pairs(document))[::-1]  # the first at the top
    names = [escape(p.name) for p in found]  # plotly reads markup in text
    figure = graph_objects.Figure(layout={"title": f"{TITLE}, {document['device']}", "barmode": "stack"})
    groups = (
        ("BF16", BF16, "bf16", [p.bf16_us for p in found]),
        ("FP8: quantize", QUANTIZE, "fp8", [p.quantize_us for p in found]),
        ("FP8: GEMM", PRODUCT, "fp8", [p.gemm_us for p in found]),
    )
    for name, colour, group, times in groups:
        figure.add_bar(name=name, y=names, x=times, orientation="h", marker_color=colour, offsetgroup=group)
    figure.update_layout(height=180 + 44 * len(found), xaxis_title="us", yaxis_automargin=True, template="plotly_white")
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page

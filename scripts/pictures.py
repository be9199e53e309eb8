"""Draw the pictures of docs/concepts.md and docs/architecture.md as SVG; ``scripts/docs.py`` writes them to docs/img.

A picture is boxes and arrows on a grid, black on white with one accent, so that it reads in a light and in a dark page.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

INK, PALE, ACCENT, WARM = "#1a1a2e", "#eef1fb", "#3f51b5", "#c2410c"


class Canvas:
    """Collect shapes and return them as one SVG document.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        title: what the picture shows, for readers who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, *lines: str, fill: str = PALE, stroke: str = ACCENT) -> None:
        """Add a rectangle with lines of text in its middle; the first line is bold."""
        radius = 5 if min(width, height) > 40 else 1
        self._shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{stroke}"'
            ' stroke-width="1.5"/>'
        )
        first = y + height / 2 - 9 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 18 * number, line, anchor="middle", bold=number == 0)

    def text(self, x: float, y: float, line: str, *, anchor: str = "start", bold: bool = False, color: str = INK) -> None:
        """Add one line of text."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}"{weight}>{escape(line)}</text>')

    def arrow(self, x1: int, y1: int, x2: int, y2: int, *, color: str = INK, dashed: bool = False) -> None:
        """Add a line with a head at its end."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        head = "warm" if color == WARM else "ink"
        self._shapes.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="1.5"{dashes}'
            f' marker-end="url(#{head})"/>'
        )

    def svg(self) -> str:
        """Return the document."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
            for name, color in (("ink", INK), ("warm", WARM))
        )
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' height="{self.height}" role="img" font-family="system-ui, sans-serif" font-size="14">\n'
            f"<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n{shapes}\n</svg>\n'
        )


def sites() -> str:
    """Return the three GEMMs of a Linear and their nine sites."""
    canvas = Canvas(760, 330, "The three GEMMs of a Linear: fprop, dgrad and wgrad, with their operands and results")
    rows = (
        ("fprop", ("input", "M x K"), ("weight.T", "K x N"), ("output", "M x N"), "contracts K"),
        ("dgrad", ("grad_output", "M x N"), ("weight", "N x K"), ("grad_input", "M x K"), "contracts N"),
        ("wgrad", ("grad_output.T", "N x M"), ("input", "M x K"), ("grad_weight", "N x K"), "contracts M"),
    )
    for number, (gemm, first, second, result, contracted) in enumerate(rows):
        y = 20 + 105 * number
        canvas.text(16, y + 32, gemm, bold=True)
        canvas.text(16, y + 52, contracted)
        canvas.box(120, y, 150, 72, *first)
        canvas.text(292, y + 42, "@", anchor="middle", bold=True)
        canvas.box(314, y, 150, 72, *second)
        canvas.arrow(474, y + 36, 546, y + 36)
        canvas.box(556, y, 170, 72, *result, fill="#ffffff")
    return canvas.svg()


def cast() -> str:
    """Return a cast and its granularities: the region of a tensor that shares one scale."""
    canvas = Canvas(760, 300, "Granularities: the region of a tensor that shares one scale")
    shapes = (
        ("tensorwise", "whole tensor", 1, 1),
        ("rowwise", "one row", 8, 1),
        ("1x128", "128 of a row", 8, 4),
        ("128x128", "a square block", 4, 4),
    )
    for number, (name, words, rows, columns) in enumerate(shapes):
        x, y, side = 24 + 184 * number, 20, 160
        for row in range(rows):
            for column in range(columns):
                width, height = side // columns, side // rows
                is_first = row == 0 and column == 0
                canvas.box(x + column * width, y + row * height, width, height, fill=ACCENT if is_first else PALE)
        canvas.text(x + side / 2, 206, name, anchor="middle", bold=True)
        canvas.text(x + side / 2, 226, words, anchor="middle")
    canvas.text(24, 262, "scale = max of the format / amax of the region;  data = round(x * scale);  x ~= data * scale_inv")
    canvas.text(24, 284, "The dark region shares one scale_inv. wgrad reads the same tensors with 128x1: it contracts the rows.")
    return canvas.svg()


def references() -> str:
    """Return which result is compared with which."""
    canvas = Canvas(760, 300, "The references of a GEMM: shadow, exact and what ran")
    canvas.box(16, 30, 170, 64, "operands", "BF16 or FP32")
    canvas.box(16, 200, 170, 64, "FP8 operands", "data, scale_inv")
    canvas.arrow(101, 94, 101, 196)
    canvas.text(112, 150, "cast")
    canvas.box(300, 30, 190, 64, "shadow", "BF16 GEMM, FP32 sums", fill="#ffffff")
    canvas.box(300, 118, 190, 64, "exact", "GEMM in FP32 or better", fill="#ffffff")
    canvas.box(300, 206, 190, 64, "actual", "the FP8 GEMM that ran", stroke=WARM)
    canvas.arrow(186, 62, 296, 62)
    canvas.arrow(186, 222, 296, 152)
    canvas.arrow(186, 240, 296, 240)
    canvas.arrow(520, 64, 520, 148, color=WARM)
    canvas.text(532, 100, "exact - shadow:", bold=True)
    canvas.text(532, 120, "quantization error")
    canvas.arrow(520, 156, 520, 240, color=WARM)
    canvas.text(532, 196, "actual - exact:", bold=True)
    canvas.text(532, 216, "accumulation error")
    return canvas.svg()


def what_if() -> str:
    """Return one live tensor under the running cast and two others."""
    canvas = Canvas(760, 250, "What-if: one live tensor, the running cast and two casts that do not run")
    canvas.box(16, 92, 150, 64, "live tensor", "of one site")
    for number, (name, words, is_actual) in enumerate(
        (
            ("e4m3fn 1x128 current", "runs: actual = true", True),
            ("e5m2 tensorwise delayed", "what-if: actual = false", False),
            ("e4m3fn tensorwise current", "what-if: actual = false", False),
        )
    ):
        y = 16 + 76 * number
        canvas.arrow(166, 124, 246, y + 30, dashed=not is_actual)
        canvas.box(250, y, 230, 60, name, words, fill=PALE if is_actual else "#ffffff")
        canvas.arrow(480, y + 30, 556, y + 30, dashed=not is_actual)
        canvas.box(560, y, 180, 60, "one row of stats", "SQNR, underflow, ...", fill="#ffffff")
    return canvas.svg()


def halves() -> str:
    """Return how data flow from a training to a fallback list."""
    canvas = Canvas(800, 300, "The recording half and the reading half, joined by the run directory")
    canvas.text(16, 24, "recording: torch, numpy, pyarrow", bold=True)
    canvas.text(486, 24, "reading: DuckDB, no torch", bold=True)
    canvas.box(16, 44, 130, 60, "model", "FP8 GEMMs")
    canvas.box(176, 44, 130, 60, "Adapter", "finds the GEMMs")
    canvas.box(16, 144, 130, 60, "RunWriter", "own thread")
    canvas.box(176, 144, 130, 60, "Observer", "device table")
    canvas.arrow(146, 74, 172, 74)
    canvas.arrow(241, 104, 241, 140)
    canvas.arrow(176, 174, 150, 174)
    canvas.box(330, 224, 130, 60, "run directory", "Parquet, JSON", stroke=WARM)
    canvas.arrow(81, 204, 81, 254, color=WARM)
    canvas.arrow(81, 254, 326, 254, color=WARM)
    canvas.box(486, 144, 130, 60, "Run", "SQL over Parquet")
    canvas.arrow(460, 254, 551, 208, color=WARM)
    canvas.box(646, 144, 130, 60, "Rules", "triage: Findings")
    canvas.box(646, 44, 130, 60, "recommend", "Fallbacks")
    canvas.box(486, 44, 130, 60, "Exporters", "stacks' formats")
    canvas.arrow(616, 174, 642, 174)
    canvas.arrow(711, 144, 711, 108)
    canvas.arrow(646, 74, 620, 74)
    canvas.box(646, 224, 130, 60, "cli, dashboard", "show all of it", fill="#ffffff")
    canvas.arrow(711, 204, 711, 220)
    return canvas.svg()


#: Name of the file in docs/img -> the function that draws it.
PICTURES: dict[str, Callable[[], str]] = {
    "sites": sites,
    "casts": cast,
    "references": references,
    "what-if": what_if,
    "halves": halves,
}

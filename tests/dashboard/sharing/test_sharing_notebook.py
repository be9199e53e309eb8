"""A run in a notebook: representations without scripts, tables for every data frame library, one-line errors."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pandas as pd
import pyarrow as pa
import pytest
from nbclient import NotebookClient

from fp8debug.errors import Fp8DebugError, RunError
from fp8debug.store.read.notes import add_note
from fp8debug.store.read.run import Run
from fp8debug_dashboard.sharing import notebook
from fp8debug_dashboard.sharing.html_figure import MAX_ROWS, HtmlFigure, table_figure
from fp8debug_dashboard.sharing.report import run_report
from tests.reports.test_reports import HOSTILE, Page
from tests.rules.sick_runs import CLIPPED
from tests.synthetic import MODULES, Override, Plan, build, write

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A sick cast from step 20 on, a tensor without a finite element at step 30, and a module whose name is markup."""
    overrides = [
        Override(module=MODULES[1][0], gemm="fprop", tensor="input", steps=(20, None), slots={"gain": 2.0}),
        Override(
            module=MODULES[3][0], gemm="fprop", tensor="input", steps=(30, None), slots={"num_nan": lambda row: row["numel"]}
        ),
        Override(module=HOSTILE, gemm="fprop", tensor="input", steps=(20, None), slots=CLIPPED),
    ]
    modules = [(HOSTILE, 256, 256), *MODULES]
    return build(tmp_path_factory.mktemp("runs") / "a<b>&", num_steps=40, modules=modules, overrides=overrides)


def figures(run: Run) -> list[HtmlFigure]:
    site = run.site(MODULES[1][0], "fprop", "input")
    return [run.findings(), run.heatmap(), run.heatmap("amax", "fprop.input"), run.site(HOSTILE), site]


def test_a_run_shows_verdict_loss_modules_and_the_worst(run: Run) -> None:
    html = run._repr_html_()
    text = Page(html).text
    for words in ("✖ error a<b>&", "steps 0 to 39", "training loss", "Modules by steps", "Worst modules", "F113", MODULES[1][0]):
        assert words in text
    assert "error from step 20, SQNR 0 dB" in text and "NaN or Inf from step 30" in text
    assert run.findings().html.count(MODULES[1][0]) == 1
    assert len(html) < 60_000


def test_a_large_model_has_a_small_representation(tmp_path: Path) -> None:
    modules = [(f"blocks.{i}.{name}", 256, 256) for i in range(40) for name in ("up", "down")]
    sick = Override(module="blocks.17.up", gemm="fprop", tensor="input", slots={"gain": 2.0})
    run = build(tmp_path / "run", num_steps=10, modules=modules, overrides=[sick], with_results=False)
    small, whole = run._repr_html_(), run.heatmap()._repr_html_()
    assert "blocks.17.* (2)" in small and "blocks.0 … blocks.16 (34)" in small and "blocks.3.up" not in small
    assert "blocks.3.up" in whole and len(small) < 40_000


def test_what_is_shown_needs_and_runs_nothing(run: Run) -> None:
    for html in (run._repr_html_(), *(figure._repr_html_() for figure in figures(run)), figures(run)[1].to_html()):
        tags = Page(html).tags
        assert not {tag for tag, _ in tags} & {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a"}
        assert not [name for _, attrs in tags for name in attrs if name.startswith("on") or name in ("src", "href", "style")]
        assert "url(" not in html and "@import" not in html
    assert "<img src=x onerror=alert(1)>" in Page(run._repr_html_()).text


def test_figures_are_tables_for_every_library(run: Run) -> None:
    for figure in figures(run):
        table = pa.table(figure)
        assert table.equals(figure.table) and len(figure) == table.num_rows > 0
        assert pd.api.interchange.from_dataframe(figure).shape == table.shape
        assert not any(pa.types.is_nested(kind) for kind in table.schema.types)
        assert figure.__dataframe__().num_rows() == table.num_rows and pa.schema(figure).equals(table.schema)
        assert repr(figure).startswith("a<b>&") and "\n" not in repr(figure)


def test_the_findings_table(run: Run) -> None:
    rows = run.findings().table.to_pylist()
    accused = {row["module"]: row for row in rows}
    assert accused[MODULES[1][0]]["code"] == "F113" and accused[MODULES[1][0]]["first_step"] == 20
    assert {row["code"] for row in run.findings(select=["F113"]).table.to_pylist()} == {"F113"}
    assert "F113" not in {row["code"] for row in run.findings(ignore=["F113"]).table.to_pylist()}
    with pytest.raises(Fp8DebugError, match="unknown rule 'F9'"):
        run.findings(select=["F9"])


def test_the_heatmap_table(run: Run) -> None:
    rows = run.heatmap("gain", "fprop.input", module=MODULES[1][0]).table.to_pylist()
    assert [(row["step"], row["level"], row["metric"]) for row in rows] == [
        (0, "healthy", "gain"),
        (10, "healthy", "gain"),
        (20, "error", "gain"),
        (30, "error", "gain"),
    ]
    assert [row["value"] for row in rows] == pytest.approx([1, 1, 2, 2])
    lost = run.heatmap("sqnr_db", "fprop.input", module=MODULES[3][0]).table.to_pylist()[-1]
    assert (lost["level"], lost["value"]) == ("NaN or Inf", None)
    assert {row["level"] for row in run.heatmap("amax", "results").table.to_pylist()} <= {None, "NaN or Inf"}


def test_a_site_is_a_line_for_each_statistic(run: Run) -> None:
    figure = run.site(MODULES[3][0])
    assert figure.html.count("<svg") == 5 and figure.html.count("NaN from step 30") >= 5
    values = run.site(MODULES[1][0]).table.to_pylist()
    assert [row["gain"] for row in values] == pytest.approx([1, 1, 2, 2]) and "sqnr_db" in values[0]
    result = run.site(MODULES[1][0], "fprop", "output")
    assert "SQNR in dB against the exact GEMM" in result.html and "SQNR in dB against the shadow GEMM" in result.html


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda run: run.heatmap("sqnr"), "unknown metric 'sqnr': did you mean 'sqnr_db'?"),
        (lambda run: run.heatmap("gain", "fprop.inptu"), "unknown tensor 'inptu': did you mean 'input'"),
        (lambda run: run.heatmap("gain", "forward.input"), "unknown gemm 'forward': did you mean 'wgrad'?"),
        (
            lambda run: run.heatmap("damage", "fprop.weight"),
            "damage at fprop.weight is not recorded in a<b>&; recorded are worst_block_sqnr_db, ",
        ),
        (lambda run: run.heatmap(module="layers.*"), "module 'layers.*' matches nothing: known are"),
        (lambda run: run.site("blocks.0.mlp.upp"), "unknown module 'blocks.0.mlp.upp': did you mean 'blocks.0.mlp.up'"),
        (
            lambda run: run.site(MODULES[0][0], "fprop", "grad_output"),
            "blocks.0.attn.qkv fprop grad_output is not recorded in a<b>&; recorded of this module: dgrad grad_input, ",
        ),
    ],
)
def test_an_error_is_one_line_with_the_way_out(run: Run, ask: Any, words: str) -> None:
    with pytest.raises(Fp8DebugError, match=re.escape(words)) as caught:
        ask(run)
    assert caught.value._render_traceback_() == [f"{type(caught.value).__name__}: {caught.value}"]
    assert "\n" not in str(caught.value)


def test_a_run_that_is_missing_or_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=re.escape("does not exist; give the folder that watch()")):
        Run(tmp_path / "gone")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "manifest.json").write_text('{"schema_version": 1}')
    with pytest.raises(RunError, match="a run that is being written can be read after its first sampled step"):
        Run(tmp_path / "new")
    write(tmp_path / "live", Plan(num_steps=20))
    manifest = tmp_path / "live" / "rank=00000" / "manifest.json"
    manifest.write_text(re.sub(r'"ended": *[^,}]+', '"ended": null', manifest.read_text()))
    assert "still being written or killed: run.refresh() reads on" in Page(Run(tmp_path / "live")._repr_html_()).text
    live = Run(tmp_path / "live")
    monkeypatch.setattr(notebook, "MOST_ROWS", 5)
    assert "not judged yet" in live._repr_html_()
    monkeypatch.undo()

    def damaged(_: Run) -> None:
        raise RunError("live cannot be read: <gone>")

    monkeypatch.setattr(notebook, "triage", damaged)
    assert "✖ error live cannot be read: &lt;gone&gt;" in live._repr_html_().replace("</span>", "")


def test_a_healthy_run_says_how_many_rules_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build(tmp_path / "run", num_steps=20)
    assert re.search(r"No finding: \d+ of \d+ rules ran; none found a fault\.", Page(run._repr_html_()).text)
    assert run.findings().table.num_rows == 0 and "None." in run.findings()._repr_html_()
    run.show()
    assert capsys.readouterr().out == "run: ok, 0 findings, steps 0 to 19\n"


def test_show_displays_every_module_in_ipython(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[HtmlFigure] = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    run.show()
    (figure,) = shown
    assert all(word in Page(figure._repr_html_()).text for word in ("What to do now", MODULES[5][0], "Worst modules"))


def test_a_long_table_is_counted() -> None:
    figure = table_figure("t", pa.table({"n": range(MAX_ROWS + 5), "x": [math.pi] * (MAX_ROWS + 5)}))
    assert "and 5 more rows" in figure.html and "3.142" in figure.html and len(figure) == MAX_ROWS + 5


def test_the_report_has_the_notes(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=10, with_results=False)
    assert "Notes" not in run_report(run)
    add_note(tmp_path / "run", "<b>loss jumps\nhere", module=MODULES[0][0], step=7)
    assert f"Notes {MODULES[0][0]}, step 7 " in Page(run_report(run)).text and "&lt;b&gt;loss jumps<br>here" in run_report(run)
    (tmp_path / "run" / "notes.json").write_text("{")
    assert "notes.json cannot be read" in run_report(run)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell of it, in a kernel of its own; its outputs are those that the page of the documentation shows."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "outputs are not kept: they grow with every run"
    client = NotebookClient(book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [output["data"] for cell in book.cells for output in cell.get("outputs", ()) if "data" in output]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert len(pages) == 4 and "F113" in pages[0] and "F113" in pages[1] and sum(map(len, pages)) < 200_000
    assert (tmp_path / "runs" / "report.html").stat().st_size < 400_000


#: How Jupyter has tables in results.
JUPYTER = "<style>.out:not(.md) table { table-layout: fixed; } .out:not(.md) td { text-align: right; }</style>"


@pytest.mark.browser
def test_a_table_has_its_columns_wide_as_their_words_in_a_notebook(page: Any, run: Run) -> None:
    html = run.findings()._repr_html_()
    page.set_content(f"<head>{JUPYTER}</head><body><div class='out'>{html}</div></body>")
    widths = page.evaluate("() => [...document.querySelectorAll('th')].map((one) => [one.textContent, one.clientWidth])")
    assert dict(widths)["message"] > 2 * dict(widths)["gemm"]
    cell = page.locator("td:not(.num)").first
    assert cell.evaluate("(one) => getComputedStyle(one).textAlign") == "left"

"""The report page: all of a run in one file that needs nothing, runs nothing, and stays small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fp8debug.errors import Fp8DebugError
from fp8debug.store.read.run import Run
from fp8debug_cli.main import status
from fp8debug_dashboard.data.module_health import (
    ERROR,
    HEALTHY,
    MAX_CELLS,
    NEAR,
    NO_DATA,
    NONFINITE,
    WARNING,
    ModuleHealth,
    module_health,
)
from fp8debug_dashboard.sharing.heatmap import MAX_FLAT, heatmap, value_words
from fp8debug_dashboard.sharing.report import MAX_ROWS, run_report, table, write_report
from tests.reports.test_reports import HOSTILE, Page
from tests.rules.sick_runs import CLIPPED, CULPRIT, FIRES
from tests.synthetic import MODULES, Override, build

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LIMIT_BYTES = 5_000_000
POOR = (Path(__file__).parents[1] / "contrast.js").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NaN with victims, the same model in BF16, and a run whose every name is markup."""
    root = tmp_path_factory.mktemp("runs")
    build(root / "bf16", recipe="bf16", what_if=["blockwise"], with_results=False)
    outside = [{"fqn": "embed", "kind": "Embedding", "reason": "no GEMM"}]
    build(root / "sick", **FIRES["F103"], module_entries={"head": {"fp8": False}}, manifest={"outside": outside})
    sick = Override(gemm="fprop", tensor="input", steps=(20, None), slots={**CLIPPED, "cast_name": HOSTILE + " delayed(1"})
    manifest = {
        "filters": [{"kind": HOSTILE, "pattern": HOSTILE, "matched": 0}],
        "environment": {HOSTILE: HOSTILE, "device": HOSTILE},
        "recipe": {"name": HOSTILE},
        "argv": [HOSTILE],
        "git": {HOSTILE: HOSTILE},
        "outside": [{"fqn": HOSTILE, "kind": HOSTILE, "reason": HOSTILE}],
    }
    build(root / "a<b>&", num_steps=50, modules=[(HOSTILE, 256, 256), *MODULES], overrides=[sick], manifest=manifest)
    return root


def test_the_report_has_every_part(folder: Path) -> None:
    page = Page(run_report(Run(folder / "sick"), against=Run(folder / "bf16")))
    for words in (
        "✖ error sick",
        "the loss is NaN from step 40 on",
        "What to do now",
        "dashed: bf16",
        "Modules by steps",
        "healthy near a limit warning error NaN or Inf not recorded",
        f"{CULPRIT} steps 0 to 39: healthy",
        "F103 NaN or Inf from step 40",
        "Findings, the culprit first",
        "Against bf16",
        "Sites against bf16",
        f"40 {CULPRIT} fprop input elements that are NaN or Inf 0 -> 128",
        "6 of 7 Linears in FP8",
        "Linears not in FP8 (1)",
        "Modules not watched (1) module kind reason embed Embedding no GEMM",
        "Configuration",
        "sampled every so many steps 10",
        "Thresholds in force",
    ):
        assert words in page.text
    assert "Sites against" not in Page(run_report(Run(folder / "sick"))).text


@pytest.mark.parametrize(("run", "against"), [("sick", "bf16"), ("a<b>&", "sick"), ("a<b>&", None)])
def test_the_report_needs_nothing_and_runs_nothing(folder: Path, run: str, against: str | None) -> None:
    text = run_report(Run(folder / run), against=None if against is None else Run(folder / against))
    tags = Page(text).tags
    assert not {tag for tag, _ in tags} & {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a"}
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on") or name in ("src", "href", "style")]
    assert "http" not in re.sub(r"http-equiv", "", text) and "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text and len(text.encode()) < 400_000


def test_markup_in_names_is_text(folder: Path) -> None:
    page = Page(run_report(Run(folder / "a<b>&"), against=Run(folder / "sick")))
    assert "<img src=x onerror=alert(1)>" in page.text and "✖ error a<b>&" in page.text
    labels = [attrs["aria-label"] or "" for tag, attrs in page.tags if tag == "svg"]
    assert any("<img src=x" in label for label in labels), "in attributes too"


def grid(levels: np.ndarray) -> ModuleHealth:
    num, columns = levels.shape
    return ModuleHealth(
        modules=tuple(f"model.layers.{i // 4}.mlp.experts.{i % 4}.down_proj" for i in range(num)),
        steps=np.arange(columns, dtype=np.int32) * 10,
        last=columns * 10 - 1,
        levels=levels.astype(np.int8),
        metrics=("sqnr_db", "overflow_rate"),
        causes=(np.arange(num * columns).reshape(num, columns) % 2).astype(np.int8),
        values=np.full((num, columns), 12.34, np.float32),
    )


def test_500_modules_fit_whatever_their_cells_are(tmp_path: Path) -> None:
    """No two neighbouring cells of one level: the largest figure that 500 modules can make."""
    worst = np.arange(MAX_CELLS).reshape(500, -1) % 2 + WARNING
    assert len(heatmap(grid(worst)).encode()) < LIMIT_BYTES * 0.8
    modules = [(f"model.layers.{i // 4}.mlp.experts.{i % 4}.down_proj", 256, 256) for i in range(500)]
    sick = Override(gemm="fprop", tensor="input", module="*.1.down_proj", slots=CLIPPED)
    build(tmp_path / "run", num_steps=20, modules=modules, overrides=[sick], with_results=False)
    path = write_report(tmp_path / "run", tmp_path / "report.html")
    assert path.stat().st_size < LIMIT_BYTES * 0.2


def test_a_page_has_a_row_for_each_module_and_folds_blocks() -> None:
    levels = np.zeros((48, 6))
    levels[20, 3:], levels[21, :] = ERROR, NO_DATA
    text = heatmap(grid(levels), {"model.layers.9.mlp.experts.0.down_proj": ["F101"]})
    names = re.findall(r"<summary>.*?hm-name'>(.*?)</span>", text)
    assert names == [
        "model.layers.0 … model.layers.4 (20)",
        "model.layers.5.* (4)",
        "model.layers.6 … model.layers.8 (12)",
        "model.layers.9.* (4)",
        "model.layers.10.* (4)",
        "model.layers.11.* (4)",
    ]
    assert text.count("experts.0.down_proj</span>") == 12, "a row for each module, inside its block"
    assert "<title>steps 30 to 59: error, overflow 1.23e+03 %</title>" in text
    assert "<b>F101</b>" in text and "<details" not in heatmap(grid(levels[:MAX_FLAT]))


def test_the_level_of_a_cell_is_the_worst_of_all_metrics(tmp_path: Path) -> None:
    overrides = [
        Override(module=MODULES[0][0], gemm="fprop", tensor="input", steps=(20, 30), slots={"sqnr_db": 30.4}),
        Override(module=MODULES[0][0], gemm="fprop", tensor="weight", steps=(20, 30), slots={"gain": 1.02}),
        Override(module=MODULES[1][0], gemm="dgrad", tensor="grad_output", steps=(30, None), slots={"sqnr_db": 12.0}),
        Override(module=MODULES[2][0], gemm="wgrad", tensor="input", steps=(10, 20), slots={"num_nan": 1}),
        Override(module=MODULES[3][0], gemm="fprop", tensor="input", steps=(0, 10), slots={"sqnr_db": 30.2}),
    ]
    health = module_health(build(tmp_path / "run", num_steps=50, overrides=overrides))
    assert health.modules == tuple(name for name, _, _ in MODULES) and health.steps.tolist() == [0, 10, 20, 30, 40]
    assert health.levels.tolist() == [
        [HEALTHY, HEALTHY, WARNING, HEALTHY, HEALTHY],
        [HEALTHY, HEALTHY, HEALTHY, ERROR, ERROR],
        [HEALTHY, NONFINITE, HEALTHY, HEALTHY, HEALTHY],
        [NEAR, HEALTHY, HEALTHY, HEALTHY, HEALTHY],
        *[[HEALTHY] * 5] * 2,
    ]
    assert (health.metrics[health.causes[0, 2]], health.values[0, 2]) == ("norm_ratio", pytest.approx(1.0201, abs=1e-4))
    assert (health.metrics[health.causes[1, 3]], health.values[1, 3]) == ("sqnr_db", pytest.approx(12, abs=0.01))


def test_many_steps_share_columns_and_a_metric_without_limits_is_ordered(tmp_path: Path) -> None:
    sick = Override(module=MODULES[0][0], gemm="fprop", tensor="input", steps=(70, 71), slots={"sqnr_db": 12.0, "amax": 99.0})
    run = build(tmp_path / "run", num_steps=100, every=1, modules=MODULES[:2], overrides=[sick], with_results=False)
    health = module_health(run)
    assert len(health.steps) == 50 and health.levels[0].tolist() == [HEALTHY] * 35 + [ERROR] + [HEALTHY] * 14
    amax = module_health(run, ["amax"], "fprop.input")
    assert not amax.is_judged and set(amax.levels.ravel().tolist()) == {0, 1, 2, 3} and amax.values.max() == 99
    assert "highest quarter" in heatmap(amax) and ": 99</title>" in heatmap(amax)
    assert "not recorded" in heatmap(module_health(run, ["damage"]))


def test_values_for_people() -> None:
    words = [value_words(*pair) for pair in (("sqnr_db", 9.016), ("overflow_rate", 0.0571), ("gain", 2.0), ("amax", 1e-7))]
    assert words == ["SQNR 9.02 dB", "overflow 5.71 %", "gain 2", "amax 1e-07"]


def test_a_long_table_is_counted() -> None:
    text = table(("name", "n"), [(f"m{i}", i) for i in range(MAX_ROWS + 7)], ("n",))
    assert text.count("<tr>") == MAX_ROWS + 1 and "and 7 more" in text


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    assert status(["report", str(folder / "sick"), "-o", str(target), "--against", str(folder / "bf16")]) == 0
    assert "Sites against bf16" in target.read_text() and capsys.readouterr().err == f"Wrote {target}\n"
    assert status(["report", str(folder / "gone"), "-o", str(target)]) == 3
    assert "does not exist; give the folder" in capsys.readouterr().err
    with pytest.raises(Fp8DebugError, match=r"cannot write .*; name a file in a folder that exists"):
        write_report(folder / "sick", tmp_path / "none" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_the_page_is_legible(browser: Browser, folder: Path, tmp_path: Path, width: int) -> None:
    path = write_report(folder / "a<b>&", tmp_path / "report.html", folder / "bf16")
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))  # noqa: B023 - of this page, closed below
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(POOR) == [], f"too little contrast, {scheme}"
        assert said == []
        page.close()

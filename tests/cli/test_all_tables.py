"""Every command that prints a table, at four widths: no line beyond the terminal, no number cut, columns left out by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import fp8debug_cli.console
from fp8debug_cli import bisect, measure, speed, verify
from fp8debug_cli.console import cell, print_table
from fp8debug_cli.main import COMMANDS, cli, status
from fp8debug_cli.output import NUMBER
from tests.bench.parity import compared
from tests.checkpoints import writers
from tests.checkpoints.writers import NAMES
from tests.synthetic import Override, Plan, write
from tests.tools.test_speed import timed

WIDTHS = (60, 80, 120, 200)
LONG = "model.language_model.layers.{}.mlp.experts.down_proj"


class Table(NamedTuple):
    """Arguments of one call of ``print_table``."""

    header: Sequence[str]
    rows: list[list[object]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of long names and small numbers, a checkpoint, two paths of a model, and the dump of an operand."""
    root = tmp_path_factory.mktemp("tables")
    modules = [(LONG.format(i), 256, 256) for i in range(3)]
    sick = [
        Override(slots={"amax": 5.341e-05}),
        Override(module=modules[1][0], gemm="fprop", tensor="input", steps=(10, None), slots={"gain": 2.0}),
    ]
    write(root / "sick", Plan(num_steps=30, modules=modules, overrides=sick, recipes={modules[2][0]: None}))
    write(root / "good", Plan(num_steps=30, modules=modules))
    tensors = writers.LAYOUTS["deepseek"](writers.original())
    tensors[f"{NAMES[1]}_scale_inv"][1, 1] = float("nan")
    writers.save(tensors, root / "checkpoint.safetensors")
    writers.save(writers.original(), root / "original.safetensors")
    compared("gpt", "scale x2", 0, root)
    return root


def arms(entries: int) -> list[dict[str, Any]]:
    interval = {"value": 0.123456, "low": -1.234e-05, "high": 12345.678}
    words = {"about": "candidates of the list: 12 modules in BF16, 3.75% of the speed-up", "closed": "yes", "problem": None}
    entry = {"name": "candidates", **words, "loss": 2.718281828, "above_bf16": interval, "share": interval}
    return [{**entry, "num_repeats": 3, "num_diverged": 1} for _ in range(entries)]


def print_verify() -> None:
    interval = {"value": 1.5e-05, "low": -2.5e-05, "high": 3.5e-05}
    inference = {
        "weights": "BF16-trained, held for 16 steps",
        "inference": "fp8",
        "loss": 2.71828,
        "own_loss": 2.7,
        "above": interval,
    }
    document = {"statements": ["the candidates close 93.5 % of the gap"], "arms": arms(2), "num_last": 20, "num_steps": 200}
    verify._print({**document, "inference": [{**inference, "counts": True}]})


def print_bisect() -> None:
    fallbacks = [{"module": LONG.format(i), "gemms": ["fprop", "dgrad", "wgrad"], "cost": 0.0123} for i in range(3)]
    share = {"value": 0.93, "low": 0.88, "high": 0.97}
    document = {"statements": ["3 GEMMs must leave FP8"], "fallbacks": fallbacks, "share": share, "runs": 17, "seconds": 912.5}
    bisect._print({**document, "assumption": "taking more out of FP8 never reopens the gap"})


def print_speed() -> None:
    shape = {"modules": [LONG.format(0), LONG.format(1)], "tokens": 8192, "in_features": 4096, "out_features": 14336}
    speed._print(timed([{**shape, "recipe": {"name": "blockwise"}}]))


def print_measure() -> None:
    dump = SimpleNamespace(actual=True, module=LONG.format(0), gemm="fprop", tensor="input", shape=(96, 64), step=10, rank=0)
    casts = ("e4m3fn 1x128 current", "e5m2 tensorwise delayed(16,max)", "e4m3fn 1x32 current pow2_ceil", "e2m1fn 1x16 current")
    found = {name: {"sqnr_db": 31.6789 - place, "amax": 5.341e-05, "num_saturated": 1234567} for place, name in enumerate(casts)}
    measure._print(dump, found, ["sqnr_db", "amax", "num_saturated"])


#: The word of a line stands for a file of ``folder``; a function prints what takes trainings or a GPU to find.
TABLES: dict[str, str | Callable[[], None]] = {
    "triage": "triage sick --baseline good",
    "coverage": "coverage sick",
    "fallback": "fallback sick",
    "calibrate": "calibrate good",
    "diff": "diff good sick",
    "show": "show sick --limit 12",
    "check": "check checkpoint.safetensors --against original.safetensors --tensors",
    "parity": "parity train rollout --modules",
    "verify": print_verify,
    "bisect": print_bisect,
    "speed": print_speed,
    "measure": print_measure,
}


def printed(
    what: str | Callable[[], None], folder: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], list[Table]]:
    """Return the lines of stdout and the tables that were asked for."""
    tables: list[Table] = []

    def record(header: Sequence[str], rows: Any, **options: Any) -> None:
        found = [list(row) for row in rows]
        tables.append(Table(header, found))
        print_table(header, found, **options)

    monkeypatch.setenv("COLUMNS", str(width))
    for name in TABLES:
        cli.get_command(None, name)  # type: ignore[arg-type]  # the group asks nothing of it
        monkeypatch.setattr(f"fp8debug_cli.{name}.print_table", record)
    if isinstance(what, str):
        words = [str(folder / word) if (folder / word).exists() else word for word in what.split()[1:]]
        assert status([what.split()[0], *words]) in (0, 1)
    else:
        what()
    return capsys.readouterr().out.splitlines(), tables


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", TABLES)
def test_a_table_fits_its_terminal(
    command: str, width: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, tables = printed(TABLES[command], folder, width, monkeypatch, capsys)
    assert tables and all(table.rows for table in tables)
    assert [line for line in lines if len(line) > width] == []
    footers = re.findall(r"\+\d+ columns?: (.*?) \(--wide\)", " ".join(" ".join(lines).split()))
    for table in tables:
        left_out = [
            name for name in table.header if any(re.search(rf"(^|, ){re.escape(name)}(, |$)", names) for names in footers)
        ]
        assert table.header[0] not in left_out
        for row in table.rows:
            for name, value in zip(table.header, row, strict=True):
                numbers = NUMBER.findall(cell(value)) if name not in left_out else []
                assert [number for number in numbers if not any(number in line for line in lines)] == [], f"{name} is cut"


@pytest.mark.parametrize("command", [name for name, what in TABLES.items() if isinstance(what, str)])
def test_wide_prints_every_column(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, tables = printed(f"{TABLES[command]} --wide", folder, 60, monkeypatch, capsys)
    assert not any(line.startswith("+") for line in lines)
    titles = " ".join(" ".join(lines).split())
    for table in tables:
        assert " ".join(" ".join(table.header).split()) in titles, "all titles on one line"


def test_the_verdict_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = {name: printed(what, folder, 200, monkeypatch, capsys)[0][0] for name, what in TABLES.items()}
    assert first["triage"].startswith("sick: error, ") and first["check"].endswith("error, 1 finding")
    assert first["coverage"] == "sick: 2 of 3 Linears in FP8, 66.7 % of the Linear FLOPs"
    assert re.match(r"sick: \d+ candidates?, together \d+\.\d% of the FP8 speed-up", first["fallback"])
    assert first["diff"].startswith("good -> sick: they differ beyond the noise, first model.language_model.layers.")
    assert first["verify"] == "the candidates close 93.5 % of the gap" and first["bisect"] == "3 GEMMs must leave FP8"


def test_no_command_with_a_table_is_forgotten() -> None:
    source = Path(fp8debug_cli.console.__file__).parent
    found = [path.stem for path in source.glob("*.py") if "print_table(" in path.read_text(encoding="utf-8")]
    assert sorted({*TABLES, "console"}) == sorted(found)
    for name in TABLES:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert name in COMMANDS and command is not None and any("--wide" in option.opts for option in command.params)

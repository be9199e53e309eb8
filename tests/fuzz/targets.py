"""Targets of the fuzzer: every reader takes any bytes and answers, or raises an error of ours that says what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

from fp8debug.errors import Fp8DebugError
from fp8debug.fallback import load_fallbacks
from fp8debug.rules.engine.config import load_settings
from fp8debug.run.arms import Arm
from fp8debug.store import dump_files
from fp8debug.store.calibration_file import load_recipes
from fp8debug.store.dump_files import dumps_of, file_name, open_dump, rank_folder
from fp8debug.store.file_checks import RefusedError, parse_json, read_footer
from fp8debug.store.read.manifest import checked
from fp8debug.store.read.run import Run
from fp8debug.store.read.stream_recovery import read_batches
from fp8debug.store.speed_file import load_shapes, read_speed
from fp8debug_cli.main import status
from tests.store.recording import record
from tests.synthetic import Plan, write

#: What reading commands may exit with.
CODES = {0, 1, 2, 3}
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("show", "--limit", "3"),
    ("coverage",),
    ("triage", "--select", "F101,F105,F113,F125"),
    ("calibrate",),
    ("fallback", "--to", "json"),
)


class Template:
    """A healthy run with a file of every kind, whose files are damaged one at a time and put back.

    Args:
        folder: where it is written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        write(self.path, Plan(num_steps=2, every=1, modules=(("up", 128, 256),), events=[(1, "note", "up", "what happened")]))
        opened = record(folder / "live", range(2))
        opened.flush()
        for stream in sorted((folder / "live/rank=00000").glob("*.arrows")):
            table = stream.name.partition("-")[0]
            (self.path / "rank=00000" / f"{table}-00007.arrows").write_bytes(stream.read_bytes())
        opened.close()
        times = {key: 1.0 for key in ("bf16_us", "fp8_us", "quantize_us", "gemm_us", "statistics_us")}
        shape = {"modules": ["up"], "tokens": 8, "in_features": 128, "out_features": 256}
        shape["gemms"] = dict.fromkeys(("fprop", "dgrad", "wgrad"), times)
        (self.path / "speed.json").write_text(json.dumps({"schema": 1, "device": "none", "shapes": [shape]}))
        self.dump = rank_folder(self.path, 1, 0) / file_name("up", "fprop", "input")
        self.dump.parent.mkdir(parents=True)
        about = {"kind": dump_files.KIND, "module": "up", "gemm": "fprop", "tensor": "input"}
        about |= {"step": "1", "rank": "0", "call": "0"}
        values = {"reference": np.ones((3, 4), np.float32)}
        save_file(values, self.dump, {**about, "cast": "", "actual": "true", "shape": "3,4", "tile": "128,128"})
        self.files = sorted(path for path in self.path.rglob("*") if path.is_file())

    @contextlib.contextmanager
    def damaged(self, number: int, damage: Callable[[bytes], bytes]) -> Iterator[Path]:
        """Give the run with one file changed, and put the file back."""
        path = self.files[number % len(self.files)]
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        try:
            yield path
        finally:
            path.write_bytes(whole)


def changed(whole: bytes, changes: Sequence[tuple[int, int]], length: int | None = None) -> bytes:
    """Return bytes with some of them replaced, cut to a length; places are taken modulo the size, from the end when negative."""
    data = bytearray(whole)
    for place, value in changes:
        if data:
            data[place % len(data)] = value % 256
    return bytes(data if length is None else data[: length % (len(data) + 1)])


def read_run(path: Path) -> list[str]:
    """Read all that a run holds; return its problems."""
    try:
        run = Run(path)
    except Fp8DebugError as error:
        _is_one_line(error)
        return [str(error)]
    try:
        run.table(["sqnr_db", "ranks"])
        for view in ("stats", "steps", "events", "modules"):
            run.sql(f"SELECT * FROM {view}")
        run.steps_range  # noqa: B018  # a property that reads
        read_speed(run.path)
        for dump in dumps_of(run, "up"):
            dump.values("reference")
    except Fp8DebugError as error:
        _is_one_line(error)
    return list(run.problems)


def run_command(path: Path, *command: str) -> tuple[int, str, str]:
    """Run a command in this process, where an exception that is none of ours comes out; return code, stdout and stderr."""
    before = os.environ.get("FP8DEBUG_TRACEBACK")
    os.environ["FP8DEBUG_TRACEBACK"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = status([command[0], str(path), *command[1:]])
    finally:
        os.environ.pop("FP8DEBUG_TRACEBACK") if before is None else os.environ.update(FP8DEBUG_TRACEBACK=before)
    assert code in CODES and "Traceback" not in err.getvalue(), err.getvalue()
    return code, out.getvalue(), err.getvalue()


def read_stream(folder: Path, data: bytes) -> int:
    """Read bytes as a stream; return the rows."""
    path = folder / "stats-00000.arrows"
    path.write_bytes(data)
    try:
        table, lost = read_batches(path, folder)
    except (OSError, ValueError, pa.ArrowException):
        return 0
    assert lost is None or "\n" not in lost
    table.validate(full=True)
    return int(table.num_rows)


def read_parquet(folder: Path, data: bytes) -> int:
    """Read bytes as the footer of a part; return the rows that it claims."""
    path = folder / "part-00000.parquet"
    path.write_bytes(data)
    try:
        return int(read_footer(path, len(data)).num_rows)
    except (OSError, RefusedError, pa.ArrowException):
        return -1


def read_documents(folder: Path, data: bytes) -> None:
    """Read bytes as each of the files that are JSON or TOML."""
    path = folder / "speed.json"
    path.write_bytes(data)
    with contextlib.suppress(ValueError):
        value = parse_json(data)
        if isinstance(value, Mapping):
            problems: list[str] = []
            found = checked(value, path, problems)
            assert all(isinstance(module["fqn"], str) for module in found.get("modules") or ())
            assert not any("\n" in problem for problem in problems)
    readers: Sequence[Callable[[], Any]] = (
        lambda: read_speed(folder),
        lambda: load_shapes(path),
        lambda: load_fallbacks(path),
        lambda: load_recipes(path),
        lambda: Arm.read(str(path)),
        lambda: load_settings(path),
    )
    for reader in readers:
        try:
            reader()
        except Fp8DebugError as error:
            _is_one_line(error)


def read_dump(folder: Path, data: bytes) -> None:
    """Read bytes as a dump, and its tensors."""
    path = folder / "x.safetensors"
    path.write_bytes(data)
    try:
        dump = open_dump(path)
        for name in dump.stored:
            dump.values(name)
    except Fp8DebugError as error:
        _is_one_line(error)


def _is_one_line(error: Fp8DebugError) -> None:
    assert 0 < len(str(error)) < 4000, str(error)[:200]

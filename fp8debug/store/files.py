"""Which files of a run directory hold rows that count: parts and streams of every rank; unreadable ones are named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fp8debug.errors import RunError
from fp8debug.store import stream
from fp8debug.store.schema import SCHEMA_VERSION, TABLES, columns_of


@dataclass(frozen=True, kw_only=True)
class Source:
    """One readable file.

    Attributes:
        path: the file.
        table: stats, steps or events.
        rank: rank of its folder.
        number: number of the part or stream.
        schema: Arrow schema of its rows.
        rows: the rows of a stream; None for a part, which the query engine reads itself.
        first_step: smallest step, None without one.
    """

    path: Path
    table: str
    rank: int
    number: int
    schema: pa.Schema
    rows: pa.Table | None
    first_step: int | None


@dataclass
class RunFiles:
    """What lies in a run directory.

    Attributes:
        manifest: the run's manifest, empty when it is missing.
        rank_manifests: manifests by rank.
        sources: readable files; rows of ``sources[before]`` count only below step ``before`` (None: all), because a
            later writing of the same rank replaced the rest.
        problems: one sentence for each thing that could not be read.
    """

    manifest: dict[str, Any]
    rank_manifests: dict[int, dict[str, Any]]
    sources: dict[int | None, list[Source]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have rows."""
        return sorted({source.rank for source in self.of()})

    def of(self, table: str | None = None) -> Iterator[Source]:
        """Return the files of a table, or of all."""
        return (s for group in self.sources.values() for s in group if table in (None, s.table))


def scan(path: Path, unreadable: Iterable[Path] = ()) -> RunFiles:
    """Look through a run directory.

    Args:
        path: the run's folder.
        unreadable: parts that are known to be damaged inside, to be left out.

    Raises:
        RunError: there is no run, or its schema is newer than ours.
    """
    problems: list[str] = []
    folders = {_rank_of(folder): folder for folder in sorted(path.glob("rank=*")) if folder.is_dir()}
    folders.pop(-1, None)
    manifest = _manifest(path / "manifest.json", problems)
    _check_is_run(path, manifest, folders)
    _check_version(path, manifest)
    files = RunFiles({} if manifest is None else manifest, {}, problems=problems)
    for rank, folder in sorted(folders.items()):
        own = _manifest(folder / "manifest.json", problems)
        if own is None:
            continue
        _check_version(folder, own)
        files.rank_manifests[rank] = own
    damaged = set(unreadable)
    problems.extend(f"{file} is damaged; its rows are left out" for file in sorted(damaged))
    for rank, folder in sorted(folders.items()):
        found = [s for table in TABLES for s in _sources(folder, table, rank, damaged, problems)]
        for before, source in _by_writing(found, files.rank_manifests.get(rank, {})):
            files.sources.setdefault(before, []).append(source)
    world = max((_int(m.get("world_size")) for m in files.rank_manifests.values()), default=0)
    missing = sorted(set(range(world)) - set(files.ranks))
    if missing and files.ranks:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        problems.append(f"no rows of rank {shown} ({len(missing)} of {world} ranks)")
    return files


def _check_is_run(path: Path, manifest: dict[str, Any] | None, folders: dict[int, Path]) -> None:
    if not path.exists():
        raise RunError(f"{path} does not exist; give the folder that watch() or `fp8debug run --out` wrote")
    if not path.is_dir():
        raise RunError(f"{path} is a file, not a run's folder")
    if manifest is None and not folders:
        inner = sorted(child.parent for child in path.glob("*/manifest.json"))
        if inner:
            raise RunError(f"{path} is a folder of runs, not a run; give one of them, e.g. {inner[0]}")
        raise RunError(f"{path} is not a run: it has no manifest.json and no rank=... folder")


def _check_version(path: Path, manifest: dict[str, Any] | None) -> None:
    version = _int((manifest or {}).get("schema_version"))
    if version > SCHEMA_VERSION:
        raise RunError(
            f"{path} has schema version {version}, this fp8debug reads up to {SCHEMA_VERSION}; install a newer fp8debug"
        )


def _manifest(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        problems.append(f"{path} is missing")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {_first_line(error)}")
    else:
        return value
    return None


def _sources(folder: Path, table: str, rank: int, damaged: set[Path], problems: list[str]) -> Iterator[Source]:
    # A stream that turns into a part between the two listings is in both, or its file is gone when it is opened and the
    # part is there at the second look.
    streams = stream.streams(folder, table)
    parts = stream.parts(folder, table)
    for number, path in streams.items():
        if number in parts:
            continue
        try:
            rows = stream.read_stream(path)
        except FileNotFoundError:
            parts |= {number: part for number, part in stream.parts(folder, table).items() if number not in parts}
        except (OSError, pa.ArrowException) as error:
            if path.exists() and path.stat().st_size:
                problems.append(f"{path} cannot be read: {_first_line(error)}")
        else:
            if rows.num_rows and _fits(rows.schema, table, path, problems):
                first = pc.min(rows["step"]).as_py() if "step" in rows.schema.names else None
                yield Source(path=path, table=table, rank=rank, number=number, schema=rows.schema, rows=rows, first_step=first)
    for number, path in sorted(parts.items()):
        if path in damaged:
            continue
        try:
            metadata = pq.read_metadata(path)
            schema = metadata.schema.to_arrow_schema()
        except (OSError, pa.ArrowException) as error:
            problems.append(f"{path} cannot be read: {_first_line(error)}")
            continue
        if _fits(schema, table, path, problems):
            first = _first_step(metadata)
            yield Source(path=path, table=table, rank=rank, number=number, schema=schema, rows=None, first_step=first)


def _fits(schema: pa.Schema, table: str, path: Path, problems: list[str]) -> bool:
    for column in columns_of(table):
        index = schema.get_field_index(column.name)
        if index >= 0 and _family(schema.field(index).type) != _family(column.field.type):
            found = schema.field(index).type
            problems.append(f"{path} is left out: column {column.name} is {found}, expected {column.type}")
            return False
    return True


def _family(arrow: pa.DataType) -> str:
    if pa.types.is_integer(arrow) or pa.types.is_floating(arrow):
        return "number"
    if pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_dictionary(arrow):
        return "string"
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow):
        return f"list of {_family(arrow.value_type)}"
    return "timestamp" if pa.types.is_timestamp(arrow) else str(arrow)


def _first_step(metadata: pq.FileMetaData) -> int | None:
    found: list[int] = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            if column.path_in_schema == "step" and column.statistics is not None and column.statistics.has_min_max:
                found.append(column.statistics.min)
    return min(found, default=None)


def _by_writing(sources: list[Source], manifest: dict[str, Any]) -> Iterator[tuple[int | None, Source]]:
    writings = manifest.get("writings")
    entries = [w for w in writings if isinstance(w, dict)] if isinstance(writings, list) else []
    bounds = sorted({_int(w.get("first_part")) for w in entries} - {0})
    for source in sources:
        later = [bound for bound in bounds if bound > source.number]
        starts = [s.first_step for s in sources if later and s.number >= later[0] and s.table != "events"]
        yield min((start for start in starts if start is not None), default=None), source


def _rank_of(folder: Path) -> int:
    digits = folder.name.removeprefix("rank=")
    return int(digits) if digits.isascii() and digits.isdigit() else -1


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

"""Files of a run directory with valid rows: parts and streams of every rank; unreadable ones are named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fp8debug.errors import RunError
from fp8debug.store import stream
from fp8debug.store.file_checks import RefusedError, has_long_text, leads_inside, places, read_footer, size_of, twice
from fp8debug.store.locations import ObjectPath
from fp8debug.store.read.manifest import read_manifest
from fp8debug.store.read.repeats import SiteBytes, site_bytes
from fp8debug.store.read.stream_recovery import read_batches
from fp8debug.store.schema import SCHEMA_VERSION, SITE_KEYS, TABLES, columns_of

#: The problem of a run of which nothing is lost: old and new parts stand side by side, each of them whole.
CUT_SHORT = "fp8debug compact was cut short; run it again to end it"

#: Steps are int32 in our columns: a larger one is read as null.
MAX_STEP = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """One readable file.

    Attributes:
        path: the file.
        table: stats, steps or events.
        rank: rank of its folder.
        number: number of the part or stream.
        schema: Arrow schema of its rows; parts with equal ones share the object.
        rows: the rows of a stream; None for a part, which the query engine reads itself.
        first_step: smallest step, None without one.
        last_step: largest step, None where it is not known without reading rows.
        is_whole: every row is known to have its keys; else readers leave out the rows that lack one.
        sites: where a part of stats holds the columns of its sites; None where that is not known.
        num_rows: rows in a part as its footer has them; None for a stream.
    """

    path: Path
    table: str
    rank: int
    number: int
    schema: pa.Schema
    rows: pa.Table | None
    first_step: int | None
    last_step: int | None = None
    is_whole: bool = False
    sites: SiteBytes | None = None
    num_rows: int | None = None

    def is_counted_whole(self, before: int | None) -> bool:
        """Return whether every row is known to count, where those below a step do, or all that have a step."""
        return self.is_whole and self.last_step is not None and self.last_step < (MAX_STEP + 1 if before is None else before)


@dataclass
class RunFiles:
    """Files of a run directory.

    Attributes:
        manifest: the run's manifest, empty when it is missing.
        rank_manifests: manifests by rank.
        sources: readable files; rows of ``sources[before]`` count only below step ``before`` (None: all), because a
            later writing of the same rank replaced the rest.
        problems: one sentence for each thing that could not be read.
    """

    manifest: dict[str, Any]
    rank_manifests: dict[int, dict[str, Any]]
    sources: dict[int | None, list[RunFile]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have rows."""
        return sorted({source.rank for source in self.of()})

    def of(self, table: str | None = None) -> Iterator[RunFile]:
        """Return the files of a table, or of all."""
        return (s for group in self.sources.values() for s in group if table in (None, s.table))

    def step_ends(self) -> tuple[int, int] | None:
        """Return the first and the last step of statistics and steps, None where footers alone do not tell them."""
        found = [
            (source, before) for before, group in self.sources.items() for source in group if source.table in ("stats", "steps")
        ]
        first = [source.first_step for source, _ in found if source.first_step is not None]
        # A later writing begins at ``before``, so what an earlier one has beyond it is not the last step.
        last = [s.last_step if before is None else min(s.last_step, before - 1) for s, before in found if s.last_step is not None]
        is_known = all(s.is_whole and s.rows is None for s, _ in found) and len(first) == len(last) == len(found) > 0
        return (min(first), max(last)) if is_known else None

    def num_rows(self, table: str) -> int | None:
        """Return how many rows of a table count, None where footers alone do not tell."""
        found = [(source, before) for before, group in self.sources.items() for source in group if source.table == table]
        if any(source.num_rows is None or not source.is_counted_whole(before) for source, before in found):
            return None
        return sum(source.num_rows or 0 for source, _ in found)

    def without_repeats(self) -> RunFiles:
        """Return the files without the parts of stats whose rows have the same sites, byte for byte, as those of another part.

        Left out are only parts on a disk of this machine, of which every row counts. What DISTINCT, min and max find in
        ``repeats.SITE_COLUMNS`` is the same.
        """
        known: set[bytes] = set()
        sources: dict[int | None, list[RunFile]] = {}
        for before, group in self.sources.items():
            for source in group:
                digest = None
                if source.sites is not None and source.is_counted_whole(before) and not isinstance(source.path, ObjectPath):
                    digest = source.sites.digest(source.path)
                if digest is None or digest not in known:
                    sources.setdefault(before, []).append(source)
                if digest is not None:
                    known.add(digest)
        return replace(self, sources=sources)


def scan(path: Path, unreadable: Iterable[Path] = ()) -> RunFiles:
    """Look through a run directory.

    Args:
        path: the run's folder.
        unreadable: parts that are known to be damaged inside, to be left out.

    Raises:
        RunError: there is no run, or its schema is newer than ours.
    """
    problems: list[str] = []
    folders = _rank_folders(path, problems)
    manifest = read_manifest(path / "manifest.json", path, problems)
    _check_is_run(path, manifest, folders)
    _check_version(path, manifest)
    if (path / ".compact").exists():
        problems.append(f"{path}: {CUT_SHORT}")
    files = RunFiles({} if manifest is None else manifest, {}, problems=problems)
    for rank, folder in sorted(folders.items()):
        own = read_manifest(folder / "manifest.json", path, problems)
        if own is None:
            continue
        _check_version(folder, own)
        files.rank_manifests[rank] = own
    damaged = set(unreadable)
    problems.extend(f"{file} is damaged; its rows are left out" for file in sorted(damaged))
    for rank, folder in sorted(folders.items()):
        tables = [
            _TableFolder(root=path, rank_folder=folder, table=table, rank=rank, damaged=damaged, problems=problems)
            for table in TABLES
        ]
        found = [source for table in tables for source in table.files()]
        for before, source in _by_writing(found, files.rank_manifests.get(rank, {})):
            files.sources.setdefault(before, []).append(source)
    world = max((_int(m.get("world_size")) for m in files.rank_manifests.values()), default=0)
    there = set(files.ranks)
    num_missing = max(0, world) - sum(rank < world for rank in there)
    if num_missing > 0 and there and files.manifest.get("ranks") is None:  # else some keep quiet on purpose
        missing = islice((rank for rank in count() if rank not in there), min(num_missing, 8))
        shown = ", ".join(map(str, missing)) + (", ..." if num_missing > 8 else "")
        problems.append(f"no rows of rank {shown} ({num_missing} of {world} ranks)")
    return files


def _rank_folders(path: Path, problems: list[str]) -> dict[int, Path]:
    folders: dict[int, Path] = {}
    for folder in sorted(path.glob("rank=*")):
        rank = _rank_of(folder)
        try:
            leads_inside(folder, path)
            if not folder.is_dir() or not 0 <= rank < 2**31:
                raise RefusedError("is left out: it is no folder of a rank")
            if rank in folders:
                raise RefusedError(f"names the rank of {folders[rank].name} again; it is left out")
        except (OSError, RefusedError) as error:
            problems.append(f"{folder} {_first_line(error)}")
        else:
            folders[rank] = folder
    return folders


def _check_is_run(path: Path, manifest: dict[str, Any] | None, folders: dict[int, Path]) -> None:
    if not path.exists():
        raise RunError(f"{path} does not exist; give the folder that watch() or `fp8debug run --out` wrote")
    if not path.is_dir():
        raise RunError(f"{path} is a file, not a run's folder")
    if path.name.startswith("rank=") and (path.parent / "manifest.json").is_file():
        raise RunError(f"{path} is one rank's part of a run; give {path.parent}")
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


@dataclass(frozen=True, kw_only=True)
class _TableFolder:
    """The files of one table of one rank; ``damaged`` parts are left out, ``problems`` takes what cannot be read."""

    root: Path
    rank_folder: Path
    table: str
    rank: int
    damaged: Set[Path]
    problems: list[str]

    def files(self) -> Iterator[RunFile]:
        """Yield the readable files that have rows, streams first."""
        try:
            leads_inside(self.rank_folder / self.table, self.root)
        except (OSError, RefusedError) as error:
            self.problems.append(f"{self.rank_folder / self.table} {_first_line(error)}")
            return
        # A stream that turns into a part between the two listings is in both, or its file is gone when it is opened and the
        # part is there at the second look.
        streams = stream.streams(self.rank_folder, self.table)
        parts = stream.parts(self.rank_folder, self.table)
        for number, path in streams.items():
            if number in parts:
                continue
            try:
                rows = self._stream(number, path)
            except FileNotFoundError:
                parts = {**stream.parts(self.rank_folder, self.table), **parts}
            else:
                yield from rows
        last: pa.Schema | None = None  # of the part before; equal ones share the object
        for number, path in sorted(parts.items()):
            part = None if path in self.damaged else self._part(number, path, last)
            if part is not None:
                last = part.schema
                yield part

    def _stream(self, number: int, path: Path) -> list[RunFile]:
        """Return a stream, or nothing where it has no rows.

        Raises:
            FileNotFoundError: it is gone.
        """
        try:
            rows, lost = read_batches(path, self.root)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            self.problems.append(f"{path} cannot be read: {_first_line(error)}")
            return []
        if lost:
            self.problems.append(f"{path} {lost}")
        if not rows.num_rows or not _fits(rows.schema, self.table, path, self.problems):
            return []
        first = _first_step(rows)
        return [
            RunFile(path=path, table=self.table, rank=self.rank, number=number, schema=rows.schema, rows=rows, first_step=first)
        ]

    def _part(self, number: int, path: Path, last: pa.Schema | None) -> RunFile | None:
        """Return a part that has rows; ``last`` is the schema of the one before it."""
        try:
            metadata = read_footer(path, size_of(path, self.root))
            schema = metadata.schema.to_arrow_schema()
            if last is not None and schema.equals(last, check_metadata=True):
                schema = last
            if has_long_text(metadata, path, schema):
                raise RefusedError("holds a name or a message longer than 64 KB")
        except (OSError, ValueError, pa.ArrowException) as error:
            self.problems.append(f"{path} cannot be read: {_first_line(error)}")
            return None
        if not metadata.num_rows or not (schema is last or _fits(schema, self.table, path, self.problems)):
            return None
        at = places(metadata)
        first, last_step = _step_ends(metadata, at)
        is_whole = _is_whole(metadata, self.table, at)
        return RunFile(
            path=path,
            table=self.table,
            rank=self.rank,
            number=number,
            schema=schema,
            rows=None,
            first_step=first,
            last_step=last_step,
            is_whole=is_whole,
            sites=site_bytes(metadata, at) if self.table == "stats" else None,
            num_rows=metadata.num_rows,
        )


def _first_step(rows: pa.Table) -> int | None:
    """Return the smallest step of a stream's rows."""
    import pyarrow.compute as pc  # takes 50 ms, and few runs need it

    first = pc.min(rows["step"]).as_py() if "step" in rows.schema.names else None
    return first if isinstance(first, int) else None


def needed(table: str) -> tuple[str, ...]:
    """Return the columns without which a row of a table stands for nothing; an event may belong to no step."""
    return {
        "stats": (*SITE_KEYS, "rank"),
        "steps": ("step", "rank"),
        "updates": ("step", "rank", "module"),
        "parameters": ("step", "rank", "parameter"),
        "events": ("kind",),
    }[table]


def _fits(schema: pa.Schema, table: str, path: Path, problems: list[str]) -> bool:
    if (name := twice(schema)) is not None:
        problems.append(f"{path} is left out: it has the column {name} twice")
        return False
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


def _step_ends(metadata: pq.FileMetaData, at: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Return the smallest and the largest step of a part; no largest where a row group does not tell its own."""
    index = at.get("step")
    if index is None:
        return None, None
    found = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
    known = [(one.min, one.max) for one in found if one is not None and one.has_min_max]
    ends = [(low, high) for low, high in known if isinstance(low, int) and isinstance(high, int)]
    last = max((high for _, high in ends), default=None) if len(ends) == len(found) else None
    return min((low for low, _ in ends), default=None), last


def _is_whole(metadata: pq.FileMetaData, table: str, at: Mapping[str, int]) -> bool:
    """Return whether the footer says that no row lacks a key, and none has a negative step."""
    if not at.keys() >= set(needed(table)):
        return False
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for name in needed(table):
            known = row_group.column(at[name]).statistics
            if known is None or not known.has_null_count or known.null_count:
                return False
            if name == "step" and not (known.has_min_max and isinstance(known.min, int) and known.min >= 0):
                return False
    return True


def _by_writing(sources: list[RunFile], manifest: dict[str, Any]) -> Iterator[tuple[int | None, RunFile]]:
    writings = manifest.get("writings")
    entries = [w for w in writings if isinstance(w, dict)] if isinstance(writings, list) else []
    bounds = sorted({_int(w.get("first_part")) for w in entries} - {0})
    for source in sources:
        later = [bound for bound in bounds if bound > source.number]
        starts = [s.first_step for s in sources if later and s.number >= later[0] and s.table != "events"]
        yield min((start for start in starts if start is not None), default=None), source


def _rank_of(folder: Path) -> int:
    digits = folder.name.removeprefix("rank=")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

"""The tensors of a checkpoint: safetensors headers, index files and configurations, local or in object storage.

Nothing in a checkpoint is trusted: every header is bounded and checked before a tensor of it is read. A damaged file or entry is
a :class:`FileFault`, and the rest stays readable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from fp8debug.errors import RunError, UsageError
from fp8debug.escaping import one_line
from fp8debug.store.file_checks import parse_json, read_json, size_of
from fp8debug.store.locations import place_of, why

Array = np.ndarray[Any, Any]

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
#: Largest header that the safetensors library itself reads.
MAX_HEADER_BYTES = 100_000_000
#: Bits of one element by the type names of safetensors.
BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
#: A shard of a set, ``model-00002-of-00005.safetensors``.
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
_MAX_NAME = 1024


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor in a file, of which only the header is in memory.

    Attributes:
        name: as the file has it.
        dtype: as safetensors spells it.
        shape: elements by dimension.
        file: the shard.
        start: first byte in the file.
        stop: byte after the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class FileFault:
    """Damage or disagreement among the files.

    Attributes:
        kind: unreadable, missing_shard, missing_tensor, duplicate, stale_shard or no_index.
        file: name of the file.
        tensor: name of the tensor, where one is meant.
        reason: a clause that follows the name.
    """

    kind: str
    file: str
    tensor: str | None = None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's tensors by name.

    Attributes:
        name: what the user called it.
        tensors: by name; of a duplicate, the one that the index names, else the first.
        metadata: of each file, by file name.
        config: ``config.json`` beside the files, empty without one.
        quantization: its quantization_config, or ModelOpt's hf_quant_config.json; None without one.
        faults: what is wrong with the files.
        elsewhere: names that the file has and that could not be read, or that the index places in shards that were not opened.
        is_part: whether one shard of a set was asked for.
    """

    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    faults: Sequence[FileFault] = ()
    elsewhere: frozenset[str] = frozenset()
    is_part: bool = False


class ByteReader:
    """Reads ranges of one file; each worker has its own.

    Args:
        tensor: whose bytes are read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._file: IO[bytes] | None = None

    def __enter__(self) -> ByteReader:
        self._file = self._tensor.file.open("rb")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, start: int, stop: int) -> Array:
        """Return the tensor's bytes from ``start`` to ``stop``, ``uint8``, in a writable array.

        Raises:
            OSError: the file cannot be read, or ends earlier.
        """
        assert self._file is not None
        self._file.seek(self._tensor.start + start)
        found = np.empty(stop - start, np.uint8)
        done = 0
        while done < found.size:
            piece = self._file.read(found.size - done)
            if not piece:
                raise OSError(f"{self._tensor.file.name} ends within {self._tensor.name}")
            found[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
        return found


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        path: a safetensors file, an index file, or a folder that holds them; local or an address in object storage.

    Raises:
        RunError: there is none, or nothing of it can be read.
        UsageError: a path of a kind that is not read.
    """
    if not str(path) or "\0" in str(path):
        raise UsageError(f"expected the path of a checkpoint, got {str(path)!r}")
    place = place_of(path)
    try:
        if place.is_dir():
            return _open(place, str(path), *_folder(place))
        if not place.is_file():
            raise RunError(f"{path} does not exist; give a safetensors file, its folder, or the index file")
        if place.name.endswith(".json"):
            return _open(place.parent, str(path), *_indexed(place))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or why(error)}") from None
    return _single(place, str(path))


def _single(place: Path, name: str) -> Checkpoint:
    shard = _SHARD.fullmatch(place.name)
    elsewhere: frozenset[str] = frozenset()
    if shard:
        index = place.with_name(f"{shard['stem']}{INDEX_SUFFIX}")
        if index.is_file():
            weight_map, _ = _weight_map(index)
            elsewhere = frozenset(tensor for tensor, file in weight_map.items() if file != place.name)
    return _open(place.parent, name, [place], {}, [], elsewhere=elsewhere, is_part=shard is not None)


def _open(
    root: Path,
    name: str,
    files: Sequence[Path],
    weight_map: Mapping[str, str],
    faults: list[FileFault],
    *,
    elsewhere: frozenset[str] = frozenset(),
    is_part: bool = False,
) -> Checkpoint:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file in files:
        try:
            found, metadata[file.name], damaged = read_header(file)
        except (OSError, ValueError) as error:
            faults.append(FileFault(kind="unreadable", file=file.name, reason=_clause(error)))
            continue
        faults += damaged
        for tensor in found:
            other = tensors.get(tensor.name)
            if other is not None:
                kept = tensor if weight_map.get(tensor.name) == file.name else other
                where = f"lies in {other.file.name} and in {file.name}; {kept.file.name} was read"
                faults.append(FileFault(kind="duplicate", file=file.name, tensor=tensor.name, reason=where))
                tensors[tensor.name] = kept
            else:
                tensors[tensor.name] = tensor
    unreadable = {fault.file for fault in faults if fault.kind in ("unreadable", "missing_shard")}
    damaged_names = {fault.tensor for fault in faults if fault.tensor and fault.tensor not in tensors}
    for tensor_name, file_name in weight_map.items():
        if file_name in unreadable or tensor_name in damaged_names:
            continue
        found_in = tensors[tensor_name].file.name if tensor_name in tensors else None
        if found_in != file_name and (found_in is not None or file_name in {file.name for file in files}):
            lies = f"but lies in {found_in}" if found_in else "and not in that file"
            reason = f"is in the index, which places it in {file_name}, {lies}"
            faults.append(FileFault(kind="missing_tensor", file=file_name, tensor=tensor_name, reason=reason))
    if not tensors:
        reasons = "; ".join(f"{fault.file} {fault.reason}" for fault in faults[:3])
        raise RunError(f"{name} has no tensor that can be read{': ' + reasons if reasons else ''}")
    config, quantization, damaged = _configuration(root)
    faults += damaged
    return Checkpoint(
        name=name,
        tensors=tensors,
        metadata=metadata,
        config=config,
        quantization=quantization,
        faults=tuple(faults),
        elsewhere=elsewhere | damaged_names | (set(weight_map) - set(tensors)),
        is_part=is_part,
    )


def _folder(place: Path) -> tuple[list[Path], Mapping[str, str], list[FileFault]]:
    entries = sorted(place.iterdir(), key=lambda entry: entry.name)
    indexes = [entry for entry in entries if entry.name.endswith(INDEX_SUFFIX)]
    files = [entry for entry in entries if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")]
    if indexes:
        first = next((entry for entry in indexes if entry.name == f"model{INDEX_SUFFIX}"), indexes[0])
        return _indexed(first, files)
    if not files:
        pickles = [entry.name for entry in entries if entry.name.endswith((".bin", ".pt", ".pth", ".distcp"))]
        more = f"; {pickles[0]} is a pickle or a format that is not read: save as safetensors" if pickles else ""
        raise RunError(f"{place} holds no {SUFFIX} file{more}")
    faults: list[FileFault] = []
    sets: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if shard := _SHARD.fullmatch(file.name):
            sets.setdefault((shard["stem"], int(shard["total"])), set()).add(int(shard["number"]))
    for (stem, total), numbers in sets.items():
        faults += _missing_shards(stem, total, numbers)
        reason = f"is one of {total} shards, and {stem}{INDEX_SUFFIX} is missing: loaders cannot find its tensors"
        if total > 1:
            faults.append(FileFault(kind="no_index", file=f"{stem}-{min(numbers):05d}-of-{total:05d}{SUFFIX}", reason=reason))
    faults += _mixed_sets(sets)
    return files, {}, faults


def _missing_shards(stem: str, total: int, numbers: set[int]) -> Iterator[FileFault]:
    first = 0 if 0 in numbers else 1
    expected = set(range(first, first + min(total, 100_000)))
    for number in sorted(expected - numbers)[:100]:
        reason = f"is missing: {len(numbers)} of {total} shards are there"
        yield FileFault(kind="missing_shard", file=f"{stem}-{number:05d}-of-{total:05d}{SUFFIX}", reason=reason)


def _mixed_sets(sets: Mapping[tuple[str, int], set[int]]) -> Iterator[FileFault]:
    totals: dict[str, list[int]] = {}
    for stem, total in sets:
        totals.setdefault(stem, []).append(total)
    for stem, found in totals.items():
        if len(found) > 1:
            counts = " and ".join(str(total) for total in sorted(found))
            reason = f"belongs to one of several sets, of {counts} shards: one of them is stale"
            yield FileFault(kind="stale_shard", file=f"{stem}-*-of-{max(found):05d}{SUFFIX}", reason=reason)


def _indexed(index: Path, beside: Sequence[Path] | None = None) -> tuple[list[Path], Mapping[str, str], list[FileFault]]:
    """Return the files that an index names and that exist, its map, and what is wrong with either."""
    try:
        weight_map, faults = _weight_map(index)
    except (OSError, ValueError) as error:
        if not beside:
            raise RunError(f"{index} cannot be read: {_clause(error)}") from None
        fault = FileFault(kind="unreadable", file=index.name, reason=f"{_clause(error)}; all shards beside it were read")
        return list(beside), {}, [fault]
    found = {entry.name: entry for entry in (beside if beside is not None else index.parent.iterdir())}
    named = dict.fromkeys(weight_map.values())
    for name in named:
        if name not in found:
            number = sum(file == name for file in weight_map.values())
            reason = f"is missing: the index places {number} tensors in it"
            faults.append(FileFault(kind="missing_shard", file=name, reason=reason))
    stems = {(shard["stem"], shard["total"]) for name in named if (shard := _SHARD.fullmatch(name))}
    files = [found[name] for name in named if name in found]
    for name, entry in found.items():
        shard = _SHARD.fullmatch(name)
        if name not in named and shard and shard["stem"] in {stem for stem, _ in stems}:
            faults.append(FileFault(kind="stale_shard", file=name, reason="is not in the index: no loader reads it"))
            files += [entry] if (shard["stem"], shard["total"]) in stems else []
    return files, weight_map, faults


def _weight_map(index: Path) -> tuple[dict[str, str], list[FileFault]]:
    document = read_json(index)
    weight_map = document.get("weight_map") if isinstance(document, Mapping) else None
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError("has no weight_map")
    kept, faults = {}, []
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file.endswith(SUFFIX) and not set(file) & set("/\\\0"):
            kept[str(tensor)] = file
        else:
            reason = f"places {one_line(str(tensor))[:80]} in {one_line(str(file))[:80]!r}, which is no file beside the index"
            faults.append(FileFault(kind="unreadable", file=index.name, tensor=str(tensor), reason=reason))
    if not kept:
        raise ValueError("names no safetensors file beside it")
    return kept, faults


#: What files of other kinds begin with.
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes it",
    b"\x80\x02": "a pickle, as torch.save wrote it",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
}


def read_header(file: Path) -> tuple[list[Tensor], Mapping[str, str], list[FileFault]]:
    """Return a file's tensors, its metadata, and the entries that cannot be read.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is no safetensors file.
    """
    size = size_of(file)
    with file.open("rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        for begins, kind in _FOREIGN.items():
            if first.startswith(begins):
                raise ValueError(f"is {kind}, which is not read: save its tensors with safetensors")
        if size < 8 or not 2 <= length <= size - 8:
            raise ValueError(f"is no safetensors file, or cut off: {size} bytes, a header of {length} bytes announced")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        text = opened.read(length)
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError("has a header that is no JSON object")
    given = header.pop("__metadata__", None)
    metadata = {str(k): v for k, v in given.items() if isinstance(v, str)} if isinstance(given, Mapping) else {}
    tensors, faults = [], []
    for name, entry in header.items():
        try:
            tensors.append(_tensor(str(name), entry, file, 8 + length, size))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            faults.append(FileFault(kind="unreadable", file=file.name, tensor=str(name)[:_MAX_NAME], reason=_clause(error)))
    last: Tensor | None = None
    for tensor in sorted(tensors, key=lambda one: (one.start, one.stop)):
        if last is not None and tensor.start < last.stop and tensor.num_bytes:
            reason = f"shares bytes with {one_line(last.name)[:120]}: the header is damaged"
            faults.append(FileFault(kind="unreadable", file=file.name, tensor=tensor.name, reason=reason))
        last = tensor
    shared = {fault.tensor for fault in faults}
    return [tensor for tensor in tensors if tensor.name not in shared], metadata, faults


def _tensor(name: str, entry: Any, file: Path, base: int, size: int) -> Tensor:
    if len(name) > _MAX_NAME:
        raise ValueError(f"has a name of {len(name)} characters")
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError("has no dtype, shape and data_offsets in the header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in BITS:
        raise ValueError(f"has the type {one_line(str(dtype))[:40]!r}, which safetensors does not define")
    numbers = [*shape, *offsets]
    if len(offsets) != 2 or len(shape) > 16 or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("has a shape or offsets that are no sizes")
    start, stop = offsets
    num_bytes = -(-math.prod(shape) * BITS[dtype] // 8)
    if stop - start != num_bytes:
        raise ValueError(f"takes {stop - start} bytes, and {dtype}{list(shape)[:8]} has {num_bytes}")
    if base + stop > size:
        raise ValueError(f"lies beyond the end of the file: it needs {base + stop} bytes, the file has {size}")
    return Tensor(name=name, dtype=dtype, shape=tuple(shape), file=file, start=base + start, stop=base + stop)


def _configuration(root: Path) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, list[FileFault]]:
    """Return config.json, its quantization section, and the files of the two that cannot be read, which count as absent."""
    faults: list[FileFault] = []
    config, modelopt = (_mapping(root / name, faults) for name in ("config.json", "hf_quant_config.json"))
    for key in ("quantization_config", "compression_config", "quantization"):
        if isinstance(config.get(key), Mapping):
            return config, config[key], faults
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and isinstance(inner.get("quantization_config"), Mapping):
        return config, inner["quantization_config"], faults
    section = modelopt.get("quantization")
    return config, section if isinstance(section, Mapping) else None, faults


def _mapping(path: Path, faults: list[FileFault]) -> Mapping[str, Any]:
    try:
        found = read_json(path) if path.is_file() else {}
        if isinstance(found, Mapping):
            return found
        reason = "is no JSON object"
    except OSError as error:
        reason = f"cannot be read: {error.strerror or why(error)}"
    except (ValueError, RunError):
        reason = "is no JSON"
    faults.append(FileFault(kind="unreadable", file=path.name, reason=f"{reason}; the weights were judged without it"))
    return {}


def _clause(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or why(error)}"
    said = (str(error) or type(error).__name__).splitlines()[0][:200]
    known = ("has ", "is ", "lies ", "takes ", "names ", "places ")
    return said if said.startswith(known) else f"is no safetensors file: {said}"

"""Dumps of whole operands, read without torch: where they lie, what their header says, and the errors of their blocks.

    RUN/dumps/step=00000100/rank=00000/blocks.2.mlp.down.fprop.input.safetensors

A file holds ``reference`` ``[rows, columns]`` as it came (BF16, FP16, FP32), and unless that GEMM reads it in high precision
``data`` (FP8, the same shape), ``scale_inv`` ``[block rows, block columns]`` and three maps over tiles of the tensor. A site's
name is data: the file's name is made safe for any name, and the way back is the metadata in its header.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8debug.errors import RunError, UsageError
from fp8debug.formats import FORMATS, GRANULARITIES, Format, block_shape
from fp8debug.store.file_checks import parse_json, size_of
from fp8debug.store.locations import place_of
from fp8debug.types import OPERAND_SITES

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

Array = np.ndarray[Any, Any]

FOLDER, SUFFIX = "dumps", ".safetensors"
#: Says in the metadata that a file is ours; changed when older readers could not read it.
KIND = "fp8debug-dump-1"
MAX_NAME_BYTES = 180
MAX_HEADER_BYTES = 1 << 20
#: Tiles of the error map where the cast has larger blocks.
TILE = 128
#: Elements that are decoded at a time.
_CHUNK = 1 << 22

_FLOATS: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I32": np.dtype("<i4"),
}
#: Data of 4 and 6 bits lie in E4M3's bytes (``Format.data_dtype``).
_FP8 = {f.safetensors_dtype: f for f in FORMATS.values() if f.bits == 8 and not f.scale_only}
_ITEM_BYTES = {**{name: kind.itemsize for name, kind in _FLOATS.items()}, **dict.fromkeys(_FP8, 1), "BF16": 2}


def file_name(module: str, gemm: str, tensor: str, call: int = 0) -> str:
    """Return the name of a site's dump: no path leaves the folder and no name is too long for a file system.

    Args:
        module: FQN, any text.
        gemm: fprop, dgrad or wgrad.
        tensor: input, weight or grad_output.
        call: which observation of the site in its step: microbatches, or a module that is called several times.
    """
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else _percent(c) for c in module)
    name = f"{safe}.{gemm}.{tensor}"
    name = "%2E" + name[1:] if name.startswith(".") else name
    if len(name) > MAX_NAME_BYTES:
        name = f"{name[: MAX_NAME_BYTES - 17]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name + (f"+{call}" if call else "") + SUFFIX


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


def rank_folder(run: Path, step: int, rank: int) -> Path:
    """Return where a rank's dumps of a step lie."""
    return run / FOLDER / f"step={step:08d}" / f"rank={rank:05d}"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor in a file: its type as safetensors spells it, its shape, and its bytes' place."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One operand of one GEMM at one step, of which only the header is in memory.

    Attributes:
        path: the file.
        module: FQN.
        gemm: fprop, dgrad or wgrad.
        tensor: input, weight or grad_output.
        cast_name: of the quantized data; empty for an operand that its GEMM reads in high precision.
        actual: False where FP8 is only tried beside the training.
        step: optimizer step.
        rank: global rank.
        call: observation of the site in the step, from 0.
        shape: rows and columns.
        reason: why it was written: the selector, or the finding.
        tile: rows and columns of a tile of the error maps.
        stored: the tensors in the file by name.
    """

    path: Path
    module: str
    gemm: str
    tensor: str
    cast_name: str
    actual: bool
    step: int
    rank: int
    call: int
    shape: tuple[int, int]
    reason: str
    tile: tuple[int, int]
    stored: Mapping[str, Stored]

    def raw(self, name: str) -> Array:
        """Return a tensor's bytes, ``uint8``, in a writable array.

        Raises:
            RunError: the file has no such tensor or cannot be read.
        """
        if name not in self.stored:
            raise RunError(
                f"{self.path} holds no {name}: {'the operand was not quantized' if name != 'reference' else 'damaged'}"
            )
        place = self.stored[name]
        try:
            if size_of(self.path) < place.stop:
                raise RunError(f"{self.path} is cut off")
            found = np.empty(place.stop - place.start, np.uint8)
            with self.path.open("rb") as file:
                file.seek(place.start)
                num_read = file.readinto(found.data) if found.size else 0
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path} cannot be read: {_first_line(error)}") from None
        if num_read != found.size:
            raise RunError(f"{self.path} is cut off")
        return found

    def values(self, name: str) -> Array:
        """Return a tensor's numbers: BF16 and FP8 as FP32, which holds them exactly."""
        place = self.stored.get(name)
        return decoded(self.raw(name), place.dtype if place else "").reshape(place.shape if place else ())

    @property
    def sum_err2(self) -> Array:
        """Squared error of each tile, FP64 ``[tile rows, tile columns]``."""
        return self.values("block_sum_err2")

    @property
    def sum_x2(self) -> Array:
        """Squared reference of each tile, FP64."""
        return self.values("block_sum_x2")

    @property
    def num_nonfinite(self) -> Array:
        """Elements of each tile that are NaN or Inf before the cast or after it, int32; the two sums leave them out."""
        return self.values("block_num_nonfinite")

    @property
    def sqnr_db(self) -> Array:
        """SQNR of each tile in dB; NaN where the reference is 0, infinite where there is no error."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.sum_x2 / self.sum_err2
            return np.where(self.sum_x2 > 0, 10 * np.log10(ratio), np.nan)


def open_dump(path: str | Path) -> Dump:
    """Read a dump's header.

    Raises:
        RunError: the file is missing or is no dump.
    """
    path = place_of(path)
    try:
        size = size_of(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise RunError(f"{path} is no dump of fp8debug: no safetensors header")
            header = parse_json(file.read(length))
        metadata = header.pop("__metadata__", {})
        if metadata.get("kind") != KIND:
            raise RunError(f"{path} is no dump of fp8debug: its metadata lack kind={KIND!r}")
        stored = {str(name): _stored(entry, 8 + length, size) for name, entry in header.items()}
        rows, columns = (int(n) for n in metadata["shape"].split(","))
        tile_rows, tile_columns = (int(n) for n in metadata["tile"].split(","))
        if stored["reference"].shape != (rows, columns) or min(tile_rows, tile_columns) < 1:
            raise ValueError("its shapes disagree")
        site = str(metadata["module"]), metadata["gemm"], metadata["tensor"]
        if site[1:] not in {(str(g), str(t)) for g, t in OPERAND_SITES}:
            raise ValueError("no such operand")
        number = {name: int(metadata[name]) for name in ("step", "rank", "call")}
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; give a file below RUN/{FOLDER}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is no dump of fp8debug: {(str(error) or type(error).__name__).splitlines()[0][:120]}") from None
    return Dump(
        path=path,
        module=site[0],
        gemm=site[1],
        tensor=site[2],
        cast_name=str(metadata.get("cast", "")),
        actual=metadata.get("actual") == "true",
        **number,
        shape=(rows, columns),
        reason=str(metadata.get("reason", "")),
        tile=(tile_rows, tile_columns),
        stored=stored,
    )


def _first_line(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) else str(error)
    return (said or type(error).__name__).splitlines()[0][:120]


def _stored(entry: Mapping[str, Any], base: int, size: int) -> Stored:
    (start, stop), shape = entry["data_offsets"], tuple(int(n) for n in entry["shape"])
    num_bytes = math.prod(shape) * _ITEM_BYTES[entry["dtype"]]
    if min(shape, default=0) < 0 or not 0 <= start <= stop or base + stop > size or stop - start != num_bytes:
        raise ValueError("a tensor lies outside the file")
    return Stored(dtype=entry["dtype"], shape=shape, start=base + start, stop=base + stop)


def find_dumps(run: str | Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (step, rank, path) of every dump below a run's folder, by step and rank; no file is opened."""
    for folder in sorted(place_of(run).glob(f"{FOLDER}/step=*/rank=*")):
        step, rank = re.fullmatch(r"step=(\d+)", folder.parent.name), re.fullmatch(r"rank=(\d+)", folder.name)
        if step and rank:
            yield from ((int(step[1]), int(rank[1]), path) for path in sorted(folder.glob(f"[!.]*{SUFFIX}")))


def dumps_of(run: Run | str | Path, module: str, step: int | None = None) -> list[Dump]:
    """Return the dumps of one module, by step, rank, and site in the order of a training step.

    Args:
        run: a run or its folder.
        module: its FQN.
        step: only this step's.

    Returns:
        their headers; ``Dump.sqnr_db`` and its likes read the maps. A file that is no dump is left out.
    """
    stems = {file_name(module, str(g), str(t)).removesuffix(SUFFIX) for g, t in OPERAND_SITES}
    found = []
    for at, _, path in find_dumps(run if isinstance(run, str | Path) else run.path):
        if (step is None or at == step) and path.name.removesuffix(SUFFIX).partition("+")[0] in stems:
            try:
                dump = open_dump(path)
            except RunError:
                continue
            if dump.module == module:
                found.append(dump)
    order = {(str(g), str(t)): place for place, (g, t) in enumerate(OPERAND_SITES)}
    return sorted(found, key=lambda d: (d.step, d.rank, order[d.gemm, d.tensor], d.call))


def dumps_at(path: str) -> list[Dump]:
    """Return the dumps that a path stands for: a file, a folder and all below it, or a glob.

    Raises:
        RunError: there is none, or a file is no dump.
    """
    if not path or "\0" in path:
        raise UsageError(f"expected the path of a dump, or of a folder with dumps, got {path!r}")
    given = [place_of(path)]
    if not given[0].exists() and set(path) & set("*?["):
        parts = given[0].parts
        fixed = next(i for i, part in enumerate(parts) if set(part) & set("*?["))
        given = sorted(type(given[0])(*parts[:fixed]).glob(str(Path(*parts[fixed:]))))
    files = [file for one in given for file in (sorted(one.rglob(f"[!.]*{SUFFIX}")) if one.is_dir() else [one])]
    if not files:
        raise RunError(f"no dump at {path}; they lie below RUN/{FOLDER} of a run that was recorded with dump=")
    return sorted((open_dump(file) for file in files), key=lambda d: (d.step, d.rank))


@cache
def _table(fmt: Format) -> Array:
    """Return the 256 values of a format by code, FP32."""
    return np.array([fmt.value(code) for code in range(256)], np.float32)


def decoded(raw: Array, dtype: str) -> Array:
    """Return the numbers that bytes stand for: BF16 and FP8 as FP32.

    Args:
        raw: ``uint8``, any length.
        dtype: as safetensors spells it.

    Raises:
        UsageError: a type that dumps do not have.
    """
    if dtype in _FP8:
        return _table(_FP8[dtype])[raw]
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _FLOATS:
        raise UsageError(f"a dump holds no {dtype}; known are {', '.join(_ITEM_BYTES)}")
    return raw.view(_FLOATS[dtype])


def tile_of(granularity: str) -> tuple[int, int]:
    """Return rows and columns of the error maps' tiles: the block of the cast, cut to 128 where it spans the tensor."""
    rows, columns = GRANULARITIES[granularity]
    return rows or TILE, columns or TILE


def block_errors(
    reference: tuple[Array, str], data: tuple[Array, str], scale_inv: Array, granularity: str, shape: tuple[int, int]
) -> dict[str, Array]:
    """Return the maps of a dump: per tile the squared error, the squared reference and the elements that are not finite.

    Args:
        reference: bytes and type, row by row.
        data: the same of the quantized tensor.
        scale_inv: FP32 ``[block rows, block columns]``.
        granularity: of the cast.
        shape: rows and columns of the tensor.

    Returns:
        ``block_sum_err2``, ``block_sum_x2`` FP64 and ``block_num_nonfinite`` int32, ``[tile rows, tile columns]``.
    """
    (rows, columns), tile, block = shape, tile_of(granularity), block_shape(granularity, *shape)
    grid = -(-rows // tile[0]), -(-columns // tile[1])
    maps: dict[str, Array] = {"block_sum_err2": np.zeros(grid), "block_sum_x2": np.zeros(grid)}
    maps["block_num_nonfinite"] = np.zeros(grid, np.int32)
    if not rows * columns:
        return maps
    step = max(1, _CHUNK // max(columns, 1) // tile[0]) * tile[0]
    starts = np.arange(0, columns, tile[1])
    x_bytes, y_bytes = _ITEM_BYTES[reference[1]], _ITEM_BYTES[data[1]]
    column_blocks = np.arange(columns) // block[1]
    for first in range(0, rows, step):
        last = min(first + step, rows)
        x = decoded(reference[0][first * columns * x_bytes : last * columns * x_bytes], reference[1])
        x = x.astype(np.float32, copy=False).reshape(-1, columns)
        y = decoded(data[0][first * columns * y_bytes : last * columns * y_bytes], data[1]).reshape(-1, columns)
        with np.errstate(over="ignore", invalid="ignore"):
            y = y * scale_inv[np.arange(first, last)[:, None] // block[0], column_blocks]
            error = y.astype(np.float64) - x
            bad = ~np.isfinite(error)
            error[bad] = 0.0
            energy = np.where(bad, 0.0, x).astype(np.float64) ** 2
        where = slice(first // tile[0], -(-last // tile[0]))
        for name, values in (
            ("block_sum_err2", error**2),
            ("block_sum_x2", energy),
            ("block_num_nonfinite", bad.astype(np.int32)),
        ):
            across = np.add.reduceat(values, starts, axis=1)
            maps[name][where] = np.add.reduceat(across, np.arange(0, last - first, tile[0]), axis=0)
    return maps

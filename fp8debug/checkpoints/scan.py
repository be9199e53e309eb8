"""One pass over a checkpoint's tensors: what the rules need to know of each, in constant memory, on all cores.

Legend: x is the reference, y = codes * scale_inv the checkpoint's weight, s a block's scale_inv, B one block.

    gain      = sum(x y) / sum(x x)
    factor_B  = sum_B(x y) / sum_B(y y)         by which y must be multiplied to fit x best
    actual    = SQNR of y                       refit  = SQNR of factor_B * y
    own       = SQNR of the cast of x under s   ideal  = SQNR of the cast of x under FP32 scales made for it, in the same blocks

Rows are read in bands that end on a block's edge; sums are FP64.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fp8debug.checkpoints.codes import OF_DTYPE, decoded, is_float, rounded, spacing, table, unpacked
from fp8debug.checkpoints.comparison import Comparison, Sums
from fp8debug.checkpoints.files import ByteReader, Tensor
from fp8debug.checkpoints.layouts import Weight
from fp8debug.formats import FORMATS
from fp8debug.store.locations import why

Array = np.ndarray[Any, Any]

#: Elements that one worker holds at a time: some 40 bytes each where a reference is compared.
CHUNK = 1 << 20
#: Format of codes that files hold as if they were values.
_CODES = "e4m3fn"
_LARGEST = FORMATS[_CODES].max
#: Blocks whose scales and factors are kept to recognize a shifted or transposed grid.
MAX_KEPT_BLOCKS = 1 << 18


@dataclass(frozen=True, kw_only=True)
class WeightFacts:
    """Facts about one quantized weight.

    Attributes:
        numel: elements.
        num_nan: elements whose code is NaN or Inf.
        num_zero: elements that are zero.
        num_distinct: codes that occur, both zeros as one.
        num_top: elements at the format's largest magnitude.
        num_next: elements one code below it.
        amax_code: largest finite magnitude among the codes.
        rms_codes: root mean square of the codes.
        rms: root mean square of codes * scale_inv; None where scales are missing, do not fit, or are not finite.
        num_blocks: blocks with a nonzero code.
        num_at_top: of these, blocks whose largest code is the format's largest.
        num_scales: scales.
        num_scale_top: scales that are the largest of their own format of 8 bits; 0 in others.
        num_scale_next: scales one code below it.
        num_scale_nan: NaN scales.
        num_scale_inf: infinite scales.
        num_scale_negative: scales below zero.
        num_scale_zero: scales of zero whose block has nonzero codes.
        num_scale_pow2: scales that are powers of two.
        scale_min: smallest finite positive scale; None without one.
        scale_max: largest finite scale.
        tensor_scale: scale of the second level; None without one.
        digest: equal for equal codes.
        comparison: with the reference; None where there is none.
        problem: why the tensor could not be read; None when it was.
    """

    numel: int = 0
    num_nan: int = 0
    num_zero: int = 0
    num_distinct: int = 0
    num_top: int = 0
    num_next: int = 0
    amax_code: float = 0.0
    rms_codes: float = 0.0
    rms: float | None = None
    num_blocks: int = 0
    num_at_top: int = 0
    num_scales: int = 0
    num_scale_top: int = 0
    num_scale_next: int = 0
    num_scale_nan: int = 0
    num_scale_inf: int = 0
    num_scale_negative: int = 0
    num_scale_zero: int = 0
    num_scale_pow2: int = 0
    scale_min: float | None = None
    scale_max: float | None = None
    tensor_scale: float | None = None
    digest: str = ""
    comparison: Comparison | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlainFacts:
    """Facts about one tensor in 16 bits or more.

    Attributes:
        numel: elements.
        num_nonfinite: NaN and Inf.
        num_nonpositive: elements that are zero or below, counted for scales alone.
        amax: largest finite magnitude.
        rms: root mean square of the finite elements.
        is_on_grid: every value is one of E4M3's, and the largest is as large as under a scale of its own: within a power of two
            of 448, or the 240 of fnuz.
        is_equal: every value equals the reference's; None without one.
        sqnr_db: against the reference; None without one, infinite for equal values.
        gain: against the reference.
        problem: why it could not be read.
    """

    numel: int = 0
    num_nonfinite: int = 0
    num_nonpositive: int = 0
    amax: float = 0.0
    rms: float = 0.0
    is_on_grid: bool = False
    is_equal: bool | None = None
    sqnr_db: float | None = None
    gain: float | None = None
    problem: str | None = None


class RowSource(Protocol):
    """A source of rows in FP32."""

    def read(self, first: int, last: int) -> Array:
        """Return rows ``first`` to ``last`` of all matrices, one below the other, FP32 ``[last - first, columns]``."""


class PlainRows:
    """Rows of a tensor in 16 bits or more.

    Args:
        tensor: of any shape.
        stack: closes the file.
    """

    def __init__(self, tensor: Tensor, stack: ExitStack) -> None:
        self._dtype = tensor.dtype
        self._columns = tensor.shape[-1] if tensor.shape else 1
        self._row_bytes = tensor.num_bytes // max(1, tensor.numel // max(1, self._columns))
        self._reader = stack.enter_context(ByteReader(tensor))

    def read(self, first: int, last: int) -> Array:
        """Return rows in FP32."""
        raw = self._reader.read(first * self._row_bytes, last * self._row_bytes)
        return decoded(raw, self._dtype).astype(np.float32, copy=False).reshape(-1, self._columns)


class QuantizedRows:
    """Dequantized rows of a quantized weight.

    Args:
        weight: whose scales fit.
        stack: closes the files.
    """

    def __init__(self, weight: Weight, stack: ExitStack) -> None:
        self._weight = weight
        self._scales = effective_scales(weight)
        self._reader = stack.enter_context(ByteReader(weight.data))

    def read(self, first: int, last: int) -> Array:
        """Return rows in FP32."""
        weight = self._weight
        codes = read_codes(weight, self._reader, first, last)
        rows = np.arange(first, last)
        scales = self._scales[rows // weight.rows, rows % weight.rows // weight.block[0]]
        with np.errstate(invalid="ignore", over="ignore"):
            expanded = np.repeat(scales, weight.block[1], axis=1)[:, : weight.columns]
            values: Array = table(weight.format)[codes] * expanded
            return values


class StackedRows:
    """Rows of several tensors, one below the other.

    Args:
        parts: what opens each, and its number of rows; opened as they are read, since there may be hundreds.
    """

    def __init__(self, parts: Sequence[tuple[Callable[[ExitStack], RowSource], int]]) -> None:
        self._parts = parts

    def read(self, first: int, last: int) -> Array:
        """Return rows in FP32."""
        found, start = [], 0
        for opens, number in self._parts:
            low, high = max(first - start, 0), min(last - start, number)
            if low < high:
                with ExitStack() as stack:
                    found.append(opens(stack).read(low, high))
            start += number
        return np.concatenate(found)


class SomeRows:
    """Rows of a tensor from one on.

    Args:
        rows: of the tensor.
        start: its first.
    """

    def __init__(self, rows: RowSource, start: int) -> None:
        self._rows, self._start = rows, start

    def read(self, first: int, last: int) -> Array:
        """Return rows in FP32."""
        return self._rows.read(self._start + first, self._start + last)


class TurnedRows:
    """Rows of matrices that lie transposed: row r of a matrix is its column r as stored.

    One matrix is held at a time, in FP32.

    Args:
        rows: of the matrices as stored, one below the other.
        stored: rows and columns of one matrix as stored.
    """

    def __init__(self, rows: RowSource, stored: tuple[int, int]) -> None:
        self._rows, self._stored = rows, stored
        self._number, self._matrix = -1, np.zeros((0, 0), np.float32)

    def read(self, first: int, last: int) -> Array:
        """Return rows in FP32."""
        height, width = self._stored
        found = []
        for number in range(first // width, -(-last // width)):
            if number != self._number:
                self._matrix = self._rows.read(number * height, (number + 1) * height)
                self._number = number
            found.append(self._matrix[:, max(first - number * width, 0) : last - number * width].T)
        return np.ascontiguousarray(np.concatenate(found))


def read_codes(weight: Weight, reader: ByteReader, first: int, last: int) -> Array:
    """Return codes of rows of all matrices, ``uint8 [last - first, columns]``."""
    row_bytes = weight.columns // 2 if weight.is_packed else weight.columns
    raw = reader.read(first * row_bytes, last * row_bytes)
    return (unpacked(raw) if weight.is_packed else raw).reshape(last - first, weight.columns)


def read_all(tensor: Tensor) -> Array:
    """Return all bytes of a tensor."""
    with ByteReader(tensor) as reader:
        return reader.read(0, tensor.num_bytes)


def second_level(weight: Weight) -> float | None:
    """Return the factor of a weight's second-level scale; None without one."""
    if weight.tensor_scale is None or not is_float(weight.tensor_scale.dtype):
        return None
    values = decoded(read_all(weight.tensor_scale), weight.tensor_scale.dtype).ravel()
    value = float(values[0]) if values.size else float("nan")
    if weight.tensor_scale_as == "divisor":
        return 1 / value if value else float("inf")
    # The largest code of the data under the largest of a block scale is the amax.
    return value / (FORMATS[weight.format].max * FORMATS["e4m3fn"].max) if weight.tensor_scale_as == "amax" else value


def effective_scales(weight: Weight) -> Array:
    """Return the scales with the second level, FP32 ``[batch, grid rows, grid columns]``.

    Raises:
        OSError: they cannot be read.
    """
    assert weight.scale is not None and weight.grid_fault is None
    scales = weight.scales(read_all(weight.scale))
    factor = second_level(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        return scales if factor is None else (scales * np.float32(factor)).astype(np.float32)


def scan_weight(weight: Weight, reference: Callable[[ExitStack], RowSource] | None = None) -> WeightFacts:
    """Return the facts about one weight; a file that cannot be read is its ``problem``.

    Args:
        weight: the weight.
        reference: opens the reference's rows, of the same shape; None without one.
    """
    try:
        with ExitStack() as stack:
            return _Scan(weight, stack, reference).facts()
    except OSError as error:
        return WeightFacts(problem=error.strerror or why(error))


class _Scan:
    def __init__(self, weight: Weight, stack: ExitStack, reference: Callable[[ExitStack], RowSource] | None) -> None:
        self._weight = weight
        self._reader = stack.enter_context(ByteReader(weight.data))
        fits = weight.scale is not None and weight.grid_fault is None
        self._stored = weight.scales(read_all(weight.scale)) if fits and weight.scale is not None else None
        self._factor = second_level(weight)
        self._scales = self._stored
        if self._stored is not None and self._factor is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                self._scales = (self._stored * np.float32(self._factor)).astype(np.float32)
        self._reference = reference(stack) if reference is not None and self._scales is not None else None
        fmt = FORMATS[weight.format]
        values = table(weight.format)
        self._half = 1 << (fmt.bits - 1)
        magnitude = np.abs(values)
        self._is_finite = np.isfinite(magnitude)
        finite = np.where(self._is_finite, magnitude, 0)
        self._square = finite**2
        #: Rank of each code's magnitude: 0 for zero, NaN and Inf.
        self._rank = np.where(self._is_finite, np.arange(1 << fmt.bits) % self._half, 0).astype(np.uint8)
        self._top = int(self._rank.max())

    def facts(self) -> WeightFacts:
        weight, fmt = self._weight, FORMATS[self._weight.format]
        counts = np.zeros(1 << fmt.bits, np.int64)
        digest = hashlib.blake2b(digest_size=16)
        sum2, num_blocks, num_at_top, num_zero_scale = 0.0, 0, 0, 0
        sums = Sums(weight.format) if self._reference is not None else None
        kept = 0
        for matrix in range(weight.batch):
            for first, last in _bands(weight):
                rank: Array | None = None
                square: Array | None = None
                partial: dict[str, Array] = {}
                ideal = self._ideal_scales(matrix, first, last) if sums is not None else None
                for start, stop in _chunks(weight, first, last):
                    at = matrix * weight.rows
                    codes = read_codes(weight, self._reader, at + start, at + stop)
                    counts += np.bincount(codes.ravel(), minlength=1 << fmt.bits)
                    digest.update(np.ascontiguousarray(codes).data)
                    largest = _blocked(np.maximum, self._rank[codes], weight)
                    energy = _blocked(np.add, self._square[codes], weight)
                    rank = largest if rank is None else np.maximum(rank, largest)
                    square = energy if square is None else square + energy
                    if sums is not None and ideal is not None:
                        for name, value in self._compared(matrix, start, codes, ideal, first, sums).items():
                            partial[name] = partial[name] + value if name in partial else value
                if rank is None or square is None:
                    continue
                filled = rank > 0
                num_blocks += int(filled.sum())
                num_at_top += int((rank == self._top).sum())
                if self._scales is not None and self._stored is not None:
                    rows = slice(first // weight.block[0], -(-last // weight.block[0]))
                    scales = self._scales[matrix, rows]
                    with np.errstate(over="ignore", invalid="ignore"):
                        sum2 += float((np.square(scales, dtype=np.float64) * square).sum())
                    num_zero_scale += int(((self._stored[matrix, rows] == 0) & filled).sum())
                    if sums is not None and ideal is not None:
                        sums.add(partial, scales, ideal, keep=kept < MAX_KEPT_BLOCKS)
                        kept += scales.size
        digest.update(counts.tobytes())
        return self._summary(counts, sum2, num_blocks, num_at_top, num_zero_scale, digest.hexdigest(), sums)

    def _ideal_scales(self, matrix: int, first: int, last: int) -> Array:
        """Return FP32 scales made for the reference's blocks in a band."""
        assert self._reference is not None
        weight, amax = self._weight, None
        at = matrix * weight.rows
        for start, stop in _chunks(weight, first, last):
            x = np.abs(self._reference.read(at + start, at + stop))
            found = _blocked(np.maximum, np.where(np.isfinite(x), x, 0), weight)
            amax = found if amax is None else np.maximum(amax, found)
        assert amax is not None
        return np.where(amax > 0, amax / np.float32(FORMATS[weight.format].max), 1).astype(np.float32)

    def _compared(self, matrix: int, start: int, codes: Array, ideal: Array, first: int, sums: Sums) -> dict[str, Array]:
        """Return the sums of each block by name; the order of the elements is counted at once."""
        assert self._reference is not None and self._scales is not None
        weight, at = self._weight, matrix * self._weight.rows
        x = self._reference.read(at + start, at + start + len(codes))
        rows = np.arange(start, start + len(codes))
        scales, best = self._scales[matrix, rows // weight.block[0]], ideal[rows // weight.block[0] - first // weight.block[0]]
        s, t = (np.repeat(one, weight.block[1], axis=1)[:, : weight.columns] for one in (scales, best))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            y = table(weight.format)[codes] * s
            scaled = x / s
            own = rounded(scaled, weight.format) * s
            error = y - x
            good = np.isfinite(error) & np.isfinite(own)
            x, y = np.where(good, x, 0), np.where(good, y, 0)
            error, own = np.where(good, error, 0), np.where(good, own, 0)
            far = good & (np.abs(error) > 1.05 * spacing(np.where(good, scaled, 0), weight.format) * np.abs(s))
            sums.add_order(x, y)
            fresh = rounded(x / t, weight.format) * t
            of = {
                "x2": np.square(x, dtype=np.float64),
                "xy": np.multiply(x, y, dtype=np.float64),
                "y2": np.square(y, dtype=np.float64),
                "error2": np.square(error, dtype=np.float64),
                "own2": np.square(own - x, dtype=np.float64),
                "x_own": np.multiply(x, own, dtype=np.float64),
                "ideal2": np.square(fresh - x, dtype=np.float64),
                "far": far.astype(np.float64),
                "differing": (good & (own != y)).astype(np.float64),
                "damaged": (far & (own != y)).astype(np.float64),
                "compared": good.astype(np.float64),
            }
            if weight.is_packed:
                of["x_swapped"] = x.astype(np.float64) * y.reshape(len(y), -1, 2)[..., ::-1].reshape(y.shape)
        return {name: _blocked(np.add, value, weight) for name, value in of.items()}

    def _largest_scales(self) -> tuple[int, int]:
        """Return how many scales are the largest of a format of 8 bits with a mantissa, and one code below; 0 of other types."""
        scale = self._weight.scale
        name = OF_DTYPE.get(scale.dtype) if scale is not None else None
        if name is None or self._stored is None:
            return 0, 0
        values = table(name)
        top, below = np.unique(values[np.isfinite(values)])[:-3:-1]
        return int((self._stored == top).sum()), int((self._stored == below).sum())

    def _summary(
        self, counts: Array, sum2: float, num_blocks: int, num_at_top: int, num_zero_scale: int, digest: str, sums: Sums | None
    ) -> WeightFacts:
        numel = int(counts.sum())
        finite = int(counts[self._is_finite].sum())
        magnitudes = np.bincount(self._rank, weights=np.where(self._is_finite, counts, 0), minlength=self._top + 1)
        present = [code for code in range(len(magnitudes)) if magnitudes[code]]
        distinct = sum(bool(counts[code]) for code in range(len(counts)) if code not in (0, self._half))
        stored, facts = self._stored, dict[str, Any]()
        if stored is not None:
            positive = stored[np.isfinite(stored) & (stored > 0)]
            mantissa, _ = np.frexp(positive)
            top, below = self._largest_scales()
            facts = {
                "num_scales": int(stored.size),
                "num_scale_nan": int(np.isnan(stored).sum()),
                "num_scale_inf": int(np.isinf(stored).sum()),
                "num_scale_negative": int((stored < 0).sum()),
                "num_scale_top": top,
                "num_scale_next": below,
                "num_scale_pow2": int((mantissa == 0.5).sum()),
                "scale_min": float(positive.min()) if positive.size else None,
                "scale_max": float(positive.max()) if positive.size else None,
                "rms": float(np.sqrt(sum2 / finite)) if finite and np.isfinite(sum2) else None,
            }
        return WeightFacts(
            numel=numel,
            num_nan=numel - finite,
            num_zero=int(counts[0]) + (int(counts[self._half]) if self._is_finite[self._half] else 0),
            num_distinct=distinct + bool(counts[0] + (counts[self._half] if self._is_finite[self._half] else 0)),
            num_top=int(magnitudes[self._top]),
            num_next=int(magnitudes[self._top - 1]),
            amax_code=float(np.abs(table(self._weight.format))[present[-1]]) if present else 0.0,
            rms_codes=float(np.sqrt((self._square * counts).sum() / finite)) if finite else 0.0,
            num_blocks=num_blocks,
            num_at_top=num_at_top,
            num_scale_zero=num_zero_scale,
            tensor_scale=self._factor,
            digest=digest,
            comparison=sums.result() if sums is not None else None,
            **facts,
        )


def _bands(weight: Weight) -> Iterator[tuple[int, int]]:
    """Yield row ranges of one matrix that end on a block's edge."""
    height = max(1, CHUNK // max(1, weight.columns) // weight.block[0]) * weight.block[0]
    for first in range(0, weight.rows, height):
        yield first, min(first + height, weight.rows)


def _chunks(weight: Weight, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a band: the band itself, or parts of its one row of blocks where that is larger than a chunk."""
    height = max(1, CHUNK // max(1, weight.columns))
    if last - first > weight.block[0]:
        height = last - first
    for start in range(first, last, height):
        yield start, min(start + height, last)


def _blocked(reduce: np.ufunc, values: Array, weight: Weight) -> Array:
    """Return a reduction over each block of rows that begin on a block's edge or lie in one block."""
    kind: dict[str, Any] = {"dtype": np.float64} if reduce is np.add else {}
    columns = np.arange(0, values.shape[1], weight.block[1])
    rows = np.arange(0, values.shape[0], weight.block[0])
    by_column = reduce.reduceat(values, columns, axis=1, **kind)
    return by_column if weight.block[0] == 1 else reduce.reduceat(by_column, rows, axis=0, **kind)


def scan_plain(tensor: Tensor, reference: Callable[[ExitStack], RowSource] | None = None) -> PlainFacts:
    """Return the facts about a tensor in 16 bits or more.

    Args:
        tensor: the tensor.
        reference: opens the reference's rows, of the same shape.
    """
    try:
        with ExitStack() as stack:
            other = reference(stack) if reference is not None else None
            return _plain_facts(tensor, PlainRows(tensor, stack), other, stack)
    except OSError as error:
        return PlainFacts(problem=error.strerror or why(error))


def _plain_facts(tensor: Tensor, rows: PlainRows, other: RowSource | None, stack: ExitStack) -> PlainFacts:
    columns = tensor.shape[-1] if tensor.shape else 1
    num_rows = tensor.numel // max(1, columns)
    height = max(1, CHUNK // max(1, columns))
    num_nonfinite, num_nonpositive, amax, sum2 = 0, 0, 0.0, 0.0
    is_on_grid, is_equal = True, True
    x2 = xy = error2 = 0.0
    for first in range(0, num_rows, height):
        y = rows.read(first, min(first + height, num_rows))
        good = np.isfinite(y)
        finite = np.where(good, y, 0)
        num_nonfinite += int(y.size - good.sum())
        num_nonpositive += int((y <= 0).sum())
        amax = max(amax, float(np.abs(finite).max(initial=0)))
        sum2 += float(np.square(finite, dtype=np.float64).sum())
        is_on_grid = is_on_grid and bool((rounded(finite, _CODES) == finite).all())
        if other is not None:
            x = other.read(first, min(first + height, num_rows))
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            if not same.all():
                is_equal = False
            x = np.where(good & np.isfinite(x), x, 0).astype(np.float64)
            kept = np.where(np.isfinite(x), finite, 0)
            x2 += float(np.square(x).sum())
            xy += float((x * kept).sum())
            error2 += float(np.square(kept - x).sum())
    sqnr = None if other is None or not x2 else float("inf") if not error2 else float(10 * np.log10(x2 / error2))
    return PlainFacts(
        numel=tensor.numel,
        num_nonfinite=num_nonfinite,
        num_nonpositive=num_nonpositive,
        amax=amax,
        rms=float(np.sqrt(sum2 / max(1, tensor.numel - num_nonfinite))),
        is_on_grid=is_on_grid and _LARGEST / 2 <= amax <= _LARGEST,
        is_equal=is_equal if other is not None else None,
        sqnr_db=sqnr,
        gain=xy / x2 if other is not None and x2 else None,
    )


@dataclass(kw_only=True)
class Task:
    """One tensor to scan.

    Attributes:
        num_bytes: that it reads.
        name: for the progress bar.
        run: does it.
        store: takes the result.
    """

    num_bytes: int
    name: str
    run: Callable[[], Any]
    store: Callable[[Any], None] = field(repr=False)


def run_all(tasks: Sequence[Task], progress: Callable[[int, int, str], None] | None, workers: int | None = None) -> None:
    """Run tasks on all cores, the largest first.

    Args:
        tasks: to run.
        progress: called after each with bytes done, bytes in all, and the tensor's name.
        workers: threads; as many as cores by default.
    """
    ordered = sorted(tasks, key=lambda task: -task.num_bytes)
    total, done = sum(task.num_bytes for task in tasks), 0
    with ThreadPoolExecutor(workers or _cores()) as pool:
        try:
            for task, result in zip(ordered, pool.map(lambda task: task.run(), ordered), strict=True):
                task.store(result)
                done += task.num_bytes
                if progress is not None:
                    progress(done, total, task.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

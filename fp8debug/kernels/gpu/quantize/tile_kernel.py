# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The kernel that reads a tensor once and quantizes it, or describes it, under up to three casts.

A program takes the tiles p, p + P, p + 2P ... of ``[J * R]`` rows by ``[H * L * 8]`` columns (see ``tile_cast``). A cast
is a constexpr tuple ``(KIND, SOURCE, e5m2, scale rounding, OUT, statistics, may saturate)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import FLOAT32_MAX, INF, bits_of, float_of, hidden, join4, load_quad, packed_extremes, unpack
from fp8debug.kernels.gpu.quantize.amax import store_four
from fp8debug.kernels.gpu.quantize.statistics import (
    COLUMNS_OF_PARTIALS,
    COLUMNS_OF_PROGRAM,
    THREADS,
    count_exponents,
    start_histogram,
    store_histogram,
)
from fp8debug.kernels.gpu.quantize.tile_cast import (
    FROM_AMAX,
    FROM_SCALE_INV,
    KIND_COLUMN,
    KIND_COLUMNS,
    KIND_NONE,
    KIND_ROW,
    KIND_ROWS,
    KIND_TENSOR,
    KIND_TILE,
    SAFE_ABOVE,
    SAFE_BELOW,
    add_tile,
    amin_key,
    codes,
    empty_cast,
    magnitudes,
    observed,
    one_of,
    per_block,
    scales,
    spread4,
    summary,
    within,
)

# OUT: where the codes go.
OUT_NONE = tl.constexpr(0)
OUT_ROWS = tl.constexpr(1)
OUT_COLUMNS = tl.constexpr(2)  # stored transposed, [columns, rows]


@triton.jit
def store_rows(out, word, row, quad, rows, columns, width, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """Store codes as the tensor lies; ``width`` is columns // 4."""
    if WORDS:
        at = out.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * width + quad
        if EVEN:
            tl.store(at, word)
        else:
            tl.store(at, word, (row < rows) & (quad < width))
    else:
        at = out.to(tl.pointer_type(tl.int8)) + row.to(tl.int64) * columns + quad * 4
        for q in tl.static_range(4):
            tl.store(at + q, (word >> (8 * q)).to(tl.int8), (row < rows) & (quad * 4 + q < columns))


@triton.jit
def store_columns(
    out, word, row, quad, tile_row, tile_column, rows, columns, height, J: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Store codes transposed; four rows in one thread (J = 4) become words along the row. ``height`` is rows // 4."""
    if WORDS and J == 4:
        # [L, R, 4, H, 2] -> four [L, R, H, 2], rows 4 r .. 4 r + 3: all inside a thread.
        even, odd = tl.split(tl.reshape(tl.permute(word, (0, 1, 3, 4, 2)), (L, R, H, 2, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        r = tile_row * R + tl.arange(0, R)[None, :, None, None]
        at = tl.arange(0, H)[None, None, :, None] * (L * 2) + tl.arange(0, L)[:, None, None, None] * 2
        column = (tile_column * (H * L * 2) + at + tl.arange(0, 2)[None, None, None, :]) * 4
        for q in tl.static_range(4):
            low = ((w0 >> (8 * q)) & 0xFF) | (((w1 >> (8 * q)) & 0xFF) << 8)
            both = low | (((w2 >> (8 * q)) & 0xFF) << 16) | (((w3 >> (8 * q)) & 0xFF) << 24)
            to = out.to(tl.pointer_type(tl.int32)) + (column + q).to(tl.int64) * height + r
            tl.store(to, both, (r < height) & (column + q < columns))
    else:
        at = out.to(tl.pointer_type(tl.int8)) + quad.to(tl.int64) * 4 * rows + row
        for q in tl.static_range(4):
            inside = (row < rows) & (quad * 4 + q < columns)
            tl.store(at + q * rows, (word >> (8 * q)).to(tl.int8), inside)


@triton.jit
def store_scale_inv(
    out, inv, row, quad, tile_row, tile_column, rows, columns, KIND: tl.constexpr, L: tl.constexpr, NATIVE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales of 1 x n blocks, and of whole tiles whose codes are, are stored transposed, as blockwise GEMMs read them."""
    if KIND == KIND_ROW:
        if NATIVE:
            # An index that Triton cannot see through keeps inv in its layout; else inv is worked out again in another.
            lane = tl.arange(0, L)[:, None, None, None, None]
            at = hidden(row) + lane * 0
            tl.store(out + tile_column.to(tl.int64) * rows + at, inv + lane.to(tl.float32) * 0.0, (at < rows) & (lane == 0))
        else:
            tl.store(out + tile_column.to(tl.int64) * rows + row, inv, row < rows)
    elif KIND == KIND_COLUMN:
        store_four(out + tile_row.to(tl.int64) * columns + quad * 4, inv, quad, columns)
    elif KIND == KIND_TILE:
        zero = tl.zeros([1, 1, 1, 1, 1], tl.int32)
        at = tile_row.to(tl.int64) * ((columns + 127) // 128) + tile_column
        if COLUMNS:
            at = tile_column.to(tl.int64) * ((rows + 127) // 128) + tile_row
        tl.store(out + at + zero, inv)
    elif KIND == KIND_ROWS:
        tl.store(out + row, inv, row + tile_column * rows < rows)
    elif KIND == KIND_COLUMNS:
        store_four(out + quad * 4, inv, quad + tile_row * columns, columns)
    else:
        zero = tl.zeros([1, 1, 1, 1, 1], tl.int32)
        tl.store(out + zero, inv, zero + tile_row + tile_column == 0)


@triton.jit
def store_parts(
    memory, x0, x1, x2, x3, word, v0, v1, v2, v3, k0, k1, k2, k3, amax, row, quad, tile_row, tile_column, rows, columns,
    SPEC: tl.constexpr, SAFE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """For a scale per row or column of the tensor: what this tile adds to each, behind the amaxes in ``memory``.

    FP32 ``[tiles, 3, n]``: sum x^2, sum err^2, both over the square of amax's binade, and amin.
    """
    kind: tl.constexpr = SPEC[0]
    d0, d1, d2, d3 = unpack(word, SPEC[2], NATIVE and not SAFE)
    a0, _, e0, _ = observed(x0, d0, v0, SAFE)
    a1, _, e1, _ = observed(x1, d1, v1, SAFE)
    a2, _, e2, _ = observed(x2, d2, v2, SAFE)
    a3, _, e3, _ = observed(x3, d3, v3, SAFE)
    block: tl.constexpr = KIND_ROW if kind == KIND_ROWS else KIND_COLUMN
    # 2^-floor(log2 amax), within FP32's normal range
    unit = float_of(tl.maximum(254 - (bits_of(amax) >> 23), 1) << 23)
    signal = (per_block(a0 * a0, a1 * a1, a2 * a2, a3 * a3, block, 0) * unit * unit).to(tl.float32)
    noise = (per_block(e0 * e0, e1 * e1, e2 * e2, e3 * e3, block, 0) * unit * unit).to(tl.float32)
    amin = float_of(((per_block(k0, k1, k2, k3, block, 2) + 1) >> 1).to(tl.int32, bitcast=True))
    amin = tl.where(amin == 0.0, INF, amin)
    if kind == KIND_ROWS:
        at = memory + rows + tile_column.to(tl.int64) * 3 * rows + row
        tl.store(at, signal, row < rows)
        tl.store(at + rows, noise, row < rows)
        tl.store(at + 2 * rows, amin, row < rows)
    else:
        at = memory + columns + tile_row.to(tl.int64) * 3 * columns + quad * 4
        store_four(at, signal, quad, columns)
        store_four(at + columns, noise, quad, columns)
        store_four(at + 2 * columns, amin, quad, columns)


@triton.jit
def cast_tile(  # noqa: C901  # branches on compile-time constants
    acc, x0, x1, x2, x3, a0, a1, a2, a3, k0, k1, k2, k3, row_amax, row_key, data, inv_out, memory, eps, margin, row, quad,
    tile_row, tile_column, rows, columns, SPEC: tl.constexpr, J: tl.constexpr, H: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    WORDS: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, SAFE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Quantize one tile under one cast, store what is asked, and return the accumulators."""
    kind: tl.constexpr = SPEC[0]
    source: tl.constexpr = SPEC[1]
    amax = tl.zeros([1, 1, 1, 1, 1], tl.float32)
    amin = amax
    if kind == KIND_ROW or kind == KIND_COLUMN or kind == KIND_TILE:
        if PACKED:
            amax = float_of(tl.max(row_amax, axis=0, keep_dims=True)[:, :, :, None, None])
            if SPEC[5]:
                key = tl.min(row_key, axis=0, keep_dims=True)[:, :, :, None, None]
                amin = float_of(((key + 1) >> 1).to(tl.int32, bitcast=True))
        else:
            amax = float_of(per_block(a0, a1, a2, a3, kind, 1))
            if SPEC[5]:
                key = per_block(k0, k1, k2, k3, kind, 2)
                amin = float_of(((key + 1) >> 1).to(tl.int32, bitcast=True))
    elif source == FROM_AMAX and kind == KIND_TENSOR:
        amax += tl.load(memory)
    elif source == FROM_AMAX and kind == KIND_ROWS:
        amax = tl.load(memory + row, row < rows, 0.0)
    elif source == FROM_AMAX and kind == KIND_COLUMNS:
        m0 = tl.load(memory + quad * 4, quad * 4 < columns, 0.0)
        m1 = tl.load(memory + quad * 4 + 1, quad * 4 + 1 < columns, 0.0)
        m2 = tl.load(memory + quad * 4 + 2, quad * 4 + 2 < columns, 0.0)
        m3 = tl.load(memory + quad * 4 + 3, quad * 4 + 3 < columns, 0.0)
        amax = join4(m0, m1, m2, m3)
    scale, inv, lifted = scales(amax, memory, eps, margin, source, SPEC)
    s0, s1, s2, s3 = spread4(scale, kind)
    word = codes(x0, x1, x2, x3, s0, s1, s2, s3, SPEC[2], NATIVE, SAFE)
    if SPEC[4] == OUT_ROWS:
        store_rows(data, word, row, quad, rows, columns, columns // 4, WORDS, EVEN)
    elif SPEC[4] == OUT_COLUMNS:
        store_columns(data, word, row, quad, tile_row, tile_column, rows, columns, rows // 4, J, H, R, L, WORDS)
    if SPEC[4] != OUT_NONE or kind >= KIND_TENSOR:
        store_scale_inv(inv_out, inv, row, quad, tile_row, tile_column, rows, columns, kind, L, NATIVE, SPEC[4] == OUT_COLUMNS)
    if SPEC[5]:
        v0, v1, v2, v3 = spread4(inv, kind)
        acc = add_tile(acc, x0, x1, x2, x3, word, v0, v1, v2, v3, amax, amin, inv, lifted, SPEC, NATIVE, SAFE)
        if kind == KIND_ROWS or kind == KIND_COLUMNS:
            store_parts(
                memory, x0, x1, x2, x3, word, v0, v1, v2, v3, k0, k1, k2, k3, amax, row, quad, tile_row, tile_column, rows,
                columns, SPEC, SAFE, NATIVE,
            )  # fmt: skip
    return acc


@triton.jit
def is_zero(x):
    """1 where zero."""
    return (x == 0.0).to(tl.int32)


@triton.jit
def all_tiles(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, data_a, inv_a, mem_a, eps_a, margin_a, data_b, inv_b, mem_b,
    eps_b, margin_b, data_c, inv_c, mem_c, eps_c, margin_c, histogram, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    J: tl.constexpr, H: tl.constexpr, R: tl.constexpr, L: tl.constexpr, LOAD: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr, STATS: tl.constexpr, HIST: tl.constexpr, NATIVE: tl.constexpr, SAFE: tl.constexpr,
    PACKED: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Do every tile of this program in the fast or the safe pass and return the accumulators.

    ``DOWN``: tiles are numbered down the columns, ``tile_columns`` to each.
    """
    FAST_WORDS: tl.constexpr = PACKED and not SAFE
    acc_a = empty_cast(R, L)
    acc_b = empty_cast(R, L)
    acc_c = empty_cast(R, L)
    amax = tl.zeros([L, R], tl.int32)
    amin = tl.full([L, R], 0xFFFFFFFF, tl.uint32)
    zeros = tl.zeros([L, R], tl.int32)
    nans = tl.zeros([L, R], tl.int32)
    infs = tl.zeros([L, R], tl.int32)
    j = tl.arange(0, J)[None, None, :, None, None]
    h = tl.arange(0, H)[None, None, None, :, None]
    r = tl.arange(0, R)[None, :, None, None, None]
    at = tl.arange(0, L)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_row = tile % tile_columns if DOWN else tile // tile_columns
        tile_column = tile // tile_columns if DOWN else tile % tile_columns
        row = tile_row * (J * R) + r * J + j
        quad = tile_column * (H * L * 2) + h * (L * 2) + at
        x0, x1, x2, x3, low, high = load_quad(x_ptr, row, quad, stride, rows, columns, LOAD, EVEN, NATIVE)
        a0, a1, a2, a3 = magnitudes(x0, x1, x2, x3, SAFE)
        k0, k1, k2, k3 = amin_key(a0), amin_key(a1), amin_key(a2), amin_key(a3)
        if FAST_WORDS:
            row_amax, row_key, zero = packed_extremes(low, high, L, R, J)
            row_key = row_key.to(tl.uint32, bitcast=True)
        else:
            row_amax = within(tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3)), 1)
            row_key = within(tl.minimum(tl.minimum(k0, k1), tl.minimum(k2, k3)), 2)
            zero = within(is_zero(x0) + is_zero(x1) + is_zero(x2) + is_zero(x3), 0)
        amax = tl.maximum(amax, tl.max(row_amax, axis=2))
        if STATS:
            amin = tl.minimum(amin, tl.min(row_key, axis=2))
            zeros += tl.sum(zero, axis=2)
            if SAFE:
                nan = (x0 != x0).to(tl.int32) + (x1 != x1).to(tl.int32) + (x2 != x2).to(tl.int32)
                nans += tl.sum(within(nan + (x3 != x3).to(tl.int32), 0), axis=2)
                inf = (tl.abs(x0) == INF).to(tl.int32) + (tl.abs(x1) == INF).to(tl.int32)
                inf += (tl.abs(x2) == INF).to(tl.int32) + (tl.abs(x3) == INF).to(tl.int32)
                infs += tl.sum(within(inf, 0), axis=2)
        if HIST:
            count_exponents(histogram, x0, x1, x2, x3, NATIVE)
        if A[0] != KIND_NONE:
            acc_a = cast_tile(
                acc_a, x0, x1, x2, x3, a0, a1, a2, a3, k0, k1, k2, k3, row_amax, row_key, data_a, inv_a, mem_a,
                eps_a, margin_a, row, quad, tile_row, tile_column, rows, columns, A, J, H, R, L, WORDS, EVEN, NATIVE,
                SAFE, FAST_WORDS,
            )  # fmt: skip
        if B[0] != KIND_NONE:
            acc_b = cast_tile(
                acc_b, x0, x1, x2, x3, a0, a1, a2, a3, k0, k1, k2, k3, row_amax, row_key, data_b, inv_b, mem_b,
                eps_b, margin_b, row, quad, tile_row, tile_column, rows, columns, B, J, H, R, L, WORDS, EVEN, NATIVE,
                SAFE, FAST_WORDS,
            )  # fmt: skip
        if C[0] != KIND_NONE:
            acc_c = cast_tile(
                acc_c, x0, x1, x2, x3, a0, a1, a2, a3, k0, k1, k2, k3, row_amax, row_key, data_c, inv_c, mem_c,
                eps_c, margin_c, row, quad, tile_row, tile_column, rows, columns, C, J, H, R, L, WORDS, EVEN, NATIVE,
                SAFE, FAST_WORDS,
            )  # fmt: skip
    return amax, amin, zeros, nans, infs, acc_a, acc_b, acc_c


@triton.jit
def beyond_fast(sums, most, memory, SPEC: tl.constexpr):
    """Say whether the fast pass of one cast left the range in which it is exact."""
    amax = one_of(most, 0)
    bad = (amax < INF) == 0
    if SPEC[1] == FROM_SCALE_INV:
        # x * scale may be Inf, y may be Inf, and y^2 may be below what FP32 holds.
        inv = tl.load(memory)
        bad = bad | (amax / inv > 1.0e30) | (inv < 8.8817841970012523e-16) | (inv > SAFE_ABOVE)
    if SPEC[5]:
        emax = one_of(most, 1)
        bad = bad | ((amax < SAFE_ABOVE) == 0) | (emax > SAFE_ABOVE) | ((emax > 0.0) & (emax < SAFE_BELOW * 0.0625))
        if SPEC[0] < KIND_TENSOR:
            bad = bad | (one_of(most, 6) > -SAFE_BELOW) | (one_of(most, 5) > FLOAT32_MAX)
        else:
            bad = bad | ((amax > 0.0) & (amax < SAFE_BELOW))
        if SPEC[1] != FROM_SCALE_INV:
            bad = bad | (one_of(sums, 3) < 0.25 * one_of(sums, 2))
    return bad


@triton.jit
def save(at, counts, sums, most, derive):
    """Store one cast's partials in the order that statistics reads; ``derive``: xy from the squares."""
    n = tl.arange(0, 8)
    product = (one_of(sums, 2) + one_of(sums, 3) - one_of(sums, 6)) * 0.5
    tl.store(at + n, counts)
    tl.store(at + 8 + n, tl.where((n == 4) & derive, product, sums))
    tl.store(at + 16 + n, most)


@triton.jit
def tile_kernel(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, partials, histograms, data_a, inv_a, mem_a, eps_a, margin_a,
    data_b, inv_b, mem_b, eps_b, margin_b, data_c, inv_c, mem_c, eps_c, margin_c, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, J: tl.constexpr, H: tl.constexpr, R: tl.constexpr, L: tl.constexpr, LOAD: tl.constexpr,
    EVEN: tl.constexpr, WORDS: tl.constexpr, STATS: tl.constexpr, HIST: tl.constexpr, NATIVE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """x ``[rows, columns]`` -> data, scale_inv and partials ``[programs, 3 casts, 24]`` (FP64) of casts A, B, C."""
    histogram = histograms + tl.program_id(0) * THREADS
    start_histogram(HIST, NATIVE)
    amax, amin, zeros, nans, infs, acc_a, acc_b, acc_c = all_tiles(
        x_ptr, stride, rows, columns, num_tiles, tile_columns, data_a, inv_a, mem_a, eps_a, margin_a, data_b, inv_b,
        mem_b, eps_b, margin_b, data_c, inv_c, mem_c, eps_c, margin_c, histogram, A, B, C, J, H, R, L, LOAD, EVEN, WORDS,
        STATS, HIST, NATIVE, False, PACKED, False,
    )  # fmt: skip
    counts_a, sums_a, most_a = summary(amax, amin, zeros, nans, infs, acc_a, A[0])
    counts_b, sums_b, most_b = summary(amax, amin, zeros, nans, infs, acc_b, B[0])
    counts_c, sums_c, most_c = summary(amax, amin, zeros, nans, infs, acc_c, C[0])
    bad = (one_of(most_a, 0) < INF) == 0
    if A[0] != KIND_NONE:
        bad = bad | beyond_fast(sums_a, most_a, mem_a, A)
    if B[0] != KIND_NONE:
        bad = bad | beyond_fast(sums_b, most_b, mem_b, B)
    if C[0] != KIND_NONE:
        bad = bad | beyond_fast(sums_c, most_c, mem_c, C)
    if bad:
        tl.debug_barrier()  # the safe pass writes the same addresses
        amax, amin, zeros, nans, infs, acc_a, acc_b, acc_c = all_tiles(
            x_ptr, stride, rows, columns, num_tiles, tile_columns, data_a, inv_a, mem_a, eps_a, margin_a, data_b, inv_b,
            mem_b, eps_b, margin_b, data_c, inv_c, mem_c, eps_c, margin_c, histogram, A, B, C, J, H, R, L, LOAD, EVEN,
            WORDS, STATS, False, NATIVE, True, PACKED, False,
        )  # fmt: skip
        counts_a, sums_a, most_a = summary(amax, amin, zeros, nans, infs, acc_a, A[0])
        counts_b, sums_b, most_b = summary(amax, amin, zeros, nans, infs, acc_b, B[0])
        counts_c, sums_c, most_c = summary(amax, amin, zeros, nans, infs, acc_c, C[0])
    if STATS:
        at = partials + tl.program_id(0) * COLUMNS_OF_PROGRAM
        ok = bad == 0
        save(at, counts_a, sums_a, most_a, ok & (A[1] != FROM_SCALE_INV))
        if B[5]:
            save(at + COLUMNS_OF_PARTIALS, counts_b, sums_b, most_b, ok & (B[1] != FROM_SCALE_INV))
        if C[5]:
            save(at + 2 * COLUMNS_OF_PARTIALS, counts_c, sums_c, most_c, ok & (C[1] != FROM_SCALE_INV))
    if HIST:
        store_histogram(histogram, NATIVE)

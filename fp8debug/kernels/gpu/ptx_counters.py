"""PTX that counts bit patterns of BF16 values in shared memory, in a window of magnitudes, beside other work.

What is done with the elements of a thread is described in ``ptx``.
"""

from __future__ import annotations

from fp8debug.kernels.gpu.ptx import WORDS

#: Magnitudes of the window: 40 binades.
WINDOW = 40 * 128
#: Counters: by magnitude and sign, and two that nobody reads for what lies outside.
_COUNTERS = 2 * WINDOW + 2


def start(threads: int) -> str:
    """Declare the counters of the window, and clear them; $1 is not used."""
    end = 4 * (_COUNTERS + -_COUNTERS % 4)
    return (
        f".shared .align 16 .b8 fp8debug_window[{end}];\n{{ .reg .b32 a, n, z; .reg .pred p; mov.u32 n, %tid.x; shl.b32 n, n, 4;"
        f" mov.u32 a, fp8debug_window; add.u32 a, a, n; mov.b32 z, 0; FP8DEBUG_CLEAR: setp.lt.u32 p, n, {end};"
        f" @p st.shared.v4.b32 [a], {{z, z, z, z}}; add.u32 a, a, {16 * threads}; add.u32 n, n, {16 * threads};"
        f" setp.lt.u32 p, n, {end}; @p bra FP8DEBUG_CLEAR; bar.sync 0; mov.b32 $0, n; }}"
    )


def sample() -> str:
    """$1 the address of 8 values -> the largest finite magnitude of them."""
    text = ["{ .reg .b32 w<4>, h, m; .reg .pred p; ld.global.v4.b32 {w0, w1, w2, w3}, [$1]; mov.b32 m, 0;"]
    for i in range(4):
        for half in (f"and.b32 h, w{i}, 0x7FFF", f"shr.u32 h, w{i}, 16; and.b32 h, h, 0x7FFF"):
            text.append(f" {half}; setp.lt.u32 p, h, 0x7F80; @p max.u32 m, m, h;")
    return "".join(text) + " mov.b32 $0, m; }"


def count(told: bool) -> str:
    """$1..16 words, $17 the window's first magnitude, above 0, $18 the table, and if ``told`` $19 -> nothing.

    $19: whether values that are not zero may lie outside the window. Counts every value in shared memory, and in the table those
    outside that are not zero.
    """
    text = ["{ .reg .b32 a, u, s, e, m, b, c, o; .reg .b64 g; .reg .pred p; mov.u32 a, fp8debug_window; mov.b32 o, 0;"]
    text.append(f" sub.u32 b, 0x10000, $17; mul.lo.u32 b, b, 0x10001; mov.b32 c, {WINDOW * 0x10001};")
    for i in range(1, WORDS + 1):
        text.append(f" and.b32 u, ${i}, 0x7FFF7FFF; add.u16x2 u, u, b; min.u16x2 u, u, c;")
        text.append("" if told else " max.u16x2 o, o, u;")
        text.append(f" shr.u32 s, ${i}, 13; and.b32 s, s, 0x00040004; mad.lo.u32 u, u, 8, s;")
        text.append(" and.b32 e, u, 0xFFFF; shr.u32 u, u, 16; add.u32 e, e, a; add.u32 u, u, a;")
        text.append(" red.shared.add.u32 [e], 1; red.shared.add.u32 [u], 1;")
    if told:
        text.append(" setp.eq.u32 p, $19, 0;")
    else:
        text.append(f" and.b32 u, o, 0xFFFF; shr.u32 o, o, 16; max.u32 o, o, u; setp.lt.u32 p, o, {WINDOW};")
    text.append(" @p bra FP8DEBUG_WITHIN;")
    for i in range(1, WORDS + 1):
        for half in (f"and.b32 e, ${i}, 0xFFFF", f"shr.u32 e, ${i}, 16"):
            text.append(f" {half}; and.b32 m, e, 0x7FFF; sub.u32 u, m, $17; setp.ge.u32 p, u, {WINDOW};")
            text.append(" setp.ne.and.u32 p, m, 0, p; shr.u32 e, e, 15; mad.lo.u32 m, m, 2, e; mad.wide.u32 g, m, 4, $18;")
            text.append(" @p red.global.add.u32 [g], 1;")
    return "".join(text) + " FP8DEBUG_WITHIN: mov.b32 $0, 0; }"


def stop(threads: int) -> str:
    """$1 the window's first magnitude, $2 the table -> nothing; adds the window to the table."""
    end = 2 * WINDOW
    return (
        "{ .reg .b32 a, n, v, i; .reg .b64 g; .reg .pred p, q; bar.sync 0; mov.u32 n, %tid.x; mov.u32 a, fp8debug_window;"
        " shl.b32 i, n, 2; add.u32 a, a, i; shl.b32 i, $1, 1; add.u32 i, i, n; mad.wide.u32 g, i, 4, $2;"
        f" FP8DEBUG_ADD: mov.u32 v, 0; setp.lt.u32 p, n, {end}; @p ld.shared.u32 v, [a]; setp.ne.u32 q, v, 0;"
        f" @q red.global.add.u32 [g], v; add.u32 a, a, {4 * threads}; add.u32 n, n, {threads}; add.s64 g, g, {4 * threads};"
        f" setp.lt.u32 p, n, {end}; @p bra FP8DEBUG_ADD; mov.b32 $0, n; }}"
    )

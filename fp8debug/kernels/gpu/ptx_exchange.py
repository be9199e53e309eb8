"""PTX by which a program of 16 warps hands a tile of 128 x 128 BF16 values on through shared memory, from rows to columns.

Thread (r, l) has words of row r, and gets those of column r: see ``ptx``. Neither of the two barriers is a meeting: a warp
says that it has written, or read, and goes on.
"""

from __future__ import annotations

#: Where the tile lies in the shared memory that a launch asks for, which Triton names and of which it uses the first bytes, and
#: how much of it is asked for.
TILE_AT, SHARED = 8192, 8192 + 32768
_TILE = f"global_smem+{TILE_AT}"


def start() -> str:
    """Declare two barriers of 16 warps, that a tile of 128 x 128 is full and that it is read; $1 is not used."""
    return (
        ".shared .align 8 .b64 fp8debug_full, fp8debug_read;\n"
        "{ .reg .b32 t; .reg .pred p; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p mbarrier.init.shared.b64 [fp8debug_full], 16;"
        " @p mbarrier.init.shared.b64 [fp8debug_read], 16; bar.sync 0; mov.b32 $0, t; }"
    )


def _passed(barrier: str, phase: str) -> str:
    """Wait for the end of a phase of a barrier; needs a predicate p."""
    return f" FP8DEBUG_WAIT: mbarrier.try_wait.parity.shared.b64 p, [{barrier}], {phase}; @!p bra FP8DEBUG_WAIT;"


def _arrived(barrier: str) -> str:
    """Say that a warp has come to a barrier; needs p, b and a b64 register s."""
    return f" bar.warp.sync 0xFFFFFFFF; mov.u32 b, %laneid; setp.eq.u32 p, b, 0; @p mbarrier.arrive.shared.b64 s, [{barrier}];"


def put() -> str:
    """$1..16 words of a row, $17 where to write, in bytes, $18 the number of the tile -> nothing.

    The matrices of 8 x 8 that a warp holds in one word of its lanes are stored as their transposes. A column's words lie in 256
    bytes, whose chunks of 16 are permuted so that no access meets in a bank. Waits until the tile before was read.
    """
    text = ["{ .reg .b32 a, b; .reg .b64 s; .reg .pred p; not.b32 b, $18; and.b32 b, b, 1;", _passed("fp8debug_read", "b")]
    text.append(f" mov.u32 a, {_TILE}; add.u32 a, a, $17;")
    for h in range(4):
        words = ", ".join(f"${4 * h + i + 1}" for i in range(4))
        text.append(f" stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [a+{8192 * h}], {{{words}}};")
    return "".join([*text, _arrived("fp8debug_full"), " mov.b32 $0, 0; }"])


def take() -> str:
    """$16 where to read, in bytes, $17 the number of the tile -> 16 words of a column; waits until the tile is full."""
    text = ["{ .reg .b32 a, b, c, d; .reg .b64 s; .reg .pred p; and.b32 b, $17, 1;", _passed("fp8debug_full", "b")]
    text.append(f" mov.u32 a, {_TILE}; add.u32 c, a, $16; xor.b32 d, $16, 64; add.u32 d, a, d;")
    for h in range(4):
        at = f"[{'cd'[h % 2]}+{128 * (h // 2)}]"
        text.append(f" ld.shared.v4.b32 {{${4 * h}, ${4 * h + 1}, ${4 * h + 2}, ${4 * h + 3}}}, {at};")
    return "".join([*text, _arrived("fp8debug_read"), " }"])


def start_sharing() -> str:
    """Declare what 16 warps share about a block of theirs, for two tiles and for four, and a barrier; $1 is not used."""
    return (
        ".shared .align 16 .b8 fp8debug_ends[128], fp8debug_sums[512];\n.shared .align 8 .b64 fp8debug_told;\n"
        "{ .reg .b32 t; .reg .pred p; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p mbarrier.init.shared.b64 [fp8debug_told], 16;"
        " bar.sync 0; mov.b32 $0, t; }"
    )


def send_ends() -> str:
    """$1 what ``ptx.extremes`` says of a row, $2 the number of the tile -> nothing; tells the other warps."""
    text = ["{ .reg .b32 a, b, m, t; .reg .b64 s; .reg .pred p; mov.b32 m, $1;"]
    for lane in (4, 8, 16):
        text.append(f" shfl.sync.bfly.b32 t, m, {lane}, 0x1F, 0xFFFFFFFF; max.u16x2 m, m, t;")
    text.append(
        " mov.u32 t, %tid.x; and.b32 b, t, 31; setp.eq.u32 p, b, 0; shr.u32 t, t, 5; and.b32 b, $2, 1; mad.lo.u32 t, b, 16, t;"
    )
    text.append(" mov.u32 a, fp8debug_ends; mad.lo.u32 a, t, 4, a; @p st.shared.b32 [a], m;")
    return "".join([*text, " @p mbarrier.arrive.shared.b64 s, [fp8debug_told]; mov.b32 $0, 0; }"])


def receive_ends() -> str:
    """$1 the number of the tile -> the same of its block; waits until all warps have told."""
    text = ["{ .reg .b32 a, b, m, t; .reg .pred p; and.b32 b, $1, 1;", _passed("fp8debug_told", "b")]
    text.append(" mov.u32 t, %tid.x; and.b32 t, t, 15; mad.lo.u32 t, b, 16, t; mov.u32 a, fp8debug_ends; mad.lo.u32 a, t, 4, a;")
    text.append(" ld.shared.b32 m, [a];")
    for lane in (1, 2, 4, 8):
        text.append(f" shfl.sync.bfly.b32 t, m, {lane}, 0x1F, 0xFFFFFFFF; max.u16x2 m, m, t;")
    return "".join([*text, " mov.b32 $0, m; }"])


def send_sums() -> str:
    """$1 and $2 sums of a thread, $3 the number of the tile -> nothing; leaves those of a warp for the others."""
    text = ["{ .reg .b32 a, b, t, x, y; .reg .pred p; mov.b32 x, $1; mov.b32 y, $2;"]
    for lane in (1, 2, 4, 8, 16):
        for sum in "xy":
            text.append(f" shfl.sync.bfly.b32 t, {sum}, {lane}, 0x1F, 0xFFFFFFFF; add.rn.f32 {sum}, {sum}, t;")
    text.append(
        " mov.u32 t, %tid.x; and.b32 b, t, 31; setp.eq.u32 p, b, 0; shr.u32 t, t, 5; and.b32 b, $3, 3; mad.lo.u32 t, b, 16, t;"
    )
    return "".join([*text, " mov.u32 a, fp8debug_sums; mad.lo.u32 a, t, 8, a; @p st.shared.v2.b32 [a], {x, y}; mov.b32 $0, 0; }"])


def receive_sums() -> str:
    """$2 the number of a tile -> both sums of its block, in one of the warps; in the others, and of no tile, zeros.

    What ``send_sums`` left of a tile may be read once the ends of the tile after the next were read.
    """
    text = ["{ .reg .b32 a, b, t, x, y; .reg .pred p; mov.b32 x, 0; mov.b32 y, 0; mov.u32 t, %tid.x; shr.u32 b, t, 5;"]
    text.append(" xor.b32 b, b, $2; and.b32 b, b, 0x8000000F; setp.ne.u32 p, b, 0; @p bra FP8DEBUG_OTHERS; and.b32 b, $2, 3;")
    text.append(" and.b32 t, t, 15; mad.lo.u32 t, b, 16, t; mov.u32 a, fp8debug_sums; mad.lo.u32 a, t, 8, a;")
    text.append(" ld.shared.v2.b32 {x, y}, [a];")
    for lane in (1, 2, 4, 8):
        for sum in "xy":
            text.append(f" shfl.sync.bfly.b32 t, {sum}, {lane}, 0x1F, 0xFFFFFFFF; add.rn.f32 {sum}, {sum}, t;")
    return "".join([*text, " FP8DEBUG_OTHERS: mov.b32 $0, x; mov.b32 $1, y; }"])

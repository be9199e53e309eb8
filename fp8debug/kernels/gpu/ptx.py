"""PTX of the fast pass, where a thread holds 32 elements of one block as 16 words of two BF16 values.

Four neighbouring lanes share a row of 128 elements: lane l has elements ``32 h + 8 l`` and the next 7 for h = 0..3. Each text is
one ``inline_asm_elementwise`` whose every element is a thread; shuffles need whole warps, which it gives.
"""

from __future__ import annotations

import struct

from fp8debug.formats import FORMATS

WORDS = 16
_HALVES = ("0x5410", "0x7632")


def _copies(first: int, names: list[str]) -> str:
    return "".join(f" mov.b32 ${first + i}, {name};" for i, name in enumerate(names))


def load_rows() -> str:
    """$16 the address of a thread's first element -> 16 words."""
    return "".join(
        f" ld.global.v4.b32 {{${4 * h}, ${4 * h + 1}, ${4 * h + 2}, ${4 * h + 3}}}, [$16+{64 * h}];" for h in range(4)
    ).join(("{", " }"))


def load_columns() -> str:
    """$16 the address of 8 elements of a row, $17 bytes to the next row -> four rows, 4 words each."""
    text = "{ .reg .b64 a; mov.b64 a, $16;"
    for i in range(4):
        text += f" ld.global.v4.b32 {{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}}, [a];"
        text += " add.s64 a, a, $17;" if i < 3 else ""
    return text + " }"


def start_turning(columns: int) -> str:
    """Declare two buffers for a tile of so many columns, one for 128; $1 is not used."""
    return f".shared .align 16 .b8 fp8debug_turned[{256 * columns * (1 + (columns < 128))}];\n{{ mov.b32 $0, 0; }}"


def turn(alone: bool) -> str:
    """$16..31 from ``load_columns``, $32 where to write, $33 where to read, in bytes -> words of two rows of one column.

    ``alone``: the only buffer, which others may still read. A column's words lie in 256 bytes, whose chunks of 16 are permuted so
    that no access meets in a bank.
    """
    text = ["{ bar.sync 0;" if alone else "{"]
    text.append(" .reg .b32 a, b, c, d, s; mov.u32 s, fp8debug_turned; add.u32 a, s, $32; xor.b32 b, $32, 64; add.u32 b, s, b;")
    text.append(" .reg .b32 p, q;")
    for j in range(8):
        word, half = j // 2, _HALVES[j % 2]
        rows = [f"${16 + 4 * i + word}" for i in range(4)]
        text.append(f" prmt.b32 p, {rows[0]}, {rows[1]}, {half}; prmt.b32 q, {rows[2]}, {rows[3]}, {half};")
        text.append(f" st.shared.v2.b32 [{'ab'[j % 2]}+{256 * j}], {{p, q}};")
    text.append(" bar.sync 0; add.u32 c, s, $33; xor.b32 d, $33, 64; add.u32 d, s, d;")
    for h in range(4):
        at = f"[{'cd'[h % 2]}+{128 * (h // 2)}]"
        text.append(f" ld.shared.v4.b32 {{${4 * h}, ${4 * h + 1}, ${4 * h + 2}, ${4 * h + 3}}}, {at};")
    return "".join(text) + " }"


def extremes() -> str:
    """$1..16 words -> $0: of four lanes, the largest magnitude and, above it, 0x7FFF minus the smallest; NaN is the largest."""
    text = ["{ .reg .b32 m<16>, n<16>, t;"]
    left, right = [f"${i}" for i in range(1, 17)], [f"${i}" for i in range(1, 17)]
    k = 0
    while len(left) > 1:
        for i in range(len(left) // 2):
            text.append(f" max.NaN.xorsign.abs.bf16x2 m{k}, {left[2 * i]}, {left[2 * i + 1]};")
            text.append(f" min.xorsign.abs.bf16x2 n{k}, {right[2 * i]}, {right[2 * i + 1]};")
            left[i], right[i] = f"m{k}", f"n{k}"
            k += 1
        del left[len(left) // 2 :], right[len(right) // 2 :]
    text.append(f" and.b32 m15, {left[0]}, 0x7FFF7FFF; not.b32 n15, {right[0]}; and.b32 n15, n15, 0x7FFF7FFF;")
    text.append(" prmt.b32 m0, m15, n15, 0x5410; prmt.b32 n0, m15, n15, 0x7632; max.u16x2 m0, m0, n0;")
    for lane in (1, 2):
        text.append(f" shfl.sync.bfly.b32 t, m0, {lane}, 0x1F, 0xFFFFFFFF; max.u16x2 m0, m0, t;")
    return "".join(text) + " mov.b32 $0, m0; }"


#: $1 / $2 to nearest, as div.rn makes it while neither is near the ends of FP32's range.
QUOTIENT = (
    "{ .reg .b32 y, n, e, q; rcp.approx.ftz.f32 y, $2; neg.f32 n, $2; fma.rn.f32 e, n, y, 0f3F800000; fma.rn.f32 y, y, e, y;"
    " mul.rn.f32 q, $1, y; fma.rn.f32 e, n, q, $1; fma.rn.f32 $0, y, e, q; }"
)


def quotient_of(top: float) -> str:
    """The same of a constant and $1."""
    constant = f"0f{struct.pack('>f', top).hex().upper()}"
    return (
        "{ .reg .b32 y, n, e, q; rcp.approx.ftz.f32 y, $1; neg.f32 n, $1; fma.rn.f32 e, n, y, 0f3F800000; fma.rn.f32 y, y, e, y;"
        f" mul.rn.f32 q, y, {constant}; fma.rn.f32 e, n, q, {constant}; fma.rn.f32 $0, y, e, q; }}"
    )


#: 1, and the largest values of E4M3 and E5M2, over $1.
INVERSE, OF_E4M3, OF_E5M2 = (quotient_of(top) for top in (1.0, FORMATS["e4m3fn"].max, FORMATS["e5m2"].max))
LOG2 = "lg2.approx.ftz.f32 $0, $1;"
ABOUT = "{ .reg .b32 y; rcp.approx.ftz.f32 y, $2; mul.rn.f32 $0, $1, y; }"


def element_pass(e5m2: bool, store: bool, statistics: bool, own: bool = True) -> str:
    """The whole of what is done with a thread's elements once their scale is known.

    Inputs after the outputs: 16 words, scale, address of the codes; with statistics also scale_inv, whether codes below the
    smallest normal may occur, and the magnitude (BF16 bits) to report as amin where there are only zeros.
    Outputs: without statistics a dummy; else sum x (0 unless ``own``), x^2, y^2, err, err^2, max abs err, zeros | codes of zero
    << 16, codes below the smallest normal, smallest nonzero magnitude (the last three valid where codes may be small).
    """
    kind = "e5m2" if e5m2 else "e4m3"
    first = 9 if statistics else 1
    w = [f"${first + i}" for i in range(WORDS)]
    scale, to = f"${first + 16}", f"${first + 17}"
    inv, small, rest = (f"${first + 18 + i}" for i in range(3))
    text = ["{ .reg .b16 l, h, lo, hi, ha, hb, hc, hd; .reg .b32 p, q, xa, xb, xc, xd, za, zb, zc, zd, k<8>;"]
    if statistics:
        text.append(" .reg .b32 s, n, t, g, m, f0, f1; mov.b32 s, 0; mov.b32 n, 0; mov.b32 t, 0; mov.b32 g, 0; mov.b32 m, 0;")
        text.append(" mov.b32 f0, 0; mov.b32 f1, 0;")
    for i in range(8):
        low, high = w[2 * i], w[2 * i + 1]
        text.append(
            f" shl.b32 xa, {low}, 16; and.b32 xb, {low}, 0xFFFF0000; shl.b32 xc, {high}, 16; and.b32 xd, {high}, 0xFFFF0000;"
        )
        text.append("".join(f" mul.rn.f32 z{c}, x{c}, {scale};" for c in "abcd"))
        text.append(f" cvt.rn.satfinite.{kind}x2.f32 l, zb, za; cvt.rn.satfinite.{kind}x2.f32 h, zd, zc; mov.b32 k{i}, {{l, h}};")
        if store and i % 2:
            text.append(f" st.global.v2.b32 [{to}+{32 * (i // 2)}], {{k{i - 1}, k{i}}};")
        if not statistics:
            continue
        text.append(f" mov.b32 {{lo, hi}}, k{i}; cvt.rn.f16x2.{kind}x2 p, lo; cvt.rn.f16x2.{kind}x2 q, hi;")
        text.append(" mov.b32 {ha, hb}, p; mov.b32 {hc, hd}, q;")
        for c in "abcd":
            text.append(f" cvt.f32.f16 z{c}, h{c}; mul.rn.f32 z{c}, z{c}, {inv}; fma.rn.f32 g, z{c}, z{c}, g;")
            text.append(f" sub.rn.f32 z{c}, z{c}, x{c}; add.rn.f32 t, t, z{c}; fma.rn.f32 n, z{c}, z{c}, n;")
            text.append(f" fma.rn.f32 s, x{c}, x{c}, s; abs.f32 z{c}, z{c}; max.f32 m, m, z{c};")
        if own:
            text.append(" add.rn.f32 f0, f0, xa; add.rn.f32 f1, f1, xb; add.rn.f32 f0, f0, xc; add.rn.f32 f1, f1, xd;")
    if not statistics:
        return "".join(text) + " mov.b32 $0, 0; }"
    text.append(" .reg .b32 a, v, z, o, u, r, one, less; .reg .pred p0; mov.b32 v, 0; mov.b32 r, 0; mov.b32 o, 0;")
    text.append(f" setp.eq.s32 p0, {small}, 0; @p0 bra FP8DEBUG_NORMAL; mov.b32 z, 0; mov.b32 o, 0xFFFFFFFF; mov.b32 a, 0;")
    text.append(" mov.b32 one, 0x00010001; mov.b32 less, 0xFFFFFFFF;")
    for word in w:
        text.append(f" and.b32 xa, {word}, 0x7FFF7FFF; min.u16x2 u, xa, one; add.u32 z, z, u;")
        text.append(" add.u16x2 xa, xa, less; min.u16x2 o, o, xa;")
    normal = "0x7C7C7C7C" if e5m2 else "0x78787878"
    for i in range(8):
        text.append(f" and.b32 xa, k{i}, 0x7F7F7F7F; add.u32 u, xa, {normal}; add.u32 xa, xa, 0x7F7F7F7F; shr.u32 u, u, 3;")
        text.append(
            " shr.u32 xa, xa, 7; and.b32 xa, xa, 0x01010101; and.b32 u, u, 0x10101010; or.b32 xa, xa, u; add.u32 a, a, xa;"
        )
    text.append(" and.b32 xa, a, 0x0F0F0F0F; mul.lo.u32 xa, xa, 0x01010101; shr.u32 u, a, 4; and.b32 u, u, 0x0F0F0F0F;")
    text.append(" mul.lo.u32 u, u, 0x01010101; shr.u32 xa, xa, 24; shr.u32 u, u, 24; sub.u32 r, 32, u; sub.u32 xa, 32, xa;")
    text.append(
        " and.b32 v, z, 0xFFFF; shr.u32 u, z, 16; add.u32 v, v, u; sub.u32 v, 32, v; shl.b32 xa, xa, 16; or.b32 v, v, xa;"
    )
    text.append(" and.b32 xa, o, 0xFFFF; shr.u32 u, o, 16; min.u32 o, xa, u; add.u32 o, o, 1;")
    text.append(f" setp.gt.u32 p0, o, 0x7FFF; selp.b32 o, {rest}, o, p0; FP8DEBUG_NORMAL: add.rn.f32 f0, f0, f1;")
    return "".join(text) + _copies(0, ["f0", "s", "g", "t", "n", "m", "v", "r", "o"]) + " }"

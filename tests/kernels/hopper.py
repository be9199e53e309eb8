"""Compiles the kernels for Hopper where there is no GPU: ``python tests/kernels/hopper.py [--all [--part 1/6]] [--only NAME]``.

With ``--ada`` for the GPUs before it, of those kernels that are started there.

The launchers themselves say what is compiled: they run on tensors in host memory, under a driver that names an H100 or H200, and
what they would compile is noted in place of being compiled (``recorded``). What they start a kernel with is checked against what
it was compiled for: grid, types, widths and alignments, at the first launch and at those after it. Then Triton's compiler and
the ``ptxas`` of its wheel make machine code of each (``built``); ``cuobjdump`` and ``nvdisasm`` tell its registers and spills.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8debug.formats import block_shape
from fp8debug.kernels.gpu import launcher
from fp8debug.kernels.gpu.amax_history import next_scale_inv
from fp8debug.kernels.gpu.describe.foreign_codes import describe
from fp8debug.kernels.gpu.describe.value_counts import ValueCounts, takes
from fp8debug.kernels.gpu.describe.what_if import observe
from fp8debug.kernels.gpu.gemm.error import compare, damage, row_slots
from fp8debug.kernels.gpu.gemm.gemm import gemm
from fp8debug.kernels.gpu.gemm.sampled import columns_of, dequantize_lines
from fp8debug.kernels.gpu.launcher import address
from fp8debug.kernels.gpu.low_bit.plan import quantize as quantize_low_bit
from fp8debug.kernels.gpu.quantize.quantize import quantize
from fp8debug.kernels.gpu.quantize.tile_plan import plan_of
from fp8debug.kernels.gpu.quantize.tiling import OPERAND, is_hopper
from fp8debug.kernels.gpu.quantize.two_way_plan import two_way_plan_of
from fp8debug.kernels.gpu.scratch import flush, pool
from fp8debug.kernels.gpu.step_end import KINDS, Joiner, StateSender, send_number
from fp8debug.kernels.sampling import Sample, num_exact, size_of_groups, spread_lines
from fp8debug.metrics import Source
from fp8debug.recipes import Cast, Recipe, get_recipe
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized, TensorRole
from tests.kernels.machine_code import resources

TARGET = GPUTarget("cuda", 90, 32)
SMS = 132
CPU = torch.device("cpu")
#: Tokens, out_features and in_features of a layer that is large, and of one that fits no tile.
LARGE, RAGGED = (8192, 4096, 14336), (37, 1106, 133)
TILE, BLOCK = Cast(granularity="1x128"), Cast(granularity="128x128")
NVFP4 = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor")


class Planned:
    """A kernel that was asked for, and in its place: it takes what it is started with, and checks it.

    Args:
        name: of the kernel.
        source: what is compiled.
        options: of the compiler.
    """

    launch_cooperative_grid = launch_pdl = None
    function = global_scratch_size = profile_scratch_size = 0
    packed_metadata = 4, 1, 0  # warps, programs of a cluster, bytes of shared memory that a launch asks for

    def __init__(self, name: str, source: Any, options: dict[str, Any]) -> None:
        self.name, self.source, self.options = name, source, options
        self.num_launches = 0

    @property
    def run(self) -> Planned:
        """Kernel as Triton starts it."""
        return self

    def _init_handles(self) -> None:
        """Have it loaded."""

    def launch_metadata(self, *_: object) -> None:
        """Triton asks for it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.check(grid, arguments)

    def __call__(self, x: int, y: int, z: int, *arguments: Any) -> None:
        self.check((x, y, z), arguments[6:])  # stream, function, two of metadata, two hooks

    def launch(self, x: int, y: int, z: int, *arguments: Any) -> None:
        """Take what ``launcher`` hands to the launcher in C of Triton 3.6."""
        self.check((x, y, z), arguments[10:])  # and whether grid and launch are special, two of scratch memory

    def check(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Say what a launch has that the kernel was not compiled for, or that no GPU takes."""
        self.num_launches += 1
        x, y, z = (*grid, 1, 1)[:3]
        assert 0 < x < 2**31 and 0 < y < 2**16 and 0 < z < 2**16, (self.name, grid)
        signature, constants, attributes = self.source.signature, self.source.constants, self.source.attrs
        assert len(arguments) == len(signature), (self.name, len(arguments), len(signature))
        for i, ((argument, kind), value) in enumerate(zip(signature.items(), arguments, strict=True)):
            where = self.name, argument, kind, value
            if kind == "constexpr":
                assert value == constants[(i,)], where
                continue
            if kind.startswith("tensordesc"):
                continue
            aligned = ["tt.divisibility", 16] in attributes.get((i,), [])
            if kind.startswith("*"):
                value = value if isinstance(value, int) else value.data_ptr()
            elif kind == "fp32":
                assert isinstance(value, float), where
                continue
            else:
                assert type(value) is int and -(2 ** (int(kind[1:]) - 1)) <= value < 2 ** (int(kind[1:]) - 1), where
            assert not aligned or value % 16 == 0, where


@contextmanager
def recorded() -> Iterator[list[Planned]]:
    """Note what is compiled while this is open, in place of compiling it, once each."""
    found: list[Planned] = []

    def note(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: Any
    ) -> Planned:
        planned = Planned(self.fn.__name__, ASTSource(self, signature, constants, attributes), dict(options.__dict__))
        self.device_caches[device][0][key] = planned
        found.append(planned)
        return planned

    def here(*_: object) -> int:
        return 0

    before = driver._active
    properties = SimpleNamespace(multi_processor_count=SMS)
    with ExitStack() as stack:
        stack.callback(driver.set_active, before)
        driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET, get_current_device=here, get_current_stream=here))
        stack.enter_context(patch.object(JITFunction, "_do_compile", note))
        stack.enter_context(patch.object(torch.cuda, "current_device", here))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: (TARGET.arch // 10, TARGET.arch % 10)))
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda *_: properties))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", here, create=True))
        stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        stack.enter_context(patch.object(launcher, "_driver", lambda: SimpleNamespace(cuFuncSetAttribute=here)))
        yield found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor whose values nobody asks for."""
    return torch.empty(shape, dtype=dtype)


def casts(x: Tensor, cast: Cast, layout: str = "rows", *, statistics: bool = False, histogram: bool = False) -> None:
    """Quantize twice, by the plan that the first call left; and have the statistics wait."""
    for _ in range(2):
        quantize(x, cast, layout=layout, statistics=statistics, histogram=histogram)
    plan = plan_of(x, cast, layout, statistics)
    if plan is not None:
        for later in (False, True, True) if statistics else (False,):
            plan(x, later)
        if plan.counting is not None:
            for _ in range(2):
                plan.counting(x, True, address(empty(1 << 16, dtype=torch.int32)))


def low_bits(x: Tensor, *casts: Cast) -> None:
    """Casts without an FP8 unit, twice each, with statistics and without."""
    for cast in casts:
        for statistics in (False, True):
            for _ in range(2):
                quantize_low_bit(x, cast, statistics=statistics)


def pair(x: Tensor, rows: Cast, columns: Cast) -> None:
    """Quantize along rows and columns at once, twice each way."""
    for statistics in (False, True) if is_hopper(CPU) and launcher.can_share() else ():
        plan = two_way_plan_of(x, rows, columns, statistics)
        assert plan is not None
        for later in (False, False, True, True) if statistics else (False, False):
            plan(x, later)
            if plan.counting is not None:
                plan.counting(x, later, address(empty(1 << 16, dtype=torch.int32)))


def operands(which: Gemm, sizes: tuple[int, int, int], recipe: Recipe) -> tuple[list[Tensor], list[Any]]:
    """The operands of a GEMM, before the cast and after."""
    m, n, k = sizes
    shapes = {TensorRole.INPUT: (m, k), TensorRole.WEIGHT: (n, k), TensorRole.GRAD_OUTPUT: (m, n)}
    high, quantized = [], []
    for role in OPERANDS[which]:
        cast = recipe.casts[which, role]
        assert cast is not None
        x = empty(*shapes[role])
        high.append(x)
        layout = "columns" if (which, role) in CONTRACTS_ROWS else "rows"
        quantized.append((quantize(x, cast, layout=layout)[0], cast))
    return high, quantized


def result(
    which: Gemm, sizes: tuple[int, int, int], recipe: str, count: int = 256, *, actual: bool = True, has_bias: bool = False
) -> None:
    """Multiply, and describe the result, twice; fprop's damage and rows of its weight too."""
    high, (first, second) = operands(which, sizes, get_recipe(recipe))
    product = gemm(which, first, second)
    m, _, k = sizes
    turned = which is Gemm.WGRAD
    length = k if turned else m
    size = size_of_groups(min(count, length), length) if turned else 1
    lines = spread_lines(min(count, length), length, size, CPU)
    sample = Sample(lines, 3 if actual else None, size, 0)
    near = columns_of(high[1], lines, size) if turned else high[1]
    bias = empty(product.shape[1]) if has_bias else None
    for _ in range(2):
        keep = actual and not turned
        found = compare(which, (high[0], near), (first, second), product if actual else None, sample, bias=bias, keep=keep)
        assert found is not None
        if found[1] is not None and which is Gemm.FPROP:
            damage(found[1], product, lines)
            damage(found[1], product[: num_exact(len(lines))])
    if which is Gemm.FPROP:
        (data, scale_inv), cast = second
        for _ in range(2):
            row_slots(high[1], data, scale_inv, block_shape(cast.granularity, *high[1].shape), lines % high[1].shape[0])
            dequantize_lines(data, scale_inv, block_shape(cast.granularity, *high[1].shape), 0, lines % high[1].shape[0])
    flush(CPU)


def counted(x: Tensor) -> None:
    """Tensorwise casts of many tensors, as the default what-ifs are."""
    value_counts = ValueCounts(CPU)
    if not takes(x, [Cast()]):
        return
    some = (Cast(), Cast(scaling="delayed"), Cast(scaling="delayed", history=16, algo="most_recent"))
    for part in range(2):
        value_counts.what_if(x, {str(cast): cast for cast in some}, part)
        value_counts.flush()


def given(x: Tensor, cast: Cast, *, transposed: bool = False) -> None:
    """Describe a tensor twice beside codes of another library, stored row by row or column by column."""
    rows, columns = x.shape
    block = block_shape(cast.granularity, rows, columns)
    dtype = torch.float8_e5m2 if cast.format == "e5m2" else torch.float8_e4m3fn
    data = empty(columns, rows, dtype=dtype).t() if transposed else empty(rows, columns, dtype=dtype)
    scale_inv = empty(-(-rows // block[0]), -(-columns // block[1]), dtype=torch.float32)
    for _ in range(2):
        assert describe(Source(x), cast, Quantized(data, scale_inv)) is not None


def joined() -> None:
    """Rows of words to a table, twice."""
    state = {kind: torch.zeros(8, 40, dtype=getattr(torch, kind[0])) for kind in KINDS}
    columns = {name: i for group in OPERAND.groups for i, name in enumerate(group.names)}
    joiner = Joiner(state, columns)
    for rows in (1, 3):
        taken = [pool(CPU).allocate() for _ in range(rows)]
        joiner([n for i, row in enumerate(taken) for n in (row.address, i, joiner.number(OPERAND))])


def leaving() -> None:
    """A step's state and numbers, twice."""
    state = empty(1 << 12, dtype=torch.uint8)
    sender, host = StateSender(state, state.clone()), empty(1, dtype=torch.float64)
    for _ in range(2):
        sender(state.clone())
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for value in empty(2, dtype=dtype):
                assert send_number(value, host)


def usual() -> None:
    """Launch what a watched step of a large layer does, and some of every other kernel."""
    m, n, _ = LARGE
    x = empty(m, n)
    for cast, layout in ((TILE, "rows"), (Cast(granularity="128x1"), "columns"), (BLOCK, "rows")):
        for statistics in (False, True):
            casts(x, cast, layout, statistics=statistics)
    pair(x, TILE, Cast(granularity="128x1"))
    casts(empty(37, 131), Cast(), statistics=True)
    casts(x, Cast(granularity="rowwise"), statistics=True)
    low_bits(x, NVFP4, replace(NVFP4, rounding="stochastic"))
    counted(x)
    for _ in range(2):
        observe(x, [TILE, Cast(scaling="delayed")], [None, torch.ones(1)], histogram=True)
    for cast, transposed in ((TILE, False), (Cast(granularity="128x1"), True), (BLOCK, False)):
        given(x, cast, transposed=transposed)
    flush(CPU)
    joined()
    leaving()
    state = empty(52, dtype=torch.float32)
    for use in ("evaluate", "train", "recompute"):
        next_scale_inv(Cast(scaling="delayed", history=16), state[0], state, use, 16)
    for which in (Gemm.FPROP, Gemm.WGRAD):
        result(which, LARGE, "blockwise")
    result(Gemm.FPROP, LARGE, "blockwise", has_bias=True)


def rest() -> None:
    """Other casts, formats, layouts, shapes and recipes, as the tests and the benches have them."""
    m, n, _ = LARGE
    large, ragged, odd = empty(m, n), empty(37, 131), empty(96, 264)
    for x in (large, ragged, empty(96, 264, dtype=torch.float32)):
        for name in ("1x16", "16x1", "16x16", "1x32", "32x1", "1x128", "128x1", "128x128"):
            low_bits(x, replace(NVFP4, granularity=name), Cast(format="e3m2fn", granularity=name, scale_format="e8m0"))
        low_bits(x, replace(NVFP4, four_over_six=True), replace(NVFP4, tensor_scale="row", hadamard=16, rounding="stochastic"))
        low_bits(x, Cast(format="e4m3fnuz"), Cast(format="e5m2fnuz", rounding="stochastic"))
    casts(large, BLOCK, "columns", statistics=True)
    casts(large, BLOCK, "columns")
    for x in (ragged, odd, empty(256, 384), large):
        for name in ("1x128", "128x1", "128x128", "1x32", "32x1", "tensorwise", "rowwise", "columnwise"):
            for layout in ("rows", "columns"):
                casts(x, Cast(granularity=name), layout, statistics=True)
                casts(x, Cast(granularity=name, format="e5m2", scale_rounding="pow2_floor"), layout)
    for dtype in (torch.float16, torch.float32):
        for x in (empty(128, 128, dtype=dtype), empty(37, 131, dtype=dtype)):
            casts(x, TILE, statistics=True)
            casts(x, Cast(granularity="128x1"), "columns", statistics=True)
    for rounding in ("pow2_ceil", "pow2_floor"):
        for name in ("1x128", "128x128", "tensorwise"):
            casts(odd, Cast(granularity=name, scale_rounding=rounding), statistics=True)
            casts(large, Cast(granularity=name, scale_rounding=rounding), statistics=True)
    casts(large, TILE, statistics=True, histogram=True)
    delayed, one = Cast(scaling="delayed"), torch.ones(1)
    for histogram in (False, True):
        observe(large, [TILE], histogram=histogram)
        observe(large, [TILE, BLOCK, delayed], [None, None, one], histogram=histogram)
        observe(large, [TILE, Cast(granularity="128x1"), Cast(granularity="rowwise")], histogram=histogram)
    for x in (large, ragged, empty(1, 1), odd.t(), empty(37, 131, dtype=torch.float16), empty(96, 264, dtype=torch.float32)):
        for name in ("1x128", "128x1", "128x128", "1x32", "32x1", "tensorwise", "rowwise", "columnwise"):
            for transposed in (False, True):
                given(x, Cast(granularity=name, format="e5m2" if transposed else "e4m3fn"), transposed=transposed)
    flush(CPU)
    counted(empty(40, 66))
    for sizes in (LARGE, (512, 256, 384), RAGGED, (40, 1100, 70)):
        for which in Gemm:
            for recipe in ("blockwise", "tensorwise_current", "rowwise", "blockwise_pow2"):
                for count, actual in ((256, True), (1, True), (256, False)):
                    result(which, sizes, recipe, count, actual=actual)


def built(planned: Planned) -> dict[str, Any]:
    """Compile a kernel, and tell what it takes of a multiprocessor; names what failed."""
    start = time.perf_counter()
    found: dict[str, Any] = {"kernel": planned.name, "launches": planned.num_launches}
    constants = {k[0]: v for k, v in planned.source.constants.items() if len(k) == 1}
    names = list(planned.source.signature)
    found["constants"] = {names[i]: value for i, value in constants.items()}
    found["types"] = {name: kind for name, kind in planned.source.signature.items() if kind != "constexpr"}
    found |= {name: planned.options[name] for name in ("num_warps", "num_stages", "maxnreg")}
    try:
        compiled = triton.compile(planned.source, target=TARGET, options=planned.options)
    except Exception as error:
        return {**found, "error": f"{type(error).__name__}: {str(error).strip()[-600:]}"}
    found |= {"shared": compiled.metadata.shared, "asked": planned.packed_metadata[2], **resources(compiled.asm["cubin"])}
    found["scratch"] = [getattr(compiled.metadata, f"{kind}_scratch_size") for kind in ("global", "profile")]
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def main() -> int:
    """Compile what is asked for and print a line of JSON for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="casts, shapes and recipes of all tests, too")
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--part", default="1/1", help="the first of four is 1/4")
    parser.add_argument("--list", action="store_true", help="name them and compile nothing")
    parser.add_argument("--release", default=triton.__version__, help="start them as with this release of Triton")
    parser.add_argument("--ada", action="store_true", help="for sm_89")
    asked = parser.parse_args()
    global TARGET
    TARGET = GPUTarget("cuda", 89 if asked.ada else 90, 32)
    triton.__version__ = asked.release
    with recorded() as plans:
        usual()
        if asked.all:
            rest()
    part, parts = map(int, asked.part.split("/"))
    plans = [planned for planned in plans if asked.only in planned.name][part - 1 :: parts]
    failed = 0
    for planned in plans:
        found = {"kernel": planned.name, "launches": planned.num_launches} if asked.list else built(planned)
        failed += "error" in found
        print(json.dumps(found, default=str), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

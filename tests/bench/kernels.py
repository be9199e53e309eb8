"""Check and time the kernels on a GPU: ``python tests/bench/kernels.py [casts] [low_bit] [gemm] [samples]``; asserts no times.

Times are medians of CUDA-graph replays over rotating inputs larger than the L2 together; speeds are relative to what the
row names. Data are random: products run faster on zeros.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8debug.kernels import dispatch, reference
from fp8debug.kernels.dispatch import describe, quantize_observed
from fp8debug.kernels.gpu.describe.value_counts import ValueCounts
from fp8debug.kernels.gpu.describe.value_counts_kernel import COUNT_WARPS, count_kernel
from fp8debug.kernels.gpu.describe.what_if import observe
from fp8debug.kernels.gpu.gemm.error import compare
from fp8debug.kernels.gpu.gemm.gemm import gemm
from fp8debug.kernels.gpu.gemm.sampled import Products, columns_of, products_of
from fp8debug.kernels.gpu.quantize.quantize import quantize
from fp8debug.kernels.gpu.quantize.tile_plan import fast_plan_of
from fp8debug.kernels.gpu.quantize.tiling import Job
from fp8debug.kernels.gpu.quantize.two_way_plan import two_way_plan_of
from fp8debug.kernels.gpu.scratch import flush
from fp8debug.kernels.sampling import Sample, num_exact, size_of_groups, spread_lines
from fp8debug.metrics import Source
from fp8debug.recipes import Cast, get_recipe
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized, TensorRole

ROTATE = 4
MANY = 24
TILE = Cast(granularity="1x128")
DOWN = Cast(granularity="128x1")
BLOCK = Cast(granularity="128x128")
DELAYED = Cast(scaling="delayed")


def microseconds(call: Callable[[int], object], repeats: int = 15, inner: int = 3) -> float:
    """Median time of one call; ``call(i)`` works on input i."""
    for i in range(ROTATE):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            for i in range(ROTATE):
                call(i)
    times = []
    for _ in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (ROTATE * inner))
    return float(sorted(times[2:])[repeats // 2])


def queued(call: Callable[[int], object], finish: Callable[[], object], repeats: int = 7, count: int = MANY) -> float:
    """Median time of a call of many, ``finish`` after the last included, on a GPU that is kept busy until all are issued."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(40_000_000)
        start.record()
        for i in range(count):
            call(i)
        finish()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / count)
    return float(sorted(times[2:])[repeats // 2])


def report(name: str, time: float, base: float | None = None, unit: str = "x") -> None:
    """Print one row."""
    ratio = "" if base is None else f"{time / base:6.2f} {unit}"
    print(f"{name:58} {time:9.1f} us {ratio}", flush=True)


def casts(rows: int = 8192, columns: int = 4096) -> None:
    """Quantize with and without statistics, and observe, on one activation."""
    torch.manual_seed(0)
    inputs = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(ROTATE)]
    x = inputs[0]
    q, found = quantize(x, TILE, statistics=True, histogram=True)
    expected = reference.quantize(x, TILE)
    assert torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(q.scale_inv, expected.scale_inv)
    wanted = reference.statistics(reference.operand_pair(x, TILE, expected))
    assert found is not None
    for name, value in found.slots().items():
        if not torch.equal(value, wanted[name]):
            print("  differs:", name, value.item(), wanted[name].item())
    del expected, wanted
    copies = [torch.empty_like(x) for _ in range(2)]
    copy = microseconds(lambda i: copies[i % 2].copy_(inputs[i]))
    floor = copy / 2
    report(f"read floor of bf16[{rows}, {columns}] (half a copy)", floor)
    scale = torch.full((1,), 0.01, device="cuda")
    plain = microseconds(lambda i: quantize(inputs[i], TILE))
    report("quantize 1x128", plain, floor, "of floor")
    report("quantize 1x128 + statistics", microseconds(lambda i: quantize(inputs[i], TILE, statistics=True)), plain, "of plain")
    full = queued(lambda i: quantize_observed(inputs[i % ROTATE], TILE, deferred=True), partial(flush, x.device))
    report("the same as in a watched step, 24 tensors joined at once", full, plain, "of plain")
    alone, together = (two_way_plan_of(x, TILE, DOWN, statistics) for statistics in (False, True))
    assert alone is not None and together is not None
    both = microseconds(lambda i: alone(inputs[i]))
    report("quantize 1x128 and 128x1 transposed", both, floor, "of floor")
    report(
        "quantize 1x128 and 128x1 transposed + statistics",
        microseconds(lambda i: together(inputs[i])),
        both,
        "of plain",
    )
    full = queued(lambda i: together(inputs[i % ROTATE], True), partial(flush, x.device))
    report("the same as in a watched step, 24 tensors joined at once", full, both, "of plain")
    for cast in (DOWN, BLOCK, Cast(), Cast(granularity="rowwise"), Cast(granularity="1x32", scale_rounding="pow2_ceil")):
        layout = "columns" if cast is DOWN else "rows"
        plain = microseconds(lambda i, cast=cast, layout=layout: quantize(inputs[i], cast, layout=layout))  # type: ignore[misc]  # bound in the loop
        report(f"quantize {cast.granularity}", plain, floor, "of floor")
        full = microseconds(lambda i, cast=cast, layout=layout: quantize(inputs[i], cast, layout=layout, statistics=True))  # type: ignore[misc]  # likewise
        report(f"quantize {cast.granularity} + statistics", full, plain, "of plain")
        if cast in (DOWN, BLOCK):
            joined = partial(quantize_observed, cast=cast, contracts_rows=cast is DOWN, deferred=True)
            full = queued(lambda i, joined=joined: joined(inputs[i % ROTATE]), partial(flush, x.device))  # type: ignore[misc]  # likewise
            report("the same as in a watched step, 24 tensors joined at once", full, plain, "of plain")
    report("observe 1x128", microseconds(lambda i: observe(inputs[i], [TILE])), floor, "of floor")
    report(
        "observe 1x128 + delayed what-if",
        microseconds(lambda i: observe(inputs[i], [TILE, DELAYED], [None, scale])),
        floor,
        "of floor",
    )
    report("observe 1x128 + histogram", microseconds(lambda i: observe(inputs[i], [TILE], histogram=True)), floor, "of floor")
    report(
        "observe 1x128 + delayed what-if + histogram",
        microseconds(lambda i: observe(inputs[i], [TILE, DELAYED], [None, scale], histogram=True)),
        floor,
        "of floor",
    )

    for cast, down in ((TILE, False), (DOWN, True), (BLOCK, False), (Cast(), False)):
        made = [quantize(one, cast, layout="columns" if down else "rows")[0] for one in inputs]
        full = queued(partial(_described, inputs, cast, made), partial(flush, x.device))
        report(f"describe {cast.granularity} (codes of another library), 24 at once", full, floor, "of floor")

    value_counts, many = (
        ValueCounts(x.device),
        [inputs[i % ROTATE].clone() for i in range(MANY)],
    )  # the same tensor is not counted twice
    end = partial(flush, x.device, [value_counts])
    full = queued(partial(_beside, value_counts, many, "rows"), end)
    report("quantize 1x128 + statistics, what-if and histogram, as in a watched step", full, floor, "of floor")
    full = queued(partial(_both_beside, value_counts, many), end)
    report("quantize 1x128 and 128x1 + statistics, what-if and histogram, likewise", full, floor, "of floor")
    full = queued(partial(_beside, value_counts, many, ""), end)
    report("observe 1x128 + delayed what-if + histogram, as in a watched step", full, floor, "of floor")
    full = queued(partial(_counted, value_counts, many), end)
    report("delayed what-if and histogram of a tensor that no kernel of ours reads, likewise", full, floor, "of floor")


def _described(x: list[torch.Tensor], cast: Cast, made: list[Quantized], i: int) -> object:
    return describe(Source(x[i % ROTATE]), cast, made[i % ROTATE])


def _beside(value_counts: ValueCounts, x: list[torch.Tensor], out: str, i: int) -> None:
    plan = fast_plan_of(x[i], Job(TILE, out, True))
    assert plan is not None and plan.counting is not None
    value_counts.count_alongside(x[i], [DELAYED], partial(plan.counting, x[i], True))
    _counted(value_counts, x, i)


def _both_beside(value_counts: ValueCounts, x: list[torch.Tensor], i: int) -> None:
    plan = two_way_plan_of(x[i], TILE, DOWN, True)
    assert plan is not None and plan.counting is not None
    value_counts.count_alongside(x[i], [DELAYED], partial(plan.counting, x[i], True))
    _counted(value_counts, x, i)


def _counted(value_counts: ValueCounts, x: list[torch.Tensor], i: int) -> None:
    value_counts.what_if(x[i], {"delayed": DELAYED}, i)


def low_bit() -> None:
    """Casts of FP4, FP6 and stochastic rounding: torch ops against the kernel, without statistics and with them."""
    nvfp4 = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor")
    mx = Cast(format="e2m1fn", granularity="1x32", scale_format="e8m0")
    chosen = {
        "nvfp4 1x16": nvfp4,
        "nvfp4 16x1": replace(nvfp4, granularity="16x1"),
        "nvfp4 16x16": replace(nvfp4, granularity="16x16"),
        "nvfp4 1x16 stochastic": replace(nvfp4, rounding="stochastic", seed=1),
        "nvfp4 16x1 hadamard": replace(nvfp4, granularity="16x1", hadamard=16),
        "nvfp4 1x16 four over six": replace(nvfp4, four_over_six=True),
        "mxfp4 1x32": mx,
        "mxfp6 e3m2 1x32": replace(mx, format="e3m2fn"),
        "e4m3fnuz tensorwise": Cast(format="e4m3fnuz"),
    }
    print(f"{'microseconds':28} {'shape':>11} {'torch':>9} {'kernel':>9} {'':>7} {'+ stats':>9} {'kernel':>9}")
    for rows, columns in ((4096, 4096), (8192, 2048)):
        torch.manual_seed(0)
        inputs = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(ROTATE)]
        for name, cast in chosen.items():
            by_torch = elapsed(partial(_quantized, reference.quantize, inputs, cast))
            by_kernel = elapsed(partial(_quantized, dispatch.quantize, inputs, cast))
            stats = elapsed(partial(_with_statistics, inputs, cast))
            observed = elapsed(partial(_observed, inputs, cast))
            ratios = f"{by_torch / by_kernel:6.1f}x {stats:9.0f} {observed:9.0f} {stats / observed:6.1f}x"
            print(f"{name:28} {rows:>5}x{columns:<5} {by_torch:9.0f} {by_kernel:9.0f} {ratios}", flush=True)


def elapsed(call: Callable[[int], object], repeats: int = 9) -> float:
    """Median time of a call from the host's start to its end on the GPU, of allocations of torch ops too: no graph."""
    for i in range(ROTATE):
        call(i)
    times = []
    for repeat in range(repeats):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(ROTATE):
            call((repeat + i) % ROTATE)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / ROTATE)
    return float(sorted(times)[repeats // 2])


def _quantized(by: Callable[..., Quantized], x: list[torch.Tensor], cast: Cast, i: int) -> object:
    return by(x[i], cast)


def _with_statistics(x: list[torch.Tensor], cast: Cast, i: int) -> object:
    return reference.statistics(reference.operand_pair(x[i], cast, reference.quantize(x[i], cast)), "log2_hist")


def _observed(x: list[torch.Tensor], cast: Cast, i: int) -> object:
    q, found = quantize_observed(x[i], cast)
    return describe(Source(x[i]), cast, q, found)


SHAPES = ((8192, 14336, 4096), (8192, 4096, 14336), (8192, 4096, 4096))


def gemms() -> None:
    """Own GEMM against cuBLAS blockwise and BF16, for fprop (M tokens, N out, K in) and the wgrads of these layers."""
    ratios = []
    for which in (Gemm.FPROP, Gemm.WGRAD):
        for tokens, n, k in SHAPES:
            flops = 2.0 * tokens * n * k
            left = (tokens, k) if which is Gemm.FPROP else (tokens, n)
            right = (n, k) if which is Gemm.FPROP else (tokens, k)
            left_cast, right_cast = (TILE, BLOCK) if which is Gemm.FPROP else (DOWN, DOWN)
            layout = "rows" if which is Gemm.FPROP else "columns"
            tensors = [[torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in (left, right)] for _ in range(ROTATE)]
            pairs = [
                (
                    (quantize(x, left_cast, layout=layout)[0], left_cast),
                    (quantize(y, right_cast, layout=layout)[0], right_cast),
                )
                for x, y in tensors
            ]
            times = {}
            for backend in ("triton", "cublas"):
                call = partial(_gemm, which, pairs, backend)
                times[backend] = microseconds(call, inner=2)
            own, peer = gemm(which, *pairs[0]), gemm(which, *pairs[0], backend="cublas")
            if which is Gemm.FPROP:
                bf16 = microseconds(lambda i, t=tensors: t[i][0] @ t[i][1].t(), inner=2)  # type: ignore[misc]  # bound in the loop
            else:
                bf16 = microseconds(lambda i, t=tensors: t[i][0].t() @ t[i][1], inner=2)  # type: ignore[misc]  # likewise
            ratios.append(times["cublas"] / times["triton"])
            speeds = ", ".join(f"{name} {flops / t / 1e6:5.0f}" for name, t in (*times.items(), ("bf16", bf16)))
            same = float((own == peer).float().mean())
            print(f"{which} {tokens}x{n}x{k}: TFLOP/s {speeds}; own/cublas {ratios[-1]:.2f}; equal {same:.4f}", flush=True)
    print(f"own GEMM over cuBLAS blockwise, geometric mean: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


def lines() -> None:
    """Own GEMM against cuBLAS with one scale for a tensor, and one for a row."""
    for recipe in ("tensorwise_current", "rowwise"):
        for tokens, n, k in (*SHAPES, (2048, 2048, 1024), (2048, 1024, 1024), (1024, 1024, 1024)):
            words = []
            for which in Gemm:
                shapes = {TensorRole.INPUT: (tokens, k), TensorRole.WEIGHT: (n, k), TensorRole.GRAD_OUTPUT: (tokens, n)}
                pairs = [
                    [
                        _operand(which, role, torch.randn(shapes[role], device="cuda").bfloat16(), recipe)
                        for role in OPERANDS[which]
                    ]
                    for _ in range(ROTATE)
                ]
                own, peer = (microseconds(partial(_gemm, which, pairs, name), inner=2) for name in ("triton", "cublas"))
                speeds = [2.0 * tokens * n * k / time / 1e6 for time in (own, peer)]
                same = float((gemm(which, *pairs[0]) == gemm(which, *pairs[0], backend="cublas")).float().mean())
                words.append(f"{which} {speeds[0]:.0f}, {speeds[1]:.0f} ({peer / own:.2f}; equal {same:.4f})")
            print(f"{recipe} {tokens}x{n}x{k}: TFLOP/s own, cublas: {'; '.join(words)}", flush=True)


def _gemm(which: Gemm, pairs: list[Any], backend: str, i: int) -> torch.Tensor:
    return gemm(which, *pairs[i], backend=backend)


def samples() -> None:
    """What a watched step adds at a GEMM of 256 sampled rows or columns, and counting a tensor for casts of one scale."""
    for tokens, n, k in SHAPES:
        for which in Gemm:
            shapes = {TensorRole.INPUT: (tokens, k), TensorRole.WEIGHT: (n, k), TensorRole.GRAD_OUTPUT: (tokens, n)}
            high = [[torch.randn(shapes[role], device="cuda").bfloat16() for role in OPERANDS[which]] for _ in range(ROTATE)]
            pairs = [tuple(_operand(which, role, x) for role, x in zip(OPERANDS[which], one, strict=True)) for one in high]
            columns, length = which is Gemm.WGRAD, k if which is Gemm.WGRAD else tokens
            size = size_of_groups(256, length) if columns else 1
            lines = spread_lines(256, length, size, torch.device("cuda"))
            sample = Sample(lines, 3, size)
            cut = [(one[0], columns_of(one[1], lines, size) if columns else one[1]) for one in high]
            results = {Gemm.FPROP: (tokens, n), Gemm.DGRAD: (tokens, k), Gemm.WGRAD: (n, k)}
            actual = [torch.randn(results[which], device="cuda").bfloat16() for _ in range(ROTATE)]
            plan = products_of(which, cut[0], pairs[0], sample, num_exact(256), wide=which is Gemm.FPROP)
            assert plan is not None
            name = f"{which} {tokens}x{n}x{k}"
            time = microseconds(partial(_products, plan, which, cut, pairs, sample), inner=2)
            report(f"shadow and exact of {name}, {plan.size[0]} parts", time)
            report("the same, and compared", microseconds(partial(_compare, which, cut, pairs, actual, sample), inner=2))
            if columns:
                report(f"256 columns of {tokens}x{k}", microseconds(partial(_columns, [one[1] for one in high], lines, size)))
            _check_exact(which, plan, (cut[0], pairs[0]), sample)
    value_counts = ValueCounts(torch.device("cuda"))
    for name, scale in (("normal", torch.ones(8192, 1)), ("rows over 9 decades", torch.logspace(-9, 0, 8192)[:, None])):
        words = [(torch.randn(8192, 4096) * scale).bfloat16().cuda().view(-1).view(torch.int32) for _ in range(ROTATE)]
        report(f"count bf16[8192, 4096], {name}", microseconds(partial(_count, value_counts, words)))


def _operand(which: Gemm, role: TensorRole, x: torch.Tensor, recipe: str = "blockwise") -> Any:
    cast = get_recipe(recipe).casts[which, role]
    assert cast is not None
    return quantize(x, cast, layout="columns" if (which, role) in CONTRACTS_ROWS else "rows")[0], cast


def _check_exact(which: Gemm, plan: Products, operands: tuple[Any, Any], sample: Sample) -> None:
    """Say how far the exact GEMM is from FP64."""
    cut, pair = operands
    parts = plan(which, cut, pair, sample).sum(0)[: (plan.shadow + plan.exact) * plan.shared]
    assert sample.lines is not None
    few, share = sample.lines[: plan.exact], sample.share(plan.far, sample.lines.device)
    first, second = (reference.dequantize(*o).double() for o in pair)
    if which is Gemm.WGRAD:
        found, wanted = parts.view(plan.shared, -1)[:, plan.shadow :], first[:, share].t() @ second[:, few]
    else:
        found = parts.view(-1, plan.shared)[plan.shadow :]
        wanted = first[few] @ (second[share].t() if which is Gemm.FPROP else second[:, share])
    loss = ((found - wanted).square().sum() / wanted.square().sum()).log10().item() * -10
    print(f"    exact GEMM {loss:.0f} dB from FP64", flush=True)


def _products(plan: Products, which: Gemm, cut: list[Any], pairs: list[Any], sample: Sample, i: int) -> object:
    return plan(which, cut[i], pairs[i], sample)


def _columns(x: list[torch.Tensor], lines: torch.Tensor, size: int, i: int) -> object:
    return columns_of(x[i], lines, size)


def _compare(which: Gemm, cut: list[Any], pairs: list[Any], actual: list[Any], sample: Sample, i: int) -> object:
    return compare(which, cut[i], pairs[i], actual[i], sample, keep=which is Gemm.FPROP)


def _count(value_counts: ValueCounts, words: list[torch.Tensor], i: int) -> None:
    num = words[i].numel()
    count_kernel[(264,)](words[i], value_counts._tables[i], num, num // 8192, 8192, True, True, num_warps=COUNT_WARPS)


if __name__ == "__main__":
    groups = ["casts", "low_bit", "gemm", "samples"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(groups)}; all by default")
    chosen = parser.parse_args().groups or groups
    if unknown := sorted({*chosen} - {*groups}):
        sys.exit(f"there is no group {', '.join(unknown)}: it is one of {', '.join(groups)}")
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "casts" in chosen:
        casts()
    if "low_bit" in chosen:
        low_bit()
    if "gemm" in chosen:
        gemms()
        lines()
    if "samples" in chosen:
        samples()

"""The sample of a GEMM's result by torch ops, for operands that no kernel multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8debug.kernels import gemm_error, reference
from fp8debug.kernels.sampling import Sample, spread_lines
from fp8debug.recipes import Cast
from fp8debug.types import Gemm

SHAPES = {Gemm.FPROP: ((40, 70), (1100, 70)), Gemm.DGRAD: ((40, 70), (70, 1100)), Gemm.WGRAD: ((70, 1100), (70, 40))}


@pytest.mark.parametrize(("shift", "parts"), [(None, 8), (3, 2)])
@pytest.mark.parametrize("which", list(Gemm), ids=str)
def test_the_wide_operand_is_dequantized_a_part_at_a_time(
    which: Gemm, shift: int | None, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, cast = torch.Generator().manual_seed(0), Cast(granularity="128x1")
    first, second = (torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES[which])
    operands = (reference.quantize(first, cast), cast), (reference.quantize(second, cast), cast)
    wanted = reference.gemm(which, *(reference.dequantize(*o) for o in operands), accumulate=torch.float64)
    lines, widths = torch.tensor([0, 7, 31]), list[int]()

    def gemm(which: Gemm, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        found = reference.gemm(which, a, b, **options)
        widths.append(found.shape[int(which is not Gemm.WGRAD)])
        return found

    monkeypatch.setattr(gemm_error, "CHUNK", 150)
    monkeypatch.setattr(gemm_error, "gemm", gemm)
    high = first, second[:, lines] if which is Gemm.WGRAD else second
    pair = gemm_error._pairs(which, high, operands, wanted, Sample(lines, shift))[1]
    share = Sample(shift=shift).share(1100, lines.device)
    exact = wanted[share][:, lines] if which is Gemm.WGRAD else wanted[lines][:, share]
    assert pair is not None and torch.equal(pair.y, exact)
    error = (pair.source.x.double() - exact.double()).square().sum() / exact.double().square().sum()
    assert -10 * error.clamp(min=1e-30).log10() > 130
    assert len(widths) == parts + 1 and max(widths[1:]) == 150  # the first is the shadow, which needs no copies


@pytest.mark.parametrize("count", [1, 2, 3, 5, 100])
def test_as_few_lines_as_are_asked_for(count: int) -> None:
    """The exact GEMM has every fourth group first, of which there may be fewer than four."""
    lines = spread_lines(count, 100, 1, torch.device("cpu"))
    assert sorted(lines.tolist()) == [i * 100 // count for i in range(count)]

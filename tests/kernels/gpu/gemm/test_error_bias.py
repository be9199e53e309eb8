"""A kernel takes off a sample of a result the bias that torch ops take off all of it: on the GPU, and by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels import gemm_error, reference
from fp8debug.kernels.gpu.gemm.error import compare
from fp8debug.kernels.sampling import Sample
from fp8debug.types import Gemm
from tests.kernels.gpu.gemm.test_error_kernel import DEVICE, N, operands, slots_of, tensors

pytestmark = [pytest.mark.twins, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize(
    ("lines", "dtype"), [(None, torch.bfloat16), ([3, 0, 31], torch.float16), ([3, 0, 31], torch.float32)], ids=str
)
def test_a_bias_is_taken_off_what_is_compared(lines: list[int] | None, dtype: torch.dtype) -> None:
    """Equal to the last bit, a column that is not finite and the rows that fill no block of rows included."""
    first, second = tensors(Gemm.FPROP)
    high, pair = (first, second), operands(Gemm.FPROP, "blockwise")
    bias = 3 * torch.randn(N, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    bias[7] = float("inf")
    actual = (reference.gemm(Gemm.FPROP, *pair) + bias.float().nan_to_num(posinf=0.0)).bfloat16()
    sample = Sample(None if lines is None else torch.tensor(lines, device=DEVICE))
    found = compare(Gemm.FPROP, high, pair, actual, sample, bias=bias, keep=True, tell=True)
    wanted = compare(Gemm.FPROP, high, pair, actual.float() - bias.float(), sample, keep=True)
    assert found is not None and wanted is not None and found[2] is not None
    for one, other in zip(found[0], wanted[0], strict=True):
        for (names, values), expected in zip(slots_of(one).items(), slots_of(other).values(), strict=True):
            assert torch.equal(values, expected), names
    assert found[1] is not None and wanted[1] is not None and torch.equal(found[1], wanted[1])
    pairs = gemm_error._paired(Gemm.FPROP, found[2], actual, sample, bias, whole=True)
    by_torch = gemm_error._pairs(Gemm.FPROP, high, pair, actual, sample, bias)
    whole = actual.float() - bias.float()
    for mine, plain in zip(pairs, by_torch, strict=True):
        assert mine is not None and plain is not None and torch.equal(mine.y, plain.y)
        assert torch.equal(mine.y, (whole if lines is None else whole[lines])[: len(mine.y)])

"""Second stages of many kernels in one launch, and of many programs: on the GPU, and on the CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.formats import block_shape
from fp8debug.kernels import reference
from fp8debug.kernels.gpu import scratch
from fp8debug.kernels.gpu.gemm.error import DAMAGE, LINES, compare, damage, row_slots
from fp8debug.kernels.sampling import Sample, num_exact
from fp8debug.metrics import Pair, Source
from fp8debug.metrics.rows import Rows
from fp8debug.recipes import Cast
from fp8debug.types import Gemm
from tests.kernels.gpu.gemm.test_error_kernel import DEVICE, slots_of, surprising

pytestmark = pytest.mark.twins
HERE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")


def test_many_second_stages_wait_for_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More space than there is ends the wait of those before; what is joined twice is the same."""
    monkeypatch.setattr(scratch, "SPACE", 100)  # two comparisons of one row
    scratch.discard(HERE)
    waiting, join = [], scratch.Pool.flush

    def counted(self: scratch.Pool) -> None:
        waiting.append(len(self._waiting[scratch.RESULTS]) // scratch.RESULTS.size)
        join(self)

    monkeypatch.setattr(scratch.Pool, "flush", counted)
    high, pair, actual = surprising(Gemm.FPROP)
    found = [compare(Gemm.FPROP, (high[0], high[1]), pair, actual, Sample(torch.tensor([4], device=DEVICE), 1)) for _ in range(9)]
    assert waiting == [0, 4, 4, 4, 4]  # the first finds no space yet; the ninth waits
    rows = [list(slots_of(one[0][0]).values()) for one in found if one is not None]
    assert len(rows) == 9 and num_exact(256) == 64
    for row in rows[1:]:
        for value, same in zip(row, rows[0], strict=True):
            assert torch.equal(value.nan_to_num(), same.nan_to_num())


def test_more_parts_than_are_joined_at_once() -> None:
    """150 rows: their parts are joined in three rounds."""
    weight, cast = (
        torch.randn(50, 20, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE),
        Cast(granularity="1x128"),
    )
    weight[3] *= 1e-5
    index = torch.arange(150, device=DEVICE) * 7 % 50
    q = reference.quantize(weight, cast)
    lines = row_slots(weight, *q, block_shape("1x128", *weight.shape), index)[LINES]
    error = torch.randn(150, 20, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    squares = damage(error, torch.ones(150, 20).bfloat16().to(DEVICE))[DAMAGE]
    scratch.flush(HERE)
    wanted = Rows().partial(Pair(source=Source(weight[index]), y=reference.dequantize(q, cast)[index]))
    for names, values in LINES.slots(lines).items():
        for name, value in zip(names, values, strict=True):
            assert float(value) == pytest.approx(float(wanted[name]), rel=1e-7), name
    ((count,), (total,)) = DAMAGE.slots(squares).values()
    assert int(count) == 150
    assert float(total) == pytest.approx(float(error.double().sum(1).square().sum()), rel=1e-12)

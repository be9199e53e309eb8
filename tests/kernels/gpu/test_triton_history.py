"""The kernel of delayed scaling equals the reference to the last bit: on a GPU, and on the CPU by Triton's interpreter."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels import amax_history
from fp8debug.kernels.gpu import amax_history as gpu_history
from fp8debug.kernels.gpu import launcher
from fp8debug.recipes import Cast

pytestmark = [pytest.mark.twins, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASTS = [
    Cast(scaling="delayed", history=4),
    Cast(scaling="delayed", history=1, format="e5m2", margin=3),
    Cast(scaling="delayed", history=1100, scale_rounding="pow2_ceil", margin=-1),
    Cast(scaling="delayed", history=3, algo="most_recent", amax_eps=0.5),
    Cast(scaling="delayed", history=1, algo="most_recent", format="e5m2", scale_rounding="pow2_floor"),
    Cast(scaling="delayed", history=2, margin=127),
]
AMAXES = (0.0, 2.0**-149, 1e-38, 3e-7, 0.4, 1.0, 448.0, 57345.0, 3.4e38, float("inf"), float("nan"))


@pytest.fixture(autouse=True)
def kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(amax_history, "takes_kernels", lambda x: True)
        monkeypatch.setattr(amax_history, "on_device", lambda x: nullcontext())


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_the_same_scales_and_ring(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, evaluations and recomputations in turn, amaxes of nothing and of no number among them; one launch a call."""
    chosen, launches = random.Random(0), list[Any]()

    def launch(*arguments: Any, **options: Any) -> None:
        launches.append(arguments)
        launcher.launch(*arguments, **options)

    monkeypatch.setattr(gpu_history, "launch", launch)
    ours, theirs = amax_history.AmaxHistory(cast, DEVICE), amax_history.ReferenceAmaxHistory(cast, DEVICE)
    for call in range(40):
        amax = torch.tensor(chosen.choice(AMAXES), device=DEVICE)
        use: amax_history.Use = chosen.choice(["train", "train", "evaluate", "recompute"] if call else ["recompute"])
        assert same(ours.next_scale_inv(amax, use), theirs.next_scale_inv(amax, use))
        assert same(ours.memory, theirs.memory)
    assert len(launches) == 40


def test_each_call_has_a_scale_of_its_own() -> None:
    """Whoever keeps one finds it as it was: a backward pass runs calls later."""
    ours = amax_history.AmaxHistory(Cast(scaling="delayed", history=1), DEVICE)
    scales = [ours.next_scale_inv(torch.tensor(amax, device=DEVICE)) for amax in (448.0, 896.0, 1.0)]
    assert [float(scale) for scale in scales] == [1.0, 1.0, 2.0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_call_waits_for_nothing_and_a_ring_elsewhere_is_no_reason_to_fail() -> None:
    cast = Cast(scaling="delayed", history=4)
    amax = torch.tensor(448.0, device=DEVICE)
    ours = amax_history.AmaxHistory(cast, DEVICE)
    ours.next_scale_inv(amax)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = ours.next_scale_inv(amax)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(found) == 1.0
    assert float(amax_history.AmaxHistory(cast, torch.device("cpu")).next_scale_inv(amax)) == 1.0


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))

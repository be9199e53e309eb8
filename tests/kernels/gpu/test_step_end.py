"""Transfers from a GPU: a step's state and its numbers by kernels, and lists of integers the other way."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels.gpu import scratch
from fp8debug.kernels.gpu.scratch import MIN_UPLOAD, to_device
from fp8debug.kernels.gpu.step_end import BLOCK, StateSender, send_number
from fp8debug.observer.host_copy import HostScalar
from fp8debug.observer.table import HostBuffers, Snapshot, TableLayout
from tests.recording.test_gpu_recording import no_synchronizing

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
VALUES = (0.0, -1.5, 2.0**-30, 65504.0, math.inf, -math.inf, math.nan)


def on_host(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=DEVICE.type == "cuda")


def arrive() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.twins
@pytest.mark.parametrize("words", [2, BLOCK, 3 * BLOCK + 6])
def test_a_state_goes_to_the_host_and_is_neutral_again(words: int) -> None:
    torch.manual_seed(words)
    neutral = torch.randint(0, 256, (8 * words,), dtype=torch.uint8, device=DEVICE)
    state, host = neutral.clone(), on_host(8 * words, dtype=torch.uint8)
    send = StateSender(state, neutral)
    for _ in range(2):
        expected = torch.randint(0, 256, (8 * words,), dtype=torch.uint8, device=DEVICE)
        state.copy_(expected)
        send(host)
        arrive()
        assert torch.equal(host, expected.cpu()) and torch.equal(state, neutral)


@pytest.mark.twins
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_number_goes_to_the_host_as_it_is(dtype: torch.dtype) -> None:
    values = torch.tensor([*VALUES, 1 / 3], dtype=torch.float64).to(dtype).to(DEVICE)
    for value in (*values, values[1:2].reshape(1, 1), torch.nn.Parameter(values[-1].clone())):  # at any alignment
        host = on_host(1, dtype=torch.float64)
        assert send_number(value, host)
        arrive()
        value = value.detach()
        assert bool(host.isnan()) == bool(value.isnan())
        assert host.isnan() or float(host) == float(value)


@pytest.mark.twins
def test_what_is_no_plain_float_is_left_to_a_copy() -> None:
    class Loss(torch.Tensor):
        pass

    host = on_host(1, dtype=torch.float64).fill_(7.0)
    assert not send_number(torch.tensor(3, device=DEVICE), host)
    assert not send_number(torch.tensor(3.0, device=DEVICE).as_subclass(Loss), host)
    arrive()
    assert float(host) == 7.0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_a_scalar_arrives_without_a_wait(dtype: torch.dtype) -> None:
    value = torch.tensor([[1]], device="cuda").to(dtype).requires_grad_(dtype.is_floating_point)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), no_synchronizing():
        scalars = [HostScalar(value) for _ in range(3)]
    assert [scalar.read() for scalar in scalars] == [1.0, 1.0, 1.0]


@pytest.mark.gpu
def test_lists_wait_in_memory_of_their_own_until_the_device_has_them() -> None:
    torch.cuda.synchronize()
    scratch._UPLOADS.clear()
    torch.cuda._sleep(100_000_000)  # 50 ms
    sent = [to_device([i] * (10 + 300 * i), DEVICE) for i in range(20)]
    assert len(scratch._UPLOADS[DEVICE]) == 20
    torch.cuda.synchronize()
    assert all(torch.equal(found[: 10 + 300 * i], torch.full_like(found[: 10 + 300 * i], i)) for i, found in enumerate(sent))
    for i in range(40):
        found = to_device([i], DEVICE)
        torch.cuda.synchronize()
        assert int(found[0]) == i
    assert len(scratch._UPLOADS[DEVICE]) == 20


class Sent:
    """Stands for an envelope where there is no device: one that leaves when the test says so."""

    made: list[Sent]

    def __init__(self, size: int) -> None:
        self.size, self.is_on_its_way, self.numbers = size, False, [0]
        self.made.append(self)

    def is_free(self) -> bool:
        return not self.is_on_its_way

    def send(self, numbers: list[int], device: torch.device) -> Any:
        self.numbers, self.is_on_its_way = numbers, True
        return self


def test_an_envelope_is_used_again_once_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    device, Sent.made = torch.device("cuda", 7), []
    monkeypatch.setattr(scratch, "PinnedUpload", Sent)
    monkeypatch.setattr(scratch, "_UPLOADS", {device: deque()})
    found: list[Any] = [to_device([i], device) for i in range(3)]
    assert found == Sent.made and [one.numbers for one in found] == [[0], [1], [2]]
    found[0].is_on_its_way = found[1].is_on_its_way = False
    assert [to_device([9], device) for _ in range(3)] == [found[0], found[1], Sent.made[3]]
    found[2].is_on_its_way = False
    large: Any = to_device([1] * (MIN_UPLOAD + 1), device)  # takes the place of the one that is too small
    assert large is Sent.made[4] and large.size == 2 * MIN_UPLOAD
    assert list(scratch._UPLOADS[device]) == [found[0], found[1], Sent.made[3], large]


class Late:
    """Stands for the event of a kernel that has not run."""

    def __init__(self) -> None:
        self.waits = 0

    def query(self) -> bool:
        return bool(self.waits)

    def synchronize(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("is_read", [False, True])
def test_memory_that_a_kernel_still_writes_to_is_not_given_back(is_read: bool) -> None:
    done: Any = Late()
    memory, given_back = torch.zeros(8, dtype=torch.uint8), list[int]()
    snapshot = Snapshot(
        TableLayout(0), HostBuffers(memory, {}, memory.numpy(), done), lambda buffers: given_back.append(done.waits)
    )
    assert not snapshot.is_done()
    if is_read:
        assert not snapshot.memory().any()
    snapshot.discard()
    snapshot.discard()
    assert given_back == [1]

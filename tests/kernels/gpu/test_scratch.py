"""Second stages that wait: whose memory they write to, what a failure leaves, which streams they meet."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels.gpu import scratch
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.gemm.error import DAMAGE
from fp8debug.kernels.gpu.gemm.error_kernel import NUM_COLUMNS, SUMMED
from fp8debug.kernels.gpu.quantize.tiling import OPERAND
from fp8debug.kernels.gpu.scratch import RESULTS, Pool, discard, flush, num_losses, pool
from fp8debug.kernels.slot_rows import ROW_WORDS, SlotRow
from fp8debug.kernels.torch_state import NotReplayableError, own_capture
from fp8debug.observer import observer
from fp8debug.observer import table as tables
from fp8debug.observer.observer import FinishedStep, Observer, RowInfo, RowKey, Settings
from fp8debug.observer.table import Table
from fp8debug.recipes import get_recipe
from fp8debug.types import Gemm, Reference, TensorRole
from tests.slots import slots_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="shown by the interpreter")
CPU = torch.device("cpu")
INFO = RowInfo("layer", 0, RowKey(Gemm.FPROP, TensorRole.OUTPUT, "", Reference.SHADOW, True))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    discard(CPU)
    yield
    discard(CPU)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table on the CPU takes rows as one on a GPU does."""
    monkeypatch.setattr(tables, "takes_kernels", lambda x: True)
    monkeypatch.setattr(tables, "on_device", lambda x: nullcontext())


def one_sum(value: float, memory: Pool) -> SlotRow:
    """A row whose sum of one part waits."""
    parts, (row,) = memory.defer(RESULTS, NUM_COLUMNS, (1, SUMMED.value))
    parts.fill_(value)
    return row


def record(seen: Observer, row: int, partials: dict[Any, Any]) -> None:
    table, filled = seen.filled(CPU)
    table.merge([row], [partials])
    filled[row] = INFO


def damage_in(row: SlotRow) -> float:
    return float(DAMAGE.slots(row)[DAMAGE.groups[1].names][0])


def out_of_memory(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_waiting_sums_are_written_to_is_kept() -> None:
    memory = pool(CPU)
    row = one_sum(3.0, memory)
    block = weakref.ref(row.block)
    for _ in range(scratch.ROWS):
        memory.allocate()
    del row  # as by a table that is dropped
    gc.collect()
    held = block()
    assert held is not None and held is not memory._block
    flush(CPU)
    assert float(DAMAGE.groups[1].of(held[0])[0]) == 3.0
    del held
    assert block() is None


def test_rows_that_wait_for_nothing_are_not_kept() -> None:
    memory = pool(CPU)
    block = weakref.ref(memory.allocate().block)
    for _ in range(scratch.ROWS):
        memory.allocate()
    assert block() is None


def test_a_flush_that_fails_loses_what_waits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, before = pool(CPU), num_losses(CPU)
    one_sum(3.0, memory)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(scratch, "to_device", out_of_memory)
        flush(CPU)
    assert num_losses(CPU) == before + 1 and not any(memory._waiting.values())
    row = one_sum(4.0, memory)
    flush(CPU)
    assert damage_in(row) == 4.0 and num_losses(CPU) == before + 1


def test_space_for_one_large_tensor_is_given_back() -> None:
    memory = pool(CPU)
    memory.space(2 * scratch.SPACE)
    flush(CPU)
    assert memory._space is None
    memory.space(1)
    assert memory._size == scratch.SPACE


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("when", ["in the step", "after the optimizer's", "at its end"])
def test_a_step_whose_sums_were_lost_is_not_recorded(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[FinishedStep] = []
    said: list[str] = []
    monkeypatch.setattr(observer, "MIN_JOINED", 1)
    settings = Settings(every=1, shadow_rows=8, plain_recipe=get_recipe("blockwise"))
    seen = Observer(settings, steps.append, lambda module, text, aloud: said.append(text))
    seen.num_modules = 1
    for step in range(3):
        record(seen, 0, {DAMAGE: one_sum(5.0 + step, pool(CPU))})
        with monkeypatch.context() as patch:
            if step == 1:
                patch.setattr(scratch, "to_device", out_of_memory)
            if step == 1 and when == "in the step":  # as at the next tensor that finds no space
                with pytest.raises(torch.OutOfMemoryError):
                    pool(CPU).flush()
            elif when == "after the optimizer's":
                seen.flush_many()
            else:
                seen.end_step({})
        if seen.step == step:
            seen.end_step({})
    assert said == ["not recorded at step 1: out of memory; training goes on"]
    found = [[slots_of(snapshot, sorted(filled))["damage"].tolist() for snapshot, filled in step.tables] for step in steps]
    assert found == [[[5.0]], [], [[7.0]]]
    assert scratch._POOLS
    seen.hand_over(wait=True)
    assert not scratch._POOLS and not seen._tables


@pytest.mark.usefixtures("joined")
def test_an_observer_that_is_turned_off_leaves_nothing_that_waits() -> None:
    seen = Observer(Settings(plain_recipe=get_recipe("blockwise")), lambda step: None, lambda module, text, aloud: None)
    seen.num_modules = 1
    record(seen, 0, {DAMAGE: one_sum(5.0, pool(CPU))})
    seen.turn_off()
    assert not scratch._POOLS and not seen._tables and not seen.has_rows


@pytest.mark.usefixtures("joined")
def test_a_long_step_is_joined_in_pieces_in_which_no_row_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits at its end is bounded, however many rows it has; all integers of a piece go to the device in one copy."""
    sent: list[int] = []
    send = scratch.to_device

    def counted(numbers: list[int], device: torch.device) -> torch.Tensor:
        sent.append(len(numbers))
        return send(numbers, device)

    monkeypatch.setattr(scratch, "to_device", counted)
    monkeypatch.setattr(tables, "MAX_JOINED", 2)
    table = tables.Table(11, CPU)
    for _ in range(2):
        for row in range(11):
            table.merge([row], [{DAMAGE: one_sum(1.0 + row, pool(CPU))}])
        assert len(sent) == 2 and len(table._listed) == 3
        assert slots_of(table.snapshot(), range(11))["damage"].tolist() == [1.0 + row for row in range(11)]
        assert sent == [5 * 4 + 4 * 3, 4 * 4 + 4 * 3, 2 * 4 + 3 * 3 + 1]  # what the next row waits for goes along
        sent.clear()


@pytest.mark.usefixtures("joined")
def test_a_hook_with_little_to_do_joins_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_JOINED", 2)
    seen = Observer(Settings(plain_recipe=get_recipe("blockwise")), lambda step: None, lambda module, text, aloud: None)
    seen.num_modules = 1
    seen.flush_if_full(CPU)
    waiting = []
    for row in range(3):
        record(seen, row, {DAMAGE: one_sum(5.0, pool(CPU))})
        seen.flush_if_full(CPU)
        waiting.append(len(seen.table(CPU)._listed))
    assert waiting == [1, 0, 1]
    seen.turn_off()


@pytest.mark.usefixtures("joined")
def test_rows_are_joined_before_the_end_of_a_step_where_they_are_some() -> None:
    """The optimizer's hook does so; what comes after is joined with the rest."""
    seen = Observer(Settings(plain_recipe=get_recipe("blockwise")), lambda step: None, lambda module, text, aloud: None)
    seen.num_modules = tables.MIN_JOINED
    seen.flush_many()  # nothing is recorded
    waiting = []
    for row in range(tables.MIN_JOINED + 1):
        record(seen, row, {DAMAGE: one_sum(5.0, pool(CPU))})
        seen.flush_many()
        waiting.append(len(seen.table(CPU)._listed))
    assert waiting == [*range(1, tables.MIN_JOINED), 0, 1]
    found = slots_of(seen.table(CPU).snapshot(), range(tables.MIN_JOINED + 1))
    assert found["damage"].tolist() == [5.0] * (tables.MIN_JOINED + 1)
    seen.turn_off()


@pytest.mark.usefixtures("joined")
def test_a_watch_that_ends_leaves_what_another_on_the_device_waits_for() -> None:
    first, second = tables.Table(1, CPU), tables.Table(1, CPU)
    second.merge([0], [{DAMAGE: one_sum(7.0, pool(CPU))}])
    first.discard()
    assert slots_of(second.snapshot(), [0])["damage"].tolist() == [7.0]
    second.discard()
    assert not scratch._POOLS


@pytest.mark.usefixtures("joined")
def test_a_row_that_is_met_again_is_joined_again() -> None:
    """As by a step with several passes; beside it slots that torch's ops made, one of them laid out as no kernel reads it."""
    table = tables.Table(3, CPU)
    histogram = torch.arange(128)[::2]
    for value in (1.0, 2.0, 4.0):
        table.merge([0, 1], [{DAMAGE: one_sum(value, pool(CPU))}, {DAMAGE: one_sum(8 * value, pool(CPU))}])
        table.merge([0, 2], [{"num_nan": torch.tensor(3)}, {"log2_hist": histogram}])
    found = slots_of(table.snapshot(), range(3))
    assert found["damage"].tolist() == [7.0, 56.0, 0.0]
    assert found["num_nan"].tolist() == [9, 0, 0] and found["log2_hist"][2].tolist() == (3 * histogram).tolist()
    assert slots_of(table.snapshot(), range(3))["damage"].tolist() == [0.0] * 3
    table.discard()


@pytest.mark.usefixtures("joined")
def test_a_step_whose_rows_were_half_joined_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tables.Table(1, CPU)
    table.merge([0], [{"num_nan": torch.tensor(3)}])
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "stack", out_of_memory)
        table.join()
    table.merge([0], [{"num_nan": torch.tensor(3)}])
    with pytest.raises(MemoryError, match="were lost"):
        table.snapshot()
    table.discard()


def test_rows_of_one_kernel_lie_in_one_block() -> None:
    memory = pool(CPU)
    first = [memory.allocate() for _ in range(scratch.ROWS - 1)]
    parts, (row, other) = memory.defer(RESULTS, NUM_COLUMNS, (1, SUMMED.value), 2)
    parts.view(2, -1).copy_(torch.tensor([[3.0], [5.0]]).expand(2, NUM_COLUMNS))
    assert row.block is other.block and row.block is not first[0].block
    assert (row.number, other.number) == (0, 1) and other.address == row.block.data_ptr() + 8 * ROW_WORDS
    flush(CPU)
    assert [damage_in(row), damage_in(other)] == [3.0, 5.0]


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_sums_of_another_stream_are_ordered_with_it(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current, other, send = Stream("current", log), Stream("other", log), scratch.to_device

    def sent(numbers: list[int], device: torch.device) -> torch.Tensor:
        log.append("launch")
        return out_of_memory() if fails else send(numbers, device)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(scratch, "to_device", sent)
    memory = scratch._POOLS[CPU, 7] = Pool(CPU, other)  # type: ignore[arg-type]  # stands for a stream
    row = one_sum(3.0, memory)
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            flush(CPU)
    else:
        flush(CPU, last=[([1, 2], lambda items: log.append(f"read {items.tolist()}"))])
        flush(CPU)  # of which nothing is left
        assert damage_in(row) == 3.0
    read = [] if fails else ["read [1, 2]"]  # before the other stream may write to its rows again
    assert log == ["current waits for other", "launch", *read, "other waits for current"]


def test_every_flush_begins_a_block_of_rows() -> None:
    """So the memory that a step leaves alive does not hang on how many rows the steps before it took."""
    steps = []
    for _ in range(5):
        steps.append([pool(CPU).allocate() for _ in range(100)])
        flush(CPU)
    blocks = [{row.block.data_ptr() for row in rows} for rows in steps]
    assert all(len(found) == 1 for found in blocks) and len(set.union(*blocks)) == len(steps)


@pytest.mark.usefixtures("joined")
def test_a_capture_replaces_no_memory_that_earlier_graphs_use() -> None:
    table = Table(2, CPU)
    table.merge([0], [{DAMAGE: one_sum(1.0, pool(CPU))}])
    table.join()
    apart = table.apart()
    assert apart.has_room_for(table)
    table._number(OPERAND)  # as by a row of another kind
    assert not apart.has_room_for(table), "the layouts would have another place"
    with own_capture(object()), pytest.raises(NotReplayableError, match="statistics"):
        apart._number(OPERAND)
    assert table.apart().has_room_for(table) and not Table(3, CPU).has_room_for(table)


@pytest.mark.usefixtures("joined")
def test_what_a_capture_that_failed_has_left_is_not_joined() -> None:
    table = Table(2, CPU)
    table.merge([0], [{DAMAGE: one_sum(1.0, pool(CPU))}])
    table.begin()
    assert not table._listed and not table._waiting


def test_a_capture_takes_rows_on_one_stream() -> None:
    with own_capture(object()), pytest.raises(NotReplayableError, match="stream"):
        pool(CPU)

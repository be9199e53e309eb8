"""What a second run of a program's functions can change outside of tensors is put back, wherever it lies."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from types import ModuleType
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8debug.adapters.interception.program_state as program_state
from fp8debug.adapters.interception.program_state import ProgramState, TooManyObjectsError

LOSSES: list[Any] = []
NUM_CALLS = 0
COUNTS: defaultdict[str, int] = defaultdict(int)
SCALE = torch.ones(2)


class Manager:
    """Collects what blocks give it."""

    total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.last: Any = None
        self.by_name: OrderedDict[str, list[int]] = OrderedDict(a=[1])

    def add(self, loss: Any) -> None:
        self.losses.append(loss)
        self.by_name["a"].append(2)
        self.last = loss
        Manager.total += 1


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


MANAGER = Manager()
ELSEWHERE = ModuleType("a_program_of_a_test")
ELSEWHERE.SEEN = set()  # type: ignore[attr-defined]


def counter() -> Any:
    count, recent = 0, deque([1], maxlen=2)

    def add() -> int:
        nonlocal count
        count += 1
        recent.append(count)
        return count + sum(recent)

    return add


class Block(nn.Module):
    shared: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept: list[Tensor] = []
        self.slotted = Slotted()
        self.count = counter()

    def forward(self, x: Tensor) -> Tensor:
        global NUM_CALLS
        NUM_CALLS += 1
        LOSSES.append(x)
        COUNTS["calls"] += 1
        MANAGER.add(x)
        ELSEWHERE.SEEN.add(len(LOSSES))
        self.kept.append(x)
        self.slotted.value += 1
        Block.shared["calls"] = NUM_CALLS
        return self._more(x) * SCALE

    def _more(self, x: Tensor) -> Tensor:
        self.count()
        return next(y + 1 for y in [x]) if LOSSES else x


def now(block: Block) -> Any:
    return (
        len(LOSSES), NUM_CALLS, dict(COUNTS), len(MANAGER.losses), MANAGER.last, repr(MANAGER.by_name), Manager.total,
        set(ELSEWHERE.SEEN), len(block.kept), block.slotted.value, dict(Block.shared),
    )  # fmt: skip


def test_all_that_a_forward_changes_is_put_back() -> None:
    sys.modules["a_program_of_a_test"] = ELSEWHERE
    block = Block()
    block(torch.ones(2))
    before, lists = now(block), (LOSSES, MANAGER.losses, block.kept)
    count = block.count()
    state = ProgramState([block])
    for _ in range(3):
        block(torch.ones(2))
    assert now(block) != before
    state.restore()
    assert now(block) == before and all(a is b for a, b in zip(lists, (LOSSES, MANAGER.losses, block.kept), strict=True))
    assert block.count() == count + 2 + 1  # its number and the one of the two latest that rises
    assert any(x is SCALE for x in state.tensors)


def test_nothing_of_libraries_is_looked_at() -> None:
    state = ProgramState([nn.TransformerEncoderLayer(8, 2, 8)])
    assert len(state._kept) < 100


def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_state, "MAX_OBJECTS", 10)
    with pytest.raises(TooManyObjectsError, match="reach more than 10 objects"):
        ProgramState([Block()])


class Wired(nn.Module):
    """A block whose forward takes one of two objects that it has anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Slotted(), Slotted()
        self.chosen: Any = self.first
        self.factor: Any = np.float32(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * cast(Tensor, self.chosen.value + self.factor)


def test_values_tell_which_object_is_where_and_numbers_of_numpy() -> None:
    block = Wired()
    before = ProgramState([block]).values
    assert ProgramState([block]).values == before
    block.chosen = block.second
    assert ProgramState([block]).values != before
    block.chosen, block.factor = block.first, np.float32(2.0)
    assert ProgramState([block]).values != before

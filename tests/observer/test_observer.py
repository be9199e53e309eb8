"""What the observer and its tables do: contributions in parts, what modules share, what is not kept."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.kernels.slot_rows import ROW_WORDS, RowLayout, SlotGroup
from fp8debug.metrics.damage import Damage
from fp8debug.observer import host_copy
from fp8debug.observer.host_copy import HostScalar
from fp8debug.observer.observer import AT_ONCE, MAX_STEPS, Observer, RowKey, Settings
from fp8debug.observer.probe import Probe
from fp8debug.observer.rows import RowAllocator
from fp8debug.observer.table import Table
from fp8debug.recipes import get_recipe
from fp8debug.types import Gemm, Reference, TensorRole
from tests.slots import slots_of

CPU = torch.device("cpu")


def observer() -> Observer:
    settings = Settings(every=1, shadow_rows=8, plain_recipe=get_recipe("blockwise"))
    return Observer(settings, lambda finished: None, lambda module, text, aloud: None)


def test_contributions_in_parts_are_joined_by_the_slots_rules() -> None:
    counts, extremes = torch.arange(8).reshape(4, 2), torch.tensor([[3.0], [7.0], [5.0]])
    table = Table(2, CPU)
    table.merge([0], [{("numel", "num_zero"): counts, ("amax",): extremes, ("amin",): extremes, "num_nan": torch.tensor(4)}])
    table.merge([1], [{("numel", "num_zero"): counts[0], ("amax",): extremes[:2]}])
    table.merge([0], [{("numel", "num_zero"): counts[:3], ("amin",): extremes - 2}])
    found = slots_of(table.snapshot(), [0, 1])
    assert found["numel"].tolist() == [12 + 6, 0] and found["num_zero"].tolist() == [16 + 9, 1]
    assert found["amax"].tolist() == [7.0, 7.0] and found["amin"][0] == 1.0 and found["num_nan"].tolist() == [4, 0]


def test_a_row_waits_for_more_of_it_and_is_joined_once() -> None:
    layout = RowLayout(SlotGroup(("numel", "num_zero"), torch.int64, 8), SlotGroup(("amax",), torch.float32, 0))
    row, table = torch.empty(ROW_WORDS, dtype=torch.int64), Table(2, CPU)
    layout.groups[0].of(row).copy_(torch.tensor([6, 2]))
    layout.groups[1].of(row).fill_(3.0)
    for _ in range(2):
        table.merge([1], [{layout: row}])
        table.merge([1], [{"num_nan": torch.tensor(5)}])
    found = slots_of(table.snapshot(), [0, 1])
    assert found["numel"].tolist() == [0, 12] and found["num_zero"].tolist() == [0, 4] and found["num_nan"].tolist() == [0, 10]
    assert found["amax"].tolist() == [float("-inf"), 3.0]


def test_a_tensor_is_worked_on_once_as_long_as_it_is_the_same() -> None:
    seen, made = observer(), iter(range(100))
    x = torch.randn(8, 4)

    def once(x: torch.Tensor, what: str = "a") -> int:
        return seen.shared(x, what, lambda: next(made))

    assert once(x) == once(x.detach()) == once(x.view(2, 16).view(8, 4)) == 0
    assert once(x, "b") == 1 and once(x[:4]) == 2 and once(x.clone()) == 3 and once(x.t()) == 4
    x[0] = 0  # in place
    assert once(x) == 5
    del x
    gc.collect()
    assert once(torch.randn(8, 4)) == 6  # it may lie where the old one lay
    seen.start_step(1)
    assert once(torch.randn(8, 4)) == 7


class Arrived:
    """Stands for an event on the CPU, where a copy is done at once."""

    def record(self) -> None:
        """There is no stream."""

    def synchronize(self) -> None:
        """Nothing is waited for."""


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_a_scalar_has_its_place_on_the_host_until_it_is_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(HostScalar, "_spare", {})
        monkeypatch.setattr(host_copy, "_pinned_buffer", lambda shape, dtype: (torch.empty(shape, dtype=dtype), Arrived()))
        monkeypatch.setattr(host_copy, "on_device", lambda x: nullcontext())
    first = [HostScalar(torch.tensor(float(i), device=device)) for i in range(3)]
    other = HostScalar(torch.tensor([[2.5]], dtype=torch.bfloat16, device=device))
    assert [one.read() for one in reversed(first)] == [2.0, 1.0, 0.0]
    second = [HostScalar(torch.tensor(float(i), device=device)) for i in (7, 8)]
    assert {id(one._host) for one in second} < {id(one._host) for one in first}
    assert [one.read() for one in (*first, *second, other)] == [0.0, 1.0, 2.0, 7.0, 8.0, 2.5]


def test_sampled_rows_are_those_of_the_step() -> None:
    seen = observer()
    first = seen.sample(64, CPU)
    assert isinstance(first.lines, torch.Tensor) and seen.sample(64, CPU) is first
    assert seen.sample(8, CPU).lines is None and seen.sample(8, CPU).shift is not None
    seen.start_step(1)
    second = seen.sample(64, CPU)
    assert isinstance(second.lines, torch.Tensor) and not torch.equal(first.lines, second.lines)
    assert torch.equal(second.lines.sort().values.diff(), torch.full((7,), 8))


def test_sampled_columns_lie_in_groups_and_reach_every_column() -> None:
    seen, found = Observer(Settings(shadow_rows=256, plain_recipe=get_recipe("blockwise")), _ignore, _ignore), set[int]()
    for step in range(0, 1600, 10):
        seen.start_step(step)
        sample = seen.sample(8192, CPU, columns=True)
        assert isinstance(sample.lines, torch.Tensor) and sample.size == 8 and len(sample.lines.unique()) == 128
        groups = sample.lines.view(16, 8)
        assert torch.equal(groups, groups[:, :1] + torch.arange(8)) and (groups[:, 0] % 8 == 0).all()
        assert torch.equal(groups[:, 0].sort().values.diff(), torch.full((15,), 512)) and groups[0, 0] == sample.start
        assert torch.equal(groups[:4, 0].sort().values.diff(), torch.full((3,), 2048))  # those of the exact GEMM
        found |= set(sample.lines.tolist())
    assert len(found) == 8192
    assert seen.sample(250, CPU, columns=True).lines is None
    assert (
        Observer(Settings(shadow_rows=30, plain_recipe=get_recipe("blockwise")), _ignore, _ignore)
        .sample(70, CPU, columns=True)
        .size
        == 1
    )


def _ignore(*args: object) -> None:
    pass


def test_modules_that_read_one_tensor_share_its_columns_and_keep_them_no_longer(tmp_path: Path) -> None:
    model = fp8debug.convert(nn.ModuleDict({name: nn.Linear(64, 32) for name in ("q", "k")}), "blockwise")
    x = torch.randn(16, 64, requires_grad=True)
    with fp8debug.watch(model, tmp_path / "run", every=1, shadow_rows=8):
        q, k = (module(x) for module in model.values())  # type: ignore[operator]  # a ModuleDict's values are modules
        kept = _kept(q, k)
        assert kept[0].input_columns is kept[1].input_columns
        columns = weakref.ref(kept[0].input_columns)
        del kept
        (q.sum() + k.sum()).backward()
        del q, k
        gc.collect()
        assert columns() is None  # before the step ends: microbatches do not pile up


def test_a_closed_watch_lets_go_of_its_model(tmp_path: Path) -> None:
    layer = nn.Linear(64, 32)
    model, held = fp8debug.convert(nn.Sequential(layer), "blockwise"), weakref.ref(layer.weight)
    with fp8debug.watch(model, tmp_path / "run", every=1, shadow_rows=8) as watch:
        model(torch.randn(16, 64)).sum().backward()
        watch.step()
    del layer, model, watch
    gc.collect()
    assert held() is None


def _kept(*outputs: torch.Tensor) -> list[Any]:
    """What the autograd functions behind these outputs keep."""
    found: list[Any] = []
    for output in outputs:
        node: Any = output.grad_fn
        while node is not None and not hasattr(node, "kept"):
            node = node.next_functions[0][0]
        assert node is not None
        found.append(node.kept)
    return found


@pytest.mark.parametrize("every", [1, 2])
def test_a_sample_given_up_is_tried_again_at_the_next_step(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(every=every, shadow_rows=8, plain_recipe=get_recipe("blockwise"), check_finite=True)
    seen = Observer(settings, lambda finished: None, lambda module, text, aloud: None)
    probe, x = Probe(seen, "layer"), torch.ones(1, 1)
    seen.start_step(every - 1)  # sampled, or not

    def full(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(seen, "next_call_index" if seen.sampling else "check", full)
        assert not probe.begin()
        probe.check(x, x, x)
    given_up = [probe.given_up]
    seen.start_step(every)
    given_up.append(probe.given_up)
    assert given_up == [True, False] and probe.begin() and probe.call_index == 0
    seen.start_step(2 * every)
    assert probe.begin() and probe.call_index == 0


def test_what_a_backward_pass_leaves_is_forgotten_though_its_forward_pass_was_a_step_before() -> None:
    seen = observer()
    probe, x = Probe(seen, "layer"), torch.randn(8, 8)
    kept = probe.fprop(x, x, x, x, x, x)
    seen.start_step(1)
    probe.backward(x, x, (x, x, x), (x, x, x), kept)
    assert seen.has_rows and probe._weights_seen
    seen.start_step(2)
    assert not seen.tensor_cache and not probe.given_up
    probe.begin()
    assert not probe._weights_seen


def test_what_a_step_leaves_is_let_go_of_a_little_at_each_forward_call() -> None:
    """At its end nothing is, however many modules it had; a module that has been called again is left alone."""
    seen = observer()
    probes, x = [Probe(seen, f"layer{i}") for i in range(3 * AT_ONCE)], torch.randn(8, 8)
    for probe in probes:
        y = torch.randn(8, 8)
        assert probe.begin() and probe.fprop(y, x, y, x, y, y) is not None and seen.cache_key(y, "columns") in seen.tensor_cache
    seen.start_step(1)
    assert all(probe._weights_seen for probe in probes) and not seen.tensor_cache
    assert probes[0].begin()
    assert sum(bool(probe._weights_seen) for probe in probes) == 2 * AT_ONCE - 1
    probes[1].fprop(x, x, x, x, x, x)
    with torch.no_grad():  # an evaluation, say
        for probe in probes[2:]:
            assert not probe.begin()
    assert [bool(probe._weights_seen) for probe in probes] == [i == 1 for i in range(3 * AT_ONCE)]
    assert not seen.deferred_release._steps


def test_what_many_steps_leave_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no forward call comes; every weak reference to a storage is given back."""
    seen, freed, free = observer(), list[int](), torch.UntypedStorage._free_weak_ref

    def counted(at: int) -> None:
        freed.append(at)
        free(at)

    monkeypatch.setattr(torch.UntypedStorage, "_free_weak_ref", counted)
    for step in range(MAX_STEPS + 2):
        for _ in range(2 * AT_ONCE):
            seen.shared(torch.randn(2), "a", object)
        seen.start_step(step + 1)
    assert len(seen.deferred_release._steps) == 1
    seen.hand_over(wait=True)
    assert not seen.deferred_release._steps and len(freed) == 2 * AT_ONCE * (MAX_STEPS + 2)


def test_what_a_metric_says_nothing_of_is_not_asked() -> None:
    from fp8debug.metrics import METRICS, Slot
    from fp8debug.metrics.base import uncovered

    class Mine(Damage):
        slots: Any = (Slot(name="mine", merge="sum", kind="int64", unit="1", doc="a slot that no kernel fills"),)
        of_operands = True

    filled = {slot.name for metric in METRICS for slot in metric.slots}
    METRICS.add("mine", Mine())
    try:
        assert [type(m) for m in uncovered(filled, 64, operand=True)] == [Mine]
        assert [type(m) for m in uncovered(filled, 64, operand=False)] == [Mine]
        names = {m.name for m in uncovered((), 1024, operand=False)}
        assert "choice" not in names and "reread" not in names and "rows" in names
        assert "choice" in {m.name for m in uncovered((), 64, operand=False)}
        assert "choice" not in {m.name for m in uncovered((), 64, operand=False, whole_rows=False)}
        assert "rows" not in {m.name for m in uncovered((), 64, operand=True)}
    finally:
        METRICS.remove("mine")


def test_rows_that_are_recorded_together_do_not_give_way_to_each_other() -> None:
    """Where a module has met as many casts as it has rows, those of earlier steps give way to new ones, and no other."""
    seen = observer()
    seen.num_modules = 1
    lines, count = RowAllocator(seen, "layer"), seen.settings.rows_per_module
    lines._first = 0

    def keys(first: int, num: int) -> tuple[RowKey, ...]:
        names = (str(first + i) for i in range(num))
        return tuple(RowKey(Gemm.FPROP, TensorRole.INPUT, name, Reference.OPERAND, True) for name in names)

    def record(some: tuple[RowKey, ...]) -> None:
        lines.record(some, 0, None, [{"num_nan": torch.tensor(int(key.cast_name))} for key in some], CPU)

    record(keys(1, count - 1))
    seen.end_step({})
    for new in (keys(100, 2), keys(200, count - 2)):  # the first takes the last row, and its second makes room
        record(new)
    table, filled = seen.filled(CPU)
    assert len(filled) == count
    found = slots_of(table.snapshot(), sorted(filled))["num_nan"].tolist()
    assert found == [int(filled[row].key.cast_name) for row in sorted(filled)]
    with pytest.raises(RuntimeError, match="too often within one step"):
        record(keys(300, 1))

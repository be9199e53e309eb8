"""A recipe that changes while a model trains: an event, and in the manifest, of the step in which it first holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex, cast, overload

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.adapters.watching.coverage import candidates_of
from fp8debug.adapters.watching.recipe_changes import LOOKED_AT, READ_AT_ONCE, STEPS_PER_MANIFEST, RecipeChanges
from fp8debug.fallback import Fallback
from fp8debug.store.write.writer import RunWriter
from tests.recording.models import net, train

ROWWISE = "fprop input, dgrad grad_output: e4m3fn rowwise current instead of e4m3fn 1x128 current; "


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str | None, str]] = []
        self.manifests: list[dict[str, Any]] = []

    def event(self, step: int, kind: str, module: str | None, message: str) -> None:
        assert kind == "recipe"
        self.events.append((step, module, message))

    def update_manifest(self, changes: Mapping[str, Any]) -> None:
        self.manifests.append({m["fqn"]: m for m in changes["modules"]})


class Counted(list[Any]):
    """A list that counts how often an entry is read."""

    num_read = 0

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def changes_of(model: nn.Module) -> tuple[RecipeChanges, Kept, Counted]:
    kept = Kept()
    changes = RecipeChanges(candidates_of([model]), cast(RunWriter, kept), 0, None)
    changes._modules = counted = Counted(changes._modules)
    return changes, kept, counted


def wide(num: int) -> Any:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(num)))
    return fp8debug.convert(model, "blockwise")


def events(run: fp8debug.Run) -> list[tuple[int, str, str]]:
    found = run.sql("SELECT step, module, message FROM events WHERE kind = 'recipe' ORDER BY step, module").to_pylist()
    return [(row["step"], row["module"], row["message"]) for row in found]


@pytest.mark.parametrize("num", [40, 400])
def test_a_step_in_which_nothing_changes_costs_the_same_in_a_model_of_any_size(num: int) -> None:
    changes, kept, counted = changes_of(wide(num))
    for step in range(20):
        before = counted.num_read
        changes.record_changes(step)
        assert counted.num_read == before, "a forward pass reads none"
        changes.apply_pending(step + 1)
        assert counted.num_read - before <= LOOKED_AT
    assert counted.num_read >= min(20 * LOOKED_AT * 0.6, 20 * num / 2) and not kept.events and not kept.manifests


def test_a_lone_change_in_a_large_model_is_noted_at_once() -> None:
    model = wide(200)
    changes, kept, _ = changes_of(model)
    model[170].set_recipe("rowwise")
    changes.apply_pending(5)
    assert [(step, module) for step, module, _ in kept.events] == [(5, "170")]
    assert kept.events[0][2].startswith(ROWWISE)
    (manifest,) = kept.manifests
    assert {m["recipe"] for fqn, m in manifest.items() if fqn != "170"} == {"blockwise"}
    assert manifest["170"]["recipe"] == "rowwise" and manifest["170"]["casts"]["fprop.input"]["granularity"] == "rowwise"
    model[3].set_recipe("bf16")
    changes.record_changes(5 + STEPS_PER_MANIFEST)
    assert kept.events[1:] == [(5 + STEPS_PER_MANIFEST, "3", "bf16 instead of blockwise")]
    assert [m["fqn"] for m in kept.manifests[-1].values() if not m["fp8"]] == ["3"]
    changes.record_changes(6 + STEPS_PER_MANIFEST)
    changes.apply_pending(6 + STEPS_PER_MANIFEST)
    changes.flush()
    assert len(kept.events) == len(kept.manifests) == 2


def test_recipes_that_move_at_every_step_are_events_and_now_and_then_in_the_manifest() -> None:
    model = wide(2)
    changes, kept, _ = changes_of(model)
    for step in range(1, 3 * STEPS_PER_MANIFEST):
        model[0].set_recipe("bf16" if step % 2 else "blockwise")
        changes.apply_pending(step)
    assert len(kept.events) == 3 * STEPS_PER_MANIFEST - 1 and len(kept.manifests) == 3
    model[0].set_recipe("rowwise")
    changes.apply_pending(3 * STEPS_PER_MANIFEST)
    assert len(kept.manifests) == 3, "said in the tenth step before"
    for step in range(3 * STEPS_PER_MANIFEST + 1, 4 * STEPS_PER_MANIFEST):
        changes.apply_pending(step)
    assert len(kept.manifests) == 4 and kept.manifests[-1]["0"]["recipe"] == "rowwise", "without another change"
    model[0].set_recipe("bf16")
    changes.apply_pending(4 * STEPS_PER_MANIFEST)
    assert len(kept.manifests) == 4
    changes.flush()
    changes.flush()
    assert len(kept.manifests) == 5 and not kept.manifests[-1]["0"]["fp8"]


def test_a_recipe_that_is_assigned_is_found_in_turn() -> None:
    model = wide(4 * LOOKED_AT)
    changes, kept, _ = changes_of(model)
    model[3 * LOOKED_AT + 1].recipe = fp8debug.get_recipe("bf16")
    for step in range(1, 5):
        assert not kept.events
        changes.apply_pending(step)
    assert kept.events == [(4, f"{3 * LOOKED_AT + 1}", "bf16 instead of blockwise")] and len(kept.manifests) == 1


def test_what_is_set_and_set_back_before_it_ran_is_no_change() -> None:
    model = wide(3)
    changes, kept, _ = changes_of(model)
    was = model[1].recipe
    model[1].set_recipe("bf16")
    model[1].set_recipe(was)
    model[2].set_recipe(was.replace(cast=was.casts["fprop", "input"], gemm="fprop", tensor="input"))  # equal, of another name
    changes.record_changes(1)
    changes.apply_pending(2)
    assert not kept.events


def test_the_bf16_steps_of_a_schedule_are_events_and_leave_the_manifest_alone() -> None:
    model: Any = fp8debug.apply(wide(3), [Fallback(module="1", gemms=("fprop", "dgrad", "wgrad"), until_step=3)])
    changes, kept, _ = changes_of(model)
    model.fp8debug_schedule.set_step(3)
    changes.apply_pending(3)
    assert kept.events[-1] == (3, "1", "blockwise instead of bf16") and not kept.manifests


def test_other_backends_are_looked_at_in_turn() -> None:
    model = wide(3 * READ_AT_ONCE)
    changes, kept, _ = changes_of(model)
    assert len(changes.refresh_backends()) == len(changes.refresh_backends()) == 3 * READ_AT_ONCE, (
        "all, until nothing has changed twice"
    )
    model[READ_AT_ONCE + 2].recipe = fp8debug.get_recipe("bf16")  # as a backend that tells nobody
    assert changes.refresh_backends()[0].fqn == "0" and not kept.manifests
    assert changes.refresh_backends()[0].fqn == f"{READ_AT_ONCE}"
    (manifest,) = kept.manifests
    assert not manifest[f"{READ_AT_ONCE + 2}"]["fp8"]
    assert len(changes.refresh_backends()) == 3 * READ_AT_ONCE


@pytest.mark.parametrize("explicit", [True, False])
def test_a_change_has_the_step_in_which_it_holds(tmp_path: Path, explicit: bool) -> None:
    model, folder = net(), tmp_path / "run"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[int, str | None] = {}
    with fp8debug.watch(model, folder, every=100) as watch:
        for step in range(16):
            if step == 3:  # before the forward pass: holds in this step
                model.head.set_recipe("rowwise")  # type: ignore[operator]  # an Fp8Linear since convert()
            train(model, 1, optimizer, after=lambda _, loss: None)
            if step == 13:  # after it: from the next one on
                model.head.set_recipe("bf16")  # type: ignore[operator]
            watch._writer.flush()
            head = next(m for m in json.loads((folder / "manifest.json").read_text())["modules"] if m["fqn"] == "head")
            seen[step] = head["recipe"]
            if explicit:
                watch.step()
    found = events(fp8debug.Run(folder))
    assert [(step, module) for step, module, _ in found] == [(3, "head"), (14, "head")]
    assert found[0][2].startswith(ROWWISE) and found[1][2] == "bf16 instead of rowwise"
    assert [seen[step] for step in (2, 3, 13, 14)] == ["blockwise", "rowwise", "rowwise", None]


@pytest.mark.parametrize("place", ["record_changes", "apply_pending"])
def test_an_error_in_looking_ends_the_recording_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def broken(*args: object) -> None:
        raise ArithmeticError("of a test")

    expected, model = train(net(), 2), net()
    monkeypatch.setattr(RecipeChanges, place, broken)
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        losses = train(model, 2, after=lambda _, loss: watch.step(loss=loss))
    assert losses == expected
    assert capsys.readouterr().err.count("recording stopped: ArithmeticError: of a test") == 1

"""BF16 until a step and from a step on: the list, the clock, the switch in the arithmetic, and what a watched run says of it."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.errors import NoMatchError, UsageError
from fp8debug.fallback import Fallback, load_fallbacks, scheduled
from fp8debug.recipes import Cast
from tests.recording.models import net, train

ALL = ("fprop", "dgrad", "wgrad")
WARM_UP = [Fallback(module="*", gemms=ALL, until_step=3)]


def in_fp8(model: Any) -> list[str]:
    """Return the modules that run in FP8 now."""
    return [n for n, m in model.named_modules() if hasattr(m, "set_recipe") and not m.recipe.is_high_precision]


def followed(model: Any, steps: int = 6, optimizer: Any = None) -> list[int]:
    """Train; return how many modules ran in FP8 at each step."""
    counts = [len(in_fp8(model))]
    train(model, steps, optimizer, after=lambda step, loss: counts.append(len(in_fp8(model))))
    return counts[:-1]


def test_steps_of_an_entry() -> None:
    entry = Fallback(module="m", gemms=ALL, from_step=2, until_step=5)
    assert [step for step in range(8) if entry.holds(step)] == [2, 3, 4]
    assert entry.is_scheduled and not Fallback(module="m", gemms=ALL).is_scheduled
    spans: list[dict[str, Any]] = [{}, {"until_step": 3}, {"from_step": 4}, {"from_step": 2, "until_step": 5}]
    found = [Fallback(module="m", gemms=ALL, **span).span() for span in spans]
    assert found == ["always", "until step 3", "from step 4", "steps 2 to 4"]


@pytest.mark.parametrize("steps", [{"until_step": 0}, {"from_step": 5, "until_step": 5}])
def test_an_entry_that_never_holds_is_refused(steps: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the fallback of 'm' never holds: until_step"):
        Fallback(module="m", gemms=ALL, **steps)


@pytest.mark.parametrize("step", [-1, 1.5, "7", True])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(UsageError, match="from_step of a fallback is the number of a step, 0 or more; 'm' has"):
        Fallback(module="m", gemms=ALL, from_step=step)


def test_lists_without_steps_still_load() -> None:
    (old,) = load_fallbacks('{"schema": 1, "fallbacks": [{"module": "m", "gemms": ["fprop"], "cast": null}]}')
    assert (old.from_step, old.until_step) == (None, None)
    (new,) = load_fallbacks('{"schema": 2, "fallbacks": [{"module": "m", "until_step": 3}]}')
    assert new.until_step == 3 and load_fallbacks({"fallbacks": [new.to_dict()]}) == [new]
    with pytest.raises(UsageError, match="fallback list of schema 3; this version reads schema 1 and 2"):
        load_fallbacks({"schema": 3, "fallbacks": []})


def test_a_changed_cast_is_not_scheduled() -> None:
    bf16, cast = Fallback(module="m", gemms=ALL), Fallback(module="m", gemms=ALL, cast=Cast())
    warm, kept = scheduled([bf16, cast], until_step=9)
    assert (warm.until_step, kept) == (9, cast)


def test_bf16_until_a_step_and_from_a_step_on() -> None:
    assert followed(fp8debug.apply(net(), WARM_UP)) == [0, 0, 0, 7, 7, 7]
    cool_down = [Fallback(module="blocks.*", gemms=ALL, from_step=4)]
    assert followed(fp8debug.apply(net(), cool_down)) == [7, 7, 7, 7, 1, 1]
    both = [*WARM_UP, *cool_down]
    assert followed(fp8debug.apply(net(), both)) == [0, 0, 0, 7, 1, 1]


def test_a_warm_up_multiplies_as_bf16_and_then_as_fp8() -> None:
    bf16 = train(net("bf16"), 6)
    mixed = train(fp8debug.apply(net(), WARM_UP), 6)
    assert mixed[:3] == bf16[:3] and mixed[3] != bf16[3]


def test_some_gemms_of_a_module_alone() -> None:
    model: Any = fp8debug.apply(net(), [Fallback(module="head", gemms=("dgrad",), until_step=1)])
    running = [key for key, cast in model.head.recipe.casts.items() if cast is None]
    assert running == [("dgrad", "grad_output"), ("dgrad", "weight")]
    model.fp8debug_schedule.set_step(1)
    assert all(model.head.recipe.casts.values())


def test_entries_without_steps_hold_in_every_step() -> None:
    entries = [Fallback(module="head", gemms=("wgrad",)), Fallback(module="head", gemms=("fprop",), until_step=2)]
    model: Any = fp8debug.apply(net(), entries)

    def left() -> set[str]:
        return {key[0].value for key, cast in model.head.recipe.casts.items() if cast is None}

    assert left() == {"fprop", "wgrad"}
    model.fp8debug_schedule.set_step(2)
    assert left() == {"wgrad"}


def test_training_that_goes_on_from_a_checkpoint_says_its_step() -> None:
    assert followed(fp8debug.apply(net(), WARM_UP, start_step=2), 3) == [0, 7, 7]
    assert followed(fp8debug.apply(net(), WARM_UP, start_step=9), 2) == [7, 7]
    assert [k for k in net().state_dict()] == [k for k in fp8debug.apply(net(), WARM_UP).state_dict()]


def test_steps_are_those_of_the_models_optimizer() -> None:
    model: Any = fp8debug.apply(net(), WARM_UP)
    other = nn.Linear(2, 2)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    for _ in range(5):
        stranger.step()
    assert model.fp8debug_schedule.step == 0
    heads = torch.optim.SGD(model.head.parameters(), lr=0.1)
    body = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    only: Any = fp8debug.apply(net(), WARM_UP, optimizer=stranger)
    stranger.step()
    heads.step()
    body.step()
    assert model.fp8debug_schedule.step == 2, "two optimizers of one model count twice: name one"
    assert only.fp8debug_schedule.step == 1


def test_the_loop_may_count_itself() -> None:
    model: Any = fp8debug.apply(net(), WARM_UP)
    model.fp8debug_schedule.set_step(0)
    assert set(followed(model, 5)) == {0}, "the optimizer counts no more"
    model.fp8debug_schedule.set_step(3)
    assert len(in_fp8(model)) == 7
    model.fp8debug_schedule.set_step(1)
    assert len(in_fp8(model)) == 0, "back, for a loop that repeats a step"
    with pytest.raises(UsageError, match="step is the number of the step under way, 0 or more; got -1"):
        model.fp8debug_schedule.set_step(-1)


def test_remove_restores_the_recipes() -> None:
    model: Any = fp8debug.apply(net(), WARM_UP)
    schedule = model.fp8debug_schedule
    schedule.remove()
    schedule.remove()
    assert len(in_fp8(model)) == 7 and not hasattr(model, "fp8debug_schedule")
    fp8debug.apply(model, WARM_UP)
    assert schedule.step == 0 and len(in_fp8(model)) == 0


def test_a_second_schedule_is_refused() -> None:
    model = fp8debug.apply(net(), [Fallback(module="head", gemms=ALL, until_step=2)])
    with pytest.raises(UsageError, match=r"head has a schedule already; model\.fp8debug_schedule\.remove\(\) ends it"):
        fp8debug.apply(model, [Fallback(module="head", gemms=("fprop",))])
    with pytest.raises(UsageError, match="the model has a schedule already"):
        fp8debug.apply(
            model, [Fallback(module="blocks.0.up", gemms=ALL, until_step=2), Fallback(module="blocks.1.up", gemms=ALL)]
        )
    assert "blocks.1.up" in in_fp8(model), "nothing of a list that is refused is put into effect"
    fp8debug.apply(model, [Fallback(module="blocks.0.up", gemms=ALL)])
    assert "blocks.0.up" not in in_fp8(model)
    with pytest.raises(UsageError, match="start_step is the number of the next optimizer step"):
        fp8debug.apply(net(), WARM_UP, start_step=-2)
    with pytest.raises(NoMatchError, match=r"fallback module 'block\.\*' matches nothing: did you mean"):
        fp8debug.apply(net(), [Fallback(module="block.*", gemms=ALL)])


def test_a_copy_of_the_model_does_not_switch_and_the_model_is_not_kept_alive() -> None:
    model: Any = fp8debug.apply(net(), WARM_UP)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    train(model, 4)
    assert len(in_fp8(model)) == 7 and in_fp8(copied) == in_fp8(loaded) == []
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_names_of_a_run_fit_a_wrapped_model() -> None:
    model = nn.Sequential()
    model.add_module("_orig_mod", net())
    fp8debug.apply(model, [Fallback(module="blocks.0.up", gemms=ALL)])
    assert "_orig_mod.blocks.0.up" not in in_fp8(model) and "_orig_mod.blocks.1.up" in in_fp8(model)


def test_an_amax_history_starts_anew_after_bf16() -> None:
    model: Any = fp8debug.apply(net("tensorwise_delayed"), [Fallback(module="head", gemms=ALL, from_step=2, until_step=4)])
    train(model, 2)
    assert not model.head._histories, "the switch to BF16 drops what the casts that stop knew"
    assert model.blocks[0].up._histories
    train(model, 3)
    (history, *_) = model.head._histories.values()
    assert int(history.memory[1]) == 1, "the first step in FP8 scales by its own amax"


def test_a_watched_run_says_when_a_recipe_changes(tmp_path: Path) -> None:
    model = fp8debug.apply(net(), [*WARM_UP, Fallback(module="head", gemms=("fprop",), from_step=5)])
    watch = fp8debug.watch(model, tmp_path / "run", every=1)
    train(model, 7)
    watch.close()
    run = fp8debug.Run(tmp_path / "run")
    events = run.sql("SELECT step, module, message FROM events WHERE kind = 'recipe' ORDER BY step, module").to_pylist()
    head = [(e["step"], e["message"]) for e in events if e["module"] == "head"]
    assert head == [
        (0, "begins by a schedule with bf16 instead of blockwise"),
        (3, "blockwise instead of bf16"),
        (5, "fprop input: bf16 instead of e4m3fn 1x128 current; fprop weight: bf16 instead of e4m3fn 128x128 current"),
    ]
    assert len(events) == 15
    steps = run.sql("SELECT step, sampled FROM steps ORDER BY step").to_pylist()
    assert [row["step"] for row in steps] == list(range(7)), "steps in which nothing ran in FP8 count too"
    first = run.sql("SELECT min(step) AS step FROM sites").to_pylist()[0]["step"]
    assert first == 3
    assert all(m["fp8"] for m in run.modules), "coverage knows the recipe that is to come"
    assert [f.code for f in fp8debug.triage(run)] == []


def test_a_scheduled_run_is_not_changed_by_watching(tmp_path: Path) -> None:
    alone = train(fp8debug.apply(net(), WARM_UP), 6)
    model = fp8debug.apply(net(), WARM_UP)
    with fp8debug.watch(model, tmp_path / "run", every=2):
        assert train(model, 6) == alone
    assert math.isfinite(alone[-1])

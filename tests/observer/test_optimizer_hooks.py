"""Hooks before and after every optimizer's step: they may come and go within one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8debug.observer.optimizer_hooks import after_any_optimizer, before_any_optimizer, optimizers_under_way


def test_hooks_are_added_and_removed_within_one_another() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    called: list[str] = []
    ends: dict[str, Callable[[], None]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda *args: called.append(name)

    def change(*args: Any) -> None:
        called.append("first")
        ends["second"]()  # after this one in order, and not called any more
        if "third" not in ends:
            ends["third"] = after_any_optimizer(note("third"))

    ends["first"] = after_any_optimizer(change)
    ends["second"] = after_any_optimizer(note("second"))
    others = register_optimizer_step_post_hook(note("the program's own"))
    try:
        optimizer.step()
        assert called == ["first", "the program's own"]
        optimizer.step()
        assert called[2:] == ["first", "third", "the program's own"]
    finally:
        others.remove()
        for end in ends.values():
            end()
            end()
    called.clear()
    optimizer.step()
    assert not called


def test_a_step_is_under_way_from_its_first_hook_to_its_last() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    seen: list[tuple[str, list[torch.optim.Optimizer]]] = []
    ends = [
        before_any_optimizer(lambda *args: seen.append(("before", optimizers_under_way()))),
        after_any_optimizer(lambda *args: seen.append(("after", optimizers_under_way()))),
    ]

    def closure() -> float:
        seen.append(("within", optimizers_under_way()))
        return 0.0

    try:
        optimizer.step(closure)
    finally:
        for end in ends:
            end()
    assert seen == [("before", [optimizer]), ("within", [optimizer]), ("after", [])]

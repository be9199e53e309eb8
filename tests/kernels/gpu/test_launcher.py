"""The cache of plans: what it keeps, and for how long."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from fp8debug.kernels.gpu import launcher
from fp8debug.kernels.gpu.launcher import PlanCache


class Named:
    """An object that a key names by its id."""


def test_an_object_that_a_key_names_lives_as_long_as_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MAX_PLANS", 2)
    cache: PlanCache[str] = PlanCache()
    named = Named()
    gone = ref(named)
    assert cache.keep((id(named), 8), "first", named) == "first"
    del named
    cache.keep((0, 8), "second")
    gc.collect()
    assert gone() is not None and sorted(cache.values()) == ["first", "second"], "or another object had its id"
    cache.keep((0, 16), "third")
    gc.collect()
    assert gone() is None and dict(cache) == {(0, 16): "third"}


def test_a_plan_may_say_that_there_is_none() -> None:
    cache: PlanCache[str | None] = PlanCache()
    assert cache.keep("key", None) is None and "key" in cache

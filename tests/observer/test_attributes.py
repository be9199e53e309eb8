"""Weights that a module computes at each access: a watch reads none of them, and draws no random number of the program's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fp8debug
from fp8debug.observer.attributes import has, is_computed, stored
from tests.recording.models import rows_of
from tests.training import losses_of, watched


class Drawn(nn.Module):
    """A weight with noise that is drawn anew at each access."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.01 * torch.randn_like(weight)


def drawn(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Drawn())
    parametrize.register_parametrization(layer, "bias", Drawn())
    return layer


class Counted(nn.Linear):
    """Counts the reads of each of its properties."""

    reads: dict[str, int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "reads", {"weight": 0, "bias": 0, "in_features": 0, "out_features": 0})
        nn.Module.__init__(self)
        self.own = nn.Parameter(torch.randn(64, 64) / 8)
        self.own_bias = nn.Parameter(torch.zeros(64))

    def _read(self, name: str, value: Any) -> Any:
        self.reads[name] += 1
        return value

    @property
    def weight(self) -> Any:  # type: ignore[override]  # computed, as some libraries do
        return self._read("weight", self.own * 1.0)

    @property
    def bias(self) -> Any:  # type: ignore[override]  # as above
        return self._read("bias", self.own_bias * 1.0)

    @property
    def in_features(self) -> Any:  # type: ignore[override]  # as above
        return self._read("in_features", 64)

    @property
    def out_features(self) -> Any:  # type: ignore[override]  # as above
        return self._read("out_features", 64)


def _counted(layer: nn.Module) -> nn.Module:
    return Counted()


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
    "drawn": drawn,
    "counted": _counted,
}


def _losses(
    wrap: Callable[[Any], nn.Module], path: Path | None, kind: str | None, when: str = "before"
) -> tuple[list[float], Any]:
    """Train; return the losses, and how often properties were read where they count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    if when == "before":
        model[0] = wrap(model[0])
    if kind == "torchao":
        float8 = pytest.importorskip("torchao.float8")
        model = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    elif kind is not None:
        fp8debug.convert(model, kind)
    if when == "after conversion":
        model[0] = wrap(model[0])
    x = torch.randn(64, 64)
    with watched(model, path, every=2) as watch:
        if when == "under the watch":
            model[0] = wrap(model[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = losses_of(model, lambda _: model(x).square().mean(), steps=5, optimizer=optimizer, watch=watch)
        if watch is not None:
            watch.coverage()
    return found, getattr(model[0], "reads", None)


@pytest.mark.parametrize("kind", [None, "blockwise"])
@pytest.mark.parametrize("name", WRAPS)
def test_a_computed_weight_is_read_as_often_as_the_program_reads_it(
    name: str, kind: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _losses(WRAPS[name], tmp_path / "run", kind) == _losses(WRAPS[name], None, kind)
    assert "not watched any more" not in (said := capfd.readouterr().err)
    recorded = {row["module"] for row in rows_of(tmp_path / "run")}
    if name == "counted":
        assert recorded == {"2"} and (kind is not None or "in_features and out_features are computed at each access" in said)
    elif kind is None:  # the weight as the GEMM read it
        assert recorded == {"0", "2"}


@pytest.mark.parametrize("kind", [None, "blockwise", "torchao"])
@pytest.mark.parametrize("name", [name for name in WRAPS if name != "counted"])
def test_a_weight_that_is_parametrized_late_is_not_read_either(name: str, kind: str | None, tmp_path: Path) -> None:
    when = "under the watch" if kind is None else "after conversion"
    assert _losses(WRAPS[name], tmp_path / "run", kind, when) == _losses(WRAPS[name], None, kind, when)
    if kind == "blockwise":  # an Fp8Linear's weight is recorded as its own forward read it
        assert {row["module"] for row in rows_of(tmp_path / "run")} == {"0", "2"}


@pytest.mark.parametrize("name", ["spectral_norm", "drawn"])
def test_an_fp8_linear_reads_a_computed_weight_once_a_forward(name: str) -> None:
    layer: Any = WRAPS[name](fp8debug.convert(nn.Sequential(nn.Linear(64, 64)), "blockwise")[0])  # type: ignore[index]
    calls = []
    layer.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append(1))
    layer(torch.randn(32, 64))
    assert len(calls) == 1
    layer.load_state_dict(layer.state_dict())
    assert len(calls) == 1


def test_a_fault_in_a_computed_weight_is_refused() -> None:
    model = fp8debug.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "blockwise")
    parametrizations.spectral_norm(model[0])  # type: ignore[index]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(fp8debug.Fp8DebugError, match="0 has no weight of its own: its weight is computed at each access"):
        fp8debug.inject(model, "swiglu_outlier", "0")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_lazy_module_is_recorded_from_its_first_call(tmp_path: Path) -> None:
    def losses(path: Path | None) -> list[float]:
        torch.manual_seed(0)
        model, found, x = nn.Sequential(nn.LazyLinear(48), nn.LazyConv1d(1, 1), nn.Linear(48, 16)), [], torch.randn(8, 4, 32)
        with watched(model, path, every=1) as watch:
            for _ in range(3):
                loss = model(x).square().mean()
                loss.backward()
                found.append(loss.item())
                if watch is not None:
                    watch.step(loss=loss)
        return found

    assert losses(tmp_path / "run") == losses(None)
    assert {row["module"] for row in rows_of(tmp_path / "run")} == {"0", "2"}
    entry = fp8debug.Run(tmp_path / "run").manifest["modules"][0]
    assert (entry["in_features"], entry["out_features"], entry["params"]) == (32, 48, 33 * 48)


def test_convert_leaves_a_lazy_module_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    model = fp8debug.convert(nn.Sequential(nn.LazyLinear(64), nn.Linear(64, 64)), "blockwise")
    assert model(torch.randn(32, 64)).shape == (32, 64)
    assert "0 (LazyLinear) is not converted: its shape is unknown before its first call" in capfd.readouterr().err
    assert isinstance(fp8debug.convert(model, "blockwise")[0], fp8debug.Fp8Linear)  # type: ignore[index]  # a Sequential


@pytest.mark.parametrize("kind", [None, "blockwise", "tensorwise_delayed", "torchao"])
def test_no_random_number_of_the_program_is_drawn(kind: str | None, tmp_path: Path) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state())]

    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    before = states()
    if kind == "torchao":
        float8 = pytest.importorskip("torchao.float8")
        model = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    elif kind is not None:
        fp8debug.convert(model, kind)
    x = torch.ones(32, 64)
    with fp8debug.watch(model, tmp_path / "run", every=1, dump=() if kind == "torchao" else ("0:fprop:input@0",)) as watch:
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            watch.step(loss=loss)
        if kind == "blockwise":
            watch.compare_inference(x)
    assert states() == before


def test_what_a_module_stores_is_told_from_what_it_computes() -> None:
    plain, computed = nn.Linear(4, 4), Counted()
    assert stored(plain, "weight") is plain.weight and stored(plain, "in_features") == 4 and stored(plain, "nothing") is None
    assert has(plain, "bias") and not has(nn.Linear(4, 4, bias=False), "bias") and not is_computed(plain, "weight")
    assert stored(computed, "weight") is None and has(computed, "bias") and is_computed(computed, "in_features")
    assert set(computed.reads.values()) == {0}
    old: Any = nn.utils.spectral_norm(nn.Linear(4, 4))
    assert stored(old, "weight") is old.weight
    parametrizations.weight_norm(plain)
    assert stored(plain, "weight") is None and has(plain, "weight") and stored(plain, "bias") is plain.bias

"""Recording on a GPU: nothing interferes, nothing waits for the device, nothing grows; and the same on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.kernels import reference
from fp8debug.kernels.amax_history import MAX_RECENT
from fp8debug.linear import Fp8Linear
from fp8debug.metrics import slots
from fp8debug.types import OPERAND_SITES
from tests.recording.models import rows_of

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]
RECIPES = ["blockwise", "tensorwise_delayed", "rowwise", "mxfp8"]
DTYPES = [torch.bfloat16, torch.float32]
Rows = dict[tuple[Any, ...], dict[str, Any]]


class Mlp(nn.Module):
    """SwiGLU and a head: x[..., width] -> [..., 128]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(functional.silu(self.gate(x)) * self.up(x))
        out: Tensor = self.head(x)
        return out


class Training:
    """A model, its optimizer and its data, the same every time; in BF16 the sizes are whole blocks, in FP32 they are ragged."""

    def __init__(self, device: str, recipe: str | None, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        ragged = dtype is torch.float32
        width, hidden = (384, 256) if device == "cuda" else (64, 160)
        self.model: nn.Module = Mlp(width - 24 * ragged, hidden).to(dtype)
        if recipe:
            fp8debug.convert(self.model, recipe)
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        rows = (512 if device == "cuda" else 48) - ragged
        self.x = torch.randn(4, rows, width - 24 * ragged).to(device, dtype)
        self.classes = torch.randint(128, (4, rows)).to(device)

    def step(self, number: int) -> Tensor:
        loss = functional.cross_entropy(self.model(self.x[number % 4]).float(), self.classes[number % 4])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, steps: int, watch: Any = None) -> list[Tensor]:
        """Train; the gradients of the last step are left."""
        losses = []
        for number in range(steps):
            self.optimizer.zero_grad()
            losses.append(self.step(number))
            if watch is not None:
                watch.step(loss=losses[-1], grad_norm=losses[-1])
        return losses


@contextmanager
def no_synchronizing() -> Iterator[None]:
    """Let every synchronization with the GPU raise; on a CPU there is none."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def by_key(path: Path) -> Rows:
    """Every row of a run's stats by its key."""
    key = ("step", "module", "gemm", "tensor", "cast_name", "reference", "actual")
    return {tuple(row[k] for k in key): row for row in rows_of(path)}


def events_of(path: Path) -> list[str]:
    return [
        f"{row['kind']} {row['module']}: {row['message']}"
        for part in sorted(path.glob("rank=*/events/*.parquet"))
        for row in pq.read_table(part, partitioning=None).to_pylist()
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("recipe", [*RECIPES, None])
@pytest.mark.parametrize("device", DEVICES)
def test_training_is_bit_identical_with_and_without(device: str, recipe: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    steps = 20 if device == "cuda" else 6
    alone, watched = (Training(device, recipe, dtype) for _ in range(2))
    losses = alone.run(steps)
    path = tmp_path / "run"
    with fp8debug.watch(watched.model, path, every=1, shadow_rows=16) as watch:
        losses_watched = watched.run(steps, watch)
    assert torch.equal(torch.stack(losses), torch.stack(losses_watched))
    for a, b in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)
    assert events_of(path) == []
    assert len({key[1] for key in by_key(path)}) == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("recipe", [*RECIPES, None])
@pytest.mark.parametrize("device", DEVICES)
def test_a_sampled_step_never_waits_for_the_device(device: str, recipe: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    training = Training(device, recipe, dtype)
    path = tmp_path / "run"
    with fp8debug.watch(training.model, path, every=1, shadow_rows=16) as watch:
        training.run(2, watch)
        with no_synchronizing():
            training.run(3, watch)
    assert events_of(path) == []
    assert sorted({key[0] for key in by_key(path)}) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_memory_does_not_grow(device: str, recipe: str, tmp_path: Path) -> None:
    steps = 5 if device == "cpu" else 20 if recipe == "mxfp8" else 100  # which runs in torch ops
    training = Training(device, recipe)
    with fp8debug.watch(training.model, tmp_path / "run", every=1, shadow_rows=16) as watch:
        training.run(MAX_RECENT + 4 if device == "cuda" else 5, watch)  # delayed scaling keeps the scales of so many calls
        gc.collect()  # or what earlier tests left goes later
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        training.run(steps, watch)
        after = torch.cuda.memory_allocated() if device == "cuda" else 0
    assert after == before


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_record_the_same_numbers(device: str, recipe: str, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        training = Training(device, recipe)
        with fp8debug.watch(training.model, tmp_path / name, every=1, shadow_rows=16) as watch:
            for number in range(3):  # two microbatches a step
                training.optimizer.zero_grad()
                training.step(number)
                watch.step(loss=training.step(number + 1))
        found.append(by_key(tmp_path / name))
    assert found[0] and found[0] == found[1]


#: Extremes that are a quotient or a logarithm of FP32 numbers, which two devices round differently.
NEAR = ("worst_block_nmse", "max_block_range_log2", "headroom", "worst_row_nmse")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_those_of_the_reference(device: str, dtype: torch.dtype, recipe: str, tmp_path: Path) -> None:
    """One forward and backward pass of one layer, against the reference on the CPU, whose operands are the same to the bit."""
    generator = torch.Generator().manual_seed(0)
    ragged = dtype is torch.float32
    m, n, k = (253, 136, 376) if ragged else (256, 128, 384)
    x = (torch.randn(m, k, generator=generator) * torch.logspace(-2, 1, m)[:, None]).to(dtype)
    gradient = (torch.randn(m, n, generator=generator) * 1e-3).to(dtype)
    x[3], x[5, 7] = 0.0, 300.0
    runs: list[Rows] = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        layer = Fp8Linear(k, n, dtype=dtype, recipe=recipe)
        layer.to(where)
        path = tmp_path / f"{len(runs)}"
        with fp8debug.watch(layer, path, every=1, shadow_rows=64) as watch:
            layer(x.detach().to(where).requires_grad_()).backward(gradient.to(where))
            watch.step()
        assert events_of(path) == []
        runs.append(by_key(path))
    wanted, found = runs
    assert set(wanted) == set(found)
    kinds = slots()
    for key, row in wanted.items():
        for name, slot in kinds.items():
            want, value = row.get(name), found[key][name]
            if want is None or value is None or (slot.kind == "int64" and key[5] == "operand"):
                assert want == value, (key, name, want, value)
                continue
            if key[5] != "operand" and name in ("amin", "num_zero"):  # a sum that almost vanishes is rounding error
                continue
            if key[5] == "exact" and ("err" in name or "nmse" in name):  # of the accumulation: 14 bits, FP32 on a CPU
                assert found[key]["sum_err2"] <= 1e-4 * found[key]["sum_x2"]
                continue
            if name in ("num_top1_flips", "num_top2_flips"):  # of columns that are almost equal
                assert abs(want - value) <= max(2, 0.02 * row["num_choice_rows"]), (key, name, want, value)
                continue
            # Sums of errors cancel; a result's error depends on how its GEMM sums.
            loose = key[5] != "operand"
            size = abs(want) + (row["sum_x2"] * row["numel"]) ** 0.5 * 1e-2 if name in ("sum_x", "sum_err") else abs(want)
            size += row["sum_x2"] * 1e-4 if loose and name in ("sum_err2", "damage") else 0.0
            size += row["amax"] * 2.0**-7 if loose and name == "max_abs_err" else 0.0
            tolerance = 0.02 if loose else 1e-5 if name in NEAR or slot.kind == "float64" else 0.0
            assert np.all(np.abs(np.subtract(value, want)) <= tolerance * size + 1e-30 * loose), (key, name, want, value)


@pytest.mark.parametrize("device", DEVICES)
def test_operands_are_the_references_to_the_bit(device: str) -> None:
    for recipe in (*RECIPES, "blockwise_e8m0"):
        layer = Fp8Linear(200, 136, recipe=recipe)
        x = torch.randn(130, 200).bfloat16()
        x[2] = 0
        for which, role in OPERAND_SITES:
            found = layer.operand(which, role, x.to(device))
            cast = layer.recipe.casts[which, role]
            assert isinstance(found, tuple) and cast is not None
            scale = reference.scale_of(x.abs().float().amax(), cast)[1] if cast.scaling == "delayed" else None
            wanted = reference.quantize(x, cast, scale)
            assert torch.equal(found[0].scale_inv.cpu(), wanted.scale_inv)
            assert torch.equal(found[0].data.cpu().view(torch.uint8), wanted.data.view(torch.uint8)), (recipe, which, role)


@pytest.mark.gpu
def test_what_no_kernel_takes_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    from fp8debug.kernels import dispatch

    dispatch._said.clear()
    layer = Fp8Linear(256, 256, recipe="mxfp8", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    layer(x)
    layer(x)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "fp8debug: Fp8Linear fprop of (e4m3fn 1x32 current pow2_ceil) by (e4m3fn 1x32 current pow2_ceil) runs in plain torch"
        " ops, slowly: no FP8 GEMM has scales of this granularity"
    ]

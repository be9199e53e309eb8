"""A training script in this process: real models, arms and recordings, without a new interpreter for each training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.run.arms import Arm, apply_arm
from fp8debug.trials import Script, Trials
from fp8debug.trials.script import Ending


class Chain(nn.Module):
    """Six Linears with norms and no way around any of them: x[..., 64] -> [..., 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 16 if i == 5 else 64, bias=False) for i in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(functional.silu(functional.rms_norm(x, x.shape[-1:])))
        return x


#: (model) -> None: what the script plants in its model.
Plant = Callable[[Chain], None]


def backwards(module: str) -> Plant:
    """Plant a fault that no statistic sees: the module's weight learns in the wrong direction while its wgrad is in FP8."""

    def plant(model: Chain) -> None:
        linear: Any = model.get_submodule(module)

        def turned(grad: Tensor) -> Tensor:
            in_fp8 = isinstance(linear, fp8debug.Fp8Linear) and linear.recipe.casts["wgrad", "input"] is not None  # type: ignore[index]  # a Gemm equals its name
            return -grad if in_fp8 else grad

        linear.weight.register_hook(turned)

    return plant


def planted(name: str, module: str, **options: Any) -> Plant:
    """Plant a fault of the catalogue."""
    return lambda model: void(fp8debug.inject(model, name, module=module, **options))


def void(value: object) -> None:
    """Return nothing of a value."""


def healthy(model: Chain) -> None:
    """Plant nothing."""


def train(arm: Arm, repeat: int, out: Path, plant: Plant = healthy, *, steps: int, every: int | None = None) -> Ending:
    """Train one arm of the script and record it."""
    began = time.monotonic()
    torch.manual_seed(repeat)
    model = Chain()
    fp8debug.convert(model, "blockwise")
    plant(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with fp8debug.watch(model, out, every=every or 10**9, what_if=()) as watch:
        watch._observer.sampling = every is not None
        applied = apply_arm(arm, [model])
        (out / "arm.json").write_text(json.dumps(applied))
        for step in range(steps):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * repeat + step))
            loss = functional.cross_entropy(model(x), x[:, :16].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    return Ending(0, time.monotonic() - began, False, "")


class Laboratory:
    """Trials whose trainings run here.

    Args:
        folder: for the script's file and the trainings.
        plant: what the script plants.
        steps: of a training.

    Attributes:
        trained: (arm, repeat) of each training that was really done.
    """

    def __init__(self, folder: Path, plant: Plant = healthy, steps: int = 20) -> None:
        self.folder, self.plant, self.steps = folder, plant, steps
        self.trained: list[tuple[str, int]] = []
        (folder / "train.py").write_text("raise SystemExit('never started')")

    def trials(self, **options: Any) -> Trials:
        """Return the trials as they would be after a new start."""

        def here(arm: Arm, repeat: int, out: Path) -> Ending:
            self.trained.append((arm.name, repeat))
            return train(arm, repeat, out, self.plant, steps=self.steps)

        script = Script(path=self.folder / "train.py", steps=self.steps)
        return Trials(self.folder / "trials", script, train=here, **options)

    def record(self) -> fp8debug.Run:
        """Return the run that a user would start from."""
        (self.folder / "run").mkdir()
        train(Arm(name="fp8"), 0, self.folder / "run", self.plant, steps=self.steps, every=4)
        return fp8debug.Run(self.folder / "run")

"""Caches of inductor and of autograd on disk: a watch puts nothing in them that a run without it would not, nor finds other code.

python tests/conditions/test_compiled_caches.py RUN|-: train two compiled models, watched into a folder or not, and print as JSON
their losses and gradients, and what the caches counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch._dynamo.utils import counters

import fp8debug
from tests.conditions.compiled import COMPILES
from tests.conditions.test_compiled_linear import Net, assert_same_rows

WIDTH, STEPS = 32, 3
pytestmark = COMPILES


def train(path: Path | None, backend: str = "inductor") -> list[str]:
    """Return the losses, and the sums of gradients at the end."""
    torch.manual_seed(0)
    model = fp8debug.convert(Net(False), "rowwise")
    for block in model.blocks:  # type: ignore[union-attr]  # of this model
        block.compile(backend=backend, fullgraph=True)
    watch = fp8debug.watch(model, path, every=2, what_if=()) if path else None
    found = []
    for step in range(STEPS):
        loss = model(torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        found.append(float(loss).hex())
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    return [*found, *(float(p.grad.double().sum()).hex() for p in model.parameters() if p.grad is not None)]


def run(cache: Path, path: Path | None) -> tuple[list[str], dict[str, int]]:
    """Train in a process of its own, with a folder for the caches."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(path or "-")],
        env=environment | {"TORCHINDUCTOR_AUTOGRAD_CACHE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: Any = json.loads(done.stdout.splitlines()[-1])
    return found[0], found[1]


def test_what_a_cache_has_is_the_same_with_and_without_a_watch(tmp_path: Path) -> None:
    first = run(tmp_path / "cache", tmp_path / "cold")
    second = run(tmp_path / "cache", None)
    third = run(tmp_path / "cache", tmp_path / "warm")
    assert first[0] == second[0] == third[0] and second[1] == third[1]
    assert first[1]["fxgraph_cache_miss"] and first[1]["autograd_cache_saved"]
    assert second[1]["fxgraph_cache_hit"] and second[1]["autograd_cache_hit"] and "fxgraph_cache_miss" not in second[1]
    assert_same_rows(tmp_path / "warm", tmp_path / "cold")


if __name__ == "__main__":
    results = train(None if sys.argv[1] == "-" else Path(sys.argv[1]))
    counted = {**counters["inductor"], **counters["aot_autograd"]}
    print(json.dumps([results, {name: number for name, number in counted.items() if "cache" in name}]))

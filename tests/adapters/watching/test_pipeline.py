"""Which modules a rank's own manifest lists: those of its pipeline stage, and none where no stage ran."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import stage as stages

import fp8debug


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("runs", [False, True])
def test_a_rank_lists_its_modules_once_a_stage_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool, quiet: bool
) -> None:
    """torch.distributed.pipelining is imported in any case, and the parameters are on no mesh."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(stages.PipelineStage, "_prepare_forward_infra", lambda *args: None)
    model = fp8debug.convert(nn.Sequential(nn.Linear(32, 32)), "blockwise")
    options: dict[str, Any] = {"ranks": [0]} if quiet else {}
    with fp8debug.watch(model, tmp_path / "run", every=1, **options) as watch:
        if runs:
            for _ in range(2):
                stages.PipelineStage._prepare_forward_infra(SimpleNamespace(stage_index=1), 2)  # type: ignore[arg-type,call-arg]
        model(torch.randn(32, 32)).sum().backward()
        watch.step(loss=math.nan)  # wakes a quiet rank
    manifest = json.loads((tmp_path / "run" / "rank=00001" / "manifest.json").read_text())
    assert [m["fqn"] for m in manifest.get("modules", [])] == (["0"] if runs else [])
    assert ("modules" in manifest) == runs

"""The tool finds a short accumulator by itself: fast accumulation against promotion, on tensor cores and by the reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8debug
from fp8debug import Fp8Linear

#: On a CPU the reference stands for the tensor core; it takes a second for 16 rows.
DEVICES = [pytest.param("cuda", 256, marks=pytest.mark.gpu), ("cpu", 16)]
FAST = fp8debug.get_recipe("tensorwise_current").replace(gemm="fprop", fast_accum=True, name="tensorwise_fast")


def recorded(path: Path, device: str, size: int, length: int, recipe: Any, steps: int = 3) -> dict[str, float]:
    """Run layers of K = length on uniform operands under a watch; return the worst SQNR and gain against the exact GEMM."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = Fp8Linear(length, size, bias=False, dtype=dtype, device=device, recipe=recipe)
    generator = torch.Generator().manual_seed(length)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(size, length, generator=generator))
    with fp8debug.watch(torch.nn.ModuleDict({"layer": layer}), path, every=1, what_if=()) as watch:
        for _ in range(steps):
            x = torch.rand(size, length, generator=generator).to(dtype).to(device)
            layer(x.requires_grad_()).float().mean().backward()
            watch.step()
    query = "SELECT min(sqnr_db) AS sqnr_db, min(gain) AS gain FROM sites WHERE reference = 'exact' AND tensor = 'output'"
    (row,) = fp8debug.Run(path).sql(query).to_pylist()
    print(f"{device} K={length} {FAST.name if recipe is FAST else recipe}: {row['sqnr_db']:.2f} dB, gain {row['gain']:.4f}")
    return dict(row)


@pytest.mark.parametrize(("device", "size"), DEVICES)
def test_fast_accumulation_is_found_and_grows_with_the_contracted_dimension(device: str, size: int, tmp_path: Path) -> None:
    found = {}
    for length in (4096, 16384):
        path = tmp_path / f"{length}"
        found[length] = recorded(path, device, size, length, FAST)
        (finding,) = fp8debug.triage(path)
        assert (finding.code, finding.module, finding.gemm, finding.tensor) == ("F108", "layer", "fprop", "output")
        assert finding.severity == "error" and f"its sums over {length} terms keep too few bits" in finding.message
        assert finding.value == pytest.approx(found[length]["sqnr_db"])
    assert 18 < found[4096]["sqnr_db"] < 28 and found[4096]["gain"] == pytest.approx(0.93, abs=0.03)
    assert 8 < found[16384]["sqnr_db"] < 15 and found[16384]["gain"] == pytest.approx(0.75, abs=0.04)
    fallbacks = fp8debug.recommend(tmp_path / "4096", fp8debug.triage(tmp_path / "4096"))
    assert [(f.module, f.gemms, f.cast, f.reasons) for f in fallbacks] == [("layer", ("fprop",), None, ("F108",))]


@pytest.mark.parametrize("recipe", ["tensorwise_current", "blockwise"])
@pytest.mark.parametrize(("device", "size"), DEVICES)
def test_promotion_leaves_nothing_to_find(device: str, size: int, recipe: str, tmp_path: Path) -> None:
    row = recorded(tmp_path / "run", device, size, 16384, recipe)
    assert row["sqnr_db"] > 50 and math.isclose(row["gain"], 1, abs_tol=2e-3)
    assert [f.code for f in fp8debug.triage(tmp_path / "run")] == []

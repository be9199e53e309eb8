"""Fast accumulation against promotion: ``python examples/accumulation.py``; the tool finds the short accumulator by itself.

One layer on uniform operands in [0, 1), as in DeepSeek-V3's section on accumulation: with all products of one sign a sum grows
steadily, and an accumulator of 14 bits drops ever more of each further product. On a GPU with FP8 the tensor cores do it; on
a CPU the reference does, whose arithmetic is the same. docs/accumulation.md has the figures.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import fp8debug
from fp8debug import Fp8Linear

PROMOTED = fp8debug.get_recipe("tensorwise_current")
FAST = PROMOTED.replace(gemm="fprop", fast_accum=True, name="tensorwise_fast")


def record(path: Path, length: int, rows: int, recipe: fp8debug.Recipe, device: str) -> None:
    """Run one layer with K = length for three steps under a watch."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = Fp8Linear(length, rows, bias=False, device=device, dtype=dtype, recipe=recipe)
    nn.init.uniform_(layer.weight)
    with fp8debug.watch(nn.ModuleDict({"layer": layer}), path, every=1, what_if=()) as watch:
        for _ in range(3):
            x = torch.rand(rows, length, device=device, dtype=dtype, requires_grad=True)
            loss = layer(x).float().mean()
            loss.backward()
            watch.step(loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], metavar="K")
    parser.add_argument("--out", type=Path, default=Path("runs/accumulation"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 256 if device == "cuda" else 16
    torch.manual_seed(0)
    query = (
        "SELECT min(sqnr_db) AS db, min(gain) AS gain, max(max_abs_err / amax) AS worst FROM sites"
        " WHERE reference = 'exact' AND tensor = 'output'"
    )
    print(f"{'K':>6}  {'sums':10} {'SQNR':>9} {'gain':>8} {'worst error':>12}  triage")
    for length in options.lengths:
        for recipe in (PROMOTED, FAST):
            path = options.out / f"K={length}" / recipe.name
            if (path / "manifest.json").exists():
                shutil.rmtree(path)  # an earlier run of this example
            record(path, length, rows, recipe, device)
            (row,) = fp8debug.Run(path).sql(query).to_pylist()
            findings = fp8debug.triage(path)
            verdict = ", ".join(f"{f.code} {f.name} at {f.module} {f.gemm}" for f in findings) or "clean"
            sums = "fast" if recipe is FAST else "promoted"
            print(f"{length:6}  {sums:10} {row['db']:6.2f} dB {row['gain']:8.4f} {row['worst']:12.2%}  {verdict}")
            if findings:
                print(f"{'':8}{findings[0].message}", file=sys.stderr)


if __name__ == "__main__":
    main()

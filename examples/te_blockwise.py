"""Transformer Engine under a watch, on a GPU: ``python examples/te_blockwise.py [--recipe block|current|delayed]``.

A TransformerLayer trains for twenty steps in FP8; then coverage says what ran, and triage what is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn import functional

import fp8debug

RECIPES = {"block": "Float8BlockScaling", "current": "Float8CurrentScaling", "delayed": "DelayedScaling"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/te", help="the run's folder, replaced if it is there")
    parser.add_argument("--recipe", default="block", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        print("error: this example needs a GPU and Transformer Engine: pip install 'fp8debug[te]'", file=sys.stderr)
        return 2
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    torch.manual_seed(0)
    layer = te.TransformerLayer(
        options.width, 4 * options.width, options.width // 64, fuse_qkv_params=True, params_dtype=torch.bfloat16, device="cuda"
    )
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4)
    shutil.rmtree(options.out, ignore_errors=True)
    with fp8debug.watch(layer, Path(options.out), every=5) as watch:
        for _ in range(options.steps):
            x = torch.randn(256, 4, options.width, device="cuda", dtype=torch.bfloat16)
            with te.autocast(enabled=True, recipe=getattr(recipe, RECIPES[options.recipe])()):
                loss = functional.mse_loss(layer(x).float(), x.float().roll(1, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    print(f"{options.out}: fp8debug coverage {options.out}; fp8debug triage {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

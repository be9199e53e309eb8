"""torchao's Float8Linear under a watch: ``python examples/torchao_float8.py``; on a CPU its GEMMs are emulated.

A small gated network trains for twenty steps with torchao's recipe; then coverage says what ran, and triage what is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.down(functional.silu(self.gate(x)) * self.up(x)))
        return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/torchao", help="the run's folder, replaced if it is there")
    parser.add_argument("--recipe", default="rowwise", choices=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # extensions of torchao for other builds of torch
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        print("error: this example needs torchao: pip install torchao", file=sys.stderr)
        return 2

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Gated(options.width).to(device, torch.bfloat16)
    config = replace(Float8LinearConfig.from_recipe_name(options.recipe), emulate=device == "cpu")
    convert_to_float8_training(model, module_filter_fn=lambda module, fqn: fqn != "head", config=config)

    shutil.rmtree(options.out, ignore_errors=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, Path(options.out), every=5) as watch:
        for _ in range(options.steps):
            x = torch.randn(256, options.width, device=device, dtype=torch.bfloat16)
            loss = functional.cross_entropy(model(x).float(), x[:, :16].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    print(f"{options.out}: fp8debug coverage {options.out}; fp8debug triage {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Bytes of a row on disk: ``python tests/bench/volume.py [--width 512] [--tokens 1024] [--steps 48]``; asserts nothing.

Trains Llama-like layers on a CPU, every step sampled, and divides the size of the Parquet parts by their rows. Real tensors'
sums and counts hardly compress, so that the figure depends little on the model; ``fp8debug/store/volume.py`` keeps it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from tests.recording.models import Gated


def main() -> None:
    """Train, and print bytes per row and rows per module."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("width", 512), ("tokens", 1024), ("steps", 48), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    for recipe in ("blockwise", "tensorwise_delayed"):
        model = nn.Sequential(*(Gated(options.width, options.width * 7 // 2 // 16 * 16) for _ in range(options.layers)))
        fp8debug.convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with tempfile.TemporaryDirectory() as folder:
            with fp8debug.watch(model, Path(folder) / "run", every=1) as watch:
                for _ in range(options.steps):
                    loss = model(torch.randn(options.tokens, options.width)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    watch.step(loss=loss, grad_norm=1.0)
            for table in ("stats", "steps"):
                parts = list(Path(folder).glob(f"run/rank=*/{table}/*.parquet"))
                rows = sum(pq.read_metadata(part).num_rows for part in parts)
                size = sum(part.stat().st_size for part in parts)
                footer = sum(pq.read_metadata(part).serialized_size for part in parts)
                per_step = rows / options.steps / (3 * options.layers)
                print(f"{recipe:20} {table}: {rows} rows, {(size - footer) / rows:.1f} bytes a row without the footer", end="")
                print(f" of {footer} bytes, {per_step:.1f} rows a step and Linear" if table == "stats" else "", flush=True)


if __name__ == "__main__":
    main()

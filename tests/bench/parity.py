"""Differences planted between two paths of a model: is the right module named, and the right cause; are equal paths silent.

.venv/bin/python -m tests.bench.parity [--seeds 5] [--show]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import torch
from torch import nn

from fp8debug.parity import ParityReport, compare_paths, record_path
from tests.bench.parity_models import FAULTS, KINDS, Planted, rollout, tokens, training


def compared(kind: str, fault: str, seed: int, folder: Path) -> tuple[ParityReport, Planted | None]:
    """Record both paths, and a repetition of the training's, and compare them."""
    joined = kind == "llama" and seed % 2 == 1
    model = training(kind, seed)
    engine = rollout(model, joined)
    planted = None
    batch = tokens(seed)
    if fault in FAULTS:
        planted = FAULTS[fault](engine, torch.Generator().manual_seed(seed))
    record_path(model, batch, folder / "train")
    record_path(engine, batch.flip(0) if seed % 3 == 2 and kind != "moe" else batch, folder / "rollout")
    repeat = None
    if seed % 2 == 0:
        record_path(model, batch, folder / "repeat")
        repeat = folder / "repeat"
    return compare_paths(folder / "train", folder / "rollout", repeat), planted


def noisy(kind: str, seed: int, folder: Path) -> ParityReport:
    """Compare two paths that differ by noise in the embedding, of the size of BF16's rounding, with a repetition of it."""
    model = training(kind, seed)
    for number, name in enumerate(("train", "rollout", "repeat")):
        engine = rollout(model, False)

        def jitter(module: nn.Module, args: object, out: torch.Tensor, number: int = number) -> torch.Tensor:
            random = torch.Generator().manual_seed(10 * seed + number)
            return (out.float() * (1 + 2**-9 * torch.randn(out.shape, generator=random))).to(out.dtype)

        engine.embed_tokens.register_forward_hook(jitter)
        record_path(engine, tokens(seed), folder / name)
    return compare_paths(folder / "train", folder / "rollout", folder / "repeat")


@click.command()
@click.option("--seeds", default=5, show_default=True)
@click.option("--show", is_flag=True, help="Print each wrong answer.")
@click.option("--only", help="One fault.")
def main(seeds: int, show: bool, only: str | None) -> None:
    """Print a table of faults with the share of right modules and causes."""
    totals = [0, 0, 0]
    for fault in FAULTS if only is None else [only]:
        right = [0, 0, 0]
        for kind in KINDS if fault != "router flip" else ("moe",):
            for seed in range(seeds * (3 if fault == "router flip" else 1)):
                with tempfile.TemporaryDirectory() as folder:
                    report, planted = compared(kind, fault, seed, Path(folder))
                assert planted is not None
                first = report[0] if report else None
                found = (first is not None and first.module in planted.module, first is not None and first.code == planted.code)
                right = [right[0] + found[0], right[1] + found[1], right[2] + 1]
                if show and not all(found):
                    click.echo(f"  {fault}, {kind}, seed {seed}: {planted}; found {first and (first.code, first.message)}")
        click.echo(f"{fault:18} module {right[0]} of {right[2]}, cause {right[1]} of {right[2]}")
        totals = [a + b for a, b in zip(totals, right, strict=True)]
    click.echo(f"all: module {totals[0] / totals[2]:.1%}, cause {totals[1] / totals[2]:.1%} of {totals[2]}")
    false, number = 0, 0
    for kind in KINDS:
        for seed in range(seeds):
            for way in ("equal", "noisy"):
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder)
                    report = compared(kind, "none", seed, path)[0] if way == "equal" else noisy(kind, seed, path)
                number, false = number + 1, false + bool(report)
                if show and report:
                    click.echo(f"  {way}, {kind}, seed {seed}: {[f.message for f in report]}")
    click.echo(f"equal paths: {false} false alarms of {number}")


if __name__ == "__main__":
    main()

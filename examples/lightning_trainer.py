"""Lightning's Trainer under a watch: ``python examples/lightning_trainer.py``; on a CPU too.

``watch(trainer, ...)`` before ``fit()`` is all: its callbacks tell of steps, loss, gradient norm and learning rate.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from small import Batches, Gated, fresh, options_of, say_where
from torch import Tensor
from torch.nn import functional

import fp8debug


class Classifier(LightningModule):  # type: ignore[misc]  # a class of a library without types
    def __init__(self) -> None:
        super().__init__()
        self.net = fp8debug.convert(Gated(), "blockwise", overrides={"head": None})

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> int:
    options = options_of(__doc__, "runs/lightning").parse_args()
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(Batches(options.steps), batch_size=None)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, devices=1, enable_model_summary=False, gradient_clip_val=1.0, **quiet)
    path = fresh(options.out)
    with fp8debug.watch(trainer, path, every=5):
        trainer.fit(Classifier(), data)
    say_where(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

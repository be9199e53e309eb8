"""A loop under Accelerate with a watch: ``python examples/accelerate_loop.py``, or under ``accelerate launch``; on a CPU too.

``watch(accelerator, ...)`` after ``prepare()`` is all: steps, loss, gradient norm and learning rate come from the accelerator
and its optimizer, and the microbatches of a step are merged.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from small import Batches, Gated, fresh, options_of, say_where
from torch.nn import functional

import fp8debug


def main() -> int:
    options = options_of(__doc__, "runs/accelerate").parse_args()
    torch.manual_seed(0)
    model = fp8debug.convert(Gated(), "blockwise", overrides={"head": None})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(Batches(2 * options.steps), batch_size=None)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    path = fresh(options.out)
    with fp8debug.watch(accelerator, path, every=5):
        for x, classes in data:
            with accelerator.accumulate(model):
                accelerator.backward(functional.cross_entropy(model(x), classes))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    say_where(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

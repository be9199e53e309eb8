"""Transformers' Trainer under a watch: ``python examples/transformers_trainer.py``; a random-initialised Llama, on a CPU too.

``watch(trainer, ...)`` before ``train()`` is all: steps, loss, gradient norm and learning rate come from the Trainer.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from small import fresh, options_of, say_where
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8debug


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of random tokens, the same every time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> int:
    options = options_of(__doc__, "runs/transformers").parse_args()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    fp8debug.convert(model, "blockwise", overrides={"lm_head": None})
    path = fresh(options.out)
    with tempfile.TemporaryDirectory() as scratch:
        more = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()}
        arguments = TrainingArguments(scratch, max_steps=options.steps, per_device_train_batch_size=4, **more)
        trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
        with fp8debug.watch(trainer, path, every=5):
            trainer.train()
    say_where(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

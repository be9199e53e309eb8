"""Models of transformers at toy sizes, the same every time."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch


def classes_of(model: str, config: str) -> tuple[Any, Any]:
    """Return classes of transformers by their names; the test is skipped where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao, which it imports
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        return getattr(transformers, model), getattr(transformers, config)


def toy_model(model: str, config: str, **sizes: Any) -> Any:
    """Return a model with random weights, in evaluation."""
    of_model, of_config = classes_of(model, config)
    torch.manual_seed(0)
    return of_model(of_config(**sizes)).eval()


def toy_mixtral(width: int, hidden: int) -> Any:
    """Return a Mixtral of two layers and four experts."""
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return toy_model("MixtralForCausalLM", "MixtralConfig", **sizes, **heads)

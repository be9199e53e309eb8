"""Training's forward beside inference's: how far the logits of one batch lie apart, for ``Watch.compare_inference``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.errors import UsageError
from fp8debug.linear import Fp8Linear
from fp8debug.recipes import get_recipe


def compare_paths(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inference: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """Return the columns ``inference_*`` of the steps table as scalar tensors, without synchronizing.

    Both passes run in evaluation mode without gradients: no amax history, buffer or random number of training moves.

    Args:
        model: what is trained.
        args: what its forward takes.
        kwargs: the same.
        inference: the other path, called with the same; the model with its FP8 Linears in high precision by default.

    Raises:
        UsageError: the model has no Fp8Linear, or its output is no logits ``[..., classes]``.
    """
    linears = [m for m in model.modules() if isinstance(m, Fp8Linear) and not m.recipe.is_high_precision]
    if not linears and inference is None:
        raise UsageError(f"{type(model).__name__} has no Fp8Linear to run in high precision; give inference=, the other path")
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            trained = _logits(model(*args, **kwargs))
            if inference is not None:
                inferred = _logits(inference(*args, **kwargs))
            else:
                with _high_precision(linears):
                    inferred = _logits(model(*args, **kwargs))
            return _difference(trained, inferred)
    finally:
        for module, was in training.items():
            module.training = was


@contextmanager
def _high_precision(linears: list[Fp8Linear]) -> Iterator[None]:
    """Run these Linears in high precision; recipes, histories and planted faults are there again afterwards."""
    before = [(linear, linear.recipe, linear.distortion) for linear in linears]
    try:
        for linear in linears:
            linear.recipe, linear.distortion = get_recipe("bf16"), None
        yield
    finally:
        for linear, recipe, distortion in before:
            linear.recipe, linear.distortion = recipe, distortion


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[-1] < 2 or not logits.numel():
        raise UsageError(f"expected logits [..., classes] (or an output with .logits), got {type(logits).__name__}")
    return logits.float().reshape(-1, logits.shape[-1])


def _difference(trained: Tensor, inferred: Tensor) -> dict[str, Tensor]:
    if trained.shape != inferred.shape:
        raise UsageError(f"the two paths' logits have shapes {list(trained.shape)} and {list(inferred.shape)}")
    p, q = trained.log_softmax(-1), inferred.log_softmax(-1)
    centered = trained - trained.mean(-1, keepdim=True)
    apart = (inferred - inferred.mean(-1, keepdim=True)) - centered
    return {
        "inference_kl": (p.exp() * (p - q)).sum(-1).mean(),
        "inference_nmse": apart.square().sum() / centered.square().sum(),
        "inference_flip_rate": (trained.argmax(-1) != inferred.argmax(-1)).float().mean(),
    }

"""A backend's FP8 Linears under a watch: ``python examples/backends.py torchao [--recipe rowwise]``.

fp8debug   its own Fp8Linear; on a CPU too
torchao    Float8Linear; on a CPU its GEMMs are emulated
te         Transformer Engine's Linear; needs a GPU

A small gated network trains for twenty steps; then ``fp8debug coverage`` says what ran, and ``triage`` what is wrong.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain

import torch
from small import Batches, Gated, fresh, options_of, say_where
from torch import nn
from torch.nn import functional

import fp8debug

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The first recipe of each is the default.
RECIPES = {
    "fp8debug": ["blockwise", "blockwise_pow2", "tensorwise_current", "tensorwise_delayed", "rowwise", "mxfp8"],
    "torchao": ["tensorwise", "rowwise", "rowwise_with_gw_hp"],
    "te": ["Float8BlockScaling", "Float8CurrentScaling", "DelayedScaling", "MXFP8BlockScaling"],
}
#: Makes what FP8 runs in.
Inside = Callable[[], AbstractContextManager[object]]


def to_fp8debug(model: nn.Module, recipe: str) -> Inside:
    fp8debug.convert(model, recipe, overrides={"head": None})
    return nullcontext


def to_torchao(model: nn.Module, recipe: str) -> Inside:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # extensions of torchao for other builds of torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=DEVICE == "cpu")
    convert_to_float8_training(model, module_filter_fn=lambda module, fqn: fqn != "head", config=config)
    return nullcontext


def to_te(model: nn.Module, recipe: str) -> Inside:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    for name in ("gate", "up", "down"):
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)
        size = old.in_features, old.out_features
        setattr(model, name, te.Linear(*size, bias=False, params_dtype=torch.bfloat16, device=DEVICE))
    return lambda: te.autocast(enabled=True, recipe=getattr(recipes, recipe)())


def main() -> int:
    parser = options_of(__doc__, "runs/backend")
    parser.add_argument("backend", choices=sorted(RECIPES))
    parser.add_argument("--recipe", choices=[*chain(*RECIPES.values())], metavar="NAME", help=f"{RECIPES}")
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    recipe = options.recipe or RECIPES[options.backend][0]
    package = {"te": "transformer_engine"}.get(options.backend, options.backend)
    if find_spec(package) is None or (options.backend == "te" and DEVICE == "cpu"):
        needs = "a GPU and pip install 'fp8debug[te]'" if options.backend == "te" else f"pip install {package}"
        print(f"error: this example needs {needs}", file=sys.stderr)
        return 2

    torch.manual_seed(0)
    model = Gated(options.width).to(DEVICE, torch.bfloat16)
    inside = {"fp8debug": to_fp8debug, "torchao": to_torchao, "te": to_te}[options.backend](model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = fresh(options.out)
    with fp8debug.watch(model, path, every=5) as watch:
        for x, classes in map(Batches(options.steps, options.width).__getitem__, range(options.steps)):
            with inside():
                logits = model(x.to(DEVICE, torch.bfloat16))
            loss = functional.cross_entropy(logits.float(), classes.to(DEVICE))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    say_where(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

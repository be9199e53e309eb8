"""Stages of a pipeline: each rank has other modules, and Megatron's ranks call their first layer 0, whichever it is.

Ranks are merged by the names of their modules, so that a layer has to have one name in the whole model. Megatron's layers know
their number there; torch's stages keep the names of the whole model by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import nn

from fp8debug.observer.observer import Observer
from fp8debug.trainers.base import replace, undoing

#: More calls than a stage has: the modules of a stage come after those of all stages before it.
CALLS_OF_STAGE = 1 << 20


def first_call(stage: int) -> int:
    """Return the place in execution order of a stage's first call."""
    return min(stage, 2047) * CALLS_OF_STAGE  # int32


def stage_of(mesh: Mapping[str, Any]) -> int:
    """Return the number of this rank's stage; 0 without a pipeline, and where the mesh does not tell."""
    places = dict(zip(mesh.get("dims", ()), mesh.get("coordinate", ()), strict=False))
    return int(places.get("pp", 0))


def is_stage(mesh: Mapping[str, Any]) -> bool:
    """Return whether this rank is one stage of several on the mesh; one of torch's that is not on it is seen when it runs.

    Args:
        mesh: what ``describe_mesh`` returned.
    """
    sizes = dict(zip(mesh.get("dims", ()), mesh.get("shape", ()), strict=True))
    return bool(sizes.get("pp", 1) > 1)


def layers_before(root: nn.Module) -> dict[str, int]:
    """Return how many layers of the model come before those of a list of layers of this stage, by the FQN of the list."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized() or state.get_pipeline_model_parallel_world_size() < 2:
        return {}
    found = {}
    for name, layers in root.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers):
            numbers = [getattr(layer, "layer_number", None) for layer in layers]  # from 1
            first = numbers[0]
            if isinstance(first, int) and first > 1 and numbers == list(range(first, first + len(layers))):
                found[name] = first - 1
    return found


def name_in_model(name: str, before: Mapping[str, int]) -> str:
    """Return a module's FQN with its layer's number in the whole model.

    Args:
        name: FQN in this stage.
        before: of :func:`layers_before`.
    """
    for layers, count in before.items():
        if name.startswith(f"{layers}."):
            number, dot, rest = name[len(layers) + 1 :].partition(".")
            return f"{layers}.{int(number) + count}{dot}{rest}"
    return name


def rank_entry(roots: Sequence[nn.Module], modules: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a rank's manifest says of its stage: rank 0 cannot know which modules it has.

    Args:
        roots: what is watched.
        modules: the entries of this rank's modules.
    """
    before = {name: count for root in roots for name, count in layers_before(root).items()}
    return {"modules": modules, **({"layers_before": before} if before and len(roots) == 1 else {})}


_METHODS = ("_prepare_forward_infra", "_prepare_backward_infra")


def ignore_shape_inference(observer: Observer, tell: Callable[[int], None]) -> Callable[[], None]:
    """Record nothing of what pipeline stages run before their first step; return what ends it.

    Args:
        observer: of the watch.
        tell: called with the number of each stage that is seen.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        return lambda: None

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def infer_shapes(*args: Any, **kwargs: Any) -> Any:
            if isinstance(number := getattr(args[0] if args else None, "stage_index", None), int):
                tell(number)
            before, observer.in_shape_inference = observer.in_shape_inference, True
            try:
                return own(*args, **kwargs)
            finally:
                observer.in_shape_inference = before

        return infer_shapes

    owners = [c for c in vars(stages).values() if isinstance(c, type)]
    undo = [replace(c, name, make) for c in owners for name in _METHODS if name in vars(c)]
    return undoing(undo)

"""Faults of coverage and of routing: a Linear in FP8 that should not be, an expert that gets no tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fp8debug.faults.base import FAULTS, Fault, Target, run_as_others, undo_all


def _unasked(where: Target) -> Callable[[], None]:
    """Turn a plain Linear into an Fp8Linear of the model's own recipe, as a filter that let it through would have."""
    undo = run_as_others(where, "FP8 already; plant this fault in a Linear that was left in high precision", "blockwise")
    vars(where.module).pop("fp8debug_request", None)
    return undo


def _starved(where: Target) -> Callable[[], None]:
    """Cut an expert off: the module that holds the target, where that is one that is called, gets no rows and gives zeros."""
    holder = where.model.get_submodule(where.name.rpartition(".")[0])
    expert = where.module if isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential) else holder
    shapes: list[tuple[int, ...]] = []

    def starve(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not where.active:
            return None
        shapes.append(tuple(args[0].shape[:-1]))
        return (args[0].reshape(-1, args[0].shape[-1])[:0], *args[1:])

    def pad(_: nn.Module, args: object, output: Tensor) -> Tensor | None:
        if not shapes:
            return None
        shape = shapes.pop()
        return output.new_zeros((*shape, output.shape[-1])) + output.sum()  # the sum of nothing: its gradient is defined

    hooks = [expert.register_forward_pre_hook(starve), expert.register_forward_hook(pad)]
    return undo_all(*(hook.remove for hook in hooks))


for _fault in (
    Fault(
        name="router_in_fp8",
        code="F109",
        description="a router that was to stay in high precision runs in FP8 (vllm #23031, maxtext #5293); acts at once",
        plant=_unasked,
    ),
    Fault(
        name="unasked_fp8",
        code="F110",
        description="a filter lets a Linear through, such as the head, and it runs in FP8 (torchtitan #4008); acts at once",
        plant=_unasked,
    ),
    Fault(
        name="starved_expert",
        code="F116",
        description="the expert that holds the module gets no tokens (TransformerEngine #648, torchtitan #1166)",
        plant=_starved,
    ),
):
    FAULTS.add(_fault.name, _fault)

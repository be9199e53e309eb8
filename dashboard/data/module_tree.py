"""Tree of a model's modules: each with its share of the FLOPs, its casts, and the health of the worst below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8debug.store.flop_shares import gemm_shares

from .coverage import in_words
from .nonfinite import FINITE
from .worst_modules import WorstModule


@dataclass(kw_only=True)
class ModuleNode:
    """Node of the tree: a module that was recorded, or what contains some.

    Attributes:
        name: last part of its FQN.
        path: FQN.
        entry: of the manifest, None for what only contains others.
        share: of the FLOPs, its own and of all below it, in [0, 1]; None where neither counts nor shapes are recorded.
        health: the worst of it and of all below it; None where nothing was recorded.
        casts: number of modules by their casts in words, its own and of all below it.
        children: in execution order, by name.
    """

    name: str
    path: str
    entry: Mapping[str, Any] | None = None
    share: float | None = None
    health: WorstModule | None = None
    casts: dict[str, int] = field(default_factory=dict)
    children: dict[str, ModuleNode] = field(default_factory=dict)


def rank_of(health: WorstModule | None) -> tuple[bool, float]:
    """Return how ill a module is, for comparison: NaN and Inf before every severity, what was not recorded last."""
    if health is None:
        return False, -10.0
    return health.state > FINITE, health.severity if health.severity == health.severity else -9.0


def module_tree(
    modules: Sequence[Mapping[str, Any]], healths: Mapping[str, WorstModule], gemms: Sequence[Mapping[str, Any]] = ()
) -> ModuleNode:
    """Return the root of the tree.

    Args:
        modules: the manifest's modules, in execution order.
        healths: by FQN the worst of a module over all steps.
        gemms: FLOPs as counted (``Run.gemms``); without them a Linear's share is that of 6 * in * out.
    """
    shared = gemm_shares(modules, gemms)
    flops = {str(m["fqn"]): float(m.get("in_features") or 0) * float(m.get("out_features") or 0) for m in modules}
    total = sum(flops.values())
    if shared is not None:
        flops, total = {fqn: shared.modules.get(fqn, 0.0) for fqn in flops}, 1.0
    root = ModuleNode(name="", path="")
    words: dict[str, str] = {}  # hundreds of modules share a few choices of casts
    for module in modules:
        fqn = str(module["fqn"])
        casts = module.get("casts")
        if (key := repr(casts)) not in words:
            words[key] = in_words(casts)
        cast = words[key] if module.get("fp8") else "BF16 or FP32"
        share = flops[fqn] / total if total else None
        node = root
        for i, name in enumerate(["", *fqn.split(".")]):
            if i:
                path = f"{node.path}.{name}" if node.path else name
                node = node.children.setdefault(name, ModuleNode(name=name, path=path))
            node.casts[cast] = node.casts.get(cast, 0) + 1
            if share is not None:
                node.share = (node.share or 0.0) + share
            node.health = max(node.health, healths.get(fqn), key=rank_of)
        node.entry = module
    return root

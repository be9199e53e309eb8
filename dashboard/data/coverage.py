"""Coverage of FP8: which Linears run in it, under which casts, and why the others do not; read from the run's manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8debug.formats import TRANSPOSED
from fp8debug.recipes import Cast
from fp8debug.store.flop_shares import gemm_shares
from fp8debug.types import CONTRACTS_ROWS

from .records import Coverage

_TURNED = {f"{gemm}.{tensor}" for gemm, tensor in CONTRACTS_ROWS}


def coverage(
    modules: Sequence[Mapping[str, Any]], filters: Sequence[Mapping[str, Any]] = (), gemms: Sequence[Mapping[str, Any]] = ()
) -> Coverage:
    """Count modules and FLOPs by their casts: of all forward GEMMs where they were counted, else of the Linears (6 * in * out).

    Args:
        modules: the manifest's modules, in execution order.
        filters: the manifest's filters.
        gemms: FLOPs as counted (``Run.gemms``).
    """
    shared = gemm_shares(modules, gemms)
    flops = [6.0 * int(m.get("in_features") or 0) * int(m.get("out_features") or 0) for m in modules]
    total = sum(flops)
    if shared is not None:
        flops, total = [shared.modules.get(str(m["fqn"]), 0.0) for m in modules], 1.0
    counts: Counter[str] = Counter()
    shares: dict[str, float] = {}
    words: dict[str, str] = {}  # hundreds of modules share a few choices of casts
    for module, cost in zip(modules, flops, strict=True):
        casts = module.get("casts")
        if (key := repr(casts)) not in words:
            words[key] = in_words(casts)
        name = words[key] if module.get("fp8") else "BF16 or FP32"
        counts[name] += 1
        shares[name] = shares.get(name, 0.0) + cost
    skipped = tuple(
        (
            str(m["fqn"]),
            str(m.get("kind") or ""),
            str(m.get("requested") or "not requested"),
            str(m.get("reason") or "no reason recorded"),
        )
        for m in modules
        if not m.get("fp8")
    )
    linears_share = sum(c for m, c in zip(modules, flops, strict=True) if m.get("fp8")) / total if total else None
    return Coverage(
        num_linears=len(modules),
        num_fp8=len(modules) - len(skipped),
        flops_share=linears_share if shared is None else shared.fp8,
        is_of_all=shared is not None,
        rest=() if shared is None else tuple((one.fqn, one.kind, one.share, one.reason) for one in shared.rest),
        casts=tuple((name, n, shares[name] / total if total else 0.0) for name, n in counts.most_common()),
        skipped=skipped,
        filters=tuple((str(f.get("kind")), str(f.get("pattern")), int(f.get("matched") or 0)) for f in filters),
    )


def in_words(casts: Mapping[str, Any] | None) -> str:
    """Return six casts in one line, tensors with the same cast together; a tile turned for its GEMM counts as the same."""
    if not casts:
        return "casts not recorded"
    by_tensor: dict[str, list[str]] = {}
    for key, values in casts.items():
        names = by_tensor.setdefault(key.split(".")[-1], [])
        name = _name(key, values)
        if name not in names:
            names.append(name)
    by_cast: dict[str, list[str]] = {}
    for tensor, names in by_tensor.items():
        by_cast.setdefault(" / ".join(names), []).append(tensor)
    if len(by_cast) == 1:
        return next(iter(by_cast))
    return "; ".join(f"{', '.join(tensors)}: {name}" for name, tensors in by_cast.items())


def _name(key: str, values: Mapping[str, Any] | None) -> str:
    if values is None:
        return "BF16"
    try:
        cast = Cast.from_dict(values)
    except (ValueError, TypeError):
        return "unreadable cast"
    if key in _TURNED:
        cast = replace(cast, granularity=TRANSPOSED[cast.granularity])
    return str(cast)

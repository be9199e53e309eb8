"""Shares of a model's FLOPs, by module and by the GEMMs that were counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


def flop_shares(modules: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return by FQN a module's share of all FLOPs in FP8, from the manifest's entries; each of its GEMMs has a third."""
    flops = {
        str(m["fqn"]): m["in_features"] * m["out_features"]
        for m in modules
        if m.get("fp8") and m.get("in_features") and m.get("out_features")
    }
    total = sum(flops.values())
    return {fqn: one / total for fqn, one in flops.items()}


class Rest(NamedTuple):
    """GEMMs outside the listed Linears, of one module in one precision.

    Attributes:
        fqn: the module that ran them.
        kind: its class.
        share: of the FLOPs of all forward GEMMs, in [0, 1].
        reason: what is known of them.
    """

    fqn: str
    kind: str
    share: float
    reason: str


class GemmShares(NamedTuple):
    """Shares of the FLOPs of a model's forward GEMMs, as counted in one step.

    Attributes:
        fp8: share in FP8, in [0, 1].
        modules: share of each listed module's own GEMMs, by FQN.
        rest: all others, the largest first.
    """

    fp8: float
    modules: dict[str, float]
    rest: tuple[Rest, ...]


def gemm_shares(modules: Iterable[Mapping[str, Any]], gemms: Sequence[Mapping[str, Any]]) -> GemmShares | None:
    """Return the shares of a model's forward GEMMs; None where they were not counted.

    Args:
        modules: the manifest's modules.
        gemms: the manifest's counts (docs/schema.md), of all stages of a pipeline.
    """
    total = sum(_flops(gemm) for gemm in gemms)
    if not total:
        return None
    listed = {str(module["fqn"]): module for module in modules}
    shares: dict[str, float] = {}
    in_fp8, rest = 0.0, []
    for gemm in gemms:
        fqn, share = str(gemm.get("fqn")), _flops(gemm) / total
        own = listed.get(fqn) if not gemm.get("weight") else None
        is_fp8 = bool(gemm.get("fp8"))
        parts = [] if own is not None or gemm.get("weight") else _parts(gemm, listed)
        for part in parts:
            shares[part] = shares.get(part, 0.0) + share / len(parts)
        if own is not None:
            shares[fqn] = shares.get(fqn, 0.0) + share
            if own.get("kind") == "Fp8Linear":  # a schedule may have had it in another precision in the step that was counted
                is_fp8 = bool(own.get("fp8"))
        elif not parts:
            rest.append(Rest(fqn, str(gemm.get("kind") or ""), share, _reason(gemm)))
        in_fp8 += share if is_fp8 else 0.0
    return GemmShares(min(in_fp8, 1.0), shares, tuple(sorted(rest, key=lambda one: -one.share)))


def _parts(gemm: Mapping[str, Any], listed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the listed weights of a module that holds several Linears in one, as experts' are."""
    start, kind = f"{gemm.get('fqn')}.", str(gemm.get("kind"))
    return [fqn for fqn, module in listed.items() if fqn.startswith(start) and str(module.get("kind")).startswith(kind)]


def _flops(gemm: Mapping[str, Any]) -> int:
    return max(int(gemm.get("flops") or 0), 0)


def _reason(gemm: Mapping[str, Any]) -> str:
    ops = ", ".join(str(op) for op in gemm.get("ops") or ()) or "GEMMs"
    where = f" by {gemm['weight']}" if gemm.get("weight") else ""
    if gemm.get("fp8"):
        return f"{ops}{where} in FP8, not recorded: fp8debug does not know its operands"
    return f"{ops}{where} in high precision ({gemm.get('precision') or 'unknown'})"

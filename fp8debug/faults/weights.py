"""Faults of the weight as a GEMM reads it: out of step, of another shard, under other blocks' scales, rounded to one code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, WEIGHTS, Change, Fault, Key, Ordinary, Target, distort, quantized
from fp8debug.kernels.dispatch import Operand
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized, TensorRole


def stale(where: Target) -> Callable[[], None]:
    """Give the GEMM the FP8 weight of ``lag`` steps ago, from microbatch ``from_microbatch`` of each step on."""
    lag, first = int(where.options["lag"]), int(where.options["from_microbatch"])
    if lag < 1 or first < 0:
        raise UsageError(f"stale_weight needs lag >= 1 and from_microbatch >= 0, got lag={lag}, from_microbatch={first}")
    kept: dict[Key, deque[Operand]] = {key: deque(maxlen=lag + 1) for key in WEIGHTS}
    at: dict[Key, tuple[int, int]] = {}

    def change(key: Key, x: Tensor, cast: Cast, ordinary: Ordinary) -> Operand:
        fresh = ordinary(x, cast)
        step, microbatch = at.get(key, (-1, 0))
        is_new = step != where.clock.step
        at[key] = where.clock.step, 0 if is_new else microbatch + 1
        if is_new:
            kept[key].append(fresh)
        return kept[key][0] if where.active and at[key][1] >= first else fresh

    # The weights of the steps before the fault are needed too, so it is planted from step 0.
    early = replace(where, step=0)

    def change_of(key: Key) -> Change:
        return lambda x, cast, ordinary, _: change(key, x, cast, ordinary)

    undo = [distort(early, change_of(key), key) for key in WEIGHTS]

    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def clustered(where: Target) -> Callable[[], None]:
    """Hold all weights near one magnitude, in the part of a binade that a scale rounded down cannot hold."""
    weight = where.weight
    pinned: list[tuple[Tensor, Tensor]] = []

    def pin(_: nn.Module, args: object) -> None:
        if not where.active:
            return
        with torch.no_grad():
            if not pinned:
                rms = weight.float().square().mean().sqrt()
                magnitude = float(where.options["mantissa"]) * 2.0 ** rms.log2().floor()
                generator = torch.Generator("cpu").manual_seed(0)
                noise = torch.randn(weight.shape, dtype=torch.float32, device="cpu", generator=generator).to(weight.device)
                values = (magnitude * (1 + float(where.options["spread"]) * noise.clamp(-2, 2))).copysign(weight)
                pinned.append((weight.detach().clone(), values.to(weight.dtype)))
            weight.copy_(pinned[0][1])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        return ordinary(x, replace(cast, scale_rounding="pow2_floor"))

    undistort = distort(where, change, *WEIGHTS, configured=True)
    hook = where.module.register_forward_pre_hook(pin)

    def undo() -> None:
        hook.remove()
        undistort()
        if pinned:
            with torch.no_grad():
                weight.copy_(pinned.pop()[0])

    return undo


def misaligned(where: Target) -> Callable[[], None]:
    """Read the scale grid one block further, as if block maxima differed by ``spread_log2`` binades."""
    spread = int(where.options["spread_log2"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        data, scale_inv = quantized(ordinary(x, cast))[0]
        if scale_inv.numel() < 2:  # one block has no neighbour: let each row have a scale
            cast = replace(cast, granularity="rowwise", scaling="current")
            data, scale_inv = quantized(ordinary(x, cast))[0]
        place = torch.arange(scale_inv.numel(), dtype=torch.int64, device=scale_inv.device).reshape(scale_inv.shape)
        exponent = (place * 7 % (spread + 1)).float()
        off = exponent.reshape(-1).roll(-1).reshape(exponent.shape) - exponent
        return Quantized(data, scale_inv * off.exp2()), cast

    return distort(where, change, *WEIGHTS)


def foreign_shard(where: Target) -> Callable[[], None]:
    """Put the shards of the FP8 weight together in the wrong order: the first two of ``shards`` change places."""
    shards = int(where.options["shards"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        length = x.shape[0] // shards
        if not length:
            raise UsageError(f"fp8_gather needs a weight of at least {shards} rows, got {x.shape[0]}")
        gathered = torch.cat([x[length : 2 * length], x[:length], x[2 * length :]])
        q, cast = quantized(ordinary(gathered, cast))
        return Quantized(q.data, q.scale_inv), cast  # a value of its own: it is described against x

    return distort(where, change, (Gemm.FPROP, TensorRole.WEIGHT), (Gemm.DGRAD, TensorRole.WEIGHT))


for _fault in (
    Fault(
        name="stale_weight",
        code="F112",
        description="the cached FP8 weight is that of some steps ago (TransformerEngine #1047, marin #7659)",
        options={"lag": 16, "from_microbatch": 0},
        plant=stale,
    ),
    Fault(
        name="clustered_weights",
        code="F118",
        description="weights of one magnitude round to one code, all downwards (arXiv 2506.20752)",
        options={"mantissa": 1.9, "spread": 0.005},
        plant=clustered,
    ),
    Fault(
        name="scale_grid",
        code="F119",
        description="the weight's data under the scales of the neighbouring blocks: a grid misaligned or transposed",
        options={"spread_log2": 4},
        plant=misaligned,
    ),
    Fault(
        name="fp8_gather",
        code="F121",
        description="shards of the gathered or reloaded FP8 weight in the wrong order (Megatron-LM #2272, #6666)",
        options={"shards": 4},
        plant=foreign_shard,
    ),
):
    FAULTS.add(_fault.name, _fault)

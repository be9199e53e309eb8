"""Corruptions that no rule was made for, planted in stacks of several kinds; each says which site a finding must name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fp8debug
from tests.adapters.linears import ScaledLinear
from tests.bench.situations.stack import (
    E4M3,
    Block,
    BlockLinear,
    Cast,
    Model,
    OwnKernel,
    altered,
    fp8_gemm_nt,
    train,
    values,
    with_fault,
)

DOWN = "blocks.1.down"


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One corruption.

    Attributes:
        record: trains into a folder.
        modules: one of them is the first finding's.
        sites: (gemm, tensor) that the first finding may have; empty allows any.
        codes: of the first finding; empty where it is not recorded, and the evidence of "healthy" says so.
        words: one of them stands in its message, or in that evidence.
    """

    record: Callable[[Path], None]
    modules: Sequence[str]
    sites: Sequence[tuple[str | None, str | None]]
    codes: Sequence[str]
    words: Sequence[str]


CORRUPTIONS: dict[str, Corruption] = {}


Record = Callable[[Path], None]


def _corruption(
    *sites: tuple[str, str], codes: Sequence[str], words: Sequence[str], modules: Sequence[str] = (DOWN,)
) -> Callable[[Record], Record]:
    def add(record: Record) -> Record:
        CORRUPTIONS[record.__name__] = Corruption(record=record, modules=modules, sites=sites, codes=codes, words=words)
        return record

    return add


def _short(model: nn.Module, path: Path, **options: Any) -> None:
    train(model, path, **{"steps": 12, "every": 2, "what_if": (), **options})


@_corruption(("wgrad", "grad_output"), codes=("F128",), words=("places", "permuted"))
def permuted_columns(path: Path) -> None:
    @altered("wgrad", "grad_output")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        half = data.shape[1] // 2
        return torch.cat([data.view(torch.uint8)[:, half:], data.view(torch.uint8)[:, :half]], 1).view(E4M3), scales

    _short(with_fault(fault), path)


@_corruption(("fprop", "input"), codes=("F119", "F128", "F113"), words=("scale", "block"))
def scale_of_the_neighbour_block(path: Path) -> None:
    _short(with_fault(altered("fprop", "input")(lambda x, data, scales: (data, scales.roll(1, 1)))), path)


@_corruption(("fprop", "output"), codes=("F108",), words=("other data", "kernel"))
def duplicated_block_of_k(path: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        if recipe == "fprop":
            a, b = ((torch.cat([x.view(torch.uint8)[:, :128]] * 2 + [x.view(torch.uint8)[:, 256:]], 1).view(E4M3),
                     torch.cat([s[:, :1]] * 2 + [s[:, 2:]], 1)) for x, s in (a, b))  # fmt: skip
        fp8_gemm_nt(a, b, d)

    _short(with_fault(OwnKernel), path, kernel=kernel)


@_corruption(("fprop", "output"), codes=("F108",), words=("bits", "accumulator"))
def sums_cut_to_bf16(path: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        if recipe != "fprop":
            return fp8_gemm_nt(a, b, d)
        first, second = values(a), values(b)
        total = torch.zeros(len(first), len(second))
        for k in range(0, first.shape[1], 4):
            total = (total + first[:, k : k + 4] @ second[:, k : k + 4].t()).bfloat16().float()
        d.copy_(total)
        return None

    _short(with_fault(OwnKernel), path, kernel=kernel)


@_corruption(("fprop", "input"), codes=("F128", "F121"), words=("older version", "another tensor", "another version"))
def cast_of_an_old_input(path: Path) -> None:
    class Fault(BlockLinear):
        last: Cast | None = None

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            new = super().cast(gemm, tensor, x)
            if (gemm, tensor) != ("fprop", "input"):
                return new
            old, self.last = self.last, new
            return old or new

    _short(with_fault(Fault), path)


@_corruption(("dgrad", "weight"), codes=("F128", "F121", "F119"), words=("transposed", "another", "place"))
def square_weight_not_transposed(path: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            return super().cast(gemm, tensor, x.t() if (gemm, tensor) == ("dgrad", "weight") else x)

    _short(with_fault(Fault, hidden=128), path)


@_corruption(codes=("F151",), words=("down.bias",))
def bias_dropped(path: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            bias, self._parameters["bias"] = self._parameters["bias"], None
            try:
                return super().forward(x)
            finally:
                self._parameters["bias"] = bias

    _short(with_fault(Fault, bias=True), path)


class Experts(nn.Module):
    """Two experts, whose outputs a router weighs."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2, bias=False)
        self.first, self.second = (Block(linear, width, hidden, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x.float()).softmax(-1)
        return cast(Tensor, x + share[:, :1] * self.first(x) + share[:, 1:] * self.second(x))


@_corruption(("fprop", "weight"), codes=("F128", "F121"), words=("another expert",), modules=("blocks.1.first.down",))
def weight_of_another_expert(path: Path) -> None:
    model = Model(block=Experts)
    other = model.blocks[1].second.down

    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            return super().cast(gemm, tensor, other.weight if (gemm, tensor) == ("fprop", "weight") else x)

    model.blocks[1].first.down.__class__ = Fault
    _short(model, path)


@_corruption(codes=("F149",), words=("zeros in",))
def gradient_lost_under_torchao(path: Path) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = Model(nn.Linear, hidden=384)
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")
    weight = cast(Tensor, model.get_submodule(DOWN).weight)

    def lose(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        kept[: len(kept) // 4] = 0
        return kept

    weight.register_hook(lose)
    _short(model, path)


@_corruption(("fprop", "weight"), codes=("F128",), words=("never written", "zero"))
def an_eighth_of_the_rows_unwritten_rowwise(path: Path) -> None:
    inner = torch._scaled_mm

    def scaled_mm(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Tensor:
        data = b.t().contiguous()
        data.view(torch.uint8)[: len(data) // 8] = 0
        return inner(a, data.t(), *args, **options)

    class Planted(ScaledLinear):
        rowwise = True

        def forward(self, x: Tensor) -> Tensor:
            with patch.object(torch, "_scaled_mm", scaled_mm):
                return super().forward(x)

    model = Model(ScaledLinear).bfloat16()
    down = model.get_submodule(DOWN)
    down.__class__ = Planted
    _short(model, path)


def _native(recipe: str, change: Callable[[Tensor], Tensor], key: tuple[str, str], path: Path, *, of: str = "data") -> None:
    """Train with the data, or the scale_inv, of one operand changed after its cast."""
    from fp8debug.faults.base import Clock, Target, distort
    from fp8debug.faults.base import quantized as known
    from fp8debug.types import Gemm, TensorRole

    model = Model(nn.Linear)
    fp8debug.convert(model, recipe, {"head": None})

    def corrupt(x: Tensor, cast: Any, ordinary: Any, options: dict[str, Any]) -> Any:
        q, cast = known(ordinary(x, cast))
        return q._replace(**{of: change(getattr(q, of))}), cast

    target = Target(model, model.get_submodule(DOWN), DOWN, 0, {}, Clock(model))
    distort(target, corrupt, (Gemm(key[0]), TensorRole(key[1])))
    _short(model, path)


@_corruption(("dgrad", "grad_output"), codes=("F128",), words=("noise",))
def noise_in_a_delayed_gradient(path: Path) -> None:
    def change(data: Tensor) -> Tensor:
        noise = torch.randn(data.shape, generator=torch.Generator().manual_seed(0))
        x = data.float()
        limit = torch.finfo(data.dtype).max
        return (x + 0.25 * x.square().mean().sqrt() * noise).clamp(-limit, limit).to(data.dtype)

    _native("tensorwise_delayed", change, ("dgrad", "grad_output"), path)


@_corruption(("dgrad", "grad_output"), codes=("F128",), words=("448",))
def gradient_clamped_at_448(path: Path) -> None:
    _native("tensorwise_delayed", lambda data: data.float().clamp(-448, 448).to(data.dtype), ("dgrad", "grad_output"), path)


@_corruption(("wgrad", "input"), codes=("F128",), words=("sign",))
def sign_lost_in_mxfp8(path: Path) -> None:
    _native("mxfp8", lambda data: (data.view(torch.uint8) & 0x7F).view(data.dtype), ("wgrad", "input"), path)


@_corruption(("fprop", "input"), codes=("F128", "F101"), words=("never written", "zero", "masked"))
def last_rows_unwritten_delayed(path: Path) -> None:
    def change(data: Tensor) -> Tensor:
        changed = data.clone()
        changed.view(torch.uint8)[-len(data) // 16 :] = 0
        return changed

    _native("tensorwise_delayed", change, ("fprop", "input"), path)


@_corruption(("dgrad", "grad_input"), codes=("F108",), words=("rows", "kernel"))
def rows_of_a_result_swapped(path: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        if recipe == "dgrad":
            d[:32] = d[32:64].clone()

    _short(with_fault(OwnKernel), path, kernel=kernel)


@_corruption(("fprop", "weight"), codes=("F128", "F121"), words=("permuted", "places", "other"))
def rows_reversed_rowwise(path: Path) -> None:
    _native("rowwise", lambda data: data.view(torch.uint8).flip(0).view(data.dtype), ("fprop", "weight"), path)


@_corruption(("dgrad", "grad_output"), codes=("F128",), words=("sign",))
def every_other_sign_flipped_delayed(path: Path) -> None:
    def change(data: Tensor) -> Tensor:
        codes = data.view(torch.uint8).clone()
        codes[:, ::2] ^= 0x80
        return codes.view(data.dtype)

    _native("tensorwise_delayed", change, ("dgrad", "grad_output"), path)


@_corruption(("wgrad", "grad_output"), codes=("F128", "F133"), words=("zero", "never written", "masked"))
def a_quarter_of_the_blocks_unwritten_mxfp8(path: Path) -> None:
    def change(data: Tensor) -> Tensor:
        codes = data.view(torch.uint8).clone()
        codes[64:160] = 0
        return codes.view(data.dtype)

    _native("mxfp8", change, ("wgrad", "grad_output"), path)


@_corruption(("fprop", "input"), codes=("F113", "F128", "F119"), words=("scale", "factor", "block"))
def exponents_off_by_one_in_half_the_blocks_mxfp8(path: Path) -> None:
    def change(scales: Tensor) -> Tensor:
        changed = scales.clone()
        changed[:, ::2] *= 2
        return changed

    _native("mxfp8", change, ("fprop", "input"), path, of="scale_inv")


@_corruption(("dgrad", "grad_output"), codes=("F113", "F128", "F119"), words=("scale", "factor"))
def one_scale_for_all_rows_rowwise(path: Path) -> None:
    _native("rowwise", lambda scales: scales.mean().expand_as(scales).clone(), ("dgrad", "grad_output"), path, of="scale_inv")


@_corruption(("fprop", "weight"), codes=("F128", "F121", "F112"), words=("older", "version", "as it is now", "noise"))
def weight_of_the_first_step_delayed(path: Path) -> None:
    kept: list[Tensor] = []

    def change(data: Tensor) -> Tensor:
        kept.append(data.clone())
        return kept[0]

    _native("tensorwise_delayed", change, ("fprop", "weight"), path)


@_corruption(("fprop", "input"), codes=("F128", "F119"), words=("places", "permuted", "order"))
def nibbles_exchanged_nvfp4(path: Path) -> None:
    def change(data: Tensor) -> Tensor:
        codes = data.view(torch.uint8).reshape(len(data), -1, 2)
        return codes.flip(2).reshape(data.shape).view(data.dtype)

    _native("nvfp4", change, ("fprop", "input"), path)


@_corruption(("fprop", "weight"), codes=("F128", "F118"), words=("sign", "zero", "one factor"))
def negative_values_lost_nvfp4(path: Path) -> None:
    _native("nvfp4", lambda data: data.float().clamp(min=0).to(data.dtype), ("fprop", "weight"), path)


@_corruption(("dgrad", "grad_output"), codes=("F113", "F128", "F119", "F147"), words=("scale", "factor"))
def tensor_scale_applied_twice_nvfp4(path: Path) -> None:
    _native("nvfp4", lambda scales: scales * scales.max() / 448, ("dgrad", "grad_output"), path, of="scale_inv")


@_corruption(("wgrad", "input"), codes=("F128",), words=("noise", "element", "rounds", "wrong"))
def last_bit_of_the_mantissa_lost_rowwise(path: Path) -> None:
    _native("rowwise", lambda data: (data.view(torch.uint8) & 0xFE).view(data.dtype), ("wgrad", "input"), path)


@_corruption(("fprop", "input"), codes=("F128",), words=("zeros of subnormal values",))
def small_codes_flushed_rowwise(path: Path) -> None:
    """The smallest elements are zero, a third of them and hardly any energy: 31.0 dB, as of a sound cast."""
    _native("rowwise", lambda data: data.float().mul(data.float().abs() >= 4).to(data.dtype), ("fprop", "input"), path)

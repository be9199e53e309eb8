"""Operands and results that are not what their GEMM should have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bench.relatives import variant
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    NOW,
    RowLinear,
    TensorLinear,
    Transformer,
    fixed_scale,
    gen,
    late,
    pow2_down,
    pow2_up,
    spoiled,
    train,
)
from tests.bench.situations.stack import fp8_gemm_nt, library, scales_of


@variant("00", modules=("layers.0.attn.q_proj",), gemms=("dgrad",), tensors=("weight",), words=(), first="right")
def columns_zero_late(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        d = d.clone()
        d.view(torch.uint8)[:, 96:] = 0
        return d, s

    train(spoiled("layers.0.attn.q_proj", casts={("dgrad", "weight"): late(fault, 8)}), folder / "sick")


@variant("00", modules=("layers.1.mlp.fc1",), gemms=("wgrad",), tensors=("grad_output",), first="right")
def rows_rolled_7th(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        return d.view(torch.uint8).roll(1, 0).view(d.dtype), s

    train(
        spoiled("layers.1.mlp.fc1", linear=RowLinear, casts={("wgrad", "grad_output"): late(fault, 0, 7)}),
        folder / "sick",
        every=1,
        steps=16,
    )


@variant("00", modules=("layers.0.attn.k_proj",), gemms=("fprop",), tensors=("weight",), first="right")
def noise_half_every5(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        v = d.float()
        return (v * (1 + 0.125 * torch.randn(v.shape, generator=gen()))).clamp(-448, 448).to(E4M3), s

    train(spoiled("layers.0.attn.k_proj", casts={("fprop", "weight"): fault}), folder / "sick", every=5)


@variant(
    "01",
    modules=("layers.1.attn.o_proj",),
    gemms=("fprop",),
    tensors=("input",),
    words=("scale",),
    misleading=("stale", "cached", "is_first_microbatch"),
    first="right",
)
def rounded_input_1x128(folder: Path) -> None:
    train(
        spoiled("layers.1.attn.o_proj", width=256, casts={("fprop", "input"): lambda x, d, s, layer: (d, pow2_up(s))}),
        folder / "sick",
    )


@variant(
    "01",
    modules=("layers.0.mlp.fc2",),
    gemms=("dgrad",),
    tensors=("grad_output",),
    words=("scale",),
    misleading=("stale", "cached"),
    first="right",
)
def rounded_down_rowwise_grad(folder: Path) -> None:
    train(
        spoiled("layers.0.mlp.fc2", linear=RowLinear, casts={("dgrad", "grad_output"): lambda x, d, s, layer: (d, pow2_down(s))}),
        folder / "sick",
        every=5,
    )


@variant(
    "01",
    modules=("layers.1.mlp.fc1",),
    gemms=("wgrad",),
    tensors=("input",),
    words=("scale",),
    misleading=("stale", "cached"),
    first="right",
)
def rounded_nearest_wgrad_late(folder: Path) -> Any:
    def near(s: Any) -> Any:
        return torch.exp2(torch.round(torch.log2(s)))

    train(spoiled("layers.1.mlp.fc1", casts={("wgrad", "input"): late(lambda x, d, s, layer: (d, near(s)), 9)}), folder / "sick")


@variant(
    "01",
    modules=("layers.0.attn.v_proj",),
    gemms=("fprop",),
    tensors=("weight",),
    words=("scale",),
    misleading=("cached", "is_first"),
    first="right",
)
def rounded_tensorwise_weight(folder: Path) -> None:
    train(
        spoiled("layers.0.attn.v_proj", linear=TensorLinear, casts={("fprop", "weight"): lambda x, d, s, layer: (d, pow2_up(s))}),
        folder / "sick",
    )


def with_kernel(folder: Path, change: Any, name: Any, gemm: Any, **kw: Any) -> None:
    def kernel(a: Any, b: Any, d: Any, c: Any = None, recipe: Any = None, **options: Any) -> None:
        first, second = change(a, b) if recipe else (a, b)
        fp8_gemm_nt(first, second, d)

    m = Transformer(width=256, hidden=384)
    marked: Any = m.get_submodule(name)
    marked.path = gemm
    vars(library())["fp8_gemm_nt"] = kernel
    try:
        train(m, folder / "sick", **kw)
    finally:
        library()


@variant(
    "03",
    modules=("layers.0.attn.q_proj",),
    gemms=("dgrad",),
    tensors=("output", "grad_input"),
    words=("scale", "kernel"),
    misleading=("accumul",),
    first="right",
)
def kernel_truncates_weight_dgrad(folder: Path) -> None:
    with_kernel(folder, lambda a, b: (a, (b[0], pow2_down(b[1]))), "layers.0.attn.q_proj", "dgrad")


@variant(
    "03",
    modules=("layers.1.mlp.fc2",),
    gemms=("wgrad",),
    tensors=("output", "grad_weight"),
    words=("scale", "kernel"),
    misleading=("accumul",),
    first="right",
)
def kernel_rounds_up_wgrad_late(folder: Path) -> None:
    with_kernel(
        folder, lambda a, b: (a, (b[0], pow2_up(b[1]))) if NOW["step"] >= 8 else (a, b), "layers.1.mlp.fc2", "wgrad", every=4
    )


@variant(
    "03",
    modules=("layers.1.attn.o_proj",),
    gemms=("fprop",),
    tensors=("output",),
    words=("scale", "kernel"),
    misleading=("accumul",),
    first="right",
)
def kernel_first_block_scale(folder: Path) -> None:
    with_kernel(
        folder, lambda a, b: ((a[0], a[1][:, :1].expand_as(a[1]).contiguous()), b), "layers.1.attn.o_proj", "fprop", every=5
    )


def zeros(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
    return (torch.zeros_like(d), s)


@variant("08", modules=("layers.0.attn.v_proj",), gemms=("wgrad",), tensors=("grad_output",), first="right")
def zeros_wgrad_late_tensorwise(folder: Path) -> None:
    train(
        spoiled("layers.0.attn.v_proj", linear=TensorLinear, casts={("wgrad", "grad_output"): late(zeros, 10)}), folder / "sick"
    )


@variant("08", tensors=("grad_output",), gemms=("dgrad", "wgrad"), first="right")
def zeros_everywhere_rowwise_every5(folder: Path) -> None:
    train(
        spoiled("*", linear=RowLinear, casts={("dgrad", "grad_output"): zeros, ("wgrad", "grad_output"): zeros}),
        folder / "sick",
        every=5,
    )


@variant("08", modules=("layers.1.mlp.fc2",), gemms=("dgrad",), tensors=("grad_output",), first="right")
def zeros_half_rows_micro(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        d = d.clone()
        d.view(torch.uint8)[160:] = 0
        return d, s

    train(spoiled("layers.1.mlp.fc2", casts={("dgrad", "grad_output"): late(fault, 5)}), folder / "sick", micro=2)


@variant("08", modules=("layers.1.attn.k_proj",), gemms=("dgrad", "wgrad"), tensors=("grad_output",), first="right")
def zeros_7th_step(folder: Path) -> None:
    train(
        spoiled(
            "layers.1.attn.k_proj",
            casts={("dgrad", "grad_output"): late(zeros, 1, 7), ("wgrad", "grad_output"): late(zeros, 1, 7)},
        ),
        folder / "sick",
        every=1,
    )


@variant(
    "10",
    modules=("layers.0.mlp.fc1",),
    gemms=("wgrad",),
    tensors=("grad_weight", "output"),
    words=("nonfinite", "finite operands"),
    first="right",
)
def wgrad_inf_every5(folder: Path) -> Any:
    def fault(out: Tensor, layer: Any) -> Any:
        if NOW["step"] >= 7:
            out[-3:] = float("inf")
        return out

    train(spoiled("layers.0.mlp.fc1", results={"wgrad": fault}), folder / "sick", every=5)


@variant(
    "10",
    modules=("layers.1.attn.o_proj",),
    gemms=("fprop",),
    tensors=("output",),
    codes=("F108",),
    misleading=("accumul",),
    first="silent",
)
def fprop_old_rows(folder: Path) -> Any:
    def fault(out: Tensor, layer: Any) -> Any:
        old = getattr(layer, "kept", None)
        layer.kept = out.detach().clone()
        if old is not None:
            out[-40:] = old[-40:]
        return out

    train(spoiled("layers.1.attn.o_proj", results={"fprop": fault}), folder / "sick", every=4)


@variant(
    "10",
    modules=("layers.1.mlp.fc2",),
    gemms=("dgrad",),
    tensors=("grad_input", "output"),
    words=("nonfinite", "finite operands"),
    first="silent",
)
def dgrad_nan_7th_skipped(folder: Path) -> Any:
    def fault(out: Tensor, layer: Any) -> Any:
        if NOW["step"] % 7 == 6:
            out[100] = float("nan")
        return out

    train(spoiled("layers.1.mlp.fc2", linear=RowLinear, results={"dgrad": fault}), folder / "sick", every=1, skip_nonfinite=True)


@variant(
    "10",
    modules=("layers.0.attn.k_proj",),
    gemms=("fprop",),
    tensors=("output",),
    words=("nonfinite", "finite operands"),
    first="right",
)
def fprop_nan_sgd_every10(folder: Path) -> Any:
    def fault(out: Tensor, layer: Any) -> Any:
        if NOW["step"] == 12:
            out[:2, 5] = float("nan")
        return out

    m = spoiled("layers.0.attn.k_proj", linear=TensorLinear, results={"fprop": fault})
    train(m, folder / "sick", every=10, steps=18, optimizer=torch.optim.SGD(m.parameters(), lr=0.1))


def prev_weight(gate: Any) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        if NOW["micro"] == 0:
            old = getattr(layer, "kept", None)
            layer.kept = (d.clone(), s.clone())
            layer.older = old
            return d, s
        return layer.older if layer.older is not None else (d, s)

    return fault


@variant("15", modules=("layers.0.attn.o_proj",), tensors=("weight",), codes=("F112",), first="right")
def later_micro_last_steps_weight(folder: Path) -> None:
    train(
        spoiled("layers.0.attn.o_proj", linear=RowLinear, casts={("fprop", "weight"): prev_weight(1)}),
        folder / "sick",
        micro=2,
        lr=4e-3,
    )


@variant("15", modules=("layers.1.mlp.fc2",), gemms=("dgrad",), tensors=("weight",), codes=("F112",), first="right")
def transposed_cache_empty(folder: Path) -> None:
    train(
        spoiled(
            "layers.1.mlp.fc2",
            casts={("dgrad", "weight"): lambda x, d, s, layer: (torch.zeros_like(d), s) if NOW["micro"] else (d, s)},
        ),
        folder / "sick",
        micro=2,
        every=5,
    )


@variant(
    "15",
    modules=("layers.0.attn.q_proj",),
    tensors=("weight",),
    codes=("F112", "F103"),
    words=("microbatch", "cache"),
    misleading=("eps",),
    first="incomplete",
)
def nan_placeholder_micro3(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        return (torch.full_like(d, float("nan")), s) if NOW["micro"] and NOW["step"] >= 4 else (d, s)

    train(
        spoiled("layers.0.attn.q_proj", linear=TensorLinear, casts={("fprop", "weight"): fault}),
        folder / "sick",
        micro=3,
        steps=10,
    )


@variant(
    "17",
    modules=("layers.1.attn.k_proj",),
    gemms=("fprop",),
    tensors=("weight",),
    codes=("F101", "F113", "F119"),
    words=("scale",),
    first="incomplete",
)
def old_row_scales_twofold(folder: Path) -> None:
    m = spoiled("layers.1.attn.k_proj", linear=RowLinear)
    layer = m.layers[1].attn.k_proj
    layer.old = scales_of(layer.weight.detach(), (1, 128), 448.0)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=gen(1)) * 0.09)
    layer.cast_faults = {("fprop", "weight"): fixed_scale(lambda x, s, layer: layer.old)}
    train(m, folder / "sick")


@variant(
    "17",
    modules=("layers.0.mlp.fc2",),
    gemms=("fprop",),
    tensors=("input",),
    codes=("F101", "F113", "F119"),
    words=("scale",),
    first="right",
)
def static_activation_scale_outgrown(folder: Path) -> Any:
    m = spoiled("layers.0.mlp.fc2", linear=TensorLinear)

    def get(x: Tensor, s: Any, layer: Any) -> Any:
        if not hasattr(layer, "old"):
            layer.old = s.clone() * 1.5
        return layer.old

    m.layers[0].mlp.fc2.cast_faults = {("fprop", "input"): fixed_scale(get)}
    m.layers[0].mlp.act.register_forward_hook(lambda mod, a, out: out * (6.0 if NOW["step"] >= 10 else 1.0))
    train(m, folder / "sick")


@variant(
    "17",
    modules=("layers.0.attn.q_proj",),
    gemms=("fprop",),
    tensors=("weight",),
    codes=("F101", "F113", "F119"),
    words=("scale",),
    first="incomplete",
)
def old_block_scales_load_at_10(folder: Path) -> Any:
    m = spoiled("layers.0.attn.q_proj", width=256)
    layer = m.layers[0].attn.q_proj

    def old(x: Tensor, s: Any, layer: Any) -> Any:
        if NOW["step"] < 10:
            layer.old = s
        return layer.old

    layer.cast_faults = {("fprop", "weight"): fixed_scale(old)}

    def before(s: Any) -> None:
        if s == 10:
            with torch.no_grad():
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=gen(2)) * 0.1)

    train(m, folder / "sick", before=before)


@variant("24", modules=("layers.1.attn.q_proj",), gemms=("fprop",), tensors=("weight",), words=("scale",), first="right")
def inverse_given_tensorwise(folder: Path) -> None:
    train(
        spoiled("layers.1.attn.q_proj", linear=TensorLinear, casts={("fprop", "weight"): lambda x, d, s, layer: (d, 1 / s)}),
        folder / "sick",
        every=5,
    )


@variant("24", modules=("layers.0.mlp.fc1",), gemms=("dgrad",), tensors=("grad_output",), words=("scale",), first="incomplete")
def multiplied_rowwise_grad_late(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        return (x.float() * s).clamp(-57344, 57344).to(E5M2), s

    train(spoiled("layers.0.mlp.fc1", linear=RowLinear, casts={("dgrad", "grad_output"): late(fault, 9)}), folder / "sick")


@variant("24", modules=("layers.1.mlp.fc2",), gemms=("wgrad",), tensors=("input",), words=("scale",), first="right")
def multiplied_static_wgrad(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        s = torch.full_like(s, 32.0 / 448)
        return (x.float() * s[:, :1]).clamp(-448, 448).to(E4M3), s

    train(spoiled("layers.1.mlp.fc2", casts={("wgrad", "input"): fault}), folder / "sick", micro=2)


@variant("24", modules=("layers.0.attn.v_proj",), gemms=("fprop",), tensors=("input",), words=("scale",), first="right")
def scale_squared_half(folder: Path) -> None:
    train(
        spoiled("layers.0.attn.v_proj", casts={("fprop", "input"): late(lambda x, d, s, layer: (d, s * 1.3), 0)}), folder / "sick"
    )


@variant("25", modules=("layers.0.attn.o_proj",), tensors=("weight",), words=("scale",), misleading=("eps",), first="right")
def scale_zero_rowwise(folder: Path) -> None:
    train(
        spoiled(
            "layers.0.attn.o_proj", linear=RowLinear, casts={("fprop", "weight"): lambda x, d, s, layer: (d, torch.zeros_like(s))}
        ),
        folder / "sick",
        steps=12,
    )


@variant(
    "25",
    modules=("layers.1.attn.v_proj",),
    gemms=("dgrad",),
    tensors=("weight",),
    words=("scale",),
    misleading=("eps",),
    first="misled",
)
def one_block_inf_dgrad(folder: Path) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        s = s.clone()
        s[-1, 0] = float("inf")
        return d, s

    train(
        spoiled("layers.1.attn.v_proj", width=256, casts={("dgrad", "weight"): late(fault, 5)}),
        folder / "sick",
        steps=10,
        every=4,
    )


@variant(
    "25",
    modules=("layers.0.mlp.fc2",),
    gemms=("fprop",),
    tensors=("input",),
    words=("scale",),
    misleading=("eps",),
    first="right",
)
def scale_garbage_late(folder: Path) -> None:
    train(
        spoiled(
            "layers.0.mlp.fc2",
            linear=TensorLinear,
            casts={("fprop", "input"): late(lambda x, d, s, layer: (d, torch.full_like(s, 3e20)), 7)},
        ),
        folder / "sick",
        steps=12,
        every=1,
    )


@variant(
    "25",
    modules=("layers.1.mlp.fc1",),
    gemms=("fprop",),
    tensors=("weight",),
    words=("scale",),
    misleading=("eps",),
    first="right",
)
def scale_ones_blocks(folder: Path) -> None:  # torch.ones placeholder
    train(
        spoiled("layers.1.mlp.fc1", casts={("fprop", "weight"): lambda x, d, s, layer: (d, torch.ones_like(s))}),
        folder / "sick",
        steps=12,
    )

"""Weights from FP8 checkpoints, and their files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8debug
from fp8debug_cli.main import status as cli_main
from tests.bench.relatives import variant
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    RowLinear,
    Transformer,
    batch,
    codes_of,
    cross_entropy,
    gen,
    on_grid,
    pow2_up,
    train,
)
from tests.bench.situations.stack import expanded, scales_of


@variant(
    "13", modules=("layers.0.attn.q_proj",), tensors=("weight",), codes=("F133",), misleading=("learning rate",), first="right"
)
def raw_rowwise_q(folder: Path) -> None:
    m = Transformer(linear=nn.Linear)
    with torch.no_grad():
        w = m.layers[0].attn.q_proj.weight
        w.copy_(codes_of(w, (1, 128)))
    fp8debug.convert(m, "tensorwise_current", overrides={"lm_head": None})
    train(m, folder / "sick", every=5)


@variant("13", modules=("layers.1.mlp.fc1",), tensors=("weight",), codes=("F133",), misleading=("learning rate",), first="right")
def raw_half_of_the_rows(folder: Path) -> None:
    m = Transformer()
    with torch.no_grad():
        w = m.layers[1].mlp.fc1.weight
        w[128:] = codes_of(w[128:], (128, 128))
    train(m, folder / "sick", optimizer=torch.optim.SGD(m.parameters(), lr=0.01))


@variant("13", tensors=("weight",), codes=("F133",), misleading=("learning rate",), first="right")
def raw_all_layers_mx(folder: Path) -> None:
    m = Transformer(linear=nn.Linear)
    with torch.no_grad():
        for n, p in m.named_parameters():
            if "layers" in n and p.dim() == 2:
                p.copy_(codes_of(p, (1, 32), up=True))
    fp8debug.convert(m, "mxfp8", overrides={"lm_head": None})
    train(m, folder / "sick")


@variant("13", modules=("layers.0.mlp.fc2",), tensors=("weight",), codes=("F133",), misleading=("learning rate",), first="right")
def raw_torchao(folder: Path) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    m = Transformer(linear=nn.Linear)
    with torch.no_grad():
        w = m.layers[0].mlp.fc2.weight
        w.copy_(codes_of(w, (128, 128)))
    convert_to_float8_training(
        m,
        config=dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True),
        module_filter_fn=lambda mod, n: n != "lm_head",
    )
    train(m, folder / "sick", exclude=("lm_head",))


def files_judge(folder: Path) -> Any:
    info = json.loads((folder / "files.json").read_text())
    wrong = []
    for k, (good, tensor, against) in info.items():
        out = io.StringIO()
        rc: Any = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                rc = cli_main(["check", str(folder / k), *(["--against", str(folder / against)] if against else [])]) or 0
            except SystemExit as e:
                rc = e.code or 0
        text = out.getvalue()
        if rc != (0 if good else 1) or (not good and tensor not in text):
            wrong.append(("false alarm " if good else "silent ") + k + f" rc {rc} " + text.strip()[:300])
    for w in wrong:
        print("   ", w)
    return "right" if not wrong else "false alarm" if any(w.startswith("false") for w in wrong) else "incomplete"


def save_files(folder: Path, good: Any, original: Any, against: Any, tensor: Any) -> None:
    from safetensors.torch import save_file

    save_file(original, folder / "original.safetensors")
    info = {}
    for k, (ok, tensors) in good.items():
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / f"{k}.safetensors")
        info[f"{k}.safetensors"] = (ok, tensor, "original.safetensors" if against else None)
    (folder / "files.json").write_text(json.dumps(info))


def wild(r: Any, c: Any, n: Any = 0) -> Any:
    return torch.randn(r, c, generator=gen(n)) * torch.exp2(torch.linspace(-3, 3, r))[:, None] * 0.02


@variant("20", files_judge, first="right")
def files_rowwise(folder: Path) -> None:
    n = "model.layers.3.self_attn.q_proj.weight"
    w = wild(384, 256)
    s = scales_of(w, (1, 256), 448.0)
    d = (w / s).clamp(-448, 448).to(E4M3)
    k = n + "_scale"
    save_files(
        folder,
        {
            "ok": (True, {n: d, k: s}),
            "ok_bf16_scale": (True, {n: (w / s.bfloat16().float()).clamp(-448, 448).to(E4M3), k: s.bfloat16()}),
            "shuffled": (False, {n: d, k: s.flip(0)}),
            "inverse": (False, {n: d, k: 1 / s}),
            "rolled_codes": (False, {n: d.view(torch.uint8).roll(1, 0).view(E4M3), k: s}),
            "zero_scale": (False, {n: d, k: torch.where(torch.arange(384)[:, None] == 7, 0.0, s)}),
            "half": (False, {n: d, k: s * 0.5}),
            "sign": (False, {n: (-d.float()).to(E4M3), k: s}),
        },
        {n: w.bfloat16()},
        True,
        n,
    )


@variant("20", files_judge, first="right")
def files_tensorwise_e5m2(folder: Path) -> None:
    n = "decoder.block.0.mlp.wi.weight"
    w = wild(200, 120, 1)
    s = (w.abs().max() / 57344).reshape(())
    d = (w / s).to(E5M2)
    k = n + "_scale"
    save_files(
        folder,
        {
            "ok": (True, {n: d, k: s}),
            "ok_shape1": (True, {n: d, k: s.reshape(1)}),
            "e4m3_scale": (False, {n: d, k: s * 128}),
            "nan": (False, {n: d, k: s * float("nan")}),
            "missing": (False, {n: d}),
            "columns_zero": (False, {n: torch.where(torch.arange(120) < 60, d.float(), 0.0).to(E5M2), k: s}),
        },
        {n: w.bfloat16()},
        True,
        n,
    )


@variant("20", files_judge, first="right")
def files_mx_alone(folder: Path) -> None:
    n = "model.layers.1.mlp.up_proj.weight"
    w = wild(256, 512, 2)
    s = pow2_up(scales_of(w, (1, 32), 448.0))
    d = (w / expanded(s, w.shape, (1, 32))).clamp(-448, 448).to(E4M3)
    k = n + "_scale"
    e = s.to(torch.float8_e8m0fnu).view(torch.uint8)
    bad = d.clone()
    bad.view(torch.uint8)[3, 5] = 0x7F
    save_files(
        folder,
        {
            "ok": (True, {n: d, k: e}),
            "nan_code": (False, {n: bad, k: e}),
            "short": (False, {n: d, k: e[:, :-1]}),
            "ff_scale": (False, {n: d, k: torch.where(torch.arange(256)[:, None] == 9, 255, e.int()).to(torch.uint8)}),
            "never_loaded": (False, {n: d, k: torch.full_like(e, 127)}),
            "raw_bf16": (False, {n: d.bfloat16()}),
            "orphan": (False, {n: w.bfloat16(), k: e}),
        },
        {n: w.bfloat16()},
        False,
        n,
    )


@variant("23", tensors=("weight",), words=("twice", "again", "already"), first="right")
def twice_rowwise_to_tensorwise(folder: Path) -> None:
    m = on_grid(Transformer(linear=nn.Linear, width=256), "row")
    fp8debug.convert(m, "tensorwise_current", overrides={"lm_head": None})
    served(m, folder, ("rowwise",))


@variant("23", tensors=("weight",), words=("twice", "again", "already"), first="right")
def twice_blocks_to_mx_attention(folder: Path) -> None:
    m = on_grid(Transformer(linear=nn.Linear, width=256), (128, 128), ("layers", "attn"))
    fp8debug.convert(m, "mxfp8", overrides={"lm_head": None})
    served(m, folder, ("blockwise",))


@variant("23", tensors=("weight",), words=("twice", "again", "already"), first="silent")
def twice_own_stack_trained(folder: Path) -> None:
    m = on_grid(Transformer(linear=RowLinear, width=256), (128, 128))
    train(m, folder / "sick", what_if=("blockwise",), every=5)


def served(m: Any, folder: Path, what_if: Any) -> None:
    with fp8debug.watch(m, folder / "sick", every=1, what_if=what_if) as w:
        for step in range(6):
            t, y = batch(step)
            w.step(loss=cross_entropy(m(t), y))

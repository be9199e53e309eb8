"""Attention, rollouts, another tool's log, and clean runs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug_cli.main import status as cli_main
from tests.bench.relatives import variant
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    NOW,
    Adam8,
    Attention,
    Layer,
    Muon,
    OwnLinear,
    RowLinear,
    TensorLinear,
    Transformer,
    ao,
    batch,
    cross_entropy,
    fixed_scale,
    lora,
    low,
    on_grid,
    padded,
    same,
    spoiled,
    train,
    zero_pad,
)
from tests.bench.situations.stack import LARGEST


def attention_said(folder: Path) -> Any:
    v = fp8debug.triage(folder / "sick")
    said = " ".join(f.message + f.cure for f in v) + json.dumps(v.classification)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli_main(["coverage", str(folder / "sick")])
    said = (said + out.getvalue()).lower()
    [f for f in fp8debug.triage(folder / "clean") if f.severity > 20] if False else []
    return "right" if "attention" in said or "matmul" in said else "silent"


class Fp8Sdpa(Attention):
    kind, first = E5M2, 0

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        if NOW["step"] < self.first:
            return super().attend(q, k, v)

        def low(t: Any) -> Any:
            s = t.detach().abs().max() / LARGEST[self.kind]
            return t + ((t / s).to(self.kind).to(t.dtype) * s - t).detach()

        return functional.scaled_dot_product_attention(low(q), low(k), low(v), is_causal=True)


@variant("18", attention_said, first="right")
def sdpa_of_fp8_qkv(folder: Path) -> None:
    class L(Layer):
        attention = Fp8Sdpa

    train(Transformer(layer=L), folder / "sick", steps=10)


class ProbsFp8(Attention):
    def attend(self, q: Any, k: Any, v: Any) -> Any:
        p = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 * 6).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", p + (p.to(E4M3).to(p.dtype) - p).detach(), v)


@variant("18", attention_said, first="right")
def einsum_probs_unscaled(folder: Path) -> None:
    class L(Layer):
        attention = ProbsFp8

    train(Transformer(linear=RowLinear, layer=L), folder / "sick", steps=10, every=5)


class BmmFp8(Attention):
    def attend(self, q: Any, k: Any, v: Any) -> Any:
        p = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        b = torch.bmm(p.to(E4M3).to(p.dtype).flatten(0, 1), v.flatten(0, 1))
        return b.unflatten(0, p.shape[:2])


@variant("18", attention_said, first="right")
def bmm_torchao(folder: Path) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    class L(Layer):
        attention = BmmFp8

    m = Transformer(linear=nn.Linear, layer=L)
    convert_to_float8_training(
        m,
        config=dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True),
        module_filter_fn=lambda mod, n: n != "lm_head",
    )
    train(m, folder / "sick", steps=10, exclude=("lm_head",))


def rollouts(folder: Path, name: Any, part: Any = lambda new, old: old, recipe: Any = "blockwise", **kw: Any) -> Any:
    m = fp8debug.convert(Transformer(linear=nn.Linear), recipe, overrides={"lm_head": None})
    old = dict(m.named_parameters())[name].detach().clone()

    def engine(t: Any) -> Any:
        r = copy.deepcopy(m)
        with torch.no_grad():
            p = dict(r.named_parameters())[name]
            p.copy_(part(p.clone(), old))
            return r(t)

    train(
        m,
        folder / "sick",
        steps=24,
        lr=5e-3,
        after_step=lambda s, w: w.compare_inference(batch(999)[0], inference=engine) if s % 6 == 5 else None,
        **kw,
    )


@variant("19", codes=("F122",), words=("layers.1.attn.o_proj",), first="silent")
def stale_o_proj(folder: Path) -> None:
    rollouts(folder, "layers.1.attn.o_proj.weight", every=5)


@variant("19", codes=("F122",), words=("layers.0.mlp.fc1",), first="silent")
def stale_half_rows(folder: Path) -> None:
    rollouts(folder, "layers.0.mlp.fc1.weight", lambda n, o: torch.cat([n[:128], o[128:]]), recipe="rowwise")


@variant("19", codes=("F122",), words=("norm",), first="right")
def stale_norm(folder: Path) -> None:
    rollouts(folder, "norm.weight", lambda n, o: o * 0.6, recipe="tensorwise_current")


@variant("19", codes=("F122",), words=("embed",), first="silent")
def stale_embedding(folder: Path) -> None:
    rollouts(folder, "embed.weight")


def te(folder: Path, layers: Any, steps: Any, value: Any, names: Any = None) -> None:
    from nvdlfw_inspect.logging import FileLogger

    log = FileLogger("nvdlfw_inspect", str(folder / "sick"))
    log._initialize_stats_logger("nvdlfw_inspect_statistics_logs")
    for s in steps:
        for layer in layers:
            for k, v in value(layer, s).items():
                log.log_scalar(f"{layer}_{k}", v, s)
    for handler in list(log.stats_logger.handlers):  # else the next log is written into this one too
        log.stats_logger.removeHandler(handler)
        handler.close()


LAYERS = [
    f"decoder.layers.{i}.{p}"
    for i in range(3)
    for p in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]


def te_judge(layer: Any, role: Any) -> Any:
    def told(path: Any) -> Any:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
            cli_main(["triage", str(path), "--format", "json"])
        return json.loads(out.getvalue())["findings"]

    def judge(folder: Path) -> Any:
        f, f2 = told(folder / "sick"), told(folder / "clean")
        for x in f:
            print("   ", x["code"], x["severity"], x["module"], x["gemm"], x["tensor"], x["message"][:200])
        if [x for x in f2 if x["severity"] != "info"]:
            return "false alarm"
        if not f:
            return "silent"
        return "right" if layer in (f[0]["module"] or "") and role in (f[0]["tensor"] or "") else "misled"

    return judge


def te_both(folder: Path, sick_value: Any, value: Any, steps: Any = range(0, 300, 10)) -> None:
    (folder / "c").mkdir()
    (folder / "s").mkdir()
    te(folder / "s", LAYERS, steps, sick_value)
    te(folder / "c", LAYERS, steps, value)
    (folder / "s" / "sick").rename(folder / "sick")
    (folder / "c" / "sick").rename(folder / "clean")


@variant("21", te_judge("decoder.layers.1.mlp.linear_fc2", "input"), first="silent")
def te_activation_overflows(folder: Path) -> Any:
    def base(layer: Any, s: Any) -> Any:
        return {
            "activation_overflows%": 0.0,
            "activation_underflows%": 0.05,
            "activation_amax": 6.0 + 0.01 * (s % 7),
            "gradient_underflows%": 1.0,
            "weight_underflows%": 0.0,
        }

    te_both(
        folder,
        lambda layer, s: {
            **base(layer, s),
            **({"activation_overflows%": 4.0, "activation_amax": 60.0} if layer == LAYERS[7] and s >= 150 else {}),
        },
        base,
    )


@variant("21", te_judge("decoder.layers.0.self_attention.linear_qkv", "grad_output"), first="silent")
def te_gradient_underflow_40(folder: Path) -> Any:
    def base(layer: Any, s: Any) -> Any:
        return {
            "gradient_underflows%": 0.3,
            "gradient_amax": 1e-3,
            "gradient_scale_inv_min": 1e-8,
            "gradient_scale_inv_max": 1e-8,
            "activation_underflows%": 0.1,
        }

    te_both(
        folder,
        lambda layer, s: {**base(layer, s), **({"gradient_underflows%": 45.0} if layer == LAYERS[0] and s >= 100 else {})},
        base,
    )


@variant("21", te_judge("decoder.layers.2.mlp.linear_fc1", "weight"), first="silent")
def te_weight_all_underflow_recipe_names(folder: Path) -> Any:
    def base(layer: Any, s: Any) -> Any:
        return {
            "weight_fp8_delayed_scaling_underflows%": 0.0,
            "weight_fp8_delayed_scaling_mse": 1e-7,
            "weight_fp8_delayed_scaling_scale_inv_min": 0.001,
            "weight_fp8_delayed_scaling_scale_inv_max": 0.001,
            "weight_std": 0.02,
            "weight_amax": 0.1,
        }

    te_both(
        folder,
        lambda layer, s: {
            **base(layer, s),
            **(
                {"weight_fp8_delayed_scaling_underflows%": 88.0, "weight_fp8_delayed_scaling_mse": 3e-4}
                if layer == LAYERS[10]
                else {}
            ),
        },
        base,
    )


@variant("22", clean=True, first="right")
def clean_ao_tensorwise_first_last(folder: Path) -> None:
    train(
        ao(Transformer(linear=nn.Linear, depth=3), "tensorwise", ("lm_head", "layers.0.*", "layers.2.*")),
        folder / "sick",
        micro=2,
        every=5,
    )


@variant("22", clean=True, first="right")
def clean_ao_gw_hp_attention_only(folder: Path) -> None:
    train(ao(Transformer(linear=nn.Linear), "rowwise_with_gw_hp", ("lm_head", "*.mlp.*")), folder / "sick", exclude=("lm_head",))


@variant("22", clean=True, first="right")
def clean_ao_muon(folder: Path) -> None:
    m = ao(Transformer(linear=nn.Linear), "rowwise")
    train(m, folder / "sick", optimizer=Muon(m.parameters(), lr=0.01), steps=24)


@variant("clean", clean=True, first="right")
def clean_own_blocks_micro2_every5(folder: Path) -> None:
    train(Transformer(depth=3, width=256), folder / "sick", micro=2, every=5)


@variant("clean", clean=True, first="right")
def clean_rowwise_e5m2_masked_rows(folder: Path) -> None:
    train(zero_pad(Transformer(linear=RowLinear)), folder / "sick", data=padded)


@variant("clean", clean=True, first="right")
def clean_tensorwise_static_input(folder: Path) -> Any:
    def get(x: Tensor, s: Any, layer: Any) -> Any:
        if not hasattr(layer, "old"):
            layer.old = s.clone() * 8
        return layer.old

    m = spoiled("*", linear=TensorLinear, casts={("fprop", "input"): fixed_scale(get)})
    train(m, folder / "sick", optimizer=torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), steps=24)


@variant("clean", clean=True, first="right")
def clean_lora_zero_rows_with_eps(folder: Path) -> None:
    train(zero_pad(Transformer(linear=lora(OwnLinear))).bfloat16(), folder / "sick", data=padded, lr=1e-3)


@variant("clean", clean=True, first="right")
def clean_muon_torchao_tensorwise_zloss(folder: Path) -> Any:
    class User(Transformer):
        def forward(self, t: Any) -> Any:
            y = self.lm_head(self.hidden(t))
            return y, y.float().logsumexp(-1).pow(2).mean() * 1e-3

    m = ao(User(linear=nn.Linear), "tensorwise")
    train(
        m,
        folder / "sick",
        loss_of=lambda o, y: cross_entropy(o[0], y) + o[1],
        optimizer=Muon(m.parameters(), lr=0.01),
        exclude=("lm_head",),
        steps=24,
    )


@variant("clean", clean=True, first="right")
def clean_loaded_checkpoint_then_trained_mx(folder: Path) -> None:
    m = on_grid(Transformer(linear=nn.Linear, width=256), (128, 128))
    fp8debug.convert(m, "mxfp8", overrides={"lm_head": None})
    train(m, folder / "sick", lr=1e-3, micro=2, every=1, steps=10)


@variant("clean", clean=True, first="right")
def clean_moment_fp8_in_sane_blocks(folder: Path) -> None:  # 8-bit first moment, sqrt-free second moment in FP32
    m = Transformer(linear=RowLinear)
    train(m, folder / "sick", optimizer=Adam8(m.parameters(), 1e-3, low(E4M3, 256), same), steps=24)


@variant("clean", clean=True, first="right")
def clean_current_clean_cache_micro(folder: Path) -> Any:  # weight cast once per step and reused, correctly
    def reuse(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        if NOW["micro"] == 0:
            layer.kept = (d, s)
        return layer.kept

    train(spoiled("*", linear=RowLinear, casts={("fprop", "weight"): reuse}), folder / "sick", micro=3, every=5)

"""Transformer Engine on a GPU: ``python tests/adapters/transformer_engine/te_on_gpu.py [--recipes block nvfp4_reference ...]``.

For each recipe two processes, as the library's debug tools stay on for good; for a ``CustomRecipe`` the first alone:

    plain  its modules, a TransformerLayer among them, are trained with and without a watch, and so are ways to use them that
           change what the library keeps: losses and weights are to be equal to the last bit, the sites of each Linear to be
           there, and nothing of ours is to wait for the GPU
    debug  a step under its own LogFp8TensorStats and LogTensorStats (nvdlfw_inspect) and under a watch: a table of both figures

Exits with 1 when a check fails or a figure that both define alike differs by more than 1 %. Two things are theirs: ``mse`` is
worked out in BF16, which adds 1 to 2 % where scales are no powers of two, so its formula is run in FP32 here; and ``mse`` of
column-wise blocks is that of the row-wise ones, and not compared. One is ours: of a tensor that is worked out once more (behind a
norm, an activation or its derivative) single elements are rounded to the other BF16 neighbour, which a ``mean`` near 0 shows: it
may differ by MEAN standard errors of a rounding of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fp8debug
from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback
from fp8debug.types import Gemm

HIDDEN, HEADS, TOKENS, STEPS = 512, 8, 256, 4
#: The recipe of the process, for modules that want it at construction.
RECIPE = [""]
#: The Linears of each module.
PARTS = {
    "first": ("first",),
    "experts": ("experts.gemm_0", "experts.gemm_1"),
    "norm": ("norm",),
    "mlp": ("mlp.fc1", "mlp.fc2"),
    "block": (
        *("block.self_attention.layernorm_qkv", "block.self_attention.proj"),
        *("block.layernorm_mlp.fc1", "block.layernorm_mlp.fc2"),
    ),
}
#: The operands of ours that are worked out once more.
WORKED_OUT = {("norm", "input"), ("mlp.fc1", "input"), ("mlp.fc2", "input"), ("mlp.fc1", "grad_output")}
#: Standard errors of a mean, if each of its elements were rounded to BF16.
MEAN = 1.0
#: Their tensors and directions of quantization, and our sites.
SITES = {
    ("activation", ""): ("fprop", "input"),
    ("activation", "_columnwise"): ("wgrad", "input"),
    ("weight", ""): ("fprop", "weight"),
    ("weight", "_columnwise"): ("dgrad", "weight"),
    ("gradient", ""): ("dgrad", "grad_output"),
    ("gradient", "_columnwise"): ("wgrad", "grad_output"),
}
FP8_STATS, TENSOR_STATS = ("underflows%", "mse", "scale_inv_min", "scale_inv_max"), ("cur_amax", "mean")


#: Factories of a ``CustomRecipe`` in the library's ``custom_recipes``, by the name of a recipe here.
CUSTOM = {
    "nvfp4_reference": "reference_nvfp4.nvfp4_ref_rht_2d_factory",
    "current_reference": "reference_current_scaling.current_scaling_ref_factory",
    "custom_delayed": "quantizer_factories.delayed_scaling_factory",
    "custom_block": "quantizer_factories.float8_block_scaling_factory",
}


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    if name in CUSTOM:
        module, factory = CUSTOM[name].split(".")
        return recipe.CustomRecipe(
            qfactory=getattr(import_module(f"transformer_engine.pytorch.custom_recipes.{module}"), factory)
        )
    kinds = {
        "block": "Float8BlockScaling",
        "current": "Float8CurrentScaling",
        "delayed": "DelayedScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    return getattr(recipe, kinds[name])()


class Net(nn.Module):
    """One or several of the modules that are read, or one that is built of them."""

    def __init__(self, *parts: str, **options: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        torch.manual_seed(0)
        has_bias = not RECIPE[0].endswith("_reference")  # whose GEMMs, or casts of a gradient with its bias, take none
        same: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda", "bias": has_bias, **options}
        self.parts = parts
        if "first" in parts:
            self.first = te.Linear(HIDDEN, HIDDEN, name="first", **same)
        if "experts" in parts:
            self.experts = te.GroupedLinear(2, HIDDEN, HIDDEN, name="experts", **{**same, "bias": False})
        if "norm" in parts:
            self.norm = te.LayerNormLinear(HIDDEN, HIDDEN, name="norm", **same)
        if "mlp" in parts:
            kind = {"activation": "swiglu", "normalization": "RMSNorm", **same}
            self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, name="mlp", **kind)
        if "block" in parts:
            more: dict[str, Any] = {"fuse_qkv_params": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
            self.block = te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, **more, **same)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for name in self.parts:
            if name == "experts":
                flat = x.reshape(-1, HIDDEN)
                x = x + self.experts(flat, [TOKENS // 2, len(flat) - TOKENS // 2], **options).view_as(x)
            elif name == "block":
                x = self.block(x)
            else:
                x = x + getattr(self, name)(x, **options)
        return x


def train(
    net: nn.Module,
    recipe: Any,
    watch: Any,
    *,
    strict: bool = False,
    after: Any = None,
    micro: int = 1,
) -> tuple[list[Tensor], list[Tensor]]:
    """Train; with several microbatches the library keeps its cast weights from one to the next."""
    import transformer_engine.pytorch as te

    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        for part in range(micro):
            torch.cuda.set_sync_debug_mode(0)
            seed = torch.Generator().manual_seed(step * micro + part)
            x = torch.randn(TOKENS // 4, 4, HIDDEN, generator=seed).bfloat16().cuda().requires_grad_()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if strict and step else 0)
            options = {"is_first_microbatch": part == 0} if micro > 1 else {}
            with te.autocast(enabled=True, recipe=recipe):
                loss = net(x, **options).float().square().mean()
            loss.backward()
        optimizer.step()
        for p in net.parameters():
            if (main_grad := getattr(p, "main_grad", None)) is not None:
                p.data.add_(main_grad, alpha=-1e-3)
                main_grad.zero_()
        optimizer.zero_grad()
        if watch is not None:
            watch.step(loss=loss)
        torch.cuda.set_sync_debug_mode(0)
        losses.append(loss.detach())
        if after is not None:
            after()
    return losses, [p.detach().dequantize().clone() for p in net.parameters()]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        from transformer_engine.pytorch import checkpoint

        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def frozen() -> nn.Module:
    net = Net("first", "mlp")
    for name, p in net.named_parameters():
        p.requires_grad_("weight" not in name or "layer_norm" in name)
    return net


def fused_gradients() -> nn.Module:
    net = Net("first", "norm", fuse_wgrad_accumulation=True)
    for p in net.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]  # Megatron's
    return net


def fp8_weights() -> nn.Module:
    import transformer_engine.pytorch as te

    with te.quantized_model_init(enabled=True, recipe=recipe_of(RECIPE[0])):
        return Net("first", "mlp")


def compiled() -> nn.Module:
    net: Any = torch.compile(Net("first"))
    return nn.Sequential(net)


#: Ways to use the library: a model, options of :func:`train`, and how many sites each of its Linears has.
WAYS: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
    **{name: (lambda name=name: Net(name), {}, dict.fromkeys(linears, 9)) for name, linears in PARTS.items()},
    "all": (lambda: Net(*PARTS), {}, dict.fromkeys(sum(PARTS.values(), ()), 9)),
    "gelu, zero-centered LayerNorm": (
        lambda: Net("mlp", activation="gelu", normalization="LayerNorm", zero_centered_gamma=True),
        {},
        {"mlp.fc1": 9, "mlp.fc2": 9},
    ),
    "microbatches": (lambda: Net("first", "norm", "mlp"), {"micro": 2}, {"first": 9, "norm": 9, "mlp.fc1": 9, "mlp.fc2": 9}),
    "checkpointed": (lambda: Checkpointed(Net("first", "norm")), {}, {"inner.first": 9, "inner.norm": 9}),
    "frozen": (frozen, {}, {"first": 6, "mlp.fc1": 6, "mlp.fc2": 6}),
    "fused gradients": (fused_gradients, {}, {"first": 9, "norm": 9}),
    "weights in FP8 alone": (fp8_weights, {}, {"first": 7, "mlp.fc1": 7, "mlp.fc2": 7}),
    "compiled": (compiled, {}, {}),
}


def equal(one: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def plain(name: str) -> list[str]:
    """Return what is wrong."""
    RECIPE[0] = name
    wrong = []
    for way, (build, options, expected) in WAYS.items():
        try:
            found = one_way(name, way, build, options, expected)
        except Exception as error:  # the other ways are to be seen too
            traceback.print_exc()
            found = [f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"]
        finally:
            torch.cuda.set_sync_debug_mode(0)
        wrong += [f"{name}, {way}: {text}" for text in found]
    if name == "block":
        wrong += [f"{name}, exported: {text}" for text in exported(name)]
    return wrong


def exported(name: str) -> list[str]:
    """Train under the recipe that ``fallback --to te-recipe`` writes: of a GEMM that leaves FP8 the result alone has rows."""
    parts = ("first", "norm", "mlp")
    with tempfile.TemporaryDirectory() as folder:
        net = Net(*parts)
        with fp8debug.watch(net, Path(folder, "run"), every=1) as watch:
            train(net, recipe_of(name), watch)
        left = [Fallback(module=m, gemms=g) for m, g in (("first", tuple(Gemm)), ("norm", ("wgrad",)), ("mlp.fc1", ("fprop",)))]
        text = EXPORTERS.get("te-recipe").export(fp8debug.Run(Path(folder, "run")), left)
    file: dict[str, Any] = {}
    exec(compile(text, "te-recipe", "exec"), file)

    def build() -> nn.Module:
        net = Net(*parts)
        file["name_modules"](net)
        return net

    return one_way(name, "exported", build, {}, {"first": 0, "norm": 7, "mlp.fc1": 7, "mlp.fc2": 9}, lambda: file["recipe"])


def one_way(name: str, way: str, build: Any, options: dict[str, Any], sites: dict[str, int], recipe: Any = None) -> list[str]:
    """Return what is wrong with one way to use the library; ``recipe`` makes another than that of the name."""
    wrong = []
    recipe = partial(recipe_of, name) if recipe is None else recipe
    try:
        expected = train(build(), recipe(), None, **options)
    except Exception as error:
        torch.cuda.set_sync_debug_mode(0)
        if name not in CUSTOM:
            raise
        print(f"{name}, {way}: the library itself cannot: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return []
    try:
        again = train(build(), recipe(), None, strict=True, **options)
        strict = True
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode(0)
        strict = False
        again = train(build(), recipe(), None, **options)
        print(f"{name}, {way}: the library itself waits for the GPU: {str(error).splitlines()[0]}")
    if not equal(expected, again):
        return ["is not the same twice without a watch"]
    with tempfile.TemporaryDirectory() as folder:
        net = build()
        with fp8debug.watch(net, Path(folder, "run"), every=1, shadow_rows=64) as watch:
            found = train(net, recipe(), watch, strict=strict, **options)
        run = fp8debug.Run(Path(folder, "run"))
        if not equal(expected, found):
            wrong.append("losses or weights differ under a watch")
        counts = {r["module"]: r["n"] for r in run.sql(COUNT).to_pylist()}
        wrong += [f"{m} has {counts.get(m, 0)} of {n} sites" for m, n in sites.items() if counts.get(m, 0) != n]
        low = run.sql("SELECT module, gemm, tensor, sqnr_db FROM sites WHERE reference = 'exact' AND sqnr_db < 40 AND step > 0")
        wrong += [f"against the exact GEMM {row}" for row in low.to_pylist()]
        for row in run.sql("SELECT DISTINCT message FROM events").to_pylist():
            print(f"{name}, {way}: event: {row['message']}")
        print(f"{name}, {way}: {counts}, {len(wrong)} checks failed; no wait: {strict}; casts {sorted(casts_of(run))}")
    return wrong


COUNT = "SELECT module, count(DISTINCT gemm || tensor) AS n FROM sites WHERE actual GROUP BY module"


def casts_of(run: fp8debug.Run) -> set[str]:
    query = "SELECT DISTINCT cast_name FROM sites WHERE actual AND reference = 'operand'"
    return {row["cast_name"] for row in run.sql(query).to_pylist()}


@contextmanager
def debug_tools(name: str, found: dict[str, float]) -> Iterator[Any]:
    """Switch the library's debug tools on, their figures going into ``found`` unrounded; before its first module is made."""
    import nvdlfw_inspect.api as debug
    import transformer_engine
    from nvdlfw_inspect.logging import BaseLogger

    class Keep(BaseLogger):  # type: ignore[misc]  # a class without types
        def log_scalar(self, name: str, value: Any, iteration: int, **more: Any) -> None:
            found[f"{iteration} {name}"] = float(value)

    fp8 = [*FP8_STATS, *(f"{s}_columnwise" for s in FP8_STATS if name in ("block", "mxfp8"))]  # others raise

    def feature(stats: list[str]) -> dict[str, Any]:
        tensors = [{"tensor": t, "stats": stats, "freq": 1} for t in ("activation", "weight", "gradient")]
        return {"enabled": True, "tensors_struct": tensors}

    features = {"LogFp8TensorStats": feature(fp8), "LogTensorStats": feature(list(TENSOR_STATS))}
    config = {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": features}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        where = str(Path(transformer_engine.__file__).parent / "debug" / "features")
        debug.initialize(config_file=f"{folder}/config.yaml", feature_dirs=[where], log_dir=folder, statistics_logger=Keep())
        from transformer_engine.debug.features.utils.stats_computation import STATS

        for stat, reduction in (("mse", "mean"), ("total_square_error", "sum")):
            STATS[stat] = (partial(_squared_error, reduction), STATS[stat][1])
        yield debug
        debug.end_debug()


def _squared_error(reduction: str, x: Tensor, others: dict[str, Any]) -> Tensor:
    """Return what theirs computes, in FP32 and from a dequantized tensor in FP32."""
    return functional.mse_loss(x.float(), others[""].dequantize(dtype=torch.float32), reduction=reduction)


def beside(name: str) -> list[str]:
    """Print both figures of each site, and return what differs."""
    theirs: dict[str, float] = {}
    wrong, ours, first = [], {}, 0
    with tempfile.TemporaryDirectory() as folder, debug_tools(name, theirs) as debug:
        for part in [part for part in PARTS if part != "block"]:
            try:
                net = Net(part)
                with fp8debug.watch(net, Path(folder, part), every=1, what_if=()) as watch:
                    train(net, recipe_of(name), watch, after=debug.step)
            except Exception as error:  # the others are to be seen too
                traceback.print_exc()
                wrong.append(f"{name}, {part}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
                debug.initialize_training_step(first := first + 2 * STEPS)
                continue
            run = fp8debug.Run(Path(folder, part))
            rows = run.sql("SELECT * FROM sites WHERE actual AND reference = 'operand' ORDER BY step, module").to_pylist()
            ours.update({(first + r["step"], r["module"], r["gemm"], r["tensor"]): r for r in rows})
            for row in run.sql("SELECT DISTINCT message FROM events").to_pylist():
                print(f"{name}, {part}: event: {row['message']}")
            first += STEPS
    compared, worst, shown = 0, 0.0, set()
    print(f"{'step, Linear, site, figure':60s} {'theirs':>14s} {'ours':>14s}")
    for (step, module, gemm, role), row in ours.items():
        tensor, way = next(key for key, site in SITES.items() if site == (gemm, role))
        for stat in (*FP8_STATS, *(TENSOR_STATS if not way else ())):
            keys = [k for k in theirs if k.startswith(f"{step} {module}_{tensor}_") and k.endswith(f"_{stat}{way}")]
            if len(keys) != 1 or (stat == "mse" and way):
                continue
            value, mine = theirs[keys[0]], figure(row, stat)
            if mine is None:
                continue
            compared += 1
            allowed, one = 0.0, 2**-9 * row["sum_x2"] ** 0.5 / row["numel"]
            if stat == "mean" and (module, role) in WORKED_OUT:
                allowed, worst = MEAN * one, max(worst, (abs(value - mine) - 0.01 * abs(mine)) / (one or 1))
            far = not abs(value - mine) <= 0.01 * max(abs(value), abs(mine)) + allowed
            label = f"{step} {module} {gemm}.{role} {stat}"
            if far:
                wrong.append(f"{name}: {label}: theirs {value:.6g}, ours {mine:.6g}")
            if far or (module, gemm, role, stat) not in shown:
                shown.add((module, gemm, role, stat))
                print(f"{label:60s} {value:14.6g} {mine:14.6g}{' <' if far else ''}")
    print(f"{name}: {compared} figures of both compared, {len(wrong)} differ by more than 1 % (a mean by {worst:.3f} errors)")
    return wrong if compared else [*wrong, f"{name}: no figure of both was found among {sorted(theirs)[:5]}"]


def figure(row: dict[str, Any], stat: str) -> float | None:
    """Return ours of the name that theirs has; None where we have none."""
    numel = row["numel"]
    values = {
        "underflows%": 100 * row["num_underflow"] / numel,
        "mse": row["sum_err2"] / numel,
        "scale_inv_min": row["scale_inv_min"],
        "scale_inv_max": row["scale_inv_max"],
        "cur_amax": row["amax"],
        "mean": row["sum_x"] / numel,
    }
    return values.get(stat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["block", "current", "delayed", *CUSTOM])
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        sys.exit("this needs a GPU and Transformer Engine: pip install 'fp8debug[te]'")
    if options.case:
        kind, name = options.case.split(":")
        wrong = plain(name) if kind == "plain" else beside(name)
        print("\n".join(wrong))
        sys.exit(bool(wrong))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    kinds = ["plain"] + (["debug"] if find_spec("nvdlfw_inspect") is not None else [])
    cases = [f"{kind}:{name}" for kind in kinds for name in options.recipes if kind == "plain" or name not in CUSTOM]
    environment = {**os.environ, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    with ThreadPoolExecutor(options.jobs) as pool:
        command = [sys.executable, __file__, "--case"]
        run = partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False)
        results = [pool.submit(run, [*command, case]) for case in cases]
        for case, result in zip(cases, results, strict=True):
            print(f"== {case}\n{result.result().stdout}", flush=True)
    failed = [case for case, result in zip(cases, results, strict=True) if result.result().returncode]
    print(f"failed: {failed}" if failed else "nothing failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

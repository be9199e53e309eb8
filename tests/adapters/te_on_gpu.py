"""Transformer Engine on a GPU: ``python tests/adapters/te_on_gpu.py [--recipes block current delayed mxfp8]``.

For each recipe two processes, as the library's debug tools stay on for good:

    plain  its modules, a TransformerLayer among them, are trained with and without a watch: losses and weights are to be equal to
           the last bit, all nine sites of each Linear to be there, and nothing of ours is to wait for the GPU
    debug  a step under its own LogFp8TensorStats and LogTensorStats (nvdlfw_inspect) and under a watch: a table of both figures

Exits with 1 when a check fails or a figure that both define alike differs by more than 1 %. Both sides' ``mse`` of a fused norm
may differ by the rounding of its BF16 result, and their ``scale_inv`` leaves blocks of zeros in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug

HIDDEN, HEADS, TOKENS, STEPS = 512, 8, 256, 4
LINEARS = (
    *("first", "experts.gemm_0", "experts.gemm_1", "norm", "mlp.fc1", "mlp.fc2"),
    *("block.self_attention.layernorm_qkv", "block.self_attention.proj", "block.layernorm_mlp.fc1", "block.layernorm_mlp.fc2"),
)
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


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    kinds = {
        "block": "Float8BlockScaling",
        "current": "Float8CurrentScaling",
        "delayed": "DelayedScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    return getattr(recipe, kinds[name])()


class Net(nn.Module):
    """Every module that is read, and one that is built of them."""

    def __init__(self, *, with_block: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        torch.manual_seed(0)
        same: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
        self.first = te.Linear(HIDDEN, HIDDEN, name="first", **same)
        self.experts = te.GroupedLinear(2, HIDDEN, HIDDEN, bias=False, name="experts", **same)
        self.norm = te.LayerNormLinear(HIDDEN, HIDDEN, name="norm", **same)
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", normalization="RMSNorm", name="mlp", **same)
        more: dict[str, Any] = {"fuse_qkv_params": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        self.block = te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, **more, **same) if with_block else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        flat = self.experts(x.reshape(-1, HIDDEN), [TOKENS // 2, x.shape[0] * x.shape[1] - TOKENS // 2])
        x = x + flat.view_as(x)
        x = x + self.mlp(self.norm(x))
        out: Tensor = x if self.block is None else self.block(x)
        return out


def train(
    net: nn.Module, recipe: Any, watch: Any, *, strict: bool = False, after: Any = None
) -> tuple[list[Tensor], list[Tensor]]:
    import transformer_engine.pytorch as te

    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        x = torch.randn(TOKENS // 4, 4, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if strict and step else 0)
        with te.autocast(enabled=True, recipe=recipe):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step(loss=loss)
        torch.cuda.set_sync_debug_mode(0)
        losses.append(loss.detach())
        if after is not None:
            after()
    return losses, [p.detach().clone() for p in net.parameters()]


def plain(name: str) -> list[str]:
    """Return what is wrong."""
    wrong = []
    expected = train(Net(with_block=True), recipe_of(name), None)
    try:
        train(Net(with_block=True), recipe_of(name), None, strict=True)
        strict = True
    except RuntimeError as error:
        strict = False
        print(f"{name}: the library waits for the GPU by itself, so that is not tested of ours: {str(error).splitlines()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        net = Net(with_block=True)
        with fp8debug.watch(net, Path(folder, "run"), every=1, shadow_rows=64) as watch:
            found = train(net, recipe_of(name), watch, strict=strict)
        run = fp8debug.Run(Path(folder, "run"))
        for part, (one, other) in enumerate(zip(expected, found, strict=True)):
            if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
                wrong.append(f"{name}: {'losses' if part == 0 else 'weights'} differ under a watch")
        counts = {r["module"]: r["n"] for r in run.sql(COUNT).to_pylist()}
        wrong += [f"{name}: {m} has {counts.get(m, 0)} of 9 sites" for m in LINEARS if counts.get(m) != 9]
        low = run.sql("SELECT module, gemm, tensor, sqnr_db FROM sites WHERE reference = 'exact' AND sqnr_db < 40 AND step > 0")
        wrong += [f"{name}: against the exact GEMM {row}" for row in low.to_pylist()]
        for row in run.sql("SELECT DISTINCT message FROM events").to_pylist():
            print(f"{name}: event: {row['message']}")
        print(f"{name}: {len(counts)} Linears, {len(wrong)} checks failed; casts {sorted(casts_of(run))}")
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
        yield debug
        debug.end_debug()


def beside(name: str) -> list[str]:
    """Print both figures of each site, and return what differs."""
    theirs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with debug_tools(name, theirs) as debug:
            net = Net(with_block=False)
            with fp8debug.watch(net, Path(folder, "run"), every=1, what_if=()) as watch:
                train(net, recipe_of(name), watch, after=debug.step)
        run = fp8debug.Run(Path(folder, "run"))
        rows = run.sql("SELECT * FROM sites WHERE actual AND reference = 'operand' ORDER BY step, module").to_pylist()
    ours = {(r["step"], r["module"], r["gemm"], r["tensor"]): r for r in rows}
    wrong, compared = [], 0
    print(f"{'step, Linear, site, figure':60s} {'theirs':>14s} {'ours':>14s}")
    for step in range(STEPS):
        for module in LINEARS[:6]:
            for (tensor, way), site in SITES.items():
                row = ours.get((step, module, *site))
                for stat in (*FP8_STATS, *(TENSOR_STATS if not way else ())):
                    keys = [k for k in theirs if k.startswith(f"{step} {module}_{tensor}_") and k.endswith(f"_{stat}{way}")]
                    if row is None or len(keys) != 1:
                        continue
                    value, mine = theirs[keys[0]], figure(row, stat)
                    if mine is None:
                        continue
                    compared += 1
                    far = abs(value - mine) > 0.01 * max(abs(value), abs(mine)) + 1e-9
                    label = f"{step} {module} {'.'.join(site)} {stat}"
                    if far:
                        wrong.append(f"{name}: {label}: theirs {value:.6g}, ours {mine:.6g}")
                    if far or step == STEPS - 1:
                        print(f"{label:60s} {value:14.6g} {mine:14.6g}{' <' if far else ''}")
    print(f"{name}: {compared} figures of both compared, {len(wrong)} differ by more than 1 %")
    return wrong if compared else [f"{name}: no figure of both was found among {sorted(theirs)[:5]}"]


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
    parser.add_argument("--recipes", nargs="+", default=["block", "current", "delayed"])
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
    codes = [
        subprocess.run([sys.executable, __file__, "--case", f"{kind}:{name}"], check=False).returncode
        for name in options.recipes
        for kind in kinds
    ]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()

"""Torch's own FP8 GEMMs and torchao on a GPU: the real kernels, recorded, the training as it was, and no wait for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.adapters.linears import ScaledLinear, rows, same, sites
from tests.adapters.watching.test_watch import NINE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:.*torchao.*",
        # torch.cuda.set_sync_debug_mode, by which train() forbids waits, at its first call
        "ignore:Synchronization debug mode is a prototype feature:UserWarning",
        # torch's own modules when they are first imported: torch.distributed.optim and decompositions script their functions
        "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    ),
]
#: wgrad's operands have a scale for each row of each expert, which no cast of ours describes.
SEVEN = NINE - {("wgrad", "grad_output"), ("wgrad", "input")}


def mlp(make: Callable[[int, int], nn.Module]) -> nn.Sequential:
    """Return two Linears with a GELU between, the same every time, in BF16."""
    torch.manual_seed(0)
    return nn.Sequential(make(256, 384), nn.GELU(), make(384, 256)).cuda().bfloat16()


def train(net: nn.Module, watch: Any = None, *, strict: bool = True, offs: Tensor | None = None, steps: int = 3) -> list[Any]:
    """Train without a wait for the GPU after the first step, and return what must not differ by a bit."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = torch.randn(640, 256, generator=torch.Generator().manual_seed(step)).bfloat16().cuda().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if strict and step else 0)
        loss = (net(x) if offs is None else net(x, offs)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step(loss=loss)
        torch.cuda.set_sync_debug_mode(0)
        losses.append(loss.detach())
    return [[loss.item() for loss in losses], [p.detach().clone() for p in net.parameters()]]


@pytest.fixture(autouse=True)
def waits() -> Any:
    yield
    torch.cuda.set_sync_debug_mode(0)


def compare(path: Path, build: Callable[[], nn.Module], **options: Any) -> fp8debug.Run:
    """Train without and with a watch, and return the run."""
    expected, net = train(build(), **options), build()
    with fp8debug.watch(net, path, every=1, shadow_rows=64) as watch:
        found = train(net, watch, **options)
    assert same(found, expected)
    run = fp8debug.Run(path)
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 40, row
    for row in rows(run, "reference = 'operand' AND numel > 0"):
        assert 24 < row["sqnr_db"] < 45, row
    return run


def casts(run: fp8debug.Run, module: str) -> dict[tuple[str, str], str]:
    where = f"module = '{module}' AND reference = 'operand'"
    return {(row["gemm"], row["tensor"]): row["cast_name"] for row in rows(run, where)}


@pytest.mark.parametrize("rowwise", [False, True])
def test_scaled_mm(tmp_path: Path, rowwise: bool) -> None:
    def make(k: int, n: int) -> nn.Module:
        linear = ScaledLinear(k, n)
        linear.rowwise = rowwise
        return linear

    run = compare(tmp_path / "run", lambda: mlp(make))
    assert sites(run, "0") == sites(run, "2") == NINE
    assert casts(run, "2")["fprop", "input"] == f"e4m3fn {'rowwise' if rowwise else 'tensorwise'} current"
    assert not run.sql("SELECT * FROM events").to_pylist()


def blocks(x: Tensor, tile_rows: int) -> tuple[Tensor, Tensor]:
    """Return data and decode factors of tiles or blocks, as torch's second version of the op wants them."""
    found = fp8debug.quantize(x, fp8debug.Cast(granularity="1x128" if tile_rows == 1 else "128x128"))
    scale = found.scale_inv
    if tile_rows == 1:
        return found.data, scale.t().contiguous().t()
    padded = scale.new_ones(scale.shape[0], -(-scale.shape[1] // 4) * 4)
    padded[:, : scale.shape[1]] = scale
    return found.data, padded.t()


def blockwise(a: Tensor, b: Tensor, rows_b: int) -> Tensor:
    """Return ``a [m, k] @ b [n, k].T`` by ``F.scaled_mm``."""
    newer: Any = functional
    tile, block = newer.ScalingType.BlockWise1x128, newer.ScalingType.BlockWise128x128
    (first, scale_a), (second, scale_b) = blocks(a, 1), blocks(b, rows_b)
    kind = tile if rows_b == 1 else block
    found: Tensor = newer.scaled_mm(first, second.t(), scale_a, tile, scale_b, kind, output_dtype=torch.bfloat16)
    return found


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return blockwise(x, weight, 128)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return blockwise(grad, weight.t().contiguous(), 128), blockwise(grad.t().contiguous(), x.t().contiguous(), 1)


class BlockLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Blockwise.apply(x, self.weight)
        return out


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_scaled_mm_v2"), reason="this torch has no _scaled_mm_v2")
def test_tiles_and_blocks_of_the_second_version(tmp_path: Path) -> None:
    run = compare(tmp_path / "run", lambda: mlp(lambda k, n: BlockLinear(k, n, bias=False)))
    assert sites(run, "0") == sites(run, "2") == NINE
    names = {site: name.split()[1] for site, name in casts(run, "2").items()}
    assert names["fprop", "input"] == names["dgrad", "grad_output"] == "1x128"
    assert names["fprop", "weight"] == names["dgrad", "weight"] == "128x128"
    assert names["wgrad", "input"] == names["wgrad", "grad_output"] == "128x1"
    for row in rows(run, "reference = 'operand'"):
        assert row["scale_log2_ratio"] == pytest.approx(0, abs=1e-6), row


# Dynamo instantiates the autograd function that it traces; torch's own modules use what it deprecates.
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("attached", ["before", "after"])
def test_inductor_keeps_its_code_and_its_gemms_are_counted(tmp_path: Path, attached: str) -> None:
    def build() -> nn.Module:
        torch._dynamo.reset()
        net = nn.Sequential(cast(nn.Module, torch.compile(mlp(ScaledLinear), fullgraph=True)))
        if attached == "after":
            net(torch.zeros(640, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)).sum().backward()
            net.zero_grad()
        return net

    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    expected = train(build())
    num_graphs = stats["unique_graphs"] - before
    net = build()
    with fp8debug.watch(net, tmp_path / "run", every=1, compiled="as_is") as watch:
        assert same(train(net, watch), expected)
    assert num_graphs and stats["unique_graphs"] == before + 2 * num_graphs  # compiled as often as without a watch
    run = fp8debug.Run(tmp_path / "run")
    events = run.sql("SELECT message FROM events").column("message").to_pylist()
    assert any("2 _scaled_mm in one forward pass belong to no watched module" in message for message in events)
    assert not rows(run)


@pytest.fixture
def torchao() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
        return pytest.importorskip("torchao.float8", reason="torchao is not installed")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_linear(tmp_path: Path, torchao: Any, recipe: str) -> None:
    def build() -> nn.Module:
        net = mlp(lambda k, n: nn.Linear(k, n, bias=False))
        torchao.convert_to_float8_training(net, config=torchao.Float8LinearConfig.from_recipe_name(recipe))
        return net

    run = compare(tmp_path / "run", build)
    high = {("wgrad", "grad_output"), ("wgrad", "input")} if recipe == "rowwise_with_gw_hp" else set()
    assert sites(run, "0") == sites(run, "2") == NINE - high
    for row in rows(run, "reference = 'operand'"):
        assert -1e-6 < row["scale_log2_ratio"] < 1 if "pow2" in row["cast_name"] else abs(row["scale_log2_ratio"]) < 1e-6, row
    assert not run.sql("SELECT * FROM events").to_pylist()


def one_configuration(*modules: str) -> None:
    """Let kernels run as they come: trying every configuration takes minutes, and which is the fastest is of no interest."""
    for name in modules:
        for kernel in vars(import_module(name)).values():
            if type(kernel).__name__ == "Autotuner":
                kernel.configs = kernel.configs[:1]


@pytest.mark.parametrize("is_triton", [False, True])
def test_blockwise_prototype(tmp_path: Path, torchao: Any, is_triton: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear

    one_configuration("torchao.prototype.blockwise_fp8_training.kernels")

    def make(k: int, n: int) -> nn.Module:
        linear = Float8BlockwiseLinear(k, n, bias=False, use_triton=is_triton)
        return cast(nn.Module, linear)

    run = compare(tmp_path / "run", lambda: mlp(make), strict=False)
    if is_triton:  # kernels of its own: said
        (entry,) = [m for m in run.modules if m["fqn"] == "2"]
        assert not entry["fp8"] and "no FP8 GEMM observed" in entry["reason"]
        return
    assert sites(run, "0") == sites(run, "2") == NINE
    assert casts(run, "2")["wgrad", "input"].startswith("e4m3fn 128x1")


class Experts(nn.Module):
    """Gated experts over one batch of tokens sorted by expert, as torchtitan has them."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"w1": (384, 256), "w2": (256, 384), "w3": (384, 256)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(4, *shape) * 0.1))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w1, w2, w3 = (getattr(self, name).transpose(-2, -1) for name in ("w1", "w2", "w3"))
        h = functional.silu(torch._grouped_mm(x, w1, offs=offs)) * torch._grouped_mm(x, w3, offs=offs)
        return torch._grouped_mm(h.nan_to_num(0), w2, offs=offs).nan_to_num(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts = nn.Linear(256, 256, bias=False), Experts()

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = self.experts(self.inner(x), offs)
        return out


def test_grouped_gemms_of_experts(tmp_path: Path, torchao: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.quantization import quantize_

    folder = "torchao.prototype.moe_training.kernels.float8_rowwise"
    one_configuration("torchao.prototype.moe_training.kernels.jagged_float8_scales", folder)

    def build() -> nn.Module:
        torch.manual_seed(0)
        net = Model().cuda().bfloat16()
        quantize_(net, Float8TrainingOpConfig(), filter_fn=lambda module, fqn: fqn == "experts")
        return net

    offs = torch.tensor([128, 128, 400, 640], dtype=torch.int32, device="cuda")  # one expert without tokens
    run = compare(tmp_path / "run", build, offs=offs)
    for name in ("w1", "w2", "w3"):
        assert sites(run, f"experts.{name}") == SEVEN
    events = [e["message"] for e in run.sql("SELECT message FROM events").to_pylist()]
    assert [e for e in events if "experts.w1" in e] == ["experts.w1 is recorded; of 4 experts 1 had no tokens at step 0"], events


@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_mxfp8_linear_emulated(tmp_path: Path, torchao: Any, mode: str) -> None:
    """Without units for it; ``strict=False``, as torchao's cast waits for the GPU. A CPU does it in test_block_formats."""
    library = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")

    def make(k: int, n: int) -> nn.Module:
        how = {
            "kernel_preference": library.KernelPreference.EMULATED,
            "scale_calculation_mode": library.ScaleCalculationMode(mode),
        }
        found: nn.Module = library.MXFP8Linear(k, n, bias=False, **how)
        return found

    run = compare(tmp_path / "run", lambda: mlp(make), strict=False)
    assert sites(run, "0") == sites(run, "2") == NINE
    assert casts(run, "2")["fprop", "input"] == f"e4m3fn 1x32 current {'pow2_ceil' if mode == 'rceil' else 'pow2_floor'}"
    assert not run.sql("SELECT * FROM events").to_pylist()


def test_mxfp8_experts_emulated(tmp_path: Path, torchao: Any) -> None:
    """Without units for it; a CPU does it in test_grouped_blocks."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def build() -> nn.Module:
        torch.manual_seed(0)
        net = Model().cuda().bfloat16()
        config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)
        try:
            quantize_(net, config, filter_fn=lambda module, fqn: fqn == "experts")
        except AssertionError as refused:  # by torchao 0.18 under torch 2.11, whose distributed ops it lacks
            pytest.skip(f"torchao refuses MXFP8 training under torch {torch.__version__}: {refused}")
        return net

    offs = torch.tensor([128, 128, 416, 640], dtype=torch.int32, device="cuda")
    run = compare(tmp_path / "run", build, offs=offs, strict=False)
    for name in ("w1", "w2", "w3"):
        assert sites(run, f"experts.{name}") == NINE


@pytest.mark.parametrize("signs", [0xD7E8, 0x1234])
def test_a_hadamard_transform_waits_for_nothing(signs: int) -> None:
    """Its matrix is made on the device; the values are those of a CPU."""
    from fp8debug.kernels.reference import hadamard

    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    on_device = x.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = hadamard(on_device, 1, signs)
    torch.cuda.set_sync_debug_mode(0)
    assert torch.allclose(found.cpu(), hadamard(x, 1, signs), atol=1e-6)

"""GEMMs of torch's own FP8 op in modules of unknown make: found, attributed, recorded, and the training left alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug.adapters.interception.listener import DECODERS
from fp8debug.adapters.scaled_mm import side_of
from fp8debug.errors import AttachError
from fp8debug.kernels.dispatch import measure
from fp8debug.linear import Fp8Linear
from fp8debug.metrics.rows import Rows
from fp8debug.recipes import Cast
from tests.adapters.linears import (
    CHECKPOINTS,
    E4M3,
    E5M2,
    ScaledLinear,
    batch,
    model,
    multiply,
    record,
    rows,
    same,
    sites,
    train,
)
from tests.adapters.watching.test_watch import NINE

#: Slots that a weight's rows fill beside those of ``measure``.
OF_ROWS = {slot.name for slot in Rows().slots}

INNER = NINE  # of a module whose input wants a gradient
FIRST = {site for site in NINE if site[0] != "dgrad"}


@pytest.mark.parametrize("options", [{}, {"rowwise": True}, {"turned": True}, {"turned": True, "rowwise": True}], ids=str)
def test_all_three_gemms_and_the_training_as_it_was(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = train(model(**options))
    net = model(**options)
    with fp8debug.watch(net, tmp_path / "run", every=2, shadow="full") as watch:
        watched = train(net, after=lambda loss: watch.step(loss=loss))
    assert same(watched, expected)
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "0") == FIRST and sites(run, "2") == INNER
    kind = "rowwise" if options.get("rowwise") else "tensorwise"
    across = "columnwise" if options.get("rowwise") else "tensorwise"
    names = {(r["gemm"], r["tensor"]): r["cast_name"] for r in rows(run, "module = '2' AND reference = 'operand'")}
    assert names["fprop", "input"] == f"e4m3fn {kind} current" and names["dgrad", "weight"] == f"e4m3fn {across} current"
    assert names["dgrad", "grad_output"] == f"e5m2 {kind} current"
    assert names["wgrad", "grad_output"] == f"e5m2 {across} current"
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 45, row  # BF16's rounding of the result
    for row in rows(run, "reference = 'shadow'"):
        assert 20 < row["sqnr_db"] < 45, row
    assert {row["step"] for row in rows(run)} == {0, 2}
    assert not run.sql("SELECT * FROM events").to_pylist()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("has_unequal", [False, True])
def test_shapes_that_fit_both_ways_are_read_as_in_other_modules_or_as_the_output_lies(
    has_unequal: bool, turned: bool, bias: bool, tmp_path: Path
) -> None:
    """As many tokens as outputs, or a square weight: the transposed GEMM has the same shapes."""
    torch.manual_seed(0)
    num_tokens = batch(0).shape[0] * batch(0).shape[1]
    widths = [64, *([96] if has_unequal else []), num_tokens, num_tokens]
    net = nn.Sequential(*(ScaledLinear(*pair, bias=bias) for pair in pairwise(widths))).bfloat16()
    for linear in net:
        cast(Any, linear).turned = turned
    run = record(tmp_path / "run", net, steps=1)
    assert len(rows(run, "reference = 'operand'")) == 6 * len(net) - 2
    for row in rows(run, "reference = 'operand'"):
        is_gradient = row["tensor"] == "grad_output"
        assert row["cast_name"].startswith("e5m2" if is_gradient else "e4m3fn"), row
        assert row["sqnr_db"] > (24 if is_gradient else 30), row


def test_recorded_operands_are_those_of_the_reference(tmp_path: Path) -> None:
    net = model(rowwise=True)
    weight = net.get_parameter("0.weight").detach().clone()
    run = record(tmp_path / "run", net, steps=1)
    for tensor, x in (("input", batch(0).reshape(-1, 64)), ("weight", weight)):
        (row,) = rows(run, f"module = '0' AND gemm = 'fprop' AND tensor = '{tensor}'")
        for name, expected in measure(x, Cast(granularity="rowwise")).items():
            if isinstance(expected, float):
                assert row[name] == pytest.approx(expected, rel=1e-6), name
            elif isinstance(expected, int) and name not in OF_ROWS:  # a count of results is not recorded of an operand
                assert (row[name] or 0) == expected, name


def test_a_bias_inside_the_gemm_is_none_of_its_error(tmp_path: Path) -> None:
    net = model(fused_bias=None)
    cast(Any, net[0]).fused_bias = torch.full((96,), 3.0, dtype=torch.bfloat16)
    (row,) = rows(record(tmp_path / "run", net, steps=1), "module = '0' AND tensor = 'output' AND reference = 'exact'")
    assert row["sqnr_db"] > 35


def test_coverage_learns_what_runs_in_fp8(tmp_path: Path) -> None:
    net = model()
    cast(Any, net[2]).is_used_in_fp8 = False
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        assert [entry["fp8"] for entry in watch.coverage()] == [False, False]
        train(net, 1, lambda loss: watch.step(loss=loss))
        first, second = watch.coverage()
    assert (first["fp8"], first["kind"], first["recipe"]) == (True, "ScaledLinear", "scaled_mm")
    assert first["casts"]["wgrad.grad_output"]["format"] == "e5m2" and first["casts"]["dgrad.weight"] is None
    assert not second["fp8"] and "no FP8 GEMM observed" in second["reason"]
    modules = fp8debug.Run(tmp_path / "run").manifest["modules"]
    assert [module["fp8"] for module in modules] == [True, False]


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.net, x.requires_grad_(), **CHECKPOINTS[self.kind])
        return out


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_recomputed_gemms_are_not_counted(tmp_path: Path, kind: str) -> None:
    expected = train(Checkpointed(model(), kind))
    net = Checkpointed(model(), kind)
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        assert same(train(net, after=lambda loss: watch.step(loss=loss)), expected)
    run = fp8debug.Run(tmp_path / "run")
    found = rows(run, "module = 'net.2' AND reference = 'shadow'")
    assert {row["num_tensors"] for row in found} == {1}
    assert {(row["gemm"], row["tensor"]) for row in found} >= {
        ("fprop", "output"),
        ("dgrad", "grad_input"),
        ("wgrad", "grad_weight"),
    }


def test_microbatches_a_module_called_twice_and_evaluation(tmp_path: Path) -> None:
    net = nn.Sequential(model()[0], nn.GELU(), nn.Linear(96, 64).bfloat16())
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        for _ in range(2):
            net(net(batch(0))).sum().backward()
        with torch.no_grad():
            net(batch(1))
        watch.step()
    found = rows(fp8debug.Run(tmp_path / "run"), "module = '0' AND reference = 'shadow'")
    assert {row["gemm"]: row["num_tensors"] for row in found} == {"fprop": 4, "dgrad": 2, "wgrad": 4}


def test_a_frozen_weight_has_no_wgrad(tmp_path: Path) -> None:
    net = model()
    net.get_parameter("2.weight").requires_grad_(False)
    assert sites(record(tmp_path / "run", net, steps=1), "2") == {site for site in NINE if site[0] != "wgrad"}


def test_gemms_of_nobody_are_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.others = model(), (model()[2],)  # which is no module of the model

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            out: Tensor = x + ScaledLinear.forward(cast(ScaledLinear, self.others[0]), torch.zeros(4, 12, 96, dtype=x.dtype))
            return out

    run = record(tmp_path / "run", Outer(), steps=2)
    said = [line for line in capsys.readouterr().err.splitlines() if "belong to no watched module" in line]
    assert len(said) == 1 and "1 _scaled_mm in one forward pass" in said[0]
    events = run.sql("SELECT message FROM events WHERE message LIKE '%belong to no watched%'").to_pylist()
    assert len(events) == 2


@pytest.mark.parametrize("every", [1, 2])
def test_gemms_of_an_fp8_linear_are_no_strays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """On a GPU an Fp8Linear calls torch's scaled GEMM; here one runs where it would."""
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    calls: list[Tensor] = []

    def multiply(module: Fp8Linear, flops: int) -> None:
        if not calls or torch._C._current_graph_task_id() == -1:
            calls.append(torch._scaled_mm(codes, codes.t(), torch.ones(()), torch.ones(())))

    monkeypatch.setattr(Fp8Linear, "counters", [multiply])
    net = fp8debug.convert(nn.Sequential(nn.Linear(16, 16)), "tensorwise_current")
    with fp8debug.watch(net, tmp_path / "run", every=every) as watch:
        for _ in range(2):
            net(torch.ones(4, 16)).sum().backward()
            watch.step()
    run = fp8debug.Run(tmp_path / "run")
    assert calls and not run.sql("SELECT message FROM events WHERE message LIKE '%belong to no watched%'").to_pylist()


# Dynamo instantiates the autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("attached", ["before", "after"])
def test_compiled_code_keeps_running_and_its_gemms_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], attached: str
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def build() -> nn.Module:
        net = model()
        torch._dynamo.reset()
        return nn.Sequential(cast(nn.Module, torch.compile(net, backend=backend, fullgraph=True)))

    expected = train(build())
    num_graphs = len(graphs)
    net = build()
    if attached == "after":
        net(batch(0)).sum().backward()
        net.zero_grad()
    with fp8debug.watch(net, tmp_path / "run", every=1, compiled="as_is") as watch:
        assert same(train(net, after=lambda loss: watch.step(loss=loss)), expected)
    assert len(graphs) == 2 * num_graphs  # compiled once, as without a watch
    told = [line for line in capsys.readouterr().err.splitlines() if "torch.compile" in line]
    assert len(told) == 1 and "2 of 2 modules are not recorded at step 0" in told[0]
    events = fp8debug.Run(tmp_path / "run").sql("SELECT message FROM events").column("message").to_pylist()
    counted = "2 _scaled_mm in one forward pass belong to no watched module (code under torch.compile"
    assert any(counted in message for message in events)


@pytest.mark.parametrize("wants_dgrad", [False, True])
def test_as_many_tokens_as_outputs(tmp_path: Path, wants_dgrad: bool) -> None:
    """dgrad and wgrad then have operands of the same shapes; this Linear runs both even where only one is wanted."""
    net = nn.Sequential(model()[0])
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_(wants_dgrad)
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full") as watch:
        net(x).square().mean().backward()
        watch.step()
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "0") == (INNER if wants_dgrad else FIRST)
    for row in rows(run, "reference != 'exact'"):
        assert row["sqnr_db"] > 20, row


# Dynamo instantiates the autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_sampled_steps_without_compilation_are_recorded(tmp_path: Path) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(cast(nn.Module, torch.compile(model(), backend="eager")))
    with fp8debug.watch(net, tmp_path / "run", every=2) as watch:
        for step in range(4):
            with torch.compiler.set_stance("default" if step % 2 else "force_eager"):
                net(batch(step)).square().mean().backward()
            watch.step()
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "0.2") == INNER and {row["step"] for row in rows(run)} == {0, 2}


def test_a_gemm_that_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Padded(ScaledLinear):
        def forward(self, x: Tensor) -> Tensor:
            wide = nn.functional.pad(x, (0, 16))
            out: Tensor = torch._scaled_mm(
                wide.to(E4M3).reshape(-1, 80),
                nn.functional.pad(self.weight, (0, 16)).to(E4M3).t(),
                torch.ones(()),
                torch.ones(()),
                out_dtype=torch.bfloat16,
            )
            return out

    net = nn.Sequential(Padded(64, 32, bias=False).bfloat16())
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        net(batch(0))
        watch.step()
    assert not rows(fp8debug.Run(tmp_path / "run"))
    assert "_scaled_mm of [48, 80] by [80, 32] is not input [48, 64] by weight [32, 64]" in capsys.readouterr().err


class PaddedMatmul(torch.autograd.Function):
    """Adds tokens of zeros until their number is a multiple, as its GEMMs ask for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        wide = x if layer.pads == "wgrad" else padded(x, layer.multiple)
        return multiply(wide, weight.t(), (E4M3, E4M3), layer.rowwise)[: len(x)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        g, wide = padded(grad, layer.multiple), padded(x, layer.multiple)
        grad_input = multiply(grad if layer.pads == "wgrad" else g, weight, (E5M2, E4M3), layer.rowwise)[: len(x)]
        if layer.turned:
            return grad_input, multiply(wide.t(), g, (E4M3, E5M2), layer.rowwise).t(), None
        return grad_input, multiply(g.t(), wide, (E5M2, E4M3), layer.rowwise), None


def padded(x: Tensor, multiple: int) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, -len(x) % multiple))


class PaddedLinear(ScaledLinear):
    def __init__(self, n: int, k: int, pads: str, multiple: int, rowwise: bool, turned: bool) -> None:
        super().__init__(n, k, bias=False)
        self.pads, self.multiple, self.rowwise, self.turned = pads, multiple, rowwise, turned

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = PaddedMatmul.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
        return out.reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("pads", ["wgrad", "all"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize(("multiple", "turned"), [(16, False), (128, False), (32, True)])
def test_tokens_that_are_padded_are_recorded_without_the_padding(
    tmp_path: Path, pads: str, rowwise: bool, multiple: int, turned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        made = [PaddedLinear(n, k, pads, multiple, rowwise, turned) for n, k in ((64, 96), (96, 32))]
        return nn.Sequential(made[0], nn.GELU(), made[1]).bfloat16()

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x.reshape(-1, 64)[:43])
            return out

    expected, watched = train(Ragged()), Ragged()
    with fp8debug.watch(watched, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        assert same(train(watched, after=lambda loss: watch.step(loss=loss)), expected)
    assert "not " not in capsys.readouterr().err
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "inner.2") == NINE
    for row in rows(run, "reference = 'operand'"):
        tokens = row["tensor"] in ("input", "grad_output")
        assert row["numel"] % 43 == 0 if tokens else row["numel"] in (64 * 96, 96 * 32)
        assert row["sqnr_db"] > (24 if "e5m2" in row["cast_name"] else 30) and row["headroom"] == pytest.approx(1, abs=1e-5)
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 45, row
    assert {f.code for f in fp8debug.triage(tmp_path / "run")} <= {"F135"}  # BF16 weights under SGD


def test_an_exception_in_the_loop_leaves_nothing_behind(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("broken")

    class BrokenBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("broken")

    net = model()
    net.append(Broken())
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"):
                net(batch(0))
            assert not _len_torch_dispatch_stack()
            with pytest.raises(RuntimeError, match="broken"):
                hidden = net[0](batch(0))
                net[2](BrokenBackward.apply(hidden)).sum().backward()
            assert not _len_torch_dispatch_stack()
            net[2](net[0](batch(0))).sum().backward()
            watch.step()
    assert sites(fp8debug.Run(tmp_path / "run"), "2") == INNER


def test_modes_of_the_user_stay_where_they_are(tmp_path: Path) -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket is torch.ops.aten._scaled_mm
            return func(*args, **(kwargs or {}))

    net = model()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        with Counting() as mode:
            loss = net(batch(0)).sum()
        assert not _len_torch_dispatch_stack() and mode.count == 2
        with Counting() as mode:
            loss.backward()
        assert not _len_torch_dispatch_stack() and mode.count == 4
        watch.step()
    assert sites(fp8debug.Run(tmp_path / "run"), "2") == INNER


def test_custom_ops_are_opened(tmp_path: Path) -> None:
    @torch.library.custom_op("fp8debug_tests::mm", mutates_args=())
    def mm(x: Tensor, weight: Tensor) -> Tensor:
        one = torch.ones(())
        return torch._scaled_mm(x.to(E4M3), weight.to(E4M3).t(), one, one, out_dtype=torch.bfloat16)

    class Opaque(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = mm(x.reshape(-1, 64), self.weight)
            return out

    net = nn.Sequential(Opaque(64, 32, bias=False).bfloat16())
    expected = net(batch(0)).detach()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        assert torch.equal(net(batch(0)), expected)
        watch.step()
    assert sites(fp8debug.Run(tmp_path / "run"), "0") == {site for site in NINE if site[0] == "fprop"}


def test_hooks_go_away_and_a_second_watch_is_refused(tmp_path: Path) -> None:
    net = model()
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()]
    watch = fp8debug.watch(net, tmp_path / "run")
    with pytest.raises(AttachError, match="0 is watched already"):
        fp8debug.watch(net, tmp_path / "second")
    watch.close()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()] == before
    assert sites(record(tmp_path / "third", net, steps=1), "2") == INNER


def test_scales_by_shape() -> None:
    data = torch.zeros(256, 384).to(E4M3)
    for granularity, shape in {
        "tensorwise": (1, 1),
        "rowwise": (256, 1),
        "columnwise": (1, 384),
        "1x128": (256, 3),
        "128x1": (2, 384),
        "128x128": (2, 3),
    }.items():
        side = side_of(data, torch.ones(shape))
        assert side.granularity == granularity and side.t().values.shape == (384, 256)
    with pytest.raises(ValueError, match=r"scales float8_e8m0fnu\[256, 12\] of data"):
        side_of(data, torch.ones(256, 12).to(torch.float8_e8m0fnu))


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_scaled_mm_v2"), reason="this torch has no _scaled_mm_v2")
def test_the_second_version_of_the_op() -> None:
    from torch.nn.functional import ScalingType, scaled_mm

    gemms: list[Any] = []

    class Hear(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten._scaled_mm_v2:
                names = [argument.name for argument in func._schema.arguments]
                gemms.append(DECODERS[func.overloadpacket]({**dict(zip(names, args, strict=False)), **(kwargs or {})}, result))
            return result

    a, b, one = torch.ones(32, 64).to(E4M3), torch.ones(48, 64).to(E4M3).t(), torch.full((), 0.5)
    with Hear():
        scaled_mm(a, b, one, ScalingType.TensorWise, one, ScalingType.TensorWise, output_dtype=torch.bfloat16)
    assert gemms[0] is not None and gemms[0].first.granularity == "tensorwise" and gemms[0].result[0, 0] == 16


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_scaled_mm_v2"), reason="this torch has no _scaled_mm_v2")
def test_scales_of_the_second_version() -> None:
    """What the op gets for ``self [256, 640]`` and ``mat2 [640, 384]``, as torch's own check of its arguments wants it."""
    read = DECODERS[torch.ops.aten._scaled_mm_v2]
    result = torch.zeros(256, 384)
    one, row, tile, block = 0, 1, 4, 5
    given = {one: ((), ()), row: ((256, 1), (1, 384)), tile: ((256, 5), (384, 5)), block: ((8, 2), (8, 3))}
    expected = {
        one: ("tensorwise", "tensorwise"),
        row: ("rowwise", "columnwise"),
        tile: ("1x128", "128x1"),
        block: ("128x128",) * 2,
    }
    for a, b in ((one, one), (row, row), (tile, block), (tile, tile), (block, tile)):
        scales = [
            torch.arange(1, 1 + torch.Size(given[kind][i]).numel()).float().reshape(given[kind][i])
            for i, kind in enumerate((a, b))
        ]
        data = torch.zeros(256, 640).to(E4M3), torch.zeros(640, 384).to(E4M3)
        args = {"self": data[0], "mat2": data[1], "scale_a": scales[:1], "scale_b": scales[1:], "recipe_a": [a], "recipe_b": [b]}
        gemm = read({**args, "swizzle_a": [], "swizzle_b": []}, result)
        assert gemm is not None and (gemm.first.granularity, gemm.second.granularity) == (expected[a][0], expected[b][1])
        if b == block:  # block (K 4, N 2) of mat2; the last three of 8 are padding
            assert gemm.second.scale_inv is not None and gemm.second.scale_inv.shape == (5, 3)
            assert gemm.second.scale_inv[4, 2] == scales[1][4, 2]
        if a == block:
            assert gemm.first.scale_inv is not None and gemm.first.scale_inv[1, 4] == scales[0][4, 1]
    with pytest.raises(ValueError, match=r"data in torch.float8_e4m3fn with block scales in torch.float32 are not read"):
        read({**args, "recipe_a": [3], "swizzle_a": [], "swizzle_b": []}, result)

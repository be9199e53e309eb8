"""GEMMs of modules of any class: assigned to the parameter that they multiply by, recorded, and in nobody's way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8debug
import fp8debug.linear
from fp8debug.adapters.interception import listener
from fp8debug.kernels import dispatch
from fp8debug.recipes import get_recipe
from tests.adapters.linears import E4M3, E5M2, multiply, same
from tests.adapters.watching.test_watch import NINE


class MatMul(torch.autograd.Function):
    """x[M, K] @ w[K, N] in FP8, its operands saved in high precision; ``norm`` and ``bias`` are computed inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, norm: bool, bias: Tensor | None) -> Tensor:
        ctx.shape = x.shape
        x = x.reshape(-1, x.shape[-1])
        if norm:
            x = x * x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)
        ctx.save_for_backward(x, w)
        out = multiply(x, w, (E4M3, E4M3), False)
        if bias is not None:
            out = out + bias
        return out.to(x.dtype).reshape(*ctx.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
        x, w = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_x = multiply(grad, w.t(), (E5M2, E4M3), False).reshape(ctx.shape)
        return grad_x, multiply(x.t(), grad, (E4M3, E5M2), False), None, grad.sum(0) if ctx.needs_input_grad[3] else None


def matmul(x: Tensor, w: Tensor, norm: bool = False, bias: Tensor | None = None) -> Tensor:
    out: Tensor = MatMul.apply(x, w, norm, bias)
    return out


class Projection(nn.Module):
    """A weight [in, out] that a module of an unknown class holds."""

    def __init__(self, n_in: int = 32, n_out: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight)


class Mlp(nn.Module):
    """Three weights in one module, two of one shape; the last one's input is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.randn(32, 64) * 0.1), nn.Parameter(torch.randn(32, 64) * 0.1)
        self.down = nn.Parameter(torch.randn(64, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return matmul(nn.functional.silu(matmul(x, self.gate)) * matmul(x, self.up), self.down)


class OutIn(nn.Module):
    """A square weight [out, in], read by a function that takes it as nn.Linear does, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 32) * 0.1), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight.t(), False, self.bias)


class Child(nn.Module):
    """Multiplies by its parent's weight, through a function."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return matmul(x, weight.t())


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.child = nn.Parameter(torch.randn(48, 32) * 0.1), Child()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.child(x, self.table)
        return out


class Fused(nn.Module):
    """Query, key and value in one weight [3 * width, in]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(96, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = matmul(x, self.qkv.t()).chunk(3, -1)
        return q * k + v


class Sliced(Fused):
    """The same, multiplied one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (matmul(x, w.t()) for w in self.qkv.chunk(3))
        return q * k + v


class Joined(nn.Module):
    """Three weights that are multiplied as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(32, 32) * 0.1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = matmul(x, torch.cat([self.q, self.k, self.v]).t()).chunk(3, -1)
        return q * k + v


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed((x[:, 0].abs() * 7).long() % 48) + x
        return matmul(h, self.embed.weight.t())


class Chunked(nn.Module):
    """A head that is never called: its weight is multiplied in FP8 a chunk at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([matmul(chunk, self.head.weight.t()) for chunk in x.chunk(2)])


class Normed(Projection):
    """The norm before it is computed in the same function: what is cast is its result."""

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x * 5, self.weight, True)


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Net(nn.Module):
    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(32, 32), inner
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.first(x))
        return out.float().square().mean()


def net(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(0)
    return Net(kind(), dtype)


def trained(model: nn.Module, watch: Any = None, steps: int = 3, micro: int = 1, rows: int = 16) -> list[Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    dtype, losses = next(model.parameters()).dtype, []
    for step in range(steps):
        for part in range(micro):
            loss = model(torch.randn(rows, 32, generator=torch.Generator().manual_seed(step * micro + part)).to(dtype))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step(loss=loss)
    return [losses, [p.detach().clone() for p in model.parameters()]]


def recorded(path: Path, kind: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16, **options: Any) -> fp8debug.Run:
    """Train with and without a watch, and return the run of a training that was the same to the last bit."""
    steps = {name: options.pop(name) for name in ("steps", "micro", "rows") if name in options}
    expected = trained(net(kind, dtype), **steps)
    with fp8debug.watch(model := net(kind, dtype), path, **{"every": 1, "shadow": "full", "what_if": (), **options}) as watch:
        assert same(trained(model, watch, **steps), expected)
    return fp8debug.Run(path)


def sites(run: fp8debug.Run, actual: bool = True) -> dict[str, set[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for row in run.sql("SELECT module, gemm, tensor FROM sites WHERE actual = ?", [actual]).to_pylist():
        found.setdefault(row["module"], set()).add((row["gemm"], row["tensor"]))
    return found


def check_numbers(run: fp8debug.Run) -> None:
    """Hold what was recorded of FP8 to what a healthy cast gives: a wrong reference lies far below."""
    for row in run.sql("SELECT * FROM sites WHERE actual AND num_zero < numel").to_pylist():
        least = 22 if row["reference"] != "operand" or "e5m2" in row["cast_name"] else 28
        found = row["sqnr_db"] if row["sqnr_db"] is not None else math.inf
        assert found > least, (row["module"], row["gemm"], row["tensor"], row["reference"], found)


def entries(run: fp8debug.Run) -> dict[str, dict[str, Any]]:
    return {module["fqn"]: module for module in run.modules}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Projection, {"inner": (48, 32)}),
        (lambda: Projection(32, 32), {"inner": (32, 32)}),
        (Mlp, {"inner.gate": (64, 32), "inner.up": (64, 32), "inner.down": (32, 64)}),
        (OutIn, {"inner": (32, 32)}),
        (Parent, {"inner.table": (48, 32)}),
        (Fused, {"inner.qkv": (96, 32)}),
        (Tied, {"inner.embed": (48, 32)}),
        (Chunked, {"inner.head": (48, 32)}),
        (Normed, {"inner": (48, 32)}),
        (Checkpointed, {"inner.gate": (64, 32), "inner.up": (64, 32), "inner.down": (32, 64)}),
    ],
    ids=["projection", "square", "mlp", "out_in", "parent", "fused", "tied", "chunked", "normed", "checkpointed"],
)
def test_each_weight_has_its_rows(
    tmp_path: Path, kind: Callable[[], nn.Module], names: dict[str, tuple[int, int]], capsys: Any
) -> None:
    run = recorded(tmp_path / "run", kind)
    found = sites(run)
    assert set(found) == set(names)
    for fqn in names:
        missing = {("wgrad", "input")} if kind in (Checkpointed, Normed) else set()
        assert found[fqn] >= set(NINE) - missing, fqn
    check_numbers(run)
    listed = entries(run)
    for fqn, (n, k) in names.items():
        assert listed[fqn]["fp8"] and listed[fqn]["observed"], listed[fqn]
        assert (listed[fqn]["out_features"], listed[fqn]["in_features"]) == (n, k)
    assert not any(gemm["fp8"] and gemm["fqn"] not in names for gemm in run.gemms)
    said = capsys.readouterr().err
    assert "in coverage alone" not in said and "belong to no watched module" not in said
    of_updates = ("F127", "F135")  # the learning rate of a test is not a training's
    assert not [f for f in fp8debug.triage(run) if f.severity.value == "error" and f.code not in of_updates]


def test_the_weight_that_is_recorded_is_the_parameter(tmp_path: Path) -> None:
    model = net(Mlp)
    run = recorded(tmp_path / "run", Mlp)
    query = "SELECT amax, sum_x2 FROM sites WHERE module = ? AND gemm = 'fprop' AND tensor = 'weight' AND step = 0"
    for name in ("gate", "up", "down"):
        (row,) = run.sql(query, [f"inner.{name}"]).to_pylist()
        weight = model.inner.get_parameter(name).detach()
        assert row["amax"] == weight.abs().amax() and row["sum_x2"] == pytest.approx(weight.double().square().sum().item(), 1e-9)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Sliced, {"inner.qkv.0", "inner.qkv.32", "inner.qkv.64"}), (Joined, {"inner.q+k+v"})],
    ids=["sliced", "joined"],
)
def test_parts_of_weights_are_recorded_from_the_second_sampled_step_on(
    tmp_path: Path, kind: Callable[[], nn.Module], names: set[str]
) -> None:
    run = recorded(tmp_path / "run", kind)
    assert set(sites(run)) == names and all(found >= set(NINE) for found in sites(run).values())
    check_numbers(run)
    listed = entries(run)
    assert all(listed[fqn]["fp8"] and listed[fqn]["observed"] for fqn in names)


def test_microbatches_are_merged(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", Mlp, micro=2)
    query = "SELECT numel, num_tensors FROM sites WHERE module = 'inner.down' AND tensor = ? AND gemm = ? AND step = 0"
    (row,) = run.sql(query, ["input", "fprop"]).to_pylist()
    assert row["numel"] == 2 * 16 * 64
    (row,) = run.sql(query, ["weight", "fprop"]).to_pylist()
    assert row["numel"] == 64 * 32


@pytest.mark.parametrize("rows", [32, 48])
def test_as_many_tokens_as_features_are_told_apart(tmp_path: Path, rows: int) -> None:
    run = recorded(tmp_path / "run", Projection, rows=rows)
    assert sites(run)["inner"] >= set(NINE)
    check_numbers(run)


def test_exclude_is_honoured_and_named(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", Mlp, exclude=["inner.up"])
    assert set(sites(run)) == {"inner.gate", "inner.down"}
    assert entries(run)["inner.up"]["reason"] == "excluded" and entries(run)["inner.up"]["fp8"]
    assert "inner" not in entries(run)


class Reentrant(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return out


class Padded(Projection):
    """Its input is padded before the cast: no tensor of the program is what the GEMM reads."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = PadMul.apply(x, self.weight)
        return out


class PadMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return multiply(nn.functional.pad(x, (0, 16)), nn.functional.pad(w, (0, 0, 0, 16)), (E4M3, E4M3), False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Reentrant, "reentrant activation checkpointing"), (Padded, "(padded, or in parts)")],
    ids=["reentrant", "padded"],
)
def test_what_cannot_be_assigned_is_in_coverage_with_the_reason(
    tmp_path: Path, kind: Callable[[], nn.Module], reason: str, capsys: Any
) -> None:
    run = recorded(tmp_path / "run", kind)
    assert sites(run) == {}
    assert entries(run)["inner"]["fp8"] and not entries(run)["inner"]["observed"]
    assert reason in entries(run)["inner"]["reason"]
    assert capsys.readouterr().err.count("inner is in coverage alone") == 1


def test_an_op_that_casts_is_followed(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", Opaque)
    assert sites(run)["inner"] >= set(NINE)
    check_numbers(run)


@torch.library.custom_op("tests_matrices::cast", mutates_args=())
def cast_op(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax() / 448
    return (x.float() / scale).to(E4M3).clone(), scale


class OpMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        (a, sa), (b, sb) = cast_op(x), cast_op(w.t().contiguous())
        return torch._scaled_mm(a, b.t(), sa, sb, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return multiply(grad, w.t(), (E5M2, E4M3), False), multiply(x.t(), grad, (E4M3, E5M2), False)


class Opaque(Projection):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = OpMul.apply(x, self.weight)
        return out


class Conv1D(nn.Module):
    """GPT-2's: a Linear with its weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 48) * 0.1), nn.Parameter(torch.zeros(48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Plain(Projection):
    """x @ weight, in three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(2, -1, 32) @ self.weight).reshape(-1, 48)


class Functional(nn.Module):
    """F.linear of a weight of its own, under any name."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(48, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.kernel)


class TiedPlain(Tied):
    """A tied head in high precision."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed((x[:, 0].abs() * 7).long() % 48) + x
        return h @ self.embed.weight.t()


class Autocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fqn"),
    [(Conv1D, "inner"), (Plain, "inner"), (Functional, "inner.kernel"), (Autocast, "inner"), (TiedPlain, "inner.embed")],
    ids=["conv1d", "matmul", "linear", "autocast", "tied"],
)
def test_what_fp8_would_do_is_recorded_of_any_matrix(
    tmp_path: Path, kind: Callable[[], nn.Module], fqn: str, dtype: torch.dtype
) -> None:
    run = recorded(tmp_path / "run", kind, dtype, what_if=("tensorwise_current",))
    assert sites(run) == {}
    assert sites(run, actual=False) == {"first": sites(run, actual=False)["first"], fqn: set(NINE)}
    module = entries(run)[fqn]
    assert not module["fp8"] and module["observed"] and (module["out_features"], module["in_features"]) == (48, 32)
    query = "SELECT amax FROM sites WHERE module = ? AND gemm = 'fprop' AND tensor = 'weight' AND step = 0"
    weight = next(p for name, p in net(kind, dtype).inner.named_parameters() if p.shape in ((48, 32), (32, 48)))
    expected = weight.detach().to(torch.bfloat16 if kind is Autocast else dtype).abs().amax()
    assert {row["amax"] for row in run.sql(query, [fqn]).to_pylist()} == {expected.item()}


def test_the_model_is_as_it_was_and_no_module_is_observed(tmp_path: Path) -> None:
    from fp8debug.adapters.interception.calls import _ENTRIES

    model = net(Mlp)
    with fp8debug.watch(model, tmp_path / "run", every=1):
        observed = {id(entry.module) for entry in _ENTRIES.values()}
        assert id(model.inner) not in observed
    assert not _ENTRIES


def test_a_parameter_that_nothing_multiplies_by_is_not_in_coverage(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 32))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table

    run = recorded(tmp_path / "run", Positions)
    assert set(entries(run)) == {"first"}


def test_a_model_without_any_linear_is_watched(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp())
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        model(torch.randn(16, 32)).sum().backward()
        watch.step()
        assert {entry["fqn"] for entry in watch.coverage()} == {"0.gate", "0.up", "0.down"}


def test_the_gemms_of_an_fp8_linear_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On a GPU they are ``_scaled_mm`` too; here the kernel's place is taken by one that runs it on the CPU."""
    codes, one = torch.ones(16, 16).to(E4M3), torch.ones(())
    monkeypatch.setattr(fp8debug.linear, "gemm", _with_scaled_mm(dispatch.gemm, codes, one))
    model = fp8debug.convert(nn.Sequential(nn.Linear(32, 32), Conv1D()), "blockwise")
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        model(torch.randn(16, 32)).sum().backward()
        watch.step()
    assert "belong to no watched module" not in capsys.readouterr().err
    assert set(entries(fp8debug.Run(tmp_path / "run"))) == {"0"}


def _with_scaled_mm(gemm: Any, codes: Tensor, one: Tensor) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16)
        return gemm(*args, **kwargs)

    return run


class QuantizesWithin(nn.Module):
    """Lets an op quantize what it computes without autograd, as compiled code does, and asks whether that is let go of."""

    is_free = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            computed = torch.relu(x)
            torch.ops.fp8debug.linear_quantize(computed, get_recipe("blockwise").plan, False)
            alive = ref(computed)
            del computed
        self.is_free = alive() is None
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("in_graph", [True, False])
def test_nothing_is_held_of_what_a_cuda_graph_computes(in_graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the graph's: torch ends the program where other tensors than outputs live on."""
    monkeypatch.setattr(listener, "is_of_cuda_graph", lambda: in_graph)
    model = QuantizesWithin()
    watch = fp8debug.watch(model, tmp_path / "run", every=1)
    model(torch.randn(16, 32)).sum().backward()
    watch.step()
    watch.close()
    assert model.is_free is in_graph

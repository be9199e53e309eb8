"""Memory that the program uses again after a GEMM: what is recorded is what the GEMM read, or nothing, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.adapters.interception.listener import GemmOperand, SeenGemm

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16


def mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply FP8 operands, the second stored by columns as the op wants it."""
    b = b if b.stride(0) == 1 else b.t().contiguous().t()
    if out is None:
        return torch._scaled_mm(a.contiguous(), b, scale_a=scale_a, scale_b=scale_b, out_dtype=BF16)
    found: Tensor = torch.ops.aten._scaled_mm.out(a.contiguous(), b, scale_a, scale_b, out_dtype=BF16, out=out)
    return found


class Linear(nn.Linear):
    """A Linear in FP8 whose three GEMMs a method each may override."""

    def __init__(self) -> None:
        super().__init__(64, 32, bias=False, dtype=BF16)
        self.scales = torch.tensor(0.02), torch.tensor(0.002), torch.tensor(1e-6)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = Matmul.apply(input, self.weight, self)
        return out

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return mm(x, w.t(), self.scales[0], self.scales[1])

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        return mm(g, w, self.scales[2], self.scales[1])

    def wgrad(self, g: Tensor, x: Tensor) -> Tensor:
        return mm(g.t(), x, self.scales[2], self.scales[0])

    def codes(self, x: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
        return (x / self.scales[scale]).to(dtype)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layer: Linear) -> Tensor:
        xq, wq = layer.codes(x, 0, E4), layer.codes(w, 1, E4)
        ctx.codes, ctx.layer = (xq, wq), layer  # not saved for backward: autograd would notice that a buffer was written to
        return layer.fprop(xq, wq)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer, (xq, wq) = ctx.layer, ctx.codes
        gq = layer.codes(grads[0], 2, E5)
        return layer.dgrad(gq, wq), layer.wgrad(gq, xq), None


class ScaleBuffer(Linear):
    """One scalar in memory holds the scale of whatever comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(())

    def scale(self, which: int) -> Tensor:
        return self.buffer.fill_(self.scales[which].item())

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        out = mm(x, w.t(), self.scales[0], self.scale(1))
        self.buffer.fill_(7.0)
        return out

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        return mm(g, w, self.scales[2], self.scale(1))

    def wgrad(self, g: Tensor, x: Tensor) -> Tensor:
        return mm(g.t(), x, self.scales[2], self.scale(0))


class OperandBuffer(Linear):
    """One piece of memory holds the codes of every operand until its GEMM has run; autograd counts the writes."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(64 * 64, dtype=E4)

    def held(self, x: Tensor) -> Tensor:
        return self.memory[: x.numel()].view(x.shape).copy_(x)

    def spoil(self) -> None:
        self.memory.view(torch.uint8).fill_(3)

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        out = mm(self.held(x), w.t(), self.scales[0], self.scales[1])
        self.spoil()
        return out

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        out = mm(g, self.held(w.t().contiguous()).t(), self.scales[2], self.scales[1])
        self.spoil()
        return out

    def wgrad(self, g: Tensor, x: Tensor) -> Tensor:
        out = mm(g.t(), self.held(x.t().contiguous()).t(), self.scales[2], self.scales[0])
        self.spoil()
        return out


class UnseenWrites(OperandBuffer):
    """The same, written by NumPy as by a kernel of the program: autograd does not count it; the result's memory is given."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(48, 32, dtype=BF16)

    def spoil(self) -> None:
        self.memory.view(torch.uint8).numpy().fill(3)

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        out = mm(self.held(x), w.t(), self.scales[0], self.scales[1], out=self.out).clone()
        self.spoil()
        self.out.view(torch.int16).numpy().fill(0)
        return out


class Ring(Linear):
    """Codes of the input lie in a ring of buffers of which another is written before the module ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = torch.zeros(3, 48, 64, dtype=E4)
        self.at = 0

    def codes(self, x: Tensor, scale: int, dtype: torch.dtype) -> Tensor:
        found = super().codes(x, scale, dtype)
        if scale:
            return found
        self.at = (self.at + 1) % 3
        return self.ring[self.at].copy_(found)

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        out = super().fprop(x, w)
        self.ring[(self.at + 1) % 3].view(torch.uint8).zero_()
        return out


class InPlaceResult(Linear):
    """Bias, activation and scale are applied to the result in place."""

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return super().fprop(x, w).add_(0.5).relu_().mul_(3)

    def dgrad(self, g: Tensor, w: Tensor) -> Tensor:
        return super().dgrad(g, w).mul_(2)

    def wgrad(self, g: Tensor, x: Tensor) -> Tensor:
        return super().wgrad(g, x).mul_(2)


class GradBuffer(Linear):
    """The memory of the gradient holds the result of dgrad, and is spoilt after it."""

    def wgrad(self, g: Tensor, x: Tensor) -> Tensor:
        out = super().wgrad(g, x)
        g.view(torch.uint8).fill_(3)
        return out


class CompiledOp(Linear):
    """A custom op, in which the memory of the operands is used again."""

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = torch.ops.fp8debug_test_buffers.mm(x, w, self.scales[0], self.scales[1])
        return found


@torch.library.custom_op("fp8debug_test_buffers::mm", mutates_args=())
def custom_mm(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor) -> Tensor:
    scratch, scale = x.clone(), xs.clone()
    out = torch._scaled_mm(scratch, w.t(), scale_a=scale, scale_b=ws, out_dtype=BF16)
    given = out.clone()
    scratch.view(torch.uint8).numpy().fill(3)
    scale.numpy().fill(7)
    out.view(torch.int16).numpy().fill(0)
    return given


KINDS: list[type[Linear]] = [
    Linear,
    ScaleBuffer,
    OperandBuffer,
    UnseenWrites,
    Ring,
    InPlaceResult,
    GradBuffer,
    CompiledOp,
]


class InPlaceInput(nn.Module):
    """A relu on the input after the Linear has read it, which kept codes of it and not itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64, dtype=BF16), Linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 1.0
        self.x = x  # alive, as where something else of the program needs it
        out: Tensor = self.last(x)
        return out + x.relu_()[:, :32]


def batches() -> Iterator[Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        yield torch.randn(48, 64).bfloat16()


def trained(model: nn.Module, path: Path | None, between: Callable[[], None] = lambda: None) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = None if path is None else fp8debug.watch(model, path, every=1, optimizer=optimizer)
    losses = []
    for x in batches():
        loss = model(x).float().square().mean()
        between()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if watch is not None:
            watch.step(loss=loss.detach())
    if watch is not None:
        watch.close()
    return losses


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def facts(path: Path, module: str) -> tuple[list[str], dict[str, float]]:
    """Return the codes of the findings, and how far each GEMM's result lies from the exact GEMM of what it read, in dB."""
    run = fp8debug.Run(path)
    rows = run.sql(
        "SELECT gemm, min(sqnr_db) AS least FROM sites WHERE reference = 'exact' AND module = ? GROUP BY gemm", [module]
    ).to_pylist()
    codes = sorted({finding.code for finding in fp8debug.triage(run) if finding.severity != "info"})
    return codes, {row["gemm"]: row["least"] for row in rows}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_the_gemm_read_is_recorded(tmp_path: Path, kind: type[Linear]) -> None:
    alone = trained(made(lambda: nn.Sequential(nn.Linear(64, 64, dtype=BF16), kind())), None)
    seen = trained(made(lambda: nn.Sequential(nn.Linear(64, 64, dtype=BF16), kind())), tmp_path / "run")
    assert all(torch.equal(one, other) for one, other in zip(alone, seen, strict=True))
    codes, decibels = facts(tmp_path / "run", "1")
    assert not {"F103", "F108", "F113"} & set(codes), codes
    assert decibels.keys() == {"fprop", "dgrad", "wgrad"}, decibels
    run = fp8debug.Run(tmp_path / "run")
    recorded = run.sql("SELECT DISTINCT step FROM sites WHERE module = '1' ORDER BY step").to_pydict()["step"]
    said = run.sql("SELECT message FROM events WHERE message LIKE '%overwritten%'").to_pydict()["message"]
    if kind in (OperandBuffer, Ring):  # a write to the buffer or another view of it counts; then operands are copied
        assert recorded == [1, 2]
        assert said == [
            "1 is not recorded in full at step 0: the first operand of its forward GEMM was overwritten before the end of its"
            " forward pass"
        ]
    else:
        assert recorded == [0, 1, 2] and not said
    assert all(value > 40 for value in decibels.values()), decibels


def test_an_input_that_a_relu_overwrites_after_the_linear(tmp_path: Path) -> None:
    alone = trained(made(InPlaceInput), None)
    assert all(map(torch.equal, alone, trained(made(InPlaceInput), tmp_path / "run")))
    codes, decibels = facts(tmp_path / "run", "last")
    assert not {"F103", "F108", "F113"} & set(codes), codes
    assert decibels.keys() == {"fprop", "dgrad", "wgrad"} and all(value > 40 for value in decibels.values())
    run = fp8debug.Run(tmp_path / "run")
    casts = run.sql("SELECT DISTINCT gemm FROM sites WHERE module = 'last' AND tensor = 'input'").to_pydict()["gemm"]
    said = run.sql("SELECT DISTINCT message FROM events WHERE module = 'last'").to_pydict()["message"]
    assert casts == ["fprop"]
    assert said == [
        "last is not recorded in full: its input in high precision is overwritten before wgrad, whose cast has no row"
    ]


def test_a_weight_that_is_updated_between_forward_and_backward(tmp_path: Path) -> None:
    model = made(lambda: nn.Sequential(nn.Linear(64, 64, dtype=BF16), Linear()))

    def update() -> None:
        with torch.no_grad():
            model[1].weight.mul_(1.1)  # type: ignore[index]  # a Sequential

    trained(model, tmp_path / "run", update)
    codes, decibels = facts(tmp_path / "run", "1")
    assert not {"F103", "F108", "F113"} & set(codes), codes
    assert decibels.keys() == {"fprop", "wgrad"}
    said = fp8debug.Run(tmp_path / "run").sql("SELECT DISTINCT message FROM events WHERE message LIKE '%overwritten%'")
    assert said.to_pydict()["message"] == [
        "1 is not recorded in full: the weight in high precision of its dgrad was overwritten before it could be read"
    ]


def test_what_is_held_knows_what_was_written_to() -> None:
    def heard(**changes: Any) -> tuple[SeenGemm, Tensor, Tensor, Tensor]:
        a, b, c = torch.ones(4, 8).to(E4), torch.ones(8, 4).to(E4), torch.ones(4, 4)
        return SeenGemm("mm", GemmOperand(a), GemmOperand(b), c)._replace(**changes), a, b, c

    one, a, b, c = heard()
    held = one.held()
    assert held.overwritten() is None and held.t().t().overwritten() is None
    c.zero_()
    assert held.overwritten() is None and held.result.sum() == 16  # a copy: it is small
    b.copy_(torch.zeros(8, 4).to(E4))
    assert held.overwritten() == "second operand" and held.t().overwritten() == "first operand"
    one, a, b, c = heard(is_opaque=True)
    held = one.held()
    a.view(torch.uint8).zero_()
    assert held.overwritten() is None and held.first.values.float().sum() == 32
    with torch.inference_mode():
        one, *_ = heard()
        assert one.held().overwritten() is None

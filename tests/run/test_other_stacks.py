"""Arms of ``verify`` and ``bisect`` on stacks that are not ours: Linears GEMM by GEMM, other modules by their casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8debug.errors import NoMatchError, UsageError
from fp8debug.run.arms import Arm, apply_arm
from fp8debug.run.other_stacks import restore_others
from tests.adapters import linears
from tests.bench.situations.stack import BlockLinear, library

GEMMS = ("fprop", "dgrad", "wgrad")


def entry(module: str, *gemms: str, **more: Any) -> dict[str, Any]:
    return {"module": module, "gemms": list(gemms or GEMMS), "tensor": "*", "cast": None, **more}


def plain(net: nn.Module) -> nn.Module:
    """Return a model with its Linears made nn.Linear, which is what BF16 is to compute."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = nn.Linear
    return net


def results(net: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return the output and all gradients of a step, a second call's."""
    x = torch.randn(4, 12, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    net(x)
    output = net(x)
    output = output[0] if isinstance(output, tuple) else output
    output.float().square().mean().backward()
    assert x.grad is not None
    found = [output.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]
    net.zero_grad()
    return found


def db(one: Tensor, other: Tensor) -> float:
    """Return the SQNR of a tensor."""
    one, other = one.detach().double(), other.detach().double()
    error = (one - other).square().sum()
    return float(10 * torch.log10(other.square().sum() / error))


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    """Tell whether two steps differ by the rounding of BF16 alone: FP8 leaves about 28 dB."""
    return all(db(a, b) > 40 for a, b in zip(one, other, strict=True))


class MegatronLinear(linears.ScaledLinear):
    """As Megatron's: no nn.Linear, returns its output and the bias that its caller adds."""

    def forward(self, x: Tensor) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = linears.Matmul.apply(flat, self.weight, self)
        return out.reshape(*x.shape[:-1], -1), self.bias


class ParallelLinear(linears.InFp8, nn.Module):
    """The same without nn.Linear among its bases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(96, 64) / 8), nn.Parameter(torch.randn(96))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Any:
        out: Tensor = linears.Matmul.apply(x.reshape(-1, 64), self.weight, self)
        return self.gain * out.reshape(*x.shape[:-1], -1), self.bias


def block_linears() -> nn.Sequential:
    library()
    torch.manual_seed(0)
    return nn.Sequential(BlockLinear(64, 128), nn.GELU(), BlockLinear(128, 32, bias=False))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(linears.model, torch.bfloat16), (lambda: linears.model(rowwise=True, turned=True), torch.bfloat16),
     (block_linears, torch.float32)],
)  # fmt: skip
def test_the_bf16_arm_computes_what_nn_linear_does(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    expected = results(plain(make()), dtype)
    net = make()
    assert not close(results(net, dtype), expected), "it runs in FP8"
    apply_arm(Arm(name="bf16", compute="bf16"), [net])
    assert close(results(net, dtype), expected)
    restore_others([net])
    assert not close(results(net, dtype), expected)
    assert not any("forward" in vars(module) for module in net.modules())


def test_parameters_may_be_wider_than_what_the_gemm_before_gave() -> None:
    library()
    torch.manual_seed(0)
    net = nn.Sequential(BlockLinear(64, 128, bias=False), nn.GELU(), BlockLinear(128, 32, bias=False))  # BF16 between them
    x, weights = torch.randn(64, 64), [p.detach() for p in net.parameters()]
    expected = functional.gelu(x @ weights[0].t()) @ weights[1].t()
    assert db(net(x).detach(), expected) < 35
    apply_arm(Arm(name="bf16", compute="bf16"), [net])
    output = net(x)
    output.float().square().sum().backward()
    assert db(output.detach(), expected) > 40
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in net.parameters())


@pytest.mark.parametrize("gemm", GEMMS)
def test_one_gemm_leaves_fp8_and_the_others_stay_to_the_bit(gemm: str) -> None:
    nets: list[Any] = [linears.model(), plain(linears.model()), linears.model()]
    apply_arm(Arm(name="a", fallbacks=(entry("0", gemm),)), [nets[2]])
    found: list[list[Tensor]] = []
    own, _, changed = layers = [net[0] for net in nets]
    for layer in layers:
        x = linears.batch(0).requires_grad_()
        layer(x)  # the first call is compared with nn.Linear's
        output = layer(x)
        output.backward(torch.ones_like(output))
        assert x.grad is not None
        found.append([output.detach(), x.grad, layer.weight.grad])
    for number, name in enumerate(GEMMS):
        if name == gemm:
            assert db(found[2][number], found[1][number]) > 40 and not torch.equal(found[0][number], found[1][number])
        else:
            assert torch.equal(found[2][number], found[0][number])
    assert torch.equal(changed.bias.grad, own.bias.grad) and changed.weight.requires_grad


def test_a_linear_that_returns_its_bias() -> None:
    for make in (lambda: MegatronLinear(64, 96), ParallelLinear):
        torch.manual_seed(0)
        layer: Any = make().bfloat16()
        net = nn.ModuleDict({"proj": layer})
        x = linears.batch(0)
        expected = functional.linear(x, layer.weight)
        assert db(layer(x)[0], expected) < 35
        apply_arm(Arm(name="a", fallbacks=(entry("proj"),)), [net])
        layer(x)
        output, bias = layer(x)
        assert db(output, expected) > 45 and bias is layer.bias


def test_what_is_no_linear_is_refused_at_its_first_call() -> None:
    layer = ParallelLinear().bfloat16()
    layer.gain = 3.0
    net = nn.ModuleDict({"proj": layer})
    apply_arm(Arm(name="bf16", compute="bf16"), [net])
    with pytest.raises(UsageError, match=r"proj is a ParallelLinear whose output is not x W\^T \+ b \(-?\d+\.\d dB\)"):
        layer(linears.batch(0))


def test_a_linear_in_high_precision_is_left() -> None:
    net = linears.model(is_used_in_fp8=False)
    expected = results(net)
    apply_arm(Arm(name="bf16", compute="bf16"), [net])
    assert all(torch.equal(a, b) for a, b in zip(results(net), expected, strict=True))


class Attention(nn.Module):
    """Attention whose softmax weights and table are cast to FP8."""

    def __init__(self, *, by_copy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(64, 64) / 8)
        self.by_copy = by_copy

    def forward(self, x: Tensor) -> Tensor:
        if self.by_copy:
            buffer = torch.empty(x.shape, dtype=linears.E4M3)
            x = x + 0 * buffer.copy_(x.detach()).to(x.dtype)
        p = torch.softmax(x @ x.mT / 8, -1)
        p = p + ((p / 512).to(linears.E4M3).to(p.dtype) * 512 - p).detach()
        flat = (p @ x).reshape(-1, 64)
        out: Tensor = linears.Matmul.apply(flat, self.table.t().contiguous(), linears.ScaledLinear(1, 1))
        return out.reshape(x.shape).to(x.dtype)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(**options)
        torch.manual_seed(1)
        self.head = linears.ScaledLinear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(x))
        return out


def expected_of(x: Tensor, net: Model) -> Tensor:
    p = torch.softmax(x @ x.mT / 8, -1)
    return functional.linear((p @ x) @ net.attention.table, net.head.weight, net.head.bias)


def test_attention_leaves_fp8_by_its_casts() -> None:
    net = Model()
    x = linears.batch(0, torch.float32)
    reference = x.clone().requires_grad_()
    expected = expected_of(reference, net)
    expected.square().mean().backward()
    wanted: list[Any] = [expected.detach(), reference.grad, net.attention.table.grad, net.head.weight.grad]
    net.zero_grad()

    def step() -> list[Any]:
        inner = x.clone().requires_grad_()
        net(inner)
        output = net(inner)
        output.square().mean().backward()
        found = [output.detach().float(), inner.grad, net.attention.table.grad, net.head.weight.grad]
        net.zero_grad()
        return found

    assert all(db(a, b) < 35 for a, b in zip(step(), wanted, strict=True))
    apply_arm(Arm(name="a", fallbacks=(entry("attention", "fprop"), entry("head"))), [net])
    forward = step()
    assert db(forward[0], wanted[0]) > 40 and db(forward[2], wanted[2]) < 35, "its backward pass stays"
    restore_others([net])
    apply_arm(Arm(name="bf16", compute="bf16", further=("attention",)), [net])
    assert all(db(a, b) > 40 for a, b in zip(step(), wanted, strict=True))
    restore_others([net])
    apply_arm(Arm(name="a", fallbacks=(entry("attention.table"),)), [net])
    assert db(step()[2], wanted[2]) > 20 and type(net.attention).__name__ == "Attention"


def test_a_cast_that_cannot_be_left_out_is_refused() -> None:
    net = Model(by_copy=True)
    apply_arm(Arm(name="bf16", compute="bf16", further=("attention",)), [net])
    with pytest.raises(UsageError, match=r"attention \(Attention\): aten\.empty.* makes a tensor in FP8"):
        net(linears.batch(0, torch.float32))


def test_what_an_arm_cannot_be_asked_for() -> None:
    net = Model()
    with pytest.raises(NoMatchError, match=r"module 'attn' matches nothing"):
        apply_arm(Arm(name="bf16", compute="bf16", further=("attn",)), [net])
    with pytest.raises(NoMatchError, match="fallback module 'heads' matches nothing"):
        apply_arm(Arm(name="a", fallbacks=(entry("heads"),)), [net])
    with pytest.raises(UsageError, match=r"head is a module of another stack: .* asks for one operand in BF16"):
        apply_arm(Arm(name="a", fallbacks=(entry("head", tensor="weight"),)), [net])
    with pytest.raises(UsageError, match=r"head is a ScaledLinear, whose operands .* leave out the arm fp8_tensors"):
        apply_arm(Arm(name="t", compute="fp8_tensors"), [net])
    assert "forward" not in vars(net.head)

"""A user's own FP8 stack, with no fp8debug in it: block casts by hand, a library's GEMM, an autograd function, a small model.

Faults override ``cast`` or ``product`` of one class.
"""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.rules import Findings

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
VOCABULARY, TOKENS = 64, 320
#: Data and scale_inv.
Cast = tuple[Tensor, Tensor]
#: Modules in which most of the faults are.
DOWN, UP = ("blocks.1.down",), ("blocks.1.up",)


def expanded(scales: Tensor, shape: Sequence[int], block: tuple[int, int]) -> Tensor:
    """Return block scales ``[block rows, block columns]`` as ``[rows, columns]``."""
    rows = scales.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def scales_of(x: Tensor, block: tuple[int, int], largest: float, eps: float = 1e-12) -> Tensor:
    """Return scale_inv of each block ``[block rows, block columns]``."""
    rows, columns = x.shape
    padded = functional.pad(x.float().abs(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.reshape(-(-rows // block[0]), block[0], -(-columns // block[1]), block[1])
    return blocks.amax((1, 3)).clamp(min=eps) / largest


def quantized(x: Tensor, scales: Tensor, block: tuple[int, int], kind: torch.dtype = E4M3) -> Tensor:
    """Return x ``[rows, columns]`` over its scales, clamped and rounded."""
    limit = LARGEST[kind]
    return (x.float() / expanded(scales, x.shape, block)).clamp(-limit, limit).to(kind)


def block_of(data: Tensor, scales: Tensor) -> tuple[int, int]:
    """Return the block of a cast, by the shape of its scales."""
    return (1 if scales.shape[0] == data.shape[0] else 128, 128)


def values(cast: Cast) -> Tensor:
    """Return what a cast stands for, FP32."""
    data, scales = cast
    return data.float() * expanded(scales, data.shape, block_of(data, scales))


def fp8_gemm_nt(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
    """Write ``a @ b.t()`` to d: the public signature of the library."""
    d.copy_(values(a) @ values(b).t())


def library() -> ModuleType:
    """Return a stand-in of DeepGEMM, by its name in ``sys.modules``, as it was made."""
    found = sys.modules.get("deep_gemm") or ModuleType("deep_gemm")
    sys.modules["deep_gemm"] = found
    vars(found)["fp8_gemm_nt"] = fp8_gemm_nt
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: BlockLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return layer.product(
            "fprop", layer.cast("fprop", "input", x), layer.cast("fprop", "weight", weight), (len(x), len(weight))
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        dgrad = wgrad = None
        if ctx.needs_input_grad[0]:
            first, second = layer.cast("dgrad", "grad_output", grad), layer.cast("dgrad", "weight", weight.t())
            dgrad = layer.product("dgrad", first, second, x.shape)
        if ctx.needs_input_grad[1]:
            first, second = layer.cast("wgrad", "grad_output", grad.t()), layer.cast("wgrad", "input", x.t())
            wgrad = layer.product("wgrad", first, second, weight.shape)
        return dgrad, wgrad, None


class BlockLinear(nn.Linear):
    """A Linear in DeepSeek's recipe over the library."""

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        """Return an operand ``[rows, contracted]`` in blocks of 128x128 (weights) or 1x128."""
        x, block = x.contiguous(), (128, 128) if tensor == "weight" else (1, 128)
        scales = scales_of(x, block, LARGEST[E4M3])
        return quantized(x, scales, block), scales

    def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        """Return ``a @ b.t()`` in BF16."""
        out = torch.empty(tuple(shape), dtype=torch.bfloat16)
        sys.modules["deep_gemm"].fp8_gemm_nt(a, b, out)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        out: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
        out = out.reshape(*x.shape[:-1], len(self.weight))
        return out if self.bias is None else out + self.bias


class OwnKernel(BlockLinear):
    """A Linear that tells the kernel which GEMM it runs, by the argument ``recipe``."""

    def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        """Return ``a @ b.t()`` in BF16."""
        out = torch.empty(tuple(shape), dtype=torch.bfloat16)
        sys.modules["deep_gemm"].fp8_gemm_nt(a, b, out, recipe=gemm)
        return out


class InInputType(BlockLinear):
    """A Linear whose output has the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        return super().forward(x).to(x.dtype)


def altered(gemm: str, tensor: str) -> Callable[[Callable[[Tensor, Tensor, Tensor], Cast]], type[BlockLinear]]:
    """Decorate a function of (tensor, data, scales): a Linear in which it changes the cast of one operand."""

    def make(change: Callable[[Tensor, Tensor, Tensor], Cast]) -> type[BlockLinear]:
        class Fault(BlockLinear):
            def cast(self, which: str, role: str, x: Tensor) -> Cast:
                data, scales = super().cast(which, role, x)
                return change(x, data, scales) if (which, role) == (gemm, tensor) else (data, scales)

        return Fault

    return make


def scaled(gemm: str, tensor: str) -> Callable[[Callable[[Tensor], Tensor]], type[BlockLinear]]:
    """Decorate a function of a tensor: a Linear in which it gives the scales of one operand in blocks of 1x128."""

    def make(scales_from: Callable[[Tensor], Tensor]) -> type[BlockLinear]:
        class Fault(BlockLinear):
            def cast(self, which: str, role: str, x: Tensor) -> Cast:
                if (which, role) != (gemm, tensor):
                    return super().cast(which, role, x)
                scales = scales_from(x)
                return quantized(x.contiguous(), scales, (1, 128)), scales

        return Fault

    return make


class Block(nn.Module):
    """A gated MLP with its norm and residual."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (linear(width, hidden, bias=bias) for _ in range(2))
        self.down = linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        h = self.norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class TwoExperts(nn.Module):
    """Two experts over one buffer of tokens.

    Attributes:
        offset: the first expert takes the tokens before it.
    """

    offset = 100

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.first, self.second = (Block(linear, width, hidden, bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        late = self.second(x[self.offset :])  # so that its backward pass comes last
        return torch.cat([self.first(x[: self.offset]), late])


class FusedBlock(nn.Module):
    """A gated MLP whose gate and up projections are one GEMM."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate_up, self.down = linear(width, 2 * hidden, bias=bias), linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        out: Tensor = x + self.down(functional.silu(gate) * up)
        return out


class Model(nn.Module):
    """Token embedding, two blocks, norm and a head in high precision; every call gives the same one."""

    def __init__(
        self,
        linear: Callable[..., nn.Module] = BlockLinear,
        width: int = 128,
        hidden: int = 384,
        bias: bool = False,
        block: Callable[..., nn.Module] = Block,
    ) -> None:
        super().__init__()
        library()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks: Any = nn.ModuleList(block(linear, width, hidden, bias) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[tokens, VOCABULARY]``."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and classes ``[TOKENS]`` of a noisy map that can be learned."""
    random = torch.Generator().manual_seed(500 + number)
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=random)
    noise = torch.randint(VOCABULARY, (TOKENS,), generator=random)
    return tokens, torch.where(torch.rand(TOKENS, generator=random) < 0.8, (tokens * 5 + 11) % VOCABULARY, noise)


def cross_entropy(out: Any, classes: Tensor) -> Tensor:
    """Return the mean loss."""
    return functional.cross_entropy(out.float(), classes)


def train(
    model: nn.Module,
    path: Path,
    *,
    steps: int = 24,
    every: int = 3,
    micro: int = 1,
    lr: float = 2e-3,
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: Callable[[Any, Tensor], Tensor] = cross_entropy,
    before: Callable[[int], None] = lambda step: None,
    after_backward: Callable[[int, int], None] = lambda step, micro: None,
    after: Callable[[int, Any], None] = lambda step, watch: None,
    kernel: Callable[..., None] | None = None,
    **watched: Any,
) -> None:
    """Train under a watch, as a user would; with this kernel in the library, where there is one."""
    if kernel is not None:
        vars(library())["fp8_gemm_nt"] = kernel
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    with fp8debug.watch(model, path, every=every, **watched) as watch:
        for step in range(steps):
            before(step)
            total = 0.0
            for number in range(micro):
                tokens, classes = batch(step * micro + number)
                loss = loss_of(model(tokens), classes) / micro
                loss.backward()
                total += loss.item()
                after_backward(step, number)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=total)
            after(step, watch)
    if kernel is not None:
        library()


def train_for_both(model: nn.Module, folder: Path, **options: Any) -> None:
    """Train what a run and its healthy twin have in common, which the fault leaves alone, into both."""
    train(model, folder / "sick", **options)
    shutil.copytree(folder / "sick", folder / "clean")


@functools.cache
def _plain_run() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train(Model(), folder / "clean")
    return folder / "clean"


def copy_plain_run(path: Path) -> None:
    """Record ``train(Model(), path)``, the healthy twin of many situations: it is trained once, and copied."""
    shutil.copytree(_plain_run(), path)


def rollouts(
    path: Path, spoil: Callable[[Any], Any], *, bias: bool = False, steps: int = 24, recipe: str = "blockwise", **made: Any
) -> None:
    """Train, and compare four times with a rollout engine: a copy of the model in which something is not as it should be."""
    model = Model(nn.Linear, bias=bias, **made)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.linspace(-1, 1, len(p)))
    fp8debug.convert(model, recipe, overrides={"head": None})

    def engine(tokens: Tensor) -> Tensor:
        other = copy.deepcopy(model)
        with torch.no_grad():
            spoil(other)
            out: Tensor = other(tokens)
        return out

    def compare(step: int, watch: Any) -> None:
        if (step + 1) % (steps // 4) == 0:
            watch.compare_inference(batch(999)[0], inference=engine)

    train(model, path, lr=5e-3, steps=steps, after=compare)


def with_fault(fault: type[nn.Module], *names: str, **made: Any) -> Model:
    """Return the model with another class at these modules, ``blocks.1.down`` by default."""
    model = Model(**made)
    for name in names or ("blocks.1.down",):
        model.get_submodule(name).__class__ = fault
    return model


def diagnosis(path: Path) -> Findings:
    """Return what triage says of a run."""
    return fp8debug.triage(path)

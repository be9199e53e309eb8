"""Train a small GPT in blockwise FP8 on real text, the Python standard library's sources byte by byte, and record it.

    python examples/train_gpt.py --out runs/exp1
    python examples/train_gpt.py --out runs/sick --fault stale_scale --fault-module blocks.2.mlp.down --fault-step 20

The model has RMSNorm, causal attention and SwiGLU; the head stays in BF16, as DeepSeek-V3 keeps it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

import fp8debug

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of x[batch, heads, length, width]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One transformer layer, norms first."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attn, self.mlp = Attention(width, heads), SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A decoder over bytes: tokens[batch, length] -> logits[batch, length, 256]."""

    def __init__(self, width: int, depth: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        hidden = 128 * math.ceil(8 * width / 3 / 128)
        blocks = [Block(width, max(1, width // 64), hidden) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in blocks:
            for last in (block.attn.proj, block.mlp.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.lm_head(self.norm(x))
        return out


def text(num_bytes: int) -> Tensor:
    """Return the first bytes of the standard library's modules, uint8, in an order that is the same on every machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    joined = bytearray()
    for path in sorted(folder.glob("*.py")):
        joined += path.read_bytes()
        if len(joined) >= num_bytes:
            break
    return torch.frombuffer(joined[:num_bytes], dtype=torch.uint8)


def batch(data: Tensor, rows: int, length: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets) ``[rows, length]``; a function of step and seed alone, so that runs can be compared."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - length - 1, (rows,), generator=generator)
    windows = torch.stack([data[s : s + length + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return functional.cross_entropy(model(tokens).reshape(-1, VOCABULARY).float(), targets.reshape(-1))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="run directory to record into; without it nothing is recorded")
    add("--every", type=int, default=5, help="record every that many steps")
    add("--recipe", default="blockwise", help=f"one of {', '.join(fp8debug.list_recipes())}")
    add("--steps", type=int, default=100)
    add("--width", type=int, default=128)
    add("--depth", type=int, default=6)
    add("--rows", type=int, default=8, help="sequences in a batch")
    add("--length", type=int, default=128, help="bytes in a sequence")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--tied", action="store_true", help="share the embedding with the head")
    add("--fault", help=f"plant one of {', '.join(f.name for f in fp8debug.list_faults())}")
    add("--fault-module", help="FQN such as blocks.2.mlp.down")
    add("--fault-step", type=int, default=20)
    add("--fallback", type=Path, help="JSON file of fp8debug fallback, applied before training")
    add("--save", type=Path, help="write a checkpoint at the end")
    add("--resume", type=Path, help="go on from a checkpoint of --save")
    add("--result", type=Path, help="write the losses as JSON")
    return parser.parse_args(argv)


def build(args: argparse.Namespace) -> GPT:
    """Return the model, converted, with the fault planted and the fallbacks applied."""
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.depth, tied=args.tied).to(args.device)
    if args.recipe != "bf16":
        fp8debug.convert(model, args.recipe, overrides={"lm_head": None})
    if args.fault:
        fp8debug.inject(model, args.fault, module=args.fault_module, step=args.fault_step)
    if args.fallback:
        fp8debug.apply(model, args.fallback)
    return model


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train; return the loss of every step and of held-out text."""
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    first = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=args.device, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
    data = text(2_000_000)
    held_out, data = data[-100_000:], data[:-100_000]
    watch = None
    if args.out:
        resume_from = first if args.resume and args.out.exists() else None
        watch = fp8debug.watch(
            model, args.out, every=args.every, optimizer=optimizer, resume_from=resume_from, total_steps=args.steps
        )

    losses: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"training, {args.recipe}", total=args.steps, completed=first)
        for step in range(first, args.steps):
            lr = args.lr * min(1.0, (step + 1) / 10)
            for group in optimizer.param_groups:
                group["lr"] = lr
            tokens, targets = (t.to(args.device) for t in batch(data, args.rows, args.length, step, args.seed))
            loss = loss_of(model, tokens, targets)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if watch:
                watch.step(loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens.numel())
            losses.append(float(loss.detach()))
            progress.update(bar, advance=1, description=f"training, {args.recipe}, loss {losses[-1]:.3f}")
    if watch:
        watch.close()
    if args.save:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
        torch.save(state, args.save)
    model.eval()
    with torch.no_grad():
        tokens, targets = batch(held_out, 16, args.length, 0, args.seed)
        final = float(loss_of(model, tokens.to(args.device), targets.to(args.device)))
    return {"recipe": args.recipe, "losses": losses, "held_out": final}


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        result = train(args)
    except fp8debug.Fp8DebugError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.recipe}: loss {result['losses'][-1]:.4f}, held-out {result['held_out']:.4f} nats per byte")
    if args.result:
        args.result.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

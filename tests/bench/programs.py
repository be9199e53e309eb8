"""Ways to train that are not the usual loop, each with and without a watch: ``python tests/bench/programs.py [--only NAME ...]``.

Every program trains a small model in each stack (an nn.Linear that is tried, Fp8Linear, torchao, an own Linear over
``_scaled_mm``), eager and with its blocks compiled (``aot_eager``). Losses, weights, random numbers and exceptions have to be
those without a watch; a line tells that, and what triage finds in the run. The exit status is the number of those that differ.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from fp8debug.errors import Fp8DebugError
from tests.adapters.linears import ScaledLinear

WIDTH, CLASSES = 64, 32
STACKS = ("plain", "native", "torchao", "scaled")
#: A program trains the model, and yields what no watch may change; it calls the function with the loss when a step is over.
Program = Callable[[nn.Module, Callable[[Tensor], None]], Iterator[Tensor]]
PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    """Add a program under its name."""
    PROGRAMS[run.__name__] = run
    return run


class Block(nn.Module):
    """Two Linears behind a norm."""

    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), make(WIDTH, 2 * WIDTH), make(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what the block adds."""
        return x + cast(Tensor, self.down(functional.silu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks and a head in high precision."""

    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(make) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


def made(stack: str, compiles: bool) -> Net:
    """Return the model of a stack."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(ScaledLinear if stack == "scaled" else lambda i, o: nn.Linear(i, o, bias=False)).bfloat16()
    if stack == "native":
        fp8debug.convert(net, "blockwise", overrides={"head": None})
    elif stack == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(net, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda _, name: name != "head")
    for block in net.blocks if compiles else ():
        block.compile(backend="aot_eager")
    return net


def batch(seed: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator).bfloat16(), torch.randint(0, CLASSES, (rows,), generator=generator)


def loss_of(net: nn.Module, seed: int, rows: int = 16) -> Tensor:
    """Return the loss on a batch."""
    x, classes = batch(seed, rows)
    return functional.cross_entropy(net(x).float(), classes)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose updates are large enough for weights in BF16 to move."""
    return torch.optim.SGD(net.parameters(), 0.1)


def steps(
    net: nn.Module, end: Callable[[Tensor], None], losses: Callable[[int], Tensor], number: int = 5, **options: Any
) -> Iterator[Tensor]:
    """Train the ordinary way on losses of a program's own."""
    optimizer = options.get("optimizer") or sgd(net)
    for step in range(number):
        loss = losses(step)
        loss.backward(**options.get("backward", {}))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
        end(loss)


@program
def ordinary(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    yield from steps(net, end, lambda step: loss_of(net, step))


@program
def optimizer_in_backward(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in net.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[cast(nn.Parameter, parameter)].step()
        optimizers[cast(nn.Parameter, parameter)].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(5):
        loss = loss_of(net, step)
        loss.backward()
        yield loss.detach()
        end(loss)


@program
def functional_call(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    for step in range(5):
        x, classes = batch(step)
        loss = functional.cross_entropy(torch.func.functional_call(net, weights, (x,)).float(), classes)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        moved = zip(weights.items(), gradients, strict=True)
        weights = {name: (w - g).detach().requires_grad_() for (name, w), g in moved}
        yield loss.detach()
        end(loss)


@program
def autograd_grad(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    optimizer, parameters = sgd(net), list(net.parameters())
    for step in range(5):
        losses = [loss_of(net, 10 * step + chunk) for chunk in range(2)]
        of_chunks = [torch.autograd.grad(loss, parameters) for loss in losses]
        for parameter, *gradients in zip(parameters, *of_chunks, strict=True):
            parameter.grad = gradients[0] + gradients[1]
        optimizer.step()
        yield losses[0].detach()
        end(losses[0])


@program
def gradient_penalty(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    def loss(step: int) -> Tensor:
        x, classes = batch(step)
        own = functional.cross_entropy(net(x.requires_grad_()).float(), classes)
        (gradient,) = torch.autograd.grad(own, x, create_graph=True)
        return own + gradient.float().square().sum()

    yield from steps(net, end, loss)


@program
def saved_tensor_hooks(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    def loss(step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            return loss_of(net, step)

    yield from steps(net, end, loss)


@program
def anomaly_detection(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        yield from ordinary(net, end)


@program
def deterministic_algorithms(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    torch.use_deterministic_algorithms(True)
    try:
        yield from ordinary(net, end)
    finally:
        torch.use_deterministic_algorithms(False)


@program
def averaged_copy(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    averaged = torch.optim.swa_utils.AveragedModel(net)
    for loss in steps(net, end, lambda step: loss_of(net, step), optimizer=torch.optim.AdamW(net.parameters(), 1e-2)):
        averaged.update_parameters(net)
        with torch.no_grad():
            yield from (loss, loss_of(averaged, 1))
    yield loss_of(copy.deepcopy(net), 1)


@program
def weights_replaced(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    yield from steps(net, end, lambda step: loss_of(net, step), 3)
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
    yield from steps(net, end, lambda step: loss_of(net, 10 + step), 3)


@program
def smaller_batch_after_an_exception(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    blocks = cast(nn.ModuleList, net.blocks)

    def fail(*_: Any) -> None:
        raise MemoryError("too large")

    def loss(step: int) -> Tensor:
        hook = blocks[1].register_forward_pre_hook(fail) if step % 2 else None
        try:
            return loss_of(net, step)
        except MemoryError:
            assert hook is not None
            hook.remove()
            return loss_of(net, step, 8)

    yield from steps(net, end, loss)


@program
def lbfgs(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    optimizer, losses = torch.optim.LBFGS(net.parameters(), lr=1e-2, max_iter=3), []
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            losses.append(loss_of(net, step))
            losses[-1].backward()
            return float(losses[-1])

        optimizer.step(closure)
        end(losses[-1])
    yield torch.stack(losses).detach()


@program
def sharpness_aware(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    parameters = list(net.parameters())

    def loss(step: int) -> Tensor:
        first = loss_of(net, step)
        offsets = [gradient * 1e-2 for gradient in torch.autograd.grad(first, parameters)]
        with torch.no_grad():
            for parameter, offset in zip(parameters, offsets, strict=True):
                parameter.add_(offset)
        loss_of(net, step).backward()
        with torch.no_grad():
            for parameter, offset in zip(parameters, offsets, strict=True):
                parameter.sub_(offset)
        return first.detach().requires_grad_()

    yield from steps(net, end, loss)


@program
def layer_drop(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    blocks, generator = cast(nn.ModuleList, net.blocks), random.Random(0)

    def loss(step: int) -> Tensor:
        net.blocks = nn.ModuleList(block for block in blocks if generator.random() < 0.6)
        found = loss_of(net, step)
        net.blocks = blocks
        return found

    yield from steps(net, end, loss, 8)


@program
def blocks_come_and_go(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    blocks = cast(nn.ModuleList, net.blocks)
    yield from steps(net, end, lambda step: loss_of(net, step), 2)
    blocks.append(copy.deepcopy(blocks[0]))
    yield from steps(net, end, lambda step: loss_of(net, 10 + step), 2)
    del blocks[0]
    yield from steps(net, end, lambda step: loss_of(net, 20 + step), 2)


@program
def batches_of_all_sizes(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    sizes = (16, 1, 34, 16, 100, 3)
    yield from steps(net, end, lambda step: loss_of(net, step, sizes[step]), len(sizes))


@program
def empty_batches(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    yield from steps(net, end, lambda step: cast(Tensor, net(batch(step, 16 * (step % 2 == 0))[0])).float().square().sum())


@program
def two_threads(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    with ThreadPoolExecutor(2) as pool:

        def loss(step: int) -> Tensor:
            losses = list(pool.map(lambda seed: loss_of(net, seed), (step, step + 100)))
            return losses[0] + losses[1]

        loss_of(net, 0)  # Dynamo compiles in one thread
        yield from steps(net, end, loss)


@program
def both_kinds_of_checkpoints(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    for block, is_reentrant in zip(cast(nn.ModuleList, net.blocks), (True, False), strict=True):
        run = block.forward
        cast(Any, block).forward = lambda x, run=run, reentrant=is_reentrant: checkpoint(run, x, use_reentrant=reentrant)

    def loss(step: int) -> Tensor:
        x, classes = batch(step)
        return functional.cross_entropy(net(x.requires_grad_()).float(), classes)

    yield from steps(net, end, loss)


@program
def evaluation_between(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    def loss(step: int) -> Tensor:
        with torch.inference_mode():
            loss_of(net, step)
        net.eval()
        with torch.no_grad():
            loss_of(net, step)
        return loss_of(net.train(), step)

    yield from steps(net, end, loss)


@program
def hooks_of_the_users(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    first, second = cast(Any, net.blocks)
    first.up.register_forward_hook(lambda module, args, output: output * 1.5)
    second.down.register_full_backward_hook(lambda module, grads, _: tuple(grad * 0.5 for grad in grads))
    first.down.weight.register_hook(lambda grad: grad * 2)
    yield from ordinary(net, end)


@program
def scaler_that_skips(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for step in range(6):
        loss = loss_of(net, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss.detach()
        end(loss)


@program
def frozen_now_and_then(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    def loss(step: int) -> Tensor:
        cast(nn.ModuleList, net.blocks)[0].requires_grad_(step % 2 == 0)
        return loss_of(net, step)

    yield from steps(net, end, loss, 6)


@program
def backward_twice(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    def loss(step: int) -> Tensor:
        found = loss_of(net, step)
        found.backward(retain_graph=True)
        return found * 0.5

    yield from steps(net, end, loss)


@program
def gradients_of_some(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    inputs = list(cast(nn.ModuleList, net.blocks)[1].parameters())
    yield from steps(net, end, lambda step: loss_of(net, step), backward={"inputs": inputs})


@program
def weights_tied_late(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    yield from steps(net, end, lambda step: loss_of(net, step), 2)
    first, second = cast(Any, net.blocks)
    second.up.weight = first.up.weight
    yield from steps(net, end, lambda step: loss_of(net, 10 + step), 3)


@program
def steps_that_nobody_tells(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    yield from ordinary(net, lambda loss: None)


@program
def random_numbers(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    def loss(step: int) -> Tensor:
        x, classes = batch(step)
        return functional.cross_entropy(net(functional.dropout(x, 0.3)).float(), classes)

    yield from steps(net, end, loss)
    yield from (torch.rand(3), torch.tensor(random.random()))


@program
def transforms(net: nn.Module, end: Callable[[Tensor], None]) -> Iterator[Tensor]:
    yield from steps(net, end, lambda step: loss_of(net, step), 3)
    x, _ = batch(0)
    yield torch.func.vmap(net)(x[None])
    yield torch.func.jvp(net, (x,), (x,))[1]


def trained(run: Program, stack: str, compiles: bool, path: Path | None) -> tuple[list[Tensor], str]:
    """Train, and return what no watch may change, and the exception that ended it; recorded where a folder is given."""
    net = made(stack, compiles)
    watch = None if path is None else fp8debug.watch(net, path, every=1)
    random.seed(1)
    torch.manual_seed(1)
    found, ended = [], ""

    def end(loss: Tensor) -> None:
        if watch is not None:
            watch.step(loss=loss)

    try:
        for result in run(net, end):
            found.append(result.detach().clone())
    except Exception as error:
        ended = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if watch is not None:
        watch.close()
    return [*found, *(parameter.detach() for parameter in net.parameters())], ended


def judged(path: Path) -> str:
    """Return the class of a run, and the findings above information."""
    try:
        report = fp8debug.triage(path)
    except Fp8DebugError as error:
        return str(error)
    findings = [f"{finding.code} {finding.name}" for finding in report if finding.severity != "info"]
    return ", ".join([str((report.classification or {}).get("class")), *findings])


def main() -> int:
    """Run the programs, and return how many differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=STACKS)
    parser.add_argument("--how", nargs="+", choices=("eager", "compiled"), default=("eager", "compiled"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    num_different = num_run = 0
    for name in options.only:
        for stack in options.stacks:
            for how in options.how:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, "run")
                    alone, seen = (trained(PROGRAMS[name], stack, how == "compiled", to) for to in (None, path))
                    is_same = len(alone[0]) == len(seen[0]) and alone[1] == seen[1]
                    is_same &= all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(alone[0], seen[0], strict=False))
                    verdict = judged(path)
                num_run, num_different = num_run + 1, num_different + (not is_same)
                ended = f"; ended by {seen[1]}" if seen[1] else ""
                print(f"{'same' if is_same else 'DIFFERS'}  {name} {stack} {how}: {verdict}{ended}", flush=True)
    print(f"{num_different} of {num_run} differ")
    return num_different


if __name__ == "__main__":
    sys.exit(main())

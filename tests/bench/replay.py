"""What a CUDA graph makes of a training step, watched and not, on a GPU: ``python tests/bench/replay.py [--tokens 8192 2048]``.

The layers of ``overhead.py`` with SGD, in BF16 and with Fp8Linear: as Python issues them, and replayed from a graph that holds
forward, backward and the optimizer. ``attached``: under a watch that samples nothing, ``Watch.step()`` outside the graph.
``every 10th``: nine steps are replayed, the sampled one runs without the graph. A time is the median over blocks of twenty steps
of a block's wall-clock time over its steps, the device idle before and after; no times are asserted.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from tests.bench.backends import convert_layers, layers
from tests.bench.overhead import NOT_SAMPLING, TURN, block_median


class Loop:
    """A training loop whose tensors stay where they are, as a capture needs it.

    Args:
        options: layers, width and tokens.
        recipe: of Fp8Linear; None is BF16.
        is_replayed: whether steps that are not sampled are replayed from a graph.
        every: of the watch; None is none.
    """

    def __init__(self, options: argparse.Namespace, recipe: str | None, is_replayed: bool, every: int | None, run: Path) -> None:
        self.model = layers(options.layers, options.width, options.width * 7 // 2, options.device)
        self._x = torch.randn(4, options.tokens // 4, options.width, dtype=torch.bfloat16, device=options.device)
        self._loss = torch.zeros((), device=options.device)
        if recipe is not None:
            convert_layers(self.model, f"native:{recipe}")
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, fused=options.device == "cuda")
        self._is_replayed, self._every = is_replayed, every
        self._graph: torch.cuda.CUDAGraph | None = None
        self.watch: Any = None if every is None else fp8debug.watch(self.model, run, every=every)

    def step(self) -> None:
        """One step of the loop, whichever way."""
        is_sampled = self.watch is not None and self.watch.current_step % self._every == 0
        if is_sampled or not self._is_replayed:
            self._eager()
        else:
            self._replay()
        if self.watch is not None:
            self.watch.step(loss=self._loss)

    def _eager(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        loss = self.model(self._x).float().square().mean()
        loss.backward()
        self._optimizer.step()
        self._loss.copy_(loss.detach())

    def _replay(self) -> None:
        if self._graph is None:
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self._eager()
            torch.cuda.current_stream().wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._eager()
        self._graph.replay()

    def milliseconds(self, blocks: int) -> float:
        """Return the median over blocks, after a block's worth of steps that compile, capture and get warm."""
        block_median(self.step, TURN, 1)
        return block_median(self.step, TURN, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 2048])
    for name, default in (("layers", 2), ("width", 4096), ("blocks", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="blockwise")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this bench times a GPU, and torch finds none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; medians of {options.blocks} blocks, SGD")
    rows: list[tuple[str, str | None, int | None]] = [
        ("BF16", None, None),
        (f"FP8 {options.recipe}", options.recipe, None),
        ("attached, not sampling", options.recipe, NOT_SAMPLING),
        ("watched, every 10", options.recipe, 10),
    ]
    for tokens in options.tokens:
        print(f"\n{options.layers} layers, width {options.width}, {tokens} tokens{'':13} as issued     replayed")
        case = argparse.Namespace(layers=options.layers, width=options.width, tokens=tokens, device="cuda")
        plain = [0.0, 0.0]
        for name, recipe, every in rows:
            words = f"{name:40}"
            for way in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    loop = Loop(case, recipe, way, every, Path(folder, "run"))
                    found = loop.milliseconds(options.blocks)
                    if loop.watch is not None:
                        loop.watch.close()
                    del loop
                    gc.collect()
                    torch.cuda.empty_cache()
                plain[way] = found if recipe is not None and every is None else plain[way]
                words += f" {found:9.2f} ms" + ("" if every is None else f" {100 * (found / plain[way] - 1):+6.2f} %")
            print(words, flush=True)


if __name__ == "__main__":
    main()

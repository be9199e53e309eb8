"""``python -m fp8debug.run [--out DIR] [--every N] train.py ARGS``: record an unmodified training script.

The script runs as ``__main__``. The model is taken to be the outermost module with a Linear whose forward runs with gradients
on, the loss the scalar on which ``backward()`` is called, and a step ends with ``optimizer.step()``. A script that calls
``fp8debug.watch()`` itself is left to it.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fp8debug.adapters import attach
from fp8debug.errors import Fp8DebugError, UsageError


class AutoWatch:
    """Waits for a script's model, then watches it.

    Args:
        out: the run directory.
        options: keyword arguments of :func:`fp8debug.watch`.
    """

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.watch: attach.Watch | None = None
        self.found = False
        self._out = out
        self._options = options
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Listen for the first training forward, for the loss, and for a script that attaches itself."""
        self._undo.append(register_module_forward_pre_hook(self._before_forward).remove)
        own_backward: Callable[..., None] = Tensor.backward

        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.watch is not None and tensor.numel() == 1 and tensor.dim() == 0:
                self.watch.note(loss=tensor)
            own_backward(tensor, *args, **kwargs)

        def restore() -> None:
            Tensor.backward = own_backward  # type: ignore[method-assign]  # put back

        Tensor.backward = backward  # type: ignore[assignment,method-assign]  # the one way to see a script's loss
        self._undo.append(restore)
        attach.on_watch.append(self.stop)

    def stop(self) -> None:
        """Stop listening, for the script attaches itself or has ended; a watch goes on."""
        self.found = True
        while self._undo:
            self._undo.pop()()
        if self.stop in attach.on_watch:
            attach.on_watch.remove(self.stop)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if not torch.is_grad_enabled() or not any(isinstance(m, nn.Linear) for m in module.modules()):
            return
        self.found = True
        self._undo.pop(0)()
        attach.on_watch.remove(self.stop)
        try:
            self.watch = attach.watch(module, self._out, **self._options)
            print(f"fp8debug: recording {type(module).__name__} into {self._out}", file=sys.stderr)
        except Fp8DebugError as error:
            print(f"fp8debug: not recorded: {error}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run a script under the recorder; return its exit code.

    Raises:
        SystemExit: as the script does.
    """
    parser = argparse.ArgumentParser(prog="fp8debug run", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=None, help="run directory (default: runs/SCRIPT)")
    parser.add_argument("--every", type=int, default=10, help="record every that many steps")
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(argv)
    out = options.out or Path("runs") / options.script.stem
    try:
        if not options.script.is_file():
            raise UsageError(f"no script {options.script}; expected the path of a Python file")
        if options.every < 1:
            raise UsageError(f"--every must be at least 1, got {options.every}")
        if (out / "manifest.json").exists():
            raise UsageError(f"{out} already holds a run; choose another --out or delete it")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    auto = AutoWatch(out, {"every": options.every})
    auto.start()
    sys.argv = [str(options.script), *options.args]
    sys.path.insert(0, str(options.script.resolve().parent))
    try:
        runpy.run_path(str(options.script), run_name="__main__")
    finally:
        found = auto.found
        auto.stop()
        if auto.watch is not None:
            auto.watch.close()
        elif not found:
            print("fp8debug: nothing recorded: no module with a Linear ran forward with gradients on", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

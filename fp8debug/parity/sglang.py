"""Make a dump for ``fp8debug parity`` of SGLang's tensor dumps (``--debug-tensor-dump-output-folder``), Pass00000.pt and so on.

    python -m fp8debug.parity.sglang FOLDER OUT

SGLang writes the outputs of leaf modules by pass; inputs and weights are not in it. The files are read by torch's restricted
unpickler (``weights_only``), which runs no code of theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8debug.errors import Fp8DebugError, RunError, UsageError
from fp8debug.parity.hook import VERSION

_INFO = ".forward_batch_info."


def convert_sglang(folder: str | Path, out: str | Path) -> int:
    """Write one safetensors file per pass and tensor; return how many.

    Args:
        folder: of SGLang's files, of one rank.
        out: folder of the dump, empty or not there.

    Raises:
        RunError: there is no such file, or one cannot be read.
        UsageError: ``out`` holds files.
    """
    from safetensors.torch import save_file

    passes = sorted(Path(folder).glob("**/Pass*.pt"))
    if not passes:
        raise RunError(f"{folder} holds no Pass*.pt")
    if len({path.parent for path in passes}) > 1:
        raise RunError(f"{folder} holds the dumps of several ranks; give the folder of one, such as {passes[0].parent}")
    target = Path(out)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise UsageError(f"{out} holds files already; give an empty folder")
    number = 0
    for place, path in enumerate(passes):
        for name, kind, tensors in _files(_read(path)):
            metadata = {"format": "fp8debug-parity", "version": str(VERSION), "module": name, "kind": kind, "pass": str(place)}
            save_file(
                {key: x.clone().contiguous() for key, x in tensors.items()},
                target / f"pass{place:05d}-call{number:06d}.safetensors",
                metadata,
            )
            number += 1
    return number


def _read(path: Path) -> dict[str, Any]:
    """Return what a pass's file holds.

    Raises:
        RunError: it cannot be read, or holds no dictionary.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(f"{path} cannot be read: {(str(error).splitlines() or [''])[0]}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} holds a {type(found).__name__}, and a dictionary of tensors was expected")
    return found


def _files(found: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """Yield the module, the kind and the tensors of each file of a pass: its tokens, then each module's output."""
    batch = {key.partition(_INFO)[2]: x for key, x in found.items() if _INFO in str(key) and isinstance(x, Tensor)}
    if "input_ids" in batch:
        names = {"tokens": "input_ids", "positions": "positions"}
        yield "", "tokens", {name: batch[own].long() for name, own in names.items() if own in batch}
    for key, value in found.items():
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1 and _INFO not in str(key):
            yield str(key), "", {f"{key}.output": first.reshape(-1, first.shape[-1])}


def main(argv: list[str] | None = None) -> int:
    """Run the command; a mistake is one line."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 2:
        print("usage: python -m fp8debug.parity.sglang FOLDER OUT", file=sys.stderr)
        return 2
    try:
        number = convert_sglang(*words)
    except Fp8DebugError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, RunError) else 2
    print(f"Wrote {number} files to {words[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

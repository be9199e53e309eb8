"""Any cast on a dump: every statistic of the operand as it was recorded, and of the same numbers under other casts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels.reference import FORMAT_OF, all_values, measure, operand_pair, statistics
from fp8debug.metrics import Source
from fp8debug.recipes import Cast, get_recipe, list_recipes
from fp8debug.store.dump_files import Dump, open_dump
from fp8debug.types import Gemm, Quantized, TensorRole

_DTYPES = {
    **{FORMATS[name].safetensors_dtype: dtype for dtype, name in FORMAT_OF.items()},
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def replay(path: str | Path | Dump, casts: Sequence[str | Cast] | str | Cast = ()) -> dict[str, dict[str, object]]:
    """Return every slot and derived value of a dump under several casts, by the cast's name.

    Args:
        path: a file, or its header.
        casts: names or values, or one; the name of a recipe stands for its cast of that operand. A delayed cast that did not run
            has no history here and takes the tensor's own amax.

    Returns:
        the cast that ran first, from the dump's own FP8 data and scales; then the others in their order.

    Raises:
        RunError: the file is no dump.
        UsageError: no such cast.
    """
    if not isinstance(path, str | Path | Dump):
        raise UsageError(f"expected a dump's file, got {path!r}")
    dump = path if isinstance(path, Dump) else open_dump(path)
    casts = [casts] if isinstance(casts, str | Cast) else casts
    x = tensor_of(dump, "reference")
    found: dict[str, dict[str, object]] = {}
    if dump.cast_name:
        cast = Cast.parse(dump.cast_name)
        q = Quantized(tensor_of(dump, "data"), tensor_of(dump, "scale_inv"))
        rows, columns = block_shape(cast.granularity, *dump.shape)
        grid = -(-dump.shape[0] // rows), -(-dump.shape[1] // columns)
        if q.data.shape != dump.shape or q.scale_inv.shape != grid:
            raise UsageError(f"{dump.path}: data {list(q.data.shape)} and scale_inv {list(q.scale_inv.shape)} do not fit {cast}")
        found[dump.cast_name] = all_values(statistics(operand_pair(Source(x), cast, q)))
    for other in (cast_for(dump, asked) for asked in casts):
        if other is not None and str(other) not in found:
            found[str(other)] = measure(x, other)
    return found


def cast_for(dump: Dump, asked: str | Cast) -> Cast | None:
    """Return the cast that a name stands for at a dump's site; None where a recipe leaves that operand in BF16.

    Raises:
        UsageError: it is the name of neither a cast nor a recipe.
    """
    if isinstance(asked, Cast):
        return asked
    if not isinstance(asked, str):
        raise UsageError(f"expected a Cast, its name or a recipe's, got {asked!r}")
    if " " not in asked.strip():
        return get_recipe(asked.strip()).casts[Gemm(dump.gemm), TensorRole(dump.tensor)]
    words = asked.split()
    try:
        return Cast.parse(" ".join(words if len(words) > 2 else [*words, "current"]))
    except UsageError as error:
        raise UsageError(f"{error}; give one such as 'e4m3fn 1x128 current', or a recipe: {', '.join(list_recipes())}") from None


def tensor_of(dump: Dump, name: str) -> Tensor:
    """Return ``reference``, ``data`` or ``scale_inv`` of a dump as it was, dtype included.

    Raises:
        RunError: the file has no such tensor, or one of a type that torch has not.
    """
    raw = torch.from_numpy(dump.raw(name))
    stored = dump.stored[name]
    if stored.dtype not in _DTYPES:
        raise UsageError(f"{dump.path}: {name} is {stored.dtype}, expected one of {', '.join(_DTYPES)}")
    return raw.view(_DTYPES[stored.dtype]).reshape(stored.shape)

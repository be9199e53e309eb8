"""The adapter of any Linear whose FP8 GEMMs are torch's own: ``aten._scaled_mm`` and ``_scaled_mm_v2``, every overload.

It takes subclasses of nn.Linear, and modules named like one with a 2-D weight of their own. Whether one runs in FP8 is known
when its first GEMM was observed; of one that runs in high precision, in a model without FP8, what FP8 would do to the GEMM
that ran is recorded, whatever its forward does to input and weight before.

The op shows data and decode factors, not how these were found: the cast is called ``current``, and scales that lag behind show in
its headroom and ``scale_log2_ratio``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fp8debug.adapters.base import ADAPTERS, class_of, num_dims
from fp8debug.adapters.interception.intercepting_probe import InterceptingProbe
from fp8debug.adapters.interception.listener import DECODERS, SCALED, GemmOperand, SeenGemm
from fp8debug.adapters.interception.scale_layouts import side_of_blocks
from fp8debug.adapters.plain import WhatIfProbe
from fp8debug.formats import GRANULARITIES, block_shape
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.observer.observer import Observer
from fp8debug.recipes import Cast, Recipe
from fp8debug.types import OPERAND_SITES, Gemm, TensorRole

#: ``_scaled_mm_v2`` names its scalings by number (torch.nn.functional.ScalingType).
_TENSORWISE, _ROWWISE, _BLOCKS_OF_16, _BLOCKS_OF_32, _TILES, _BLOCKS = range(6)
#: A scaling of blocks, and that of blocks under a scale of the whole tensor.
_IN_BLOCKS = ([_BLOCKS_OF_16], [_BLOCKS_OF_32], [_BLOCKS_OF_16, _TENSORWISE])
_PLAIN = (Tensor, nn.Parameter)
#: Scale grids that ``_scaled_mm`` tells apart by shape alone.
_BY_SHAPE = ("tensorwise", "rowwise", "columnwise", "1x128", "128x1", "128x128")


def side_of(data: Tensor, scale_inv: Tensor, among: Sequence[str] = _BY_SHAPE) -> GemmOperand:
    """Return an operand whose scaling is read off the shape of its decode factors.

    Where a block spans the whole dimension, as a tile over at most 128 tokens does, the first of ``among`` that fits names it.

    Raises:
        ValueError: no scaling that we know has decode factors of that shape or type.
    """
    if data.dtype not in FORMAT_OF:
        raise ValueError(f"its data are in {data.dtype}")
    if scale_inv.numel() == 1:
        scale_inv = scale_inv.reshape(1, 1)
    if scale_inv.dtype is torch.float32 and scale_inv.dim() == 2:
        for granularity in among:
            rows, columns = block_shape(granularity, *data.shape)
            if scale_inv.shape == (-(-data.shape[0] // rows), -(-data.shape[1] // columns)):
                return GemmOperand(data, scale_inv.clone(), granularity)  # a program may use its memory for the next one
    shape = f"{str(scale_inv.dtype).removeprefix('torch.')}{list(scale_inv.shape)}"
    raise ValueError(f"scales {shape} of data {list(data.shape)} are of no known layout")


def _scaled_mm(args: Mapping[str, Any], result: Any) -> SeenGemm:
    if args.get("scale_result") is not None or result.element_size() == 1:
        raise ValueError("its result is in FP8")
    data, scales = (args["self"], args["mat2"]), (args["scale_a"], args["scale_b"])
    if all(scale.element_size() == 1 for scale in scales):  # blocks, whose scales cuBLAS reads in tiles, and hipBLASLt does not
        first, second = (
            side_of_blocks(values, scale, is_swizzled=torch.version.hip is None)
            for values, scale in zip((data[0], data[1].t()), scales, strict=True)
        )
        return SeenGemm("_scaled_mm", first, second.t(), result, args.get("bias"))
    return SeenGemm("_scaled_mm", side_of(data[0], scales[0]), side_of(data[1], scales[1]), result, args.get("bias"))


def _scaled_mm_v2(args: Mapping[str, Any], result: Any) -> SeenGemm:
    sides = []
    for name, end in (("self", "a"), ("mat2", "b")):
        scales, kinds, swizzles = args[f"scale_{end}"], list(args[f"recipe_{end}"]), list(args[f"swizzle_{end}"])
        data = args[name] if end == "a" else args[name].t()  # [M or N, K] with the scales of its rows
        if args.get("contraction_dim") or any(swizzles[1:]):
            raise ValueError(f"scaling types {kinds} of _scaled_mm_v2, swizzled {swizzles}, are not read")
        if kinds in _IN_BLOCKS:
            side = side_of_blocks(data, *scales, is_swizzled=any(swizzles))
            if side.granularity != ("1x32" if kinds[0] == _BLOCKS_OF_32 else "1x16"):
                raise ValueError(f"scaling type {kinds[0]} of _scaled_mm_v2 with scales in {scales[0].dtype} is not read")
        elif len(kinds) == 1 and not any(swizzles):
            side = _side_of_kind(data, scales[0], kinds[0])
        else:
            raise ValueError(f"scaling types {kinds} of _scaled_mm_v2, swizzled {swizzles}, are not read")
        sides.append(side if end == "a" else side.t())
    return SeenGemm("_scaled_mm_v2", sides[0], sides[1], result, args.get("bias"))


def _side_of_kind(data: Tensor, scale_inv: Tensor, kind: int) -> GemmOperand:
    """Return an operand ``[rows, K]``; 128x128 blocks have their scales transposed, and K's padded to a multiple of 4."""
    if kind == _TENSORWISE:
        return side_of(data, scale_inv, ("tensorwise",))
    if kind == _ROWWISE:
        return side_of(data, scale_inv.reshape(-1, 1), ("rowwise",))
    if kind == _TILES:
        return side_of(data, scale_inv, ("1x128",))
    if kind == _BLOCKS:
        return side_of(data, scale_inv[: -(-data.shape[1] // 128)].t(), ("128x128",))
    raise ValueError(f"scaling type {kind} of _scaled_mm_v2 is not read")


def _mm(args: Mapping[str, Any], result: Any) -> SeenGemm | None:
    """Read a GEMM in high precision, one of three that a recipe leaves there, or one of another library's tensors."""
    first, second = args["self"], args["mat2"]
    for read in SUBCLASSES:
        if (gemm := read(first, second, result)) is not None:
            return gemm
    return _high_precision("mm", first, second, result)


def _addmm(args: Mapping[str, Any], result: Any) -> SeenGemm | None:
    """Read a GEMM in high precision that adds a bias ``[s]`` to each row; None where it scales or adds something else."""
    bias = args["self"]
    if args.get("beta", 1) != 1 or args.get("alpha", 1) != 1 or bias.dim() != 1:
        return None
    return _high_precision("addmm", args["mat1"], args["mat2"], result, bias)


def _high_precision(name: str, first: Any, second: Any, result: Any, bias: Tensor | None = None) -> SeenGemm | None:
    if type(first) not in _PLAIN or type(second) not in _PLAIN or not first.is_floating_point():
        return None
    return SeenGemm(name, GemmOperand(first), GemmOperand(second), result, bias)


#: Read ``aten.mm`` of tensors of another library; None where they are none.
SUBCLASSES: list[Callable[[Any, Any, Tensor], SeenGemm | None]] = []

DECODERS[torch.ops.aten._scaled_mm] = _scaled_mm
DECODERS[torch.ops.aten.mm] = _mm
DECODERS[torch.ops.aten.addmm] = _addmm
SCALED.add(torch.ops.aten._scaled_mm)
if hasattr(torch.ops.aten, "_scaled_mm_v2"):
    DECODERS[torch.ops.aten._scaled_mm_v2] = _scaled_mm_v2
for _name in ("_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
    if hasattr(torch.ops.aten, _name):
        SCALED.add(getattr(torch.ops.aten, _name))


#: Casts of modules as they were observed.
_CASTS: WeakKeyDictionary[nn.Module, dict[tuple[Gemm, TensorRole], Cast | None]] = WeakKeyDictionary()


class ScaledMm:
    """Linears of unknown make."""

    name = "scaled_mm"
    kind = ""  # the class's name
    fp8 = True
    is_intercepted = True

    def matches(self, module: nn.Module) -> bool:
        """Return whether it is a subclass of nn.Linear or like one, and no other adapter knows better."""
        name, weight = class_of(module).__name__, module._parameters.get("weight")
        if name == "NonDynamicallyQuantizableLinear":
            return False
        is_like_one = name.endswith("Linear") and num_dims(weight) == 2
        if not isinstance(module, nn.Linear) and not is_like_one:
            return False
        return not any(other.matches(module) for other in ADAPTERS if other is not self)

    def recipe(self, module: nn.Module) -> Recipe | None:
        """Return the casts that were observed; None before the first, and without any."""
        casts = _CASTS.get(module)
        return Recipe("scaled_mm", dict(casts)) if casts else None

    def attach(self, module: nn.Module, name: str, observer: Observer) -> Callable[[], None]:
        """Listen to the module."""

        def cast_of(which: Gemm, role: TensorRole, seen: Cast) -> Cast:
            assert seen.granularity in GRANULARITIES
            _CASTS.setdefault(module, dict.fromkeys(OPERAND_SITES))[which, role] = seen
            return seen

        return InterceptingProbe(observer, name, cast_of, trial=WhatIfProbe(observer, name, actual=False)).install(module)


ADAPTERS.add(ScaledMm.name, ScaledMm())

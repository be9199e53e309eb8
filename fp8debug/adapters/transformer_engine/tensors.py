"""Quantized tensors of Transformer Engine as operands of ours: codes and decode factors in the orientation of the site.

A storage holds a tensor twice, each for the GEMMs that contract one of its dimensions: row-wise (blocks along the last dimension)
and column-wise (blocks along the first). What lies how, of a tensor ``[M, K]`` (version 2.20):

| storage | row-wise data, scale_inv | column-wise data, scale_inv |
| --- | --- | --- |
| Float8Tensor | ``[M, K]``, ``[1]`` | transposed ``[K, M]``, the same ``[1]``; or none, and the row-wise is read |
| Float8BlockwiseQTensor 1x128 | ``[M, K]``, transposed ``[K/128, M]`` | transposed ``[K, M]``, ``[M/128, K]`` |
| Float8BlockwiseQTensor 128x128 | ``[M, K]``, ``[M/128, K/128]`` | transposed ``[K, M]``, transposed ``[K/128, M/128]`` |
| MXFP8Tensor | ``[M, K]``, E8M0 ``[M, K/32]`` | ``[M, K]``, E8M0 ``[M/32, K]`` |
| NVFP4Tensor 1x16 | ``[M, K/2]``, E4M3 ``[M, K/16]``, the tensor's amax | transposed ``[K, M/2]``, ``[K, M/16]``, an amax |
| NVFP4Tensor 16x16 | the same, each scale repeated for 16 rows | the same |

NVFP4's column-wise data are those of the transformed tensor where the quantizer has a Hadamard transform. ``NVFP4TensorRef``, the
plain-torch reference that trains without the units, has the same layout under other names; ``CurrentScalingTensorRef``, that of
current scaling, the layout of a Float8Tensor. An ``IdentityTensor`` is the tensor that it holds. Dimensions of scale_inv are
rounded up and padded, the last of blockwise ones to 4; MXFP8's to 128 along the data and 4 along the blocks, NVFP4's to 128 and
4; both may be swizzled into the 128x4 tiles that cuBLAS reads. Nothing is copied but scales and FP4 codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8debug.adapters.base import same_cast
from fp8debug.adapters.interception.listener import GemmOperand
from fp8debug.adapters.interception.scale_layouts import power_of_two, unpacked, unswizzled
from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.recipes import HADAMARD, HADAMARD_SIGNS, Cast

_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
_BLOCK, _MX_BLOCK, _NV_BLOCK = (block_shape(name, 1, 1)[1] for name in ("1x128", "1x32", "1x16"))
_NVFP4 = {"NVFP4TensorStorage", "NVFP4TensorRef"}
_KNOWN_DTYPES: dict[object, torch.dtype] = {}  # by the library's own
_NAMES: dict[type, frozenset[str]] = {}


def names_of(what: object) -> frozenset[str]:
    """Return the names of an object's class and its bases, by which the library's are told apart without importing it."""
    kind = type(what)
    if kind not in _NAMES:
        _NAMES[kind] = frozenset(c.__name__ for c in kind.__mro__)
    return _NAMES[kind]


def unwrapped(tensor: Any, columnwise: bool) -> Any:
    """Return what a GEMM really reads of an operand: one direction of a hybrid tensor or of a debug tool's wrapper."""
    names = names_of(tensor)
    if "DebugQuantizedTensor" in names:
        return unwrapped(tensor.get_tensor(columnwise), columnwise)
    if is_hybrid(tensor):
        return unwrapped(tensor.columnwise_sub_storage if columnwise else tensor.rowwise_sub_storage, columnwise)
    if "IdentityTensorStorage" in names:
        return tensor._hp_data
    return tensor


def is_of_debug_tools(tensor: Any) -> bool:
    """Return whether the library's debug tools are on, and have wrapped an operand."""
    return "DebugQuantizedTensor" in names_of(tensor)


def is_hybrid(tensor: Any) -> bool:
    """Return whether an operand holds its two directions in formats of their own."""
    return "HybridQuantizedTensorStorage" in names_of(tensor)


def is_quantized(tensor: Any) -> bool:
    """Return whether it is a tensor in any of the library's narrow formats; a plain tensor or nothing is not."""
    return "QuantizedTensorStorage" in names_of(tensor)


def side_of_storage(tensor: Any, columnwise: bool) -> GemmOperand | None:
    """Return one direction of an operand as ``[M, K]``; a plain tensor as it is, None where that direction is not there.

    Raises:
        ValueError: the storage is of a kind that is not read.
    """
    tensor = unwrapped(tensor, columnwise)
    names = names_of(tensor)
    if "QuantizedTensorStorage" not in names:
        return None if tensor is None else GemmOperand(tensor.detach().reshape(-1, tensor.shape[-1]))
    if "Float8BlockwiseQTensorStorage" in names:
        return _blockwise(tensor, columnwise)
    if "Float8TensorStorage" in names:
        return _tensorwise(tensor, columnwise)
    if "MXFP8TensorStorage" in names:
        return _mxfp8(tensor, columnwise)
    if names & _NVFP4:
        return _nvfp4(tensor, columnwise)
    if "CurrentScalingTensorRef" in names:
        return _current_reference(tensor, columnwise)
    raise ValueError(f"{type(tensor).__name__} is not read")


def cast_of_storage(tensor: Any, columnwise: bool, granularity: str, recipe: Any) -> Cast:
    """Return the cast that made one direction of a storage, from its quantizer; a delayed one's history from the recipe in force.

    Raises:
        ValueError: its format is not read.
    """
    tensor = unwrapped(tensor, columnwise)
    quantizer = getattr(tensor, "_quantizer", None)
    number_format = FORMAT_OF[_dtype(tensor)]
    is_delayed = "Float8Quantizer" in names_of(quantizer) or (quantizer is None and hasattr(recipe, "amax_history_len"))
    if granularity == "tensorwise" and is_delayed:
        algo = getattr(recipe, "amax_compute_algo", "max")
        if algo not in ("max", "most_recent"):
            raise ValueError("an amax_compute_algo of the user's has no name as a cast")
        history, margin = getattr(recipe, "amax_history_len", 1024), getattr(recipe, "margin", 0)
        return same_cast(
            format=number_format, scaling="delayed", granularity="tensorwise", history=history, algo=algo, margin=margin
        )
    is_reference = "CurrentScalingQuantizerRef" in names_of(quantizer)
    pow2_name, eps_name = ("pow_2_scales", "eps") if is_reference else ("force_pow_2_scales", "amax_epsilon")
    pow2 = bool(getattr(quantizer, pow2_name, False)) or granularity in ("1x32", "32x1")
    return same_cast(
        format=number_format,
        granularity=granularity,
        scale_rounding="pow2_ceil" if pow2 else "none",
        amax_eps=float(getattr(quantizer, eps_name, 0.0) or 0.0),
    )


def _dtype(tensor: Any) -> torch.dtype:
    """Return the dtype of a storage's codes.

    Raises:
        ValueError: it has no name here.
    """
    if "CurrentScalingTensorRef" in names_of(tensor):
        dtype: torch.dtype = tensor.quant_dtype
        return dtype
    found = _KNOWN_DTYPES.get(tensor._fp8_dtype)
    if found is None:
        name = str(getattr(tensor._fp8_dtype, "name", tensor._fp8_dtype))
        if name not in _DTYPES:
            raise ValueError(f"data in {name} are not read")
        found = _KNOWN_DTYPES[tensor._fp8_dtype] = _DTYPES[name]
    return found


def _codes(data: Tensor, dtype: torch.dtype, *, is_transposed: bool = False) -> Tensor:
    """Return bytes as FP8 ``[M, K]``, another tensor on the same memory: the library empties its own when it is done."""
    data = data.view(dtype)
    if data.dim() != 2:
        data = data.reshape(data.shape[0], -1) if is_transposed else data.reshape(-1, data.shape[-1])
    return data.t() if is_transposed else data


def _scales(scale_inv: Tensor, rows: int, columns: int, *, is_transposed: bool = False) -> Tensor:
    """Return scales ``[rows, columns]`` of what is perhaps transposed, without their padding; another tensor, too."""
    found = scale_inv.t() if is_transposed else scale_inv
    if found.shape != (rows, columns):
        return found[:rows, :columns]
    return found if is_transposed else found.detach()


def _tensorwise(tensor: Any, columnwise: bool) -> GemmOperand | None:
    transpose = None if tensor._transpose_invalid else tensor._transpose
    data = transpose if columnwise and transpose is not None else tensor._data
    if data is None:
        data = transpose
    if data is None:
        return None
    codes = _codes(data, _dtype(tensor), is_transposed=data is transpose)
    return GemmOperand(codes, tensor._scale_inv.view(1, 1), "tensorwise")


def _current_reference(tensor: Any, columnwise: bool) -> GemmOperand | None:
    is_transposed = tensor.data is None or (columnwise and tensor.data_t is not None)
    data, scale = (tensor.data_t, tensor.scale_t) if is_transposed else (tensor.data, tensor.scale)
    if data is None or scale is None:
        return None
    return GemmOperand(_codes(data, _dtype(tensor), is_transposed=is_transposed), scale.detach().view(1, 1), "tensorwise")


def _blockwise(tensor: Any, columnwise: bool) -> GemmOperand | None:
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    scale_inv = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    if data is None or scale_inv is None:
        return None
    codes = _codes(data, _dtype(tensor), is_transposed=columnwise)
    rows, columns = codes.shape
    down, across = -(-rows // _BLOCK), -(-columns // _BLOCK)
    if tensor._is_2D_scaled:
        return GemmOperand(codes, _scales(scale_inv, down, across, is_transposed=columnwise), "128x128")
    if columnwise:
        return GemmOperand(codes, _scales(scale_inv, down, columns), "128x1")
    return GemmOperand(codes, _scales(scale_inv, rows, across, is_transposed=True), "1x128")


def _mxfp8(tensor: Any, columnwise: bool) -> GemmOperand | None:
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    scale_inv = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    if data is None or scale_inv is None:
        return None
    codes = _codes(data, _dtype(tensor))
    rows, columns = codes.shape
    scale_inv = scale_inv.detach().view(torch.uint8)
    grid = (-(-rows // _MX_BLOCK), columns) if columnwise else (rows, -(-columns // _MX_BLOCK))
    if tensor._with_gemm_swizzled_scales:
        scale_inv = unswizzled(scale_inv, *grid[::-1]).t() if columnwise else unswizzled(scale_inv, *grid)
    return GemmOperand(codes, power_of_two(scale_inv[: grid[0], : grid[1]]), "32x1" if columnwise else "1x32")


def _nvfp4(tensor: Any, columnwise: bool) -> GemmOperand | None:
    if "NVFP4TensorRef" in names_of(tensor):
        data, scale_inv = (tensor.data_t, tensor.scale_t) if columnwise else (tensor.data, tensor.scale)
        amax = tensor.global_amax_col if columnwise else tensor.global_amax_row
        four_over_six, bound, is_swizzled = tensor.nvfp4_use_4over6, tensor.nvfp4_e4m3_max, False
    else:
        data, scale_inv, amax = (
            getattr(tensor, f"_{name}")
            for name in (
                ("columnwise_data", "columnwise_scale_inv", "amax_columnwise")
                if columnwise
                else ("rowwise_data", "rowwise_scale_inv", "amax_rowwise")
            )
        )
        four_over_six, bound = tensor._nvfp4_use_4over6, tensor._nvfp4_e4m3_max
        is_swizzled = tensor._with_gemm_swizzled_scales
    if data is None or scale_inv is None or amax is None:
        return None
    cast = _nvfp4_cast(tensor._quantizer, columnwise, four_over_six=four_over_six, is_row_scaled=amax.numel() > 1)
    codes = unpacked(data.detach().reshape(data.shape[0], -1) if columnwise else data.detach().reshape(-1, data.shape[-1]))
    rows, blocks = codes.shape[0], -(-codes.shape[1] // _NV_BLOCK)
    scales = scale_inv.detach().view(torch.uint8)
    scales = unswizzled(scales, rows, blocks) if is_swizzled else scales[:rows, :blocks]
    if cast.granularity == "16x16" and len(scales) == rows:
        scales = scales[::_NV_BLOCK]
    # In FP32, as the library's dequantization does: the amax over what the largest code under the largest scale stands for.
    top = amax.detach().float().reshape(-1, 1)[:rows] / (FORMATS["e2m1fn"].max * bound)
    found = GemmOperand(codes, scales.contiguous().view(torch.float8_e4m3fn).float() * top, cast.granularity, cast=cast)
    return found.t() if columnwise else found


def _nvfp4_cast(quantizer: Any, columnwise: bool, *, four_over_six: bool, is_row_scaled: bool) -> Cast:
    """Return the cast along the rows of data in NVFP4, which are columns of the tensor where it is read column-wise.

    Raises:
        ValueError: the scales are powers of two.
    """
    if getattr(quantizer, "pow_2_scales", False):
        raise ValueError("FP4 with power-of-two scales is not read")
    is_2d = bool(getattr(quantizer, "with_2d_quantization", False)) or getattr(quantizer, "quant_tile_shape", None) == (16, 16)
    has_transform = columnwise and bool(getattr(quantizer, "with_rht", False))
    has_signs = bool(getattr(quantizer, "rht_matrix_random_sign_mask_t", getattr(quantizer, "with_random_sign_mask", True)))
    return same_cast(
        format="e2m1fn",
        granularity="16x16" if is_2d else "1x16",
        scale_format="e4m3fn",
        tensor_scale="row" if is_row_scaled else "tensor",
        rounding="stochastic" if getattr(quantizer, "stochastic_rounding", False) else "nearest",
        hadamard=HADAMARD if has_transform else 0,
        hadamard_signs=0 if has_transform and not has_signs else HADAMARD_SIGNS,
        four_over_six=four_over_six,
    )

"""Quantized tensors laid out as Transformer Engine lays them out (2.20), made and read by the layout's definition."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from fp8debug.formats import FORMATS
from fp8debug.kernels.reference import hadamard, quantize
from fp8debug.recipes import Cast
from tests.adapters.blocks import packed


class DType(IntEnum):
    kFloat8E4M3 = 7  # noqa: N815  # the library's name
    kFloat8E5M2 = 8  # noqa: N815  # the same


NAMES = {DType.kFloat8E4M3: "e4m3fn", DType.kFloat8E5M2: "e5m2"}


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return x with dimensions rounded up, filled with what must not be read."""
    shape = -(-x.shape[0] // rows) * rows, -(-x.shape[1] // columns) * columns
    out = torch.full(shape, 77, dtype=x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


class QuantizedTensorStorage:
    _quantizer: Any
    _fp8_dtype: DType

    def values(self, columnwise: bool) -> Tensor:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        raise NotImplementedError


class Float8TensorStorage(QuantizedTensorStorage):
    def __init__(self, data: Tensor | None, scale_inv: Tensor, dtype: DType, quantizer: Any, transpose: Tensor | None) -> None:
        self._data, self._scale_inv, self._fp8_dtype, self._quantizer = data, scale_inv, dtype, quantizer
        self._transpose, self._transpose_invalid = transpose, transpose is None

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if columnwise_usage and self._transpose is None:
            assert self._data is not None
            self._transpose, self._transpose_invalid = self._data.t().contiguous(), False
        if rowwise_usage is False:
            self._data = None

    def clear(self) -> None:
        for t in (self._data, self._transpose):
            if t is not None:
                t.data = torch.empty(0, dtype=torch.uint8)

    def values(self, columnwise: bool) -> Tensor:
        dtype = getattr(torch, f"float8_{NAMES[self._fp8_dtype]}")
        data = self._transpose.t() if columnwise and self._transpose is not None else self._data
        assert data is not None
        return data.view(dtype).float() * self._scale_inv


class Blocks(QuantizedTensorStorage):
    """What the storages of blocks have in common."""

    _rowwise_data: Any
    _rowwise_scale_inv: Any
    _columnwise_data: Any
    _columnwise_scale_inv: Any

    def __init__(self, row: Any, column: Any, dtype: DType, quantizer: Any) -> None:
        self._rowwise_data, self._rowwise_scale_inv = row or (None, None)
        self._columnwise_data, self._columnwise_scale_inv = column or (None, None)
        self._fp8_dtype, self._quantizer = dtype, quantizer

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        assert not columnwise_usage or self._columnwise_data is not None
        if rowwise_usage is False:
            self._rowwise_data = self._rowwise_scale_inv = None
        if columnwise_usage is False:
            self._columnwise_data = self._columnwise_scale_inv = None

    def clear(self) -> None:
        for t in (self._rowwise_data, self._columnwise_data, self._rowwise_scale_inv, self._columnwise_scale_inv):
            if t is not None:
                t.data = torch.empty(0, dtype=t.dtype)

    def codes(self, data: Tensor) -> Tensor:
        return data.view(getattr(torch, f"float8_{NAMES[self._fp8_dtype]}")).float()


class Float8BlockwiseQTensorStorage(Blocks):
    _is_2D_scaled = False  # noqa: N815  # the library's name

    def values(self, columnwise: bool) -> Tensor:
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        out: Tensor = self.codes(data)
        i, j = torch.arange(out.shape[0])[:, None], torch.arange(out.shape[1])[None]
        out = out * (scale[i // 128, j // 128] if self._is_2D_scaled else scale[j // 128, i])
        return out.t() if columnwise else out


class MXFP8TensorStorage(Blocks):
    _with_gemm_swizzled_scales = False

    def values(self, columnwise: bool) -> Tensor:
        codes: Tensor = self.codes(self._columnwise_data if columnwise else self._rowwise_data)
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        if self._with_gemm_swizzled_scales:
            scale = from_tiles(scale.t()).t() if columnwise else from_tiles(scale)
        factors: Tensor = 2.0 ** (scale.double() - 127)
        i, j = torch.arange(codes.shape[0])[:, None], torch.arange(codes.shape[1])[None]
        found: Tensor = codes * (factors[i // 32, j] if columnwise else factors[i, j // 32])
        return found.float()


def places(scales: Tensor) -> Tensor:
    """Where cuBLAS reads each scale of [rows, columns]: tiles of 128x4, one row of tiles after the other."""
    row, column = torch.arange(scales.shape[0])[:, None], torch.arange(scales.shape[1])[None]
    tile = (row // 128) * (scales.shape[1] // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


def to_tiles(scales: Tensor) -> Tensor:
    flat = torch.empty(scales.numel(), dtype=scales.dtype)
    flat[places(scales)] = scales
    return flat


def from_tiles(scales: Tensor) -> Tensor:
    return scales.as_strided((scales.numel(),), (1,))[places(scales)]


class Quantizer:
    def __init__(self, dtype: DType = DType.kFloat8E4M3, **options: Any) -> None:
        self.dtype, self.rowwise, self.columnwise = dtype, True, True
        self.__dict__.update(options)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise = self.rowwise if rowwise is None else rowwise
        self.columnwise = self.columnwise if columnwise is None else columnwise

    def cast(self, granularity: str, **more: Any) -> Cast:
        return Cast(format=NAMES[self.dtype], granularity=granularity, **more)


class Float8Quantizer(Quantizer):
    """Delayed scaling: it reads the live scale and writes the live amax."""

    scale: Tensor
    amax: Tensor

    def __call__(self, x: Tensor) -> Float8TensorStorage:
        self.amax.copy_(torch.maximum(self.amax, x.detach().abs().amax().float() if x.numel() else self.amax))
        scale_inv = self.scale.reciprocal().reshape(1)
        q = quantize(x, self.cast("tensorwise", scaling="delayed"), scale_inv.reshape(()))
        data = q.data.view(torch.uint8)
        return Float8TensorStorage(data, scale_inv, self.dtype, self, data.t().contiguous() if self.columnwise else None)


class Float8CurrentScalingQuantizer(Quantizer):
    force_pow_2_scales = False
    amax_epsilon = 0.0

    def __call__(self, x: Tensor) -> Float8TensorStorage:
        q = quantize(x, self.cast("tensorwise"))
        data = q.data.view(torch.uint8)
        transpose = data.t().contiguous() if self.columnwise else None
        return Float8TensorStorage(data, q.scale_inv.reshape(1), self.dtype, self, transpose)


class Float8BlockQuantizer(Quantizer):
    force_pow_2_scales = True
    amax_epsilon = 0.0
    block_scaling_dim = 1

    def __call__(self, x: Tensor) -> Float8BlockwiseQTensorStorage:
        two = self.block_scaling_dim == 2
        rounding: Any = "pow2_ceil" if self.force_pow_2_scales else "none"
        cast = self.cast("128x128" if two else "1x128", scale_rounding=rounding, amax_eps=self.amax_epsilon)

        def stored(x: Tensor) -> tuple[Tensor, Tensor]:
            if not x.numel():
                return x.to(torch.uint8), torch.ones(-(-x.shape[1] // 128), x.shape[0])
            q = quantize(x.contiguous(), cast)
            return q.data.view(torch.uint8), padded(q.scale_inv if two else q.scale_inv.t(), 1, 4)

        column = stored(x.t()) if self.columnwise else None
        found = Float8BlockwiseQTensorStorage(stored(x) if self.rowwise else None, column, self.dtype, self)
        found._is_2D_scaled = two
        return found


class MXFP8Quantizer(Quantizer):
    optimize_for_gemm = False

    def __call__(self, x: Tensor) -> MXFP8TensorStorage:
        def stored(granularity: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
            q = quantize(x.contiguous(), self.cast(granularity, scale_rounding="pow2_ceil"))
            scales = padded((q.scale_inv.double().log2() + 127).to(torch.uint8), rows, columns)
            if self.optimize_for_gemm:
                scales = to_tiles(scales.t()).view(scales.shape) if columns == 128 else to_tiles(scales).view(scales.shape)
            return q.data.view(torch.uint8), scales

        row = stored("1x32", 128, 4) if self.rowwise else None
        found = MXFP8TensorStorage(row, stored("32x1", 4, 128) if self.columnwise else None, self.dtype, self)
        found._with_gemm_swizzled_scales = self.optimize_for_gemm
        return found


def fp4_values(data: Tensor) -> Tensor:
    """Return what bytes of two FP4 codes stand for, the low half first."""
    table = torch.tensor([FORMATS["e2m1fn"].value(code) for code in range(16)])
    byte = data.long()
    return table[torch.stack((byte & 15, byte >> 4), -1).flatten(1)]


class NVFP4TensorStorage(Blocks):
    _with_gemm_swizzled_scales = False
    _nvfp4_use_4over6 = False
    _nvfp4_e4m3_max = 448
    _amax_rowwise: Any
    _amax_columnwise: Any

    def values(self, columnwise: bool) -> Tensor:
        """Return what the GEMM reads: column-wise the transformed tensor, whose transform the product undoes."""
        data = self._columnwise_data if columnwise else self._rowwise_data
        scale = self._columnwise_scale_inv if columnwise else self._rowwise_scale_inv
        amax = self._amax_columnwise if columnwise else self._amax_rowwise
        values = fp4_values(data)
        if self._with_gemm_swizzled_scales:
            scale = from_tiles(scale)
        factors = scale.view(torch.float8_e4m3fn).float() * (amax / (6 * 448))
        i, j = torch.arange(values.shape[0])[:, None], torch.arange(values.shape[1])[None]
        found: Tensor = values * factors[i, j // 16]
        return found.t() if columnwise else found


class NVFP4Quantizer(Quantizer):
    with_rht = False
    with_2d_quantization = False
    stochastic_rounding = False
    rht_matrix_random_sign_mask_t = 0xD7E8
    optimize_for_gemm = False

    def __call__(self, x: Tensor) -> NVFP4TensorStorage:
        two = self.with_2d_quantization
        how: Any = {"scale_format": "e4m3fn", "tensor_scale": "tensor"}
        how["rounding"] = "stochastic" if self.stochastic_rounding else "nearest"
        cast = Cast(format="e2m1fn", granularity="16x16" if two else "1x16", **how)

        def stored(x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            amax = x.float().abs().amax().reshape(1)
            q = quantize(x.contiguous(), cast)
            scales = (q.scale_inv / (amax / (6 * 448))).to(torch.float8_e4m3fn)
            scales = padded((scales.repeat_interleave(16, 0)[: len(x)] if two else scales).view(torch.uint8), 128, 4)
            return (
                packed(q.data).view(torch.uint8),
                to_tiles(scales).view(scales.shape) if self.optimize_for_gemm else scales,
            ), amax

        row, row_amax = stored(x) if self.rowwise else (None, None)
        turned = hadamard(x.float(), 0, self.rht_matrix_random_sign_mask_t) if self.with_rht else x
        column, column_amax = stored(turned.t()) if self.columnwise else (None, None)
        found = NVFP4TensorStorage(row, column, self.dtype, self)
        found._amax_rowwise, found._amax_columnwise = row_amax, column_amax
        found._with_gemm_swizzled_scales = self.optimize_for_gemm
        return found


class Reference(QuantizedTensorStorage):
    """What the storages of the plain-torch references have in common: two directions, the second transposed in memory."""

    _quantizer: Any

    def __init__(self, quantizer: Any, row: dict[str, Any], column: dict[str, Any], **facts: Any) -> None:
        self.__dict__.update(row, **column, **facts, _quantizer=quantizer)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        assert not columnwise_usage or self.__dict__["data_t"] is not None
        if rowwise_usage is False:
            self.data = None

    def clear(self) -> None:
        self.data = self.data_t = self.scale = self.scale_t = None


class CurrentScalingTensorRef(Reference):
    data: Any
    data_t: Any
    scale: Any
    quant_dtype: torch.dtype

    def values(self, columnwise: bool) -> Tensor:
        found: Tensor = (self.data_t if columnwise else self.data).float() * self.scale
        return found.t() if columnwise else found


class CurrentScalingQuantizerRef(Quantizer):
    pow_2_scales = False
    eps = 0.0

    def __call__(self, x: Tensor) -> CurrentScalingTensorRef:
        rounding: Any = "pow2_ceil" if self.pow_2_scales else "none"
        q = quantize(x.contiguous(), self.cast("tensorwise", scale_rounding=rounding, amax_eps=self.eps))
        scale = q.scale_inv.reshape(1)
        row, column = {"data": q.data, "scale": scale}, {"data_t": q.data.t().contiguous(), "scale_t": scale}
        return CurrentScalingTensorRef(self, row, column, quant_dtype=q.data.dtype)


class NVFP4TensorRef(Reference):
    data: Any
    data_t: Any
    scale: Any
    scale_t: Any
    global_amax_row: Any
    global_amax_col: Any

    def values(self, columnwise: bool) -> Tensor:
        """Return what the GEMM reads: column-wise the transformed tensor, whose transform the product undoes."""
        data, scale = (self.data_t, self.scale_t) if columnwise else (self.data, self.scale)
        amax = self.global_amax_col if columnwise else self.global_amax_row
        found: Tensor = fp4_values(data) * (scale.float() * (amax / (6 * 448))).repeat_interleave(16, 1)
        return found.t() if columnwise else found


class NVFP4QuantizerRef(Quantizer):
    quant_tile_shape = (1, 16)
    with_rht = False
    pow_2_scales = False

    def __call__(self, x: Tensor) -> NVFP4TensorRef:
        two = self.quant_tile_shape == (16, 16)
        cast = Cast(format="e2m1fn", granularity="16x16" if two else "1x16", scale_format="e4m3fn", tensor_scale="tensor")

        def stored(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            amax = x.float().abs().amax().reshape(1)
            q = quantize(x.contiguous(), cast)
            scales = (q.scale_inv / (amax / (6 * 448))).to(torch.float8_e4m3fn)
            scales = scales.view(torch.uint8).repeat_interleave(16 if two else 1, 0).view(torch.float8_e4m3fn)
            return packed(q.data).view(torch.uint8), scales, amax

        row = dict(zip(("data", "scale", "global_amax_row"), stored(x), strict=True))
        turned = hadamard(x.float(), 0, 0xD7E8) if self.with_rht else x
        column = dict(zip(("data_t", "scale_t", "global_amax_col"), stored(turned.t()), strict=True))
        return NVFP4TensorRef(self, row, column, nvfp4_use_4over6=False, nvfp4_e4m3_max=448)


class IdentityTensorStorage(QuantizedTensorStorage):
    """A tensor in high precision among quantized ones."""

    def __init__(self, x: Tensor, quantizer: Any) -> None:
        self._hp_data, self._quantizer = x, quantizer

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """One tensor serves both directions."""

    def clear(self) -> None:
        self._hp_data.data = torch.empty(0, dtype=self._hp_data.dtype)

    def values(self, columnwise: bool) -> Tensor:
        return self._hp_data.float()


class IdentityQuantizer(Quantizer):
    def __call__(self, x: Tensor) -> IdentityTensorStorage:
        return IdentityTensorStorage(x.detach().clone(), self)


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Its two directions in formats of their own."""

    rowwise_sub_storage: Any
    columnwise_sub_storage: Any

    def __init__(self, row: Any, column: Any, quantizer: Any) -> None:
        self.rowwise_sub_storage, self.columnwise_sub_storage, self._quantizer = row, column, quantizer

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if rowwise_usage is False:
            self.rowwise_sub_storage = None
        if columnwise_usage is False:
            self.columnwise_sub_storage = None

    def clear(self) -> None:
        for part in (self.rowwise_sub_storage, self.columnwise_sub_storage):
            if part is not None:
                part.clear()

    def values(self, columnwise: bool) -> Tensor:
        part = self.columnwise_sub_storage if columnwise else self.rowwise_sub_storage
        found: Tensor = part.values(columnwise)
        return found


class HybridQuantizer(Quantizer):
    rowwise_quantizer: Any
    columnwise_quantizer: Any

    def __call__(self, x: Tensor) -> HybridQuantizedTensorStorage:
        row, column = self.rowwise_quantizer, self.columnwise_quantizer
        row.set_usage(rowwise=True, columnwise=False)
        column.set_usage(rowwise=False, columnwise=True)
        return HybridQuantizedTensorStorage(row(x) if self.rowwise else None, column(x) if self.columnwise else None, self)

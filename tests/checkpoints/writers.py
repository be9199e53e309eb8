"""Sound checkpoints in every layout, as their producers write them, beside the BF16 original."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

Tensors = dict[str, Tensor]
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = [f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")]
ROWS, COLUMNS = 288, 320
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def original(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> Tensors:
    """Return the BF16 weights, whose rows differ in size, with a norm and an embedding."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name in NAMES:
        size = torch.exp2(torch.linspace(-3, 3, rows))[:, None] * torch.exp2(torch.linspace(-1, 2, columns))
        found[name] = (torch.randn(rows, columns, generator=generator) * size * 0.02).bfloat16()
    found["model.embed_tokens.weight"] = torch.randn(64, columns, generator=generator).bfloat16()
    found["model.norm.weight"] = 1 + 0.1 * torch.randn(columns, generator=generator).bfloat16()
    return found


def quantized(weights: Tensors) -> list[str]:
    """Return the names of the weights that get quantized."""
    return [name for name in weights if "layers" in name]


def spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Return scales at the size of the weight."""
    rows, columns = shape
    return scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def amaxes(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block."""
    rows, columns = x.shape
    padded = pad(x.float(), (0, -columns % block[1], 0, -rows % block[0]))
    return padded.reshape(-1, block[0], padded.shape[1] // block[1], block[1]).abs().amax((1, 3))


def ceil_pow2(scales: Tensor) -> Tensor:
    """Return powers of two that are not smaller."""
    return torch.exp2(torch.ceil(torch.log2(scales)))


def cast(x: Tensor, block: tuple[int, int] = (128, 128), fmt: torch.dtype = E4, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes and FP32 scale_inv of a block cast."""
    largest = torch.finfo(fmt).max
    scales = amaxes(x, block) / largest
    scales = ceil_pow2(scales) if pow2 else scales
    return (x.float() / spread(scales, x.shape, block)).clamp(-largest, largest).to(fmt), scales


def e2m1(x: Tensor) -> Tensor:
    """Return packed E2M1 codes of values within 6, the low nibble first."""
    code = (x.abs()[..., None] - _E2M1).abs().argmin(-1).to(torch.uint8) + 8 * (x < 0).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4


def nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, E4M3 scales per 1x16 and the encode scale of the tensor."""
    encode = 448 * 6 / x.float().abs().max()
    scales = (amaxes(x, (1, 16)) / 6 * encode).clamp(max=448).to(E4)
    wide = spread(scales, x.shape, (1, 16)) / encode
    return e2m1((x.float() / wide.clamp(min=1e-30)).clamp(-6, 6)), scales, encode.reshape(1)


def e8m0_bytes(scales: Tensor) -> Tensor:
    """Return powers of two as biased exponents."""
    return (torch.log2(scales).round() + 127).to(torch.uint8)


def padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return scales padded to multiples."""
    return pad(scales, (0, -scales.shape[1] % columns, 0, -scales.shape[0] % rows))


def _deepseek(pow2: bool = False, e8m0: bool = False) -> Callable[[Tensors], Tensors]:
    def write(weights: Tensors) -> Tensors:
        found = dict(weights)
        for name in quantized(weights):
            found[name], scales = cast(weights[name], pow2=pow2 or e8m0)
            found[f"{name}_scale_inv"] = scales.to(torch.float8_e8m0fnu) if e8m0 else scales
        return found

    return write


def _native(weights: Tensors) -> Tensors:
    found = dict(weights)
    for name in quantized(weights):
        found[name], found[name.removesuffix("weight") + "scale"] = cast(weights[name])
    return found


def _scaled(block: tuple[int, int], dtype: torch.dtype = torch.float32, *, scalar: bool = False) -> Callable[[Tensors], Tensors]:
    def write(weights: Tensors) -> Tensors:
        found = dict(weights)
        for name in quantized(weights):
            codes, scales = cast(weights[name], block)
            rounded = scales.to(dtype)  # compressed-tensors rounds the scale first
            found[name] = (weights[name].float() / spread(rounded, codes.shape, block)).clamp(-448, 448).to(E4)
            found[f"{name}_scale"] = rounded.reshape(()) if scalar else rounded
            found[name.removesuffix("weight") + "input_scale"] = torch.tensor([0.02])
        return found

    return write


def _experts(weights: Tensors) -> Tensors:
    found = dict(weights)
    codes, scales = zip(*(cast(found.pop(name)) for name in quantized(weights)), strict=True)
    found["model.layers.0.mlp.experts.down_proj"] = torch.stack(codes)
    found["model.layers.0.mlp.experts.down_proj_scale_inv"] = torch.stack(scales)
    return found


def experts_original(weights: Tensors) -> Tensors:
    """Return the original of the fused experts."""
    found = dict(weights)
    found["model.layers.0.mlp.experts.down_proj"] = torch.stack([found.pop(name) for name in quantized(weights)])
    return found


def _mx(weights: Tensors, *, as_bytes: bool) -> Tensors:
    found = dict(weights)
    for name in quantized(weights):
        found[name], scales = cast(weights[name], (1, 32), pow2=True)
        found[f"{name}_scale"] = e8m0_bytes(scales) if as_bytes else scales.to(torch.float8_e8m0fnu)
    return found


def _mxfp4(weights: Tensors, *, as_blocks: bool) -> Tensors:
    found = dict(weights)
    for name in quantized(weights):
        x = found.pop(name)
        scales = ceil_pow2(amaxes(x, (1, 32)) / 6)
        codes, stem = e2m1((x.float() / spread(scales, x.shape, (1, 32))).clamp(-6, 6)), name
        if as_blocks:
            found[f"{stem}_blocks"] = codes.reshape(len(codes), -1, 16)
            found[f"{stem}_scales"] = e8m0_bytes(scales)
        else:
            found[f"{stem}_packed"], found[f"{stem}_scale"] = codes, e8m0_bytes(scales)
    return found


def _nvfp4(weights: Tensors, *, divides: bool) -> Tensors:
    found = dict(weights)
    for name in quantized(weights):
        codes, scales, encode = nvfp4(found.pop(name))
        found[f"{name}_scale"] = scales
        if divides:
            found[f"{name}_packed"], found[f"{name}_global_scale"] = codes, encode
            found[name.removesuffix("weight") + "input_global_scale"] = torch.tensor([100.0])
        else:
            found[name], found[f"{name}_scale_2"] = codes, 1 / encode
    return found


def _engine(weights: Tensors, kind: str) -> Tensors:
    found = dict(weights)
    for name in quantized(weights):
        x = found.pop(name)
        if kind == "tensor":
            codes, scales = cast(x, (len(x), x.shape[1]))
            found[f"{name}._data"], found[f"{name}._scale_inv"] = codes.view(torch.uint8), scales.reshape(1)
            continue
        if kind == "nvfp4":
            codes, scales, encode = nvfp4(x)
            found[f"{name}._amax_rowwise"] = 448 * 6 / encode
            stored = padded(scales.view(torch.uint8), 128, 4)
        elif kind == "mxfp8":
            codes, scales = cast(x, (1, 32), pow2=True)
            stored = padded(e8m0_bytes(scales), 128, 4)
        else:
            codes, scales = cast(x, (128, 128) if kind == "2d" else (1, 128), pow2=True)
            stored = padded(scales, 1, 4) if kind == "2d" else padded(scales.t().contiguous(), 1, 4)
        found[f"{name}._rowwise_data"], found[f"{name}._rowwise_scale_inv"] = codes.view(torch.uint8), stored.contiguous()
        found[f"{name}._columnwise_data"] = codes.view(torch.uint8).t().contiguous()
    return found


#: By name: from the original to what the files hold.
LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "deepseek": _deepseek(),
    "deepseek_pow2": _deepseek(pow2=True),
    "deepseek_e8m0": _deepseek(e8m0=True),
    "deepseek_native": _native,
    "experts": _experts,
    "per_tensor": _scaled((ROWS, COLUMNS), scalar=True),
    "per_channel_bf16": _scaled((1, COLUMNS), torch.bfloat16),
    "per_block": _scaled((128, 128), torch.bfloat16),
    "mxfp8_bytes": lambda weights: _mx(weights, as_bytes=True),
    "mxfp8_e8m0": lambda weights: _mx(weights, as_bytes=False),
    "mxfp4": lambda weights: _mxfp4(weights, as_blocks=False),
    "mxfp4_blocks": lambda weights: _mxfp4(weights, as_blocks=True),
    "nvfp4": lambda weights: _nvfp4(weights, divides=True),
    "nvfp4_modelopt": lambda weights: _nvfp4(weights, divides=False),
    **{f"engine_{kind}": lambda weights, kind=kind: _engine(weights, kind) for kind in ("tensor", "2d", "1d", "mxfp8", "nvfp4")},  # type: ignore[misc]  # a default argument binds kind
}


def save(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> Path:
    """Write one file."""
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


def save_sharded(tensors: Tensors, folder: Path, number: int = 2) -> Path:
    """Write shards and an index, with each weight's scale in another shard than its codes."""
    folder.mkdir(exist_ok=True)
    names, weight_map = list(tensors), {}
    for shard in range(number):
        file = f"model-{shard + 1:05d}-of-{number:05d}.safetensors"
        part = {name: tensors[name] for place, name in enumerate(names) if place % number == shard}
        save(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder

"""Public reports of checkpoints that were wrong, or looked wrong, each rebuilt as a small file; the answer was written first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8debug.checkpoints import check_checkpoint
from tests.checkpoints import writers
from tests.checkpoints.writers import E4, Tensors

LAYER = "model.layers.{}.mlp."
BLOCK = (128, 128)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A public report.

    Attributes:
        reference: repository and number.
        make: writes the checkpoint into a folder and returns it with its reference, or None.
        code: of the warning or error that is right; None where the file is sound.
        tensors: names of the tensors that it has to name, and no others.
        says: what its message has to hold.
    """

    reference: str
    make: Callable[[Path], tuple[Path, Path | None]]
    code: str | None
    tensors: frozenset[str] = frozenset()
    says: str = ""


def experts(layers: int = 2, number: int = 4) -> Tensors:
    """Return the BF16 linears of some experts."""
    found: Tensors = {}
    for layer in range(layers):
        for expert in range(number):
            for part, shape in (("gate_proj", (96, 128)), ("up_proj", (96, 128)), ("down_proj", (128, 96))):
                name = f"{LAYER.format(layer)}experts.{expert}.{part}.weight"
                found[name] = (torch.randn(shape) * 0.03).bfloat16()
    return found


def configured(folder: Path, tensors: Tensors, **quantization: object) -> Path:
    folder.mkdir(exist_ok=True)
    writers.save(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def modelopt(weights: Tensors, encode: Callable[[str, torch.Tensor], float]) -> Tensors:
    """Return NVFP4 as Model Optimizer writes it, under the encode scale of each tensor."""
    found: Tensors = {}
    for name, x in weights.items():
        scale = encode(name, x)
        blocks = (writers.amaxes(x, (1, 16)) / 6 * scale).clamp(max=448).to(E4)
        wide = writers.spread(blocks, x.shape, (1, 16)) / scale
        found[name] = writers.e2m1((x.float() / wide.clamp(min=1e-30)).clamp(-6, 6))
        found[f"{name}_scale"], found[f"{name}_scale_2"] = blocks, torch.tensor(1 / scale)
    return found


def own_amax(_: str, x: torch.Tensor) -> float:
    return 2688 / float(x.float().abs().max())


def _unequal_halves(folder: Path) -> tuple[Path, None]:
    weights = experts()
    for name in weights:
        if "up_proj" in name and "experts.2" not in name:
            weights[name] = weights[name] * 1.5

    def encode(name: str, x: torch.Tensor) -> float:
        return own_amax(name, x) if "experts.2" not in name else 2688 / 0.2

    return configured(folder, modelopt(weights, encode), quant_algo="NVFP4", quant_method="modelopt"), None


def _shared_halves(folder: Path) -> tuple[Path, None]:
    weights = experts()

    def shared(name: str, _: torch.Tensor) -> float:
        stem = name.rpartition(".experts.")[0]
        pair = [weights[n] for n in weights if n.startswith(stem) and ("down" in n) == ("down" in name)]
        return 2688 / max(float(x.float().abs().max()) for x in pair)

    return configured(folder, modelopt(weights, shared), quant_algo="NVFP4", quant_method="modelopt"), None


def _scales_of_packed_data(folder: Path) -> tuple[Path, None]:
    tensors = modelopt({k: v for k, v in writers.original(128, 256).items() if "layers" in k}, own_amax)
    for name in [n for n in tensors if n.endswith("q_proj.weight")]:
        tensors[f"{name}_scale"] = writers.amaxes(tensors[name].float(), (1, 16)).clamp(max=448).to(E4)
        tensors[name.replace("weight", "weight_quantizer._scale")] = tensors[f"{name}_scale"].float()
    return configured(folder, tensors, quant_algo="NVFP4", quant_method="modelopt"), None


def _copied_by_value(folder: Path) -> tuple[Path, None]:
    tensors: Tensors = {}
    for name, x in experts().items():
        scales = writers.ceil_pow2(writers.amaxes(x, (1, 32)) / 6)
        tensors[f"{name}_packed"] = writers.e2m1((x.float() / writers.spread(scales, x.shape, (1, 32))).clamp(-6, 6))
        wrong = scales.to(torch.uint8) if "experts.1.down" in name else writers.e8m0_bytes(scales)
        tensors[f"{name}_scale"] = wrong
    return configured(folder, tensors, quant_method="mxfp4"), None


def _renamed_scales_of_excluded(folder: Path) -> tuple[Path, None]:
    tensors: Tensors = {}
    for name, x in experts().items():
        scales = writers.ceil_pow2(writers.amaxes(x, (1, 32)) / 6)
        tensors[name] = writers.e2m1((x.float() / writers.spread(scales, x.shape, (1, 32))).clamp(-6, 6))
        tensors[f"{name}_scale"] = writers.e8m0_bytes(scales)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name], tensors[f"{name}_scale"] = writers.cast(torch.randn(256, 384) * 0.03)
    return configured(folder, tensors, quant_method="quark", exclude=["model.layers.*.self_attn.*"]), None


def _bytes_as_factors(folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    tensors: Tensors = {}
    wrong: Tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        x = torch.randn(64, 256) * 0.03
        tensors[name], scales = writers.cast(x, (1, 32), pow2=True)
        tensors[f"{name}_scale"] = writers.e8m0_bytes(scales)
        factor = tensors[f"{name}_scale"].float() if layer else scales
        wrong[name] = (tensors[name].float() * writers.spread(factor, x.shape, (1, 32))).bfloat16()
    return writers.save(wrong, folder / "wrong.safetensors"), writers.save(tensors, folder / "source.safetensors")


def _bytes_as_factors_alone(folder: Path) -> tuple[Path, None]:
    return _bytes_as_factors(folder)[0], None


def _comfy(folder: Path) -> tuple[Path, None]:
    folder.mkdir()
    tensors: Tensors = {"scaled_fp8": torch.zeros(2, dtype=E4)}
    for number in range(3):
        x = torch.randn(128, 192) * 0.03
        scale = x.abs().max() / 448
        name = f"encoder.block.{number}.attention.q"
        tensors[f"{name}.weight"] = (x / scale).to(E4)
        tensors[f"{name}.scale_weight"], tensors[f"{name}.scale_input"] = scale.reshape(1), torch.ones(1)
    return writers.save(tensors, folder / "model.safetensors"), None


def _comfy_without(folder: Path) -> tuple[Path, None]:
    path, _ = _comfy(folder)
    tensors = load_file(path)
    del tensors["encoder.block.1.attention.q.scale_weight"]
    return writers.save(tensors, path), None


def _exponent_one_too_small(folder: Path) -> tuple[Path, Path]:
    weights = {f"{LAYER.format(n)}down_proj.weight": (torch.randn(128, 256) * 0.03).bfloat16() for n in range(3)}
    tensors: Tensors = {}
    for number, (name, x) in enumerate(weights.items()):
        amax = writers.amaxes(x, (1, 32))
        scales = torch.exp2(torch.floor(torch.log2(amax / 6))) if number == 1 else torch.exp2(torch.floor(torch.log2(amax)) - 2)
        tensors[f"{name}_packed"] = writers.e2m1((x.float() / writers.spread(scales, x.shape, (1, 32))).clamp(-6, 6))
        tensors[f"{name}_scale"] = writers.e8m0_bytes(scales)
    configured(folder, tensors, quant_method="mxfp4")
    return folder, writers.save(weights, folder.parent / "original.safetensors")


def _round_trip(folder: Path) -> tuple[Path, Path]:
    first: Tensors = {}
    again: Tensors = {}
    for number in range(3):
        x = torch.randn(128, 256) * 0.03
        # A few blocks whose largest value lies just above half of the ceiling: it rounds down to it.
        amax = writers.amaxes(x, (1, 32))
        scales = writers.ceil_pow2(amax / 448)
        flat = x.view(128, 8, 32)
        largest = flat.abs().argmax(-1)
        for row in range(20):
            flat[row, 0] *= 0.4
            flat[row, 0, largest[row, 0]] = 225 * float(scales[row, 0])
        name = f"{LAYER.format(number)}up_proj.weight"
        first[name], scales = writers.cast(x, (1, 32), pow2=True)
        first[f"{name}_scale"] = writers.e8m0_bytes(scales)
        value = first[name].float() * writers.spread(scales, x.shape, (1, 32))
        again[name], scales = writers.cast(value.bfloat16(), (1, 32), pow2=True)
        again[f"{name}_scale"] = writers.e8m0_bytes(scales)
        assert not torch.equal(again[f"{name}_scale"], first[f"{name}_scale"])
    folder.mkdir()
    return writers.save(again, folder / "again.safetensors"), writers.save(first, folder / "first.safetensors")


UP = frozenset(f"{LAYER.format(layer)}experts.{expert}.up_proj.weight" for layer in range(2) for expert in (0, 1, 3))
Q = frozenset(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2))
REPORTS = {
    "gate and up under two tensor scales": Report(
        reference="vllm #54974", make=_unequal_halves, code="F207", tensors=UP, says="gate_proj"
    ),
    "gate and up under one tensor scale": Report(reference="vllm #54974", make=_shared_halves, code=None),
    "scales made of packed data": Report(
        reference="Model-Optimizer #2038", make=_scales_of_packed_data, code="F203", tensors=Q, says="too few"
    ),
    "E8M0 copied by value into bytes": Report(
        reference="sglang #33541",
        make=_copied_by_value,
        code="F214",
        tensors=frozenset(f"{LAYER.format(n)}experts.1.down_proj.weight" for n in range(2)),
    ),
    "excluded layers keep codes under renamed scales": Report(
        reference="vllm #54556", make=_renamed_scales_of_excluded, code="F206", tensors=Q, says="exclude"
    ),
    "scale bytes taken as factors": Report(
        reference="omlx #2159",
        make=_bytes_as_factors,
        code="F214",
        tensors=frozenset({"model.layers.1.self_attn.k_proj.weight"}),
        says="as bytes",
    ),
    "scale bytes taken as factors, file alone": Report(
        reference="omlx #2159",
        make=_bytes_as_factors_alone,
        code="F214",
        tensors=frozenset({"model.layers.1.self_attn.k_proj.weight"}),
    ),
    "ComfyUI's names": Report(reference="stable-diffusion.cpp #1898", make=_comfy, code=None),
    "ComfyUI's names, a scale missing": Report(
        reference="stable-diffusion.cpp #1898",
        make=_comfy_without,
        code="F201",
        tensors=frozenset({"encoder.block.1.attention.q.weight"}),
    ),
    "exponent one too small": Report(
        reference="vllm #43557",
        make=_exponent_one_too_small,
        code="F235",
        tensors=frozenset({f"{LAYER.format(1)}down_proj.weight"}),
    ),
    "MXFP8 by way of BF16": Report(reference="Megatron-LM #6666", make=_round_trip, code=None),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    report = REPORTS[name]
    path, reference = report.make(tmp_path / "model")
    found = [f for f in check_checkpoint(path, reference) if f.severity > "info"]
    told = [(f.code, f.tensor, f.also, f.message) for f in found]
    if report.code is None:
        assert not found, told
        return
    assert [f.code for f in found] == [report.code], told
    assert {found[0].tensor, *found[0].also} == report.tensors, told
    assert report.says in found[0].message, told


def _experts_joined(weights: Tensors, *, quantize: bool) -> Tensors:
    """Return the experts of each layer in one tensor of gate and up, and one of down, as transformers 5 has them."""
    found: Tensors = {}
    for layer in range(2):
        above = f"{LAYER.format(layer)}experts"
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            joined = [torch.cat([weights[f"{above}.{e}.{part}.weight"] for part in parts]) for e in range(4)]
            if not quantize:
                found[f"{above}.{name}"] = torch.stack(joined)
                continue
            codes, scales = zip(*(writers.cast(x, (32, 32)) for x in joined), strict=True)
            found[f"{above}.{name}"], found[f"{above}.{name}_scale_inv"] = torch.stack(codes), torch.stack(scales)
    return found


@pytest.mark.parametrize("joined", ["checkpoint", "reference"])
def test_experts_that_one_of_the_two_joins_are_compared(joined: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = experts()
    if joined == "checkpoint":
        tensors, original = _experts_joined(weights, quantize=True), weights
        bad, scale = f"{LAYER.format(1)}experts.down_proj", f"{LAYER.format(1)}experts.down_proj_scale_inv"
    else:
        tensors, original = {}, _experts_joined(weights, quantize=False)
        for name, x in weights.items():
            tensors[name], tensors[f"{name}_scale_inv"] = writers.cast(x, (32, 32))
        bad = f"{LAYER.format(1)}experts.3.up_proj.weight"
        scale = f"{bad}_scale_inv"
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    reference = writers.save({f"language_model.{k}": v for k, v in original.items()}, tmp_path / "original.safetensors")
    report = check_checkpoint(configured(tmp_path / "sound", tensors, **config), reference)
    assert not report and all(one.comparison is not None for one in report.judged.weights)
    tensors[scale] = tensors[scale] * 2
    (finding,) = check_checkpoint(configured(tmp_path / "sick", tensors, **config), reference)
    assert (finding.code, finding.tensor, finding.also) == ("F231", bad, ())


def test_a_joined_projection_is_compared_with_its_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = {
        f"model.layers.0.self_attn.{p}_proj.weight": (torch.randn(n, 256) * 0.03).bfloat16()
        for p, n in zip("qkv", (128, 64, 64), strict=True)
    }
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors: Tensors = {}
    tensors[name], tensors[f"{name}_scale_inv"] = writers.cast(torch.cat(list(parts.values())))
    path = writers.save(tensors, tmp_path / "joined.safetensors")
    assert not check_checkpoint(path, writers.save(parts, tmp_path / "parts.safetensors"))
    apart: Tensors = {}
    for part, x in parts.items():
        apart[part], apart[f"{part}_scale_inv"] = writers.cast(x)
    (finding,) = check_checkpoint(
        writers.save(apart, tmp_path / "apart.safetensors"),
        writers.save({name: torch.cat(list(parts.values())[::-1])}, tmp_path / "whole.safetensors"),
    )
    assert (finding.code, len(finding.also)) == ("F234", 2)  # v, k and q: in another order

"""Sound files of every layout give no finding, alone and against their original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8debug.checkpoints import CheckReport, check_checkpoint
from tests.checkpoints import writers


def said(report: CheckReport) -> list[tuple[str, str | None, str]]:
    return [(finding.code, finding.tensor, finding.message) for finding in report]


#: The writer of one layout has one shape.
SHAPES = [
    (layout, shape)
    for layout in writers.LAYOUTS
    for shape in ((writers.ROWS, writers.COLUMNS), (128, 128), (100, 640))
    if layout != "per_tensor" or shape == (writers.ROWS, writers.COLUMNS)
]


@pytest.mark.parametrize(("layout", "shape"), SHAPES, ids=str)
def test_a_sound_file(tmp_path: Path, layout: str, shape: tuple[int, int]) -> None:
    weights = writers.original(*shape)
    if layout == "per_channel_bf16":
        weights = writers.original(shape[0], writers.COLUMNS)
    file = writers.save(writers.LAYOUTS[layout](weights), tmp_path / "model.safetensors")
    original = writers.experts_original(weights) if layout == "experts" else weights
    reference = writers.save(original, tmp_path / "original.safetensors")
    alone = check_checkpoint(file)
    assert said(alone) == [] and alone.verdict == "ok"
    assert len(alone.judged.weights) == (1 if layout == "experts" else len(writers.NAMES)), alone.layouts
    assert alone.not_judged == []
    against = check_checkpoint(file, reference)
    assert said(against) == []
    for one in against.judged.weights:
        found = one.comparison
        assert found is not None and found.sqnr_db is not None and found.gain is not None
        assert found.gain == pytest.approx(1, abs=0.02)
        assert found.sqnr_db > (14 if one.weight.format == "e2m1fn" else 28), one.weight.name


@pytest.mark.parametrize("layout", ["deepseek", "nvfp4", "engine_2d"])
def test_a_quantized_reference_is_dequantized(tmp_path: Path, layout: str) -> None:
    file = writers.save(writers.LAYOUTS[layout](writers.original()), tmp_path / "model.safetensors")
    report = check_checkpoint(file, file)
    assert said(report) == []
    assert all(one.comparison is not None and one.comparison.sqnr_db == float("inf") for one in report.judged.weights)


def test_shards_with_scales_in_another_shard(tmp_path: Path) -> None:
    weights = writers.original()
    folder = writers.save_sharded(writers.LAYOUTS["deepseek"](weights), tmp_path / "model", 3)
    config = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    for path in (folder, folder / "model.safetensors.index.json", *folder.glob("model-*")):
        assert said(check_checkpoint(path)) == [], path


def test_uniform_constant_and_ternary_weights_are_no_faults(tmp_path: Path) -> None:
    """Initializations are not Gaussian: nothing piles up at the largest code by a fault."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        "a.0.weight": (torch.rand(256, 256, generator=generator) - 0.5).bfloat16(),
        "a.1.weight": (torch.randint(-1, 2, (256, 256), generator=generator) * 0.5).bfloat16(),
        "a.2.weight": torch.randn(256, 256, generator=generator).clamp(-2, 2).bfloat16(),
        "a.3.weight": torch.cat([torch.randn(128, 256, generator=generator), torch.zeros(128, 256)]).bfloat16(),
    }
    for pow2 in (False, True):
        tensors = {}
        for name, weight in weights.items():
            tensors[name], scales = writers.cast(weight, pow2=pow2)
            tensors[f"{name}_scale_inv"] = torch.where(scales > 0, scales, 1.0)
            tensors[name] = torch.nan_to_num(tensors[name].float()).to(writers.E4)
        assert said(check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))) == []


def test_a_uniform_weight_whose_blocks_have_one_amax_is_no_constant_scale(tmp_path: Path) -> None:
    """PyTorch initializes Linears so; in BF16 the amax of every block is the bound."""
    weight = ((torch.rand(512, 384, generator=torch.Generator().manual_seed(1)) * 2 - 1) * 0.05).bfloat16()
    codes, scales = writers.cast(weight)
    assert scales.numel() == 12 and len(scales.unique()) == 1
    file = writers.save({"a.0.weight": codes, "a.0.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    assert said(check_checkpoint(file)) == []


def test_tiny_scales_of_zero_blocks_are_not_too_small(tmp_path: Path) -> None:
    """Writers that clamp the amax by an eps leave any scale above a block of zeros."""
    weight = writers.original()["model.layers.0.mlp.down_proj.weight"].clone()
    weight[:, 128:] = 0
    reference = writers.save({"a.0.weight": weight}, tmp_path / "original.safetensors")
    codes, scales = writers.cast(weight, (1, 32), pow2=True)
    scales = torch.where(scales > 2.0**-60, scales, 2.0**-100)
    codes = torch.nan_to_num(codes.float()).to(writers.E4)
    tensors = {"a.0.weight": codes, "a.0.weight_scale": writers.e8m0_bytes(scales)}
    assert said(check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"), reference)) == []


@pytest.mark.parametrize("experts", ["joined", "one by one"])
def test_experts_of_a_reference_that_lie_transposed(tmp_path: Path, experts: str) -> None:
    """transformers keeps experts as [experts, inputs, outputs]; down_proj is square, so that its shape does not tell."""
    generator = torch.Generator().manual_seed(1)
    stem, shapes = "model.layers.0.mlp.experts", {"gate_up_proj": (512, 256), "down_proj": (256, 256)}
    tensors, reference = {}, {}
    for name, shape in shapes.items():
        weights = torch.randn(3, *shape, generator=generator).bfloat16() * 0.02
        reference[f"{stem}.{name}"] = weights.transpose(1, 2).contiguous()
        if experts == "joined":
            pairs = [writers.cast(one) for one in weights]
            tensors[f"{stem}.{name}"] = torch.stack([codes.view(torch.uint8) for codes, _ in pairs]).view(writers.E4)
            tensors[f"{stem}.{name}_scale_inv"] = torch.stack([scales for _, scales in pairs])
            continue
        for number, one in enumerate(weights):
            for part, rows in zip(("gate_proj", "up_proj") if "up" in name else (name,), one.split(256), strict=True):
                codes, scales = writers.cast(rows)
                tensors |= {f"{stem}.{number}.{part}.weight": codes, f"{stem}.{number}.{part}.weight_scale_inv": scales}
    file = writers.save(tensors, tmp_path / "model.safetensors")
    assert said(check_checkpoint(file, writers.save(reference, tmp_path / "original.safetensors"))) == []
    reference[f"{stem}.down_proj"][1] *= -1
    (finding,) = check_checkpoint(file, writers.save(reference, tmp_path / "original.safetensors"))
    wanted = f"{stem}.down_proj" if experts == "joined" else f"{stem}.1.down_proj.weight"
    assert finding.code == "F234" and finding.tensor == wanted


def test_scales_rounded_down_as_ocp_mx_are_sound(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = dict(weights)
    for name in writers.quantized(weights):
        amax = writers.amaxes(weights[name], (1, 32))
        scales = torch.exp2(torch.floor(torch.log2(amax)) - 8)
        wide = writers.spread(scales, weights[name].shape, (1, 32))
        tensors[name] = (weights[name].float() / wide).clamp(-448, 448).to(writers.E4)
        tensors[f"{name}_scale"] = writers.e8m0_bytes(scales)
    file = writers.save(tensors, tmp_path / "model.safetensors")
    assert said(check_checkpoint(file)) == []
    assert said(check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))) == []


def test_master_weights_in_fp32_and_a_tied_head(tmp_path: Path) -> None:
    weights = {name: w.float() + 1e-4 * torch.randn(w.shape) * w.float() for name, w in writers.original().items()}
    tensors = writers.LAYOUTS["deepseek"](weights)
    reference = {name: w.bfloat16() for name, w in weights.items()}
    reference["lm_head.weight"] = reference["model.embed_tokens.weight"].clone()
    file = writers.save(tensors, tmp_path / "model.safetensors")
    assert said(check_checkpoint(file, writers.save(reference, tmp_path / "original.safetensors"))) == []


def test_weights_of_other_quantizations_are_named_as_not_judged(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(8, 8, dtype=torch.int8), "a.weight_scale": torch.ones(8, 1)}
    report = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert said(report) == []
    assert sorted(name for name, _ in report.not_judged) == ["a.weight", "a.weight_scale"]
    assert "not judged: 2, e.g. a.weight" in report.summary


def test_a_cast_without_scales_is_information(tmp_path: Path) -> None:
    tensors = {"a.weight": (torch.randn(64, 64) * 0.05).to(writers.E4)}
    report = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert [(f.code, str(f.severity)) for f in report] == [("F201", "info")]


# What the installed libraries themselves write.


@pytest.mark.parametrize("kind", ["row", "tensor", "mxfp8", "mxfp4", "nvfp4", "nvfp4_tensor"])
def test_what_torchao_saves(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8Tensor, PerRow, PerTensor

    weights = {name: w for name, w in writers.original(256, 384).items() if "embed" not in name}
    state = dict(weights)
    for name in writers.quantized(weights):
        x = weights[name]
        if kind in ("row", "tensor"):
            state[name] = Float8Tensor.from_hp(x, granularity=PerRow() if kind == "row" else PerTensor())
        elif kind.startswith("mx"):
            state[name] = MXTensor.to_mx(x, writers.E4 if kind == "mxfp8" else torch.float4_e2m1fn_x2, 32)
        else:
            scale = per_tensor_amax_to_scale(x.abs().max()) if kind == "nvfp4_tensor" else None
            state[name] = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=kind == "nvfp4_tensor")
    tensors, metadata = flatten_tensor_state_dict(state)
    file = writers.save(tensors, tmp_path / "model.safetensors", metadata)
    report = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert said(report) == []
    assert {one.weight.layout for one in report.judged.weights} == {"torchao"}
    for one in report.judged.weights:
        theirs = state[one.weight.name].dequantize().float()
        x = weights[one.weight.name].float()
        sqnr = 10 * torch.log10(x.square().sum() / (theirs - x).square().sum())
        assert one.comparison is not None and one.comparison.sqnr_db == pytest.approx(float(sqnr), abs=0.05)


def test_what_transformers_saves(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        class quantization_config:  # noqa: N801  # the attribute that the library reads
            weight_block_size = (128, 128)
            scale_fmt = "float"

    weights = writers.original(256, 384)
    tensors = dict(weights)
    quantize = Fp8Quantize(Quantizer())
    for name in writers.quantized(weights):
        tensors.update(quantize.convert({name: weights[name]}))
    file = writers.save(tensors, tmp_path / "model.safetensors")
    report = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert said(report) == []
    assert report.layouts == {"deepseek e4m3fn 128x128": len(writers.NAMES)}

"""Faults of checkpoints, each found by its rule with the tensor's name; a row is a kind of fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8debug.checkpoints import CHECKS, CheckReport, check_checkpoint
from tests.checkpoints import writers
from tests.checkpoints.writers import E4, E5, NAMES, Tensors

BAD = NAMES[1]
SCALE = f"{BAD}_scale_inv"
Change = Callable[[Tensors, Tensors], None]


def deepseek(weights: Tensors) -> Tensors:
    return writers.LAYOUTS["deepseek"](weights)


def layers(number: int = 6) -> Tensors:
    """Return one projection of several layers, with codes and scales."""
    found: Tensors = {}
    for layer in range(number):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        found[name], found[f"{name}_scale_inv"] = writers.cast(torch.randn(256, 256) * 0.02)
    return found


def put(name: str, make: Callable[[Tensors], torch.Tensor]) -> Change:
    """Replace one tensor by what is made of the file's tensors."""

    def change(tensors: Tensors, _: Tensors) -> None:
        tensors[name] = make(tensors)

    return change


def drop(name: str) -> Change:
    return lambda tensors, _: tensors.__delitem__(name)


def at(place: tuple[int, int], value: float) -> Callable[[Tensors], torch.Tensor]:
    def make(tensors: Tensors) -> torch.Tensor:
        scales = tensors[SCALE].clone()
        scales[place] = value
        return scales

    return make


def nan_codes(tensors: Tensors) -> torch.Tensor:
    codes = tensors[BAD].view(torch.uint8).clone()
    codes[3, 5:9] = 0x7F
    return codes.view(E4)


def clipped(tensors: Tensors, weights: Tensors) -> None:
    scales = tensors[SCALE] / 4
    wide = writers.spread(scales, weights[BAD].shape, (128, 128))
    tensors[BAD], tensors[SCALE] = (weights[BAD].float() / wide).clamp(-448, 448).to(E4), scales


def tensorwise_clip(tensors: Tensors, weights: Tensors) -> None:
    scale = weights[BAD].float().abs().max().reshape(1, 1) / 448 / 64
    tensors[BAD] = (weights[BAD].float() / scale).clamp(-448, 448).to(E4)
    tensors[f"{BAD}_scale"] = scale
    del tensors[SCALE]


def one_bad_scale(tensors: Tensors, _: Tensors) -> None:
    for name in writers.quantized(tensors):
        if name.endswith("_scale_inv"):
            tensors[name] = writers.ceil_pow2(tensors[name])
    scales = tensors[SCALE].clone()
    scales[1, 1] *= 1.3
    tensors[SCALE] = scales


#: By fault: (code, the tensor it is found at, what changes the sound DeepSeek file).
ALONE: dict[str, tuple[str, str, Change]] = {
    "scale missing": ("F201", BAD, drop(SCALE)),
    "weight dropped, scale left": ("F202", SCALE, drop(BAD)),
    "scale beside a BF16 weight": ("F202", SCALE, lambda t, w: t.__setitem__(BAD, w[BAD])),
    "two scales": ("F202", f"{BAD}_scale", put(f"{BAD}_scale", lambda t: t[SCALE])),
    "grid transposed": ("F203", BAD, put(SCALE, lambda t: torch.ones(2, 3))),
    "a row of blocks too many": ("F203", BAD, put(SCALE, lambda t: torch.cat([t[SCALE], t[SCALE][-1:]]))),
    "a column of blocks too few": ("F203", BAD, put(SCALE, lambda t: t[SCALE][:, :-1])),
    "scales of integers": ("F203", BAD, put(SCALE, lambda t: torch.ones(3, 3, dtype=torch.int32))),
    "scale NaN": ("F211", BAD, put(SCALE, at((1, 2), float("nan")))),
    "scale infinite": ("F211", BAD, put(SCALE, at((0, 0), float("inf")))),
    "input scale NaN": (
        "F211",
        "model.layers.0.mlp.down_proj.input_scale",
        put("model.layers.0.mlp.down_proj.input_scale", lambda t: torch.tensor([float("nan")])),
    ),
    "scales zero": ("F212", BAD, put(SCALE, lambda t: torch.zeros_like(t[SCALE]))),
    "scale negative": ("F212", BAD, put(SCALE, at((2, 0), -1e-4))),
    "input scale zero": (
        "F212",
        "model.layers.0.mlp.down_proj.input_scale",
        put("model.layers.0.mlp.down_proj.input_scale", lambda t: torch.zeros(())),
    ),
    "scale inverse": ("F214", BAD, put(SCALE, lambda t: 1 / t[SCALE])),
    "scales never loaded": ("F214", BAD, put(SCALE, lambda t: torch.ones_like(t[SCALE]))),
    "codes NaN": ("F215", BAD, put(BAD, nan_codes)),
    "weight never written": ("F215", BAD, put(BAD, lambda t: torch.full_like(t[BAD].view(torch.uint8), 0xFF).view(E4))),
    "weight all zero": ("F216", BAD, put(BAD, lambda t: torch.zeros_like(t[BAD].view(torch.uint8)).view(E4))),
    "weight of one code": ("F216", BAD, put(BAD, lambda t: torch.full_like(t[BAD].view(torch.uint8), 0x7E).view(E4))),
    "one scale for all blocks": ("F217", BAD, put(SCALE, lambda t: torch.full_like(t[SCALE], float(t[SCALE][0, 0])))),
    "scales rounded after the cast": ("F218", BAD, put(SCALE, lambda t: writers.ceil_pow2(t[SCALE]))),
    "codes clipped": ("F219", BAD, clipped),
    "codes clipped under one scale": ("F219", BAD, tensorwise_clip),
    "codes of another layer": ("F221", NAMES[3], lambda t, _: t.update({NAMES[3]: t[BAD], f"{NAMES[3]}_scale_inv": t[SCALE]})),
    "codes as BF16": ("F222", BAD, lambda t, _: t.update({BAD: t[BAD].bfloat16(), SCALE: t.pop(SCALE)[:0]})),
    "NaN in a norm": ("F223", "model.norm.weight", put("model.norm.weight", lambda t: t["model.norm.weight"] * float("nan"))),
}
#: The same against the original.
AGAINST: dict[str, tuple[str, str, Change]] = {
    "scale twice as large": ("F231", BAD, put(SCALE, lambda t: 2 * t[SCALE])),
    "scale of fnuz maxima": ("F231", BAD, put(SCALE, lambda t: t[SCALE] * 448 / 240)),
    "inverse scale": ("F231", BAD, put(SCALE, lambda t: 1 / t[SCALE])),
    "scale a hundredth": ("F231", BAD, put(SCALE, lambda t: t[SCALE] / 100)),
    "transposed square grid": ("F232", BAD, put(SCALE, lambda t: t[SCALE].t().contiguous())),
    "grid shifted by a row": ("F232", BAD, put(SCALE, lambda t: torch.roll(t[SCALE], 1, 0))),
    "grid shifted by a column": ("F232", BAD, put(SCALE, lambda t: torch.roll(t[SCALE], -1, 1))),
    "scales in reverse order": ("F232", BAD, put(SCALE, lambda t: t[SCALE].flip(0))),
    "scales rounded up after the cast": ("F218", BAD, put(SCALE, lambda t: writers.ceil_pow2(t[SCALE]))),
    "scales rounded down after the cast": ("F218", BAD, put(SCALE, lambda t: writers.ceil_pow2(t[SCALE]) / 2)),
    "weights of another step": ("F234", BAD, lambda t, w: recast(t, w[BAD].float() * (1 + 0.05 * torch.randn(w[BAD].shape)))),
    "weights of a near step": ("F234", BAD, lambda t, w: recast(t, near(w[BAD].float()))),
    "copy of another layer": ("F221", BAD, lambda t, w: recast(t, w[NAMES[3]])),
    "weight of another model": ("F234", BAD, lambda t, w: recast(t, square(9)[BAD])),
    "signs turned": ("F234", BAD, lambda t, w: recast(t, -w[BAD])),
    "rows in another order": ("F234", BAD, put(BAD, lambda t: t[BAD].view(torch.uint8).roll(7, 0).view(E4))),
    "half of the rows unwritten": ("F234", BAD, put(BAD, lambda t: torch.cat([t[BAD][:256], torch.zeros(32, 320).to(E4)]))),
    "norm of another step": ("F234", "model.norm.weight", put("model.norm.weight", lambda t: t["model.norm.weight"] * 1.02)),
    "weight missing": ("F236", BAD, lambda t, _: (t.pop(BAD), t.pop(SCALE)) and None),
    "another shape": ("F236", "model.norm.weight", put("model.norm.weight", lambda t: t["model.norm.weight"][:-1])),
    "cast from E5M2": ("F233", BAD, lambda t, w: recast(t, twice(w[BAD], (128, 128), E5))),
    "cast from another block": ("F233", BAD, lambda t, w: recast(t, twice(w[BAD], (1, 128), E4))),
    "scale eps above the weight": ("F235", BAD, lambda t, w: under(t, w, 2.0**14)),
}


def near(x: torch.Tensor) -> torch.Tensor:
    """Return weights after a step: noise of their rms at 45 dB below."""
    return x + 0.006 * x.square().mean().sqrt() * torch.randn(x.shape)


def recast(tensors: Tensors, x: torch.Tensor) -> None:
    tensors[BAD], tensors[SCALE] = writers.cast(x)


def twice(x: torch.Tensor, block: tuple[int, int], fmt: torch.dtype) -> torch.Tensor:
    codes, scales = writers.cast(x, block, fmt)
    return codes.float() * writers.spread(scales, x.shape, block)


def under(tensors: Tensors, weights: Tensors, factor: float) -> None:
    scales = tensors[SCALE] * factor
    wide = writers.spread(scales, weights[BAD].shape, (128, 128))
    tensors[BAD], tensors[SCALE] = (weights[BAD].float() / wide).to(E4), scales


def square(seed: int = 3) -> Tensors:
    """Return an original with square grids of 3x3 blocks."""
    return writers.original(writers.ROWS, writers.COLUMNS, seed)


def codes_of(report: CheckReport) -> dict[str, list[str | None]]:
    return {finding.code: [finding.tensor, *finding.also] for finding in report if finding.severity > "info"}


@pytest.mark.parametrize("fault", ALONE)
def test_a_fault_is_found_without_a_reference(tmp_path: Path, fault: str) -> None:
    torch.manual_seed(0)
    weights = square()
    tensors = deepseek(weights)
    code, tensor, change = ALONE[fault]
    change(tensors, weights)
    report = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    found = codes_of(report)
    assert code in found and tensor in found[code], [(f.code, f.tensor, f.message) for f in report]
    assert set(found) <= {code, "F202", "F214"}, "one fault has one cause"
    named = {name for names in found.values() for name in names}
    assert named <= {tensor, BAD, SCALE}, "no sound tensor is named"


@pytest.mark.parametrize("fault", AGAINST)
def test_a_fault_is_found_against_the_original(tmp_path: Path, fault: str) -> None:
    torch.manual_seed(0)
    weights = square()
    tensors = deepseek(weights)
    code, tensor, change = AGAINST[fault]
    change(tensors, weights)
    file = writers.save(tensors, tmp_path / "model.safetensors")
    report = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    found = codes_of(report)
    assert code in found and tensor in found[code], [(f.code, f.tensor, f.message) for f in report]
    assert set(found) <= {code, "F214", "F219", "F221"}, [(f.code, f.message) for f in report]
    assert {name for names in found.values() for name in names} <= {tensor, *([NAMES[3]] if "F221" in found else [])}


def test_there_are_more_than_twenty_kinds() -> None:
    assert len({*ALONE, *AGAINST}) >= 20


def test_every_rule_has_a_fault() -> None:
    elsewhere = {"F204", "F205", "F206", "F207", "F208", "F213", "F220"}  # in test_files.py, test_checkpoint_reports.py and below
    assert {code for code, _, _ in (*ALONE.values(), *AGAINST.values())} | elsewhere == set(CHECKS.names())


def test_the_messages_tell_the_cause(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = square()
    reference = writers.save(weights, tmp_path / "original.safetensors")
    words = {
        "scale twice as large": "2 times the reference's (fnuz codes read as fn, or the reverse)",
        "scale of fnuz maxima": "(448 / 240",
        "inverse scale": "inverse of those that fit",
        "transposed square grid": "transposed",
        "grid shifted by a row": "shifted by 1 rows and 0 columns",
        "scales in reverse order": "in another order",
        "signs turned": "the signs are turned",
        "weights of another step": "the weight is that of another step",
        "copy of another layer": f"a copy of {NAMES[3]}, which fits the reference",
        "weight of another model": "another tensor",
        "half of the rows unwritten": "of 9 blocks are not the reference's",
    }
    for fault, text in words.items():
        tensors = deepseek(weights)
        AGAINST[fault][2](tensors, weights)
        report = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"), reference)
        assert any(text in finding.message for finding in report), (fault, [finding.message for finding in report])


# What needs a configuration, or many layers.


def configured(tmp_path: Path, tensors: Tensors, **quantization: object) -> Path:
    writers.save(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization} if quantization else {"a": 1}))
    return tmp_path


def test_a_scale_that_is_no_power_of_two(tmp_path: Path) -> None:
    tensors = writers.LAYOUTS["deepseek_pow2"](square())
    assert codes_of(check_checkpoint(configured(tmp_path, tensors, quant_method="fp8", scale_fmt="ue8m0"))) == {}
    tensors[SCALE] = tensors[SCALE] * 1.3
    folder = configured(tmp_path, tensors, quant_method="fp8", scale_fmt="ue8m0")
    (finding,) = check_checkpoint(folder)
    assert (finding.code, finding.tensor) == ("F213", BAD)
    assert finding.message == "9 of 9 scales are no powers of two, and the configuration declares ue8m0"
    tensors = writers.LAYOUTS["deepseek_pow2"](writers.original(1024, 256))
    tensors[SCALE][1, 1] *= 1.3
    assert codes_of(check_checkpoint(writers.save(tensors, tmp_path / "one.safetensors"), select=("F213",))) == {"F213": [BAD]}


@pytest.mark.parametrize(
    ("quantization", "tensor"),
    [
        ({}, BAD),
        ({"quant_method": "fp8", "fmt": "e5m2"}, BAD),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp"]}, BAD),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*0.mlp.down_proj"]}, BAD),
        ({"quant_method": "modelopt", "exclude_modules": ["*.0.mlp.*"]}, BAD),
    ],
)
def test_a_configuration_that_says_otherwise(tmp_path: Path, quantization: dict[str, object], tensor: str) -> None:
    (finding,) = check_checkpoint(configured(tmp_path, deepseek(square()), **quantization))
    assert (finding.code, finding.tensor) == ("F206", tensor)


def test_a_block_other_than_the_declared_one(tmp_path: Path) -> None:
    folder = configured(tmp_path, deepseek(square()), quant_method="fp8", weight_block_size=[64, 64])
    (finding,) = check_checkpoint(folder)
    assert (finding.code, finding.tensor, len(finding.also)) == ("F203", BAD, len(NAMES) - 1)
    assert "3x3 scales, expected 5x5 for blocks of 64x64: the grid is that of blocks of 128x128" in finding.message


def test_one_layer_unlike_the_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = layers()
    name = "model.layers.3.mlp.up_proj.weight"
    tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"] * 100
    (finding,) = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert (finding.code, finding.tensor, str(finding.severity)) == ("F220", name, "warning")
    tensors = layers()
    tensors[name], tensors[f"{name}_scale_inv"] = writers.cast(torch.randn(256, 256) * 0.02, (1, 128))
    tensors["model.layers.6.mlp.up_proj.weight"] = torch.randn(256, 256).bfloat16() * 0.02
    found = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert [(f.code, f.tensor, str(f.severity)) for f in found] == [("F220", name, "info")]
    assert found[0].also == ("model.layers.6.mlp.up_proj.weight",)


def test_layers_of_a_sound_model_may_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors: Tensors = {}
    for layer in range(12):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        size = 0.02 * 3 ** (1 - layer / 6) * (2 if layer == 0 else 1)
        tensors[name], tensors[f"{name}_scale_inv"] = writers.cast(torch.randn(256, 256) * size)
    assert list(check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))) == []


def test_nvfp4_with_the_second_level_the_wrong_way_round(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = square()
    tensors = writers.LAYOUTS["nvfp4"](weights)
    tensors[f"{BAD}_global_scale"] = 1 / tensors[f"{BAD}_global_scale"]
    file = writers.save(tensors, tmp_path / "model.safetensors")
    reference = writers.save(weights, tmp_path / "original.safetensors")
    assert codes_of(check_checkpoint(file)) == {"F214": [BAD]}
    assert codes_of(check_checkpoint(file, reference))["F231"] == [BAD]


def test_scales_of_columns_are_called_so(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = writers.LAYOUTS["per_channel_bf16"](weights)
    tensors[f"{BAD}_scale"] = weights[BAD].float().abs().amax(0) / 448
    save_file(tensors, tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(tmp_path)
    assert (finding.code, finding.tensor) == ("F203", BAD)
    assert "320 scales" in finding.message and finding.message.endswith("or 288x1 for rows: there is one for each column")


def test_equal_causes_are_one_finding(tmp_path: Path) -> None:
    tensors = deepseek(square())
    for name in NAMES:
        del tensors[f"{name}_scale_inv"]
    (finding,) = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert (finding.tensor, finding.also) == (BAD, (NAMES[0], NAMES[3], NAMES[2]))


def test_scales_that_are_rounded_to_one_power_of_two(tmp_path: Path) -> None:
    """Blocks with similar amaxes get one scale; it was rounded and not broadcast, which a scale of 1 or of FP32 would be."""
    weight = torch.randn(384, 512, generator=torch.Generator().manual_seed(3)).bfloat16() * 0.02
    codes, scales = writers.cast(weight)
    largest = scales.max()
    for stored, code in ((writers.ceil_pow2(largest), "F218"), (largest, "F217")):
        tensors = {"a.0.weight": codes, "a.0.weight_scale_inv": torch.full_like(scales, stored.item())}
        (finding,) = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
        assert (finding.code, finding.tensor) == (code, "a.0.weight")


def test_a_factor_of_two_in_mxfp4_is_no_rounding(tmp_path: Path) -> None:
    """FP4 moves a block's best factor by far more than FP8 does, and every ratio of E8M0 scales is a power of two."""
    weights = writers.original()
    tensors = writers.LAYOUTS["mxfp4_blocks"](weights)
    tensors[f"{BAD}_scales"] += 1
    reference = writers.save(weights, tmp_path / "original.safetensors")
    (finding,) = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"), reference)
    assert (finding.code, finding.tensor) == ("F231", BAD) and "2 times" in finding.message
    assert "fnuz" not in finding.message


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str) -> None:
    writers.save(deepseek(writers.original()), tmp_path / "model.safetensors")
    (tmp_path / name).write_text(text)
    (finding,) = check_checkpoint(tmp_path)
    assert (finding.code, finding.file) == ("F204", name) and "is no JSON" in finding.message


def test_nvfp4_of_another_step_is_no_factor(tmp_path: Path) -> None:
    """FP4 is so coarse that the factors of a slightly other weight lie within the tolerance; they explain nothing of it."""
    weights = writers.original()
    random = torch.Generator().manual_seed(3)
    other = {
        **weights,
        BAD: (weights[BAD] + 0.05 * weights[BAD].float().std() * torch.randn(weights[BAD].shape, generator=random)).bfloat16(),
    }
    name = next(one for one in writers.LAYOUTS if one.startswith("nvfp4"))
    file = writers.save(writers.LAYOUTS[name](other), tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert (finding.code, finding.tensor) == ("F234", BAD)


def laid_out(kind: str, weights: Tensors, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Return weights with scales in small blocks, those of BAD changed before they are stored."""
    tensors = dict(weights)
    for name in writers.quantized(weights):
        x = tensors.pop(name)
        if kind.startswith("nvfp4"):
            tensors[f"{name}_packed"], scales, tensors[f"{name}_global_scale"] = writers.nvfp4(x)
            tensors[f"{name}_scale"] = change(scales.float()).to(E4) if name == BAD else scales
            continue
        is_fp4 = kind == "mxfp4"
        emax, largest = (2, 6.0) if is_fp4 else (8, 448.0)
        scales = torch.exp2(torch.floor(torch.log2(writers.amaxes(x, (1, 32)))) - emax)
        scaled = (x.float() / writers.spread(scales, x.shape, (1, 32))).clamp(-largest, largest)
        tensors[f"{name}_packed" if is_fp4 else name] = writers.e2m1(scaled) if is_fp4 else scaled.to(E4)
        tensors[f"{name}_scale"] = writers.e8m0_bytes(change(scales) if name == BAD else scales)
    return tensors


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in tiles of 128x4 as cuBLAS wants them."""
    rows, columns = scales.shape
    return scales.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


#: What is done to block scales -> what the message says; the code is F232 but for a factor.
DISPLACED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a column": (lambda s: s.roll(1, 1), "shifted by 0 rows and 1 columns"),
    "two columns back": (lambda s: s.roll(-2, 1), "shifted by 0 rows and -2 columns"),
    "a row": (lambda s: s.roll(1, 0), "shifted by 1 rows and 0 columns"),
    "swizzled": (swizzled, "swizzled, in tiles of 128x4"),
    "another order": (lambda s: s.flip(0), "in another order"),
    "one for all": (lambda s: torch.full_like(s, float(s.median())), "one scale stands for all blocks"),
    "halved": (lambda s: s / 2, "0.5 times the reference's"),
    "doubled": (lambda s: s * 2, "2 times the reference's"),
}


@pytest.mark.parametrize("spread", ["alike", "unlike"])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in ("mxfp8", "mxfp4") for fault in DISPLACED]
    + [("nvfp4", fault) for fault in DISPLACED if fault not in ("halved", "doubled")],  # E4M3's largest scale has no double
)
def test_scales_of_other_small_blocks_are_told_from_rounded_ones(tmp_path: Path, kind: str, fault: str, spread: str) -> None:
    """Scales of neighbouring blocks are often a factor of 2 apart, as those are that were rounded after the cast."""
    torch.manual_seed(0)
    weights = {name: torch.randn(256, 256).bfloat16() * 0.02 for name in NAMES}
    if spread == "unlike":
        weights = {n: w * torch.exp(0.4 * torch.randn(256, 1)) * torch.exp(0.3 * torch.randn(1, 256)) for n, w in weights.items()}
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
    change, says = DISPLACED[fault]
    file = writers.save(laid_out(kind, weights, change), tmp_path / "model.safetensors")
    report = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    code = "F231" if fault in ("halved", "doubled") else "F232"
    assert [(f.code, f.tensor) for f in report] == [(code, BAD)], [f.message for f in report]
    assert says in report[0].message


@pytest.mark.parametrize("rounding", [torch.floor, torch.ceil, torch.round])
@pytest.mark.parametrize("block", [(1, 32), (1, 320), (128, 128)])
def test_scales_rounded_after_the_cast_keep_their_finding(
    tmp_path: Path, rounding: Callable[[torch.Tensor], torch.Tensor], block: tuple[int, int]
) -> None:
    weights = writers.original()
    tensors = deepseek(weights)
    tensors[BAD], scales = writers.cast(weights[BAD], block)
    tensors.pop(SCALE)
    tensors[f"{BAD}_scale"] = torch.exp2(rounding(torch.log2(scales)))
    if block == (1, 32):
        tensors[f"{BAD}_scale"] = writers.e8m0_bytes(tensors[f"{BAD}_scale"])
    file = writers.save(tensors, tmp_path / "model.safetensors")
    report = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert [(f.code, f.tensor) for f in report] == [("F218", BAD)], [f.message for f in report]


def test_scales_that_are_all_one_are_one_finding(tmp_path: Path) -> None:
    weights = square()
    tensors = deepseek(weights)
    tensors[SCALE] = torch.ones_like(tensors[SCALE])
    file = writers.save(tensors, tmp_path / "model.safetensors")
    original = writers.save(weights, tmp_path / "original.safetensors")
    for against, code in ((None, "F214"), (original, "F232")):
        (finding,) = check_checkpoint(file, against)
        assert (finding.code, finding.tensor) == (code, BAD) and "all scales are 1: they were never loaded" in finding.message
    inverse = deepseek(weights)
    inverse[SCALE] = 1 / inverse[SCALE]
    (finding,) = check_checkpoint(writers.save(inverse, tmp_path / "inverse.safetensors"), original)
    assert finding.code == "F231" and "inverse" in finding.message


def test_a_copied_layer_is_named_at_both_without_a_reference_and_at_the_copy_with_one(tmp_path: Path) -> None:
    weights, other = square(), NAMES[3]
    tensors = deepseek(weights)
    for copy, source in ((BAD, other), (other, BAD)):
        copied = {**tensors, copy: tensors[source], f"{copy}_scale_inv": tensors[f"{source}_scale_inv"]}
        file = writers.save(copied, tmp_path / "model.safetensors")
        (finding,) = check_checkpoint(file)
        assert finding.code == "F221" and {finding.tensor, *finding.also} == {BAD, other}
        assert "either may be the copy" in finding.message
        (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
        assert (finding.code, finding.tensor, finding.also) == ("F221", copy, ())
        assert f"a copy of {source}, which fits the reference" in finding.message
    tied = {**weights, other: weights[BAD]}
    assert list(check_checkpoint(writers.save(deepseek(tied), file), writers.save(tied, tmp_path / "tied.safetensors"))) == []


def test_what_a_damaged_file_or_a_lost_weight_explains_is_told_once(tmp_path: Path) -> None:
    weights = writers.original()
    original = writers.save(weights, tmp_path / "original.safetensors")
    folder = writers.save_sharded(deepseek(weights), tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[-1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) * 2 // 3])
    assert {f.code for f in check_checkpoint(folder, original)} == {"F204"}
    shard.unlink()
    assert {f.code for f in check_checkpoint(folder, original)} == {"F205"}
    tensors = deepseek(weights)
    del tensors[BAD]
    file = writers.save(tensors, tmp_path / "lost.safetensors")
    assert [(f.code, f.tensor) for f in check_checkpoint(file, original)] == [("F236", BAD)]
    assert [(f.code, f.tensor) for f in check_checkpoint(file)] == [("F202", SCALE)]


def test_an_index_that_names_another_shard(tmp_path: Path) -> None:
    folder = writers.save_sharded(deepseek(writers.original()), tmp_path / "model")
    index = next(folder.glob("*.index.json"))
    document = json.loads(index.read_text())
    files = sorted(set(document["weight_map"].values()))
    found = document["weight_map"][BAD]
    document["weight_map"][BAD] = next(file for file in files if file != found)
    index.write_text(json.dumps(document))
    (finding,) = check_checkpoint(folder)
    assert (finding.code, finding.tensor) == ("F205", BAD) and f"but lies in {found}" in finding.message


def test_integer_scales_are_of_the_wrong_type_and_no_others_are_missing(tmp_path: Path) -> None:
    tensors = writers.LAYOUTS["per_channel_bf16"](writers.original())
    tensors[f"{BAD}_scale"] = torch.ones(288, 1, dtype=torch.int32)
    (finding,) = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert (finding.code, finding.tensor) == ("F203", BAD) and "I32" in finding.message


@pytest.mark.parametrize("kind", ["tensor", "2d", "mxfp8"])
def test_transformer_engines_names_need_no_configuration(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    writers.save(writers.LAYOUTS[f"engine_{kind}"](writers.original()), tmp_path / "model.safetensors")
    assert list(check_checkpoint(tmp_path)) == []


def test_one_tensor_scale_is_tensorwise_whatever_the_size(tmp_path: Path) -> None:
    weight = torch.randn(256, 256)
    scale = weight.abs().max() / 448
    file = writers.save({"a.weight": (weight / scale).to(E4), "a.weight_scale": scale.reshape(1)}, tmp_path / "model.safetensors")
    assert check_checkpoint(file).to_dict()["layouts"] == {"compressed-tensors e4m3fn tensorwise": 1}


def test_a_few_damaged_codes_are_found_against_the_original(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = deepseek(weights)
    codes = tensors[BAD].view(torch.uint8).clone()
    codes[5, 7] ^= 0x40
    tensors[BAD] = codes.view(E4)
    file = writers.save(tensors, tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert (finding.code, finding.tensor) == ("F234", BAD) and "1 of 92160 elements" in finding.message
    assert list(check_checkpoint(file)) == [], "which the file alone cannot tell"


def test_codes_of_fnuz_are_one_finding(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = deepseek(weights)
    scales = writers.amaxes(weights[BAD], (128, 128)) / 240
    scaled = (weights[BAD].float() / writers.spread(scales, weights[BAD].shape, (128, 128))).clamp(-240, 240)
    tensors[BAD] = scaled.to(torch.float8_e4m3fnuz).view(torch.uint8).view(E4)
    tensors[SCALE] = scales
    file = writers.save(tensors, tmp_path / "model.safetensors")
    assert [(f.code, f.tensor) for f in check_checkpoint(file)] == [("F215", BAD)]
    (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert finding.code == "F231" and "fnuz codes read as fn" in finding.message


def test_codes_under_powers_of_two_stored_as_bf16(tmp_path: Path) -> None:
    """Their largest is not 448, but within a power of two of it."""
    weights = writers.original()
    tensors = writers.LAYOUTS["deepseek_pow2"](weights)
    tensors[BAD] = (tensors[BAD].float() / 2).to(E4).bfloat16()
    del tensors[SCALE]
    report = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert [(f.code, f.tensor) for f in report] == [("F222", BAD)] and "the largest is 224" in report[0].message


def test_a_second_level_of_zero_is_one_finding(tmp_path: Path) -> None:
    tensors = writers.LAYOUTS["nvfp4_modelopt"](writers.original())
    tensors[f"{BAD}_scale_2"] = torch.zeros_like(tensors[f"{BAD}_scale_2"])
    report = check_checkpoint(writers.save(tensors, tmp_path / "model.safetensors"))
    assert [(f.code, f.tensor) for f in report] == [("F212", BAD)]


def test_one_inverse_scale_is_called_so(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = writers.LAYOUTS["per_tensor"](weights)
    tensors[f"{BAD}_scale"] = 1 / tensors[f"{BAD}_scale"]
    file = writers.save(tensors, tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert finding.code == "F231" and "the stored scale is the inverse of the one that fits" in finding.message


def test_scales_that_waste_the_format_need_lose_nothing_unless_they_are_powers_of_two(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = deepseek(weights)
    scales = writers.amaxes(weights[BAD], (128, 128)) / 448 * 2.0**14
    tensors[BAD] = (weights[BAD].float() / writers.spread(scales, weights[BAD].shape, (128, 128))).to(E4)
    tensors[SCALE] = scales
    file = writers.save(tensors, tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert (finding.code, finding.tensor) == ("F235", BAD)


def _static(folder: Path, lacking: str | None) -> CheckReport:
    """Judge layers under tensor scales with static activation and cache scales, of which one is left out."""
    found: Tensors = {}
    for layer in range(4):
        above = f"model.layers.{layer}.self_attn"
        for part in ("q_proj", "k_proj", "v_proj"):
            weight = torch.randn(64, 64)
            scale = weight.abs().amax() / 448
            name = f"{above}.{part}"
            found |= {f"{name}.weight": (weight / scale).to(E4), f"{name}.weight_scale": scale.reshape(1)}
            found[f"{name}.input_scale"] = torch.tensor([0.01])
        found |= {f"{above}.{part}_scale": torch.tensor([0.02]) for part in "kv"}
    if lacking is not None:
        del found[lacking]
    save_file(found, folder / "model.safetensors")
    return check_checkpoint(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("lacking", "tensor"),
    [
        ("model.layers.2.self_attn.k_proj.input_scale", "model.layers.2.self_attn.k_proj.weight"),
        ("model.layers.1.self_attn.v_scale", "model.layers.1.self_attn.k_proj.weight"),
        (None, None),
    ],
)
def test_an_activation_scale_that_the_others_have(lacking: str | None, tensor: str | None, tmp_path: Path) -> None:
    report = _static(tmp_path, lacking)
    assert [(f.code, f.tensor) for f in report] == ([] if lacking is None else [("F208", tensor)])
    assert all(f"no {str(lacking).rpartition('.')[2]}, which 3 of 4 modules of this role have" in f.message for f in report)


def test_layers_of_another_kind_need_no_activation_scale(tmp_path: Path) -> None:
    found: Tensors = {}
    for layer in range(8):
        above = f"model.layers.{layer}.self_attn"
        has_keys, by_rows = layer < 6, layer == 1
        for part in ("q_proj", "k_proj", "v_proj") if has_keys else ("q_proj",):
            weight = torch.randn(64, 64)
            scale = weight.abs().amax(1, keepdim=True) / 448 if by_rows else (weight.abs().amax() / 448).reshape(1)
            found |= {f"{above}.{part}.weight": (weight / scale).to(E4), f"{above}.{part}.weight_scale": scale}
            if not by_rows:  # its inputs are cast by their own scales
                found[f"{above}.{part}.input_scale"] = torch.tensor([0.01])
        if has_keys and not by_rows:
            found |= {f"{above}.{part}_scale": torch.tensor([0.02]) for part in "kv"}
    save_file(found, tmp_path / "model.safetensors")
    assert [(f.code, f.tensor) for f in check_checkpoint(tmp_path / "model.safetensors") if f.code == "F208"] == []


def test_parts_that_were_joined_under_one_scale(tmp_path: Path) -> None:
    parts = [torch.randn(64, 64) * size for size in (1.0, 0.4, 0.7)]
    scales = [part.abs().amax() / 448 for part in parts]
    codes = torch.cat([(part / scale).to(E4).view(torch.uint8) for part, scale in zip(parts, scales, strict=True)]).view(E4)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file({name: codes, f"{name}_scale": torch.stack(scales).amax().reshape(1)}, tmp_path / "model.safetensors")
    save_file({name: torch.cat(parts)}, tmp_path / "original.safetensors")
    (finding,) = check_checkpoint(tmp_path / "model.safetensors", tmp_path / "original.safetensors")
    assert (finding.code, finding.tensor) == ("F234", name)
    assert "parts that were cast under scales of their own and joined under one" in finding.message

"""Weights that differ by a few percent: a factor, another step, a second rounding and clipped blocks, told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8debug.checkpoints import check_checkpoint
from fp8debug.checkpoints.rules import TensorFinding
from tests.checkpoints import writers

BAD = writers.NAMES[1]
Tensors = writers.Tensors
LAYOUTS = ("deepseek", "deepseek_pow2", "per_tensor", "per_channel_bf16", "mxfp8_e8m0", "mxfp4", "nvfp4")


def found(tmp_path: Path, layout: str, change: Callable[[torch.Tensor], torch.Tensor]) -> list[TensorFinding]:
    """Return the findings of a checkpoint in which one weight was changed before its cast."""
    weights = writers.original()
    tensors = writers.LAYOUTS[layout]({**weights, BAD: change(weights[BAD].float())})
    file = writers.save(tensors, tmp_path / "model.safetensors")
    return list(check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors")))


def noise(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what changes each element by a random share of itself."""
    return lambda x: x * (1 + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("gain", [0.97, 1.03, 1.05])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_small_factor_is_a_factor_in_every_layout(tmp_path: Path, layout: str, gain: float) -> None:
    (finding,) = found(tmp_path, layout, lambda x: gain * x)
    assert (finding.code, finding.tensor) == ("F231", BAD)
    assert finding.value == pytest.approx(gain, abs=0.015)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_a_percent_is_none(tmp_path: Path, layout: str) -> None:
    assert found(tmp_path, layout, lambda x: 1.005 * x) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [0.02, 0.03, 0.1])
def test_noise_is_another_step_and_no_second_rounding(tmp_path: Path, layout: str, size: float) -> None:
    if layout.endswith("fp4") and size < 0.1:
        size *= 3  # FP4 hides less
    (finding,) = found(tmp_path, layout, noise(size))
    assert (finding.code, finding.tensor) == ("F234", BAD)
    assert finding.message.startswith("the weight is that of another step"), "all of it, and not some blocks"


def test_few_codes_off_by_more_are_no_damage_where_many_are_off_by_one(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(5)
    (finding,) = found(tmp_path, "nvfp4", lambda x: x + 0.01 * x.std(1, keepdim=True) * torch.randn(x.shape, generator=random))
    assert finding.code == "F234" and finding.message.startswith("the weight is that of another step")


def test_some_blocks_are_named_where_the_rest_is_the_reference(tmp_path: Path) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:16] = x[16:32].flip(1)
        return x

    for layout in ("nvfp4", "mxfp8_e8m0"):
        (finding,) = found(tmp_path, layout, change)
        assert finding.code == "F234" and "blocks are not the reference's" in finding.message


def rounded(way: str) -> Tensors:
    """Return DeepSeek's layout with one weight rounded otherwise, under the scales of its own amax."""
    weights = writers.original()
    tensors = writers.LAYOUTS["deepseek"](weights)
    scaled = weights[BAD].float() / writers.spread(tensors[f"{BAD}_scale_inv"], weights[BAD].shape, (128, 128))
    _, exponent = torch.frexp(scaled.abs().clamp(min=2.0**-6))
    quantum = torch.ldexp(torch.ones_like(scaled), exponent - 4)
    if way == "towards zero":
        codes = (scaled / quantum).trunc() * quantum
    else:
        codes = (scaled / quantum + torch.rand(scaled.shape, generator=torch.Generator().manual_seed(1))).floor() * quantum
    return {**tensors, BAD: codes.clamp(-448, 448).to(writers.E4)}


@pytest.mark.parametrize(
    ("way", "code", "says"),
    [("towards zero", "F231", "the cast rounds towards zero"), ("at random", "F233", "at random")],
)
def test_other_roundings(tmp_path: Path, way: str, code: str, says: str) -> None:
    file = writers.save(rounded(way), tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(file, writers.save(writers.original(), tmp_path / "original.safetensors"))
    assert (finding.code, finding.tensor) == (code, BAD) and says in finding.message


def fp4(layout: str, x: torch.Tensor, clip: float) -> Tensors:
    """Return one FP4 weight whose scales hold a part of each block's amax."""
    if layout == "nvfp4":
        _, scales, encode = writers.nvfp4(x)
        scales = (scales.float() * clip).to(writers.E4)
        wide = writers.spread(scales, x.shape, (1, 16)) / encode
        more = {"l.0.weight_scale": scales, "l.0.weight_global_scale": encode}
    else:
        floor = torch.exp2(torch.floor(torch.log2(writers.amaxes(x, (1, 32)))) - 2) * clip
        wide, more = writers.spread(floor, x.shape, (1, 32)), {"l.0.weight_scale": writers.e8m0_bytes(floor)}
    return {"l.0.weight_packed": writers.e2m1((x / wide.clamp(min=1e-30)).clamp(-6, 6)), **more}


@pytest.mark.parametrize("data", ["gauss", "uniform", "laplace", "heavy"])
@pytest.mark.parametrize(("layout", "clip"), [("nvfp4", 1.0), ("nvfp4", 0.5), ("mxfp4", 1.0), ("mxfp4", 0.25)])
def test_fp4_blocks_that_clip_are_found_without_a_reference(tmp_path: Path, layout: str, clip: float, data: str) -> None:
    torch.manual_seed(4)
    shape = (256, 256)
    x = {
        "gauss": torch.randn(shape),
        "uniform": 2 * torch.rand(shape) - 1,
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample(shape),
        "heavy": torch.distributions.StudentT(3.0).sample(shape),
    }[data]
    report = check_checkpoint(writers.save(fp4(layout, 0.02 * x, clip), tmp_path / "model.safetensors"))
    assert [finding.code for finding in report] == (["F219"] if clip < 1 else [])


def test_block_scales_that_are_clipped_are_found_without_a_reference(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = writers.LAYOUTS["nvfp4"](weights)
    x = weights[BAD].float()
    encode = 8 * 448 * 6 / x.abs().max()
    scales = (writers.amaxes(x, (1, 16)) / 6 * encode).clamp(max=448).to(writers.E4)
    wide = writers.spread(scales, x.shape, (1, 16)) / encode
    tensors |= {f"{BAD}_packed": writers.e2m1((x / wide.clamp(min=1e-30)).clamp(-6, 6)), f"{BAD}_scale": scales}
    tensors[f"{BAD}_global_scale"] = encode.reshape(1)
    file = writers.save(tensors, tmp_path / "model.safetensors")
    for against in (None, writers.save(weights, tmp_path / "original.safetensors")):
        (finding,) = check_checkpoint(file, against)
        assert (finding.code, finding.tensor) == (
            "F219",
            BAD,
        ) and "block scales are the largest of their format" in finding.message


def test_codes_that_are_exchanged_in_their_bytes(tmp_path: Path) -> None:
    weights = writers.original()
    for layout in ("nvfp4", "mxfp4"):
        tensors = writers.LAYOUTS[layout](weights)
        codes = tensors[f"{BAD}_packed"]
        tensors[f"{BAD}_packed"] = codes >> 4 | codes << 4
        file = writers.save(tensors, tmp_path / f"{layout}.safetensors")
        (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
        assert finding.code == "F234" and finding.message.startswith("the two codes of each byte are exchanged")


def test_codes_of_another_format(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = writers.LAYOUTS["deepseek"](weights)
    codes, tensors[f"{BAD}_scale_inv"] = writers.cast(weights[BAD], fmt=writers.E5)
    tensors[BAD] = codes.view(torch.uint8).view(writers.E4)
    file = writers.save(tensors, tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert finding.code == "F234" and "codes of another format" in finding.message


def test_wrong_scales_of_some_blocks_are_one_finding(tmp_path: Path) -> None:
    weights = writers.original()
    tensors = writers.LAYOUTS["deepseek"](weights)
    tensors[f"{BAD}_scale_inv"][-1] *= 3
    file = writers.save(tensors, tmp_path / "model.safetensors")
    (finding,) = check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))
    assert (finding.code, finding.tensor) == ("F232", BAD)


def test_scales_below_the_range_of_their_type_are_zero_and_warn_nobody(tmp_path: Path) -> None:
    weights = {name: 2e-4 * x if name in writers.NAMES else x for name, x in writers.original().items()}
    tensors = writers.LAYOUTS["deepseek"](weights)
    tensors |= {f"{name}_scale_inv": tensors[f"{name}_scale_inv"].half() for name in writers.NAMES}
    file = writers.save(tensors, tmp_path / "model.safetensors")
    assert [f.code for f in check_checkpoint(file, writers.save(weights, tmp_path / "original.safetensors"))] == ["F212"]

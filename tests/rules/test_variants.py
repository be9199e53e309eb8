"""Variations of known faults: some of those that the bench trains, and scales beside copies of an earlier step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8debug.rules import triage
from tests.bench.relatives import VARIANTS
from tests.bench.relatives.stack import E4M3, NOW, CastFault, OwnLinear, RowLinear, spoiled, train
from tests.bench.situations.stack import LARGEST, expanded
from tests.bench.variants import judged
from tests.scaled_mm import skipped_without_scaled_mm
from tests.shortened import shortened

BY_NAME = {one.name: one for one in VARIANTS}
#: Missed at first and named since: scales older than their weight, rows of NaN whose steps are skipped, a log without errors, an
#: optimizer of one's own over BF16 weights, FP32 weights that are written back to BF16, rows of dgrad's result that are changed
#: after its GEMM, weights that are written back to FP8, an operand without a row; and two sound programs that had a finding.
QUICK = (
    *("dgrad_tail_huge_sixth_step", "weights_kept_in_fp8", "sound_scalar_scales_swapped", "sound_relu_squared_sparse_tokens"),
    *("old_row_scales_twofold", "old_block_scales_load_at_10"),
    *("dgrad_nan_7th_skipped", "te_gradient_underflow_40", "bf16_muon_like"),
    *("bf16_written_back_every5", "sign_lost_in_a_transposed_copy"),
)


@pytest.mark.parametrize("name", shortened(QUICK, 6))
def test_a_variation_is_diagnosed(name: str) -> None:
    with skipped_without_scaled_mm():
        assert judged(BY_NAME[name]) == "right"


def test_no_amax_eps_is_recommended_where_no_block_was_zero(tmp_path: Path) -> None:
    NOW.update(step=0, micro=0)
    BY_NAME["one_block_inf_dgrad"].record(tmp_path)
    (first, *_) = triage(tmp_path / "sick")
    assert (first.code, first.name, first.module, first.gemm) == ("F103", "gemm-nonfinite", "layers.1.attn.v_proj", "dgrad")
    assert "a block of zeros (its operands had none at 2 sampled steps before" in first.message
    assert first.cure.startswith("sample step 5 (every=1) to see which: a scale that is loaded or computed before its first use")


def of_an_earlier_step(what: str, first: int = 6, lag: int = 4) -> CastFault:
    """Return a fault: the scales, or the whole FP8 copy, are those of some steps ago."""
    kept: list[tuple[Tensor, Tensor]] = []

    def change(x: Tensor, data: Tensor, scales: Tensor, layer: OwnLinear) -> tuple[Tensor, Tensor]:
        kept.append((data.clone(), scales.clone()))
        if NOW["step"] < first:
            return data, scales
        old_data, old = kept[-1 - lag]
        block = layer.block("weight" if x.shape == layer.weight.shape else "input", x)
        today = (x.float() / expanded(old, x.shape, block)).clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3)
        return (today, old) if what == "scales" else (old_data, old)

    return change


@pytest.mark.parametrize("linear", shortened([OwnLinear, RowLinear], 2))
@pytest.mark.parametrize(("what", "code"), [("scales", "F113"), ("copy", "F112")])
def test_old_scales_of_a_weight_that_grows_are_told_from_an_old_copy(
    linear: type[OwnLinear], what: str, code: str, tmp_path: Path
) -> None:
    NOW.update(step=0, micro=0)
    model = spoiled("layers.1.mlp.fc1", linear=linear, casts={("fprop", "weight"): of_an_earlier_step(what)})

    @torch.no_grad()
    def grow(step: int) -> None:
        if step >= 6:
            model.layers[1].mlp.fc1.weight.mul_(1.1)

    with skipped_without_scaled_mm():
        train(model, tmp_path / "run", steps=14, before=grow)
    found = triage(tmp_path / "run")
    assert [(f.code, f.module, f.gemm, f.tensor) for f in found] == [(code, "layers.1.mlp.fc1", "fprop", "weight")]
    assert ("scales those of an earlier step" in found[0].message) == (what == "scales")


def test_old_scales_of_an_input_that_grows(tmp_path: Path) -> None:
    NOW.update(step=0, micro=0)
    model = spoiled("layers.1.mlp.fc1", casts={("fprop", "input"): of_an_earlier_step("scales")})
    model.layers[1].norm2.register_forward_hook(lambda module, args, out: out * (1 + 0.2 * max(0, NOW["step"] - 5)))
    train(model, tmp_path / "run", steps=14)
    found = triage(tmp_path / "run")
    assert [(f.code, f.name, f.tensor) for f in found] == [("F113", "wrong-scale", "input")]

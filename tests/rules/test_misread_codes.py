"""F120: codes of one format of 8 bits that are read as another, of every ordered pair of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels import reference
from fp8debug.metrics.base import Source, spread
from fp8debug.recipes import Cast
from fp8debug.rules import Severity, triage
from fp8debug.rules.reading.misread import DATA_FORMATS, PairLimits, codes, misreadings
from fp8debug.types import Quantized
from tests.rules.misread_codes import DOWN, PAIRS, as_codes_of, record
from tests.shortened import shortened

GENERATOR = torch.Generator().manual_seed(0)


def _gaussian() -> Tensor:
    return torch.randn(128, 256, generator=GENERATOR)


TENSORS: dict[str, Callable[[], Tensor]] = {
    "gaussian": _gaussian,
    "heavy tails": lambda: _gaussian() ** 3,
    "unequal rows": lambda: _gaussian() * torch.logspace(-3, 0, 128).unsqueeze(1),
    "after ReLU": lambda: _gaussian().clamp(min=0),
    "after GELU": lambda: torch.nn.functional.gelu(_gaussian()),
    "uniform": lambda: torch.rand(128, 256, generator=GENERATOR),
    "one outlier": lambda: torch.cat([torch.full((1, 256), 1e-3), _gaussian()]).index_fill(0, torch.tensor(0), 300.0),
    "a block of zeros": lambda: _gaussian().index_fill(0, torch.arange(64), 0.0),
}
CASTS = {
    f"{granularity} {rounding}": Cast(granularity=granularity, scale_rounding=rounding)
    for granularity, rounding in (
        ("tensorwise", "none"),
        ("tensorwise", "pow2_ceil"),
        ("rowwise", "none"),
        ("1x128", "pow2_ceil"),
        ("128x128", "none"),
    )
}


def _row(x: Tensor, cast: Cast, q: Quantized) -> dict[str, object]:
    return reference.all_values(reference.statistics(reference.operand_pair(Source(x), cast, q)))


@pytest.mark.parametrize(("made", "read"), PAIRS)
def test_codes_are_read_as_torch_reads_them(made: str, read: str) -> None:
    values, others = codes(FORMATS[made], FORMATS[read])
    bits = torch.tensor(values).to(getattr(torch, made_dtype(made))).view(torch.uint8)
    found = bits.view(getattr(torch, made_dtype(read))).float().tolist()
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, others, strict=True))


def made_dtype(name: str) -> str:
    return FORMATS[name].torch_dtype


@pytest.mark.parametrize(("made", "read"), PAIRS)
@pytest.mark.parametrize("granularity", CASTS)
def test_every_pair_is_named_in_any_tensor(made: str, read: str, granularity: str) -> None:
    cast = replace(CASTS[granularity], format=read)
    for name, tensor in TENSORS.items():
        x = tensor()
        q = as_codes_of(made, read, reference.quantize(x, replace(cast, format=made)))
        row = _row(x, cast, q)
        found = misreadings(row, cast, PairLimits())
        assert made in [one.made.name for one in found], (name, found)
        assert len(found) == 1 or cast.scale_rounding != "none", (name, found)
        assert row["sqnr_db"] < 10, name  # type: ignore[operator]


@pytest.mark.parametrize("granularity", CASTS)
@pytest.mark.parametrize("name", [fmt.name for fmt in DATA_FORMATS])
def test_a_sound_cast_reads_its_own_codes(name: str, granularity: str) -> None:
    cast = replace(CASTS[granularity], format=name)
    for tensor in TENSORS.values():
        x = tensor()
        assert misreadings(_row(x, cast, reference.quantize(x, cast)), cast, PairLimits()) == ()


@pytest.mark.parametrize("granularity", CASTS)
@pytest.mark.parametrize(("made", "read"), PAIRS)
def test_a_cast_that_clips_under_scales_of_another_format_is_no_misreading(made: str, read: str, granularity: str) -> None:
    cast = replace(CASTS[granularity], format=read)
    for name, tensor in TENSORS.items():
        x = tensor()
        scales = reference.quantize(x, replace(cast, format=made)).scale_inv
        limit = FORMATS[read].max
        scaled = x / spread(scales, *block_shape(cast.granularity, *x.shape), *x.shape)
        data = scaled.clamp(-limit, limit).to(getattr(torch, made_dtype(read)))
        row = _row(x, cast, Quantized(data, scales))
        assert misreadings(row, cast, PairLimits()) == (), name


#: One granularity for each pair and operand: all three, and each pair at both operands.
PLANTED = [
    (pair, key, recipe)
    for place, pair in enumerate(PAIRS)
    for key, recipe in (
        (("fprop", "weight"), ("rowwise", "blockwise", "tensorwise_current")[place % 3]),
        (("fprop", "input"), ("blockwise", "tensorwise_current", "rowwise")[place % 3]),
    )
]


@pytest.mark.parametrize(("pair", "key", "recipe"), shortened(PLANTED, 3))
def test_a_planted_pair_is_found_alone(pair: tuple[str, str], key: tuple[str, str], recipe: str, tmp_path: Path) -> None:
    made, read = pair
    record(tmp_path / "run", made, read, key, recipe)
    (finding,) = triage(tmp_path / "run")
    assert (finding.code, finding.module, finding.gemm, finding.tensor) == ("F120", DOWN, *key)
    assert finding.severity is Severity.ERROR
    assert f"codes of {made} are read as {read}" in finding.message
    # Of one largest value: a factor of two is another way to it, but for the NaN of -0.
    is_shared = pair == ("e5m2fnuz", "e5m2") or (pair == ("e5m2", "e5m2fnuz") and "NaN" not in finding.message)
    assert ("or a factor of two" in finding.message) is is_shared
    assert finding.cure.startswith(f"tell the GEMM that the operand is {made}, or cast it to {read}")


def test_a_pair_of_one_maximum_apart_under_scales_of_powers_of_two_has_two_readings(tmp_path: Path) -> None:
    record(tmp_path / "run", "e4m3fnuz", "e4m3fn", ("fprop", "weight"), "blockwise_pow2")
    (finding,) = triage(tmp_path / "run")
    assert (finding.code, finding.name, finding.module) == ("F113", "wrong-scale", DOWN)
    assert finding.message.endswith("its scale_inv does not belong to its data, or its codes are of e4m3fnuz and read as e4m3fn")

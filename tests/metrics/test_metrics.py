"""The registered metrics as a whole: names, units and kinds; then what each records of small tensors, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8debug.kernels.dispatch import measure, operand_pair, quantize, statistics
from fp8debug.metrics import METRICS, Pair, Source, derived_columns, slots
from fp8debug.metrics.damage import Damage
from fp8debug.recipes import Cast

ONE = Cast(scaling="static", scale_inv=1.0)

#: Names that other tools read; they stay.
STORED = """
    numel num_zero num_nan num_inf num_actual_nonfinite num_underflow num_subnormal num_saturated amax amin
    sum_x sum_x2 sum_y2 sum_xy sum_err sum_err2 max_abs_err scale_inv_min scale_inv_max scale_inv_sum_log2
    num_blocks num_zero_blocks num_eps_blocks headroom worst_block_nmse max_block_range_log2 log2_hist
    damage num_damage_rows
""".split()
DERIVED = """
    zero_rate nonfinite_rate actual_nonfinite_rate underflow_rate underflow_nonzero_rate subnormal_rate overflow_rate
    mse nmse sqnr_db cosine gain norm_ratio bias rms range_log2 scale_inv_mean_log2 zero_block_rate eps_block_rate
    scale_log2_ratio worst_block_sqnr_db damage_per_row
""".split()


def test_names_are_a_public_interface() -> None:
    assert set(slots()) >= set(STORED)
    assert set(derived_columns()) >= set(DERIVED)
    assert set(measure(torch.ones(2, 2), Cast())) == set(slots()) | set(derived_columns())


def test_every_name_is_given_once() -> None:
    assert len([slot for metric in METRICS for slot in metric.slots]) == len(slots())
    assert len([name for metric in METRICS for name in metric.derived]) == len(derived_columns())
    assert not set(slots()) & set(derived_columns())


def test_slots_keep_their_kind() -> None:
    """Counts are int64 and add up, sums float64; a float32 is an extreme, never a count or a sum."""
    for slot in slots().values():
        expected = {"int64": "sum", "float64": "sum"}.get(slot.kind)
        assert slot.merge == expected or (slot.kind == "float32" and slot.merge in ("max", "min")), slot.name
        assert slot.name.startswith("num") == (slot.kind == "int64" and slot.size == 1), slot.name
        assert slot.doc and slot.unit


def test_units_are_in_the_name() -> None:
    for name, column in derived_columns().items():
        assert name.endswith("_db") == (column.unit == "dB"), name
        assert (name.endswith("_log2") or "_log2_" in name) == (column.unit == "log2"), name
        assert not name.endswith("_rate") or column.unit == "1", name
        assert column.doc, name


def test_every_metric_says_which_count_it_needs() -> None:
    for metric in METRICS:
        assert slots()[metric.present].kind == "int64", metric.name


def test_small_tensor_by_hand() -> None:
    """Under scale 1: 17 ties to 16, 500 clips to 448, 2^-11 vanishes, 2^-8 is subnormal."""
    x = torch.tensor([[17.0, -500.0, 2.0**-11, 2.0**-8, 0.0, 1.0]])
    found: dict[str, Any] = measure(x, ONE)
    counts = ("numel", "num_zero", "num_underflow", "num_subnormal", "num_saturated", "num_actual_nonfinite")
    assert [found[name] for name in counts] == [6, 1, 1, 1, 1, 0]
    assert (found["amax"], found["amin"], found["max_abs_err"]) == (500.0, 2.0**-11, 52.0)
    assert found["sum_x"] == 17 - 500 + 2.0**-11 + 2.0**-8 + 1
    assert found["sum_err"] == -1 + 52 - 2.0**-11
    assert found["sum_err2"] == 1 + 52**2 + 2.0**-22
    assert found["sum_xy"] == 17 * 16 + 500 * 448 + 2.0**-16 + 1
    assert found["sum_y2"] == 16**2 + 448**2 + 2.0**-16 + 1
    assert found["mse"] == found["sum_err2"] / 6 and found["bias"] == found["sum_err"] / 6
    assert found["gain"] == found["sum_xy"] / found["sum_x2"]
    assert found["headroom"] == pytest.approx(500 / 448)
    assert found["range_log2"] == math.log2(500 * 2**11)
    assert found["rms"] == math.sqrt(found["sum_x2"] / 6)


def test_scales_of_blocks_by_hand() -> None:
    x = torch.zeros(4, 256)
    x[0, :128], x[0, 128:], x[1, 0] = 448.0, 7.0, 1e-13
    found: dict[str, Any] = measure(x, Cast(granularity="1x128", scale_rounding="pow2_ceil", amax_eps=7 * 2.0**-40))
    assert [found[n] for n in ("num_blocks", "num_zero_blocks", "num_eps_blocks")] == [8, 5, 1]
    assert (found["scale_inv_min"], found["scale_inv_max"]) == (2.0**-46, 1.0)
    assert found["scale_inv_sum_log2"] == 0 - 6 - 46 and found["scale_inv_mean_log2"] == -52 / 3
    assert (found["num_scales"], found["scale_inv_sum2_log2"]) == (3, 36 + 46**2)
    assert found["scale_inv_std_log2"] == pytest.approx(((36 + 46**2) / 3 - (52 / 3) ** 2) ** 0.5)
    assert measure(x[:1, :128] * 3, Cast())["scale_inv_std_log2"] == 0, "one scale has no spread"
    equal: dict[str, Any] = measure(torch.full((64, 256), 0.3), Cast(granularity="1x128"))
    assert (equal["num_scales"], equal["scale_inv_std_log2"]) == (128, 0), "nor have equal ones, whatever their sums round to"
    assert found["zero_block_rate"] == 5 / 8 and found["eps_block_rate"] == 1 / 8


@pytest.mark.parametrize("cast", [Cast(granularity="1x128"), Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn")])
def test_a_block_of_which_the_scale_is_nan_has_no_small_amax(cast: Cast) -> None:
    x = torch.ones(4, 128)
    q = quantize(x, cast)
    broken = q._replace(scale_inv=torch.full_like(q.scale_inv, math.nan))
    found = statistics(operand_pair(x, cast, broken))
    assert found["num_eps_blocks"] == 0 and found["num_actual_nonfinite"] == x.numel()
    assert math.isnan(found["scale_inv_sum_log2"])


def test_worst_block_by_hand() -> None:
    x = torch.ones(2, 256)
    x[1, 130] = 2.0**-8
    x[1, 128:130] = 448.0  # under scale 1 the ones stay exact
    x[1, 131:] = 17.0
    found: dict[str, Any] = measure(x, Cast(granularity="1x128"))
    signal = 2 * 448**2 + 2.0**-16 + 125 * 17**2
    assert found["worst_block_nmse"] == pytest.approx(125 / signal, rel=1e-6)
    assert found["worst_block_sqnr_db"] == pytest.approx(10 * math.log10(signal / 125), abs=1e-5)
    assert found["max_block_range_log2"] == pytest.approx(math.log2(448 * 256))


def test_results_have_no_scales() -> None:
    x = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
    found = statistics(Pair(source=Source(x), y=x * 1.5))
    assert "scale_inv_min" not in found and "log2_hist" not in found and "num_underflow" not in found
    assert "damage" not in found
    assert float(found["sum_err2"]) == 0.25 * 21 and int(found["num_zero"]) == 1


def test_nonfinite_results_are_counted_and_left_out_of_sums() -> None:
    x = torch.tensor([[1.0, 2.0, math.nan, math.inf, 3.0]])
    y = torch.tensor([[1.0, math.nan, 1.0, math.inf, -math.inf]])
    found = statistics(Pair(source=Source(x), y=y))
    assert int(found["num_actual_nonfinite"]) == 2
    assert (int(found["num_nan"]), int(found["num_inf"])) == (1, 1)
    assert float(found["sum_x2"]) == float(found["sum_y2"]) == float(found["sum_xy"]) == 1
    assert float(found["max_abs_err"]) == 0


def test_damage_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    y = x + torch.tensor([[1.0, 0.0], [1.0, -1.0], [0.5, 0.0]])
    grad = torch.tensor([[2.0, 100.0], [3.0, 3.0], [math.inf, 0.0]])
    found = Damage().partial(Pair(source=Source(x), y=y, grad=grad))
    assert float(found["damage"]) == 4.0, "(2 * 1)^2 + (3 - 3)^2; a row whose gradient is not finite is left out"
    assert int(found["num_damage_rows"]) == 3


def test_the_source_is_looked_at_once_for_all_casts() -> None:
    source = Source(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    first = statistics(operand_pair(source, Cast(), quantize(source.x, Cast())))
    second = statistics(operand_pair(source, ONE, quantize(source.x, ONE)))
    assert first["log2_hist"] is second["log2_hist"] and first["num_zero"] is second["num_zero"]
    assert float(first["sum_err2"]) != float(second["sum_err2"])


def test_a_skipped_slot_leaves_its_metric_out() -> None:
    x = torch.ones(2, 2)
    found = statistics(operand_pair(x, ONE, quantize(x, ONE)), skip="log2_hist")
    assert "log2_hist" not in found and "numel" in found


def test_num_tensors_counts_even_the_empty() -> None:
    x = torch.zeros(0, 8)
    found = statistics(operand_pair(x, ONE, quantize(x, ONE)))
    assert list(found) == ["num_tensors"] and int(found["num_tensors"]) == 1

"""Situations of public bug reports: some of those that the bench rebuilds, and the score in docs/triage.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fp8debug
from fp8debug.rules import triage
from tests.bench import situations
from tests.bench.situations import OUTCOMES, SITUATIONS, Expected, outcome
from tests.bench.turns import take_turns
from tests.scaled_mm import skipped_without_scaled_mm
from tests.shortened import shortened
from tests.synthetic import build

ROOT = Path(__file__).parents[2]
BY_NAME = {one.name: one for one in SITUATIONS}
#: One of each kind: a GEMM, a gradient, a sum, a cached weight, inference by bias and by one factor, routing.
QUICK = (
    *("padded_scales", "no_gradient", "doubled_gradients", "scale_of_cached_weight"),
    *("bias_dropped", "reciprocal_scale", "routing_differs", "nan_of_a_fused_wgrad"),
    *("every_fourth_column_is_dead", "mask_of_the_other_shape", "weights_from_the_gradient_buffer"),
    *("offloaded_input_read_too_early", "not_gathered_after_loading", "e5m2_read_as_e4m3", "gradients_on_top_of_weights"),
    *("norm_output_is_overwritten", "no_weight_gradient", "rounded_by_a_reload"),
    *("maximum_below_two", "scale_of_the_first_rank", "masters_of_fp8_values", "rows_stored_in_the_first"),
    *("unwritten_scales_of_padding", "history_lost_on_resume", "moments_lost_on_resume"),
    *("gate_and_up_excluded_in_rollout", "cast_after_an_export_in_bf16"),
    *("stale_placeholder", "gradient_of_an_empty_group", "one_use_counted_twice", "transpose_unpacked_first"),
    *("a_step_before_the_scalers", "parameters_replaced", "learning_rate_of_a_late_group", "masked_whole"),
    *("least_variance_rounds_to_zero", "rollout_on_another_schedule"),
    *("clipped_before_they_are_unscaled", "fp16_without_a_loss_scale", "second_moment_rounds_to_zero"),
    *("normalized_update_of_zeros", "garbage_columns_now_and_then", "cache_scales_of_the_dummy_weights", "loss_in_bf16"),
)
#: Of these, what `make test` has of a NaN, a gradient, an operand, a scale, a copy of the weights, an optimizer and a rollout.
SHORT = {
    *("nan_of_a_fused_wgrad", "padded_scales", "masked_whole", "one_use_counted_twice", "reciprocal_scale"),
    *("cast_after_an_export_in_bf16", "no_weight_gradient", "e5m2_read_as_e4m3", "norm_output_is_overwritten"),
    *("least_variance_rounds_to_zero", "rollout_on_another_schedule", "maximum_below_two"),
}
#: Of these, those with long trainings: each Linear is recorded in its turn, which takes half the time, as in a long run.
IN_TURNS = {
    "moments_lost_on_resume",
    "learning_rate_of_a_late_group",
    "a_step_before_the_scalers",
    "clipped_before_they_are_unscaled",
    "gradient_of_an_empty_group",
    "second_moment_rounds_to_zero",
    "history_lost_on_resume",
    "loss_in_bf16",
    "normalized_update_of_zeros",
    "rollout_on_another_schedule",
    "transpose_unpacked_first",
    "one_use_counted_twice",
    "masked_whole",
    "parameters_replaced",
    "cache_scales_of_the_dummy_weights",
    "least_variance_rounds_to_zero",
    "fp16_without_a_loss_scale",
}
TURNS = 4


@pytest.mark.parametrize("name", shortened(QUICK, SHORT))
def test_a_public_report_is_diagnosed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = BY_NAME[name]
    monkeypatch.setattr(fp8debug, "watch", fp8debug.watch)  # as it was, after the test
    take_turns(TURNS if name in IN_TURNS else 1)
    with skipped_without_scaled_mm():
        one.record(tmp_path)
    found = triage(tmp_path / "sick")
    clean = triage(tmp_path / "clean") if (tmp_path / "clean").exists() else []
    assert found.classification is not None
    assert outcome(found, found.classification, clean, one.expected) == "right", [f.message for f in found]


def test_those_in_turns_are_among_them() -> None:
    assert set(QUICK) >= IN_TURNS


def test_what_is_right_is_not_everything(tmp_path: Path) -> None:
    healthy = triage(build(tmp_path / "run"))
    assert healthy.classification is not None
    for one in SITUATIONS:
        if not one.expected.clean:
            assert outcome(healthy, healthy.classification, [], one.expected) == "silent", one.name
    assert outcome(healthy, healthy.classification, [], Expected(clean=True)) == "right"


def test_the_page_has_the_score_of_every_report() -> None:
    files = {path.stem for path in Path(situations.__file__).parent.glob("*.py")} - {"__init__", "stack"}
    assert {one.record.__module__ for one in SITUATIONS} == {f"{situations.__name__}.{name}" for name in files}
    text = (ROOT / "docs" / "triage.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[?([\w./-]+#\d+)[^|]*\| [^|]+ \| (\d+) \| ([\w ]+) \| ([\w ]+) \|$", text, re.MULTILINE)
    expected = [(one.reference, str(one.round), one.first) for one in SITUATIONS]
    assert [tuple(row[:3]) for row in rows] == expected
    now = [row[3] for row in rows]
    assert set(now) <= set(OUTCOMES)
    for some in (now, [row[3] for row in rows if row[1] == "2"]):
        assert len(some) >= 15 and some.count("right") >= 0.8 * len(some) and "misled" not in some


def test_the_page_counts_first_sight_by_round() -> None:
    text = (ROOT / "docs" / "triage.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    counts = {int(row[0]): [int(cell) for cell in row[1:]] for row in found}
    assert sorted(counts) == sorted({one.round for one in SITUATIONS})
    for number, (total, *by_outcome) in counts.items():
        first = [one.first for one in SITUATIONS if one.round == number]
        assert (total, by_outcome) == (len(first), [first.count(name) for name in OUTCOMES]), number

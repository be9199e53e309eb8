"""The statistics of an experiment: bands, verdicts, divergence, sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from fp8debug.trials.gap import Band, assess, interval, mean_band, ratio_band, sentence

NAN = math.nan


def curve(level: float, steps: int = 40, *, seed: int = 0, noise: float = 0.01) -> list[float]:
    """Return a falling loss that ends near ``level``; curves of one seed share their noise, as arms of one seed do."""
    wobble = np.random.default_rng(seed).normal(0, noise, steps)
    return [float(level + 2 * math.exp(-i / 5) + w) for i, w in enumerate(wobble)]


def curves(bf16: Sequence[float], fp8: Sequence[float], **arms: Sequence[float]) -> dict[str, dict[int, list[float]]]:
    """Return curves that end at these levels, one for each repeat."""
    levels = {"bf16": bf16, "fp8": fp8, **arms}
    return {name: {r: curve(x, seed=r) for r, x in enumerate(found)} for name, found in levels.items()}


def test_a_mean_has_student_s_interval() -> None:
    band = mean_band(np.array([1.0, 2.0, 3.0]))  # s = 1, t(2) = 4.303, 4.303 / sqrt(3) = 2.484
    assert (
        band.value == 2 and band.low == pytest.approx(2 - 2.4843, abs=1e-3) and band.high == pytest.approx(2 + 2.4843, abs=1e-3)
    )


def test_a_ratio_has_no_noise_where_its_samples_are_in_proportion() -> None:
    below = np.array([1.0, 2.0, 4.0])
    assert ratio_band(0.5 * below, below) == pytest.approx(Band(0.5, 0.5, 0.5))
    assert ratio_band(np.array([1.0, 1.0]), np.array([1.0, -1.0])).value is not None


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        gap = rng.normal(0.1, 0.02, 3)
        closed = gap * 0.7 + rng.normal(0, 0.01, 3)
        band = ratio_band(closed, gap)
        inside += band.low <= 0.7 <= band.high
    assert 0.92 < inside / 400 < 0.985


def test_one_sample_has_no_band() -> None:
    band = mean_band(np.array([1.5]))
    assert band == Band(1.5, -math.inf, math.inf)
    assert json.dumps(band.to_dict(), allow_nan=False) == '{"value": 1.5, "low": null, "high": null}'
    assert interval(band) == "[one sample: no band]"


def test_the_share_of_a_closed_gap_is_one() -> None:
    found = assess(
        curves([2.0, 2.1, 2.2], [2.5, 2.62, 2.68], good=[2.0, 2.11, 2.2], half=[2.25, 2.36, 2.44], bad=[2.5, 2.6, 2.7])
    )
    assert found.verdict == "gap" and found.gap is not None and found.gap.value == pytest.approx(0.5, abs=0.01)
    assert found.num_steps == 40 and found.num_last == 10
    shares = {name: arm.share.value for name, arm in found.arms.items() if arm.share}
    assert shares == pytest.approx({"bf16": 1, "fp8": 0, "good": 0.993, "half": 0.5, "bad": 0.0}, abs=0.01)
    assert {name: arm.closed for name, arm in found.arms.items()} == {
        "bf16": "yes",
        "fp8": "no",
        "good": "yes",
        "half": "partly",
        "bad": "no",
    }
    assert sentence(found).startswith("FP8 trains +0.5")


@pytest.mark.parametrize(
    ("fp8", "reason"),
    [
        ([2.0, 2.12, 2.19], "within the noise"),
        ([2.004, 2.1041, 2.2039], "below the gap that counts"),
        ([1.5, 1.6, 1.7], "FP8 trains below BF16"),
    ],
)
def test_a_gap_that_is_none_is_said_to_be_none(fp8: list[float], reason: str) -> None:
    found = assess(curves([2.0, 2.1, 2.2], fp8, arm=fp8))
    assert found.verdict == "nothing_to_close"
    assert "nothing to close" in sentence(found) and reason in sentence(found)
    assert found.arms["arm"].share is None and found.arms["arm"].closed is None


def test_a_divergence_is_an_infinite_gap_that_is_closed_or_not() -> None:
    found = assess(
        {
            "bf16": {0: curve(2.0), 1: curve(2.1, seed=1)},
            "fp8": {0: curve(2.0), 1: [*curve(2.1, 20, seed=1), *[NAN] * 20]},
            "good": {0: curve(2.0), 1: curve(2.1, seed=1)},
            "bad": {0: [*curve(2.0, 30), math.inf], 1: curve(2.1, seed=1)},
        }
    )
    assert found.verdict == "diverged" and found.gap is None
    assert sentence(found) == "FP8 diverges in 1 of 2 repeats, BF16 in none: the gap is infinite"
    assert (found.arms["good"].closed, found.arms["bad"].closed) == ("yes", "no")
    assert found.arms["good"].share is None and found.arms["bad"].num_diverged == 1
    assert found.arms["bad"].loss == pytest.approx(2.1, abs=0.02)  # of the repeat that did not diverge


def test_a_bf16_that_diverges_is_not_fp8_s_doing() -> None:
    found = assess({"bf16": {0: [NAN] * 9}, "fp8": {0: curve(2.0)}})
    assert sentence(found) == "BF16 itself diverges in 1 of 1 repeats: not FP8's doing"


def test_only_what_both_have_is_compared() -> None:
    assert assess({}).verdict == "incomplete"
    assert assess({"bf16": {0: curve(2.0)}, "fp8": {}}).verdict == "incomplete"
    found = assess({"bf16": {0: curve(2.0), 1: curve(2.0)}, "fp8": {0: curve(2.5, 25)}, "arm": {1: curve(2.0)}})
    assert found.num_steps == 25 and found.arms["fp8"].num_repeats == 1 and found.arms["arm"].num_repeats == 0
    assert found.arms["arm"].closed is None and found.arms["arm"].loss is None


@pytest.mark.parametrize("repeats", [1, 2])
def test_few_repeats_are_judged_by_their_steps(repeats: int) -> None:
    levels = [2.0, 2.3][:repeats]
    few = assess(curves(levels, [x + 0.1 for x in levels]))
    assert few.verdict == "gap" and few.gap and few.gap.high - few.gap.low < 0.02


def test_the_noise_of_steps_is_in_the_band() -> None:
    found = assess({"bf16": {0: curve(2.0)}, "fp8": {0: curve(2.5)}, "arm": {0: curve(2.1, seed=7)}}, last=16)
    share = found.arms["arm"].share
    assert share and share.low < 0.8 < share.high and found.num_last == 16

"""Every metric has words, one group, and its column's name beside them."""

from __future__ import annotations

from collections import Counter

from fp8debug_dashboard.data import metric_labels
from fp8debug_dashboard.data.metric_labels import GROUPS, grouped, label_of, with_name
from fp8debug_dashboard.data.queries import metrics
from fp8debug_dashboard.pages.heatmap import metric_options


def test_groups_hold_columns_that_there_are_and_each_once() -> None:
    listed = [name for words in GROUPS.values() for name in words]
    assert set(listed) <= set(metrics()) and max(Counter(listed).values()) == 1
    found = [name for _, names in grouped(list(metrics())) for name in names]
    assert sorted(found) == sorted(metrics()), "no metric is left out of the menu"


def test_no_two_metrics_have_the_same_words() -> None:
    words = Counter(with_name(name) for name in metrics())
    assert max(words.values()) == 1
    assert (
        label_of("overflow_rate") == "overflow, saturated" and with_name("overflow_rate") == "overflow, saturated (overflow_rate)"
    )
    assert label_of("num_rows") == "rows that were judged one by one" and label_of("lr") == "learning rate"
    assert label_of("no_such") == with_name("no_such") == "no_such"


def test_a_menu_lists_what_was_recorded_by_group() -> None:
    options = metric_options(["amax", "sqnr_db", "num_rows"])
    assert [option["group"] for option in options] == ["precision", "the tensor itself", metric_labels.REST]
    assert options[0]["items"] == [{"value": "sqnr_db", "label": "SQNR, dB (sqnr_db)"}]

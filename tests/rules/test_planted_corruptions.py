"""A floor under every verdict: corruptions that no rule was made for are named, with their site and what the numbers leave.

At first sight 8 of the 13 that can be seen in what is recorded were right, 4 had another cause at the right site or were silent
(a weight of another expert, the cast of an old input, a clamp at another maximum, rows of a gradient that are lost), and one was
planted above section 4's limits (sums cut to BF16 every 16 elements of 384: 45 dB) and is planted harder since. Of ten more in
other recipes (``rows_reversed_rowwise`` and those after it) 8 were right; of a tensor scale applied twice F147 had not been
expected, and a weight in NVFP4 without its negative values was silent at 3 dB.
``bias_dropped`` was named as not watched until F151.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fp8debug.rules import Severity, triage
from tests.rules.planted_corruptions import CORRUPTIONS
from tests.scaled_mm import skipped_without_scaled_mm
from tests.shortened import shortened

#: What a program may do on purpose is information.
ON_PURPOSE = ("gradient_lost_under_torchao", "bias_dropped")


@pytest.mark.parametrize("name", shortened(CORRUPTIONS, 4))
def test_a_corruption_is_named(name: str, tmp_path: Path) -> None:
    planted = CORRUPTIONS[name]
    if "torchao" in name:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
            pytest.importorskip("torchao.float8")
    with skipped_without_scaled_mm():
        planted.record(tmp_path / "run")
    found = triage(tmp_path / "run")
    assert found.classification is not None
    if not planted.codes:
        assert any(all(word in line for word in planted.words) for line in found.classification["evidence"])
        return
    assert found, found.classification["what"]
    first = found[0]
    assert first.module in planted.modules and first.code in planted.codes, first.message
    assert not planted.sites or (first.gemm, first.tensor) in planted.sites
    assert any(word in first.message for word in planted.words), first.message
    assert len(found) == 1, [f.message for f in found]
    assert (first.severity is Severity.INFO) == (name in ON_PURPOSE)

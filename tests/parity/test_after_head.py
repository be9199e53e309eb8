"""Changes of a head's output by its model: caps and factors in one path alone, and engines whose head gives capped logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fp8debug.parity import ParityReport, compare_paths, record_path
from tests.bench.parity_models import Decoder, tokens, training

Change = Callable[[Tensor], Tensor]


def capped(cap: float) -> Change:
    """Return what caps logits, as Gemma 2 does."""
    return lambda x: cap * torch.tanh(x / cap)


class Changed(Decoder):
    """The decoder, with logits that are made of its head's output."""

    change: Change

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.change(super().forward(input_ids))


class CappedHead(nn.Module):
    """A head that gives the final logits itself, as vLLM's compute_logits does."""

    def __init__(self, head: nn.Linear, change: Change) -> None:
        super().__init__()
        self.weight, self.change = head.weight, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(nn.functional.linear(x, self.weight))


def model(change: Change | None) -> Decoder:
    """Return a model in BF16 with larger logits than an untrained one's."""
    found = training("llama", 0, recipe=None)
    with torch.no_grad():
        found.lm_head.weight.mul_(8)
    if change is not None:
        found.__class__ = Changed
        found.change = change  # type: ignore[assignment]  # the class has just been set
    return found


def compared(tmp_path: Path, ours: nn.Module, theirs: nn.Module) -> ParityReport:
    record_path(ours, tokens(0), tmp_path / "train")
    record_path(theirs, tokens(0), tmp_path / "rollout")
    return compare_paths(tmp_path / "train", tmp_path / "rollout")


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (capped(5), None, "the training caps it at 5 and the rollout takes the head's output"),
        (None, capped(5), "the training takes the head's output and the rollout caps it at 5"),
        (capped(5), capped(8), "the training caps it at 5 and the rollout caps it at 8"),
        (None, lambda x: x / 2, "the rollout multiplies it by 0.5"),
        (None, lambda x: x.abs(), "the rollout makes other logits of the head's output, by no cap and no factor"),
    ],
)
def test_logits_that_are_changed_after_the_head(tmp_path: Path, ours: Change | None, theirs: Change | None, says: str) -> None:
    (finding,) = compared(tmp_path, model(ours), model(theirs))
    assert (finding.code, finding.module, finding.tensor) == ("F306", "lm_head", "logits")
    assert says in finding.message


def test_a_cap_that_changes_little_is_told_from_nothing_or_not_at_all(tmp_path: Path) -> None:
    says = {5.0: "the rollout caps it at 5", 42.0: "by too little to tell a cap or a factor from rounding"}
    for cap, text in says.items():
        ours, theirs = model(None), model(capped(cap))
        for one in (ours, theirs):
            with torch.no_grad():
                one.lm_head.weight.mul_(0.25)
        (finding,) = compared(tmp_path / str(cap), ours, theirs)
        assert text in finding.message and finding.message.count("takes the head's output") <= 1


def test_equal_changes_are_none(tmp_path: Path) -> None:
    for number, change in enumerate((capped(5), lambda x: 0.5 * x, lambda x: x.float())):
        assert list(compared(tmp_path / str(number), model(change), model(change))) == []


def test_logits_that_differ_by_a_number_for_each_token_are_the_same_distribution(tmp_path: Path) -> None:
    assert list(compared(tmp_path, model(None), model(lambda x: x.float().log_softmax(-1)))) == []


def test_a_head_that_gives_capped_logits_is_that_of_a_model_that_caps_them(tmp_path: Path) -> None:
    engine = model(None)
    engine.lm_head = CappedHead(engine.lm_head, capped(5))  # type: ignore[assignment]  # as engines have it
    assert list(compared(tmp_path / "a", model(capped(5)), copy.deepcopy(engine))) == []
    for number, (change, says) in enumerate([(capped(8), "caps it at 8"), (None, "takes the head's output")]):
        (finding,) = compared(tmp_path / f"b{number}", model(change), engine)
        assert (finding.code, finding.module, finding.tensor) == ("F306", "lm_head", "logits")
        assert finding.message.endswith(f"the training {says} and the rollout caps it at 5")


def test_logits_that_the_head_gives_are_written_once(tmp_path: Path) -> None:
    record_path(model(None), tokens(0), tmp_path / "dump")
    record_path(model(capped(5)), tokens(0), tmp_path / "capped")
    number = [len(list((tmp_path / name).iterdir())) for name in ("dump", "capped")]
    assert number[1] == number[0] + 1

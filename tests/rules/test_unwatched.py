"""What a run did not look at is named in every report, with exact counts, and is no finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug.reports.page import to_html
from fp8debug.rules import Findings
from fp8debug.rules.reading.unwatched import in_words, unwatched
from fp8debug_cli.main import status
from fp8debug_dashboard.web.triage_process import packed, unpacked
from tests.synthetic import build


class Words(nn.Module):
    """An embedding, two Linears with biases, a norm, positions and a head, which may share the embedding's weight."""

    def __init__(self, *, tied: bool = False, again: bool | None = None, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.embed = nn.Embedding(32, 64)
        self.places = nn.Parameter(torch.zeros(16, 64))
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 32, bias=False)
        self.again = again
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.places
        inner = lambda x: self.down(functional.gelu(self.up(x)))  # noqa: E731  # a checkpoint takes one function
        y = inner(x) if self.again is None else checkpoint(inner, x, use_reentrant=self.again)
        y = self.norm(x + y)
        out: Tensor = functional.linear(y, self.head.weight) if self.fused else self.head(y)
        return out


def recorded(path: Path, *, fp8_head: bool = False, exclude: tuple[str, ...] = (), **kind: Any) -> Findings:
    torch.manual_seed(0)
    model = fp8debug.convert(Words(**kind), "blockwise", {} if fp8_head else {"head": None})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, path, every=2, what_if=(), optimizer=optimizer, exclude=exclude) as watch:
        for _ in range(6):
            words = torch.randint(32, (4, 16))
            loss = functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    return fp8debug.triage(path)


def test_parameters_of_no_watched_module_are_named_by_kind_in_every_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = recorded(tmp_path / "run")
    run = fp8debug.Run(tmp_path / "run")
    assert {one["role"]: (one["first"], one["num_tensors"], one["num_params"]) for one in run.parameters} == {
        "embedding": ("embed.weight", 1, 32 * 64),
        "other": ("places", 1, 16 * 64),
        "watched": ("up.weight", 2, 2 * 64 * 128),
        "bias": ("up.bias", 2, 128 + 64),
        "norm": ("norm.weight", 2, 2 * 64),
        "linear": ("head.weight", 1, 32 * 64),
    }
    assert findings == [] and findings.verdict == "ok", "what was not watched is no finding"
    (one,) = (entry for entry in findings.not_watched if entry["what"] == "parameters")
    total = 2 * 64 * 128 + 64 * 64 + 16 * 64 + 192 + 128
    assert (one["num"], one["share"]) == (total - 2 * 64 * 128, (total - 2 * 64 * 128) / total)
    assert one["text"].startswith("values of 25 % of the parameters: embedding 9.4 % (embed.weight), ")
    assert "norm 0.59 % (norm.weight and 1 more), bias 0.88 % (up.bias and 1 more), other 4.7 % (places)" in one["text"]
    assert findings.classification is not None and f"not watched: {one['text']}" in findings.classification["evidence"]
    assert json.loads(findings.to_json())["not_watched"] == findings.not_watched
    assert one["text"] in to_html(run, findings)
    assert unpacked(json.loads(json.dumps(packed(findings)))).not_watched == findings.not_watched
    for command in ("triage", "coverage"):
        assert status([command, str(tmp_path / "run")]) == 0
        assert one["text"] in " ".join(capsys.readouterr().out.split())


def test_a_tied_embedding_is_watched_with_the_head_and_an_excluded_linear_is_not(tmp_path: Path) -> None:
    recorded(tmp_path / "tied", tied=True, fp8_head=True)
    assert "embedding" not in {one["role"] for one in fp8debug.Run(tmp_path / "tied").parameters}
    recorded(tmp_path / "excluded", exclude=("down",))
    found = {one["role"]: (one["first"], one["num_tensors"]) for one in fp8debug.Run(tmp_path / "excluded").parameters}
    assert found["linear"] == ("down.weight", 2) and found["watched"] == ("up.weight", 1)


@pytest.mark.parametrize(
    ("reentrant", "says"),
    [
        (None, None),
        (False, "casts of recomputed forward passes: up and 1 more under activation checkpointing"),
        (True, "first forward passes under reentrant activation checkpointing: of up and 1 more the recomputation is recorded"),
    ],
)
def test_passes_that_a_checkpoint_recomputes_are_named(reentrant: bool | None, says: str | None, tmp_path: Path) -> None:
    recorded(tmp_path, again=reentrant)
    told = [one.text for one in unwatched(fp8debug.Run(tmp_path)) if one.what == "recomputed"]
    assert [text.startswith(says or "") for text in told] == ([True] if says else [])


@pytest.mark.parametrize("fused", [True, False])
def test_a_weight_that_is_multiplied_by_outside_its_module_is_named(fused: bool, tmp_path: Path) -> None:
    recorded(tmp_path / "run", fp8_head=True, fused=fused)
    found = [one for one in unwatched(fp8debug.Run(tmp_path / "run")) if one.what == "uncalled"]
    assert [(one.first, one.num) for one in found] == ([("head", 1)] if fused else [])
    if fused:
        (line,) = in_words(found)
        assert line.startswith(
            "not watched: GEMMs outside the Linears by the weight of head: no sampled step calls the module, and the weight has"
            " gradients"
        )


class Unseen(nn.Linear):
    """Multiplies without a GEMM, as a library's kernel does for who sees torch's ops alone."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1)


def test_a_module_that_is_called_is_not_said_to_be_uncalled_because_nothing_of_it_is_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Unseen(16, 16, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fp8debug.watch(model, tmp_path / "run", every=1, optimizer=optimizer) as watch:
        for _ in range(2):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    run = fp8debug.Run(tmp_path / "run")
    assert {m["fqn"]: (m["called"], m["observed"]) for m in run.modules} == {"0": (True, True), "1": (True, False)}
    assert [one for one in unwatched(run) if one.what == "uncalled"] == []


def test_a_report_with_findings_names_it_too(tmp_path: Path) -> None:
    entry = {"role": "embedding", "first": "embed.weight", "num_tensors": 1, "num_params": 300}
    watched = {"role": "watched", "first": "blocks.0.mlp.up.weight", "num_tensors": 6, "num_params": 700}
    filters = [{"kind": "include", "pattern": "x.*", "matched": 0}]
    run = build(tmp_path / "run", manifest={"parameters": [entry, watched, {"role": 3}], "filters": filters})
    findings = fp8debug.triage(run)
    assert findings and "30 % of the parameters: embedding 30 % (embed.weight)" in to_html(run, findings)
    assert in_words(unwatched(run))[0].startswith("not watched: values, gradients and updates of 30 %")
    assert unwatched(build(tmp_path / "older")) == [], "of a run that does not count them nothing is known"

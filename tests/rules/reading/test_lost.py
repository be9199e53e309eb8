"""A module, or a whole rank, that is not recorded any more: never healthy, in no command and no format."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.observer.probe import Probe
from fp8debug.reports.github import to_github
from fp8debug.reports.page import to_html
from fp8debug.reports.sarif import to_sarif
from fp8debug.rules import Severity, triage
from fp8debug.rules.reading.lost import in_one_sentence, losses_of
from fp8debug.store.read.run import Run
from fp8debug_cli.main import status
from tests.synthetic import MODULES, build

DOWN = "blocks.1.mlp.down"
WHY = "RuntimeError: expected m1 and m2 to have the same dtype"
EVENT = (8, "skipped", DOWN, f"{DOWN} is not watched any more: {WHY}")


def cli(*args: str | Path) -> tuple[int, str]:
    """Run a command; return its exit status and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = status([str(arg) for arg in args])
    return code, text.getvalue()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train a model whose second Linear fp8debug fails at from step 4 on."""
    own = Probe._operand

    def failing(self: Probe, *args: Any, **kwargs: Any) -> Any:
        if self.module == "down" and self.observer.step >= 4:
            raise RuntimeError("expected m1 and m2 to have the same dtype")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Probe, "_operand", failing)
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, module in {"up": nn.Linear(64, 128), "act": nn.SiLU(), "down": nn.Linear(128, 64)}.items():
        model.add_module(name, module)
    fp8debug.convert(model, "blockwise")
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(64, 64)
    with fp8debug.watch(model, tmp_path / "run", every=2) as watch:
        for _ in range(12):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss.detach())
    return tmp_path / "run"


def test_a_run_that_lost_a_module_is_not_healthy(path: Path) -> None:
    code, text = cli("triage", path)
    told = f"down is not recorded from step 4 on: {WHY}"
    assert code == 1 and f"warning: {told}" in text
    assert text.startswith("run: warning, 0 findings, steps 0 to 11\n")
    assert f"down is not recorded from step 4 on ({WHY})" in text and "no rule found a fault in what was recorded" in text
    assert cli("triage", path, "--fail-on", "error")[0] == cli("triage", path, "--fail-on", "never")[0] == 0
    assert cli("triage", path, "--select", "F101")[0] == 1
    document = json.loads(cli("triage", path, "--format", "json")[1])
    assert document["verdict"] == "warning" and document["classification"]["cause"] == "incomplete"
    assert document["lost"] == [{"module": "down", "rank": 0, "step": 4, "until": None, "reason": WHY, "ended": False}]
    code, text = cli("coverage", path)
    assert code == 0 and f"warning: {told}" in text
    rows = json.loads(cli("coverage", path, "--format", "json")[1])
    notes = {row["module"]: row["note"] for row in rows}
    assert told in notes["down"] and "not recorded" not in (notes["up"] or "")


def test_every_report_has_it(path: Path) -> None:
    pytest.importorskip("dash", reason="the dashboard is not installed")
    from fp8debug_dashboard.pages.overview import sentence
    from fp8debug_dashboard.web.run_view import Judgement
    from fp8debug_dashboard.web.triage_process import packed, unpacked

    run = Run(path)
    findings = triage(run)
    told = f"down is not recorded from step 4 on: {WHY}"
    assert f"::warning title=not recorded any more::{told}" in to_github(findings)
    notes = json.loads(to_sarif(findings))["runs"][0]["invocations"][0]["toolExecutionNotifications"]
    assert {"level": "warning", "message": {"text": told}} in notes
    assert told in to_html(run, findings)
    again = unpacked(json.loads(json.dumps(packed(findings))))
    assert again.lost == findings.lost and again.verdict == "warning"
    judged = Judgement(known=again)
    assert judged.verdict == "warning" and told in sentence(judged)


def test_what_was_lost_is_no_evidence_against_fp8s_doing(tmp_path: Path) -> None:
    spike = {50: {"loss": 9.0}}
    assert _class(tmp_path / "whole", steps=spike)["cause"] == "not-fp8"
    found = _class(tmp_path / "before", steps=spike, events=[EVENT])
    assert found["cause"] == "undecided" and found["what"].endswith(f"{DOWN} is not recorded from step 8 to step 9 ({WHY})")
    later = (80, "skipped", DOWN, EVENT[3])
    assert _class(tmp_path / "after", steps=spike, events=[later])["cause"] == "not-fp8"


def _class(path: Path, **options: Any) -> dict[str, Any]:
    found = triage(build(path, **options)).classification
    assert found is not None
    return dict(found)


def test_a_rank_that_stopped_and_one_that_was_resumed(tmp_path: Path) -> None:
    events = [(90, "recording", None, "recording stopped: OSError: disk full"), EVENT, (95, *EVENT[1:])]
    lost = losses_of(build(tmp_path / "run", events=events))
    assert [(one.module, one.step, one.until) for one in lost] == [(DOWN, 8, 10), (None, 90, None)]
    assert str(lost[0]) == f"{DOWN} is not recorded from step 8 to step 9: {WHY}"
    assert str(lost[1]) == "rank 0 is not recorded from step 90 on: OSError: disk full"
    assert in_one_sentence(lost) == f"{DOWN}, all of rank 0 are not recorded from step 8 on ({WHY})"
    assert in_one_sentence([]) == "" and losses_of(build(tmp_path / "whole")) == []
    harmless = [(8, "skipped", DOWN, f"{DOWN} is not recorded in full at step 8: out of memory in a sample; training goes on")]
    findings = triage(build(tmp_path / "harmless", events=harmless))
    assert findings.lost == [] and findings.verdict == "ok" and not findings.reaches(Severity.INFO)


def test_modules_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    events = [(20, "skipped", name, f"{name} is not watched any more: ValueError: odd") for name, _, _ in MODULES]
    lost = losses_of(build(tmp_path / "run", events=events))
    assert len(lost) == len(MODULES)
    assert in_one_sentence(lost).endswith(
        f"and {len(MODULES) - 3} more are not recorded from step 20 to step 29 (ValueError: odd)"
    )


def test_a_run_without_statistics_is_never_healthy(tmp_path: Path) -> None:
    """A model whose forward() is called directly, as some programs do, is not seen."""
    model = nn.Sequential(nn.Linear(16, 16))
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        for _ in range(3):
            loss = model[0].forward(torch.ones(4, 16)).sum()
            loss.backward()
            watch.step(loss=loss)
    findings = triage(tmp_path / "run")
    assert findings.verdict == "warning" and not list(findings)
    assert [(entry["module"], entry["step"]) for entry in findings.lost] == [(None, 0)]
    code, text = cli("triage", tmp_path / "run")
    assert code == 1 and "no module has statistics" in text


def test_a_run_of_its_first_step_is_not_judged_by_what_is_not_there_yet(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        watch.step(loss=torch.ones(()))
    assert triage(tmp_path / "run").lost == []


@pytest.mark.parametrize(
    ("event", "module", "reason"),
    [
        ((8, "skipped", DOWN, f"{DOWN} is left out: {WHY}", "not-watched"), DOWN, WHY),
        ((8, "recording", None, f"the end of it: {WHY}", "recording-stopped"), None, WHY),
        ((99, "note", None, f"stopped by {WHY}", "program-ended"), None, f"stopped by {WHY}"),
    ],
)
def test_what_was_lost_is_found_by_the_code_of_its_event(
    tmp_path: Path, event: tuple[Any, ...], module: str | None, reason: str
) -> None:
    (lost,) = losses_of(build(tmp_path / "run", events=[event]))
    assert (lost.module, lost.step, lost.reason, lost.ended) == (module, event[0], reason, event[1] == "note")
    other = (*event[:4], "another-code")
    assert losses_of(build(tmp_path / "other", events=[other])) == []
    misleading = (*EVENT, "another-code")
    assert losses_of(build(tmp_path / "words", events=[misleading])) == [], "words count where there is no code"


def test_events_of_older_runs_have_words_alone(tmp_path: Path) -> None:
    build(tmp_path / "run", events=[EVENT])
    (part,) = (tmp_path / "run").glob("rank=*/events/*.parquet")
    rows = pq.read_table(part)
    pq.write_table(rows.drop_columns(["code"]), part)
    run = Run(tmp_path / "run")
    assert run.sql("SELECT code FROM events").to_pylist() == [{"code": None}]
    assert [(lost.module, lost.step, lost.reason) for lost in losses_of(run)] == [(DOWN, 8, WHY)]

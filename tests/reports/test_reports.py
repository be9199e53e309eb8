"""What triage writes for other tools and for a ticket: GitHub's commands, SARIF by its schema, a page that needs nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fp8debug.fallback.policy import recommend, without_candidates
from fp8debug.reports.github import escaped, to_github
from fp8debug.reports.page import to_html
from fp8debug.reports.sarif import to_sarif
from fp8debug.reports.svg import MAX_POINTS, Chart, thinned
from fp8debug.rules import RULES, Finding, Findings, Severity, triage
from fp8debug.store.read.run import Run
from tests.rules.sick_runs import CLIPPED, CULPRIT, FIRES
from tests.synthetic import MODULES, Override, build

HOSTILE = "<img src=x onerror=alert(1)>'\"&%\n::error::"


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Findings]:
    """A NaN with victims, a spike, and a finding without a module."""
    folder = tmp_path_factory.mktemp("runs")
    build(folder / "bf16", recipe="bf16", what_if=["blockwise"], with_results=False)
    filters = [{"kind": "include", "pattern": "x.*", "matched": 0}]
    run = build(folder / "sick", **FIRES["F103"], manifest={"filters": filters})
    return run, triage(run, folder / "bf16")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Findings]:
    """A run folder from elsewhere, whose names and texts hold markup and commands."""
    modules = [(HOSTILE, 256, 256), *MODULES]
    sick = Override(gemm="fprop", tensor="input", steps=(20, None), slots={**CLIPPED, "cast_name": HOSTILE + " delayed(1"})
    filters = [{"kind": HOSTILE, "pattern": HOSTILE, "matched": 0}]
    manifest = {"filters": filters, "environment": {"torch": HOSTILE, "device": HOSTILE}, "recipe": {"name": HOSTILE}}
    run = build(tmp_path_factory.mktemp("hostile") / "a<b>&", num_steps=50, modules=modules, overrides=[sick], manifest=manifest)
    return run, triage(run)


def test_a_finding_is_one_workflow_command(sick: tuple[Run, Findings]) -> None:
    first, *lines = to_github(sick[1]).splitlines()
    assert first.startswith("::notice title=fp8debug sick::error: the loss is NaN from step 40 on: numerical, origin ")
    assert len(lines) == len(sick[1]) == 2
    assert lines[0].startswith(f"::error title=F103 zero-tile-nan in {CULPRIT}::{CULPRIT} fprop input, steps 40: 128 finite")
    assert "%0Acure: amax_eps=1e-12" in lines[0]
    assert lines[1].startswith("::warning title=F110 coverage-gap::steps 0-99: the include pattern 'x.*' matches no module")
    assert to_github(Findings([], run="r")) == ""


def test_the_escapes_are_githubs() -> None:
    assert escaped("50 %\r\na:b,c") == "50 %25%0D%0Aa:b,c"
    assert escaped("50 %\na:b,c", in_property=True) == "50 %25%0Aa%3Ab%2Cc"


def test_no_name_can_forge_a_command(hostile: tuple[Run, Findings]) -> None:
    lines = to_github(hostile[1]).splitlines()
    assert len(lines) == len(hostile[1]) + 1
    assert all(re.match(r"::(error|warning|notice) title=[^:,\r\n]*::", line) for line in lines)


class Rules(NamedTuple):
    """What the schema says of one kind of object: the properties that it may have, those that it must, and any one of."""

    allowed: str
    required: str = ""
    any_of: str = ""


#: From the JSON schema of SARIF 2.1.0 (errata 01); every kind has additionalProperties false.
SARIF = {
    "log": Rules("$schema version runs inlineExternalProperties properties", "version runs"),
    "run": Rules(
        "automationDetails columnKind invocations originalUriBaseIds properties results tool logicalLocations artifacts", "tool"
    ),
    "tool": Rules("driver extensions properties", "driver"),
    "driver": Rules("name version rules informationUri semanticVersion properties", "name"),
    "rule": Rules("id name shortDescription fullDescription help helpUri defaultConfiguration properties", "id"),
    "text": Rules("text markdown properties", "text"),
    "configuration": Rules("level enabled rank parameters properties"),
    "message": Rules("text markdown id arguments properties", "", "text id"),
    "result": Rules(
        "ruleId ruleIndex rule kind level message locations relatedLocations partialFingerprints properties", "message"
    ),
    "location": Rules("id physicalLocation logicalLocations message properties"),
    "physical": Rules("artifactLocation region address properties", "", "address artifactLocation"),
    "artifact": Rules("uri uriBaseId index description properties"),
    "logical": Rules("name index fullyQualifiedName decoratedName parentIndex kind properties"),
    "invocation": Rules("executionSuccessful toolExecutionNotifications exitCode properties", "executionSuccessful"),
    "notification": Rules("message level associatedRule descriptor locations properties", "message"),
    "reference": Rules("id index guid toolComponent properties", "", "index guid id"),
    "automation": Rules("id description guid correlationGuid properties"),
}
LEVELS = {"none", "note", "warning", "error"}


def conforms(kind: str, value: Mapping[str, Any]) -> None:
    rules = SARIF[kind]
    assert set(value) <= set(rules.allowed.split()), f"{kind} has {set(value) - set(rules.allowed.split())}"
    assert set(rules.required.split()) <= set(value), f"{kind} lacks {set(rules.required.split()) - set(value)}"
    assert not rules.any_of or set(rules.any_of.split()) & set(value), f"{kind} has none of {rules.any_of}"
    assert value.get("level", "none") in LEVELS


def locations_conform(found: list[dict[str, Any]]) -> None:
    for location in found:
        conforms("location", location)
        conforms("physical", location["physicalLocation"])
        conforms("artifact", location["physicalLocation"]["artifactLocation"])
        assert re.fullmatch(r"[\w./-]+", location["physicalLocation"]["artifactLocation"]["uri"]), "a URI reference"
        for logical in location.get("logicalLocations", []):
            conforms("logical", logical)


@pytest.mark.parametrize("which", ["sick", "hostile"])
def test_sarif_follows_its_schema(which: str, request: pytest.FixtureRequest) -> None:
    findings: Findings = request.getfixturevalue(which)[1]
    log = json.loads(to_sarif(findings), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    conforms("log", log)
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    conforms("run", run)
    conforms("tool", run["tool"])
    conforms("driver", run["tool"]["driver"])
    conforms("automation", run["automationDetails"])
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    for base in run["originalUriBaseIds"].values():
        conforms("artifact", base)
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(set(ids)) == len(ids), "rules are unique"
    for rule in run["tool"]["driver"]["rules"]:
        conforms("rule", rule)
        conforms("configuration", rule["defaultConfiguration"])
        for text in ("shortDescription", "fullDescription", "help"):
            conforms("text", rule[text])
    for invocation in run["invocations"]:
        conforms("invocation", invocation)
        for notification in invocation["toolExecutionNotifications"]:
            conforms("notification", notification)
            conforms("message", notification["message"])
            conforms("reference", notification["associatedRule"])
    assert len(run["results"]) == len(findings)
    for result, finding in zip(run["results"], findings, strict=True):
        conforms("result", result)
        conforms("message", result["message"])
        assert ids[result["ruleIndex"]] == result["ruleId"] == finding.code
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
        locations_conform(result["locations"])
        locations_conform(result.get("relatedLocations", []))


def test_sarif_names_modules_and_levels(sick: tuple[Run, Findings]) -> None:
    (run,) = json.loads(to_sarif(sick[1]))["runs"]
    first, second = run["results"]
    assert (first["level"], second["level"]) == ("error", "warning")
    assert first["locations"][0]["logicalLocations"] == [{"name": "up", "fullyQualifiedName": CULPRIT, "kind": "module"}]
    assert "logicalLocations" not in second["locations"][0], "a pattern is no module"
    assert [location["message"]["text"] for location in first["relatedLocations"]] == ["victim"] * 5
    assert first["properties"]["steps"] == [40, 40]
    assert run["properties"]["classification"]["class"] == "divergence"


class Page(HTMLParser):
    """Tags with their attributes and the text of a page; it must be well formed."""

    VOID = ("meta", "br", "rect", "line", "circle", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_says_it_all(sick: tuple[Run, Findings]) -> None:
    page = Page(to_html(*sick))
    for words in (
        "✖ error sick",
        "Class: (b) divergence",
        "the loss is NaN from step 40 on: numerical, origin blocks.1.mlp.up (F103 zero-tile-nan) since step 40",
        "What to do now",
        "fp8debug explain F103",
        "F103 zero-tile-nan",
        "128 finite elements of the fprop input became NaN or Inf",
        "Manual page of F103",
        "One NaN reaches the loss in the same step",
        "Against bf16",
        "Thresholds in force",
        "max_nonfinite 0",
    ):
        assert words in page.text
    labels = [attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"]
    assert labels[0] is not None and labels[0].startswith("training loss, steps 0 to 99")
    assert any(label and label.startswith("elements made NaN or Inf, steps 0 to ") for label in labels)


def test_names_of_repeated_layers_are_folded(sick: tuple[Run, Findings]) -> None:
    run, findings = sick
    victims = tuple(f"blocks.{i}.mlp.up" for i in range(24))
    one = replace(findings[0], victims=victims, also=("head",))
    text = Page(to_html(run, Findings([one], thresholds=findings.thresholds))).text
    assert "victims blocks.{0..23}.mlp.up (24)" in text and "same cause head" in text


def test_what_a_plot_and_a_list_leave_out_is_counted(sick: tuple[Run, Findings]) -> None:
    run, findings = sick
    one = findings[0]
    many = [replace(one, module=f"blocks.{i}", steps=(i, i)) for i in range(14)]
    text = Page(to_html(run, Findings(many, thresholds=findings.thresholds))).text
    assert "The first 12 of 14 such steps are marked." in text and "The first 6 of 14 such steps are marked." in text
    assert "Then the cures of 11 more findings, below." in text
    assert "such steps are marked" not in Page(to_html(*sick)).text


@pytest.mark.parametrize("which", ["sick", "hostile"])
def test_the_page_needs_nothing_and_runs_nothing(which: str, request: pytest.FixtureRequest) -> None:
    run, findings = request.getfixturevalue(which)
    text = to_html(run, findings)
    tags = Page(text).tags
    assert not {tag for tag, _ in tags} & {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a"}
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on") or name in ("src", "href", "style")]
    assert "http" not in re.sub(r"http-equiv", "", text), "no address at all"
    assert "default-src 'none'" in text
    assert len(text) < 400_000
    assert "url(" not in text and "@import" not in text


def test_a_constant_line_is_labelled_with_its_value_and_no_value_that_it_never_has() -> None:
    svg = Chart(title="share clipped", steps=(0, 10), values=(0.0, 0.0)).to_svg()
    assert re.findall(r"class='tick end'>([^<]*)<", svg) == ["0", "10"]  # a value, and the last step
    assert "-0.05" not in svg
    svg = Chart(title="gain", steps=(0, 10), values=(1.0, 2.0)).to_svg()
    assert re.findall(r"class='tick end'>([^<]*)<", svg) == ["1", "2", "10"]


def test_markup_in_names_is_text(hostile: tuple[Run, Findings]) -> None:
    run, findings = hostile
    assert any(HOSTILE in (f.module or "") for f in findings) and len(findings) > 1
    page = Page(to_html(run, findings))
    assert "<img src=x onerror=alert(1)>" in page.text
    assert "✖ error a<b>&" in page.text


def test_a_healthy_page_and_one_without_a_loss(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=20, steps={step: {"loss": None} for step in range(20)}, with_results=False)
    page = Page(to_html(run, triage(run)))
    assert "✔ ok run" in page.text and "Class: unknown" in page.text and "Loss not recorded" in page.text
    assert f" of {len(RULES.names())} rules ran; none found a fault." in page.text


def test_a_finding_at_a_site_that_was_not_recorded_has_no_chart(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=10, with_results=False)
    finding = Finding(code="F101", name="n", severity=Severity.INFO, module="gone", gemm="fprop", tensor="input", steps=(0, 9),
                      message="m", cure="c")  # fmt: skip
    page = Page(to_html(run, Findings([finding], run="run", steps=(0, 9))))
    labels = {attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"}
    assert [label for label in labels if not str(label).startswith("training loss")] == [], "the loss alone"


def test_a_chart_of_gaps_extremes_and_one_point() -> None:
    gaps = Chart(title="t", steps=[0, 1, 2, 3], values=[1.0, None, float("nan"), 2.0]).to_svg()
    assert gaps.count("<polyline") == 2 and gaps.count("<circle") == 2
    assert "no finite value" in Chart(title="t", steps=[0], values=[None]).to_svg()
    one = Chart(title="t", steps=[5], values=[0.0], limit=0.0, span=(5, 5), marks=[(5, "F1")]).to_svg()
    assert "nan" not in one and "inf" not in one
    assert "(log scale)" in Chart(title="t", steps=[0, 1], values=[1e-6, 1.0], limit=-1.0).to_svg()


def test_a_long_line_keeps_its_extremes() -> None:
    line = [(step, 1.0) for step in range(100_000)]
    line[77_777] = (77_777, 9.0)
    line[11_111] = (11_111, -9.0)
    kept = thinned(line, MAX_POINTS)
    assert len(kept) <= MAX_POINTS
    assert {(77_777, 9.0), (11_111, -9.0)} <= set(kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_noise_is_drawn_as_noise_and_words_about_nan_lie_over_no_line() -> None:
    """From end to end a change of 1e-4 looked like a jump between two labels that were equal."""
    values = [2.0, 2.0002, 2.0, 2.0001, math.nan, math.nan]
    svg = Chart(title="share", steps=range(0, 60, 10), values=values).to_svg()
    heights = [float(at) for at in re.findall(r"cy='([\d.]+)'", svg)]
    (words,) = re.findall(r"y='([\d.]+)' class='tick strong[^']*'>NaN from step 40<", svg)
    assert max(heights) - min(heights) < 5 and svg.count(">2</text>") == 1
    low = Chart(title="falls", steps=range(0, 60, 10), values=[9.0, 5.0, 1.0, 1.0, math.nan, math.nan]).to_svg()
    assert max(float(at) for at in re.findall(r"cy='([\d.]+)'", low)) <= float(words) - 9


def test_a_fallback_is_named_only_where_one_could_cure(tmp_path: Path, sick: tuple[Run, Findings]) -> None:
    came = Override(module="blocks.0.mlp.up", gemm="fprop", tensor="input", steps=(40, None), slots={"num_nan": 3})
    run = build(tmp_path / "run", overrides=[came], steps={step: {"loss": math.nan} for step in range(40, 100)})
    findings = triage(run)
    assert [(f.code, f.gemm, f.tensor) for f in findings] == [("F125", "fprop", "input")] and findings[0].module
    assert "fp8debug fallback RUN" not in to_html(run, findings) and recommend(run, findings, 1.0) == []
    assert without_candidates(findings) == "another cast or BF16 is no cure for F125"
    assert "fp8debug fallback RUN" in to_html(*sick)

"""``fp8debug fallback``: files for stacks, notes on stderr, schedules, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import load_fallbacks
from fp8debug_cli.main import status
from tests.synthetic import Override, Plan, write

CULPRIT = "blocks.1.mlp.up"
SICK = Override(module=CULPRIT, gemm=None, tensor="weight", reference="operand", steps=(40, None), slots={"gain": 2.0})


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "sick"
    write(path, Plan(num_steps=60, overrides=[SICK]))
    return path


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of ``fp8debug fallback WORDS``."""
    capsys.readouterr()
    code = status(["fallback", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", EXPORTERS.names())
def test_every_consumer_has_its_file(capsys: pytest.CaptureFixture[str], sick: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / f"list{EXPORTERS.get(name).suffix}"
    code, out, err = said(capsys, sick, "--to", name, "-o", target)
    assert (code, out) == (0, "") and err.endswith(f"Wrote {target}\n")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert CULPRIT in target.read_text(encoding="utf-8").replace("\\", "") or name == "loongforge"


def test_what_a_format_cannot_say_is_on_stderr_once(capsys: pytest.CaptureFixture[str], sick: Path) -> None:
    _, out, err = said(capsys, sick, "--to", "torchtitan", "--until-step", 500)
    notes = err.splitlines()
    assert notes == [
        f"note: torchtitan cannot leave single GEMMs in BF16; the whole module runs in it: {CULPRIT} (fprop dgrad)",
        "note: torchtitan has no steps; start the job again, with and without the file, at these steps:"
        f" {CULPRIT} until step 500",
    ]
    assert all(f"# {note.removeprefix('note: ')}\n" in out for note in notes)


def test_stdout_is_the_file(capsys: pytest.CaptureFixture[str], sick: Path, tmp_path: Path) -> None:
    said(capsys, sick, "--to", "torchao", "-o", tmp_path / "filter.py")
    assert said(capsys, sick, "--to", "torchao")[1] == (tmp_path / "filter.py").read_text(encoding="utf-8")


def test_a_schedule_for_the_bf16_entries(capsys: pytest.CaptureFixture[str], sick: Path) -> None:
    _, out, err = said(capsys, sick, "--to", "json", "--until-step", 500, "--from-step", 20)
    (entry,) = load_fallbacks(out)
    assert err == ""
    assert (entry.from_step, entry.until_step) == (20, 500) and json.loads(out)["schema"] == 2
    assert "steps 20 to 499" in said(capsys, sick, "--until-step", 500, "--from-step", 20)[1]


def test_fill_spends_the_budget(capsys: pytest.CaptureFixture[str], sick: Path) -> None:
    assert len(load_fallbacks(said(capsys, sick, "--to", "json", "--budget", "90%", "--fill")[1])) > 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "torchao", "-o", "RUN/no/filter.py"), "error: cannot write RUN/no/filter.py: No such file or directory"),
        (("--to", "torch"), "error: unknown exporter 'torch': did you mean 'torchao' or 'torchtitan'?"),
        (("--until-step", "0"), "error: Invalid value for '--until-step': 0 is not in the range x>=1."),
        (("--from-step", "soon"), "error: Invalid value for '--from-step': 'soon' is not a valid integer range."),
        (
            ("--from-step", "9", "--until-step", "9"),
            f"error: the fallback of '{CULPRIT}' never holds: until_step 9 is not after from_step 9",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], sick: Path, words: tuple[str, ...], message: str) -> None:
    code, out, err = said(capsys, sick, *(word.replace("RUN", str(sick)) for word in words))
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert (code, out, lines) == (2, "", [message.replace("RUN", str(sick))])


def test_stages_of_a_pipeline_are_files_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, target = tmp_path / "run", tmp_path / "fp8.yaml"
    write(run, Plan(num_steps=60, overrides=[SICK], world_size=2))
    for rank in (0, 1):
        path = run / f"rank={rank:05d}" / "manifest.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "mesh": {"dims": ["pp"], "shape": [2], "coordinate": [rank]}})
        )
    code, _, err = said(capsys, run, "--to", "megatron")
    assert code == 2 and err.splitlines()[-1] == "error: megatron needs 2 files, one per pipeline stage; give -o FILE"
    assert said(capsys, run, "--to", "megatron", "-o", target)[0] == 0
    assert sorted(path.name for path in tmp_path.glob("*.yaml")) == ["fp8.stage0.yaml", "fp8.stage1.yaml"]

"""``fp8debug run --alert``: what is posted or started, and that an address stays secret."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fp8debug.errors import UsageError
from fp8debug.rules import Finding, Severity
from fp8debug.trackers.alerts import AlertSender
from fp8debug.trackers.live import finding_line
from tests.run.test_run_script import start

SECRET = "s3cr3t-t0ken"

SICK = """
import torch, fp8debug
from torch import nn

torch.manual_seed(0)
model = fp8debug.convert(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), "blockwise")
fp8debug.inject(model, "wrong_scale", module="2", step=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(16, 32)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def finding(severity: Severity = Severity.ERROR) -> Finding:
    return Finding(
        code="F113", name="wrong-scale", severity=severity, module="blocks.0.up\n::error::", gemm="fprop", tensor="input",
        steps=(4, 8), message="it is twice its reference", cure="reload the scale",
    )  # fmt: skip


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """A server on loopback that keeps what is posted; ``/broken`` answers 500."""
    posted: list[Any] = []

    class Kept(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(500 if self.path.startswith("/broken") else 200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Kept) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}", posted
        served.shutdown()


def test_an_error_is_posted_and_a_warning_is_not(server: tuple[str, list[Any]]) -> None:
    address, posted = server
    send = AlertSender(f"{address}/hook/{SECRET}", "exp1")
    send(finding(Severity.WARNING))
    assert posted == []
    send(finding())
    ((path, document),) = posted
    assert path == f"/hook/{SECRET}" and document["run"] == "exp1" and document["finding"] == finding().to_dict()
    assert document["text"].startswith("exp1: error F113 wrong-scale: blocks.0.up") and "\n" not in document["text"]
    assert SECRET not in repr(send)


def test_a_server_that_fails_is_reported_once_without_its_address(
    server: tuple[str, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for address in (f"{server[0]}/broken/{SECRET}", f"http://127.0.0.1:9/{SECRET}"):
        send = AlertSender(address, "exp1")
        send(finding())
        send(finding())
        err = capsys.readouterr().err
        assert err.count("alert not sent to 127.0.0.1: ") == err.count("\n") == 1 and SECRET not in err


def test_a_command_gets_the_document_and_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "page me.py"
    program.write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path(sys.argv[1]).write_text(sys.stdin.read() + '\\n' + os.environ['FP8DEBUG_ALERT'])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    for code in (0, 1):
        AlertSender(f"{sys.executable} '{program}' {tmp_path / 'out'} {code}", "exp1")(finding())
        document, text = (tmp_path / "out").read_text().splitlines()
        assert json.loads(document)["finding"]["code"] == "F113" and text == json.loads(document)["text"]
        assert capsys.readouterr().err.count("alert not sent") == code


def test_a_target_that_is_neither_is_refused() -> None:
    for target, message in {
        "no-such-program --now": "no program 'no-such-program'",
        "": "no program ''",
        "sh 'unfinished": "--alert takes a URL or a command: No closing quotation",
        "https://": "--alert takes the address of a host",
        f"{sys.executable} page.py >> log": "'>>' is for a shell, and none reads the command: put it into a script",
    }.items():
        with pytest.raises(UsageError) as caught:
            AlertSender(target, "exp1")
        assert message in str(caught.value)


def test_the_address_is_neither_printed_nor_written(server: tuple[str, list[Any]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SICK)
    address, posted = server
    done = start(tmp_path, "--out", "run", "--every", "1", "--alert", f"{address}/{SECRET}", "train.py")
    assert done.returncode == 0, done.stderr
    assert [document["finding"]["code"] for _, document in posted] == ["F113"]
    assert SECRET not in done.stderr + done.stdout
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files and not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "wandb,tensorbord"], "--to names no tracker: 'tensorbord': did you mean 'tensorboard'?"),
        (["--alert", "no-such-program"], "--alert: no program 'no-such-program'"),
        (["--alert", "true", "--arm", "bf16"], "--alert and --arm do not go together"),
    ],
)
def test_run_refuses_what_cannot_be_used(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    done = start(tmp_path, *words, "train.py")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_finding_of_no_module_is_about_the_whole_run() -> None:
    values = finding().to_dict() | {"also": ()}
    line = finding_line("exp1", values | {"module": None, "gemm": None, "tensor": None})
    assert line.startswith("exp1: error F113 wrong-scale: the whole run, step ")
    assert " and 1 more module, step " in finding_line("exp1", values | {"also": ("blocks.1.up",)})

"""``fp8debug run --alert URL|COMMAND``: errors of a run that is recorded, posted to an address or given to a program.

Both get one document of JSON, the program on its stdin:

    {"text": "exp1: error F113 wrong-scale: blocks.3 fprop input, step 120: ...", "run": "exp1", "finding": {...}}

``text`` is what chat services (Slack, Mattermost, Discord's Slack mode) read; ``finding`` is that of ``triage --format json``.
The address may hold a secret: it is neither written nor printed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import urlsplit

from fp8debug.errors import UsageError
from fp8debug.trackers.live import finding_line
from fp8debug.trackers.sending import say

if TYPE_CHECKING:
    from fp8debug.rules.base import Finding

#: Seconds for an answer, and for a program.
URL_S, COMMAND_S = 10.0, 60.0
#: Variable of a program's environment that holds the text.
VARIABLE = "FP8DEBUG_ALERT"
#: Words by which a shell redirects, joins or ends commands: a program would get them as arguments.
_OF_A_SHELL = frozenset(("|", "||", "&", "&&", ";", "<", "<<", ">", ">>", "2>", "2>>", "2>&1", "&>"))


class AlertSender:
    """Sends errors; a failure is reported once.

    Args:
        target: ``http://`` or ``https://`` address, or a program with its arguments, which no shell reads.
        run: name of the run.

    Raises:
        UsageError: neither.
    """

    def __init__(self, target: str, run: str) -> None:
        self._run = run
        self._has_failed = False
        self._url = target if target.startswith(("http://", "https://")) else None
        self._words: list[str] = []
        if self._url is not None:
            try:
                has_host = bool(urlsplit(target).hostname)
            except ValueError:
                has_host = False
            if not has_host:
                raise UsageError("--alert takes the address of a host, such as https://hooks.example.com/T000/B000")
            return
        try:
            self._words = shlex.split(target)
        except ValueError as error:
            raise UsageError(f"--alert takes a URL or a command: {error}") from None
        if not self._words or shutil.which(self._words[0]) is None:
            raise UsageError(
                f"--alert: no program {(self._words or [''])[0]!r}; expected a URL or a command such as 'sh alert.sh'"
            )
        if (found := next((word for word in self._words if word in _OF_A_SHELL), None)) is not None:
            raise UsageError(
                f"--alert: {found!r} is for a shell, and none reads the command: put it into a script, 'sh alert.sh'"
            )

    def __repr__(self) -> str:
        return f"AlertSender({self._shown!r})"

    def __call__(self, finding: Finding) -> None:
        """Send a finding, if it is an error."""
        from dataclasses import asdict

        if str(finding.severity) != "error":
            return
        text = finding_line(self._run, asdict(finding))
        document = json.dumps({"text": text, "run": self._run, "finding": finding.to_dict()})
        try:
            if self._url is not None:
                self._post(document)
            else:
                self._start(document, text)
        except Exception as error:  # in a thread of its own
            if not self._has_failed:
                self._has_failed = True
                why = f"HTTP {error.code}" if isinstance(error, HTTPError) else type(error).__name__
                say(f"alert not sent to {self._shown}: {why}; training goes on: {text}")

    @property
    def _shown(self) -> str:
        """The host or the program, without what may be secret."""
        return self._words[0] if self._url is None else str(urlsplit(self._url).hostname)

    def _post(self, document: str) -> None:
        from urllib.request import Request, urlopen

        assert self._url is not None
        headers = {"Content-Type": "application/json", "User-Agent": "fp8debug"}
        with urlopen(Request(self._url, document.encode(), headers), timeout=URL_S):
            pass

    def _start(self, document: str, text: str) -> None:
        environment = {**os.environ, VARIABLE: text}
        done = subprocess.run(
            self._words,
            input=document,
            text=True,
            encoding="utf-8",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise subprocess.SubprocessError

"""``FP8DEBUG=DIR[,every=N,...]``: recording in processes that are not yours to start, such as the workers of Ray.

    export PYTHONPATH=$(python -m fp8debug.startup):$PYTHONPATH FP8DEBUG=runs/exp1,every=20

The folder on ``PYTHONPATH`` holds a ``sitecustomize.py``, which every Python process runs at its start. Without ``FP8DEBUG`` it
looks at the environment and does nothing else; with it, torch is waited for, and the models that train are watched as by
``fp8debug run``. Where a process takes a function to call at its start, that is :func:`start`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from fp8debug.imports import after_import

VARIABLE = "FP8DEBUG"
#: What may stand behind the folder, and how it is read.
OPTIONS = {
    "every": int,
    "shadow_rows": int,
    "resume_from": int,
    "compiled": str,
    "turns": int,
    "ranks": str,
    "plain_recipe": str,
    "budget": str,
}


def start() -> None:
    """Watch the models that train in this process, if the environment says so; a wrong value is one line on stderr."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    try:
        out, options = parse(text)
    except ValueError as error:
        print(f"fp8debug: not recorded: {VARIABLE}={text}: {error}", file=sys.stderr)
        return
    # a process started from here may stand in another folder
    os.environ[VARIABLE] = ",".join([str(out), *text.split(",")[1:]])
    after_import("torch", partial(_begin, out, options))


def parse(text: str) -> tuple[Path, dict[str, Any]]:
    """Return the run directory, absolute, and the arguments of ``watch()``.

    Raises:
        ValueError: it is not ``DIR[,name=value,...]``.
    """
    folder, *words = text.split(",")
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in OPTIONS or not equals:
            raise ValueError(f"{word!r} is none of {', '.join(f'{known}=...' for known in OPTIONS)}")
        options[name] = OPTIONS[name](value)
    if not folder:
        raise ValueError("expected a folder first, such as runs/exp1,every=20")
    if "://" in folder:
        raise ValueError("object storage is only read; record to a local folder, copy it there")
    return Path(folder).absolute(), {"every": 10, **options}


def _begin(out: Path, options: dict[str, Any]) -> None:
    try:
        from fp8debug.run.auto_watch import AutoWatch

        AutoWatch(out, options).start()
    except Exception as error:  # the process is not ours
        from fp8debug.interruptions import is_ours

        if not is_ours(error):
            raise
        print(f"fp8debug: not recorded: {type(error).__name__}: {error}", file=sys.stderr)

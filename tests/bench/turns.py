"""Have what a bench script trains recorded in turns: an option of ``variants.py`` and ``clean.py``, and what some tests train."""

from __future__ import annotations

import argparse
from functools import wraps
from typing import Any

import fp8debug


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--turns``."""
    parser.add_argument("--turns", type=int, default=1, help="sampled steps in which each module is recorded once")


def take_turns(turns: int) -> None:
    """Give ``turns`` to each watch of training that is attached from now on and names none."""
    watch = fp8debug.watch

    @wraps(watch)
    def watched(*args: Any, **kwargs: Any) -> Any:
        own = kwargs if kwargs.get("inference") else {"turns": turns, **kwargs}
        return watch(*args, **own)

    if turns > 1:
        fp8debug.watch = watched

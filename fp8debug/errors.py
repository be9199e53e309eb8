"""The exception tree: one base, one class per kind of cure; a message says what was expected, what came and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: A longer message, somebody's tensor or file in it, is cut in its middle: what is wrong comes first, the way out last.
MAX_MESSAGE = 800
_BREAKS = re.compile(r"\s*[\r\n\v\f\t\x1c-\x1e\x85\u2028\u2029]\s*")


class Fp8DebugError(Exception):
    """Base of every error that a user can cause and cure; ``slug`` names its section in docs/errors.md."""

    slug = "error"

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints in place of a traceback: one line; ``%debug`` and the exception still have all of it."""
        return [f"{type(self).__name__}: {self}"]

    def __str__(self) -> str:
        """Return the message on one line, whatever was quoted in it."""
        text = _BREAKS.sub(" ", super().__str__().strip())
        return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"


class UsageError(Fp8DebugError, ValueError):
    """An argument has a value that cannot be used."""

    slug = "usage"


class UnknownNameError(UsageError):
    """A name that stands for nothing: a recipe, format, fault, rule, column or module."""

    slug = "unknown-name"

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}: {suggest(name, known)}")


class NoMatchError(UsageError):
    """A pattern that matches nothing, where silence would hide a mistake."""

    slug = "no-match"

    def __init__(self, kind: str, pattern: str, known: Iterable[str]) -> None:
        super().__init__(f"{kind} {pattern!r} matches nothing: {suggest(pattern, known)}")


class AttachError(Fp8DebugError, ValueError):
    """A target that cannot be watched: no Linear in it, or not a model or trainer."""

    slug = "attach"


class RecordError(Fp8DebugError, OSError):
    """A run directory that cannot be written: it holds a run already, or the folder refuses."""

    slug = "record"


class RunError(Fp8DebugError):
    """A run that cannot be read: missing, empty, of a newer schema, or damaged."""

    slug = "run"


class NoStepYetError(RunError):
    """A run without a recorded step: it has just begun, or it ended before its first."""

    slug = "no-step-yet"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the way out of a wrong name: the closest known names, or all of them when none is close.

    Patterns are compared without their wildcards, and all names without regard to case.
    """
    names = sorted(set(known))
    if not names:
        return "there are none"
    stem = name.replace("*", "").replace("?", "").strip(".")
    import difflib  # takes 25 ms, and few runs end in an error

    by_letters = {known.lower(): known for known in names}
    close = difflib.get_close_matches(stem.lower(), by_letters, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(by_letters[c]) for c in close) + "?"
    shown = ", ".join(names[:12])
    return f"known are {shown}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")

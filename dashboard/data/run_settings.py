"""Settings of a run by name, for columns in the list of runs: what its program was called with, and where it ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Settings of one run that are kept, and the longest value.
MAX_SETTINGS, MAX_LENGTH = 200, 120
#: Of the manifest: other parts describe modules, or have columns of their own.
_PLAIN = ("every", "shadow_rows", "what_if", "fp8debug_version", "created")
_NESTED = ("environment", "git")


def settings_of(manifest: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the settings in a manifest: options of the program as ``--lr``, the others as ``environment.torch``.

    Numbers are numbers, so that a column of them is sorted as such. A manifest may hold anything; what is no setting is left out.
    """
    found: dict[str, str | float] = {}
    argv = manifest.get("argv")
    found.update(_options([str(word) for word in argv]) if isinstance(argv, list) else {})
    for name in _PLAIN:
        if manifest.get(name) not in (None, [], ""):
            found[name] = _value(manifest[name])
    for name in _NESTED:
        part = manifest.get(name)
        if isinstance(part, Mapping):
            found.update({f"{name}.{key}": _value(value) for key, value in part.items() if value not in (None, [], "")})
    return dict(list(found.items())[:MAX_SETTINGS])


def _options(argv: Sequence[str]) -> dict[str, str | float]:
    """Return ``--name value``, ``--name=value``, ``name=value`` and flags; the last of equal names counts."""
    found: dict[str, str | float] = {}
    i = 1
    while i < len(argv):
        word = argv[i]
        name, is_given, value = word.partition("=")
        if is_given and name:
            found[name] = _value(value)
        elif word.startswith("--"):
            has_value = i + 1 < len(argv) and not argv[i + 1].startswith("--")
            found[word] = _value(argv[i + 1]) if has_value else "yes"
            i += has_value
        i += 1
    return found


def _value(value: Any) -> str | float:
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    try:
        number = float(value)
    except (TypeError, ValueError):
        text = str(value)
        return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1] + "…"
    return number if abs(number) < float("inf") else str(value)


def choices(runs: Iterable[Mapping[str, str | float]]) -> tuple[list[str], list[str]]:
    """Return the names of settings that differ between runs, and of those that do not, each in order of first appearance."""
    known = list(runs)
    names = list(dict.fromkeys(name for settings in known for name in settings))
    differing = [name for name in names if len({settings.get(name) for settings in known}) > 1]
    return differing, [name for name in names if name not in differing]

"""Thresholds and choices of a project: ``[tool.fp8debug]`` of the nearest pyproject.toml, or a TOML file that is named.

[tool.fp8debug]
ignore = ["F110"]
fail-on = "error"

[tool.fp8debug.rules.F101]
max_rate = 0.02

[tool.fp8debug.check]
ignore = ["F221"]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.registry import Registry
from fp8debug.rules.base import RULES, Severity
from fp8debug.rules.engine.selection import Thresholds, chosen, configured
from fp8debug.store.file_checks import read_text
from fp8debug.store.locations import place_of

KEYS = ("select", "ignore", "fail-on", "rules")
#: The section of ``fp8debug check``, with the same keys; its codes are checked by that command.
CHECK = "check"


@dataclass(frozen=True, kw_only=True)
class ProjectSettings:
    """Settings of a project; None where it sets nothing.

    Attributes:
        path: the file; None when there is none.
        select: codes to report.
        ignore: codes not to report.
        fail_on: severity from which triage exits with 1, or ``never``.
        thresholds: by rule.
        check_section: what stands under ``check``, unread.
    """

    path: Path | None = None
    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    fail_on: str | None = None
    thresholds: Thresholds = field(default_factory=dict)
    check_section: Mapping[str, Any] = field(default_factory=dict)

    def of_checkpoints(self, registry: Registry[Any]) -> ProjectSettings:
        """Return the settings of ``fp8debug check``.

        Args:
            registry: the rules over checkpoints.

        Raises:
            UsageError: an unknown key, code or threshold, or a value of another type.
        """
        return _parsed(self.path, self.check_section, registry)


def load_settings(file: str | Path | None = None, start: str | Path = ".") -> ProjectSettings:
    """Return the settings of a file, or of the nearest pyproject.toml upwards of ``start`` that has ``[tool.fp8debug]``.

    Args:
        file: a pyproject.toml, or a TOML file with the same keys at its top.
        start: where to begin to look when no file is named.

    Raises:
        UsageError: the file cannot be read, or holds an unknown key or a value of another type.
    """
    if file is not None:
        document = _read(place_of(file))
        table = _nested(document, "tool", "fp8debug")
        if table is None and Path(file).name == "pyproject.toml":
            raise UsageError(f"{file} has no [tool.fp8debug]")
        return _parsed(place_of(file), document if table is None else table)
    for folder in [Path(start).resolve(), *Path(start).resolve().parents]:
        path = folder / "pyproject.toml"
        if path.is_file() and (table := _nested(_read(path), "tool", "fp8debug")) is not None:
            return _parsed(path, table)
    return ProjectSettings()


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(read_text(path))
    except RecursionError:
        raise UsageError(f"cannot read {path}: nested too deep") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read {path}: {reason}") from None


def _nested(document: Mapping[str, Any], *names: str) -> Mapping[str, Any] | None:
    table: Any = document
    for name in names:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else None


def _parsed(path: Path | None, table: Mapping[str, Any], registry: Registry[Any] = RULES) -> ProjectSettings:
    try:
        return _settings(path, table, registry)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _settings(path: Path | None, table: Mapping[str, Any], registry: Registry[Any]) -> ProjectSettings:
    keys = (*KEYS, CHECK) if registry is RULES else KEYS
    for key in table:
        if key not in keys:
            raise UnknownNameError("key", key, keys)
    fail_on, rules = table.get("fail-on"), table.get("rules", {})
    levels = [*map(str, Severity), "never"]
    if fail_on is not None and fail_on not in levels:
        raise UsageError(f"fail-on must be one of {', '.join(levels)}, got {fail_on!r}")
    if not isinstance(rules, Mapping):
        raise UsageError(f"rules must be tables such as [tool.fp8debug.rules.F101], got {rules!r}")
    section = table.get(CHECK, {})
    if not isinstance(section, Mapping):
        raise UsageError(f"check must be a table, [tool.fp8debug.check], got {section!r}")
    configured(rules, registry)
    select, ignore = (_codes(key, table.get(key)) for key in ("select", "ignore"))
    chosen(select or (), None, registry)
    chosen(ignore or (), None, registry)
    return ProjectSettings(path=path, select=select, ignore=ignore, fail_on=fail_on, thresholds=rules, check_section=section)


def _codes(key: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(code, str) for code in value):
        raise UsageError(f'{key} must be a list of codes such as ["F101"], got {value!r}')
    return tuple(value)

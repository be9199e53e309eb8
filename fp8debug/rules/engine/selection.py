"""Selection of rules and their thresholds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.registry import Registry
from fp8debug.rules.base import RULES, Documented, Rule

R = TypeVar("R", bound=Documented)

#: By rule (code or name): threshold -> value.
Thresholds = Mapping[str, Mapping[str, float]]


@overload
def configured(thresholds: Thresholds | None = None) -> dict[str, Rule]: ...


@overload
def configured(thresholds: Thresholds | None, registry: Registry[R]) -> dict[str, R]: ...


def configured(thresholds: Thresholds | None = None, registry: Registry[Any] = RULES) -> dict[str, Any]:
    """Return every rule by its code, with the thresholds replaced that are given.

    Args:
        thresholds: by rule (code or name), then by threshold.
        registry: the rules; those over runs by default.

    Raises:
        UnknownNameError: no such rule or threshold.
        UsageError: a value of another type.
    """
    rules = {rule.code: rule for rule in registry}
    codes = {**{rule.name: rule.code for rule in registry}, **{code: code for code in rules}}
    if not isinstance(thresholds, Mapping | None):
        raise UsageError(f'thresholds are given as {{"F101": {{"max_rate": 0.02}}}}, got {thresholds!r}')
    for name, changes in (thresholds or {}).items():
        if not isinstance(changes, Mapping):
            raise UsageError(f"thresholds of {name} must be a table such as {{max_rate = 0.02}}, got {changes!r}")
        code = codes.get(name) or codes.get(name.upper())
        if code is None:
            raise UnknownNameError("rule", name, codes)
        known = rules[code].thresholds
        for key, value in changes.items():
            if key not in known:
                raise UnknownNameError(f"threshold of {code}", key, known)
            _check_number(f"{key} of {code}", value, is_whole=isinstance(known[key], int))
        rules[code] = replace(rules[code], **changes)
    return rules


def chosen(prefixes: Sequence[str], needed_by: str | None = None, registry: Registry[Any] = RULES) -> set[str]:
    """Return the codes that begin with one of the prefixes, or whose rule has that name.

    Args:
        prefixes: codes, beginnings of codes, names.
        needed_by: what needs at least one of them.
        registry: the rules; those over runs by default.

    Raises:
        UnknownNameError: one fits no rule.
        UsageError: there is none where one is needed.
    """
    if not isinstance(prefixes, Iterable) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise UsageError(f"rules are selected by codes or names, such as ('F10', 'wrong-scale'); got {prefixes!r}")
    if needed_by is not None and not any(prefix.strip() for prefix in prefixes):
        raise UsageError(f"{needed_by} is empty: give codes such as F10 or F113, or leave it out for all rules")
    codes: set[str] = set()
    for prefix in prefixes:
        found = {r.code for r in registry if prefix and (r.code.startswith(prefix.upper()) or r.name == prefix)}
        if not found:
            raise UnknownNameError("rule", prefix, [*registry.names(), *(rule.name for rule in registry)])
        codes |= found
    return codes


def _check_number(what: str, value: object, *, is_whole: bool) -> None:
    is_number = isinstance(value, int) if is_whole else isinstance(value, (int, float)) and not math.isnan(value)
    if isinstance(value, bool) or not is_number:
        raise UsageError(f"{what} must be a {'whole ' if is_whole else ''}number, got {value!r}")

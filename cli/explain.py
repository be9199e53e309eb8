"""``fp8debug explain CODE``: a rule's manual page, from its docstring."""

from __future__ import annotations

import click

from fp8debug.checkpoints.rules import CHECKS
from fp8debug.errors import UnknownNameError
from fp8debug.parity.rules import PATHS
from fp8debug.rules import RULES
from fp8debug.rules.base import Documented

from .output import write


@click.command("explain")
@click.argument("code", required=False)
@click.option("--list", "wants_list", is_flag=True, help="List every rule.")
def command(code: str | None, wants_list: bool) -> None:
    """Print the manual page of the rule CODE (F101, or its name): what it detects, why it matters, the cure."""
    if wants_list or code is None:
        for rule in _all():
            write(f"{rule.code}  {rule.name:24}  {rule.summary}")
        return
    rule = _rule(code)
    write(f"{click.style(f'{rule.code} {rule.name}', bold=True)}\n\n{rule.summary}")
    for heading, text in rule.manual().items():
        indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        write(f"\n{click.style(heading, bold=True)}\n{indented}")


def _all() -> list[Documented]:
    return [*RULES, *CHECKS, *PATHS]


def _rule(name: str) -> Documented:
    for rule in _all():
        if name.upper() == rule.code or name.lower() == rule.name:
            return rule
    raise UnknownNameError("rule", name.upper(), [known for rule in _all() for known in (rule.code, rule.name)])

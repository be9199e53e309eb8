"""Selection of operands and steps to dump: the strings of ``watch(dump=...)``.

    SELECTOR = SITES [@STEPS]                          blocks.*.down:fprop:input@100:200:10
    SITES    = MODULE [:GEMM [:TENSOR]]                globs; what is left out is *
    STEPS    = N | [A]:[B][:EVERY] | on-finding        from A to before B; left out: every sampled step

``on-finding`` alone is ``*@on-finding``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape

from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from fp8debug.types import OPERAND_SITES, Gemm, match_fqn

ON_FINDING = "on-finding"


@dataclass(frozen=True, kw_only=True)
class Selector:
    """One string of ``watch(dump=...)``.

    Attributes:
        text: as it was given.
        module: FQN glob.
        gemm: a GEMM or ``*``.
        tensor: an operand or ``*``.
        first: first step, None from the start.
        end: the step before which it ends, None for never.
        every: only steps ``first + n * every``.
        on_finding: hold the last steps and write them when something happens.
    """

    text: str
    module: str
    gemm: str
    tensor: str
    first: int | None
    end: int | None
    every: int
    on_finding: bool

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Return what a string selects.

        Raises:
            UsageError: it is no selector.
        """
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"expected a selector such as 'blocks.2.mlp.down:fprop:input@100:200', got {text!r}")
        sites, at, steps = ("*", "@", text) if text == ON_FINDING else text.partition("@")
        words = [word.strip() or "*" for word in sites.split(":")]
        if len(words) > 3:
            raise UsageError(f"dump {text!r} has too many parts; expected MODULE:GEMM:TENSOR@STEPS")
        module, gemm, tensor = [*words, "*", "*"][:3]
        for kind, word, known in (("gemm", gemm, [g.value for g in Gemm]), ("operand", tensor, _operands(gemm))):
            if word != "*" and word not in known:
                raise UnknownNameError(f"{kind} of dump {text!r}", word, known)
        on_finding = steps.strip() == ON_FINDING
        first, end, every = _parse_steps(text, steps.strip()) if at and not on_finding else (None, None, None)
        return cls(
            text=text,
            module=module,
            gemm=gemm,
            tensor=tensor,
            first=first,
            end=end,
            every=every or 1,
            on_finding=on_finding,
        )

    def takes_site(self, module: str, gemm: str, tensor: str) -> bool:
        """Return whether a site is among its sites."""
        return fnmatchcase(module, self.module) and self.gemm in ("*", gemm) and self.tensor in ("*", tensor)

    def takes_step(self, step: int) -> bool:
        """Return whether a step is among its steps."""
        first = self.first or 0
        return step >= first and (self.end is None or step < self.end) and (step - first) % self.every == 0


def _operands(gemm: str) -> list[str]:
    return sorted({str(tensor) for g, tensor in OPERAND_SITES if gemm in ("*", str(g))})


def _parse_steps(text: str, steps: str) -> tuple[int | None, int | None, int | None]:
    """Return first, end and every of the part of a selector after the @."""
    words = [word.strip() for word in steps.split(":")]
    if not all(word.isdecimal() or (not word and len(words) > 1) for word in words) or len(words) > 3 or words[2:] == ["0"]:
        raise UsageError(f"dump {text!r}: steps are a number, a range A:B or A:B:EVERY, or {ON_FINDING}; got {steps!r}")
    first, end, every = [*(int(word) if word else None for word in words), None, None][:3]
    if len(words) == 1 and first is not None:
        end = first + 1
    if end is not None and end <= (first or 0):
        raise UsageError(f"dump {text!r}: the range {steps!r} is empty; the first step comes first and the end is not in it")
    return first, end, every


def parse_selectors(texts: Iterable[str], modules: Sequence[str], every: int) -> list[Selector]:
    """Return the selectors of ``watch(dump=...)``, all of which select something.

    Args:
        texts: the strings.
        modules: FQNs of the modules that are watched.
        every: steps that are sampled are its multiples.

    Raises:
        NoMatchError: a selector's module matches none that is watched.
        UsageError: a string is no selector or selects no sampled step.
    """
    parsed = [Selector.parse(text) for text in texts]
    for selector in parsed:
        if not match_fqn(modules, selector.module):
            raise NoMatchError("dump", selector.module, modules)
        first = selector.first or 0
        below = first // every * every
        # Steps repeat after every * selector.every at the latest.
        last = first + every * selector.every
        last = last if selector.end is None else min(last, selector.end)
        if not any(selector.takes_step(step) for step in range(below, last, every)):
            raise UsageError(
                f"dump {selector.text!r} selects no sampled step with every={every};"
                f" sampled are {below}, {below + every}, ... or watch with another every="
            )
    return [replace(s, module=escape(s.module)) if s.module in modules else s for s in parsed]

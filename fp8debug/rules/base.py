"""Interface of a rule (Run -> Findings), its findings, and the registry: a new rule is one file with one class.

A rule's docstring is its manual page (``fp8debug explain F101``) and has the five ``SECTIONS``; its thresholds are its
dataclass fields, each with its source in the docstring. A rule accuses; what to do about it is for ``recommend()``.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.errors import UnknownNameError
from fp8debug.registry import Registry

if TYPE_CHECKING:
    from fp8debug.rules.reading.conditions import Look
    from fp8debug.store.read.run import Run

#: The headings of every rule's docstring, in this order, after its one-line summary.
SECTIONS = ("What it detects", "Why it matters", "Example", "Cure", "Thresholds")


class Severity(str, Enum):
    """Severity of a finding; it equals its name, and is ordered as listed here."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Position in rising order, from 1."""
        return list(Severity).index(self) + 1

    def __str__(self) -> str:
        return self.value

    def __lt__(self, other: str) -> bool:
        return self.rank < Severity(other).rank

    def __le__(self, other: str) -> bool:
        return self.rank <= Severity(other).rank

    def __gt__(self, other: str) -> bool:
        return self.rank > Severity(other).rank

    def __ge__(self, other: str) -> bool:
        return self.rank >= Severity(other).rank

    @classmethod
    def parse(cls, name: str) -> Severity:
        """Return the severity of that name.

        Raises:
            UnknownNameError: there is none.
        """
        try:
            return cls(name.lower())
        except ValueError:
            raise UnknownNameError("severity", name, [str(s) for s in cls]) from None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause, at the worst of the sites that show it.

    Attributes:
        code: of the rule, ``F101``.
        name: of the rule; it names the fault.
        severity: info, warning or error.
        module: FQN of the culprit; None when no layer is to blame.
        gemm: of the worst site; None when the finding is not about one.
        tensor: of the worst site.
        cast: name of the running cast there.
        steps: first and last step that show it, both included.
        ranks: ranks whose tensors showed it.
        value: the measured number at the worst step; None when it is not finite or there is none.
        threshold: the limit it crossed.
        unit: of value and threshold, as in the schema.
        message: one sentence with the numbers.
        cure: what helps, cheapest first.
        also: further modules with the same cause, in execution order.
        victims: modules that only suffer from it.
        call_index: execution order of the culprit in the forward pass.
        origin: where the first NaN or Inf came from: ``cast``, ``gemm``, or ``outside`` where no Linear made it; None for
            findings of other kinds, and where that was not recorded.
        parts: the findings per site of which this one was made; empty for a single site.
    """

    code: str
    name: str
    severity: Severity
    module: str | None = None
    gemm: str | None = None
    tensor: str | None = None
    cast: str | None = None
    steps: tuple[int, int]
    ranks: tuple[int, ...] = (0,)
    value: float | None = None
    threshold: float | None = None
    unit: str = "1"
    message: str
    cure: str
    also: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    call_index: int = 0
    origin: str | None = None
    parts: tuple[Finding, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def unpacked(cls, values: Mapping[str, Any]) -> Finding:
        """Return the finding of which ``dataclasses.asdict`` gave these values, through JSON or not."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list) and name != "parts"}
        parts = tuple(cls.unpacked(part) for part in values["parts"])
        return cls(**{**values, **lists, "severity": Severity(values["severity"]), "parts": parts})

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Culprit order: errors first, then the first step, then execution (the backward pass from the last layer)."""
        backward = self.gemm in ("dgrad", "wgrad")
        return (-self.severity.rank, self.steps[0], int(backward), -self.call_index if backward else self.call_index)

    @property
    def sites(self) -> tuple[Finding, ...]:
        """The findings per site: ``parts``, or this one alone."""
        return self.parts or (self,)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as documented JSON values; a number that is not finite is None."""
        return {
            "code": self.code,
            "name": self.name,
            "severity": str(self.severity),
            "module": self.module,
            "gemm": self.gemm,
            "tensor": self.tensor,
            "cast": self.cast,
            "steps": list(self.steps),
            "ranks": list(self.ranks),
            "value": finite(self.value),
            "threshold": finite(self.threshold),
            "unit": self.unit,
            "message": self.message,
            "cure": self.cure,
            "also": list(self.also),
            "victims": list(self.victims),
            "origin": self.origin,
        }


def finite(value: float | None) -> float | None:
    """Return the value, a float to the digits that hold, or None where JSON has no word for it."""
    if value is None or not math.isfinite(value):
        return None
    return round_stable(value) if isinstance(value, float) else value


def round_stable(value: float) -> float:
    """Return a value to 12 digits: in what order sums over ranks are added no engine fixes, and the last bits hang on it."""
    return float(f"{value:.12g}")


@dataclass(frozen=True)
class Documented(ABC):
    """A judgement with a code, a manual page and thresholds; a subclass is a frozen dataclass whose fields are its thresholds.

    Attributes:
        code: ``F`` and three digits.
        name: slug that names the fault.
        cure: what helps, cheapest first, in one line.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    cure: ClassVar[str]

    @property
    def summary(self) -> str:
        """First line of the manual page."""
        return _doc(self).partition("\n")[0]

    @property
    def thresholds(self) -> dict[str, float]:
        """The limits by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def manual(self) -> dict[str, str]:
        """Return the manual page: text by section heading, in order."""
        pages: dict[str, list[str]] = {}
        for line in _doc(self).splitlines()[1:]:
            if line.strip() in SECTIONS and not line.startswith(" "):
                pages[line.strip()] = []
            elif pages:
                pages[list(pages)[-1]].append(line)
        return {heading: inspect.cleandoc("\n".join(lines)) for heading, lines in pages.items()}


@dataclass(frozen=True)
class Rule(Documented):
    """Base of every rule over a run.

    Attributes:
        code: ``F1NN``, NN the number in the catalogue of numerics.md, 5.
        columns: slots or derived columns without which the rule cannot judge.
        changes: fields of Cast that cure the fault without leaving FP8; empty where no cast does.
        needs_fp8: True for a rule that judges running casts: a run of what-if rows alone has none.
        is_harmful: False for a fault that cannot move the loss, such as a module left in BF16.
        follows: True for a fault that one elsewhere may cause: of a :class:`FollowingRule`.
        needs_training: True for a rule over gradients, optimizer steps or the loss, which a run of inference has not.
        only_unexplained: True for a rule that knows no cause of its own: sites that another rule explains are left to that rule.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    changes: ClassVar[Mapping[str, Any]] = {}
    needs_fp8: ClassVar[bool] = True
    is_harmful: ClassVar[bool] = True
    follows: ClassVar[bool] = False
    needs_training: ClassVar[bool] = False
    only_unexplained: ClassVar[bool] = False

    @abstractmethod
    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per site that shows the fault; ``triage()`` joins them."""

    def looks(self) -> Iterable[Look]:
        """Return the rows that ``check`` asks for; what is named here is read in one pass for all rules."""
        return ()

    def needs(self, run: Run) -> str | None:
        """Return why the rule cannot judge this run, beyond its columns; None when it can."""
        return None

    def is_cured_by_cast(self, site: Finding, run: Run) -> bool:
        """Tell whether ``changes`` cure the fault at a site of this rule's findings, where they change its cast at all."""
        return True

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Return whether a finding of this rule holds beside those of the other rules."""
        return True


@dataclass(frozen=True)
class FollowingRule(Rule):
    """Base of the rules over faults that one elsewhere may cause, by the size of what it sends on.

    Right after an error of another cause their findings are victims.

    Attributes:
        follow_steps: sampled steps after the first of another cause within which a consequence shows.
        min_batch_growth: amax of what the first module reads over its largest of the sampled steps before, from which on a
            finding that begins and ends with such steps is a consequence of the batch.
    """

    follows = True

    follow_steps: int = 2
    min_batch_growth: float = 10.0


def accuses_other_modules(finding: Finding, others: Sequence[Finding], code: str) -> bool:
    """Return whether a finding accuses a module that no finding of the rule ``code`` does."""
    accused = {part.module for other in others if other.code == code for part in other.sites}
    return any(part.module not in accused for part in finding.sites)


def asks_for_cast(site: Finding) -> bool:
    """Return whether a finding is about the cast of an operand and harms the run: another cast, or BF16, may then be a cure."""
    is_site = bool(site.module and site.gemm and site.tensor) and site.code in RULES
    return is_site and RULES.get(site.code).is_harmful and site.severity > Severity.INFO


def _doc(rule: Documented) -> str:
    return inspect.cleandoc(type(rule).__doc__ or "")


RULES: Registry[Rule] = Registry("rule")

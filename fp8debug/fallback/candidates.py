"""One candidate for another cast or BF16, and a list of them as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8debug.errors import UsageError
from fp8debug.recipes import Cast
from fp8debug.store.file_checks import parse_json, read_json
from fp8debug.types import OPERAND_SITES, Gemm

GEMMS = tuple(gemm.value for gemm in Gemm)
TENSORS = ("*", *dict.fromkeys(tensor.value for _, tensor in OPERAND_SITES))

#: Of the JSON document. 1: first version (fp8debug 0.1). 2: ``from_step`` and ``until_step``, which a reader of 1 would
#: overlook; a list without them is still written as 1.
SCHEMA, PLAIN_SCHEMA = 2, 1


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """One candidate: what of a module should run in another cast, or in BF16, when, and why.

    Attributes:
        module: FQN; a glob such as ``*`` or ``blocks.*`` in a list written by hand.
        gemms: of ``fprop``, ``dgrad``, ``wgrad``.
        tensor: the operand whose cast changes; ``*`` for both.
        cast: what it should run in; None is BF16.
        reasons: codes of the findings that ask for it; ``damage`` or ``error`` where the recorded errors do.
        damage: mean damage of a sampled row of the module's output, in loss^2; None when it was not recorded.
        cost: share of the FP8 speed-up given back, as `fp8debug speed` measured it, else the GEMMs' share of all FP8 FLOPs; 0
            for another cast.
        cheaper: what could be tried before it; None when this is the cheapest cure known.
        from_step: first optimizer step at which it holds; None from the start ("BF16 from step N": a cool-down).
        until_step: first step at which it holds no more; None for ever ("BF16 until step N": a warm-up).
    """

    module: str
    gemms: tuple[str, ...]
    tensor: str = "*"
    cast: Cast | None = None
    reasons: tuple[str, ...] = ()
    damage: float | None = None
    cost: float = 0.0
    cheaper: str | None = None
    from_step: int | None = None
    until_step: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.gemms  # of JSON, or written by hand
        gemms = (given,) if isinstance(given, str) else given
        if not isinstance(self.module, str) or not isinstance(gemms, Sequence) or not isinstance(self.cast, Cast | None):
            raise UsageError(
                "a fallback needs the name of a module, gemms, and a Cast or None;"
                f" got {self.module!r}, {self.gemms!r} and {self.cast!r}"
            )
        object.__setattr__(self, "gemms", tuple(gemms))
        if not self.gemms or not set(self.gemms) <= set(GEMMS) or self.tensor not in TENSORS:
            raise UsageError(
                f"a fallback needs gemms of {', '.join(GEMMS)} and a tensor of {', '.join(TENSORS)};"
                f" {self.module!r} has {list(self.gemms)} and {self.tensor!r}"
            )
        for name, number in (("damage", self.damage), ("cost", self.cost)):
            is_number = isinstance(number, int | float) and not isinstance(number, bool) and number >= 0
            if not is_number and (name, number) != ("damage", None):
                raise UsageError(f"{name} of a fallback is a number of at least 0; {self.module!r} has {number!r}")
        if not isinstance(self.reasons, tuple | list) or not all(isinstance(reason, str) for reason in self.reasons):
            raise UsageError(f"reasons of a fallback are codes of findings; {self.module!r} has {self.reasons!r}")
        for name, step in (("from_step", self.from_step), ("until_step", self.until_step)):
            if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
                raise UsageError(f"{name} of a fallback is the number of a step, 0 or more; {self.module!r} has {step!r}")
        if self.until_step is not None and self.until_step <= (self.from_step or 0):
            raise UsageError(
                f"the fallback of {self.module!r} never holds: until_step {self.until_step} is not after"
                f" from_step {self.from_step or 0}"
            )

    @property
    def is_scheduled(self) -> bool:
        """True if it holds in some steps only."""
        return self.from_step is not None or self.until_step is not None

    def holds(self, step: int) -> bool:
        """Return whether it holds at a step."""
        return (self.from_step or 0) <= step and (self.until_step is None or step < self.until_step)

    def span(self) -> str:
        """Return when it holds, for people: ``until step 100``, ``from step 50``, ``steps 50 to 99``, ``always``."""
        if self.from_step is not None and self.until_step is not None:
            return f"steps {self.from_step} to {self.until_step - 1}"
        if self.until_step is not None:
            return f"until step {self.until_step}"
        return f"from step {self.from_step}" if self.from_step is not None else "always"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, the cast by its name (null is BF16); steps only where there are some."""
        values: dict[str, Any] = {
            "module": self.module,
            "gemms": list(self.gemms),
            "tensor": self.tensor,
            "cast": None if self.cast is None else str(self.cast),
            "reasons": list(self.reasons),
            "damage": self.damage,
            "cost": self.cost,
            "cheaper": self.cheaper,
        }
        if self.is_scheduled:
            values |= {"from_step": self.from_step, "until_step": self.until_step}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fallback:
        """Build a fallback from :meth:`to_dict`; only ``module`` is required, unknown keys are ignored.

        Raises:
            UsageError: not a fallback.
        """
        try:
            cast = values.get("cast")
            return cls(
                module=str(values["module"]),
                gemms=values.get("gemms") or GEMMS,
                tensor=str(values.get("tensor", "*")),
                cast=cast if cast is None else Cast.parse(cast) if isinstance(cast, str) else Cast.from_dict(cast),
                reasons=tuple(values.get("reasons", ())),
                damage=values.get("damage"),
                cost=float(values.get("cost", 0.0)),
                cheaper=values.get("cheaper"),
                from_step=values.get("from_step"),
                until_step=values.get("until_step"),
            )
        except UsageError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError):
            expected = '{"module": "blocks.0.up", "gemms": ["fprop"], "cast": null}'
            raise UsageError(f"not an entry of a fallback list: {str(values)[:80]}; expected one such as {expected}") from None


def scheduled(fallbacks: Iterable[Fallback], *, from_step: int | None = None, until_step: int | None = None) -> list[Fallback]:
    """Return the list with its BF16 entries held in these steps only; a changed cast costs nothing and stays for good."""
    return [f if f.cast else replace(f, from_step=from_step, until_step=until_step) for f in fallbacks]


def load_fallbacks(source: str | Path | Mapping[str, Any] | Iterable[Fallback | Mapping[str, Any]]) -> list[Fallback]:
    """Return the fallbacks of a JSON file, JSON text or parsed document, as the ``json`` exporter writes it, or of a list.

    Raises:
        UsageError: it cannot be read, or is not a fallback list.
    """
    document: Any = source
    if isinstance(source, str | Path):
        is_text = isinstance(source, str) and source.lstrip().startswith(("{", "["))
        try:
            document = parse_json(str(source)) if is_text else read_json(Path(source))
        except OSError as error:
            raise UsageError(f"cannot read fallbacks from {str(source)[:80]!r}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"cannot read fallbacks from {str(source)[:80]!r}: {error}") from None
    entries = document.get("fallbacks") if isinstance(document, Mapping) else document
    if isinstance(document, Mapping) and document.get("schema", 1) not in (PLAIN_SCHEMA, SCHEMA):
        raise UsageError(f"fallback list of schema {document['schema']}; this version reads schema 1 and 2, so upgrade fp8debug")
    if isinstance(entries, str | Fallback) or not isinstance(entries, Iterable):
        raise UsageError(
            "expected a fallback list: what recommend() returns, or a JSON object with 'fallbacks', as"
            f" fp8debug fallback --to json writes; got {type(source if isinstance(source, str | Path) else entries).__name__}"
        )
    return [entry if isinstance(entry, Fallback) else Fallback.from_dict(entry) for entry in entries]

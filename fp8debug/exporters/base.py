"""What an exporter is: a fallback list in one stack's own format; a new one is one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fp8debug.registry import Registry

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.run import Run


class Exporter(Protocol):
    """Writes a fallback list for one consumer.

    Attributes:
        name: what ``fp8debug fallback --to`` calls it.
        suffix: of the file, with its dot.
    """

    name: str
    suffix: str

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the file's text."""
        ...


EXPORTERS: Registry[Exporter] = Registry("exporter")

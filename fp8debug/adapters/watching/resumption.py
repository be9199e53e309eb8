"""Comparison of a resumed run's settings with those of the part before it, and with its checkpoint's."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fp8debug.store.configuration import Difference, declared_differences, differences, settings_of_checkpoint
from fp8debug.store.read.manifest import checked
from fp8debug.store.write.writer import RunWriter

#: Sides of a comparison, as messages name them.
EARLIER, CHECKPOINT = "the earlier part of the run", "the checkpoint"


class Resumption:
    """Reports each setting once that is not what the earlier part of the run, or the checkpoint, had.

    What a backend runs may be known only after the first sampled step: ``compare`` is called again then. Each difference is
    one clause of one printed line, of an event of kind ``resume``, and an entry of ``resumed`` in the manifest, which F144 reads.

    Args:
        writer: of rank 0; elsewhere nothing is compared.
        first_step: of the watch.
        checkpoint: folder with the ``manifest.json`` of a run, or the ``config.json`` of a model, or both.
        roots: the watched models; one with ``config.quantization_config`` states its checkpoint's settings itself.

    Raises:
        UsageError: the checkpoint's folder states no settings.
    """

    def __init__(
        self, writer: RunWriter, first_step: int, checkpoint: str | Path | None = None, roots: Sequence[nn.Module] = ()
    ) -> None:
        self._writer, self._step = writer, first_step
        self._known: set[tuple[str, Difference]] = set()
        own = writer.earlier if writer.rank == 0 else {}
        self._earlier = checked(own, writer.path, []) if own else None
        self._stored, self._declared = settings_of_checkpoint(checkpoint)
        if self._declared is None:
            self._declared = next(filter(None, map(_of_model, roots)), None)
        kept = (self._earlier or {}).get("resumed") or []
        self._entries = [entry for entry in kept if (entry.get("step") or 0) < first_step]
        self._is_active = writer.rank == 0 and (self._earlier or self._stored or self._declared) is not None

    def compare(self, manifest: Mapping[str, Any]) -> None:
        """Report what differs and was not reported yet.

        Args:
            manifest: as far as it is known now.
        """
        if not self._is_active:
            return
        for against, found in self._found(manifest):
            new = [one for one in found if (against, one) not in self._known]
            self._known.update((against, one) for one in new)
            self._entries += [{"step": self._step, "against": against, **one.to_dict()} for one in new]
            if new:
                clauses = "; ".join(map(str, new))
                text = f"resumed at step {self._step} with other settings than {against}: {clauses}"
                print(f"fp8debug: {text}", file=sys.stderr)
                self._writer.event(self._step, "resume", None, text)
        self._writer.update_manifest({"resumed": list(self._entries)})

    def _found(self, manifest: Mapping[str, Any]) -> Iterable[tuple[str, list[Difference]]]:
        if self._earlier is not None:
            yield EARLIER, differences(self._earlier, manifest)
        if self._stored is not None:
            yield CHECKPOINT, differences(self._stored, manifest)
        if self._declared is not None:
            yield CHECKPOINT, declared_differences(self._declared, manifest)


def _of_model(root: nn.Module) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a Transformers model that was loaded from a quantized checkpoint."""
    declared = getattr(vars(root).get("config"), "quantization_config", None)
    to_dict = getattr(declared, "to_dict", None)
    declared = to_dict() if callable(to_dict) else declared
    return declared if isinstance(declared, Mapping) else None

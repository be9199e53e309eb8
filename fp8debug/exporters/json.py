"""The format of our own: what ``fp8debug.apply`` reads.

    {"schema": 1, "run": "exp1",
     "fallbacks": [{"module": "blocks.3.mlp.down", "gemms": ["fprop"], "tensor": "*", "cast": null, "reasons": ["F105"],
                    "damage": 1.2e-9, "cost": 0.021, "cheaper": "..."}],
     "folklore": {"about": "...", "modules": ["blocks.0.attn.qkv", "head"]}}

``cast`` is the name of a cast, null is BF16; ``cost`` is the share of the FP8 speed-up given back. An entry that holds in some
steps only has ``from_step`` and ``until_step`` (first step at which it holds no more), null where that side is open; the
schema is then 2. ``apply`` ignores ``folklore``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS, Exporter
from fp8debug.fallback import positional_prior
from fp8debug.fallback.candidates import PLAIN_SCHEMA, SCHEMA

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

FOLKLORE = (
    "positional prior, not evidence from this run: production recipes often keep the first and last layers in BF16"
    " (DeepSeek-V3, Nemotron-H)"
)


class JsonExporter(Exporter):
    """The list with its reasons; the positional prior apart, labelled as folklore."""

    name = "json"
    suffix = ".json"

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the document."""
        document = {
            "schema": SCHEMA if any(fallback.is_scheduled for fallback in fallbacks) else PLAIN_SCHEMA,
            "run": run.name,
            "fallbacks": [fallback.to_dict() for fallback in fallbacks],
            "folklore": {"about": FOLKLORE, "modules": positional_prior(run)},
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"


EXPORTERS.add(JsonExporter.name, JsonExporter())

"""The format of our own: what ``fp8debug.apply`` reads.

    {"schema": 1, "run": "exp1",
     "fallbacks": [{"module": "blocks.3.mlp.down", "gemms": ["fprop"], "tensor": "*", "cast": null, "reasons": ["F105"],
                    "damage": 1.2e-9, "cost": 0.021, "cheaper": "..."}],
     "folklore": {"about": "...", "modules": ["blocks.0.attn.qkv", "head"]}}

``cast`` is the name of a cast, null is BF16; ``cost`` is the share of the FP8 speed-up given back. ``apply`` ignores
``folklore``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.exporters.base import EXPORTERS
from fp8debug.fallback import positional_prior

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.run import Run

#: 1: first version (fp8debug 0.1).
SCHEMA = 1

FOLKLORE = (
    "positional prior, not evidence from this run: production recipes often keep the first and last layers in BF16"
    " (DeepSeek-V3, Nemotron-H)"
)


class JsonExporter:
    """The list with its reasons; the positional prior apart, labelled as folklore."""

    name = "json"
    suffix = ".json"

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the document."""
        document = {
            "schema": SCHEMA,
            "run": run.name,
            "fallbacks": [fallback.to_dict() for fallback in fallbacks],
            "folklore": {"about": FOLKLORE, "modules": positional_prior(run)},
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"


EXPORTERS.add(JsonExporter.name, JsonExporter())

"""The scan of a large run: at which sites and steps any rank shows what the looks hint at, and what is read of these rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fp8debug.metrics import derived_columns
from fp8debug.metrics.expression import names
from fp8debug.rules.looks import Look
from fp8debug.store.schema import SITE_KEYS

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


def keep_suspects(run: Run, looks: Sequence[Look]) -> list[int]:
    """Keep the sites and steps at which a rank shows what a look hints at; return for each look whether there are any."""
    by_gate: dict[str, list[Look]] = {}
    for look in looks:
        for gate in look.gates or ("",):
            by_gate.setdefault(gate, []).append(look)
    places = {look: place for place, look in enumerate(looks)}
    selects = []
    for gate, behind in by_gate.items():
        by_keys: dict[str, list[str]] = {}
        for look in behind:
            by_keys.setdefault(look.keys, []).append(look.hint)
        hints = " OR ".join(f"({shared}) AND ({any_of(texts)})" for shared, texts in by_keys.items())
        bits = [f"CASE WHEN {look.keys} AND ({look.hint}) THEN {2 ** places[look]} ELSE 0 END" for look in behind]
        shown = f"CAST(0 AS BIGINT) + {' + '.join(bits)} AS shown"
        where = f"{gate} AND ({hints})" if gate else hints
        selects.append(f"SELECT DISTINCT {', '.join(SITE_KEYS)}, {shown} FROM raw WHERE {where}")
    run.hold({"suspects": "\nUNION ALL\n".join(selects)})
    shown = run.sql("SELECT DISTINCT shown FROM suspects")["shown"].to_pylist()
    return [sum(number >> place & 1 for number in shown) for place in range(len(looks))]


def slots_of(run: Run, looks: Sequence[Look]) -> list[str]:
    """Return the columns of ``raw`` that some looks and their rules read; histograms are read where they lie."""
    words = set(re.findall(r"[a-z]\w*", " ".join(text for look in looks for text in (look.rows, *look.columns))))
    words |= {name for word in words & derived_columns().keys() for name in names(derived_columns()[word].expression)}
    words |= {*SITE_KEYS, "rank", "call_index", "replicated", "shard"}
    return [name for name in run.slots if name in words - {"log2_hist"}]


def any_of(predicates: Iterable[str]) -> str:
    """Return the predicate that holds where one of these does."""
    return "\n OR ".join(f"({text})" for text in dict.fromkeys(predicates))

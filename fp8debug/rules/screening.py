"""One pass over a large run for all rules: the rows that any of them asks for are found together and kept apart.

A row of ``sites`` joins the rows of all ranks, and to join them all is most of what a query costs. Each rule says what one rank
at least must show for the rows that it asks for (``looks``); one scan finds the few sites and steps at which any rank shows it,
and only these are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fp8debug.rules.looks import Look
from fp8debug.store.schema import SITE_KEYS
from fp8debug.types import OPERAND_SITES, RESULTS

if TYPE_CHECKING:
    from fp8debug.store.run import Run

#: Rows of statistics up to which ``sites`` is kept in memory whole (1.4 KB a row), so that no rule reads a file.
SMALL = 50_000
#: Rows of statistics that are read at once by a query in batches of steps: what it groups stays below 1 GB.
BATCH = 5_000_000

#: In the order in which they are computed.
_SITES = [*((str(gemm), str(tensor)) for gemm, tensor in OPERAND_SITES), *((str(g), str(t)) for g, t in RESULTS.items())]


def is_kept_whole(run: Run) -> bool:
    """Keep the statistics of a small run in memory; tell whether it is one."""
    if not run.keeps_whole or run.num_rows > SMALL:
        return False
    if not run.memo("kept whole", list[bool]):
        run.hold({view: f"SELECT * FROM {view}" for view in ("raw", "stats", "sites")})
        run.memo("kept whole", list[bool]).append(True)
    return True


def screen(run: Run, looks: Iterable[Look]) -> None:
    """Keep the rows that the looks ask for; ``source`` then says where to read them."""
    if is_kept_whole(run):
        return
    known = run.memo("screened", dict[str, Look])
    found = {look.rows: look for look in looks}
    if found.keys() <= known.keys():
        return
    known |= found
    keys, slots = ", ".join(SITE_KEYS), [name for name in run.slots if name != "log2_hist"]
    by_keys: dict[str, list[str]] = {}
    for look in known.values():
        by_keys.setdefault(look.keys, []).append(look.hint)
    hints = " OR ".join(f"({shared}) AND ({_any(texts)})" for shared, texts in by_keys.items())
    run.hold(
        {
            "suspects": f"SELECT DISTINCT {keys} FROM raw WHERE {hints}",
            "suspected": f"SELECT {', '.join(slots)} FROM raw SEMI JOIN suspects USING ({keys})",
        }
    )
    run.hold({"flagged": f"SELECT * FROM ({run.sites_of('suspected', slots)}) AS joined WHERE {_any(known)}"})


def _any(predicates: Iterable[str]) -> str:
    return "\n OR ".join(f"({text})" for text in dict.fromkeys(predicates))


def source(run: Run, rows: str) -> str:
    """Return the table that has all rows of ``sites`` for which a predicate holds."""
    return "flagged" if rows in run.memo("screened", dict[str, Look]) else "sites"


def bad_rows(run: Run, where: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows in order of steps, execution and the computation of a module's GEMMs."""
    table, few = source(run, where), ""
    params: list[object] = []
    if table == "flagged" and "log2_hist" in columns:  # which is not kept there
        extent = f"SELECT module, min(step) AS first, max(step) AS last FROM flagged WHERE {where} GROUP BY module"
        modules = run.sql(extent).to_pylist()
        if not modules:
            return []
        first, last = min(row["first"] for row in modules), max(row["last"] for row in modules)
        table, params = "sites", [row["module"] for row in modules]
        few = f"step >= {first} AND step <= {last} AND module IN ({', '.join('?' * len(params))}) AND "
    rows: list[dict[str, Any]] = run.sql(f"SELECT {', '.join(columns)} FROM {table} WHERE {few}{where}", params).to_pylist()
    return sorted(rows, key=_place)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    site = (row["gemm"], row["tensor"])
    place = _SITES.index(site) if site in _SITES else len(_SITES)
    return row["step"], row["call_index"] is None, row["call_index"] or 0, str(row["module"]), place, str(row["cast_name"])


def batches(run: Run, query: str, first: int = 0) -> Iterator[pa.Table]:
    """Yield the answers to a query that groups by step, asked for some steps at a time.

    Args:
        run: where to look.
        query: its text, with ``{steps}`` for the condition on the steps.
        first: place of the first sampled step to ask for.
    """
    steps = run.sampled_steps
    size = max(1, len(steps) * BATCH // max(1, run.num_rows))
    for start in range(first, len(steps), size):
        batch = steps[start : start + size]
        yield run.sql(query.replace("{steps}", f"step >= {batch[0]} AND step <= {batch[-1]}"))


def in_batches(run: Run, query: str) -> list[dict[str, Any]]:
    """Return the rows of ``batches`` together."""
    return [row for table in batches(run, query) for row in table.to_pylist()]

"""One pass over a large run for all rules: the rows that any of them asks for are found together and kept apart.

Of each look it is known what one rank at least must show; one scan finds the few sites and steps at which any rank shows it, and
only these are joined.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fp8debug.metrics import derived_columns
from fp8debug.metrics.expression import names
from fp8debug.rules.reading.conditions import RUNNING, Look
from fp8debug.store.schema import SITE_KEYS
from fp8debug.types import OPERAND_SITES, RESULTS

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
    """Return the columns of ``raw`` that some looks and their rules read, but for histograms."""
    words = set(re.findall(r"[a-z]\w*", " ".join(text for look in looks for text in (look.rows, *look.columns))))
    words |= {name for word in words & derived_columns().keys() for name in names(derived_columns()[word].expression)}
    words |= {*SITE_KEYS, "rank", "call_index", "replicated", "shard"}
    return [name for name in run.slots if name in words - {"log2_hist"}]


def any_of(predicates: Iterable[str]) -> str:
    """Return the predicate that holds where one of these does."""
    return "\n OR ".join(f"({text})" for text in dict.fromkeys(predicates))


#: Rows of statistics up to which ``sites`` is kept in memory whole (1.4 KB a row), so that no rule reads a file.
SMALL = 50_000
#: Rows of suspects up to which their histograms are kept in memory too (0.5 KB a row); those of more are read where they lie.
MAX_HISTOGRAMS = 200_000
#: Rows of statistics that are read at once by a query in batches of steps: what it groups stays below 1 GB.
BATCH = 5_000_000

#: In the order in which they are computed.
_SITES = [*((str(gemm), str(tensor)) for gemm, tensor in OPERAND_SITES), *((str(g), str(t)) for g, t in RESULTS.items())]


@dataclass
class _Screened:
    """Predicates that were searched for, and those that may have rows."""

    looks: dict[str, Look] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)
    has_histograms: bool = False


def is_kept_whole(run: Run) -> bool:
    """Keep the statistics of a small run in memory; tell whether it is one."""
    if not run.keeps_whole or run.num_rows > SMALL:
        return False
    if not run.memo("kept whole", list[bool]):
        run.hold({view: f"SELECT * FROM {view}" for view in ("raw", "sites")})
        run.memo("kept whole", list[bool]).append(True)
    return True


def screen(run: Run, looks: Iterable[Look]) -> None:
    """Look for the rows that the looks ask for, and keep those of a large run; ``source`` then says where to read them."""
    screened = run.memo("screened", _Screened)
    asked = {look.rows: look for look in looks}
    if asked.keys() <= screened.looks.keys():
        return
    screened.looks |= asked
    known = list(screened.looks.values())
    if is_kept_whole(run):
        found = list(run.first_row(_any_rows(known)) or ())
    else:
        found = keep_suspects(run, known)
    screened.found = {look.rows for look, num in zip(known, found, strict=True) if num}
    if screened.found and not is_kept_whole(run):
        asking = [look for look in known if look.rows in screened.found]
        slots = slots_of(run, asking)
        num = run.sql("SELECT count(*) AS num FROM suspects").to_pylist()[0]["num"] * len(run.ranks)
        screened.has_histograms = num <= MAX_HISTOGRAMS and any("log2_hist" in look.columns for look in asking)
        slots += ["log2_hist"] if screened.has_histograms else []
        keys = ", ".join(SITE_KEYS)
        run.hold({"suspected": f"SELECT {', '.join(slots)} FROM raw SEMI JOIN suspects USING ({keys})"})
        run.hold({"flagged": f"SELECT * FROM ({run.sites_of('suspected', slots)}) AS joined WHERE {any_of(screened.found)}"})


def _any_rows(looks: Sequence[Look]) -> str:
    """Return the query for one row that tells, for each look, whether it has rows; what most share is written once."""
    texts = [look.rows for look in looks]
    texts = [f"is_running{text.removeprefix(RUNNING)}" if text.startswith(f"{RUNNING} AND ") else text for text in texts]
    return f"SELECT {', '.join(f'bool_or({text})' for text in texts)} FROM (SELECT *, {RUNNING} AS is_running FROM sites)"


def may_have(run: Run, look: Look) -> bool:
    """Return whether there may be rows that a look asks for."""
    screened = run.memo("screened", _Screened)
    return look.rows not in screened.looks or look.rows in screened.found


def source(run: Run, look: Look) -> str:
    """Return the table that has all rows of ``sites`` that a look asks for, if there are any."""
    return "flagged" if look.rows in run.memo("screened", _Screened).looks and not is_kept_whole(run) else "sites"


def source_of_ranks(run: Run, look: Look) -> str | None:
    """Return the table of the rows of every rank where one shows what a look hints at; None where none does."""
    if source(run, look) == "sites":
        return "raw"
    return "suspected" if may_have(run, look) else None


def bad_rows(run: Run, look: Look, within: Collection[tuple[str, int]] = ()) -> list[dict[str, Any]]:
    """Return the rows that a look asks for in order of steps, execution and the computation of a module's GEMMs.

    Args:
        run: where to look.
        look: for which rows.
        within: modules and steps to which they belong, where they are known.
    """
    if not may_have(run, look):
        return []
    table, few = source(run, look), ""
    params: list[object] = []
    if table == "flagged" and "log2_hist" in look.columns and not run.memo("screened", _Screened).has_histograms:
        pairs = run.sql(f"SELECT DISTINCT module, step FROM flagged WHERE {look.rows}").to_pylist()
        within = [(row["module"], row["step"]) for row in pairs]
        if not within:
            return []
    if within:
        table, params = "sites", list(dict.fromkeys(module for module, _ in within))
        first, last = min(step for _, step in within), max(step for _, step in within)
        few = f"step >= {first} AND step <= {last} AND module IN ({', '.join('?' * len(params))}) AND "
    columns = ", ".join(("step", "module", "gemm", "tensor", "cast_name", "call_index", "ranks", *look.columns))
    rows: list[dict[str, Any]] = run.sql(f"SELECT {columns} FROM {table} WHERE {few}{look.rows}", params).to_pylist()
    return sorted(rows, key=_place)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    site = (row["gemm"], row["tensor"])
    place = _SITES.index(site) if site in _SITES else len(_SITES)
    return row["step"], row["call_index"] is None, row["call_index"] or 0, str(row["module"]), place, str(row["cast_name"])


def has_cast(run: Run, which: str) -> bool:
    """Return whether a cast was recorded for which a predicate holds."""
    query = f"SELECT 1 AS one FROM raw WHERE {which} LIMIT 1"
    return bool(run.memo(f"has cast {which}", lambda: run.first_row(query) is not None))


def batches(run: Run, query: str, params: Sequence[object] = (), first: int = 0) -> Iterator[pa.Table]:
    """Yield the answers to a query that groups by step, asked for some steps at a time.

    Args:
        run: where to look.
        query: its text, with ``{steps}`` for the condition on the steps.
        params: values for ``?``.
        first: place of the first sampled step to ask for.
    """
    steps = run.sampled_steps
    num = max(1, -(-run.num_rows * (len(steps) - first) // max(1, len(steps) * BATCH)))
    size = max(1, -(-(len(steps) - first) // num))
    for start in range(first, len(steps), size):
        batch = steps[start : start + size]
        yield run.sql(query.replace("{steps}", f"step >= {batch[0]} AND step <= {batch[-1]}"), params)


def in_batches(run: Run, query: str, params: Sequence[object] = ()) -> list[dict[str, Any]]:
    """Return the rows of ``batches`` together."""
    return [row for table in batches(run, query, params) for row in table.to_pylist()]

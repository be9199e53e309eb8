"""What pages ask most of a large run, in memory: keys as small numbers, and a few metrics in float32.

Parquet is packed: to find one module in ten million rows every page of a column is unpacked. The first pages of a run are read
from it all the same; :func:`build` takes seconds and runs in the background. Its answers are those of the views, which
``data`` gives, but for float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fp8debug import Run
from fp8debug.types import Gemm, Reference, TensorRole

from .envelopes import badness_sql, kind_of

#: The metrics that are kept, the ones that pages show unasked first; a run of 100 million rows has room for three.
METRICS = ("sqnr_db", "scale_inv_mean_log2", "headroom", "gain", "underflow_rate", "overflow_rate", "cosine", "amax")
#: Room for the table, and what a row takes beside its metrics: module (2 bytes), step (4), key of the site (2).
MAX_BYTES, KEY_BYTES = 2 << 30, 8
_GEMMS, _TENSORS, _REFERENCES = ([member.value for member in kind] for kind in (Gemm, TensorRole, Reference))

#: (gemm, tensor, cast name, reference, running) of a site.
Key = tuple[str, str, str, str, bool]


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """The table ``narrow`` (m, step, c and the metrics) of a connection of its own, with the meaning of its codes.

    Attributes:
        run: holds the table.
        metrics: its metrics.
        modules: name of each m.
        keys: site of each c.
    """

    run: Run
    metrics: frozenset[str]
    modules: Sequence[str]
    keys: dict[int, Key]

    def heat(self, metric: str, keys: Iterable[Key], first: int, last: int, width: int) -> pa.Table:
        """Return the worst of each module and ``width`` steps: module, cell, step, v and kind, as ``data.heat`` asks for them."""
        wanted = set(keys)
        codes = [c for c, key in self.keys.items() if key in wanted]
        e5m2 = [c for c in codes if "e5m2" in self.keys[c][2]]
        leaf = [c for c in codes if self.keys[c][:2] == ("wgrad", "grad_output")]
        kind_by_code = {c: kind_of(*self.keys[c][:4]) for c in codes}
        cases = [
            f"WHEN {_among([c for c in codes if kind_by_code[c] == k])} THEN {k}" for k in sorted(set(kind_by_code.values()))
        ]
        worst = f"({badness_sql(metric, _among(e5m2), _among(leaf))}, CASE {' '.join(cases) or 'WHEN FALSE THEN 0'} END)"
        table = self.run.sql(
            f"SELECT m, CAST(floor((step - {first}) / {width}) AS BIGINT) AS cell, min(step) AS step,"
            f" max_by({metric}, {worst}) AS v, max_by(c, {worst}) AS c FROM narrow"
            f" WHERE {_among(codes)} AND step BETWEEN {first} AND {last} AND {metric} IS NOT NULL"
            f" GROUP BY m, CAST(floor((step - {first}) / {width}) AS BIGINT)"
        )
        kinds = np.zeros(max(self.keys, default=0) + 1, dtype=np.int32)
        for c, key in self.keys.items():
            kinds[c] = kind_of(*key[:4])
        names = pa.DictionaryArray.from_arrays(table.column("m").combine_chunks().cast(pa.int32()), pa.array(self.modules))
        kind = pa.array(kinds[table.column("c").to_numpy()])
        return pa.table({"module": names, "kind": kind, **{name: table.column(name) for name in ("cell", "step", "v")}})

    def traces(self, module: str, metrics: Sequence[str], first: int, width: int) -> pa.Table:
        """Return mean, least and largest of some metrics of a module, as ``data.several_traces`` asks for them."""
        values = ", ".join(f"avg({n}) AS {n}_avg, min({n}) AS {n}_min, max({n}) AS {n}_max" for n in metrics)
        order = sorted(self.keys, key=lambda c: (*self.keys[c][:2], not self.keys[c][4], *self.keys[c][2:4]))
        places = " ".join(f"WHEN {c} THEN {place}" for place, c in enumerate(order))
        table = self.run.sql(
            f"SELECT CASE c {places} END AS place, min(step) AS step, {values} FROM narrow WHERE m = {self._m(module)}"
            f" GROUP BY c, CAST(floor((step - {first}) / {width}) AS BIGINT) ORDER BY 1, 2"
        )
        sites = [self.keys[order[place]] for place in table.column("place").to_pylist()]
        names = ("gemm", "tensor", "cast_name", "reference", "actual")
        types = (pa.string(), pa.string(), pa.string(), pa.string(), pa.bool_())
        columns = {name: pa.array([site[i] for site in sites], types[i]) for i, name in enumerate(names)}
        return pa.table({**columns, **{name: table.column(name) for name in table.column_names[1:]}})

    def steps(self, module: str) -> list[int]:
        """Return the steps at which a module has statistics."""
        query = f"SELECT DISTINCT step FROM narrow WHERE m = {self._m(module)} ORDER BY step"
        return [int(step) for step in self.run.sql(query).column("step").to_pylist()]

    def _m(self, module: str) -> int:
        return self.modules.index(module) if module in self.modules else len(self.modules)


def build(path: Path) -> Narrow | None:
    """Read the table of a run; None where it would be too large, or holds none of the metrics.

    Raises:
        Fp8DebugError: the run cannot be read.
    """
    run = Run(path)
    room = (MAX_BYTES // max(1, run.num_rows) - KEY_BYTES) // 4
    metrics = [name for name in METRICS if run.has(name)][: max(0, room)]
    modules = list(dict.fromkeys(str(m["fqn"]) for m in run.modules))
    found = run.sql("SELECT DISTINCT cast_name FROM raw WHERE cast_name IS NOT NULL ORDER BY 1").column("cast_name").to_pylist()
    lists = (_GEMMS, _TENSORS, _REFERENCES, ["false", "true"], [str(name) for name in found])
    if not metrics or not modules or not found or len(modules) > 60_000 or np.prod([len(each) for each in lists]) > 60_000:
        return None
    code = "0"
    for name, known in zip(("gemm", "tensor", "reference", "actual", "cast_name"), lists, strict=True):
        code = f"({code} * {len(known)} + {_place(name, known)})"
    values = ", ".join(f"TRY_CAST({name} AS FLOAT) AS {name}" for name in metrics)
    keys_sql = f"CAST({_place('module', modules)} AS USMALLINT) AS m, step, CAST({code} AS USMALLINT) AS c"
    run.hold({"narrow": f"SELECT {keys_sql}, {values} FROM sites WHERE step IS NOT NULL AND module IS NOT NULL"})
    codes = [c for c in run.sql("SELECT DISTINCT c FROM narrow").column("c").to_pylist() if c is not None]
    keys = {c: _key(c, lists) for c in codes}
    return Narrow(run=run, metrics=frozenset(metrics), modules=modules, keys=keys)


def _among(codes: Sequence[int]) -> str:
    return f"c IN ({', '.join(map(str, codes))})" if codes else "FALSE"


def _place(column: str, values: Sequence[str]) -> str:
    """Return SQL for the place of a string column's value in a list: an enumeration looks up each word of a dictionary once."""
    words = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
    return f"CAST(enum_code(CAST(CAST({column} AS VARCHAR) AS ENUM({words}))) AS INTEGER)"


def _key(code: int, lists: Sequence[Sequence[str]]) -> Key:
    places = []
    for values in reversed(lists):
        code, place = divmod(code, len(values))
        places.append(values[place])
    cast_name, actual, reference, tensor, gemm = places
    return gemm, tensor, cast_name, reference, actual == "true"

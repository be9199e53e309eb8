"""``Run``: a recorded run, read through SQL (DuckDB) from its Parquet parts and from the streams not yet compacted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import duckdb
import pyarrow as pa

from fp8debug.errors import Fp8DebugError, NoMatchError, NoStepYetError, RunError, UnknownNameError, UsageError
from fp8debug.store.locations import ObjectPath, forget, place_of, why
from fp8debug.store.read.ending import end_thread_at_exit, stop_at_exit
from fp8debug.store.read.engine import connect, path_literal, unreadable
from fp8debug.store.read.files import RunFile, RunFiles, needed, scan
from fp8debug.store.read.manifest import modules_table
from fp8debug.store.read.repeats import SITE_COLUMNS
from fp8debug.store.read.views import (
    DUCKDB,
    columns_in,
    counted,
    site_columns,
    sites_sql,
    stats_sql,
    steps_sql,
    typed,
    updates_sql,
)
from fp8debug.store.schema import Column
from fp8debug.types import Gemm, Reference, TensorRole, match_fqn

if TYPE_CHECKING:
    from fp8debug_dashboard.sharing.html_figure import HtmlFigure

_T = TypeVar("_T")
#: Errors that say nothing of the files.
_QUERY_ERRORS = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException, duckdb.InterruptException)
#: Seconds between two interruptions: a query that has not begun yet overhears the first.
AGAIN_S = 0.02

#: ``a:b`` or (a, b): a <= step < b; a side that is empty or None is open; ``a`` is that step alone.
StepRange: TypeAlias = str | tuple[int | None, int | None]


class Run:
    """A run directory, finished, killed or still being written.

    Args:
        path: the run's folder.

    Attributes:
        path: the run's folder.
        name: its name.
        manifest: ``manifest.json``; empty when it is missing.
        rank_manifests: each rank's ``manifest.json`` by rank.
        ranks: ranks that have rows.
        problems: one sentence for each file that could not be read and each missing rank.

    Raises:
        RunError: there is no run, it holds no rows, or its schema is newer than ours.
    """

    #: Whether a small one may be kept in memory whole.
    keeps_whole = True
    #: Whether ``raw`` has all rows of the files, so that of parts that repeat one another one will do for the sites.
    _has_all_rows = True
    _dialect = DUCKDB

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise UsageError(f"expected the path of a run's folder, got {path!r}")
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise RunError(f"{str(path)!r} is no path in UTF-8, which the query engine needs; rename it") from None
        self.path = place_of(path)
        self._lock = threading.RLock()
        self._damaged: set[Path] = set()
        stop_at_exit(self)
        try:
            self.name = self.path.resolve().name
            with self._lock:
                end_thread_at_exit()
                self._open()
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from fp8debug_dashboard.sharing.notebook import run_html

        return run_html(self)

    def refresh(self) -> None:
        """Look again at a run that is still being written."""
        with self._lock:
            self._open()

    def stop_answering(self, until: float) -> None:
        """Interrupt the query of another thread, at the end of the program; see ``ending``."""
        while not (is_ours := self._lock.acquire(timeout=AGAIN_S)) and time.monotonic() < until:
            connection = self.__dict__.get("_connection")
            if connection is not None:
                connection.interrupt()
        if is_ours:
            self.__dict__.pop("_connection", None)  # kept by a thread that never ends, it would be reported as leaked
            self._lock.release()

    def _open(self) -> None:
        for folder in self._folders():
            forget(folder)
        try:
            self._use(self._scan())
        except duckdb.Error as error:
            end_thread_at_exit()
            if not self._find_damage():
                raise RunError(f"{self.path} cannot be read: {why(error)}") from None
            self._use(self._scan())

    def _use(self, files: RunFiles) -> None:
        self._parts = [source.path for source in files.of() if source.rows is None]
        if not any(s.table != "events" for s in files.of()):
            found = "; ".join(files.problems)
            if found:
                raise RunError(f"{self.path} holds no recorded step yet: {found}")
            what = "a run that is being written can be read after its first sampled step"
            raise NoStepYetError(f"{self.path} holds no recorded step yet; {what}")
        self.manifest, self.rank_manifests = files.manifest, files.rank_manifests
        self.ranks, self.problems = files.ranks, files.problems
        self._memo: dict[str, Any] = {}
        self._footer_ends = files.step_ends()
        self._files = files
        self._modules: list[dict[str, Any]] | None = None
        self._connection = connect(self._folders())
        self._create_views(files)

    def _folders(self) -> Sequence[Path]:
        """Return the folders whose files make up the run."""
        return (self.path,)

    def _scan(self) -> RunFiles:
        """Look for the files; a run of several folders looks in all of them."""
        return scan(self.path, self._damaged)

    def _create_views(self, files: RunFiles) -> None:
        is_single_rank = len(files.ranks) == 1
        stats, steps = columns_in("stats", files), columns_in("steps", files)
        self._slots = stats
        self._create("raw", self._table_sql("stats", stats, files))
        self._create("raw_steps", self._table_sql("steps", steps, files))
        updates = columns_in("updates", files)
        self._create("raw_updates", self._table_sql("updates", updates, files))
        self._create("updates", updates_sql(updates, self._dialect))
        parameters = columns_in("parameters", files)
        self._create("raw_parameters", self._table_sql("parameters", parameters, files))
        self._create("parameters", updates_sql(parameters, self._dialect, "parameters", "parameter"))
        self._create("events", self._table_sql("events", columns_in("events", files), files))
        self._create("stats", stats_sql(stats))
        self._create("sites", sites_sql(stats, self._dialect, is_single_rank=is_single_rank))
        self._create("steps", steps_sql(steps, is_single_rank=is_single_rank))
        self._columns = site_columns(stats, is_single_rank=is_single_rank)
        self._step_columns = [column.name for column in steps]
        self._list_modules()

    def _list_modules(self) -> None:
        self._register("modules", modules_table(self.modules))

    def _create(self, name: str, query: str) -> None:
        self._connection.execute(f"CREATE VIEW {name} AS {query}")

    def _table_sql(self, table: str, columns: Sequence[Column], files: RunFiles) -> str:
        selects = []
        for before, group in files.sources.items():
            where = f" WHERE step < {before} OR step IS NULL" if before is not None else ""
            of_table = [source for source in group if source.table == table]
            for is_whole in (True, False):
                parts = [source for source in of_table if source.rows is None and source.is_whole is is_whole]
                if parts:
                    text = f"SELECT {typed(columns, parts, self._dialect)} FROM {self._parts_sql(parts)}"
                    selects.append(counted(text, where, table, is_whole=is_whole))
            for source in of_table:
                if source.rows is not None:
                    name = f"stream_{table}_{source.rank}_{source.number}"
                    self._register(name, source.rows)
                    rows = f"SELECT {typed(columns, [source], self._dialect)} FROM {name}"
                    selects.append(counted(rows, where, table, is_whole=source.is_whole))
        if not selects:
            selects.append(f"SELECT {typed(columns, [], self._dialect)} WHERE FALSE")
        return "\nUNION ALL\n".join(selects)

    def _parts_sql(self, parts: Sequence[RunFile]) -> str:
        """Return the text that stands for the rows of Parquet files."""
        by_name = any(source.schema != parts[0].schema for source in parts)  # which makes DuckDB open every file for each query
        paths = ", ".join(path_literal(source.path) for source in parts)
        return f"read_parquet([{paths}], union_by_name = {str(by_name).lower()}, hive_partitioning = false)"

    def _register(self, name: str, rows: pa.Table) -> None:
        self._connection.register(name, rows)

    def sql(self, query: str, params: Sequence[object] | Mapping[str, object] | None = None) -> pa.Table:
        """Return the answer to a query.

        The views: ``sites`` (one row per step, site, cast and reference; ranks joined, ``ranks`` lists them; slots and
        derived columns), ``stats`` (the same per rank), ``raw`` (per rank, slots only), ``steps`` (one row per step),
        ``raw_steps`` (per rank), ``updates`` (what an optimizer step did to each weight, ranks joined), ``raw_updates`` (per
        rank), ``parameters`` and ``raw_parameters`` (the same of parameters that are no watched weights), ``events`` and
        ``modules``.

        Args:
            query: one SELECT in DuckDB's SQL.
            params: values for ``?`` or ``$name``; names that come from outside belong here, not into the text.

        Raises:
            UsageError: the query is wrong; the message is DuckDB's.
            RunError: the files cannot be read.
        """
        if not isinstance(query, str):
            raise UsageError(f"a query is one SELECT as text, got {query!r}")
        return self._again(lambda: self._query(query, params))

    def first_row(self, query: str) -> tuple[Any, ...] | None:
        """Return the first row of the answer to one of our own queries, without parameters; None where it has none.

        It is planned once; an answer of :meth:`sql` is planned for its names and types, and again to be computed.
        """
        return self._again(lambda: self._first_row(query))

    def _first_row(self, query: str) -> tuple[Any, ...] | None:
        rows = self._connection.execute(query).fetchall()
        return rows[0] if rows else None

    def _again(self, ask: Callable[[], _T]) -> _T:
        """Ask; where a file turns out to be damaged, ask again without it."""
        with self._lock:
            end_thread_at_exit()
            if "_connection" not in self.__dict__:  # the main thread asks at the end of the program
                self._open()
            try:
                return ask()
            except duckdb.Error as error:
                end_thread_at_exit()
                if isinstance(error, _QUERY_ERRORS) or not self._find_damage():
                    raise UsageError(f"the query failed: {error}") from error
                self._open()
                return ask()
            except Exception as error:
                # Errors of a store come through DuckDB as they are.
                if isinstance(error, Fp8DebugError) or not isinstance(self.path, ObjectPath):
                    raise
                raise RunError(f"{self.path} cannot be read: {why(error)}") from None

    def distinct_sites(self, query: str) -> pa.Table:
        """Return the answer to a query over ``site_rows``: steps and ``repeats.SITE_COLUMNS`` of rows of ``raw``.

        They have every combination of these columns that ``raw`` has, not as often and not at every step: parts whose bytes
        repeat are read once. For DISTINCT, min and max.

        Args:
            query: one SELECT from ``site_rows``, without parameters.

        Raises:
            UsageError: the query is wrong.
            RunError: the files cannot be read.
        """

        def ask() -> pa.Table:
            self.memo("site_rows", self._create_site_rows)
            return self._query(query, None)

        return self._again(ask)

    def _create_site_rows(self) -> None:
        if self._has_all_rows:
            columns = [column for column in self._slots if column.name in (*SITE_COLUMNS, *needed("stats"))]
            self._create("site_rows", self._table_sql("stats", columns, self._files.without_repeats()))
        else:
            self._create("site_rows", f"SELECT step, {', '.join(SITE_COLUMNS)} FROM raw")

    def hold(self, tables: Mapping[str, str]) -> None:
        """Keep the answers to queries as tables, made in this order; each then stands for a view of its name, until a refresh."""

        def keep() -> None:
            for name, query in tables.items():
                self._connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}")

        self._again(keep)

    def sites_of(self, rows: str, columns: Collection[str]) -> str:
        """Return the text of ``sites`` made of a table of rows of ``raw``, with some of its columns."""
        slots = [column for column in self._slots if column.name in columns]
        return sites_sql(slots, self._dialect, is_single_rank=len(self.ranks) == 1, source=rows)

    def memo(self, key: str, make: Callable[[], _T]) -> _T:
        """Return what ``make`` gave when it was first called for this key; a refresh forgets it."""
        with self._lock:
            if key not in self._memo:
                self._memo[key] = make()
            found: _T = self._memo[key]
            return found

    def _query(self, query: str, params: Sequence[object] | Mapping[str, object] | None) -> pa.Table:
        statements = self._connection.extract_statements(query)
        if len(statements) != 1 or statements[0].type not in (
            duckdb.StatementType.SELECT,
            duckdb.StatementType.EXPLAIN,
        ):
            raise UsageError(f"not one SELECT: {query.strip()[:80]!r}")
        return self._connection.sql(query, params=params).to_arrow_table()

    def _find_damage(self) -> bool:
        """Read every part to its end, which costs as much as a query; remember those that fail."""
        try:
            found = unreadable(self._parts, self._folders())
        except OSError as error:
            raise RunError(f"{self.path} cannot be read: {why(error)}") from None
        self._damaged |= found
        return bool(found)

    def show(self) -> None:
        """Display the run in a notebook: verdict, what to do, loss, modules by steps, findings. A terminal gets the findings.

        Needs no network, and the output runs no script.
        """
        from fp8debug_dashboard.sharing.notebook import show_run

        show_run(self)

    def findings(
        self, baseline: Run | str | Path | None = None, select: Sequence[str] = ("F",), ignore: Sequence[str] = ()
    ) -> HtmlFigure:
        """Judge the run; return the findings as a table, the culprit first.

        Arguments and errors are those of :func:`fp8debug.triage`, which returns the findings as objects.
        """
        from fp8debug_dashboard.sharing.notebook import findings_figure

        return findings_figure(self, baseline, select, ignore)

    def heatmap(self, metric: str | None = None, site: str | None = None, module: str = "*") -> HtmlFigure:
        """Return a metric of modules over steps, as a figure and as a table.

        Args:
            metric: a column of ``sites``; the worst of all that have a healthy range by default.
            site: ``gemm.tensor`` as ``fprop.input``, ``operands``, ``results`` (against the shadow) or ``exact``; all by
                default.
            module: glob over module names.

        Raises:
            UnknownNameError: no such metric or site.
            UsageError: the run has no value of it.
            NoMatchError: no module matches the glob.
        """
        from fp8debug_dashboard.sharing.notebook import heatmap_figure

        return heatmap_figure(self, metric, site, module)

    def site(self, module: str, gemm: str = "fprop", tensor: str = "input") -> HtmlFigure:
        """Return the statistics of one site over steps, as a figure and as a table.

        Args:
            module: FQN.
            gemm: ``fprop``, ``dgrad`` or ``wgrad``.
            tensor: an operand or result of it.

        Raises:
            UnknownNameError: no such module, gemm or tensor.
            UsageError: nothing was recorded at that site.
        """
        from fp8debug_dashboard.sharing.notebook import site_figure

        return site_figure(self, module, gemm, tensor)

    @property
    def modules(self) -> list[dict[str, Any]]:
        """The manifest's modules, and those of other pipeline stages, in execution order (those never called last).

        ``call_index`` is added.
        """
        with self._lock:
            if self._modules is None:
                self._modules = self._read_modules()
            return self._modules

    @property
    def gemms(self) -> list[dict[str, Any]]:
        """FLOPs of the forward GEMMs of one step, by the module that ran them, of all stages; empty where none were counted.

        The entries are those of ``gemms`` in the manifest (docs/schema.md).
        """
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        for manifest in (self.manifest, *(found for _, found in sorted(self.rank_manifests.items()))):
            for entry in manifest.get("gemms") or ():
                place = tuple(entry.get(name) for name in ("fqn", "kind", "precision", "fp8", "weight"))
                known.setdefault(place, entry)
        return list(known.values())

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """Numbers of parameters by role, of all pipeline stages; empty where they were not counted.

        The entries are those of ``parameters`` in the manifest (docs/backends.md).
        """
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        for manifest in (self.manifest, *(found for _, found in sorted(self.rank_manifests.items()))):
            for entry in manifest.get("parameters") or ():
                if entry.get("role") and (entry.get("num_params") or 0) > 0:
                    known.setdefault((entry["role"], entry.get("first")), entry)
        return list(known.values())

    def _read_modules(self) -> list[dict[str, Any]]:
        query = "SELECT module, min(call_index) AS call_index FROM site_rows WHERE module IS NOT NULL GROUP BY module"
        called = {row["module"]: row["call_index"] for row in self.distinct_sites(query).to_pylist()}
        known: dict[str, dict[str, Any]] = {}
        for manifest in (self.manifest, *(found for _, found in sorted(self.rank_manifests.items()))):
            listed = manifest.get("modules")
            for m in listed if isinstance(listed, list) else []:
                if isinstance(m, dict) and "fqn" in m:
                    known.setdefault(str(m["fqn"]), {**m, "fqn": str(m["fqn"]), "call_index": called.get(str(m["fqn"]))})
        modules = list(known.values())
        modules += [{"fqn": fqn, "call_index": at} for fqn, at in sorted(called.items()) if fqn not in known]
        places = {m["fqn"]: place for place, m in enumerate(modules)}

        def order(module: dict[str, Any]) -> tuple[bool, int, int]:
            at = module["call_index"]
            return at is None, at or 0, places[module["fqn"]]

        return sorted(modules, key=order)

    @property
    def columns(self) -> list[str]:
        """The columns of the view ``sites``: keys, slots, derived."""
        return list(self._columns)

    @property
    def slots(self) -> list[str]:
        """The columns of the view ``raw``: keys, rank and slots."""
        return [column.name for column in self._slots]

    @property
    def steps_range(self) -> tuple[int, int]:
        """The first and the last step that was recorded, 0 and 0 without any; the footers of parts tell it without their rows."""
        if self._footer_ends is not None:
            return self._footer_ends
        query = (
            "SELECT min(step) AS first, max(step) AS last FROM (SELECT step FROM raw_steps UNION ALL SELECT step FROM raw) AS a"
        )
        row = self.memo("steps_range", lambda: self.sql(query).to_pylist()[0])
        return (0, 0) if row["first"] is None else (row["first"], row["last"])

    @property
    def num_rows(self) -> int:
        """Number of rows of statistics that were recorded, those of all ranks; the footers of most runs tell it."""
        num = self._files.num_rows("stats") if self._has_all_rows else None
        if num is not None:
            return num
        return int(self.memo("num_rows", lambda: self.sql("SELECT count(*) AS num FROM raw").to_pylist()[0]["num"]))

    @property
    def sampled_steps(self) -> list[int]:
        """The steps with statistics, in order."""
        query = "SELECT DISTINCT step FROM raw ORDER BY step"
        return list(self.memo("sampled_steps", lambda: self.sql(query)["step"].to_pylist()))

    def sampled_steps_of(self, module: str) -> list[int]:
        """Return the steps with statistics of a module, in order: all sampled ones but where modules take turns."""
        if self.manifest.get("turns", 1) == 1:
            return self.sampled_steps
        query = "SELECT module, array_sort(array_agg(DISTINCT step)) AS steps FROM raw GROUP BY module"
        steps = self.memo("sampled_steps_of", lambda: {row["module"]: row["steps"] for row in self.sql(query).to_pylist()})
        return list(steps.get(module, ()))

    def has(self, column: str) -> bool:
        """Return whether a column of ``sites`` or ``steps`` was recorded: it holds anything but null."""
        derived = self._rows_of_ranks
        views = {**dict.fromkeys(self._step_columns, "steps"), **dict.fromkeys(self._columns, derived), "ranks": "sites"}
        if column not in views:
            return False
        early = views[column] == derived and self.memo("early", self._early).get(column)
        view = "raw" if column in self.slots else views[column]
        query = f"SELECT 1 AS one FROM {view} WHERE {column} IS NOT NULL LIMIT 1"
        return bool(early) or self.memo(f"has {column}", lambda: self.first_row(query) is not None)

    @property
    def _rows_of_ranks(self) -> str:
        """View of the rows of each rank with derived columns: of one rank, ``sites``, which may be in memory."""
        return "sites" if len(self.ranks) == 1 else "stats"

    def _early(self) -> dict[str, bool]:
        """Return which columns hold something at the first sampled step: nearly all that ever do."""
        # Histograms are many times as large as all the rest.
        asked = [name for name in self._columns if name not in ("ranks", "log2_hist")]
        known = ", ".join(f"count({name}) > 0 AS {name}" for name in asked)
        first = min((step for step in self.sampled_steps if step is not None), default=0)
        row = self.first_row(f"SELECT {known} FROM {self._rows_of_ranks} WHERE step = {first}") or ()
        return dict(zip(asked, row, strict=True))

    def table(
        self,
        columns: Sequence[str] | None = None,
        module: str = "*",
        gemm: str | None = None,
        tensor: str | None = None,
        steps: StepRange | None = None,
        reference: str | None = None,
        actual: bool | None = None,
    ) -> pa.Table:
        """Return rows of ``sites``, ranks and microbatches merged, ordered by step and execution.

        Args:
            columns: columns to return; all but the histogram by default.
            module: a module's name, or a glob over them.
            gemm: ``fprop``, ``dgrad`` or ``wgrad``.
            tensor: ``input``, ``weight``, ``grad_output``, ``output``, ``grad_input`` or ``grad_weight``.
            steps: ``(a, b)`` or ``"a:b"``: a <= step < b; None or an empty side is open; ``"a"`` is that step alone.
            reference: ``operand``, ``shadow`` or ``exact``.
            actual: True for the running casts only, False for what-ifs only.

        Raises:
            UnknownNameError: no such column, gemm, tensor or reference.
            NoMatchError: no module matches the glob.
            UsageError: steps is neither ``a:b`` nor ``a``.
        """
        wanted = self._wanted(columns)
        where = _Conditions()
        for kind, value, known in (("gemm", gemm, Gemm), ("tensor", tensor, TensorRole), ("reference", reference, Reference)):
            if value is not None:
                _known(kind, str(value), [member.value for member in known])
                where.add(f"{kind} = ?", str(value))
        if actual is not None:
            where.add("actual = ?", actual)
        first, end = parse_steps(steps)
        if first is not None:
            where.add("step >= ?", first)
        if end is not None:
            where.add("step < ?", end)
        if not isinstance(module, str):
            raise UsageError(f"module is a glob over module names, got {module!r}")
        names = [m["fqn"] for m in self.modules]
        found = match_fqn(names, module)
        if not found:
            raise NoMatchError("module", module, names)
        if len(found) < len(names):
            where.add(f"module IN ({', '.join('?' * len(found))})", *found)
        gemm_order = "CASE gemm WHEN 'fprop' THEN 0 WHEN 'dgrad' THEN 1 ELSE 2 END"
        order = f"step, call_index, module, {gemm_order}, tensor, reference, actual DESC, cast_name"
        return self.sql(f"SELECT {', '.join(wanted)} FROM sites{where} ORDER BY {order}", where.params)

    def _wanted(self, columns: Sequence[str] | None) -> list[str]:
        """Return the columns that were asked for: all but the histogram by default."""
        if columns is None:
            return [column for column in self._columns if column != "log2_hist"]
        wanted = [columns] if isinstance(columns, str) else columns
        if not isinstance(wanted, Sequence) or not all(isinstance(column, str) for column in wanted):
            raise UsageError(f"columns is a list of names, got {columns!r}")
        if not wanted:
            raise UsageError("columns is empty; leave it out for all columns")
        for column in wanted:
            _known("column", column, self._columns)
        return list(wanted)


class _Conditions:
    """Conditions of a query on ``sites`` and their parameters; as text, its WHERE clause."""

    def __init__(self) -> None:
        self.params: list[object] = []
        self._conditions: list[str] = []

    def add(self, condition: str, *params: object) -> None:
        """Add a condition with a question mark for each parameter."""
        self._conditions.append(condition)
        self.params.extend(params)

    def __str__(self) -> str:
        return f" WHERE {' AND '.join(self._conditions)}" if self._conditions else ""


def parse_steps(steps: StepRange | None) -> tuple[int | None, int | None]:
    """Return (first, end) of a step range, end exclusive, None where a side is open.

    Raises:
        UsageError: it is neither ``"a:b"`` nor ``"a"`` nor a pair.
    """
    if steps is None:
        return None, None
    first: int | None
    end: int | None
    try:
        if isinstance(steps, str) and ":" not in steps:
            first, end = int(steps), int(steps) + 1
        elif isinstance(steps, str):
            first, end = (int(side) if side.strip() else None for side in steps.split(":"))
        else:
            first, end = (None if side is None else int(side) for side in steps)
    except (TypeError, ValueError):
        raise UsageError(f"steps must be a step like 100 or a range like 100:200, 100: or :200, got {steps!r}") from None
    if first is not None and end is not None and end <= first:
        raise UsageError(f"the range of steps {steps!r} is empty: it goes from the first to before the second")
    return first, end


def _known(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UnknownNameError(kind, name, known)

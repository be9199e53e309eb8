"""One run as its files were at one moment, with what was concluded from it; what takes long is done once, off the first paint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fp8debug import Run
from fp8debug.errors import Fp8DebugError

from ..data import queries
from ..data.health import HEALTH
from ..data.large_run import BackgroundRun, LargeRun
from ..data.metric_cache import MetricCache, build
from ..data.step_ranges import GLANCE
from ..figures.theme import level

if TYPE_CHECKING:
    from fp8debug import Fallback
    from fp8debug.rules.comparison.runs import Differences
    from fp8debug.rules.engine.findings import Findings

    from ..data.records import Heat, StepSeries

#: Files of a run below this size are judged before its page is laid out: it takes less than the eye notices.
SMALL_BYTES = 8 << 20
#: From this size on, some 30 million rows, the table in memory does not wait for the verdict: pages need it more, and until it
#: is there, and for what it has not, they read some of the steps.
HUGE_BYTES = 2 << 30
#: The longest that a layout waits for the verdict of a small run.
WAIT_S = 1.5
#: Answers that are kept for a run, the oldest goes first: a heatmap takes 3 MB at most.
MAX_KEPT = 96
RECORDED = "recorded"
_ORDER = {"error": 0, "warning": 1, "info": 2, "unknown": 3, "ok": 4}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Result of triage, or its pending state.

    Attributes:
        known: what it found, the culprit first; None while nothing is known.
        is_pending: the rules are still looking; ``known`` is of an earlier state of the files, or None.
        failure: why triage could not run, or "".
    """

    known: Findings | None = None
    is_pending: bool = False
    failure: str = ""

    @property
    def findings(self) -> Findings:
        """Findings so far, or none; imports the rules, for which the first page shall not wait."""
        from fp8debug.rules.engine.findings import Findings

        return Findings() if self.known is None else self.known

    @property
    def verdict(self) -> str:
        """``error``, ``warning``, ``info`` or ``ok``; ``unknown`` without findings while pending, and after a failure."""
        if self.failure or self.known is None:
            return "unknown"
        severities = [level(f.severity) for f in self.known or ()]
        if self.known is not None and self.known.lost:
            severities.append(level("warning"))
        return min(severities, key=_ORDER.__getitem__, default="ok")


_IMPORTING = threading.Lock()


def import_pandas() -> None:
    """Import pandas, where it is installed, as a whole: pyarrow does when the rules make arrays.

    A page that is written as JSON meanwhile fails: plotly's writer takes a module that is half imported for one that is there.
    """
    with _IMPORTING, suppress(ImportError):
        import pandas  # noqa: F401  # for its import alone


PENDING = Judgement(is_pending=True)


@dataclass
class Verdicts:
    """The newest judgement of a run and the state of its files then, shared by its states, and the lock under which it is judged.

    A run that grows faster than it is judged has a verdict all the same: that of the state that was judged last. ``kept`` is what
    a page shows until its like of the new state is known.
    """

    latest: Judgement = PENDING
    stamp: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunView:
    """A run with what was concluded from it, as of one state of its files.

    Attributes:
        run: the run; its queries are safe from several threads.
        stamp: state of its files.
        size: their bytes.
        name: of its folder.
        siblings: returns the names of the runs in the same folder; none where one run is served.
        open_sibling: opens another run of the same folder by its name.
        verdicts: shared with the earlier and later states of the files.
        is_superseded: the files have changed since.
        metric_cache: the table in memory that answers for a large run once it was read.
    """

    run: Run
    stamp: str
    size: int = 0
    name: str = ""
    siblings: Callable[[], list[str]] = list
    open_sibling: Callable[[str], RunView] | None = None
    verdicts: Verdicts = field(default_factory=Verdicts)
    is_superseded: bool = False
    metric_cache: MetricCache | None = None
    _second_connection: Run | None = None
    _loading_cache: threading.Thread | None = None
    _solving: threading.Lock = field(default_factory=threading.Lock)
    _judgement: Judgement | None = None
    _solve: Callable[..., list[Fallback]] | None = None
    _lists: dict[tuple[float, bool], list[Fallback]] = field(default_factory=dict)
    _differences: dict[str, Differences] = field(default_factory=dict)
    _kept: dict[Hashable, Any] = field(default_factory=dict)
    _locks: dict[Hashable, threading.Lock] = field(default_factory=dict)
    _lock_of_locks: threading.Lock = field(default_factory=threading.Lock)
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Take over what was concluded from this very state of the files."""
        if self.verdicts.stamp == self.stamp != "":
            self._judgement = self.verdicts.latest

    def second_connection(self) -> Run:
        """Return the run on a second connection, for what takes long: a connection answers one question at a time."""
        with self._opening:
            if self._second_connection is None:
                self._second_connection = BackgroundRun(self.run.path)
            return self._second_connection

    @property
    def knows_modules(self) -> bool:
        """True where listing the modules costs nothing."""
        return not isinstance(self.run, LargeRun) or self.run.knows_modules

    @property
    def is_small(self) -> bool:
        """True where a page is laid out with what was concluded from the whole run."""
        return self.size < SMALL_BYTES

    @property
    def is_huge(self) -> bool:
        """True where a page can't wait for what is read of all steps."""
        return self.size >= HUGE_BYTES

    def is_thin(self, *metrics: str) -> bool:
        """Return whether a page reads some steps only, of a huge run whose table in memory has not all these metrics."""
        return self.is_huge and (self.metric_cache is None or not self.metric_cache.metrics.issuperset(metrics))

    def is_thin_health(self) -> bool:
        """Return the same of the health, for any large run: it takes five times what one metric takes to be read of all steps."""
        is_large = self.is_huge or not self.is_small
        return is_large and (self.metric_cache is None or self.metric_cache.health is None)

    def load_cache(self) -> None:
        """Begin to read the table in memory, once: of a large run that nobody is writing."""
        with self._lock_of_locks:
            if self._loading_cache is not None or self.size < SMALL_BYTES:
                return
            self._loading_cache = threading.Thread(target=self._load_cache, daemon=True)
            self._loading_cache.start()

    @property
    def is_loading_cache(self) -> bool:
        """True while the table in memory is being read."""
        thread = self._loading_cache
        return thread is not None and thread.is_alive()

    def _load_cache(self) -> None:
        if not self.is_huge:
            self.judge()  # one after the other, so that pages have a core; of more rows pages from the files take too long
        with suppress(Fp8DebugError):  # the pages then read the files, and say what is wrong
            found = build(self.run.path)
            if self._loading_cache is threading.current_thread():
                self.metric_cache = found
                if found is not None:  # or the next page reads all rows to ask at which steps there are any
                    self.run.memo("sampled_steps", found.sampled.tolist)

    def wait_for_cache(self) -> None:
        """Wait until the table in memory was read, where somebody has begun to."""
        thread = self._loading_cache
        if thread is not None:
            thread.join()

    def drop_cache(self) -> None:
        """Give the table in memory back; it is read anew when it is asked for."""
        self.metric_cache = self._loading_cache = None

    def judge(self) -> Judgement:
        """Return what triage says; computed once, on a connection of its own, so that pages are answered meanwhile."""
        with self.verdicts.lock:
            if self._judgement is None:
                if self.is_superseded:
                    return self.verdicts.latest
                self._judgement = self.verdicts.latest = self._triage()
                self.verdicts.stamp = self.stamp
            return self._judgement

    def _triage(self) -> Judgement:
        from fp8debug import triage

        from .triage_process import triage_in_process

        try:
            if self.size >= SMALL_BYTES:
                found = Judgement(known=triage_in_process(self.run.path))
            else:
                found = Judgement(known=triage(Run(self.run.path)))
        except Fp8DebugError as error:
            return Judgement(failure=str(error))
        with suppress(Fp8DebugError):
            self.cache(RECORDED, lambda: queries.recorded(self.second_connection()))
        return found

    def judged(self) -> Judgement:
        """Return what is known by now: at once for a large run, after a moment for a small one."""
        if self._judgement is None and self.size < SMALL_BYTES:
            import_pandas()
            thread = threading.Thread(target=self.judge, daemon=True)
            thread.start()
            thread.join(WAIT_S)
        return self.latest()

    def latest(self) -> Judgement:
        """Return the newest conclusions without any work; those of an earlier state of the files are pending."""
        return self._judgement or replace(self.verdicts.latest, is_pending=True)

    @property
    def is_triaged(self) -> bool:
        """True when the findings are known."""
        return self._judgement is not None

    @property
    def has_fallbacks(self) -> bool:
        """True when candidates are known without asking the run."""
        return self._solve is not None

    def fallbacks(self, budget: float = 0.10, *, fill: bool = False) -> list[Fallback]:
        """Return the candidates within a budget; the run is asked once, whatever the number of budgets.

        Raises:
            RunError: ``speed.json`` is damaged.
        """
        self.judge()
        with self._solving:
            if self._solve is None:
                from fp8debug.fallback.policy import solver

                self._solve = solver(self.second_connection(), self.latest().findings)
            if (budget, fill) not in self._lists:
                self._lists[budget, fill] = self._solve(budget, fill=fill)
            return self._lists[budget, fill]

    def has_list(self, budget: float, *, fill: bool = False) -> bool:
        """Return whether the candidates within a budget are known."""
        return (budget, fill) in self._lists

    def cache(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what was computed under a key, or compute it now; who asks for the same meanwhile waits for it."""
        with self._lock_of_locks:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._kept:
                found = compute()
                while len(self._kept) >= MAX_KEPT:
                    self._kept.pop(next(iter(self._kept)), None)
                self._kept[key] = found
            return self._kept.get(key)

    def casts(self) -> list[tuple[str, bool]]:
        """Return (cast name, running) of every operand cast recorded, running ones first."""
        found: list[tuple[str, bool]] = self.cache("casts", lambda: queries.casts(self.run, self.metric_cache))
        return found

    def recorded(self) -> list[str]:
        """Return the metrics of the run: those of a few steps until the whole run has been read, in the background."""
        found: list[str] = self.cached(RECORDED) or self.cache("recorded lately", lambda: queries.recorded_lately(self.run))
        return found

    def training(self) -> tuple[list[StepSeries], int | None]:
        """Return loss and what else was recorded of the training, and the first step whose loss is no number."""
        found: tuple[list[StepSeries], int | None]
        found = self.cache("training", lambda: (queries.training(self.run), queries.loss_lost_at(self.run)))
        return found

    def last_loss(self) -> float | None:
        """Return the loss of the last step that has one."""
        found: float | None = self.cache("last loss", lambda: queries.last_loss(self.run))
        return found

    def default_cast(self) -> str:
        """Return ``running``, or ``what-if`` for a run in which nothing ran in FP8."""
        return str(self.cache("default cast", lambda: queries.default_cast(self.run)))

    def heat(
        self,
        metric: str = HEALTH,
        site: str = "all",
        cast: str | None = None,
        steps: tuple[int | None, int | None] = (None, None),
        run: Run | None = None,
        at_once: bool = False,
    ) -> Heat:
        """Return a metric, or the health, over all modules and some steps; what was read is kept.

        Args:
            metric: column of ``sites``, or ``health``.
            site: see ``queries.where``.
            cast: the same; the default one if None.
            steps: first and last step.
            run: the connection that is asked; the first by default.
            at_once: a reader waits, who sees more later: read fewer steps where the health is not known yet.

        Raises:
            Fp8DebugError: no such metric, or the run cannot be read.
        """
        cast = self.default_cast() if cast is None else cast
        is_thin = self.is_thin_health() if metric == HEALTH else self.is_thin(metric)
        asked = self.run if run is None else run
        key: tuple[Hashable, ...] = ("heat", metric, site, cast, steps, is_thin)
        part = GLANCE if at_once and metric == HEALTH and is_thin and not self.is_cached(key) else 1

        def ask() -> Heat:
            if metric == HEALTH:
                return queries.health(asked, site, cast, steps, self.metric_cache, is_thin, part)
            return queries.heat(asked, metric, site, cast, steps, self.metric_cache, is_thin)

        found: Heat = self.cache(key if part == 1 else (*key, part), ask)
        return found

    def has_health(self) -> bool:
        """Return whether the health of the whole run is known without reading it."""
        if self.metric_cache is not None and self.metric_cache.health is not None:
            return True
        key = ("heat", HEALTH, "all", self.cached("default cast"), (None, None), self.is_thin_health())
        return self.is_cached(key)

    def is_cached(self, key: Any) -> bool:
        """Return whether something was computed under a key."""
        return key in self._kept

    def cached(self, key: Any) -> Any:
        """Return what was computed under a key, or None."""
        return self._kept.get(key)

    def differences(self, name: str) -> Differences | None:
        """Return how this run differs from another of the folder, None while nobody has compared them."""
        return self._differences.get(name)

    def compare(self, names: Sequence[str]) -> None:
        """Compare this run with others of the folder, each the first of its pair; what is known is kept."""
        from fp8debug.rules.comparison.runs import diff_runs

        for name in names:
            if name not in self._differences and self.open_sibling is not None:
                other = self.open_sibling(name)
                self._differences[name] = diff_runs(Run(other.run.path), Run(self.run.path))

"""Cache of a large run's commonest metrics, in memory: a few metrics in float32, one block of steps by modules for each site.

Parquet is packed: to find one module in ten million rows every page of a column is unpacked. The first pages of a run are read
from it all the same; :func:`build` takes seconds and runs in the background. Its answers are those of the views, which
``data`` gives, but for float32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8debug import Run
from fp8debug.types import Gemm, Reference, TensorRole

from . import health as healths
from .arrays import ints, known_floats
from .healthy_ranges import CLIPS_LITTLE, ROW_BITS, badness, kind_of
from .nonfinite import COUNTS, FINITE, MISSING, NAN, States, has_nonfinite
from .records import Floats, Ints
from .site_rows import Key, keys_of, known_cells, read_rows, severities_of_rows

#: The metrics that are kept, the ones that pages show unasked first; a run of 100 million rows has room for four.
METRICS = ("sqnr_db", "scale_inv_mean_log2", "headroom", "gain", "underflow_rate", "overflow_rate", "cosine", "amax")
#: Room for all blocks.
MAX_BYTES = 29 << 26
#: Sites that are told apart: a run has some tens.
MAX_KEYS = 4096
#: Stands where a site has no value: NaN is one.
NOTHING = np.finfo(np.float32).min
_KNOWN = tuple({member.value for member in kind} for kind in (Gemm, TensorRole, Reference))


class MetricSeries(NamedTuple):
    """A metric of one site over steps: mean, smallest, largest and the state of the steps behind each point."""

    key: Key
    steps: Ints
    values: Floats
    low: Floats
    high: Floats
    states: States | None


@dataclass(frozen=True, kw_only=True)
class MetricCache:
    """The blocks of a run.

    Attributes:
        blocks: of each metric, float32 ``[keys, steps, modules]``.
        modules: names, in execution order.
        keys: the sites.
        sampled: the steps with statistics.
        states: of ``nonfinite``, int8 ``[keys, steps, modules]``; None for a run without NaN and Inf.
        bits: of ``row_kinds``, in units of ``CLIPS_LITTLE``, uint8 ``[keys, steps, modules]``; None where none of their metrics
            was recorded.
        health: numbers of ``health.severity_numbers`` plus one, 0 where there is none, uint16 ``[keys, steps, modules]``; None
            where none of its metrics was recorded.
    """

    blocks: dict[str, Floats]
    modules: Sequence[str]
    keys: Sequence[Key]
    sampled: Ints
    states: States | None = None
    bits: NDArray[np.uint8] | None = None
    health: NDArray[np.uint16] | None = None

    @property
    def metrics(self) -> frozenset[str]:
        """The metrics that are kept."""
        return frozenset(self.blocks)

    def heat(
        self, metric: str, keys: Collection[Key], first: int, last: int, width: int
    ) -> tuple[list[str], Ints, Floats, Ints, States]:
        """Return the worst of each module and ``width`` steps, as ``data.heat`` asks for them.

        Returns:
            The modules and the first step of each cell that have a value; values, kinds and states, ``[modules, cells]``.
        """
        low, high = np.searchsorted(self.sampled, [first, last + 1])
        steps, places = self.sampled[low:high], _places(self.sampled[low:high], first, width)
        shape = (len(places[0]) if places else 0, len(self.modules))
        worst, values = np.full(shape, -np.inf, np.float32), np.full(shape, np.nan, np.float32)
        kinds, begins = np.zeros(shape, np.int32), np.full(shape[0], np.iinfo(np.int32).max, np.int32)
        states = np.full(shape, -1, np.int8)
        marked = None if metric in COUNTS else self.states
        order = sorted((kind_of(*key[:4]), i) for i, key in enumerate(self.keys) if key in keys)
        bit = ROW_BITS.get(metric, 0) if self.bits is not None else 0
        for base, i in order:
            for place in places:
                rows = np.flatnonzero(place >= 0)
                own = self.blocks[metric][i, low + place[rows]]
                known = own != NOTHING
                judged, kind = badness(metric, own, base), np.full(own.shape, base, np.int32)
                if bit and self.bits is not None:
                    has_bit = self.bits[i, low + place[rows]] & (bit // CLIPS_LITTLE) > 0
                    judged, kind = np.where(has_bit, badness(metric, own, base + bit), judged), kind + bit * has_bit
                bad = np.where(known, _ranked(judged), -np.inf)
                # Of equally bad ones the largest kind counts.
                wins = known & ((bad > worst[rows]) | (bad == worst[rows]) & (kind >= kinds[rows]))
                for whole, new in ((worst, bad), (values, own), (kinds, kind)):
                    whole[rows] = np.where(wins, new, whole[rows])
                state = np.where(known, np.where(np.isnan(own), NAN, FINITE), -1).astype(np.int8)
                if marked is not None:
                    mark = marked[i, low + place[rows]]
                    state = np.where(mark > FINITE, np.maximum(mark, state), state)
                    unknown = (mark > FINITE) & (worst[rows] == -np.inf)
                    kinds[rows] = np.where(unknown, kind, kinds[rows])
                states[rows] = np.maximum(states[rows], state)
                seen = (state >= FINITE).any(axis=1)
                begins[rows[seen]] = np.minimum(begins[rows[seen]], steps[place[rows[seen]]])
        there = states >= FINITE
        modules, cells = np.flatnonzero(there.any(axis=0)), np.flatnonzero(there.any(axis=1))
        chosen = np.ix_(cells, modules)
        names = [self.modules[m] for m in modules.tolist()]
        states[states < FINITE] = MISSING
        return names, begins[cells], values[chosen].T.copy(), kinds[chosen].T.copy(), states[chosen].T.copy()

    def health_of(self, keys: Sequence[Key], first: int, last: int, width: int) -> tuple[list[str], Ints, Ints, States]:
        """Return the worst health of each module and ``width`` steps, as ``queries.health`` asks for it.

        Returns:
            The modules and the first step of each cell that have a value; codes of the health (-1 for none) and
            states, ``[modules, cells]``.
        """
        assert self.health is not None
        low, high = np.searchsorted(self.sampled, [first, last + 1])
        steps, places = self.sampled[low:high], healths.sites_of(key[:4] for key in keys)
        shape = (len(steps), len(self.modules))
        codes, states = np.full(shape, -1, np.int32), np.full(shape, -1, np.int8)
        for i, key in enumerate(self.keys):
            if key not in keys:
                continue
            own = self.health[i, low:high].astype(np.int32)
            site = key[0], key[1], key[3]
            place = places.index(site) if site in places else healths.ROOM - 1
            np.maximum(codes, np.where(own > 0, (own - 1) * healths.ROOM + place, -1), out=codes)
            np.maximum(states, np.where(own > 0, np.int8(FINITE), np.int8(-1)), out=states)
            if self.states is not None:
                mark = self.states[i, low:high]
                np.maximum(states, np.where(mark > FINITE, mark, np.int8(-1)), out=states)
        if len(steps):
            _, begins = np.unique((steps - first) // width, return_index=True)
            begun = np.minimum.reduceat(np.where((states >= FINITE).any(axis=1), steps, np.iinfo(np.int32).max), begins)
            codes, states = np.maximum.reduceat(codes, begins), np.maximum.reduceat(states, begins)
        else:
            begun = steps
        return known_cells(self.modules, begun, codes, states)

    def lines(self, module: str, metric: str, first: int, width: int) -> list[MetricSeries]:
        """Return the lines of a module that have a value, in the order of ``data.several_traces``."""
        if module not in self.modules:
            return []
        found, m = [], self.modules.index(module)
        block = self.blocks[metric][:, :, m]
        marks = self.states[:, :, m] if self.states is not None and metric not in COUNTS else None
        have = {self.keys[i][3] for i in np.flatnonzero((block != NOTHING).any(axis=1)).tolist()}
        for i in sorted(range(len(self.keys)), key=lambda i: _order(self.keys[i])):
            is_known, is_marked = block[i] != NOTHING, np.zeros(block.shape[1], np.bool_)
            if marks is not None and (self.keys[i][3] in have or not have):
                is_marked = marks[i] > FINITE
            there = np.flatnonzero(is_known | is_marked)
            if not len(there):
                continue
            _, begins = np.unique((self.sampled[there] - first) // width, return_index=True)
            known = is_known[there]
            values = np.where(known, block[i, there], np.float32(np.nan))
            counts = np.add.reduceat(known.astype(np.int64), begins)
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                sums = np.add.reduceat(np.where(known, values, 0).astype(np.float64), begins)
                mean = np.where(counts > 0, sums / counts, np.nan).astype(np.float32)
            low = np.fmin.reduceat(values, begins)
            high = np.maximum.reduceat(np.where(known, values, -np.inf).astype(np.float32), begins)
            high = np.where(counts > 0, high, np.float32(np.nan))
            states = None if marks is None else np.maximum.reduceat(marks[i, there], begins)
            found.append(MetricSeries(self.keys[i], self.sampled[there][begins], mean, low, high, states))
        return found

    def steps(self, module: str) -> list[int]:
        """Return the steps at which a module has statistics."""
        if module not in self.modules:
            return []
        m = self.modules.index(module)
        known = np.zeros(len(self.sampled), np.bool_)
        for block in self.blocks.values():
            known |= (block[:, :, m] != NOTHING).any(axis=0)
        if self.states is not None:
            known |= (self.states[:, :, m] > FINITE).any(axis=0)
        return [int(step) for step in self.sampled[known]]


def _order(key: Key) -> tuple[str, str, bool, str, str]:
    gemm, tensor, cast_name, reference, actual = key
    return gemm, tensor, not actual, cast_name, reference


def _ranked(bad: Floats) -> Floats:
    """Return what is comparable: NaN is worst, as the engine has it, and nothing is as good as no value."""
    return np.where(np.isnan(bad), np.float32(np.inf), np.maximum(bad, np.float32(-3e38)))


def _places(steps: Ints, first: int, width: int) -> list[NDArray[np.int64]]:
    """Return for each cell its first step's place, then its second's and so on; -1 where a cell has no more."""
    if not len(steps):
        return []
    _, begins, counts = np.unique((steps - first) // width, return_index=True, return_counts=True)
    return [np.where(j < counts, begins + j, -1) for j in range(int(counts.max()))]


def build(path: Path) -> MetricCache | None:
    """Read the blocks of a run; None where they would be too large, or none of the metrics was recorded.

    Raises:
        Fp8DebugError: the run cannot be read.
    """
    run = Run(path)
    modules = list(dict.fromkeys(str(m["fqn"]) for m in run.modules))
    keys = [key for key in keys_of(run) if all(key[i] in known for i, known in zip((0, 1, 3), _KNOWN, strict=True))]
    sampled = np.array([step for step in run.sampled_steps if step is not None], dtype=np.int32)
    shape = (len(keys), len(sampled), len(modules))
    num = int(np.prod(shape))
    metrics = [name for name in METRICS if run.has(name)][: max(0, MAX_BYTES - 3 * num) // (4 * num or MAX_BYTES)]
    if not metrics or len(keys) > MAX_KEYS:
        return None
    judged = [name for name in healths.METRICS if run.has(name)]
    health = np.zeros(shape, np.uint16) if judged else None
    bits = np.zeros(shape, np.uint8) if any(run.has(name) for name in ROW_BITS) else None
    blocks = {name: np.full(shape, NOTHING, np.float32) for name in metrics}
    states = np.zeros(shape, np.int8) if has_nonfinite(run) else None
    for table in read_rows(run, modules, keys, list(dict.fromkeys([*metrics, *judged])), sampled):
        place = ints(table, "c"), np.searchsorted(sampled, ints(table, "step")), ints(table, "m")
        for name in metrics:
            values, known = known_floats(table, name)
            if states is not None and name not in COUNTS:
                known &= ints(table, "lost") == 0
            blocks[name][place] = np.where(known, values, NOTHING)
        if bits is not None:
            bits[place] = ints(table, "bits") // CLIPS_LITTLE
        if health is not None:
            health[place] = severities_of_rows(table, judged, keys) + 1
        if states is not None:
            states[place] = ints(table, "state")
    return MetricCache(blocks=blocks, modules=modules, keys=keys, sampled=sampled, states=states, bits=bits, health=health)

"""F114: ranks quantize one logical tensor with different scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.prefilter import has_cast, in_batches
from fp8debug.rules.reading.traces import IS_DELAYED, RUNNING, Trace

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_SITE = "step, module, gemm, tensor, cast_name"
_AMONG = f"raw WHERE {{steps}} AND {RUNNING} AND scale_inv_max > 0"
_SCALE = "coalesce(scale_inv_min, scale_inv_max)"
_RATIO = f"greatest(max(scale_inv_max) / min(scale_inv_max), max({_SCALE}) / min({_SCALE}))"


@dataclass(frozen=True)
class RankScalesDiffer(Rule):
    """Ranks use different scales for one logical tensor: the group over which its amax is taken is wrong.

    What it detects
        Two kinds of evidence, neither of which needs the layout of the ranks. One tensor on several ranks (a replicated
        weight, the input of a column-parallel layer: same number of elements, same amax to the bit, same sum of squares)
        under different scale_inv. And a site under delayed or static tensor scaling whose ranks disagree in a run in which
        nearly all other sites of that tensor agree to the bit although their amaxes differ: there a group reduces, and this
        site is left out of it. Ranks that each scale their own data by themselves are healthy.

    Why it matters
        The shards of one product no longer fit each other: one rank clips or loses bits that its peers keep, and the
        sum is biased. A 40B model with tensor parallelism 8 diverged near step 1000 from it.

    Example
        layers.7.mlp.down, fprop weight, e4m3fn 128x128 current: rank 3 uses a scale_inv 2 times that of ranks 0, 1, 2 for
        the same tensor from step 120 on.

    Cure
        The process group of the amax reduction (tensor and data parallel ranks together for weights and inputs that they
        share); reload or rebuild the scales of the rank that differs; current scaling needs no group for replicated tensors.

    Thresholds
        - max_ratio 1.001: largest scale_inv over the smallest. Equal amaxes give equal scales to the bit; numerics.md, 2.
        - same_tensor 1e-6: relative difference of sum_x2 up to which equal amaxes are one tensor's; its summation in FP64
          differs by less.
        - min_agreeing 0.8: share of the other sites of that tensor that agree. No published basis.
        - min_sites 3: such sites needed.
        - min_steps 2: sampled steps that show it, and half of those since the first.
        - Seen in TransformerEngine #335, Megatron-LM #442.
    """

    code = "F114"
    name = "rank-scales-differ"
    columns = ("scale_inv_max", "amax")
    cure = "check the process group of the amax reduction; rebuild the scales of the rank that differs"

    max_ratio: float = 1.001
    same_tensor: float = 1e-6
    min_agreeing: float = 0.8
    min_sites: int = 3
    min_steps: int = 2

    def needs(self, run: Run) -> str | None:
        """Ask for two ranks."""
        return None if len(run.ranks) > 1 else "one rank only"

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the sites whose ranks disagree."""
        # What is one tensor's has one amax: few columns tell for most sites that there is nothing to see.
        alike = f"{_AMONG} GROUP BY {_SITE} HAVING count(*) > 1 AND max(amax) = min(amax) AND {_RATIO} > {self.max_ratio}"
        found = in_batches(run, f"SELECT DISTINCT module FROM (SELECT module FROM {alike}) AS alike")
        modules = sorted({row["module"] for row in found})
        bad = []
        if modules:
            sites = self._sites(f" AND module IN ({', '.join('?' * len(modules))})")
            bad = in_batches(run, f"SELECT * FROM ({sites}) AS compared WHERE is_one AND ratio > {self.max_ratio}", modules)
        for tensor in self._left_out(run):
            apart = f"is_delayed AND NOT is_one AND tensor = ? AND ratio > {self.max_ratio}"
            bad += in_batches(run, f"SELECT * FROM ({self._sites()}) AS compared WHERE {apart}", [tensor])
        by_site: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in sorted(bad, key=lambda row: (row["step"], row["call_index"] or 0, *map(str, row.values()))):
            by_site.setdefault((row["module"], row["gemm"], row["tensor"], row["cast_name"]), []).append(row)
        for (module, gemm, tensor, cast_name), rows in by_site.items():
            trace = Trace(
                module=module,
                gemm=gemm,
                tensor=tensor,
                cast_name=cast_name,
                rows=tuple(rows),
                sampled=tuple(run.sampled_steps_of(module)),
            )
            if trace.lasting(min(self.min_steps, len(trace.sampled))):
                yield self._finding(run, trace)

    def _left_out(self, run: Run) -> list[str]:
        """Return the tensors whose scales a group reduces at nearly all sites, of those under delayed tensor scaling."""
        if not has_cast(run, IS_DELAYED):
            return []
        query = (
            "SELECT tensor, module, gemm, count(*) AS num, count(*) FILTER (WHERE ratio > 1) AS num_apart"
            f" FROM ({self._sites()}) AS compared WHERE is_delayed AND NOT is_one GROUP BY tensor, module, gemm"
        )
        places: dict[str, set[tuple[str, str]]] = {}
        num, num_apart = Counter[str](), Counter[str]()
        for row in in_batches(run, query):
            places.setdefault(row["tensor"], set()).add((row["module"], row["gemm"]))
            num[row["tensor"]] += row["num"]
            num_apart[row["tensor"]] += row["num_apart"]
        return [
            tensor
            for tensor in sorted(places)
            if len(places[tensor]) > self.min_sites and num_apart[tensor] <= (1 - self.min_agreeing) * num[tensor]
        ]

    def _sites(self, also: str = "") -> str:
        """Return the text of the query for what ranks share and what they do not, of all sites of more than one rank."""
        return (
            f"SELECT {_SITE}, min(call_index) AS call_index, {IS_DELAYED} AND cast_name LIKE '% tensorwise %' AS is_delayed,"
            " coalesce(max(amax) = min(amax) AND max(numel) = min(numel)"
            f" AND max(sum_x2) - min(sum_x2) <= {self.same_tensor} * max(sum_x2), FALSE) AS is_one, {_RATIO} AS ratio"
            f" FROM {_AMONG}{also} GROUP BY {_SITE} HAVING count(*) > 1"
        )

    def _finding(self, run: Run, trace: Trace) -> Finding:
        worst = trace.worst("ratio")
        query = (
            "SELECT rank, scale_inv_max FROM raw WHERE step = ? AND module = ? AND gemm = ? AND tensor = ? AND cast_name = ?"
            " AND actual AND reference = 'operand' AND scale_inv_max > 0 ORDER BY rank"
        )
        key = [worst["step"], trace.module, trace.gemm, trace.tensor, trace.cast_name]
        scales = {row["rank"]: row["scale_inv_max"] for row in run.sql(query, key).to_pylist()}
        odd = self._odd(scales)
        whose = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} differ{'' if len(odd) > 1 else 's'}"
        what = "the same tensor" if worst["is_one"] else "a tensor whose scale the other sites' ranks share"
        message = (
            f"the ranks quantize the {trace.gemm} {trace.tensor}, {what}, with scales up to {worst['ratio']:.3g} times apart at"
            f" step {worst['step']}: {whose}"
        )
        rows = tuple({**row, "ranks": odd} for row in trace.rows)
        finding = replace(trace, rows=rows)
        return finding.finding(self, Severity.ERROR, message, value=worst["ratio"], threshold=self.max_ratio)

    def _odd(self, scales: Mapping[int, float]) -> Sequence[int]:
        """Return the ranks that differ from most; all of them where there is no majority."""
        usual = median(scales.values())
        odd = [rank for rank, scale in scales.items() if not 1 / self.max_ratio < scale / usual < self.max_ratio]
        return odd if odd and 2 * len(odd) < len(scales) else list(scales)


RULES.add(RankScalesDiffer.code, RankScalesDiffer())

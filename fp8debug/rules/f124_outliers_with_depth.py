"""F124: outliers in the inputs of one role grow from layer to layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.model_structure import Group, fprop_inputs, is_routed, numbered, reads
from fp8debug.rules.reading.outlier_spread import bound_log2, spreads_log2
from fp8debug.rules.reading.prefilter import batches
from fp8debug.rules.reading.traces import RUNNING, times

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Bound and spread are sums of the same logarithms in another order.
_ROUNDING = 1e-6
_INPUTS = f"{RUNNING} AND gemm = 'fprop' AND tensor = 'input' AND log2_hist IS NOT NULL"


@dataclass(frozen=True)
class OutliersWithDepth(Rule):
    """The outliers of one role's inputs, such as those of QKV, grow with the depth of the layer.

    What it detects
        The spread of fprop's input, log2(amax / median magnitude), over the layers of a numbered list: a rise from the
        first layer to the last that is robust (Theil-Sen slope, the lower end of its 95 % interval above 0) and ends
        beyond what activations have. The finding names the layer with the widest spread. Where values underflow already,
        F105 has found them, and this one does not stand.

    Why it matters
        The last layers use up the range of the format first: E4M3 holds 18.8 binades from amax to the first underflow. In
        Ling 2.0 the outliers of QKV grow with depth and with training, and decide which layers need another scale.

    Example
        layers.23.attn.qkv, fprop input: amax is 2.1e+03 times the median magnitude; the spread grows by 0.41 (0.36 to
        0.45) binades a layer over 24 layers.

    Cure
        granularity='1x128' for this operand, where it has another; a norm on Q and K or a clipped gain; BF16 for the last
        layers' QKV. Outliers that stay are reported under 1x128 too: their tiles may be lost.

    Thresholds
        - min_spread_log2 9: spread of the widest layer. No published basis: 3 for a Gaussian, 6 for a product of two; up to
          6.4 in healthy runs [measured, docs/lab/log.md].
        - min_rise_log2 3: rise from the first to the last layer, by the slope. No published basis.
        - min_layers 4: layers; a slope of fewer says nothing.
        - Seen in Ling 2.0, 5.1.1; numerics.md, 5.
    """

    code = "F124"
    name = "outliers-with-depth"
    columns = ("log2_hist", "amax")
    cure = "granularity='1x128' for this operand; normalise Q and K; else BF16 for this role in the last layers"

    min_spread_log2: float = 9.0
    min_rise_log2: float = 3.0
    min_layers: int = 4

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per role whose outliers grow."""
        spreads = self._spreads(run)
        inputs = fprop_inputs(run)
        for group in numbered(run, self.min_layers):
            known = [(fqn, spreads[fqn]) for fqn in group.members.values() if fqn in spreads]
            places = [rows[0]["call_index"] for _, rows in known]
            if len(known) >= self.min_layers and places == sorted(places) and not is_routed(group, inputs):
                yield from self._judged(run, group, known)

    def _spreads(self, run: Run) -> dict[str, list[dict[str, Any]]]:
        query = (
            f"SELECT step, module, call_index, cast_name, amax, log2_hist FROM sites WHERE {{steps}} AND {_INPUTS}"
            " ORDER BY step, call_index"
        )
        found: dict[str, list[dict[str, Any]]] = {}
        for table in batches(run, query) if self._may_be_wide(run) else ():
            for row, spread in zip(table.drop_columns(["amax", "log2_hist"]).to_pylist(), spreads_log2(table), strict=True):
                if spread is not None:
                    found.setdefault(row["module"], []).append({**row, "spread": spread})
        return found

    def _may_be_wide(self, run: Run) -> bool:
        """Return whether any level may reach the limit.

        A level is the median of the later half of a module's steps, so that it is below the limit where more than half of those
        are: the last quarter tells. Where a module lacks one of these steps, or has two rows at a step, all are read.
        """
        members = {fqn for group in numbered(run, self.min_layers) for fqn in group.members.values()}
        running = {fqn: row for fqn, row in reads(run).items() if fqn in members}
        if any(row["first_cast"] != row["last_cast"] for row in running.values()):
            return True
        num_steps = len(run.sampled_steps)
        num_last = max(1, num_steps // 2) // 2 + 1
        query = f"SELECT step, module, amax, log2_hist FROM raw WHERE {{steps}} AND {_INPUTS}"
        seen: Counter[str] = Counter()
        for table in batches(run, query, first=max(0, num_steps - num_last)) if running else ():
            bound, steps = bound_log2(table)
            if not bound < self.min_spread_log2 - _ROUNDING:
                return True
            seen += steps
        return any(seen[fqn] < min(num_last, num_steps) for fqn in running)

    def _judged(self, run: Run, group: Group, known: Sequence[tuple[str, list[dict[str, Any]]]]) -> Iterable[Finding]:
        levels = [median(row["spread"] for row in rows[-max(1, len(rows) // 2) :]) for _, rows in known]
        slope, low, high = theil_sen(levels)
        widest = max(range(len(levels)), key=levels.__getitem__)
        if levels[widest] < self.min_spread_log2 or slope * (len(levels) - 1) < self.min_rise_log2 or low <= 0:
            return
        fqn, rows = known[widest]
        bad = [row for row in rows if row["spread"] >= self.min_spread_log2] or rows[-1:]
        message = (
            f"the amax of the fprop input is {times(2.0 ** levels[widest])} times the median magnitude; over {len(levels)}"
            f" layers of {group.prefix} it grows by {slope:.2f} ({low:.2f} to {high:.2f}) binades a layer"
        )
        is_tiled = "1x" in str(bad[-1]["cast_name"])
        cure = self.cure.partition("; ")[2] if is_tiled else self.cure
        yield Finding(code=self.code, name=self.name, severity=Severity.WARNING, module=fqn, gemm="fprop", tensor="input",
                      cast=bad[-1]["cast_name"], steps=(bad[0]["step"], bad[-1]["step"]), ranks=tuple(run.ranks),
                      value=levels[widest], threshold=self.min_spread_log2, unit="log2", message=message, cure=cure,
                      call_index=bad[-1]["call_index"] or 0)  # fmt: skip

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand beside no finding of an outlier that underflows already."""
        return not any(f.code == "F105" for f in others)


def theil_sen(levels: Sequence[float]) -> tuple[float, float, float]:
    """Return the median slope over all pairs and its 95 % interval (Sen 1968, by the variance of Kendall's statistic)."""
    num = len(levels)
    slopes = sorted((levels[j] - levels[i]) / (j - i) for i in range(num) for j in range(i + 1, num))
    spread = 1.96 * math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    low = max(0, math.floor((len(slopes) - spread) / 2))
    return median(slopes), slopes[low], slopes[len(slopes) - 1 - low]


RULES.add(OutliersWithDepth.code, OutliersWithDepth())

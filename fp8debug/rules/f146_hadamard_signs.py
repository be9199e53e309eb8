"""F146: the operands of a GEMM, or the ranks, are transformed by different signs, so that the transform does not cancel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8debug.errors import UsageError
from fp8debug.metrics.limits import cast_floor_db
from fp8debug.recipes import Cast
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import RUNNING, Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.prefilter import has_cast
from fp8debug.rules.reading.traces import Trace, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_IS_TRANSFORMED = "cast_name LIKE '% hadamard=%'"


@dataclass(frozen=True)
class HadamardSigns(Rule):
    """The Hadamard transform of an operand has other signs than its partner's, or than those it is undone by.

    What it detects
        Two operands of one GEMM whose casts declare different transforms (other signs, or only one of them has any); ranks that
        declare different ones; and an operand that comes back from its transform with some elements of each group negated: the
        right size (norm ratio 1) at a cosine of 1 - k / 8 for k of 16 signs that differ, while the same tensor is
        right in the GEMMs without the transform.

    Why it matters
        x diag(s) H H^T diag(s') y is the product only where s = s'. With other signs half of the terms of wgrad have the wrong
        sign: the weight's gradient is noise, and fprop and dgrad look clean. Ranks that differ cannot share a tensor.

    Example
        blocks.1.down, wgrad grad_output, e2m1fn 16x1 current ... hadamard=16: cosine 0.02 at norm ratio 1.00, while dgrad's cast
        of the same tensor has 17.2 dB: its signs are not those by which it is undone.

    Cure
        Give both operands the same sign vector on all ranks (draw it once, from a seed that the ranks share), or
        hadamard=0 for both; BF16 for this GEMM until then.

    Thresholds
        - max_sqnr_db 6.5: one sign of 16 that differs negates 1/16 of the energy, an error of 4/16 of it, 6.0 dB; each
          further one adds as much (closed form). The cast itself leaves 11.6 dB at least; numerics.md, 2.
        - max_size_error 0.1: abs(norm ratio - 1): signs leave the size as it is, within what rounding does to it.
        - min_elements 256: elements. No published basis.
    """

    code = "F146"
    name = "hadamard-signs"
    columns = ("sum_xy", "sum_x2", "sum_y2")
    cure = "one sign vector for both operands and all ranks, or hadamard=0 for both; else BF16 for this GEMM"

    max_sqnr_db: float = 6.5
    max_size_error: float = 0.1
    min_elements: int = 256

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("sqnr_db", "<", self.max_sqnr_db),
            Keys(_IS_TRANSFORMED),
            f"numel >= {self.min_elements} AND abs(norm_ratio - 1) <= {self.max_size_error}",
        ]
        return look(conditions, ["sqnr_db", "cosine", "norm_ratio"])

    def looks(self) -> Iterable[Look]:
        """Return the transformed operands that are far from their tensor and have its size."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands, and the GEMMs, whose transforms do not fit."""
        found = traces(run, self._look)
        right = self._elsewhere(run, found)
        for whole in found:
            site = whole.module, whole.tensor
            trace = whole.where(lambda row, site=site: right.get((*site, row["step"]), True))  # type: ignore[misc]  # bound now
            if trace is None:
                continue
            row = trace.least("cosine")
            beside = ", and is right in a GEMM without the Hadamard transform" if (*site, row["step"]) in right else ""
            message = (
                f"the {trace.gemm} {trace.tensor} has cosine {row['cosine']:.2f} at norm ratio {row['norm_ratio']:.2f} at step"
                f" {row['step']}{beside}: the signs of its transform are not those by which it is undone, about"
                f" {round(8 * (1 - row['cosine']))} of 16 differ"
            )
            yield trace.finding(self, Severity.ERROR, message, value=row["sqnr_db"], threshold=self.max_sqnr_db, unit="dB")
        yield from self._declared(run)

    def _elsewhere(self, run: Run, found: Iterable[Trace]) -> dict[tuple[str, str, int], bool]:
        """Return by module, tensor and step whether the tensor is as its casts make it in the GEMMs without the transform."""
        modules = sorted({trace.module for trace in found})
        if not modules:
            return {}
        query = (
            f"SELECT module, tensor, step, cast_name, sqnr_db FROM sites WHERE {RUNNING} AND NOT {_IS_TRANSFORMED}"
            f" AND sqnr_db IS NOT NULL AND module IN ({', '.join('?' * len(modules))})"
        )
        rows = run.sql(query, modules).to_pylist()
        floors = {name: cast_floor_db(cast) for name in {row["cast_name"] for row in rows} if (cast := _parsed(name))}
        right: dict[tuple[str, str, int], bool] = {}
        for row in rows:
            site = row["module"], row["tensor"], row["step"]
            right[site] = right.get(site, True) and row["sqnr_db"] >= floors.get(row["cast_name"], 0.0)
        return right

    def _declared(self, run: Run) -> Iterable[Finding]:
        """Return the GEMMs whose two operands, or whose ranks, declare different transforms."""
        if not has_cast(run, _IS_TRANSFORMED):
            return
        query = (
            "SELECT module, gemm, tensor, cast_name, min(step) AS first, max(step) AS last, min(call_index) AS call_index,"
            f" array_agg(DISTINCT rank) AS ranks FROM raw WHERE {RUNNING} AND tensor IN ('input', 'weight', 'grad_output')"
            f" AND (module, gemm) IN (SELECT DISTINCT module, gemm FROM raw WHERE actual AND {_IS_TRANSFORMED})"
            " GROUP BY module, gemm, tensor, cast_name ORDER BY module, gemm, tensor, cast_name"
        )
        gemms: dict[tuple[str, str], list[dict[str, object]]] = {}
        for row in run.sql(query).to_pylist():
            gemms.setdefault((row["module"], row["gemm"]), []).append(row)
        for rows in gemms.values():
            yield from self._of_gemm(rows)

    def _of_gemm(self, rows: list[dict[str, object]]) -> Iterable[Finding]:
        signs: dict[int, set[tuple[int, int]]] = {}
        for row in rows:
            if (cast := _parsed(str(row["cast_name"]))) is not None:
                for rank in row["ranks"]:  # type: ignore[attr-defined]  # a list
                    signs.setdefault(rank, set()).add((cast.hadamard, cast.hadamard_signs if cast.hadamard else 0))
        apart = {rank: found for rank, found in signs.items() if len(found) > 1}
        if not apart and len(set(map(frozenset, signs.values()))) < 2:
            return
        worst = next(row for row in rows if " hadamard=" in str(row["cast_name"]))
        texts = sorted({f"{size} {mask:#06x}" if size else "none" for found in signs.values() for size, mask in found})
        who = "its two operands" if apart else "its ranks"
        message = f"{who} declare different Hadamard transforms in {worst['gemm']}: {', '.join(texts)}"
        first, last = (int(str(worst[key])) for key in ("first", "last"))
        trace = Trace(
            module=str(worst["module"]), gemm=str(worst["gemm"]), tensor=str(worst["tensor"]), cast_name=str(worst["cast_name"]),
            rows=tuple({"step": step, "ranks": sorted(signs), "call_index": worst["call_index"]} for step in (first, last)),
            sampled=(first, last),
        )  # fmt: skip
        severity = Severity.ERROR if apart else Severity.WARNING
        finding = trace.finding(self, severity, message, value=float(len(texts)), threshold=1.0)
        yield replace(finding, ranks=tuple(sorted(apart or signs)))


def _parsed(name: str) -> Cast | None:
    try:
        return Cast.parse(name)
    except UsageError:  # of another version, or damaged
        return None


RULES.add(HadamardSigns.code, HadamardSigns())

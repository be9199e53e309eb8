"""One site in two runs: its statistics step by step, and the first step at which they lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.types import plain_name

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Statistic -> how far two runs may lie apart, amax and rms in binades. No published basis: a quarter of a binade is more
#: than two good runs with the same data differ by, the rest are the warning limits of numerics.md, 4.
TOLERANCES = {
    "rms": 0.25,
    "amax": 1.0,
    "sqnr_db": 3.0,
    "underflow_nonzero_rate": 0.01,
    "overflow_rate": 0.001,
    "gain": 0.01,
}
OF_REFERENCE = ("rms", "amax")
#: Names of statistics for people; a rate is in percent.
WORDS = {"sqnr_db": "SQNR", "underflow_nonzero_rate": "underflow", "overflow_rate": "overflow"}
#: Elements of a tensor, or of the cast that ran, that are NaN or Inf: apart where one of the runs has some.
NONFINITE = "num_nonfinite"
KEYS = ("step", "module", "gemm", "tensor", "reference")
#: The columns of a line of ``row_of``.
COLUMNS = [
    *KEYS,
    *(f"{name}_{run}" for name in TOLERANCES for run in ("first", "second")),
    *(f"{NONFINITE}_{run}" for run in ("first", "second")),
    "apart",
]

Site = tuple[str, str, str, str]
Series = dict[int, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SiteDifference:
    """One site in both runs.

    Attributes:
        module: FQN without wrappers.
        gemm: GEMM.
        tensor: operand or result.
        reference: what the statistics compare with.
        num_steps: steps that both sampled.
        differs_at: first of them at which the tensor is not the same to the last digits; None when it always is.
        diverges_at: first of them from which on a statistic lies apart twice or until the end; None when none does.
        what: which, with the values of both runs there.
        medians: statistic -> [first run's, second run's] median over the common steps, from ``diverges_at`` on.
    """

    module: str
    gemm: str
    tensor: str
    reference: str
    num_steps: int
    differs_at: int | None
    diverges_at: int | None
    what: str | None
    medians: dict[str, list[float | None]]


def unwrapped(name: str) -> str:
    """Return a module's name without the parts that wrappers, DDP among them, put into it."""
    return ".".join(part for part in plain_name(name).split(".") if part != "module") or name


def series_of(run: Run, steps: tuple[int | None, int | None]) -> dict[Site, Series]:
    """Return the statistics of every site by step, sites in the order of the computation."""
    within = [f"step {operator} {bound}" for bound, operator in zip(steps, (">=", "<"), strict=True) if bound is not None]
    columns = ", ".join(
        f"max({name}) AS {name}"
        if name in OF_REFERENCE
        else f"max({name}) FILTER (WHERE actual AND cast_name <> 'bf16') AS {name}"
        for name in TOLERANCES
    )
    own = "coalesce(max(num_actual_nonfinite) FILTER (WHERE actual), 0)"
    counts = f"max(coalesce(num_nan, 0) + coalesce(num_inf, 0)) + {own} AS {NONFINITE}"
    query = (
        f"SELECT step, module, gemm, tensor, reference, min(call_index) AS place, {columns}, {counts} FROM sites"
        f" WHERE reference IN ('operand', 'shadow'){''.join(f' AND {condition}' for condition in within)}"
        " GROUP BY step, module, gemm, tensor, reference"
        " ORDER BY CASE gemm WHEN 'fprop' THEN 0 ELSE 1 END, CASE gemm WHEN 'fprop' THEN min(call_index)"
        " ELSE -min(call_index) END, module, gemm, reference, tensor, step"
    )
    found: dict[Site, Series] = {}
    for row in run.sql(query).to_pylist():
        site = (unwrapped(row["module"]), row["gemm"], row["tensor"], row["reference"])
        found.setdefault(site, {})[row["step"]] = row
    return found


def difference_of(site: Site, common: Sequence[int], ours: Series, theirs: Series) -> SiteDifference:
    """Return how a site differs at the steps that both runs sampled."""
    module, gemm, tensor, reference = site
    differs_at = next(
        (s for s in common if any(not _same(ours[s][name], theirs[s][name]) for name in (*OF_REFERENCE, NONFINITE))), None
    )
    apart = [(step, _first_difference(ours[step], theirs[step])) for step in common]
    place = next((i for i, (_, what) in enumerate(apart) if what and all(later for _, later in apart[i : i + 2])), None)
    since = common if place is None else common[place:]
    medians = {name: [_median(run, since, name) for run in (ours, theirs)] for name in TOLERANCES}
    return SiteDifference(
        module=module,
        gemm=gemm,
        tensor=tensor,
        reference=reference,
        num_steps=len(common),
        differs_at=differs_at,
        diverges_at=None if place is None else apart[place][0],
        what=None if place is None else apart[place][1],
        medians={name: values for name, values in medians.items() if values != [None, None]},
    )


def row_of(site: Site, step: int, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return one line of the CSV."""
    row: dict[str, Any] = dict(zip(KEYS, (step, *site), strict=True))
    for name in TOLERANCES:
        row |= {f"{name}_first": ours[name], f"{name}_second": theirs[name]}
    row |= {f"{NONFINITE}_first": ours[NONFINITE], f"{NONFINITE}_second": theirs[NONFINITE]}
    return {**row, "apart": _first_difference(ours, theirs) or ""}


def _first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return the first statistic that lies apart, with its two values; None when none does."""
    if bool(ours[NONFINITE]) != bool(theirs[NONFINITE]):
        return f"elements that are NaN or Inf {ours[NONFINITE]:.0f} -> {theirs[NONFINITE]:.0f}"
    for name, limit in TOLERANCES.items():
        a, b = ours[name], theirs[name]
        if a is None or b is None:
            continue
        if not (math.isfinite(a) and math.isfinite(b)):
            distance = 0.0 if _same(a, b) else math.inf
        elif name in OF_REFERENCE:
            distance = abs(math.log2(a / b)) if a > 0 and b > 0 else 0.0 if a == b else math.inf
        else:
            distance = abs(a - b)
        if distance > limit:
            unit = " dB" if name.endswith("_db") else " %" if name.endswith("_rate") else ""
            a, b = (100 * value if unit == " %" else value for value in (a, b))
            return f"{WORDS.get(name, name)} {a:.4g} -> {b:.4g}{unit}"
    return None


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-9)


def _median(run: Series, common: Sequence[int], name: str) -> float | None:
    known = [run[step][name] for step in common if run[step][name] is not None and math.isfinite(run[step][name])]
    return median(known) if known else None

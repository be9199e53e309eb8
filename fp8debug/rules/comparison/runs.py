"""Two runs side by side: configuration, loss, modules, and per site and step where their statistics part.

A site is compared at the steps that both runs sampled. ``amax`` and ``rms`` are of the tensor before its cast, so a run in
BF16 has them too; the statistics of the running cast exist where a run is in FP8.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fp8debug.errors import NoMatchError
from fp8debug.rules.comparison.configuration import compare, gap_words, without_nonfinite
from fp8debug.rules.comparison.sites import COLUMNS, SiteDifference, difference_of, row_of, series_of, unwrapped
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.nonfinite import NonfiniteOrigin, first_poison
from fp8debug.store.read.run import Run, parse_steps
from fp8debug.types import match_fqn

#: What of a comparison of losses ``Differences`` keeps.
LOSS_KEYS = ("steps", "baseline_loss", "loss", "loss_gap", "loss_gap_error", "diverges_at", "nonfinite_at")


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Similarities and differences of two runs.

    Attributes:
        names: of the runs.
        loss: :func:`fp8debug.rules.comparison.configuration.compare` of the second with the first, without the configuration.
        configuration: ``{key: [first run's, second run's]}`` of what differs in what was in force.
        only: modules that only the first, only the second run has.
        sites: the sites in both, those that diverge first, then by execution.
        rows: per site and common step the statistics of both, for CSV.
        origin: name of a run and the origin of its first NaN or Inf, the site that triage names; of the run in which it comes
            first, None where neither has one.
    """

    names: tuple[str, str]
    loss: dict[str, Any]
    configuration: dict[str, list[Any]]
    only: tuple[list[str], list[str]]
    sites: list[SiteDifference]
    rows: list[dict[str, Any]]
    origin: tuple[str, NonfiniteOrigin] | None = None

    @property
    def first(self) -> SiteDifference | None:
        """The site that diverges first."""
        return self.sites[0] if self.sites and self.sites[0].diverges_at is not None else None

    @property
    def differ(self) -> bool:
        """Return whether loss, modules or a site differ beyond the noise."""
        is_same = self.loss["nonfinite_at"][0] == self.loss["nonfinite_at"][1]
        return self.loss["diverges_at"] is not None or not is_same or any(self.only) or self.first is not None

    @property
    def columns(self) -> list[str]:
        """The columns of ``rows``."""
        return COLUMNS

    @property
    def loss_words(self) -> str:
        """One line about the losses."""
        return gap_words(self.loss, self.names)

    @property
    def site_words(self) -> str:
        """One line about the sites."""
        if not self.sites:
            return "none compared: no site was sampled in both runs at a common step" + self._origin_words
        num = sum(site.diverges_at is not None for site in self.sites)
        same = sum(site.differs_at is None for site in self.sites)
        equal = f"{same} have the same tensors to the last digits{self._origin_words}"
        if self.first is None:
            return f"none of {len(self.sites)} sites diverges; {equal}"
        site = self.first
        return (
            f"{num} of {len(self.sites)} sites diverge, first {site.module} {site.gemm} {site.tensor} at step {site.diverges_at}:"
            f" {site.what}; {equal}"
        )

    @property
    def _origin_words(self) -> str:
        if self.origin is None:
            return ""
        name, found = self.origin
        row = found.row
        return f"; the first NaN or Inf of {name}: {row['module']} {row['gemm']} {row['tensor']} at step {found.step}"

    @property
    def _origin_place(self) -> dict[str, Any] | None:
        if self.origin is None:
            return None
        name, found = self.origin
        return {"run": name, "step": found.step, **{key: found.row[key] for key in ("module", "gemm", "tensor")}}

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``diff --format json`` (docs/triage.md)."""
        return {
            "schema": 1,
            "runs": list(self.names),
            "configuration": self.configuration,
            "loss": {**without_nonfinite(self.loss), "first_nonfinite": self._origin_place},
            "modules": {"only_first": self.only[0], "only_second": self.only[1]},
            "first_divergence": asdict(self.first) if self.first else None,
            "sites": [asdict(site) for site in self.sites],
        }


def diff_runs(first: Run, second: Run, module: str = "*", steps: str | None = None) -> Differences:
    """Compare two runs.

    Args:
        first: usually the good one, or BF16.
        second: the other.
        module: glob over module names.
        steps: ``a:b``, a <= step < b.

    Raises:
        NoMatchError: no module of either run matches the glob.
        UsageError: steps is no range.
    """
    loss = compare(second, first, CourseLimits())
    configuration = loss.pop("configuration")
    names = [{unwrapped(m["fqn"]): None for m in run.modules} for run in (first, second)]
    chosen = dict.fromkeys(match_fqn({**names[0], **names[1]}, module))
    if not chosen:
        raise NoMatchError("module", module, [*names[0], *names[1]])
    series = [series_of(run, parse_steps(steps)) for run in (first, second)]
    sites, rows = [], []
    for site in [site for site in series[0] if site in series[1] and site[0] in chosen]:
        ours, theirs = series[0][site], series[1][site]
        common = sorted(ours.keys() & theirs.keys())
        if common:
            sites.append(difference_of(site, common, ours, theirs))
            rows += [row_of(site, step, ours[step], theirs[step]) for step in common]
    end = math.inf
    origin = _origin(first, second)
    site_of = (unwrapped(origin[1].row["module"]), origin[1].row["gemm"], origin[1].row["tensor"]) if origin else None

    def place(site: SiteDifference) -> tuple[float, bool]:
        return (end if site.diverges_at is None else site.diverges_at), (site.module, site.gemm, site.tensor) != site_of

    sites.sort(key=place)
    return Differences(
        names=(first.name, second.name),
        loss={key: loss[key] for key in LOSS_KEYS},
        configuration=configuration,
        only=([n for n in chosen if n not in names[1]], [n for n in chosen if n not in names[0]]),
        sites=sites,
        rows=rows,
        origin=origin,
    )


def _origin(first: Run, second: Run) -> tuple[str, NonfiniteOrigin] | None:
    """Return the name of the run in which a NaN or Inf comes first, and its origin; the second run where both have it there."""
    found = [(run.name, origin) for run in (second, first) if (origin := first_poison(run)) is not None]
    return min(found, key=lambda entry: entry[1].step, default=None)

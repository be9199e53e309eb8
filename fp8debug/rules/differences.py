"""Two runs side by side: configuration, loss, modules, and per site and step where their statistics part.

A site is compared at the steps that both runs sampled. ``amax`` and ``rms`` are of the tensor before its cast, so a run in
BF16 has them too; the statistics of the running cast exist where a run is in FP8.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fp8debug.errors import NoMatchError
from fp8debug.rules.apart import COLUMNS, SiteDifference, difference_of, row_of, series_of, unwrapped
from fp8debug.rules.baseline import MIN_ERRORS, MIN_SHARE, compare
from fp8debug.selectors import matching
from fp8debug.store.run import Run, parse_steps


@dataclass(frozen=True, kw_only=True)
class Differences:
    """What two runs have in common and what not.

    Attributes:
        names: of the runs.
        loss: :func:`fp8debug.rules.baseline.compare` of the second with the first, without the configuration.
        configuration: ``{key: [first run's, second run's]}`` of what differs in what was in force.
        only: modules that only the first, only the second run has.
        sites: the sites in both, those that diverge first, then by execution.
        rows: per site and common step the statistics of both, for CSV.
    """

    names: tuple[str, str]
    loss: dict[str, Any]
    configuration: dict[str, list[Any]]
    only: tuple[list[str], list[str]]
    sites: list[SiteDifference]
    rows: list[dict[str, Any]]

    @property
    def first(self) -> SiteDifference | None:
        """The site that diverges first."""
        return self.sites[0] if self.sites and self.sites[0].diverges_at is not None else None

    @property
    def differ(self) -> bool:
        """Tell whether loss, modules or a site differ beyond the noise."""
        return self.loss["diverges_at"] is not None or any(self.only) or self.first is not None

    @property
    def columns(self) -> list[str]:
        """The columns of ``rows``."""
        return COLUMNS

    @property
    def loss_words(self) -> str:
        """One line about the losses."""
        loss = self.loss
        if not loss["steps"]:
            return "no step has a loss in both runs"
        first, last = loss["steps"]
        noise = f"the noise ({MIN_ERRORS:g} standard errors, or {MIN_SHARE:.0%} of the loss)"
        since = f"within {noise}" if loss["diverges_at"] is None else f"beyond {noise} from step {loss['diverges_at']} on"
        return (
            f"median of steps {first} to {last}: {loss['baseline_loss']:.4g} -> {loss['loss']:.4g}, gap {loss['loss_gap']:.2g}"
            f" +- {loss['loss_gap_error']:.1g}: {since}"
        )

    @property
    def site_words(self) -> str:
        """One line about the sites."""
        if not self.sites:
            return "none was sampled at a common step in both runs"
        num = sum(site.diverges_at is not None for site in self.sites)
        same = sum(site.differs_at is None for site in self.sites)
        if self.first is None:
            return f"none of {len(self.sites)} sites diverges; {same} have the same tensors to the last digits"
        site = self.first
        return (
            f"{num} of {len(self.sites)} sites diverge, first {site.module} {site.gemm} {site.tensor} at step {site.diverges_at}:"
            f" {site.what}; {same} have the same tensors to the last digits"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``diff --format json`` (docs/triage.md)."""
        return {
            "schema": 1,
            "runs": list(self.names),
            "configuration": self.configuration,
            "loss": self.loss,
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
    loss = compare(second, first)
    configuration = loss.pop("configuration")
    names = [{unwrapped(m["fqn"]): None for m in run.modules} for run in (first, second)]
    chosen = dict.fromkeys(matching({**names[0], **names[1]}, module))
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
    sites.sort(key=lambda site: end if site.diverges_at is None else site.diverges_at)
    return Differences(
        names=(first.name, second.name),
        loss={key: loss[key] for key in ("steps", "baseline_loss", "loss", "loss_gap", "loss_gap_error", "diverges_at")},
        configuration=configuration,
        only=([n for n in chosen if n not in names[1]], [n for n in chosen if n not in names[0]]),
        sites=sites,
        rows=rows,
    )

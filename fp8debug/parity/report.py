"""``ParityReport``: what a comparison of two paths returns, and its documented, stable forms for programs (JSON, CSV)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8debug.parity.measures import Measures
from fp8debug.parity.rules import PathFinding
from fp8debug.rules.base import finite
from fp8debug.rules.engine.report import Report

#: What each version of the JSON document changed. 1: first version; a new key makes no new version.
JSON_SCHEMA = 1
CSV_COLUMNS = (
    *("code", "name", "severity", "module", "rollout_module", "tensor", "value", "threshold", "unit", "message", "cure", "also"),
)


class ParityReport(Report[PathFinding]):
    """Findings, the culprit first, with every compared module.

    Args:
        findings: in order.
        train: what the user called the training's dump.
        rollout: the same of the rollout's.
        repeat: the same of the repetition.
        modules: measures in execution order.
        metrics: of the predictions.
        unmatched: modules of one path alone, with that path.
        problems: what could not be read.
    """

    columns = CSV_COLUMNS

    def __init__(
        self,
        findings: Iterable[PathFinding],
        *,
        train: str,
        rollout: str,
        repeat: str | None,
        modules: Sequence[Measures],
        metrics: Mapping[str, Any],
        unmatched: Sequence[tuple[str, str]],
        problems: Sequence[str],
    ) -> None:
        super().__init__(findings)
        self.train, self.rollout, self.repeat = train, rollout, repeat
        self.modules, self.metrics = list(modules), dict(metrics)
        self.unmatched, self.problems = list(unmatched), list(problems)

    @property
    def summary(self) -> str:
        """One sentence: what was compared, and the metrics."""
        text = f"{len(self.modules)} modules compared"
        if self.unmatched:
            text += f", {len(self.unmatched)} of one path alone (first {self.unmatched[0][0]}, {self.unmatched[0][1]})"
        return "; ".join([text, *metric_words(self.metrics)])

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``parity --format json`` (docs/parity.md)."""
        return {
            "schema": JSON_SCHEMA,
            "train": self.train,
            "rollout": self.rollout,
            "repeat": self.repeat,
            "verdict": self.verdict,
            "metrics": {key: finite(value) for key, value in self.metrics.items()},
            "findings": [finding.to_dict() for finding in self],
            "modules": [row(one) for one in self.modules],
            "unmatched": [{"module": name, "path": path} for name, path in self.unmatched],
            "problems": self.problems,
        }


def row(one: Measures) -> dict[str, Any]:
    """Return a module's measures as documented JSON values."""
    return {
        "module": one.module,
        "rollout_module": one.theirs,
        "kind": one.kind,
        "rows": list(one.num_rows),
        "input_nmse": finite(one.input),
        "output_nmse": finite(one.output),
        "weight_nmse": finite(one.weight),
        "weight_gain": finite(one.weight_gain),
        "error_train": finite(one.error[0]),
        "error_rollout": finite(one.error[1]),
        "routing_flip_rate": finite(one.flips),
    }


def metric_words(metrics: Mapping[str, Any]) -> list[str]:
    """Return the metrics of two paths' predictions for people; those that are not known are left out."""

    def known(name: str) -> float | None:
        value = metrics.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    error, most, top1, top5 = (known(name) for name in ("logprob_error", "logprob_max", "top1_flip_rate", "top5_flip_rate"))
    tokens, ratio, kl = (known(name) for name in ("num_tokens", "token_mult_prob_error", "kl"))
    found = [] if tokens is None else [f"{tokens:.0f} tokens"]
    if error is not None:
        at_most = "" if most is None else f", {most:.3g} at most"
        found.append(f"their log-probabilities differ by {error:.3g} nats on average{at_most}")
    found += [] if ratio is None else [f"token_mult_prob_error {ratio:.4g}"]
    found += [] if kl is None else [f"KL {kl:.3g} nats"]
    if top1 is not None:
        found.append(f"the most probable token differs at {100 * top1:.3g} %")
    if top5 is not None:
        found.append(f"the five most probable at {100 * top5:.3g} %")
    return found

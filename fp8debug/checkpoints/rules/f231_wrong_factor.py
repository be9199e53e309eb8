"""F231: a weight off by one factor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from fp8debug.checkpoints.comparison import Comparison, fits, gain_beside_cast, is_factor, is_wrong
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, db
from fp8debug.checkpoints.scan import WeightFacts
from fp8debug.formats import FORMATS
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class WrongFactor(FileRule):
    """The weight is the reference's times one factor.

    What it detects
        Codes that fit the reference as well as the format can, once every scale is multiplied by the same factor; or, by
        blocks, by the inverse of the square of the scale: the stored scale is the inverse one.

    Why it matters
        Cosine and relative block errors do not see a constant factor; the model does.

    Example
        model.layers.2.self_attn.k_proj.weight: the values are 2 times the reference's: fnuz codes read as fn, or the
        reverse.

    Cure
        Correct the scale by the factor; look for fnuz against fn (2), 448 against 240, E5M2 against E4M3 (128), or a stale
        amax.

    Thresholds
        - max_gain_error 0.01: deviation of the factor from 1 that counts; numerics.md, 4 (warn at 1 %).
        - max_cut 0.07: deviation up to which a factor may come from mantissas that are cut off, where the scales are right:
          half a code of E4M3 is 1/32 to 1/16 of a value.
        - max_loss_db 1.5: how far the refitted weight may be below the ideal cast. No published basis.
    """

    code = "F231"
    name = "wrong-factor"
    cure = (
        "correct the scale by the factor; look for fnuz against fn (2), 448 against 240, E5M2 against E4M3 (128), or a stale amax"
    )
    needs_reference = True

    max_gain_error: float = 0.01
    max_cut: float = 0.07
    max_loss_db: float = 1.5

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that differ by a factor."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if against is None:
                continue
            gain = gain_beside_cast(against) if is_factor(against, self.max_gain_error) else None
            are_scales = is_wrong(against, self.max_gain_error) and fits(against, self.max_loss_db)
            if gain is None and not are_scales:
                continue
            numbers = f"SQNR {db(against.sqnr_db)}, {db(against.refit_db)} without the factor"
            is_known = against.factor is not None and abs(1 / against.factor - 1) > self.max_gain_error
            if is_known or (gain is not None and not are_scales):
                ratio = 1 / against.factor if against.factor is not None and is_known else gain or 1.0
                cause = _named(ratio, weight.format)
                if _is_inverse(ratio, facts):
                    cause = "the stored scale is the inverse of the one that fits"
                elif facts.scale_min == facts.scale_max == 1.0:
                    cause = "all scales are 1: they were never loaded"
                elif abs(ratio - 1) < self.max_cut and not against.is_pow2 and _is_of_amax(against, ratio):
                    way = "towards" if ratio < 1 else "away from"
                    cause = f"the scales are those of the reference's amax: the cast rounds {way} zero"
                elif facts.num_scale_pow2 == facts.num_scales and 0.5 < ratio < 2:
                    cause = "the scale was rounded to a power of two after the cast, or is one of another amax"
                text = f"the values are {ratio:.3g} times the reference's ({cause}); {numbers}"
                yield self.of_weight(weight, Severity.ERROR, text, value=ratio, threshold=1 + self.max_gain_error)
            elif against.pattern == "inverse":
                text = f"the stored scales are the inverse of those that fit the reference; {numbers}"
                cure = "store scale_inv, by which one multiplies: x ~= data * scale_inv"
                yield self.of_weight(
                    weight, Severity.ERROR, text, cure=cure, value=against.gain, threshold=1 + self.max_gain_error
                )


def _is_of_amax(against: Comparison, ratio: float) -> bool:
    """Return whether the scales are those of the reference's amax rather than those of the weight's, which is off by a factor."""
    scale = against.scale_ratio
    return scale is not None and 2 * abs(scale - 1) < abs(scale - ratio)


def _is_inverse(ratio: float, facts: WeightFacts) -> bool:
    """Return whether a factor is the square of the one scale of a weight, of either level."""
    whole = facts.scale_min if facts.scale_min == facts.scale_max else None
    known = [one for one in (whole, facts.tensor_scale) if one is not None and one > 0 and abs(log2(one)) > 1]
    return any(abs(log2(ratio / one**2)) < 0.02 for one in known)


#: Ratios that have a name, and their inverses.
_E4M3, _E4M3FNUZ, _E5M2 = (FORMATS[name].max for name in ("e4m3fn", "e4m3fnuz", "e5m2"))
_NAMED = {
    2.0 ** (FORMATS["e4m3fnuz"].bias - FORMATS["e4m3fn"].bias): "fnuz codes read as fn, or the reverse",
    _E4M3 / _E4M3FNUZ: f"{_E4M3:g} / {_E4M3FNUZ:g}, fn against fnuz maxima",
    _E5M2 / _E4M3: f"{_E5M2:g} / {_E4M3:g}",
}


def _named(ratio: float, fmt: str) -> str:
    for known, name in _NAMED.items():
        if fmt.startswith(("e4m3", "e5m2")) and min(abs(log2(ratio / known)), abs(log2(ratio * known))) < 0.02:
            return name
    return "a scale of another amax"


CHECKS.add(WrongFactor.code, WrongFactor())

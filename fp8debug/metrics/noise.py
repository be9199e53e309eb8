"""Stochastic rounding of a cast: whether it rounds at random, without bias, and anew in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.formats import FORMATS
from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor

    from fp8debug.formats import Format


class Noise:
    """Roundings of elements between two values of the format, in units of the spacing there.

    An element at a distance f in (0, 1) above the value below it goes up with probability f. With r = 1 - f where it went up and
    r = -f where it went down, r has the mean 0 and the variance f (1 - f), whatever the tensor: so sums of r and r^2 tell random
    rounding from rounding to nearest (r^2 at most half of the variance for values spread evenly over a spacing), from truncation
    and from zeros. Elements beyond the format's maximum and those that are not finite are left out. Only casts with stochastic
    rounding have any.
    """

    name = "noise"
    of_results = False
    kinds = ("stochastic",)
    present = "num_noise"
    slots = (
        Slot(
            name="num_noise",
            merge="sum",
            kind="int64",
            unit="1",
            doc="elements between two values of the format, under stochastic rounding",
        ),
        Slot(
            name="noise_sum",
            merge="sum",
            kind="float64",
            unit="1",
            doc="sum of their roundings r away from 0, in units of the spacing; its mean is 0",
        ),
        Slot(name="noise_sum2", merge="sum", kind="float64", unit="1", doc="sum of r^2"),
        Slot(name="noise_variance", merge="sum", kind="float64", unit="1", doc="sum of the variance f (1 - f) of r"),
        Slot(
            name="noise_repeat",
            merge="sum",
            kind="float64",
            unit="1",
            doc="sum of r times r of the sampled step before at the same place, over a corner of the tensor",
        ),
        Slot(name="noise_repeat_variance", merge="sum", kind="float64", unit="1", doc="variance of that sum"),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "noise_ratio": Derived(
            expression="noise_sum2 / noise_variance",
            unit="1",
            doc="energy of the roundings over that of stochastic rounding: 1; 0.5 to nearest, 2 truncated",
        ),
        "noise_bias": Derived(expression="noise_sum / num_noise", unit="1", doc="mean rounding away from 0, in spacings"),
        "noise_repeat_z": Derived(
            expression="noise_repeat / sqrt(noise_repeat_variance)",
            unit="1",
            doc="correlation of the roundings with those of the sampled step before, in standard deviations of independent ones",
        ),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Sum; int64 and FP64 ``[]``; nothing for another rounding. The repeats are ``observer.rechecks.RepeatCheck``'s."""
        if pair.cast is None or pair.cast.rounding != "stochastic":
            return {}
        up, rest = roundings(pair.scaled, pair.data, FORMATS[pair.cast.format])
        is_read = (rest > 0) & pair.as_read.value.isfinite() & pair.data.isfinite()
        r = (up - rest).double().masked_fill(~is_read, 0.0)
        rest = rest.double().masked_fill(~is_read, 0.0)
        none = r.new_zeros(())
        return {
            "num_noise": is_read.count_nonzero(),
            "noise_sum": r.sum(),
            "noise_sum2": r.square().sum(),
            "noise_variance": (rest * (1 - rest)).sum(),
            "noise_repeat": none,
            "noise_repeat_variance": none,
        }


def roundings(scaled: Tensor, data: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return how far data lie above the value below the scaled magnitude, and how far the magnitude does, in spacings.

    Args:
        scaled: magnitudes in units of the data, FP32.
        data: what they were rounded to, FP32; of a correct rounding the first result is 0 or 1.
        fmt: of the data.

    Returns:
        two FP32 tensors; the second is 0 for values of the format and for those beyond its maximum.
    """
    inside = scaled.clamp(max=fmt.max)
    exponent = (inside.frexp().exponent - 1).clamp(min=1 - fmt.bias) - fmt.mantissa_bits
    per_spacing = (-exponent).to(inside.dtype).exp2()  # not ldexp, which computes in torch's default dtype
    units = inside * per_spacing
    below = units.floor()
    return data.abs() * per_spacing - below, units - below


METRICS.add(Noise.name, Noise())

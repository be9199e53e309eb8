"""For every rule a hand-made run that fires and a near miss that must stay silent; the ratchet wants both."""

from __future__ import annotations

import math
from typing import Any

from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from tests.synthetic import Override, Slots

CULPRIT = "blocks.1.mlp.up"
DELAYED = "e4m3fn tensorwise delayed(16,max)"
INPUT: dict[str, Any] = {"module": CULPRIT, "gemm": "fprop", "tensor": "input", "steps": (40, None)}
WEIGHT: dict[str, Any] = {"module": CULPRIT, "tensor": "weight", "reference": "operand", "steps": (40, None)}
RESULT: dict[str, Any] = {**INPUT, "tensor": "output", "reference": "exact"}
NAN = float("nan")


def share(rate: float) -> Any:
    """A count that is this share of the row's elements."""

    def count(row: Slots) -> int:
        return int(row["numel"] * rate + 0.5)

    return count


def outlier_histogram(row: Slots) -> list[int]:
    """Nearly all elements near 2^0, a few at 2^18."""
    bins = [0] * NUM_BINS
    for binade in range(-10, 1):
        bins[binade - FIRST_LOG2] = row["numel"] // 11
    bins[18 - FIRST_LOG2] = row["numel"] // 128
    return bins


def powers_of_two(row: Slots) -> float:
    """The energy that a row's histogram has when every element is a power of two."""
    return math.fsum(count * 4.0 ** (FIRST_LOG2 + place) for place, count in enumerate(row["log2_hist"]))


CLIPPED = {"cast_name": DELAYED, "num_saturated": share(0.76), "headroom": 14.0, "sqnr_db": 3.0, "gain": 0.4}
FLUSHED = {"cast_name": DELAYED, "num_underflow": share(0.97), "headroom": 1e-6, "sqnr_db": 0.1, "gain": 0.03}
OUTLIER = {"num_underflow": share(0.6), "amax": 3e5, "log2_hist": outlier_histogram, "sqnr_db": 60.0,
           "sum_x2": lambda row: row["numel"] * 2.0**29}  # fmt: skip
FLOOR = {"cast_name": "e4m3fn 1x128 current pow2_floor", "num_saturated": share(0.003), "gain": 0.998}

#: What fires, by code: arguments of synthetic.build.
FIRES: dict[str, dict[str, Any]] = {
    "F101": {"overrides": [Override(**INPUT, slots=CLIPPED)]},
    "F102": {"overrides": [Override(**INPUT, slots=FLUSHED)]},
    "F103": {
        "overrides": [
            Override(**{**INPUT, "steps": (40, 41)}, slots={"num_actual_nonfinite": 128, "num_zero_blocks": 1}),
            Override(steps=(50, None), actual=None, slots={"num_nan": lambda row: row["numel"]}),
        ],
        "steps": {step: {"loss": NAN} for step in range(40, 100)},
    },
    "F104": {"overrides": [Override(**INPUT, slots=FLOOR)]},
    "F105": {"recipe": "tensorwise_current", "overrides": [Override(**INPUT, slots=OUTLIER)]},
    "F108": {"overrides": [Override(**RESULT, slots={"sqnr_db": 22.0, "gain": 0.92})]},
    "F110": {"module_entries": {CULPRIT: {"fp8": False, "kind": "Linear", "requested": None, "casts": None}}},
    "F111": {
        "overrides": [
            Override(**{**site, "reference": "operand"}, slots={"sum_err2": 0.0})
            for site in (INPUT, {**INPUT, "tensor": "weight"})
        ]
    },
    "F113": {"overrides": [Override(**WEIGHT, slots={"gain": 2.0})]},
    "F120": {"overrides": [Override(**INPUT, slots={"cast_name": "e5m2 1x128 current", "sqnr_db": 25.5})]},
    "F125": {"steps": {55: {"loss": 6.0}}},
}

#: What looks alike and is healthy, by code and name.
SILENT: dict[str, dict[str, dict[str, Any]]] = {
    "F101": {
        "only the maximum clips": {"overrides": [Override(**INPUT, slots={**CLIPPED, "num_saturated": 3, "sqnr_db": 31.5,
                                                                          "gain": 1.0, "headroom": 1.01})]},
        "one step of growth": {
            "recipe": "tensorwise_delayed",
            "overrides": [Override(steps=(50, 51), slots={"num_saturated": share(0.03), "headroom": 2.0})],
        },
        "the gradient of one bad batch": {
            "recipe": "tensorwise_delayed",
            "overrides": [
                Override(tensor="grad_output", steps=(50, 51), slots={"num_saturated": share(0.3), "headroom": 5.0})
            ],
        },
        "weights that grow from zero": {
            "recipe": "tensorwise_delayed",
            "every": 1,
            "num_steps": 30,
            "overrides": [
                Override(tensor="weight", steps=(step, step + 1),
                         slots={"num_saturated": share(1.2 - 0.15 * step), "headroom": step / (step - 1),
                                                               "gain": (step - 1) / step, "sqnr_db": 200.0})
                for step in range(2, 8)
            ],
        },
        "the first steps": {
            "recipe": "tensorwise_delayed",
            "every": 1,
            "num_steps": 30,
            "overrides": [Override(steps=(1, 4), slots={"num_saturated": share(0.05), "headroom": 2.0})],
        },
    },
    "F102": {
        "a quiet gradient under E5M2": {
            "recipe": "tensorwise_delayed",
            "overrides": [Override(tensor="grad_output", slots={"headroom": 1e-3})],
        },
        "a gradient whose tokens are solved": {
            "recipe": "tensorwise_delayed",
            "overrides": [Override(tensor="grad_output", slots={"num_underflow": share(0.2), "headroom": 1e-3})],
        },
        "a gradient that grows from nothing": {
            "recipe": "tensorwise_delayed",
            "overrides": [Override(tensor="grad_output", steps=(0, 1), slots={"num_underflow": share(1.0), "headroom": 1e-9})],
        },
    },
    "F103": {
        "padding": {"overrides": [Override(**INPUT, slots={"num_zero_blocks": 500, "num_zero": share(0.5)})]},
        "the loss scale overflows once": {
            "overrides": [Override(tensor="grad_output", steps=(30, 31), slots={"num_inf": 7})]
        },
    },
    "F104": {
        "a clipping that delayed scaling may do": {
            "recipe": "tensorwise_delayed",
            "overrides": [Override(slots={"num_saturated": 5, "headroom": 1.02})],
        },
        "pow2_floor where no maximum lies high": {
            "overrides": [Override(**INPUT, slots={"cast_name": "e4m3fn 1x128 current pow2_floor"})]
        },
    },
    "F105": {
        "a tail of GELU": {"overrides": [Override(**INPUT, slots={"num_underflow": share(0.08)})]},
        "an outlier that leaves its neighbours": {
            "overrides": [Override(**INPUT, slots={"amax": 2e3, "log2_hist": outlier_histogram, "sqnr_db": 40.0})]
        },
        "wgrad's grad_output": {
            "overrides": [Override(gemm="wgrad", tensor="grad_output", slots={"num_underflow": share(0.16)})]
        },
        "rows of another size under scales of their own, nine tenths zeros of a squared ReLU": {
            "overrides": [Override(**INPUT, slots={**OUTLIER, "num_zero": share(0.9), "num_underflow": share(0.004)})]
        },
    },
    "F108": {
        "the rounding of BF16": {"overrides": [Override(**RESULT, slots={"sqnr_db": 52.0})]},
        "one step of a result that cancels": {
            "overrides": [Override(**{**RESULT, "steps": (40, 41)}, slots={"sqnr_db": 30.0})]
        },
        "noise of the cast": {"overrides": [Override(**{**RESULT, "reference": "shadow"}, slots={"sqnr_db": 27.5})]},
    },
    "F110": {
        "an override asked for BF16": {"recipes": {CULPRIT: None}},
        "another kind of module": {
            "module_entries": {CULPRIT: {"fp8": False, "kind": "NonDynamicallyQuantizableLinear", "requested": None}}
        },
        "a Linear that exclude keeps out of the watch": {
            "module_entries": {CULPRIT: {"fp8": False, "kind": "Linear", "requested": None, "casts": None}},
            "manifest": {"exclude": ["*.1.mlp.up"]},
        },
    },
    "F111": {
        "one-hot input": {
            "overrides": [
                Override(**INPUT, slots={"sum_err2": 0.0, "amin": 1.0, "amax": 1.0,
                                         "log2_hist": lambda row: [row["numel"] * (i == 45) for i in range(NUM_BINS)]})
            ]
        },
        "one feature, each row its own amax": {
            "overrides": [Override(**INPUT, slots={"sum_err2": 0.0, "num_blocks": lambda row: row["numel"],
                                                   "max_block_range_log2": 0.0})]
        },
        "two values of one magnitude in a row": {
            "overrides": [Override(**INPUT, slots={"sum_err2": 1e-14, "max_block_range_log2": 1e-7})]
        },
        "tokens so sparse that a block has one": {
            "overrides": [Override(**INPUT, slots={"sum_err2": 0.0, "num_zero": share(0.99)})]
        },
        "powers of two": {"overrides": [Override(**INPUT, slots={"sum_err2": 0.0, "sum_x2": powers_of_two})]},
        "a weight on the FP8 grid": {"overrides": [Override(**WEIGHT, slots={"sum_err2": 0.0})]},
        "an outlier that is kept exactly": {
            "overrides": [Override(**INPUT, slots={"log2_hist": outlier_histogram, "amax": 2.0**18,
                                                   "sum_x2": lambda row: row["numel"] * 2.0**29,
                                                   "sum_err2": lambda row: row["numel"] * 1e-4})]
        },
    },
    "F113": {
        "values that round to one code": {
            "recipe": "blockwise_pow2", "overrides": [Override(**WEIGHT, slots={"gain": 0.95, "sqnr_db": 200.0})]
        },
        "a unit scale, and a multiply after the GEMM": {
            "overrides": [
                Override(**{**WEIGHT, "module": "*"}, slots={"gain": 4480.0, "scale_inv_min": 1.0, "scale_inv_max": 1.0})
            ]
        },
        "both scales on one operand's side": {
            "overrides": [
                Override(**{**WEIGHT, "gemm": "fprop"}, slots={"gain": 512.0}),
                Override(**{**INPUT, "reference": "operand"}, slots={"gain": 1 / 512}),
            ]
        },
        "an input of few tokens": {"overrides": [Override(**INPUT, slots={"gain": 1.018, "sqnr_db": 34.0})]},
        "a gain in the envelope": {"overrides": [Override(slots={"gain": 1.002}, reference="operand")]},
    },
    "F120": {
        "HYBRID": {"recipe": "tensorwise_delayed"},
        "constant weights": {
            "recipe": "blockwise_pow2", "overrides": [Override(**WEIGHT, slots={"gain": 0.945, "sqnr_db": 200.0})]
        },
    },
    "F125": {
        "noise of 5 %": {"steps": {s: {"loss": 3.0 + 0.15 * (-1) ** (s // 3)} for s in range(100)}},
        "a steep descent": {"steps": {s: {"loss": 2.0 + 8.0 * 0.8**s} for s in range(100)}},
        "a bump in the first steps": {"steps": {5: {"loss": 7.0}, 6: {"loss": 6.5}}},
    },
}  # fmt: skip

"""Hand-made runs for the rules of single operands, rows and microbatches: what fires, and what looks alike and is healthy."""

from __future__ import annotations

from typing import Any

from fp8debug.metrics.histogram import NUM_BINS
from tests.rules.sick_runs import INPUT, WEIGHT, share
from tests.synthetic import Override, Slots

DGRAD: dict[str, Any] = {**INPUT, "gemm": "dgrad", "tensor": "grad_output"}
WGRAD: dict[str, Any] = {**INPUT, "gemm": "wgrad"}
OUTPUT: dict[str, Any] = {**INPUT, "tensor": "output", "reference": "shadow"}
GRADIENT: dict[str, Any] = {**WGRAD, "tensor": "grad_weight", "reference": "shadow"}
COARSE = "e4m3fn 128x128 current"
FLOOR = "e4m3fn 128x128 current pow2_floor"


def rotated(cosine: float, length: float = 1.0) -> dict[str, Any]:
    """Return the sums of a tensor that lies at this cosine from its reference and is ``length`` times as long."""
    return {
        "sum_xy": lambda row: cosine * length * row["sum_x2"],
        "sum_y2": lambda row: length**2 * row["sum_x2"],
        "sum_err2": lambda row: (1 + length**2 - 2 * cosine * length) * row["sum_x2"],
    }


def shifted(log2: float) -> Any:
    """Return the sum of log2(scale_inv) at a second read whose scales are ``2^log2`` times the first one's."""

    def total(row: Slots) -> float:
        moved: float = row["scale_inv_sum_log2"] + log2 * row["num_blocks"]
        return moved

    return total


def of_energy(nmse: float) -> Any:
    """Return a squared error that is this share of the reference's energy."""
    return lambda row: nmse * row["sum_x2"]


STALE = {**rotated(0.995), "headroom": 1.06}
FOREIGN = {**rotated(0.55), "num_bad_rows": 128, "num_good_rows": 128}
TWICE = {"sqnr_db": 28.6, "headroom": 1.05, "num_saturated": 900}
POISONED = [
    Override(**INPUT, slots={"num_underflow": share(0.9), "sqnr_db": 60.0}),
    Override(**OUTPUT, slots={"num_bad_rows": 240, "num_good_rows": 16, "sqnr_db": 32.0}),
]
STALLED = {
    "grad_sum_err2": of_energy(10**-2.4), "grad_sum_xy": of_energy(0.97), "num_grad_bf16": lambda row: row["num_grad"],
}  # fmt: skip

EXACT: dict[str, Any] = {**OUTPUT, "reference": "exact"}
LOST = {"grad_sum_err2": of_energy(0.4), "grad_sum_xy": of_energy(0.37)}
CODES = {"amax": 448.0, "sqnr_db": 60.0}
ON_GRID = {"sum_err2": 0.0, "sum_xy": of_energy(1.0), "sum_y2": of_energy(1.0)}
ONE_BINADE = [0] * (NUM_BINS - 1) + [4096]

NVFP4: dict[str, Any] = {"recipe": "nvfp4"}
TRANSFORMED: dict[str, Any] = {**DGRAD, "gemm": "wgrad"}
SINGLE = "e2m1fn 1x16 current scale=e4m3fn"


def times_noise(factor: float) -> Any:
    """Return roundings of so many times the energy of random ones."""
    return lambda row: factor * row["noise_variance"]


def cut_off(ratio: float) -> dict[str, Any]:
    """Return the slots of an operand whose largest value lies so far beyond its largest scale."""
    return {"headroom": ratio, "scale_inv_max": lambda row: row["amax"] / 6 / ratio, "num_saturated": share(0.6), "sqnr_db": 3.0}


FIRES: dict[str, dict[str, Any]] = {
    "F145": {**NVFP4, "overrides": [Override(**DGRAD, slots={"noise_sum2": times_noise(0.5)})]},
    "F146": {**NVFP4, "overrides": [Override(**TRANSFORMED, slots=rotated(0.25))]},
    "F147": {**NVFP4, "overrides": [Override(**INPUT, slots=cut_off(40.0))]},
    "F148": {**NVFP4, "overrides": [Override(**DGRAD, slots={"cast_name": SINGLE, "sqnr_db": 0.1,
                                                             "num_eps_blocks": lambda row: row["num_blocks"]})]},
    "F106": {"overrides": [Override(**DGRAD, slots={"cast_name": COARSE, "num_underflow": share(0.5)})]},
    "F107": {"overrides": [Override(**WGRAD, slots=TWICE)]},
    "F112": {"overrides": [Override(**WEIGHT, slots=STALE)]},
    "F115": {"overrides": [Override(**WGRAD, slots={"reread_scale_inv_sum_log2": shifted(-3.5)})]},
    "F117": {"recipe": "tensorwise_current", "overrides": POISONED},
    "F118": {"overrides": [Override(**WEIGHT, slots={"cast_name": FLOOR, "num_saturated": share(0.97), "gain": 0.921,
                                                     "sqnr_db": 200.0, "headroom": 1.09})]},
    "F119": {"overrides": [Override(**WEIGHT, slots={**rotated(0.84, 3.0), "headroom": 4.0})]},
    "F121": {"overrides": [Override(**WEIGHT, slots=FOREIGN)]},
    "F123": {"overrides": [Override(**GRADIENT, slots=STALLED)]},
    "F128": {"overrides": [Override(**WGRAD, slots=rotated(0.5))]},
    "F134": {"overrides": [Override(**GRADIENT, slots=LOST)]},
    "F133": {"overrides": [Override(**WEIGHT, slots=CODES)]},
    "F137": {
        "recipe": "blockwise_pow2", "what_if": ["blockwise"],
        "overrides": [Override(**{**WEIGHT, "gemm": "fprop"}, actual=False, slots=ON_GRID)],
    },
}  # fmt: skip

SILENT: dict[str, dict[str, dict[str, Any]]] = {
    "F145": {
        "random roundings of few elements": {
            **NVFP4, "overrides": [Override(**DGRAD, slots={"num_noise": 900, "noise_sum2": 75.0, "noise_variance": 150.0})]
        },
        "roundings within eight standard deviations": {
            **NVFP4, "overrides": [Override(**DGRAD, slots={"noise_repeat": 80.0, "noise_sum2": times_noise(0.8)})]
        },
        "a generator of 8 bits": {
            **NVFP4, "overrides": [Override(**DGRAD, slots={"noise_sum": lambda row: 0.002 * row["num_noise"]})]
        },
        "an operand that is no rounding at all": {
            **NVFP4, "overrides": [Override(**DGRAD, slots={**rotated(0.1), "noise_sum2": times_noise(9.0)})]
        },
    },
    "F146": {
        "the same tensor is as wrong without the transform": {
            **NVFP4, "overrides": [Override(**{**DGRAD, "gemm": None, "reference": "operand"}, slots=rotated(0.25))]
        },
        "noise of FP4": {**NVFP4, "overrides": [Override(**TRANSFORMED, slots={"sqnr_db": 12.0})]},
    },
    "F147": {
        "a scale rounded to E4M3": {**NVFP4, "overrides": [Override(**INPUT, slots={"headroom": 1.06})]},
        "scales of other blocks": {
            **NVFP4, "overrides": [Override(**INPUT, slots={"headroom": 8.0, "sqnr_db": 3.0, "num_saturated": share(0.3)})]
        },
        "tiny blocks whose scale is zero": {**NVFP4, "overrides": [Override(**INPUT, slots={"num_eps_blocks": 40})]},
        "a scale rounded to a subnormal of E4M3, in one block of a transformed tensor": {
            **NVFP4,
            "overrides": [Override(**TRANSFORMED, slots={"headroom": 1.42, "scale_inv_max": lambda row: row["amax"] / 9,
                                                         "num_saturated": share(0.04)})],
        },
    },
    "F148": {
        "tiny blocks whose scale is zero": {
            **NVFP4, "overrides": [Override(**INPUT, slots={"cast_name": SINGLE, "num_eps_blocks": 40})]
        },
        "under an amax eps": {
            **NVFP4,
            "overrides": [Override(**INPUT, slots={"cast_name": "e2m1fn 1x16 current eps=0.001 scale=e4m3fn", "sqnr_db": 0.1,
                                                   "num_eps_blocks": 40})],
        },
    },
    "F106": {
        "the same tokens in 1x128": {"overrides": [Override(**DGRAD, slots={"num_underflow": share(0.5)})]},
        "a what-if that is no better": {
            "what_if": ["blockwise"],
            "recipe": "blockwise_pow2",
            "overrides": [
                Override(**DGRAD, slots={"cast_name": COARSE, "num_underflow": share(0.5)}),
                Override(**DGRAD, actual=False, slots={"num_underflow": share(0.45)}),
            ],
        },
        "wgrad, a leaf": {"overrides": [Override(**{**DGRAD, "gemm": "wgrad"}, slots={"num_underflow": share(0.16)})]},
        "one sampled step": {
            "overrides": [
                Override(**{**DGRAD, "steps": (40, 41)}, slots={"cast_name": COARSE, "num_underflow": share(0.5)})
            ]
        },
    },
    "F107": {
        "power-of-two scales": {
            "recipe": "blockwise_pow2", "overrides": [Override(**WGRAD, slots={"sqnr_db": 28.6, "headroom": 0.9})]
        },
        "both casts are as noisy": {
            "overrides": [Override(**{**INPUT, "gemm": None, "reference": "operand"}, slots={"sqnr_db": 31.0})]
        },
        "a tensor's own scale": {"overrides": [Override(**WGRAD, slots={"sqnr_db": 29.2})]},
    },
    "F112": {
        "weights one step after zero": {"overrides": [Override(**WEIGHT, slots={"gain": 0.95, "sqnr_db": 200.0})]},
        "a weight of few values": {"overrides": [Override(**WEIGHT, slots={"sqnr_db": 30.4})]},
        "a second read as good as the first": {
            "overrides": [Override(**WEIGHT, slots={"sqnr_db": 30.4, "reread_sum_err2": of_energy(10**-2.95)})]
        },
        "one sampled step that rounding explains": {
            "overrides": [Override(**{**WEIGHT, "steps": (40, 41)}, slots={**rotated(0.9985), "headroom": 1.06})]
        },
    },
    "F115": {
        "a kernel that is not deterministic": {
            "overrides": [Override(**WGRAD, slots={"reread_scale_inv_sum_log2": shifted(0.03)})]
        },
        "only some microbatches were recomputed": {
            "overrides": [
                Override(
                    **WGRAD,
                    slots={"reread_scale_inv_sum_log2": 0.0, "num_reread_blocks": lambda row: row["num_blocks"] // 2},
                )
            ]
        },
        "a delayed scale that grows in the first steps": {
            "recipe": "tensorwise_delayed", "every": 1, "num_steps": 20,
            "overrides": [Override(**{**WGRAD, "steps": (1, 8)}, slots={"reread_scale_inv_sum_log2": shifted(1.0)})],
        },
    },
    "F117": {
        "rows with a scale of their own": {"overrides": [Override(**OUTPUT, slots={"num_bad_rows": 240})]},
        "a few rows that cancel": {
            "recipe": "tensorwise_current", "overrides": [Override(**OUTPUT, slots={"num_bad_rows": 6})]
        },
    },
    "F118": {
        "block maxima clip": {"recipe": "tensorwise_delayed", "overrides": [Override(**WEIGHT, slots={"num_saturated": 3})]},
        "a cluster that does not clip": {"overrides": [Override(**WEIGHT, slots={"gain": 0.945, "sqnr_db": 200.0})]},
    },
    "F119": {
        "a scale of the tensor's own": {"overrides": [Override(**WEIGHT, slots={"sqnr_db": 31.0})]},
        "a delayed scale in its first steps": {
            "recipe": "tensorwise_delayed", "every": 1, "num_steps": 20,
            "overrides": [Override(**{**WEIGHT, "steps": (2, 6)}, slots={"headroom": 1.6, "num_saturated": share(0.02)})],
        },
    },
    "F121": {
        "rows that are all good but few": {
            "overrides": [Override(**WEIGHT, slots={"num_bad_rows": 2, "num_good_rows": 254})]
        },
        "replicas that differ by rounding": {
            "world_size": 2, "overrides": [Override(**WEIGHT, ranks=(1,), slots={"sqnr_db": 31.65})]
        },
    },
    "F123": {
        "ten microbatches in BF16": {
            "overrides": [Override(**GRADIENT, slots={**STALLED, "grad_sum_err2": of_energy(10**-4.8)})]
        },
        "a weight that another module adds to": {
            "overrides": [Override(**GRADIENT, slots={**STALLED, "grad_first_nmse": 0.3})]
        },
    },
    "F128": {
        "rounding at its worst": {"overrides": [Override(**WGRAD, slots={"sqnr_db": 24.61})]},
        "E5M2 at its worst": {
            "recipe": "tensorwise_delayed", "overrides": [Override(**DGRAD, slots={"sqnr_db": 19.1})],
        },
        "a delayed scale in its first steps": {
            "recipe": "tensorwise_delayed", "every": 1, "num_steps": 20,
            "overrides": [Override(**{**INPUT, "steps": (2, 6)}, slots={"sqnr_db": 12.0})],
        },
    },
    "F134": {
        "a weight that another module adds to": {
            "overrides": [Override(**GRADIENT, slots={**LOST, "grad_first_nmse": 0.3})]
        },
        "BF16 over its microbatches": {
            "overrides": [Override(**GRADIENT, slots={**STALLED, "grad_sum_err2": of_energy(10**-4.8)})]
        },
    },
    "F133": {
        "a weight that grows past a format's maximum": {
            "overrides": [
                Override(**{**WEIGHT, "steps": (10 * n, 10 * n + 1)}, slots={"amax": 448.0 * 4.0 ** (n - 5)}) for n in range(10)
            ]
        },
        "a large weight": {"overrides": [Override(**WEIGHT, slots={"amax": 30.0})]},
        "weights that are all so large": {
            "overrides": [Override(tensor="weight", reference="operand", steps=(40, None), slots={"amax": 448.0})]
        },
    },
    "F137": {
        "a constant weight": {
            "recipe": "blockwise_pow2", "what_if": ["blockwise"],
            "overrides": [Override(**{**WEIGHT, "gemm": "fprop"}, actual=False, slots=ON_GRID),
                          Override(**{**WEIGHT, "gemm": "fprop"}, slots={"log2_hist": ONE_BINADE})],
        },
        "a weight that both casts hold": {
            "recipe": "blockwise_pow2", "what_if": ["blockwise"],
            "overrides": [Override(**{**WEIGHT, "gemm": "fprop"}, actual=None,
                                   slots={**ON_GRID, "log2_hist": ONE_BINADE})],
        },
    },
}  # fmt: skip

"""Metrics in words and in groups; the column's name, by which SQL and the command line know a metric, stands beside them."""

from __future__ import annotations

from collections.abc import Sequence

from .queries import metrics

#: Group -> column -> words. What is in no group follows in "other counts and sums", by its sentence in the schema.
GROUPS: dict[str, dict[str, str]] = {
    "precision": {
        "sqnr_db": "SQNR, dB",
        "cosine": "cosine similarity",
        "gain": "gain",
        "norm_ratio": "norm ratio",
        "nmse": "relative squared error",
        "mse": "mean squared error",
        "max_abs_err": "largest error",
        "bias": "mean error",
        "worst_block_sqnr_db": "SQNR of the worst block, dB",
        "worst_row_sqnr_db": "SQNR of the worst row, dB",
        "bad_row_rate": "rows below 10 dB",
        "good_row_rate": "rows above 24 dB",
    },
    "range of the format": {
        "underflow_rate": "underflow",
        "underflow_nonzero_rate": "underflow of nonzeros",
        "subnormal_rate": "subnormals",
        "overflow_rate": "overflow, saturated",
        "headroom": "headroom",
        "nonfinite_rate": "NaN and Inf",
        "actual_nonfinite_rate": "NaN and Inf made here",
    },
    "scale": {
        "scale_inv_mean_log2": "log2 scale_inv, mean",
        "scale_inv_std_log2": "log2 scale_inv, standard deviation",
        "scale_inv_min": "scale_inv, smallest",
        "scale_inv_max": "scale_inv, largest",
        "scale_log2_ratio": "scale against current scaling, log2",
        "zero_block_rate": "blocks of zeros",
        "eps_block_rate": "blocks at amax eps",
        "num_zero_blocks": "blocks of zeros, number",
        "max_block_range_log2": "widest range in a block, log2",
    },
    "the tensor itself": {
        "amax": "largest magnitude",
        "amin": "smallest nonzero magnitude",
        "rms": "root mean square",
        "range_log2": "range, log2",
        "zero_rate": "zeros",
        "num_nan": "NaN, number",
        "num_inf": "Inf, number",
        "num_actual_nonfinite": "NaN and Inf made here, number",
    },
    "effect on the loss": {
        "damage_per_row": "damage of a row",
        "damage": "damage",
        "top1_flip_rate": "top-1 choices changed",
        "top2_flip_rate": "top-2 choices changed",
    },
    "stochastic rounding": {
        "noise_ratio": "energy of random rounding, 1 is right",
        "noise_bias": "mean of random rounding, 0 is right",
        "noise_repeat_z": "random rounding repeated, standard deviations",
    },
    "gradient accumulation and second reads": {
        "grad_sum_sqnr_db": "SQNR of the accumulated gradient, dB",
        "grad_sum_gain": "gain of the accumulated gradient",
        "reread_sqnr_db": "SQNR at the second read, dB",
        "reread_scale_log2": "scale at the second read, log2",
    },
}
_WORDS = {name: words for group in GROUPS.values() for name, words in group.items()}
#: What a training step has.
SERIES = {"loss": "loss", "grad_norm": "gradient norm", "loss_scale": "loss scale", "lr": "learning rate"}
REST = "other counts and sums"


def label_of(name: str) -> str:
    """Return a metric in words: those of its group, else the beginning of its sentence in the schema, else its name."""
    if name in _WORDS or name in SERIES:
        return _WORDS.get(name) or SERIES[name]
    _, doc = metrics().get(name, ("", ""))
    return doc.split(";")[0].split(",")[0].split(":")[0] or name


def with_name(name: str) -> str:
    """Return a metric in words with the column's name behind them, by which a search finds it too."""
    words = label_of(name)
    return words if words == name else f"{words} ({name})"


def grouped(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return metrics by group, in the order of the groups; the rest last."""
    found = [(group, [name for name in words if name in names]) for group, words in GROUPS.items()]
    found.append((REST, [name for name in names if name not in _WORDS]))
    return [(group, own) for group, own in found if own]

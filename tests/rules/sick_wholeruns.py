"""Hand-made runs for the rules of coverage and of whole runs: several ranks, experts, depth, loss scale, the first steps."""

from __future__ import annotations

import math
from typing import Any

from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from tests.synthetic import MODULES, Override, Slots

CULPRIT = "blocks.1.mlp.up"
NUM_EXPERTS = 4

#: A router before four experts of one block, after a Linear; names say nothing.
ROUTED = (
    ("net.0.mix", 256, 256),
    ("net.0.moe.choose", 256, NUM_EXPERTS),
    *(
        (f"net.0.moe.parts.{i}.{part}", *shape)
        for i in range(NUM_EXPERTS)
        for part, shape in {"a": (256, 512), "c": (512, 256)}.items()
    ),
)
LAYERS = tuple((f"net.{i}.mix", 256, 256) for i in range(6))


def tokens(expert: str, share: float, steps: tuple[int | None, int | None] = (None, None)) -> Override:
    """An expert reads a share of the tokens."""

    def shrink(name: str) -> Any:
        return lambda row: int(row[name] * share)

    slots = {name: shrink(name) for name in ("numel", "num_zero", "num_underflow", "num_subnormal")}
    sums = {name: lambda row, name=name: row[name] * share for name in ("sum_x2", "sum_y2", "sum_xy", "sum_err2")}
    return Override(module=f"net.0.moe.parts.{expert}.*", tensor="input", slots={**slots, **sums}, steps=steps)


def no_tokens(expert: str, steps: tuple[int | None, int | None]) -> Override:
    """An expert has rows without elements, as the recorder writes them."""
    empty = {"numel": 0, "num_zero": 0, "num_underflow": 0, "num_subnormal": 0, "amax": None, "amin": None, "headroom": None}
    return Override(module=f"net.0.moe.parts.{expert}.*", slots=empty, steps=steps, actual=None)


SHARES = [tokens(str(i), share) for i, share in enumerate((0.4, 0.3, 0.2, 0.1))]
BF16_ROUTER = {"recipes": {"net.0.moe.choose": None}, "modules": ROUTED}


def wide(log2_spread: float) -> Any:
    """An input whose amax lies so many binades above its median magnitude."""

    def bins(row: Slots) -> list[int]:
        found = [0] * NUM_BINS
        for binade in range(-6, 1):
            found[binade - FIRST_LOG2] = row["numel"] // 7
        return found

    return {"log2_hist": bins, "amax": 2.0 ** (log2_spread - 2.5)}


def growing(log2_step: float) -> list[Override]:
    """Outliers that grow from layer to layer."""
    spreads = {name: wide(4.0 + log2_step * i) for i, (name, _, _) in enumerate(LAYERS)}
    return [Override(module=name, gemm="fprop", tensor="input", slots=slots) for name, slots in spreads.items()]


def other_scale(row: Slots) -> float:
    return float(row["scale_inv_max"]) * 2


TWICE = {"scale_inv_max": other_scale, "scale_inv_min": lambda row: row["scale_inv_min"] * 2, "headroom": 0.5}
WRONG_RANK = Override(module=CULPRIT, tensor="weight", steps=(40, None), ranks=(1,), reference="operand", slots=TWICE)
#: Ranks whose scales come from an amax that all of them share.
GROUPED = Override(tensor="input", reference="operand", slots={"scale_inv_max": 0.0134, "scale_inv_min": 0.0134})
LEFT_OUT = Override(module=CULPRIT, gemm="fprop", tensor="input", steps=(40, None), ranks=(1,), reference="operand",
                    slots={"scale_inv_max": 0.02, "scale_inv_min": 0.02})  # fmt: skip


def losses(values: Any) -> dict[int, dict[str, Any]]:
    return {step: {"loss": values(step)} for step in range(100)}


def scales(values: Any) -> dict[int, dict[str, Any]]:
    return {step: {"loss_scale": values(step)} for step in range(100)}


def compared(nmse: float, kl: float) -> dict[int, dict[str, Any]]:
    row = {"inference_nmse": nmse, "inference_kl": kl, "inference_flip_rate": min(1.0, kl)}
    return {step: row for step in range(40, 100, 20)}


GRADIENTS: dict[str, Any] = {"tensor": "grad_output", "reference": "operand"}
ZERO: dict[str, Any] = {
    "num_zero": lambda row: row["numel"], "sum_x2": 0.0, "sum_xy": 0.0, "sum_y2": 0.0, "sum_err2": 0.0, "amax": 0.0,
    "num_zero_blocks": lambda row: row.get("num_blocks"), "headroom": None,
}  # fmt: skip


def rounded(lost: float, gain: float, **more: Any) -> Any:
    """Updates of the culprit's BF16 weight of which a share is lost, and the whole takes effect to another."""
    row = {"dtype": "bfloat16", "num_lost": round(8192 * lost), "sum_intended_update": gain * 8192 * 3e-4**2,
           "sum_spacing_log2": -4.0 * 8192, **more}  # fmt: skip
    return lambda step, module: row if module == CULPRIT else {}


def enlarged(ratio: float, **more: Any) -> Any:
    """Updates of all weights so many times their RMS, from step 40 on."""
    row = {"sum_update2": 8192 * (ratio * 0.02) ** 2, "max_update": 3 * ratio * 0.02, **more}
    return lambda step, module: row if step >= 40 else {}


def given(module: str = CULPRIT, **more: Any) -> Any:
    """Gradients of two microbatches, of independent directions and size 1, of which the optimizer gets the sum."""
    whole = {"sum_given2": 2.0, "sum_passes2": 2.0, "sum_given_passes": 2.0, "sum_since2": 2.0, "sum_given_since": 2.0,
             "sum_last2": 1.0, "sum_given_last": 1.0, "sum_first2": 1.0, "sum_given_first": 1.0}  # fmt: skip
    return lambda step, name: {**whole, **(more if (step >= 40 and name in (module, "*")) or module == "*" else {})}


#: The optimizer gets the second of two microbatches.
LAST = {"sum_given2": 1.0, "sum_given_passes": 1.0, "sum_given_since": 1.0, "sum_given_last": 1.0, "sum_given_first": 0.0}
#: One setting that a resume changed.
RESUMED = {"step": 40, "against": "the earlier part of the run", "setting": "amax_eps", "before": "0.0", "now": "1e-06",
           "sites": ["fprop.input"], "module": CULPRIT, "num_modules": 1, "is_notable": True}  # fmt: skip


RESUME = [(40, "resume", None, "resumed in the folder of the earlier part")]


def sized(scale: float, steps: tuple[int | None, int | None], module: str = CULPRIT) -> Override:
    """A weight so many times as large as the healthy one, without the noise of its size, and with scales of its own amax."""
    slots = {
        "amax": 0.1 * scale, "amin": 1e-8, "sum_x": 0.5 * scale, "sum_x2": lambda row: row["numel"] * (0.02 * scale) ** 2,
        "sqnr_db": 31.7, "scale_inv_max": 0.1 * scale / 448, "scale_inv_min": 0.05 * scale / 448,
    }  # fmt: skip
    return Override(module=module, tensor="weight", reference="operand", steps=steps, slots=slots)


def pace(size: float) -> Any:
    """Updates of every weight by so much."""
    return lambda step, module: {"sum_update2": 8192 * size**2, "sum_intended2": 8192 * size**2,
                                 "sum_intended_update": 8192 * size**2, "lr": size}  # fmt: skip


def told(parameter: str, steps: range = range(1000), **columns: Any) -> Any:
    """Rows of one parameter with other columns."""
    return lambda step, name: columns if name == parameter and step in steps else {}


FIRES: dict[str, dict[str, Any]] = {
    "F109": {"modules": ROUTED, "overrides": SHARES, "module_entries": {"net.0.moe.choose": {"requested": None}}},
    "F114": {"world_size": 3, "overrides": [WRONG_RANK]},
    "F116": {**BF16_ROUTER, "overrides": [*SHARES, no_tokens("2", (40, None))]},
    "F122": {"steps": compared(0.4, 0.7)},
    "F124": {"modules": LAYERS, "overrides": growing(1.6)},
    "F126": {"steps": scales(lambda step: 65536.0 / 2 ** max(0, min(8, (step - 40) // 2)))},
    "F127": {"steps": losses(lambda step: 5.5 + 20 * (1 - math.exp(-step / 8)))},
    "F135": {"updates": rounded(0.97, 0.03)},
    "F143": {"overrides": [Override(**GRADIENTS, steps=(40, None), slots=ZERO)]},
    "F144": {"manifest": {"resumed": [RESUMED]}},
    "F149": {"updates": given(CULPRIT, **LAST)},
    "F150": {"events": RESUME, "overrides": [sized(1, (0, 10)), sized(1, (40, 50))]},
    "F151": {"parameters": told("embed.weight", range(40, 100), nonfinite_before="nan", amax_before=None)},
}

SILENT: dict[str, dict[str, dict[str, Any]]] = {
    "F151": {
        "trained parameters": {"parameters": told("")},
        "a frozen parameter": {"parameters": told(
            "embed.weight", optimizer=None, requires_grad=False, has_grad=False, grad_amax=None, num_moved=None)},
        "a gradient that is zero at first": {"parameters": told("embed.weight", range(20), grad_amax=0.0, num_moved=0)},
        "a parameter that something else moves": {"parameters": told("embed.weight", optimizer=None, num_moved=None)},
        "a mask of minus infinity": {"parameters": told("blocks.0.load_buffer", nonfinite_before="inf", amax_before=None)},
        "a buffer that is never written": {"parameters": told("blocks.0.load_buffer", num_writes=0, num_moved=0)},
        "gradients that overflow in a skipped step": {"parameters": told(
            "embed.weight", range(40, 41), grad_nonfinite="inf", grad_amax=None, num_moved=0)},
    },
    "F150": {
        "resumed where it was": {"events": RESUME, "updates": pace(3e-5)},
        "frozen weights": {"events": RESUME, "overrides": [sized(1, (None, None), "*")]},
        "a weight that returns without a resume": {"overrides": [sized(1, (0, 10)), sized(1, (40, 50))]},
        "steps large enough for what changed": {
            "events": RESUME, "updates": pace(2e-3), "overrides": [sized(1.5, (40, None))]},
        "weights that grow as before": {
            "events": RESUME, "overrides": [sized(1 + step / 20, (step, step + 10)) for step in range(0, 100, 10)],
            "steps": {step: {"lr": None} for step in range(100)}},
        "a first sampled step before the resume": {"events": [(10, *RESUME[0][1:])], "overrides": [sized(2, (10, None))],
                                                   "steps": {step: {"lr": None} for step in range(100)}},
    },
    "F149": {
        "the sum of two microbatches": {"updates": given()},
        "a gradient that is clipped": {"updates": given("*", **{
            name: value / (4 if name == "sum_given2" else 2) if "given" in name else value
            for name, value in given()(40, CULPRIT).items()})},
        "noise that is added to the sum": {"updates": given(sum_given2=4.0)},
        "a tied weight, whose other use adds more": {"updates": given(sum_given2=5.0, sum_given_last=1.2)},
        "zeros where wgrad gave zeros": {
            "updates": lambda step, name: {"num_grad": 0, "sum_grad2": 0.0} if name == CULPRIT else {},
            "overrides": [Override(module=CULPRIT, tensor="grad_weight", slots={
                "num_zero": lambda row: row["numel"], "sum_x2": 0.0, "sum_y2": 0.0, "sum_xy": 0.0, "sum_err2": 0.0})]},
    },
    "F144": {
        "resumed with the same settings": {"manifest": {"resumed": []}},
        "not resumed": {},
    },
    "F143": {
        "one module without a gradient": {"overrides": [Override(module=CULPRIT, **GRADIENTS, slots=ZERO)]},
        "steps without a token to learn from": {"overrides": [Override(**GRADIENTS, steps=(40, 42), slots=ZERO)]},
    },
    "F109": {
        "a router in high precision": {**BF16_ROUTER, "overrides": SHARES},
        "a router that an override put in FP8": {
            "modules": ROUTED, "overrides": SHARES,
            "manifest": {"filters": [{"kind": "override", "pattern": "net.0.moe.choose", "matched": 1}]},
        },
        "a head of as many classes as there are layers": {"modules": (*LAYERS, ("head", 256, len(LAYERS)))},
        "a first layer as narrow as the model is deep": {"modules": (("stem", 256, len(LAYERS)), *LAYERS)},
    },
    "F110": {
        "a subclass that a request for the whole model cannot convert": {"module_entries": {
            CULPRIT: {"fp8": False, "observed": False, "kind": "NonDynamicallyQuantizableLinear", "casts": None}}},
        "another backend, where nobody is asked": {
            "module_entries": {name: {"requested": None} for name, _, _ in MODULES}
        },
    },
    "F114": {
        "ranks that scale their own data": {"world_size": 3, "recipe": "tensorwise_delayed"},
        "a group that reduces": {"world_size": 3, "recipe": "tensorwise_delayed", "overrides": [GROUPED]},
        "one step": {"world_size": 2, "overrides": [Override(
            module=CULPRIT, tensor="weight", steps=(40, 41), ranks=(1,), reference="operand",
            slots={"scale_inv_max": other_scale})]},
        "weights that are shards": {"world_size": 2, "overrides": [Override(
            tensor="weight", ranks=(1,), reference="operand",
            slots={"amax": lambda row: row["amax"] * 1.1, "scale_inv_max": lambda row: row["scale_inv_max"] * 1.1})]},
    },
    "F116": {
        "empty now and then": {**BF16_ROUTER, "overrides": [*SHARES, *(no_tokens("2", (s, s + 1)) for s in (20, 50, 80))]},
        "never had tokens": {**BF16_ROUTER, "overrides": [*SHARES, no_tokens("3", (None, None))]},
        "fades out": {**BF16_ROUTER, "overrides": [
            *SHARES, tokens("2", 0.1, (20, 40)), tokens("2", 0.02, (40, 60)), no_tokens("2", (60, None))]},
        "a layer that is dropped at random": {"modules": LAYERS, "overrides": [
            Override(module="net.3.mix", slots={"numel": 0}, steps=(60, None), actual=None)]},
    },
    "F122": {
        "quantization noise": {"steps": compared(0.02, 0.05)},
        "logits that are far apart and say the same": {"steps": compared(0.2, 0.001)},
        "further away bit by bit": {"steps": {
            step: compared(0.0018 * (step / 20) ** 1.2, 0.004)[40] for step in range(20, 100, 20)}},
        "one comparison of three": {"steps": {**compared(0.01, 0.01), 40: compared(0.4, 0.7)[40]}},
    },
    "F124": {
        "the same outliers in every layer": {"modules": LAYERS, "overrides": [
            Override(gemm="fprop", tensor="input", slots=wide(11.0))]},
        "one layer with outliers": {"modules": LAYERS, "overrides": [
            Override(module="net.5.mix", gemm="fprop", tensor="input", slots=wide(12.0))]},
        "a slight growth": {"modules": LAYERS, "overrides": growing(0.6)},
    },
    "F126": {
        "the first descent": {"steps": scales(lambda step: 65536.0 / 2 ** min(step, 9))},
        "a scale that grows and is taken back": {"steps": scales(lambda step: 1024.0 * (2 if step % 20 > 10 else 1))},
    },
    "F127": {
        "a start without warm-up": {"steps": losses(lambda step: 5.5 + 4 * step * math.exp(-step / 2) - 0.02 * step)},
        "a hump that takes the window": {"steps": losses(
            lambda step: 5.5 + 2 * math.exp(-(((step - 12) / 6) ** 2)) - 0.03 * step + 0.2 * (-1) ** step)},
        "a loss that stays": {"steps": losses(lambda step: 2.8 + 0.05 * (-1) ** step)},
        "large updates of a large learning rate": {"updates": enlarged(0.3)},
        "a weight that starts from zero": {
            "updates": lambda step, module: {"sum_weight2": 8192.0 * (3e-4 * step) ** 2},
        },
        "second moments that are 0 and do no harm": {"updates": enlarged(0.1, num_moment_zero=400)},
    },
    "F135": {
        "FP32 weights": {"updates": lambda step, module: {}},
        "FP32 weights behind a gate that starts from 0": {
            "updates": rounded(1.0, 0.0, dtype="float32", sum_spacing_log2=-34.0 * 8192),
        },
        "stochastic rounding": {"updates": rounded(0.97, 0.99)},
        "master weights in the state": {"updates": rounded(0.97, 0.03, keeps_precision=True)},
        "a learning rate that ends at 0": {"updates": lambda step, module: (
            rounded(0.1, 0.98)(step, CULPRIT) if step < 30 else
            {**rounded(1.0, 0.0)(step, CULPRIT), "sum_intended2": 8192 * 1e-5**2})},
        "a learning rate of 0": {"updates": rounded(1.0, 0.0, lr=0.0)},
        "sparse gradients under another formula": {
            "overrides": [Override(tensor="grad_weight", slots={"num_zero": lambda row: row["numel"] - 60})],
            "updates": rounded(0.0, 0.0, num_intended=None, num_lost=None, sum_intended2=None, sum_intended_update=None,
                               num_moved=60, num_grad=60)},
    },
}  # fmt: skip

"""F122: the trained weights give other logits in inference than in training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.parting import PartingLimits, parting, quiet_differences
from fp8debug.rules.reading.traces import percent

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: The cure where all logits differ by one factor.
_TEMPERATURE = (
    "divide the logits by the temperature in both paths, or in none, before they are compared and in the loss (an engine may"
    " return log-probabilities of logits that it has divided, as vLLM's processed_logprobs)"
)


@dataclass(frozen=True)
class InferenceDiffers(Rule, PartingLimits):
    """The weights give other logits in inference than in training, although the training loss looks fine.

    What it detects
        The logits of one batch by the training's own FP8 forward and by inference (the same modules in high precision, or a path
        of yours), compared by `watch.compare_inference(batch)`. Quantization noise alone moves logits by a few percent of
        their size; here the difference is a material part of it, and the predicted distributions differ; or it is
        suddenly many times what the comparisons before it showed. It stands only when no other rule has found the operand
        at fault, which then is the cause. Where both passes called modules of the same names, the first module is named
        whose own difference, given the input that it got, is at least own_share of the largest; and why: its weight, a
        scale, the error of a cast or GEMM in training or in inference, or tokens routed otherwise. Where many modules
        differ alike none is named; where none does, the first whose input differs is, as what differs lies before it
        (attention, a cache's scales, a norm). Where no input differs either, no class changes and the difference is the same at
        all comparisons, the logits differ by one factor (a temperature). Where the weights of most modules differ and move
        towards training's from one comparison to the next, it is information: inference has a moving average of them, or an
        earlier step's, as it may be meant; where they stand, the message says so. Where the logits differ by no more than noise,
        or do not last: other-precision, information: a module runs in FP8 in one path and in high precision in the other, while
        both run other modules in FP8 (a list of exceptions that matches other names than were meant). rounded-before-cast,
        information: both cast the weights to FP8, inference after an export in BF16, which changes codes near the ties; the
        difference grows as updates become smaller than BF16's spacing. other-cast, information: a module in FP8 in both has the
        same input and weight in both, and another result (another granularity or format, scales rounded to powers of two in one
        path alone). other-weight, a warning: a weight is not training's, beyond what a cast to FP8 or BF16 makes of it, while
        those of most modules are (one that is not synchronized; where all differ, inference may have an earlier step's or their
        average on purpose). other-input, a warning: all modules compute the same in both, the first ones from the same inputs,
        and then one gets an input that is further away than a cast to FP8 makes it: what lies before it differs. Both passes run
        in evaluation mode: dropout that is active where a trainer computes its log-probabilities is not seen.

    Why it matters
        Training learns around what is wrong in its own forward pass. The loss is fine, and the exported model is worse:
        trained in FP8 and served in BF16, or a policy whose rollouts run in another engine with weights out of step.

    Example
        Inference's logits differ from training's by 38 % of their variance since step 300 (KL 0.71 nats a token, 24 % of
        the tokens predict another class).

    Cure
        Compare weights and scales of both paths, dequantized (a weight that was not synchronised, a scale applied twice);
        serve in the recipe of the training; train the last steps in the precision of inference. `fp8debug verify RUN
        --inference N` measures what inference of the trained weights in BF16 and in FP8 costs.

    Thresholds
        - max_nmse 0.02: squared difference of the logits, their mean over classes removed, over their variance. No published
          basis: 0.00006 to 0.003 in small GPTs and SwiGLU nets under six recipes [measured, docs/lab/log.md]; 28.5 dB for one
          GEMM is 0.0014.
        - max_kl 0.01: nats a token; below, the difference does not show in what is predicted. No published basis: up to 0.0011
          in those healthy runs.
        - min_jump 10, jump_nmse 0.01, jump_kl 0.002: times the largest nmse of the comparisons before, at that nmse and KL at
          least. No published basis: twice the KL and three times the nmse of those healthy runs; a weight that was not
          synchronised multiplied the nmse by 300 from one comparison to the next [measured].
        - min_share 0.5: share of the comparisons since the first one that show it.
        - own_share 0.5: of the largest own difference. max_alike 0.5: share of the compared modules; where more differ that much,
          none is named. No published basis.
        - max_gain 0.05, max_shape 0.1: distance of a weight's or result's factor from 1 beyond which a scale is at fault;
          numerics.md, 4 (act beyond 5 %); and the share of its difference that is left without the factor. No published basis
          for the latter. max_factor_error 0.1: relative difference of the factors of weights that one fault scales. No published
          basis.
        - min_fp8_error 0.00025, max_fp8_error 0.004, max_rounded_gain 0.01: squared relative difference that rounding a weight to
          FP8 makes, 36 to 24 dB: E4M3 has 31.5 dB on Gaussian data and E5M2 25.5; and what it changes of the factor; numerics.md,
          4 (warn beyond 1 %). They choose among the causes in the message, and of other-input the input lies beyond max_fp8_error
          where those before it lie within max_exact_error. Seen in vllm #43694.
        - min_followed 0.5, min_toward 0.1, max_standing 0.5: of weights that differ in most modules, share of the elements of
          each that moved between two comparisons, of those that training moved, and median cosine of that way with the one to
          training's weight: weights follow training; the median share up to which they stand, as an average in BF16 does. No
          published basis; the cosine of 1,024 elements with independent ones is 0.03 (closed form). One comparison tells neither.
        - min_excess 2: times a module's error in the other pass from which on it is more than that of other tokens, 3 dB. No
          published basis.
        - max_exact_error 1e-5, min_low_error 1e-4: squared error of a result up to which its module runs in high precision
          (BF16's own is 2.7e-6), and from which on in FP8 (40 dB, where two operands in E4M3 leave 28.5 dB); and the difference
          up to which two weights are the same. numerics.md, 4. Seen in xtuner #2044.
        - min_bf16_error 1.4e-6, max_bf16_error 5.5e-6: of rounded-before-cast, the difference of all weights that both cast, 3 dB
          on either side of BF16's rounding, 55.6 dB; numerics.md, 4.
        - min_other_cast 0.01: of other-cast, relative difference of a module's errors in both paths; the input behind it differs
          by min_low_error to max_fp8_error. A result in FP32 in one and in BF16 in the other makes 0.003 (2.7e-6 of 0.001, closed
          form), another order of the sums less. Seen in prime-rl #3112.
        - max_factor_change 0.001: relative difference of nmse over two comparisons or more, up to which one factor of all logits
          makes it. Closed form: 0. Seen in ms-swift #8427.
        - Seen in verl #7519; numerics.md, 5 (trained in FP8, served in BF16).
    """

    code = "F122"
    name = "inference-differs"
    needs_training = True
    cure = "compare weights and scales of both paths, dequantized; serve in the training's recipe, or end training in inference's"

    max_nmse: float = 0.02
    max_kl: float = 0.01
    min_jump: float = 10.0
    jump_nmse: float = 0.01
    jump_kl: float = 0.002
    min_share: float = 0.5
    max_factor_change: float = 1e-3

    def needs(self, run: Run) -> str | None:
        """Ask for a comparison."""
        return None if run.has("inference_nmse") else "no inference was compared: call watch.compare_inference(batch)"

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding for the run."""
        columns = "step, inference_kl, inference_nmse, inference_flip_rate"
        query = f"SELECT {columns} FROM steps WHERE inference_nmse IS NOT NULL ORDER BY step"
        rows = run.sql(query).to_pylist()
        bad, threshold = [row for row in rows if self._exceeds(row, self.max_nmse, self.max_kl)], self.max_nmse
        if not bad:
            bad, threshold = self._after_jump(rows), self.jump_nmse
        if not bad or len(bad) < self.min_share * sum(row["step"] >= bad[0]["step"] for row in rows):
            yield from self._quiet(run)
            return
        worst = max(bad, key=lambda row: float(row["inference_nmse"]))
        message = (
            f"inference's logits differ from training's by {percent(worst['inference_nmse'])} of their variance at step"
            f" {worst['step']} (KL {worst['inference_kl']:.2g} nats a token, {percent(worst['inference_flip_rate'])} of the"
            " tokens predict another class)"
        )
        finding = Finding(code=self.code, name=self.name, severity=Severity.WARNING, steps=(bad[0]["step"], bad[-1]["step"]),
                          ranks=tuple(run.ranks), value=worst["inference_nmse"], threshold=threshold, message=message,
                          cure=self.cure)  # fmt: skip
        part = parting(run, {row["step"] for row in bad}, self)
        if part is None:
            yield finding
        elif part.is_behind and (factors := self._factors(bad)):
            yield replace(finding, message=f"{message}; {_told_of_factors(factors, len(bad))}", cure=_TEMPERATURE)
        elif part.module is None:
            finding = replace(finding, severity=Severity.INFO) if part.follows else finding
            yield replace(finding, message=f"{message}; {part.why}", cure=part.cure or self.cure)
        else:
            yield replace(finding, message=f"{message}; the first module that parts is {part.module}: {part.why}",
                          module=part.module, gemm="fprop", tensor=part.tensor, call_index=part.place,
                          cure=part.cure or self.cure)  # fmt: skip

    def _quiet(self, run: Run) -> Iterable[Finding]:
        """Return what the two paths do otherwise while their logits hardly differ: as information, but for a weight."""
        steps = run.sql("SELECT min(step) AS first, max(step) AS last FROM events WHERE kind = 'inference'").to_pylist()[0]
        for name, part in quiet_differences(run, self.min_share, self):
            severity, message = Severity.INFO, part.why
            if name in ("other-weight", "other-input"):
                severity, message = Severity.WARNING, f"{part.module} in inference: {part.why}; the logits hardly show it"
            yield Finding(code=self.code, name=name, severity=severity, steps=(steps["first"], steps["last"]),
                          ranks=tuple(run.ranks), message=message, module=part.module, gemm="fprop", tensor=part.tensor,
                          call_index=part.place, cure=part.cure or self.cure)  # fmt: skip

    @staticmethod
    def _exceeds(row: dict[str, Any], nmse: float, kl: float) -> bool:
        return bool(row["inference_nmse"] > nmse and row["inference_kl"] > kl)

    def _factors(self, rows: Sequence[dict[str, Any]]) -> list[float]:
        """Return the factors of which one may make inference's logits of training's; none where they differ otherwise.

        One factor k on all logits leaves (k - 1)^2 of their variance, whatever they are, and no other class.
        """
        sizes = [float(row["inference_nmse"]) for row in rows]
        is_one = len(rows) > 1 and max(sizes) - min(sizes) <= self.max_factor_change * max(sizes)
        if not is_one or any(row["inference_flip_rate"] for row in rows):
            return []
        return [factor for factor in (1 + math.sqrt(sizes[0]), 1 - math.sqrt(sizes[0])) if factor > 0]

    def _after_jump(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the comparisons far beyond all those before the first such one."""
        largest = math.inf
        for place, row in enumerate(rows):
            limit = max(self.jump_nmse, self.min_jump * largest)
            if self._exceeds(row, limit, self.jump_kl):
                return [later for later in rows[place:] if self._exceeds(later, limit, self.jump_kl)]
            largest = row["inference_nmse"] if math.isinf(largest) else max(largest, row["inference_nmse"])
        return []

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand only when no operand is known to be at fault by then."""
        return not any(
            RULES.get(f.code).is_harmful and f.module and f.severity > Severity.INFO and f.steps[0] <= finding.steps[1]
            for f in others
        )


def _told_of_factors(factors: Sequence[float], num: int) -> str:
    """Return in words that inference's logits are training's times a factor."""
    sizes = " or ".join(f"{factor:.3g}" for factor in factors)
    return (
        f"all modules compute the same in both, the difference is the same at {num} comparisons and no class changes: inference's"
        f" logits are {sizes} times training's, as of a temperature that one path divides by and the other does not"
    )


RULES.add(InferenceDiffers.code, InferenceDiffers())

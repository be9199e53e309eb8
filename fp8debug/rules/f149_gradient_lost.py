"""F149: the optimizer steps with another gradient than the backward passes gave: a part of them, nothing, or a multiple."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity, accuses_other_modules
from fp8debug.rules.reading.census import role_of
from fp8debug.rules.reading.model_structure import share_input
from fp8debug.rules.reading.optimizer_steps import NOT_RECORDED, ROUNDED_TO_ZERO
from fp8debug.rules.reading.outside_scales import applied_outside
from fp8debug.rules.reading.traces import ElsewhereLimits, percent
from fp8debug.types import Gemm, not_observed, not_observed_code

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_ABSENT, _EMPTY, _SINCE, _LAST, _FIRST, _SCALED, _KEPT, _UNEQUAL, _ONE_USE, _MASKED, _NEVER, _JOINED, _USES, _UNHELD = (
    *("absent", "empty", "since", "last", "first", "scaled", "kept", "unequal", "one use", "masked", "never", "joined", "uses"),
    "unheld",
)
_BEYOND, _AVERAGED, _OWN_FACTOR, _AFTER, _ROUNDED, _CUT = "beyond", "averaged", "own factor", "after", "rounded", "cut"
_EARLY, _ZEROED = "early", "zeroed"
#: In the order in which they are looked for: the part that the optimizer gets, and its columns.
_PARTS = ((_SINCE, "sum_since2", "sum_given_since"), (_LAST, "sum_last2", "sum_given_last"),
          (_FIRST, "sum_first2", "sum_given_first"))  # fmt: skip
_NAMES = {_ABSENT: "gradient-absent", _EMPTY: "gradient-lost", _SINCE: "gradient-emptied", _LAST: "gradient-overwritten",
          _FIRST: "gradient-of-first-microbatch", _SCALED: "gradient-scaled-at-step",
          _KEPT: "gradient-kept", _UNEQUAL: "gradient-weighted", _ONE_USE: "gradient-of-one-use",
          _MASKED: "gradient-in-part", _NEVER: "gradient-never-computed",
          _JOINED: "gradient-joined", _USES: "gradient-of-uses-weighted", _UNHELD: "gradient-without-optimizer",
          _BEYOND: "gradient-out-of-size", _AVERAGED: "gradient-averaged-twice", _OWN_FACTOR: "gradient-of-another-factor",
          _AFTER: "gradient-changed-after-dgrad", _ROUNDED: ROUNDED_TO_ZERO,
          _CUT: "gradient-cut-off", _EARLY: "gradient-clipped-early", _ZEROED: "gradient-zeroed-at-steps"}  # fmt: skip
#: The GEMMs that an event names where wgrad did not run: alone, or as neither of the backward pass did.
_WITHOUT_WGRAD = ((Gemm.WGRAD,), (Gemm.DGRAD, Gemm.WGRAD))
#: Relative difference of sums over the same columns that FP32 parts: of squares that are added in another order.
_SAME = 1e-6
#: Relative difference of sums over a weight that did not move: of FP64 sums, with a wide margin.
_EQUAL = 1e-9
_NOT_A_CAST = "; no cast changes it"
_CURES = {
    _ABSENT: "check where wgrad writes (a main_grad that the optimizer does not read, a detached or copied parameter)",
    _NEVER: "check whether the backward pass computes wgrad for this weight and where it writes it (a grouped or delayed wgrad"
    " that nobody runs); freeze the weight (requires_grad False) where none is meant",
    _UNHELD: "make the optimizer of the parameters that the model has when it trains (sharding, a conversion or to_empty replaces"
    " them), and check its groups; freeze the weight (requires_grad False) where none is meant",
    _CUT: "look at what reads this module's output: a detach, a no_grad block, a cached value; none if the weight is frozen on"
    " purpose",
    _EMPTY: "check what empties weight.grad or main_grad before the optimizer reads it (zero_grad ahead of step), and whether"
    " the fused backward writes into the buffer that the optimizer reads",
    _SINCE: "empty the gradient (zero_grad, zero_grad_buffer) once a step, after the optimizer's step and before the first"
    " microbatch",
    _LAST: "make wgrad add to the accumulated gradient in every microbatch but the first (accumulate, beta = 1,"
    " overwrite_main_grad off)",
    _UNEQUAL: "check what touches weight.grad between the two microbatches: a hook, a scaler or a reduction over one rank that"
    " multiplies what is there already",
    _EARLY: "clip once a step, after the last backward pass (and after scaler.unscale_) and before the optimizer's step; a"
    " function that computes the loss alone runs before the backward pass",
    _ZEROED: "compute the norm that gradients are clipped to in FP32, squares and their sum too: in FP16 the square of a norm"
    " beyond 255 is Inf, and a factor of 1 / Inf is 0; look at what else multiplies gradients by 0 (none if such steps are left"
    " out on purpose)",
    _USES: "check what splits or delays the weight gradient of a module that is called several times (a pipeline's separate wgrad"
    " pass, a custom autograd function): each use has to be added once; without the split autograd does it",
    _ONE_USE: "add the gradient of each use of the weight (accumulate into weight.grad where it is set, as by a delayed wgrad)",
    _KEPT: "empty the gradient after each optimizer step (zero_grad, which a wrapper or a condition may skip), and a"
    " buffer that gradients share with gathered weights or an evaluation before the first microbatch",
    _FIRST: "check what gates the accumulation (a flag that is set once a step, no_sync); later microbatches have to be added",
    _MASKED: "if no mask or hook freezes these elements on purpose, check what writes weight.grad after wgrad: shards that are"
    " not gathered, a buffer that is filled in part",
    _ROUNDED: "reduce and keep gradients in BF16 or FP32, or in FP8 with a scale per block (a compressed reduction, a buffer in"
    " FP8); none if the program keeps the largest gradients alone on purpose",
    _JOINED: "if neither a loss of the weights themselves, gradient noise nor a factor per layer is meant, check what else writes"
    " weight.grad before the step: a placeholder or shared buffer that is not zeroed and is added to a fused wgrad's main_grad",
    _BEYOND: "check the kernels between wgrad's GEMM and weight.grad (an epilogue, a reduction, unpadding: columns or rows that"
    " none of them writes hold what was in memory) against another backend; record with every=1 until it is gone",
    _AVERAGED: "check what divides or multiplies these gradients by the number of microbatches: the loss is averaged for all of"
    " them, and a hook, a fused accumulation or a second optimizer's own averaging does it once more for these, or undoes it",
    _OWN_FACTOR: "none if a factor for these weights is meant (a multiplier of a layer or a group), else check what multiplies"
    " their gradients between the last backward pass and the step (an average over fewer ranks than the others', as of experts)",
    _AFTER: "check what reads and writes dgrad's result after its GEMM (an epilogue, unpadding, rows that no kernel writes) and"
    " the backward pass of what lies between (a norm, attention, a residual) against another backend; record with every=1 until"
    " it is gone",
    _SCALED: "check what multiplies the gradient between the last backward pass and the step: a division by the number of"
    " microbatches or ranks that is undone twice, a reduction over one rank that adds the buffer to itself",
}
#: Words of the kinds that have no figure, between "the optimizer" and "of" a module.
_TEXTS = {
    _EMPTY: "gets a weight.grad of zeros, though wgrad gave a gradient, for the weight",
    _ABSENT: "gets no weight.grad, though wgrad gave a gradient, and does not move the weight",
    _NEVER: "gets no weight.grad, as no wgrad ran, and does not move the weight",
    _UNHELD: "never steps with a parameter to which wgrad gave a gradient, and which nothing moves: the weight",
    _CUT: "never gets a gradient, as no GEMM of a backward pass ran, while the weights beside it and those of the same role in"
    " other layers are trained, for the weight",
}


@dataclass(frozen=True)
class GradientLost(Rule):
    """The optimizer does not get the gradient of its microbatches: one of them alone, none, or a multiple.

    What it detects
        weight.grad when a torch optimizer steps, against the gradients that wgrad gave in each backward pass of the
        step, on sampled columns: gradient-emptied (it is what came after weight.grad was found empty once more:
        zero_grad between microbatches, a buffer emptied too early), gradient-overwritten (the last pass alone),
        gradient-of-first-microbatch, gradient-kept (it still holds that of earlier steps when a step begins, though
        the same optimizer stepped just before, and no wgrad of the step went unseen), gradient-lost (all zeros, where
        wgrad was not), gradient-absent (None, and the weight stands still while others move), gradient-never-computed
        (the same where no wgrad ran for a weight that requires a gradient), gradient-cut-off, information
        (an optimizer holds the weight, no GEMM of its backward pass ran at any sampled step, and weights of the same block are
        trained, as are those of the same role in other layers: a detach, or a weight that is frozen), gradient-without-optimizer
        (no step of an optimizer has the weight, which has a gradient and stands to the last digit, while other weights are
        updated; information where none of these runs before it, as of a program that trains its last layers alone),
        gradient-weighted (another multiple of the first of two passes than of the second, where nothing emptied
        weight.grad between them: a program that does may join the gradients of two losses as it likes, and one that
        clips after each microbatch clips the first one's twice, by another factor at each step), gradient-clipped-early (such a
        factor for the first of two passes, while the second arrives as wgrad gave it), gradient-zeroed-at-steps (all zeros for
        all weights at the steps with the largest gradients, where wgrad's results are finite: a norm that is Inf makes a
        clipping factor of 0), gradient-of-one-use
        (of a weight that modules share and that each of them multiplies once a step, it is as large as one use's, and
        not as their sum; or of a module that is called several times in the only pass, it is one call's),
        gradient-of-uses-weighted (of a module that is called twice in the only pass, it is another multiple of one
        call's gradient than of the other's: one is counted twice, or scaled), gradient-in-part (zeros where wgrad gave
        none, as a mask leaves them, which is information), gradient-rounded-to-zero (such zeros, while what is left
        holds most of the square of wgrad's result: the small elements became 0, as in FP8 without a scale; with one
        microbatch), gradient-scaled-at-step (the same multiple above 1 of the sum in all modules), gradient-joined,
        information: in a run of one rank, weight.grad has more than wgrad gave, in several modules that share no
        weight and by different factors: a regularizer, a factor per layer, or a buffer that was added to it. A common
        factor below 1 is clipping, averaging or the inverse of a loss scale, and no finding; where most modules have one
        above 1 and others none, it is that of most. Directions are compared, so that a factor hides nothing.
        Where several ranks add to a gradient, or something else does (an embedding that is tied to a head, noise),
        nothing is concluded; nor where an optimizer steps on copies of its own; nor of multiples where wgrad's result
        is multiplied after its GEMM, which is where passes are read. A pass before another optimizer's step does not
        count: it is of that one's loss (a generator's gradients of the discriminator); nor does one of
        torch.autograd.grad, or one after which the weight was changed before the next (an ascent step).

    Why it matters
        The run trains on a part of its batch, or not at all. Nothing is NaN, every cast is clean, the loss is worse or noisier;
        FP8 is suspected because its wgrad is fused with the accumulation.

    Example
        blocks.1.down: the optimizer steps with the gradient of the passes after weight.grad was emptied, 49 % of the sum of all
        by norm, at 5 sampled steps from step 0 on.

    Cure
        Empty gradients once a step, after the optimizer's step; make wgrad add in every microbatch but the first. No cast
        changes it.

    Thresholds
        - max_part_nmse 1e-4: of weight.grad against a part of the sum, after the best common factor: 40 dB, BF16's own
          rounding is 55 dB.
        - min_sum_nmse 1e-3: the same against the whole sum: 30 dB; of 500 equal, independent microbatches one is 27 dB.
        - min_gain 1.05, max_spread 0.01, min_share 0.9: of gradient-scaled-at-step: factor, its spread over modules and steps,
          share of the modules that show it. No published basis; clipping is at most 1.
        - max_spread and min_empty_steps too of gradient-averaged-twice and gradient-of-another-factor: a module's factor over the
          median of all modules' at a step, which is the same at its last sampled steps, all that have another factor than 1 (by
          min_gain), and is the number of microbatches or its inverse. Clipping by module has another factor at each step.
        - min_nonzero_rate 0.5: of wgrad's result, where weight.grad has no element but 0 on another sample of its elements; and
          share of zeros of gradient-rounded-to-zero, in two modules or more. No published basis.
        - min_kept_ratio 10: of gradient-kept at a single sampled step, norm of weight.grad there over the median of the
          others: what it held was no gradient (a buffer that is shared with weights). No published basis.
        - min_steps 2: sampled steps that show it, all in a shorter run; min_empty_steps 3, the last ones, of gradient-lost
          with one microbatch and of gradient-absent. No published basis.
        - max_use_error 0.15, min_use_share 0.5, min_use_steps 3: of gradient-of-one-use, relative distance of the squares of
          weight.grad and of one use's gradient at every sampled step, after the factor that other weights' gradients have (both
          are of samples of the elements, up to 6 % apart [measured]); square of another use over it; and sampled steps at
          which it is so large. The square of a sum is 1 + s + 2 c sqrt(s) times the use's, at share s and cosine c of the
          two: 1.5 or more unless they oppose each other.
        - min_joined_gain 1.25: of gradient-joined, with one gradient a step, RMS of weight.grad over that of wgrad's result, in
          two modules at min_use_steps sampled steps (all in a shorter run), and the largest such ratio of a step over the
          smallest. Both are of samples of the elements, 3 % apart in RMS [measured]; of queries and keys, whose gradients are
          in few rows, 0.4 to 1.4 times [measured, examples/demo.py]. The gain is therefore asked for beyond the
          largest such ratio below 1, inverted, of any module and step. No published basis.
        - min_size_ratio 1000: of gradient-out-of-size, RMS of weight.grad over that of wgrad's result in the only pass, against
          the median of all modules at that step, and against the module's own at min_empty_steps sampled steps or more. Both are
          of samples: a gradient in one row of many can lie sqrt(elements / 8192) apart by the sample alone, 110 times of 1e8.
          No published basis.
        - max_usual_ratio 10: of gradient-changed-after-dgrad, RMS of grad_output and of dgrad's result of the modules behind the
          place, at most, over their median; min_size_ratio times theirs is that of the modules before it, at half of the sampled
          steps or fewer, of min_empty_steps or more, and not at the last ones alone. No published basis.
        - gradient-without-optimizer: min_empty_steps sampled steps; the sums of the weight differ by 1e-9 of their size at most.
        - min_empty_steps, max_spread too of gradient-clipped-early: sampled steps at which the first of two passes has a smaller
          factor, and distance of the second's from 1 there, and of the sum's at the others. Closed form: 0; clipping after each
          pass leaves it at 1 only where the sum lies within the limit that the first pass exceeded. Seen in nano-world-model #22.
        - min_empty_steps too of gradient-zeroed-at-steps: sampled steps without zeros; at fewer than min_steps with zeros it is
          information. No published basis. Size is the root of the sum of the squares of wgrad's results. Seen in fairscale #263.
        - min_part_rate 0.05, max_zero_rate 0.001: of gradient-in-part, share of zeros in weight.grad, and in wgrad's result at
          the same step. No published basis; it is information, as a program may mask gradients on purpose.
        - max_lost_square 0.5: of gradient-rounded-to-zero, share of the square of wgrad's result that is lost over the share of
          the elements that are: 1 where a mask takes them whatever they are. Closed form for Gaussian elements: 0.58 where the
          smaller 88 % are 0, 0.14 where half are, less of heavier tails and where others are rounded up.
        - max_unit_gain 2: gain of codes over their tensor (or its inverse) beyond which a scale_inv of 1 is not the tensor's own,
          so that wgrad's result is multiplied after its GEMM; as in F113.
        - Seen in TransformerEngine #2769 and #3437, Megatron-LM #6660, DeepSpeed #7839, pytorch #180952 and
          #149205; ROCm/TransformerEngine #580.
    """

    code = "F149"
    name = "gradient-lost"
    needs_training = True
    columns = ()
    cure = _CURES[_SINCE] + _NOT_A_CAST
    needs_fp8 = False

    max_part_nmse: float = 1e-4
    min_sum_nmse: float = 1e-3
    min_gain: float = 1.05
    max_spread: float = 0.01
    min_share: float = 0.9
    min_kept_ratio: float = 10.0
    min_nonzero_rate: float = 0.5
    min_steps: int = 2
    min_empty_steps: int = 3
    max_use_error: float = 0.15
    min_use_share: float = 0.5
    min_use_steps: int = 3
    min_part_rate: float = 0.05
    max_zero_rate: float = 0.001
    max_lost_square: float = 0.5
    min_joined_gain: float = 1.25
    min_size_ratio: float = 1000.0
    max_usual_ratio: float = 10.0
    max_unit_gain: float = ElsewhereLimits.max_unit_gain

    def needs(self, run: Run) -> str | None:
        """Return why nothing can be judged: no optimizer step was recorded."""
        return None if run.sql("SELECT step FROM raw_updates LIMIT 1").num_rows else NOT_RECORDED

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding for each way in which gradients are lost."""
        query = (
            "SELECT step, module, sum_before2 AS before2, sum_given2 AS given2,"
            " sum_passes2 AS passes2, sum_given_passes AS given_passes, sum_since2,"
            " sum_given_since, sum_last2, sum_given_last, sum_first2, sum_given_first FROM updates"
            " WHERE sum_given2 IS NOT NULL ORDER BY step, module"
        )
        kept = [row for row in run.sql(query).to_pylist() if math.isfinite(row["given2"])]
        rows = [row for row in kept if row["passes2"] and math.isfinite(row["passes2"])]
        places = {m["fqn"]: m["call_index"] or 0 for m in run.modules}
        found: dict[str, dict[str, list[dict[str, Any]]]] = {}
        outside = {row["module"] for row in applied_outside(run, self.max_unit_gain) if row["gemm"] == Gemm.WGRAD.value}
        for row in rows:
            kind = self._kind(row)
            if kind is not None and not (kind == _UNEQUAL and row["module"] in outside):
                found.setdefault(kind, {}).setdefault(row["module"], []).append(row)
        num_steps: dict[str, int] = {}
        for row in rows:
            num_steps[row["module"]] = num_steps.get(row["module"], 0) + 1
        unseen = _without_some_wgrads(run, {row["module"] for row in kept if row["before2"]})
        for row in kept:
            if row["before2"] and (row["step"], row["module"]) not in unseen:
                found.setdefault(_KEPT, {}).setdefault(row["module"], []).append(row)
                num_steps.setdefault(row["module"], self.min_steps)
        large = self._far_larger(run, found.get(_KEPT, {}))
        for kind in (_EMPTY, _SINCE, _LAST, _FIRST, _KEPT, _UNEQUAL, _USES, _ONE_USE):
            shown = {
                module: ill
                for module, ill in found.get(kind, {}).items()
                if (len(ill) >= min(self.min_steps, num_steps[module]) or (kind == _KEPT and module in large))
                and not (kind == _UNEQUAL and self._is_clipped(ill))
            }
            yield from self._finding(run, kind, shown, places)
        whole = {row["module"] for row in rows if self._is_scaled_sum(row)}
        early = {
            name: ill
            for name, ill in found.get(_UNEQUAL, {}).items()
            if name not in whole and self._is_clipped(ill) and self._keeps_the_last(ill)
        }
        yield from self._finding(run, _EARLY, early, places)
        known = {module for modules in found.values() for module in modules}
        yield from self._scaled(run, [row for row in rows if row["sum_since2"] is not None], places)
        with_parts = [row for row in rows if row["sum_since2"] is not None]
        yield from self._of_another_factor(run, with_parts, known | outside, places)
        yield from self._without(run, known, places)
        yield from self._cut_off(run, places)
        yield from self._unheld(run, places)
        yield from self._of_one_use(run, known | outside, places)
        yield from self._joined(run, known | outside, places)
        yield from self._beyond(run, known | outside, places)
        yield from self._after_dgrad(run, places)

    def _far_larger(self, run: Run, kept: Mapping[str, Sequence[Mapping[str, Any]]]) -> set[str]:
        """Return the modules whose weight.grad held far more when a step began than their gradients have: no gradient at all."""
        if not kept:
            return set()
        query = "SELECT step, module, sum_grad2 AS square FROM updates WHERE sum_grad2 > 0 ORDER BY step, module"
        usual: dict[str, list[tuple[int, float]]] = {}
        for row in run.sql(query).to_pylist():
            usual.setdefault(row["module"], []).append((row["step"], row["square"]))
        found = set()
        for module, ill in kept.items():
            steps = {row["step"] for row in ill}
            others = [square for step, square in usual.get(module, ()) if step not in steps]
            now = [square for step, square in usual.get(module, ()) if step in steps]
            if len(others) >= self.min_steps and now and max(now) >= self.min_kept_ratio**2 * median(others):
                found.add(module)
        return found

    def _of_one_use(self, run: Run, known: set[str], places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of shared weights whose gradient is that of one of the modules alone."""
        groups = _shared_weights(run)
        if not groups:
            return
        given, made = _given(run), _made(run)
        shared = {name for names in groups.values() for name in names}
        for holder, names in groups.items():
            steps = [step for step in given if holder in given[step] and holder not in known]
            uses = [self._uses(given[step], made.get(step, {}), holder, names, shared) for step in steps]
            for name in names:
                weighs = [step for step, use in zip(steps, uses, strict=True) if self._counts(use, name)]
                if len(weighs) >= self.min_use_steps and all(abs(u.get(name, 0.0) - 1) <= self.max_use_error for u in uses):
                    rows = [{"step": step, "use": name, "others": [other for other in names if other != name]} for step in steps]
                    yield from self._finding(run, _ONE_USE, {holder: rows}, places)
                    break

    def _joined(self, run: Run, known: set[str], places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of gradients that have more than wgrad gave, by factors that no scaling of all has.

        Squares add where what joins is independent of the gradient; a factor of all gradients is the same in each. What joins
        makes no gradient smaller: one that is, by more than all are, shows how far two samples of one gradient can lie apart.
        """
        if (run.manifest.get("world_size") or 1) > 1 or len(run.ranks) > 1:
            return
        shown: dict[str, list[dict[str, Any]]] = {}
        by_step = _ratios(run, known)
        least = self.min_joined_gain * max(map(_shortfall, by_step.values()), default=1.0)
        for step, ratios in by_step.items():
            if len(ratios) < 2 or max(ratios.values()) < self.min_joined_gain * min(ratios.values()):
                continue
            for name, ratio in ratios.items():
                if ratio >= least:
                    shown.setdefault(name, []).append({"step": step, "ratio": ratio})
        needed = min(self.min_use_steps, len(by_step))
        shown = {name: rows for name, rows in shown.items() if len(rows) >= needed}
        if len(shown) > 1:
            yield from self._finding(run, _JOINED, shown, places)

    def _beyond(self, run: Run, known: set[str], places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of gradients that are out of all proportion to wgrad's result, at single steps."""
        by_step = _ratios(run, known)
        by_module: dict[str, list[float]] = {}
        for ratios in by_step.values():
            for name, ratio in ratios.items():
                by_module.setdefault(name, []).append(ratio)
        usual = {name: median(own) for name, own in by_module.items() if len(own) >= self.min_empty_steps}
        shown: dict[str, list[dict[str, Any]]] = {}
        for step, ratios in by_step.items():
            middle = median(ratios.values()) if len(ratios) > 1 else math.inf
            for name, ratio in ratios.items():
                if name in usual and ratio >= self.min_size_ratio * max(middle, usual[name]):
                    shown.setdefault(name, []).append({"step": step, "ratio": ratio})
        yield from self._finding(run, _BEYOND, dict(sorted(shown.items(), key=lambda pair: pair[1][0]["step"])), places)

    def _after_dgrad(self, run: Run, places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of gradients that are out of size behind a dgrad whose own result is not, at single steps."""
        shown: dict[str, list[dict[str, Any]]] = {}
        by_step = _gradient_ratios(run, self.min_size_ratio, self.min_empty_steps)
        for step, ratios in by_step.items():
            large = [name for name, (given, _) in ratios.items() if given >= self.min_size_ratio]
            others = [name for name in ratios if name not in large]
            if not large or not others:
                continue
            last = min(others, key=lambda name: places.get(name, 0))
            before = max(large, key=lambda name: places.get(name, 0))
            is_usual = all(max(ratios[name]) <= self.max_usual_ratio for name in others)
            if is_usual and places.get(before, 0) < places.get(last, 0):
                shown.setdefault(last, []).append({"step": step, "before": before, "ratio": ratios[before][0]})
        steps = list(by_step)
        for name, rows in shown.items():
            ill = {row["step"] for row in rows}
            comes_back = any(step not in ill for step in steps[steps.index(rows[0]["step"]) :])
            if comes_back and 2 * len(ill) <= len(steps):
                width = next((m.get("in_features") for m in run.modules if m["fqn"] == name), None)
                alike = [
                    m["fqn"] for m in run.modules if m.get("in_features") == width and m["fqn"] in places and m["fqn"] != name
                ]
                same = [other for other in alike if share_input(run, name, other)]
                row = rows[0]
                whose = f"the dgrad of {name}" + (f" (or of {', '.join(same)}, which read the same input)" if same else "")
                message = (
                    f"grad_output of {row['before']} and of what lies before it is {row['ratio']:.2g} times its usual size at"
                    f" step {row['step']}, as at {len(ill)} of {len(steps)} sampled steps, while {whose} and of what lies behind"
                    " gave its usual result: it was changed after the GEMM"
                )
                for module in (name, *same):
                    yield Finding(code=self.code, name=_NAMES[_AFTER], severity=Severity.WARNING, module=module, gemm="dgrad",
                                  tensor="grad_input", steps=(row["step"], rows[-1]["step"]), ranks=tuple(run.ranks),
                                  value=row["ratio"], threshold=self.min_size_ratio, message=message,
                                  cure=_CURES[_AFTER] + _NOT_A_CAST, call_index=places.get(module, 0))  # fmt: skip

    def _counts(self, use: Mapping[str, float], name: str) -> bool:
        """Return whether another use's gradient is large enough to tell whether it is in the sum."""
        return max((square for module, square in use.items() if module != name), default=0.0) >= self.min_use_share

    def _uses(
        self, given: Mapping[str, float], made: Mapping[str, float], holder: str, names: Sequence[str], shared: set[str]
    ) -> dict[str, float]:
        """Return the squares of the uses' gradients over that of weight.grad, after the factor of the other weights."""
        factors = [given[name] / made[name] for name in given if name not in shared and made.get(name)]
        factor = median(factors) if factors else 1.0
        return {name: factor * made[name] / given[holder] for name in names if made.get(name)}

    def _kind(self, row: Mapping[str, Any]) -> str | None:
        """Return which part of the sum a gradient is; None for the sum, or what nothing explains."""
        if row["given2"] == 0:
            return _EMPTY
        if _nmse(row["given2"], row["passes2"], row["given_passes"]) <= self.min_sum_nmse:
            return None
        has_one_pass = row["sum_since2"] is None
        for kind, square, product in _PARTS:
            if row[square] and row[product] > 0 and _nmse(row["given2"], row[square], row[product]) < self.max_part_nmse:
                return _ONE_USE if has_one_pass else kind
        if has_one_pass:
            return _USES if self._are_unequal(row) else None
        if not math.isclose(row["sum_since2"] or 0.0, row["passes2"], rel_tol=_SAME):
            return None
        return _UNEQUAL if self._are_unequal(row) else None

    def _are_unequal(self, row: Mapping[str, Any]) -> bool:
        """Return whether a gradient is a sum of two with another factor for each."""
        factors = self._factors(row)
        return factors is not None and abs(factors[0] / factors[1] - 1) > self.min_gain - 1

    def _factors(self, row: Mapping[str, Any]) -> tuple[float, float] | None:
        """Return a and b where a gradient is a times that of the first of two passes, or uses, and b times that of the second.

        Of two, first . last follows from the square of their sum. None where it is no such sum, or there are more passes.
        """
        x2, y2, xg, yg = (row[name] for name in ("sum_first2", "sum_last2", "sum_given_first", "sum_given_last"))
        if abs(xg + yg - row["given_passes"]) > _SAME * math.sqrt(row["given2"] * row["passes2"]):
            return None
        xy = (row["passes2"] - x2 - y2) / 2
        det = x2 * y2 - xy * xy
        if det <= self.min_sum_nmse * x2 * y2:
            return None
        a, b = (xg * y2 - yg * xy) / det, (yg * x2 - xg * xy) / det
        left = 1 - (a * xg + b * yg) / row["given2"]
        return (a, b) if left < self.max_part_nmse and min(a, b) > 0 else None

    def _is_clipped(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the first of two passes has a smaller factor at each step, and another one at different steps.

        A program that clips after each microbatch clips the first one's gradient once more, by its size: no factor of a hook or a
        scaler is another one at each step.
        """
        factors = [pair[0] / pair[1] for pair in map(self._factors, rows) if pair is not None]
        return len(factors) > 1 and max(factors) < 1 and max(factors) >= self.min_gain * min(factors)

    def _keeps_the_last(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the second of two passes arrives as wgrad gave it at each step, which no clipping of the sum left."""
        factors = [pair[1] for pair in map(self._factors, rows) if pair is not None]
        return len(factors) >= self.min_empty_steps and all(abs(factor - 1) <= self.max_spread for factor in factors)

    def _is_scaled_sum(self, row: Mapping[str, Any]) -> bool:
        """Return whether a gradient is the sum of its passes by another factor than 1."""
        is_sum = _nmse(row["given2"], row["passes2"], row["given_passes"]) <= self.min_sum_nmse
        return is_sum and abs(row["given_passes"] / row["passes2"] - 1) > self.max_spread

    def _scaled(self, run: Run, rows: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the finding of gradients that are the same multiple of their sums in all modules and steps."""
        sums = [
            {**row, "gain": row["given_passes"] / row["passes2"]}
            for row in rows
            if _nmse(row["given2"], row["passes2"], row["given_passes"]) <= self.min_sum_nmse
        ]
        if len(sums) < self.min_share * len(rows) or len({row["step"] for row in sums}) < self.min_steps:
            return
        middle = median(row["gain"] for row in sums)
        alike = [row for row in sums if abs(row["gain"] - middle) <= self.max_spread * middle]
        if middle < self.min_gain or len(alike) < max(2, self.min_share * len(rows)):
            return
        shown: dict[str, list[dict[str, Any]]] = {}
        for row in alike:
            shown.setdefault(row["module"], []).append(row)
        yield from self._finding(run, _SCALED, shown, places)

    def _of_another_factor(
        self, run: Run, rows: Sequence[Mapping[str, Any]], known: set[str], places: Mapping[str, int]
    ) -> Iterable[Finding]:
        """Return the findings of modules whose gradient is the sum times a constant that most other modules do not have."""
        by_step: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            if _nmse(row["given2"], row["passes2"], row["given_passes"]) <= self.min_sum_nmse and row["given_passes"] > 0:
                by_step.setdefault(row["step"], []).append({**row, "gain": row["given_passes"] / row["passes2"]})
        ratios: dict[str, list[dict[str, Any]]] = {}
        for sums in by_step.values():
            middle = median(row["gain"] for row in sums)
            is_of_most = middle >= self.min_gain and any(abs(row["gain"] - 1) <= self.max_spread for row in sums)
            middle = 1.0 if is_of_most else middle  # nothing multiplies all gradients by more than 1 on purpose
            for row in sums:
                ratio = row["gain"] / middle
                ratios.setdefault(row["module"], []).append({**row, "ratio": ratio, "is_of_most": is_of_most})
        last = {name: _to_the_end(found, self._is_other) for name, found in ratios.items() if name not in known}
        own = {name: found for name, found in last.items() if self._is_constant(found)}
        is_of_most = all(row["is_of_most"] for found in own.values() for row in found)
        if not own or (2 * len(own) >= len(ratios) and not is_of_most):
            return
        nums = _num_passes(run, set(own))
        averaged = {name: found for name, found in own.items() if self._is_of_passes(found, nums)}
        for kind, shown in ((_AVERAGED, averaged), (_OWN_FACTOR, {n: found for n, found in own.items() if n not in averaged})):
            named = {
                name: [{**row, "num_passes": nums.get((row["step"], name), 0)} for row in found] for name, found in shown.items()
            }
            yield from self._finding(run, kind, named, places)

    def _is_other(self, row: Mapping[str, Any]) -> bool:
        """Return whether a module's factor is another one than that of most modules."""
        return bool(max(row["ratio"], 1 / row["ratio"]) >= self.min_gain)

    def _is_constant(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a module's factor over that of most modules is the same at enough sampled steps."""
        if len(rows) < self.min_empty_steps:
            return False
        middle = median(row["ratio"] for row in rows)
        return all(abs(row["ratio"] - middle) <= self.max_spread * middle for row in rows)

    def _is_of_passes(self, rows: Sequence[Mapping[str, Any]], nums: Mapping[tuple[int, str], int]) -> bool:
        """Return whether a factor is at every step the number of microbatches, or its inverse."""
        sizes = [(max(row["ratio"], 1 / row["ratio"]), nums.get((row["step"], row["module"]), 0)) for row in rows]
        return all(num > 1 and abs(size - num) <= self.max_spread * num for size, num in sizes)

    def _without(self, run: Run, known: set[str], places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of weights with one pass a step, or more, whose gradient never arrives though wgrad gave one."""
        query = (
            "SELECT u.module AS module, u.step AS step, u.num_grad IS NULL AS absent, g.sum_y2 AS passes2,"
            " u.num_moved AS num_moved, coalesce(u.num_grad, 0) AS num_grad, u.num_sampled AS num_sampled,"
            " g.zero_rate AS zero_rate, (u.sum_grad2 / u.num_sampled) / g.square AS kept_square FROM updates u JOIN"
            " (SELECT step, module, max(sum_y2) AS sum_y2, max(num_zero / numel) AS zero_rate,"
            " max(sum_y2 / numel) FILTER (num_tensors = 1) AS square FROM raw"
            " WHERE actual AND tensor = 'grad_weight' AND reference = 'shadow'"
            f" AND num_nan + num_inf = 0 AND num_zero <= {1 - self.min_nonzero_rate} * numel"
            " GROUP BY step, module) g ON g.step = u.step AND g.module = u.module"
            " WHERE g.sum_y2 > 0 AND coalesce(u.lr, 1) > 0 ORDER BY u.step, u.module"
        )
        rows = run.sql(query).to_pylist()
        moves = {row["module"] for row in rows if row["num_moved"]}
        modules: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            modules.setdefault(row["module"], []).append(row)
        rounded: set[str] = set()
        for kind in (_EMPTY, _ABSENT, _ROUNDED, _MASKED):
            shown = {}
            for module, seen in modules.items():
                ill = _to_the_end(seen, lambda row, kind=kind: self._has_none(row, kind))  # type: ignore[misc]  # bound now
                if module not in known | rounded and len(ill) >= self.min_empty_steps and (kind != _ABSENT or moves):
                    shown[module] = ill
            if kind == _ROUNDED:  # a reduction or a buffer is that of several weights; of one, its own dead channels
                shown = shown if len(shown) > 1 else {}
                rounded |= set(shown)
            yield from self._finding(run, kind, shown, places)
        yield from self._without_wgrad(run, known, places)
        yield from self._zeroed(run, rows, places)

    def _zeroed(self, run: Run, rows: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the finding of steps with the largest gradients, at which the optimizer gets zeros for all weights."""
        steps: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            if not row["absent"] and math.isfinite(row["passes2"]):
                steps.setdefault(row["step"], []).append(row)
        sizes = {step: math.sqrt(sum(row["passes2"] for row in found)) for step, found in steps.items()}
        empty = [step for step, found in steps.items() if not any(row["num_grad"] for row in found)]
        others = [step for step, found in steps.items() if all(row["num_grad"] for row in found)]
        if not empty or len(others) < self.min_empty_steps:
            return
        size, most = min(sizes[step] for step in empty), max(sizes[step] for step in others)
        if size <= most:
            return
        where = f"step {empty[0]}, the one of {len(steps)} sampled steps"
        if len(empty) > 1:
            where = f"{len(empty)} of {len(steps)} sampled steps from step {empty[0]} on, those"
        message = (
            f"the optimizer gets a weight.grad of zeros for all weights at {where} with the largest gradients: wgrad's results"
            f" are finite and of size {size:.3g} or more there, of {most:.3g} or less at the others. A clipping factor of 0 does"
            " that, as of a norm that is Inf"
        )
        severity = Severity.WARNING if len(empty) >= self.min_steps else Severity.INFO
        first = min({row["module"] for row in steps[empty[0]]}, key=lambda name: (places.get(name, 0), name))
        yield Finding(code=self.code, name=_NAMES[_ZEROED], severity=severity, module=first, gemm="wgrad",
                      tensor="grad_weight", steps=(empty[0], empty[-1]), ranks=tuple(run.ranks), value=size, threshold=most,
                      message=message, cure=_CURES[_ZEROED] + _NOT_A_CAST, call_index=places.get(first, 0))  # fmt: skip

    def _without_wgrad(self, run: Run, known: set[str], places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of weights that need a gradient, whose backward pass has no wgrad, and that never move."""
        told = " OR ".join(
            f"code = '{not_observed_code(*gemms)}' OR code IS NULL AND message LIKE '%{not_observed(*gemms)}%'"
            for gemms in _WITHOUT_WGRAD
        )
        query = (
            "SELECT module, step, num_moved FROM updates WHERE num_grad IS NULL AND coalesce(lr, 1) > 0 AND module IN"
            f" (SELECT module FROM events WHERE kind = 'skipped' AND ({told}))"
            " AND module NOT IN (SELECT module FROM raw WHERE gemm = 'wgrad' AND actual AND numel > 0) ORDER BY step, module"
        )
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in run.sql(query).to_pylist():
            rows.setdefault(row["module"], []).append(row)
        if rows and run.sql("SELECT step FROM updates WHERE num_moved > 0 LIMIT 1").num_rows:
            still = {name: own for name, own in rows.items() if name not in known and not any(row["num_moved"] for row in own)}
            shown = {name: own for name, own in still.items() if len(own) >= self.min_empty_steps}
            yield from self._finding(run, _NEVER, shown, places)

    def _cut_off(self, run: Run, places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of weights without any backward pass, whose neighbours and whose like in other layers have one."""
        query = (
            "SELECT module, step, num_grad, num_moved FROM updates WHERE coalesce(lr, 1) > 0 AND module NOT IN"
            " (SELECT module FROM events WHERE kind = 'skipped' AND module IS NOT NULL) ORDER BY step, module"
        )
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in run.sql(query).to_pylist():
            rows.setdefault(row["module"], []).append(row)
        trained = {name for name, own in rows.items() if any(row["num_moved"] for row in own)}
        blocks = {name.rpartition(".")[0] for name in trained}
        roles = {role_of(name) for name in trained}
        shown = {
            name: own
            for name, own in rows.items()
            if len(own) >= self.min_empty_steps
            and not any(row["num_grad"] is not None or row["num_moved"] for row in own)
            and name.rpartition(".")[0] in blocks
            and role_of(name) in roles
        }
        if shown:
            query = (
                "SELECT DISTINCT module, gemm FROM raw WHERE actual AND numel > 0 AND gemm IN ('fprop', 'dgrad', 'wgrad')"
                f" AND module IN ({', '.join('?' for _ in shown)})"
            )
            ran: dict[str, set[str]] = {}
            for row in run.sql(query, list(shown)).to_pylist():
                ran.setdefault(row["module"], set()).add(row["gemm"])
            alone = {name: own for name, own in shown.items() if ran.get(name) == {Gemm.FPROP.value}}
            yield from self._finding(run, _CUT, alone, places)

    def _unheld(self, run: Run, places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of weights that have gradients, that no optimizer's step had, and that stand while others move."""
        query = (
            "SELECT w.module AS module, g.step AS step FROM"
            " (SELECT module FROM raw WHERE reference = 'operand' AND gemm = 'fprop' AND tensor = 'weight' AND sum_x2 > 0"
            " GROUP BY module HAVING max(amax) = min(amax) AND max(numel) = min(numel)"
            f" AND max(sum_x2) - min(sum_x2) <= {_EQUAL} * max(sum_x2)"
            f" AND max(sum_x) - min(sum_x) <= {_EQUAL} * sqrt(max(sum_x2) * max(numel))) w JOIN"
            " (SELECT DISTINCT module, step FROM raw WHERE actual AND tensor = 'grad_weight' AND reference = 'shadow'"
            f" AND sum_y2 > 0 AND num_nan + num_inf = 0 AND num_zero <= {1 - self.min_nonzero_rate} * numel) g"
            " ON g.module = w.module WHERE w.module NOT IN (SELECT DISTINCT module FROM updates)"
            " ORDER BY w.module, g.step"
        )
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in run.sql(query).to_pylist():
            rows.setdefault(row["module"], []).append(row)
        moved = [row["module"] for row in run.sql("SELECT DISTINCT module FROM updates WHERE num_moved > 0").to_pylist()]
        shown = {name: own for name, own in rows.items() if len(own) >= self.min_empty_steps}
        if moved:
            first = min(places.get(name, 0) for name in moved)
            inner = {name: own for name, own in shown.items() if places.get(name, 0) > first}
            yield from self._finding(run, _UNHELD, inner, places)
            outer = {name: own for name, own in shown.items() if name not in inner}
            for finding in self._finding(run, _UNHELD, outer, places):
                yield replace(finding, severity=Severity.INFO)

    def _has_none(self, row: Mapping[str, Any], kind: str) -> bool:
        """Return whether an optimizer gets a gradient of zeros, in part or in whole, or none while the weight stands still."""
        if kind == _EMPTY:
            return not row["absent"] and not row["num_grad"]
        if kind in (_ROUNDED, _MASKED):
            is_whole = row["zero_rate"] <= self.max_zero_rate and row["num_sampled"]
            is_part = bool(is_whole and 0 < row["num_grad"] <= (1 - self.min_part_rate) * row["num_sampled"])
            return is_part and (kind == _MASKED or self._keeps_the_large(row))
        return bool(row["absent"]) and not row["num_moved"]

    def _keeps_the_large(self, row: Mapping[str, Any]) -> bool:
        """Return whether the elements of a gradient that are not 0 hold most of the square of wgrad's result."""
        lost = 1 - row["num_grad"] / row["num_sampled"]
        return (
            row["kept_square"] is not None
            and lost >= self.min_nonzero_rate
            and 1 - row["kept_square"] <= self.max_lost_square * lost
        )

    def _finding(
        self, run: Run, kind: str, shown: Mapping[str, Sequence[Mapping[str, Any]]], places: Mapping[str, int]
    ) -> Iterable[Finding]:
        """Return a finding for each module that loses gradients in one way; ``triage`` joins them."""
        warnings = (_ABSENT, _USES, _NEVER, _SCALED, _ROUNDED, _UNHELD, _AVERAGED, _EARLY)
        severity = Severity.WARNING if kind in warnings else Severity.ERROR
        severity = Severity.INFO if kind in (_OWN_FACTOR, _MASKED, _JOINED, _CUT) else severity
        others = f", as in {_counted(len(shown) - 1, 'other module')}" if len(shown) > 1 else ""
        for module, ill in shown.items():
            steps = [row["step"] for row in ill]
            value, limit, text = self._told(kind, ill[0])
            message = (
                f"the optimizer {text} of {module}{others}, at {_counted(len(steps), 'sampled step')} from step {steps[0]} on"
            )
            yield Finding(code=self.code, name=_NAMES[kind], severity=severity, module=module, gemm="wgrad",
                          tensor="grad_weight", steps=(steps[0], steps[-1]), ranks=tuple(run.ranks), value=value,
                          threshold=limit, message=message, cure=_CURES[kind] + _NOT_A_CAST,
                          call_index=places.get(module, 0))  # fmt: skip

    def _told(self, kind: str, row: Mapping[str, Any]) -> tuple[float, float, str]:
        """Return value, threshold and words of a way in which a gradient is lost."""
        if kind in _TEXTS:
            return 0.0, 0.0, _TEXTS[kind]
        if kind in (_MASKED, _ROUNDED):
            return self._told_of_zeros(kind, row)
        if kind in (_AVERAGED, _OWN_FACTOR):
            others = "others do, which get theirs as wgrad gave it" if row["is_of_most"] else "most others do"
            told = f"gets {row['ratio']:.3g} times as much of the sum of its microbatches' gradients as {others}"
            verb = "divided" if row["ratio"] < 1 else "multiplied"
            why = "," if row["is_of_most"] else ""
            why = f": it is {verb} by the number of microbatches, {row['num_passes']}, once more," if kind == _AVERAGED else why
            return row["ratio"], self.min_gain, f"{told}{why} for the weight"
        if kind == _JOINED:
            text = (
                f"gets a gradient {row['ratio']:.3g} times as large (RMS) as wgrad gave, and others by another factor, for"
                " the weight"
            )
            return row["ratio"], self.min_joined_gain, text
        if kind == _BEYOND:
            text = (
                f"gets a gradient {row['ratio']:.3g} times as large (RMS) as wgrad's result at step {row['step']}, for the weight"
            )
            return row["ratio"], self.min_size_ratio, text
        if kind == _SCALED:
            gain = row["given_passes"] / row["passes2"]
            return gain, self.min_gain, f"gets {gain:.3g} times the sum of the microbatches' gradients for the weight"
        if kind in (_ONE_USE, _USES):
            return self._told_of_uses(kind, row)
        if kind == _KEPT:
            size = math.sqrt(row["before2"] / row["given2"]) if row["given2"] else math.inf
            was = f"still holds that of earlier steps when a step begins, {size:.2g} times its size at the end"
            return size, 0.0, f"gets a gradient that {was}, for the weight"
        if kind in (_UNEQUAL, _EARLY):
            return self._told_of_two(kind, row)
        nmse = _nmse(row["given2"], row["passes2"], row["given_passes"])
        square = next(square for name, square, _ in _PARTS if name == kind)
        share = percent(math.sqrt(row[square] / row["passes2"]))
        part = {_SINCE: "the gradient of the passes after weight.grad was emptied", _LAST: "the gradient of the last pass",
                _FIRST: "the gradient of the first pass"}[kind]  # fmt: skip
        return nmse, self.min_sum_nmse, f"steps with {part}, {share} of the sum of all by norm, for the weight"

    def _told_of_two(self, kind: str, row: Mapping[str, Any]) -> tuple[float, float, str]:
        """Return the same of two passes that have factors of their own."""
        a, b = self._factors(row) or (1.0, 1.0)
        told = f"steps with {a:.3g} times the first pass's gradient"
        if kind == _UNEQUAL:
            return a / b, self.min_gain, f"{told} and {b:.3g} times the second's, for the weight"
        told += f" at step {row['step']}, by another factor at other steps, and with all of the last one's"
        return a / b, 1 / self.min_gain, f"{told}: the gradients were clipped before the last backward pass, for the weight"

    def _told_of_zeros(self, kind: str, row: Mapping[str, Any]) -> tuple[float, float, str]:
        """Return the same of a gradient that is 0 in part."""
        lost = 1 - row["num_grad"] / row["num_sampled"]
        text = f"gets a weight.grad with zeros in {percent(lost)} of its elements, where wgrad gave none,"
        if kind == _ROUNDED:
            text += (
                f" while the others hold {row['kept_square']:.2g} times the square of wgrad's result: the small ones became 0"
                " after it, as in FP8 without a scale,"
            )
        return lost, self.min_part_rate, f"{text} for the weight"

    def _told_of_uses(self, kind: str, row: Mapping[str, Any]) -> tuple[float, float, str]:
        """Return the same of the uses of a weight, by several modules or by several calls of one."""
        if kind == _USES:
            a, b = self._factors(row) or (1.0, 1.0)
            text = f"steps with {a:.3g} times the gradient of one use and {b:.3g} times that of the other, of the same pass, for"
            return a / b, self.min_gain, f"{text} the weight"
        if "use" not in row:
            text = "steps with the gradient of one use alone, of several in the same backward pass, for the weight"
            return _nmse(row["given2"], row["passes2"], row["given_passes"]), self.min_sum_nmse, text
        others = ", ".join(row["others"])
        text = f"gets the gradient of {row['use']} alone, and none of {others}, for the shared weight"
        return 1.0, self.max_use_error, text

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to a sum that is already wrong between microbatches."""
        return accuses_other_modules(finding, others, "F134")


def _without_some_wgrads(run: Run, modules: set[str]) -> set[tuple[int, str]]:
    """Return the steps and modules of which fewer wgrads were recorded than forward passes.

    What weight.grad holds when the first wgrad is seen may then be of this step: that of a microbatch whose wgrad was not seen.
    """
    if not modules:
        return set()
    query = (
        "SELECT DISTINCT step, module FROM (SELECT step, rank, module, max(num_tensors) FILTER (gemm = 'fprop') AS num_fprop,"
        " max(num_tensors) FILTER (gemm = 'wgrad') AS num_wgrad FROM raw WHERE actual GROUP BY step, rank, module) t"
        " WHERE num_wgrad < num_fprop"
    )
    return {(row["step"], row["module"]) for row in run.sql(query).to_pylist() if row["module"] in modules}


def _gradient_ratios(run: Run, least: float, min_steps: int) -> dict[int, dict[str, tuple[float, float]]]:
    """Return by step and module the RMS of grad_output and of dgrad's result, each over its median of all steps.

    Empty where no module's gradient is so much larger at one step than at another. Dgrad's result is 1 where it is not known.

    Args:
        run: the run.
        least: how many times larger.
        min_steps: sampled steps that a module needs.
    """
    where = (
        "actual AND gemm = 'dgrad' AND tensor = 'grad_output' AND reference = 'operand' AND num_nan + num_inf = 0 AND sum_x2 > 0"
    )
    query = f"SELECT module, max(amax) AS most, min(amax) AS fewest FROM raw WHERE {where} GROUP BY module"
    if not any(row["most"] >= least * row["fewest"] for row in run.sql(query).to_pylist() if row["fewest"]):
        return {}
    query = f"SELECT step, module, sum(sum_x2) / sum(numel) AS square FROM raw WHERE {where} GROUP BY step, module ORDER BY step"
    given = _over_median(run.sql(query).to_pylist(), min_steps)
    query = (
        "SELECT step, module, sum(sum_y2) / sum(numel) AS square FROM raw WHERE actual AND tensor = 'grad_input'"
        " AND reference = 'shadow' AND numel > 0 AND num_nan + num_inf = 0 AND sum_y2 > 0 GROUP BY step, module ORDER BY step"
    )
    made = _over_median(run.sql(query).to_pylist(), min_steps)
    return {step: {name: (x, made.get(step, {}).get(name, 1.0)) for name, x in own.items()} for step, own in given.items()}


def _over_median(rows: Sequence[Mapping[str, Any]], min_steps: int) -> dict[int, dict[str, float]]:
    """Return by step and module the root of a mean square over the module's (lower) median of them."""
    own: dict[str, list[float]] = {}
    for row in rows:
        own.setdefault(row["module"], []).append(math.sqrt(row["square"]))
    usual = {name: median_low(sizes) for name, sizes in own.items() if len(sizes) >= min_steps}
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if usual.get(row["module"]):
            found.setdefault(row["step"], {})[row["module"]] = math.sqrt(row["square"]) / usual[row["module"]]
    return found


def _num_passes(run: Run, modules: set[str]) -> dict[tuple[int, str], int]:
    """Return the number of gradients that wgrad gave in a step, by step and module."""
    query = (
        "SELECT step, module, max(num_tensors) AS num FROM raw WHERE actual AND tensor = 'grad_weight' AND reference = 'shadow'"
        " GROUP BY step, module"
    )
    return {(row["step"], row["module"]): row["num"] for row in run.sql(query).to_pylist() if row["module"] in modules}


def _shared_weights(run: Run) -> dict[str, list[str]]:
    """Return the modules that share a weight, by the one that holds it."""
    groups: dict[str, list[str]] = {}
    for module in run.modules:
        if module.get("shared_with"):
            groups.setdefault(module["shared_with"], [module["shared_with"]]).append(module["fqn"])
    return groups


def _shortfall(ratios: Mapping[str, float]) -> float:
    """Return how many times smaller than wgrad's result the smallest gradient is, at least 1, after a factor below 1 of all."""
    positive = [ratio for ratio in ratios.values() if ratio > 0]
    return max(1.0, min(1.0, median(positive)) / min(positive)) if positive else 1.0


def _given(run: Run) -> dict[int, dict[str, float]]:
    """Return by step and module the mean square of the gradients that optimizers got."""
    query = (
        "SELECT u.step AS step, u.module AS module, u.sum_grad2 / u.num_sampled AS given2 FROM updates u"
        " WHERE u.num_sampled > 0 AND u.sum_grad2 > 0 ORDER BY u.step, u.module"
    )
    given: dict[int, dict[str, float]] = {}
    for row in run.sql(query).to_pylist():
        given.setdefault(row["step"], {})[row["module"]] = row["given2"]
    return given


def _made(run: Run) -> dict[int, dict[str, float]]:
    """Return by step and module the mean square of the gradient that wgrad gave, of modules with a single one."""
    query = (
        "SELECT step, module, max(sum_y2 / numel) AS square FROM raw WHERE actual AND tensor = 'grad_weight'"
        " AND reference = 'shadow' AND numel > 0 AND num_nan + num_inf = 0 AND num_tensors = 1 GROUP BY step, module"
    )
    made: dict[int, dict[str, float]] = {}
    for row in run.sql(query).to_pylist():
        made.setdefault(row["step"], {})[row["module"]] = row["square"]
    return made


def _ratios(run: Run, known: set[str]) -> dict[int, dict[str, float]]:
    """Return by step and module the RMS of weight.grad over that of wgrad's result.

    Args:
        run: of one gradient a step.
        known: modules that are left out, as are those that share a weight.
    """
    shared = {name for names in _shared_weights(run).values() for name in names}
    given, made = _given(run), _made(run)
    return {
        step: {
            name: math.sqrt(square / made[step][name])
            for name, square in given[step].items()
            if made[step].get(name) and math.isfinite(square) and name not in shared and name not in known
        }
        for step in given
        if made.get(step)
    }


def _counted(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _to_the_end(rows: Sequence[dict[str, Any]], holds: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return the last rows, of those that all hold."""
    begins = max((place + 1 for place, row in enumerate(rows) if not holds(row)), default=0)
    return list(rows[begins:])


def _nmse(y2: float, x2: float, xy: float) -> float:
    """Return 1 - cosine^2: the squared error of y against x under the best common factor, over y's square."""
    return 1.0 if not x2 or not y2 else max(0.0, 1.0 - xy * xy / (x2 * y2))


RULES.add(GradientLost.code, GradientLost())

"""F150: weights are not what the steps before made of them: after a resume, between two steps, or zeros from the start."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.optimizer_steps import OUT_OF_SIZE, largest_updates
from fp8debug.rules.reading.traces import percent
from fp8debug.store.read.resumed import JoinedRun

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_SIZES = {"mean": "sum_x / numel", "rms": "sqrt(sum_x2 / numel)", "amax": "amax"}
#: SQL: size of each weight at each sampled step, of the tensor before its cast, and the error of the cast that ran. In high
#: precision what-if casts alone have rows.
_WEIGHTS = (
    "(SELECT module, step, max(CASE WHEN actual THEN sum_err2 / sum_x2 END) AS nmse, "
    + ", ".join(f"coalesce(max(CASE WHEN actual THEN {sql} END), max({sql})) AS {name}" for name, sql in _SIZES.items())
    + ", max(range_log2) AS range_log2 FROM sites WHERE reference = 'operand' AND gemm = 'fprop' AND tensor = 'weight'"
    " AND numel > 0 AND sum_x2 > 0"
    " GROUP BY module, step)"
)
#: Relative difference of sums over one tensor that are added in another order: of FP64 sums, with a wide margin.
_SAME = 1e-9
_OLDER = (
    "load the weights of the resumed step: compare the checkpoint's names with the model's (missing and unexpected keys), write"
    " master weights to the parameters and gather them over ranks before the first forward pass; no cast is at fault"
)

_INITIAL = (
    "make masters from the weights in high precision, and the FP8 parameters from the masters (preserve_high_precision_init_val"
    " in Transformer Engine); where an FP8 checkpoint is all there is, nothing is to be done"
)
_MOMENTS = (
    "save and load the optimizer's state with the weights (its state_dict, whose moments some loaders need to find made before"
    " they load them); where it is left out on purpose, warm the learning rate up again; no cast is at fault"
)
#: SQL: the same of all ranks, without joining them: largest magnitude and share of zeros of each finite weight.
_FINITE = (
    "SELECT module, step, max(amax) AS amax, CAST(sum(num_zero) AS DOUBLE) / sum(numel) AS zero_rate FROM raw"
    " WHERE reference = 'operand' AND gemm = 'fprop' AND tensor = 'weight' AND numel > 0"
    " AND coalesce(num_nan, 0) + coalesce(num_inf, 0) = 0 GROUP BY module, step"
)
#: SQL: share of zeros of what wgrad gave.
_GIVEN = (
    "SELECT module, step, CAST(sum(num_zero) AS DOUBLE) / sum(numel) AS zero_rate FROM raw"
    " WHERE actual AND tensor = 'grad_weight' AND reference = 'shadow' AND numel > 0 GROUP BY module, step"
)
_ELEMENTS = (
    "look at what the optimizer does with elements that have no gradient or a second moment of 0 (a first moment in few bits does"
    " not come back as 0, and is divided by eps alone), and at what else writes this weight between steps; record with every=1;"
    " no cast changes it"
)
_ZEROS = (
    "load or initialize this weight: compare the checkpoint's names and packed parameters with the model's (a copy that the model"
    " does not read is loaded without a word); none if it is pruned or padded on purpose; no cast changes it"
)
_MASTERS = "load the masters, or weights in high precision, and cast them anew; a checkpoint needs them beside its FP8 values"


@dataclass(frozen=True)
class WeightsNotRestored(Rule):
    """The weights after a resume are not those from before it: not loaded, not gathered, or of another checkpoint.

    What it detects
        older-weights: at the first sampled step after a resume a weight is, to the last digits of mean and RMS and with the same
        amax, what it was at an earlier sampled step, and not what it was at the last one before the resume: initialization that
        no checkpoint replaced, shards that were not gathered, or an older checkpoint. weights-jump: its RMS has moved further
        than the optimizer steps in between can move it. weights-rounded: its FP8 cast holds it without error, as it did not
        before: it was made of FP8 values in the checkpoint, not of masters. The tensors before their casts are compared, in FP8
        and in BF16. weights-begin-rounded, information: the same at step 0 of a run, of a weight that its cast rounds at all
        later sampled steps: FP8 parameters were made first, and the masters of them.
        elements-jump, without a resume: the largest magnitude of a weight grows between two sampled steps by far more than the
        largest update of an element at any sampled step can move it in as many steps.
        weights-stay-zero: most of a weight is 0 at all sampled steps, and so is wgrad's result: what is 0 never gets a gradient,
        as queries and keys that both begin from zero.
        moments-begin-anew: the optimizer's first moment at the step of a resume is made of that step's gradient alone, in most
        of the weights: it was empty when the step began, and the weights are those from before.

    Why it matters
        Loss and gradients of the first steps are those of another model. Where masters overwrite the weights after one
        step, the run goes on as if nothing had been, with moments that belong to nothing.

    Example
        The weight of blocks.1.gate at step 24, the first sampled one after a resume, is that of step 0, and not that of step
        22: it was not loaded from the checkpoint, or not written from its masters.

    Cure
        Load the checkpoint of the resumed step under the model's own names, write master weights to the parameters and gather
        them over ranks before the first forward pass. Where an older checkpoint is meant, resume at its step
        (resume_from=STEP), or ignore F150 for this run.

    Thresholds
        - older-weights: equal means a relative difference of 1e-9 at most, what FP64 sums lose in another order.
        - min_moved 1e-6: of older-weights, difference of mean or RMS from the last weight before the resume, over the RMS. Sums
          that move by d between sampled steps return to 1e-9 by chance with a probability of about (1e-9 / d)^2: weights in
          BF16 of which few elements move do so at d of 1e-9, and at 1e-6 once in a million.
        - max_steps_worth 4: times what the steps in between can move the RMS. Closed form: the RMS of a sum of updates is at
          most the sum of their RMS. The RMS of one update is the largest that `updates` has of the weight; where no optimizer
          was recorded, the largest change a step between sampled steps before the resume, or the median one after it, or
          the learning rate where `steps` has it. The factor is for what was not sampled; no published basis.
        - min_jump 0.1: share of the RMS below which no jump is reported. No published basis.
        - max_change 0.1: of the RMS, up to which a weight was restored and moved on. No published basis.
        - min_exact_db 100, max_sqnr_db 45: SQNR of the cast after a resume and before it, as in F137: FP32 arithmetic leaves 120
          dB and more, BF16 55.6 dB, FP8 31.5 dB; numerics.md, 4.
        - min_range_log2 4: of weights-begin-rounded, binades between largest and smallest magnitude, below which a weight may lie
          on the grid by its nature (an identity, a mask, a constant). A Gaussian of 256 elements has 9. No published basis.
        - min_history 3: sampled steps of a weight before the resume, without which no jump is judged; and of elements-jump and
          weights-stay-zero. No published basis.
        - min_jump_ratio 30: of elements-jump, growth of the largest magnitude over the largest update of a sampled element times
          the steps in between. Closed form: 1 at most where every update was sampled; Adam's updates are 3.2 times the learning
          rate at most (beta1 0.9, beta2 0.999). 8192 elements are sampled: of 2^24 with Student's tail of exponent 3 the largest
          is 13 times theirs. No published basis beyond. Seen in unsloth-zoo #962.
        - min_zero_rate 0.5: of weights-stay-zero, share of zeros in the weight and in wgrad's result. No published basis: a width
          that is padded to a multiple, or pruned, has such rows too, seldom half of them. Seen in prime-rl #3451.
        - min_anew 0.5, max_anew_error 1e-4: of moments-begin-anew, share of the weights; relative distance of the moment's
          square from (1 - beta1)^2 of the gradient's, from the gradient's own for SGD's momentum. Closed form: what a first step
          leaves, to 4e-8 in FP32 [measured]. A moment from before adds 81 % of its own square: 0.05 of the gradient's where these
          are independent.
        - max_grown 30: of moments-begin-anew, RMS of the gradient over that of the last sampled step before, up to which it
          is reported: a gradient so large hides a moment, to 0.0004 of its square at 100 times. No published basis.
        - Megatron-LM #6920, #6666, TransformerEngine #1121, KempnerForge #115; numerics.md, 5.
    """

    code = "F150"
    name = "weights-not-restored"
    cure = _OLDER
    columns = ("sum_x", "sum_x2", "amax")
    needs_fp8 = False
    is_harmful = False
    needs_training = True

    min_moved: float = 1e-6
    max_steps_worth: float = 4.0
    min_jump: float = 0.1
    max_change: float = 0.1
    min_exact_db: float = 100.0
    max_sqnr_db: float = 45.0
    min_history: int = 3
    min_range_log2: float = 4.0
    min_anew: float = 0.5
    max_anew_error: float = 1e-4
    max_grown: float = 30.0
    min_jump_ratio: float = 30.0
    min_zero_rate: float = 0.5

    def needs(self, run: Run) -> str | None:
        """Ask for a resumed run, or one whose first step was sampled."""
        is_from_start = bool(run.sampled_steps) and min(run.sampled_steps) == 0
        return None if _resumes(run) or is_from_start else "the run was not resumed, and its first step was not sampled"

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per weight and resume, and those of weights that begin as FP8 values, jump or stay zero."""
        yield from self._begin_rounded(run)
        resumes = _resumes(run)
        yield from self._elements(run, resumes)
        yield from self._zeros(run)
        for start in resumes:
            both = _around(run, start)
            if all(_is_close(*pair, self.max_change) for pair in both.values()):
                yield from self._anew(run, start)
            other = {name: pair for name, pair in both.items() if not _is_same(*pair)}
            if other:
                older = {name: step for name, step in _steps_of(run, start).items() if self._has_left(other.get(name))}
                first = min(run.sampled_steps)
                is_partial = len(older) < len(other) or first in older.values()
                for name, step in older.items():
                    yield self._older(run, other[name], step, Severity.ERROR if is_partial else Severity.WARNING)
                rest = {name: pair for name, pair in other.items() if name not in older}
                rounded = {name: pair for name, pair in rest.items() if self._is_rounded(*pair)}
                yield from (self._rounded(run, pair) for pair in rounded.values())
                yield from self._jumps(run, resumes, {name: pair for name, pair in rest.items() if name not in rounded})

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Leave a weight whose elements jump to what was loaded into it, or to updates that are out of size by then."""
        if finding.name != "elements-jump":
            return True
        loaded = any(f.code == "F133" and finding.module in {part.module for part in f.sites} for f in others)
        return not loaded and not any(f.name == OUT_OF_SIZE and f.steps[0] <= finding.steps[1] for f in others)

    def _elements(self, run: Run, resumes: list[int]) -> Iterable[Finding]:
        """Return the weights of which an element moved between two sampled steps further than updates can move it."""
        query = (
            "SELECT module, max(max_update) AS size, count(*) AS num FROM updates WHERE num_sampled > 0 AND max_update > 0"
            " GROUP BY module"
        )
        sizes = {row["module"]: row["size"] for row in run.sql(query).to_pylist() if row["num"] >= self.min_history}
        if not sizes:
            return
        query = (
            "SELECT w.module AS module, w.step AS step, w.amax AS amax, u.num_grad AS num_grad, u.num_sampled AS num_sampled FROM"
            f" ({_FINITE}) w LEFT JOIN updates u ON u.module = w.module AND u.step = w.step ORDER BY w.module, w.step"
        )
        paths: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in run.sql(query).to_pylist():
            paths[row["module"]].append(row)
        for name, path in paths.items():
            for before, after in pairwise(path if name in sizes else []):
                ratio = (after["amax"] - before["amax"]) / (sizes[name] * (after["step"] - before["step"]))
                is_resumed = any(before["step"] < start <= after["step"] for start in resumes)
                if is_resumed or ratio <= self.min_jump_ratio:
                    continue
                still = (before["num_sampled"] or 0) - (before["num_grad"] or 0)
                without = f"; {percent(still / before['num_sampled'])} of its elements have no gradient then" if still else ""
                message = (
                    f"the largest element of the weight of {name} grows from {before['amax']:.3g} at step {before['step']} to"
                    f" {after['amax']:.3g} at step {after['step']}, {ratio:.2g} times as far as the largest update of a sampled"
                    f" step ({sizes[name]:.2g}) moves one in as many steps{without}: an update in between is out of size, or"
                    " something else wrote the weight"
                )
                found = self._finding(run, after, "elements-jump", Severity.WARNING, message, value=ratio,
                                      threshold=self.min_jump_ratio)  # fmt: skip
                yield replace(found, steps=(before["step"], after["step"]), cure=_ELEMENTS)
                break

    def _zeros(self, run: Run) -> Iterable[Finding]:
        """Return the weights that are 0 for the most part, and whose zeros never get a gradient."""
        query = (
            "SELECT w.module AS module, min(w.step) AS step, max(w.step) AS last, min(w.zero_rate) AS weight,"
            f" min(g.zero_rate) AS gradient, count(*) AS num FROM ({_FINITE}) w JOIN ({_GIVEN}) g ON g.module = w.module"
            f" AND g.step = w.step GROUP BY w.module HAVING min(w.zero_rate) >= {self.min_zero_rate}"
            f" AND min(g.zero_rate) >= {self.min_zero_rate} AND max(g.zero_rate) < 1 AND count(*) >= {self.min_history}"
            " ORDER BY w.module"
        )
        for row in run.sql(query).to_pylist():
            message = (
                f"{percent(row['weight'])} of the weight of {row['module']} are 0 at all {row['num']} sampled steps, and so are"
                f" {percent(row['gradient'])} of what wgrad gives: its zeros never get a gradient, as of a product of two zeros"
                " (queries and keys), and no step moves them"
            )
            found = self._finding(run, row, "weights-stay-zero", Severity.WARNING, message, value=row["weight"],
                                  threshold=self.min_zero_rate)  # fmt: skip
            yield replace(found, steps=(row["step"], row["last"]), cure=_ZEROS)

    def _anew(self, run: Run, start: int) -> Iterable[Finding]:
        """Return the optimizer's moments that were empty when the step of a resume began, as one finding."""
        query = (
            "SELECT module, max(CASE WHEN step = $start THEN optimizer END) AS optimizer,"
            " max(CASE WHEN step = $start AND sum_grad2 > 0 AND coalesce(beta1, 1) > 0"
            " THEN abs(sum_moment2 / sum_grad2 / ((1 - coalesce(beta1, 0)) * (1 - coalesce(beta1, 0))) - 1) END) AS error,"
            " sqrt(max(CASE WHEN step = $start THEN sum_grad2 / num_sampled END)"
            " / max(CASE WHEN step < $start AND step = last THEN sum_grad2 / num_sampled END)) AS grown"
            " FROM (SELECT *, max(CASE WHEN step < $start THEN step END) OVER (PARTITION BY module) AS last FROM updates"
            " WHERE num_sampled > 0) GROUP BY module HAVING error IS NOT NULL AND grown IS NOT NULL"
        )
        rows = run.sql(query, {"start": start}).to_pylist()
        anew = {r["module"]: r for r in rows if r["error"] <= self.max_anew_error and r["grown"] <= self.max_grown}
        if not anew or len(anew) < self.min_anew * len(rows):
            return
        first = next((m["fqn"] for m in run.modules if m["fqn"] in anew), min(anew))
        row = anew[first]
        message = (
            f"the first moment of {row['optimizer']} at step {start}, the first one after a resume, is made of that step's"
            f" gradient alone, in {len(anew)} of {len(rows)} weights, first {first}: the optimizer's state was not restored, and"
            " its first updates are as large as at the start of training"
        )
        found = self._finding(run, {"module": first, "step": start}, "moments-begin-anew", Severity.WARNING, message,
                              value=row["error"], threshold=self.max_anew_error)  # fmt: skip
        yield replace(found, gemm=None, tensor=None, cure=_MOMENTS)

    def _has_left(self, pair: tuple[Mapping[str, Any], Mapping[str, Any]] | None) -> bool:
        """Return whether a weight is so far from its last one that it equals an older one by no chance."""
        if pair is None:
            return False
        before, after = pair
        limit = self.min_moved * float(after["rms"])
        return bool(max(abs(after["rms"] - before["rms"]), abs(after["mean"] - before["mean"])) > limit)

    def _older(self, run: Run, pair: tuple[Mapping[str, Any], Mapping[str, Any]], step: int, severity: Severity) -> Finding:
        before, after = pair
        message = (
            f"the weight of {after['module']} at step {after['step']}, the first sampled one after a resume, is that of step"
            f" {step}, and not that of step {before['step']}: it was not loaded from the checkpoint of the resumed step, or not"
            " written from its masters"
        )
        return self._finding(run, after, "older-weights", severity, message, value=float(step), threshold=float(before["step"]))

    def _is_rounded(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
        """Return whether a cast holds a weight exactly that it did not hold before."""
        if before["nmse"] is None or after["nmse"] is None:
            return False
        return bool(before["nmse"] > 10 ** (-self.max_sqnr_db / 10) and after["nmse"] <= 10 ** (-self.min_exact_db / 10))

    def _begin_rounded(self, run: Run) -> Iterable[Finding]:
        """Return the weights that a cast holds exactly at the run's first step, and no longer when the optimizer has moved them.

        A frozen weight of an FP8 checkpoint stays on the grid; a constant, an identity or a mask lies on every grid, and has
        no range.
        """
        if min(run.sampled_steps, default=1) != 0 or 0 in _resumes(run):
            return
        exact, inexact = 10 ** (-self.min_exact_db / 10), 10 ** (-self.max_sqnr_db / 10)
        query = f"SELECT module FROM {_WEIGHTS} w WHERE step = 0 AND nmse <= {exact} AND range_log2 >= {self.min_range_log2}"
        modules = run.sql(query)["module"].to_pylist()
        if not modules:
            return
        query = (
            f"SELECT module, min(nmse) AS later FROM {_WEIGHTS} w WHERE step > 0 AND module IN ({', '.join('?' * len(modules))})"
            f" GROUP BY module HAVING min(nmse) > {inexact} ORDER BY module"
        )
        for row in run.sql(query, modules).to_pylist():
            left_db = -10 * math.log10(row["later"])
            message = (
                f"the weight of {row['module']} lies on the grid of its FP8 cast at step 0, which rounds nothing there and leaves"
                f" {left_db:.1f} dB later: it begins as FP8 values, and what these had rounded off was never in its masters"
            )
            found = self._finding(run, {**row, "step": 0}, "weights-begin-rounded", Severity.INFO, message, value=left_db,
                                  threshold=self.max_sqnr_db, unit="dB")  # fmt: skip
            yield replace(found, cure=_INITIAL)

    def _rounded(self, run: Run, pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Finding:
        before, after = pair
        lost_db = -10 * math.log10(before["nmse"])
        message = (
            f"the weight of {after['module']} at step {after['step']}, the first sampled one after a resume, lies on the grid of"
            f" its FP8 cast, which left {lost_db:.1f} dB at step {before['step']} and rounds nothing now: it was loaded from FP8"
            " values, and what they had rounded off is lost unless masters hold it"
        )
        found = self._finding(run, after, "weights-rounded", Severity.WARNING, message, value=lost_db, threshold=self.max_sqnr_db,
                              unit="dB")  # fmt: skip
        return replace(found, cure=_MASTERS)

    def _jumps(
        self, run: Run, resumes: list[int], pairs: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> Iterable[Finding]:
        """Return the weights whose RMS moved further across a resume than the optimizer's steps can move it."""
        far = {
            name: abs(after["rms"] - before["rms"])
            for name, (before, after) in pairs.items()
            if abs(after["rms"] - before["rms"]) > self.min_jump * max(before["rms"], after["rms"])
        }
        if not far:
            return
        updates = largest_updates(run)
        rates = _largest_rate(run)
        paths = _paths(run, far)
        for name, jump in far.items():
            before, after = pairs[name]
            step_size = updates.get(name)
            if step_size is None:
                step_size = self._own_pace(paths[name], resumes, after["step"])
                step_size = None if step_size is None else max(step_size, rates)
            limit = None if step_size is None else self.max_steps_worth * step_size * (after["step"] - before["step"])
            if limit is not None and jump > limit:
                message = (
                    f"the weight of {name} has RMS {after['rms']:.3g} at step {after['step']}, the first sampled one after a"
                    f" resume, and {before['rms']:.3g} at step {before['step']}: the optimizer's steps in between move it by"
                    f" {limit / self.max_steps_worth:.2g} at most; another checkpoint was loaded, or none"
                )
                yield self._finding(run, after, "weights-jump", Severity.WARNING, message, value=jump, threshold=limit, unit="x")

    def _own_pace(self, path: list[Mapping[str, Any]], resumes: list[int], after: int) -> float | None:
        """Return how far a step has moved a weight's RMS: at most before a resume, or in the median after it."""
        paces = [
            (b["step"], abs(b["rms"] - a["rms"]) / (b["step"] - a["step"]))
            for a, b in pairwise(path)
            if not any(a["step"] < start <= b["step"] for start in resumes)
        ]
        earlier = [pace for step, pace in paces if step < after]
        later = [pace for step, pace in paces if step > after]
        if len(earlier) < self.min_history - 1:
            return None
        return float(max([*earlier, *([median(later)] if later else [])]))

    def _finding(
        self, run: Run, after: Mapping[str, Any], name: str, severity: Severity, message: str,
        *, value: float, threshold: float, unit: str = "1",
    ) -> Finding:  # fmt: skip
        places = {m["fqn"]: m["call_index"] or 0 for m in run.modules}
        return Finding(code=self.code, name=name, severity=severity, module=after["module"], gemm="fprop", tensor="weight",
                       steps=(after["step"], after["step"]), ranks=tuple(run.ranks), value=value, threshold=threshold, unit=unit,
                       message=message, cure=self.cure, call_index=places.get(after["module"], 0))  # fmt: skip


def _resumes(run: Run) -> list[int]:
    """Return the first steps of the resumed parts, in order."""
    told = run.sql("SELECT DISTINCT step FROM events WHERE kind = 'resume' AND step IS NOT NULL").to_pylist()
    joined = run.starts[1:] if isinstance(run, JoinedRun) else []
    return sorted({*(row["step"] for row in told), *joined})


def _around(run: Run, start: int) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return by module its weight at the last sampled step before a resume and at the first one after it."""
    rows = run.sql(
        f"SELECT w.* FROM {_WEIGHTS} w JOIN (SELECT module, max(CASE WHEN step < {start} THEN step END) AS last,"
        f" min(CASE WHEN step >= {start} THEN step END) AS next FROM {_WEIGHTS} v GROUP BY module) b ON w.module = b.module"
        " WHERE (w.step = b.last OR w.step = b.next) AND b.last IS NOT NULL AND b.next IS NOT NULL ORDER BY w.step"
    ).to_pylist()
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["module"]].append(row)
    return {name: (own[0], own[1]) for name, own in found.items() if len(own) == 2}


def _steps_of(run: Run, start: int) -> dict[str, int]:
    """Return by module the last sampled step before a resume at which its weight was what it is after the resume."""
    rows = run.sql(
        f"SELECT w.module AS module, max(w.step) AS step FROM {_WEIGHTS} w JOIN (SELECT v.* FROM {_WEIGHTS} v JOIN (SELECT"
        f" module, min(step) AS step FROM {_WEIGHTS} u WHERE step >= {start} GROUP BY module) n ON v.module = n.module AND"
        f" v.step = n.step) a ON w.module = a.module WHERE w.step < {start} AND w.amax = a.amax"
        f" AND abs(w.rms - a.rms) <= {_SAME} * a.rms AND abs(w.mean - a.mean) <= {_SAME} * a.rms GROUP BY w.module"
    ).to_pylist()
    return {row["module"]: row["step"] for row in rows}


def _paths(run: Run, modules: Iterable[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Return by module the RMS of its weight over the sampled steps."""
    wanted = list(modules)
    marks = ", ".join("?" for _ in wanted)
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in wanted}
    for row in run.sql(f"SELECT * FROM {_WEIGHTS} w WHERE module IN ({marks}) ORDER BY step", wanted).to_pylist():
        found[row["module"]].append(row)
    return found


def _largest_rate(run: Run) -> float:
    """Return the largest learning rate of a run, 0 where none was recorded."""
    (row,) = run.sql("SELECT max(lr) AS lr FROM steps").to_pylist()
    return row["lr"] or 0.0


def _is_close(one: Mapping[str, Any], other: Mapping[str, Any], max_change: float) -> bool:
    """Return whether a few optimizer steps lie between two rows of a weight at most: the weight was restored."""
    return bool(abs(one["rms"] - other["rms"]) <= max_change * float(one["rms"]))


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two rows are of one tensor."""
    limit = _SAME * float(one["rms"])
    is_near = abs(one["rms"] - other["rms"]) <= limit and abs(one["mean"] - other["mean"]) <= limit
    return bool(one["amax"] == other["amax"]) and is_near


RULES.add(WeightsNotRestored.code, WeightsNotRestored())

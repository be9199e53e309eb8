"""F135: the optimizer's updates are smaller than the weights' own dtype can hold, and are rounded away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.formats import FORMATS
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.census import census_of, has_census, in_order, module_of
from fp8debug.rules.reading.optimizer_steps import NOT_RECORDED
from fp8debug.rules.reading.traces import percent

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Of an optimizer whose formula is not known, weights of these are not judged: what does not move may not be meant to.
_FINE = ("float32", "float64")
#: Distance of two values over the largest power of two below them, of the dtypes of weights that round updates away.
_EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
#: Relative distance of two FP32 values, at most.
_FP32_SPACING = 2.0**-23
#: Roles of parameters that are not judged as harshly: a gain of 1 stands in BF16 at every learning rate below 2e-3.
_SMALL = ("norm", "bias")
#: SQL over ``updates``: the rows of weights without an FP32 copy, and their sums by module. An optimizer leaves out a weight
#: that has no gradient in a step (an expert without tokens), whatever its state asks for: nothing is rounded away there.
_JUDGED = (
    "NOT coalesce(keeps_precision, FALSE) AND num_sampled > 0 AND coalesce(lr, 1) > 0"
    " AND (num_intended IS NULL OR num_intended > 0) AND (num_grad IS NOT NULL OR num_moved > 0)"
)
_SUMS = (
    "min(dtype) AS dtype, min(optimizer) AS optimizer, max(lr) AS lr, min(step) AS first,"
    " max(step) AS last, count(*) AS num, CAST(sum(num_intended) AS DOUBLE) AS num_intended,"
    " CAST(sum(num_lost) AS DOUBLE) AS num_lost,"
    " sum(sum_intended2) AS intended2, sum(sum_intended_update) AS effect, sum(sum_spacing_log2) AS spacing_log2,"
    " max(CAST(num_moved AS DOUBLE) / num_grad) FILTER (WHERE num_grad > 0) AS moved,"
    " CAST(sum(num_moved) AS DOUBLE) AS num_moved, sum(sum_update2) AS update2, CAST(sum(num_sampled) AS DOUBLE) AS num_sampled,"
    " max(num_moved) AS most_moved, sum(sum_weight2) AS weight2, sum(sum_grad2) AS grad2, max(sum_moment2) AS moment2"
)
_LEFT_OUT = (
    "check what the optimizer does with this weight: a group that it skips, an update of a copy that is never written back, or"
    " a later write of the old value; no cast changes it"
)
#: The same sums of FP32 weights, and how many elements are values of BF16 when a step begins, from the second sampled step on: a
#: checkpoint in BF16 may have them so at the first one.
_BEGUN_IN_BF16 = (
    f"SELECT module, {_SUMS}, CAST(sum(num_bf16) AS DOUBLE) AS num_bf16 FROM"
    f" (SELECT u.*, min(step) OVER (PARTITION BY module) AS start FROM updates u) t"
    f" WHERE step > start AND num_bf16 IS NOT NULL AND {_JUDGED} GROUP BY module"
)
#: The same sums of the steps, but the first, and at how many of them a weight is exactly what one of its casts makes of it, with
#: that cast. A checkpoint in FP8 has weights so at the first step. An input that its cast holds exactly too was not cast: F111.
_BEGUN_IN_FP8 = (
    f"SELECT module, {_SUMS}, max(grid) AS grid, CAST(count(grid) AS DOUBLE) AS num_on_grid FROM"
    " (SELECT u.*, g.grid AS grid, min(u.step) OVER (PARTITION BY u.module) AS start FROM updates u LEFT JOIN"
    " (SELECT step, module, min(cast_name) FILTER (WHERE tensor = 'weight' AND sum_err2 <= {0} * sum_x2) AS grid FROM sites"
    " WHERE gemm = 'fprop' AND tensor IN ('input', 'weight') AND reference = 'operand' AND sum_x2 > 0 GROUP BY step, module"
    " HAVING max(CASE WHEN tensor = 'input' AND actual AND sum_err2 > {0} * sum_x2 THEN 1 ELSE 0 END) = 1) g"
    f" ON g.step = u.step AND g.module = u.module) t WHERE step > start AND {_JUDGED} GROUP BY module"
)
#: Steps that Adam has counted, at each sampled step at which it moved the weight.
_COUNTED = (
    "SELECT module, step, optimizer, beta1, beta2, num_steps FROM updates WHERE num_moved > 0 AND num_steps > 0"
    " AND beta1 < 1 AND beta2 < 1 ORDER BY module, step"
)
_COUNT = (
    "keep the optimizer's count of steps in FP32 or as an integer: a new tensor has the default dtype (set_default_dtype), and"
    " BF16 holds no 257; no cast changes it"
)
#: The steps of weights in BF16 or FP16 of which the optimizer keeps a copy, or what rounding took.
_KEPT = (
    "SELECT module, step, dtype, optimizer, CAST(num_moved AS DOUBLE) AS num_moved, CAST(num_sampled AS DOUBLE) AS num_sampled,"
    " sum_weight2 AS weight2, max_update FROM updates WHERE keeps_precision AND num_moved > 0 AND max_update IS NOT NULL"
    f" AND dtype IN ({', '.join(repr(name) for name in _EPS)}) ORDER BY module, step"
)
_COPY = (
    "look at the dtype of the optimizer's copies of the weights (masters), after a checkpoint was loaded above all, and load or"
    " make them in FP32; no cast changes it"
)
#: Learning rate of each weight, at each sampled step at which it moved.
_RATES = "SELECT module, step, lr FROM updates WHERE lr > 0 AND num_moved > 0 ORDER BY module, step"
_RATE = (
    "check that the scheduler sets every parameter group (optimizer.param_groups), those that were added after it was made among"
    " them; none if this learning rate is meant to stand; no cast changes it"
)


_MOMENT = (
    "keep the first moment in FP32 or BF16, or with a scale per block: in FP8 without a scale what is below its smallest value"
    " becomes 0; no cast of a GEMM changes it"
)


@dataclass(frozen=True)
class UpdatesRoundedAway(Rule):
    """The optimizer writes its updates into weights of a dtype too coarse for them, and most round back to the old value.

    What it detects
        Weights that a torch optimizer updates itself, without an FP32 copy in its state: in BF16, FP16 or FP8, or written back
        to such a grid. Of the update that its formula asks for (Adam, AdamW and SGD, computed again in FP32 from the
        optimizer's state) the run records which elements did not move, and how much of the whole took effect, which is 1 under
        stochastic rounding and near 0 where updates are below half the distance of two values of the dtype. All sampled steps
        count together, large updates most, so that a warm-up or a learning rate that ends at 0 is no finding. A loss that
        begins during a run and lasts to its end counts from there on, where a typical update is larger than the distance of two
        values of the dtype: the dtype loses no such update, so that something writes the weight to a coarser grid. FP32
        weights do not count whose updates lie below the distance of two FP32 values: their gradient is next to 0, as under SGD
        behind a gate that starts from 0. An FP32 weight that holds values of BF16 alone when each step begins is written back to
        them between two steps (by an export, a copy, a hook), where nothing of the step itself shows the loss.
        A weight that its own cast, or a what-if, holds exactly when each step begins is written back to FP8 so: information, as
        a program may round it on its way to the GEMM alone.
        A step at which a weight has no gradient and does not move does not count.
        Of an optimizer with another formula the share of elements that moved is judged alone: next to none is a warning, and
        less than half, which move by about the distance of two values, information, as it may round stochastically.
        step-count-stands: the count of steps that Adam keeps, and corrects the bias of its moments by, is the same at all sampled
        steps from one on, though the optimizer moves the weight at each of them: a count in BF16 ends at 256, one in FP16 at
        2048. Information where that changes no update by more than min_count_factor.
        learning-rate-stands, information: the learning rate of a weight is the same at all its sampled steps, while that of most
        other weights changes at these steps: a parameter group that the scheduler does not know.
        Parameters that no watched GEMM has (norms, embeddings, biases, heads) are judged by the same sums: from error_lost and
        error_gain on, a warning; information of a norm or bias, as a gain of 1 stands in BF16 at usual learning rates.
        copy-rounded, a warning: of a weight in BF16 or FP16 of which the optimizer keeps a copy (masters, or Kahan's sum) no
        element of its RMS or above moves any more, while smaller ones do: the copy itself is rounded, as after a resume that
        loads it in BF16.
        weight-not-updated: no element of a weight in FP32 moved in any sampled step, though it has a gradient, its updates are
        large enough for FP32, and the same optimizer moves other weights.
        first-moment-lost: the same where the first moment that the optimizer keeps is 0 at all these steps, whether others move
        or not: it is kept in too few bits, and what is small became 0. No layer is accused.

    Why it matters
        Training stands still beside its FP32 twin while every cast is healthy. Two BF16 values of size 0.03 lie 1.2e-4 apart:
        at a learning rate of 6e-6 Adam moves 2 % of such weights. A count that stands at 256 leaves updates too small: at beta2
        0.999, 1.7 times at step 1,000 and 2.1 times later, as if the learning rate were that much lower.

    Example
        97 % of the updates of blocks.0.up are rounded away: 2.7 % of the intended update took effect in 8 sampled steps
        (AdamW, learning rate 6e-06, bfloat16 weights); a typical update is 0.03 times
        the distance of two bfloat16 values.

    Cure
        Keep FP32 master weights (FP32 parameters under autocast, or an optimizer that holds them), or write the updates with
        stochastic rounding or Kahan summation. No cast of a GEMM is at fault.

    Thresholds
        - max_lost 0.5, max_gain 0.5: a warning where more of the updates are lost and less of the whole takes effect. No
          published basis; closed form: rounding to nearest loses every update below half the distance of two values.
        - max_late_gain 0.8: the same as max_gain for losses since a step, whose updates the dtype holds: all of them take
          effect there but for single roundings. No published basis.
        - error_lost 0.9, error_gain 0.1: an error beyond both.
        - min_moved 0.01: share of elements with a gradient that moves in the best sampled step, of an optimizer whose formula
          is not known. No published basis.
        - max_step 2: of such an optimizer, information: RMS of the update of the elements that moved, over the distance of two
          values at the weight's RMS, up to which less than 1 - max_lost of moved elements says that the others' updates are
          lost. Closed form: an element that moves because its update is above half the distance moves by one of them.
        - min_bf16 0.999: share of the elements of an FP32 weight that BF16 holds when a step begins, at min_steps sampled steps
          after the first, from which on something writes it back: of FP32 values 2^-16 are values of BF16 (closed form).
          Updates that are max_gain times the distance of two such values or larger, by RMS, are not lost.
        - min_exact_db 100: SQNR of a weight's cast at all sampled steps but the first, min_steps or more, from which on the
          weight lies on the grid of FP8, or of fewer bits, when they begin, though updates move half of its elements or more;
          information where these are less than max_gain times the distance of two values. As in F150: FP32 arithmetic leaves
          120 dB and more.
        - min_steps 3: sampled steps with updates. No published basis.
        - min_count_factor 1.01: of step-count-stands, sqrt(1 - beta2^t) / (1 - beta1^t) at the number of steps that it should be,
          over the same at the count, for a warning. Closed form: a factor of Adam's update. min_steps sampled steps show it.
        - min_rate_change 2, min_steps: of learning-rate-stands, largest learning rate over the smallest, of most weights, at the
          steps at which the other stands; its sampled steps. No published basis.
        - min_copy_growth 4, min_copy_moves 1000, min_steps: of copy-rounded, square root of the steps that it lasts, over those
          from the last sampled step before it, while the largest move of an element grows by less than half of that; elements
          that moved at the sampled steps, at most max_lost of all; and these steps. Closed form: with an FP32 copy the moves
          of the largest elements begin after as many steps as their updates, at random or of one sign, take to half the distance
          of two values, and the largest move grows as the root of the steps until then. Seen in Megatron-LM #1359.
        - weight-not-updated needs an update of 2^-23 of the weight by RMS at least, the distance of two FP32 values: that of the
          formula, or learning rate times gradient.
        - Automodel #3444, ao #1124 and #4915, MS-AMP #112, pytorch #79888, speculators #765; numerics.md, 5.
    """

    code = "F135"
    name = "updates-rounded-away"
    needs_training = True
    columns = ()
    cure = "keep FP32 master weights, or write the updates with stochastic rounding or Kahan summation; no cast is at fault"
    needs_fp8 = False
    is_harmful = False

    max_lost: float = 0.5
    max_gain: float = 0.5
    max_late_gain: float = 0.8
    error_lost: float = 0.9
    error_gain: float = 0.1
    min_moved: float = 0.01
    max_step: float = 2.0
    min_bf16: float = 0.999
    min_exact_db: float = 100.0
    min_steps: int = 3
    min_count_factor: float = 1.01
    min_rate_change: float = 2.0
    min_copy_moves: int = 1000
    min_copy_growth: float = 4.0

    def needs(self, run: Run) -> str | None:
        """Return why nothing can be judged: no optimizer step was recorded."""
        return None if has_census(run) or run.sql("SELECT step FROM raw_updates LIMIT 1").num_rows else NOT_RECORDED

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per weight whose updates are lost."""
        places = {m["fqn"]: m["call_index"] or 0 for m in run.modules}
        yield from self._standing(run, places)
        yield from self._standing_rates(run, places)
        yield from self._in_narrow_copies(run, places)
        query = f"SELECT module, {_SUMS} FROM updates WHERE {_JUDGED} GROUP BY module"
        rows = sorted(run.sql(query).to_pylist(), key=lambda row: (places.get(row["module"], 0), row["module"]))
        late = {row["module"]: row for row in run.sql(self._since_lost).to_pylist()}
        begun = {row["module"]: row for row in run.sql(_BEGUN_IN_BF16).to_pylist()}
        query = _BEGUN_IN_FP8.format(10 ** (-self.min_exact_db / 10))
        kept = {row["module"]: row for row in run.sql(query).to_pylist()} if run.has("sum_err2") else {}
        moving = {row["optimizer"] for row in rows if row["most_moved"]}
        parameters = self._of_parameters(run)
        yield from self._without_moment(run, rows, list(parameters.values()))
        for row in rows:
            if row["num"] < self.min_steps or _has_no_moment(row):
                continue
            if row["most_moved"] == 0 and row["optimizer"] in moving and _may_move(row):
                yield self._left_out(run, row, f"the weight of {row['module']}", places.get(row["module"], 0))
            elif found := self._judged(run, row, places.get(row["module"], 0)):
                yield found
            elif row["module"] in late and (found := self._since(run, late[row["module"]], places.get(row["module"], 0))):
                yield found
            elif row["module"] in begun and (
                found := self._written_back(run, begun[row["module"]], places.get(row["module"], 0))
            ):
                yield found
            elif row["module"] in kept and (found := self._kept_in_fp8(run, kept[row["module"]], places.get(row["module"], 0))):
                yield found
        yield from self._parameters(run, parameters, moving)

    def _of_parameters(self, run: Run) -> dict[str, dict[str, Any]]:
        """Return the sums of parameters that no watched GEMM has, by name and in its order, of those with enough steps."""
        query = f"SELECT parameter, {_SUMS} FROM parameters WHERE role <> 'buffer' AND {_JUDGED} GROUP BY parameter"
        rows = {row["parameter"]: row for row in run.sql(query).to_pylist() if row["num"] >= self.min_steps}
        return {name: rows[name] for name in in_order(rows)}

    def _without_moment(
        self, run: Run, rows: Sequence[Mapping[str, Any]], parameters: Sequence[Mapping[str, Any]]
    ) -> Iterable[Finding]:
        """Return the first moments that are 0 under gradients that are not, as one finding."""
        weights = [row for row in rows if row["num"] >= self.min_steps]
        lost = [row for row in (*weights, *parameters) if _has_no_moment(row)]
        if not lost:
            return
        first, name = lost[0], lost[0].get("module") or lost[0]["parameter"]
        others = [row["moved"] for row in weights if row["moved"] and row["optimizer"] == first["optimizer"]]
        rest = ""
        if others and max(others) < 1 - self.max_lost:
            rest = f"; of the other weights at most {percent(max(others))} of the elements with a gradient move in a step"
        message = (
            f"the first moment that {first['optimizer']} keeps of {name} is 0 at all {first['num']} sampled steps, under"
            f" gradients that are not, and no element moves, as of {len(lost)} of {len(weights) + len(parameters)} weights and"
            f" parameters{rest}: it is kept in too few bits"
        )
        severity = Severity.ERROR if "module" in first else Severity.WARNING
        yield Finding(code=self.code, name="first-moment-lost", severity=severity, steps=(first["first"], first["last"]),
                      ranks=tuple(run.ranks), value=0.0, threshold=self.min_moved, message=message, cure=_MOMENT)  # fmt: skip

    def _parameters(self, run: Run, rows: Mapping[str, Mapping[str, Any]], moving: set[str]) -> Iterable[Finding]:
        """Return the findings of parameters that no watched GEMM has."""
        moving = moving | {row["optimizer"] for row in rows.values() if row["most_moved"]}
        for name, own in rows.items():
            row, place = {**own, "module": name}, census_of(run).place(name)
            if _has_no_moment(row):
                continue
            if row["most_moved"] == 0 and row["optimizer"] in moving and _may_move(row):
                found = replace(self._left_out(run, row, name, place), severity=Severity.WARNING)
            elif (judged := self._judged(run, row, place)) is not None and judged.severity is Severity.ERROR:
                is_small = census_of(run).rows[name]["role"] in _SMALL
                found = replace(judged, severity=Severity.INFO if is_small else Severity.WARNING)
            else:
                continue
            yield replace(found, module=module_of(name))

    @property
    def _since_lost(self) -> str:
        """The query of the same sums over the last steps of each weight, in all of which most updates are lost."""
        is_lost = f"num_intended > 0 AND num_lost > {self.max_lost} * num_intended"
        return (
            f"SELECT module, {_SUMS} FROM (SELECT u.*, f.fine AS fine FROM updates u JOIN (SELECT module,"
            f" max(CASE WHEN {is_lost} THEN -1 ELSE step END) AS fine FROM updates WHERE {_JUDGED} GROUP BY module) f"
            f" ON u.module = f.module) t WHERE step > fine AND fine >= 0 AND {_JUDGED} GROUP BY module"
        )

    def _since(self, run: Run, row: Mapping[str, Any], call_index: int) -> Finding | None:
        """Return the finding of a weight whose updates have been lost since a step, though its dtype holds them."""
        if row["num"] < self.min_steps or not _is_finite(row["spacing_log2"]):
            return None
        if 2.0 ** (row["spacing_log2"] / row["num_intended"]) < 1:
            return None
        return self._judged(run, row, call_index, since=row["first"])

    def _written_back(self, run: Run, row: Mapping[str, Any], call_index: int) -> Finding | None:
        """Return the finding of an FP32 weight that is in BF16 when a step begins, though the steps move it off those values."""
        is_bf16 = row["num_bf16"] >= self.min_bf16 * row["num_sampled"] and 2 * row["num_moved"] >= row["num_sampled"]
        spacing = _spacing({**row, "dtype": "bfloat16"})
        if row["num"] < self.min_steps or not is_bf16 or spacing is None:
            return None
        by = math.sqrt(row["update2"] / row["num_moved"]) / spacing
        if by >= self.max_gain:
            return None
        rate = "" if row["lr"] is None else f", learning rate {row['lr']:.2g}"
        message = (
            f"the FP32 weight of {row['module']} holds values of BF16 alone when a step begins, at {row['num']} sampled steps"
            f" ({row['optimizer']}{rate}), though the steps move it off them: something writes it back to BF16 in between. An"
            f" update is {by:.2g} times the distance of two BF16 values (RMS), so that most are rounded away, unless at random"
        )
        return Finding(code=self.code, name=self.name, severity=Severity.WARNING, module=row["module"],
                       steps=(row["first"], row["last"]), ranks=tuple(run.ranks), value=by, threshold=self.max_gain,
                       message=message, cure=self.cure, call_index=call_index)  # fmt: skip

    def _kept_in_fp8(self, run: Run, row: Mapping[str, Any], call_index: int) -> Finding | None:
        """Return the finding of a weight that is on an FP8 grid when a step begins, though the steps move it off that grid."""
        format_ = FORMATS.get(str(row["grid"]).partition(" ")[0])
        is_kept = row["num_on_grid"] == row["num"] >= self.min_steps and 2 * row["num_moved"] >= row["num_sampled"]
        if format_ is None or not is_kept or not row["weight2"] or not _is_finite(row["update2"]):
            return None
        spacing = 2.0 ** (math.floor(0.5 * math.log2(row["weight2"] / row["num_sampled"])) - format_.mantissa_bits)
        by = math.sqrt(row["update2"] / row["num_moved"]) / spacing
        if by >= self.max_gain:
            return None
        rate = "" if row["lr"] is None else f", learning rate {row['lr']:.2g}"
        message = (
            f"the {row['dtype']} weight of {row['module']} lies on the grid of {row['grid']} when a step begins, at {row['num']}"
            f" sampled steps ({row['optimizer']}{rate}), though the steps move it off it: something rounds it to FP8 in between."
            f" An update is {by:.2g} times the distance of two such values (RMS), so that most are rounded away, unless at random"
            " or on the way to the GEMM alone"
        )
        return Finding(code=self.code, name=self.name, severity=Severity.INFO, module=row["module"],
                       steps=(row["first"], row["last"]), ranks=tuple(run.ranks), value=by, threshold=self.max_gain,
                       message=message, cure=self.cure, call_index=call_index)  # fmt: skip

    def _in_narrow_copies(self, run: Run, places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the findings of weights whose larger elements stand, though the optimizer keeps what rounding takes from them.

        An FP32 copy that was made of the weight lies in the middle between its two limits of rounding, and leaves it at random
        or faster: elements whose values lie farther apart begin to move as steps go by.
        """
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in run.sql(_KEPT).to_pylist():
            rows.setdefault(row["module"], []).append(row)
        for module in sorted(rows, key=lambda name: (places.get(name, 0), name)):
            since: list[dict[str, Any]] = []
            for row in rows[module]:
                spacing = _spacing(row)
                since = [*since, row] if spacing is not None and row["max_update"] < spacing else []
            if not since or not self._is_rounded_copy(since, rows[module]):
                continue
            first, dtype, moves = since[0], since[0]["dtype"], sum(row["num_moved"] for row in since)
            before = ", though they did before" if len(since) < len(rows[module]) else ""
            message = (
                f"{first['optimizer']} keeps a copy of the {dtype} weight of {module}, or what rounding takes from it, but from"
                f" step {first['step']} on no element of its RMS or above moves{before}, at {len(since)} sampled steps with"
                f" {moves:.0f} moves of smaller ones: updates below half the distance of two {dtype} values are rounded away, as"
                f" where the copy (the master weight) is in {dtype} itself"
            )
            yield Finding(code=self.code, name="copy-rounded", severity=Severity.WARNING, module=module,
                          steps=(first["step"], since[-1]["step"]), ranks=tuple(run.ranks), value=moves,
                          threshold=float(self.min_copy_moves), message=message, cure=_COPY,
                          call_index=places.get(module, 0))  # fmt: skip

    def _is_rounded_copy(self, since: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether moves stayed small for so long that an FP32 copy would have moved larger elements."""
        moves, num = sum(row["num_moved"] for row in since), sum(row["num_sampled"] for row in since)
        if len(since) < self.min_steps or not self.min_copy_moves <= moves <= (1 - self.max_lost) * num:
            return False
        fine = rows[len(rows) - len(since) - 1]["step"] if len(since) < len(rows) else since[0]["step"] - 1
        growth = math.sqrt((since[-1]["step"] - since[0]["step"]) / (since[0]["step"] - fine))
        largest = max(row["max_update"] for row in since)
        return bool(growth >= self.min_copy_growth and largest <= 0.5 * self.min_copy_growth * since[0]["max_update"])

    def _standing(self, run: Run, places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the optimizer's count of steps that stands, as one finding."""
        counted: dict[str, list[Mapping[str, Any]]] = {}
        for row in run.sql(_COUNTED).to_pylist():
            counted.setdefault(row["module"], []).append(row)
        standing = {name: found for name, rows in counted.items() if len(found := _last_alike(rows)) >= self.min_steps}
        if not standing:
            return
        first = min(standing, key=lambda name: (places.get(name, 0), name))
        rows, count = standing[first], int(standing[first][0]["num_steps"])
        begin, end = rows[0]["step"], rows[-1]["step"]
        beta1, beta2, should_be = rows[-1]["beta1"], rows[-1]["beta2"], count + end - begin
        sizes = [math.sqrt(1 - beta2**num) / (1 - beta1**num) for num in (should_be, count)]
        factor = sizes[0] / sizes[1]
        message = (
            f"{rows[0]['optimizer']} counts {count} steps for the weight of {first} at {len(rows)} sampled steps from step"
            f" {begin} to {end}, in all of which it moves it, as for {len(standing)} of {len(counted)} weights: its step"
            f" counter stands, and with it the bias correction; updates are {factor:.3g} times too small at step {end}"
        )
        is_harmful = factor > self.min_count_factor
        yield Finding(code=self.code, name="step-count-stands", severity=Severity.WARNING if is_harmful else Severity.INFO,
                      steps=(begin, end), ranks=tuple(run.ranks), value=factor, threshold=self.min_count_factor,
                      message=message, cure=_COUNT)  # fmt: skip

    def _standing_rates(self, run: Run, places: Mapping[str, int]) -> Iterable[Finding]:
        """Return the weights whose learning rate stands while that of most others is scheduled."""
        rates: dict[str, dict[int, float]] = {}
        for row in run.sql(_RATES).to_pylist():
            rates.setdefault(row["module"], {})[row["step"]] = row["lr"]
        standing = {name: own for name, own in rates.items() if len(own) >= self.min_steps and len(set(own.values())) == 1}
        if not standing or 2 * len(standing) >= len(rates):
            return
        for name in sorted(standing, key=lambda name: (places.get(name, 0), name)):
            own = standing[name]
            others = [
                [rate for step, rate in other.items() if step in own] for key, other in rates.items() if key not in standing
            ]
            changed = [other for other in others if other and max(other) >= self.min_rate_change * min(other)]
            if 2 * len(changed) <= len(rates):
                continue
            begin, end = min(own), max(own)
            message = (
                f"the learning rate of {name} is {own[begin]:.3g} at all its {len(own)} sampled steps from step {begin} to {end},"
                f" as of {len(standing)} of {len(rates)} weights, while that of others goes from {changed[0][0]:.3g} to"
                f" {changed[0][-1]:.3g}: a parameter group that the scheduler does not set"
            )
            yield Finding(code=self.code, name="learning-rate-stands", severity=Severity.INFO, module=name, steps=(begin, end),
                          ranks=tuple(run.ranks), value=max(changed[0]) / min(changed[0]), threshold=self.min_rate_change,
                          message=message, cure=_RATE, call_index=places.get(name, 0))  # fmt: skip

    def _left_out(self, run: Run, row: Mapping[str, Any], what: str, call_index: int) -> Finding:
        """Return the finding of a weight that never moves though it has a gradient."""
        message = (
            f"no element of {what} moved in {row['num']} sampled steps ({row['optimizer']}, {row['dtype']}"
            " weights), though it has a gradient, and the same optimizer moves other weights: its updates are not written"
        )
        return Finding(code=self.code, name="weight-not-updated", severity=Severity.ERROR, module=row["module"],
                       steps=(row["first"], row["last"]), ranks=tuple(run.ranks), value=0.0, threshold=self.min_moved,
                       message=message, cure=_LEFT_OUT, call_index=call_index)  # fmt: skip

    def _partly(self, run: Run, row: Mapping[str, Any], where: str, call_index: int) -> Finding | None:
        """Return what an optimizer of unknown formula leaves: few elements move, and those by about one value of the dtype.

        Updates of elements are of one size: where many stay and the others move to the next value, the size is below half the
        distance of two values. An optimizer that updates a few elements on purpose moves them further.
        """
        spacing = _spacing(row)
        if spacing is None or row["moved"] >= 1 - self.max_lost or not row["num_moved"]:
            return None
        by = math.sqrt(row["update2"] / row["num_moved"]) / spacing
        if by > self.max_step:
            return None
        message = (
            f"at most {percent(row['moved'])} of the elements of the weight of {row['module']} that have a gradient moved in an"
            f" update, in {row['num']} sampled steps {where}, and those by {by:.2g} times the distance of two {row['dtype']}"
            " values (RMS): the updates of the others are smaller than half of it and are rounded away, unless this optimizer"
            " rounds stochastically or keeps the weight in FP32"
        )
        return Finding(code=self.code, name=self.name, severity=Severity.INFO, module=row["module"],
                       steps=(row["first"], row["last"]), ranks=tuple(run.ranks), value=row["moved"],
                       threshold=1 - self.max_lost, message=message, cure=self.cure, call_index=call_index)  # fmt: skip

    def _judged(self, run: Run, row: Mapping[str, Any], call_index: int, since: int | None = None) -> Finding | None:
        """Return the finding of a weight whose updates are lost, in all of a run or, from ``since`` on, in the rest of it."""
        rate = "" if row["lr"] is None else f", learning rate {row['lr']:.2g}"
        where = f"({row['optimizer']}{rate}, {row['dtype']} weights)"
        if row["num_intended"] and not all(_is_finite(row[name]) for name in ("intended2", "effect", "spacing_log2")):
            return None  # NaN is told of by other rules
        if row["num_intended"] and row["intended2"]:
            lost, value = row["num_lost"] / row["num_intended"], row["effect"] / row["intended2"]
            limit = self.max_gain if since is None else self.max_late_gain
            if lost <= self.max_lost or value >= limit:
                return None
            is_error = lost > self.error_lost and value < self.error_gain
            threshold = self.error_gain if is_error else limit
            typical = 2.0 ** (row["spacing_log2"] / row["num_intended"])
            if row["dtype"] in _FINE and typical < 1:
                return None
            steps = f"{row['num']} sampled steps" + ("" if since is None else f" from step {since} on")
            message = (
                f"{percent(lost)} of the updates of {row['module']} are rounded away: {percent(max(0.0, value))} of the intended"
                f" update took effect in {steps} {where}; a typical update is {typical:.2g} times the distance"
                f" of two {row['dtype']} values"
            )
            message += "" if typical < 1 else ", so that something writes the weight back to a coarser grid"
        else:
            if row["moved"] is None or row["dtype"] in _FINE:
                return None
            if row["moved"] >= self.min_moved:
                return self._partly(run, row, where, call_index) if since is None else None
            is_error, value, threshold = False, row["moved"], self.min_moved
            message = (
                f"the weight of {row['module']} hardly moves: an update changed at most {percent(value)} of the elements that"
                f" have a gradient in {row['num']} sampled steps {where}"
            )
        return Finding(code=self.code, name=self.name, severity=Severity.ERROR if is_error else Severity.WARNING,
                      module=row["module"], steps=(row["first"], row["last"]), ranks=tuple(run.ranks), value=value,
                      threshold=threshold, message=message, cure=self.cure, call_index=call_index)  # fmt: skip


def _spacing(row: Mapping[str, Any]) -> float | None:
    """Return the distance of two values of a weight's dtype at the RMS of the weight."""
    eps = _EPS.get(row["dtype"])
    if eps is None or not row["weight2"] or not row["num_sampled"] or not _is_finite(row["weight2"]):
        return None
    return eps * 2.0 ** math.floor(0.5 * math.log2(row["weight2"] / row["num_sampled"]))


def _last_alike(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the last rows that have the same count of steps."""
    begin = len(rows) - 1
    while begin and rows[begin - 1]["num_steps"] == rows[-1]["num_steps"]:
        begin -= 1
    return rows[begin:]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _has_no_moment(row: Mapping[str, Any]) -> bool:
    """Return whether an FP32 weight never moves as the first moment of its gradients, which are large enough, is 0."""
    may_move = _is_finite(row["grad2"]) and _may_move({**row, "intended2": None})
    return row["most_moved"] == 0 and row["moment2"] == 0 and may_move


def _may_move(row: Mapping[str, Any]) -> bool:
    """Return whether an FP32 weight's updates are large enough to change it: by the formula, or by learning rate and gradient."""
    if row["dtype"] not in _FINE or not row["weight2"]:
        return False
    if row["intended2"] is not None:
        return bool(row["intended2"] >= _FP32_SPACING**2 * row["weight2"])
    return row["lr"] is not None and bool((row["grad2"] or 0.0) * row["lr"] ** 2 >= _FP32_SPACING**2 * row["weight2"])


RULES.add(UpdatesRoundedAway.code, UpdatesRoundedAway())

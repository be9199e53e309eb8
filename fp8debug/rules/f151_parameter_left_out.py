"""F151: a parameter outside the Linears is not trained, or holds the first NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.census import NOT_RECORDED, Census, census_of, described, has_census, in_order, module_of
from fp8debug.rules.reading.nonfinite import first_poison
from fp8debug.rules.reading.optimizer_steps import ROUNDED_TO_ZERO

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_NO_GRADIENT, _ZERO, _UNHELD = "parameter-without-gradient", "parameter-gradient-zero", "parameter-left-out"
_CURES = {
    _NO_GRADIENT: "check whether the forward pass uses it: a detach, a no_grad block, a branch that never runs; none if it is"
    " meant",
    _ZERO: "look at what multiplies its gradient by 0: a mask, a gate that stays 0, a kernel that does not write this gradient;"
    " none if it is meant",
    _UNHELD: "give it to an optimizer (one made before the parameter existed, or groups that do not take its name), or set"
    " requires_grad to False if it is meant to stand",
}
_NONFINITE_CURE = (
    "look at what writes this tensor: its initialisation, the checkpoint that filled it, or the optimizer's update of it; what it"
    " makes NaN downstream needs no cure"
)
_BUFFER_CURE = "keep the buffer in FP32 (cast the parameters alone, or cast it back after model.bfloat16()); no cast changes it"
#: Rows of parameters and buffers that are not finite; whether watched weights are, by step.
_SICK = (
    "SELECT parameter, role, dtype, shape, step, nonfinite_before, nonfinite, grad_nonfinite, grad_amax FROM parameters"
    " WHERE nonfinite_before IS NOT NULL OR nonfinite IS NOT NULL ORDER BY step, parameter LIMIT 1000"
)
_LAST_FINITE = "SELECT max(step) AS step FROM parameters WHERE parameter = ? AND step < ? AND amax_before IS NOT NULL"
_SICK_WEIGHTS = (
    "SELECT count(*) AS num FROM raw WHERE step = ? AND tensor = 'weight' AND gemm = 'fprop' AND reference = 'operand'"
    " AND num_nan + num_inf > 0"
)
_SICK_UPDATES = (
    "SELECT count(*) AS num FROM updates WHERE step = ? AND num_sampled > 0 AND NOT coalesce(isfinite(sum_update2), FALSE)"
)
_STANDING_BUFFERS = (
    "SELECT parameter, min(dtype) AS dtype, min(shape) AS shape, count(*) AS num, min(step) AS first, max(step) AS last,"
    " CAST(sum(num_writes) AS BIGINT) AS num_writes FROM parameters WHERE role = 'buffer' AND num_writes IS NOT NULL"
    " AND dtype IN ('bfloat16', 'float16') GROUP BY parameter"
    " HAVING min(num_writes) > 0 AND sum(num_moved) = 0 AND min(amax_before) > 0 ORDER BY parameter"
)


@dataclass(frozen=True)
class ParameterLeftOut(Rule):
    """A parameter that no watched GEMM has (a norm, an embedding, a bias, a head, a router) is left out of training, or is NaN.

    What it detects
        Of each parameter that is no weight of a watched Linear, and of each floating buffer, the run records at sampled steps
        whether an optimizer holds it, its gradient, and whether values are finite.
        parameter-left-out: it gets gradients, and no optimizer that steps holds it, while its values stand and other parameters
        move.
        parameter-without-gradient: an optimizer holds it, and no sampled step has a gradient for it, while other parameters
        have. parameter-gradient-zero: it has one, which is 0 everywhere at all of them.
        All three are information: such parameters may be meant. A warning where the same parameter of other layers is trained
        and, of the last two, the Linears around it have gradients. A part of the model whose Linears have no gradient either (an
        expert without tokens, a frozen encoder) is not told here.
        nonfinite-parameter: it holds NaN or Inf while all watched weights are finite, at a sampled step before the first NaN of
        a Linear or at it; or the optimizer's update of a finite gradient made it so, and of no watched weight. Inf in a buffer
        counts where it was finite before, as masks hold it. An error where NaN reaches the loss or a Linear.
        buffer-not-updated, information: a buffer in BF16 or FP16 is written between all sampled steps and no element changes,
        as when what is added is less than half the distance of two values.

    Why it matters
        A norm's gain that stands, or a head that no optimizer holds, costs quality and shows in no cast. A NaN in an embedding
        shows in the Linear behind it, which is then taken for its origin.

    Example
        blocks.3.norm.weight (float32[64]) has gradients at 8 sampled steps, and no optimizer that steps holds it: it stands,
        while 11 parameters of the same role in other layers are trained.

    Cure
        Give the parameter to the optimizer; look at why the forward pass does not use it, or at what writes the NaN. Keep
        buffers that add small numbers in FP32. No cast of a GEMM is at fault.

    Thresholds
        - min_steps 3: sampled steps that show it. No published basis.
        - min_alike 3: parameters of the same name in other layers that are trained, and min_share 0.75 of them, for a warning. No
          published basis.
        - speculators #765, Megatron-LM #1482; numerics.md, 5.
    """

    code = "F151"
    name = _UNHELD
    needs_training = True
    columns = ()
    cure = (
        "give the parameter to the optimizer, or look at why it has no gradient, or at what writes its NaN; no cast is at fault"
    )
    needs_fp8 = False
    is_harmful = False

    min_steps: int = 3
    min_alike: int = 3
    min_share: float = 0.75

    def needs(self, run: Run) -> str | None:
        """Return why nothing can be judged: no census was recorded."""
        return None if has_census(run) else NOT_RECORDED

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per parameter."""
        yield from self._nonfinite(run)
        yield from self._standing_buffers(run)
        census = census_of(run)
        given = [name for name in [*census.rows, *census.alive] if name in census.alive or census.rows[name]["num_nonzero"]]
        if not given:
            return
        for name in in_order(census.rows):
            row = census.rows[name]
            kind = self._kind(row) if row["requires_grad"] else None
            if kind is None or (kind != _UNHELD and census.runs_around(name) is False):
                continue
            yield self._finding(run, census, row, kind)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield, where a gradient is 0, to what rounds small gradients to 0 (F149)."""
        is_rounded = any(other.name == ROUNDED_TO_ZERO for other in others)
        return not is_rounded or any(part.name != _ZERO for part in finding.sites)

    def _kind(self, row: Mapping[str, Any]) -> str | None:
        """Return in which way a parameter is left out at all its sampled steps; None for one that is trained."""
        if row["num"] < self.min_steps:
            return None
        if row["optimizer"] is None:
            return _UNHELD if row["num_nonzero"] >= self.min_steps and row["is_same"] else None
        if row["num_given"] == 0:
            return None if row["num_moved"] else _NO_GRADIENT
        return _ZERO if row["num_zero"] == row["num"] else None

    def _finding(self, run: Run, census: Census, row: Mapping[str, Any], kind: str) -> Finding:
        name = row["parameter"]
        others = census.alike(name)
        trained = [other for other in others if census.rows[other]["num_moved"]]
        is_odd = len(trained) >= max(self.min_alike, self.min_share * len(others)) and len(others) > 0
        is_warning = is_odd and (kind == _UNHELD or bool(census.runs_around(name)))
        what = described(row)
        message = {
            _UNHELD: f"{what} has gradients at {row['num_nonzero']} sampled steps, and no optimizer that steps has it: it stands",
            _NO_GRADIENT: f"{what} has no gradient at any of {row['num']} sampled steps, though {row['optimizer']} has it",
            _ZERO: f"the gradient of {what} is 0 everywhere at all {row['num']} sampled steps",
        }[kind]
        if trained:
            message += f", while {len(trained)} of {len(others)} parameters of the same role in other layers are trained"
        return Finding(code=self.code, name=kind, severity=Severity.WARNING if is_warning else Severity.INFO,
                       module=module_of(name), steps=(row["first"], row["last"]), ranks=tuple(run.ranks),
                       value=float(row["num"]), threshold=float(self.min_steps), message=message, cure=_CURES[kind],
                       call_index=census.place(name))  # fmt: skip

    def _nonfinite(self, run: Run) -> Iterable[Finding]:
        """Return the parameter or buffer that held the first NaN or Inf, where no watched weight did."""
        for row in run.sql(_SICK).to_pylist():
            found = self._origin(run, row)
            if found is not None:
                yield found
                return

    def _origin(self, run: Run, row: Mapping[str, Any]) -> Finding | None:
        """Return the finding of a parameter that is not finite at a step, if nothing else was before."""
        step, is_before = row["step"], row["nonfinite_before"] is not None
        last = run.sql(_LAST_FINITE, [row["parameter"], step]).to_pylist()[0]["step"]
        poison = first_poison(run)
        known = -1 if last is None else last
        if is_before:
            if run.sql(_SICK_WEIGHTS, [step]).to_pylist()[0]["num"] or (poison is not None and poison.step <= known):
                return None
            how = f"holds {_word(row['nonfinite_before'])} when step {step} begins" + (
                f", and was finite at step {last}" if last is not None else ", as at no earlier sampled step it was seen finite"
            )
        else:
            is_own = row["grad_nonfinite"] is None and row["grad_amax"] is not None
            if not is_own or run.sql(_SICK_UPDATES, [step]).to_pylist()[0]["num"] or (poison is not None and poison.step <= step):
                return None
            how = f"holds {_word(row['nonfinite'])} after the optimizer's step {step}, of a finite gradient: the update made it"
        ends = _is_harmed(run, step) or poison is not None
        if row["role"] == "buffer" and last is None and not (ends and row["nonfinite_before"] == "nan"):
            return None
        message = f"{described(row)} {how}; all watched weights are finite there: what reads it passes it on"
        return Finding(code=self.code, name="nonfinite-parameter", severity=Severity.ERROR if ends else Severity.WARNING,
                       module=module_of(row["parameter"]), steps=(step, step), ranks=tuple(run.ranks), message=message,
                       cure=_NONFINITE_CURE, call_index=-1, origin="outside")  # fmt: skip

    def _standing_buffers(self, run: Run) -> Iterable[Finding]:
        """Return the buffers of 16 bits that are written and do not change."""
        for row in run.sql(_STANDING_BUFFERS).to_pylist():
            if row["num"] < self.min_steps:
                continue
            message = (
                f"the buffer {described(row)} is written {row['num_writes']} times between {row['num']} sampled steps and no"
                f" element changes: what is added rounds away in {row['dtype']} (a bias that balances experts, a moving average),"
                " or it is written with the same values"
            )
            yield Finding(code=self.code, name="buffer-not-updated", severity=Severity.INFO, module=module_of(row["parameter"]),
                          steps=(row["first"], row["last"]), ranks=tuple(run.ranks), value=float(row["num"]),
                          threshold=float(self.min_steps), message=message, cure=_BUFFER_CURE)  # fmt: skip


def _word(kind: str) -> str:
    return "NaN" if kind == "nan" else "Inf"


def _is_harmed(run: Run, step: int) -> bool:
    """Return whether a loss from a step on is not finite."""
    found = run.sql("SELECT step, loss FROM steps WHERE loss IS NOT NULL")
    pairs = zip(found["step"].to_pylist(), found["loss"].to_pylist(), strict=True)
    return any(at >= step and not math.isfinite(loss) for at, loss in pairs)


RULES.add(ParameterLeftOut.code, ParameterLeftOut())

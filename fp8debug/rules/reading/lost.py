"""Gaps of a recording, up to its end or from the beginning: no rule judges it, so that it is never called healthy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.store.schema import ENDED_BY, ENDED_CODE, RECORDING_STOPPED, STOPPED_CODE
from fp8debug.types import NOT_WATCHED, NOT_WATCHED_CODE

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Modules that a sentence names.
MAX_NAMES = 3
#: Exceptions by which a user ends a run on purpose.
_ON_PURPOSE = ("KeyboardInterrupt", "GeneratorExit")


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A module, or a rank with all its modules, that is not recorded from a step on: fp8debug failed, or the program ended.

    Attributes:
        module: FQN; None for all modules of the rank.
        rank: global rank.
        step: the step in which the error came; the first that is not recorded, or not whole.
        until: the step from which it is recorded again, after a resume; None where it is not.
        reason: the error.
        ended: whether it is the program's own exception, which ended it.
    """

    module: str | None
    rank: int
    step: int
    until: int | None
    reason: str
    ended: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON values."""
        found = {"module": self.module, "rank": self.rank, "step": self.step, "until": self.until, "reason": self.reason}
        return {**found, "ended": self.ended}

    def __str__(self) -> str:
        if self.ended:
            return f"the program ended in step {self.step} by {self.reason}" + (f" (rank {self.rank})" if self.rank else "")
        end = "on" if self.until is None else f"to step {self.until - 1}"
        return f"{self.module or f'rank {self.rank}'} is not recorded from step {self.step} {end}: {self.reason}"


def losses_of(run: Run) -> list[Lost]:
    """Return what the run stopped recording, in order; of each module and rank the first time."""
    found: list[Lost] = run.memo("lost", lambda: _read(run))
    return found


def _read(run: Run) -> list[Lost]:
    query = (
        "SELECT rank, step, module, message FROM events WHERE"
        " (kind = 'skipped' AND module IS NOT NULL AND (code = ? OR code IS NULL AND message LIKE ?))"
        " OR (kind = 'recording' AND (code = ? OR code IS NULL AND message LIKE ?))"
        " ORDER BY step NULLS FIRST, rank, module"
    )
    told = [NOT_WATCHED_CODE, f"% is {NOT_WATCHED}: %", STOPPED_CODE, f"{RECORDING_STOPPED}: %"]
    found: dict[tuple[str | None, int], Lost] = {}
    for row in run.sql(query, told).to_pylist():
        module, rank, step = row["module"], row["rank"] or 0, row["step"]
        step = run.steps_range[0] if step is None else step
        told, _, reason = row["message"].partition(": ")
        reason = reason or told
        if (module, rank) not in found:
            found[module, rank] = Lost(module=module, rank=rank, step=step, until=_again(run, module, rank, step), reason=reason)
    return [*(list(found.values()) or _everything(run)), *_exceptions(run)]


def _exceptions(run: Run) -> list[Lost]:
    """Return the exceptions that ended the program on some rank; not one that a resumed part followed."""
    query = (
        "SELECT rank, step, message FROM events WHERE kind = 'note' AND step >= ?"
        " AND (code = ? OR code IS NULL AND message LIKE ?) ORDER BY step, rank, message"
    )
    found: dict[int, Lost] = {}
    for row in run.sql(query, [run.steps_range[1], ENDED_CODE, f"{ENDED_BY} %: %"]).to_pylist():
        reason = row["message"].removeprefix(f"{ENDED_BY} ").removesuffix(": ")
        if reason.partition(":")[0] not in _ON_PURPOSE:
            rank = row["rank"] or 0
            found.setdefault(rank, Lost(module=None, rank=rank, step=row["step"], until=None, reason=reason, ended=True))
    return list(found.values())


def _everything(run: Run) -> list[Lost]:
    """Return that no module has statistics, for a run of several steps without any; the first step is always sampled."""
    first, last = run.steps_range
    if run.num_rows or last == first or not run.modules:
        return []
    reasons = [str(module["reason"]) for module in run.modules if module.get("reason") and not module.get("observed")]
    why = max(reasons, key=reasons.count) if reasons else "fp8debug coverage RUN lists the modules"
    return [Lost(module=None, rank=run.ranks[0], step=first, until=None, reason=f"no module has statistics; {why}")]


def _again(run: Run, module: str | None, rank: int, step: int) -> int | None:
    """Return the first later step with rows of a module, or of any; None where there is none."""
    query = "SELECT min(step) AS step FROM raw WHERE rank = ? AND step > ?"
    values: list[object] = [rank, step]
    if module is not None:
        query, values = f"{query} AND module = ?", [*values, module]
    found: int | None = run.sql(query, values).to_pylist()[0]["step"]
    return found


def in_one_sentence(lost: Sequence[Lost]) -> str:
    """Return what was lost, since when and why; empty where nothing was."""
    ends = [one for one in lost if one.ended]
    lost = [one for one in lost if not one.ended]
    if ends:
        more = f" and {len(ends) - 1} more rank{'' if len(ends) == 2 else 's'} too" if len(ends) > 1 else ""
        return "; ".join(filter(None, (in_one_sentence(lost), f"{ends[0]}{more}")))
    if not lost:
        return ""
    names = list(dict.fromkeys(one.module or f"all of rank {one.rank}" for one in lost))
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    first = lost[0]
    verb = "is" if len(names) == 1 else "are"
    end = "on" if any(one.until is None for one in lost) else f"to step {max(one.until or 0 for one in lost) - 1}"
    return f"{', '.join(names[:MAX_NAMES])}{more} {verb} not recorded from step {first.step} {end} ({first.reason})"

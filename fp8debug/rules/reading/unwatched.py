"""Parts of a run that fp8debug did not look at, of which no verdict claims anything: the one source for all reports.

Each is a fact of the manifest or of the rows, never a finding. What the tool cannot know that it missed is not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.rules.reading.census import has_census
from fp8debug.rules.reading.outside_scales import applied_outside
from fp8debug.rules.reading.traces import percent
from fp8debug.store.flop_shares import gemm_shares
from fp8debug.types import NOT_REPEATED, NOT_REPEATED_CODE

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Kind of modules that add their bias themselves, once.
_OWN = "Fp8Linear"
#: Roles of parameters, in the order in which they are named.
_ROLES = ("embedding", "linear", "norm", "bias", "other")


@dataclass(frozen=True, kw_only=True)
class Unwatched:
    """Something that was not watched.

    Attributes:
        what: ``parameters``, ``gemms``, ``uncalled``, ``recomputed``, ``outside-scales`` or ``results``.
        text: one sentence.
        share: of all parameters, or of the FLOPs of all forward GEMMs, in [0, 1]; None for the other kinds.
        first: FQN of the first module or parameter.
        num: how many parameters (elements), or modules and operands of the other kinds.
    """

    what: str
    text: str
    share: float | None
    first: str
    num: int

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON values."""
        return {"what": self.what, "text": self.text, "share": self.share, "first": self.first, "num": self.num}


def unwatched(run: Run) -> list[Unwatched]:
    """Return what a run did not look at, as far as it knows."""
    found: list[Unwatched] = run.memo(
        "unwatched", lambda: [*_parameters(run), *_gemms(run), *_uncalled(run), *_recomputed(run), *_other(run)]
    )
    return found


def in_words(found: Iterable[Unwatched]) -> list[str]:
    """Return a line for each."""
    return [f"not watched: {one.text}" for one in found]


def and_more(names: Sequence[object] | int) -> str:
    """Return how many there are after the first of some names, or of a number of names; empty where there are none."""
    count = (names if isinstance(names, int) else len(names)) - 1
    return f" and {count} more" if count > 0 else ""


def why_without_fp8(run: Run) -> str | None:
    """Return why a run without rows of FP8 operands may have had some that were not recorded; None where it had none."""
    found: str | None = run.memo("why without fp8", lambda: _why_without_fp8(run))
    return found


def _why_without_fp8(run: Run) -> str | None:
    if unrecorded := [module["fqn"] for module in run.modules if module.get("fp8") and not module.get("observed")]:
        return f"FP8 ran in {unrecorded[0]}{and_more(unrecorded)}, which is not recorded"
    query = (
        "SELECT DISTINCT module FROM events WHERE kind = 'skipped' AND (code = ? OR code IS NULL AND message LIKE ?)"
        " ORDER BY module"
    )
    hidden = [row["module"] for row in run.sql(query, [NOT_REPEATED_CODE, f"% is {NOT_REPEATED}: %"]).to_pylist()]
    if hidden:
        return f"{hidden[0]}{and_more(hidden)} ran in compiled code, which is not recorded"
    return None if run.num_rows else "nothing was recorded"


def _parameters(run: Run) -> Iterable[Unwatched]:
    total = sum(int(entry["num_params"]) for entry in run.parameters)
    rest: dict[str, list[dict[str, Any]]] = {}
    for entry in run.parameters:
        if entry["role"] != "watched":
            rest.setdefault(entry["role"] if entry["role"] in _ROLES else "other", []).append(entry)
    if not rest:
        return
    parts = []
    for role in (role for role in _ROLES if role in rest):
        share = sum(entry["num_params"] for entry in rest[role]) / total
        parts.append(f"{role} {percent(share)} ({rest[role][0]['first']}{and_more(_num_tensors(rest[role]))})")
    num = sum(entry["num_params"] for entries in rest.values() for entry in entries)
    is_taken = run.manifest.get("inference") is True or has_census(run)
    what = "values" if is_taken else "values, gradients and updates"
    text = (
        f"{what} of {percent(num / total)} of the parameters: {', '.join(parts)}; whether they are right is not judged, a fault"
        " in them shows in the loss and in what later Linears get"
    )
    first = next(rest[role][0]["first"] for role in _ROLES if role in rest)
    yield Unwatched(what="parameters", text=text, share=num / total, first=str(first), num=num)


def _num_tensors(entries: Iterable[dict[str, Any]]) -> int:
    return sum(entry.get("num_tensors") or 1 for entry in entries)


def _gemms(run: Run) -> Iterable[Unwatched]:
    shares = gemm_shares(run.modules, run.gemms)
    if shares is not None and shares.rest:
        first, share = shares.rest[0], sum(one.share for one in shares.rest)
        where = f"{first.fqn} ({first.kind}: {first.reason}){and_more(shares.rest)}"
        text = f"{percent(share)} of the GEMM FLOPs, first {where}"
        yield Unwatched(what="gemms", text=text, share=share, first=first.fqn, num=len(shares.rest))


def _uncalled(run: Run) -> Iterable[Unwatched]:
    """Return the modules that no sampled step called, though their weights have gradients: something else multiplies by them."""
    waiting = [m["fqn"] for m in run.modules if m.get("call_index") is None and not m.get("called") and not m.get("shared_with")]
    if not waiting:
        return
    given = {row["module"] for row in run.sql("SELECT DISTINCT module FROM updates WHERE num_grad > 0").to_pylist()}
    used = [name for name in waiting if name in given]
    if used:
        text = (
            f"GEMMs outside the Linears by the weight of {used[0]}{and_more(used)}: no sampled step calls the module, and the"
            " weight has gradients (a fused loss that computes the logits itself, a function, a tied embedding)"
        )
        yield Unwatched(what="uncalled", text=text, share=None, first=used[0], num=len(used))


def _recomputed(run: Run) -> Iterable[Unwatched]:
    """Return the forward passes that activation checkpointing ran twice, of which one alone was recorded."""
    again, alone = ([m["fqn"] for m in run.modules if m.get("recomputed") == how] for how in ("again", "alone"))
    if again:
        text = (
            f"casts of recomputed forward passes: {again[0]}{and_more(again)} under activation checkpointing; of the"
            " recomputation wgrad's input alone is compared with the forward pass's"
        )
        yield Unwatched(what="recomputed", text=text, share=None, first=again[0], num=len(again))
    if alone:
        text = (
            f"first forward passes under reentrant activation checkpointing: of {alone[0]}{and_more(alone)} the recomputation is"
            " recorded, and whether it repeats the pass that made the loss is not"
        )
        yield Unwatched(what="recomputed", text=text, share=None, first=alone[0], num=len(alone))


def _other(run: Run) -> Iterable[Unwatched]:
    """Return what multiplies or adds outside the recorded GEMMs."""
    without = applied_outside(run)
    if without:
        site = without[0]
        operand = f"{site['module']} {site['gemm']} {site['tensor']}{and_more(without)}"
        text = (
            f"whether scales are applied outside their GEMMs, whose scale_inv is 1 in every block: {operand}; compare the output"
            " of such a module with the BF16 product of its input and weight"
        )
        yield Unwatched(what="outside-scales", text=text, share=None, first=site["module"], num=len(without))
    added = [m["fqn"] for m in run.modules if m.get("bias") and m.get("fp8") and m.get("observed") and m["kind"] != _OWN]
    if added:
        text = (
            f"what modules add to the results of their GEMMs: the bias of {added[0]}{and_more(added)}; a bias that is left out or"
            " added twice shows in fp8debug parity of two paths"
        )
        yield Unwatched(what="results", text=text, share=None, first=added[0], num=len(added))

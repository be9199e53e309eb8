"""``fp8debug coverage RUN``: which modules run in FP8, under which casts, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from fp8debug.errors import RunError
from fp8debug.escaping import one_line
from fp8debug.formats import TRANSPOSED
from fp8debug.rules.reading.lost import Lost, losses_of
from fp8debug.rules.reading.unwatched import in_words, unwatched
from fp8debug.store.flop_shares import GemmShares, Rest, gemm_shares
from fp8debug.store.read.module_names import folded
from fp8debug.store.read.run import Run
from fp8debug.types import Gemm

from .console import open_run, print_table, to_csv, to_json, wide_option
from .output import echo, write

COLUMNS = ["module", "kind", "fp8", "requested", "flops", "gemms", "casts", "reason", "note"]

#: The order in which a narrow terminal loses columns: what a module is called, whether it is in FP8 and why not stay longest.
_LAYOUT: dict[str, Any] = {
    "wrap": ["module", "casts", "reason", "note"],
    "drop": ["kind", "gemms", "requested", "casts", "note", "flops"],
}

#: The casts are those that the recorded steps ran, not those that were asked for. ``gemms`` is how many fprop/dgrad/wgrad GEMMs
#: were seen a sampled step on all ranks; a module without a gradient to pass on has no dgrad, one with a frozen weight no wgrad.
MODULES = """
WITH recorded AS (
  SELECT module, string_agg(DISTINCT tensor || ': ' || cast_name, '; ' ORDER BY tensor || ': ' || cast_name) AS casts
  FROM sites WHERE actual AND reference = 'operand' GROUP BY module
), seen AS (
  SELECT module, sum(num_tensors) FILTER (WHERE gemm = 'fprop') AS fprop, sum(num_tensors) FILTER (WHERE gemm = 'dgrad') AS dgrad,
    sum(num_tensors) FILTER (WHERE gemm = 'wgrad') AS wgrad
  FROM sites WHERE actual AND reference = 'shadow' GROUP BY module
), wanted AS (
  SELECT module, sum(num_tensors) AS wanted FROM sites
  WHERE actual AND reference = 'operand' AND gemm = 'wgrad' AND tensor = 'input' GROUP BY module
), sampled AS (
  SELECT count(DISTINCT step) AS times FROM sites WHERE actual
)
SELECT fqn AS module, kind, coalesce(fp8, false) AS fp8, coalesce(requested, 'not requested') AS requested,
  flops_per_token / sum(flops_per_token) OVER () AS flops,
  round(fprop / times, 2) || '/' || round(coalesce(dgrad, 0) / times, 2) || '/' || round(coalesce(wgrad, 0) / times, 2) AS gemms,
  casts, CASE WHEN NOT coalesce(fp8, false) THEN coalesce(reason, 'no reason recorded') WHEN NOT coalesce(observed, false)
  THEN coalesce(reason, 'not observed')
  WHEN fprop IS NULL THEN 'never called in a sampled step, or under torch.compile' END AS reason,
  fprop, dgrad, wgrad, wanted
FROM modules CROSS JOIN sampled LEFT JOIN recorded ON recorded.module = modules.fqn LEFT JOIN seen ON seen.module = modules.fqn
LEFT JOIN wanted ON wanted.module = modules.fqn
ORDER BY call_index NULLS LAST, fqn
"""

#: Parts of a name that say what a Linear is for, where common practice keeps it in high precision.
SPARED = {"lm_head": "an output head", "head": "an output head", "output_layer": "an output head", "embed_out": "an output head"}
SPARED |= {"router": "a router", "embed": "an embedding", "embedding": "an embedding", "norm": "a normalisation"}

#: Backward GEMMs that ran in a backward pass and were not seen, as the recording says itself.
UNSEEN = "SELECT DISTINCT module, code FROM events WHERE code LIKE 'not-observed:%'"

TOTALS = """
SELECT count(*) FILTER (WHERE fp8) AS num_fp8, count(*) AS num,
  round(100.0 * sum(flops_per_token) FILTER (WHERE fp8) / sum(flops_per_token), 1) AS share FROM modules
"""


@click.command("coverage")
@click.argument("run")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--each", is_flag=True, help="A line for each module.  [default: one for layers that are alike]")
@wide_option
def command(run: str, form: str, each: bool) -> None:
    """List the Linears of RUN: whether each runs in FP8, its share of the FLOPs of all GEMMs, its casts, and why not.

    GEMMs outside the Linears follow: attention, other modules, weights that a function multiplies by. Layers that are alike in
    all but their number and their FLOPs are one line of the table, blocks.{0..15}.attn.q, with the FLOPs of all of them.
    """
    opened = open_run(run)
    if not opened.manifest.get("modules"):
        raise RunError(f"{opened.name}: coverage was not recorded, manifest.json is missing or lists no modules")
    lost = losses_of(opened)
    shares = gemm_shares(opened.modules, opened.gemms)
    rows = _rows(opened, lost, shares)
    if form == "table":
        _print_table(opened, rows if each else _folded(rows), lost, shares)
    else:
        rows = [{**row, "flops": _percent(row["flops"])} for row in rows]
        write(to_csv(COLUMNS, rows) if form == "csv" else to_json(rows), nl=False)


def _rows(run: Run, lost: Sequence[Lost], shares: GemmShares | None) -> list[dict[str, Any]]:
    """Return a row for each Linear, then one for each module or function with other GEMMs; ``flops`` is a share."""
    rows: list[dict[str, Any]] = run.sql(MODULES).to_pylist()
    modules = {module["fqn"]: module for module in run.modules}
    unseen: dict[str, str] = {}
    for event in run.sql(UNSEEN).to_pylist():
        unseen[event["module"]] = unseen.get(event["module"], "") + event["code"]
    for row in rows:
        seen = {gemm: row.pop(gemm) for gemm in ("fprop", "dgrad", "wgrad", "wanted")}
        ends = [str(one) for one in lost if not one.ended and one.module in (None, row["module"])]
        gemms = None if run.manifest.get("inference") is True else _on_backward(seen, row["kind"], unseen.get(row["module"], ""))
        override = _backward_override(modules[row["module"]])
        notes = *ends[:1], override or gemms, _against_practice(modules[row["module"]])
        row["note"] = "; ".join(note for note in notes if note) or None
        if shares is not None:
            row["flops"] = shares.modules.get(row["module"], 0.0)
    return rows if shares is None else [*rows, *map(_row_of_rest, shares.rest)]


def _on_backward(seen: Mapping[str, float | None], kind: str, unseen: str) -> str | None:
    """Return a note on forward passes without backward GEMMs, with what is known of the reason.

    An Fp8Linear records its backward pass whenever it runs, and casts the input for wgrad in each forward pass that wants a
    gradient of the weight; of other modules neither is certain.

    Args:
        seen: GEMMs of each kind in all sampled steps; ``wanted`` are casts of an input for wgrad.
        kind: of the module.
        unseen: codes of its events on GEMMs that its backward pass lacks.
    """
    fprop, dgrad, wgrad, wanted = (int(seen[name] or 0) for name in ("fprop", "dgrad", "wgrad", "wanted"))
    if not fprop or (wgrad >= fprop and not 0 < dgrad < fprop):
        return None
    if not wgrad and not dgrad:
        return "no wgrad seen: no backward pass followed, the weight is frozen, or it was not recorded"
    if wgrad >= fprop:
        why = "not seen in the backward pass" if Gemm.DGRAD.value in unseen else "the input needed no gradient"
        doubt = "" if unseen or kind == "Fp8Linear" else ", or it was not seen"
        return f"{fprop - dgrad} of {fprop} fprop without a dgrad: {why}{doubt}"
    if Gemm.WGRAD.value in unseen:
        return f"{fprop - wgrad} of {fprop} fprop without a wgrad: not seen in the backward pass, or none followed"
    if dgrad >= fprop:
        parts = [(fprop - wgrad, "the weight was frozen")]
    elif kind == "Fp8Linear" and wanted >= wgrad > 0:
        parts = [(wanted - wgrad, "no backward pass followed"), (fprop - wanted, "the weight was frozen")]
    else:
        parts = [(fprop - wgrad, "no backward pass followed or the weight was frozen")]
    doubt = "" if kind == "Fp8Linear" else ", or it was not seen"
    return "; ".join(f"{num} of {fprop} fprop without a wgrad: {why}{doubt}" for num, why in parts if num > 0)


def _print_table(run: Run, rows: Sequence[Mapping[str, Any]], lost: Sequence[Lost], shares: GemmShares | None) -> None:
    """Print the totals, the rows, and what was lost, filtered or not watched."""
    totals = run.sql(TOTALS).to_pylist()[0]
    share = ""
    if shares is not None:
        share = f", {100 * shares.fp8:.1f} % of the FLOPs of all GEMMs"
    elif totals["share"] is not None:
        share = f", {totals['share']} % of the Linear FLOPs"
    echo(f"{run.name}: {totals['num_fp8']} of {totals['num']} Linears in FP8{share}")
    if shares is not None and shares.rest:
        echo(f"outside these Linears (attention, matmuls of other modules and functions): {_summary(shares.rest)}")
    if note := run.manifest.get("gemms_note"):
        echo(f"not complete: {note}")
    echo("")
    shown = [{**row, "casts": row["casts"] and _merged(row["casts"]), "flops": _percent(row["flops"])} for row in rows]
    print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in shown], **_LAYOUT)
    for one in lost:
        echo(f"warning: {one_line(str(one))}")
    for entry in run.manifest.get("filters") or ():
        number = entry.get("matched")
        echo(f"{entry.get('kind')} {entry.get('pattern')!r}: {number} module{'' if number == 1 else 's'}")
    for line in in_words(unwatched(run)):
        echo(one_line(line))
    for module in run.manifest.get("outside") or ():
        echo(f"not watched: {module.get('fqn')} ({module.get('kind')}): {module.get('reason')}")


def _folded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for modules that differ in a layer's number and their FLOPs alone."""
    alike = [tuple(str(row[name]) for name in COLUMNS if name not in ("module", "flops")) for row in rows]
    found = []
    for pattern, places in folded([row["module"] for row in rows], alike):
        flops = [rows[place]["flops"] for place in places if rows[place]["flops"] is not None]
        found.append({**rows[places[0]], "module": pattern, "flops": sum(flops) if flops else None})
    return found


def _merged(casts: str) -> str:
    """Return casts with the tensors that share one together; a tile that is turned for its GEMM counts as the same."""
    by_tensor: dict[str, list[str]] = {}
    for part in casts.split("; "):
        tensor, _, cast = part.partition(": ")
        by_tensor.setdefault(tensor, []).append(cast)
    by_cast: dict[str, list[str]] = {}
    for tensor, known in by_tensor.items():
        apart = [cast for cast in known if not (_is_column(cast) and _turned(cast) in known)]
        by_cast.setdefault(" / ".join(apart), []).append(tensor)
    return "; ".join(f"{', '.join(tensors)}: {cast}" for cast, tensors in by_cast.items())


def _turned(cast: str) -> str:
    """Return the name of a cast for the transposed tensor."""
    words = cast.split(" ")
    return " ".join([*words[:1], *(TRANSPOSED.get(word, word) for word in words[1:2]), *words[2:]])


def _is_column(cast: str) -> bool:
    """Return whether a cast's blocks are one column wide."""
    granularity = cast.split(" ")[1:2]
    return granularity != [] and (granularity[0] == "columnwise" or granularity[0].endswith("x1"))


def _row_of_rest(rest: Rest) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    in_fp8 = " in FP8, " in rest.reason
    return {**row, "module": rest.fqn, "kind": rest.kind, "fp8": in_fp8, "flops": rest.share, "reason": rest.reason}


def _summary(rest: Sequence[Rest], most: int = 4) -> str:
    """Return the classes of modules behind GEMMs outside the Linears, with their shares, the largest first."""
    kinds: dict[str, float] = {}
    for one in rest:
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.share
    largest = sorted(kinds.items(), key=lambda item: -item[1])
    words = [f"{kind} {_percent(share)}" for kind, share in largest[:most]]
    others = sum(share for _, share in largest[most:])
    return ", ".join([*words, f"others {_percent(others)}"] if others else words)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"


def _backward_override(module: Mapping[str, Any]) -> str | None:
    """Return a note on a module of Transformer Engine whose backward GEMMs leave low precision on purpose."""
    _, is_there, override = str(module.get("recipe") or "").partition(" backward=")
    if not is_there:
        return None
    operands = ", on dequantized operands" if override == "dequantized" else ""
    return f"backward override {override} (NVTE_BACKWARD_OVERRIDE): dgrad and wgrad run in high precision{operands}"


def _against_practice(module: Mapping[str, Any]) -> str | None:
    """Return a note on an FP8 module whose like is usually left in high precision, by its place or by its name."""
    if not module.get("fp8"):
        return None
    what = "a router" if module.get("selects") else SPARED.get(module["fqn"].rpartition(".")[2].lower())
    return f"{what} in FP8, against common practice" if what else None

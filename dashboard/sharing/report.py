"""A run as one self-contained page of HTML to send around: no network, no script, everything from the run escaped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from fp8debug.errors import RunError, UsageError
from fp8debug.escaping import one_line
from fp8debug.reports.page import appendix, bullets, document, finding_sections, verdict_sections
from fp8debug.rules import Findings, triage
from fp8debug.rules.comparison.runs import Differences, diff_runs
from fp8debug.rules.reading.changes import in_force
from fp8debug.store.locations import place_of
from fp8debug.store.read.notes import read_notes
from fp8debug.store.read.run import Run

from ..data.coverage import coverage
from ..data.module_health import module_health
from .heatmap import codes_by_module, heatmap

#: Rows of a table; more are counted.
MAX_ROWS = 200
#: Columns that a narrow page has room for; a table of more moves sideways.
MAX_FIXED = 3
#: Sites of a comparison, and modules that one of two runs has alone; the others are counted.
MAX_SITES, MAX_ONLY = 20, 8
#: Settings of the watch in a manifest, and what they are called.
SETTINGS = {
    "created": "recorded",
    "every": "sampled every so many steps",
    "shadow_rows": "rows of the shadow GEMMs",
    "what_if": "what-if recipes",
    "include": "include",
    "exclude": "exclude",
    "fp8debug_version": "fp8debug",
    "git": "git",
}


def write_report(run: Run | str | Path, output: str | Path, against: Run | str | Path | None = None) -> Path:
    """Judge a run and write its report; the file is there whole or not at all.

    Args:
        run: a run or its folder.
        output: the file to write.
        against: a run to compare with, usually the good one or one in BF16.

    Returns:
        The path of the file.

    Raises:
        RunError: a run cannot be read.
        UsageError: the file cannot be written.
    """
    opened = run if isinstance(run, Run) else Run(run)
    text = run_report(opened, against=None if against is None else against if isinstance(against, Run) else Run(against))
    target = place_of(output)
    half = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            half.write_text(text, encoding="utf-8")
            half.replace(target)
        finally:
            with suppress(OSError):  # the first error is reported
                half.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}; name a file in a folder that exists") from None
    return target


def run_report(run: Run, findings: Findings | None = None, against: Run | None = None) -> str:
    """Return the page: verdict, loss, heatmap, findings with evidence, comparison, coverage, configuration.

    Args:
        run: the run.
        findings: what triage found in it, with ``against`` as its baseline; judged here by default.
        against: a run to compare with.
    """
    judged = triage(run, against) if findings is None else findings
    body = [
        *verdict_sections(run, judged, against),
        _panel("Modules by steps", f"{heatmap(module_health(run), codes_by_module(judged))}<p class='muted'>{HEALTH_WORDS}</p>"),
        *finding_sections(run, judged),
        "" if against is None else _comparison(diff_runs(against, run)),
        _notes(run),
        _coverage(run),
        _configuration(run.manifest),
        appendix(run, judged),
    ]
    return document(f"{judged.run}: {judged.verdict}", body)


#: Beneath a heatmap of health.
HEALTH_WORDS = (
    "A cell is the worst of SQNR, overflow, underflow, gain, norm and cosine over a module's operands and results, against the"
    " healthy range of its cast (docs/numerics.md, section 4). Codes are those of findings."
)


def _panel(title: str, content: str) -> str:
    return f"<section class='panel'><h2>{escape(title)}</h2>{content}</section>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> str:
    """Return a table of plain values; None is a dash.

    Args:
        header: titles.
        rows: cells.
        numbers: titles of the columns that are set to the right.
    """
    kinds = [" class='num'" if name in numbers else "" for name in header]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(header, kinds, strict=True))
    found = [[_cell(value) for value in row] for row in rows]
    lines = "".join(
        f"<tr>{''.join(f'<td{kind}>{value}</td>' for value, kind in zip(row, kinds, strict=True))}</tr>"
        for row in found[:MAX_ROWS]
    )
    more = f"<p class='muted'>and {len(found) - MAX_ROWS} more</p>" if len(found) > MAX_ROWS else ""
    label = escape(", ".join(header), quote=True)
    kind = f"scroll' tabindex='0' role='region' aria-label='{label}" if len(header) > MAX_FIXED else "fixed"
    return f"<div class='{kind}'><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>{more}"


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return escape(one_line(", ".join(f"{key} {inner}" for key, inner in value.items())))
    if isinstance(value, (list, tuple)):
        return escape(one_line(", ".join(map(str, value)))) or "-"
    return escape(f"{value:.4g}" if isinstance(value, float) else one_line(str(value)))


def _comparison(found: Differences) -> str:
    parted = [site for site in found.sites if site.diverges_at is not None]
    only = [
        f"only in {name}: {', '.join(names[:MAX_ONLY])}" + (f" and {len(names) - MAX_ONLY} more" if len(names) > MAX_ONLY else "")
        for name, names in zip(found.names, found.only, strict=True)
        if names
    ]
    lines = bullets([found.site_words, *only])
    rows = [
        (
            site.diverges_at,
            site.module,
            f"{site.gemm} {site.tensor}",
            site.what,
            *(
                " → ".join("-" if v is None else f"{v:.4g}" for v in site.medians.get(name, (None, None)))
                for name in ("sqnr_db", "rms")
            ),
        )
        for site in parted[:MAX_SITES]
    ]
    header = ("diverges at", "module", "site", "what", "SQNR in dB", "rms")
    more = f"<p class='muted'>and {len(parted) - MAX_SITES} more sites</p>" if len(parted) > MAX_SITES else ""
    return _panel(f"Sites against {found.names[0]}", lines + (table(header, rows) + more if rows else ""))


def _notes(run: Run) -> str:
    """Return what people wrote about the run; nothing where nobody did."""
    try:
        notes = read_notes(run.path)
    except RunError as error:
        return _panel("Notes", f"<p>{escape(str(error))}</p>")
    entries = [
        f"<dt>{escape(one_line(note.about))}<br>{escape(one_line(note.written))}</dt>"
        f"<dd>{'<br>'.join(escape(one_line(line)) for line in note.text.splitlines())}</dd>"
        for note in notes
    ]
    return _panel("Notes", f"<dl>{''.join(entries)}</dl>") if entries else ""


def _coverage(run: Run) -> str:
    modules = run.modules
    if not run.manifest.get("modules"):
        return _panel("Coverage", "<p class='muted'>not recorded: the manifest lists no modules</p>")
    found = coverage(modules, run.manifest.get("filters") or (), run.gemms)
    of = "of the FLOPs of all forward GEMMs" if found.is_of_all else "of the Linears' FLOPs"
    share = "" if found.flops_share is None else f", {100 * found.flops_share:.1f} % {of}"
    lead = f"<p class='lead'>{found.num_fp8} of {found.num_linears} Linears in FP8{share}.</p>"
    casts = table(
        ("casts", "modules", "share of FLOPs"),
        [(n, k, f"{100 * s:.1f} %") for n, k, s in found.casts],
        ("modules", "share of FLOPs"),
    )
    skipped = table(("module", "kind", "requested", "reason"), found.skipped) if found.skipped else "<p>None.</p>"
    rest = table(("module", "class", "share", "reason"), [(f, k, f"{100 * s:.2f} %", r) for f, k, s, r in found.rest], ("share",))
    outside = [
        (entry.get("fqn"), entry.get("kind"), entry.get("reason"))
        for entry in run.manifest.get("outside") or ()
        if isinstance(entry, Mapping)
    ]
    parts = [lead, casts, _fold(f"Linears not in FP8 ({len(found.skipped)})", skipped)]
    if found.rest:
        parts.append(_fold(f"GEMMs outside the Linears ({len(found.rest)})", rest))
    if outside:
        parts.append(_fold(f"Modules not watched ({len(outside)})", table(("module", "kind", "reason"), outside)))
    if found.filters:
        parts.append(_fold("Filters", table(("filter", "pattern", "modules"), found.filters, ("modules",))))
    return _panel("Coverage", "".join(parts))


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _configuration(manifest: Mapping[str, Any]) -> str:
    if not manifest:
        return _panel("Configuration", "<p class='muted'>not recorded: manifest.json is missing</p>")
    rows = [*in_force(manifest).items(), *((word, manifest.get(key)) for key, word in SETTINGS.items())]
    return _panel("Configuration", table(("setting", "value"), [(k, v) for k, v in rows if v not in (None, "", [], {})]))

"""Interface of an exporter: a fallback list in one stack's own format; a new one is one file.

What a format cannot say is never dropped in silence: ``notes`` has one sentence for each kind of it, which the command line
prints on stderr and the file holds as comments where its format has comments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from fp8debug.fallback.candidates import GEMMS
from fp8debug.formats import FORMATS
from fp8debug.recipes import Cast
from fp8debug.registry import Registry

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run


class Exporter(ABC):
    """Writes a fallback list for one consumer.

    Attributes:
        name: what ``fp8debug fallback --to`` calls it.
        suffix: of the file, with its dot.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]

    @abstractmethod
    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the file's text."""

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say, or says only roughly: one sentence for each kind."""
        return []

    def files(self, run: Run, fallbacks: Sequence[Fallback]) -> dict[str, str]:
        """Return the texts of all files by what is added to the stem of the file's name; most formats have one, ``""``."""
        return {"": self.export(run, fallbacks)}


EXPORTERS: Registry[Exporter] = Registry("exporter")


def in_bf16(run: Run, fallbacks: Sequence[Fallback]) -> dict[str, tuple[str, ...]]:
    """Return by module the GEMMs that should run in BF16, globs expanded; an entry for one operand counts for its GEMMs."""
    names = [str(module["fqn"]) for module in run.modules if module.get("fp8")]
    found: dict[str, set[str]] = {}
    for fallback in fallbacks:
        if fallback.cast is None:
            matched = [] if fallback.module in names else [name for name in names if fnmatchcase(name, fallback.module)]
            for name in matched or [fallback.module]:
                found.setdefault(name, set()).update(fallback.gemms)
    return {module: tuple(gemm for gemm in GEMMS if gemm in gemms) for module, gemms in found.items()}


def precision_of(cast: Cast | None) -> str:
    """Return the stacks' name of a precision for both operands of a GEMM: bf16, mxfp8, blockwise, tensorwise; or nothing."""
    if cast is None:
        return "bf16"
    is_fp8 = FORMATS[cast.format].bits == 8 and cast.scaling == "current"
    return {"1x32": "mxfp8", "1x128": "blockwise", "128x128": "blockwise", "tensorwise": "tensorwise"}.get(
        cast.granularity if is_fp8 else "", ""
    )


def precisions(run: Run, fallbacks: Sequence[Fallback]) -> dict[str, dict[str, str]]:
    """Return by module and GEMM the precision that entries ask for, globs expanded; one operand in BF16 takes its GEMM."""
    names = [str(module["fqn"]) for module in run.modules if module.get("fp8")]
    found: dict[str, dict[str, str]] = {}
    for fallback in fallbacks:
        precision = precision_of(fallback.cast)
        if precision and (fallback.cast is None or fallback.tensor == "*"):
            matched = [] if fallback.module in names else [name for name in names if fnmatchcase(name, fallback.module)]
            for name in matched or [fallback.module]:
                found.setdefault(name, {}).update(dict.fromkeys(fallback.gemms, precision))
    return found


def whole_modules(run: Run, fallbacks: Sequence[Fallback]) -> dict[str, str]:
    """Return by module the one precision of a format without single GEMMs: the highest that any of its GEMMs asks for."""
    return {
        module: next(name for name in ("bf16", "tensorwise", "blockwise", "mxfp8") if name in gemms.values())
        for module, gemms in precisions(run, fallbacks).items()
    }


def not_in_fp8(run: Run) -> list[str]:
    """Return the modules that the recorded run left in high precision; none where nothing ran in FP8."""
    names = [str(module["fqn"]) for module in run.modules if not module.get("fp8")]
    return names if len(names) < len(run.modules) else []


def limits(run: Run, fallbacks: Sequence[Fallback], *, per_gemm: bool, has_precisions: bool = False) -> list[str]:
    """Return the notes that a format without casts, operands and steps needs.

    Args:
        run: the run.
        fallbacks: the list.
        per_gemm: whether the format can leave single GEMMs of a module in BF16.
        has_precisions: whether it can give a module one of the precisions of :func:`precision_of`.
    """
    notes = []
    casts = [
        f"{f.module} {' '.join(f.gemms)} {f.tensor.replace('*', 'operands')} in {f.cast}"
        for f in fallbacks
        if f.cast and not (has_precisions and f.tensor == "*" and precision_of(f.cast))
    ]
    if casts:
        notes.append(f"cannot change a cast; make these changes in the recipe of the stack instead: {several(casts)}")
    one = [f"{f.module} {f.tensor}" for f in fallbacks if f.cast is None and f.tensor != "*"]
    if one:
        notes.append(f"cannot leave one operand alone in BF16; the whole GEMM runs in it: {several(one)}")
    partly = [f"{module} ({' '.join(gemms)})" for module, gemms in in_bf16(run, fallbacks).items() if len(gemms) < len(GEMMS)]
    rungs = {module: gemms for module, gemms in precisions(run, fallbacks).items() if "bf16" not in gemms.values()}
    some = [f"{module} ({' '.join(gemms)})" for module, gemms in rungs.items() if len(gemms) < len(GEMMS)]
    if some and has_precisions and not per_gemm:
        notes.append(f"cannot give single GEMMs another precision; the whole module runs in it: {several(some)}")
    if partly and not per_gemm:
        notes.append(f"cannot leave single GEMMs in BF16; the whole module runs in it: {several(partly)}")
    steps = [f"{f.module} {f.span()}" for f in fallbacks if f.is_scheduled]
    if steps:
        notes.append(f"has no steps; start the job again, with and without the file, at these steps: {several(steps)}")
    return notes


def several(names: Sequence[str], most: int = 8) -> str:
    """Return names in one line, the first few of many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(one_line(name) for name in names[:most]) + rest


def one_line(text: str) -> str:
    """Return text that stays one line in any format, a comment say: a run from elsewhere may hold any name."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def yaml_string(text: str) -> str:
    """Return a YAML scalar in double quotes that stands for any text."""
    plain = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(plain.get(c, c if " " <= c <= "~" else f"\\U{ord(c):08x}") for c in text) + '"'


def comments(lines: Sequence[str], mark: str = "# ") -> str:
    """Return lines as comments."""
    return "".join(f"{mark}{one_line(line)}\n" for line in lines)


def header(run: Run, name: str, notes: Sequence[str]) -> list[str]:
    """Return the first comment lines of an exported file: where it comes from, and what it cannot say."""
    about = f"fp8debug fallback {run.name} --to {name}: candidates, to be proved by a run with them"
    return [about, *(f"{name} {note}" for note in notes)]


def reasons(fallbacks: Sequence[Fallback]) -> Mapping[str, str]:
    """Return by module why it should run in BF16."""
    found: dict[str, dict[str, None]] = {}
    for fallback in fallbacks:
        if fallback.cast is None:
            found.setdefault(fallback.module, {}).update(dict.fromkeys(fallback.reasons))
    return {module: " ".join(codes) or "by hand" for module, codes in found.items()}

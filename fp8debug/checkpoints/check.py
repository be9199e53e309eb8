"""``check_checkpoint()``: read a checkpoint once, ask every rule, join findings of one cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from fp8debug.checkpoints.codes import OF_DTYPE, is_float
from fp8debug.checkpoints.files import Checkpoint, Tensor, open_checkpoint
from fp8debug.checkpoints.layouts import LAYOUTS, Weight
from fp8debug.checkpoints.layouts.base import extent
from fp8debug.checkpoints.names import MARKERS, is_scale, parts_of, scaled_by, shift
from fp8debug.checkpoints.report import CheckReport
from fp8debug.checkpoints.rules import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.checkpoints.rules.base import JudgedTensor, JudgedWeight
from fp8debug.checkpoints.scan import (
    PlainFacts,
    PlainRows,
    QuantizedRows,
    RowSource,
    SomeRows,
    StackedRows,
    Task,
    TurnedRows,
    WeightFacts,
    run_all,
    scan_plain,
    scan_weight,
)
from fp8debug.errors import UsageError
from fp8debug.rules.engine.selection import Thresholds, chosen, configured

#: What wrappers of training frameworks add to a module's name.
_WRAPPERS = re.compile(r"(?:^module\.)|(?:_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.)")
#: Endings of the names of codes, after that of the scale without its own.
_CODES = ("", "_packed", "_blocks", "_qdata")
#: What layouts add to the name of a weight's codes.
_WEIGHT_PARTS = re.compile(r"^(.*weight)(?:_packed|_blocks|\._data|\._rowwise_data)$|^(.*)\._(\w+)_qdata$")
#: Tensors of a reference that exports leave out: tied to another one, or computed anew.
_OPTIONAL = re.compile(r"(?:^|.*\.)(?:lm_head\.weight|rotary_emb\.inv_freq|inv_freq|position_ids|masked_bias|attn\.bias)")


def check_checkpoint(
    path: str | Path,
    against: str | Path | None = None,
    select: Sequence[str] = ("F",),
    ignore: Sequence[str] = (),
    *,
    thresholds: Thresholds | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    workers: int | None = None,
) -> CheckReport:
    """Judge a checkpoint by every rule over checkpoints.

    Args:
        path: a safetensors file, an index file, or a folder; local or in object storage.
        against: the reference, usually the BF16 original or the master weights; a quantized one is dequantized.
        select: codes, beginnings of codes (``F21``) or names of rules to report.
        ignore: the same, not to report.
        thresholds: by rule (code or name), limits to use in place of the rule's own.
        progress: called after each tensor with bytes done, bytes in all, and the tensor's name.
        workers: threads; as many as cores by default.

    Returns:
        the findings, errors first, then by name, numbers in order.

    Raises:
        UnknownNameError: a code that no rule begins with, or a threshold that a rule does not have.
        UsageError: no rule is left to report.
        RunError: the checkpoint or the reference cannot be read.
    """
    rules: dict[str, FileRule] = configured(thresholds, CHECKS)
    wanted = chosen([select] if isinstance(select, str) else select, "select", CHECKS)
    wanted -= chosen([ignore] if isinstance(ignore, str) else ignore, None, CHECKS)
    if not wanted:
        raise UsageError("nothing is left to report: every rule that is selected is ignored")
    checkpoint = open_checkpoint(path)
    reference = None if against is None else open_checkpoint(against)
    found = _sorted_out(checkpoint)
    judged, seen = _scanned(found, reference, progress, workers)
    findings: list[TensorFinding] = []
    explained: set[str | None] = set()
    skipped = []
    ordered = sorted(rules.values(), key=lambda rule: (rule.only_unexplained, rule.code))
    for rule in ordered:
        if rule.needs_reference and reference is None:
            skipped += [(rule.code, "no reference was given; --against compares with one")] if rule.code in wanted else []
            continue
        of_rule = [f for f in rule.check(judged) if not (rule.only_unexplained and f.tensor in explained)]
        explained |= {f.tensor for f in of_rule if f.severity > "info"}
        findings += of_rule
    order = {name: place for place, name in enumerate(sorted({*seen, *checkpoint.tensors}, key=_natural))}
    return CheckReport(
        _joined([f for f in findings if f.code in wanted], order),
        checkpoint=str(path),
        against=None if against is None else str(against),
        judged=judged,
        not_judged=found.not_judged,
        skipped=skipped,
        thresholds={code: rule.thresholds for code, rule in rules.items() if code in wanted},
    )


@dataclass(frozen=True, kw_only=True)
class _Sorted:
    """A checkpoint's tensors by what they are."""

    checkpoint: Checkpoint
    weights: Sequence[Weight]
    plains: Sequence[Tensor]
    unread: Sequence[tuple[Tensor, str]]
    not_judged: Sequence[tuple[str, str]]


def _sorted_out(checkpoint: Checkpoint) -> _Sorted:
    claimed: set[str] = set()
    weights = [weight for layout in LAYOUTS for weight in layout.weights(checkpoint, claimed)]
    plains, unread, not_judged = [], [], []
    for tensor in checkpoint.tensors.values():
        if tensor.name in claimed:
            continue
        reason = _unread(tensor, checkpoint, claimed)
        if reason is None and _is_of_unread(tensor, checkpoint):
            not_judged.append((tensor.name, "scale of a weight that lies elsewhere or could not be read"))
        elif reason == "":
            not_judged.append((tensor.name, "scale of a weight in another quantization"))
        elif reason is not None:
            unread.append((tensor, reason))
        elif tensor.name in MARKERS:
            not_judged.append((tensor.name, "a marker, no weight"))
        elif tensor.dtype in OF_DTYPE or (tensor.dtype == "U8" and tensor.name.endswith(("weight_packed", "_qdata"))):
            weights.append(_without_scale(tensor))
        elif is_float(tensor.dtype):
            plains.append(tensor)
        else:
            not_judged.append((tensor.name, f"{tensor.dtype}, which no layout of FP8, MX or NVFP4 names"))
    weights.sort(key=lambda weight: _natural(weight.name))
    return _Sorted(checkpoint=checkpoint, weights=weights, plains=plains, unread=unread, not_judged=not_judged)


def _without_scale(tensor: Tensor) -> Weight:
    is_fp4 = tensor.dtype in ("U8", "F4")
    batch, rows, columns = extent(tensor.shape, is_packed=tensor.dtype == "U8")
    return Weight(
        name=tensor.name.removesuffix("_packed"),
        layout="none",
        data=tensor,
        format="e2m1fn" if is_fp4 else OF_DTYPE[tensor.dtype],
        is_packed=is_fp4,
        batch=batch,
        rows=rows,
        columns=columns,
        block=(max(rows, 1), max(columns, 1)),
    )


def _weight_of_codes(name: str) -> str:
    """Return the name of the weight that a tensor of codes belongs to, by any layout."""
    found = _WEIGHT_PARTS.match(name)
    if found is None:
        return name
    return found[1] or f"{found[2]}.{found[3]}"


def _is_of_unread(tensor: Tensor, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor is the scale of a weight that lies in another file, or in the unreadable part of its own."""
    stem = None if is_scale(tensor.name) else scaled_by(tensor.name)
    return stem is not None and any(f"{stem}{ending}" in checkpoint.elsewhere for ending in _CODES)


def _unread(tensor: Tensor, checkpoint: Checkpoint, claimed: set[str]) -> str | None:
    """Return why a tensor is a scale that nothing reads, "" where another quantization reads it, None for other tensors."""
    stem = None if is_scale(tensor.name) else scaled_by(tensor.name)
    if stem is None:
        return None
    names = tuple(f"{stem}{ending}" for ending in _CODES)
    base = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if base is None:
        is_weight = stem.endswith("weight")
        if not is_weight or any(name in checkpoint.elsewhere for name in names) or checkpoint.is_part:
            return None
        return f"there is no {stem.rpartition('.')[2]}, packed or not"
    if base.name in claimed:
        return "the weight has another scale, which is read"
    if is_float(base.dtype):
        return f"the weight is {base.dtype}"
    return "" if base.dtype not in OF_DTYPE else f"a {tensor.dtype} scale of this name belongs to no layout"


def _scanned(
    found: _Sorted, reference: Checkpoint | None, progress: Callable[[int, int, str], None] | None, workers: int | None
) -> tuple[Judged, list[str]]:
    shapes = {weight.name: (weight.batch * weight.rows, weight.columns) for weight in found.weights}
    shapes |= {one.name: (one.numel // max(1, columns), columns) for one in found.plains for columns in (_columns(one),)}
    batches = {weight.name: weight.batch for weight in found.weights} | {one.name: extent(one.shape)[0] for one in found.plains}
    other = None if reference is None else _Reference(reference, shapes, batches)
    weights: dict[int, WeightFacts] = {}
    plains: dict[int, PlainFacts] = {}
    unmatched: list[tuple[str, str]] = []
    tasks = []
    for place, weight in enumerate(found.weights):
        rows = None
        if other is not None and weight.scale is not None and weight.grid_fault is None:
            rows = other.rows(weight.name, shapes[weight.name], unmatched, batches[weight.name])
        size = weight.data.num_bytes * (1 if rows is None else 3)
        run = partial(scan_weight, weight, rows)
        tasks.append(Task(num_bytes=size, name=weight.name, run=run, store=partial(weights.__setitem__, place)))
    for place, tensor in enumerate(found.plains):
        rows = None
        if other is not None and not is_scale(tensor.name):
            rows = other.rows(tensor.name, shapes[tensor.name], unmatched, batches[tensor.name])
        plain = partial(scan_plain, tensor, rows)
        tasks.append(Task(num_bytes=tensor.num_bytes, name=tensor.name, run=plain, store=partial(plains.__setitem__, place)))
    run_all(tasks, progress, workers)
    if other is not None:
        have = [weight.name for weight in found.weights] + [tensor.name for tensor in found.checkpoint.tensors.values()]
        unmatched += other.missing(have, found.checkpoint.elsewhere, is_part=found.checkpoint.is_part)
    judged = Judged(
        checkpoint=found.checkpoint,
        weights=[JudgedWeight(weight, weights[place]) for place, weight in enumerate(found.weights)],
        plains=[JudgedTensor(tensor, plains[place]) for place, tensor in enumerate(found.plains)],
        unread=found.unread,
        reference=reference,
        unmatched=unmatched,
    )
    return judged, [weight.name for weight in found.weights]


Opens = Callable[[ExitStack], RowSource]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A tensor's rows, or several tensors' below one another.

    Attributes:
        opens: opens them.
        shape: rows and columns.
        used: names in the reference.
    """

    opens: Opens
    shape: tuple[int, int]
    used: tuple[str, ...]


class _Reference:
    """The tensors of a reference by name, without what wrappers add to it.

    Tensors that one of the two joins (q, k and v; gate and up; the experts of a layer) are compared part by part, and names may
    begin otherwise (``model.``, ``model.language_model.``). Experts' tensors that one of the two stores as [experts, inputs,
    outputs], as transformers does for gpt-oss and Llama 4, are transposed: all of a module where the shape of one says so.

    Args:
        reference: the checkpoint.
        shapes: rows and columns of the tensors that are compared with it, by name.
        batches: matrices of those that have several.
    """

    def __init__(self, reference: Checkpoint, shapes: Mapping[str, tuple[int, int]], batches: Mapping[str, int]) -> None:
        found = _sorted_out(reference)
        weights = {_bare(weight.name): weight for weight in found.weights}
        plains = {_bare(tensor.name): tensor for tensor in found.plains if not is_scale(tensor.name)}
        shapes = {_bare(name): shape for name, shape in shapes.items()}
        batches = {_bare(name): batch for name, batch in batches.items()}
        whole = {*weights, *plains}
        parts = {part for name in whole for ways in parts_of(name, _batch(weights.get(name), plains.get(name))) for part in ways}
        own = [part for name in shapes for ways in parts_of(name, batches.get(name, 1)) for part in ways]
        take, give = shift([*shapes, *own], whole | parts) or ("", "")

        def moved(name: str) -> str:
            return give + name[len(take) :] if name.startswith(take) else name

        self._weights = {moved(name): weight for name, weight in weights.items()}
        self._plains = {moved(name): tensor for name, tensor in plains.items()}
        self._wholes: dict[str, tuple[str, int]] = {}  # part -> what joins it, and its first row
        self._turned: set[str] = set()  # modules whose matrices lie transposed
        for name in (*self._weights, *self._plains):
            batch = _batch(self._weights.get(name), self._plains.get(name))
            if batch > 1 and batches.get(name) == batch:
                self._compare_shape(name, batch, shapes[name])
            for ways in parts_of(name, batch):
                if all(part in shapes for part in ways):
                    if batch > 1:
                        self._compare_shape(name, batch, (sum(shapes[part][0] for part in ways), shapes[ways[0]][1]))
                    starts = accumulate((shapes[part][0] for part in ways), initial=0)
                    self._wholes.update((part, (name, start)) for part, start in zip(ways, starts, strict=False))
        self._used: set[str] = set()

    def rows(self, name: str, shape: tuple[int, int], unmatched: list[tuple[str, str]], batch: int = 1) -> Opens | None:
        """Return what opens the rows of a tensor; None, with the reason in ``unmatched``, where it cannot be compared."""
        bare = _bare(name)
        found = self._one(bare) or self._joined(bare, batch) or self._part(bare, shape)
        if found is None:
            unmatched.append((name, "not compared: the reference has no such tensor"))
            return None
        if isinstance(found, str):
            unmatched.append((name, f"not compared: {found}"))
            return None
        self._used.update(found.used)
        if found.shape == shape:
            return found.opens
        theirs = f"the reference's is {found.shape[0]}x{found.shape[1]}"
        unmatched.append((name, f"the tensor is {shape[0]}x{shape[1]}, {theirs}"))
        return None

    def _one(self, bare: str) -> _Rows | str | None:
        plain, weight = self._plains.get(bare), self._weights.get(bare)
        shape = _shape(weight, plain)
        if plain is not None:
            opens: Opens = partial(PlainRows, plain)
        elif weight is None:
            return None
        elif weight.scale is None or weight.grid_fault is not None:
            return "the reference's own scales are missing or do not fit it"
        else:
            opens = partial(QuantizedRows, weight)
        batch = _batch(weight, plain)
        if batch > 1 and bare.rpartition(".")[0] in self._turned:
            stored = shape[0] // batch, shape[1]
            return _Rows(opens=partial(_turned, opens, stored), shape=(batch * stored[1], stored[0]), used=(bare,))
        return _Rows(opens=opens, shape=shape, used=(bare,))

    def _compare_shape(self, name: str, batch: int, ours: tuple[int, int]) -> None:
        """Note the module of a tensor of the reference whose matrices are the transposes of ours."""
        rows, columns = _shape(self._weights.get(name), self._plains.get(name))
        if rows // batch != columns and (ours[0] // batch, ours[1]) == (columns, rows // batch):
            self._turned.add(name.rpartition(".")[0])

    def _joined(self, bare: str, batch: int) -> _Rows | str | None:
        """Return the parts of a tensor that the reference has one by one."""
        for names in parts_of(bare, batch):
            parts = [self._one(name) for name in names]
            if any(part is None for part in parts):
                continue
            known = [part for part in parts if isinstance(part, _Rows)]
            self._used.update(names)
            columns = {part.shape[1] for part in known}
            if len(known) < len(parts) or len(columns) != 1 or bare.endswith("bias"):
                return "the reference has its parts one by one, and they cannot be joined"
            stacked = [(part.opens, part.shape[0]) for part in known]
            shape = sum(rows for _, rows in stacked), columns.pop()
            return _Rows(opens=lambda _, stacked=stacked: StackedRows(stacked), shape=shape, used=names)  # type: ignore[misc]  # a default binds it
        return None

    def _part(self, bare: str, shape: tuple[int, int]) -> _Rows | str | None:
        """Return the rows of a tensor that the reference joins with others."""
        name, start = self._wholes.get(bare, ("", 0))
        whole = self._one(name) if name else None
        if not isinstance(whole, _Rows):
            return whole
        self._used.add(name)
        if bare.endswith("bias") or whole.shape[1] != shape[1] or start + shape[0] > whole.shape[0]:
            return f"the reference joins it with others in {name}, in another order of dimensions"
        opens = whole.opens
        return _Rows(opens=lambda stack: SomeRows(opens(stack), start), shape=shape, used=(name,))

    def missing(self, names: Iterable[str], unread: Iterable[str], *, is_part: bool) -> list[tuple[str, str]]:
        """Return the tensors that the reference has and the checkpoint lacks."""
        if is_part:
            return []
        have = {_bare(name) for name in names} | self._used
        lacking = [name for name in (*self._weights, *self._plains) if name not in have and not _OPTIONAL.fullmatch(name)]
        elsewhere = {_bare(_weight_of_codes(name)) for name in unread}  # of which F204 and F205 tell
        return [(name, "the reference has the tensor, the checkpoint does not") for name in lacking if name not in elsewhere]


def _turned(opens: Opens, stored: tuple[int, int], stack: ExitStack) -> RowSource:
    return TurnedRows(opens(stack), stored)


def _shape(weight: Weight | None, plain: Tensor | None) -> tuple[int, int]:
    """Return the rows of all matrices of a tensor, and its columns."""
    if plain is not None:
        columns = _columns(plain)
        return plain.numel // max(1, columns), columns
    return (0, 0) if weight is None else (weight.batch * weight.rows, weight.columns)


def _columns(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.shape else 1


def _batch(weight: Weight | None, plain: Tensor | None) -> int:
    """Return the number of matrices of a tensor."""
    if weight is not None:
        return weight.batch
    return extent(plain.shape)[0] if plain is not None else 1


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts layer 10 behind layer 2."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() and len(part) < 19 else 0, part) for part in re.split(r"(\d+)", name)
    ]


def _bare(name: str) -> str:
    return _WRAPPERS.sub("", name)


def _joined(findings: Sequence[TensorFinding], order: dict[str, int]) -> list[TensorFinding]:
    """Join findings of one rule and severity into the first by name; the others' names are in ``also``."""
    last = len(order)
    groups: dict[tuple[str, Any], list[TensorFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.severity), []).append(finding)
    joined = []
    for group in groups.values():
        group.sort(key=lambda f: order.get(f.tensor or "", last))
        first = group[0]
        names = dict.fromkeys(name for f in group for name in (*([] if f is first else [f.tensor or f.file or ""]), *f.also))
        joined.append(replace(first, also=tuple(name for name in names if name != (first.tensor or first.file))))
    return sorted(joined, key=lambda f: (-f.severity.rank, order.get(f.tensor or "", last), f.code))

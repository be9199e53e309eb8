"""``compare_paths()``: the first module whose difference is its own given the input it got, and its cause.

A module's own difference is one of its weight, of the error that its cast and GEMM make, of its output where its input is the
same, or of what lies between it and the modules before it. What a difference of the input makes is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fp8debug.checkpoints.names import role_of
from fp8debug.errors import RunError
from fp8debug.escaping import one_line
from fp8debug.parity.after_head import judge_logits
from fp8debug.parity.dump import PathDump, aligned, is_attention, layer_of, moved, open_dump, parted
from fp8debug.parity.logprobs import HEADS, metrics_of, odd_logprobs
from fp8debug.parity.measures import Measures, is_of_expert, is_of_one_expert, measure_module, nmse
from fp8debug.parity.names import ModuleOutput, Names, matched
from fp8debug.parity.report import ParityReport
from fp8debug.parity.rules import (
    ActivationCast,
    KernelDiffers,
    PathFinding,
    PathsDiffer,
    PrecisionDiffers,
    RoutingDiffers,
    StaleRolloutWeight,
    WeightCast,
    WeightScale,
    not_finite,
)
from fp8debug.parity.runs import is_run, measure_runs, notes_of_runs

_STALE, _SCALE, _CAST, _ACTIVATION = StaleRolloutWeight(), WeightScale(), WeightCast(), ActivationCast()
_ROUTING, _KERNEL, _PRECISION, _DIFFER = RoutingDiffers(), KernelDiffers(), PrecisionDiffers(), PathsDiffer()
#: Times what a repetition of one path shows from which on a difference is none of its noise.
ABOVE_NOISE = 4.0
#: Growth of a small difference d through a cast to FP8, whose step turns it into some codes: GROWTH * sqrt(d).
GROWTH_OF_CODES = 0.06
#: Share of the tokens that a small difference d before the router may send elsewhere, of experts that are nearly equal:
#: FLIPS_OF_NOISE * sqrt(d).
FLIPS_OF_NOISE = 8.0
#: Squared relative error of a score that is rounded to BF16, on average.
ROUNDING_OF_SCORES = 2.0**-18 / 3
#: Share of the modules from which on a difference is one of the paths, not of a module.
ALIKE = 0.5
#: Limits are so many times as wide where one path adds an adapter's product and the other has merged it: base, product and sum
#: are rounded to BF16 (2.8e-6 each, and more of the sum where they cancel).
ROUNDINGS_OF_ADAPTER = 4.0
#: Error of a module's output beyond which no cast of its input makes it, unless values clip: 10 dB.
NO_CAST = 0.1
#: Modules of one role among which the owner of a weight is looked for, and rows that are compared.
MAX_PEERS, PEER_ROWS = 4096, 8
#: Rows of a weight by which the part of an adapter in it is told.
ADAPTER_ROWS = 256
#: Cosine of two weights of one module from which on they are steps of one tensor.
OTHER_TENSOR = 0.7
_PATHS = ("training", "rollout")
_CURE_OF_ATTENTION = (
    "compare RoPE (theta, scaling, halves or pairs), softmax scale, mask and window, heads of keys and values, and the KV cache's"
    " precision; use one attention backend in both paths"
)


def compare_paths(
    train: str | Path,
    rollout: str | Path,
    repeat: str | Path | None = None,
    *,
    names: Names | str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> ParityReport:
    """Compare two dumps, or two recorded runs, module by module.

    Args:
        train: dump of the training's path, or a recorded run.
        rollout: the same of the rollout's.
        repeat: a second dump of one of the two, or of the training with another batch; measures the noise.
        names: table of names, or the TOML file of one.
        progress: called with modules done, modules in all, and a name.

    Raises:
        RunError: a dump cannot be read, or the two have no module or token in common.
        UsageError: the table of names cannot be used.
    """
    table = names if isinstance(names, Names) else Names.read(names)
    if is_run(train) and is_run(rollout):
        measures, single, left = measure_runs(train, rollout, table)
        problems = notes_of_runs(train, rollout)
        if repeat is not None:
            problems.append("a repetition of a run is not read: statistics of the same tokens have no noise")
        return ParityReport(_joined(single, measures), train=str(train), rollout=str(rollout), repeat=None, modules=measures,
                            metrics={}, unmatched=left, problems=problems)  # fmt: skip
    if is_run(train) or is_run(rollout):
        run, other = (train, rollout) if is_run(train) else (rollout, train)
        raise RunError(f"{run} is a recorded run and {other} is none: give two runs, or two dumps (record_path() writes one)")
    ours, theirs = open_dump(train), open_dump(rollout)
    again = None if repeat is None else open_dump(repeat)
    problems = [
        f"{dump.name}: {one_line(text)}" for dump in (ours, theirs, *([again] if again else [])) for text in dump.problems
    ]
    found, left = _measured(ours, theirs, table, progress, problems)
    if ours.modules and theirs.modules and not found:
        a, b = next(iter(ours.modules)), next(iter(theirs.modules))
        raise RunError(f"no module of {train} is one of {rollout} ({a} against {b}); map their names with --names TABLE")
    noise: dict[str, Measures] = {}
    if again is not None:
        is_ours = len(set(again.modules) & set(ours.modules)) >= len(set(again.modules) & set(theirs.modules))
        base = ours if is_ours else theirs
        floor, _ = _measured(base, again, table, None, problems)
        noise = {m.module if is_ours else _ours_of(m.module, found): m for m in floor}
    problems += [*_few_modules(ours, theirs, found), *_few_tokens(ours, theirs)]
    metrics = metrics_of(ours, theirs, problems)
    findings = [_located(finding, ours, theirs, found, problems) for finding in judge(found, noise)]
    findings = judge_logits(findings, ours, theirs, found, _KERNEL, problems)
    findings += [_DIFFER.found(text, value=value, threshold=threshold, tensor="logprobs", cure=cure)
                 for dump, other, path in ((ours, theirs, _PATHS[0]), (theirs, ours, _PATHS[1]))
                 if (told := odd_logprobs(dump, other, path, _DIFFER.max_error, problems)) is not None
                 for text, value, threshold, cure in (told,)]  # fmt: skip
    error = metrics.get("token_mult_prob_error")
    findings = _with_positions(findings, moved(ours, theirs), found, noise, error or 0.0, problems)
    findings += _other_tokens(ours, theirs)
    if not findings and error is not None and error > _DIFFER.max_error:
        findings += _of_metric(error, metrics["num_tokens"], found, problems)
    return ParityReport(
        findings,
        train=str(train),
        rollout=str(rollout),
        repeat=None if repeat is None else str(repeat),
        modules=found,
        metrics=metrics,
        unmatched=left,
        problems=problems,
    )


def _of_metric(error: float, num_tokens: int, found: Sequence[Measures], problems: list[str]) -> list[PathFinding]:
    """Return the finding of a large difference of the log-probabilities that no module explains.

    Noise that grows on its way to the head is none: the problems get a line.
    """
    text = f"token_mult_prob_error is {error:.3g} over {num_tokens} tokens; no recorded module differs beyond noise"
    head = _head_of_noise(found)
    if head is None:
        return [_DIFFER.found(text, value=error, threshold=_DIFFER.max_error)]
    problems.append(
        f"{text}, which grows to {head.input:.2g} of the square of the head's input; batch-invariant kernels and one attention"
        " backend in both paths avoid it"
    )
    return []


def _head_of_noise(found: Sequence[Measures]) -> Measures | None:
    """Return the head where the paths begin alike and noise has grown to its input and output; else None."""
    recorded = [m for m in found if not _is_rotary(m.module) and (m.input, m.output) != (None, None)]
    head = next((m for m in reversed(recorded) if m.module.rpartition(".")[2] in HEADS), None)
    if head is None or min(head.input or 0.0, head.output or 0.0) <= _KERNEL.max_same:
        return None
    first = recorded[0].input if recorded[0].input is not None else recorded[0].output
    return head if (first or 0.0) <= _KERNEL.max_same else None


def _few_modules(ours: PathDump, theirs: PathDump, found: Sequence[Measures]) -> list[str]:
    """Return a line where the paths share less than half of the modules of the one that has fewer."""
    fewer = min(len(ours.modules), len(theirs.modules))
    if len(found) >= fewer / 2:
        return []
    return [f"only {len(found)} of {fewer} modules have the same name in both: another model, or map names with --names TABLE"]


def _few_tokens(ours: PathDump, theirs: PathDump) -> list[str]:
    """Return a line where the paths share less than half of the shorter one's tokens."""
    rows = aligned(ours, theirs)
    counts = [sum(key is not None for key in dump.keys() or ()) for dump in (ours, theirs)]
    if rows is None or len(rows[0]) >= min(counts) / 2:
        return []
    return [f"only {len(rows[0])} of {min(counts)} tokens are in both paths; record both on the same tokens"]


def _have_same_tokens(ours: PathDump, theirs: PathDump, rows: tuple[Any, Any]) -> bool:
    """Return whether both read the same tokens, in any order, and the same padding."""
    counts = {sum(key is not None for key in dump.keys() or ()) for dump in (ours, theirs)}
    return counts == {len(rows[0])} and ours.num_tokens == theirs.num_tokens


def _other_tokens(ours: PathDump, theirs: PathDump) -> list[PathFinding]:
    """Return a finding where the paths read other tokens from some position on."""
    found = parted(ours, theirs)
    if found is None:
        return []
    place, mine, other = found
    text = (
        f"the paths read other tokens: at position {place} of a sequence training has id {mine} and the rollout {other}; what"
        " follows is not compared"
    )
    cure = "compare the chat template, special tokens and truncation of both paths, and record both on the same token ids"
    return [_DIFFER.found(text, tensor="tokens", value=float(place), cure=cure)]


def _with_positions(
    findings: Sequence[PathFinding],
    places: tuple[int, int] | None,
    found: Sequence[Measures],
    noise: Mapping[str, Measures],
    error: float,
    problems: list[str],
) -> list[PathFinding]:
    """Return the findings with those of rotary embeddings judged by what reads them: attention does not see a common shift.

    Where nothing else differs, other positions are no finding, and a line of the problems.

    Args:
        findings: so far.
        places: positions of the first common token, where they differ.
        found: all modules.
        noise: those of a repetition.
        error: of the log-probabilities.
        problems: takes the line.
    """
    turned = [f for f in findings if _is_rotary(f.module or "")]
    rest = [f for f in findings if not _is_rotary(f.module or "")]
    if places is None and not turned:
        return list(findings)
    others = [m for m in found if not _is_rotary(m.module)]
    is_read = any(is_attention(m.module.rpartition(".")[0]) and None not in (m.input, m.output) for m in others)
    is_noise = error <= _DIFFER.max_error or _head_of_noise(found) is not None
    is_harmless = is_read and is_noise and not rest and not judge(others, noise)
    text = (
        ""
        if places is None
        else f"the same tokens stand at other positions: at {places[0]} in training and at {places[1]} in the rollout"
    )
    if is_harmless:
        more = "nothing else that was recorded differs, as where all positions are shifted"
        problems.append(f"{text or one_line(turned[0].message)}; {more}")
        return []
    if places is None:
        return [*turned, *rest]
    cure = (
        "count positions from the first token that is no padding in both paths; learned embeddings depend on them, rotary ones on"
        " differences alone"
    )
    value = float(places[1] - places[0])
    return [_DIFFER.found(text, tensor="positions", value=value, cure=cure), *rest]


def _is_rotary(name: str) -> bool:
    return "rotary" in name.rpartition(".")[2]


def _located(
    finding: PathFinding, ours: PathDump, theirs: PathDump, found: Sequence[Measures], problems: list[str]
) -> PathFinding:
    """Say whose weight a stale one is: that of another module of its role or of its parent, or its own without its adapter."""
    m = next((one for one in found if one.module == finding.module), None)
    if finding.code != _STALE.code or finding.tensor != "weight" or m is None:
        return finding
    try:
        return _of_adapter(finding, ours, theirs, m) or _of_peer(finding, ours, theirs, m) or finding
    except (OSError, ValueError) as error:
        problems.append(f"{one_line(m.module)}: whose weight the rollout has is not known: {one_line(str(error))}")
        return finding


def _of_peer(finding: PathFinding, ours: PathDump, theirs: PathDump, m: Measures) -> PathFinding | None:
    name, parent = m.module, m.module.rpartition(".")[0]
    beside = [one for one in ours.modules if one != name and one.rpartition(".")[0] == parent]
    peers = [*beside, *(one for one in ours.modules if one != name and role_of(one) == role_of(name) and one not in beside)]
    start, number = m.weight_rows[1]
    with ExitStack() as stack:
        if not number or (held := theirs.weight(m.theirs, stack)) is None:
            return None
        some = held[0].read(start, start + min(PEER_ROWS, number))
        for peer in peers[:MAX_PEERS]:
            with ExitStack() as inner:
                own = ours.weight(peer, inner)
                if own is None or own[1] != (number, held[1][1]):
                    continue
                error = nmse(own[0].read(0, len(some)), some)
            limit = _CAST.max_cast if own[2] or held[2] else _STALE.max_same
            if error is not None and error <= limit:
                how = "names are mapped wrongly"
                cure = "look at how names are mapped when weights are sent: pipeline stages, layer and expert numbers"
                if peer in beside:
                    how = f"parts of {m.theirs if m.weight_rows[1][1] < held[1][0] else parent} are exchanged"
                    cure = "look at the order in which the weights of a joined module are put together"
                text = f"{name}: the rollout's weight is training's {peer}: {how}"
                return replace(finding, message=text, cure=cure)
    return None


def _of_adapter(finding: PathFinding, ours: PathDump, theirs: PathDump, m: Measures) -> PathFinding | None:
    """Return a finding that tells what part of one path's adapter is in the other's weight, if it explains the difference."""
    if m.adapter[0] == m.adapter[1]:
        return None
    path = 0 if m.adapter[0] else 1
    with_adapter, other = (ours, theirs) if m.adapter[0] else (theirs, ours)
    names = m.module, m.theirs
    first, (start, number) = m.weight_rows[path][0], m.weight_rows[1 - path]
    with ExitStack() as stack:
        sources = (
            with_adapter.weight(f"{names[path]}.base_layer", stack),
            with_adapter.weight(names[path], stack),
            other.weight(names[1 - path], stack),
        )
        if any(one is None for one in sources) or not number:
            return None
        base, whole, held = (
            one[0].read(row, row + min(ADAPTER_ROWS, number)).astype(float)
            for one, row in zip(sources, (first, first, start), strict=True)
            if one is not None
        )
    delta, difference = whole - base, held - base
    size = float((delta * delta).sum())
    if not size > 0:
        return None
    part = float((delta * difference).sum()) / size
    rest = float(((difference - part * delta) ** 2).sum()) / size
    if rest > _SCALE.max_rest:
        return None
    other_path = _PATHS[1 - path]
    if abs(part) < _SCALE.max_rest:
        text = f"{m.module}: the {other_path}'s weight is that of the base, without the adapter that the {_PATHS[path]} adds"
        cure = f"merge the adapter before the weights are loaded in the {other_path}, or load it there as well"
    else:
        text = (
            f"{m.module}: the {other_path}'s weight has the adapter's product {part:.3g} times, the {_PATHS[path]} adds it once"
        )
        cure = "compare the adapter's scaling (alpha / r), and whether it was merged more than once"
    return replace(finding, message=text, cure=cure, value=part)


def _ours_of(name: str, found: Sequence[Measures]) -> str:
    return next((m.module for m in found if m.theirs == name), name)


def _measured(
    ours: PathDump,
    theirs: PathDump,
    table: Names,
    progress: Callable[[int, int, str], None] | None,
    problems: list[str],
) -> tuple[list[Measures], list[tuple[str, str]]]:
    """Return the measures of the common modules in execution order, and the others with their path."""
    pairs, mine, others = matched(list(ours.modules), list(theirs.modules), table)
    rows = aligned(ours, theirs)
    same = rows is None or _have_same_tokens(ours, theirs, rows)
    found: list[Measures] = []
    whole = _layers_alone((list(ours.modules), list(theirs.modules)), pairs)
    for number, (name, first, second) in enumerate(pairs):
        if progress is not None:
            progress(number, len(pairs), name)
        if _is_other_function(ours, theirs, first.module, second.module, table):
            mine, others = [*mine, first.module], [*others, second.module]
            continue
        try:
            one = measure_module(ours, theirs, name, first, second, rows, same_tokens=same)
            found.append(replace(one, skipped=whole.get(name, ())))
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{one_line(name)} cannot be compared: {one_line(str(error))}")
    return found, [(name, "training") for name in mine] + [(name, "rollout") for name in others]


def _layers_alone(
    modules: tuple[Sequence[str], Sequence[str]], pairs: Sequence[tuple[str, ModuleOutput, ModuleOutput]]
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return by common module the (path, layer) of layers that one path alone runs between it and the common one before it."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    known = [(name, first.module, second.module) for name, first, second in reversed(pairs)]
    commons = [{own: name for name, own, _ in known}, {own: name for name, _, own in known}]
    for path, names, common in zip(_PATHS, modules, commons, strict=True):
        kept = {layer_of(name) for name in common}
        alone: dict[str, None] = {}
        for name in names:
            if name in common:
                found[common[name]] = (*found.get(common[name], ()), *((path, layer) for layer in alone))
                alone = {}
            elif (layer := layer_of(name)) is not None and layer not in kept:
                alone[layer] = None
    return found


def _is_other_function(ours: PathDump, theirs: PathDump, name: str, other: str, table: Names) -> bool:
    """Return whether two modules of one name compute another function: SiLU beside vLLM's, which multiplies gate by up.

    It reads other features, or lies beside a module that joins two (gate and up) in one path alone.
    """
    first, second = ours.modules[name], theirs.modules[other]
    if first.stored or second.stored:
        return False
    sizes = first.num_columns("input"), second.num_columns("input")
    if 0 not in sizes:
        return sizes[0] != sizes[1]
    joins = [any(len(table.parts(one)) == 2 and one.rpartition(".")[0] == module.rpartition(".")[0] for one in dump.modules)
             for dump, module in ((ours, name), (theirs, other))]  # fmt: skip
    return joins[0] != joins[1]


def judge(modules: Sequence[Measures], noise: Mapping[str, Measures] | None = None) -> list[PathFinding]:
    """Return what differs, the culprit first.

    Args:
        modules: in execution order.
        noise: measures of a repetition, by module.
    """
    noise = noise or {}
    levels = _level(modules, 0), _level(modules, 1)
    limits = _limits(modules, levels)
    single: list[PathFinding] = []
    before = 0.0  # the largest difference of an output so far
    noise_before = 0.0
    is_routed = False
    of_block: dict[str, list[Measures]] = {}
    for place, m in enumerate(modules):
        repeated = noise.get(m.module)
        block = m.module.rpartition(".")[0]
        siblings = of_block.setdefault(block, [])
        is_one_kernel = before == 0 and any(one != block and _is_same_attention(one, of_block[one]) for one in of_block)
        here = limits._replace(attention=limits.plain) if is_one_kernel else limits.of_scores(_scores(siblings))
        if m.bad:
            single.append(not_finite(m.module, m.theirs, m.bad))
            break
        own = _weight(m, modules, repeated) or _arithmetic(m, levels, repeated)
        if is_of_expert(m.module) and not is_of_one_expert(m.module):  # what experts share gets rows in the order of its kernel
            single += [] if own is None else [own]
            siblings.append(m)
            continue
        routed = None if is_routed and _is_expert(m) else _routing(m, modules, place, repeated, before)
        is_routed |= routed is not None
        is_routed |= _is_expert(m) and (m.num_rows[0] != m.num_rows[1] or (m.input or 0.0) > 1e-3)  # by noise
        if routed is not None and any(f.module == routed.module for f in single):
            routed = None  # the router's own difference explains it
        if routed is not None and own is not None and routed.module == m.module:
            own, routed = replace(own, message=f"{own.message}; {m.flips or 0.0:.2%} of the tokens go to other experts"), None
        found = routed or own or _function(m) or _direct(m, repeated, before, noise_before, is_routed, here, single)
        found = found or _between(m, modules[:place], siblings, repeated, before, noise_before, is_routed, here)
        if found is not None:
            single.append(_of_layer(found, m))
        before = max(before, m.output or 0.0)
        siblings.append(m)
        if repeated is not None:
            noise_before = max(noise_before, repeated.output or 0.0)
    return _joined(single, modules)


def _is_same_attention(name: str, modules: Sequence[Measures]) -> bool:
    """Return whether the last module of an attention reads the same bits in both paths, and passes them on.

    A weight or values of zero hide what the kernels make: rows of the output are then equal.
    """
    return is_attention(name) and len(modules) > 1 and modules[-1].input == modules[-1].output == 0 and modules[-1].output_varies


def _of_layer(finding: PathFinding, m: Measures) -> PathFinding:
    """Return the finding of a layer that one path alone runs, where it explains a difference that has no cause of its own."""
    if len({path for path, _ in m.skipped}) != 1 or finding.code != _KERNEL.code or finding.value is None:
        return finding  # layers of both paths alone have other names
    path, layer = m.skipped[0]
    more = f" and {len(m.skipped) - 1} more layers" if len(m.skipped) > 1 else ""
    text = f"{layer}{more}: run in the {path} alone, and {m.module} behind differs by {finding.value:.2g}"
    cure = "compare the number of layers, pipeline stages and early exits of both paths; record both whole"
    return _DIFFER.found(f"{text} of its square", module=layer, value=finding.value, threshold=finding.threshold, cure=cure)


def _level(modules: Sequence[Measures], path: int) -> float:
    """Return the median error of the casts and GEMMs of a path."""
    known = [e for m in modules if (e := m.error[path]) is not None and "norm" not in m.kind.lower()]
    return median(known) if known else 0.0


class Limits(NamedTuple):
    """Least difference that counts where no repetition measured the noise.

    Attributes:
        plain: of modules.
        attention: of attention, whose kernels round scores and probabilities or do not.
        scores: mean square of attention's scores.
    """

    plain: float
    attention: float
    scores: float = 0.0

    def of(self, name: str) -> float:
        """Return that of a module, or of what a block computes."""
        return self.attention if is_attention(name) else self.plain

    def passed_on(self, name: str, given: float) -> float:
        """Return what a difference of an input may grow to in the output; q and k each bring theirs to the scores."""
        grown = _KERNEL.max_growth * given
        return max(grown, _of_scores(2 * given, self.scores)) if is_attention(name) else grown

    def of_scores(self, scores: float) -> Limits:
        """Return those of an attention whose scores have a mean square."""
        wider = max(1.0, _of_scores(ROUNDING_OF_SCORES, scores) / (ROUNDING_OF_SCORES * _KERNEL.max_scores))
        return self._replace(attention=self.attention * wider, scores=scores)


def _of_scores(error: float, scores: float) -> float:
    """Return the difference of attention's output that a relative error of its scores makes, all squared.

    Softmax turns a difference e of a score into one of e of the probability: error s^2. Where s is large, the largest score has
    all, but for a share of rows that falls as 1 / s; and where e is beyond 1, the rows whose two largest scores lie within e
    read another value. Their factors 16 and 8 bound what causal attention of 256 and 2048 tokens shows from s = 4 to 10^5.
    """
    return min(error * scores, 16 * error * sqrt(scores), 8 * sqrt(error))


def _scores(siblings: Sequence[Measures]) -> float:
    """Return the mean square of the scores q k / sqrt(d) of one block's attention, as of directions by chance: |q|^2 |k|^2.

    Norms of q and k come after the projections, and count in their place; of a joined projection all parts count.
    """
    sizes = {e.module.rpartition(".")[2][:1]: e.output_rms for e in siblings if e.output_rms is not None}
    if "q" in sizes and "k" in sizes:
        return float((sizes["q"] * sizes["k"]) ** 2)
    return float(max(sizes.values(), default=0.0) ** 4)


def _limits(modules: Sequence[Measures], levels: tuple[float, float]) -> Limits:
    """Return the least differences: less where the GEMMs of both paths show that they run in more than BF16, or in FP32."""
    plain, largest = _KERNEL.max_same, max(levels)
    is_known = all(any(m.error[path] is not None for m in modules) for path in (0, 1))
    if is_known:
        plain = min(plain, max(_KERNEL.max_same_fp32, ABOVE_NOISE * largest))
    is_fp32 = is_known and largest < _KERNEL.max_error_fp32
    return Limits(plain, plain if is_fp32 else _KERNEL.max_attention * plain)


def _floor(repeated: float | None, least: float = _KERNEL.max_same) -> float:
    return max(least, ABOVE_NOISE * repeated) if repeated is not None else least


def _widened(floor: float, m: Measures) -> float:
    """Return a limit with room for the roundings of a product that one path adds and the other has merged."""
    return ROUNDINGS_OF_ADAPTER * floor if m.adapter[0] != m.adapter[1] else floor


def _is_expert(m: Measures) -> bool:
    return is_of_expert(m.module) or ".expert" in m.module


def _routing(
    m: Measures, modules: Sequence[Measures], place: int, repeated: Measures | None, before: float
) -> PathFinding | None:
    flips = m.flips or 0.0
    by_noise = _flips_of_noise(max(before, m.input or 0.0), m.num_rows[0])
    floor = max(_ROUTING.max_flips, by_noise, ABOVE_NOISE * ((repeated.flips or 0.0) if repeated else 0.0))
    if flips > floor:
        text = f"{m.module}: {flips:.2%} of the tokens go to other experts in the rollout"
        if m.num_chosen is not None and m.num_chosen[0] != m.num_chosen[1]:
            text = f"{m.module}: a token goes to {m.num_chosen[0]} experts in training and to {m.num_chosen[1]} in the rollout"
        return _ROUTING.found(text, module=m.module, theirs=m.theirs, tensor="output", value=flips, threshold=floor)
    moved = (
        m.same_tokens
        and m.num_rows[0] != m.num_rows[1]
        and is_of_one_expert(m.module)
        and (repeated is None or repeated.num_rows[0] == repeated.num_rows[1])
    )
    if moved:
        layer, last = m.module.partition(".expert")[0], m.module.rpartition(".")[2]
        group = [e for e in modules if e.module.partition(".expert")[0] == layer and e.module.rpartition(".")[2] == last]
        tokens = max((e.num_rows[0] for e in modules), default=0)
        flipped = sum(abs(e.num_rows[0] - e.num_rows[1]) for e in group) / 2
        moved = flipped > _flips_of_noise(before, tokens) * tokens
    mixed = is_of_one_expert(m.module) and (m.input or 0.0) > 1e-3 and before <= _KERNEL.max_same / 10
    if not moved and not mixed:
        return None
    router = next((e for e in reversed(modules[:place]) if _is_router(e.module) and not _is_expert(e)), None)
    where, theirs = (router.module, router.theirs) if router is not None else (m.module, m.theirs)
    what = f"{m.module} gets {m.num_rows[1]} rows in the rollout and {m.num_rows[0]} in training"
    what = what if moved else f"{m.module} gets other rows in the rollout"
    return _ROUTING.found(f"{where}: {what}: tokens are routed otherwise", module=where, theirs=theirs, tensor="output",
                          value=float(m.num_rows[1]), threshold=float(m.num_rows[0]))  # fmt: skip


def _flips_of_noise(difference: float, tokens: int) -> float:
    """Return the share of the tokens that a difference before the router may send elsewhere, one token at least."""
    return FLIPS_OF_NOISE * difference**0.5 + 1 / max(1, tokens) if difference > 0 else 0.0


def _is_router(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "router" in name or last in ("gate", "wg", "gating")


def _weight(m: Measures, modules: Sequence[Measures], repeated: Measures | None) -> PathFinding | None:
    where = {"module": m.module, "theirs": m.theirs, "tensor": "weight", "threshold": _STALE.max_same}
    if m.bias is not None and m.bias > _floor(repeated.bias if repeated else None) and not (m.weight or 0.0) > m.bias:
        lacking = [path for path, has in zip(_PATHS, m.has_bias, strict=True) if not has]
        what = f"the {lacking[0]} has no bias" if lacking else "its bias is not training's"
        text = f"{m.module}: {what}; the difference is {m.bias:.2g} of an output's square"
        return _STALE.found(text, **{**where, "tensor": "bias"}, value=m.bias, cure="load this module's bias in the rollout")
    if m.weight is None or m.weight <= _floor(repeated.weight if repeated else None, _STALE.max_same):
        return None
    gain, refit = m.weight_gain or 0.0, m.weight_refit if m.weight_refit is not None else m.weight
    rest = max(0.0, m.weight - (gain - 1) ** 2)
    is_factor = abs(gain - 1) > _SCALE.min_gain or m.weight > _CAST.min_cast
    if is_factor and rest < _SCALE.max_rest * m.weight:
        return _SCALE.found(f"{m.module}: the rollout's weight is {gain:.4g} times training's", value=gain, **where)
    if m.weight > _CAST.min_cast and refit < _SCALE.max_rest * m.weight:
        text = (
            f"{m.module}: each block of the rollout's weight is training's times another factor: scales of other blocks (a"
            f" transposed or shifted grid); it differs by {m.weight:.2g} of its square, {refit:.2g} with the right factors"
        )
        return _SCALE.found(text, value=m.weight, **where)
    is_cast = _CAST.min_cast <= m.weight <= _CAST.max_cast and (m.weight_far or 0.0) <= _CAST.max_far
    if is_cast and m.weight_may_be_cast:
        if _casts_too(m):
            return None
        text = f"{m.module}: the rollout's weight differs by {m.weight:.2g} of its square, as rounding to FP8 makes"
        return _CAST.found(text, value=m.weight, **where)
    text = f"{m.module}: the rollout's weight differs from training's by {m.weight:.2g} of its square; {_kind_of_copy(m)}"
    return _STALE.found(text, value=m.weight, **where)


def _kind_of_copy(m: Measures) -> str:
    """Return what the cosine of two weights tells."""
    gain = m.weight_gain or 0.0
    size2 = (m.weight or 0.0) - 1 + 2 * gain  # |W_r|^2 / |W_t|^2
    cosine = gain / size2**0.5 if size2 > 0 else 0.0
    if cosine > OTHER_TENSOR:
        return "it is a copy of another step"
    if cosine < -OTHER_TENSOR:
        return f"its signs are turned (cosine {cosine:.2g})"
    return f"it is another tensor, or its rows are in another order, such as swapped halves (cosine {cosine:.2g})"


def _casts_too(m: Measures) -> bool:
    """Return whether training casts the weight when it multiplies, where the rollout holds it cast: the same in both."""
    first, second = m.error
    return (
        m.weight_is_fp8 == (False, True)
        and first is not None
        and second is not None
        and m.weight is not None
        and first > second + 0.5 * m.weight
    )


def _arithmetic(m: Measures, levels: tuple[float, float], repeated: Measures | None) -> PathFinding | None:
    """Compare what each path makes of its own input and weight."""
    first, second = m.error
    if first is None or second is None or _casts_too(m):
        return None
    known = [e for e in repeated.error if e is not None] if repeated else []
    floor = _widened(_floor(max(known) - min(known) if known else None), m)
    large, small = max(first, second), min(first, second)
    if large <= floor or large < _ACTIVATION.min_excess * small:
        return None
    path = 0 if first > second else 1
    is_usual = levels[path] >= _PRECISION.min_cast > levels[1 - path] and large >= _ACTIVATION.min_cast / 4
    where = {"module": m.module, "theirs": m.theirs, "value": large, "threshold": floor}
    numbers = f"{_PATHS[path]}'s output differs from input by weight by {large:.2g} of its square, the other's by {small:.2g}"
    gain = m.gain[path] or 1.0
    if "norm" in m.kind.lower() or (large < _PRECISION.min_cast and not is_usual):
        eps = f" (epsilon {m.eps[0]:g} and {m.eps[1]:g})" if None not in m.eps and m.eps[0] != m.eps[1] else ""
        return _KERNEL.found(f"{m.module}: {numbers}: another formula or kernel{eps}", tensor="output", **where)
    if abs(gain - 1) > 0.05 and large - (gain - 1) ** 2 < 0.2 * large:
        text = f"{m.module}: the {_PATHS[path]}'s output is {gain:.4g} times input by weight: a scale of its input or result"
        return _ACTIVATION.found(text, tensor="input", cure="compare the scales of this module's input in both paths", **where)
    if small < _PRECISION.min_cast and large <= _CAST.max_cast:
        text = (
            f"{m.module}: the {_PATHS[path]} runs it in FP8 (error {large:.2g}), the {_PATHS[1 - path]} in high precision"
            f" ({small:.2g})"
        )
        if is_usual:
            return _ACTIVATION.found(f"{text}, as it does most modules", tensor="input", **where)
        return _PRECISION.found(text, tensor="input", **where)
    if large > NO_CAST and gain > 0.95:
        text = f"{m.module}: {numbers}: more than a cast makes; another formula, such as an adapter that is added more than once"
        return _KERNEL.found(text, tensor="output", **where)
    return _ACTIVATION.found(f"{m.module}: {numbers}", tensor="input", **where)


def _function(m: Measures) -> PathFinding | None:
    """Compare the activation functions that both paths compute, each by its own input and output."""
    first, second = m.function
    if first is None or second is None or first == second:
        return None
    text = f"{m.module}: the training computes {first}, the rollout {second}"
    cure = "give both paths one activation function (hidden_act)"
    return _KERNEL.found(text, module=m.module, theirs=m.theirs, tensor="output", value=m.output, cure=cure)


def _direct(
    m: Measures,
    repeated: Measures | None,
    before: float,
    noise_before: float,
    is_routed: bool,
    limits: Limits,
    earlier: Sequence[PathFinding],
) -> PathFinding | None:
    """Compare outputs of inputs that are the same."""
    if m.output is None or (is_routed and _is_expert(m)):
        return None
    if any((f.module or "").startswith(f"{m.module}.") for f in earlier):
        return None  # a part of it differs
    least = limits.of(m.module)
    given = m.input if m.input is not None else before
    noise_in = repeated.input if repeated and repeated.input is not None else noise_before if repeated else None
    floor_in = _floor(noise_in, limits.plain)
    floor = _widened(_floor(repeated.output if repeated else None, least), m)
    errors = [e for e in m.error if e is not None]
    is_fp8 = bool(errors) and max(errors) > _PRECISION.min_cast
    is_noisy = given > floor_in  # where inputs were not recorded, noise before the module may be more than that of one cast
    if is_noisy and (m.input is not None or given > _KERNEL.max_noise):
        return None
    growth = _KERNEL.min_jump if is_noisy else _KERNEL.max_growth
    if m.output <= max(floor, growth * given, GROWTH_OF_CODES * given**0.5 if is_fp8 else 0.0):
        return None
    where = {"module": m.module, "theirs": m.theirs, "tensor": "output", "value": m.output, "threshold": floor}
    if is_fp8 and m.output >= _ACTIVATION.min_cast / 4:
        text = (
            f"{m.module}: of the same input and weight the rollout makes an output that differs by {m.output:.2g} of its square"
        )
        return _ACTIVATION.found(f"{text}, as another cast of its input does", **{**where, "tensor": "input"})
    same = f"differs by {given:.2g} at most" if is_noisy else "is the same"
    known = "of the same input" if m.input is not None else f"its input was not recorded, all before it {same}, and"
    known = "of the same tokens" if "embed" in m.kind.lower() and m.input is None else known
    note = f" (epsilon {m.eps[0]:g} and {m.eps[1]:g})" if None not in m.eps and m.eps[0] != m.eps[1] else ""
    gain = m.output_gain if m.output_gain is not None else 1.0
    is_factor = m.output - (gain - 1) ** 2 < _SCALE.max_rest * m.output
    how = f"is {gain:.4g} times training's" if is_factor else f"differs by {m.output:.2g} of its square"
    if "rotary" in m.kind.lower():
        where["cure"] = "compare rope_theta, the scaling of RoPE (type and factor) and positions of both paths"
    elif m.weight is None and m.input is None and not note:
        where["cure"] = f"record inputs and weights too, or compare both checkpoints (check A --against B); else {_KERNEL.cure}"
        note = "; no weight of it was recorded, so that a stale one may be the cause as well"
    return _KERNEL.found(f"{m.module}: {known} the rollout makes an output that {how}{note}", **where)


def _between(
    m: Measures,
    earlier: Sequence[Measures],
    siblings: Sequence[Measures],
    repeated: Measures | None,
    before: float,
    noise_before: float,
    is_routed: bool,
    limits: Limits,
) -> PathFinding | None:
    """Compare a module's input with all outputs before it: what computes it is no recorded module.

    Where those are noisy, attention is still compared with the projections that it reads.
    """
    if m.input is None or is_routed or not earlier:
        return None
    floor_before = _floor(noise_before if repeated else None, limits.plain)
    parent = m.module.rpartition(".")[0]
    read = [e.output for e in siblings if e.output is not None] if parent else []
    is_noisy = before > floor_before
    if is_noisy and not (read and is_attention(parent)):
        return None
    given = max(read) if is_noisy else before
    floor = _floor(repeated.input if repeated else None, limits.of(parent))
    if m.input <= max(floor, limits.passed_on(parent, given)):
        return None
    names = [e.module.rpartition(".")[2] for e in siblings] if parent else []
    name = parent if names else m.module
    last = earlier[-1].module
    agree = f"its {', '.join(names[-3:])} agree{'s' * (len(names) == 1)}" if names else f"{last} before it agrees"
    if is_noisy:
        agree = f"its {', '.join(names[-3:])} by {given:.2g} at most"
    where = {"tensor": "input", "value": m.input, "threshold": floor}
    gain = m.input_gain if m.input_gain is not None else 1.0
    is_factor = m.input - (gain - 1) ** 2 < _SCALE.max_rest * m.input
    casts = _casts(m)
    if casts and not is_factor:
        whose = f"the {casts[0]}'s input is a cast of the other path's" if len(casts) == 1 else "one path casts its input"
        text = f"{m.module}: {whose}: the two differ by {m.input:.2g} of their square, as a cast makes, and {agree}"
        return _ACTIVATION.found(text, module=m.module, theirs=m.theirs, **where)
    how = f"is {gain:.4g} times training's" if is_factor else f"differs by {m.input:.2g} of its square in the rollout"
    handed = f"what it hands to {m.module}" if names else "what it reads"
    text = f"{name}: {handed} {how}, and {agree}"
    if is_attention(name):
        where["cure"] = _CURE_OF_ATTENTION
    return _KERNEL.found(text, module=name, theirs=m.theirs.rpartition(".")[0] if names else m.theirs, **where)


def _casts(m: Measures) -> list[str]:
    """Return the paths whose input may be a cast of the other's: both, where nothing clips or underflows."""
    if m.input_far is None or m.input_rounding is None:
        return []
    known = zip(_PATHS, m.input_far, m.input_rounding, strict=True)
    return [path for path, far, rounding in known if rounding >= _ACTIVATION.min_cast and far <= _CAST.max_far]


def _joined(single: Sequence[PathFinding], modules: Sequence[Measures]) -> list[PathFinding]:
    """Join modules of one cause into the first; the causes of single modules before those of most."""
    groups: dict[str, list[PathFinding]] = {}
    for finding in single:
        groups.setdefault(finding.code, []).append(finding)
    known = sum(any(e is not None for e in m.error) or m.weight is not None for m in modules)
    alone: list[PathFinding] = []
    alike: list[PathFinding] = []
    order = {m.module: place for place, m in enumerate(modules)}
    for group in groups.values():
        first = replace(
            group[0], also=tuple(dict.fromkeys(f.module for f in group[1:] if f.module and f.module != group[0].module))
        )
        if len(group) > 1 and len(group) >= ALIKE * known:
            alike.append(replace(first, message=f"{first.message}; {len(group)} of {known} modules differ alike"))
        else:
            alone.append(first)

    def key(finding: PathFinding) -> int:
        return order.get(
            finding.module or "", next((p for n, p in order.items() if n.startswith(f"{finding.module}.")), len(order))
        )

    return sorted(alone, key=key) + sorted(alike, key=key)

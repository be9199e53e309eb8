"""Metrics of two paths' predictions: log-probabilities of the tokens, KL, and flips of the most probable ones."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from fp8debug.checkpoints.scan import PlainRows
from fp8debug.escaping import one_line
from fp8debug.parity.dump import PathDump, aligned, floats, sampled

Array = np.ndarray[Any, Any]
#: Names of the module whose output is the logits.
HEADS = ("lm_head", "output", "output_layer", "head", "embed_out")
#: Tokens whose logits are compared, and the number of the most probable ones.
MAX_TOKENS, TOP = 512, 5
#: Tokens by which a temperature is fitted.
FITTED = 64


def metrics_of(ours: PathDump, theirs: PathDump, problems: list[str]) -> dict[str, Any]:
    """Return the metrics that can be had.

    Keys, where known: num_tokens, logprob_error (mean absolute difference, nats), logprob_max, token_mult_prob_error
    (mean of exp(|difference|), as NeMo-RL), kl (nats a token, training from rollout: of the logits, or of the log-probabilities
    by mean(exp(d) - d - 1)), top1_flip_rate, top5_flip_rate.
    """
    found: dict[str, Any] = {}
    rows = aligned(ours, theirs)
    try:
        a, b = (floats(dump.numbers.get("logprobs", ())) for dump in (ours, theirs))
        a, b = a if a.size or not b.size else _made(ours), b if b.size or not a.size else _made(theirs)
        if a.size and b.size:
            if rows is not None and a.size > rows[0].max() and b.size > rows[1].max():
                a, b = a[rows[0]], b[rows[1]]
            if a.size == b.size:
                found |= _of_logprobs(a, b)
            else:
                problems.append(f"log-probabilities of {a.size} and {b.size} tokens, and no tokens to align them by")
        first, second = logits_of(ours), logits_of(theirs)
        if first is not None and second is not None:
            found |= _of_logits(ours, first, second, rows, has_logprobs="logprob_error" in found)
    except (OSError, ValueError, KeyError) as error:
        problems.append(f"log-probabilities cannot be read: {one_line(str(error))}")
    return found


def _of_logprobs(a: Array, b: Array) -> dict[str, Any]:
    known = np.isfinite(a) & np.isfinite(b)
    if not known.any():
        return {}
    d = b[known] - a[known]
    with np.errstate(over="ignore"):
        return {
            "num_tokens": int(known.sum()),
            "logprob_error": float(np.abs(d).mean()),
            "logprob_max": float(np.abs(d).max()),
            "token_mult_prob_error": float(np.exp(np.abs(d)).mean()),
            "kl": float((np.exp(d) - d - 1).mean()),
        }


def _made(dump: PathDump) -> Array:
    """Return the log-probabilities of a path's tokens that its logits make, NaN where they are not known or not asked."""
    logits = logits_of(dump)
    if logits is None or not dump.tokens or logits.number != dump.num_tokens:
        return np.empty(0)
    found = np.full(logits.number, np.nan)
    tokens, wanted = _following(dump, np.arange(logits.number - 1))
    rows = np.nonzero(wanted)[0]
    rows = rows[(tokens[rows + 1] >= 0) & (tokens[rows + 1] < logits.columns)]
    rows = rows[sampled(rows, MAX_TOKENS)]
    if rows.size:
        found[rows + 1] = _log_softmax(logits.rows(rows))[np.arange(len(rows)), tokens[rows + 1]]
    return found


class Logits:
    """Logits of all passes.

    Args:
        tensors: of each pass.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self._tensors = tensors
        self.columns = tensors[0].shape[-1]
        self.number = sum(t.numel // max(1, t.shape[-1]) for t in tensors)

    def rows(self, wanted: Array) -> Array:
        """Return some rows, FP64."""
        out = np.empty((len(wanted), self.columns))
        start = 0
        for tensor in self._tensors:
            number = tensor.numel // max(1, tensor.shape[-1])
            with ExitStack() as stack:
                reader = PlainRows(tensor, stack)
                for place in np.nonzero((wanted >= start) & (wanted < start + number))[0].tolist():
                    row = int(wanted[place]) - start
                    out[place] = reader.read(row, row + 1)[0]
            start += number
        return out


def logits_of(dump: PathDump) -> Logits | None:
    """Return a path's logits, of which its model makes probabilities; None where it has none."""
    tensors = dump.numbers.get("logits")
    return _checked(tensors) if tensors else head_of(dump)


def head_of(dump: PathDump) -> Logits | None:
    """Return the output of a path's head."""
    named = (m for n, m in reversed(dump.modules.items()) if n.rpartition(".")[2] in HEADS and "output" in m.tensors)
    head = next(named, None)
    return None if head is None else _checked(head.tensors["output"])


def _checked(tensors: list[Any]) -> Logits | None:
    return Logits(tensors) if tensors and len({t.shape[-1] for t in tensors}) == 1 and tensors[0].shape[-1] > 1 else None


def _of_logits(ours: PathDump, first: Logits, second: Logits, rows: Any, *, has_logprobs: bool) -> dict[str, Any]:
    if first.columns != second.columns:
        return {}
    if rows is not None and first.number > rows[0].max() and second.number > rows[1].max():
        places = sampled(rows[0], MAX_TOKENS)
        mine, other = rows[0][places], rows[1][places]
    elif first.number == second.number:
        mine = other = sampled(np.arange(first.number), MAX_TOKENS)
    else:
        return {}
    p, q = _log_softmax(first.rows(mine)), _log_softmax(second.rows(other))
    known = np.isfinite(p).all(1) & np.isfinite(q).all(1)
    p, q, mine, other = p[known], q[known], mine[known], other[known]
    if not len(p):
        return {}
    top = [np.argsort(-x, axis=1)[:, :TOP] for x in (p, q)]
    flips = [set(a) != set(b) for a, b in zip(top[0].tolist(), top[1].tolist(), strict=True)]
    found: dict[str, Any] = {
        "kl": float((np.exp(p) * (p - q)).sum(1).mean()),
        "top1_flip_rate": float((top[0][:, 0] != top[1][:, 0]).mean()),
        f"top{TOP}_flip_rate": float(np.mean(flips)),
    }
    if not has_logprobs and ours.tokens:
        tokens, wanted = _following(ours, mine)
        chosen = tokens[mine[wanted] + 1]
        if chosen.size and chosen.max() < first.columns:
            places = np.nonzero(wanted)[0]
            found = _of_logprobs(p[places, chosen], q[places, chosen]) | found
    return found


def _following(dump: PathDump, rows: Array) -> tuple[Array, Array]:
    """Return all tokens, and which of the rows have their sequence's next token in the row below."""
    tokens = np.concatenate([t.ravel() for t, _, _ in dump.tokens])
    keys = dump.keys() or []
    is_next = [
        n < len(tokens) and keys[n] is not None and keys[n][1] == (keys[n - 1] or (0, -9))[1] + 1 for n in (rows + 1).tolist()
    ]
    return tokens, np.array(is_next, bool)


def _asked(dump: PathDump, source: PathDump) -> tuple[Array, Array, Array] | None:
    """Return logits of some rows, the token after each, and the log-probability that a path recorded of it.

    Args:
        dump: has the log-probabilities.
        source: has the logits: the same path or the other.

    Returns:
        None without both, or without tokens.
    """
    values, logits = floats(dump.numbers.get("logprobs", ())), logits_of(source)
    if logits is None or not dump.tokens or not values.size:
        return None
    places = np.arange(values.size)  # of the logits of each row
    if source is dump and values.size != logits.number:
        return None
    if source is not dump:
        pairs = aligned(dump, source)
        if pairs is None or (values.size, logits.number) != (dump.num_tokens, source.num_tokens):
            return None
        places = np.full(values.size, -1)
        places[pairs[0]] = pairs[1]
    tokens, wanted = _following(dump, np.arange(values.size - 1))
    rows = np.nonzero(wanted & (places[:-1] >= 0))[0]
    rows = rows[np.isfinite(values[rows + 1]) & (tokens[rows + 1] < logits.columns) & (tokens[rows + 1] >= 0)]
    rows = rows[sampled(rows, MAX_TOKENS)]
    given = logits.rows(places[rows])
    rows, given = rows[np.isfinite(given).all(1)], given[np.isfinite(given).all(1)]
    return (given, tokens[rows + 1], values[rows + 1]) if len(rows) else None


def odd_logprobs(
    dump: PathDump, other: PathDump, path: str, max_error: float, problems: list[str]
) -> tuple[str, float, float, str] | None:
    """Return why recorded log-probabilities do not follow from the path's logits: message, error, its limit, cure.

    Without logits of its own those of the other path stand for them. None where they do follow, where the dump has not both and
    tokens, or where nothing explains a difference from the other path's.

    Args:
        dump: the path.
        other: the other path.
        path: its name in the message.
        max_error: limit of the mean of exp(|difference|).
        problems: takes a line where something cannot be read.
    """
    is_own = logits_of(dump) is not None
    try:
        asked = _asked(dump, dump if is_own else other)
    except (OSError, ValueError, KeyError) as error:
        problems.append(f"log-probabilities cannot be read: {one_line(str(error))}")
        return None
    if asked is None:
        return None
    given, chosen, reported = asked
    p = _log_softmax(given)
    d = reported - p[np.arange(len(chosen)), chosen]
    with np.errstate(over="ignore"):
        error_now = float(np.exp(np.abs(d)).mean())
    if error_now <= max_error:
        return None
    small = float(np.log(max_error))
    temperature, rest = _best_temperature(given[:FITTED], chosen[:FITTED], reported[:FITTED])
    if rest <= small:
        why, cure = f"they fit a temperature of {temperature:.2g}", "compare log-probabilities at the temperature of sampling"
    elif float(np.abs(reported - p.max(1)).mean()) <= small:
        why = "they are those of the most probable token"
        cure = "look the log-probability up by the id of the sampled token, not by its place in the list"
    elif float(d.min()) >= -small:
        why = "each is at or above its own, as after top-p or top-k"
        cure = "ask the engine for raw log-probabilities, or renormalize over the same tokens in training"
    elif not is_own:
        return None
    else:
        why, cure = "no temperature explains it", "compare the tokens, penalties and logit processors that they were made with"
    whose = "its own logits" if is_own else "the other path's logits"
    text = f"the {path}'s log-probabilities do not follow from {whose}, by {np.abs(d).mean():.2g} nats a token: {why}"
    return text, error_now, max_error, cure


def _best_temperature(logits: Array, tokens: Array, reported: Array) -> tuple[float, float]:
    """Return the temperature that explains log-probabilities best, and the mean difference that is left (nats)."""

    def rest(temperature: float) -> float:
        return float(np.abs(_log_softmax(logits / temperature)[np.arange(len(tokens)), tokens] - reported).mean())

    best = min(np.geomspace(0.05, 5, 48).tolist(), key=rest)
    best = min((best * np.linspace(0.9, 1.1, 81)).tolist(), key=rest)
    return best, rest(best)


def _log_softmax(x: Array) -> Array:
    with np.errstate(all="ignore"):
        x = x - x.max(1, keepdims=True)
        return np.asarray(x - np.log(np.exp(x).sum(1, keepdims=True)))

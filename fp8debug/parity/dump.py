"""Dump of one path: tensors by module in safetensors files (docs/parity.md), of which the headers alone are in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8debug.checkpoints.codes import is_float
from fp8debug.checkpoints.files import ByteReader, Checkpoint, Tensor, read_header
from fp8debug.checkpoints.layouts import LAYOUTS, Weight
from fp8debug.checkpoints.scan import PlainRows, QuantizedRows, RowSource
from fp8debug.errors import RunError
from fp8debug.escaping import one_line

Array = np.ndarray[Any, Any]
#: Last parts of names of activations; a tensor of another name with one of a module's parameters is stored with it.
ACTIVATIONS = ("input", "output", "indices")
GLOBALS = ("tokens", "positions", "mask", "logprobs", "logits")
_INTEGERS: Mapping[str, Any] = {
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "U8": np.uint8,
    "U32": np.uint32,
    "BOOL": np.bool_,
}
_PARAMETER = re.compile(r"(?:weight|bias|eps|qweight)\w*|\w*scale\w*|_\w+")
#: A tensor of all experts' weights [experts, outputs, inputs], or of their biases or scales: as engines, transformers and
#: torchtitan name them in the module of the experts.
_OF_EXPERTS = re.compile(r"(w1|w2|w3|w13|(?:gate|up|down|gate_up)_proj)(?:_(weight\w*|bias|\w*scale\w*))?")
#: Execution order of a decoder's modules by name, for files that do not say theirs: sections of a layer, of which the parts of
#: the name tell two and the last one the norms, and the roles in attention and in an MLP.
_BEFORE, _ATTENTION, _MIDDLE, _MLP, _AFTER, _WHOLE = range(6)
_SECTIONS = (
    (re.compile(r"post_(?:feedforward|ffn|mlp)\w*"), _AFTER),
    (re.compile(r"(?:input|pre_attention|self_attn|attn|attention)_(?:layer)?_?norm|ln_?1|norm_?1|operator_norm"), _BEFORE),
    (
        re.compile(r"(?:post_attention|post_self_attn|pre_(?:feedforward|mlp)|ffn|mlp|final)_(?:layer)?_?norm|ln_?2|norm_?2"),
        _MIDDLE,
    ),
)
_ROLES = {
    _ATTENTION: (
        r"q_a|(?:fused_)?qkv_a|(?:linear_)?q_down",
        r"q_b|q$|q_|qkv|query|wq|c_attn|in_proj|linear_q",
        r"kv_a|kv_b|k$|k_|key|wk|linear_kv",
        r"v$|v_|value|wv",
        r"rotary|rope",
        r"attn|core|sdpa|attend|dropout",
        r"o$|o_|out|wo|dense|c_proj|proj|linear",
    ),
    _MLP: (
        r"router|gate$|wg$|gating",
        r"gate_up|gate_proj|w1\b|w13|fc_?1|c_fc|fc_in|wi|linear_fc1|linear1|dense_h_to|up|w3\b",
        r"act|gelu|silu|relu",
        r"down|w2\b|fc_?2|c_proj|fc_out|wo|linear_fc2|linear2|dense_4h",
    ),
}
_EMBEDDING, _ROTARY = re.compile(r"\w*embed\w*|wte|wpe|tok_?emb\w*"), re.compile(r"rotary\w*|rope")
_IN_ATTENTION = re.compile(r"\w*attn\w*|\w*attention\w*|mixer")
_IN_MLP = re.compile(r"\w*mlp\w*|ffn\w*|feed_forward|\w*moe\w*|experts?\w*|fc_?\d|linear\d")
_BLOCK = re.compile(r"mlp|ffn|feed_forward|\w*moe\w*")
_HEAD = re.compile(r"\w*head|output|output_layer|embed_out|logits\w*")
_DIGITS = re.compile(r"(\d+)")
#: Tokens at the beginning of a sequence that one path may lack, and at least so many that follow.
MAX_LACKING = 4
#: Rows that are read at once.
_CHUNK = 2048


@dataclass
class Recorded:
    """Tensors of one module.

    Attributes:
        name: as the dump has it.
        kind: class of the module, empty where unknown.
        tensors: by last part of the name, one of each pass.
        stored: parameters and scales by last part.
    """

    name: str
    kind: str = ""
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)

    def num_rows(self, key: str) -> int:
        """Return the rows of all passes; 0 where nothing was recorded."""
        return sum(_rows_of(tensor)[0] for tensor in self.tensors.get(key, ()))

    @property
    def num_outputs(self) -> int:
        """Features of an output: of the recorded ones, else of the weight; 0 where neither is known."""
        weight = self.stored.get("weight")
        return self.num_columns("output") or (weight.shape[0] if weight is not None and len(weight.shape) == 2 else 0)

    def num_columns(self, key: str) -> int:
        """Return the features of a row; 0 where nothing was recorded, or passes differ."""
        found = {_rows_of(tensor)[1] for tensor in self.tensors.get(key, ())}
        return found.pop() if len(found) == 1 else 0

    def rows(self, key: str, wanted: Array) -> Array:
        """Return rows of all passes one below the other, FP32 (``indices``: int64) ``[len(wanted), features]``.

        Raises:
            OSError: they cannot be read.
        """
        columns = self.num_columns(key)
        out = np.empty((len(wanted), columns), np.int64 if key == "indices" else np.float32)
        start = 0
        for tensor in self.tensors[key]:
            number = _rows_of(tensor)[0]
            with ExitStack() as stack:
                read = _reader_of_integers(tensor, columns) if key == "indices" else PlainRows(tensor, stack).read
                for first in range(0, number, _CHUNK):
                    last = min(number, first + _CHUNK)
                    places = np.nonzero((wanted >= start + first) & (wanted < start + last))[0]
                    if places.size:
                        out[places] = read(first, last)[wanted[places] - start - first]
            start += number
        return out


class TokenRead(NamedTuple):
    """One token that a path read.

    Attributes:
        key: digest of all tokens up to it, and its position.
        before: digest of the tokens before it.
        token: its id.
        sequence: number of its sequence.
    """

    key: tuple[int, int]
    before: int
    token: int
    sequence: int


@dataclass
class PathDump:
    """One path.

    Attributes:
        name: what the user called it.
        modules: by name in execution order.
        tokens: (tokens, positions, mask) of each pass; the last two may be None.
        numbers: ``logprobs`` and ``logits``.
        problems: what could not be read, a line each.
    """

    name: str
    modules: dict[str, Recorded] = field(default_factory=dict)
    tokens: list[tuple[Array, Array | None, Array | None]] = field(default_factory=list)
    numbers: dict[str, list[Tensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _weights: dict[str, Weight] | None = None

    def weight(self, module: str, stack: ExitStack) -> tuple[RowSource, tuple[int, int], bool] | None:
        """Return the rows of a module's weight, its shape, and whether it is quantized; None without one that can be read."""
        if self._weights is None:
            tensors = {f"{m.name}.{key}": tensor for m in self.modules.values() for key, tensor in m.stored.items()}
            checkpoint, claimed = Checkpoint(name=self.name, tensors=tensors), set[str]()
            found = [weight for layout in LAYOUTS for weight in layout.weights(checkpoint, claimed)]
            self._weights = {one.name: one for one in found if one.scale is not None and one.grid_fault is None}
        quantized = self._weights.get(f"{module}.weight")
        if quantized is not None:
            return QuantizedRows(quantized, stack), (quantized.batch * quantized.rows, quantized.columns), True
        if (adapter := self._adapter(module)) is not None:
            return self._adapted(*adapter, stack)
        plain = self.modules[module].stored.get("weight")
        if plain is None or not is_float(plain.dtype) or len(plain.shape) not in (1, 2):
            return None
        return PlainRows(plain, stack), _rows_of(plain), False

    def has_adapter(self, module: str) -> bool:
        """Return whether a module is a Linear with an adapter beside its base."""
        return f"{module}.base_layer" in self.modules

    def _adapter(self, module: str) -> tuple[str, Tensor, Tensor, float] | None:
        """Return the base of a Linear with one adapter, the adapter's weights and its factor; None for other modules."""
        base, factor = f"{module}.base_layer", self.vector(module, "scaling")
        if base not in self.modules or factor is None:
            return None
        parts = [
            [
                m.stored["weight"]
                for name, m in self.modules.items()
                if name.startswith(f"{module}.{part}") and "weight" in m.stored
            ]
            for part in ("lora_A", "lora_B", "lora_magnitude")
        ]
        if len(parts[0]) != 1 or len(parts[1]) != 1 or parts[2]:
            return None
        (down,), (up,) = parts[0], parts[1]
        is_sound = len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1]
        return (base, down, up, float(factor[0])) if is_sound and is_float(down.dtype) and is_float(up.dtype) else None

    def _adapted(
        self, base: str, down: Tensor, up: Tensor, factor: float, stack: ExitStack
    ) -> tuple[RowSource, tuple[int, int], bool] | None:
        found = self.weight(base, stack)
        if found is None or found[1] != (up.shape[0], down.shape[1]):
            return None
        return _AdaptedRows(found[0], PlainRows(down, stack).read(0, down.shape[0]), PlainRows(up, stack), factor), *found[1:]

    def vector(self, module: str, key: str) -> Array | None:
        """Return a bias, a norm's gain or an epsilon, FP64; None without one."""
        tensor = self.modules[module].stored.get(key)
        base = self.modules.get(f"{module}.base_layer")
        if tensor is None and key == "bias" and base is not None:
            tensor = base.stored.get(key)
        if tensor is None or not is_float(tensor.dtype) or len(tensor.shape) != 1:
            return None
        with ExitStack() as stack:
            return np.asarray(PlainRows(tensor, stack).read(0, 1)[0].astype(np.float64))

    @property
    def num_tokens(self) -> int:
        """Tokens of all passes, padding among them; 0 where none were recorded."""
        return sum(tokens.size for tokens, _, _ in self.tokens)

    def keys(self) -> list[tuple[int, int] | None] | None:
        """Return what tells each row's token: a digest of all tokens up to it, and its position; None for padding.

        Returns None where no tokens were recorded. A pass of decoding goes on with the sequences of the passes before it.
        """
        return [None if read is None else read.key for read in self.reads()] if self.tokens else None

    def reads(self) -> list[TokenRead | None]:
        """Return each row's token and where it stands; None for padding."""
        found: list[TokenRead | None] = []
        open_ones: list[list[int]] = []  # digest, length and number of each sequence
        for tokens, positions, mask in self.tokens:
            many = tokens if tokens.ndim > 1 else None
            flat, where = tokens.ravel().tolist(), None if positions is None else positions.ravel().tolist()
            kept = [1] * len(flat) if mask is None else mask.ravel().tolist()
            free, state = list(open_ones), None
            for number, token in enumerate(flat):
                begins = number % many.shape[-1] == 0 if many is not None else number == 0
                place = None if where is None else int(where[number])
                if not kept[number]:
                    found.append(None)
                    continue
                if state is None or (begins and many is not None) or (place is not None and place != state[1]):
                    state = next((one for one in free if place and one[1] == place), None)
                    if state is None:
                        state = [0, place or 0, len(open_ones)]
                        open_ones.append(state)
                    else:
                        free = [one for one in free if one is not state]
                before, state[0] = state[0], hash((state[0], int(token)))
                found.append(TokenRead((state[0], state[1]), before, int(token), state[2]))
                state[1] += 1
        return found


class _AdaptedRows:
    """Rows of base + factor * up @ down, a Linear's weight with its adapter merged."""

    def __init__(self, base: RowSource, down: Array, up: RowSource, factor: float) -> None:
        self._base, self._down, self._up, self._factor = base, down, up, np.float32(factor)

    def read(self, first: int, last: int) -> Array:
        """Return rows in FP32."""
        return np.asarray(self._base.read(first, last) + self._factor * (self._up.read(first, last) @ self._down))


def open_dump(path: str | Path) -> PathDump:
    """Read the headers of a dump.

    Args:
        path: a folder of safetensors files, or one of them.

    Raises:
        RunError: there is none, or nothing of it can be read.
    """
    place = Path(path)
    if not place.exists():
        raise RunError(f"{path} does not exist; give the folder of a dump, or a run")
    files = sorted(place.glob("**/*.safetensors"), key=lambda f: natural(str(f))) if place.is_dir() else [place]
    if not files:
        pickled = next(iter(place.glob("**/Pass*.pt")), None) if place.is_dir() else None
        way = (
            f"; {pickled.name} is a dump of SGLang: python -m fp8debug.parity.sglang {path} OUT makes one of it"
            if pickled
            else ""
        )
        raise RunError(f"{path} holds no safetensors file{way}")
    dump = PathDump(str(path))
    ordered = True
    for file in files:
        try:
            tensors, metadata, faults = read_header(file)
        except (OSError, ValueError) as error:
            dump.problems.append(f"{file.name} cannot be read: {one_line(str(error))}")
            continue
        dump.problems += [f"{file.name}: {one_line(f.tensor or '')} {f.reason}" for f in faults]
        is_ours = metadata.get("format") == "fp8debug-parity"
        ordered &= is_ours
        by_name = {tensor.name: tensor for tensor in tensors}
        _take_tokens(dump, file, by_name)
        for name, tensor in by_name.items():
            _take(dump, name, tensor, metadata.get("kind", ""), is_ours)
    if not dump.modules and not dump.numbers:
        raise RunError(f"{path} holds no tensor of a module" + (f": {dump.problems[0]}" if dump.problems else ""))
    if not ordered:
        dump.modules = {name: dump.modules[name] for name in sorted(dump.modules, key=execution)}
    dump.modules = _split_experts(dump.modules)
    return dump


def _split_experts(modules: Mapping[str, Recorded]) -> dict[str, Recorded]:
    """Return modules with one for each expert whose weights lie in one tensor, before the module that holds the tensor.

    Weights of the same numbers in another module for each expert, as training may have them, are so compared one by one.
    """
    found: dict[str, Recorded] = {}
    for name, module in modules.items():
        parts = {key: match.groups() for key in module.stored if (match := _OF_EXPERTS.fullmatch(key))}
        for key, (base, rest) in parts.items():
            tensor = module.stored[key]
            if len(tensor.shape) != 3 or rest not in (None, "weight", "weight_packed"):
                continue
            for number in range(tensor.shape[0]):
                expert, stored = f"{name}.{number}.{base}", {}
                for other, (other_base, other_rest) in parts.items():
                    one = module.stored[other]
                    if other_base == base and one.shape[:1] == tensor.shape[:1]:
                        kind = other_rest or "weight"
                        kind = f"weight_{kind}" if kind.startswith("scale") else kind
                        stored[kind] = _entry(one, number, f"{expert}.{kind}")
                found.setdefault(expert, Recorded(expert, "expert")).stored = stored
        found[name] = module
    return found


def _entry(tensor: Tensor, number: int, name: str) -> Tensor:
    """Return one entry of the first dimension, which is a piece of the file, under a name; a number as [1]."""
    size = tensor.num_bytes // tensor.shape[0]
    start = tensor.start + number * size
    return replace(tensor, name=name, shape=tensor.shape[1:] or (1,), start=start, stop=start + size)


def _take_tokens(dump: PathDump, file: Path, by_name: dict[str, Tensor]) -> None:
    found = {key: by_name.pop(key) for key in ("tokens", "positions", "mask") if key in by_name}
    if "tokens" not in found:
        return
    try:
        arrays = {key: integers(tensor).reshape(tensor.shape) for key, tensor in found.items()}
    except (OSError, ValueError, KeyError) as error:
        dump.problems.append(f"{file.name}: tokens cannot be read: {one_line(str(error))}")
        return
    dump.tokens.append((arrays["tokens"], arrays.get("positions"), arrays.get("mask")))


def _take(dump: PathDump, name: str, tensor: Tensor, kind: str, is_ours: bool) -> None:
    if name in GLOBALS:
        dump.numbers.setdefault(name, []).append(tensor)
        return
    above, _, last = name.rpartition(".")
    is_of_experts = above.endswith("experts") and _OF_EXPERTS.fullmatch(last) is not None
    is_stored = is_ours or is_of_experts or _PARAMETER.fullmatch(last) is not None or len(tensor.shape) < 2  # a buffer
    if not above or not (last in ACTIVATIONS or is_stored):
        above, last = name, "output"  # plain files: the module's name alone
    if last in ACTIVATIONS and (len(tensor.shape) < 2 or (last != "indices" and not is_float(tensor.dtype))):
        dump.problems.append(f"{one_line(name)}: {tensor} is no activation [tokens, features]")
        return
    base = above.partition("#")[0]
    module = dump.modules.setdefault(above if last in ACTIVATIONS else base, Recorded(above))
    module.kind = module.kind or kind
    if last in ACTIVATIONS:
        module.tensors.setdefault(last, []).append(tensor)
    else:
        module.stored.setdefault(last, tensor)


def integers(tensor: Tensor) -> Array:
    """Return a tensor of whole numbers, int64.

    Raises:
        ValueError: it holds something else.
    """
    if tensor.dtype not in _INTEGERS:
        raise ValueError(f"{tensor} holds no whole numbers")
    with ByteReader(tensor) as reader:
        return np.asarray(reader.read(0, tensor.num_bytes).view(_INTEGERS[tensor.dtype]).astype(np.int64))


def _reader_of_integers(tensor: Tensor, columns: int) -> Callable[[int, int], Array]:
    rows = integers(tensor).reshape(-1, columns)
    return lambda first, last: rows[first:last]


def floats(tensors: Iterable[Tensor]) -> Array:
    """Return the numbers of vectors of all passes, FP64."""
    found = []
    for tensor in tensors:
        with ExitStack() as stack:
            rows, columns = _rows_of(tensor)
            found.append(PlainRows(tensor, stack).read(0, rows).reshape(rows * columns))
    return np.concatenate(found).astype(np.float64) if found else np.empty(0)


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts layer 10 behind layer 2."""
    return [(p.isdecimal(), int(p) if p.isdecimal() and len(p) < 19 else 0, p) for p in _DIGITS.split(name)]


def is_attention(name: str) -> bool:
    """Return whether a module is attention, or the core of one, by the last part of its name."""
    return _IN_ATTENTION.fullmatch(name.rpartition(".")[2]) is not None


def layer_of(name: str) -> str | None:
    """Return the name of the layer that a module lies in, up to its first number; None outside of layers."""
    parts = name.partition("#")[0].split(".")
    place = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
    return None if place is None else ".".join(parts[: place + 1])


def execution(name: str) -> tuple[int, int, int, int, list[tuple[bool, int, str]]]:
    """Return a key that sorts modules of a decoder by name as they run: embedding, layers, norm, head.

    In a layer: norm, attention, norm, MLP, norm; a block after its parts.
    """
    *above, last = name.partition("#")[0].split(".")
    place = next((n for n, part in enumerate((*above, last)) if part.isdecimal() and len(part) < 19), None)
    order = natural(name)
    if place is None:
        if _ROTARY.fullmatch(last):
            return 0, 0, 0, 1, order
        is_head = _HEAD.fullmatch(last) is not None
        return (0, 0, 0, 0, order) if _EMBEDDING.fullmatch(last) and not is_head else (2, 0, 0, int(is_head), order)
    layer = int((*above, last)[place])
    if place == len(above):
        return 1, layer, _WHOLE, 0, order
    section = next((number for pattern, number in _SECTIONS if pattern.fullmatch(last)), None)
    if section is not None:
        return 1, layer, section, 0, order
    inside = (*above[place + 1 :], last)
    first = next((n for n, part in enumerate(inside) if _IN_ATTENTION.fullmatch(part) or _IN_MLP.fullmatch(part)), None)
    if first is None:
        known = [number for number in _ROLES if _role(number, last) < 2 * len(_ROLES[_ATTENTION])]
        section = known[0] if known else _MIDDLE
    else:
        section = _ATTENTION if _IN_ATTENTION.fullmatch(inside[first]) else _MLP
    is_block = first == len(inside) - 1 and (_IN_ATTENTION.fullmatch(last) or _BLOCK.fullmatch(last))
    return 1, layer, section, 2 * len(_ROLES[_ATTENTION]) + 2 if is_block else _role(section, last), order


def _role(section: int, last: str) -> int:
    """Return where a module runs in its section by the last part of its name; behind all that are known for others."""
    patterns = _ROLES.get(section, ())
    place = next((place for place, pattern in enumerate(patterns) if re.match(pattern, last)), len(_ROLES[_ATTENTION]))
    return 2 * place + ("norm" in last)  # of what comes before it


def _rows_of(tensor: Tensor) -> tuple[int, int]:
    columns = tensor.shape[-1] if tensor.shape else 1
    return tensor.numel // max(1, columns), columns


def aligned(ours: PathDump, theirs: PathDump) -> tuple[Array, Array] | None:
    """Return the rows of the same tokens of both, in our order; None where one of them has no tokens.

    Tokens are the same by all tokens up to them and their position; where no position is one of the other path's, by the tokens
    alone, if they are most of the shorter path's.

    Raises:
        RunError: they have no token in common.
    """
    first, second = ours.keys(), theirs.keys()
    if first is None or second is None:
        return None
    found = _pairs(first, second)
    if not found[0]:
        counts = [sum(key is not None for key in keys) for keys in (first, second)]
        found = _pairs(*([key if key is None else key[0] for key in keys] for keys in (first, second)))
        if 2 * len(found[0]) < min(counts):
            found = [], []
    if not found[0]:
        other = parted(ours, theirs)
        ids = "" if other is None else f" (at position {other[0]} one has id {other[1]}, the other {other[2]})"
        ids += _begun_later(ours, theirs) or _begun_later(theirs, ours)
        way_out = "record both on the same tokens, from their start"
        raise RunError(f"{ours.name} and {theirs.name} have no token in common{ids}: {way_out}")
    return np.array(found[0]), np.array(found[1])


def _pairs(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return the places of equal keys, in the order of the first; None is no key."""
    places: dict[Hashable, list[int]] = {}
    for row, key in enumerate(second):
        if key is not None:
            places.setdefault(key, []).append(row)
    mine: list[int] = []
    yours: list[int] = []
    taken: dict[Hashable, int] = {}
    for row, key in enumerate(first):
        found = places.get(key) if key is not None else None
        if key is None or found is None:
            continue
        number = taken.get(key, 0)
        if number < len(found):
            taken[key] = number + 1
            mine.append(row)
            yours.append(found[number])
    return mine, yours


def moved(ours: PathDump, theirs: PathDump) -> tuple[int, int] | None:
    """Return the positions at which both have the first of the same tokens; None where they are the same."""
    rows, first, second = aligned(ours, theirs), ours.keys(), theirs.keys()
    if rows is None or first is None or second is None:
        return None
    a, b = first[int(rows[0][0])], second[int(rows[1][0])]
    return None if a is None or b is None or a[1] == b[1] else (a[1], b[1])


def _begun_later(long: PathDump, short: PathDump) -> str:
    """Return a note where the first sequence of one is the other's without its first tokens, such as one of its beginning."""
    a, b = ([read.token for read in dump.reads() if read is not None and read.sequence == 0] for dump in (long, short))
    for number in range(1, MAX_LACKING + 1):
        part = a[number : number + len(b)]
        if len(part) >= MAX_LACKING and part == b[: len(part)]:
            ids = ", ".join(map(str, a[:number]))
            tokens = "token" if number == 1 else "tokens"
            return f"; {short.name} starts {number} {tokens} later, without {ids}: begin-of-sequence tokens that one path adds?"
    return ""


def parted(ours: PathDump, theirs: PathDump) -> tuple[int, int, int] | None:
    """Return the first position from which on both go on with other tokens after the same ones, and the two ids.

    None where they never do, as where one of them has more sequences, or longer ones. What repeats one id to the end of its
    sequence is padding without a mask.
    """
    sides = []
    for dump in (ours, theirs):
        reads = [read for read in dump.reads() if read is not None]
        ends: dict[int, tuple[int, int]] = {}  # of each sequence, the id that it ends with, and the position from which on
        for read in reads:
            if ends.get(read.sequence, (-1, 0))[0] != read.token:
                ends[read.sequence] = read.token, read.key[1]
        last = {read.sequence: read.key[1] for read in reads}
        padded = {number for number, (_, start) in ends.items() if last[number] > start}
        sides.append(([r for r in reads if r.sequence not in padded or r.key[1] < ends[r.sequence][1]], {r.key for r in reads}))
    (mine, known), (other, theirs_known) = sides
    after = {(read.before, read.key[1]): read.token for read in other if read.key not in known}
    found = [
        (read.key[1], read.token, after[read.before, read.key[1]])
        for read in mine
        if read.key not in theirs_known and (read.before, read.key[1]) in after
    ]
    return min(found, default=None)


def sampled(rows: Sequence[Any] | Array, most: int) -> Array:
    """Return places of at most so many rows, spread evenly."""
    number = len(rows)
    return np.unique(np.linspace(0, number - 1, min(number, most)).astype(np.int64)) if number else np.empty(0, np.int64)

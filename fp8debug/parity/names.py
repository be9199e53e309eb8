"""Names of the same module in two stacks: wrappers, prefixes, and modules that an engine joins (qkv, gate_up)."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp8debug.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Additions of wrappers to names.
_WRAPPERS = re.compile(r"(?:^module\.)|(?:_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.|\.base_layer(?=\.|$))")
#: An expert's Linear as some stacks number it, and its name in the others.
_OF_EXPERT = re.compile(r"(\bexperts\.\d+\.)(w1|w2|w3|w13)$")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "w13": "gate_up_proj"}
#: Last part of a joined module -> the parts that it joins, in the order of their outputs.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "qkv": ("q", "k", "v"),
    "Wqkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up": ("gate", "up"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


@dataclass(frozen=True)
class Names:
    """A table of names, which a user's file extends.

    Attributes:
        fused: last part of a joined module -> last parts of what it joins.
        rename: (pattern, replacement) pairs, applied to the names of both sides in this order.
    """

    fused: Mapping[str, Sequence[str]] = field(default_factory=lambda: dict(FUSED))
    rename: Sequence[tuple[str, str]] = ()

    @classmethod
    def read(cls, path: str | Path | None) -> Names:
        """Return the table of a TOML file: ``[fused]`` of lists, ``[rename]`` of replacements by regular expression.

        Raises:
            UsageError: the file cannot be read, or holds something else.
        """
        if path is None:
            return cls()
        try:
            told = tomllib.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as TOML: {str(error).splitlines()[0]}") from None
        fused, rename = told.get("fused", {}), told.get("rename", {})
        is_sound = isinstance(fused, dict) and isinstance(rename, dict) and set(told) <= {"fused", "rename"}
        is_sound = is_sound and all(isinstance(v, list) and all(isinstance(p, str) for p in v) for v in fused.values())
        if not is_sound or not all(isinstance(v, str) for v in rename.values()):
            raise UsageError(f"{path}: expected [fused] with lists of names and [rename] with replacements, nothing else")
        for pattern in rename:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"{path}: {pattern!r} is no regular expression: {error}") from None
        return cls({**FUSED, **{key: tuple(value) for key, value in fused.items()}}, tuple(rename.items()))

    def bare(self, name: str) -> str:
        """Return a name without what wrappers add, renamed by the table."""
        name = _WRAPPERS.sub("", name)
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return _OF_EXPERT.sub(lambda match: match[1] + _EXPERT_NAMES[match[2]], name)

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the names of the modules that one joins; none for one that joins none."""
        above, dot, last = name.rpartition(".")
        return tuple(f"{above}{dot}{part}" for part in self.fused.get(last, ()))


@dataclass(frozen=True)
class ModuleOutput:
    """A module of one side, or a part of its outputs.

    Attributes:
        module: name in its dump.
        place: which of ``of`` it is; None for the whole.
        of: names of all parts, as the other side has them.
    """

    module: str
    place: int | None = None
    of: tuple[str, ...] = ()


def matched(
    ours: Sequence[str], theirs: Collection[str], names: Names
) -> tuple[list[tuple[str, ModuleOutput, ModuleOutput]], list[str], list[str]]:
    """Return (name, piece of ours, piece of theirs) of each common module in our execution order, and the names of the rest.

    Names that only differ by a common beginning (``model.``) are the same.
    """
    table = {names.bare(name): name for name in theirs}
    mine = [(names.bare(name), name) for name in ours]
    alone = {*table, *(part for name in table for part in names.parts(name))}
    if (shift := _prefix([name for name, _ in mine], alone)) is not None:
        take, give = shift
        table = {give + name[len(take) :] if name.startswith(take) else name: value for name, value in table.items()}
    split = {part: (whole, place, names.parts(whole)) for whole in table for place, part in enumerate(names.parts(whole))}
    by_bare = dict(mine)
    found: list[tuple[str, ModuleOutput, ModuleOutput]] = []
    used: set[str] = set()
    for name, own in mine:
        parts = names.parts(name)
        if name in table:
            found.append((own, ModuleOutput(own), ModuleOutput(table[name])))
            used.add(name)
        elif parts and all(part in table for part in parts):
            for place, part in enumerate(parts):
                found.append((part, ModuleOutput(own, place, tuple(table[p] for p in parts)), ModuleOutput(table[part])))
            used.update(parts)
        elif name in split and all(part in by_bare for part in split[name][2]):
            whole, place, of = split[name]
            found.append((own, ModuleOutput(own), ModuleOutput(table[whole], place, tuple(by_bare[p] for p in of))))
            used.add(whole)
    done = {piece.module for _, piece, _ in found}
    return found, [name for name in ours if name not in done], [own for name, own in table.items() if name not in used]


def _prefix(ours: Iterable[str], theirs: Collection[str]) -> tuple[str, str] | None:
    """Return what to take from the beginning of their names and what to put there; None where nothing is gained."""
    ours = list(ours)
    best, most = None, sum(name in theirs for name in ours)
    for beginning in ("model.", "language_model.", "model.language_model.", "transformer.", "policy.", "actor."):
        for take, give in ((beginning, ""), ("", beginning)):
            moved = {give + name[len(take) :] for name in theirs if name.startswith(take)}
            if (number := sum(name in moved for name in ours)) > most:
                best, most = (take, give), number
    return best

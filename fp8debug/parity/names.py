"""Names of the same module in two stacks: wrappers, prefixes, and modules that an engine joins (qkv, gate_up)."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp8debug.checkpoints.names import FUSED, shift
from fp8debug.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Additions of wrappers to names.
_WRAPPERS = re.compile(
    r"(?:^module\.)|(?:^base_model\.model\.)|(?:_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.)"
)
#: Parts of a Linear with adapters, as PEFT names them.
_ADAPTED = re.compile(r"(?P<module>.+)\.(?:base_layer|lora_[a-zA-Z_]+)(?:\..+)?")
#: An expert's Linear as some stacks number it, and its name in the others.
_OF_EXPERT = re.compile(r"(\bexperts\.\d+\.)(w1|w2|w3|w13)$")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "w13": "gate_up_proj"}


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


def is_of_adapter(name: str) -> bool:
    """Return whether a module is part of a Linear with adapters: its base or an adapter."""
    return _ADAPTED.fullmatch(name) is not None


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
    if (moved := shift([name for name, _ in mine], alone)) is not None:
        take, give = moved
        table = {give + name[len(take) :] if name.startswith(take) else name: value for name, value in table.items()}
    mine, merged = _without_adapters(mine, set(table))
    theirs_kept, theirs_merged = _without_adapters(list(table.items()), {name for name, _ in mine})
    table = dict(theirs_kept)
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
    left = [own for name, own in table.items() if name not in used]
    done = {piece.module for _, piece, _ in found} | merged
    return found, [name for name in ours if name not in done], [name for name in left if name not in theirs_merged]


def _without_adapters(side: Sequence[tuple[str, str]], other: Collection[str]) -> tuple[list[tuple[str, str]], set[str]]:
    """Leave out the parts of Linears whose adapters the other side has merged, or has none of.

    The Linear as a whole is compared, where it was recorded itself; its base alone has another weight than the merged one.

    Args:
        side: (bare name, name) of its modules.
        other: bare names of the other side.

    Returns:
        the modules to compare, and the names of the parts that the whole stands for.
    """
    names = {bare for bare, _ in side}
    kept: list[tuple[str, str]] = []
    merged: set[str] = set()
    for bare, own in side:
        match = _ADAPTED.fullmatch(bare)
        whole = match["module"] if match else ""
        if not match or f"{whole}.base_layer" not in names or f"{whole}.base_layer" in other:
            kept.append((bare, own))
        elif whole in names:
            merged.add(own)
    return kept, merged

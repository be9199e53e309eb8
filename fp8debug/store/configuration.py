"""Settings in force as a manifest states them (casts, backends, versions), and the differences between two parts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8debug.errors import UsageError
from fp8debug.formats import format_named
from fp8debug.recipes import Cast
from fp8debug.store.file_checks import read_json
from fp8debug.store.read.manifest import checked
from fp8debug.types import OPERAND_SITES, plain_name

#: Sites that a sentence names.
MAX_SITES = 3
#: Fields of a cast that act under one kind of scaling only.
_ONLY = {"history": "delayed", "algo": "delayed", "margin": "delayed", "scale_inv": "static"}
#: Entries of ``environment`` that cannot change numerics.
_IRRELEVANT = ("python", "platform")
#: Scalings by the names that ``quantization_config`` uses.
_SCALINGS = {"dynamic": "current", "static": "static"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting that two parts of a run do not share.

    Attributes:
        setting: field of Cast, or ``precision``, ``cast``, ``backend``, ``weights``, ``fast_accum``, ``environment.NAME``.
        before: value in the earlier part.
        now: value in force.
        sites: ``gemm.tensor`` of the operands; empty for all of them, and for settings that are not of a cast.
        module: FQN of the first module; None for a setting of the whole run.
        num_modules: how many modules have this difference.
        is_notable: False for what is asked for (BF16 on request) or rarely matters (versions, device).
    """

    setting: str
    before: str
    now: str
    sites: tuple[str, ...] = ()
    module: str | None = None
    num_modules: int = 0
    is_notable: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``resumed`` in the manifest."""
        found = {"setting": self.setting, "before": self.before, "now": self.now, "sites": list(self.sites)}
        return {**found, "module": self.module, "num_modules": self.num_modules, "is_notable": self.is_notable}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Difference:
        """Return the difference of an entry that ``store.manifest`` has checked; what is missing reads as empty."""
        return cls(
            setting=entry.get("setting") or "",
            before=entry.get("before") or "",
            now=entry.get("now") or "",
            sites=tuple(map(str, entry.get("sites") or ())),
            module=entry.get("module"),
            num_modules=entry.get("num_modules") or 0,
            is_notable=entry.get("is_notable") is not False,
        )

    def __str__(self) -> str:
        where = []
        if self.sites:
            more = f" and {len(self.sites) - MAX_SITES} more" if len(self.sites) > MAX_SITES else ""
            where.append(", ".join(site.replace(".", " ") for site in self.sites[:MAX_SITES]) + more)
        if self.module is not None:
            where.append(f"{self.num_modules} modules, first {self.module}" if self.num_modules > 1 else self.module)
        return f"{self.setting}: {self.before} -> {self.now}" + (f" ({'; '.join(where)})" if where else "")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the settings that differ between two manifests of one run, those of modules first.

    A module is compared where both parts have it and know how it runs; one that no sampled step called says nothing.

    Args:
        before: manifest of the earlier part.
        now: manifest of the later part.
    """
    earlier = {plain_name(entry["fqn"]): entry for entry in before.get("modules") or () if entry.get("fqn")}
    found: dict[tuple[str, str, str, bool], dict[str, list[str]]] = {}
    for entry in now.get("modules") or ():
        name = plain_name(entry.get("fqn") or "")
        if name in earlier:
            for setting, was, is_now, site, is_notable in _of_module(earlier[name], entry):
                found.setdefault((setting, was, is_now, is_notable), {}).setdefault(name, []).append(site)
    return [*_joined(found), *_of_environment(before.get("environment") or {}, now.get("environment") or {})]


def declared_differences(quantization: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return what a checkpoint's ``quantization_config`` declares otherwise than the modules run that are in FP8.

    Compared are ``fmt``, ``weight_block_size``, ``scale_fmt`` and ``activation_scheme``, as DeepSeek-V3's and Transformers'
    ``quant_method: fp8`` state them, with the weights and inputs of fprop; what is not stated is not compared.
    """
    if quantization.get("quant_method") != "fp8":
        return []
    declared = _declared_casts(quantization)
    found: dict[tuple[str, str, str, bool], dict[str, list[str]]] = {}
    for entry in now.get("modules") or ():
        casts = entry.get("casts") or {}
        running = {site: casts[site] for site in declared if isinstance(casts.get(site), Mapping)}
        for site, cast in running.items():
            for name, value in declared[site].items():
                if (is_now := str(cast.get(name))) != value:
                    found.setdefault((name, value, is_now, True), {}).setdefault(entry["fqn"], []).append(site)
    return _joined(found)


def _declared_casts(quantization: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return by site of fprop the fields of a cast that a checkpoint's ``quantization_config`` states."""
    fmt = format_named(str(quantization.get("fmt")))
    block = quantization.get("weight_block_size")
    stated: dict[str, dict[str, str | None]] = {
        "fprop.weight": {
            "format": None if fmt is None else fmt.name,
            "granularity": f"{block[0]}x{block[1]}" if isinstance(block, list) and len(block) == 2 else None,
            "scale_rounding": "pow2_ceil" if quantization.get("scale_fmt") == "ue8m0" else None,
        },
        "fprop.input": {"scaling": _SCALINGS.get(str(quantization.get("activation_scheme")))},
    }
    return {site: {name: v for name, v in fields.items() if v is not None} for site, fields in stated.items()}


def _joined(found: Mapping[tuple[str, str, str, bool], Mapping[str, list[str]]]) -> list[Difference]:
    """Return one difference for each setting and pair of values, over all modules that have it."""
    joined = []
    for (setting, was, is_now, is_notable), modules in found.items():
        sites = tuple(dict.fromkeys(site for own in modules.values() for site in own if site))
        sites = () if len(sites) == len(OPERAND_SITES) else sites
        where: dict[str, Any] = {"sites": sites, "module": next(iter(modules)), "num_modules": len(modules)}
        joined.append(Difference(setting=setting, before=was, now=is_now, is_notable=is_notable, **where))
    return joined


def _of_module(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str, bool]]:
    """Yield (setting, before, now, site, is notable) of one module."""
    was, is_now = _precision(before), _precision(now)
    if was is None or is_now is None:
        return
    if was != is_now:
        yield "precision", was, is_now, "", not (is_now != "FP8" and now.get("requested") == "bf16")
        return
    for setting, key in (("backend", "kind"), ("weights", "weight_dtype")):
        if before.get(key) and now.get(key) and before[key] != now[key]:
            yield setting, str(before[key]), str(now[key]), "", True
    if was != "FP8":
        return
    fast = [", ".join(map(str, entry.get("fast_accum") or ())) or "none" for entry in (before, now)]
    if fast[0] != fast[1]:
        yield "fast_accum", fast[0], fast[1], "", True
    casts, others = before.get("casts") or {}, now.get("casts") or {}
    # Of one backend a cast is declared, of another it is the one that was seen: none of a GEMM that never ran.
    is_other = bool(before.get("kind") and now.get("kind") and before["kind"] != now["kind"])
    for site in others:
        if site in casts and not (is_other and None in (casts[site], others[site])):
            yield from ((*found, site, True) for found in _of_cast(casts[site], others[site]))


def _of_cast(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Iterable[tuple[str, str, str]]:
    if before is None or now is None:
        if before != now:
            yield "cast", _name(before), _name(now)
        return
    scalings = {before.get("scaling"), now.get("scaling")}
    for name in now:
        if name in before and before[name] != now[name] and scalings <= {_ONLY.get(name, *scalings)}:
            yield name, str(before[name]), str(now[name])


def _name(cast: Mapping[str, Any] | None) -> str:
    try:
        return "bf16" if cast is None else str(Cast.from_dict(cast))
    except (UsageError, TypeError):
        return "unknown"


def _precision(entry: Mapping[str, Any]) -> str | None:
    """Return how a module runs; None where that is not known, or no sampled step called it."""
    if entry.get("called") is False:
        return None
    if entry.get("fp8"):
        return "FP8"
    is_known = entry.get("called") or entry.get("requested") == "bf16"
    return "high precision" if is_known else None


def _of_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[Difference]:
    """Yield what differs of versions (where both parts state them) and of variables (upper case; unset where missing)."""
    for key in sorted({*before, *now}):
        is_variable = key.isupper()
        if key in _IRRELEVANT or not (is_variable or (key in before and key in now)):
            continue
        was, is_now = str(before.get(key, "unset")), str(now.get(key, "unset"))
        if was != is_now:
            is_notable = is_variable or key == "float32_matmul_precision"
            yield Difference(setting=f"environment.{key}", before=was, now=is_now, is_notable=is_notable)


def settings_of_checkpoint(folder: str | Path | None) -> tuple[dict[str, Any] | None, Mapping[str, Any] | None]:
    """Return the manifest of a run and the ``quantization_config`` that a checkpoint's folder holds.

    Raises:
        UsageError: it holds neither.
    """
    if folder is None:
        return None, None
    folder = Path(folder)
    manifest, config = _json(folder / "manifest.json"), _json(folder / "config.json")
    stored = checked(manifest, folder / "manifest.json", []) if "modules" in manifest else None
    declared = config.get("quantization_config")
    if stored is None and not isinstance(declared, Mapping):
        raise UsageError(
            f"checkpoint {folder} states no FP8 settings: neither a run's manifest.json nor quantization_config in config.json"
        )
    return stored, declared if isinstance(declared, Mapping) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""Casts and recipes as values: how each operand of each GEMM is quantized, the built-in recipes, and what the environment says.

Scale semantics are those of the whole package: ``x ~= data * scale_inv``. See docs/numerics.md for the arithmetic.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import index
from typing import Any
from zlib import crc32

from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.formats import FORMATS, GRANULARITIES, TRANSPOSED
from fp8debug.registry import Registry
from fp8debug.types import CONTRACTS_ROWS, OPERAND_SITES, Gemm, TensorRole

SCALINGS = ("current", "delayed", "static")
SCALE_ROUNDINGS = ("none", "pow2_ceil", "pow2_floor")
ALGOS = ("max", "most_recent")
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
_MAX_HISTORY = 2**20
#: An operand without a cast in ``Recipe.plan``.
HIGH_PRECISION = "bf16"


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Conversion of a tensor to FP8.

    Attributes:
        format: ``e4m3fn`` or ``e5m2``.
        granularity: region that shares a scale, rows x columns of the tensor as it is stored.
        scaling: ``current`` (scale from this tensor's amax), ``delayed`` (from the amaxes of earlier calls; tensorwise
            only) or ``static`` (given).
        scale_rounding: ``none`` keeps the FP32 scale; ``pow2_ceil`` rounds scale_inv up to a power of two, so nothing
            clips; ``pow2_floor`` is the OCP MX text and clips where amax / 2^floor(log2 amax) > 1.75 (E4M3).
        amax_eps: lower bound of the amax before the scale is formed, in the units of the tensor.
        history: delayed only, number of amaxes kept (1024 is Transformer Engine's default).
        algo: delayed only, which amax of the history counts.
        margin: delayed only, the scale is divided by 2^margin.
        scale_inv: static only, the decode factor.

    Raises:
        UsageError: a value that no kernel can use.
    """

    format: str = "e4m3fn"
    granularity: str = "tensorwise"
    scaling: str = "current"
    scale_rounding: str = "none"
    amax_eps: float = 0.0
    history: int = 1024
    algo: str = "max"
    margin: int = 0
    scale_inv: float | None = None

    @cached_property
    def _hash(self) -> int:
        return crc32(str(self).encode())  # the same in every process: a pickle has it

    def __hash__(self) -> int:
        """Return a hash that is worked out once: casts are keys in what runs at every GEMM."""
        return self._hash

    def __post_init__(self) -> None:
        _known("format", self.format, [f.name for f in FORMATS.values() if not f.scale_only])
        _known("granularity", self.granularity, GRANULARITIES)
        _known("scaling", self.scaling, SCALINGS)
        _known("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)
        _known("algo", self.algo, ALGOS)
        # A NumPy or torch scalar would print differently, and the printed cast is its name.
        for name, number, wanted in (
            ("amax_eps", float, "a number"),
            ("history", index, "a whole number"),
            ("margin", index, "a whole number"),
            ("scale_inv", _optional, "a number"),
        ):
            try:
                object.__setattr__(self, name, number(getattr(self, name)))
            except (TypeError, ValueError):
                raise UsageError(f"{name} must be {wanted}, got {getattr(self, name)!r}") from None
        if not 0 <= self.amax_eps <= _FLOAT32_MAX:
            raise UsageError(f"amax_eps must be finite in FP32 and >= 0, got {self.amax_eps}")
        if not 1 <= self.history <= _MAX_HISTORY:
            raise UsageError(f"history holds 1 to {_MAX_HISTORY} amaxes, got {self.history}")
        if abs(self.margin) > 127:
            raise UsageError(f"margin is a power of two between -127 and 127, got {self.margin}")
        if self.scaling == "delayed" and self.granularity != "tensorwise":
            raise UsageError(f"delayed scaling needs granularity 'tensorwise', got {self.granularity!r}")
        if self.scaling == "static":
            # 1 / scale_inv must be finite in FP32 too: 2^-127 is E8M0's smallest scale.
            if self.scale_inv is None or not 2.0**-127 <= self.scale_inv <= _FLOAT32_MAX:
                raise UsageError(f"static scaling needs scale_inv=, between 2^-127 and FP32's max, got {self.scale_inv}")
        elif self.scale_inv is not None:
            raise UsageError(f"scale_inv is for scaling='static', not {self.scaling!r}")

    def __str__(self) -> str:
        """Return the name under which the cast is stored as ``cast_name``: what has the same name quantizes alike."""
        scaling = self.scaling
        if scaling == "delayed":
            margin = f",margin={self.margin}" if self.margin else ""
            scaling = f"delayed({self.history},{self.algo}{margin})"
        elif scaling == "static":
            scaling = f"static({self.scale_inv!r})"
        rounding = "" if self.scale_rounding == "none" else f" {self.scale_rounding}"
        eps = f" eps={self.amax_eps!r}" if self.amax_eps else ""
        return f"{self.format} {self.granularity} {scaling}{rounding}{eps}"

    @classmethod
    def parse(cls, name: str) -> Cast:
        """Return the cast whose ``str()`` is ``name``, e.g. ``e4m3fn tensorwise delayed(16,max)``.

        Raises:
            UsageError: it is the name of no cast.
        """
        try:
            number_format, granularity, scaling, *rest = name.split(" ")
            scaling, _, inner = scaling.removesuffix(")").partition("(")
            values: dict[str, Any] = {"format": number_format, "granularity": granularity, "scaling": scaling}
            if scaling == "delayed":
                history, algo, *margin = inner.split(",")
                values |= {"history": int(history), "algo": algo}
                values |= {"margin": int(margin[0].removeprefix("margin="))} if margin else {}
            elif scaling == "static":
                values["scale_inv"] = float(inner)
            for word in rest:
                is_eps = word.startswith("eps=")
                values["amax_eps" if is_eps else "scale_rounding"] = float(word[4:]) if is_eps else word
            return cls(**values)
        except ValueError as error:
            detail = f": {error}" if isinstance(error, UsageError) else ""
            raise UsageError(f"{name!r} is the name of no cast{detail}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cast:
        """Build a cast from :meth:`to_dict`.

        Raises:
            UsageError: a key that is no field, or a value that no cast has.
        """
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise UnknownNameError("cast field", key, known)
        try:
            return cls(**values)
        except UsageError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a cast: {error} in {str(dict(values))[:80]}") from None


def _optional(number: Any) -> float | None:
    return None if number is None else float(number)


def _known(kind: str, name: str, known: Any) -> None:
    if not isinstance(name, str):
        raise UsageError(f"{kind} must be one of {', '.join(known)}, got {name!r}")
    if name not in known:
        raise UnknownNameError(kind, name, known)


@dataclass(frozen=True)
class Recipe:
    """A cast, or None for BF16, per (gemm, operand).

    Blocks always run along the dimension that the GEMM contracts, so a ``1x128`` given for an operand whose rows are
    contracted (wgrad's two operands and dgrad's weight) is stored as ``128x1``, and the other way round.

    Attributes:
        name: what it is called in files and on the command line.
        casts: ``{(gemm, tensor): Cast | None}`` with all six operands; treat it as read-only.
        fast_accum: GEMMs that leave their sums in the tensor core, about 14 bits, over all of the contracted dimension;
            only operands with one scale per row or tensor allow it (docs/accumulation.md).
        plan: all casts and ``fast_accum`` as one text, without the name: recipes with the same plan compute the same numbers.

    Raises:
        UsageError: an operand is missing or is none of the six, or fast_accum where the scales do not allow it.
    """

    name: str
    casts: dict[tuple[Gemm, TensorRole], Cast | None] = field(default_factory=dict)
    fast_accum: tuple[Gemm, ...] = ()
    plan: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        is_known = isinstance(self.name, str) and isinstance(self.casts, Mapping) and isinstance(self.fast_accum, tuple | list)
        if not is_known:
            raise UsageError(f"a recipe is a name, casts {{(gemm, tensor): Cast or None}} and a tuple of GEMMs; got {self!r}")
        if odd := set(self.casts) ^ set(OPERAND_SITES):  # a Gemm equals its name, so strings do as keys
            keys = sorted(f"({', '.join(map(str, key))})" if isinstance(key, tuple) else repr(key) for key in odd)
            raise UsageError(f"recipe {self.name!r} needs a cast or None for each of the six operands; check {', '.join(keys)}")
        for (gemm, tensor), cast in self.casts.items():
            if not isinstance(cast, Cast | None):
                raise UsageError(f"({gemm}, {tensor}) of recipe {self.name!r} needs a Cast or None, got {cast!r}")
        oriented = {key: _oriented(self.casts[key], key) for key in OPERAND_SITES}
        object.__setattr__(self, "casts", oriented)
        for gemm in self.fast_accum:
            casts = {tensor: cast for (g, tensor), cast in oriented.items() if g == gemm}
            wrong = [f"{tensor} is {cast or 'BF16'}" for tensor, cast in casts.items() if not _has_one_scale(cast)]
            if gemm not in list(Gemm) or wrong:
                names = " and ".join(wrong) or "there is no such GEMM"
                raise UsageError(f"fast_accum of recipe {self.name!r} needs one scale per row or tensor; {gemm!s}: {names}")
        object.__setattr__(self, "fast_accum", tuple(gemm for gemm in Gemm if gemm in self.fast_accum))
        names = "|".join(str(cast or HIGH_PRECISION) for cast in oriented.values())
        object.__setattr__(self, "plan", f"{names};{','.join(self.fast_accum)}")

    def replace(
        self, gemm: str = "*", tensor: str = "*", *, name: str | None = None, fast_accum: bool | None = None, **changes: Any
    ) -> Recipe:
        """Return a recipe with some casts changed.

        Args:
            gemm: ``fprop``, ``dgrad``, ``wgrad`` or ``*`` for all.
            tensor: ``input``, ``weight``, ``grad_output`` or ``*``.
            name: name of the new recipe; the default adds a ``+`` to the old one.
            fast_accum: whether those GEMMs sum in the tensor core alone; a GEMM as a whole, whatever ``tensor`` says.
            changes: fields of :class:`Cast`, or ``cast=Cast(...)`` / ``cast=None`` (BF16) as a whole. A field given for an
                operand in BF16 starts from the default cast.

        Raises:
            UsageError: nothing to change, or no such (gemm, tensor).
        """
        keys = [(g, t) for g, t in OPERAND_SITES if gemm in ("*", g.value) and tensor in ("*", t.value)]
        if not keys:
            known = ", ".join(f"({g}, {t})" for g, t in OPERAND_SITES)
            raise UsageError(f"no operand ({gemm}, {tensor}); the six are {known}")
        if not isinstance(fast_accum, bool | None):
            raise UsageError(f"fast_accum is True, False, or None for no change, got {fast_accum!r}")
        if not changes and fast_accum is None:
            raise UsageError("replace() needs a field of Cast to change, or cast=")
        if "cast" in changes and len(changes) > 1:
            raise UsageError(f"replace() takes cast= or fields of Cast, not both: {', '.join(sorted(changes))}")
        casts = dict(self.casts)
        for key in keys if changes else ():
            if "cast" in changes:
                casts[key] = changes["cast"]
            else:
                casts[key] = _replaced(casts[key] or Cast(), changes)
        chosen = {g for g, _ in keys if fast_accum is not None}  # and blockwise scales, or BF16, end short sums
        fast = {g for g in self.fast_accum if all(_has_one_scale(cast) for key, cast in casts.items() if key[0] is g)}
        fast = fast | chosen if fast_accum else fast - chosen
        return Recipe(name or self.name.rstrip("+") + "+", casts, tuple(fast))

    @property
    def is_high_precision(self) -> bool:
        """True when no operand is quantized."""
        return not any(self.casts.values())

    def to_dict(self) -> dict[str, Any]:
        """Return name and casts as plain JSON values, casts keyed ``gemm.tensor``."""
        casts = {f"{g}.{t}": c.to_dict() if c else None for (g, t), c in self.casts.items()}
        fast = {"fast_accum": [g.value for g in self.fast_accum]} if self.fast_accum else {}
        return {"name": self.name, "casts": casts, **fast}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from :meth:`to_dict`.

        Raises:
            UsageError: a key or value that no recipe has.
        """
        try:
            given = values["casts"].items()
            casts: Any = {tuple(key.split(".")): None if cast is None else Cast.from_dict(cast) for key, cast in given}
            return cls(values["name"], casts, tuple(values.get("fast_accum", ())))
        except UsageError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"not a recipe: {error!r} in {str(values)[:80]}") from None

    @classmethod
    def from_env(cls, base: str | Recipe = "blockwise_pow2", environ: Mapping[str, str] | None = None) -> Recipe:
        """Return the blockwise recipe that the environment of a Transformer Engine or LoongForge job asks for.

        Reads LoongForge's ``FP8_QUANT_{FWD_INP,FWD_WEIGHT,BWD_GRAD}_AMAX_EPS`` and
        ``NVTE_FP8_BLOCK_SCALING_{FWD_INP,FWD_WEIGHT,BWD_GRAD}_POWER2``, and ``NVTE_FP8_BLOCK_SCALING_FP32_SCALES``,
        which sets all three to FP32 scales unless one of the former says otherwise. The forward input's settings hold for
        the input wherever it is quantized (fprop, wgrad), likewise weight and grad_output.

        Args:
            base: recipe that unset variables leave as it is; Transformer Engine's default has power-of-two scales.
            environ: mapping to read; the process's environment by default.

        Raises:
            UsageError: a variable has a value that is no number or no switch; the message names it.
        """
        environ = os.environ if environ is None else environ
        recipe = get_recipe(base) if isinstance(base, str) else base
        name = recipe.name
        prefixes = {TensorRole.INPUT: "FWD_INP", TensorRole.WEIGHT: "FWD_WEIGHT", TensorRole.GRAD_OUTPUT: "BWD_GRAD"}
        fp32 = _switch(environ, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
        for tensor, prefix in prefixes.items():
            changes: dict[str, Any] = {}
            power2 = _switch(environ, f"NVTE_FP8_BLOCK_SCALING_{prefix}_POWER2")
            if power2 is None and fp32 is not None:
                power2 = not fp32
            if power2 is not None:
                changes["scale_rounding"] = "pow2_ceil" if power2 else "none"
            eps = _number(environ, f"FP8_QUANT_{prefix}_AMAX_EPS")
            if eps is not None:
                changes["amax_eps"] = eps
            if changes:
                casts = {
                    key: _replaced(cast, changes) if cast and key[1] is tensor else cast for key, cast in recipe.casts.items()
                }
                recipe = Recipe(name + "+env", casts, recipe.fast_accum)
        return recipe


def _replaced(cast: Cast, changes: Mapping[str, Any]) -> Cast:
    known = {f.name for f in fields(Cast)}
    for key in changes:
        if key not in known:
            raise UnknownNameError("cast field", key, known)
    if changes.get("scaling", cast.scaling) != "static" and "scale_inv" not in changes:
        changes = {**changes, "scale_inv": None}
    return replace(cast, **changes)


def _has_one_scale(cast: Cast | None) -> bool:
    """Return whether a GEMM can apply the cast's scales to its finished sums."""
    return cast is not None and cast.granularity in ("tensorwise", "rowwise", "columnwise")


def _oriented(cast: Cast | None, key: tuple[Gemm, TensorRole]) -> Cast | None:
    if cast is None:
        return None
    rows, columns = GRANULARITIES[cast.granularity]
    if (rows == 1 and columns != 1) if key in CONTRACTS_ROWS else (columns == 1 and rows != 1):
        return replace(cast, granularity=TRANSPOSED[cast.granularity])
    return cast


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "1", "true", "false"):
        return None if not value else value in ("1", "true")
    raise UsageError(f"{name} must be 0 or 1, got {environ[name]!r}")


def _number(environ: Mapping[str, str], name: str) -> float | None:
    value = environ.get(name, "").strip()
    if not value:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _FLOAT32_MAX:
        raise UsageError(f"{name} must be a finite number >= 0, got {environ[name]!r}")
    return number


def _uniform(name: str, default: Cast, **exceptions: Cast) -> Recipe:
    """Return a recipe with one cast for all operands except those of the named tensors."""
    return Recipe(name, {key: exceptions.get(key[1].value, default) for key in OPERAND_SITES})


RECIPES: Registry[Recipe] = Registry("recipe")

_TILE = Cast(granularity="1x128")
_BLOCK = Cast(granularity="128x128")
_TILE_POW2, _BLOCK_POW2 = (replace(cast, scale_rounding="pow2_ceil") for cast in (_TILE, _BLOCK))
for _recipe in (
    Recipe("bf16", dict.fromkeys(OPERAND_SITES)),
    # DeepSeek-V3, arXiv 2412.19437, section 3.3.2; amax eps 0 because its kernel's 1e-4 would flush small gradients.
    _uniform("blockwise", _TILE, weight=_BLOCK),
    # Transformer Engine's Float8BlockScaling with its default scales.
    _uniform("blockwise_pow2", _TILE_POW2, weight=_BLOCK_POW2),
    # LoongForge with all three POWER2 switches on and the amax eps that it recommends.
    _uniform("blockwise_e8m0", replace(_TILE_POW2, amax_eps=1e-12), weight=replace(_BLOCK_POW2, amax_eps=1e-12)),
    _uniform("tensorwise_current", Cast()),
    # Transformer Engine's DelayedScaling, HYBRID: E4M3 forward, E5M2 backward.
    _uniform("tensorwise_delayed", Cast(scaling="delayed"), grad_output=Cast(format="e5m2", scaling="delayed")),
    _uniform("rowwise", Cast(granularity="rowwise")),
    # OCP MX block, scales rounded up as arXiv 2506.08027 recommends for training.
    _uniform("mxfp8", Cast(granularity="1x32", scale_rounding="pow2_ceil")),
):
    RECIPES.add(_recipe.name, _recipe)


def get_recipe(name: str) -> Recipe:
    """Return the built-in recipe of that name.

    Raises:
        UnknownNameError: there is none; the message has the closest names.
    """
    _known("recipe", name, list_recipes())
    return RECIPES.get(name)


def list_recipes() -> list[str]:
    """Return the names of the built-in recipes."""
    return RECIPES.names()

"""Casts and recipes as values: how each operand of each GEMM is quantized, the built-in recipes, and what the environment says.

Scale semantics are those of the whole package: ``x ~= data * scale_inv``. See docs/numerics.md for the arithmetic.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import index
from typing import Any
from zlib import crc32

from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.formats import FORMATS, GRANULARITIES, SCALE_FORMATS, TRANSPOSED, Gaussian, gaussian
from fp8debug.registry import Registry
from fp8debug.types import CONTRACTS_ROWS, OPERAND_SITES, Gemm, TensorRole

SCALINGS = ("current", "delayed", "static")
SCALE_ROUNDINGS = ("none", "pow2_ceil", "pow2_floor", "pow2_amax_ceil", "pow2_even")
ALGOS = ("max", "most_recent")
TENSOR_SCALES = ("none", "tensor", "row")
ROUNDINGS = ("nearest", "stochastic")
#: Size of the Hadamard transform of NVFP4 (arXiv 2509.25149, section 4.2).
HADAMARD = 16
HADAMARDS = (0, HADAMARD)
#: Values of a cast's fields that are names; ``format`` has those of ``FORMATS`` that hold data.
_CHOICES: dict[str, Iterable[str]] = {
    "granularity": GRANULARITIES,
    "scaling": SCALINGS,
    "scale_rounding": SCALE_ROUNDINGS,
    "algo": ALGOS,
    "scale_format": SCALE_FORMATS,
    "tensor_scale": TENSOR_SCALES,
    "rounding": ROUNDINGS,
}
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
_MAX_HISTORY = 2**20
#: Signs of Transformer Engine's Hadamard transform for NVFP4 (``get_wgrad_sign_vector``): bit i set negates element i.
HADAMARD_SIGNS = 0xD7E8
#: An operand without a cast in ``Recipe.plan``.
HIGH_PRECISION = "bf16"


def _optional(number: Any) -> float | None:
    return None if number is None else float(number)


#: Fields of a cast that are numbers: the conversion, and its name in a message.
_NUMBERS: dict[str, tuple[Callable[[Any], float | None], str]] = {
    "amax_eps": (float, "a number"),
    "history": (index, "a whole number"),
    "margin": (index, "a whole number"),
    "scale_inv": (_optional, "a number"),
    "seed": (index, "a whole number"),
    "hadamard": (index, "a whole number"),
    "hadamard_signs": (index, "a whole number"),
}


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Conversion of a tensor to FP8, FP6 or FP4.

    Attributes:
        format: of the data, one of :data:`~fp8debug.formats.FORMATS`.
        granularity: region that shares a scale, rows x columns of the tensor as it is stored.
        scaling: ``current`` (scale from this tensor's amax), ``delayed`` (from the amaxes of earlier calls; tensorwise
            only) or ``static`` (given).
        scale_rounding: ``none`` keeps the FP32 scale; ``pow2_ceil`` rounds scale_inv up to a power of two, so nothing
            clips; ``pow2_floor`` is the OCP MX text (1.0, section 6.3) and clips where amax / 2^floor(log2 amax) > 1.75
            (E4M3). torchao calls these two RCEIL and FLOOR, and has two more: ``pow2_amax_ceil`` (CEIL) rounds the amax up
            to a power of two and takes FLOOR's scale; ``pow2_even`` (EVEN) rounds it to the format's mantissa before.
        amax_eps: lower bound of the amax before the scale is formed, in the units of the tensor.
        history: delayed only, number of amaxes kept (1024 is Transformer Engine's default).
        algo: delayed only, which amax of the history counts.
        margin: delayed only, the scale is divided by 2^margin.
        scale_inv: static only, the decode factor.
        scale_format: what a block's scale_inv is stored in: ``fp32``; ``e8m0``, a power of two, rounded as ``scale_rounding``
            says, up by default; ``e4m3fn``, rounded to nearest (NVFP4, arXiv 2509.25149).
        tensor_scale: second level of an ``e4m3fn`` scale, in FP32: ``none``, ``tensor``, or ``row``, one for each line along
            which the blocks lie.
        rounding: of the data, ``nearest`` (even) or ``stochastic``.
        seed: stochastic only, of the random numbers; equal tensors under equal casts give equal data.
        hadamard: 16 transforms groups of 16 elements along the blocks before the cast, by a Hadamard matrix with fixed random
            signs; 0 does not. :func:`~fp8debug.dequantize` undoes it, and so does a GEMM of two such operands.
        hadamard_signs: of the transform, 16 bits; bit i is set where element i of a group is negated. Transformer Engine's by
            default; torchao draws them for each module.
        four_over_six: the better of two scales per block, one that maps its amax to the format's max and one to two thirds of
            that, by the sum of absolute errors ("Four Over Six", arXiv 2512.02010, and Transformer Engine's default).

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
    scale_format: str = "fp32"
    tensor_scale: str = "none"
    rounding: str = "nearest"
    seed: int = 0
    hadamard: int = 0
    four_over_six: bool = False
    hadamard_signs: int = HADAMARD_SIGNS

    @cached_property
    def _hash(self) -> int:
        return crc32(str(self).encode())  # the same in every process: a pickle has it

    def __hash__(self) -> int:
        """Return a hash that is worked out once: casts are keys in what runs at every GEMM."""
        return self._hash

    def __post_init__(self) -> None:
        _known("format", self.format, [f.name for f in FORMATS.values() if not f.scale_only])
        for name, choices in _CHOICES.items():
            _known(name, getattr(self, name), choices)
        # A NumPy or torch scalar would print differently, and the printed cast is its name.
        for name, (number, wanted) in _NUMBERS.items():
            try:
                object.__setattr__(self, name, number(getattr(self, name)))
            except (TypeError, ValueError):
                raise UsageError(f"{name} must be {wanted}, got {getattr(self, name)!r}") from None
        if not isinstance(self.four_over_six, bool):
            raise UsageError(f"four_over_six must be True or False, got {self.four_over_six!r}")
        self._check_ranges()
        self._check_scaling()
        self._check_scale_format()
        self._check_randomness()

    def _check_ranges(self) -> None:
        if not 0 <= self.amax_eps <= _FLOAT32_MAX:
            raise UsageError(f"amax_eps must be finite in FP32 and >= 0, got {self.amax_eps}")
        if not 1 <= self.history <= _MAX_HISTORY:
            raise UsageError(f"history holds 1 to {_MAX_HISTORY} amaxes, got {self.history}")
        if abs(self.margin) > 127:
            raise UsageError(f"margin is a power of two between -127 and 127, got {self.margin}")

    def _check_scaling(self) -> None:
        if self.scaling == "delayed" and self.granularity != "tensorwise":
            raise UsageError(f"delayed scaling needs granularity 'tensorwise', got {self.granularity!r}")
        if self.scaling == "static":
            # 1 / scale_inv must be finite in FP32 too: 2^-127 is E8M0's smallest scale.
            if self.scale_inv is None or not 2.0**-127 <= self.scale_inv <= _FLOAT32_MAX:
                raise UsageError(f"static scaling needs scale_inv=, between 2^-127 and FP32's max, got {self.scale_inv}")
        elif self.scale_inv is not None:
            raise UsageError(f"scale_inv is for scaling='static', not {self.scaling!r}")

    def _check_randomness(self) -> None:
        """Check what is drawn at random: the rounding's numbers and the Hadamard transform's signs."""
        if not 0 <= self.seed < 2**64 or (self.seed and self.rounding != "stochastic"):
            raise UsageError(f"seed is for rounding='stochastic', from 0 to 2^64 - 1, got {self.seed} with {self.rounding!r}")
        if self.hadamard not in HADAMARDS:
            raise UsageError(f"hadamard is {' or '.join(map(str, HADAMARDS))}, got {self.hadamard}")
        if self.hadamard and self.line is None:
            raise UsageError(f"hadamard needs blocks of one row or column, such as '1x16', got {self.granularity!r}")
        if not 0 <= self.hadamard_signs < 2**HADAMARD or (self.hadamard_signs != HADAMARD_SIGNS and not self.hadamard):
            raise UsageError(f"hadamard_signs is for hadamard={HADAMARD}, from 0 to {2**HADAMARD - 1}, got {self.hadamard_signs}")

    def _check_scale_format(self) -> None:
        stored = SCALE_FORMATS[self.scale_format]
        if stored is not None and self.scaling != "current":
            raise UsageError(f"scale_format={self.scale_format!r} needs scaling 'current', got {self.scaling!r}")
        if stored is not None and stored.scale_only and self.scale_rounding == "none":
            object.__setattr__(self, "scale_rounding", "pow2_ceil")
        elif stored is not None and not stored.scale_only and self.scale_rounding != "none":
            raise UsageError(f"scale_format={self.scale_format!r} is rounded to nearest, not {self.scale_rounding!r}")
        if (stored is None or stored.scale_only) and (self.tensor_scale != "none" or self.four_over_six):
            option = "four_over_six" if self.four_over_six else "tensor_scale"
            raise UsageError(f"{option} needs a scale_format with a mantissa, such as 'e4m3fn', got {self.scale_format!r}")
        if self.tensor_scale == "row" and self.line is None:
            raise UsageError(f"tensor_scale='row' needs blocks of one row or column, such as '1x16', got {self.granularity!r}")
        fmt = FORMATS[self.format]
        if self.four_over_six and fmt.max * 2 / 3 not in {fmt.value(code) for code in range(1 << fmt.bits)}:
            raise UsageError(f"four_over_six needs a format that has two thirds of its largest value, got {self.format!r}")

    @property
    def line(self) -> int | None:
        """Dimension along which the blocks lie: 1 for one row, 0 for one column, None for other shapes."""
        rows, columns = GRANULARITIES[self.granularity]
        return None if rows != 1 and columns != 1 else int(rows == 1)

    @property
    def gaussian(self) -> Gaussian:
        """Expected losses of Gaussian data under current scaling, in closed form (``formats.gaussian``)."""
        rows, columns = GRANULARITIES[self.granularity]
        stored = SCALE_FORMATS[self.scale_format]
        rounding = self.scale_rounding if stored is None or stored.scale_only else self.scale_format
        if rows is None or columns is None:  # a row or a tensor: its length changes little
            return gaussian(FORMATS[self.format], 2**16 if rows == columns else 2**12, rounding, self.rounding == "stochastic")
        return gaussian(FORMATS[self.format], rows * columns, rounding, self.rounding == "stochastic")

    @cached_property
    def is_plain(self) -> bool:
        """True if it is FP8 as Hopper has it, which the Triton kernels take: OCP formats of 8 bits, rounded to nearest.

        With scales in FP32, or powers of two rounded up or as OCP MX says, of whole tensors, rows, or 32 elements and more.
        """
        fmt, stored = FORMATS[self.format], SCALE_FORMATS[self.scale_format]
        return (
            fmt.bits == 8
            and not fmt.is_unsigned_zero
            and (stored is None or stored.scale_only)
            and self.scale_rounding in SCALE_ROUNDINGS[:3]
            and self.rounding == "nearest"
            and not self.hadamard
            and not {2, 4, 8, 16} & set(GRANULARITIES[self.granularity])
        )

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
        more = "" if self.scale_format == "fp32" else f" scale={self.scale_format}"
        more += "" if self.tensor_scale == "none" else f" tensor_scale={self.tensor_scale}"
        more += "" if self.rounding == "nearest" else f" {self.rounding}({self.seed})" if self.seed else f" {self.rounding}"
        more += f" hadamard={self.hadamard}" if self.hadamard else ""
        more += f" signs={self.hadamard_signs:#06x}" if self.hadamard_signs != HADAMARD_SIGNS else ""
        more += " four_over_six" if self.four_over_six else ""
        return f"{self.format} {self.granularity} {scaling}{rounding}{eps}{more}"

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
                values.update(_parsed_option(word))
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


def _parsed_option(word: str) -> dict[str, Any]:
    """Return what a word of a cast's name after its scaling says, as fields of a cast."""
    key, equals, value = word.partition("=")
    match key:
        case "eps":
            return {"amax_eps": float(value)}
        case "scale":
            return {"scale_format": value}
        case "hadamard" if equals:
            return {"hadamard": int(value)}
        case "signs":
            return {"hadamard_signs": int(value, 16)}
        case "tensor_scale":
            return {"tensor_scale": value}
    rounding, _, seed = word.removesuffix(")").partition("(")
    if rounding in ROUNDINGS:
        return {"rounding": rounding, **({"seed": int(seed)} if seed else {})}
    return {"four_over_six": True} if word == "four_over_six" else {"scale_rounding": word}


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


def _nvfp4() -> Recipe:
    """Return NVFP4 as NVIDIA trains in it (arXiv 2509.25149, section 4, and Transformer Engine's ``NVFP4BlockScaling``).

    1x16 blocks with E4M3 scales under one FP32 scale per tensor; 16x16 for weights, so that fprop and dgrad read the same
    numbers; stochastic rounding of grad_output; a random Hadamard transform on both operands of wgrad.
    """
    tile = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor")
    casts: dict[tuple[Gemm, TensorRole], Cast | None] = {}
    for gemm, tensor in OPERAND_SITES:
        changes: dict[str, Any] = {"granularity": "16x16"} if tensor is TensorRole.WEIGHT else {}
        changes |= {"rounding": "stochastic"} if tensor is TensorRole.GRAD_OUTPUT else {}
        changes |= {"hadamard": HADAMARD} if gemm is Gemm.WGRAD else {}
        casts[gemm, tensor] = replace(tile, **changes)
    return Recipe("nvfp4", casts)


RECIPES: Registry[Recipe] = Registry("recipe")

_TILE = Cast(granularity="1x128")
_BLOCK = Cast(granularity="128x128")
_MX = Cast(granularity="1x32", scale_rounding="pow2_ceil")
_MXFP4 = replace(_MX, format="e2m1fn", scale_format="e8m0")
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
    _uniform("mxfp8", _MX),
    # The same with E2M3, E3M2 and E2M1 (OCP MX 1.0, section 5.2); FP4 gradients are rounded at random (arXiv 2502.20586).
    _uniform("mxfp6_e2m3", replace(_MX, format="e2m3fn", scale_format="e8m0")),
    _uniform("mxfp6_e3m2", replace(_MX, format="e3m2fn", scale_format="e8m0")),
    _uniform("mxfp4", _MXFP4, grad_output=replace(_MXFP4, rounding="stochastic")),
    _nvfp4(),
    # MI300's FP8 under one scale per tensor: E4M3 forward, E5M2 backward, as Transformer Engine on ROCm.
    _uniform("tensorwise_fnuz", Cast(format="e4m3fnuz"), grad_output=Cast(format="e5m2fnuz")),
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

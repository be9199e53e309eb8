"""No threshold is hidden in a rule or in what it reads with: a number is a field of a rule, or a fact that is named here.

A threshold is what one could choose otherwise. A fact is not: a format's, a closed form's, a size of a batch. Each fact has its
derivation in the code, in a comment or docstring beside it, and here in a word.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8debug import rules
from fp8debug.rules import RULES

ROOT = Path(rules.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
#: Within functions: identities, halves and signs, and the base of decibels.
SMALL = {0, 1, 2, 10, 0.5}
#: Functions that write numbers for people.
WORDS = {"percent", "times"}
#: Numbers that no threshold is: file -> where -> what it is.
FACTS = {
    "base.py": {"Finding.ranks": "the only rank"},
    "classification.py": {"classify.worst": "no division by zero"},
    "comparison/configuration.py": {"_DEVIATIONS, _MEDIANS_ERROR": "of a Gaussian"},
    "comparison/sites.py": {
        "TOLERANCES": "differences that fp8debug diff prints; no rule reads them",
        "_first_difference.a, b": "percent",
        "_same": "FP64 sums in another order",
    },
    "engine/config.py": {"_read": "a version of Python"},
    "engine/findings.py": {"JSON_SCHEMA": "a version", "CSV_COLUMNS": "an empty finding", "Findings.__init__": "no steps"},
    "f103_zero_tile.py": {"ZeroTileNan.changes": "the amax eps of a cure"},
    "f105_outlier_underflow.py": {"OutlierUnderflow.is_cured_by_cast.left": "elements of a block of 1x128"},
    "f108_short_accumulator.py": {"_FP16_ERROR": "closed form of FP16"},
    "f110_coverage_gap.py": {"_precision": "bits of a name"},
    "f111_fp8_not_on.py": {
        "_FP8_DB": "closed form of E4M3",
        "bulk_energy": "squares of powers of two",
        "_energy_of_exponents": "squares of powers of two",
        "Fp8NotOn._is_of_rank_one.gemm, one, other, side": "four names",
    },
    "f113_wrong_scale.py": {"_BINADE": "closed form of rounding up to a power of two"},
    "f119_scale_grid.py": {"_FINE": "blocks of MXFP8", "_kantorovich": "Kantorovich's inequality"},
    "f120_wrong_format.py": {"_WIDER_BY": "parts ratios of 1.87 and more from 1", "_formats_of_gradients": "bits"},
    "f121_weight_copy.py": {"WeightCopyDiffers._between_ranks.ratio": "no division by zero"},
    "f124_outliers_with_depth.py": {"_ROUNDING": "FP64 sums in another order", "theil_sen.spread": "Kendall's variance at 95 %"},
    "f126_loss_scale.py": {"_SMALLEST, _NORMAL": "FP16"},
    "f128_operand_differs.py": {
        "_FLOOR_ROUNDING": "rounding of FP32",
        "_HALF_STEPS": "of each format",
        "_FLUSHING": "of each format",
        "_CUT_GAIN, _CUT_NMSE": "closed form of truncation",
        "_STEP": "of each format",
        "OperandDiffers._floor_of": "bits",
        "OperandDiffers._is_spread.energy": "squares of powers of two",
    },
    "f135_updates_rounded_away.py": {"_FP32_SPACING": "FP32", "_EPS": "BF16 and FP16"},
    "f146_hadamard_signs.py": {"HadamardSigns.check.message": "half of 16 signs"},
    "f149_gradient_lost.py": {"_SAME": "FP32 squares in another order", "_EQUAL": "FP64 sums"},
    "f150_weights_not_restored.py": {"_SAME": "FP64 sums in another order"},
    "reading/bf16_verdict.py": {"GradientNoise.share": "no division by zero"},
    "reading/bounds.py": {
        "ACCUMULATOR_BITS": "Hopper's tensor cores",
        "HIGHEST_FLOOR_DB": "20 log10(17)",
        "IS_BELOW_8_BITS": "bits",
        "deficit_sql": "dB of a bit and of rounding at random",
        "one_scale_db.relative, spacing": "mean squares of an even spread",
        "one_scale_db.square": "mean squares of an even spread",
        "accumulator_floor_db": "decibels, and the length of an unknown sum",
    },
    "reading/conditions.py": {"_SLACK": "FP64 sums in another order"},
    "reading/forecasts.py": {
        "_Z95": "of a Gaussian",
        "_FEWEST": "two points have a slope",
        "rising.quarter": "a quarter",
        "_line.deviation": "Kendall's variance",
    },
    "reading/loss_scales.py": {"_OFFSETS": "steps at which a scale is noted", "_MAD": "of a Gaussian"},
    "reading/losses.py": {"_SIGNIFICANDS": "formats of 16 bits"},
    "reading/lost.py": {"MAX_NAMES": "length of a message"},
    "reading/misread.py": {"DATA_FORMATS": "bits", "_POINTS": "points of a sum", "_SAME": "FP32's rounding"},
    "reading/model_structure.py": {"numbered": "a group has two members", "router_outputs": "what FP8 GEMMs ask for"},
    "reading/movements.py": {"_DEVIATIONS": "of a Gaussian", "Movements.words.more": "length of a message"},
    "reading/nonfinite.py": {
        "NEXT_STEPS": "the step after", "MAX_RESULT": "the largest of FP32 and BF16", "FP16_MAX": "the largest of FP16",
        "_FP16_RESULT": "half of the largest of FP16",
    },
    "reading/outlier_spread.py": {"_CHUNK": "rows of a batch"},
    "reading/prefilter.py": {"SMALL": "rows of a query", "BATCH": "rows of a batch", "MAX_HISTOGRAMS": "rows in memory"},
    "reading/stored_scales.py": {"_ROUNDED, _ROUNDED_SUBNORMAL": "rounding of E4M3"},
    "reading/weights.py": {"_E5M2_DB": "closed form of E5M2"},
}  # fmt: skip


def is_none(node: ast.AST | None) -> bool:
    """Return whether a default is that of nothing, or of one."""
    return isinstance(node, ast.Constant) and node.value in (0, 1)


def numbers(node: ast.AST, where: tuple[str, ...] = (), *, is_kept: bool = False) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a piece of code, each with where it stands: functions and classes, and the name that it gets.

    Args:
        node: the code; what it takes out of a sequence by number is left out.
        where: names around it.
        is_kept: whether a module or class keeps it under a name, or a function has it as a default: there all numbers count, and
            elsewhere those that are not :data:`SMALL`.
    """
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool) and (is_kept or value not in SMALL):
            yield ".".join(where), value
        return
    if isinstance(node, ast.FunctionDef) and node.name in WORDS:
        return
    if isinstance(node, ast.Subscript | ast.FormattedValue):
        yield from numbers(node.value, where, is_kept=is_kept)
        return
    if isinstance(node, ast.FunctionDef):
        where = (*where, node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            yield from numbers(default, where, is_kept=not is_none(default)) if default is not None else ()
        for statement in node.body:
            yield from numbers(statement, where)
        return
    if isinstance(node, ast.ClassDef):
        for statement in node.body:
            yield from numbers(statement, (*where, node.name), is_kept=True)
        return
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        is_kept = not where or (is_kept and not is_none(node.value))
        if isinstance(target, ast.Name | ast.Tuple):
            where = (*where, ast.unparse(target).strip("()"))
        if node.value is not None:
            yield from numbers(node.value, where, is_kept=is_kept)
        return
    for part in ast.iter_child_nodes(node):
        yield from numbers(part, where, is_kept=is_kept)


def thresholds() -> set[str]:
    """Return the fields that can be set, as class and name: of each rule and of each class that it has them from."""
    return {
        f"{base.__name__}.{name}"
        for rule in RULES
        for base in type(rule).__mro__
        for name in vars(base).get("__annotations__", {})
        if name in rule.thresholds
    }


def hidden(code: str, facts: dict[str, str]) -> list[str]:
    """Return the numbers of a file that are neither thresholds nor facts."""
    known = thresholds() | facts.keys()
    return [f"{where}: {value}" for where, value in numbers(ast.parse(code)) if where not in known]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_number_is_a_threshold_or_a_fact(path: Path) -> None:
    found = hidden(path.read_text(encoding="utf-8"), FACTS.get(path.relative_to(ROOT).as_posix(), {}))
    assert not found, "a field of the rule, which can be set, with its source in the manual page; or a fact, with its derivation"


def test_every_fact_is_a_number_of_its_file() -> None:
    """No fact outlives its number, under whose name a threshold might hide."""
    stale = []
    for file, facts in FACTS.items():
        there = {where for where, _ in numbers(ast.parse((ROOT / file).read_text(encoding="utf-8")))}
        stale += [f"{file} {where}" for where in facts if where not in there]
    assert not stale


def test_a_fact_that_a_module_keeps_has_its_derivation() -> None:
    bare = []
    for file, facts in FACTS.items():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        for name in (where for where in facts if where.isupper() or (where.startswith("_") and "." not in where)):
            at = next((place for place, line in enumerate(lines) if line.startswith((f"{name} = ", f"{name}: "))), None)
            if at is not None and not lines[at - 1].startswith("#"):
                bare.append(f"{file} {name}")
    assert not bare


@pytest.mark.parametrize(
    "code",
    [
        "MIN_SHARE = 0.5",
        "_LIMIT = 2",
        "RECENT, PAST = 2, 16",
        "FLOORS = {'amax': 1.0}",
        "LIMITS = Limits(max_rate=0.01)",
        "def near(steps, num=5):\n    return steps[:num]",
        "def is_far(run, *, tolerance: float = 0.15):\n    return run.gap > tolerance",
        "def noise(values):\n    return 1.02 * max(values)",
        "class Loose:\n    max_rate: float = 0.01",
        "class Loose:\n    min_share: float = 0.5",
        "class Rule:\n    def check(self):\n        least = 6.0 * self.noise\n        return self.gap > least",
    ],
)
def test_the_search_sees_a_hidden_threshold(code: str) -> None:
    assert hidden(code, {})


def test_the_search_knows_what_can_be_set() -> None:
    """Fields that a rule has from a class of ``reading`` among them, and nothing of a class that no rule has."""
    assert {
        "WrongScale.min_cosine",
        "ElsewhereLimits.far_gain",
        "WeightLimits.max_sqnr_db",
        "CourseLimits.min_lr_jump",
    } < thresholds()
    assert not hidden("class ElsewhereLimits:\n    far_gain: float = 16.0", {})
    assert len(FILES) > 60 and sum(len(list(numbers(ast.parse(path.read_text(encoding="utf-8"))))) for path in FILES) > 300


def test_every_threshold_is_read() -> None:
    """A field that nothing reads would be set in vain."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {f"{rule.code} {name}" for rule in RULES for name in rule.thresholds if name not in read}

"""F203: scales that do not fit the weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class WrongScaleGrid(FileRule):
    """The scales have another shape than the weight's blocks ask for.

    What it detects
        A scale tensor whose rows and columns are not those of the weight's blocks, ragged last blocks included: transposed,
        too many, too few, of another type, or of another block than the configuration declares. The way that padded and
        swizzled scales lie is known for the layouts that have them.

    Why it matters
        A loader that broadcasts, crops or repeats the scales gives each block the scale of another one.

    Example
        model.layers.0.mlp.down_proj.weight: 5x8 scales, expected 8x5 for blocks of 128x128: the grid is transposed.

    Cure
        Write the scales as [ceil(rows / block rows), ceil(columns / block columns)], or correct weight_block_size in
        config.json.

    Thresholds
        None: shapes decide. Block shapes as in numerics.md, 2.
    """

    code = "F203"
    name = "wrong-scale-grid"
    cure = "write one scale per block, [ceil(rows / block rows), ceil(columns / block columns)], or correct weight_block_size"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights whose scales do not fit."""
        for weight, _ in judged.weights:
            if weight.grid_fault is not None:
                text = f"the weight of {weight.rows}x{weight.columns} has {weight.grid_fault}"
                yield self.of_weight(weight, Severity.ERROR, text)


CHECKS.add(WrongScaleGrid.code, WrongScaleGrid())

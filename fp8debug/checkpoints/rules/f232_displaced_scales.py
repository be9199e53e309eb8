"""F232: scales of other blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import fits, is_wrong
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, db
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class DisplacedScales(FileRule):
    """The codes fit the reference under the scales of other blocks.

    What it detects
        Scales that would be right stand elsewhere in the grid: transposed, shifted by blocks, swizzled (or not, where a
        reader expects it), or in another order. Or the right factor differs from block to block without a pattern.

    Why it matters
        The shape is right, so every loader accepts it.

    Example
        model.layers.0.mlp.down_proj.weight: the scales are shifted by 1 row of blocks.

    Cure
        Write each block's scale at its own place; after a permutation, a split or a fusion of rows permute the scales too.

    Thresholds
        - max_loss_db 1.5: how far the refitted weight may be below the ideal cast. No published basis. Seen in
          TransformerEngine #3342.
    """

    code = "F232"
    name = "displaced-scales"
    cure = "write each block's scale at its own place; a permutation, split or fusion of rows moves the scales too"
    needs_reference = True

    max_loss_db: float = 1.5

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such scales."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if against is None or not is_wrong(against) or not fits(against, self.max_loss_db):
                continue
            if against.factor is not None or against.pattern in ("inverse", "rounded"):
                continue
            rows, columns = against.shift
            has_one = facts.num_scales > 1 and facts.scale_min == facts.scale_max
            words = {
                "transposed": "the scales are transposed",
                "shifted": f"the scales are shifted by {rows} rows and {columns} columns of blocks",
                "swizzled": "the scales lie swizzled, in tiles of 128x4 as cuBLAS reads them, and are read row by row",
                "unswizzled": "the scales lie row by row, and are read as swizzled, in tiles of 128x4",
                "reordered": "the scales are right and in another order",
                None: "one scale stands for all blocks" if has_one else "each block needs another factor",
            }
            if has_one and facts.scale_max == 1.0:
                words[None] = "all scales are 1: they were never loaded"
            numbers = f"SQNR {db(against.sqnr_db)}, {db(against.refit_db)} with the right ones"
            text = f"{words[against.pattern]}: {against.num_bad_blocks} of {against.num_blocks} blocks are off; {numbers}"
            yield self.of_weight(weight, Severity.ERROR, text, value=against.sqnr_db, threshold=against.ideal_db, unit="dB")


CHECKS.add(DisplacedScales.code, DisplacedScales())

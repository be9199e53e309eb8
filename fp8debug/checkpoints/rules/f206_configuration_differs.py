"""F206: config.json declares another quantization than the files have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8debug.checkpoints.layouts.base import Block, Weight, declared_block
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, excluded
from fp8debug.formats import FORMATS, format_named
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class ConfigurationDiffers(FileRule):
    """The configuration beside the files tells loaders to read the weights another way.

    What it detects
        FP8 weights with scales and a config.json without any quantization section; a weight that modules_to_not_convert or
        ignore excludes and that holds codes; codes of another format than fmt declares.

    Why it matters
        The loader follows the configuration: it reads codes as values, or builds a layer that has no place for the scales.

    Example
        model.layers.0.mlp.gate.weight: modules_to_not_convert names it, and the file has e4m3fn codes.

    Cure
        Correct quantization_config in config.json, or write the excluded weights in BF16.

    Thresholds
        None: names and types decide. Seen in TensorRT-Model-Connect #1115, mcore-bridge #32, vllm #54556.
    """

    code = "F206"
    name = "configuration-differs"
    cure = "correct quantization_config in config.json, or write the excluded weights in BF16"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that the configuration describes wrongly."""
        checkpoint = judged.checkpoint
        config = checkpoint.quantization
        scaled = [weight for weight, _ in judged.weights if weight.scale is not None]
        # Transformer Engine's names are no weights' names: nobody reads them as values.
        named = [weight for weight in scaled if weight.layout != "transformer-engine"]
        if checkpoint.config and config is None and named and checkpoint.config.get("dtype") != "fp8":
            text = f"config.json has no quantization_config, and {len(named)} weights are quantized: loaders read codes as values"
            yield self.of_weight(named[0], Severity.WARNING, text)
        patterns = excluded(checkpoint)
        block = declared_block(checkpoint) if (config or {}).get("weight_block_size") else None
        declared = format_named(str((config or {}).get("fmt", "")))
        for weight in scaled:
            module = weight.name.removesuffix(".weight")
            hit = next((pattern for pattern in patterns if _excludes(pattern, module)), None)
            if hit is not None:
                text = f"the configuration excludes the module ({hit}), and the file holds {weight.format} codes of it"
                yield self.of_weight(weight, Severity.ERROR, text)
            fmt = FORMATS[weight.format]
            if block is not None and weight.grid_fault is None and _differs(weight, block):
                text = f"the configuration declares blocks of {block[0]}x{block[1]}, the weight has {weight.granularity} scales"
                yield self.of_weight(weight, Severity.ERROR, text)
            if declared is not None and declared.bits == fmt.bits and declared.exponent_bits != fmt.exponent_bits:
                text = f"the configuration declares {declared.name.removesuffix('fn')}, and the weight has {weight.format} codes"
                yield self.of_weight(weight, Severity.ERROR, text)


def _differs(weight: Weight, block: Block) -> bool:
    """Return whether a weight has other blocks than those declared; blocks that reach beyond it are as large as it is."""
    rows, columns = weight.rows, weight.columns
    own, told = ((min(one[0], rows), min(one[1], columns)) for one in (weight.block, block))
    return own != told


def _excludes(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return len(pattern) < 1000 and re.match(pattern[3:], module) is not None
        except re.error:
            return False
    if set(pattern) & set("*?["):
        return fnmatchcase(module, pattern)
    return module == pattern or module.startswith(f"{pattern}.")


CHECKS.add(ConfigurationDiffers.code, ConfigurationDiffers())
